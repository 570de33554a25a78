//! What a guest test's run in a lab comes to, against what is known to fail there.

use std::fmt;

use minivmm::matrix::tap::{Point, Report};

use super::{Ended, Host, Job};
use crate::bare::image;
use crate::target;

/// A test that fails in a lab: the guest, the test, and why.
pub type Known = (&'static str, &'static str, &'static str);

/// How many tests of the guests came out how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// They hold.
    pub passed: usize,
    /// They fail, as is known.
    pub known: usize,
    /// They fail, and should not.
    pub failed: usize,
    /// The host's CPU or the machine on it has not what they are about.
    pub skipped: usize,
}

impl Tally {
    /// Puts the numbers where `cargo xtask test` and `cargo xtask lab` look for them, and on standard output.
    pub fn write(&self, host: Host) {
        let line = format!("{} lab: {self}", host.label());
        println!("{line}");
        // Without the file the line is missing at the end of `cargo xtask test`, and nothing else.
        let _ = std::fs::create_dir_all(target().join("lab"));
        let _ = std::fs::write(target().join("lab").join(host.label()), line + "\n");
    }

    fn add(&mut self, other: Tally) {
        self.passed += other.passed;
        self.known += other.known;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally {
            passed,
            known,
            failed,
            skipped,
        } = self;
        write!(
            f,
            "{passed} guest tests passed, {known} failed as known, {failed} failed, {skipped} skipped"
        )
    }
}

/// Reads a guest test's run: adds it to `tally`, and says what is wrong with it. `all_ran`: what is known to fail and holds is
/// wrong, too.
pub fn judge(guest: &str, ended: &Ended, known: &[Known], all_ran: bool, tally: &mut Tally) -> String {
    let report = match Report::read(&ended.said) {
        Some(report) if report.broken.is_none() => report,
        other => {
            tally.failed += 1;
            let why = other.and_then(|report| report.broken);
            let why = why.unwrap_or_else(|| "no TAP".into());
            return format!("{guest}: {why}, status {}\n{}\n", ended.status, ended.said);
        }
    };
    let mut wrong = String::new();
    let mut sum = Tally::default();
    for (name, point) in &report.points {
        let known = known.iter().any(|row| (row.0, row.1) == (guest, name.as_str()));
        match point {
            Point::Passed => {
                sum.passed += 1;
                if known && all_ran {
                    wrong += &format!("{guest}: {name} is known to fail, and holds\n");
                }
            }
            Point::Skipped(_) => sum.skipped += 1,
            Point::Failed(_) if known => sum.known += 1,
            Point::Failed(why) => {
                sum.failed += 1;
                wrong += &format!("{guest}: {name}\n{why}\n");
            }
        }
    }
    if sum.passed == 0 {
        wrong += &format!("{guest}: nothing passed\n{}\n", ended.said);
    }
    tally.add(sum);
    wrong
}

/// The tests that the committed matrix has failing on a host in a lab, and that have no reason in this list.
///
/// # Panics
/// The table is not there, or has nothing of this host.
pub fn without_reason(host: Host, known: &[Known]) -> Vec<String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../resources/matrix-expected.txt");
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let head = format!("[{}]\n", host.name());
    let (_, section) = text.split_once(&head).unwrap_or_else(|| panic!("{path}: no {head}"));
    let section = section.split("\n[").next().unwrap_or_default();
    let failing = section.lines().filter(|line| line.contains("FAIL"));
    let tests = failing.filter_map(|line| line.split_whitespace().next()?.split_once('/'));
    tests
        .filter(|test| !known.iter().any(|row| (row.0, row.1) == *test))
        .map(|(guest, test)| format!("{guest}/{test}"))
        .collect()
}

/// A guest test in a lab: image, model, options, and whether a unit of ours is in it, so that the machine has to be handed over.
pub type Guest = (&'static str, &'static str, &'static [&'static str], bool);

/// What runs for a guest test, with more options of the lab's.
///
/// # Panics
/// There is no such guest.
pub fn job(&(guest, model, options, _): &Guest, more: &[&str]) -> Job {
    let always = ["--engine", "kvm", "--stats", "--cpu-model", model];
    Job::new(always.iter().chain(more).chain(options).copied()).file("--kernel", image(guest))
}

/// What is wrong with the runs of guest tests, whose numbers it writes down.
pub fn judge_all(host: Host, guests: &[&Guest], ended: &[Ended], known: &[Known]) -> String {
    let mut tally = Tally::default();
    let mut wrong = String::new();
    for ((guest, _, _, by_handover), ended) in guests.iter().zip(ended) {
        // What hangs on the lab's speed may hold as well.
        wrong += &judge(guest, ended, known, false, &mut tally);
        if handovers(ended).is_none_or(|count| (count > 0) != *by_handover) {
            wrong += &format!("{guest}: handovers: {:?}\n", handovers(ended));
        }
    }
    tally.write(host);
    wrong
}

fn wanted() -> String {
    std::env::var("MINIVMM_LAB").unwrap_or_default()
}

/// Whether `cargo xtask lab` names guests, whose words are to be seen.
pub fn some_are_chosen() -> bool {
    !wanted().is_empty()
}

/// The guests that `cargo xtask lab NAME...` names, or all of them.
///
/// # Panics
/// None of them has a name that is wanted.
pub fn chosen<T>(guests: impl Iterator<Item = T>, name: impl Fn(&T) -> &str) -> Vec<T> {
    let wanted = wanted();
    let guests: Vec<T> = guests.collect();
    let names: Vec<&str> = guests.iter().map(&name).collect();
    for word in wanted.split_terminator(',') {
        assert!(
            names.contains(&word),
            "{word} is not run in this lab, which runs {names:?}"
        );
    }
    let takes = |guest: &T| wanted.is_empty() || wanted.split(',').any(|word| word == name(guest));
    guests.into_iter().filter(takes).collect()
}

/// How often the machine was handed over for a unit, by what `--stats` prints.
pub fn handovers(ended: &Ended) -> Option<u64> {
    let line = ended.said.lines().find(|line| line.starts_with("handovers:"))?;
    let (before, _) = line.split_once(" for a unit")?;
    before.split_whitespace().next_back()?.parse().ok()
}

/// Which part of its wall time a run on KVM was in the software engine, by its statistics.
pub fn share_in_engine(ended: &Ended) -> Option<f64> {
    let seconds = |line: &str, behind: &str, before: &str| -> Option<f64> {
        let line = ended.said.lines().find(|said| said.starts_with(line))?;
        let (_, from) = line.split_once(behind)?;
        from.split_once(before)?.0.trim().parse().ok()
    };
    let wall = seconds("wall time:", ":", " s")?;
    (wall > 0.0).then_some(seconds("handovers:", "debugger;", " s")? / wall)
}

#[cfg(test)]
#[path = "judge_test.rs"]
mod tests;
