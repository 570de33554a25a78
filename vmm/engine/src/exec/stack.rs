//! ENTER, PUSHA, POPA.

use iced_x86::Mnemonic as M;

use crate::cpu::{Cpu, SS, slot};
use crate::lower::{End, Lower, body, sized_wide};
use crate::op::{Done, Op, chain};

/// ENTER pushes at most the frame pointer, 30 of the display, and the new frame pointer.
const PUSHES: usize = 32;

body! {
    Enter<S>(c, o) {
        enter::<S>(c, o)
    }
    PushA<S>(c, o) {
        push_all::<S>(c, o)
    }
    PopA<S>(c, o) {
        pop_all::<S>(c, o)
    }
}

impl Cpu {
    /// The linear address of `S` bytes of the stack.
    fn stack_linear<const S: u8>(&mut self, sp: u64, write: bool) -> Done<u64> {
        if self.is64() {
            Ok(sp)
        } else {
            self.segmented(SS, sp & self.stack_mask(), S as u64, write)
        }
    }

    /// Pushes all of `values` or none of them; the new stack pointer is left for the caller to set.
    fn push_values<const S: u8>(&mut self, o: &Op, values: &[u64]) -> Done<u64> {
        let mut places = [0; PUSHES];
        let mut sp = self.get::<8>(slot::RSP);
        for place in &mut places[..values.len()] {
            sp = sp.wrapping_sub(S as u64) & self.stack_mask();
            *place = self.stack_linear::<S>(sp, true)?;
            self.probe_write(o, *place, S as usize)?;
        }
        for (&place, &value) in places.iter().zip(values) {
            self.store::<S>(o, place, value)?;
        }
        Ok(sp)
    }
}

/// SDM Vol. 2A "ENTER", Operation. `imm` is the size of the frame, `aux` the nesting level.
#[inline(never)]
fn enter<const S: u8>(c: &mut Cpu, o: &Op) -> Done {
    let level = (o.aux % 32) as usize;
    // The whole of ESP, also where only SP counts on the way down.
    let (rsp, mask) = (c.get::<8>(slot::RSP), c.stack_mask());
    let frame = rsp & !mask | rsp.wrapping_sub(S as u64) & mask;
    // First whatever can fault, in the order of the pushes and of the reads of the display between them. The instruction also
    // faults whenever a write at the final stack pointer would.
    let mut display = [0; PUSHES];
    let mut bp = c.get::<8>(slot::RBP);
    let pushes = if level > 0 { level + 1 } else { 1 };
    let mut places = [0; PUSHES];
    let mut sp = rsp;
    for i in 0..pushes {
        if (1..level).contains(&i) {
            bp = bp.wrapping_sub(S as u64);
            display[i] = c.stack_linear::<S>(bp, false)?;
            c.load::<S>(o, display[i])?;
        }
        sp = sp.wrapping_sub(S as u64) & mask;
        places[i] = c.stack_linear::<S>(sp, true)?;
        c.probe_write(o, places[i], S as usize)?;
    }
    let last = sp.wrapping_sub(o.imm) & mask;
    let linear = c.stack_linear::<S>(last, true)?;
    c.probe_write(o, linear, S as usize)?;
    // Then in order: an entry of the display may lie where the entry before it was pushed.
    for (i, &place) in places[..pushes].iter().enumerate() {
        let value = match i {
            0 => c.get::<S>(slot::RBP),
            _ if i == level => frame,
            _ => c.load::<S>(o, display[i])?,
        };
        c.store::<S>(o, place, value)?;
    }
    c.set::<S>(slot::RBP, frame);
    c.set_sp(last);
    Ok(())
}

#[inline(never)]
fn push_all<const S: u8>(c: &mut Cpu, o: &Op) -> Done {
    // In the order of their numbers; SP as it was.
    let mut values = [0; 8];
    for (i, value) in values.iter_mut().enumerate() {
        *value = c.get::<S>(i as u8 * 8);
    }
    let sp = c.push_values::<S>(o, &values)?;
    c.set_sp(sp);
    Ok(())
}

#[inline(never)]
fn pop_all<const S: u8>(c: &mut Cpu, o: &Op) -> Done {
    let mut values = [0; 8];
    let mut sp = c.get::<8>(slot::RSP);
    for value in values.iter_mut().rev() {
        let from = c.stack_linear::<S>(sp, false)?;
        *value = c.load::<S>(o, from)?;
        sp = sp.wrapping_add(S as u64);
    }
    for (i, &value) in values.iter().enumerate().filter(|&(i, _)| i as u8 * 8 != slot::RSP) {
        c.set::<S>(i as u8 * 8, value);
    }
    c.set_sp(sp);
    Ok(())
}

pub(crate) fn lower(l: &mut Lower) -> End {
    match l.i.mnemonic() {
        M::Enter => {
            let size = match l.i.code() {
                iced_x86::Code::Enterw_imm16_imm8 => 2,
                iced_x86::Code::Enterd_imm16_imm8 => 4,
                _ => 8,
            };
            let (bytes, level) = (l.imm(0) & 0xffff, l.imm(1) as u16 & 0xff);
            l.emit(sized_wide!(size, Enter), |o| {
                (o.imm, o.aux, o.seg) = (bytes, level, SS as u8)
            });
        }
        M::Pusha => l.emit(chain::<PushA<2>>(), |o| o.seg = SS as u8),
        M::Pushad => l.emit(chain::<PushA<4>>(), |o| o.seg = SS as u8),
        M::Popa => l.emit(chain::<PopA<2>>(), |o| o.seg = SS as u8),
        _ => l.emit(chain::<PopA<4>>(), |o| o.seg = SS as u8),
    }
    End::Open
}
