//! `cargo xtask matrix`: our guests on all models and engines, against the committed table.

use crate::demo;
use crate::packages;
use crate::progress::Stage;
use crate::tree;
use anyhow::{Context, Result};
use std::process::{Command, ExitCode};

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

#[derive(clap::Args)]
pub struct Options {
    /// What executes the guests [default: soft and kvm]
    #[arg(long, value_name = "NAME")]
    engine: Vec<String>,
    /// Install nothing: list what is missing and stop
    #[arg(long)]
    no_install: bool,
    /// More options of `minivmm matrix`, after `--`
    #[arg(last = true, value_name = "OPTION")]
    options: Vec<String>,
}

/// `cargo xtask matrix`. With `UPDATE=1` the expected table is written.
pub fn run(options: &Options) -> Result<ExitCode> {
    let stage = Stage::start("packages");
    let needs = [packages::GCC, packages::BINUTILS];
    packages::ensure_installed(&stage, &needs, !options.no_install)?;
    stage.end("ok");
    let program = demo::build_release()?;
    let stage = Stage::start("guests");
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.current_dir(tree::root());
    stage.must(build.args(["build", "--release", "-p", "guest-tests"]))?;
    stage.end("ok");
    let mut command = Command::new(&program);
    command
        .current_dir(tree::root())
        .arg("matrix")
        .arg("--guests")
        .arg(tree::target().join("bare/images"));
    command.arg("--model").args(MODELS);
    command.args(["--max-instructions", INSTRUCTIONS]);
    let both = ["soft", "kvm"].map(String::from);
    let engines = if options.engine.is_empty() {
        &both[..]
    } else {
        &options.engine
    };
    for engine in engines {
        command.args(["--engine", engine]);
    }
    command
        .arg("--expected")
        .arg(tree::root().join("resources/matrix-expected.txt"));
    if std::env::var_os("UPDATE").is_some() {
        command.arg("--accept");
    }
    for (option, name) in [("--junit", "matrix.xml"), ("--html", "matrix.html")] {
        command.arg(option).arg(tree::target().join(name));
    }
    command.args(&options.options);
    let status = command.status().context("cannot run minivmm")?;
    Ok(ExitCode::from(u8::try_from(status.code().unwrap_or(1)).unwrap_or(1)))
}
