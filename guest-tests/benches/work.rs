//! Ordinary programs in the guest, against QEMU's software CPU: a C compiler, Python, SQLite, xz, gzip, OpenSSL, forks, a pipe, page
//! faults, and floating point.
//!
//! `cargo xtask bench --only work [--rounds N]`; the figures go to target/bench-work.json too. Times are of CPUs, user and system
//! together, between the lines that the guest prints before and behind each program, since a machine that others use makes seconds
//! lie. The model is a Skylake server and QEMU's CPU is `max`: both have AVX2 and RDRAND.

use std::fs;
use std::process::{Command, ExitCode};
use std::time::Duration;

use guest_tests::measure::{middle, rounds};
use guest_tests::{INIT_MARKER, in_minivmm, in_qemu, linux, start, target};

const LIMIT: Duration = Duration::from_secs(1800);
const CMDLINE: &str = "console=ttyS0 panic=-1 quiet minivmm.script=workloads";
const MEMORY: &str = "1024";
/// As guest-tests/linux/work/workloads has them, with `/init` before.
const ROWS: [&str; 13] = [
    "boot", "gcc", "python3", "sqlite3", "xz", "gzip", "sha256", "rsa", "forks", "pipe", "mmap", "sse2", "avx2",
];

fn main() -> ExitCode {
    match rounds(5).and_then(measure) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("bench: {message}");
            ExitCode::FAILURE
        }
    }
}

/// The seconds of CPUs that each row takes.
fn seconds(command: &mut Command) -> Result<Vec<f64>, String> {
    let mut running = start(command, LIMIT);
    let mut times = Vec::new();
    for row in ROWS {
        let (before, ended) = if row == "boot" {
            (0.0, INIT_MARKER.to_string())
        } else {
            let begins = format!("work: {row} begins");
            running
                .wait_for(&begins)
                .ok_or_else(|| format!("no line \"{begins}\""))?;
            (running.cpu_seconds(), format!("work: {row} ended with status 0"))
        };
        if running.wait_for(&ended).is_none() {
            let outcome = running.finish();
            return Err(format!("no line \"{ended}\":\n{}{}", outcome.console, outcome.errors));
        }
        times.push(running.cpu_seconds() - before);
    }
    running.kill();
    Ok(times)
}

fn measure(rounds: usize) -> Result<(), String> {
    let initrd = target().join("guest/initramfs-work.cpio");
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        eprintln!("round {round} of {rounds}");
        let mut command = in_minivmm(&linux().kernel);
        command.args(["-m", &format!("{MEMORY}M"), "--cpu-model", "skylake-server", "--initrd"]);
        ours.push(seconds(command.arg(&initrd).args(["--cmdline", CMDLINE]))?);
        let mut command = in_qemu(&linux().kernel);
        command.args(["-m", MEMORY, "-initrd"]);
        theirs.push(seconds(command.arg(&initrd).args(["-append", CMDLINE]))?);
    }
    println!("ordinary programs, medians of {rounds}, seconds of CPUs");
    println!("  {:<8}  {:>8}  {:>8}  {:>5}", "", "minivmm", "QEMU TCG", "ratio");
    let mut json = Vec::new();
    let mut ratios = Vec::new();
    for (n, row) in ROWS.iter().enumerate() {
        let [ours, theirs] = [&ours, &theirs].map(|times| middle(times.iter().map(|round| round[n]).collect()));
        println!("  {row:<8}  {ours:>8.2}  {theirs:>8.2}  {:>5.2}", ours / theirs);
        json.push(format!(
            "\"{row}\": {{\"minivmm_s\": {ours:.2}, \"qemu_s\": {theirs:.2}}}"
        ));
        if *row != "boot" {
            ratios.push(ours / theirs);
        }
    }
    let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
    let worst = ratios.iter().copied().fold(0.0, f64::max);
    println!("  programs: geometric mean {mean:.3}, worst {worst:.2}");
    let json = format!(
        "{{\"rounds\": {rounds}, \"mean\": {mean:.3}, \"worst\": {worst:.3}, {}}}\n",
        json.join(", ")
    );
    let path = target().join("bench-work.json");
    fs::write(&path, json).map_err(|error| format!("cannot write {}: {error}", path.display()))
}
