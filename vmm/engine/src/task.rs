//! Hardware task switches (SDM Vol. 3A chapter 9 "Task Management").
//!
//! # Theory
//! A far JMP or CALL to a TSS or a task gate, a task gate in the IDT, and IRET with NT set all save the registers in the TSS
//! of the task that runs and load them from another. Up to the point where the new task's registers are loaded a fault
//! belongs to the old task and nothing has changed; from there on it belongs to the new task, which has all its registers but
//! segments that may be unusable, and has not run an instruction.
//!
//! # Practice
//! Everything that the first half touches is probed before it is changed. What goes wrong in the second half is left in
//! `Cpu::event` with `Cpu::late_fault` set, for whoever switched to raise.
//!
//! # Left out
//! IA-32e mode, which has no task switches: callers refuse them there.

use crate::cpu::{CS, Cpu, DS, ES, Event, FS, GS, SS, Segment, Source};
use crate::mem::Who;
use crate::op::{Done, Op, Stop};
use crate::segment::{Descriptor, GP, NP, TS, named, rf};
use crate::vmx::ExitInformation;
use x86::vmx::ExitReason;

/// What asks for a task switch: it decides about busy bits, the link and NT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SwitchKind {
    /// Far JMP: the old task ends being busy.
    Jump,
    /// Far CALL: the new task is nested in the old one.
    Call,
    /// An interrupt or exception through a task gate: nested likewise.
    Event,
    /// IRET with NT set: back to the task that the link names.
    Return,
}

impl SwitchKind {
    fn nests(self) -> bool {
        matches!(self, SwitchKind::Call | SwitchKind::Event)
    }

    /// The vector for a TSS selector or type that will not do.
    fn vector(self) -> u8 {
        if self == SwitchKind::Return { TS } else { GP }
    }
}

/// Where a kind of TSS keeps what (SDM Vol. 3A Figures 9-2 "32-Bit Task-State Segment (TSS)", 9-10 "16-Bit TSS Format").
struct Layout {
    /// Bytes of a field.
    size: u64,
    /// The least limit.
    limit: u32,
    ip: u64,
    flags: u64,
    /// EAX, ECX, EDX, EBX, ESP, EBP, ESI, EDI.
    general: u64,
    /// ES, CS, SS, DS, and, in the larger one, FS and GS.
    segments: u64,
    segment_count: usize,
    ldt: u64,
}

const NARROW: Layout = Layout {
    size: 2,
    limit: 0x2b,
    ip: 0x0e,
    flags: 0x10,
    general: 0x12,
    segments: 0x22,
    segment_count: 4,
    ldt: 0x2a,
};

const WIDE: Layout = Layout {
    size: 4,
    limit: 0x67,
    ip: 0x20,
    flags: 0x24,
    general: 0x28,
    segments: 0x48,
    segment_count: 6,
    ldt: 0x60,
};

/// CR3 and the T flag in a 32-bit TSS.
const CR3: u64 = 0x1c;
const TRAP: u64 = 0x64;

/// The busy bit of a TSS descriptor's type.
const BUSY: u8 = 2;
/// L0 to L3 and LE of DR7.
const LOCAL: u64 = 0x155;

impl Layout {
    fn of(kind: u8) -> &'static Layout {
        if kind & 8 != 0 { &WIDE } else { &NARROW }
    }

    /// Offset and number of bytes that a save writes.
    fn saved(&self) -> (u64, usize) {
        let end = self.segments + self.size * self.segment_count as u64;
        (self.ip, (end - self.ip) as usize)
    }
}

/// A task switch to be made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Switch {
    pub why: SwitchKind,
    /// EXT of the error codes.
    pub ext: u32,
    /// The flags that the old task keeps.
    pub flags: u64,
    /// The step count at which the new task begins: its RF holds there.
    pub at: u64,
}

impl Cpu {
    /// The VM exit that is under way, if there is one, is that of an instruction.
    fn set_exit_length(&mut self, o: &Op) {
        if let Some(exit) = &mut self.exit {
            exit.length = o.len;
        }
    }

    /// The VM exit that a task switch is. SDM Vol. 3C 26.2, task switches; Table 28-2 "Exit Qualification for Task Switches".
    fn task_switch_exit(&mut self, selector: u16, why: SwitchKind) -> Stop {
        let source = match why {
            SwitchKind::Call => 0,
            SwitchKind::Return => 1,
            SwitchKind::Jump => 2,
            SwitchKind::Event => 3,
        };
        let exit = ExitInformation::new(ExitReason::TaskSwitch).qualified(u64::from(selector) | source << 30);
        self.vm_exit(exit)
    }

    /// Far JMP or CALL to a TSS, or to the one that a task gate names.
    pub(crate) fn far_task(&mut self, o: &Op, selector: u16, call: bool) -> Done {
        self.rip = self.next_ip(o);
        let switch = Switch {
            why: if call { SwitchKind::Call } else { SwitchKind::Jump },
            ext: 0,
            flags: self.rflags(),
            at: self.steps_after(o),
        };
        let switched = self.switch_task(selector, switch);
        self.set_exit_length(o);
        switched
    }

    /// IRET with NT set: to the task that the present TSS links to.
    pub(crate) fn return_task(&mut self, o: &Op) -> Done {
        let link = self.tss_field(0, 2, 0)? as u16;
        self.rip = self.next_ip(o);
        let switch = Switch {
            why: SwitchKind::Return,
            ext: 0,
            flags: self.rflags() & !rf::NT,
            at: self.steps_after(o),
        };
        let switched = self.switch_task(link, switch);
        self.set_exit_length(o);
        switched
    }

    /// An interrupt or exception through a task gate: the switch, then the error code on the new task's stack, in its size.
    pub(crate) fn deliver_to_task(&mut self, gate: Descriptor, event: Event, ext: u32) -> Done {
        let switch = Switch {
            why: SwitchKind::Event,
            ext,
            flags: self.flags_image(event),
            at: self.steps_now(),
        };
        self.switch_task(gate.gate_selector(), switch)?;
        let Some(code) = event.error.filter(|_| !self.late_fault) else {
            return Ok(());
        };
        let size = if self.tr.kind() & 8 != 0 { 4 } else { 2 };
        let stack = self.own_stack(false, ext);
        match self.push_frame(stack, &[code as u64], size) {
            Ok(sp) => self.set_stack_pointer(stack.segment, sp),
            Err(Stop) => (self.late_fault, self.task_trap) = (true, false),
        }
        Ok(())
    }

    /// Switches to the task of a TSS selector (SDM Vol. 3A 9.3 "Task Switching"). RIP is what the old task will resume at.
    /// `Err`: nothing has happened. `Ok` with `late_fault`: the exception in `event` is the new task's.
    fn switch_task(&mut self, selector: u16, switch: Switch) -> Done {
        let Switch { why, ext, .. } = switch;
        if self.non_root() {
            return Err(self.task_switch_exit(selector, why));
        }
        let error = named(selector) | ext;
        if selector & 4 != 0 || selector & 0xfffc == 0 {
            return Err(self.fault(why.vector(), Some(error)));
        }
        let d = self.descriptor(selector, why.vector(), ext)?;
        let kind = d.kind();
        let busy = kind & BUSY != 0;
        if !d.system() || !matches!(kind & !BUSY, 1 | 9) || busy != (why == SwitchKind::Return) {
            return Err(self.fault(why.vector(), Some(error)));
        }
        if !d.present() {
            return Err(self.fault(NP, Some(error)));
        }
        let (old, new) = (Layout::of(self.tr.kind()), Layout::of(kind));
        if d.limit() < new.limit {
            return Err(self.fault(TS, Some(error)));
        }
        let (at, len) = old.saved();
        if !self.tr.present() || at + len as u64 - 1 > self.tr.limit as u64 {
            return Err(self.fault(TS, Some(named(self.tr.selector) | ext)));
        }

        // All that the switch touches must be there before it changes anything.
        let (from, to) = (self.tr.base, d.base());
        let old_entry = self.gdtr.base.wrapping_add(named(self.tr.selector) as u64 & !7 | 5);
        self.probe_as(from.wrapping_add(at), len, Who::System)?;
        for offset in (0..new.limit as u64).step_by(4) {
            self.read_system(to.wrapping_add(offset), 4)?;
        }
        if why.nests() {
            self.probe_as(to, 2, Who::System)?;
        }
        if why != SwitchKind::Return {
            self.probe_as(d.at.wrapping_add(5), 1, Who::System)?;
        }
        let old_access = if why.nests() {
            0
        } else {
            self.probe_as(old_entry, 1, Who::System)?;
            self.read_system(old_entry, 1)? as u8
        };

        self.save_task(old, switch.flags)?;
        if !why.nests() {
            self.write_system(old_entry, &[old_access & !BUSY])?;
        }
        if why.nests() {
            self.write_system(to, &self.tr.selector.to_le_bytes())?;
        }
        if why != SwitchKind::Return {
            self.write_system(d.at.wrapping_add(5), &[(d.bits >> 40) as u8 | BUSY])?;
        }
        self.tr = d.segment(selector);
        self.tr.attributes |= BUSY as u16;

        self.cr0.set_ts(true);
        self.dr[7] &= !LOCAL;
        self.watched.ask = true;
        if why != SwitchKind::Event {
            // The trap for TF comes after the new task's first instruction.
            self.skip_step = true;
        }
        self.shadow_at = u64::MAX;
        self.late_fault = self.load_task(new, switch).is_err();
        if self.late_fault {
            self.task_trap = false;
        }
        self.refresh_mode();
        Ok(())
    }

    /// The debug trap of a task whose TSS has its T flag set (SDM Vol. 3B 19.3.1.5 "Task-Switch Exception Condition").
    /// `others` are the DR6 bits of what else led to it.
    pub(crate) fn task_switch_trap(&mut self, others: u64) -> Event {
        self.set_debug_status(others | 1 << 15);
        Event {
            vector: 1,
            error: None,
            source: Source::Exception,
        }
    }

    /// Saves the registers in the old task's TSS.
    fn save_task(&mut self, layout: &Layout, flags: u64) -> Done {
        let (at, len) = layout.saved();
        let mut image = [0u8; 0x48];
        let mut put = |offset: u64, value: u64| {
            let from = (offset - at) as usize;
            let size = layout.size as usize;
            image[from..from + size].copy_from_slice(&value.to_le_bytes()[..size]);
        };
        put(layout.ip, self.rip);
        put(layout.flags, flags);
        for i in 0..8 {
            put(layout.general + i * layout.size, self.get::<8>(i as u8 * 8));
        }
        for i in 0..layout.segment_count {
            put(layout.segments + i as u64 * layout.size, self.seg[i].selector as u64);
        }
        self.write_system(self.tr.base.wrapping_add(at), &image[..len])
    }

    /// Loads the new task; what fails here is the new task's own fault.
    fn load_task(&mut self, layout: &Layout, switch: Switch) -> Done {
        let ext = switch.ext;
        let base = self.tr.base;
        let mut image = [0u64; 0x68 / 2];
        // By field: the halves of a 32-bit field that a 16-bit TSS has not got stay 0.
        for offset in (0..layout.limit as u64).step_by(layout.size as usize) {
            image[(offset / layout.size) as usize] =
                self.read_system(base.wrapping_add(offset), layout.size as usize)?;
        }
        let field = |offset: u64| image[(offset / layout.size) as usize];
        let wide = layout.size == 4;

        let mut flags = field(layout.flags) & (0xffff | if wide { 0x3f_0000 } else { 0 });
        if switch.why.nests() {
            flags |= rf::NT;
        }
        let cr3 = field(CR3);
        let selectors: [u16; 6] = core::array::from_fn(|i| {
            if i < layout.segment_count {
                field(layout.segments + i as u64 * layout.size) as u16
            } else {
                0
            }
        });
        let ldt = field(layout.ldt) as u16;
        self.rip = field(layout.ip);
        for i in 0..8 {
            self.set::<4>(i as u8 * 8, field(layout.general + i * layout.size));
        }
        self.task_trap = wide && field(TRAP) & 1 != 0;
        self.set_rflags(flags);
        self.rf_at = if flags & rf::RF != 0 { switch.at } else { u64::MAX };

        // Selectors first, so that a fault finds them; their segments are unusable until they have been checked.
        for (seg, selector) in self.seg.iter_mut().zip(selectors) {
            *seg = Segment {
                selector,
                ..Segment::default()
            };
        }
        self.ldtr = Segment {
            selector: ldt,
            ..Segment::default()
        };
        let virtual8086 = flags & rf::VM != 0;
        self.cpl = if virtual8086 { 3 } else { (selectors[CS] & 3) as u8 };

        if wide && self.cr0.pg() {
            self.cr3 = cr3;
            self.watched.loads_cr3 = self.watched.tell;
            self.tlb.flush_pcid(0);
            if self.cr4.pae() {
                self.check_pdptes(cr3)?;
            }
        }
        self.refresh_mode();

        self.load_task_ldt(ldt, ext)?;
        if virtual8086 {
            for (seg, selector) in selectors.into_iter().enumerate() {
                self.seg[seg] = Segment {
                    attributes: if seg == CS { 0xfb } else { 0xf3 },
                    ..Segment::real(selector)
                };
            }
        } else {
            let cpl = self.cpl;
            self.seg[SS] = self.stack_descriptor(selectors[SS], cpl, TS, ext)?;
            self.load_task_code(selectors[CS], ext)?;
            for seg in [DS, ES, FS, GS] {
                self.load_task_data(seg, selectors[seg], ext)?;
            }
        }
        // EIP is checked by the fetch.
        Ok(())
    }

    fn load_task_ldt(&mut self, selector: u16, ext: u32) -> Done {
        if selector & 0xfffc == 0 {
            return Ok(());
        }
        let error = named(selector) | ext;
        if selector & 4 != 0 {
            return Err(self.fault(TS, Some(error)));
        }
        let d = self.descriptor(selector, TS, ext)?;
        if !d.system() || d.kind() != 2 || !d.present() {
            return Err(self.fault(TS, Some(error)));
        }
        self.ldtr = d.segment(selector);
        Ok(())
    }

    fn load_task_code(&mut self, selector: u16, ext: u32) -> Done {
        let error = named(selector) | ext;
        if selector & 0xfffc == 0 {
            return Err(self.fault(TS, Some(error)));
        }
        let mut d = self.descriptor(selector, TS, ext)?;
        let rpl = (selector & 3) as u8;
        let denied = if d.conforming() { d.dpl() > rpl } else { d.dpl() != rpl };
        if !d.code() || denied {
            return Err(self.fault(TS, Some(error)));
        }
        if !d.present() {
            return Err(self.fault(NP, Some(error)));
        }
        self.mark_accessed(&mut d)?;
        self.seg[CS] = d.segment(selector);
        Ok(())
    }

    fn load_task_data(&mut self, seg: usize, selector: u16, ext: u32) -> Done {
        if selector & 0xfffc == 0 {
            return Ok(());
        }
        let error = named(selector) | ext;
        let mut d = self.descriptor(selector, TS, ext)?;
        let rpl = (selector & 3) as u8;
        let privileged = !d.conforming() && (rpl > d.dpl() || self.cpl > d.dpl());
        if !d.readable() || privileged {
            return Err(self.fault(TS, Some(error)));
        }
        if !d.present() {
            return Err(self.fault(NP, Some(error)));
        }
        self.mark_accessed(&mut d)?;
        self.seg[seg] = d.segment(selector);
        Ok(())
    }
}
