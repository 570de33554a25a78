//! How fast this host's KVM is, and what it does not say of itself.

use std::io;
use std::time::{Duration, Instant};

use kvm_bindings::{KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_FILTER, kvm_enable_cap};
use kvm_ioctls::{Kvm, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuFd, VmFd};
use x86::msr::IA32_TSC_DEADLINE;

use crate::guest_debug;
use crate::sys::{self, Reason};
use machine::memory::Memory;

/// What no interpreter in a kernel reaches, and every processor.
pub const NATIVE_MIPS: f64 = 100.0;
/// Where the loop is.
const CODE: u64 = 0x1000;
/// mov ecx, imm32 (of 16-bit code); again: dec ecx; jnz again; hlt
const LOOP: [u8; 11] = [0x66, 0xb9, 0, 0, 0, 0, 0x66, 0x49, 0x75, 0xfc, 0xf4];
/// Iterations of a first look, and of the measurement if that looks fast.
const FIRST: u32 = 10_000;
const THEN: u32 = 4_000_000;

/// WRMSR of this, which no KVM serves once it is filtered.
const MSR: u32 = 0x560;
/// mov ecx, [`MSR`]; mov si, imm16; again: wrmsr; dec si; jnz again; hlt
const EXITS: [u8; 15] = [
    0x66, 0xb9, 0x60, 0x05, 0, 0, 0xbe, 0, 0, 0x0f, 0x30, 0x4e, 0x75, 0xfb, 0xf4,
];

/// What an exit costs that is answered at once: so many WRMSRs of a filtered register, with the two instructions of a loop
/// around each.
///
/// # Errors
/// KVM refuses or fails.
pub fn exits(kvm: &Kvm, count: u16) -> io::Result<Duration> {
    let memory = Memory::new(2 << 20).map_err(io::Error::other)?;
    let vm = filtered(kvm, MSR)?;
    sys::lend(&vm, &memory)?;
    let mut vcpu = vm.create_vcpu(0)?;
    let mut code = EXITS;
    code[7..9].copy_from_slice(&count.to_le_bytes());
    memory.write(CODE, &code).map_err(io::Error::other)?;
    begin(&vcpu)?;
    let started = Instant::now();
    loop {
        match sys::run_unkicked(&mut vcpu) {
            Reason::WriteMsr(..) => sys::set_msr(&mut vcpu, Some(0)),
            Reason::Halt => return Ok(started.elapsed()),
            reason => return Err(io::Error::other(format!("a loop ended with {reason:?}"))),
        }
    }
}

/// mov ecx, IA32_TSC_DEADLINE; or eax, -1; wrmsr; hlt (of 32-bit code)
const DEADLINE: [u8; 11] = [0xb9, 0xe0, 0x06, 0, 0, 0x83, 0xc8, 0xff, 0x0f, 0x30, 0xf4];

/// Whether a guest's write of IA32_TSC_DEADLINE comes out of KVM once the register is filtered. Where VMX has a timer of its own,
/// KVM (up to 6.1 at least) serves the write before it looks at the filter, and forgets it where the APIC is not its own.
///
/// # Errors
/// KVM refuses or fails.
pub fn deadline_exits(kvm: &Kvm) -> io::Result<bool> {
    let memory = Memory::new(2 << 20).map_err(io::Error::other)?;
    let vm = filtered(kvm, IA32_TSC_DEADLINE)?;
    sys::lend(&vm, &memory)?;
    let mut vcpu = vm.create_vcpu(0)?;
    memory.write(CODE, &DEADLINE).map_err(io::Error::other)?;
    guest_debug::begin(&vcpu, CODE)?;
    match sys::run_unkicked(&mut vcpu) {
        Reason::WriteMsr(..) => Ok(true),
        Reason::Halt => Ok(false),
        reason => Err(io::Error::other(format!("WRMSR ended with {reason:?}"))),
    }
}

/// A machine in which writes of a register come out of KVM.
fn filtered(kvm: &Kvm, msr: u32) -> io::Result<VmFd> {
    let vm = kvm.create_vm()?;
    vm.enable_cap(&kvm_enable_cap {
        cap: KVM_CAP_X86_USER_SPACE_MSR,
        args: [KVM_MSR_EXIT_REASON_FILTER.into(), 0, 0, 0],
        ..Default::default()
    })?;
    let range = MsrFilterRange {
        flags: MsrFilterRangeFlags::WRITE,
        base: msr,
        msr_count: 1,
        bitmap: &[0],
    };
    vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &[range])?;
    // VMX has to have them for real mode.
    vm.set_tss_address(0xfffb_d000)?;
    Ok(vm)
}

/// Has a CPU begin at [`CODE`].
fn begin(vcpu: &VcpuFd) -> io::Result<()> {
    let mut sregs = vcpu.get_sregs()?;
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.get_regs()?;
    (regs.rip, regs.rflags) = (CODE, 2);
    Ok(vcpu.set_regs(&regs)?)
}

/// Million instructions per second of a loop of two instructions.
///
/// # Errors
/// KVM refuses or fails.
pub fn mips(kvm: &Kvm) -> io::Result<f64> {
    let memory = Memory::new(2 << 20).map_err(io::Error::other)?;
    let vm = kvm.create_vm()?;
    // VMX has to have them for real mode.
    vm.set_tss_address(0xfffb_d000)?;
    sys::lend(&vm, &memory)?;
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
        begin(&vcpu)?;
        let started = Instant::now();
        match sys::run_unkicked(&mut vcpu) {
            Reason::Halt => {}
            reason => return Err(io::Error::other(format!("a loop ended with {reason:?}"))),
        }
        let mips = f64::from(iterations) * 2.0 / started.elapsed().as_secs_f64() / 1e6;
        fastest = fastest.max(mips);
    }
    Ok(fastest)
}
