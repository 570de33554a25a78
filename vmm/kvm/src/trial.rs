//! What a KVM keeps of what it is asked for, tried with a guest that looks: the offset of the time-stamp counter, and CPUID.
//!
//! Every call can succeed on a KVM that then shows the guest something else (one that interprets, or runs on a hypervisor that
//! serves CPUID or RDTSC before it). No capability says so, and a guest's clock or choice of code is wrong without a word.

use std::io;

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use kvm_ioctls::Kvm;
use serde::{Serialize, Serializer};

use crate::guest_debug;
use crate::sys::{self, Reason};
use machine::memory::Memory;

/// Something that this KVM accepts and does not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Defect {
    /// There is no way to set the offset.
    #[error("KVM has no offset of a guest's time-stamp counter (KVM_VCPU_TSC_OFFSET; Linux 5.16 has)")]
    NoTscOffset,
    /// The offset is accepted and has no effect.
    #[error("a guest's RDTSC shows the host's time-stamp counter, whatever the offset")]
    TscOffset,
    /// CPUID shows what was not set.
    #[error("a guest's CPUID.{leaf:02X}H:{register} shows {shown:08X}H where {set:08X}H was set")]
    Cpuid {
        /// The leaf, of subleaf 0.
        leaf: u32,
        /// The register.
        register: &'static str,
        /// What KVM_SET_CPUID2 was given.
        set: u32,
        /// What the guest got.
        shown: u32,
    },
}

impl Serialize for Defect {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The part that is shown: leaf, and EAX, EBX, ECX and EDX. It has next to no feature, so that a feature that is shown nevertheless
/// stands out; the widths of addresses are what KVM insists on.
const SHOWN: [(u32, [u32; 4]); 9] = [
    (0, [0xd, 0x756e_6547, 0x6c65_746e, 0x4965_6e69]),
    (1, [0x306c3, 0, 0, 0]),
    (6, [0; 4]),
    (7, [0; 4]),
    (0xa, [0; 4]),
    (0x8000_0000, [0x8000_0008, 0, 0, 0]),
    (0x8000_0001, [0; 4]),
    (0x8000_0002, [0x6972_7401, 0x6972_7402, 0x6972_7403, 0x6972_7404]),
    (0x8000_0008, [0x3024, 0, 0, 0]),
];

const REGISTERS: [&str; 4] = ["EAX", "EBX", "ECX", "EDX"];

/// Bits that follow other registers, not KVM_SET_CPUID2: MONITOR (IA32_MISC_ENABLE), OSXSAVE (CR4), APIC (IA32_APIC_BASE); OSPKE (CR4).
/// SDM Vol. 2A "CPUID".
const FOLLOWING: [(u32, [u32; 4]); 2] = [(1, [0, 0, 1 << 27 | 1 << 3, 1 << 9]), (7, [0, 0, 1 << 4, 0])];

/// What the time-stamp counter is to be ahead of the host's: days, at any frequency.
const AHEAD: u64 = 1 << 50;

/// Where the guest is, and where it stores what it sees.
const CODE: u64 = 0x1000;
const FOUND: u32 = 0x4000;

/// What the guest has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    cpuid: [[u32; 4]; SHOWN.len()],
    tsc: u64,
    /// The host's counter before it ran and after it.
    host: (u64, u64),
    /// Whether KVM took the offset.
    took_offset: bool,
}

/// Tries it, with a guest in a machine of its own.
///
/// # Errors
/// KVM refuses or fails.
pub fn defects(kvm: &Kvm) -> io::Result<Vec<Defect>> {
    look(kvm).map(|seen| judge(&seen))
}

/// What was found, on one line.
pub fn summary(defects: &[Defect]) -> String {
    let time = defects.iter().find(|defect| !matches!(defect, Defect::Cpuid { .. }));
    let mut cpuid = defects.iter().filter(|defect| matches!(defect, Defect::Cpuid { .. }));
    let first = cpuid.next().map(|defect| match cpuid.count() {
        0 => defect.to_string(),
        more => format!("{defect} (and {more} more of its registers differ)"),
    });
    let found: Vec<String> = time.map(ToString::to_string).into_iter().chain(first).collect();
    found.join("; ")
}

/// Code of 32 bits that stores what CPUID shows of each leaf and what RDTSC shows, then halts.
fn program() -> Vec<u8> {
    let mut code = Vec::new();
    let mut at = FOUND;
    let mut store = |code: &mut Vec<u8>, moves: &[&[u8]]| {
        for opcode in moves {
            code.extend_from_slice(opcode);
            code.extend_from_slice(&at.to_le_bytes());
            at += 4;
        }
    };
    // mov [at], eax; ebx; ecx; edx
    const MOVES: [&[u8]; 4] = [&[0xa3], &[0x89, 0x1d], &[0x89, 0x0d], &[0x89, 0x15]];
    for (leaf, _) in SHOWN {
        // mov eax, leaf; xor ecx, ecx; cpuid
        code.push(0xb8);
        code.extend_from_slice(&leaf.to_le_bytes());
        code.extend_from_slice(&[0x31, 0xc9, 0x0f, 0xa2]);
        store(&mut code, &MOVES);
    }
    // rdtsc
    code.extend_from_slice(&[0x0f, 0x31]);
    store(&mut code, &[MOVES[0], MOVES[3]]);
    // hlt
    code.push(0xf4);
    code
}

fn look(kvm: &Kvm) -> io::Result<Seen> {
    let memory = Memory::new(2 << 20).map_err(io::Error::other)?;
    let vm = kvm.create_vm()?;
    // VMX has to have them for real mode.
    vm.set_tss_address(0xfffb_d000)?;
    sys::lend(&vm, &memory)?;
    memory.write(CODE, &program()).map_err(io::Error::other)?;
    let mut vcpu = vm.create_vcpu(0)?;
    let entries = SHOWN.map(|(function, [eax, ebx, ecx, edx])| kvm_cpuid_entry2 {
        function,
        flags: if function == 7 {
            KVM_CPUID_FLAG_SIGNIFCANT_INDEX
        } else {
            0
        },
        eax,
        ebx,
        ecx,
        edx,
        ..Default::default()
    });
    vcpu.set_cpuid2(&CpuId::from_entries(&entries).map_err(|e| io::Error::other(format!("{e:?}")))?)?;
    guest_debug::begin(&vcpu, CODE)?;
    let took_offset = sys::set_tsc_offset(&vcpu, AHEAD).is_ok();
    let before = sys::host_tsc();
    match sys::run_unkicked(&mut vcpu) {
        Reason::Halt => {}
        reason => return Err(io::Error::other(format!("CPUID and RDTSC ended with {reason:?}"))),
    }
    let host = (before, sys::host_tsc());
    let mut bytes = [0; SHOWN.len() * 16 + 8];
    memory.read(FOUND.into(), &mut bytes).map_err(io::Error::other)?;
    let mut words = bytes
        .chunks_exact(4)
        .map(|word| word.iter().rev().fold(0, |value, byte| value << 8 | u32::from(*byte)));
    let mut word = || words.next().unwrap_or(0);
    let cpuid = [(); SHOWN.len()].map(|()| [(); 4].map(|()| word()));
    let tsc = u64::from(word()) | u64::from(word()) << 32;
    Ok(Seen {
        cpuid,
        tsc,
        host,
        took_offset,
    })
}

fn judge(seen: &Seen) -> Vec<Defect> {
    let mut defects = Vec::new();
    let (before, after) = seen.host;
    if !seen.took_offset {
        defects.push(Defect::NoTscOffset);
    } else if !(before.wrapping_add(AHEAD)..=after.wrapping_add(AHEAD)).contains(&seen.tsc) {
        defects.push(Defect::TscOffset);
    }
    for ((leaf, set), shown) in SHOWN.into_iter().zip(seen.cpuid) {
        let following = FOLLOWING
            .into_iter()
            .find(|row| row.0 == leaf)
            .map_or([0; 4], |row| row.1);
        for (n, register) in REGISTERS.into_iter().enumerate() {
            if (set[n] ^ shown[n]) & !following[n] != 0 {
                defects.push(Defect::Cpuid {
                    leaf,
                    register,
                    set: set[n],
                    shown: shown[n],
                });
            }
        }
    }
    defects
}

#[cfg(test)]
#[path = "trial_test.rs"]
mod tests;
