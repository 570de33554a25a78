//! `cargo xtask test`: the whole suite, stage by stage, and a table at the end.

use crate::counts::{Counts, Runner};
use crate::packages::{self, find_program};
use crate::progress::Stage;
use crate::table::{self, Align};
use crate::{coverage, fuzz, guest, lab, python, tree};
use anyhow::{Result, bail};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// The whole suite must end within this on a machine of two cores.
const LIMIT: Duration = Duration::from_secs(60 * 60);

/// The same for the long form.
const FULL_LIMIT: Duration = Duration::from_secs(4 * 60 * 60);

/// How long each fuzz target is run under libFuzzer with `--full`.
const FUZZ_SECONDS: u64 = 30;

/// How long each family of the differential test goes on with `--full`, in each of its code sizes.
const DIFFERENTIAL_SECONDS: &str = "6";

#[derive(clap::Args)]
pub struct TestOptions {
    /// The long form of the tests that have one, such as the differential test
    #[arg(long)]
    full: bool,
    /// Install nothing: list what is missing and stop
    #[arg(long)]
    no_install: bool,
}

/// One row of the closing table.
struct Row {
    name: &'static str,
    seconds: f64,
    counts: Option<Counts>,
    /// What its tests found nothing to run on for, a line each.
    skipped: String,
    fault: Option<String>,
}

/// Where tests say that they found nothing to run on.
fn skips() -> PathBuf {
    tree::target().join("skipped.txt")
}

/// The stages that ran, and the rules they share.
struct Suite {
    rows: Vec<Row>,
    end: Instant,
    full: bool,
    nextest: bool,
}

/// What tests and builds and is in no registry.
const UNPUBLISHED: [&str; 6] = ["guest-tests", "guests", "rt", "pt-oracle", "ptdump", "xtask"];

/// The engine's feature for hosts whose compiler makes no sibling calls.
const PLAIN_LOOP: &str = "plain-loop";

/// A part of the tests: a stage of its own.
#[derive(Clone, Copy)]
enum Tests {
    /// Everything but the guests.
    Units,
    /// What boots guests.
    Guests,
    /// The engine's, with the loop for hosts whose compiler makes no sibling calls.
    PlainLoop,
}

impl Suite {
    /// Runs one stage; what goes wrong in it is kept for the table, so that the later stages still run.
    fn stage(&mut self, name: &'static str, work: impl FnOnce(&Stage, &Suite, &mut Counts) -> Result<()>) {
        let stage = Stage::start(name);
        let mut counts = Counts::default();
        // There is none after most stages.
        let _ = fs::remove_file(skips());
        let result = work(&stage, self, &mut counts);
        let skipped = fs::read_to_string(skips()).unwrap_or_default();
        counts.skip(&skipped);
        let fault = result.err().map(|error| format!("{error:#}"));
        let ran = counts.passed + counts.failed;
        let outcome = match &fault {
            // The rest of it stands below the table.
            Some(fault) => format!("FAILED: {}", fault.lines().next().unwrap_or_default()),
            None if ran > 0 => format!("ok, {ran} tests"),
            None => "ok".to_string(),
        };
        let seconds = stage.end(&outcome);
        let counts = (!counts.is_empty()).then_some(counts);
        self.rows.push(Row {
            name,
            seconds,
            counts,
            skipped,
            fault,
        });
    }

    fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command
            .current_dir(tree::root())
            .args(arguments)
            .env("CARGO_TERM_COLOR", "never")
            // An incremental build makes ordinary calls of small functions of other crates, and the engine's handlers then cannot lead to
            // each other by jumps.
            .env("CARGO_INCREMENTAL", "0");
        command.env("MINIVMM_SKIPPED", skips());
        // What the guest tests boot: the stage before them builds it.
        command.env("MINIVMM", tree::target().join("debug/minivmm"));
        if self.full {
            command.env("MINIVMM_FULL", "1");
            // Once: the plain loop's run of the same test stays short.
            if !arguments.contains(&PLAIN_LOOP) {
                command.env("DIFF_SECONDS", DIFFERENTIAL_SECONDS);
            }
        }
        command
    }

    /// Runs cargo and fails unless it succeeds.
    fn must(&self, stage: &Stage, arguments: &[&str]) -> Result<()> {
        match stage.run(&mut self.cargo(arguments), Some(self.end), |_| {})? {
            status if status.success() => Ok(()),
            status => bail!("cargo {}: {status}", arguments.join(" ")),
        }
    }

    /// What builds everything that the tests of this suite need, in one go.
    fn build(&self) -> Vec<&'static str> {
        match self.nextest {
            true => vec!["nextest", "run", "--workspace", "--no-run"],
            false => vec!["test", "--workspace", "--no-run", "--lib", "--bins", "--tests"],
        }
    }

    /// Runs tests with the better runner there is: nextest, or cargo's own.
    fn tests(&self, stage: &Stage, counts: &mut Counts, tests: Tests) -> Result<()> {
        let (runner, mut arguments) = if self.nextest {
            (
                Runner::Nextest,
                vec!["nextest", "run", "--no-tests=pass", "--no-fail-fast"],
            )
        } else {
            (
                Runner::Cargo,
                vec!["test", "--no-fail-fast", "--lib", "--bins", "--tests"],
            )
        };
        arguments.extend(match (tests, runner) {
            // By a filter over the whole workspace: another choice of packages would build what they share with other features.
            (Tests::Units, Runner::Nextest) => vec!["--workspace", "-E", "not package(guest-tests)"],
            (Tests::Guests, Runner::Nextest) => vec!["--workspace", "-E", "package(guest-tests)"],
            (Tests::Units, Runner::Cargo) => vec!["--workspace", "--exclude", "guest-tests"],
            (Tests::Guests, Runner::Cargo) => vec!["-p", "guest-tests"],
            (Tests::PlainLoop, _) => vec!["-p", "minivmm-engine", "--features", PLAIN_LOOP],
        });
        self.count(stage, counts, runner, &arguments)
    }

    /// Runs a test runner and reads its output.
    fn count(&self, stage: &Stage, counts: &mut Counts, runner: Runner, arguments: &[&str]) -> Result<()> {
        let status = stage.run(&mut self.cargo(arguments), Some(self.end), |line| {
            counts.read(runner, line)
        })?;
        if counts.failed > 0 {
            bail!("{} tests failed", counts.failed);
        }
        if !status.success() {
            bail!("cargo {}: {status}", arguments.join(" "));
        }
        Ok(())
    }
}

/// `cargo xtask test`.
pub fn run(options: &TestOptions) -> Result<ExitCode> {
    let start = Instant::now();
    let nextest = find_program("cargo-nextest").is_some();
    let limit = if options.full { FULL_LIMIT } else { LIMIT };
    let mut suite = Suite {
        rows: Vec::new(),
        end: start + limit,
        full: options.full,
        nextest,
    };
    suite.stage("packages", |stage, _, _| {
        lab::forget_tallies()?;
        let mut needs = vec![
            packages::GCC,
            packages::BINUTILS,
            packages::QEMU,
            packages::QEMU_USER,
            packages::QEMU_IMG,
            packages::PASST,
            packages::RSYNC,
            packages::HWLOC,
            packages::STRESS_NG,
            packages::GDB,
            packages::VALGRIND,
            packages::PERF,
            packages::LIBIPT,
            packages::PYTHON,
        ];
        needs.extend(packages::BOCHS_NEEDS);
        if options.full {
            needs.extend([packages::CRASH, packages::DEBOOTSTRAP]);
            needs.extend(packages::NUMPY_NEEDS);
        }
        packages::ensure_installed(stage, &needs, !options.no_install)
    });
    suite.stage("guest", |stage, _, _| {
        let mut guest = guest::prepare(stage)?;
        if options.full {
            guest::with_debug(stage, &mut guest)?;
            python::ensure(stage, &python::DRGN)?;
        }
        python::ensure(stage, &python::PERFETTO)?;
        guest::xen::prepare(stage)?;
        guest::bochs::prepare(stage)?;
        let which = if options.full {
            guest::kernels::Which::All
        } else {
            guest::kernels::Which::Ends
        };
        guest::with_kernels(stage, which)?;
        guest::rr::prepare(stage)?;
        guest::with_tools(stage, &guest).map(drop)
    });
    suite.stage("format", |stage, suite, _| {
        suite.must(stage, &["fmt", "--all", "--check"])
    });
    suite.stage("clippy", |stage, suite, _| {
        suite.must(
            stage,
            &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"],
        )
    });
    suite.stage("build", |stage, suite, _| suite.must(stage, &suite.build()));
    suite.stage("tests", |stage, suite, counts| suite.tests(stage, counts, Tests::Units));
    suite.stage("guests", |stage, suite, counts| {
        suite.tests(stage, counts, Tests::Guests)
    });
    suite.stage("doc tests", |stage, suite, counts| {
        suite.count(stage, counts, Runner::Cargo, &["test", "--workspace", "--doc"])
    });
    suite.stage("plain loop", |stage, suite, counts| {
        suite.tests(stage, counts, Tests::PlainLoop)
    });
    suite.stage("crates", |stage, suite, _| {
        // In the long form each is built as whoever downloads it would.
        let verify = if suite.full { &[][..] } else { &["--no-verify"] };
        let others = UNPUBLISHED.iter().flat_map(|name| ["--exclude", name]);
        let arguments = ["package", "--workspace", "--offline", "--allow-dirty"];
        let arguments: Vec<&str> = arguments
            .into_iter()
            .chain(verify.iter().copied())
            .chain(others)
            .collect();
        suite.must(stage, &arguments)
    });
    if options.full {
        suite.stage("fuzz", |stage, _, _| {
            packages::ensure_installed(stage, &[packages::GXX], !options.no_install)?;
            let figures = fuzz::run_targets(stage, &fuzz::targets()?, FUZZ_SECONDS)?;
            fuzz::render(&figures).lines().for_each(|line| stage.say(line));
            Ok(())
        });
    }
    let mut total = Counts::default();
    for row in &suite.rows {
        total += row.counts.clone().unwrap_or_default();
    }
    suite.stage("coverage", |stage, _, _| {
        let survey = coverage::survey(tree::root())?;
        let (items, covered) = survey.totals();
        stage.say(&format!("{covered} of {items} items have a test"));
        match coverage::check(&survey, Some(&total.names))? {
            faults if faults.is_empty() => Ok(()),
            faults => bail!("{} faults\n{}", faults.len(), faults.join("\n")),
        }
    });
    Ok(if report(&suite.rows, &total, start.elapsed(), limit) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Prints the table and the closing lines, and says whether everything held.
fn report(rows: &[Row], total: &Counts, elapsed: Duration, limit: Duration) -> bool {
    let number = |counts: &Option<Counts>, of: fn(&Counts) -> u64| {
        counts.as_ref().map_or(String::new(), |counts| of(counts).to_string())
    };
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|row| {
            vec![
                row.name.to_string(),
                format!("{:.1}", row.seconds),
                number(&row.counts, |counts| counts.passed + counts.failed),
                number(&row.counts, |counts| counts.failed),
                number(&row.counts, |counts| counts.skipped),
                if row.fault.is_some() { "FAILED" } else { "ok" }.to_string(),
            ]
        })
        .collect();
    let head = [
        ("stage", Align::Left),
        ("seconds", Align::Right),
        ("ran", Align::Right),
        ("failed", Align::Right),
        ("skipped", Align::Right),
        ("", Align::Left),
    ];
    println!("\n{}", table::render(&head, &cells));
    for row in rows {
        if let Some(fault) = &row.fault {
            println!("{}: {fault}\n", row.name);
        }
    }
    for row in rows.iter().filter(|row| !row.skipped.is_empty()) {
        println!("{}: {} tests skipped", row.name, row.skipped.lines().count());
        row.skipped.lines().for_each(|line| println!("  {line}"));
    }
    for line in total.closing.iter().chain(&lab::tallies()) {
        println!("{line}");
    }
    println!("{} seconds of {} allowed", elapsed.as_secs(), limit.as_secs());
    // A stage that failed as a whole (a lint, a build) counts as one.
    let stages = rows
        .iter()
        .filter(|row| row.fault.is_some() && row.counts.as_ref().is_none_or(|c| c.failed == 0));
    let failed = total.failed + stages.count() as u64;
    let verdict = verdict(failed, total.passed, elapsed, limit);
    println!("{}", verdict.unwrap_or_else(|why| why));
    // Last, so that it is easy to find.
    println!("{} passed, {failed} failed, {} skipped", total.passed, total.skipped);
    verdict.is_ok()
}

/// Whether the suite holds: nothing failed, something ran, and in time.
fn verdict(failed: u64, passed: u64, elapsed: Duration, limit: Duration) -> Result<&'static str, &'static str> {
    if failed > 0 {
        Err("the suite failed")
    } else if passed == 0 {
        Err("the suite failed: no test ran")
    } else if elapsed > limit {
        Err("the suite failed: it took longer than it may")
    } else {
        Ok("the suite holds")
    }
}

#[cfg(test)]
#[path = "test_test.rs"]
mod tests;
