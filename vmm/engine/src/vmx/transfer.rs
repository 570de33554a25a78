//! What VM entries and VM exits load and save (SDM Vol. 3C 27.3.2 "Loading Guest State", 28.3 "Saving Guest State", 28.5 "Loading Host
//! State").

use x86::cr::{Cr0, Cr4, Efer};
use x86::msr::{
    IA32_DEBUGCTL, IA32_FS_BASE, IA32_GS_BASE, IA32_LBR_CTL, IA32_PAT, IA32_PERF_GLOBAL_CTRL, IA32_RTIT_CTL,
    IA32_X2APIC_BASE,
};
use x86::rflags::flag as rf;
use x86::vmx::controls::{Entry, Exit, Pin, Secondary};
use x86::vmx::exits::{Interruptibility, activity};
use x86::vmx::{Field, Vmcs};

use crate::cpu::{Activity, CS, Cpu, FS, GS, SS, Segment, Table, slot};
use crate::watch::DUE;

/// Bits of CR0 that neither VM entries nor VM exits change: ET, CD, NW and what is reserved.
const CR0_KEPT: u64 = !0x8005_002f;
/// Unusable, in access rights.
const UNUSABLE: u64 = 1 << 16;
/// IA32_EFER.LMA and LME.
const LONG: u64 = 0x500;

/// The fields of a segment register: selector, limit, access rights, base. `number` counts ES, CS, SS, DS, FS, GS, LDTR, TR.
fn fields(number: u32) -> [Field; 4] {
    [
        Field(Field::GUEST_ES.0 + 2 * number),
        Field(Field::GUEST_ES_LIMIT.0 + 2 * number),
        Field(Field::GUEST_ES_RIGHTS.0 + 2 * number),
        Field(Field::GUEST_ES_BASE.0 + 2 * number),
    ]
}

fn save_segment(v: &mut Vmcs, number: u32, s: Segment, dpl: Option<u8>) {
    let [selector, limit, rights, base] = fields(number);
    let mut bits = u64::from(s.attributes & 0xf0ff);
    if !s.present() {
        bits |= UNUSABLE;
    }
    if let Some(dpl) = dpl {
        bits = bits & !0x60 | u64::from(dpl) << 5;
    }
    v.set(selector, s.selector.into());
    v.set(limit, s.limit.into());
    v.set(rights, bits);
    v.set(base, s.base);
}

fn load_segment(v: &Vmcs, number: u32) -> Segment {
    let [selector, limit, rights, base] = fields(number);
    let rights = v.get(rights);
    Segment {
        selector: v.get(selector) as u16,
        base: v.get(base),
        limit: v.get32(limit),
        // An unusable segment is one that is not present.
        attributes: if rights & UNUSABLE != 0 {
            rights as u16 & 0xf07f
        } else {
            rights as u16 & 0xf0ff
        },
    }
}

/// The host's data segment of a selector. SDM Vol. 3C 28.5.2 "Loading Host Segment and Descriptor-Table Registers".
fn host_segment(selector: u64, base: u64) -> Segment {
    Segment {
        selector: selector as u16,
        base,
        limit: u32::MAX,
        attributes: if selector == 0 { 0xc013 } else { 0xc093 },
    }
}

impl Cpu {
    /// RDMSR between two instructions.
    pub(super) fn msr_now(&mut self, msr: u32) -> Option<u64> {
        match self.held_msr(msr) {
            Some(value) => Some(value),
            None => self.read_unit(msr).ok(),
        }
    }

    /// WRMSR between two instructions. Whether it would have been #GP.
    fn set_msr_now(&mut self, msr: u32, value: u64) -> bool {
        let written = match self.write_held_msr(msr, value) {
            Some(written) => written,
            None => self.write_unit(msr, value),
        };
        self.watched.ask = true;
        written.is_err()
    }

    /// Loads a register of the state area: as [`Cpu::set_msr_now`] does, unless it has the value. A unit that is written to is asked anew what it
    /// wants to hear, which costs more than all the rest of a VM entry.
    fn load_msr_now(&mut self, msr: u32, value: u64) {
        if self.msr_now(msr) != Some(value) {
            self.set_msr_now(msr, value);
        }
    }

    /// Loads DR7, of which the units hear where it differs.
    fn load_dr7(&mut self, value: u64) {
        self.watched.ask |= self.dr[7] != value;
        self.dr[7] = value;
    }

    /// Saves the guest's state.
    pub(super) fn save_guest(&mut self, v: &mut Vmcs) {
        let Some(guest) = self.guest() else { return };
        let (pin, exit, nmi_blocked) = (guest.pin, guest.exit, guest.virtual_nmi_blocked);
        v.set(Field::GUEST_CR0, self.cr0.into_bits());
        v.set(Field::GUEST_CR3, self.cr3);
        v.set(Field::GUEST_CR4, self.cr4.into_bits());
        if exit.contains(Exit::SAVE_DEBUG) {
            v.set(Field::GUEST_DR7, self.dr[7]);
            let value = self.msr_now(IA32_DEBUGCTL).unwrap_or(0);
            v.set(Field::GUEST_DEBUGCTL, value);
        }
        v.set(Field::GUEST_SYSENTER_CS, self.msrs.sysenter_cs);
        v.set(Field::GUEST_SYSENTER_ESP, self.msrs.sysenter_esp);
        v.set(Field::GUEST_SYSENTER_EIP, self.msrs.sysenter_eip);
        if exit.contains(Exit::SAVE_PAT) {
            let value = self.msr_now(IA32_PAT).unwrap_or(0);
            v.set(Field::GUEST_PAT, value);
        }
        // Where either control of such a register can be 1 it is saved, whatever they are.
        let supported = self.vmx_caps.map_or(Exit::NONE, |caps| caps.exit);
        for (control, msr, field) in [
            (Exit::CLEAR_RTIT_CTL, IA32_RTIT_CTL, Field::GUEST_RTIT_CTL),
            (Exit::CLEAR_LBR_CTL, IA32_LBR_CTL, Field::GUEST_LBR_CTL),
        ] {
            if supported.contains(control) {
                let value = self.msr_now(msr).unwrap_or(0);
                v.set(field, value);
            }
        }
        if exit.contains(Exit::SAVE_EFER) {
            v.set(Field::GUEST_EFER, self.efer.into_bits());
        }
        let long = if self.efer.lma() { Entry::GUEST_64BIT.0 } else { 0 };
        // IA32_VMX_MISC[5]: the control follows the mode.
        let entry = v.get32(Field::ENTRY_CONTROLS) & !Entry::GUEST_64BIT.0 | long;
        v.set(Field::ENTRY_CONTROLS, entry.into());
        for (number, s) in (0..).zip(self.seg) {
            let dpl = (number == SS as u32).then_some(self.cpl);
            save_segment(v, number, s, dpl);
        }
        save_segment(v, 6, self.ldtr, None);
        save_segment(v, 7, self.tr, None);
        for (limit, base, table) in [
            (Field::GUEST_GDTR_LIMIT, Field::GUEST_GDTR_BASE, self.gdtr),
            (Field::GUEST_IDTR_LIMIT, Field::GUEST_IDTR_BASE, self.idtr),
        ] {
            v.set(limit, table.limit.into());
            v.set(base, table.base);
        }
        let now = self.steps_now();
        v.set(Field::GUEST_RIP, self.rip);
        v.set(Field::GUEST_RSP, self.get::<8>(slot::RSP));
        let resume = if self.rf_at == now { rf::RF } else { 0 };
        v.set(Field::GUEST_RFLAGS, self.rflags() | resume);
        let state = match self.activity {
            Activity::Halted | Activity::Waiting => activity::HLT,
            Activity::Shutdown => activity::SHUTDOWN,
            Activity::WaitForSipi => activity::WAIT_FOR_SIPI,
            Activity::Running => activity::ACTIVE,
        };
        v.set(
            Field::GUEST_ACTIVITY,
            if self.activity == Activity::Waiting { 0 } else { state }.into(),
        );
        let mov_ss = self.stack_shadow_at == now;
        let held_off = Interruptibility::new()
            .with_mov_ss(mov_ss)
            .with_sti(self.shadow_at == now && !mov_ss)
            .with_nmi(if pin.contains(Pin::VIRTUAL_NMIS) {
                nmi_blocked
            } else {
                self.nmi_blocked
            });
        v.set(Field::GUEST_INTERRUPTIBILITY, held_off.into_bits().into());
        // Bit 12 says that an enabled breakpoint is among bits 3:0. SDM Vol. 3C Table 25-4 "Format of Pending-Debug-Exceptions".
        let pending = self.watched.pending & 0x400f;
        let enabled = u64::from(pending & 15 != 0) << 12;
        v.set(Field::GUEST_PENDING_DEBUG, pending | enabled);
        if exit.contains(Exit::SAVE_PREEMPTION_TIMER)
            && let Some(value) = self.timer_value()
        {
            v.set(Field::PREEMPTION_TIMER, value.into());
        }
        if let Some(guest) = self.guest()
            && guest.delivers_virtual_interrupts()
        {
            v.set(Field::GUEST_INTERRUPT_STATUS, guest.apic.status());
        }
        if let Some(nested) = self.nested()
            && self.cr0.pg()
            && self.cr4.pae()
            && !self.efer.lma()
        {
            for n in 0..4 {
                let at = (self.cr3 & 0xffff_ffe0) + 8 * n;
                let ram = &mut self.shared().ram;
                let value = nested
                    .structure(ram, at, false, false)
                    .map_or(0, |at| ram.read_phys(at, 8));
                v.set(Field(Field::GUEST_PDPTE0.0 + 2 * n as u32), value);
            }
        }
    }

    /// Loads the guest's state, which has been checked.
    pub(super) fn load_guest(&mut self, v: &Vmcs) {
        let entry = v.entry_controls();
        let cr0 = v.get(Field::GUEST_CR0) & !CR0_KEPT | self.cr0.into_bits() & CR0_KEPT;
        self.cr0 = Cr0::from_bits(cr0);
        self.cr3 = v.get(Field::GUEST_CR3);
        self.cr4 = Cr4::from_bits(v.get(Field::GUEST_CR4));
        if entry.contains(Entry::LOAD_DEBUG) {
            self.load_dr7(v.get(Field::GUEST_DR7) & !0xd000 | 0x400);
            self.load_msr_now(IA32_DEBUGCTL, v.get(Field::GUEST_DEBUGCTL));
        }
        self.msrs.sysenter_cs = v.get(Field::GUEST_SYSENTER_CS);
        self.msrs.sysenter_esp = v.get(Field::GUEST_SYSENTER_ESP);
        self.msrs.sysenter_eip = v.get(Field::GUEST_SYSENTER_EIP);
        let wide = entry.contains(Entry::GUEST_64BIT);
        let efer = if entry.contains(Entry::LOAD_EFER) {
            v.get(Field::GUEST_EFER)
        } else {
            let old = self.efer.into_bits();
            let lme = if self.cr0.pg() { LONG & !0x400 } else { 0 };
            let set = if wide { LONG } else { 0 };
            old & !(0x400 | lme) | set & (0x400 | lme)
        };
        self.efer = Efer::from_bits(efer);
        if entry.contains(Entry::LOAD_PAT) {
            self.load_msr_now(IA32_PAT, v.get(Field::GUEST_PAT));
        }
        if entry.contains(Entry::LOAD_PERF_GLOBAL_CTRL) {
            self.load_msr_now(IA32_PERF_GLOBAL_CTRL, v.get(Field::GUEST_PERF_GLOBAL_CTRL));
        }
        if entry.contains(Entry::LOAD_PKRS) {
            self.set_pkrs(v.get(Field::GUEST_PKRS) as u32);
        }
        for number in 0..6 {
            self.seg[number as usize] = load_segment(v, number);
        }
        self.ldtr = load_segment(v, 6);
        self.tr = load_segment(v, 7);
        self.gdtr = Table {
            base: v.get(Field::GUEST_GDTR_BASE),
            limit: v.get(Field::GUEST_GDTR_LIMIT) as u16,
        };
        self.idtr = Table {
            base: v.get(Field::GUEST_IDTR_BASE),
            limit: v.get(Field::GUEST_IDTR_LIMIT) as u16,
        };
        self.rip = v.get(Field::GUEST_RIP);
        self.set::<8>(slot::RSP, v.get(Field::GUEST_RSP));
        let flags = v.get(Field::GUEST_RFLAGS);
        self.set_rflags(flags);
        self.cpl = if flags & rf::VM != 0 {
            3
        } else {
            (v.get32(Field::GUEST_SS_RIGHTS) >> 5 & 3) as u8
        };
        let now = self.steps_now();
        let held_off = Interruptibility::from_bits(v.get32(Field::GUEST_INTERRUPTIBILITY));
        let at = |on| if on { now } else { u64::MAX };
        self.rf_at = at(flags & rf::RF != 0);
        self.shadow_at = at(held_off.sti() || held_off.mov_ss());
        self.stack_shadow_at = at(held_off.mov_ss());
        if v.pin().contains(Pin::VIRTUAL_NMIS) {
            if let Some(guest) = self.guest_mut() {
                guest.virtual_nmi_blocked = held_off.nmi();
            }
        } else {
            self.nmi_blocked = held_off.nmi();
        }
        self.activity = match v.get32(Field::GUEST_ACTIVITY) {
            activity::HLT => Activity::Halted,
            activity::SHUTDOWN => Activity::Shutdown,
            activity::WAIT_FOR_SIPI => Activity::WaitForSipi,
            _ => Activity::Running,
        };
        let pending = v.get(Field::GUEST_PENDING_DEBUG) & 0x400f;
        self.watched.pending = match (pending, held_off.mov_ss()) {
            (0, _) => 0,
            (bits, true) => bits,
            (bits, false) => bits | DUE,
        };
    }

    /// Loads the host's state.
    pub(super) fn load_host(&mut self, v: &Vmcs) {
        let exit = v.exit_controls();
        let wide = exit.contains(Exit::HOST_64BIT);
        let cr0 = v.get(Field::HOST_CR0) & !CR0_KEPT | self.cr0.into_bits() & CR0_KEPT;
        self.cr0 = Cr0::from_bits(cr0);
        self.cr3 = v.get(Field::HOST_CR3);
        self.cr4 = Cr4::from_bits(v.get(Field::HOST_CR4));
        if wide {
            self.cr4.set_pae(true);
        } else {
            self.cr4.set_pcide(false);
        }
        self.load_dr7(0x400);
        self.load_msr_now(IA32_DEBUGCTL, 0);
        self.msrs.sysenter_cs = v.get(Field::HOST_SYSENTER_CS);
        self.msrs.sysenter_esp = v.get(Field::HOST_SYSENTER_ESP);
        self.msrs.sysenter_eip = v.get(Field::HOST_SYSENTER_EIP);
        let efer = if exit.contains(Exit::LOAD_EFER) {
            v.get(Field::HOST_EFER)
        } else {
            self.efer.into_bits() & !LONG | if wide { LONG } else { 0 }
        };
        self.efer = Efer::from_bits(efer);
        if exit.contains(Exit::LOAD_PAT) {
            self.load_msr_now(IA32_PAT, v.get(Field::HOST_PAT));
        }
        if exit.contains(Exit::LOAD_PERF_GLOBAL_CTRL) {
            self.load_msr_now(IA32_PERF_GLOBAL_CTRL, v.get(Field::HOST_PERF_GLOBAL_CTRL));
        }
        if exit.contains(Exit::LOAD_PKRS) {
            self.set_pkrs(v.get(Field::HOST_PKRS) as u32);
        }
        for (number, field) in [
            Field::HOST_ES,
            Field::HOST_CS,
            Field::HOST_SS,
            Field::HOST_DS,
            Field::HOST_FS,
            Field::HOST_GS,
        ]
        .into_iter()
        .enumerate()
        {
            let base = match number {
                FS => v.get(Field::HOST_FS_BASE),
                GS => v.get(Field::HOST_GS_BASE),
                _ => 0,
            };
            self.seg[number] = host_segment(v.get(field), base);
        }
        self.seg[CS].attributes = if wide { 0xa09b } else { 0xc09b };
        self.tr = Segment {
            selector: v.get(Field::HOST_TR) as u16,
            base: v.get(Field::HOST_TR_BASE),
            limit: 0x67,
            attributes: 0x8b,
        };
        self.ldtr = Segment::default();
        self.gdtr = Table {
            base: v.get(Field::HOST_GDTR_BASE),
            limit: 0xffff,
        };
        self.idtr = Table {
            base: v.get(Field::HOST_IDTR_BASE),
            limit: 0xffff,
        };
        self.rip = v.get(Field::HOST_RIP);
        self.set::<8>(slot::RSP, v.get(Field::HOST_RSP));
        self.set_rflags(2);
        self.cpl = 0;
        self.rf_at = u64::MAX;
        self.shadow_at = u64::MAX;
        self.stack_shadow_at = u64::MAX;
        self.activity = Activity::Running;
        self.monitor.line = None;
        self.watched.pending = 0;
    }

    /// Loads the registers of units that a VM entry may have in the guest-state area. SDM Vol. 3C 27.3.2.1 "Loading Guest Control Registers,
    /// Debug Registers, and MSRs".
    pub(super) fn load_guest_units(&mut self, v: &Vmcs) {
        let entry = v.entry_controls();
        if entry.contains(Entry::LOAD_LBR_CTL) {
            self.load_msr_now(IA32_LBR_CTL, v.get(Field::GUEST_LBR_CTL));
        }
        if entry.contains(Entry::LOAD_RTIT_CTL) {
            self.load_msr_now(IA32_RTIT_CTL, v.get(Field::GUEST_RTIT_CTL));
        }
    }

    /// Clears those that a VM exit may clear. SDM Vol. 3C 28.5.1 "Loading Host Control Registers, Debug Registers, MSRs".
    pub(super) fn clear_units(&mut self, v: &Vmcs) {
        let exit = v.exit_controls();
        if exit.contains(Exit::CLEAR_LBR_CTL) {
            self.load_msr_now(IA32_LBR_CTL, 0);
        }
        if exit.contains(Exit::CLEAR_RTIT_CTL) {
            self.load_msr_now(IA32_RTIT_CTL, 0);
        }
    }

    /// Loads MSRs from a list. SDM Vol. 3C 27.4 "Loading MSRs", 28.6 "Loading MSRs". Errors: the number of the entry, from 1.
    pub(super) fn load_msrs(&mut self, at: u64, count: u64) -> Result<(), u64> {
        for n in 0..count {
            let [index, value] = [0, 8].map(|offset| self.shared().ram.read_phys(at + 16 * n + offset, 8));
            let msr = index as u32;
            let refused = index >> 32 != 0
                || matches!(msr, IA32_FS_BASE | IA32_GS_BASE | 0x79 | 0x8b | 0x9b)
                || msr & !0xff == IA32_X2APIC_BASE;
            if refused || self.set_msr_now(msr, value) {
                return Err(n + 1);
            }
        }
        Ok(())
    }

    /// Stores MSRs in a list. SDM Vol. 3C 28.4 "Saving MSRs". Errors: one cannot be read.
    pub(super) fn store_msrs(&mut self, at: u64, count: u64) -> Result<(), ()> {
        for n in 0..count {
            let index = self.shared().ram.read_phys(at + 16 * n, 8);
            let value = match u32::try_from(index) {
                Ok(msr) if msr & !0xff != IA32_X2APIC_BASE => self.msr_now(msr).ok_or(())?,
                _ => return Err(()),
            };
            let _ = self.shared().write_ram(at + 16 * n + 8, &value.to_le_bytes());
        }
        Ok(())
    }

    /// Before a VM entry or a VM exit loads state.
    pub(crate) fn leave_world(&mut self) {
        let rights = self.rights();
        self.tlb.leave(rights);
    }

    /// After a VM entry or a VM exit has loaded state: other translations hold, and another mode.
    pub(crate) fn changed_world(&mut self) {
        let (tag, rights) = (self.vmx_tag(), self.rights());
        self.tlb.enter(tag, rights);
        self.watched.observed = (u64::MAX, 0);
        self.refresh_mode();
    }

    /// What the rights in the TLB's entries depend on, beside the protection keys' registers: a change of any of it is one that MOV to a
    /// control register forgets translations for.
    fn rights(&self) -> u64 {
        // PE, WP, PG.
        const CR0: u64 = 1 << 31 | 1 << 16 | 1;
        // PSE, PAE, PGE, LA57, PCIDE, SMEP, SMAP, PKE, CET, PKS.
        const CR4: u64 = 0x1f2_10b0;
        // LMA, NXE.
        const EFER: u64 = 0xc00;
        let mode_based = self
            .guest()
            .is_some_and(|guest| guest.secondary.contains(Secondary::MODE_BASED_EXECUTE));
        u64::from(mode_based) << 62
            | self.cr0.into_bits() & CR0
            | (self.cr4.into_bits() & CR4) << 32
            | self.efer.into_bits() & EFER
    }
}
