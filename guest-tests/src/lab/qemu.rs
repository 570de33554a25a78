//! The lab with kvm-amd: QEMU's software CPU.

use std::path::Path;
use std::process::Command;

use crate::{linux, program};

/// The command that boots the host, with its serial port on standard output.
pub fn command(initrd: &Path) -> Command {
    let mut command = program("qemu-system-x86_64");
    // One CPU. With two on threads of their own, QEMU 7.2 now and then goes on with its translation of an INT3 that Linux has
    // patched away on the other CPU, and KVM has the scheduler patched whenever a first machine comes or a last one goes. With two on
    // one thread it now and then delivers an interrupt that VMRUN injects a second time, at its handler's first instruction and with
    // interrupts off: KVM's trace has one injection and an EOI too many. A counter that Linux trusts.
    let options = "-accel tcg,thread=single -cpu max,+svm,+invtsc -m 1536 -smp 1 \
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
