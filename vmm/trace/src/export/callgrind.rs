//! What each function ran and called, as callgrind_annotate and KCachegrind read it. Format: Valgrind manual, "Callgrind Format
//! Specification".

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, Write},
};

use pt_flow::Block;

use super::{calls::Export, error::ExportError, file::OutFile};
use crate::view::{Frame, Function, Here, Names, Owner};

/// Instructions by function and by call, in a file.
#[derive(Debug)]
pub struct Callgrind {
    command: String,
    file: OutFile,
    profile: Profile,
}

impl Callgrind {
    /// To this file, as what a command ran.
    pub fn new(file: OutFile, command: &str) -> Callgrind {
        Callgrind {
            command: command.into(),
            file,
            profile: Profile::default(),
        }
    }
}

#[derive(Debug, Default)]
struct Profile {
    own: BTreeMap<Function, u64>,
    /// By caller and callee: calls, and instructions in them.
    calls: HashMap<(Function, Function), (u64, u64)>,
}

impl Profile {
    /// All instructions.
    fn total(&self) -> u64 {
        self.own.values().sum()
    }

    /// Writes the profile.
    fn write(&self, names: &Names, command: &str, out: &mut dyn Write) -> io::Result<()> {
        let total = self.total();
        let command = command.replace(char::is_control, " ");
        writeln!(
            out,
            "# callgrind format\nversion: 1\ncreator: minivmm\ncmd: {command}\npositions: line"
        )?;
        writeln!(out, "events: Ir\nsummary: {total}")?;
        let mut calls: Vec<_> = self.calls.iter().collect();
        calls.sort_unstable_by_key(|(edge, _)| **edge);
        let mut functions: Vec<Function> = self.own.keys().copied().collect();
        functions.extend(calls.iter().flat_map(|((from, to), _)| [*from, *to]));
        functions.sort_unstable();
        functions.dedup();
        let object = |function| match names.module(function) {
            Some(module) => format!("[{module}]"),
            None if function == Function::USER => "[user]".into(),
            None if names.is_guests(function) => "[guest kernel]".into(),
            None if function.is_label() => "[guest]".into(),
            None => names.file_of(function).unwrap_or("[kernel]").into(),
        };
        // Functions of one name are distinguished by a number, and each is described where it comes by first.
        let mut reported = vec![false; functions.len()];
        let mut number = |function: Function| {
            let n = functions.binary_search(&function).unwrap_or(0);
            match std::mem::replace(&mut reported[n], true) {
                true => format!("({})", n + 1),
                false => format!("({}) {}", n + 1, names.name(function)),
            }
        };
        let mut edges = calls.into_iter().peekable();
        for &function in &functions {
            writeln!(out, "\nob={}\nfl=???\nfn={}", object(function), number(function))?;
            if let Some(own) = self.own.get(&function) {
                writeln!(out, "0 {own}")?;
            }
            while let Some(((_, to), (count, below))) = edges.next_if(|((from, _), _)| *from == function) {
                writeln!(
                    out,
                    "cob={}\ncfi=???\ncfn={}\ncalls={count} 0\n0 {below}",
                    object(*to),
                    number(*to)
                )?;
            }
        }
        writeln!(out, "\ntotals: {total}")
    }
}

impl Export for Callgrind {
    fn enter(&mut self, _: &Names, _: &Here, _: Owner, stack: &mut [Frame], back: bool) {
        if let [.., from, to] = stack
            && !back
        {
            self.profile.calls.entry((from.function, to.function)).or_default().0 += 1;
        }
    }

    fn leave(&mut self, _: &Names, _: &Here, _: Owner, stack: &mut [Frame]) {
        if let [rest @ .., from, to] = stack {
            // Of a recursion the outermost call has it all.
            let again = rest
                .windows(2)
                .any(|pair| (pair[0].function, pair[1].function) == (from.function, to.function));
            let edge = self.profile.calls.entry((from.function, to.function)).or_default();
            if !again {
                edge.1 += to.own + to.below;
            }
        }
    }

    fn run(&mut self, _: &Here, stack: &[Frame], block: &Block) {
        let function = stack.last().map_or(Function::UNKNOWN, |top| top.function);
        *self.profile.own.entry(function).or_default() += u64::from(block.count);
    }

    fn finish(mut self: Box<Self>, names: &Names) -> Result<Option<String>, ExportError> {
        let written = self.profile.write(names, &self.command, &mut self.file);
        written.map_err(|source| self.file.error(source))?;
        self.file.finish().map(|()| None)
    }
}
