//! Memory operands: their address, what their segment asks for, and the ops that load, store and modify them.

use iced_x86::Register;

use super::{Lower, body, gpr, sized};
use crate::cpu::{SS, mode, slot};
use crate::op::{Handler, Reason, Stop, chain};
use crate::translate::Form;

/// A memory operand ready for an op: whatever the decoder could not fold in has been computed by an op before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mem {
    pub base: u8,
    pub idx: u8,
    pub scale: u8,
    pub seg: u8,
    pub disp: i32,
}

impl Lower<'_> {
    /// The memory operand's segment. In 64-bit mode the prefixes for ES, CS, SS and DS are ignored, so that there, too, what
    /// RSP and RBP point to is the stack.
    pub fn segment(&self) -> u8 {
        let stack = matches!(
            self.i.memory_base(),
            Register::RSP | Register::RBP | Register::ESP | Register::EBP
        );
        match self.i.memory_segment() {
            Register::ES | Register::CS | Register::SS | Register::DS if self.is64() => {
                if stack {
                    2
                } else {
                    3
                }
            }
            segment => segment.number() as u8,
        }
    }

    /// The memory operand: its address sum, with an op before it where segment or address size ask for more.
    /// `size` and `write` are what the segment check needs to know.
    pub fn mem(&mut self, size: u8, write: bool) -> Mem {
        self.mem_span(size as u16, write)
    }

    /// `mem` for operands of any length: state images.
    pub fn mem_span(&mut self, size: u16, write: bool) -> Mem {
        let raw = self.sum();
        self.place(raw, size, write)
    }

    /// Whether there is a memory operand whose segment has a limit or rights that an access may violate.
    pub fn segment_checks(&self) -> bool {
        let seg = self.i.memory_segment().number();
        (0..self.i.op_count()).any(|n| self.is_mem(n))
            && !self.is64()
            && !(self.mode & mode::FLAT != 0 && matches!(seg, 0 | 2 | 3))
    }

    /// For handlers that check the operand's segment themselves, since something comes before its faults: the address sum and the
    /// size of the addresses where there is anything to check, else `mem` and 0.
    pub fn mem_checked_later(&mut self, size: u8) -> (Mem, u8) {
        if !self.segment_checks() {
            return (self.mem(size, true), 0);
        }
        let seg = self.segment();
        let m = self.sum();
        (Mem { seg, ..m }, self.address_size())
    }

    /// `mem_span` for an address sum that an op of the instruction has made out of more than `sum` knows of.
    pub fn place(&mut self, raw: Mem, size: u16, write: bool) -> Mem {
        let seg = self.segment();
        let address = self.address_size();
        let m = if self.is64() {
            let segmented = seg >= 4;
            match (address, segmented) {
                (8, false) => return Mem { seg, ..raw },
                (8, true) => self.emit_ea(chain::<EaBased<8>>(), raw, seg, 0),
                (_, false) => self.emit_ea(chain::<EaFlat<4>>(), raw, seg, 0),
                (_, true) => self.emit_ea(chain::<EaBased<4>>(), raw, seg, 0),
            }
        } else if self.mode & mode::FLAT != 0 && matches!(seg, 0 | 2 | 3) {
            match address {
                2 => self.emit_ea(chain::<EaFlat<2>>(), raw, seg, 0),
                _ => self.emit_ea(chain::<EaFlat<4>>(), raw, seg, 0),
            }
        } else {
            let aux = size | (write as u16) << 15;
            match address {
                2 => self.emit_ea(chain::<EaChecked<2>>(), raw, seg, aux),
                _ => self.emit_ea(chain::<EaChecked<4>>(), raw, seg, aux),
            }
        };
        Mem { seg, ..m }
    }

    /// For an operand that must be aligned, ahead of `mem`: #GP for its alignment comes before #SS for the stack segment's limit.
    pub fn alignment_first(&mut self, alignment: u8) {
        if !self.segment_checks() || self.segment() != SS as u8 {
            return;
        }
        let m = self.sum();
        let f = match self.address_size() {
            2 => chain::<EaAligned<2>>(),
            _ => chain::<EaAligned<4>>(),
        };
        self.emit_mem(f, m, |op| op.aux = alignment as u16);
    }

    /// The memory operand's linear address without any check: INVLPG's.
    pub fn unchecked(&mut self) -> Mem {
        let seg = self.segment();
        let raw = self.sum();
        let plain = self.is64() && seg < 4;
        match (plain, self.address_size()) {
            (true, 8) => Mem { seg, ..raw },
            (true, _) => self.emit_ea(chain::<EaFlat<4>>(), raw, seg, 0),
            (false, 8) => self.emit_ea(chain::<EaBased<8>>(), raw, seg, 0),
            (false, 4) => self.emit_ea(chain::<EaBased<4>>(), raw, seg, 0),
            (false, _) => self.emit_ea(chain::<EaBased<2>>(), raw, seg, 0),
        }
    }

    /// The memory operand's address sum alone, without its segment: LEA and INVLPG's like.
    pub fn sum(&mut self) -> Mem {
        let displacement = self.i.memory_displacement64().wrapping_add(self.sp_bias as u64);
        // A vector of indices is the handler's business.
        let index = if self.i.is_vsib() {
            Register::None
        } else {
            self.i.memory_index()
        };
        let (base, idx) = (gpr(self.i.memory_base()), gpr(index));
        let scale = self.i.memory_index_scale().trailing_zeros() as u8;
        let mut m = Mem {
            base,
            idx,
            scale,
            seg: 3,
            disp: displacement as i32,
        };
        // Addresses below 64 bits are cut to size later, so only 64-bit ones can have a displacement that does not fit.
        if self.is64()
            && displacement as i32 as i64 as u64 != displacement
            && (self.address_size() == 8 || base == slot::PAGE)
        {
            self.emit_mem(chain::<EaWide>(), m, |op| {
                op.disp = 0;
                op.imm = displacement;
            });
            m = Mem {
                base: slot::EA,
                idx: slot::ZERO,
                scale: 0,
                seg: 3,
                disp: 0,
            };
        }
        m
    }

    fn emit_ea(&mut self, f: Handler, raw: Mem, seg: u8, aux: u16) -> Mem {
        self.emit_mem(f, raw, |op| {
            op.seg = seg;
            op.aux = aux;
        });
        Mem {
            base: slot::EA,
            idx: slot::ZERO,
            scale: 0,
            seg,
            disp: 0,
        }
    }

    /// Operand `n`, a register or memory of `size` bytes that is only read, as a register slot.
    pub fn read(&mut self, n: u32, size: u8) -> u8 {
        if self.is_reg(n) {
            return self.reg(n);
        }
        let m = self.mem(size, false);
        self.load_t0(size, m);
        slot::T0
    }

    /// Loads memory into T0.
    pub fn load_t0(&mut self, size: u8, m: Mem) {
        self.emit_mem(sized!(size, LoadT0), m, |_| ());
    }

    /// Operand `n`, a register or memory of `size` bytes that is read and written: `f` emits ops on the slot it is given.
    /// With LOCK the write is a compare and exchange that starts over when somebody else was faster.
    pub fn modify(&mut self, n: u32, size: u8, f: impl FnOnce(&mut Self, u8)) {
        if self.is_reg(n) {
            let slot = self.reg(n);
            return f(self, slot);
        }
        let m = self.mem(size, true);
        self.modify_at(m, size, f);
    }

    /// `modify` of a memory operand whose address has been seen to.
    pub fn modify_at(&mut self, m: Mem, size: u8, f: impl FnOnce(&mut Self, u8)) {
        if self.i.has_lock_prefix() {
            self.lock(m, size);
        }
        self.emit_mem(sized!(size, ModifyBegin), m, |_| ());
        f(self, slot::T0);
        if self.i.has_lock_prefix() {
            self.emit(sized!(size, ModifyEndLocked), |_| ());
        } else {
            self.emit(sized!(size, ModifyEnd), |_| ());
        }
    }

    /// Before a locked access to memory: it may be one that the guest wants to hear of, on parts that can tell.
    pub fn lock(&mut self, m: Mem, size: u8) {
        if self.features.bus_lock_detect() {
            self.emit_mem(chain::<BusLock>(), m, |o| o.aux = size.into());
        }
    }

    /// `modify` of memory, locked whether or not there is a prefix.
    pub fn modify_locked(&mut self, n: u32, size: u8, f: impl FnOnce(&mut Self)) {
        debug_assert!(self.is_mem(n));
        let m = self.mem(size, true);
        self.lock(m, size);
        self.emit_mem(sized!(size, ModifyBegin), m, |_| ());
        f(self);
        self.emit(sized!(size, ModifyEndLocked), |_| ());
    }

    /// Stores T0 to operand 0 as POP does: an address based on the stack pointer counts from after the pop.
    pub fn pop_store(&mut self, size: u8) {
        let by_stack = self.i.memory_base().full_register() == Register::RSP;
        self.sp_bias = if by_stack { size } else { 0 };
        let m = self.mem(size, true);
        self.sp_bias = 0;
        self.emit_mem(sized!(size, StoreT0), m, |_| ());
    }

    /// Operand `n`, a register or memory of `size` bytes that is only written: `f` emits ops on the slot it is given, none of
    /// which may change anything else before the store has succeeded unless the instruction allows it.
    pub fn write(&mut self, n: u32, size: u8, f: impl FnOnce(&mut Self, u8)) {
        if self.is_reg(n) {
            let slot = self.reg(n);
            return f(self, slot);
        }
        let m = self.mem(size, true);
        f(self, slot::T0);
        self.emit_mem(sized!(size, StoreT0), m, |_| ());
    }
}

body! {
    /// `address sum + 64-bit displacement`.
    EaWide(c, o) {
        let ea = c.ea(o).wrapping_add(o.imm);
        c.set::<8>(slot::EA, ea);
        Ok(())
    }
    /// Address sum cut to the address size, in a flat segment.
    EaFlat<A>(c, o) [Form::EaFlat(A)] {
        let ea = c.ea(o) & if A == 2 { 0xffff } else { 0xffff_ffff };
        c.set::<8>(slot::EA, ea);
        Ok(())
    }
    /// FS or GS in 64-bit mode: a base, no limit.
    EaBased<A>(c, o) [Form::EaBased(A)] {
        let ea = c.ea(o) & match A { 2 => 0xffff, 4 => 0xffff_ffff, _ => u64::MAX };
        let base = c.seg[(o.seg as usize).min(5)].base;
        c.set::<8>(slot::EA, ea.wrapping_add(base));
        Ok(())
    }
    /// A segment with base, limit and rights.
    EaChecked<A>(c, o) [Form::EaChecked(A)] {
        let offset = c.ea(o) & if A == 2 { 0xffff } else { 0xffff_ffff };
        let linear = c.segmented(o.seg as usize, offset, (o.aux & 0x7fff) as u64, o.aux >> 15 != 0)?;
        c.set::<8>(slot::EA, linear);
        Ok(())
    }
    /// Whether the address in the stack segment is a multiple of `aux`.
    EaAligned<A>(c, o) {
        let offset = c.ea(o) & if A == 2 { 0xffff } else { 0xffff_ffff };
        let linear = c.seg[SS].base.wrapping_add(offset) & 0xffff_ffff;
        c.aligned(linear, o.aux as u64)
    }
    /// Loads a memory operand into T0.
    LoadT0<S>(c, o) [Form::LoadT0(S)] {
        let ea = c.ea(o);
        let v = c.load::<S>(o, ea)?;
        c.set::<8>(slot::T0, v);
        Ok(())
    }
    /// Stores T0.
    StoreT0<S>(c, o) [Form::StoreT0(S)] {
        let ea = c.ea(o);
        let v = c.get::<S>(slot::T0);
        c.store::<S>(o, ea, v)
    }
    /// Loads an operand that will be written back, into T0 and T1.
    ModifyBegin<S>(c, o) {
        let ea = c.ea(o);
        let v = c.begin::<S>(o, ea)?;
        c.set::<8>(slot::T0, v);
        c.set::<8>(slot::T1, v);
        Ok(())
    }
    /// Writes T0 back.
    ModifyEnd<S>(c, o) {
        c.finish::<S>(o);
        Ok(())
    }
    /// Before a locked access of `aux` bytes.
    BusLock(c, o) {
        if !c.watched.interest.bus_locks || c.cpl == 0 {
            return Ok(());
        }
        c.note_bus_lock(o)
    }
    /// Writes T0 back if memory still holds T1; else the instruction runs again.
    ModifyEndLocked<S>(c, o) {
        if c.finish_locked::<S>(o) {
            return Ok(());
        }
        c.stop = Reason::Resolve;
        Err(Stop)
    }
}
