//! What has run of a matrix.

use super::{
    cell::{Cell, Verdict},
    plan::Shard,
};

/// What has run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// The cells, in the order in which they were planned.
    pub cells: Vec<Cell>,
    /// The part of all cells that this is.
    pub shard: Option<Shard>,
}

impl Report {
    /// The engines, in the order of their first cells.
    pub fn engines(&self) -> Vec<&str> {
        distinct(self.cells.iter().map(|cell| cell.engine.as_str()))
    }

    /// The models, likewise.
    pub fn models(&self) -> Vec<&str> {
        distinct(self.cells.iter().map(|cell| cell.model.as_str()))
    }

    /// The guests, likewise.
    pub fn guests(&self) -> Vec<&str> {
        distinct(self.cells.iter().map(|cell| cell.guest.as_str()))
    }

    /// A cell.
    pub fn cell(&self, guest: &str, model: &str, engine: &str) -> Option<&Cell> {
        let here = |cell: &&Cell| cell.guest == guest && cell.model == model && cell.engine == engine;
        self.cells.iter().find(here)
    }

    /// Whether an engine was to be had for no cell.
    pub fn absent(&self, engine: &str) -> bool {
        let mut cells = self.cells.iter().filter(|cell| cell.engine == engine);
        cells.all(|cell| matches!(cell.verdict, Verdict::Absent(_)))
    }

    /// How many cells passed, failed and were skipped.
    pub fn counts(&self) -> [usize; 3] {
        let mut counts = [0; 3];
        for cell in &self.cells {
            counts[match cell.verdict {
                Verdict::Passed => 0,
                Verdict::Failed(_) => 1,
                Verdict::Skipped(_) | Verdict::Absent(_) => 2,
            }] += 1;
        }
        counts
    }
}

fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut distinct = Vec::new();
    for name in names {
        if !distinct.contains(&name) {
            distinct.push(name);
        }
    }
    distinct
}
