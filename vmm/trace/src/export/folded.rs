//! Stacks with the instructions that ran in them: lines as flame graphs are made of, and flame graphs.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    io::{self, Write},
};

use pt_flow::Block;

use super::{calls::Export, error::ExportError, file::OutFile};
use crate::view::{Frame, Function, Here, Names, Owner};

/// Paths that are distinguished, at most; what is deeper counts for what is above.
const MOST: usize = 2 << 20;
const ROOT: u32 = 0;
/// Parts of the whole that a flame graph does not show: a tenth of a pixel of some thousand.
const NARROWEST: u64 = 12_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Key {
    Process(u32),
    Function(Function),
}

/// Every call looks a stack up, by two small numbers: a multiplication spreads them. A guest that chooses them badly makes its own trace slow.
#[derive(Clone, Copy, Default)]
struct Mix(u64);

impl Mix {
    fn add(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word) * 0x9e37_79b9_7f4a_7c15;
        self.0 = product as u64 ^ (product >> 64) as u64;
    }
}

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.add(u64::from(*byte).wrapping_add(1)));
    }
    fn write_u32(&mut self, word: u32) {
        self.add(u64::from(word) + 1);
    }
    fn write_isize(&mut self, word: isize) {
        self.add((word as u64).wrapping_add(1));
    }
}

#[derive(Clone, Copy, Debug)]
struct Node {
    parent: u32,
    key: Key,
    own: u64,
}

/// A stack, and what ran in it itself.
#[derive(Debug)]
pub(super) struct TreeNode {
    /// The stack without its last function, by its place in the tree.
    pub parent: usize,
    /// The last function, or the thread's name.
    pub name: String,
    /// Instructions.
    pub own: u64,
}

/// Stacks, each behind the one without its last function; the first is that of nothing.
#[derive(Debug)]
pub(super) struct Tree {
    pub nodes: Vec<TreeNode>,
    /// Stacks that count for those above them.
    pub merged: usize,
}

/// The stacks below each stack, with the names of their last functions.
type Callees = Vec<Vec<(String, usize)>>;

/// Instructions by stack.
#[derive(Debug)]
pub(super) struct Stacks {
    /// Where frames keep their node.
    pub(super) tag: usize,
    nodes: Vec<Node>,
    children: HashMap<(u32, Key), u32, BuildHasherDefault<Mix>>,
    /// Names of processes and threads of the kernel, and their numbers.
    processes: Vec<String>,
    numbers: HashMap<String, u32>,
}

impl Default for Stacks {
    fn default() -> Stacks {
        Stacks {
            tag: 0,
            nodes: vec![Node {
                parent: ROOT,
                key: Key::Process(0),
                own: 0,
            }],
            children: HashMap::default(),
            processes: Vec::new(),
            numbers: HashMap::new(),
        }
    }
}

/// A line's name for it: what separates names is not in them.
fn clean(name: &str) -> String {
    name.replace([';', '\n', '\r'], "_")
}

impl Stacks {
    fn child(&mut self, parent: u32, key: Key) -> u32 {
        if let Some(node) = self.children.get(&(parent, key)) {
            return *node;
        }
        if self.nodes.len() >= MOST {
            return parent;
        }
        let node = self.nodes.len() as u32;
        self.nodes.push(Node { parent, key, own: 0 });
        self.children.insert((parent, key), node);
        node
    }

    fn process(&mut self, names: &Names, here: &Here, owner: Owner) -> u32 {
        let name = names.owner_name(owner, here.step);
        let n = self.numbers.get(name).copied().unwrap_or_else(|| {
            let n = self.processes.len() as u32;
            self.processes.push(name.to_string());
            self.numbers.insert(name.to_string(), n);
            n
        });
        self.child(ROOT, Key::Process(n))
    }

    /// All instructions.
    pub(super) fn total(&self) -> u64 {
        self.nodes.iter().map(|node| node.own).sum()
    }

    fn name(&self, names: &Names, key: Key) -> String {
        match key {
            Key::Process(n) => clean(self.processes.get(n as usize).map_or("", String::as_str)),
            Key::Function(function) => match names.module(function) {
                Some(module) => format!("{} [{module}]", clean(names.name(function))),
                None => clean(names.name(function)),
            },
        }
    }

    /// The stacks as a tree, callees by their names. Stacks with all that they call that have fewer instructions than `least` count for the
    /// one above.
    pub(super) fn tree(&self, names: &Names, least: u64) -> Tree {
        let (own, mut children, merged) = self.merged(names, least);
        let mut tree = Tree {
            nodes: Vec::new(),
            merged,
        };
        let mut waiting: Vec<(usize, usize, String)> = vec![(0, 0, String::new())];
        while let Some((node, parent, name)) = waiting.pop() {
            let at = tree.nodes.len();
            tree.nodes.push(TreeNode {
                parent,
                name,
                own: own[node],
            });
            let mut below = std::mem::take(&mut children[node]);
            below.sort_unstable_by(|a, b| b.0.cmp(&a.0));
            waiting.extend(below.into_iter().map(|(name, node)| (node, at, name)));
        }
        tree
    }

    /// The instructions of each stack and the stacks below it, where those of fewer instructions than `least` count for the one above; and how
    /// many do.
    fn merged(&self, names: &Names, least: u64) -> (Vec<u64>, Callees, usize) {
        // Children come behind their parents.
        let mut all: Vec<u64> = self.nodes.iter().map(|node| node.own).collect();
        for n in (1..self.nodes.len()).rev() {
            all[self.nodes[n].parent as usize] += all[n];
        }
        let mut own: Vec<u64> = self.nodes.iter().map(|node| node.own).collect();
        let mut children = vec![Vec::new(); self.nodes.len()];
        let mut merged = 0;
        for n in (1..self.nodes.len()).rev() {
            let parent = self.nodes[n].parent as usize;
            if all[n] < least && parent != 0 {
                own[parent] += own[n];
                merged += 1;
            } else {
                children[parent].push((self.name(names, self.nodes[n].key), n));
            }
        }
        (own, children, merged)
    }

    /// The lines, sorted. Paths whose instructions are fewer than `least` count for the path above.
    fn lines(&self, names: &Names, least: u64, mut line: impl FnMut(&str, u64) -> io::Result<()>) -> io::Result<()> {
        let (own, mut children, _) = self.merged(names, least);
        let mut waiting: Vec<(usize, usize, String)> = vec![(0, 0, String::new())];
        let mut path = String::new();
        while let Some((node, len, name)) = waiting.pop() {
            path.truncate(len);
            if !path.is_empty() {
                path.push(';');
            }
            path.push_str(&name);
            if own[node] > 0 {
                line(&path, own[node])?;
            }
            let mut below = std::mem::take(&mut children[node]);
            below.sort_unstable_by(|a, b| b.0.cmp(&a.0));
            waiting.extend(below.into_iter().map(|(name, node)| (node, path.len(), name)));
        }
        Ok(())
    }

    /// Writes `process;function;function count`, a line for each stack.
    fn write_folded(&self, names: &Names, out: &mut dyn Write) -> io::Result<()> {
        self.lines(names, 0, |path, count| writeln!(out, "{path} {count}"))
    }

    /// Writes a flame graph as SVG. What would be too narrow to be seen is part of its caller.
    fn write_flamegraph(&self, names: &Names, title: &str, out: &mut dyn Write) -> io::Result<()> {
        let mut lines = Vec::new();
        self.lines(names, self.total().div_ceil(NARROWEST), |path, count| {
            lines.push(format!("{path} {count}"));
            Ok(())
        })?;
        let mut options = inferno::flamegraph::Options::default();
        options.title = title.into();
        options.count_name = "instructions".into();
        options.name_type = "Function:".into();
        // The lines are in the order of the tree, in which "f" with all that it calls comes before "f.cold". Only a chart takes them so, from
        // its last to its first, where a graph sorts by the bytes of whole lines and so cuts "f" in two.
        options.flame_chart = true;
        if lines.is_empty() {
            lines.push("nothing 1".into());
        }
        inferno::flamegraph::from_lines(&mut options, lines.iter().rev().map(String::as_str), out)
            .map_err(io::Error::other)
    }
}

impl Stacks {
    pub(super) fn enter(&mut self, names: &Names, here: &Here, owner: Owner, stack: &mut [Frame]) {
        let Some((top, rest)) = stack.split_last_mut() else {
            return;
        };
        let (parent, of) = match rest.last() {
            Some(below) => (below.tags[self.tag] as u32, Some(below.function)),
            None => (self.process(names, here, owner), None),
        };
        // Calls between functions that have no names show nothing.
        top.tags[self.tag] = if of == Some(top.function) && !top.function.known() {
            parent
        } else {
            self.child(parent, Key::Function(top.function))
        }
        .into();
    }

    pub(super) fn run(&mut self, stack: &[Frame], block: &Block) {
        let node = stack.last().map_or(ROOT, |top| top.tags[self.tag] as u32);
        self.nodes[node as usize].own += u64::from(block.count);
    }
}

/// A file of lines `process;function;function count`, one for each stack.
#[derive(Debug)]
pub struct Folded {
    stacks: Stacks,
    file: OutFile,
}

impl Folded {
    /// To this file.
    pub fn new(file: OutFile) -> Folded {
        let stacks = Stacks::default();
        Folded { stacks, file }
    }
}

/// A flame graph as SVG.
#[derive(Debug)]
pub struct FlameGraph {
    stacks: Stacks,
    title: String,
    file: OutFile,
}

impl FlameGraph {
    /// To this file, under a title.
    pub fn new(file: OutFile, title: &str) -> FlameGraph {
        FlameGraph {
            stacks: Stacks::default(),
            title: title.into(),
            file,
        }
    }
}

/// What both forms do with calls.
macro_rules! of_stacks {
    () => {
        fn begin(&mut self, tag: usize) {
            self.stacks.tag = tag;
        }

        fn enter(&mut self, names: &Names, here: &Here, owner: Owner, stack: &mut [Frame], _: bool) {
            self.stacks.enter(names, here, owner, stack);
        }

        fn leave(&mut self, _: &Names, _: &Here, _: Owner, _: &mut [Frame]) {}

        fn run(&mut self, _: &Here, stack: &[Frame], block: &Block) {
            self.stacks.run(stack, block);
        }
    };
}

impl Export for Folded {
    of_stacks!();

    fn finish(mut self: Box<Self>, names: &Names) -> Result<Option<String>, ExportError> {
        let written = self.stacks.write_folded(names, &mut self.file);
        written.map_err(|source| self.file.error(source))?;
        self.file.finish().map(|()| None)
    }
}

impl Export for FlameGraph {
    of_stacks!();

    fn finish(mut self: Box<Self>, names: &Names) -> Result<Option<String>, ExportError> {
        let written = self.stacks.write_flamegraph(names, &self.title, &mut self.file);
        written.map_err(|source| self.file.error(source))?;
        self.file.finish().map(|()| None)
    }
}
