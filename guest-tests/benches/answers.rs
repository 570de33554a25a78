//! How long answers take: who wrote a word last in a recorded session, a replay with a trace in two parts over one, a booted Linux that
//! is there again from a snapshot, exports of a whole boot's trace, and drgn's list of the tasks of a running guest.
//!
//! `cargo xtask bench --only answers [--rounds N]`; the figures go to target/bench-answers.json too. Somebody waits for each of these, so
//! times are of the wall, with seconds of CPUs beside them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use guest_tests::measure::{Taken, load, middle_taken, rounds, taken};
use guest_tests::{
    Folder, Running, in_minivmm, linux, linux_in_minivmm, minivmm, run, start, start_with_input, target,
};

const LIMIT: Duration = Duration::from_secs(900);
const CMDLINE: &str = "console=ttyS0 quiet panic=-1";
/// How many steps the session has at least: two thousand million, as a Linux that has worked for a while.
const STEPS: u64 = 2_000_000_000;
/// It works until the session is long enough, and panics.
const SCRIPT: &str =
    "#!/bin/sh\ni=0\nwhile [ $i -lt 600000 ]; do i=$((i+1)); done\nuname -a\necho c >/proc/sysrq-trigger\n";

/// One line of the table.
struct Row {
    what: &'static str,
    taken: Taken,
    /// What is asked of it, in seconds of the wall.
    wanted: f64,
}

fn main() -> ExitCode {
    let folder = Folder::new("answers");
    match rounds(5).and_then(|rounds| measure(&folder, rounds)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("bench: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Does something so often, and gives the middle of what it took.
fn timed(rounds: usize, mut work: impl FnMut() -> Result<(), String>) -> Result<Taken, String> {
    let times: Result<Vec<Taken>, String> = (0..rounds).map(|_| taken(&mut work)).collect();
    Ok(middle_taken(&times?))
}

/// Runs minivmm and gives what it wrote to standard output.
fn ask(words: &[&str], status: i32) -> Result<String, String> {
    let outcome = run(Command::new(minivmm()).args(words), LIMIT);
    match outcome.status == Some(status) {
        true => Ok(outcome.console),
        false => Err(format!("{words:?} ended with {:?}: {}", outcome.status, outcome.errors)),
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("the target folder's name is UTF-8")
}

fn measure(folder: &Folder, rounds: usize) -> Result<(), String> {
    let mut rows = Vec::new();
    let steps = session(folder, rounds, &mut rows)?;
    let (slices, bytes) = exports(folder, rounds, &mut rows)?;
    running(folder, rounds, &mut rows)?;
    println!("{rounds} rounds, load {:.1}; seconds", load());
    println!("  {:<44} {:>7} {:>7} {:>7}", "", "wall", "CPUs", "wanted");
    for row in &rows {
        println!(
            "  {:<44} {:>7.2} {:>7.2} {:>7.2}",
            row.what, row.taken.wall, row.taken.cpu, row.wanted
        );
    }
    let of = |what: &str| rows.iter().find(|row| row.what == what).map(|row| row.taken.wall);
    let jobs = match (of(JOBS), of(SERIES)) {
        (Some(two), Some(one)) => two / one,
        _ => return Err("a replay is missing".into()),
    };
    println!("  replay with a trace, two jobs over one: {jobs:.2} (wanted 0.60)");
    println!(
        "  Perfetto: {:.1} bytes a slice, {bytes} bytes, {slices} slices (wanted 20)",
        bytes as f64 / slices as f64
    );
    println!("  the session has {:.2} G steps", steps as f64 / 1e9);
    let json: Vec<String> = rows
        .iter()
        .map(|row| {
            format!(
                "{:?}: {{\"wall\": {:.3}, \"cpu\": {:.3}}}",
                row.what, row.taken.wall, row.taken.cpu
            )
        })
        .collect();
    let json = format!(
        "{{\"rounds\": {rounds}, \"jobs_ratio\": {jobs:.3}, \"bytes_a_slice\": {:.2}, {}}}\n",
        bytes as f64 / slices as f64,
        json.join(", ")
    );
    let path = target().join("bench-answers.json");
    fs::write(&path, json).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

const SERIES: &str = "replay with a trace, in series";
const JOBS: &str = "replay with a trace, --jobs 2";

/// Questions to a recorded session, and its replays; how many steps it has.
fn session(folder: &Folder, rounds: usize, rows: &mut Vec<Row>) -> Result<u64, String> {
    let scripts = folder.join("scripts");
    fs::create_dir(&scripts).map_err(|error| error.to_string())?;
    folder.script("scripts/run", SCRIPT);
    let session = folder.join("session");
    let mut record = linux_in_minivmm(CMDLINE);
    record.args(["--memory", "256M", "--inject"]).arg(&scripts);
    let outcome = run(record.arg("--record").arg(&session), LIMIT);
    // 10 is a guest's panic.
    if outcome.status != Some(10) {
        return Err(format!(
            "the recording ended with {:?}: {}",
            outcome.status, outcome.errors
        ));
    }
    let (mut first, mut after) = (Vec::new(), Vec::new());
    let mut steps = 0;
    // Words that the kernel writes seldom: each question is a new one, and then the same again.
    let words = [
        "saved_command_line",
        "system_state",
        "jiffies",
        "panic_cpu",
        "linux_banner",
        "init_task",
        "panic_timeout",
    ];
    for word in words.iter().cycle().take(rounds.min(words.len())) {
        let question = ["query", text(&session), "last-writer", word, "--len", "4"];
        first.push(taken(|| {
            steps = steps.max(last_number(&ask(&question, 0)?));
            Ok::<(), String>(())
        })?);
        after.push(taken(|| ask(&question, 0).map(drop))?);
    }
    if steps < STEPS {
        return Err(format!("the session has {steps} steps, which is too short"));
    }
    let row = |what, taken, wanted| Row { what, taken, wanted };
    rows.push(row("last writer of a word, asked first", middle_taken(&first), 2.0));
    rows.push(row("the same, asked again", middle_taken(&after), 0.2));
    let trace = folder.join("replayed");
    let (mut series, mut jobs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let replay = ["replay", text(&session), "--force", "--trace", text(&trace)];
        series.push(taken(|| ask(&replay, 10).map(drop))?);
        let two = [&replay[..], &["--jobs", "2"]].concat();
        jobs.push(taken(|| ask(&two, 10).map(drop))?);
    }
    fs::remove_dir_all(&trace).map_err(|error| error.to_string())?;
    let series = middle_taken(&series);
    rows.push(row(SERIES, series, series.wall));
    rows.push(row(JOBS, middle_taken(&jobs), 0.6 * series.wall));
    Ok(steps)
}

/// The greatest number after the word `step`.
fn last_number(said: &str) -> u64 {
    let mut words = said.split([' ', ',', '\n']);
    let mut greatest = 0;
    while let Some(word) = words.next() {
        if word == "step" {
            greatest = greatest.max(words.next().and_then(|word| word.parse().ok()).unwrap_or(0));
        }
    }
    greatest
}

/// Exports of the trace of a whole boot; how many slices Perfetto's has, and its size.
fn exports(folder: &Path, rounds: usize, rows: &mut Vec<Row>) -> Result<(u64, u64), String> {
    let trace = folder.join("trace");
    let mut boot = linux_in_minivmm("console=ttyS0 panic=-1 quiet minivmm.script=nothing");
    let outcome = run(boot.arg("--trace").arg(&trace), LIMIT);
    if outcome.status != Some(0) {
        return Err(outcome.errors);
    }
    let mut export = |what, form: &str, wanted| {
        let file = folder.join(form);
        let option = format!("--{form}");
        let words = ["trace", "export", text(&trace), "--force", &option, text(&file)];
        let taken = timed(rounds, || ask(&words, 0).map(drop))?;
        rows.push(Row { what, taken, wanted });
        Ok::<PathBuf, String>(file)
    };
    export("flame graph of a whole boot", "flamegraph", 10.0)?;
    export("page of a whole boot", "html", 10.0)?;
    let file = export("Perfetto of a whole boot", "perfetto", 60.0)?;
    let bytes = fs::metadata(&file).map_err(|error| error.to_string())?.len();
    let python = target().join("host/perfetto/bin/python");
    let counted = run(Command::new(python).args(["-c", SLICES]).arg(&file), LIMIT);
    let slices = counted.console.trim().parse();
    let slices: u64 = slices.map_err(|_| format!("Perfetto's schema does not read it: {}", counted.errors))?;
    if slices == 0 {
        return Err("Perfetto's schema finds no slice in it".into());
    }
    Ok((slices, bytes))
}

/// Counts the slices of a trace by Perfetto's published schema, packet by packet.
const SLICES: &str = r#"
import sys, zlib
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at

def packets(data):
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        assert tag == 10, tag
        length, at = varint(data, at)
        packet = schema.TracePacket.FromString(bytes(data[at:at + length]))
        at += length
        if packet.HasField("compressed_packets"):
            yield from packets(memoryview(zlib.decompress(packet.compressed_packets)))
        else:
            yield packet

events = (packet.track_event for packet in packets(memoryview(open(sys.argv[1], "rb").read())) if packet.HasField("track_event"))
print(sum(event.type == schema.TrackEvent.TYPE_SLICE_BEGIN for event in events))
"#;

/// What is asked of a guest that runs: a snapshot from which it is there again, and drgn's list of tasks.
fn running(folder: &Path, rounds: usize, rows: &mut Vec<Row>) -> Result<(), String> {
    let at = |name: &str| format!("unix:{}", folder.join(name).display());
    let mut command = in_minivmm(&linux().kernel);
    command.arg("--initrd").arg(&linux().initrd);
    command.args(["--cmdline", "console=ttyS0 quiet"]);
    command.args(["--control", &at("control"), "--qmp", &at("qmp")]);
    let mut guest = start(&mut command, LIMIT);
    guest.wait_for("guest#").ok_or("the guest has no shell")?;
    let control = folder.join("control");
    let snapshot = folder.join("snapshot");
    ask(&["ctl", text(&control), "snapshot", text(&snapshot)], 0)?;
    let taken = drgn(folder, rounds)?;
    rows.push(Row {
        what: "drgn: the tasks of a running guest",
        taken,
        wanted: 1.0,
    });
    ask(&["ctl", text(&control), "quit"], 0)?;
    guest.finish();
    let mut times = Vec::new();
    for _ in 0..rounds {
        let begun = Instant::now();
        let mut command = Command::new(minivmm());
        let mut guest: Running = start_with_input(command.arg("--restore").arg(&snapshot), LIMIT);
        guest.enter("echo b$((1 + 1))ck");
        guest
            .wait_for("b2ck")
            .ok_or("the restored guest's shell does not answer")?;
        times.push(Taken {
            wall: begun.elapsed().as_secs_f64(),
            cpu: guest.cpu_seconds(),
        });
        guest.kill();
    }
    rows.push(Row {
        what: "restored guest: its shell has answered",
        taken: middle_taken(&times),
        wanted: 0.3,
    });
    Ok(())
}

/// What drgn takes for the list, without what it takes to start and to read Debian's vmlinux.
fn drgn(folder: &Path, rounds: usize) -> Result<Taken, String> {
    let debug = target().join("guest/debug");
    let folders = fs::read_dir(&debug).map_err(|error| format!("{}: {error}", debug.display()))?;
    let vmlinux = folders
        .filter_map(|entry| Some(entry.ok()?.path().join("vmlinux")))
        .find(|path| path.is_file())
        .ok_or("Debian's vmlinux is not there")?;
    let script = folder.join("tasks.py");
    fs::write(&script, TASKS).map_err(|error| error.to_string())?;
    let mut times = Vec::new();
    for _ in 0..rounds {
        let mut command = Command::new(target().join("host/drgn/bin/drgn"));
        command.current_dir(folder);
        command.args(["--qemu", "qmp", "--main-symbols", "-s"]).arg(&vmlinux);
        let outcome = run(command.arg(&script), LIMIT);
        let said = outcome.console.trim().split(' ').map(str::parse);
        match said.collect::<Result<Vec<f64>, _>>().as_deref() {
            Ok(&[wall, cpu, tasks]) if tasks > 10.0 => times.push(Taken { wall, cpu }),
            _ => return Err(format!("drgn said {:?}: {}", outcome.console, outcome.errors)),
        }
    }
    Ok(middle_taken(&times))
}

/// Lists the tasks and says how long that took: seconds of the wall, of the CPU, and how many there were.
const TASKS: &str = "\
import time
from drgn.helpers.linux.pid import for_each_task
wall, cpu = time.monotonic(), time.process_time()
tasks = [(task.pid.value_(), task.comm.string_()) for task in for_each_task(prog)]
print(time.monotonic() - wall, time.process_time() - cpu, len(tasks))
";
