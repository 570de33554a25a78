extern crate std;

use std::collections::BTreeSet;
use std::vec::Vec;

use super::*;
use crate::vmx::caps::{self, REVISION};
use crate::vmx::exits::failure;
use crate::vmx::fields::{FIELDS, SHADOW, SLOTS};

const PINS: u32 = 0x16;
const PRIMARY: u32 = 0x0401_e172;
const EXITS: u32 = 0x0003_6dff | 1 << 9;
const ENTRIES: u32 = 0x11ff | 1 << 9;
/// Where memory holds an ordinary VMCS, and where a shadow one.
const ORDINARY: u64 = 0x9000;
const SHADOWED: u64 = 0xa000;
/// Four PDPTEs of which one has a reserved bit.
const BAD_PDPTES: u64 = 0xb000;
/// A virtual-APIC page whose task priority is 2.
const VIRTUAL_APIC: u64 = 0xc000;

fn memory(at: u64) -> u64 {
    match at {
        ORDINARY => REVISION.into(),
        SHADOWED => (REVISION | SHADOW).into(),
        at if at == BAD_PDPTES + 8 => 3,
        at if at == VIRTUAL_APIC + 0x80 => 0x20,
        _ => 0,
    }
}

/// Sapphire Rapids as the manual has it, whatever the engine executes of it.
fn on<T>(long_mode: bool, f: impl FnOnce(&Processor<'_>) -> T) -> T {
    traced(long_mode, false, f)
}

/// The same with Intel PT on.
fn traced<T>(long_mode: bool, tracing: bool, f: impl FnOnce(&Processor<'_>) -> T) -> T {
    f(&Processor {
        caps: &caps::SAPPHIRERAPIDS,
        features: Features::all(),
        physical_bits: 46,
        linear_bits: 57,
        long_mode,
        debugctl: 0xffc3,
        perf_global_ctrl: 0xf_0000_00ff,
        model: &crate::model::SAPPHIRERAPIDS,
        tracing,
        read: &memory,
    })
}

/// A 64-bit guest of a 64-bit host that enters.
fn good() -> Vmcs {
    let mut v = Vmcs::default();
    let mut set = |rows: &[(Field, u64)]| rows.iter().for_each(|&(field, value)| v.set(field, value));
    set(&[
        (Field::PIN_CONTROLS, PINS.into()),
        (Field::PRIMARY_CONTROLS, PRIMARY.into()),
        (Field::EXIT_CONTROLS, EXITS.into()),
        (Field::ENTRY_CONTROLS, ENTRIES.into()),
        (Field::HOST_CR0, 0x8005_0033),
        (Field::HOST_CR4, 0x2020),
        (Field::HOST_CS, 0x10),
        (Field::HOST_TR, 0x40),
        (Field::GUEST_CR0, 0x8005_0033),
        (Field::GUEST_CR4, 0x2020),
        (Field::GUEST_RFLAGS, 2),
        (Field::LINK_POINTER, u64::MAX),
        (Field::GUEST_CS, 8),
        (Field::GUEST_CS_RIGHTS, 0xa09b),
        (Field::GUEST_CS_LIMIT, 0xffff_ffff),
        (Field::GUEST_TR_RIGHTS, 0x8b),
        (Field::GUEST_LDTR_RIGHTS, 0x1_0000),
        (Field::GUEST_DR7, 0x400),
    ]);
    for n in [0, 2, 3, 4, 5] {
        set(&[
            (Field(Field::GUEST_ES.0 + 2 * n), 0x10),
            (Field(Field::GUEST_ES_RIGHTS.0 + 2 * n), 0xc093),
            (Field(Field::GUEST_ES_LIMIT.0 + 2 * n), 0xffff_ffff),
        ]);
    }
    v
}

/// `good` with virtual-8086 segments in a 32-bit guest.
fn virtual8086() -> Vec<(Field, u64)> {
    let mut rows = std::vec![
        (Field::ENTRY_CONTROLS, u64::from(ENTRIES & !(1 << 9))),
        (Field::GUEST_RFLAGS, 0x2_0002),
    ];
    for n in 0..6 {
        rows.extend([
            (Field(Field::GUEST_ES.0 + 2 * n), 0x100),
            (Field(Field::GUEST_ES_BASE.0 + 2 * n), 0x1000),
            (Field(Field::GUEST_ES_RIGHTS.0 + 2 * n), 0xf3),
            (Field(Field::GUEST_ES_LIMIT.0 + 2 * n), 0xffff),
        ]);
    }
    rows
}

fn secondary(bits: Secondary) -> [(Field, u64); 2] {
    [
        (Field::PRIMARY_CONTROLS, (PRIMARY | 1 << 31).into()),
        (Field::SECONDARY_CONTROLS, bits.0.into()),
    ]
}

fn with_secondary(bits: Secondary, rows: &[(Field, u64)]) -> Vec<(Field, u64)> {
    [&secondary(bits)[..], rows].concat()
}

fn shadowed(bits: Secondary, rows: &[(Field, u64)]) -> Vec<(Field, u64)> {
    let mut all = with_secondary(bits, rows);
    all.insert(2, (Field::PRIMARY_CONTROLS, (PRIMARY | 1 << 31 | 1 << 21).into()));
    all
}

fn primary(bits: u32, rows: &[(Field, u64)]) -> Vec<(Field, u64)> {
    [&[(Field::PRIMARY_CONTROLS, (PRIMARY | bits).into())], rows].concat()
}

fn entry(bits: u32, rows: &[(Field, u64)]) -> Vec<(Field, u64)> {
    [&[(Field::ENTRY_CONTROLS, (ENTRIES | bits).into())], rows].concat()
}

/// A 32-bit guest with PAE paging.
fn guest32(rows: &[(Field, u64)]) -> Vec<(Field, u64)> {
    let guest = [
        (Field::ENTRY_CONTROLS, u64::from(ENTRIES & !(1 << 9))),
        (Field::GUEST_CS_RIGHTS, 0xc09b),
    ];
    [&guest[..], rows].concat()
}

fn exit(bits: u32, rows: &[(Field, u64)]) -> Vec<(Field, u64)> {
    [&[(Field::EXIT_CONTROLS, (EXITS | bits).into())], rows].concat()
}

fn inject(kind: u64, vector: u64, rows: &[(Field, u64)]) -> Vec<(Field, u64)> {
    [&[(Field::ENTRY_INTERRUPTION, 1 << 31 | kind << 8 | vector)], rows].concat()
}

/// The first rule that these values break, of controls, host and guest in this order.
fn broken(rows: &[(Field, u64)], long_mode: bool) -> Option<&'static Rule> {
    let mut v = good();
    rows.iter().for_each(|&(field, value)| v.set(field, value));
    on(long_mode, |p| {
        [CONTROLS, HOST, GUEST]
            .iter()
            .find_map(|rules| first_broken(rules, &v, p))
    })
}

const CANONICAL_NOT: u64 = 1 << 60;
const BEYOND: u64 = 1 << 46;
const EPT: Secondary = Secondary::EPT;
const EPTP: (Field, u64) = (Field::EPT_POINTER, 0x1e);

/// What breaks each rule, in the order of the tables. Every rule has a row at least.
fn rows() -> Vec<(Vec<(Field, u64)>, &'static str)> {
    let unrestricted = EPT | Secondary::UNRESTRICTED;
    let f = |field: Field, value: u64| std::vec![(field, value)];
    let mut rows = std::vec![
        (f(Field::PIN_CONTROLS, 0), "reserved bits of the pin-based controls"),
        (
            f(Field::PIN_CONTROLS, 1 << 9 | 0x16),
            "reserved bits of the pin-based controls"
        ),
        (
            f(Field::PRIMARY_CONTROLS, 0),
            "reserved bits of the primary processor-based controls"
        ),
        (
            with_secondary(Secondary(1 << 27), &[]),
            "reserved bits of the secondary processor-based controls",
        ),
        (
            f(Field::CR3_TARGET_COUNT, 5),
            "no more CR3-target values than there are"
        ),
        (primary(1 << 25, &[(Field::IO_BITMAP_B, 1)]), "I/O bitmap addresses"),
        (primary(1 << 28, &[(Field::MSR_BITMAP, BEYOND)]), "MSR-bitmap address"),
        (
            primary(1 << 21, &[(Field::VIRTUAL_APIC, 0x800)]),
            "virtual-APIC address"
        ),
        (
            primary(1 << 21, &[(Field::TPR_THRESHOLD, 16)]),
            "reserved bits of the TPR threshold"
        ),
        (
            primary(
                1 << 21,
                &[(Field::TPR_THRESHOLD, 3), (Field::VIRTUAL_APIC, VIRTUAL_APIC)]
            ),
            "TPR threshold no higher than the virtual TPR",
        ),
        (f(Field::PIN_CONTROLS, 0x36), "virtual NMIs need NMI exiting"),
        (primary(1 << 22, &[]), "NMI-window exiting needs virtual NMIs"),
        (
            with_secondary(Secondary::APIC_ACCESSES, &[(Field::APIC_ACCESS, 8)]),
            "APIC-access address",
        ),
        (
            with_secondary(Secondary::X2APIC, &[]),
            "APIC virtualization needs the TPR shadow"
        ),
        (
            shadowed(Secondary::X2APIC | Secondary::APIC_ACCESSES, &[]),
            "x2APIC mode and APIC accesses are not virtualized together",
        ),
        (
            shadowed(Secondary::VIRTUAL_INTERRUPTS, &[]),
            "virtual-interrupt delivery needs external-interrupt exiting",
        ),
        (
            f(Field::PIN_CONTROLS, 0x96),
            "posted interrupts need virtual-interrupt delivery, acknowledgement, a vector and a descriptor",
        ),
        (with_secondary(Secondary::VPID, &[]), "VPID 0 is the host's"),
        (with_secondary(EPT, &[(Field::EPT_POINTER, 0x19)]), "EPT pointer"),
        (with_secondary(EPT, &[(Field::EPT_POINTER, 0x16)]), "EPT pointer"),
        (with_secondary(EPT, &[(Field::EPT_POINTER, 0x9e)]), "EPT pointer"),
        (
            with_secondary(EPT, &[(Field::EPT_POINTER, 0x1e | BEYOND)]),
            "EPT pointer"
        ),
        (
            with_secondary(Secondary::UNRESTRICTED, &[]),
            "an unrestricted guest and mode-based execute control need EPT",
        ),
        (
            with_secondary(Secondary::PML, &[]),
            "page-modification logging needs EPT and an address",
        ),
        (
            with_secondary(Secondary::VM_FUNCTIONS, &[(Field::VM_FUNCTIONS, 2)]),
            "VM functions: reserved bits, and EPTP switching needs EPT and a list",
        ),
        (
            with_secondary(Secondary::VMCS_SHADOWING, &[(Field::VMWRITE_BITMAP, 1)]),
            "VMREAD-bitmap and VMWRITE-bitmap addresses",
        ),
        (
            with_secondary(
                Secondary::VIRTUALIZATION_EXCEPTION,
                &[(Field::VIRTUALIZATION_EXCEPTION_AREA, 1)],
            ),
            "virtualization-exception information address",
        ),
        (with_secondary(Secondary::TSC_SCALING, &[]), "TSC multiplier"),
        (
            with_secondary(EPT | Secondary::PT_GUEST_PHYSICAL, &[EPTP]),
            "Intel PT with guest-physical addresses needs EPT, and IA32_RTIT_CTL loaded by VM entries and cleared by VM exits",
        ),
        (f(Field::EXIT_CONTROLS, 0), "reserved bits of the VM-exit controls"),
        (exit(1 << 22, &[]), "saving of the preemption timer needs the timer"),
        (
            std::vec![(Field::EXIT_MSR_STORE_COUNT, 1), (Field::EXIT_MSR_STORE, 8)],
            "VM-exit MSR-store address",
        ),
        (
            std::vec![(Field::EXIT_MSR_LOAD_COUNT, 2), (Field::EXIT_MSR_LOAD, BEYOND - 16)],
            "VM-exit MSR-load address",
        ),
        (f(Field::ENTRY_CONTROLS, 0), "reserved bits of the VM-entry controls"),
        (inject(1, 32, &[]), "type of the injected event"),
        (inject(2, 3, &[]), "vector of the injected event"),
        (inject(3, 32, &[]), "vector of the injected event"),
        (inject(7, 1, &[]), "vector of the injected event"),
        (
            inject(3, 13, &[]),
            "error code of the injected event, exactly where it has one"
        ),
        (
            inject(3, 6 | 1 << 11, &[]),
            "error code of the injected event, exactly where it has one",
        ),
        (
            inject(4, 13 | 1 << 11, &[]),
            "error code of the injected event, exactly where it has one",
        ),
        (
            inject(3, 6 | 1 << 12, &[]),
            "reserved bits of the interruption information"
        ),
        (
            inject(3, 13 | 1 << 11, &[(Field::ENTRY_ERROR_CODE, 0x1_0000)]),
            "reserved bits of the exception error code",
        ),
        (
            inject(4, 0x80, &[(Field::ENTRY_INSTRUCTION_LENGTH, 16)]),
            "length of the injected software event",
        ),
        (
            std::vec![(Field::ENTRY_MSR_LOAD_COUNT, 1), (Field::ENTRY_MSR_LOAD, BEYOND)],
            "VM-entry MSR-load address",
        ),
    ];
    rows.extend([
        (
            f(Field::HOST_CR0, 0x8005_0013),
            "CR0 has the bits that are fixed in VMX operation",
        ),
        (
            f(Field::HOST_CR4, 0x20),
            "CR4 has the bits that are fixed in VMX operation",
        ),
        (
            std::vec![(Field::HOST_CR3, BEYOND)],
            "CR3 within the physical-address width",
        ),
        (
            f(Field::HOST_SYSENTER_EIP, CANONICAL_NOT),
            "canonical IA32_SYSENTER_ESP and IA32_SYSENTER_EIP",
        ),
        (
            exit(1 << 12, &[(Field::HOST_PERF_GLOBAL_CTRL, 1 << 63)]),
            "reserved bits of IA32_PERF_GLOBAL_CTRL",
        ),
        (exit(1 << 19, &[(Field::HOST_PAT, 2)]), "memory types in IA32_PAT"),
        (
            exit(1 << 21, &[(Field::HOST_EFER, 0x100)]),
            "IA32_EFER: reserved bits, and LMA and LME as the host address-space size",
        ),
        (exit(1 << 29, &[(Field::HOST_PKRS, 1 << 32)]), "reserved bits of PKRS"),
        (f(Field::HOST_DS, 3), "selectors have RPL and TI 0"),
        (f(Field::HOST_TR, 0), "CS and TR are not null"),
        (
            f(Field::HOST_GDTR_BASE, CANONICAL_NOT),
            "canonical bases of FS, GS, GDTR, IDTR and TR",
        ),
        (f(Field::HOST_CR4, 0x2000), "a 64-bit host has PAE and a canonical RIP"),
        (
            f(Field::HOST_RIP, CANONICAL_NOT),
            "a 64-bit host has PAE and a canonical RIP",
        ),
        (
            f(Field::EXIT_CONTROLS, (EXITS & !(1 << 9)).into()),
            "SS is not null for a 32-bit host",
        ),
        (
            std::vec![
                (Field::EXIT_CONTROLS, (EXITS & !(1 << 9)).into()),
                (Field::HOST_SS, 0x18)
            ],
            "in IA-32e mode the host is 64-bit",
        ),
    ]);
    let v86 = virtual8086();
    let in_v86 = |more: &[(Field, u64)]| [&v86[..], more].concat();
    rows.extend([
        (
            f(Field::GUEST_CR0, 0x8005_0013),
            "CR0 has the bits that are fixed in VMX operation; an unrestricted guest may be without PE and PG",
        ),
        (
            f(Field::GUEST_CR0, 0x32),
            "CR0 has the bits that are fixed in VMX operation; an unrestricted guest may be without PE and PG",
        ),
        (
            with_secondary(unrestricted, &[EPTP, (Field::GUEST_CR0, 0x8005_0032)]),
            "CR0.PG needs CR0.PE",
        ),
        (
            f(Field::GUEST_CR4, 0x20),
            "CR4 has the bits that are fixed in VMX operation",
        ),
        (f(Field::GUEST_DEBUGCTL, 4), "reserved bits of IA32_DEBUGCTL"),
        (f(Field::GUEST_CR4, 0x2000), "IA-32e mode needs CR0.PG and CR4.PAE"),
        (guest32(&[(Field::GUEST_CR4, 0x2_2020)]), "PCIDs need IA-32e mode"),
        (f(Field::GUEST_CR3, BEYOND), "CR3 within the physical-address width"),
        (f(Field::GUEST_DR7, 1 << 32), "bits 63:32 of DR7"),
        (
            f(Field::GUEST_SYSENTER_ESP, CANONICAL_NOT),
            "canonical IA32_SYSENTER_ESP and IA32_SYSENTER_EIP",
        ),
        (
            entry(1 << 13, &[(Field::GUEST_PERF_GLOBAL_CTRL, 1 << 63)]),
            "reserved bits of IA32_PERF_GLOBAL_CTRL",
        ),
        (
            entry(1 << 14, &[(Field::GUEST_PAT, 3 << 56)]),
            "memory types in IA32_PAT",
        ),
        (
            entry(1 << 15, &[(Field::GUEST_EFER, 0x400)]),
            "IA32_EFER: reserved bits, LMA as the VM-entry control, and with paging LME as LMA",
        ),
        (
            entry(1 << 18, &[(Field::GUEST_RTIT_CTL, 1 << 63)]),
            "reserved bits of IA32_RTIT_CTL",
        ),
        (
            entry(1 << 21, &[(Field::GUEST_LBR_CTL, 1 << 4)]),
            "reserved bits of IA32_LBR_CTL",
        ),
        (entry(1 << 22, &[(Field::GUEST_PKRS, 1 << 32)]), "reserved bits of PKRS"),
        (f(Field::GUEST_TR, 4), "TR is in the GDT"),
        (
            std::vec![(Field::GUEST_LDTR, 4), (Field::GUEST_LDTR_RIGHTS, 0x82)],
            "LDTR is in the GDT",
        ),
        (f(Field::GUEST_SS, 0x13), "SS has the RPL of CS"),
        (in_v86(&[(Field::GUEST_ES_BASE, 0)]), "bases in virtual-8086 mode"),
        (
            f(Field::GUEST_FS_BASE, CANONICAL_NOT),
            "canonical bases of TR, FS and GS",
        ),
        (
            std::vec![
                (Field::GUEST_LDTR_BASE, CANONICAL_NOT),
                (Field::GUEST_LDTR_RIGHTS, 0x82)
            ],
            "canonical base of LDTR",
        ),
        (
            f(Field::GUEST_DS_BASE, 1 << 32),
            "bases of CS, SS, DS and ES of 32 bits",
        ),
        (
            in_v86(&[(Field::GUEST_GS_LIMIT, 0xfffe)]),
            "limits in virtual-8086 mode",
        ),
        (
            in_v86(&[(Field::GUEST_SS_RIGHTS, 0x93)]),
            "access rights in virtual-8086 mode",
        ),
        (f(Field::GUEST_CS_RIGHTS, 0xa093), "type of CS"),
        (f(Field::GUEST_SS_RIGHTS, 0xc091), "type of SS"),
        (f(Field::GUEST_DS_RIGHTS, 0xc092), "types of DS, ES, FS and GS"),
        (f(Field::GUEST_DS_RIGHTS, 0xc099), "types of DS, ES, FS and GS"),
        (f(Field::GUEST_ES_RIGHTS, 0xc083), "S"),
        (f(Field::GUEST_CS_RIGHTS, 0xa0fb), "DPL of CS"),
        (
            with_secondary(unrestricted, &[EPTP, (Field::GUEST_CS_RIGHTS, 0xc0f3)]),
            "DPL of CS",
        ),
        (std::vec![(Field::GUEST_CS, 0xb), (Field::GUEST_SS, 0x13)], "DPL of SS"),
        (f(Field::GUEST_DS, 0x13), "DPL of DS, ES, FS and GS"),
        (f(Field::GUEST_DS_RIGHTS, 0xc013), "P"),
        (f(Field::GUEST_DS_RIGHTS, 0xc193), "reserved bits of access rights"),
        (f(Field::GUEST_CS_RIGHTS, 0xe09b), "no D/B in 64-bit mode"),
        (f(Field::GUEST_DS_RIGHTS, 0x4093), "G"),
        (
            std::vec![(Field::GUEST_DS_LIMIT, 0xfff0), (Field::GUEST_DS_RIGHTS, 0xc093)],
            "G",
        ),
        (f(Field::GUEST_TR_RIGHTS, 0x83), "type of TR"),
        (f(Field::GUEST_TR_RIGHTS, 0x1_008b), "access rights of TR"),
        (f(Field::GUEST_LDTR_RIGHTS, 0x2), "access rights of LDTR"),
        (
            f(Field::GUEST_IDTR_BASE, CANONICAL_NOT),
            "canonical bases of GDTR and IDTR",
        ),
        (
            f(Field::GUEST_GDTR_LIMIT, 0x1_0000),
            "limits of GDTR and IDTR of 16 bits",
        ),
        (f(Field::GUEST_RIP, CANONICAL_NOT), "RIP"),
        (f(Field::GUEST_RFLAGS, 0), "reserved bits of RFLAGS"),
        (f(Field::GUEST_RFLAGS, 1 << 22 | 2), "reserved bits of RFLAGS"),
        (
            in_v86(&[(Field::ENTRY_CONTROLS, ENTRIES.into())]),
            "no virtual-8086 mode in IA-32e mode or without protection",
        ),
        (inject(0, 32, &[]), "IF for an external interrupt"),
        (f(Field::GUEST_ACTIVITY, 4), "activity state"),
        (
            std::vec![
                (Field::GUEST_ACTIVITY, 1),
                (Field::GUEST_CS, 0xb),
                (Field::GUEST_SS, 0x13),
                (Field::GUEST_CS_RIGHTS, 0xa0fb),
                (Field::GUEST_SS_RIGHTS, 0xc0f3),
            ],
            "HLT needs an SS with DPL 0",
        ),
        (
            std::vec![(Field::GUEST_ACTIVITY, 2), (Field::GUEST_INTERRUPTIBILITY, 2)],
            "blocking by STI or MOV SS needs the active state",
        ),
        (
            inject(3, 6, &[(Field::GUEST_ACTIVITY, 1)]),
            "the activity state lets the injected event in",
        ),
        (
            inject(2, 2, &[(Field::GUEST_ACTIVITY, 3)]),
            "the activity state lets the injected event in",
        ),
        (
            f(Field::GUEST_INTERRUPTIBILITY, 32),
            "reserved bits of the interruptibility state",
        ),
        (
            std::vec![(Field::GUEST_INTERRUPTIBILITY, 3), (Field::GUEST_RFLAGS, 0x202)],
            "not blocked by both STI and MOV SS",
        ),
        (f(Field::GUEST_INTERRUPTIBILITY, 1), "blocking by STI needs IF"),
        (
            inject(
                0,
                32,
                &[(Field::GUEST_INTERRUPTIBILITY, 1), (Field::GUEST_RFLAGS, 0x202)],
            ),
            "an external interrupt is not blocked",
        ),
        (
            inject(2, 2, &[(Field::GUEST_INTERRUPTIBILITY, 2)]),
            "an NMI is not blocked by MOV SS",
        ),
        (f(Field::GUEST_INTERRUPTIBILITY, 4), "no blocking by SMI outside SMM"),
        (
            inject(2, 2, &[(Field::PIN_CONTROLS, 0x3e), (Field::GUEST_INTERRUPTIBILITY, 8)]),
            "a virtual NMI is not blocked by another",
        ),
        (f(Field::GUEST_INTERRUPTIBILITY, 16), "no enclave"),
        (
            f(Field::GUEST_PENDING_DEBUG, 1 << 13),
            "reserved bits of the pending debug exceptions",
        ),
        (
            std::vec![(Field::GUEST_INTERRUPTIBILITY, 2), (Field::GUEST_RFLAGS, 0x102)],
            "a pending single step as TF and BTF have it",
        ),
        (
            std::vec![
                (Field::GUEST_INTERRUPTIBILITY, 2),
                (Field::GUEST_PENDING_DEBUG, 1 << 14)
            ],
            "a pending single step as TF and BTF have it",
        ),
        (
            f(Field::GUEST_PENDING_DEBUG, 1 << 16),
            "no pending debug exception of a transaction",
        ),
        (f(Field::LINK_POINTER, 0x8000), "VMCS link pointer"),
        (f(Field::LINK_POINTER, SHADOWED), "VMCS link pointer"),
        (f(Field::LINK_POINTER, ORDINARY + 8), "VMCS link pointer"),
        (
            guest32(&[
                secondary(EPT)[0],
                secondary(EPT)[1],
                EPTP,
                (Field::GUEST_PDPTE2, 1 | 1 << 46),
            ]),
            "PDPTEs of the VMCS, with EPT",
        ),
        (
            guest32(&[(Field::GUEST_CR3, BAD_PDPTES)]),
            "PDPTEs in memory, without EPT",
        ),
    ]);
    rows
}

/// Rules that no VMCS of this processor breaks ahead of others: the reserved-bits rules of the controls see to it.
const BEHIND_OTHERS: &[&str] = &[
    "no entry to SMM, nor deactivation of the dual-monitor treatment, outside SMM",
    "outside IA-32e mode neither guest nor host is 64-bit",
    "a 32-bit host has no 64-bit guest, no PCIDs, and a RIP of 32 bits",
    "CR4.CET needs CR0.WP",
];

// covers: vmx/entry-checks
#[test]
fn each_rule_is_broken_by_its_row_and_no_rule_before_it_is() {
    assert_eq!(
        broken(&[], true).map(|rule| rule.name),
        None,
        "the VMCS that the rows change enters"
    );
    let mut seen = BTreeSet::new();
    for (changes, name) in rows() {
        let rule = broken(&changes, true);
        assert_eq!(rule.map(|rule| rule.name), Some(name), "{changes:x?}");
        seen.insert(name);
    }
    let mut tracing = good();
    tracing.set(Field::ENTRY_CONTROLS, (ENTRIES | 1 << 18).into());
    let rule = traced(true, true, |p| first_broken(CONTROLS, &tracing, p)).map(|rule| rule.name);
    assert_eq!(rule, Some("IA32_RTIT_CTL is not loaded while Intel PT is on"));
    assert!(traced(true, false, |p| first_broken(CONTROLS, &tracing, p)).is_none());
    seen.extend(rule);
    for rule in [CONTROLS, HOST, GUEST].into_iter().flatten() {
        assert!(
            seen.contains(rule.name) || BEHIND_OTHERS.contains(&rule.name),
            "{rule:?} has no row"
        );
    }
}

// covers: vmx/entry-checks-accept
#[test]
fn what_no_rule_forbids_enters() {
    let unrestricted = EPT | Secondary::UNRESTRICTED;
    for (changes, why) in [
        (virtual8086(), "virtual-8086 mode"),
        (guest32(&[]), "32-bit with PAE paging"),
        (inject(3, 13 | 1 << 11, &[]), "#GP with its error code"),
        (inject(4, 0x80, &[]), "INT n of length 0, which this part takes"),
        (inject(0, 32, &[(Field::GUEST_RFLAGS, 0x202)]), "an external interrupt"),
        (
            inject(
                2,
                2,
                &[(Field::GUEST_INTERRUPTIBILITY, 1), (Field::GUEST_RFLAGS, 0x202)],
            ),
            "an NMI after STI",
        ),
        (inject(2, 2, &[(Field::GUEST_ACTIVITY, 1)]), "an NMI in HLT"),
        (
            with_secondary(
                unrestricted,
                &[
                    EPTP,
                    (Field::GUEST_CR0, 0x30),
                    (Field::ENTRY_CONTROLS, (ENTRIES & !(1 << 9)).into()),
                    (Field::GUEST_CS_RIGHTS, 0xc093),
                ],
            ),
            "real-address mode in an unrestricted guest",
        ),
        (
            std::vec![(Field::LINK_POINTER, ORDINARY)],
            "a link pointer to an ordinary VMCS",
        ),
        (std::vec![(Field::GUEST_DS_RIGHTS, 0x1_0000)], "an unusable DS"),
    ] {
        assert_eq!(broken(&changes, true).map(|rule| rule.name), None, "{why}");
    }
}

#[test]
fn outside_ia32e_mode_nothing_is_64_bit() {
    assert_eq!(
        broken(&[], false).map(|rule| rule.name),
        Some("outside IA-32e mode neither guest nor host is 64-bit")
    );
}

// covers: vmx/entry-failure-numbers
#[test]
fn the_tables_have_their_numbers_and_qualifications() {
    let mut v = good();
    v.set(Field::HOST_TR, 0);
    let host = on(true, |p| instruction(&v, p).map_err(|(error, _)| error));
    assert_eq!(host, Err(InstructionError::HostState));
    v.set(Field::PIN_CONTROLS, 0);
    let controls = on(true, |p| instruction(&v, p).map_err(|(error, _)| error));
    assert_eq!(controls, Err(InstructionError::Controls), "controls come first");
    for (name, qualification) in [
        ("VMCS link pointer", failure::LINK_POINTER),
        ("an NMI is not blocked by MOV SS", failure::NMI),
        ("PDPTEs of the VMCS, with EPT", failure::PDPTE),
        ("PDPTEs in memory, without EPT", failure::PDPTE),
        ("RIP", failure::OTHER),
    ] {
        let rule = GUEST.iter().find(|rule| rule.name == name).unwrap();
        assert_eq!(rule.qualification, qualification, "{name}");
    }
}

/// A generator of numbers that look random: xorshift64*.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

// covers: vmx/entry-checks-fuzz
#[test]
fn no_vmcs_upsets_the_checks() {
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    // Whole VMCSs of nonsense, and such as differ from one that enters in a few fields: those reach the later rules.
    let count = 1_000_000;
    let mut reached = BTreeSet::new();
    for round in 0..count {
        let mut v = good();
        if round % 4 == 0 {
            (0..SLOTS).for_each(|slot| v.0[slot] = numbers.next());
        } else {
            for _ in 0..1 + numbers.next() % 4 {
                let field = FIELDS[(numbers.next() % FIELDS.len() as u64) as usize].field;
                let bit = 1 << (numbers.next() & 63);
                let value = match numbers.next() % 3 {
                    0 => numbers.next(),
                    1 => v.get(field) ^ bit,
                    _ => bit.wrapping_sub(1),
                };
                v.set(field, value);
            }
        }
        on(round % 5 != 0, |p| {
            for rules in [CONTROLS, HOST, GUEST] {
                // All of them, not the first alone.
                for rule in rules {
                    if (rule.broken)(&v, p) {
                        reached.insert(rule.name);
                    }
                }
            }
        });
    }
    assert!(reached.len() > 80, "{} rules", reached.len());
}
