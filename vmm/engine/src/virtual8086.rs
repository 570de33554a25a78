//! Virtual interrupts: what virtual-8086 mode extensions and protected-mode virtual interrupts make of the instructions that
//! IOPL governs (SDM Vol. 3B chapter 22 "8086 Emulation").
//!
//! # Theory
//! Below IOPL 3 a virtual-8086 program may not touch IF: each such instruction is #GP for its monitor. CR4.VME lets it
//! change a flag of its own instead, VIF, and faults only where the monitor has left word of a pending interrupt in VIP.
//! CR4.PVI does the same for CLI and STI of protected-mode programs at CPL 3. With VME, INT n goes through the program's own
//! vector table where the TSS's redirection bitmap says so.
//!
//! # Practice
//! Each function answers for one instruction; the handlers in `exec` ask.

use crate::cpu::{CS, Cpu, SS};
use crate::op::{Done, Op};
use crate::segment::rf;

/// Bytes of the redirection bitmap, which ends where the I/O permission bitmap begins.
const REDIRECTION: u64 = 32;

impl Cpu {
    /// Virtual-8086 mode with extensions, below IOPL 3: VIF stands for IF.
    pub(crate) fn has_virtual_if(&self) -> bool {
        self.virtual8086() && self.cr4.vme() && self.iopl() < 3
    }

    /// CLI and STI change VIF: in virtual-8086 mode with VME, or at CPL 3 with PVI.
    fn flips_virtual_if(&self) -> bool {
        self.cpl == 3 && self.iopl() < 3 && self.virtual_interrupts()
    }

    /// The flag that CLI and STI change (SDM Vol. 2A "CLI", Vol. 2B "STI").
    pub(crate) fn interrupt_flag(&mut self) -> Done<u64> {
        if !self.cr0.pe() || self.cpl <= self.iopl() {
            return Ok(rf::IF);
        }
        if self.flips_virtual_if() {
            return Ok(rf::VIF);
        }
        Err(self.gp(0))
    }

    /// VIF and VIP are both set where they count: #GP before the next instruction.
    pub(crate) fn virtual_interrupt_due(&self) -> bool {
        const BOTH: u64 = rf::VIF | rf::VIP;
        if self.rflags & BOTH != BOTH || !self.cr0.pe() || self.cpl != 3 {
            return false;
        }
        self.virtual_interrupts()
    }

    /// VIF and VIP count: CR4.VME in virtual-8086 mode, CR4.PVI elsewhere.
    fn virtual_interrupts(&self) -> bool {
        if self.virtual8086() {
            self.cr4.vme()
        } else {
            self.cr4.pvi()
        }
    }

    /// FLAGS as PUSHF and a redirected INT n push them below IOPL 3: IF shows VIF, IOPL shows 3.
    pub(crate) fn virtual_flags(&self) -> u64 {
        let flags = self.rflags() & !rf::IF | rf::IOPL;
        flags | if self.rflags & rf::VIF != 0 { rf::IF } else { 0 }
    }

    /// What POPF and IRET with 16-bit operands make of the flags below IOPL 3, arithmetic flags aside: VIF takes the image's
    /// IF. #GP when that would enable interrupts with one pending, or single-step.
    pub(crate) fn load_virtual_flags(&mut self, image: u64) -> Done<u64> {
        if image & rf::TF != 0 || image & rf::IF != 0 && self.rflags & rf::VIP != 0 {
            return Err(self.gp(0));
        }
        const LOADED: u64 = rf::TF | rf::DF | rf::NT;
        let vif = if image & rf::IF != 0 { rf::VIF } else { 0 };
        Ok(self.rflags & !(LOADED | rf::VIF) | image & LOADED | vif)
    }

    /// INT n in virtual-8086 mode (SDM Vol. 3B 22.3.3 "Class 3—Software Interrupt Handling in Virtual-8086 Mode"): the new
    /// instruction pointer if the program's own vector table served it, `None` if the IDT is to.
    pub(crate) fn redirect(&mut self, o: &Op, vector: u8) -> Done<Option<u64>> {
        if self.cr4.vme() && !self.intercepted(vector)? {
            return self.own_vector(o, vector).map(Some);
        }
        if self.iopl() < 3 {
            return Err(self.gp(0));
        }
        Ok(None)
    }

    /// The vector's bit in the redirection bitmap: the IDT serves it, or the monitor.
    fn intercepted(&mut self, vector: u8) -> Done<bool> {
        let tr = self.tr;
        if !tr.present() || tr.kind() & 8 == 0 || tr.limit < 0x67 {
            return Err(self.gp(0));
        }
        let io = self.read_system(tr.base.wrapping_add(0x66), 2)?;
        let at = io.wrapping_sub(REDIRECTION).wrapping_add(vector as u64 / 8);
        if at > tr.limit as u64 {
            return Err(self.gp(0));
        }
        Ok(self.read_system(tr.base.wrapping_add(at), 1)? >> (vector & 7) & 1 != 0)
    }

    /// Through the vector table at linear address 0, as in real-address mode. The table is read as the program itself would.
    fn own_vector(&mut self, o: &Op, vector: u8) -> Done<u64> {
        let mut entry = [0; 4];
        self.read_bytes(o, vector as u64 * 4, &mut entry)?;
        let entry = u32::from_le_bytes(entry);
        let (ip, selector) = (entry as u16, (entry >> 16) as u16);
        let (flags, flag) = if self.iopl() < 3 {
            (self.virtual_flags(), rf::VIF)
        } else {
            (self.rflags(), rf::IF)
        };
        let stack = self.own_stack(false, 0);
        let cs = self.seg[CS].selector as u64;
        let next = self.next_ip(o);
        let sp = self.push_frame(stack, &[flags, cs, next], 2)?;
        self.set_stack_pointer(Some(self.seg[SS]), sp);
        self.rflags &= !(flag | rf::TF);
        self.enter_real(selector);
        self.refresh_mode();
        Ok(ip as u64)
    }
}
