//! Ordinary programs in the guest, against QEMU's software CPU: a C compiler, Python, SQLite, xz, gzip, OpenSSL, forks, a pipe, page
//! faults, and floating point.
//!
//! `cargo xtask bench --only work [--rounds N]`; the figures go to target/bench-work.json too. Times are of CPUs, user and system
//! together, between the lines that the guest prints before and behind each program, since a machine that others use makes seconds
//! lie. The model is a Skylake server and QEMU's CPU is `max`: both have AVX2 and RDRAND. The model's AVX-512 is compared with QEMU's
//! AVX2, in the same loop, and its vectors with x86-64-v1 alone (`--vector portable`) with QEMU's, which are functions.

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

/// The row that QEMU has not got.
const AVX512: &str = "avx512";
/// What is compared with what of QEMU's, beside the rows: the name, the row with `portable` or without, and QEMU's row.
const VECTORS: [(&str, bool, &str, &str); 4] = [
    ("avx512 over avx2", false, AVX512, "avx2"),
    ("sse2 portable", true, "sse2", "sse2"),
    ("avx2 portable", true, "avx2", "avx2"),
    ("avx512 portable over avx2", true, AVX512, "avx2"),
];

/// The seconds of CPUs that each of these rows takes.
fn seconds(command: &mut Command, rows: &[&str]) -> Result<Vec<f64>, String> {
    let mut running = start(command, LIMIT);
    let mut times = Vec::new();
    for &row in rows {
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
    let all = [&ROWS[..], &[AVX512]].concat();
    let (mut ours, mut tables, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=rounds {
        eprintln!("round {round} of {rounds}");
        for (vectors, times) in [("host", &mut ours), ("portable", &mut tables)] {
            let mut command = in_minivmm(&linux().kernel);
            command.args(["-m", &format!("{MEMORY}M"), "--cpu-model", "skylake-server"]);
            command.args(["--vector", vectors, "--initrd"]).arg(&initrd);
            times.push(seconds(command.args(["--cmdline", CMDLINE]), &all)?);
        }
        let mut command = in_qemu(&linux().kernel);
        command.args(["-m", MEMORY, "-initrd"]);
        theirs.push(seconds(command.arg(&initrd).args(["-append", CMDLINE]), &ROWS)?);
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
    let of = |times: &[Vec<f64>], row: &str| {
        let column = all.iter().position(|known| *known == row).unwrap_or_default();
        middle(times.iter().map(|round| round[column]).collect())
    };
    for (name, portable, row, over) in VECTORS {
        let ours = of(if portable { &tables } else { &ours }, row);
        let theirs = of(&theirs, over);
        println!("  {name:<26}  {ours:>8.2}  {theirs:>8.2}  {:>5.2}", ours / theirs);
        json.push(format!(
            "\"{name}\": {{\"minivmm_s\": {ours:.2}, \"qemu_s\": {theirs:.2}}}"
        ));
    }
    let json = format!(
        "{{\"rounds\": {rounds}, \"mean\": {mean:.3}, \"worst\": {worst:.3}, {}}}\n",
        json.join(", ")
    );
    let path = target().join("bench-work.json");
    fs::write(&path, json).map_err(|error| format!("cannot write {}: {error}", path.display()))
}
