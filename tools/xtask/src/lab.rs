//! `cargo xtask lab`: minivmm on a real kvm-amd, in Debian's kernel on QEMU's software CPU, or on a real kvm-intel, on minivmm's own
//! software CPU or on Bochs.

use crate::packages::{self, BINUTILS, BOCHS_NEEDS, GCC, Need, QEMU};
use crate::progress::Stage;
use crate::{guest, tree};
use anyhow::{Result, ensure};
use std::process::{Command, ExitCode};
use std::{fs, path::Path};

#[derive(clap::Args)]
pub struct LabOptions {
    /// On kvm-intel, inside Bochs, instead of kvm-amd inside QEMU
    #[arg(long, conflicts_with = "own")]
    intel: bool,
    /// On kvm-intel, inside minivmm, whose processor has counters, branch records, PEBS and Intel PT under it
    #[arg(long)]
    own: bool,
    /// With --own: on every model of the lab, not on icelake-server alone
    #[arg(long, requires = "own")]
    full: bool,
    /// Install nothing: list what is missing and stop
    #[arg(long)]
    no_install: bool,
    /// Guest tests by name, as tsc or pt_packets, with what they say [default: all that the lab's test runs]
    #[arg(value_name = "TEST")]
    tests: Vec<String>,
}

/// Where the labs' tests write how many guest tests came out how, a file a host.
const TALLIES: &str = "lab";

/// The emulator that a lab runs in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Emulator {
    /// kvm-amd.
    Qemu,
    /// kvm-intel.
    Bochs,
    /// kvm-intel.
    Own,
}

/// What a lab needs from the system.
fn needs(emulator: Emulator) -> Vec<Need> {
    let emulator = match emulator {
        Emulator::Qemu => &[QEMU][..],
        Emulator::Bochs => &BOCHS_NEEDS[..],
        Emulator::Own => &[],
    };
    [GCC, BINUTILS].iter().chain(emulator).copied().collect()
}

/// Makes what a lab runs: packages, the guests' files, and minivmm.
pub fn prepare(stage: &Stage, emulator: Emulator, install: bool) -> Result<()> {
    packages::ensure_installed(stage, &needs(emulator), install)?;
    guest::prepare(stage)?;
    stage.say("building minivmm");
    stage.must(&mut cargo(&["build", "--release", "-p", "minivmm"]))
}

/// cargo, with the minivmm that the labs run.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .current_dir(tree::root())
        .args(arguments)
        .env("MINIVMM", tree::target().join("release/minivmm"));
    command
}

/// `cargo xtask lab`: makes what the lab needs and runs its tests with their output shown.
pub fn run(options: &LabOptions) -> Result<ExitCode> {
    let sources = tree::root().join("guest-tests/guests");
    for test in &options.tests {
        let known = guest_tests(&sources)?;
        ensure!(
            known.contains(test),
            "no guest test {test}: there are {}",
            known.join(" ")
        );
    }
    let stage = Stage::start("lab");
    let emulator = match (options.own, options.intel) {
        (true, _) => Emulator::Own,
        (_, true) => Emulator::Bochs,
        _ => Emulator::Qemu,
    };
    prepare(&stage, emulator, !options.no_install)?;
    stage.end("ok");
    let test = match emulator {
        Emulator::Qemu => "lab::",
        Emulator::Bochs => "lab_intel::",
        Emulator::Own => "lab_own::",
    };
    let mut command = cargo(&["test", "-p", "guest-tests", "--test", "all", "--", test, "--nocapture"]);
    command.env("MINIVMM_LAB", options.tests.join(","));
    // Of the own lab the default form has one model, and all that runs on it.
    let form = if options.own && !options.full {
        "MINIVMM_LAB_WHOLE"
    } else {
        "MINIVMM_FULL"
    };
    let status = command.env(form, "1").status()?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The guest tests, by their sources: those with a table of tests.
fn guest_tests(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let rust = path.extension().is_some_and(|extension| extension == "rs");
        if rust && fs::read_to_string(&path)?.contains("rt::tests!") {
            names.push(path.file_stem().unwrap_or_default().to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Forgets what the labs came to in runs before.
pub fn forget_tallies() -> Result<()> {
    match fs::remove_dir_all(tree::target().join(TALLIES)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// What the labs came to, a line a host.
pub fn tallies() -> Vec<String> {
    let Ok(entries) = fs::read_dir(tree::target().join(TALLIES)) else {
        return Vec::new();
    };
    let mut lines: Vec<String> = entries
        .filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok())
        .map(|text| text.trim().to_string())
        .collect();
    lines.sort();
    lines
}

#[cfg(test)]
#[path = "lab_test.rs"]
mod tests;
