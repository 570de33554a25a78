//! How fast this host's KVM is.

use std::io;
use std::time::Instant;

use kvm_ioctls::Kvm;

use super::room::{self, Reason};
use crate::machine::memory::Memory;

/// What no interpreter in a kernel reaches, and every processor.
pub const NATIVE_MIPS: f64 = 100.0;
/// Where the loop is.
const CODE: u64 = 0x1000;
/// mov ecx, imm32 (of 16-bit code); again: dec ecx; jnz again; hlt
const LOOP: [u8; 11] = [0x66, 0xb9, 0, 0, 0, 0, 0x66, 0x49, 0x75, 0xfc, 0xf4];
/// Iterations of a first look, and of the measurement if that looks fast.
const FIRST: u32 = 10_000;
const THEN: u32 = 4_000_000;

/// Million instructions per second of a loop of two instructions.
///
/// # Errors
/// KVM refuses or fails.
pub fn mips(kvm: &Kvm) -> io::Result<f64> {
    let memory = Memory::new(2 << 20).map_err(io::Error::other)?;
    let vm = kvm.create_vm()?;
    // VMX has to have them for real mode.
    vm.set_tss_address(0xfffb_d000)?;
    room::lend(&vm, &memory)?;
    let mut vcpu = vm.create_vcpu(0)?;
    let mut fastest = 0f64;
    // The first few find caches cold.
    for iterations in [FIRST, FIRST, FIRST, THEN] {
        if iterations == THEN && fastest < NATIVE_MIPS / 10.0 {
            break;
        }
        let mut code = LOOP;
        code[2..6].copy_from_slice(&iterations.to_le_bytes());
        memory.write(CODE, &code).map_err(io::Error::other)?;
        let mut sregs = vcpu.get_sregs()?;
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        vcpu.set_sregs(&sregs)?;
        let mut regs = vcpu.get_regs()?;
        (regs.rip, regs.rflags) = (CODE, 2);
        vcpu.set_regs(&regs)?;
        let started = Instant::now();
        loop {
            match room::run(&mut vcpu) {
                Reason::Halt => break,
                Reason::Kicked => {}
                reason => return Err(io::Error::other(format!("a loop ended with {reason:?}"))),
            }
        }
        let mips = f64::from(iterations) * 2.0 / started.elapsed().as_secs_f64() / 1e6;
        fastest = fastest.max(mips);
    }
    Ok(fastest)
}
