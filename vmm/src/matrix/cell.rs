//! One cell: a run of this program in a process of its own, and what it comes to.

use std::{
    ffi::OsString,
    io::Read,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::tap::{Point, Report};

/// Of a stream, so much is kept from its beginning.
const KEPT: usize = 4 << 20;
/// Of a failed cell's console, so many lines stand in reports.
const SHOWN: usize = 60;
/// minivmm ends by itself at its `--timeout`; one that does not is ended after so much more.
const GRACE: Duration = Duration::from_secs(30);

/// How a guest says that it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PassBy {
    /// By TAP if its console shows some, else by exit status.
    #[default]
    Auto,
    /// By TAP.
    Tap,
    /// By exit status alone: 0 (power-off, reset), or 1 (0 written to the debug-exit port).
    Status,
}

/// A run to be made.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The guest's name.
    pub guest: String,
    /// The model, as `--cpu-model` takes it.
    pub model: String,
    /// The engine, as `--engine` takes it.
    pub engine: String,
    /// The arguments of minivmm.
    pub arguments: Vec<OsString>,
    /// How the guest says that it holds.
    pub pass: PassBy,
    /// Wall time that minivmm is given.
    pub timeout: Duration,
}

/// What a cell comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It holds.
    Passed,
    /// The guest has nothing to do on this model: why.
    Skipped(String),
    /// The engine cannot be had on this host, or cannot run the model here: why.
    Absent(String),
    /// It does not hold: why.
    Failed(String),
}

/// A cell that has run.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// The guest's name.
    pub guest: String,
    /// The model.
    pub model: String,
    /// The engine.
    pub engine: String,
    /// What it comes to.
    pub verdict: Verdict,
    /// Its tests, where it reports in TAP.
    pub points: Vec<(String, Point)>,
    /// Wall time.
    pub time: Duration,
    /// Where it failed: the last lines of the console, and what minivmm said.
    pub log: String,
}

impl Cell {
    /// `GUEST on MODEL (ENGINE)`.
    pub fn name(&self) -> String {
        format!("{} on {} ({})", self.guest, self.model, self.engine)
    }

    /// How many tests passed, failed and were skipped.
    pub fn counts(&self) -> [usize; 3] {
        let mut counts = [0; 3];
        for (_, point) in &self.points {
            counts[match point {
                Point::Passed => 0,
                Point::Failed(_) => 1,
                Point::Skipped(_) => 2,
            }] += 1;
        }
        counts
    }
}

/// How a process ended and what it said.
struct Ended {
    status: ExitStatus,
    killed: bool,
    console: String,
    errors: String,
}

/// Runs a cell. `program` is minivmm.
pub fn run(program: &Path, plan: &Plan) -> Cell {
    let started = Instant::now();
    let mut cell = Cell {
        guest: plan.guest.clone(),
        model: plan.model.clone(),
        engine: plan.engine.clone(),
        verdict: Verdict::Passed,
        points: Vec::new(),
        time: Duration::ZERO,
        log: String::new(),
    };
    match execute(program, plan) {
        Ok(ended) => {
            let report = match plan.pass {
                PassBy::Status => None,
                _ => Report::read(&ended.console),
            };
            cell.verdict = judge(&ended, report.as_ref(), plan);
            cell.points = report.map(|report| report.points).unwrap_or_default();
            if matches!(cell.verdict, Verdict::Failed(_)) {
                let log = format!("{}{}", tail(&ended.console), ended.errors);
                cell.log = log.trim().to_string();
            }
        }
        Err(error) => {
            let why = machine::plain(&error);
            cell.verdict = Verdict::Failed(format!("cannot run {}: {why}", program.display()));
        }
    }
    cell.time = started.elapsed();
    cell
}

fn execute(program: &Path, plan: &Plan) -> std::io::Result<Ended> {
    let mut child = Command::new(program)
        .args(&plan.arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let console = collect(child.stdout.take());
    let errors = collect(child.stderr.take());
    let end = Instant::now() + plan.timeout + GRACE;
    let mut killed = false;
    let mut pause = Duration::from_millis(1);
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > end {
            killed = true;
            child.kill()?;
            break child.wait()?;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    };
    let text = |stream: thread::JoinHandle<Vec<u8>>| {
        let bytes = stream.join().unwrap_or_default();
        String::from_utf8_lossy(&bytes).replace('\r', "")
    };
    Ok(Ended {
        status,
        killed,
        console: text(console),
        errors: text(errors),
    })
}

/// Reads a stream to its end on a thread of its own, and keeps its beginning.
fn collect(stream: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut kept = Vec::new();
        let mut buffer = [0; 1 << 14];
        let Some(mut stream) = stream else { return kept };
        while let Ok(count @ 1..) = stream.read(&mut buffer) {
            let room = KEPT.saturating_sub(kept.len());
            kept.extend_from_slice(&buffer[..count.min(room)]);
        }
        kept
    })
}

fn judge(ended: &Ended, report: Option<&Report>, plan: &Plan) -> Verdict {
    let failed = |why: String| Verdict::Failed(why);
    // A report of several lines comes after its headline.
    let said = ended.errors.lines().find_map(|line| line.strip_prefix("minivmm: "));
    let said = said.or(ended.errors.lines().next()).unwrap_or("no message").to_string();
    if ended.killed {
        let limit = (plan.timeout + GRACE).as_secs();
        return failed(format!("minivmm did not end within {limit} s and was ended"));
    }
    let Some(code) = ended.status.code() else {
        return failed(format!("minivmm ended by {}", ended.status));
    };
    match code {
        // What `Error::Engine` says.
        2 if said.starts_with("--engine ") || said.contains("this host lacks") => return Verdict::Absent(said),
        2 => return failed(format!("minivmm: {said}")),
        4 => return failed(said),
        6 => return failed(format!("minivmm failed: {said}")),
        8 => return failed(format!("hangs: {said}")),
        _ => {}
    }
    let panic = ended
        .console
        .lines()
        .find(|line| line.contains("Kernel panic - not syncing"));
    if let Some(line) = panic {
        return failed(line.to_string());
    }
    let Some(report) = report else {
        return match (plan.pass, code) {
            (PassBy::Tap, _) => failed("no TAP on the console".to_string()),
            (_, 0 | 1) => Verdict::Passed,
            (_, code) => failed(by_status(code)),
        };
    };
    if let Some(broken) = &report.broken {
        return failed(broken.clone());
    }
    let skipped = |point: &Point| match point {
        Point::Skipped(reason) => Some(reason.clone()),
        _ => None,
    };
    match (report.failed().len(), report.points.len(), code) {
        (0, _, 0 | 1) => {}
        (0, _, code) => return failed(format!("every test holds, but {}", by_status(code))),
        (failures, tests, _) => return failed(format!("{failures} of {tests} tests failed")),
    }
    if let Some(reason) = &report.nothing {
        return Verdict::Skipped(reason.clone());
    }
    let reasons: Option<Vec<String>> = report.points.iter().map(|(_, point)| skipped(point)).collect();
    match reasons.as_deref() {
        Some([first, ..]) => Verdict::Skipped(first.clone()),
        _ => Verdict::Passed,
    }
}

fn by_status(code: i32) -> String {
    if code & 1 == 1 {
        format!("the guest wrote {} to the debug-exit port", code >> 1)
    } else {
        format!("minivmm's exit status is {code}")
    }
}

/// The last lines.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(SHOWN);
    let mut tail = String::new();
    if from > 0 {
        tail += &format!("({from} lines before)\n");
    }
    for line in &lines[from..] {
        tail += line;
        tail.push('\n');
    }
    tail
}

/// This program.
pub fn program() -> Result<PathBuf, crate::Error> {
    std::env::current_exe().map_err(|source| crate::Error::System {
        what: "finding this program's own file",
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that prints `console`, says `errors` and ends with `status`.
    fn cell(console: &str, errors: &str, status: i32, pass: PassBy) -> Cell {
        let script = format!("printf '%s' \"$1\"; printf '%s' \"$2\" >&2; exit {status}");
        let arguments = ["-c", &script, "sh", console, errors].map(OsString::from).to_vec();
        let plan = Plan {
            guest: "g".into(),
            model: "m".into(),
            engine: "soft".into(),
            arguments,
            pass,
            timeout: Duration::from_secs(60),
        };
        run(Path::new("sh"), &plan)
    }

    // covers: matrix/verdict
    #[test]
    fn a_cell_passes_by_tap_or_by_exit_status() {
        const TAP: &str = "TAP version 14\r\n1..2\r\nok 1 - a\r\nok 2 - b # SKIP no b\r\n";
        const FAILS: &str = "TAP version 14\n1..2\nok 1 - a\nnot ok 2 - b\n";
        const NONE: &str = "TAP version 14\n1..1\nok 1 - a # SKIP no a\n";
        let failed = |why: &str| Verdict::Failed(why.to_string());
        let skipped = |why: &str| Verdict::Skipped(why.to_string());
        for (console, errors, status, pass, verdict) in [
            (TAP, "", 1, PassBy::Auto, Verdict::Passed),
            (TAP, "", 0, PassBy::Tap, Verdict::Passed),
            (
                TAP,
                "",
                5,
                PassBy::Auto,
                failed("every test holds, but the guest wrote 2 to the debug-exit port"),
            ),
            (FAILS, "", 3, PassBy::Auto, failed("1 of 2 tests failed")),
            (FAILS, "", 1, PassBy::Auto, failed("1 of 2 tests failed")),
            (FAILS, "", 1, PassBy::Status, Verdict::Passed),
            (NONE, "", 1, PassBy::Auto, skipped("no a")),
            (
                "TAP version 14\n1..0 # SKIP no x\n",
                "",
                1,
                PassBy::Auto,
                skipped("no x"),
            ),
            ("hello\n", "", 0, PassBy::Auto, Verdict::Passed),
            ("hello\n", "", 1, PassBy::Status, Verdict::Passed),
            ("hello\n", "", 0, PassBy::Tap, failed("no TAP on the console")),
            (
                "",
                "",
                43,
                PassBy::Auto,
                failed("the guest wrote 21 to the debug-exit port"),
            ),
            (
                "[    1.0] Kernel panic - not syncing: no init\n",
                "",
                0,
                PassBy::Auto,
                failed("[    1.0] Kernel panic - not syncing: no init"),
            ),
            (
                TAP,
                "minivmm: --max-instructions 9: reached, CPU 0 at 0x1000 (loop+0x2)\n",
                8,
                PassBy::Auto,
                failed("hangs: --max-instructions 9: reached, CPU 0 at 0x1000 (loop+0x2)"),
            ),
            (
                "",
                "warning\nminivmm: guest crashed: triple fault\nRIP 1\n",
                4,
                PassBy::Auto,
                failed("guest crashed: triple fault"),
            ),
            (
                "",
                "minivmm: internal error: x\n",
                6,
                PassBy::Auto,
                failed("minivmm failed: internal error: x"),
            ),
            (
                "",
                "minivmm: --kernel x: no\n",
                2,
                PassBy::Auto,
                failed("minivmm: --kernel x: no"),
            ),
            (
                "",
                "minivmm: --engine kvm: no /dev/kvm\n",
                2,
                PassBy::Auto,
                Verdict::Absent("--engine kvm: no /dev/kvm".into()),
            ),
        ] {
            let cell = cell(console, errors, status, pass);
            assert_eq!(cell.verdict, verdict, "{console:?} {errors:?} {status}");
        }
    }

    // covers: matrix/crash
    #[test]
    fn what_a_failed_cell_said_is_kept_also_the_tests_before_its_end() {
        let console = "TAP version 14\n1..3\nok 1 - a\n";
        let dead = cell(
            console,
            "minivmm: guest crashed: triple fault\nRIP 0000000000001234\n",
            4,
            PassBy::Auto,
        );
        assert!(
            dead.log.contains("ok 1 - a") && dead.log.contains("RIP 0000000000001234"),
            "{}",
            dead.log
        );
        assert_eq!((dead.points.len(), dead.counts()), (1, [1, 0, 0]));
        let long = "line\n".repeat(100);
        assert!(
            cell(&long, "", 3, PassBy::Auto)
                .log
                .starts_with("(40 lines before)\nline\n")
        );
        assert_eq!(cell(&long, "", 1, PassBy::Auto).log, "");
    }

    // covers: matrix/crash
    #[test]
    fn a_process_that_dies_or_cannot_be_run_fails_its_cell() {
        let plan = Plan {
            guest: "g".into(),
            model: "m".into(),
            engine: "soft".into(),
            arguments: ["-c", "kill -SEGV $$"].map(OsString::from).to_vec(),
            pass: PassBy::Auto,
            timeout: Duration::from_secs(60),
        };
        let Verdict::Failed(why) = run(Path::new("sh"), &plan).verdict else {
            panic!("a process that died");
        };
        assert!(why.contains("SIGSEGV"), "{why}");
        let Verdict::Failed(why) = run(Path::new("/nowhere/minivmm"), &plan).verdict else {
            panic!("a program that is not there");
        };
        assert!(why.starts_with("cannot run /nowhere/minivmm"), "{why}");
    }
}
