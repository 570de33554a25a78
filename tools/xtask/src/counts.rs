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
mod tests {
    use super::*;

    use Runner::{Cargo, Nextest};

    fn read(runner: Runner, text: &str) -> Counts {
        let mut counts = Counts::default();
        text.lines().for_each(|line| counts.read(runner, line));
        counts
    }

    // covers: suite/test
    #[test]
    fn both_runners_closing_lines_are_counted() {
        for (runner, line, passed, failed, skipped) in [
            (
                Cargo,
                "test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0s",
                5,
                0,
                1,
            ),
            (
                Cargo,
                "test result: FAILED. 5 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out",
                5,
                3,
                0,
            ),
            (
                Cargo,
                "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out",
                0,
                0,
                0,
            ),
            (
                Cargo,
                "     Summary [   0.012s] 5 tests run: 5 passed, 1 skipped",
                0,
                0,
                0,
            ),
            (
                Nextest,
                "     Summary [   0.012s] 5 tests run: 5 passed, 1 skipped",
                5,
                0,
                1,
            ),
            (
                Nextest,
                "     Summary [   0.012s] 1 test run: 1 passed, 0 skipped",
                1,
                0,
                0,
            ),
            (
                Nextest,
                "Summary [ 12.5s] 9/12 tests run: 4 passed (1 slow), 3 failed, 2 timed out, 0 skipped",
                4,
                5,
                0,
            ),
            (
                Nextest,
                "Summary [ 12.5s] 2 tests run: 1 passed, 1 exec failed, 0 skipped",
                1,
                1,
                0,
            ),
            (
                Nextest,
                "    test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out",
                0,
                0,
                0,
            ),
            (Nextest, "        PASS [   0.004s] xtask counts::tests::x", 0, 0, 0),
            (Cargo, "running 5 tests", 0, 0, 0),
        ] {
            let counts = read(runner, line);
            assert_eq!(
                (counts.passed, counts.failed, counts.skipped),
                (passed, failed, skipped),
                "{line}"
            );
            assert_eq!(counts.closing.is_empty(), passed + failed + skipped == 0, "{line}");
        }
    }

    #[test]
    fn names_are_those_of_tests_that_held() {
        let cargo = "test mmu::tests::long_walk ... ok\ntest mmu::tests::ud ... FAILED\n\
                     test mmu::tests::later ... ignored\ntest bad - should panic ... ok\n";
        let nextest = "        PASS [   0.004s] (  3/117) engine mmu::tests::global_pages\n\
                       PASS [   0.004s] guest-tests::linux boots\n        FAIL [   0.004s] engine mmu::tests::nx\n";
        for (runner, text, names) in [
            (Cargo, cargo, ["bad", "mmu::tests::long_walk"]),
            (Nextest, nextest, ["boots", "mmu::tests::global_pages"]),
        ] {
            assert_eq!(
                read(runner, text).names.iter().map(String::as_str).collect::<Vec<_>>(),
                names
            );
        }
    }

    // covers: kvm/skip
    #[test]
    fn tests_without_anything_to_run_on_have_not_passed() {
        let mut counts = read(Nextest, "Summary [ 1s] 5 tests run: 5 passed, 1 skipped");
        counts.skip("guests on KVM: /dev/kvm is not there\nSMP on KVM: /dev/kvm is not there\n");
        assert_eq!((counts.passed, counts.skipped), (3, 3));
        counts.skip("");
        assert_eq!((counts.passed, counts.skipped), (3, 3));
    }

    #[test]
    fn stages_add_up() {
        let mut sum = read(Nextest, "Summary [ 1s] 3 tests run: 2 passed, 1 failed, 4 skipped");
        sum += read(
            Cargo,
            "test result: ok. 7 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out",
        );
        assert_eq!((sum.passed, sum.failed, sum.skipped, sum.closing.len()), (9, 1, 5, 2));
    }
}
