//! The lab with kvm-intel on minivmm's own software CPU.

use std::path::Path;
use std::process::Command;

use crate::{linux, minivmm};

/// The model: with XSAVE, which minivmm wants of a KVM.
const MODEL: &str = "haswell,+vmx";

/// The command that boots the host, with its serial port on standard output.
pub fn command(initrd: &Path) -> Command {
    let mut command = Command::new(minivmm());
    command
        .args(["--engine", "soft", "--cpu-model", MODEL, "-m", "1G"])
        .arg("--kernel")
        .arg(&linux().kernel)
        .arg("--initrd")
        .arg(initrd)
        .args(["--cmdline", "console=ttyS0 panic=-1 quiet tsc=reliable"]);
    command
}
