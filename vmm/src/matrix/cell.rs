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
use crate::launch::NEEDS_LONG_MODE;
use trace::regular;

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
    /// The model is one of all: a guest that it cannot run is skipped.
    pub one_of_all: bool,
    /// Wall time that minivmm is given.
    pub timeout: Duration,
    /// It runs a command, whose exit status is minivmm's.
    pub command: bool,
    /// A file whose contents are typed into its console.
    pub input: Option<PathBuf>,
    /// Why it is not run.
    pub skip: Option<String>,
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
    if let Some(why) = &plan.skip {
        cell.verdict = Verdict::Skipped(why.clone());
        return cell;
    }
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
    let input = match &plan.input {
        Some(path) => Stdio::from(regular::open(path)?),
        None => Stdio::null(),
    };
    let mut child = Command::new(program)
        .args(&plan.arguments)
        .stdin(input)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let streams = collect(child.stdout.take()).and_then(|console| Ok((console, collect(child.stderr.take())?)));
    let (console, errors) = match streams {
        Ok(streams) => streams,
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            return Err(error);
        }
    };
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
fn collect(stream: Option<impl Read + Send + 'static>) -> std::io::Result<thread::JoinHandle<Vec<u8>>> {
    thread::Builder::new().spawn(move || {
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
    if plan.command {
        match code {
            125 if said.contains("64-bit mode, which the model lacks") => {
                return Verdict::Skipped("the kernel is a 64-bit one".into());
            }
            125 if said.starts_with("--engine ") || said.contains("this host lacks") => return Verdict::Absent(said),
            125..=127 => return failed(said),
            _ => {}
        }
    }
    match code {
        _ if plan.command => {}
        // What `Error::Engine` says.
        2 if said.starts_with("--engine ") || said.contains("this host lacks") => return Verdict::Absent(said),
        2 if plan.one_of_all && said.contains(NEEDS_LONG_MODE) => {
            return Verdict::Skipped("the kernel needs 64-bit mode".into());
        }
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
            (_, 0) => Verdict::Passed,
            (_, 1) if !plan.command => Verdict::Passed,
            (_, code) if plan.command => failed(format!("the command's exit status is {code}")),
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
        (0, _, 0) => {}
        (0, _, 1) if !plan.command => {}
        (0, _, code) if plan.command => {
            return failed(format!("every test holds, but the command's exit status is {code}"));
        }
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
#[path = "cell_test.rs"]
mod tests;
