//! The lab with kvm-amd: QEMU's software CPU.

use std::path::Path;
use std::process::Command;

use crate::{linux, program};

/// The command that boots the host, with its serial port on standard output.
pub fn command(initrd: &Path) -> Command {
    let mut command = program("qemu-system-x86_64");
    let options = "-accel tcg,thread=multi -cpu max,+svm -m 1024 -smp 2 \
                   -display none -nodefaults -no-reboot -net none -serial stdio";
    command
        .args(options.split_whitespace())
        .arg("-kernel")
        .arg(&linux().kernel)
        .arg("-initrd")
        .arg(initrd)
        .args(["-append", "console=ttyS0 panic=-1 quiet"]);
    command
}
