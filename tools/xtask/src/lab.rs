//! `cargo xtask lab`: minivmm on a real kvm-amd, in Debian's kernel on QEMU's software CPU.

use crate::packages::{self, BINUTILS, GCC, QEMU};
use crate::progress::Stage;
use crate::{guest, tree};
use anyhow::Result;
use std::process::{Command, ExitCode};

/// `cargo xtask lab`: makes what the lab needs and runs its tests with their output shown.
pub fn run() -> Result<ExitCode> {
    let stage = Stage::start("lab");
    packages::ensure_installed(&stage, &[GCC, BINUTILS, QEMU], true)?;
    guest::prepare(&stage)?;
    stage.say("building minivmm");
    let cargo = |arguments: &[&str]| {
        let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command
            .current_dir(tree::root())
            .args(arguments)
            .env("MINIVMM", tree::target().join("release/minivmm"));
        command
    };
    stage.must(&mut cargo(&["build", "--release", "-p", "minivmm"]))?;
    stage.end("ok");
    let status = cargo(&["test", "-p", "guest-tests", "--test", "lab", "--", "--nocapture"]).status()?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
