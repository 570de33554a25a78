//! The lab with kvm-intel on minivmm's own software CPU.

use std::path::Path;
use std::process::Command;

use crate::{linux, minivmm};

/// The command that boots the host, with its serial port on standard output, on a processor of this model.
pub fn command(initrd: &Path, model: &str) -> Command {
    let mut command = Command::new(minivmm());
    command
        .args(["--engine", "soft", "--cpu-model"])
        .arg(model)
        .args(["-m", "1G"])
        .arg("--kernel")
        .arg(&linux().kernel)
        .arg("--initrd")
        .arg(initrd)
        .args(["--cmdline", "console=ttyS0 panic=-1 quiet tsc=reliable"]);
    command
}
