//! What a test runner's output says: how many tests ran, and which.

use std::collections::BTreeSet;
use std::ops::AddAssign;

/// Whose output is read. Each one's lines can stand inside the other's: nextest shows what a failed test printed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Runner {
    /// `cargo test`.
    Cargo,
    /// `cargo nextest run`.
    Nextest,
}

/// What `cargo test` or `cargo nextest` reported.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    /// Tests that ran and held.
    pub passed: u64,
    /// Tests that ran and did not hold, or never ended.
    pub failed: u64,
    /// Tests that the runner left out (`#[ignore]`d ones), and tests that found nothing to run on.
    pub skipped: u64,
    /// Names of the tests that held, with their modules (`tests::name`).
    pub names: BTreeSet<String>,
    /// The runner's own closing lines, word for word.
    pub closing: Vec<String>,
}

impl AddAssign<Counts> for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.names.extend(other.names);
        self.closing.extend(other.closing);
    }
}

impl Counts {
    /// Takes one line of a runner's output into account.
    pub fn read(&mut self, runner: Runner, line: &str) {
        let text = line.trim();
        match runner {
            Runner::Cargo => {
                if let Some(rest) = text.strip_prefix("test result: ") {
                    self.close(text, rest.split_once(". ").map_or("", |(_, tail)| tail).split(';'));
                } else if let Some(rest) = text.strip_prefix("test ")
                    && let Some((name, "ok")) = rest.rsplit_once(" ... ")
                {
                    self.names.insert(name.trim_end_matches(" - should panic").to_string());
                }
            }
            Runner::Nextest => {
                if let Some(rest) = text.strip_prefix("Summary [") {
                    self.close(text, rest.split_once("run:").map_or("", |(_, tail)| tail).split(','));
                } else if let Some(rest) = text.strip_prefix("PASS [")
                    // PASS [   0.004s] ( 3/17) package::binary module::name
                    && let Some(name) = rest.split_whitespace().next_back()
                {
                    self.names.insert(name.to_string());
                }
            }
        }
    }

    /// Takes the lines of tests that found nothing to run on into account, each with its reason. The runner has counted them
    /// with those that held.
    pub fn skip(&mut self, lines: &str) {
        let count = lines.lines().count() as u64;
        self.passed = self.passed.saturating_sub(count);
        self.skipped += count;
    }

    /// Whether a runner said anything about a test.
    pub fn is_empty(&self) -> bool {
        self.passed + self.failed + self.skipped == 0
    }

    /// Takes a closing line, unless it is about no test at all.
    fn close<'a>(&mut self, line: &str, parts: impl Iterator<Item = &'a str>) {
        let mut sum = Counts::default();
        sum.tally(parts);
        if !sum.is_empty() {
            sum.closing.push(line.to_string());
        }
        *self += sum;
    }

    /// Adds parts such as `3 passed`, ` 1 timed out`, `2 passed (1 slow)`.
    fn tally<'a>(&mut self, parts: impl Iterator<Item = &'a str>) {
        for part in parts {
            let mut words = part.split_whitespace();
            let Some(Ok(number)) = words.next().map(str::parse::<u64>) else {
                continue;
            };
            match words.next() {
                Some("passed") => self.passed += number,
                Some("failed" | "timed" | "exec") => self.failed += number,
                Some("ignored" | "skipped") => self.skipped += number,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
#[path = "counts_test.rs"]
mod tests;
