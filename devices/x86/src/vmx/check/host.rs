//! SDM Vol. 3C 27.2.2 "Checks on Host Control Registers, MSRs, and SSP", 27.2.3 "Checks on Host Segment and Descriptor-Table
//! Registers", 27.2.4 "Checks Related to Address-Space Size".

use super::{Processor, Rule, rules};
use crate::vmx::caps::{CR0_FIXED0, CR0_FIXED1, CR4_FIXED0, cr4_fixed1};
use crate::vmx::controls::{Entry, Exit};
use crate::vmx::fields::{Field, Vmcs};

fn wide(v: &Vmcs) -> bool {
    v.exit_controls().contains(Exit::HOST_64BIT)
}

const PAE: u64 = 1 << 5;
const PCIDE: u64 = 1 << 17;
const CET: u64 = 1 << 23;
const WP: u64 = 1 << 16;
const LME_LMA: u64 = 0x500;

/// Checks on the host-state area.
pub const HOST: &[Rule] = rules! {
    "27.2.2" "CR0 has the bits that are fixed in VMX operation" =>
        |v, _| v.get(Field::HOST_CR0) & CR0_FIXED0 != CR0_FIXED0 || v.get(Field::HOST_CR0) & !CR0_FIXED1 != 0;
    "27.2.2" "CR4 has the bits that are fixed in VMX operation" =>
        |v, p| v.get(Field::HOST_CR4) & CR4_FIXED0 != CR4_FIXED0
            || v.get(Field::HOST_CR4) & !cr4_fixed1(p.features) != 0;
    "27.2.2" "CR4.CET needs CR0.WP" =>
        |v, _| v.get(Field::HOST_CR4) & CET != 0 && v.get(Field::HOST_CR0) & WP == 0;
    "27.2.2" "CR3 within the physical-address width" => |v, p| p.beyond(v.get(Field::HOST_CR3));
    "27.2.2" "canonical IA32_SYSENTER_ESP and IA32_SYSENTER_EIP" =>
        |v, p| [Field::HOST_SYSENTER_ESP, Field::HOST_SYSENTER_EIP].iter().any(|&at| !p.canonical(v.get(at)));
    "27.2.2" "reserved bits of IA32_PERF_GLOBAL_CTRL" =>
        |v, p| v.exit_controls().contains(Exit::LOAD_PERF_GLOBAL_CTRL)
            && v.get(Field::HOST_PERF_GLOBAL_CTRL) & !p.perf_global_ctrl != 0;
    "27.2.2" "memory types in IA32_PAT" =>
        |v, _| v.exit_controls().contains(Exit::LOAD_PAT) && Processor::bad_pat(v.get(Field::HOST_PAT));
    "27.2.2" "IA32_EFER: reserved bits, and LMA and LME as the host address-space size" =>
        |v, p| {
            let efer = v.get(Field::HOST_EFER);
            let mode = if wide(v) { LME_LMA } else { 0 };
            v.exit_controls().contains(Exit::LOAD_EFER) && (p.bad_efer(efer) || efer & LME_LMA != mode)
        };
    "27.2.2" "reserved bits of PKRS" =>
        |v, _| v.exit_controls().contains(Exit::LOAD_PKRS) && v.get(Field::HOST_PKRS) >> 32 != 0;

    "27.2.3" "selectors have RPL and TI 0" =>
        |v, _| [
            Field::HOST_ES, Field::HOST_CS, Field::HOST_SS, Field::HOST_DS, Field::HOST_FS, Field::HOST_GS, Field::HOST_TR,
        ].iter().any(|&at| v.get(at) & 7 != 0);
    "27.2.3" "CS and TR are not null" => |v, _| v.get(Field::HOST_CS) == 0 || v.get(Field::HOST_TR) == 0;
    "27.2.3" "SS is not null for a 32-bit host" => |v, _| !wide(v) && v.get(Field::HOST_SS) == 0;
    "27.2.3" "canonical bases of FS, GS, GDTR, IDTR and TR" =>
        |v, p| [
            Field::HOST_FS_BASE, Field::HOST_GS_BASE, Field::HOST_GDTR_BASE, Field::HOST_IDTR_BASE, Field::HOST_TR_BASE,
        ].iter().any(|&at| !p.canonical(v.get(at)));

    "27.2.4" "outside IA-32e mode neither guest nor host is 64-bit" =>
        |v, p| !p.long_mode && (wide(v) || v.entry_controls().contains(Entry::GUEST_64BIT));
    "27.2.4" "in IA-32e mode the host is 64-bit" => |v, p| p.long_mode && !wide(v);
    "27.2.4" "a 32-bit host has no 64-bit guest, no PCIDs, and a RIP of 32 bits" =>
        |v, _| !wide(v)
            && (v.entry_controls().contains(Entry::GUEST_64BIT)
                || v.get(Field::HOST_CR4) & PCIDE != 0
                || v.get(Field::HOST_RIP) >> 32 != 0);
    "27.2.4" "a 64-bit host has PAE and a canonical RIP" =>
        |v, p| wide(v) && (v.get(Field::HOST_CR4) & PAE == 0 || !p.canonical(v.get(Field::HOST_RIP)));
};
