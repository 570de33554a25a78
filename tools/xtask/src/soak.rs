//! `cargo xtask soak`: two equal machines side by side for hours. Their states must stay the same, and what they hold of the host must
//! not grow.

use crate::progress::Stage;
use crate::table::{self, Align};
use crate::{demo, guest, packages, tree};
use anyhow::{Context, Result, bail, ensure};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// The model: it has every unit that the guest's rounds use.
const MODEL: &str = "icelake-server";
/// The disk of each machine.
const DISK: u64 = 64 << 20;
/// What the kernel says when something is wrong with it, and the script.
const COMPLAINTS: [&str; 6] = ["Oops", "BUG:", "WARNING:", "Call Trace", "I/O error", "FAILED"];

#[derive(clap::Args)]
pub struct SoakOptions {
    /// How long, in hours: 0.05 is three minutes
    #[arg(value_parser = hours)]
    hours: f64,
    /// Steps of the machine between two comparisons
    #[arg(long, default_value_t = 4_000_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    every: u64,
    /// The program that runs the machines [default: a release build of this tree]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Install nothing: list what is missing and stop
    #[arg(long)]
    no_install: bool,
}

fn hours(word: &str) -> Result<f64> {
    let hours = word.parse().context("not a number")?;
    ensure!(hours > 0.0 && hours <= 10_000.0, "not a number of hours above 0");
    Ok(hours)
}

/// What one machine holds of the host, at a step.
#[derive(Clone, Debug, PartialEq)]
struct Sample {
    /// The monitor's hash of the whole machine.
    hash: String,
    /// Rounds that the guest has ended.
    rounds: usize,
    /// Resident memory, in KiB.
    resident: u64,
    /// Open file descriptors.
    descriptors: usize,
    /// What the disk's file takes, in KiB.
    disk: u64,
}

/// A running machine and its folder.
struct Machine {
    folder: PathBuf,
    socket: PathBuf,
    child: Child,
}

impl Machine {
    fn start(program: &Path, guest: &guest::Guest, folder: PathBuf) -> Result<Machine> {
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let file = |name: &str| File::create(folder.join(name)).with_context(|| format!("cannot make {name}"));
        file("disk")?.set_len(DISK).context("cannot make the disk")?;
        let mut command = Command::new(program);
        command.current_dir(&folder).arg("--kernel").arg(&guest.kernel);
        command.arg("--initrd").arg(&guest.initrd);
        command.args(["--cmdline", "console=ttyS0 quiet panic=-1 minivmm.script=soak"]);
        command.args([
            "--engine", "soft", "--clock", "virtual", "--cpus", "2", "--memory", "768M",
        ]);
        command.args(["--cpu-model", MODEL, "--disk", "disk", "--serial", "file:console"]);
        // Paths of sockets are short.
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let socket = std::env::temp_dir().join(format!("minivmm-soak-{}-{name}", std::process::id()));
        command.arg("--control").arg(format!("unix:{}", socket.display()));
        command.args(["--paused", "--stats"]);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file("errors")?);
        let child = command.spawn().context("cannot run minivmm")?;
        let mut machine = Machine { folder, socket, child };
        while !machine.socket.exists() {
            ensure!(
                machine.child.try_wait()?.is_none(),
                "minivmm ended at its start: {}",
                machine.read("errors")?
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(machine)
    }

    fn read(&self, name: &str) -> Result<String> {
        let bytes = fs::read(self.folder.join(name)).with_context(|| format!("cannot read {name}"))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Sends a request to the control socket and gives the line that comes back. Behind `run-to` it comes when the machine is there,
    /// which is later than `minivmm ctl` would wait.
    fn ask(&self, request: &str) -> Result<String> {
        let line = UnixStream::connect(&self.socket).and_then(|mut stream| {
            stream.write_all(format!("{request}\n").as_bytes())?;
            let mut line = String::new();
            BufReader::new(stream).read_line(&mut line)?;
            Ok(line)
        });
        match line {
            Ok(line) if line.contains("\"ok\":true") => Ok(line),
            Ok(line) => bail!("{request}: {line}{}", self.read("errors")?),
            Err(error) => bail!("{request}: {error}: {}", self.read("errors")?),
        }
    }

    fn command(&self, command: &str) -> Result<String> {
        self.ask(&format!("{{\"command\":\"{command}\"}}"))
    }

    /// A line of the monitor's, and what it prints.
    fn monitor(&self, line: &str) -> Result<String> {
        let answer = self.ask(&format!("{{\"command\":\"monitor\",\"line\":\"{line}\"}}"))?;
        let text = answer.split("\"text\":\"").nth(1).context("an answer without text")?;
        Ok(text.to_string())
    }

    /// The step that it stands at.
    fn step(&self) -> Result<u64> {
        let status = self.command("status")?;
        number_behind(&status, "\"steps\":").with_context(|| format!("no step in {status}"))
    }

    fn sample(&self) -> Result<Sample> {
        let hash = self.monitor("hash")?;
        let console = self.read("console")?;
        if let Some(word) = COMPLAINTS.iter().find(|word| console.contains(*word)) {
            let tail: Vec<&str> = console.lines().rev().take(30).collect();
            let tail: Vec<&str> = tail.into_iter().rev().collect();
            bail!("the guest says {word}:\n{}", tail.join("\n"));
        }
        let process = PathBuf::from(format!("/proc/{}", self.child.id()));
        let status = fs::read_to_string(process.join("status")).context("cannot read the process's status")?;
        Ok(Sample {
            hash: hash.split_whitespace().next().unwrap_or_default().to_string(),
            rounds: console.lines().filter(|line| is_round(line)).count(),
            resident: number_behind(&status, "VmRSS:").context("no VmRSS")?,
            descriptors: fs::read_dir(process.join("fd"))
                .context("cannot list descriptors")?
                .count(),
            disk: fs::metadata(self.folder.join("disk"))?.blocks() / 2,
        })
    }

    /// Ends it, and gives the hash that `--stats` prints.
    fn end(mut self) -> Result<String> {
        self.command("quit")?;
        let status = self.child.wait()?;
        let errors = self.read("errors")?;
        ensure!(status.success(), "minivmm ended with {status}: {errors}");
        let line = errors.lines().find_map(|line| line.strip_prefix("state hash:"));
        Ok(line.context("no state hash in --stats")?.trim().to_string())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn is_round(line: &str) -> bool {
    line.starts_with("soak: round ") && line.contains(" ends")
}

/// The decimal number that follows some text.
fn number_behind(text: &str, key: &str) -> Option<u64> {
    let behind = text[text.find(key)? + key.len()..].trim_start();
    let len = behind.find(|c: char| !c.is_ascii_digit()).unwrap_or(behind.len());
    behind[..len].parse().ok()
}

/// What is wrong with the samples of both machines, a line each.
fn faults(samples: &[[Sample; 2]]) -> Vec<String> {
    let mut faults = Vec::new();
    for (at, [one, other]) in samples.iter().enumerate() {
        if one.hash != other.hash || one.rounds != other.rounds {
            faults.push(format!(
                "comparison {at}: the machines differ, {} and {}",
                one.hash, other.hash
            ));
        }
    }
    let Some([last, _]) = samples.last() else {
        return vec!["nothing was compared".to_string()];
    };
    if last.rounds == 0 {
        faults.push("no round has ended: more time".to_string());
    }
    for which in 0..2 {
        let of: Vec<&Sample> = samples.iter().map(|both| &both[which]).collect();
        if of.iter().any(|sample| sample.disk > DISK >> 10) {
            faults.push(format!("machine {which}: its disk's file takes more than the disk"));
        }
        // The guest reaches its working set in its first rounds.
        let settled: Vec<&Sample> = of.iter().copied().filter(|sample| sample.rounds >= 2).collect();
        let (before, after) = settled.split_at(settled.len() / 2);
        let most = |samples: &[&Sample]| samples.iter().map(|sample| sample.resident).max();
        if let (Some(before), Some(after)) = (most(before), most(after))
            && after > before + before / 20
        {
            faults.push(format!("machine {which}: {before} KiB resident, then {after} KiB"));
        }
        let descriptors = |samples: &[&Sample]| samples.iter().map(|sample| sample.descriptors).max();
        if let (Some(before), Some(after)) = (descriptors(before), descriptors(after))
            && after > before
        {
            faults.push(format!("machine {which}: {before} descriptors, then {after}"));
        }
    }
    faults
}

fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

fn pair<T: ToString + PartialEq>(both: &[Sample; 2], of: impl Fn(&Sample) -> T) -> String {
    match (of(&both[0]), of(&both[1])) {
        (one, other) if one == other => one.to_string(),
        (one, other) => format!("{} {}", one.to_string(), other.to_string()),
    }
}

fn print(rows: &[(Duration, u64, [Sample; 2])]) {
    let head = [
        ("after", Align::Right),
        ("steps", Align::Right),
        ("rounds", Align::Right),
        ("state hash", Align::Left),
        ("RSS MiB", Align::Right),
        ("descriptors", Align::Right),
        ("disk MiB", Align::Right),
    ];
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|(after, steps, both)| {
            vec![
                clock(*after),
                steps.to_string(),
                pair(both, |sample| sample.rounds),
                pair(both, |sample| sample.hash.clone()),
                pair(both, |sample| sample.resident >> 10),
                pair(both, |sample| sample.descriptors),
                pair(both, |sample| sample.disk >> 10),
            ]
        })
        .collect();
    println!("\n{}", table::render(&head, &cells));
}

/// `cargo xtask soak`.
pub fn run(options: &SoakOptions) -> Result<ExitCode> {
    let stage = Stage::start("guest");
    packages::ensure_installed(&stage, &[packages::GCC], !options.no_install)?;
    let guest = guest::prepare(&stage)?;
    let guest = guest::with_tools(&stage, &guest)?;
    stage.end("ok");
    let program = match &options.program {
        // The machines run in folders of their own.
        Some(program) => fs::canonicalize(program).with_context(|| format!("cannot find {}", program.display()))?,
        None => demo::build_release()?,
    };
    let start = Instant::now();
    let end = start + Duration::from_secs_f64(options.hours * 3600.0);
    let stage = Stage::start("soak");
    let folder = tree::target().join("soak");
    let machines = ["a", "b"].map(|name| Machine::start(&program, &guest, folder.join(name)));
    let [a, b] = machines;
    let machines = [a?, b?];
    let mut rows = Vec::new();
    let mut steps = 0;
    let result = loop {
        steps += options.every;
        // Both run at once; each answers the next question where it stands then.
        for machine in &machines {
            machine.monitor(&format!("run-to {steps}"))?;
        }
        let sampled = machines[0].sample().and_then(|a| Ok([a, machines[1].sample()?]));
        let both = match sampled {
            Ok(both) => both,
            Err(error) => break Err(error),
        };
        for machine in &machines {
            ensure!(machine.step()? == steps, "a machine does not stand at step {steps}");
        }
        let differ = both[0].hash != both[1].hash;
        stage.say(&format!(
            "{} step {steps}: {} rounds, {}{}",
            clock(start.elapsed()),
            both[0].rounds,
            both[0].hash,
            if differ { ", and another" } else { "" }
        ));
        rows.push((start.elapsed(), steps, both));
        if differ || Instant::now() >= end {
            break Ok(());
        }
    };
    let elapsed = stage.end(if result.is_ok() { "over" } else { "FAILED" });
    print(&rows);
    result?;
    let samples: Vec<[Sample; 2]> = rows.iter().map(|(_, _, both)| both.clone()).collect();
    let mut faults = faults(&samples);
    let last = samples.last().map(|both| both[0].hash.clone()).unwrap_or_default();
    for machine in machines {
        let hash = machine.end()?;
        if hash != last {
            faults.push(format!("--stats has the state hash {hash}, the monitor had {last}"));
        }
    }
    for fault in &faults {
        println!("{fault}");
    }
    let equal = samples.iter().filter(|both| both[0].hash == both[1].hash).count();
    println!(
        "{} hours, {equal} of {} state hashes equal, {} rounds: {}",
        (elapsed / 36.0).round() / 100.0,
        samples.len(),
        samples.last().map_or(0, |both| both[0].rounds),
        if faults.is_empty() { "all holds" } else { "FAILED" }
    );
    Ok(if faults.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

#[cfg(test)]
#[path = "soak_test.rs"]
mod tests;
