//! Instructions of the CPU that a test uses. Those that may fault hand the fault back.

use crate::exception::Fault;
use core::arch::asm;
use x86::cpuid::{Feature, Register};

/// Runs one instruction: its fault, or nothing. The operands are those of `asm!`; R8 is taken, and memory is too.
#[macro_export]
macro_rules! attempt {
    ($instruction:expr $(, $($operand:tt)*)?) => {{
        let fault: u64;
        // The operands are the caller's, as it means them.
        #[allow(clippy::macro_metavars_in_unsafe)]
        // SAFETY: the guest owns the machine; the fixup table leads a fault to the label behind the instruction.
        unsafe {
            core::arch::asm!(
                "xor r8d, r8d",
                "2:",
                $instruction,
                "3:",
                ".pushsection .fixups, \"a\"",
                ".quad 2b, 3b",
                ".popsection",
                $($($operand)*,)?
                out("r8") fault,
            );
        }
        $crate::exception::Fault::decode(fault)
    }};
}

/// CPUID.
pub fn cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    let r = core::arch::x86_64::__cpuid_count(leaf, subleaf);
    [r.eax, r.ebx, r.ecx, r.edx]
}

/// Whether CPUID shows a feature; leaves above the highest show none.
pub fn has(feature: Feature) -> bool {
    let place = feature.place();
    leaf(place.leaf, place.subleaf)[match place.register {
        Register::Eax => 0,
        Register::Ebx => 1,
        Register::Ecx => 2,
        Register::Edx => 3,
    }] >> place.bit
        & 1
        != 0
}

/// A leaf of CPUID, zeros above the highest one of its range. SDM Vol. 2A CPUID: beyond it, Intel parts answer with the
/// highest basic leaf.
pub fn leaf(leaf: u32, subleaf: u32) -> [u32; 4] {
    if leaf > cpuid(leaf & 0x8000_0000, 0)[0] {
        return [0; 4];
    }
    cpuid(leaf, subleaf)
}

/// DisplayFamily_DisplayModel of CPUID.1:EAX: the family and the model with their extensions.
pub fn family_model() -> (u32, u32) {
    let eax = cpuid(1, 0)[0];
    let (family, model) = (eax >> 8 & 15, eax >> 4 & 15);
    (
        if family == 15 {
            family + (eax >> 20 & 0xFF)
        } else {
            family
        },
        if family == 6 || family == 15 {
            model | eax >> 12 & 0xF0
        } else {
            model
        },
    )
}

/// RDMSR.
///
/// # Errors
/// The fault, which is #GP(0) if the CPU is as it should be.
pub fn rdmsr(msr: u32) -> Result<u64, Fault> {
    let (low, high): (u32, u32);
    match attempt!("rdmsr", in("ecx") msr, out("eax") low, out("edx") high) {
        None => Ok(u64::from(high) << 32 | u64::from(low)),
        Some(fault) => Err(fault),
    }
}

/// WRMSR.
///
/// # Errors
/// The fault, which is #GP(0) if the CPU is as it should be.
pub fn wrmsr(msr: u32, value: u64) -> Result<(), Fault> {
    match attempt!("wrmsr", in("ecx") msr, in("eax") value as u32, in("edx") (value >> 32) as u32) {
        None => Ok(()),
        Some(fault) => Err(fault),
    }
}

/// RDMSR of a register that has to be there.
#[track_caller]
pub fn read(msr: u32) -> u64 {
    match rdmsr(msr) {
        Ok(value) => value,
        Err(fault) => panic!("RDMSR {msr:X}H: {fault}"),
    }
}

/// WRMSR of a value that has to be accepted.
#[track_caller]
pub fn write(msr: u32, value: impl Into<u64>) {
    let value = value.into();
    if let Err(fault) = wrmsr(msr, value) {
        panic!("WRMSR {msr:X}H of {value:X}H: {fault}");
    }
}

/// Neither RDMSR nor WRMSR knows the register.
#[track_caller]
pub fn no_msr(msr: u32) {
    assert_eq!(rdmsr(msr), Err(Fault::GP0), "RDMSR {msr:X}H");
    assert_eq!(wrmsr(msr, 0), Err(Fault::GP0), "WRMSR {msr:X}H");
}

/// WRMSR of this value is #GP(0), and the register stays as it was.
#[track_caller]
pub fn refuses(msr: u32, value: u64) {
    let before = read(msr);
    assert_eq!(wrmsr(msr, value), Err(Fault::GP0), "WRMSR {msr:X}H of {value:X}H");
    assert_eq!(read(msr), before, "MSR {msr:X}H after a refused {value:X}H");
}

macro_rules! control {
    ($($read:ident $write:ident $register:literal;)*) => {$(
        #[doc = concat!("Reads ", $register, ".")]
        pub fn $read() -> u64 {
            let value;
            // SAFETY: reading has no effect (DR7.GD aside, which is what a test is about).
            unsafe { asm!(concat!("mov {}, ", $register), out(reg) value) };
            value
        }
        #[doc = concat!("Writes ", $register, "; the fault, if any.")]
        pub fn $write(value: u64) -> Option<Fault> {
            attempt!(concat!("mov ", $register, ", {}"), in(reg) value)
        }
    )*};
}

macro_rules! debug_registers {
    ($($n:literal $register:literal;)*) => {
        /// Reads DR0 to DR7.
        ///
        /// # Errors
        /// Its fault.
        pub fn dr(n: usize) -> Result<u64, Fault> {
            let value: u64;
            let fault = match n {
                $($n => attempt!(concat!("mov {}, ", $register), out(reg) value),)*
                _ => panic!("there is no DR{n}"),
            };
            fault.map_or(Ok(value), Err)
        }

        /// Writes DR0 to DR7.
        ///
        /// # Errors
        /// Its fault.
        pub fn set_dr(n: usize, value: u64) -> Result<(), Fault> {
            let fault = match n {
                $($n => attempt!(concat!("mov ", $register, ", {}"), in(reg) value),)*
                _ => panic!("there is no DR{n}"),
            };
            fault.map_or(Ok(()), Err)
        }
    };
}

control! {
    cr0 set_cr0 "cr0";
    cr2 set_cr2 "cr2";
    cr3 set_cr3 "cr3";
    cr4 set_cr4 "cr4";
    cr8 set_cr8 "cr8";
}
debug_registers! {
    0 "dr0";
    1 "dr1";
    2 "dr2";
    3 "dr3";
    4 "dr4";
    5 "dr5";
    6 "dr6";
    7 "dr7";
}

/// IN of a byte.
pub fn inb(port: u16) -> u8 {
    let value;
    // SAFETY: the guest owns its ports.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack)) };
    value
}

/// OUT of a byte.
pub fn outb(port: u16, value: u8) {
    // SAFETY: the guest owns its ports.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack)) };
}

/// RFLAGS.
pub fn flags() -> u64 {
    let value;
    // SAFETY: PUSHF only reads.
    unsafe { asm!("pushfq", "pop {}", out(reg) value) };
    value
}

/// Sets IF.
pub fn enable_interrupts() {
    // SAFETY: handlers are in place from the first instruction of Rust.
    unsafe { asm!("sti") };
}

/// Clears IF.
pub fn disable_interrupts() {
    // SAFETY: it delays interrupts only.
    unsafe { asm!("cli") };
}

/// Waits for an interrupt, with IF set for just that time.
pub fn halt() {
    // SAFETY: STI's shadow covers HLT, so that no interrupt is missed in between.
    unsafe { asm!("sti", "hlt", "cli") };
}

/// PAUSE.
pub fn pause() {
    core::hint::spin_loop();
}

/// RDTSC.
pub fn tsc() -> u64 {
    // SAFETY: CR4.TSD is clear.
    unsafe { core::arch::x86_64::_rdtsc() }
}
