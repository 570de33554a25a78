//! One page for a browser, without anything from elsewhere: when each thread ran, instructions by stack, and functions by name.
//!
//! # What is left out
//!
//! A whole boot has to be a page of some megabytes. So stacks of few instructions count for what is above them, and time is cut into at
//! most [`BINS`] equal parts; the page says how much that is.
//!
//! # Names
//!
//! Names are the guest's. They stand in a block of JSON that has no `<`, so that no name can end it, and the page's script puts them
//! on a canvas or into text, never into HTML.

use std::{collections::HashMap, io, io::Write};

use pt_flow::{Block, Event};
use serde_json::{Value, json};

use super::{
    calls::Export,
    error::ExportError,
    file::OutFile,
    folded::{Stacks, Tree},
};
use crate::Header;
use crate::view::{Frame, Here, Names, Owner, Process};

const PAGE: &str = include_str!("html/page.html");
const STYLE: &str = include_str!("html/page.css");
const SCRIPT: &str = include_str!("html/page.js");
/// Parts that time is cut into, at most.
const BINS: u64 = 2048;
/// Stacks that a page shows: about fifteen bytes each.
const MOST_STACKS: usize = 500_000;
/// Rows of threads.
const MOST_ROWS: usize = 300;
/// Threads that are counted apart.
const MOST_THREADS: usize = 1 << 16;

/// What has a row: a thread by its process's number and its own, the idle thread of a vCPU, or, where the trace does not tell threads, a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Key {
    Thread(u32, u32),
    Idle(usize),
    Process(Option<Process>),
}

/// Instructions of a thread on a vCPU: parts of time, and how many in each.
#[derive(Debug, Default)]
struct Cell(Vec<(u64, u64)>);

impl Cell {
    fn add(&mut self, bin: u64, count: u64) {
        match self.0.last_mut() {
            Some((last, sum)) if *last == bin => *sum += count,
            _ => self.0.push((bin, count)),
        }
    }

    /// Two parts of time become one.
    fn halve(&mut self) {
        let before = std::mem::take(&mut self.0);
        for (bin, count) in before {
            self.add(bin / 2, count);
        }
    }
}

/// When threads ran.
#[derive(Debug)]
struct Timeline {
    from: Option<u64>,
    /// A part of time has two to the power of this many ticks, as all moments here: every block asks for one.
    bin: u32,
    last: u64,
    threads: Vec<(Key, String)>,
    numbers: HashMap<Key, u32>,
    /// The owner on each vCPU, and its cell.
    runs: Vec<Option<(Owner, usize)>>,
    /// By vCPU and thread.
    cells: Vec<((usize, u32), Cell)>,
    places: HashMap<(usize, u32), usize>,
}

impl Timeline {
    fn bin(&mut self, here: &Here) -> u64 {
        let Some(ticks) = here.ticks else { return 0 };
        let at = ticks.saturating_sub(*self.from.get_or_insert(ticks));
        while at >> self.bin >= BINS {
            self.bin += 1;
            self.last /= 2;
            self.cells.iter_mut().for_each(|(_, cell)| cell.halve());
        }
        let bin = at >> self.bin;
        self.last = self.last.max(bin);
        bin
    }

    fn thread(&mut self, names: &Names, here: &Here, owner: Owner) {
        if self.runs.len() <= here.cpu {
            self.runs.resize(here.cpu + 1, None);
        }
        if self.runs[here.cpu].is_some_and(|(known, _)| known == owner) {
            return;
        }
        let name = names.owner_name(owner, here.step);
        let key = match owner.thread.map(|id| names.thread(id)) {
            Some(thread) if thread.tid == 0 => Key::Idle(here.cpu),
            Some(thread) => Key::Thread(thread.tgid, thread.tid),
            None => Key::Process(owner.process),
        };
        let fresh = self.threads.len() as u32;
        let number = match self.numbers.get(&key) {
            Some(number) => *number,
            None if self.threads.len() >= MOST_THREADS => 0,
            None => {
                self.threads.push((key, String::new()));
                self.numbers.insert(key, fresh);
                fresh
            }
        };
        // A thread is called what it was called last.
        self.threads[number as usize].1 = name.into();
        let place = (here.cpu, number);
        let cells = &mut self.cells;
        let cell = *self.places.entry(place).or_insert_with(|| {
            cells.push((place, Cell::default()));
            cells.len() - 1
        });
        self.runs[here.cpu] = Some((owner, cell));
    }

    fn run(&mut self, here: &Here, count: u64) {
        let bin = self.bin(here);
        if let Some(&Some((_, cell))) = self.runs.get(here.cpu) {
            self.cells[cell].1.add(bin, count);
        }
    }

    /// Threads by their instructions, and the number that is not shown.
    fn rows(&self) -> (HashMap<u32, usize>, Vec<&(Key, String)>, usize) {
        let mut sums = vec![0; self.threads.len()];
        let mut firsts = vec![u64::MAX; self.threads.len()];
        for ((_, thread), cell) in &self.cells {
            sums[*thread as usize] += cell.0.iter().map(|(_, count)| count).sum::<u64>();
            let first = cell.0.first().map_or(u64::MAX, |(bin, _)| *bin);
            firsts[*thread as usize] = first.min(firsts[*thread as usize]);
        }
        let mut order: Vec<usize> = (0..sums.len()).filter(|thread| sums[*thread] > 0).collect();
        order.sort_by_key(|thread| (std::cmp::Reverse(sums[*thread]), *thread));
        let left_out = order.len().saturating_sub(MOST_ROWS);
        order.truncate(MOST_ROWS);
        order.sort_by_key(|thread| (firsts[*thread], *thread));
        let rows = order.iter().map(|thread| &self.threads[*thread]).collect();
        let numbers = order.iter().enumerate().map(|(row, thread)| (*thread as u32, row));
        (numbers.collect(), rows, left_out)
    }
}

/// The page.
#[derive(Debug)]
pub struct Html {
    stacks: Stacks,
    timeline: Timeline,
    title: String,
    /// What was traced, in a line.
    facts: String,
    cpus: usize,
    /// Ticks in a millisecond.
    tsc_khz: u32,
    file: OutFile,
}

impl Html {
    /// To this file, under a title, with a line on what was traced.
    pub fn new(file: OutFile, title: &str, facts: &str, header: &Header) -> Html {
        Html {
            stacks: Stacks::default(),
            timeline: Timeline {
                from: None,
                bin: 0,
                last: 0,
                threads: Vec::new(),
                numbers: HashMap::new(),
                runs: Vec::new(),
                cells: Vec::new(),
                places: HashMap::new(),
            },
            title: title.into(),
            facts: facts.into(),
            cpus: header.cpus,
            tsc_khz: header.tsc_khz,
            file,
        }
    }

    /// The smallest stack that is shown, so that they are not too many.
    fn tree(&self, names: &Names) -> (Tree, u64) {
        let total = self.stacks.total();
        let mut least = 0;
        loop {
            let tree = self.stacks.tree(names, least);
            if tree.nodes.len() <= MOST_STACKS || least >= total {
                return (tree, least);
            }
            least = (least * 2).max(total / 10_000_000).max(1);
        }
    }

    fn data(&self, names: &Names) -> Value {
        let (tree, least) = self.tree(names);
        let (numbers, rows, left_out) = self.timeline.rows();
        let threads: Vec<Value> = rows
            .iter()
            .map(|(key, name)| {
                let (pid, tid) = match *key {
                    Key::Thread(pid, tid) => (pid, tid),
                    Key::Idle(_) | Key::Process(_) => (0, 0),
                };
                json!({"name": name, "pid": pid, "tid": tid})
            })
            .collect();
        let mut cells: Vec<Value> = Vec::new();
        let mut keys: Vec<_> = self.timeline.cells.iter().collect();
        keys.sort_by_key(|(key, _)| *key);
        let mut not_shown = 0;
        for ((cpu, thread), cell) in keys {
            let Some(row) = numbers.get(thread) else {
                not_shown += cell.0.iter().map(|(_, count)| count).sum::<u64>();
                continue;
            };
            let pairs = cell.0.iter().flat_map(|(bin, count)| [*bin, *count]);
            cells.push([*cpu as u64, *row as u64].into_iter().chain(pairs).collect());
        }
        let ns = |ticks: u64| ticks as f64 * 1e6 / f64::from(self.tsc_khz.max(1));
        let bin_ns = ns(1 << self.timeline.bin);
        let mut timeline_note = format!(
            "Virtual time in parts of {:.3} µs. A bar is as high as the instructions that ran in its part. The rows of vCPUs have the color of the \
             thread that ran most.",
            bin_ns / 1000.0
        );
        if left_out > 0 {
            timeline_note += &format!(
                " The {MOST_ROWS} threads with the most instructions are shown; {left_out} others with {not_shown} instructions are not."
            );
        }
        let mut flame_note =
            "As wide as its instructions; whoever called it is above. A thread's own name is the first row."
                .to_string();
        if tree.merged > 0 {
            flame_note += &format!(
                " {} stacks of fewer than {least} instructions count for what called them.",
                tree.merged
            );
        }
        let mut texts: Vec<&str> = Vec::new();
        let mut known: HashMap<&str, usize> = HashMap::new();
        let name: Vec<usize> = tree
            .nodes
            .iter()
            .map(|node| {
                *known.entry(&node.name).or_insert_with(|| {
                    texts.push(&node.name);
                    texts.len() - 1
                })
            })
            .collect();
        let of = |field: fn(&super::folded::TreeNode) -> u64| tree.nodes.iter().map(field).collect::<Vec<_>>();
        json!({
            "title": self.title,
            "facts": self.facts,
            "timeline_note": timeline_note,
            "flame_note": flame_note,
            "cpus": self.cpus,
            "from_ns": ns(self.timeline.from.unwrap_or(0)),
            "bin_ns": bin_ns,
            "bins": self.timeline.last + 1,
            "threads": threads,
            "cells": cells,
            "names": texts,
            "nodes": {"parent": of(|node| node.parent as u64), "name": name, "own": of(|node| node.own)},
        })
    }
}

/// JSON as it can stand in a page: `<` is in texts alone, where it has another form.
fn embedded(data: &Value) -> String {
    data.to_string().replace('<', "\\u003c")
}

impl Export for Html {
    fn begin(&mut self, tag: usize) {
        self.stacks.tag = tag;
    }

    fn enter(&mut self, names: &Names, here: &Here, owner: Owner, stack: &mut [Frame], _: bool) {
        self.timeline.thread(names, here, owner);
        self.stacks.enter(names, here, owner, stack);
    }

    fn leave(&mut self, _: &Names, _: &Here, _: Owner, _: &mut [Frame]) {}

    fn run(&mut self, here: &Here, stack: &[Frame], block: &Block) {
        self.stacks.run(stack, block);
        self.timeline.run(here, block.count.into());
    }

    fn event(&mut self, _: &Here, _: &Event) {}

    fn finish(mut self: Box<Self>, names: &Names) -> Result<Option<String>, ExportError> {
        let data = embedded(&self.data(names));
        let write = |file: &mut OutFile| -> io::Result<()> {
            // Each part once, so that what comes from the guest is not taken for a place of another.
            let (head, rest) = split(PAGE, "/*STYLE*/");
            let (middle, rest) = split(rest, "/*DATA*/");
            let (behind, end) = split(rest, "/*SCRIPT*/");
            for part in [head, STYLE, middle, &data, behind, SCRIPT, end] {
                file.write_all(part.as_bytes())?;
            }
            Ok(())
        };
        let written = write(&mut self.file);
        written.map_err(|source| self.file.error(source))?;
        self.file.finish().map(|()| None)
    }
}

fn split<'a>(text: &'a str, at: &str) -> (&'a str, &'a str) {
    text.split_once(at).unwrap_or((text, ""))
}

#[cfg(test)]
#[path = "html_test.rs"]
mod tests;
