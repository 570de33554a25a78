//! How fast minivmm is: the boot of Debian's cloud kernel against QEMU's software CPU, and four loops against QEMU and the
//! host itself. Medians of alternated runs, as ratios, since a machine that is shared makes seconds lie.
//!
//! `cargo xtask bench [-- --rounds N] [--only boot|loops]`; the figures go to target/bench.json too.

use guest_tests::measure::{alternate, median, ratio};
use guest_tests::{
    INIT_MARKER, LOOPS, LOOPS_NATIVE, in_minivmm, in_qemu, linux, linux_in_minivmm, minivmm, start, target,
};
use std::cell::Cell;
use std::process::{Command, ExitCode};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(600);
const CMDLINE: &str = "console=ttyS0 panic=-1 minivmm.script=nothing";

/// Each loop with its repetitions, and how many times the native time the interpreter of the design probe took for the
/// same kind of work (chained handlers and linked blocks).
const PROBES: [(&str, &str, f64); 4] = [
    ("digest", "100000", 0.370 / 0.017),
    ("qsort", "400000", 0.244 / 0.040),
    ("sieve", "60", 0.990 / 0.093),
    ("hash", "3000000", 0.246 / 0.053),
];

type Timed = Result<Duration, String>;

fn main() -> ExitCode {
    let mut rounds = 5;
    let mut only = String::new();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            // What `cargo bench` adds by itself.
            "--bench" => {}
            "--rounds" => match words
                .next()
                .and_then(|word| word.parse().ok())
                .filter(|rounds| *rounds > 0)
            {
                Some(number) => rounds = number,
                None => return wrong("--rounds wants a number above zero"),
            },
            "--only" => match words.next() {
                Some(word) if ["boot", "loops"].contains(&word.as_str()) => only = word,
                _ => return wrong("--only wants boot or loops"),
            },
            other => return wrong(&format!("unknown option {other}")),
        }
    }
    println!("{} rounds each, {}\n", rounds, minivmm().display());
    let mut json = Vec::new();
    let result = (|| {
        if only != "loops" {
            boot(rounds, &mut json)?;
        }
        if only != "boot" {
            loops(rounds, &mut json)?;
        }
        let path = target().join("bench.json");
        let text = format!("{{\n  \"rounds\": {rounds},\n  {}\n}}\n", json.join(",\n  "));
        std::fs::write(&path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        println!("\nwritten to {}", path.display());
        Ok::<(), String>(())
    })();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => wrong(&error),
    }
}

fn wrong(message: &str) -> ExitCode {
    eprintln!("bench: {message}");
    ExitCode::FAILURE
}

/// From the start of the process to the line that /init prints first.
fn boot(rounds: usize, json: &mut Vec<String>) -> Result<(), String> {
    let (peak, their_peak) = (Cell::new(0), Cell::new(0));
    let mut figures = Vec::new();
    let mut ours = || -> Timed {
        let mut running = start(linux_in_minivmm(CMDLINE).arg("--stats"), LIMIT);
        let time = running.wait_for(INIT_MARKER).ok_or("minivmm did not reach /init")?;
        peak.set(peak.get().max(running.peak_memory().unwrap_or(0)));
        let outcome = running.finish();
        let figure = mips_of(&outcome.errors).ok_or_else(|| format!("no MIPS in --stats:\n{}", outcome.errors))?;
        figures.push(figure);
        Ok(time)
    };
    let mut theirs = || -> Timed {
        let mut command = in_qemu(&linux().kernel);
        command.arg("-initrd").arg(&linux().initrd).args(["-append", CMDLINE]);
        let mut running = start(&mut command, LIMIT);
        let time = running.wait_for(INIT_MARKER).ok_or("QEMU did not reach /init")?;
        their_peak.set(their_peak.get().max(running.peak_memory().unwrap_or(0)));
        running.kill();
        Ok(time)
    };
    let times = alternate(rounds, &mut [&mut ours, &mut theirs])?;
    figures.sort_by(f64::total_cmp);
    let mips = figures[figures.len() / 2];
    let (ours, theirs) = (median(&times[0]), median(&times[1]));
    println!("boot of Debian's cloud kernel to /init");
    println!(
        "  minivmm  {:>8.2} s  {:>6.1} MIPS  {:>5} MiB",
        ours.as_secs_f64(),
        mips,
        peak.get() >> 20
    );
    println!(
        "  QEMU TCG {:>8.2} s  {:>11}  {:>5} MiB",
        theirs.as_secs_f64(),
        "",
        their_peak.get() >> 20
    );
    println!("  ratio    {:>8.2}\n", ratio(ours, theirs));
    json.push(format!(
        "\"boot\": {{\"minivmm_s\": {:.3}, \"qemu_s\": {:.3}, \"ratio\": {:.3}, \"mips\": {:.1}, \"peak_bytes\": {}}}",
        ours.as_secs_f64(),
        theirs.as_secs_f64(),
        ratio(ours, theirs),
        mips,
        peak.get()
    ));
    Ok(())
}

/// The figure before the word MIPS in what `--stats` prints.
fn mips_of(text: &str) -> Option<f64> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let at = words
        .iter()
        .position(|word| word.trim_matches(|c: char| !c.is_alphanumeric()) == "MIPS")?;
    let near = [at.checked_sub(1), Some(at + 1)];
    near.into_iter()
        .flatten()
        .find_map(|index| words.get(index)?.trim_end_matches(',').parse().ok())
}

/// The time between a loop's start and its end, as its output tells.
fn between(command: &mut Command) -> Timed {
    let mut running = start(command, LIMIT);
    let from = running.wait_for("start\n");
    let to = running.wait_for("end ");
    let outcome = running.finish();
    match (from, to) {
        (Some(from), Some(to)) => Ok(to - from),
        _ => Err(format!(
            "{command:?} did not end: {}{}",
            outcome.console, outcome.errors
        )),
    }
}

fn loops(rounds: usize, json: &mut Vec<String>) -> Result<(), String> {
    println!("loop      native s  minivmm s  QEMU s  minivmm/native  minivmm/QEMU  probe/native  minivmm/probe");
    let mut rows = Vec::new();
    for (name, reps, probe) in PROBES {
        let line = format!("{name} {reps}");
        let mut native = || between(Command::new(LOOPS_NATIVE).args([name, reps]));
        let mut ours = || between(in_minivmm(LOOPS).args(["--cmdline", &line]));
        let mut theirs = || between(in_qemu(LOOPS).args(["-append", &line]));
        let times = alternate(rounds, &mut [&mut native, &mut ours, &mut theirs])?;
        let [native, ours, theirs] = [0, 1, 2].map(|subject| median(&times[subject]));
        println!(
            "{name:<8}  {:>8.3}  {:>9.3}  {:>6.3}  {:>14.1}  {:>12.2}  {probe:>12.1}  {:>13.2}",
            native.as_secs_f64(),
            ours.as_secs_f64(),
            theirs.as_secs_f64(),
            ratio(ours, native),
            ratio(ours, theirs),
            ratio(ours, native) / probe
        );
        rows.push(format!(
            "\"{name}\": {{\"native_s\": {:.4}, \"minivmm_s\": {:.4}, \"qemu_s\": {:.4}}}",
            native.as_secs_f64(),
            ours.as_secs_f64(),
            theirs.as_secs_f64()
        ));
    }
    json.push(format!("\"loops\": {{{}}}", rows.join(", ")));
    Ok(())
}
