//! XADD, CMPXCHG, CMPXCHG8B, CMPXCHG16B, XLAT.

use iced_x86::{Mnemonic as M, Register};

use crate::cpu::{Cpu, slot};
use crate::flags::{ADD, CMP, ZF, alu};
use crate::lower::{End, Lower, Mem, body, sized};
use crate::op::{Done, Op, chain};

body! {
    /// XADD's sum: of the operand in `dst` and the register in `src`.
    Sum<S>(c, o) {
        let (a, b) = (c.get::<S>(o.dst), c.get::<S>(o.src));
        let (r, nf) = alu::<ADD, S>(a, b, c.nf);
        c.nf = nf;
        c.set::<S>(o.dst, r);
        Ok(())
    }
    /// XADD of two registers, which may be the same: the sum wins.
    SumRr<S>(c, o) {
        let (a, b) = (c.get::<S>(o.dst), c.get::<S>(o.src));
        let (r, nf) = alu::<ADD, S>(a, b, c.nf);
        c.nf = nf;
        c.set::<S>(o.src, a);
        c.set::<S>(o.dst, r);
        Ok(())
    }
    /// The operand as it was, to a register: XADD's last act, once memory has been written.
    Old<S>(c, o) {
        let v = c.get::<S>(slot::T1);
        c.set::<S>(o.dst, v);
        Ok(())
    }
    /// CMPXCHG: the new value of the operand in T0. Memory is written in any case.
    Compare<S>(c, o) {
        let (a, v) = (c.get::<S>(slot::RAX), c.get::<S>(slot::T0));
        c.nf = alu::<CMP, S>(a, v, c.nf).1;
        if c.nf & ZF != 0 {
            let new = c.get::<S>(o.src);
            c.set::<8>(slot::T0, new);
        }
        Ok(())
    }
    /// What was found, to the accumulator, if it was not what it held.
    Accumulator<S>(c, _o) {
        if c.nf & ZF == 0 {
            let v = c.get::<S>(slot::T1);
            c.set::<S>(slot::RAX, v);
        }
        Ok(())
    }
    /// CMPXCHG of registers: exactly one of destination and accumulator is written.
    CompareRr<S>(c, o) {
        let (a, v) = (c.get::<S>(slot::RAX), c.get::<S>(o.dst));
        c.nf = alu::<CMP, S>(a, v, c.nf).1;
        if c.nf & ZF != 0 {
            let new = c.get::<S>(o.src);
            c.set::<S>(o.dst, new);
        } else {
            c.set::<S>(slot::RAX, v);
        }
        Ok(())
    }
    Compare8b(c, o) {
        compare8b(c, o)
    }
    Compare16b(c, o) {
        compare16b(c, o)
    }
    /// XLAT's address sum: rBX and AL.
    TableSum(c, o) {
        let ea = c.ea(o).wrapping_add(c.get::<1>(slot::RAX));
        c.set::<8>(slot::EA, ea);
        Ok(())
    }
    /// XLAT.
    Table(c, o) {
        let ea = c.ea(o);
        let v = c.load::<1>(o, ea)?;
        c.set::<1>(slot::RAX, v);
        Ok(())
    }
}

#[inline(never)]
fn compare8b(c: &mut Cpu, o: &Op) -> Done {
    let ea = c.ea(o);
    let expected = c.get::<4>(slot::RDX) << 32 | c.get::<4>(slot::RAX);
    let new = c.get::<4>(slot::RCX) << 32 | c.get::<4>(slot::RBX);
    loop {
        let old = c.begin::<8>(o, ea)?;
        let equal = old == expected;
        c.set::<8>(slot::T1, old);
        c.set::<8>(slot::T0, if equal { new } else { old });
        if c.finish_locked::<8>(o) {
            if equal {
                c.nf |= ZF;
            } else {
                c.nf &= !ZF;
                c.set::<4>(slot::RAX, old);
                c.set::<4>(slot::RDX, old >> 32);
            }
            return Ok(());
        }
    }
}

#[inline(never)]
fn compare16b(c: &mut Cpu, o: &Op) -> Done {
    let ea = c.ea(o);
    if !ea.is_multiple_of(16) {
        return Err(c.gp(0));
    }
    let expected = (c.get::<8>(slot::RDX) as u128) << 64 | c.get::<8>(slot::RAX) as u128;
    let new = (c.get::<8>(slot::RCX) as u128) << 64 | c.get::<8>(slot::RBX) as u128;
    let old = c.exchange16(o, ea, expected, new)?;
    if old == expected {
        c.nf |= ZF;
    } else {
        c.nf &= !ZF;
        c.set::<8>(slot::RAX, old as u64);
        c.set::<8>(slot::RDX, (old >> 64) as u64);
    }
    Ok(())
}

pub(crate) fn lower(l: &mut Lower) -> End {
    match l.i.mnemonic() {
        M::Xadd => {
            let (size, src) = (l.size(0), l.reg(1));
            if l.is_reg(0) {
                let dst = l.reg(0);
                l.emit(sized!(size, SumRr), |o| (o.dst, o.src) = (dst, src));
            } else {
                l.modify(0, size, |l, slot| {
                    l.emit(sized!(size, Sum), |o| (o.dst, o.src) = (slot, src))
                });
                l.emit(sized!(size, Old), |o| o.dst = src);
            }
        }
        M::Cmpxchg => {
            let (size, src) = (l.size(0), l.reg(1));
            if l.is_reg(0) {
                let dst = l.reg(0);
                l.emit(sized!(size, CompareRr), |o| (o.dst, o.src) = (dst, src));
            } else {
                l.modify(0, size, |l, _| l.emit(sized!(size, Compare), |o| o.src = src));
                l.emit(sized!(size, Accumulator), |_| ());
            }
        }
        M::Cmpxchg8b => {
            let m = l.mem(8, true);
            if l.i.has_lock_prefix() {
                l.lock(m, 8);
            }
            l.emit_mem(chain::<Compare8b>(), m, |_| ());
        }
        M::Cmpxchg16b => {
            let m = l.mem(16, true);
            if l.i.has_lock_prefix() {
                l.lock(m, 16);
            }
            l.emit_mem(chain::<Compare16b>(), m, |_| ());
        }
        _ => {
            // The index of the operand is AL, not a whole register.
            debug_assert!(l.i.memory_index() == Register::AL);
            let raw = Mem {
                base: slot::RBX,
                idx: slot::ZERO,
                scale: 0,
                seg: 3,
                disp: 0,
            };
            l.emit_mem(chain::<TableSum>(), raw, |_| ());
            let sum = Mem { base: slot::EA, ..raw };
            let m = l.place(sum, 1, false);
            l.emit_mem(chain::<Table>(), m, |_| ());
        }
    }
    End::Open
}
