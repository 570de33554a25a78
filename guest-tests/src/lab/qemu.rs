//! The lab with kvm-amd: QEMU's software CPU.

use std::path::Path;
use std::process::Command;

use crate::{linux, program};

/// The command that boots the host, with its serial port on standard output.
pub fn command(initrd: &Path) -> Command {
    let mut command = program("qemu-system-x86_64");
    // One thread: with one a CPU, QEMU 7.2 now and then goes on with its translation of an INT3 that Linux has patched away on the
    // other CPU, and KVM has the scheduler patched whenever a first machine comes or a last one goes. A counter that Linux
    // trusts: it is the host's for all CPUs.
    let options = "-accel tcg,thread=single -cpu max,+svm,+invtsc -m 1536 -smp 2 \
                   -display none -nodefaults -no-reboot -net none -serial stdio";
    command
        .args(options.split_whitespace())
        .arg("-kernel")
        .arg(&linux().kernel)
        .arg("-initrd")
        .arg(initrd)
        .args(["-append", "console=ttyS0 panic=-1 quiet tsc=reliable"]);
    command
}
