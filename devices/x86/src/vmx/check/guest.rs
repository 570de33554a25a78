//! SDM Vol. 3C 27.3.1 "Checks on the Guest State Area".

use super::{Processor, Rule, rules};
use crate::pt::RtitCtl;
use crate::vmx::caps::{CR0_FIXED0, CR0_FIXED1, CR4_FIXED0, REVISION, cr4_fixed1};
use crate::vmx::controls::{Entry, Pin, Secondary};
use crate::vmx::exits::{Interruptibility, Interruption, activity, failure};
use crate::vmx::fields::{Field, SHADOW, Vmcs};

const PE: u64 = 1;
const WP: u64 = 1 << 16;
const PG: u64 = 1 << 31;
const PAE: u64 = 1 << 5;
const PCIDE: u64 = 1 << 17;
const CET: u64 = 1 << 23;
const LME: u64 = 1 << 8;
const LMA: u64 = 1 << 10;
const TF: u64 = 1 << 8;
const IF: u64 = 1 << 9;
const VM: u64 = 1 << 17;
/// Bits of RFLAGS that are 0: 63:22, 15, 5, 3.
const RFLAGS_ZERO: u64 = !0x003f_7fd7;
const BTF: u64 = 2;
/// BS of the pending debug exceptions.
const BS: u64 = 1 << 14;

fn wide(v: &Vmcs) -> bool {
    v.entry_controls().contains(Entry::GUEST_64BIT)
}
fn unrestricted(v: &Vmcs) -> bool {
    v.secondary().contains(Secondary::UNRESTRICTED)
}
fn cr0(v: &Vmcs) -> u64 {
    v.get(Field::GUEST_CR0)
}
fn cr4(v: &Vmcs) -> u64 {
    v.get(Field::GUEST_CR4)
}
fn rflags(v: &Vmcs) -> u64 {
    v.get(Field::GUEST_RFLAGS)
}
fn virtual8086(v: &Vmcs) -> bool {
    rflags(v) & VM != 0
}
fn injected(v: &Vmcs) -> Option<Interruption> {
    let i = Interruption::from_bits(v.get32(Field::ENTRY_INTERRUPTION));
    i.valid().then_some(i)
}
fn held_off(v: &Vmcs) -> Interruptibility {
    Interruptibility::from_bits(v.get32(Field::GUEST_INTERRUPTIBILITY))
}
fn state(v: &Vmcs) -> u32 {
    v.get32(Field::GUEST_ACTIVITY)
}

/// A guest segment: ES, CS, SS, DS, FS, GS, LDTR, TR by number, as their fields are.
#[derive(Clone, Copy)]
struct Segment {
    selector: u16,
    base: u64,
    limit: u32,
    rights: u32,
}

const ES: u32 = 0;
const CS: u32 = 1;
const SS: u32 = 2;
const DS: u32 = 3;
const FS: u32 = 4;
const GS: u32 = 5;
const LDTR: u32 = 6;
const TR: u32 = 7;
const ALL: [u32; 6] = [ES, CS, SS, DS, FS, GS];
const DATA: [u32; 4] = [DS, ES, FS, GS];

impl Segment {
    fn of(v: &Vmcs, number: u32) -> Segment {
        Segment {
            selector: v.get(Field(Field::GUEST_ES.0 + 2 * number)) as u16,
            base: v.get(Field(Field::GUEST_ES_BASE.0 + 2 * number)),
            limit: v.get32(Field(Field::GUEST_ES_LIMIT.0 + 2 * number)),
            rights: v.get32(Field(Field::GUEST_ES_RIGHTS.0 + 2 * number)),
        }
    }
    fn usable(self) -> bool {
        self.rights >> 16 & 1 == 0
    }
    fn kind(self) -> u32 {
        self.rights & 15
    }
    fn s(self) -> bool {
        self.rights >> 4 & 1 != 0
    }
    fn dpl(self) -> u32 {
        self.rights >> 5 & 3
    }
    fn present(self) -> bool {
        self.rights >> 7 & 1 != 0
    }
    fn rpl(self) -> u32 {
        u32::from(self.selector) & 3
    }
    fn ti(self) -> bool {
        self.selector & 4 != 0
    }
    /// Bits 11:8 and 31:17.
    fn reserved(self) -> bool {
        self.rights & 0xfffe_0f00 != 0
    }
    /// G does not fit the limit.
    fn granularity(self) -> bool {
        let g = self.rights >> 15 & 1 != 0;
        self.limit & 0xfff != 0xfff && g || self.limit >> 20 != 0 && !g
    }
}

fn any(v: &Vmcs, numbers: &[u32], broken: impl Fn(Segment) -> bool) -> bool {
    numbers.iter().any(|&number| broken(Segment::of(v, number)))
}

/// CS always, the others where they are usable.
fn any_usable(v: &Vmcs, numbers: &[u32], broken: impl Fn(Segment) -> bool) -> bool {
    numbers.iter().any(|&number| {
        let segment = Segment::of(v, number);
        (number == CS || segment.usable()) && broken(segment)
    })
}

/// Bit 0 of a PDPTE is set and one that is reserved.
fn bad_pdpte(value: u64, p: &Processor<'_>) -> bool {
    let reserved = (!0u64 << p.physical_bits) | 0x1e6;
    value & 1 != 0 && value & reserved != 0
}

/// The guest has PDPTEs.
fn pae(v: &Vmcs) -> bool {
    cr0(v) & PG != 0 && cr4(v) & PAE != 0 && !wide(v)
}

/// Checks on the guest-state area.
pub const GUEST: &[Rule] = rules! {
    // 27.3.1.1 "Checks on Guest Control Registers, Debug Registers, and MSRs".
    "27.3.1.1" "CR0 has the bits that are fixed in VMX operation; an unrestricted guest may be without PE and PG" =>
        |v, _| {
            let fixed = if unrestricted(v) { CR0_FIXED0 & !(PE | PG) } else { CR0_FIXED0 };
            cr0(v) & fixed != fixed || cr0(v) & !CR0_FIXED1 != 0
        };
    "27.3.1.1" "CR0.PG needs CR0.PE" => |v, _| cr0(v) & PG != 0 && cr0(v) & PE == 0;
    "27.3.1.1" "CR4 has the bits that are fixed in VMX operation" =>
        |v, p| cr4(v) & CR4_FIXED0 != CR4_FIXED0 || cr4(v) & !cr4_fixed1(p.features) != 0;
    "27.3.1.1" "CR4.CET needs CR0.WP" => |v, _| cr4(v) & CET != 0 && cr0(v) & WP == 0;
    "27.3.1.1" "reserved bits of IA32_DEBUGCTL" =>
        |v, p| v.entry_controls().contains(Entry::LOAD_DEBUG) && v.get(Field::GUEST_DEBUGCTL) & !p.debugctl != 0;
    "27.3.1.1" "IA-32e mode needs CR0.PG and CR4.PAE" =>
        |v, _| wide(v) && (cr0(v) & PG == 0 || cr4(v) & PAE == 0);
    "27.3.1.1" "PCIDs need IA-32e mode" => |v, _| !wide(v) && cr4(v) & PCIDE != 0;
    "27.3.1.1" "CR3 within the physical-address width" => |v, p| p.beyond(v.get(Field::GUEST_CR3));
    "27.3.1.1" "bits 63:32 of DR7" =>
        |v, _| v.entry_controls().contains(Entry::LOAD_DEBUG) && v.get(Field::GUEST_DR7) >> 32 != 0;
    "27.3.1.1" "canonical IA32_SYSENTER_ESP and IA32_SYSENTER_EIP" =>
        |v, p| [Field::GUEST_SYSENTER_ESP, Field::GUEST_SYSENTER_EIP].iter().any(|&at| !p.canonical(v.get(at)));
    "27.3.1.1" "reserved bits of IA32_PERF_GLOBAL_CTRL" =>
        |v, p| v.entry_controls().contains(Entry::LOAD_PERF_GLOBAL_CTRL)
            && v.get(Field::GUEST_PERF_GLOBAL_CTRL) & !p.perf_global_ctrl != 0;
    "27.3.1.1" "memory types in IA32_PAT" =>
        |v, _| v.entry_controls().contains(Entry::LOAD_PAT) && Processor::bad_pat(v.get(Field::GUEST_PAT));
    "27.3.1.1" "IA32_EFER: reserved bits, LMA as the VM-entry control, and with paging LME as LMA" =>
        |v, p| {
            let efer = v.get(Field::GUEST_EFER);
            let (lma, lme) = (efer & LMA != 0, efer & LME != 0);
            v.entry_controls().contains(Entry::LOAD_EFER)
                && (p.bad_efer(efer) || lma != wide(v) || cr0(v) & PG != 0 && lma != lme)
        };
    "27.3.1.1" "reserved bits of IA32_RTIT_CTL" =>
        |v, p| v.entry_controls().contains(Entry::LOAD_RTIT_CTL)
            && p.model.units.pt.is_none_or(|caps| RtitCtl::accept(v.get(Field::GUEST_RTIT_CTL), &caps).is_err());
    "27.3.1.1" "reserved bits of IA32_LBR_CTL" =>
        |v, p| v.entry_controls().contains(Entry::LOAD_LBR_CTL) && v.get(Field::GUEST_LBR_CTL) & !p.lbr_ctl() != 0;
    "27.3.1.1" "reserved bits of PKRS" =>
        |v, _| v.entry_controls().contains(Entry::LOAD_PKRS) && v.get(Field::GUEST_PKRS) >> 32 != 0;

    // 27.3.1.2 "Checks on Guest Segment Registers".
    "27.3.1.2" "TR is in the GDT" => |v, _| Segment::of(v, TR).ti();
    "27.3.1.2" "LDTR is in the GDT" => |v, _| Segment::of(v, LDTR).usable() && Segment::of(v, LDTR).ti();
    "27.3.1.2" "SS has the RPL of CS" =>
        |v, _| !virtual8086(v) && !unrestricted(v) && Segment::of(v, SS).rpl() != Segment::of(v, CS).rpl();
    "27.3.1.2" "bases in virtual-8086 mode" =>
        |v, _| virtual8086(v) && any(v, &ALL, |s| s.base != u64::from(s.selector) << 4);
    "27.3.1.2" "canonical bases of TR, FS and GS" => |v, p| any(v, &[TR, FS, GS], |s| !p.canonical(s.base));
    "27.3.1.2" "canonical base of LDTR" => |v, p| any(v, &[LDTR], |s| s.usable() && !p.canonical(s.base));
    "27.3.1.2" "bases of CS, SS, DS and ES of 32 bits" => |v, _| any_usable(v, &[CS, SS, DS, ES], |s| s.base >> 32 != 0);
    "27.3.1.2" "limits in virtual-8086 mode" => |v, _| virtual8086(v) && any(v, &ALL, |s| s.limit != 0xffff);
    "27.3.1.2" "access rights in virtual-8086 mode" => |v, _| virtual8086(v) && any(v, &ALL, |s| s.rights != 0xf3);
    "27.3.1.2" "type of CS" =>
        |v, _| !virtual8086(v)
            && !matches!((Segment::of(v, CS).kind(), unrestricted(v)), (9 | 11 | 13 | 15, _) | (3, true));
    "27.3.1.2" "type of SS" =>
        |v, _| !virtual8086(v) && any_usable(v, &[SS], |s| !matches!(s.kind(), 3 | 7));
    "27.3.1.2" "types of DS, ES, FS and GS" =>
        |v, _| !virtual8086(v) && any_usable(v, &DATA, |s| s.kind() & 1 == 0 || s.kind() & 10 == 8);
    "27.3.1.2" "S" => |v, _| !virtual8086(v) && any_usable(v, &ALL, |s| !s.s());
    "27.3.1.2" "DPL of CS" =>
        |v, _| {
            let (cs, ss) = (Segment::of(v, CS), Segment::of(v, SS));
            !virtual8086(v)
                && match cs.kind() {
                    3 => cs.dpl() != 0,
                    9 | 11 => cs.dpl() != ss.dpl(),
                    _ => cs.dpl() > ss.dpl(),
                }
        };
    "27.3.1.2" "DPL of SS" =>
        |v, _| {
            let (cs, ss) = (Segment::of(v, CS), Segment::of(v, SS));
            !virtual8086(v)
                && (!unrestricted(v) && ss.dpl() != ss.rpl()
                    || (cs.kind() == 3 || cr0(v) & PE == 0) && ss.dpl() != 0)
        };
    "27.3.1.2" "DPL of DS, ES, FS and GS" =>
        |v, _| !virtual8086(v)
            && !unrestricted(v)
            && any_usable(v, &DATA, |s| s.kind() <= 11 && s.dpl() < s.rpl());
    "27.3.1.2" "P" => |v, _| !virtual8086(v) && any_usable(v, &ALL, |s| !s.present());
    "27.3.1.2" "reserved bits of access rights" => |v, _| !virtual8086(v) && any_usable(v, &ALL, Segment::reserved);
    "27.3.1.2" "no D/B in 64-bit mode" =>
        |v, _| !virtual8086(v) && wide(v) && Segment::of(v, CS).rights >> 13 & 3 == 3;
    "27.3.1.2" "G" => |v, _| !virtual8086(v) && any_usable(v, &ALL, Segment::granularity);
    "27.3.1.2" "type of TR" =>
        |v, _| !matches!((Segment::of(v, TR).kind(), wide(v)), (11, _) | (3, false));
    "27.3.1.2" "access rights of TR" =>
        |v, _| any(v, &[TR], |s| s.s() || !s.present() || s.reserved() || s.granularity() || !s.usable());
    "27.3.1.2" "access rights of LDTR" =>
        |v, _| any(v, &[LDTR], |s| s.usable()
            && (s.kind() != 2 || s.s() || !s.present() || s.reserved() || s.granularity()));

    // 27.3.1.3 "Checks on Guest Descriptor-Table Registers".
    "27.3.1.3" "canonical bases of GDTR and IDTR" =>
        |v, p| [Field::GUEST_GDTR_BASE, Field::GUEST_IDTR_BASE].iter().any(|&at| !p.canonical(v.get(at)));
    "27.3.1.3" "limits of GDTR and IDTR of 16 bits" =>
        |v, _| [Field::GUEST_GDTR_LIMIT, Field::GUEST_IDTR_LIMIT].iter().any(|&at| v.get(at) >> 16 != 0);

    // 27.3.1.4 "Checks on Guest RIP, RFLAGS, and SSP".
    "27.3.1.4" "RIP" =>
        |v, p| {
            let rip = v.get(Field::GUEST_RIP);
            let long = wide(v) && Segment::of(v, CS).rights >> 13 & 1 != 0;
            if long { !p.canonical(rip) } else { rip >> 32 != 0 }
        };
    "27.3.1.4" "reserved bits of RFLAGS" => |v, _| rflags(v) & RFLAGS_ZERO != 0 || rflags(v) & 2 == 0;
    "27.3.1.4" "no virtual-8086 mode in IA-32e mode or without protection" =>
        |v, _| virtual8086(v) && (wide(v) || cr0(v) & PE == 0);
    "27.3.1.4" "IF for an external interrupt" =>
        |v, _| injected(v).is_some_and(|i| i.kind() == 0) && rflags(v) & IF == 0;

    // 27.3.1.5 "Checks on Guest Non-Register State".
    "27.3.1.5" "activity state" => |v, _| state(v) > activity::WAIT_FOR_SIPI;
    "27.3.1.5" "HLT needs an SS with DPL 0" => |v, _| state(v) == activity::HLT && Segment::of(v, SS).dpl() != 0;
    "27.3.1.5" "blocking by STI or MOV SS needs the active state" =>
        |v, _| (held_off(v).sti() || held_off(v).mov_ss()) && state(v) != activity::ACTIVE;
    "27.3.1.5" "the activity state lets the injected event in" =>
        |v, _| injected(v).is_some_and(|i| match (state(v), i.kind(), i.vector()) {
            (activity::ACTIVE, ..) => false,
            (activity::HLT, kind, vector) => !matches!((kind, vector), (0 | 2, _) | (3, 1 | 18) | (7, 0)),
            (activity::SHUTDOWN, kind, vector) => !matches!((kind, vector), (2, _) | (3, 18)),
            _ => true,
        });
    "27.3.1.5" "reserved bits of the interruptibility state" => |v, _| held_off(v).reserved() != 0;
    "27.3.1.5" "not blocked by both STI and MOV SS" => |v, _| held_off(v).sti() && held_off(v).mov_ss();
    "27.3.1.5" "blocking by STI needs IF" => |v, _| held_off(v).sti() && rflags(v) & IF == 0;
    "27.3.1.5" "an external interrupt is not blocked" =>
        |v, _| injected(v).is_some_and(|i| i.kind() == 0) && (held_off(v).sti() || held_off(v).mov_ss());
    "27.3.1.5" (failure::NMI) "an NMI is not blocked by MOV SS" =>
        |v, _| injected(v).is_some_and(|i| i.kind() == 2) && held_off(v).mov_ss();
    "27.3.1.5" "no blocking by SMI outside SMM" => |v, _| held_off(v).smi();
    "27.3.1.5" "a virtual NMI is not blocked by another" =>
        |v, _| injected(v).is_some_and(|i| i.kind() == 2) && v.pin().contains(Pin::VIRTUAL_NMIS) && held_off(v).nmi();
    "27.3.1.5" "no enclave" => |v, _| held_off(v).enclave();
    "27.3.1.5" "reserved bits of the pending debug exceptions" =>
        |v, _| v.get(Field::GUEST_PENDING_DEBUG) & !0x1_500f != 0;
    "27.3.1.5" "a pending single step as TF and BTF have it" =>
        |v, _| {
            let stepping = rflags(v) & TF != 0 && v.get(Field::GUEST_DEBUGCTL) & BTF == 0;
            let waits = held_off(v).sti() || held_off(v).mov_ss() || state(v) == activity::HLT;
            waits && (v.get(Field::GUEST_PENDING_DEBUG) & BS != 0) != stepping
        };
    "27.3.1.5" "no pending debug exception of a transaction" => |v, _| v.get(Field::GUEST_PENDING_DEBUG) >> 16 & 1 != 0;
    "27.3.1.5" (failure::LINK_POINTER) "VMCS link pointer" =>
        |v, p| {
            let pointer = v.get(Field::LINK_POINTER);
            let shadow = v.secondary().contains(Secondary::VMCS_SHADOWING);
            let identifier = || (p.read)(pointer) as u32;
            pointer != u64::MAX
                && (p.misplaced(pointer, 4096) || identifier() != REVISION | if shadow { SHADOW } else { 0 })
        };

    // 27.3.1.6 "Checks on Guest Page-Directory-Pointer-Table Entries".
    "27.3.1.6" (failure::PDPTE) "PDPTEs of the VMCS, with EPT" =>
        |v, p| pae(v)
            && v.secondary().contains(Secondary::EPT)
            && (0..4).any(|n| bad_pdpte(v.get(Field(Field::GUEST_PDPTE0.0 + 2 * n)), p));
    "27.3.1.6" (failure::PDPTE) "PDPTEs in memory, without EPT" =>
        |v, p| pae(v)
            && !v.secondary().contains(Secondary::EPT)
            && (0..4).any(|n| bad_pdpte((p.read)((v.get(Field::GUEST_CR3) & 0xffff_ffe0) + 8 * n), p));
};
