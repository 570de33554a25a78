//! `cargo xtask bench`: what the figures are measured with is `guest-tests/benches/speed.rs`, and for decoders
//! `guest-tests/pt-oracle/benches/decode.rs`, for whole boots `guest-tests/benches/boots.rs`, for ordinary programs
//! `guest-tests/benches/work.rs`, for the debug and trace units `guest-tests/benches/units.rs`, for the trace of a boot
//! `guest-tests/benches/traces.rs`, for going back `guest-tests/benches/reverse.rs`, for KVM `guest-tests/benches/kvm.rs` and, in the lab,
//! `guest-tests/benches/lab.rs`, for the network `guest-tests/benches/net.rs`, for `minivmm run` `guest-tests/benches/run.rs`, for VM
//! exits `guest-tests/benches/vmx.rs`, for questions to sessions and guests `guest-tests/benches/answers.rs`; this prepares and runs them.

use crate::progress::Stage;
use crate::{demo, guest, packages, python, tree};
use anyhow::{Context, Result};
use std::process::{Command, ExitCode, Stdio};

#[derive(clap::Args)]
pub struct BenchOptions {
    /// Runs of each subject; the subjects take turns
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Measure only the boot, the loops, whole boots, ordinary programs, what the units cost, the decoding of traces, the trace of a boot, answers, going back,
    /// what is added to KVM, a boot on KVM in the lab, the network, commands that `minivmm run` runs, or VM exits
    #[arg(long, value_parser = ["boot", "loops", "boots", "work", "units", "decode", "traces", "answers", "debug", "kvm", "lab", "net", "run", "vmx"])]
    only: Option<String>,
    /// Install nothing: list what is missing and stop
    #[arg(long)]
    no_install: bool,
}

/// What runs guests of its own, and which of guest-tests' benches measures it.
const GUESTS: [(&str, &str); 11] = [
    ("boots", "boots"),
    ("work", "work"),
    ("units", "units"),
    ("traces", "traces"),
    ("answers", "answers"),
    ("debug", "reverse"),
    ("kvm", "kvm"),
    ("run", "run"),
    ("lab", "lab"),
    ("net", "net"),
    ("vmx", "vmx"),
];

/// `cargo xtask bench`.
pub fn run(options: &BenchOptions) -> Result<ExitCode> {
    let stage = Stage::start("packages");
    let needs = [
        packages::GCC,
        packages::BINUTILS,
        packages::QEMU,
        packages::PASST,
        packages::DEBOOTSTRAP,
        packages::LIBIPT,
        packages::PYTHON,
    ];
    packages::ensure_installed(&stage, &needs, !options.no_install)?;
    stage.end("ok");
    let decodes = || run_to_end(decode(options).current_dir(tree::root()));
    if options.only.as_deref() == Some("decode") {
        return decodes();
    }
    let stage = Stage::start("guest");
    let mut files = guest::prepare(&stage)?;
    if options.only.as_deref().is_none_or(|only| only == "answers") {
        guest::with_debug(&stage, &mut files)?;
        python::ensure(&stage, &python::DRGN)?;
        python::ensure(&stage, &python::PERFETTO)?;
    }
    if options.only.as_deref().is_none_or(|only| only == "work") {
        guest::with_work(&stage, &files)?;
    }
    if options.only.as_deref().is_none_or(|only| only == "boots") {
        guest::with_kernels(&stage, guest::kernels::Which::All)?;
    }
    stage.end("ok");
    let program = demo::build_release()?;
    let measured = |bench| {
        run_to_end(
            guests(options, bench)
                .env("MINIVMM", &program)
                .current_dir(tree::root()),
        )
    };
    if let Some((_, bench)) = GUESTS.iter().find(|(only, _)| options.only.as_deref() == Some(only)) {
        return measured(bench);
    }
    let speeds = run_to_end(speed(options).env("MINIVMM", &program).current_dir(tree::root()))?;
    if options.only.is_some() || speeds != ExitCode::SUCCESS {
        return Ok(speeds);
    }
    for (_, bench) in GUESTS {
        let ended = measured(bench)?;
        if ended != ExitCode::SUCCESS {
            return Ok(ended);
        }
    }
    decodes()
}

fn run_to_end(command: &mut Command) -> Result<ExitCode> {
    let status = command.stdin(Stdio::null()).status().context("cannot run cargo")?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The command that measures decoders.
fn decode(options: &BenchOptions) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["bench", "--quiet", "-p", "pt-oracle", "--bench", "decode", "--"]);
    command.args(["--rounds", &options.rounds.to_string()]);
    command
}

/// The command that measures the units, the trace of a boot, going back, or KVM.
fn guests(options: &BenchOptions, bench: &str) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["bench", "--quiet", "-p", "guest-tests", "--bench", bench, "--"]);
    command.args(["--rounds", &options.rounds.to_string()]);
    command
}

/// The command that measures.
fn speed(options: &BenchOptions) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["bench", "--quiet", "-p", "guest-tests", "--bench", "speed", "--"]);
    command.args(["--rounds", &options.rounds.to_string()]);
    if let Some(only) = &options.only {
        command.args(["--only", only]);
    }
    command
}

#[cfg(test)]
#[path = "bench_test.rs"]
mod tests;
