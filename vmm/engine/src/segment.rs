//! Descriptors: reading them, loading segment registers from them, and the far transfers of control that CALL, JMP, RET and
//! IRET make through them (SDM Vol. 3A chapters 3 "Protected-Mode Memory Management" and 6 "Protection").
//!
//! Where a far transfer means another task it goes on in `task`.

use crate::cpu::{CS, Cpu, DS, ES, FS, GS, SS, Segment, mode, slot};
use crate::mem::Who;
use crate::op::{Done, Op, Stop};

/// Exception vectors that segment checks raise.
pub(crate) const TS: u8 = 10;
pub(crate) const NP: u8 = 11;
pub(crate) const STACK: u8 = 12;
pub(crate) const GP: u8 = 13;

pub(crate) use x86::rflags::flag as rf;

/// A descriptor as it stands in its table (SDM Vol. 3A 3.4.5 "Segment Descriptors").
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    /// Its linear address.
    pub at: u64,
    pub bits: u64,
}

impl Descriptor {
    pub fn base(self) -> u64 {
        self.bits >> 16 & 0xff_ffff | self.bits >> 32 & 0xff00_0000
    }

    /// In bytes, granularity applied.
    pub fn limit(self) -> u32 {
        let raw = (self.bits & 0xffff | self.bits >> 32 & 0xf_0000) as u32;
        if self.bits >> 55 & 1 != 0 {
            raw << 12 | 0xfff
        } else {
            raw
        }
    }

    pub fn kind(self) -> u8 {
        (self.bits >> 40 & 0xf) as u8
    }

    /// A system descriptor: S is 0.
    pub fn system(self) -> bool {
        self.bits >> 44 & 1 == 0
    }

    pub fn code(self) -> bool {
        !self.system() && self.kind() & 8 != 0
    }

    pub fn conforming(self) -> bool {
        self.code() && self.kind() & 4 != 0
    }

    /// Data, or code that may be read.
    pub fn readable(self) -> bool {
        !self.system() && (self.kind() & 8 == 0 || self.kind() & 2 != 0)
    }

    pub fn writable(self) -> bool {
        !self.system() && self.kind() & 0xa == 2
    }

    pub fn dpl(self) -> u8 {
        (self.bits >> 45 & 3) as u8
    }

    pub fn present(self) -> bool {
        self.bits >> 47 & 1 != 0
    }

    pub fn long(self) -> bool {
        self.bits >> 53 & 1 != 0
    }

    pub fn big(self) -> bool {
        self.bits >> 54 & 1 != 0
    }

    /// The selector that a gate holds.
    pub fn gate_selector(self) -> u16 {
        (self.bits >> 16) as u16
    }

    /// The segment register's contents once it is loaded.
    pub fn segment(self, selector: u16) -> Segment {
        Segment {
            selector,
            base: self.base(),
            limit: self.limit(),
            attributes: (self.bits >> 40) as u16 & 0xf0ff,
        }
    }
}

/// Call gate, interrupt gate or trap gate (SDM Vol. 3A Figures 6-8 "Call-Gate Descriptor", 7-2 "IDT Gate Descriptors").
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gate {
    pub selector: u16,
    pub offset: u64,
}

impl Gate {
    pub fn new(bits: u64, high: u64) -> Gate {
        Gate {
            selector: (bits >> 16) as u16,
            offset: bits & 0xffff | bits >> 32 & 0xffff_0000 | high << 32,
        }
    }
}

/// Where a frame is pushed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stack {
    /// The stack segment; `None` for a 64-bit stack.
    pub segment: Option<Segment>,
    pub sp: u64,
    /// Whose pushes they are.
    pub level: u8,
    /// Error code of a #SS.
    pub error: u32,
}

/// The error code that names a selector.
pub(crate) fn named(selector: u16) -> u32 {
    selector as u32 & 0xfffc
}

impl Cpu {
    /// IA-32e mode.
    #[inline]
    pub(crate) fn long_mode(&self) -> bool {
        self.efer.lma()
    }

    /// I/O privilege level.
    pub(crate) fn iopl(&self) -> u8 {
        (self.rflags >> 12 & 3) as u8
    }

    /// Virtual-8086 mode.
    pub(crate) fn virtual8086(&self) -> bool {
        self.rflags & rf::VM != 0
    }

    /// Reads the descriptor that a selector names, which must not be null; `vector` when it lies beyond its table.
    pub(crate) fn descriptor(&mut self, selector: u16, vector: u8, ext: u32) -> Done<Descriptor> {
        self.descriptor_or_none(selector)?
            .ok_or_else(|| self.fault(vector, Some(named(selector) | ext)))
    }

    /// The same; `None` beyond the table.
    pub(crate) fn descriptor_or_none(&mut self, selector: u16) -> Done<Option<Descriptor>> {
        let (base, limit) = if selector & 4 == 0 {
            (self.gdtr.base, self.gdtr.limit as u64)
        } else if self.ldtr.present() {
            (self.ldtr.base, self.ldtr.limit as u64)
        } else {
            return Ok(None);
        };
        let offset = selector as u64 & 0xfff8;
        if offset + 7 > limit {
            return Ok(None);
        }
        let at = base.wrapping_add(offset);
        let bits = self.read_system(at, 8)?;
        Ok(Some(Descriptor { at, bits }))
    }

    /// The upper eight bytes of a 16-byte system descriptor of IA-32e mode.
    pub(crate) fn descriptor_high(&mut self, selector: u16, d: Descriptor) -> Done<u64> {
        let limit = if selector & 4 == 0 {
            self.gdtr.limit as u64
        } else {
            self.ldtr.limit as u64
        };
        let high = if (selector as u64 & 0xfff8) + 15 > limit {
            return Err(self.gp(named(selector)));
        } else {
            self.read_system(d.at.wrapping_add(8), 8)?
        };
        // The type field of the upper half must be 0 (SDM Vol. 3A 6.8.3.1 "IA-32e Mode Call Gates").
        if high >> 40 & 0x1f != 0 {
            return Err(self.gp(named(selector)));
        }
        Ok(high)
    }

    /// Sets the accessed bit of a descriptor about to be loaded.
    pub(crate) fn mark_accessed(&mut self, d: &mut Descriptor) -> Done {
        if d.bits >> 40 & 1 == 0 {
            d.bits |= 1 << 40;
            self.write_system(d.at.wrapping_add(5), &[(d.bits >> 40) as u8])?;
        }
        Ok(())
    }

    /// Loads ES, SS, DS, FS or GS as MOV, POP and LDS do (SDM Vol. 2B "MOV—Move").
    pub(crate) fn load_segment(&mut self, seg: usize, selector: u16) -> Done {
        if !self.protected() {
            let virtual8086 = self.virtual8086();
            let s = &mut self.seg[seg];
            s.selector = selector;
            s.base = (selector as u64) << 4;
            if virtual8086 {
                (s.limit, s.attributes) = (0xffff, 0xf3);
            }
            // In real mode limit and attributes stay as protected mode left them.
            return Ok(());
        }
        let rpl = (selector & 3) as u8;
        if seg == SS {
            self.seg[SS] = self.stack_descriptor(selector, self.cpl, GP, 0)?;
            return Ok(());
        }
        if selector & 0xfffc == 0 {
            self.seg[seg] = Segment {
                selector,
                ..Segment::default()
            };
            return Ok(());
        }
        let mut d = self.descriptor(selector, GP, 0)?;
        let privileged = !d.conforming() && (rpl > d.dpl() || self.cpl > d.dpl());
        if !d.readable() || privileged {
            return Err(self.gp(named(selector)));
        }
        if !d.present() {
            return Err(self.fault(NP, Some(named(selector))));
        }
        self.mark_accessed(&mut d)?;
        self.seg[seg] = d.segment(selector);
        Ok(())
    }

    /// The contents of SS for a selector at a privilege level; `vector` for what is wrong with the selector.
    pub(crate) fn stack_descriptor(&mut self, selector: u16, cpl: u8, vector: u8, ext: u32) -> Done<Segment> {
        let rpl = (selector & 3) as u8;
        if selector & 0xfffc == 0 {
            // A null SS is for 64-bit code above CPL 3 (SDM Vol. 3A 3.4.2 "Segment Selectors").
            if self.is64() && cpl != 3 && rpl == cpl {
                return Ok(null_stack(selector));
            }
            return Err(self.fault(vector, Some(ext)));
        }
        let mut d = self.descriptor(selector, vector, ext)?;
        if rpl != cpl || !d.writable() || d.dpl() != cpl {
            return Err(self.fault(vector, Some(named(selector) | ext)));
        }
        if !d.present() {
            return Err(self.fault(STACK, Some(named(selector) | ext)));
        }
        self.mark_accessed(&mut d)?;
        Ok(d.segment(selector))
    }

    /// A stack pointer field of the TSS, and the stack segment that goes with it, for a more privileged level
    /// (SDM Vol. 3A 6.8.5 "Stack Switching").
    pub(crate) fn inner_stack(&mut self, level: u8, ext: u32) -> Done<(Segment, u64)> {
        let level = level as u64;
        if self.long_mode() {
            let rsp = self.tss_field(4 + level * 8, 8, ext)?;
            return Ok((null_stack(level as u16), rsp));
        }
        let wide = self.tr.kind() & 8 != 0;
        let (sp, selector) = if wide {
            let selector = self.tss_field(8 + level * 8, 2, ext)?;
            (self.tss_field(4 + level * 8, 4, ext)?, selector as u16)
        } else {
            let selector = self.tss_field(4 + level * 4, 2, ext)?;
            (self.tss_field(2 + level * 4, 2, ext)?, selector as u16)
        };
        let ss = self.stack_descriptor(selector, level as u8, TS, ext)?;
        Ok((ss, sp))
    }

    /// Reads the TSS.
    pub(crate) fn tss_field(&mut self, offset: u64, size: usize, ext: u32) -> Done<u64> {
        if !self.tr.present() || offset + size as u64 - 1 > self.tr.limit as u64 {
            return Err(self.fault(TS, Some(named(self.tr.selector) | ext)));
        }
        self.read_system(self.tr.base.wrapping_add(offset), size)
    }

    /// The present stack, for pushes of a far transfer that stays at the present level.
    pub(crate) fn own_stack(&self, wide: bool, error: u32) -> Stack {
        Stack {
            segment: if wide { None } else { Some(self.seg[SS]) },
            sp: self.get::<8>(slot::RSP),
            level: self.cpl,
            error,
        }
    }

    /// Pushes items of `size` bytes, first to last: all of them or none. The new stack pointer.
    pub(crate) fn push_frame(&mut self, stack: Stack, items: &[u64], size: u64) -> Done<u64> {
        let mut bytes = [0u8; 8 * 40];
        let total = size * items.len() as u64;
        debug_assert!(total as usize <= bytes.len());
        for (i, item) in items.iter().rev().enumerate() {
            let at = i * size as usize;
            bytes[at..at + size as usize].copy_from_slice(&item.to_le_bytes()[..size as usize]);
        }
        let who = Who::Stack(stack.level);
        // The first item, which is the uppermost, faults first.
        let top_first = |c: &mut Cpu, linear: u64| {
            let probed = c.probe_as(linear, total as usize, who);
            if probed.is_err() {
                c.probe_as(linear.wrapping_add(total - size), size as usize, who)?;
                return c.probe_as(linear, total as usize, who);
            }
            probed
        };
        let Some(ss) = stack.segment else {
            let sp = stack.sp.wrapping_sub(total);
            if !self.canonical(sp) || !self.canonical(sp.wrapping_add(total - 1)) {
                return Err(self.fault(STACK, Some(stack.error)));
            }
            top_first(self, sp)?;
            self.check_frame(stack, sp, size)?;
            self.write_as(sp, &bytes[..total as usize], who)?;
            return Ok(sp);
        };
        let mask = if ss.big() { 0xffff_ffff } else { 0xffff };
        let old = stack.sp & mask;
        let sp = old.wrapping_sub(total) & mask;
        if old >= total || old == 0 {
            // One piece: its ends are within the limit, so the whole is.
            let linear = self.frame_linear(&ss, sp, total, stack.error)?;
            top_first(self, linear)?;
            self.check_frame(stack, linear, size)?;
            self.write_as(linear, &bytes[..total as usize], who)?;
            return Ok(sp);
        }
        // The frame wraps around the stack's end, where each push is checked for itself.
        for pass in 0..2 {
            let mut at = old;
            for (i, _) in items.iter().enumerate() {
                at = at.wrapping_sub(size) & mask;
                let linear = self.frame_linear(&ss, at, size, stack.error)?;
                let from = total as usize - (i + 1) * size as usize;
                if pass == 0 {
                    self.probe_as(linear, size as usize, who)?;
                    self.check_frame(stack, linear, size)?;
                } else {
                    self.write_as(linear, &bytes[from..from + size as usize], who)?;
                }
            }
        }
        Ok(sp)
    }

    /// Pushes at CPL 3 are subject to alignment checks.
    fn check_frame(&mut self, stack: Stack, linear: u64, size: u64) -> Done {
        if stack.level == 3 {
            self.check_alignment(linear, size)?;
        }
        Ok(())
    }

    fn frame_linear(&mut self, ss: &Segment, offset: u64, size: u64, error: u32) -> Done<u64> {
        let last = offset + size - 1;
        let within = if ss.attributes & 0xc == 4 {
            offset > ss.limit as u64 && last <= if ss.big() { 0xffff_ffff } else { 0xffff }
        } else {
            last <= ss.limit as u64
        };
        if within && ss.present() {
            Ok(ss.base.wrapping_add(offset) & 0xffff_ffff)
        } else {
            Err(self.fault(STACK, Some(error)))
        }
    }

    /// Sets the stack pointer by the size of a stack segment; 64 bits for `None`.
    pub(crate) fn set_stack_pointer(&mut self, segment: Option<Segment>, sp: u64) {
        match segment {
            None => self.set::<8>(slot::RSP, sp),
            Some(s) if s.big() => self.set::<4>(slot::RSP, sp),
            Some(_) => self.set::<2>(slot::RSP, sp),
        }
    }

    /// An instruction pointer for a code segment: canonical in 64-bit code, else within the limit.
    pub(crate) fn check_ip(&mut self, d: Descriptor, rip: u64, error: u32) -> Done {
        let fine = if self.long_mode() && d.long() {
            self.canonical(rip)
        } else {
            rip <= d.limit() as u64
        };
        if fine { Ok(()) } else { Err(self.gp(error)) }
    }

    /// A code descriptor's L and D must not both be set in IA-32e mode.
    fn bad_size(&self, d: Descriptor) -> bool {
        self.long_mode() && d.long() && d.big()
    }

    /// Enters a code segment at a privilege level.
    pub(crate) fn enter_code(&mut self, d: Descriptor, selector: u16, cpl: u8) {
        self.seg[CS] = d.segment(selector & 0xfffc | cpl as u16);
        self.cpl = cpl;
    }

    /// Loads CS in real-address or virtual-8086 mode.
    pub(crate) fn enter_real(&mut self, selector: u16) {
        let virtual8086 = self.virtual8086();
        let cs = &mut self.seg[CS];
        cs.selector = selector;
        cs.base = (selector as u64) << 4;
        if virtual8086 {
            (cs.limit, cs.attributes) = (0xffff, 0xfb);
        }
    }

    /// Far JMP (`call` false) or CALL with an operand size of `size` bytes: the new RIP
    /// (SDM Vol. 2A "CALL—Call Procedure", "JMP—Jump").
    pub(crate) fn far_transfer(&mut self, o: &Op, selector: u16, offset: u64, size: u64, call: bool) -> Done<u64> {
        let next = self.next_ip(o);
        if !self.protected() {
            if offset > 0xffff && offset > self.seg[CS].limit as u64 {
                return Err(self.gp(0));
            }
            if call {
                let cs = self.seg[CS].selector as u64;
                let stack = self.own_stack(false, 0);
                let sp = self.push_frame(stack, &[cs, next], size)?;
                self.set_stack_pointer(stack.segment, sp);
            }
            self.enter_real(selector);
            self.refresh_mode();
            return Ok(offset);
        }
        if selector & 0xfffc == 0 {
            return Err(self.gp(0));
        }
        let mut d = self.descriptor(selector, GP, 0)?;
        let error = named(selector);
        if d.system() {
            return self.through_gate(o, d, selector, call);
        }
        let rpl = (selector & 3) as u8;
        let denied = if d.conforming() {
            d.dpl() > self.cpl
        } else {
            rpl > self.cpl || d.dpl() != self.cpl
        };
        if !d.code() || self.bad_size(d) || denied {
            return Err(self.gp(error));
        }
        if !d.present() {
            return Err(self.fault(NP, Some(error)));
        }
        // Of a 64-bit offset into code of another size the lower half alone counts.
        let offset = if d.long() { offset } else { offset & 0xffff_ffff };
        self.check_ip(d, offset, 0)?;
        self.mark_accessed(&mut d)?;
        if call {
            let cs = self.seg[CS].selector as u64;
            // The pushes are those of the mode that is entered.
            let mut stack = self.own_stack(self.long_mode() && d.long(), 0);
            if !self.is64() {
                stack.sp &= 0xffff_ffff;
            }
            let sp = self.push_frame(stack, &[cs, next], size)?;
            self.set_stack_pointer(stack.segment, sp);
        }
        self.enter_code(d, selector, self.cpl);
        self.refresh_mode();
        Ok(offset)
    }

    /// The same through a call gate (SDM Vol. 3A 6.8.4 "Accessing a Code Segment Through a Call Gate").
    fn through_gate(&mut self, o: &Op, gate: Descriptor, selector: u16, call: bool) -> Done<u64> {
        let error = named(selector);
        let long = self.long_mode();
        let size: u64 = match (gate.kind(), long) {
            (12, true) => 8,
            (12, false) => 4,
            (4, false) => 2,
            // An available TSS, or a task gate. A busy TSS may not be entered again.
            (1 | 5 | 9, false) => 0,
            _ => return Err(self.gp(error)),
        };
        if gate.dpl() < self.cpl || (selector & 3) as u8 > gate.dpl() {
            return Err(self.gp(error));
        }
        if size == 0 && gate.kind() != 5 {
            self.far_task(o, selector, call)?;
            return Ok(self.rip);
        }
        if !gate.present() {
            return Err(self.fault(NP, Some(error)));
        }
        if size == 0 {
            self.far_task(o, gate.gate_selector(), call)?;
            return Ok(self.rip);
        }
        let high = if long { self.descriptor_high(selector, gate)? } else { 0 };
        let count = if long { 0 } else { gate.bits >> 32 & 0x1f };
        let mut target = Gate::new(gate.bits, high & 0xffff_ffff);
        if size == 2 {
            target.offset &= 0xffff;
        }
        if target.selector & 0xfffc == 0 {
            return Err(self.gp(0));
        }
        let mut d = self.descriptor(target.selector, GP, 0)?;
        let error = named(target.selector);
        if !d.code() || d.dpl() > self.cpl || long && (!d.long() || d.big()) {
            return Err(self.gp(error));
        }
        if !call && !d.conforming() && d.dpl() != self.cpl {
            return Err(self.gp(error));
        }
        if !d.present() {
            return Err(self.fault(NP, Some(error)));
        }
        self.mark_accessed(&mut d)?;
        let next = self.next_ip(o);
        let cs = self.seg[CS].selector as u64;
        if call && !d.conforming() && d.dpl() < self.cpl {
            let (ss, sp) = self.inner_stack(d.dpl(), 0)?;
            self.check_ip(d, target.offset, 0)?;
            let stack = Stack {
                segment: if long { None } else { Some(ss) },
                sp,
                level: d.dpl(),
                error: named(ss.selector),
            };
            let mut items = [0; 4 + 31];
            items[0] = self.seg[SS].selector as u64;
            items[1] = self.get::<8>(slot::RSP);
            for i in 0..count {
                // The parameter pushed first is copied first.
                items[2 + i as usize] = self.stack_item(o, (count - 1 - i) * size, size)?;
            }
            let n = 2 + count as usize;
            (items[n], items[n + 1]) = (cs, next);
            let sp = self.push_frame(stack, &items[..n + 2], size)?;
            self.seg[SS] = ss;
            self.set_stack_pointer(stack.segment, sp);
            self.enter_code(d, target.selector, d.dpl());
        } else {
            self.check_ip(d, target.offset, 0)?;
            if call {
                let stack = self.own_stack(long, 0);
                let sp = self.push_frame(stack, &[cs, next], size)?;
                self.set_stack_pointer(stack.segment, sp);
            }
            self.enter_code(d, target.selector, self.cpl);
        }
        self.refresh_mode();
        Ok(target.offset)
    }

    /// Reads an item of the present stack, `skip` bytes above the stack pointer.
    pub(crate) fn stack_item(&mut self, o: &Op, skip: u64, size: u64) -> Done<u64> {
        match size {
            2 => self.peek::<2>(o, skip),
            4 => self.peek::<4>(o, skip),
            _ => self.peek::<8>(o, skip),
        }
    }

    /// Moves the present stack pointer up.
    fn drop_items(&mut self, bytes: u64) {
        let sp = self.get::<8>(slot::RSP).wrapping_add(bytes);
        self.set_sp(sp);
    }

    /// Far RET, with an operand size of `size` bytes and `extra` bytes of parameters: the new RIP
    /// (SDM Vol. 2B "RET—Return From Procedure").
    pub(crate) fn far_return(&mut self, o: &Op, size: u64, extra: u64) -> Done<u64> {
        // The selector is read first, and nothing but it of its slot.
        let selector = self.stack_item(o, size, 2)? as u16;
        let rip = self.stack_item(o, 0, size)?;
        if !self.protected() {
            if rip > self.seg[CS].limit as u64 {
                return Err(self.gp(0));
            }
            self.drop_items(2 * size + extra);
            self.enter_real(selector);
            self.refresh_mode();
            return Ok(rip);
        }
        let d = self.return_target(selector)?;
        let rpl = (selector & 3) as u8;
        let rip = self.return_ip(d, rip);
        if rpl == self.cpl {
            self.check_ip(d, rip, 0)?;
            self.drop_items(2 * size + extra);
            self.enter_code(d, selector, rpl);
        } else {
            let ss = self.stack_item(o, 3 * size + extra, size)? as u16;
            let sp = self.stack_item(o, 2 * size + extra, size)?;
            let stack = self.return_stack(d, ss, rpl)?;
            self.check_ip(d, rip, 0)?;
            self.enter_outer(d, selector, stack, sp.wrapping_add(extra), size);
        }
        self.refresh_mode();
        Ok(rip)
    }

    /// The instruction pointer that RET or IRET goes back to: to compatibility mode the lower half of what was popped.
    fn return_ip(&self, d: Descriptor, rip: u64) -> u64 {
        if self.long_mode() && !d.long() {
            rip & 0xffff_ffff
        } else {
            rip
        }
    }

    /// The code segment that RET or IRET goes back to.
    fn return_target(&mut self, selector: u16) -> Done<Descriptor> {
        if selector & 0xfffc == 0 {
            return Err(self.gp(0));
        }
        let mut d = self.descriptor(selector, GP, 0)?;
        let rpl = (selector & 3) as u8;
        let denied = if d.conforming() { d.dpl() > rpl } else { d.dpl() != rpl };
        if rpl < self.cpl || !d.code() || denied || self.bad_size(d) {
            return Err(self.gp(named(selector)));
        }
        if !d.present() {
            return Err(self.fault(NP, Some(named(selector))));
        }
        self.mark_accessed(&mut d)?;
        Ok(d)
    }

    /// The stack segment that RET or IRET goes back to.
    fn return_stack(&mut self, code: Descriptor, selector: u16, cpl: u8) -> Done<Segment> {
        if selector & 0xfffc == 0 {
            // A null SS only for 64-bit code above CPL 3.
            if self.long_mode() && code.long() && cpl != 3 && (selector & 3) as u8 == cpl {
                return Ok(null_stack(selector));
            }
            return Err(self.gp(0));
        }
        let mut d = self.descriptor(selector, GP, 0)?;
        if (selector & 3) as u8 != cpl || !d.writable() || d.dpl() != cpl {
            return Err(self.gp(named(selector)));
        }
        if !d.present() {
            return Err(self.fault(STACK, Some(named(selector))));
        }
        self.mark_accessed(&mut d)?;
        Ok(d.segment(selector))
    }

    /// Goes to a less privileged level, or, for IRET in 64-bit mode, to another stack.
    fn enter_outer(&mut self, code: Descriptor, selector: u16, ss: Segment, sp: u64, size: u64) {
        let cpl = (selector & 3) as u8;
        let outer = cpl > self.cpl;
        self.seg[SS] = ss;
        if self.long_mode() && code.long() {
            self.set_sized(
                slot::RSP,
                if size == 8 { 8 } else { 4 },
                sp & (u64::MAX >> (64 - 8 * size)),
            );
        } else {
            // To 16- or 32-bit code: what the stack segment's size covers, the rest as it was.
            let width = if ss.big() { 4 } else { 2 };
            self.set_sized(slot::RSP, width, sp & (u64::MAX >> (64 - 8 * size)));
        }
        self.enter_code(code, selector, cpl);
        if !outer {
            return;
        }
        // Segments that the outer level may not use become null; bases stay (SDM Vol. 2B "RET", "IRET").
        for seg in [ES, DS, FS, GS] {
            let s = &mut self.seg[seg];
            let conforming = s.attributes & 0xc == 0xc;
            if s.present() && !conforming && s.dpl() < cpl {
                (s.selector, s.attributes) = (0, 0);
            }
        }
    }

    /// IRET with an operand size of `size` bytes: the new RIP (SDM Vol. 2A "IRET/IRETD/IRETQ—Interrupt Return").
    pub(crate) fn interrupt_return(&mut self, o: &Op, size: u64) -> Done<u64> {
        self.interrupt_return_after(o, size, |_| Ok(()))
    }

    /// The same; `leaves` is called before 64-bit code is left for code of another privilege level or size, when nothing has changed yet.
    pub(crate) fn interrupt_return_after(
        &mut self,
        o: &Op,
        size: u64,
        leaves: impl FnOnce(&mut Cpu) -> Done,
    ) -> Done<u64> {
        if self.virtual8086() && self.iopl() < 3 && !(self.has_virtual_if() && size == 2) {
            return Err(self.gp(0));
        }
        // IRET ends the blocking of NMIs even if it faults (SDM Vol. 3A 7.7.1 "Handling Multiple NMIs").
        let nmi_blocked = self.nmi_blocked;
        self.unblock_nmis();
        if self.protected() && self.rflags & rf::NT != 0 {
            if self.long_mode() {
                return Err(self.gp(0));
            }
            self.return_task(o)?;
            return Ok(self.rip);
        }
        // Read from the top down, and so is what lies above.
        let flags = self.stack_item(o, 2 * size, size)?;
        let selector = self.stack_item(o, size, size)? as u16;
        let rip = self.stack_item(o, 0, size)?;
        if !self.protected() {
            if rip > self.seg[CS].limit as u64 {
                return Err(self.gp(0));
            }
            let virtual_flags = if self.has_virtual_if() {
                Some(self.load_virtual_flags(flags)?)
            } else {
                None
            };
            self.drop_items(3 * size);
            self.enter_real(selector);
            if let Some(new) = virtual_flags {
                self.rflags = new;
                self.nf = crate::flags::from_rflags(flags);
                self.rf_at = u64::MAX;
            } else {
                self.return_flags(o, flags, size, if self.virtual8086() { 3 } else { 0 });
            }
            self.refresh_mode();
            return Ok(rip);
        }
        if flags & rf::VM != 0 && size == 4 && self.cpl == 0 && !self.long_mode() {
            return self.return_to_virtual8086(o, rip, selector, flags);
        }
        let d = self.return_target(selector)?;
        let rpl = (selector & 3) as u8;
        let cpl = self.cpl;
        let rip = self.return_ip(d, rip);
        if rpl == cpl && !self.is64() {
            self.check_ip(d, rip, 0)?;
            self.drop_items(3 * size);
            self.enter_code(d, selector, rpl);
        } else {
            let ss = self.stack_item(o, 4 * size, size)? as u16;
            let sp = self.stack_item(o, 3 * size, size)?;
            let stack = self.return_stack(d, ss, rpl)?;
            self.check_ip(d, rip, 0)?;
            if self.is64()
                && (rpl != cpl || !d.long())
                && let Err(stop) = leaves(self)
            {
                // It runs again.
                self.nmi_blocked = nmi_blocked;
                return Err(stop);
            }
            self.enter_outer(d, selector, stack, sp, size);
        }
        self.return_flags(o, flags, size, cpl);
        self.refresh_mode();
        Ok(rip)
    }

    /// The flags that IRET loads, by operand size and by the privilege level it ran at.
    fn return_flags(&mut self, o: &Op, image: u64, size: u64, cpl: u8) {
        let mut mask = crate::flags::RFLAGS_ARITH | rf::TF | rf::DF | rf::NT;
        if size > 2 {
            mask |= rf::AC | rf::ID;
        }
        let real = !self.cr0.pe();
        if (real || cpl == 0) && !self.virtual8086() {
            mask |= rf::IOPL;
            if size > 2 && !real {
                mask |= rf::VIF | rf::VIP;
            }
        }
        if real || cpl <= self.iopl() {
            mask |= rf::IF;
        }
        let flags = self.rflags() & !mask | image & mask;
        self.set_rflags(flags);
        self.rf_at = if size > 2 && image & rf::RF != 0 {
            self.steps_after(o)
        } else {
            u64::MAX
        };
    }

    /// IRET to virtual-8086 mode (SDM Vol. 3B 22.2.5 "Entering Virtual-8086 Mode").
    fn return_to_virtual8086(&mut self, o: &Op, rip: u64, selector: u16, flags: u64) -> Done<u64> {
        let mut items = [0; 6];
        for (i, item) in items.iter_mut().enumerate() {
            *item = self.stack_item(o, 12 + 4 * i as u64, 4)?;
        }
        let [esp, ss, es, ds, fs, gs] = items;
        if rip > 0xffff {
            return Err(self.gp(0));
        }
        self.return_flags(o, flags, 4, 0);
        self.rflags |= rf::VM;
        self.set::<4>(slot::RSP, esp);
        for (seg, selector) in [(CS, selector as u64), (SS, ss), (ES, es), (DS, ds), (FS, fs), (GS, gs)] {
            self.seg[seg] = Segment {
                attributes: if seg == CS { 0xfb } else { 0xf3 },
                ..Segment::real(selector as u16)
            };
        }
        self.cpl = 3;
        self.refresh_mode();
        Ok(rip)
    }

    /// Enters flat code and a flat stack as SYSCALL, SYSRET, SYSENTER and SYSEXIT do, without reading descriptors.
    pub(crate) fn enter_flat(&mut self, code: u16, stack: u16, cpl: u8, wide: bool) {
        let level = (cpl as u16) << 5;
        let size = if wide { 0x2000 } else { 0x4000 };
        self.seg[CS] = Segment {
            selector: code,
            base: 0,
            limit: u32::MAX,
            attributes: 0x809b | size | level,
        };
        self.seg[SS] = Segment {
            selector: stack,
            base: 0,
            limit: u32::MAX,
            attributes: 0xc093 | level,
        };
        self.cpl = cpl;
        self.refresh_mode();
    }
}

/// A null SS: its RPL and DPL are the privilege level.
pub(crate) fn null_stack(selector: u16) -> Segment {
    Segment {
        selector,
        base: 0,
        limit: 0,
        attributes: (selector & 3) << 5,
    }
}

impl Cpu {
    /// The linear address of an access through a segment, checked (SDM Vol. 3A 6.3 "Limit Checking", 6.4 "Type Checking").
    pub(crate) fn segmented(&mut self, seg: usize, offset: u64, size: u64, write: bool) -> Done<u64> {
        let linear = self.within(seg, offset, size, write);
        linear.ok_or_else(|| self.segment_fault(seg))
    }

    /// What an access raises that its segment does not allow: #SS for the stack's, #GP for another.
    pub(crate) fn segment_fault(&mut self, seg: usize) -> Stop {
        if seg == SS { self.fault(12, Some(0)) } else { self.gp(0) }
    }

    /// Whether accesses through a segment are checked, as [`Lower::segment_checks`](crate::lower::Lower::segment_checks) tells of an instruction.
    fn checks_segment(&self, seg: usize) -> bool {
        !self.is64() && (self.mode & mode::FLAT == 0 || !matches!(seg, 0 | 2 | 3))
    }

    /// The linear address `at` bytes into an operand of which only the first part's segment check was made: for the `len` bytes
    /// there; `None` where the segment does not allow the access.
    pub(crate) fn later_part(&self, o: &Op, linear: u64, at: u64, len: u64) -> Option<u64> {
        let seg = o.seg as usize;
        if self.is64() {
            return Some(linear.wrapping_add(at));
        }
        if !self.checks_segment(seg) {
            return Some(linear.wrapping_add(at) & 0xffff_ffff);
        }
        let offset = linear.wrapping_sub(self.seg[seg.min(5)].base) & 0xffff_ffff;
        self.within(seg, offset + at, len, false)
    }

    /// The same without the fault: `None` where the segment does not allow the access.
    pub(crate) fn within(&self, seg: usize, offset: u64, size: u64, write: bool) -> Option<u64> {
        let s = self.seg[seg.min(5)];
        if self.is64() {
            return Some(if seg >= 4 { s.base.wrapping_add(offset) } else { offset });
        }
        let code = s.attributes & 8 != 0;
        let rights = s.present()
            && if write {
                !code && s.attributes & 2 != 0
            } else {
                !code || s.attributes & 2 != 0
            };
        let last = offset + size.max(1) - 1;
        let expand_down = s.attributes & 0xc == 4;
        let within = if expand_down {
            let top = if s.big() { 0xffff_ffff } else { 0xffff };
            offset > s.limit as u64 && last <= top
        } else {
            last <= s.limit as u64
        };
        (rights && within).then(|| s.base.wrapping_add(offset) & 0xffff_ffff)
    }
}
