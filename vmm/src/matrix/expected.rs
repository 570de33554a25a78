//! The expected table: a line for each guest, and for each of its tests, in each engine's section. What is as everywhere is short,
//! so that a change shows in a diff by itself:
//!
//! ```text
//! [soft]
//! lbr             pass core2 haswell; skip alderlake p6
//! lbr/order       pass
//! lbr/info        pass haswell; skip core2
//! ```
//!
//! A word alone means all models on which the guest's own line has it run.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::cell::{Cell, Verdict};
use super::tap::Point;

/// How a line's outcome is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// It holds.
    Pass,
    /// It does not, and that is known.
    Fail,
    /// It has nothing to do.
    Skip,
}

impl Outcome {
    const ALL: [Outcome; 3] = [Outcome::Pass, Outcome::Fail, Outcome::Skip];

    /// The word in the table.
    pub fn word(self) -> &'static str {
        match self {
            Outcome::Pass => "pass",
            Outcome::Fail => "FAIL",
            Outcome::Skip => "skip",
        }
    }
}

/// A cell's outcome and those of its tests.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    outcome: Outcome,
    tests: BTreeMap<String, Outcome>,
}

/// Engine, guest, model.
type Key = (String, String, String);

/// A whole table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table(BTreeMap<Key, Entry>);

/// A line of a table that means nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}: {text}")]
pub struct TableError {
    /// Counted from 1.
    line: usize,
    why: Wrong,
    /// Its first words.
    text: String,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Wrong {
    #[error("no [engine] before it")]
    Engine,
    #[error("no two blanks after the name")]
    Blanks,
    #[error("neither pass nor FAIL nor skip")]
    Outcome,
    #[error("a model twice")]
    Twice,
    #[error("{guest} has no line with {model} before it")]
    NoGuest { guest: String, model: String },
}

impl Table {
    /// Reads a table.
    ///
    /// # Errors
    /// The first line that is none, in one line.
    pub fn parse(text: &str) -> Result<Table, TableError> {
        let mut table = Table::default();
        let mut engine = None;
        for (number, line) in (1..).zip(text.lines()) {
            let wrong = |why| TableError {
                line: number,
                why,
                text: line.chars().take(60).collect(),
            };
            let line = line.trim_end();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
                engine = Some(name.to_string());
                continue;
            }
            let engine = engine.clone().ok_or_else(|| wrong(Wrong::Engine))?;
            let (name, list) = line.split_once("  ").ok_or_else(|| wrong(Wrong::Blanks))?;
            let (guest, test) = match name.split_once('/') {
                Some((guest, test)) => (guest, Some(test)),
                None => (name, None),
            };
            for part in list.trim().split("; ") {
                let mut words = part.split_whitespace();
                let outcome = words
                    .next()
                    .and_then(|word| Outcome::ALL.into_iter().find(|o| o.word() == word));
                let outcome = outcome.ok_or_else(|| wrong(Wrong::Outcome))?;
                let models: Vec<String> = words.map(str::to_string).collect();
                match test {
                    None => {
                        for model in models {
                            let tests = BTreeMap::new();
                            let entry = Entry { outcome, tests };
                            if table
                                .0
                                .insert((engine.clone(), guest.to_string(), model), entry)
                                .is_some()
                            {
                                return Err(wrong(Wrong::Twice));
                            }
                        }
                    }
                    Some(test) => {
                        let everywhere = models.is_empty();
                        let mut missing: BTreeSet<String> = models.iter().cloned().collect();
                        for ((e, g, model), entry) in &mut table.0 {
                            let here = *e == engine && g == guest;
                            if here && (everywhere && entry.outcome != Outcome::Skip || missing.remove(model)) {
                                entry.tests.insert(test.to_string(), outcome);
                            }
                        }
                        if let Some(model) = missing.first() {
                            return Err(wrong(Wrong::NoGuest {
                                guest: guest.into(),
                                model: model.clone(),
                            }));
                        }
                    }
                }
            }
        }
        Ok(table)
    }

    /// The table as text.
    pub fn text(&self) -> String {
        let mut text = String::from(
            "# What each guest, and each of its tests, comes to on each CPU model. Where a test's line names no model, it is so on\n\
             # all on which the guest runs.\n",
        );
        let width = self
            .0
            .iter()
            .flat_map(|((_, guest, _), entry)| {
                let tests = entry
                    .tests
                    .keys()
                    .map(|test| guest.chars().count() + 1 + test.chars().count());
                tests.chain([guest.chars().count()])
            })
            .max()
            .unwrap_or(0);
        let mut engine_before = "";
        let guests: BTreeSet<(&str, &str)> = self.0.keys().map(|(e, g, _)| (e.as_str(), g.as_str())).collect();
        for (engine, guest) in guests {
            if engine != engine_before {
                let _ = write!(text, "\n[{engine}]\n");
                engine_before = engine;
            }
            let cells: Vec<(&str, &Entry)> = self
                .0
                .iter()
                .filter(|((e, g, _), _)| e == engine && g == guest)
                .map(|((_, _, model), entry)| (model.as_str(), entry))
                .collect();
            let all: Vec<(&str, Outcome)> = cells.iter().map(|(model, entry)| (*model, entry.outcome)).collect();
            let _ = writeln!(text, "{guest:width$}  {}", list(&all));
            let runs: BTreeSet<&str> = all
                .iter()
                .filter(|(_, o)| *o != Outcome::Skip)
                .map(|(m, _)| *m)
                .collect();
            let tests: BTreeSet<&String> = cells.iter().flat_map(|(_, entry)| entry.tests.keys()).collect();
            for test in tests {
                let outcomes: Vec<(&str, Outcome)> = cells
                    .iter()
                    .filter_map(|(model, entry)| Some((*model, *entry.tests.get(test)?)))
                    .collect();
                let models: BTreeSet<&str> = outcomes.iter().map(|(model, _)| *model).collect();
                let first = outcomes[0].1;
                let same = models == runs && outcomes.iter().all(|(_, outcome)| *outcome == first);
                let shown = if same {
                    first.word().to_string()
                } else {
                    list(&outcomes)
                };
                let name = format!("{guest}/{test}");
                let _ = writeln!(text, "{name:width$}  {shown}");
            }
        }
        text
    }

    /// Puts cells in the place of those that are there. Where an engine was not to be had, nothing is known, and what is there stays.
    pub fn put(&mut self, cells: &[Cell]) {
        for cell in cells {
            let outcome = match cell.verdict {
                Verdict::Passed => Outcome::Pass,
                Verdict::Skipped(_) => Outcome::Skip,
                Verdict::Failed(_) => Outcome::Fail,
                Verdict::Absent(_) => continue,
            };
            let tests = cell.points.iter().map(|(name, point)| {
                let outcome = match point {
                    Point::Passed => Outcome::Pass,
                    Point::Failed(_) => Outcome::Fail,
                    Point::Skipped(_) => Outcome::Skip,
                };
                (name.clone(), outcome)
            });
            let entry = Entry {
                outcome,
                tests: tests.collect(),
            };
            self.0
                .insert((cell.engine.clone(), cell.guest.clone(), cell.model.clone()), entry);
        }
    }

    /// Keeps, of the engines that these cells are of, only what these cells are of: what is gone shows.
    pub fn keep_only(&mut self, cells: &[Cell]) {
        let engines: BTreeSet<&str> = cells.iter().map(|cell| cell.engine.as_str()).collect();
        let known: BTreeSet<Key> = cells
            .iter()
            .map(|cell| (cell.engine.clone(), cell.guest.clone(), cell.model.clone()))
            .collect();
        self.0
            .retain(|key, _| !engines.contains(key.0.as_str()) || known.contains(key));
    }

    /// Lines that another table has otherwise: `-` as it is here, `+` as it is there.
    pub fn differences(&self, other: &Table) -> Vec<String> {
        let lines = |table: &Table| -> BTreeMap<String, String> {
            let mut engine = String::new();
            let mut lines = BTreeMap::new();
            for line in table
                .text()
                .lines()
                .filter(|line| !line.is_empty() && !line.starts_with('#'))
            {
                match line.split_once("  ") {
                    None => engine = line.to_string(),
                    Some((name, list)) => {
                        lines.insert(format!("{engine} {name}"), list.trim().to_string());
                    }
                }
            }
            lines
        };
        let (here, there) = (lines(self), lines(other));
        let names: BTreeSet<&String> = here.keys().chain(there.keys()).collect();
        let mut differences = Vec::new();
        for name in names {
            let (was, is) = (here.get(name), there.get(name));
            if was == is {
                continue;
            }
            differences.extend(was.map(|list| format!("-{name}  {list}")));
            differences.extend(is.map(|list| format!("+{name}  {list}")));
        }
        differences
    }

    /// Whether a test, or with no name a cell, is expected to fail.
    pub fn expects_failure(&self, cell: &Cell) -> bool {
        let key = (cell.engine.clone(), cell.guest.clone(), cell.model.clone());
        self.0.get(&key).is_some_and(|entry| entry.outcome == Outcome::Fail)
    }

    /// How many tests of a guest pass, or `None` where the guest is skipped or not there.
    pub fn passes(&self, engine: &str, guest: &str, model: &str) -> Option<usize> {
        let entry = self.0.get(&(engine.into(), guest.into(), model.into()))?;
        let passed = entry
            .tests
            .values()
            .filter(|outcome| **outcome == Outcome::Pass)
            .count();
        (entry.outcome != Outcome::Skip).then_some(passed)
    }

    /// How many of a guest's tests pass and how many fail on an engine, over all models.
    pub fn sums(&self, engine: &str, guest: &str) -> [usize; 2] {
        let cells = self
            .0
            .iter()
            .filter(|((e, g, _), _)| (e.as_str(), g.as_str()) == (engine, guest));
        let tests: Vec<Outcome> = cells.flat_map(|(_, entry)| entry.tests.values().copied()).collect();
        [Outcome::Pass, Outcome::Fail].map(|which| tests.iter().filter(|outcome| **outcome == which).count())
    }

    /// Whether it has a section of this engine.
    pub fn knows(&self, engine: &str) -> bool {
        self.0.keys().any(|(e, _, _)| e == engine)
    }

    /// The guests of an engine.
    pub fn guests(&self, engine: &str) -> BTreeSet<&str> {
        let cells = self.0.keys().filter(|(e, _, _)| e == engine);
        cells.map(|(_, guest, _)| guest.as_str()).collect()
    }

    /// Tests that pass on no model, as `guest/test`.
    pub fn never_passed(&self) -> Vec<String> {
        let mut tests: BTreeMap<String, bool> = BTreeMap::new();
        for ((_, guest, _), entry) in &self.0 {
            for (test, outcome) in &entry.tests {
                *tests.entry(format!("{guest}/{test}")).or_default() |= *outcome == Outcome::Pass;
            }
        }
        let never = tests.into_iter().filter(|(_, passed)| !passed);
        never.map(|(name, _)| name).collect()
    }
}

/// `pass a b; skip c`.
fn list(models: &[(&str, Outcome)]) -> String {
    let mut parts = Vec::new();
    for outcome in Outcome::ALL {
        let these: Vec<&str> = models
            .iter()
            .filter(|(_, o)| *o == outcome)
            .map(|(model, _)| *model)
            .collect();
        if !these.is_empty() {
            parts.push(format!("{} {}", outcome.word(), these.join(" ")));
        }
    }
    parts.join("; ")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::time::Duration;

    /// A cell for tests: `points` as `a`, `-b` that failed, `?c` that was skipped.
    pub fn cell(guest: &str, model: &str, engine: &str, verdict: Verdict, points: &[&str]) -> Cell {
        let point = |text: &&str| match text.split_at(1) {
            ("-", name) => (name.to_string(), Point::Failed("at: x".into())),
            ("?", name) => (name.to_string(), Point::Skipped("lacks <it>".into())),
            _ => (text.to_string(), Point::Passed),
        };
        Cell {
            guest: guest.into(),
            model: model.into(),
            engine: engine.into(),
            verdict,
            points: points.iter().map(point).collect(),
            time: Duration::from_millis(1500),
            log: String::new(),
        }
    }

    fn some() -> Vec<Cell> {
        let failed = || Verdict::Failed("1 of 2 tests failed".into());
        vec![
            cell("lbr", "haswell", "soft", Verdict::Passed, &["order", "info"]),
            cell("lbr", "core2", "soft", Verdict::Passed, &["order", "?info"]),
            cell("lbr", "p6", "soft", Verdict::Skipped("no 64-bit mode".into()), &[]),
            cell("dr", "p6", "soft", Verdict::Passed, &[]),
            cell("pt", "haswell,+rtm", "soft", failed(), &["-a", "b c"]),
            cell("lbr", "p6", "kvm", Verdict::Absent("no KVM".into()), &[]),
        ]
    }

    const TEXT: &str = "
[soft]
dr         pass p6
lbr        pass core2 haswell; skip p6
lbr/info   pass haswell; skip core2
lbr/order  pass
pt         FAIL haswell,+rtm
pt/a       FAIL
pt/b c     pass
";

    // covers: matrix/expected
    #[test]
    fn a_table_is_written_and_read() {
        let mut table = Table::default();
        table.put(&some());
        let text = table.text();
        assert!(text.ends_with(TEXT), "{text}");
        assert_eq!(Table::parse(&text).unwrap(), table);
        assert!(table.expects_failure(&some()[4]) && !table.expects_failure(&some()[0]));
        assert_eq!(table.never_passed(), ["pt/a"]);
        assert_eq!(table.guests("soft"), BTreeSet::from(["dr", "lbr", "pt"]));
        let passes = |guest, model| table.passes("soft", guest, model);
        let counts = [
            passes("lbr", "haswell"),
            passes("lbr", "core2"),
            passes("lbr", "p6"),
            passes("lbr", "x"),
        ];
        assert_eq!(counts, [Some(2), Some(1), None, None]);
    }

    // covers: matrix/expected
    #[test]
    fn a_change_shows_as_the_lines_that_differ() {
        let expected = Table::parse(TEXT).unwrap();
        let mut cells = some();
        cells[1].points.retain(|(name, _)| name != "info");
        cells[4].verdict = Verdict::Passed;
        cells[4].points[0].1 = Point::Passed;
        // One that is gone.
        cells.remove(3);
        let mut now = expected.clone();
        now.put(&cells);
        assert_eq!(
            expected.differences(&now),
            [
                "-[soft] lbr/info  pass haswell; skip core2",
                "+[soft] lbr/info  pass haswell",
                "-[soft] pt  FAIL haswell,+rtm",
                "+[soft] pt  pass haswell,+rtm",
                "-[soft] pt/a  FAIL",
                "+[soft] pt/a  pass",
            ]
        );
        now.keep_only(&cells);
        assert!(expected.differences(&now).contains(&"-[soft] dr  pass p6".to_string()));
        // What was not to be had says nothing: an expected line of it stays.
        let kvm = Table::parse("[kvm]\nlbr  pass p6\n").unwrap();
        let mut after = kvm.clone();
        after.put(&cells);
        after.keep_only(&cells);
        assert!(
            kvm.differences(&after).iter().all(|line| line.starts_with('+')),
            "{:?}",
            kvm.differences(&after)
        );
    }

    // covers: matrix/bad-input
    #[test]
    fn what_is_no_table_is_said_with_its_line() {
        for (text, words) in [
            ("lbr  pass p6\n", "line 1: no [engine]"),
            ("[soft]\nlbr pass p6\n", "line 2: no two blanks"),
            ("[soft]\n\nlbr  passes p6\n", "line 3: neither pass"),
            ("[soft]\nlbr  pass p6; skip p6\n", "line 2: a model twice"),
            (
                "[soft]\nlbr  pass p6\nlbr/a  pass core2\n",
                "line 3: lbr has no line with core2",
            ),
        ] {
            let error = Table::parse(text).unwrap_err().to_string();
            assert!(error.starts_with(words), "{error}");
        }
    }
}
