//! APIC virtualization (SDM Vol. 3C chapter 30 "APIC Virtualization and Virtual Interrupts").
//!
//! # Theory
//! A guest's local APIC is a page of memory, the virtual-APIC page. Whatever way the guest takes to its local APIC (CR8, the page that it
//! takes for the APIC's, MSRs 800H to 8FFH) leads there, as far as the controls let it, or to a VM exit. With virtual-interrupt delivery the
//! processor keeps the priorities of that APIC itself, delivers what is requested there, and takes over what other processors have posted.
//!
//! # Practice
//! A translation that leads to the APIC-access page is never entered in the TLB: each access takes the slow path, which finds no RAM there
//! and asks here. So nobody else pays. What a write to the page leads to comes after the instruction: the run loop calls
//! [`Cpu::emulate_apic_write`] then, and the VM exit that it may cause waits in [`VirtualApic::exit`] for the next boundary, before
//! any interrupt. The page and the posted-interrupt descriptor need not be RAM: there they read as all ones, and writes are lost.
//!
//! # Left out
//! IPI virtualization. Writes that are not those of an instruction's own operands cause VM exits: what goes to a stack is several pushes of one
//! operation, of which the second would (30.4.3.1), and what is written to a descriptor or a task-state segment has been read before, in
//! eight bytes or beside what is virtualized. Physical accesses, of page walks without EPT, reach what is in memory, as the
//! manual allows (30.4.6.2); so do those of debug and trace units, which cause no VM exits.

use serde::{Deserialize, Serialize};
use x86::vmx::controls::{Pin, Primary, Secondary};
use x86::vmx::exits::{EventKind, Interruption, apic_access};
use x86::vmx::{ExitReason, Field, Vmcs};

use super::{ExitInformation, Guest, Vectoring};
use crate::Engine;
use crate::cpu::{Activity, Cpu, Event, Source};
use crate::mmu::Access;
use crate::op::{Done, Stop};
use x86::rflags::flag as rf;
use x86::watch::Abort;

/// Offsets on the virtual-APIC page. SDM Vol. 3C 30.1.1 "Virtualized APIC Registers".
mod register {
    pub const ID: u64 = 0x20;
    pub const VERSION: u64 = 0x30;
    pub const TPR: u64 = 0x80;
    pub const PPR: u64 = 0xa0;
    pub const EOI: u64 = 0xb0;
    pub const LOGICAL_DESTINATION: u64 = 0xd0;
    pub const SPURIOUS: u64 = 0xf0;
    pub const ISR: u64 = 0x100;
    pub const IRR: u64 = 0x200;
    pub const LAST_IRR: u64 = 0x270;
    pub const ERROR: u64 = 0x280;
    pub const ICR_LOW: u64 = 0x300;
    pub const ICR_HIGH: u64 = 0x310;
    pub const TIMER: u64 = 0x320;
    pub const LAST_LVT: u64 = 0x370;
    pub const INITIAL_COUNT: u64 = 0x380;
    pub const DIVIDE: u64 = 0x3e0;
    pub const SELF_IPI: u64 = 0x3f0;
}

/// MSRs of the local APIC that WRMSR treats specially. SDM Vol. 3C 30.5 "Virtualizing MSR-Based APIC Accesses".
mod msr {
    pub const TPR: u32 = 0x808;
    pub const EOI: u32 = 0x80b;
    pub const SELF_IPI: u32 = 0x83f;
}

/// Of a value written to VICR_LO, what must be 0 for a self-IPI that is virtualized: reserved bits, delivery status, a trigger mode other than
/// edge, a delivery mode other than fixed. SDM Vol. 3C 30.4.3.2 "APIC-Write Emulation".
const NO_SELF_IPI: u32 = 0xfff0_0000 | 3 << 16 | 1 << 13 | 1 << 12 | 1 << 15 | 7 << 8;
/// The destination shorthand, and its value "self".
const SHORTHAND: u32 = 3 << 18;
/// See above.
const SELF: u32 = 1 << 18;

/// The virtual APIC of the running guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VirtualApic {
    /// The virtual-APIC address, which counts with the TPR shadow alone.
    pub page: u64,
    /// The APIC-access address, if accesses to it are virtualized.
    pub access: Option<u64>,
    /// The TPR threshold.
    pub tpr_threshold: u8,
    /// Guest interrupt status: RVI, the highest vector that is requested.
    pub requesting: u8,
    /// SVI, the highest vector in service.
    pub servicing: u8,
    /// The EOI-exit bitmap.
    pub eoi_exits: [u64; 4],
    /// Posted interrupts, if they are processed.
    pub posted: Option<PostedInterrupts>,
    /// A pending virtual interrupt is recognized.
    pub recognized: bool,
    /// The operation under way has written to the APIC-access page at this offset, and the write was virtualized.
    pub written: Option<u16>,
    /// The VM exit that the virtualization of an access causes, before the next instruction.
    pub exit: Option<ApicExit>,
}

/// What the processor needs for posted-interrupt processing. SDM Vol. 3C 30.6 "Posted-Interrupt Processing".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PostedInterrupts {
    /// The notification vector.
    pub vector: u8,
    /// The physical address of the descriptor.
    pub descriptor: u64,
}

/// Trap-like VM exits of APIC virtualization.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ApicExit {
    /// The virtual TPR is below the threshold.
    TprBelowThreshold,
    /// EOI virtualization has dismissed this vector, whose bit in the EOI-exit bitmap is set.
    Eoi(u8),
    /// A write at this offset, which is software's to emulate.
    Write(u16),
}

/// What an access to the APIC-access page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    /// A read that a write to the same place follows.
    Modify,
}

impl From<Access> for Kind {
    fn from(access: Access) -> Kind {
        if access == Access::Write {
            Kind::Write
        } else {
            Kind::Read
        }
    }
}

impl VirtualApic {
    pub(super) fn of(v: &Vmcs) -> VirtualApic {
        let secondary = v.secondary();
        let status = v.get(Field::GUEST_INTERRUPT_STATUS);
        VirtualApic {
            page: v.get(Field::VIRTUAL_APIC),
            access: secondary
                .contains(Secondary::APIC_ACCESSES)
                .then(|| v.get(Field::APIC_ACCESS)),
            tpr_threshold: v.get(Field::TPR_THRESHOLD) as u8 & 15,
            requesting: status as u8,
            servicing: (status >> 8) as u8,
            eoi_exits: [
                Field::EOI_EXIT_0,
                Field::EOI_EXIT_1,
                Field::EOI_EXIT_2,
                Field::EOI_EXIT_3,
            ]
            .map(|field| v.get(field)),
            posted: v.pin().contains(Pin::POSTED_INTERRUPTS).then(|| PostedInterrupts {
                vector: v.get(Field::POSTED_INTERRUPT_VECTOR) as u8,
                descriptor: v.get(Field::POSTED_INTERRUPT_DESCRIPTOR),
            }),
            ..VirtualApic::default()
        }
    }

    /// The guest interrupt status, as its field has it.
    pub(super) fn status(&self) -> u64 {
        u64::from(self.requesting) | u64::from(self.servicing) << 8
    }
}

impl Guest {
    pub(super) fn delivers_virtual_interrupts(&self) -> bool {
        self.secondary.contains(Secondary::VIRTUAL_INTERRUPTS)
    }

    /// Whether an access of so many bytes at an offset on the APIC-access page is virtualized. SDM Vol. 3C 30.4.2 "Virtualizing Reads from the
    /// APIC-Access Page", 30.4.3.1 "Determining Whether a Write Access is Virtualized".
    fn virtualizes(&self, offset: u64, len: usize, write: bool) -> bool {
        use register::*;
        let within = len <= 4 && (offset & 15) as usize + len <= 4;
        if !self.primary.contains(Primary::TPR_SHADOW) || !within || self.apic.written.is_some() {
            return false;
        }
        if !self.secondary.contains(Secondary::APIC_REGISTERS) {
            return match offset {
                TPR => true,
                EOI | ICR_LOW => write && self.delivers_virtual_interrupts(),
                _ => false,
            };
        }
        match offset & !15 {
            ID | TPR | EOI | LOGICAL_DESTINATION..=SPURIOUS | ERROR | ICR_LOW | ICR_HIGH => true,
            TIMER..=LAST_LVT | INITIAL_COUNT | DIVIDE => true,
            VERSION | ISR..=LAST_IRR => !write,
            _ => false,
        }
    }
}

impl Cpu {
    /// The APIC-access address; no page's where accesses are not virtualized.
    pub(crate) fn apic_access_page(&self) -> u64 {
        self.guest().and_then(|guest| guest.apic.access).unwrap_or(u64::MAX)
    }

    /// Something of VMX operation comes before the next instruction and before anything from outside: the injection of an event, an APIC-write
    /// emulation, or a VM exit that one has caused.
    pub(crate) fn transition_due(&self) -> bool {
        self.guest()
            .is_some_and(|guest| guest.injected.is_some() || guest.apic.written.is_some() || guest.apic.exit.is_some())
    }

    // ---- Memory-mapped accesses --------------------------------------------------------------------------------------

    /// An access to the APIC-access page by an instruction of so many bytes: a VM exit unless it is virtualized. SDM Vol. 3C 30.4.
    #[cold]
    pub(crate) fn check_apic_access(&mut self, offset: u64, len: usize, kind: Kind, instruction: u8) -> Done {
        let virtualized = self.guest().is_some_and(|guest| {
            (kind == Kind::Write || guest.virtualizes(offset, len, false))
                && (kind == Kind::Read || guest.virtualizes(offset, len, true))
        });
        if virtualized {
            return Ok(());
        }
        let access = if kind == Kind::Read {
            apic_access::READ
        } else {
            apic_access::WRITE
        };
        Err(self.apic_access_exit(offset, access, instruction))
    }

    /// Leaves for an APIC-access VM exit. SDM Vol. 3C Table 28-6 "Exit Qualification for APIC-Access VM Exits from Linear Accesses and
    /// Guest-Physical Accesses".
    #[cold]
    pub(crate) fn apic_access_exit(&mut self, offset: u64, access: u64, instruction: u8) -> Stop {
        let qualification = offset & 0xfff | access << apic_access::SHIFT;
        let mut exit = ExitInformation::new(ExitReason::ApicAccess).qualified(qualification);
        exit.length = instruction;
        self.vm_exit(exit)
    }

    /// A virtualized read.
    #[cold]
    pub(crate) fn read_virtual_apic(&mut self, offset: u64, bytes: &mut [u8]) {
        let at = self.virtual_apic_page() + offset;
        if self.shared().ram.read(at, bytes).is_err() {
            bytes.fill(0xff);
        }
    }

    /// A virtualized write, in a block of its own.
    #[cold]
    pub(crate) fn write_virtual_apic(&mut self, offset: u64, bytes: &[u8]) {
        let at = self.virtual_apic_page() + offset;
        let _ = self.shared().write_ram(at, bytes);
        if let Some(guest) = self.guest_mut() {
            guest.apic.written = Some(offset as u16);
        }
        // An iteration of a repeated instruction is an operation of its own.
        self.bus_used = true;
    }

    /// What follows the operation that has written to the APIC-access page. SDM Vol. 3C 30.4.3.2 "APIC-Write Emulation".
    #[cold]
    pub(crate) fn emulate_apic_write(&mut self) {
        let Some(guest) = self.guest_mut() else { return };
        let Some(offset) = guest.apic.written.take() else {
            return;
        };
        let delivers = guest.delivers_virtual_interrupts();
        match u64::from(offset & !15) {
            register::TPR => {
                let value = self.virtual_register(register::TPR);
                self.set_virtual_register(register::TPR, value & 0xff);
                self.virtualize_tpr();
            }
            register::EOI if delivers => {
                self.set_virtual_register(register::EOI, 0);
                self.virtualize_eoi();
            }
            register::ICR_HIGH => {
                let value = self.virtual_register(register::ICR_HIGH);
                self.set_virtual_register(register::ICR_HIGH, value & 0xff00_0000);
            }
            register::ICR_LOW if delivers => {
                let value = self.virtual_register(register::ICR_LOW);
                if value & NO_SELF_IPI == 0 && value & SHORTHAND == SELF && value & 0xf0 != 0 {
                    self.virtualize_self_ipi(value as u8);
                } else {
                    self.leave_for(ApicExit::Write(offset));
                }
            }
            _ => self.leave_for(ApicExit::Write(offset)),
        }
    }

    // ---- MSRs and CR8 ------------------------------------------------------------------------------------------------

    /// RDMSR of a register of the local APIC; `None`: it is not virtualized. SDM Vol. 3C 30.5 "Virtualizing MSR-Based APIC Accesses".
    #[cold]
    pub(crate) fn read_virtual_msr(&mut self, number: u32) -> Option<u64> {
        let guest = self.guest()?;
        if !guest.secondary.contains(Secondary::X2APIC) {
            return None;
        }
        if number != msr::TPR && !guest.secondary.contains(Secondary::APIC_REGISTERS) {
            return None;
        }
        let at = self.virtual_apic_page() + u64::from(number & 0xff) * 16;
        Some(self.shared().ram.read_phys(at, 8))
    }

    /// WRMSR of a register of the local APIC: whether it was virtualized. Errors: #GP(0).
    #[cold]
    pub(crate) fn write_virtual_msr(&mut self, number: u32, value: u64) -> Done<bool> {
        let Some(guest) = self.guest() else { return Ok(false) };
        if !guest.secondary.contains(Secondary::X2APIC) {
            return Ok(false);
        }
        let allowed = match number {
            msr::TPR => 0xff,
            msr::EOI if guest.delivers_virtual_interrupts() => 0,
            msr::SELF_IPI if guest.delivers_virtual_interrupts() => 0xff,
            _ => return Ok(false),
        };
        if value & !allowed != 0 {
            return Err(self.gp(0));
        }
        self.virtual_apic_ready()?;
        let at = self.virtual_apic_page() + u64::from(number & 0xff) * 16;
        let _ = self.shared().write_ram(at, &value.to_le_bytes());
        match number {
            msr::TPR => self.virtualize_tpr(),
            msr::EOI => self.virtualize_eoi(),
            _ if value & 0xf0 != 0 => self.virtualize_self_ipi(value as u8),
            _ => self.leave_for(ApicExit::Write(register::SELF_IPI as u16)),
        }
        Ok(true)
    }

    /// The class of the virtual TPR, with the TPR shadow: what MOV from CR8 reads. SDM Vol. 3C 30.3 "Virtualizing CR8-Based TPR Accesses".
    pub(crate) fn virtual_tpr(&mut self) -> Option<u8> {
        self.guest()
            .filter(|guest| guest.primary.contains(Primary::TPR_SHADOW))?;
        Some((self.virtual_register(register::TPR) >> 4) as u8 & 15)
    }

    /// MOV to CR8 with the TPR shadow: whether there is one.
    pub(crate) fn set_virtual_tpr(&mut self, class: u8) -> Done<bool> {
        let shadow = |guest: &Guest| guest.primary.contains(Primary::TPR_SHADOW);
        if !self.guest().is_some_and(shadow) {
            return Ok(false);
        }
        self.virtual_apic_ready()?;
        self.set_virtual_register(register::TPR, u32::from(class) << 4);
        self.virtualize_tpr();
        Ok(true)
    }

    // ---- The registers -----------------------------------------------------------------------------------------------

    pub(crate) fn virtual_apic_page(&self) -> u64 {
        self.guest().map_or(u64::MAX, |guest| guest.apic.page)
    }

    /// An instruction that writes to the virtual-APIC page is alone in its block if code was decoded from there.
    fn virtual_apic_ready(&mut self) -> Done {
        let page = self.virtual_apic_page();
        if self.shared().blocks.covers(page, 0x1000) {
            self.need_solo()?;
        }
        Ok(())
    }

    fn virtual_register(&mut self, register: u64) -> u32 {
        let at = self.virtual_apic_page() + register;
        self.shared().ram.read_phys(at, 4) as u32
    }

    fn set_virtual_register(&mut self, register: u64, value: u32) {
        let at = self.virtual_apic_page() + register;
        let _ = self.shared().write_ram(at, &value.to_le_bytes());
    }

    /// Sets or clears the bit of a vector in VISR or VIRR.
    fn set_virtual_bit(&mut self, register: u64, vector: u8, set: bool) {
        let at = register | u64::from(vector & 0xe0) >> 1;
        let (bit, value) = (1 << (vector & 0x1f), self.virtual_register(at));
        self.set_virtual_register(at, if set { value | bit } else { value & !bit });
    }

    /// The highest vector in VISR or VIRR; 0 if there is none.
    fn highest_virtual_bit(&mut self, register: u64) -> u8 {
        for word in (0..8u8).rev() {
            let value = self.virtual_register(register | u64::from(word) << 4);
            if value != 0 {
                return word << 5 | (31 - value.leading_zeros()) as u8;
            }
        }
        0
    }

    /// The VM exit before the next instruction.
    fn leave_for(&mut self, exit: ApicExit) {
        if let Some(guest) = self.guest_mut() {
            guest.apic.exit = Some(exit);
        }
    }

    /// SDM Vol. 3C 30.1.2 "TPR Virtualization".
    fn virtualize_tpr(&mut self) {
        if self.guest().is_some_and(Guest::delivers_virtual_interrupts) {
            self.virtualize_ppr();
            self.evaluate_virtual_interrupts();
        } else {
            self.check_tpr_threshold();
        }
    }

    fn check_tpr_threshold(&mut self) {
        let class = (self.virtual_register(register::TPR) >> 4) as u8 & 15;
        if self.guest().is_some_and(|guest| class < guest.apic.tpr_threshold) {
            self.leave_for(ApicExit::TprBelowThreshold);
        }
    }

    /// SDM Vol. 3C 30.1.3 "PPR Virtualization".
    fn virtualize_ppr(&mut self) {
        let tpr = self.virtual_register(register::TPR) & 0xff;
        let servicing = u32::from(self.guest().map_or(0, |guest| guest.apic.servicing));
        let ppr = if tpr >> 4 >= servicing >> 4 {
            tpr
        } else {
            servicing & 0xf0
        };
        self.set_virtual_register(register::PPR, ppr);
    }

    /// SDM Vol. 3C 30.1.4 "EOI Virtualization".
    fn virtualize_eoi(&mut self) {
        let Some(vector) = self.guest().map(|guest| guest.apic.servicing) else {
            return;
        };
        self.set_virtual_bit(register::ISR, vector, false);
        let servicing = self.highest_virtual_bit(register::ISR);
        let Some(guest) = self.guest_mut() else { return };
        guest.apic.servicing = servicing;
        let exits = guest.apic.eoi_exits[usize::from(vector >> 6)] >> (vector & 63) & 1 != 0;
        self.virtualize_ppr();
        if exits {
            self.leave_for(ApicExit::Eoi(vector));
        } else {
            self.evaluate_virtual_interrupts();
        }
    }

    /// SDM Vol. 3C 30.1.5 "Self-IPI Virtualization".
    fn virtualize_self_ipi(&mut self, vector: u8) {
        self.set_virtual_bit(register::IRR, vector, true);
        if let Some(guest) = self.guest_mut() {
            guest.apic.requesting = guest.apic.requesting.max(vector);
        }
        self.evaluate_virtual_interrupts();
    }

    /// SDM Vol. 3C 30.2.1 "Recognition of Virtual Interrupts".
    fn evaluate_virtual_interrupts(&mut self) {
        let priority = self.virtual_register(register::PPR) as u8 >> 4;
        let Some(guest) = self.guest_mut() else { return };
        let recognized = !guest.interrupt_window() && guest.apic.requesting >> 4 > priority;
        guest.apic.recognized = recognized;
        self.want_window |= recognized;
    }

    /// What a VM entry has to do with the virtual APIC. SDM Vol. 3C 27.3.2.5 "Updating Non-Register State", 27.7.7 "VM Exits Induced by the
    /// TPR Threshold".
    pub(super) fn enter_virtual_apic(&mut self) {
        let Some(guest) = self.guest() else { return };
        if guest.delivers_virtual_interrupts() {
            self.virtualize_ppr();
            self.evaluate_virtual_interrupts();
        } else if guest.primary.contains(Primary::TPR_SHADOW) {
            self.check_tpr_threshold();
        }
    }

    // ---- Virtual interrupts ------------------------------------------------------------------------------------------

    /// A pending virtual interrupt is recognized, and nothing holds it off. SDM Vol. 3C 30.2.2 "Virtual-Interrupt Delivery".
    pub fn takes_virtual_interrupt(&self) -> bool {
        let now = self.steps_now();
        self.guest()
            .is_some_and(|guest| guest.apic.recognized && guest.injected.is_none() && guest.apic.exit.is_none())
            && self.rflags & rf::IF != 0
            && self.shadow_at != now
            && self.stack_shadow_at != now
            && matches!(self.activity, Activity::Running | Activity::Halted | Activity::Waiting)
            && !self.debug_due()
    }

    /// The vector of the virtual interrupt that is about to be delivered.
    fn accept_virtual_interrupt(&mut self) -> u8 {
        let vector = self.guest().map_or(0, |guest| guest.apic.requesting);
        self.set_virtual_bit(register::ISR, vector, true);
        self.set_virtual_register(register::PPR, u32::from(vector & 0xf0));
        self.set_virtual_bit(register::IRR, vector, false);
        let requesting = self.highest_virtual_bit(register::IRR);
        if let Some(guest) = self.guest_mut() {
            (guest.apic.servicing, guest.apic.requesting) = (vector, requesting);
            guest.apic.recognized = false;
        }
        self.want_window = self.asked_window || self.window_wanted();
        vector
    }

    /// An external interrupt of this vector is a notification of posted interrupts.
    pub(crate) fn notifies(&self, event: Event) -> bool {
        let posted = self.guest().and_then(|guest| guest.apic.posted);
        event.source == Source::External && posted.is_some_and(|posted| posted.vector == event.vector)
    }

    /// Takes over the interrupts that have been posted. SDM Vol. 3C 30.6 "Posted-Interrupt Processing".
    fn take_posted_interrupts(&mut self) {
        let Some(posted) = self.guest().and_then(|guest| guest.apic.posted) else {
            return;
        };
        // Processors take turns, so that nobody comes between what is read and what is written.
        let on = posted.descriptor + 32;
        let byte = self.shared().ram.read_phys(on, 1) as u8;
        let _ = self.shared().write_ram(on, &[byte & !1]);
        self.bus().end_of_interrupt();
        for word in 0..8u8 {
            let at = posted.descriptor + 4 * u64::from(word);
            let requests = self.shared().ram.read_phys(at, 4) as u32;
            if requests == 0 {
                continue;
            }
            let _ = self.shared().write_ram(at, &[0; 4]);
            let register = register::IRR | u64::from(word) << 4;
            let value = self.virtual_register(register);
            self.set_virtual_register(register, value | requests);
            let highest = word << 5 | (31 - requests.leading_zeros()) as u8;
            if let Some(guest) = self.guest_mut() {
                guest.apic.requesting = guest.apic.requesting.max(highest);
            }
        }
        self.evaluate_virtual_interrupts();
    }
}

impl Engine {
    /// Delivers the virtual interrupt that [`Cpu::takes_virtual_interrupt`] speaks of.
    pub(crate) fn deliver_virtual_interrupt(&mut self, cpu: &mut Cpu) {
        self.abort(cpu, Abort::Event, None);
        let vector = cpu.accept_virtual_interrupt();
        // It causes no VM exit as an external interrupt, but its delivery may meet one.
        let information = Interruption::event(EventKind::External, vector, false);
        let vectoring = Vectoring {
            information,
            error: 0,
            length: 0,
        };
        cpu.injecting = Some((vectoring, cpu.rip));
        self.deliver(
            cpu,
            Event {
                vector,
                error: None,
                source: Source::External,
            },
        );
        cpu.injecting = None;
    }

    /// A notification has come, and the local APIC has been acknowledged. What was waiting in MWAIT goes on; what was halted stays so unless
    /// a virtual interrupt is delivered.
    pub(crate) fn process_posted_interrupts(&mut self, cpu: &mut Cpu) {
        cpu.deliveries += 1;
        if cpu.activity == Activity::Waiting {
            self.resume(cpu);
        }
        cpu.take_posted_interrupts();
    }
}
