//! A CPU's state between KVM and the software engine, as plain data on both sides.
//!
//! # What does not go along
//! KVM keeps no place for debug exceptions that were held off, for an armed MONITOR, or for an open transaction: a CPU goes to
//! KVM only where it has none of them ([`portable`]). The other way KVM may be in the middle of delivering an event, which the
//! engine then begins anew ([`Vcpu::pending`]). Of the x87 environment KVM keeps 64-bit pointers and no selectors.

use engine::{Activity, CpuState, Event, Segment, Source, Table};
use kvm_bindings::{
    KVM_VCPUEVENT_VALID_NMI_PENDING, KVM_VCPUEVENT_VALID_SHADOW, KVM_X86_SHADOW_INT_MOV_SS, KVM_X86_SHADOW_INT_STI,
    kvm_debugregs, kvm_dtable, kvm_regs, kvm_segment, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use x86::cpuid::Feature;
use x86::model::CpuModel;
use x86::msr::*;

/// XSTATE_BV bits of x87, SSE, AVX, AVX-512 (opmasks, ZMM_Hi256, Hi16_ZMM) and PKRU.
const X87: u64 = 1 << 0;
const SSE: u64 = 1 << 1;
const AVX: u64 = 1 << 2;
const OPMASK: u64 = 1 << 5;
const ZMM_HI256: u64 = 1 << 6;
const HI16_ZMM: u64 = 1 << 7;
const PKRU: u64 = 1 << 9;
/// Offsets in an XSAVE area. SDM Vol. 1 13.4 "XSAVE Area".
const MXCSR: usize = 24;
const XSTATE_BV: usize = 512;
const YMM_HI: usize = 576;

/// A CPU's state as KVM hands it out: one member an ioctl.
#[derive(Default)]
pub struct Vcpu {
    /// KVM_GET_REGS.
    pub regs: kvm_regs,
    /// KVM_GET_SREGS.
    pub sregs: kvm_sregs,
    /// KVM_GET_DEBUGREGS.
    pub debug: kvm_debugregs,
    /// KVM_GET_XSAVE.
    pub xsave: kvm_xsave,
    /// KVM_GET_XCRS, where the model has XSAVE.
    pub xcrs: kvm_xcrs,
    /// KVM_GET_VCPU_EVENTS.
    pub events: kvm_vcpu_events,
    /// KVM_GET_MSRS of [`msrs`], in that order.
    pub msrs: Vec<u64>,
}

/// The registers that KVM holds in its list of MSRs and the engine in itself, of this model.
pub fn msrs(model: &CpuModel) -> Vec<u32> {
    let features = model.features();
    [
        (IA32_SYSENTER_CS, features.has(Feature::Sep)),
        (IA32_SYSENTER_ESP, features.has(Feature::Sep)),
        (IA32_SYSENTER_EIP, features.has(Feature::Sep)),
        (IA32_STAR, features.has(Feature::Lm)),
        (IA32_LSTAR, features.has(Feature::Lm)),
        (IA32_CSTAR, features.has(Feature::Lm)),
        (IA32_FMASK, features.has(Feature::Lm)),
        (IA32_KERNEL_GS_BASE, features.has(Feature::Lm)),
        (
            IA32_TSC_AUX,
            features.has(Feature::Rdtscp) || features.has(Feature::Rdpid),
        ),
        (IA32_XSS, features.has(Feature::Xsaves)),
    ]
    .into_iter()
    .filter_map(|(msr, there)| there.then_some(msr))
    .collect()
}

/// Where the engine keeps one of [`msrs`].
fn held(state: &mut CpuState, msr: u32) -> Option<&mut u64> {
    let held = &mut state.msrs;
    Some(match msr {
        IA32_SYSENTER_CS => &mut held.sysenter_cs,
        IA32_SYSENTER_ESP => &mut held.sysenter_esp,
        IA32_SYSENTER_EIP => &mut held.sysenter_eip,
        IA32_STAR => &mut held.star,
        IA32_LSTAR => &mut held.lstar,
        IA32_CSTAR => &mut held.cstar,
        IA32_FMASK => &mut held.fmask,
        IA32_KERNEL_GS_BASE => &mut held.kernel_gs_base,
        IA32_TSC_AUX => &mut held.tsc_aux,
        IA32_XSS => &mut held.xss,
        _ => return None,
    })
}

/// Whether KVM has a place for all of a state. One that is not portable becomes so after an instruction or two.
pub fn portable(state: &CpuState) -> bool {
    state.pending_debug == 0
        && state.transaction.is_none()
        && state.monitor.line.is_none()
        && state.smm.inside.is_none()
        && matches!(
            state.activity,
            Activity::Running | Activity::Halted | Activity::WaitForSipi
        )
}

fn segment(s: &Segment) -> kvm_segment {
    let bits = |shift: u16, count: u16| (s.attributes >> shift & ((1 << count) - 1)) as u8;
    kvm_segment {
        base: s.base,
        limit: s.limit,
        selector: s.selector,
        type_: bits(0, 4),
        s: bits(4, 1),
        dpl: bits(5, 2),
        present: bits(7, 1),
        avl: bits(12, 1),
        l: bits(13, 1),
        db: bits(14, 1),
        g: bits(15, 1),
        unusable: u8::from(!s.present()),
        padding: 0,
    }
}

fn of_segment(s: &kvm_segment) -> Segment {
    let bit = |value: u8, shift: u16| u16::from(value) << shift;
    // What is unusable is not present to the engine; only a base may mean something, as of FS and GS in 64-bit mode.
    let present = u8::from(s.present != 0 && s.unusable == 0);
    Segment {
        selector: s.selector,
        base: s.base,
        limit: s.limit,
        attributes: bit(s.type_ & 0xf, 0)
            | bit(s.s & 1, 4)
            | bit(s.dpl & 3, 5)
            | bit(present, 7)
            | bit(s.avl & 1, 12)
            | bit(s.l & 1, 13)
            | bit(s.db & 1, 14)
            | bit(s.g & 1, 15),
    }
}

fn table(t: &Table) -> kvm_dtable {
    kvm_dtable {
        base: t.base,
        limit: t.limit,
        padding: [0; 3],
    }
}

fn of_table(t: &kvm_dtable) -> Table {
    Table {
        base: t.base,
        limit: t.limit,
    }
}

/// The XSAVE area as bytes, least significant byte of each word first.
fn bytes(xsave: &kvm_xsave) -> Vec<u8> {
    xsave.region.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn words(bytes: &[u8], xsave: &mut kvm_xsave) {
    for (word, four) in xsave.region.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = u32::from_le_bytes([four[0], four[1], four[2], four[3]]);
    }
}

/// Where PKRU lies in the standard form, if the model has it.
fn pkru_at(model: &CpuModel) -> Option<usize> {
    let offset = model.cpuid(0xd, 9)[1] as usize;
    model.features().has(Feature::Pku).then_some(offset)
}

/// Where the components of AVX-512 lie in the standard form (opmasks, ZMM_Hi256, Hi16_ZMM), if the model has them.
fn avx512_at(model: &CpuModel) -> Option<[usize; 3]> {
    let offsets = [5, 6, 7].map(|component| model.cpuid(0xd, component)[1] as usize);
    model.features().has(Feature::Avx512f).then_some(offsets)
}

fn put_quarters(area: &mut [u8], quarters: impl Iterator<Item = u128>) {
    for (slot, quarter) in area.chunks_exact_mut(16).zip(quarters) {
        slot.copy_from_slice(&quarter.to_le_bytes());
    }
}

impl Vcpu {
    /// Takes on the engine's state. What the engine does not know of (the APIC's base, KVM's flags) stays as KVM gave it.
    pub fn take(&mut self, state: &CpuState, model: &CpuModel) {
        let [
            rax,
            rcx,
            rdx,
            rbx,
            rsp,
            rbp,
            rsi,
            rdi,
            r8,
            r9,
            r10,
            r11,
            r12,
            r13,
            r14,
            r15,
        ] = state.gpr;
        self.regs = kvm_regs {
            rax,
            rbx,
            rcx,
            rdx,
            rsi,
            rdi,
            rsp,
            rbp,
            r8,
            r9,
            r10,
            r11,
            r12,
            r13,
            r14,
            r15,
            rip: state.rip,
            rflags: state.rflags.into_bits(),
        };
        let [es, cs, ss, ds, fs, gs] = state.segments.each_ref().map(segment);
        let s = &mut self.sregs;
        (s.es, s.cs, s.ss, s.ds, s.fs, s.gs) = (es, cs, ss, ds, fs, gs);
        // KVM takes the privilege level from here, whether the segment is usable or not.
        s.ss.dpl = state.cpl;
        (s.ldt, s.tr) = (segment(&state.ldtr), segment(&state.tr));
        // A task register is always usable, and busy; in IA-32e mode it is a 64-bit one. SDM Vol. 3C 27.3.1.2 "Checks on Guest
        // Segment Registers".
        s.tr.unusable = 0;
        s.tr.present = 1;
        s.tr.s = 0;
        s.tr.type_ = if state.efer.lma() || s.tr.type_ & 8 != 0 { 11 } else { 3 };
        (s.gdt, s.idt) = (table(&state.gdtr), table(&state.idtr));
        (s.cr0, s.cr4, s.efer) = (state.cr0.into(), state.cr4.into(), state.efer.into());
        (s.cr2, s.cr3) = (state.cr2, state.cr3);
        s.interrupt_bitmap = [0; 4];
        self.debug.db.copy_from_slice(&state.dr[..4]);
        (self.debug.dr6, self.debug.dr7) = (state.dr[6], state.dr[7]);

        let mut area = bytes(&self.xsave);
        area[..416].copy_from_slice(&state.fpu.fxsave(true, true));
        area[XSTATE_BV..XSTATE_BV + 16].fill(0);
        let mut present = X87 | SSE;
        if model.features().has(Feature::Avx) {
            present |= AVX;
            for (slot, half) in area[YMM_HI..].chunks_exact_mut(16).zip(&state.fpu.ymm_hi) {
                slot.copy_from_slice(&half.to_le_bytes());
            }
        }
        if let Some([opmask, hi256, hi16]) = avx512_at(model) {
            present |= OPMASK | ZMM_HI256 | HI16_ZMM;
            for (slot, k) in area[opmask..].chunks_exact_mut(8).zip(&state.fpu.avx512.k) {
                slot.copy_from_slice(&k.to_le_bytes());
            }
            put_quarters(&mut area[hi256..], state.fpu.zmm_hi256(16).flatten());
            put_quarters(&mut area[hi16..], (16..32).flat_map(|n| state.fpu.zmm(n)));
        }
        if let Some(at) = pkru_at(model) {
            present |= PKRU;
            area[at..at + 4].copy_from_slice(&state.pkru.to_le_bytes());
        }
        area[XSTATE_BV..XSTATE_BV + 8].copy_from_slice(&present.to_le_bytes());
        words(&area, &mut self.xsave);
        self.xcrs.nr_xcrs = 1;
        self.xcrs.xcrs[0].xcr = 0;
        self.xcrs.xcrs[0].value = state.xcr0;

        self.events = kvm_vcpu_events::default();
        self.events.nmi.masked = u8::from(state.nmi_blocked);
        self.events.interrupt.shadow = match (state.stack_shadow, state.shadow) {
            (true, _) => KVM_X86_SHADOW_INT_MOV_SS as u8,
            (false, true) => KVM_X86_SHADOW_INT_STI as u8,
            (false, false) => 0,
        };
        // No NMI waits in KVM: one that did when the CPU was there last went to the local APIC.
        self.events.flags = KVM_VCPUEVENT_VALID_SHADOW | KVM_VCPUEVENT_VALID_NMI_PENDING;
        let mut from = state.clone();
        self.msrs = msrs(model)
            .into_iter()
            .map(|msr| held(&mut from, msr).map_or(0, |value| *value))
            .collect();
    }

    /// The engine's state. What KVM does not know of (counts of steps, whether the CPU is halted) is as in `before`.
    pub fn give(&self, before: &CpuState, model: &CpuModel) -> CpuState {
        let (r, s) = (&self.regs, &self.sregs);
        let mut state = before.clone();
        state.gpr = [
            r.rax, r.rcx, r.rdx, r.rbx, r.rsp, r.rbp, r.rsi, r.rdi, r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14,
            r.r15,
        ];
        (state.rip, state.rflags) = (r.rip, r.rflags.into());
        state.segments = [&s.es, &s.cs, &s.ss, &s.ds, &s.fs, &s.gs].map(of_segment);
        (state.ldtr, state.tr) = (of_segment(&s.ldt), of_segment(&s.tr));
        (state.gdtr, state.idtr) = (of_table(&s.gdt), of_table(&s.idt));
        (state.cr0, state.cr4, state.efer) = (s.cr0.into(), s.cr4.into(), s.efer.into());
        (state.cr2, state.cr3) = (s.cr2, s.cr3);
        state.cpl = match (state.cr0.pe(), state.rflags.vm()) {
            (false, _) => 0,
            (true, true) => 3,
            (true, false) => s.ss.dpl & 3,
        };
        state.dr[..4].copy_from_slice(&self.debug.db);
        (state.dr[6], state.dr[7]) = (self.debug.dr6, self.debug.dr7);

        self.give_xsave(&mut state, model);
        if self.xcrs.nr_xcrs > 0 && model.features().has(Feature::Xsave) {
            state.xcr0 = self.xcrs.xcrs[0].value;
        }
        state.nmi_blocked = self.events.nmi.masked != 0;
        let shadow = u32::from(self.events.interrupt.shadow);
        state.stack_shadow = shadow & KVM_X86_SHADOW_INT_MOV_SS != 0;
        state.shadow = shadow != 0;
        (state.pending_debug, state.transaction) = (0, None);
        // Others have executed: nobody has been notified of what comes next.
        state.observed = None;
        for (msr, value) in msrs(model).into_iter().zip(&self.msrs) {
            if let Some(slot) = held(&mut state, msr) {
                *slot = *value;
            }
        }
        state
    }

    /// A component whose bit in XSTATE_BV is clear is in its initial configuration, whatever its bytes say. SDM Vol. 1 13.8.1
    /// "Standard Form of XRSTOR".
    fn give_xsave(&self, state: &mut CpuState, model: &CpuModel) {
        let area = bytes(&self.xsave);
        let mut present = [0; 8];
        present.copy_from_slice(&area[XSTATE_BV..XSTATE_BV + 8]);
        let present = u64::from_le_bytes(present);
        let fpu = &mut state.fpu;
        if present & X87 != 0 {
            fpu.load_x87(&area, true);
        } else {
            fpu.fninit();
            fpu.r = [0; 8];
        }
        if present & SSE != 0 {
            fpu.load_xmm(&area, true);
        } else {
            fpu.xmm = [0; 16];
        }
        let mxcsr = [area[MXCSR], area[MXCSR + 1], area[MXCSR + 2], area[MXCSR + 3]];
        fpu.mxcsr = u32::from_le_bytes(mxcsr) & fpu.mxcsr_mask;
        for (half, slot) in fpu.ymm_hi.iter_mut().zip(area[YMM_HI..].chunks_exact(16)) {
            let mut value = [0; 16];
            if present & AVX != 0 {
                value.copy_from_slice(slot);
            }
            *half = u128::from_le_bytes(value);
        }
        if let Some([opmask, hi256, hi16]) = avx512_at(model) {
            let component = |bit: u64, at: usize| (present & bit != 0).then(|| &area[at..]);
            fpu.load_opmasks(component(OPMASK, opmask));
            fpu.load_zmm_hi256(component(ZMM_HI256, hi256), 16);
            fpu.load_hi16_zmm(component(HI16_ZMM, hi16));
        }
        if let Some(at) = pkru_at(model) {
            state.pkru = match present & PKRU != 0 {
                true => u32::from_le_bytes([area[at], area[at + 1], area[at + 2], area[at + 3]]),
                false => 0,
            };
        }
    }

    /// The event that KVM is in the middle of delivering, if it is. A software interrupt is none: RIP is still at its
    /// instruction, which runs again.
    pub fn pending(&self) -> Option<Event> {
        let events = &self.events;
        let external = |vector, source| {
            Some(Event {
                vector,
                error: None,
                source,
            })
        };
        if events.exception.injected != 0 && !matches!(events.exception.nr, 3 | 4) {
            let error = (events.exception.has_error_code != 0).then_some(events.exception.error_code);
            return Some(Event {
                vector: events.exception.nr,
                error,
                source: Source::Exception,
            });
        }
        if events.nmi.injected != 0 {
            return external(2, Source::Nmi);
        }
        if events.interrupt.injected != 0 && events.interrupt.soft == 0 {
            return external(events.interrupt.nr, Source::External);
        }
        None
    }
}

/// Whether a CPU can be handed over to KVM as it is, and has not come to a triple fault.
pub fn can_enter(state: &CpuState) -> bool {
    portable(state) && state.activity != Activity::Shutdown
}

#[cfg(test)]
#[path = "vcpu_state_test.rs"]
mod tests;
