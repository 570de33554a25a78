//! `cargo xtask matrix`: our guests on all models and engines, against the committed table.

use crate::demo;
use crate::lab;
use crate::packages;
use crate::progress::Stage;
use crate::tree;
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::{fs, io};

/// Every model, one that shows transactions, and two with 32-bit layouts that ours do not have: the Core Duo's samples, and the last
/// branches of a later Pentium 4.
const MODELS: [&str; 4] = [
    "all",
    "skylake-server,+rtm",
    "core2,-lm,-dtes64",
    "guest-tests/guests/prescott.toml",
];

/// A guest of ours that executes more hangs.
const INSTRUCTIONS: &str = "2000000000";

/// The engines that are hosts in a lab.
const LABS: [&str; 2] = ["kvm-amd", "kvm-intel"];

#[derive(clap::Args)]
pub struct MatrixOptions {
    /// What executes the guests: soft, kvm (this host's), kvm-amd or kvm-intel (a host in a lab) [default: soft]
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = ["soft", "kvm", "kvm-amd", "kvm-intel"])]
    engine: Vec<String>,
    /// On the software engine and on both hosts in labs
    #[arg(long, conflicts_with = "engine")]
    labs: bool,
    /// Install nothing: list what is missing and stop
    #[arg(long)]
    no_install: bool,
    /// More options of `minivmm matrix`, after `--`, for the engines that are no labs
    #[arg(last = true, value_name = "OPTION")]
    options: Vec<String>,
}

/// The engines that run here, and those in labs.
fn engines(options: &MatrixOptions) -> (Vec<&str>, Vec<&'static str>) {
    let wanted: Vec<&str> = match (options.labs, options.engine.is_empty()) {
        (true, _) => ["soft"].into_iter().chain(LABS).collect(),
        (false, true) => vec!["soft"],
        (false, false) => options.engine.iter().map(String::as_str).collect(),
    };
    let here = wanted.iter().copied().filter(|name| !LABS.contains(name)).collect();
    (here, LABS.into_iter().filter(|name| wanted.contains(name)).collect())
}

/// `cargo xtask matrix`. With `UPDATE=1` the expected table is written.
pub fn run(options: &MatrixOptions) -> Result<ExitCode> {
    let (here, labs) = engines(options);
    let stage = Stage::start("packages");
    let needs = [packages::GCC, packages::BINUTILS];
    packages::ensure_installed(&stage, &needs, !options.no_install)?;
    stage.end("ok");
    let program = demo::build_release()?;
    let stage = Stage::start("guests");
    stage.must(&mut lab::cargo(&["build", "--release", "-p", "guest-tests"]))?;
    for name in &labs {
        let emulator = match *name {
            "kvm-intel" => lab::Emulator::Bochs,
            _ => lab::Emulator::Qemu,
        };
        lab::prepare(&stage, emulator, !options.no_install)?;
    }
    stage.end("ok");
    if labs.is_empty() {
        let mut command = matrix(&program, &here);
        outputs(&mut command);
        command.args(&options.options);
        return status(&mut command);
    }
    // Each engine leaves its reports, and the table is made of all of them.
    let reports = tree::target().join("matrix");
    match fs::remove_dir_all(&reports) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).context("cannot empty target/matrix");
        }
        _ => {}
    }
    fs::create_dir_all(&reports).context("cannot make target/matrix")?;
    if !here.is_empty() {
        let mut command = matrix(&program, &here);
        command.arg("--junit").arg(reports.join("here.xml"));
        command.args(&options.options).stdout(Stdio::null());
        // 1: some cell fails, which the comparison below looks at.
        let code = command.status().context("cannot run minivmm")?.code();
        ensure!(matches!(code, Some(0 | 1)), "minivmm matrix ended with status {code:?}");
    }
    for name in labs {
        let mut lab = lab::cargo(&[
            "run",
            "--release",
            "-p",
            "guest-tests",
            "--bin",
            "lab-matrix",
            "--",
            name,
        ]);
        let status = lab.arg(&reports).status().context("cannot run cargo")?;
        ensure!(
            status.success(),
            "the lab with {name} did not come to its end: see above"
        );
    }
    let mut command = Command::new(&program);
    command.args(["matrix", "merge"]);
    let mut files: Vec<_> = fs::read_dir(&reports)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    files.sort();
    command.args(files);
    outputs(&mut command);
    status(&mut command)
}

/// The run of all guests on engines that are here.
fn matrix(program: &Path, engines: &[&str]) -> Command {
    let mut command = Command::new(program);
    command
        .current_dir(tree::root())
        .arg("matrix")
        .arg("--guests")
        .arg(tree::target().join("bare/images"));
    command.arg("--model").args(MODELS);
    command.args(["--max-instructions", INSTRUCTIONS]);
    for engine in engines {
        command.args(["--engine", engine]);
    }
    command
}

/// Where the table is compared and the reports go.
fn outputs(command: &mut Command) {
    command
        .arg("--expected")
        .arg(tree::root().join("resources/matrix-expected.txt"));
    if std::env::var_os("UPDATE").is_some() {
        command.arg("--accept");
    }
    for (option, name) in [("--junit", "matrix.xml"), ("--html", "matrix.html")] {
        command.arg(option).arg(tree::target().join(name));
    }
}

fn status(command: &mut Command) -> Result<ExitCode> {
    let status = command.status().context("cannot run minivmm")?;
    Ok(ExitCode::from(u8::try_from(status.code().unwrap_or(1)).unwrap_or(1)))
}

#[cfg(test)]
#[path = "matrix_test.rs"]
mod tests;
