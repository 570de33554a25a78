//! Delivery of exceptions and interrupts (SDM Vol. 3A chapter 7 "Interrupt and Exception Handling").
//!
//! An event is delivered whole or not at all: gate, code segment, stack and instruction pointer are checked and the frame is
//! written before any register changes. What delivery itself raises goes back to the run loop, which knows what that makes of
//! the first event (double fault, shutdown).

use crate::cpu::{CS, Cpu, DS, ES, Event, FS, GS, SS, Segment, Source, slot};
use crate::op::Done;
use crate::segment::{Descriptor, GP, Gate, NP, Stack, named, rf};
use crate::transaction::DR6_RTM;

/// An error code's IDT bit.
const IDT: u32 = 2;

impl Cpu {
    /// Delivers an event: `Err` with the next exception in `Cpu::event` when delivery itself faults. RIP is what the frame
    /// will hold: the instruction for faults, the one after it for software interrupts and traps.
    pub(crate) fn deliver(&mut self, event: Event) -> Done {
        // Whoever comes back from a handler looks at the line again: MWAIT does not wait.
        self.monitor.line = None;
        let switched = if !self.cr0.pe() {
            self.deliver_real(event)?;
            false
        } else {
            self.deliver_protected(event)?
        };
        // A #DB handler runs with general detection off (SDM Vol. 3B 19.2.4 "Debug Control Register (DR7)").
        if event.debug() {
            self.dr[7] &= !(1 << 13);
            self.dr[6] |= DR6_RTM;
        }
        self.shadow_at = u64::MAX;
        if !switched {
            self.rf_at = u64::MAX;
        }
        Ok(())
    }

    /// RFLAGS as the frame holds them (for RF see SDM Vol. 3B 19.3.1.1 "Instruction-Breakpoint Exception Condition").
    pub(crate) fn flags_image(&self, event: Event) -> u64 {
        let fault = event.source == Source::Exception && !matches!(event.vector, 1 | 8 | 18);
        let rf = fault || self.rf_at == self.steps_now();
        self.rflags() | if rf { rf::RF } else { 0 }
    }

    fn deliver_real(&mut self, event: Event) -> Done {
        let at = event.vector as u64 * 4;
        if at + 3 > self.idtr.limit as u64 {
            return Err(self.gp(0));
        }
        let entry = self.read_system(self.idtr.base.wrapping_add(at), 4)?;
        let cs = self.seg[CS].selector as u64;
        let stack = self.own_stack(false, 0);
        let flags = self.flags_image(event);
        let sp = self.push_frame(stack, &[flags, cs, self.rip], 2)?;
        self.set_stack_pointer(stack.segment, sp);
        self.rflags &= !(rf::IF | rf::TF | rf::AC);
        let cs = (entry >> 16) as u16;
        (self.seg[CS].selector, self.seg[CS].base) = (cs, (cs as u64) << 4);
        self.rip = entry & 0xffff;
        self.refresh_mode();
        Ok(())
    }

    /// Whether it was a task switch.
    fn deliver_protected(&mut self, event: Event) -> Done<bool> {
        // EXT: the event did not come from an instruction that asked for it.
        let ext = (event.source != Source::Software) as u32;
        let error = (event.vector as u32) << 3 | IDT | ext;
        let long = self.long_mode();
        let entry = if long { 16 } else { 8 };
        let at = event.vector as u64 * entry;
        if at + entry - 1 > self.idtr.limit as u64 {
            return Err(self.gp(error));
        }
        let at = self.idtr.base.wrapping_add(at);
        let bits = self.read_system(at, 8)?;
        let high = if long {
            self.read_system(at.wrapping_add(8), 8)?
        } else {
            0
        };
        let descriptor = Descriptor { at, bits };
        // Interrupt gates 6 and 14, trap gates 7 and 15, task gates 5.
        let size: u64 = match (descriptor.kind(), long) {
            (5, false) => 0,
            (14 | 15, true) => 8,
            (14 | 15, false) => 4,
            (6 | 7, false) => 2,
            _ => return Err(self.gp(error)),
        };
        if !descriptor.system() || event.source == Source::Software && descriptor.dpl() < self.cpl {
            return Err(self.gp(error));
        }
        if !descriptor.present() {
            return Err(self.fault(NP, Some(error)));
        }
        if size == 0 {
            self.deliver_to_task(descriptor, event, ext)?;
            return Ok(true);
        }
        let mut gate = Gate::new(bits, high & 0xffff_ffff);
        if size == 2 {
            gate.offset &= 0xffff;
        }
        if gate.selector & 0xfffc == 0 {
            return Err(self.gp(ext));
        }
        let mut d = self.descriptor(gate.selector, GP, ext)?;
        let error = named(gate.selector) | ext;
        if !d.code() || d.dpl() > self.cpl || long && (!d.long() || d.big()) {
            return Err(self.gp(error));
        }
        if !d.present() {
            return Err(self.fault(NP, Some(error)));
        }
        let from_virtual = self.virtual8086();
        let inner = !d.conforming() && d.dpl() < self.cpl;
        if from_virtual && (!inner || d.dpl() != 0) {
            return Err(self.gp(error));
        }
        let ist = if long { bits >> 32 & 7 } else { 0 };
        let level = if inner { d.dpl() } else { self.cpl };
        let (ss, sp) = if ist != 0 {
            let sp = self.tss_field(0x1c + ist * 8, 8, ext)?;
            let ss = if inner {
                crate::segment::null_stack(level as u16)
            } else {
                self.seg[SS]
            };
            (ss, sp)
        } else if inner {
            self.inner_stack(level, ext)?
        } else {
            (self.seg[SS], self.get::<8>(slot::RSP))
        };
        self.check_ip(d, gate.offset, ext)?;
        self.mark_accessed(&mut d)?;

        let stack = Stack {
            segment: if long { None } else { Some(ss) },
            // 64-bit frames are aligned to 16 bytes (SDM Vol. 3A 7.14.2 "64-Bit Mode Stack Frame").
            sp: if long { sp & !0xf } else { sp },
            level,
            error: if inner && !long { named(ss.selector) } else { 0 } | ext,
        };
        let flags = self.flags_image(event);
        let mut items = [0; 10];
        let mut n = 0;
        let mut push = |item| {
            items[n] = item;
            n += 1;
        };
        if from_virtual {
            for seg in [GS, FS, DS, ES] {
                push(self.seg[seg].selector as u64);
            }
        }
        if inner || long {
            push(self.seg[SS].selector as u64);
            push(self.get::<8>(slot::RSP));
        }
        push(flags);
        push(self.seg[CS].selector as u64);
        push(self.rip);
        if let Some(code) = event.error {
            push(code as u64);
        }
        let sp = self.push_frame(stack, &items[..n], size)?;

        self.set_stack_pointer(stack.segment, sp);
        if inner {
            self.seg[SS] = ss;
        }
        if from_virtual {
            for seg in [GS, FS, DS, ES] {
                self.seg[seg] = Segment::default();
            }
        }
        let mut clear = rf::TF | rf::NT | rf::RF | rf::VM;
        if descriptor.kind() & 1 == 0 {
            clear |= rf::IF;
        }
        self.rflags &= !clear;
        self.enter_code(d, gate.selector, level);
        self.rip = gate.offset;
        self.refresh_mode();
        Ok(false)
    }
}
