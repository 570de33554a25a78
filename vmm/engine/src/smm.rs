//! System-management mode (SDM Vol. 3C chapter 32).
//!
//! # Theory
//! An SMI takes the processor between two instructions into a mode of its own: what it was doing is put into memory at SMBASE, and the
//! handler begins in an environment like real-address mode, with NMIs and further SMIs held off. RSM takes it all back, as the handler
//! has left it there.
//!
//! # Practice
//! SMRAM is ordinary RAM, and there is no firmware: who wants an SMI to be handled has put a handler there before. What the manual has
//! the processor keep to itself ([`Interrupted`]) is not in SMRAM. In VMX operation an SMI has the default treatment (32.14): the
//! processor leaves VMX operation, and RSM takes it back to where it was, without a VM entry or VM exit. Nobody pays who gets no SMI.
//!
//! SMRR hides a range from a processor outside SMM by taking it from the map of RAM for as long as it is that processor's turn
//! ([`Ram::hide`](crate::ram::Ram::hide)): there, everything that the processor reads is all ones, and what it writes is lost, whether an
//! instruction does it, a page walk, VMX operation or a unit. The manual says "a fixed value for each byte".
//!
//! # Left out
//! The dual-monitor treatment. The memory type of SMRR, as there are no caches.

use serde::{Deserialize, Serialize};
use x86::cr::{Cr0, Cr3, Cr4, Efer};
use x86::msr::IA32_SMRR_PHYSBASE;
use x86::rflags::flag as rf;
use x86::smm::{self, PhysicalRange, SaveArea, Saved, Smrr};
use x86::watch::{Abort, Change, Far};

use crate::Engine;
use crate::bus::{Bus, MsrFault};
use crate::cpu::{Activity, CS, Cpu, SS, Segment, Table, slot};
use crate::op::Op;
use crate::vmx::Vmx;

/// System-management mode of a processor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Smm {
    /// SMBASE, which INIT leaves.
    pub base: u32,
    /// SMIs since the reset: MSR_SMI_COUNT.
    pub count: u32,
    /// IA32_SMRR_PHYSBASE and IA32_SMRR_PHYSMASK, which INIT leaves.
    pub smrr: Smrr,
    /// An SMI waits.
    pub pending: bool,
    /// In SMM: what the processor keeps of what it has left.
    pub inside: Option<Box<Interrupted>>,
}

impl Default for Smm {
    fn default() -> Self {
        Smm {
            base: smm::SMBASE,
            count: 0,
            smrr: Smrr::default(),
            pending: false,
            inside: None,
        }
    }
}

/// What the processor keeps to itself while it is in SMM.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
pub struct Interrupted {
    /// VMX operation. SDM Vol. 3C 32.14.1 "Default Treatment of SMI Delivery".
    pub vmx: Option<Box<Vmx>>,
    /// CR4.VMXE.
    pub vmxe: bool,
    /// NMIs were blocked.
    pub nmi_blocked: bool,
    /// Debug exceptions that waited.
    pub pending_debug: u64,
    /// What the processor was doing.
    pub activity: Activity,
    /// The privilege level.
    pub cpl: u8,
    /// The I/O instruction that the SMI came behind.
    pub io: Option<IoAccess>,
}

/// An I/O instruction, or an iteration of one, that has just retired. SDM Vol. 3C 32.7.1 "I/O State Implementation", 32.12 "I/O Instruction
/// Restart".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoAccess {
    /// The port.
    pub port: u16,
    /// Bytes.
    pub size: u8,
    /// SDM Vol. 3C Table 32-6 "I/O Instruction Type Encodings".
    pub kind: u8,
    /// Where the instruction is.
    pub rip: u64,
    /// RCX, RSI and RDI before it.
    pub before: [u64; 3],
    /// The linear address of the memory operand.
    pub linear: u64,
}

/// Kinds of I/O instruction, as the I/O state field has them.
pub(crate) mod io {
    pub const IN: u8 = 1;
    pub const STRING: u8 = 2;
    pub const REP: u8 = 4;
    pub const IMMEDIATE: u8 = 8;
}

impl IoAccess {
    /// The I/O state field: IO_SMI, length, type, port.
    fn state(self) -> u64 {
        1 | u64::from(self.size) << 1 | u64::from(self.kind) << 4 | u64::from(self.port) << 16
    }
}

/// Bits of CR0 that an SMI clears: PE, EM, TS, PG. SDM Vol. 3C Table 32-4 "Processor Register Initialization in SMM".
const CR0_CLEARED: u64 = 1 << 31 | 1 << 3 | 1 << 2 | 1;
/// Of a state save area: the auto HALT restart field's bit, and the I/O instruction restart field.
const RESTART_HALT: u64 = 1;
const RESTART_IO: u64 = 0xff;
/// Bytes of RSM.
const RSM: u8 = 2;

impl Cpu {
    /// Requests an SMI, which is taken as soon as [`Cpu::smi_deliverable`]. One more while it waits is the same.
    pub fn request_smi(&mut self) {
        self.smm.pending = true;
    }

    /// An SMI waits and would be taken now. SDM Vol. 3C 32.3.1 "Entering SMM": in SMM it is held off, and one is remembered. This processor
    /// holds it off behind STI and MOV SS, too, and while it waits for a start-up IPI.
    pub fn smi_due(&self) -> bool {
        self.smm.pending
            && self.smm.inside.is_none()
            && self.shadow_at != self.steps
            && self.stack_shadow_at != self.steps
            && matches!(self.activity, Activity::Running | Activity::Halted | Activity::Waiting)
            && !self.transition_due()
    }

    /// An SMI waits, and not for RSM.
    pub fn smi_pending(&self) -> bool {
        self.smm.pending && self.smm.inside.is_none()
    }

    /// In system-management mode.
    pub fn in_smm(&self) -> bool {
        self.smm.inside.is_some()
    }

    /// Has RAM hide what SMRR keeps from the processor as it is now.
    pub(crate) fn hide_smram(&mut self) {
        let range = if self.in_smm() {
            PhysicalRange::NONE
        } else {
            self.smm.smrr.range()
        };
        self.shared().ram.hide(range);
    }

    /// WRMSR of a system-management range register.
    pub(crate) fn write_smrr(&mut self, msr: u32, value: u64) -> Result<(), MsrFault> {
        if !self.in_smm() {
            return Err(MsrFault::GeneralProtection);
        }
        if msr == IA32_SMRR_PHYSBASE {
            self.smm.smrr.write_base(value)?;
        } else {
            self.smm.smrr.write_mask(value)?;
        }
        // Translations of before SMM lead to what is hidden behind RSM.
        self.tlb.flush_all();
        Ok(())
    }

    /// Notes the I/O instruction of `o`, in case an SMI comes right behind it. RIP and index registers are as before the instruction.
    pub(crate) fn note_io(&mut self, o: &Op, port: u16, size: u8, kind: u8, linear: u64) {
        self.io = IoAccess {
            port,
            size,
            kind,
            rip: self.ip(o),
            before: [slot::RCX, slot::RSI, slot::RDI].map(|slot| self.get::<8>(slot)),
            linear,
        };
        self.io_at = self.steps_after(o);
    }

    /// The state save area of the processor as it stands.
    fn saved(&self, io: Option<IoAccess>, halted: bool) -> SaveArea {
        let wide = self.features.lm();
        let mut area = SaveArea::new(wide);
        let now = self.steps_now();
        let resume = if self.rf_at == now { rf::RF } else { 0 };
        for (what, value) in [
            (Saved::Cr0, self.cr0.into_bits()),
            (Saved::Cr3, self.cr3),
            (Saved::Cr4, self.cr4.with_vmxe(false).into_bits()),
            (Saved::Rflags, self.rflags() | resume),
            (Saved::Efer, self.efer.into_bits()),
            (Saved::Rip, self.rip),
            (Saved::Dr6, self.dr[6]),
            (Saved::Dr7, self.dr[7]),
            (Saved::AutoHalt, u64::from(halted)),
            (Saved::Smbase, self.smm.base.into()),
            (
                Saved::Revision,
                if wide {
                    smm::revision::WIDE
                } else {
                    smm::revision::NARROW
                }
                .into(),
            ),
        ] {
            area.set(what, value);
        }
        for number in 0..16 {
            area.set(Saved::Gpr(number), self.get::<8>(8 * number));
        }
        let segments = self.seg.iter().chain([&self.ldtr, &self.tr]);
        for (number, s) in (0..).zip(segments) {
            area.set(Saved::Selector(number), s.selector.into());
            area.set_hidden(number, (s.base, s.limit, s.attributes));
        }
        for (number, table, name) in [(8, self.gdtr, smm::Table::Gdt), (9, self.idtr, smm::Table::Idt)] {
            area.set_table(name, table.base);
            area.set_hidden(number, (table.base, table.limit.into(), 0));
        }
        area.set_table(smm::Table::Ldt, self.ldtr.base);
        if let Some(io) = io {
            area.set(Saved::IoState, io.state());
            area.set(Saved::IoMemory, io.linear);
            area.set(Saved::IoRip, io.rip);
        }
        if let Some(pointer) = self.guest().and_then(|guest| guest.ept) {
            area.set(Saved::EptEnabled, 1);
            area.set(Saved::EptPointer, pointer.into_bits());
        }
        area
    }

    /// SDM Vol. 3C 32.5.1 "Initial SMM Execution Environment".
    fn load_smm(&mut self) {
        self.cr0 = Cr0::from_bits(self.cr0.into_bits() & !CR0_CLEARED);
        self.cr4 = Cr4::new();
        self.efer = Efer::new();
        self.dr[7] = 0x400;
        self.set_rflags(2);
        self.rip = smm::ENTRY;
        let base = u64::from(self.smm.base);
        let data = Segment {
            selector: 0,
            base: 0,
            limit: u32::MAX,
            attributes: 0x8093,
        };
        self.seg = [data; 6];
        self.seg[CS] = Segment {
            selector: (base >> 4) as u16,
            base,
            ..data
        };
        self.cpl = 0;
        (self.rf_at, self.shadow_at, self.stack_shadow_at) = (u64::MAX, u64::MAX, u64::MAX);
        self.nmi_blocked = true;
        self.monitor.line = None;
        self.watched.pending = 0;
        self.watched.ask = true;
    }

    /// What RSM loads of the control registers; `None`: the processor shuts down. SDM Vol. 3C 32.3.2 "Exiting From SMM".
    fn rsm_controls(&self, area: &SaveArea, vmxe: bool) -> Option<(Cr0, Cr3, Cr4, Efer)> {
        let cr0 = Cr0::from_bits(area.get(Saved::Cr0) | 0x10);
        let cr4 = Cr4::accept(area.get(Saved::Cr4), self.features).ok()?;
        if cr0.pg() && !cr0.pe() || cr0.nw() && !cr0.cd() || cr0.into_bits() >> 32 != 0 || cr4.vmxe() {
            return None;
        }
        let efer = area.get(Saved::Efer);
        if efer & Efer::reserved(self.features) != 0 {
            return None;
        }
        let efer = Efer::from_bits(efer);
        let long = efer.lme() && cr0.pg();
        if long && !cr4.pae() || efer.lma() != long || cr4.pcide() && !long {
            return None;
        }
        let cr3 = area.get(Saved::Cr3);
        if cr3 & Cr3::reserved(self.maxphyaddr, false) != 0 {
            return None;
        }
        Some((cr0, Cr3::from_bits(cr3), cr4.with_vmxe(vmxe), efer))
    }

    /// Takes back what an SMI has saved and the handler has left. Whether the state is one that a processor can have.
    fn load_saved(&mut self, area: &SaveArea, inside: &Interrupted) -> bool {
        let Some((cr0, cr3, cr4, efer)) = self.rsm_controls(area, inside.vmxe) else {
            return false;
        };
        (self.cr0, self.cr3, self.cr4, self.efer) = (cr0, cr3.into_bits(), cr4, efer);
        for number in 0..8 {
            let (base, limit, attributes) = area.hidden(number);
            let segment = Segment {
                selector: area.get(Saved::Selector(number)) as u16,
                base,
                limit,
                attributes: attributes & 0xf0ff,
            };
            match number {
                6 if area.wide() => {
                    self.ldtr = Segment {
                        base: area.table(smm::Table::Ldt),
                        ..segment
                    };
                }
                // The map of parts without Intel 64 architecture has no place for its selector.
                6 => {
                    self.ldtr = Segment {
                        selector: self.ldtr.selector,
                        ..segment
                    };
                }
                7 => self.tr = segment,
                _ => self.seg[usize::from(number)] = segment,
            }
        }
        let table = |number, name| {
            let (base, limit, _) = area.hidden(number);
            Table {
                base: if area.wide() { area.table(name) } else { base },
                limit: limit as u16,
            }
        };
        self.gdtr = table(8, smm::Table::Gdt);
        self.idtr = table(9, smm::Table::Idt);
        for number in 0..if area.wide() { 16 } else { 8 } {
            self.set::<8>(8 * number, area.get(Saved::Gpr(number)));
        }
        self.rip = area.get(Saved::Rip);
        // Bits 10:4 and 31:17 are 1, bits 12 and 63:32 are 0.
        self.dr[6] = area.get(Saved::Dr6) & 0xffff_efff | 0xfffe_07f0;
        self.dr[7] = area.get(Saved::Dr7) & 0xffff_2fff | 0x400;
        let now = self.steps_now();
        let flags = area.get(Saved::Rflags);
        let virtual_8086 = cr0.pe() && !efer.lma();
        self.set_rflags(if virtual_8086 { flags } else { flags & !rf::VM });
        self.cpl = if self.rflags & rf::VM != 0 { 3 } else { inside.cpl & 3 };
        self.rf_at = if flags & rf::RF != 0 { now } else { u64::MAX };
        (self.shadow_at, self.stack_shadow_at) = (u64::MAX, u64::MAX);
        true
    }
}

impl Engine {
    /// Delivers an SMI; only while [`Cpu::smi_due`].
    pub fn smi(&mut self, cpu: &mut Cpu, bus: &mut dyn Bus) {
        self.between(cpu, bus, |engine, cpu| {
            engine.abort(cpu, Abort::Event, None);
            engine.enter_smm(cpu);
        });
    }

    fn enter_smm(&mut self, cpu: &mut Cpu) {
        cpu.deliveries += 1;
        cpu.link = core::ptr::null_mut();
        let activity = cpu.activity;
        self.resume(cpu);
        // The units hear of it while the processor is as it was: what they stop is about what it has left.
        let at = cpu.linear(cpu.rip);
        let effects = cpu.say(|watch, view| watch.state(Change::Smi { at }, view));
        self.follow(cpu, effects);
        let io = (cpu.io_at == cpu.steps_now()).then_some(cpu.io);
        let area = cpu.saved(io, activity == Activity::Halted);
        let place = u64::from(cpu.smm.base) + area.offset();
        cpu.shared().ram.hide(PhysicalRange::NONE);
        // An SMBASE outside RAM leaves nothing behind, and RSM finds all ones.
        let _ = cpu.shared().write_ram(place, area.bytes());
        let (from, cpl) = (cpu.linear(cpu.rip), cpu.cpl);
        cpu.leave_world();
        let inside = Interrupted {
            vmx: cpu.vmx.take(),
            vmxe: cpu.cr4.vmxe(),
            nmi_blocked: cpu.nmi_blocked,
            pending_debug: cpu.watched.pending,
            activity,
            cpl,
            io,
        };
        cpu.smm.inside = Some(Box::new(inside));
        cpu.smm.pending = false;
        cpu.smm.count = cpu.smm.count.wrapping_add(1);
        cpu.load_smm();
        cpu.changed_world();
        cpu.tlb.flush_present();
        cpu.want_window = cpu.asked_window;
        self.transition(cpu, from, cpl, Far::Smi, 0, true);
    }

    /// RSM, once the instruction has retired.
    pub(crate) fn leave_smm(&mut self, cpu: &mut Cpu) {
        let Some(inside) = cpu.smm.inside.take() else { return };
        cpu.link = core::ptr::null_mut();
        let from = cpu.linear(cpu.rip.wrapping_sub(RSM.into()));
        let mut area = SaveArea::new(cpu.features.lm());
        let place = u64::from(cpu.smm.base) + area.offset();
        if cpu.shared().ram.read(place, area.bytes_mut()).is_err() {
            area.bytes_mut().fill(0xff);
        }
        // What SMM has translated leads to what may be hidden now.
        cpu.tlb.flush_present();
        cpu.leave_world();
        let valid = cpu.load_saved(&area, &inside);
        if !valid {
            cpu.smm.inside = Some(inside);
            cpu.activity = Activity::Shutdown;
            cpu.changed_world();
            let effects = cpu.say(|watch, view| watch.state(Change::Shutdown, view));
            self.follow(cpu, effects);
            return;
        }
        if let Some(io) = inside.io
            && area.get(Saved::IoRestart) & RESTART_IO == RESTART_IO
        {
            cpu.rip = io.rip;
            if io.kind & io::STRING != 0 {
                for (slot, value) in [slot::RCX, slot::RSI, slot::RDI].into_iter().zip(io.before) {
                    cpu.set::<8>(slot, value);
                }
            }
        }
        cpu.hide_smram();
        cpu.smm.base = area.get(Saved::Smbase) as u32;
        cpu.nmi_blocked = inside.nmi_blocked;
        cpu.watched.pending = inside.pending_debug;
        cpu.watched.ask = true;
        cpu.vmx = inside.vmx;
        cpu.keep_vmx_rules();
        cpu.changed_world();
        cpu.tlb.flush_present();
        cpu.want_window |= cpu.window_wanted();
        // What has been held off comes before the next instruction.
        cpu.bus_used |= cpu.smm.pending || cpu.want_nmi || cpu.init_pending;
        self.transition(cpu, from, 0, Far::Rsm, RSM, true);
        let effects = cpu.say(|watch, view| watch.state(Change::Rsm, view));
        self.follow(cpu, effects);
        if inside.activity == Activity::Halted && area.get(Saved::AutoHalt) & RESTART_HALT != 0 {
            cpu.activity = Activity::Halted;
            cpu.change(Change::Halt);
        }
    }
}

impl Cpu {
    /// After RSM to VMX operation: fixed bits are fixed, and without unrestricted guests the privilege level of CS and SS is that of SS's
    /// descriptor. SDM Vol. 3C 32.14.2 "Default Treatment of RSM".
    fn keep_vmx_rules(&mut self) {
        let Some(vmx) = &self.vmx else { return };
        let (fixed, unrestricted) = (vmx.cr0_fixed(), vmx.unrestricted());
        self.cr0 = Cr0::from_bits(self.cr0.into_bits() | fixed);
        if self.rflags & rf::VM == 0 && !unrestricted {
            let dpl = self.seg[SS].dpl();
            for number in [CS, SS] {
                let s = &mut self.seg[number].selector;
                *s = *s & !3 | u16::from(dpl);
            }
        }
    }
}
