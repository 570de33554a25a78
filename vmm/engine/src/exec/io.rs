//! IN, OUT, INS, OUTS (SDM Vol. 1 chapter 20 "Input/Output").

use iced_x86::{Mnemonic as M, OpKind, Register};
use x86::watch::AccessKind;

use crate::cpu::{Cpu, DS, ES, slot};
use crate::exec::system::{Go, cold_flows};
use crate::lower::{End, Lower};
use crate::op::{Done, Op, chain_flow};
use crate::segment::rf;
use crate::smm::io;

cold_flows! {
    /// IN: port `imm`, or DX when `aux` has bit 8; `aux`'s low byte is the size.
    In = |c: &mut Cpu, o: &Op| {
        let (port, size) = port(c, o)?;
        let now = c.now(o);
        let v = c.bus().port_read(port, size, now);
        c.note_io(o, port, size, kind(o) | io::IN, 0);
        c.bus_used = true;
        c.set_sized(slot::RAX, size, v as u64);
        c.note_access(o, port as u64, size as usize, AccessKind::PortRead);
        Ok(Go::Look(c.next_ip(o)))
    };
    Out = |c: &mut Cpu, o: &Op| {
        let (port, size) = port(c, o)?;
        let now = c.now(o);
        let v = c.get_sized(slot::RAX, size) as u32;
        c.bus().port_write(port, size, v, now);
        c.note_io(o, port, size, kind(o), 0);
        c.bus_used = true;
        c.note_access(o, port as u64, size as usize, AccessKind::PortWrite);
        Ok(Go::Look(c.next_ip(o)))
    };
    /// INS: `dst` is the address size, `scale` 1 with REP.
    Ins = ins;
    /// OUTS.
    Outs = outs;
}

/// What an SMI says of IN or OUT.
fn kind(o: &Op) -> u8 {
    if o.aux & 0x100 != 0 { 0 } else { io::IMMEDIATE }
}

/// What an SMI says of INS or OUTS.
fn string(o: &Op) -> u8 {
    if o.scale != 0 { io::STRING | io::REP } else { io::STRING }
}

/// The port of an instruction, once the access is known to be allowed.
fn port(c: &mut Cpu, o: &Op) -> Done<(u16, u8)> {
    let size = o.aux as u8;
    let port = if o.aux & 0x100 != 0 {
        c.get::<2>(slot::RDX) as u16
    } else {
        o.imm as u16
    };
    may_access(c, port, size)?;
    Ok((port, size))
}

/// IOPL, then the I/O permission bitmap (SDM Vol. 1 20.5.2 "I/O Permission Bit Map").
pub(crate) fn may_access(c: &mut Cpu, port: u16, size: u8) -> Done {
    if !c.cr0.pe() || c.cpl <= c.iopl() && c.rflags & rf::VM == 0 {
        return Ok(());
    }
    // A 16-bit TSS has no bitmap.
    let tr = c.tr;
    if !tr.present() || tr.kind() & 8 == 0 || tr.limit < 0x67 {
        return Err(c.gp(0));
    }
    let at = c.read_system(tr.base.wrapping_add(0x66), 2)? + port as u64 / 8;
    // Two bytes are read always, so that one more byte must follow the last.
    if at + 1 > tr.limit as u64 {
        return Err(c.gp(0));
    }
    let bits = c.read_system(tr.base.wrapping_add(at), 2)?;
    if bits >> (port & 7) & ((1 << size) - 1) != 0 {
        return Err(c.gp(0));
    }
    Ok(())
}

fn address_mask(o: &Op) -> u64 {
    u64::MAX >> (64 - 8 * o.dst as u32)
}

/// Where a string operand is, checked.
fn operand(c: &mut Cpu, o: &Op, seg: usize, at: u8, write: bool) -> Done<u64> {
    let offset = c.get::<8>(at) & address_mask(o);
    c.segmented(seg, offset, o.aux as u8 as u64, write)
}

/// Moves an index register past an element, the count of a REP with it, and says where to go on: at the instruction while
/// iterations are left. Each is a step of its own, so that the bus is looked after between them.
fn advance(c: &mut Cpu, o: &Op, at: u8) -> Go {
    let size = o.aux as u8 as u64;
    let step = if c.rflags & rf::DF != 0 {
        size.wrapping_neg()
    } else {
        size
    };
    let moved = c.get::<8>(at).wrapping_add(step);
    c.set_sized(at, o.dst, moved);
    c.bus_used = true;
    if o.scale != 0 {
        let left = c.get_sized(slot::RCX, o.dst).wrapping_sub(1) & address_mask(o);
        c.set_sized(slot::RCX, o.dst, left);
        if left != 0 {
            // This step was an iteration; the instruction itself is still to retire. An interrupt here saves RF set.
            c.iterations += 1;
            c.rf_at = c.steps_after(o);
            return Go::Look(c.ip(o));
        }
    }
    Go::Look(c.next_ip(o))
}

fn done_already(c: &Cpu, o: &Op) -> bool {
    o.scale != 0 && c.get_sized(slot::RCX, o.dst) == 0
}

fn ins(c: &mut Cpu, o: &Op) -> Done<Go> {
    if done_already(c, o) {
        return Ok(Go::To(c.next_ip(o)));
    }
    let (port, size) = port(c, o)?;
    let linear = operand(c, o, ES, slot::RDI, true)?;
    // The port may only be read once the store is sure to succeed.
    c.probe_write(o, linear, size as usize)?;
    let now = c.now(o);
    let v = c.bus().port_read(port, size, now);
    c.write_bytes(o, linear, &v.to_le_bytes()[..size as usize])?;
    c.note_access(o, port as u64, size as usize, AccessKind::PortRead);
    c.note_io(o, port, size, string(o) | io::IN, linear);
    Ok(advance(c, o, slot::RDI))
}

fn outs(c: &mut Cpu, o: &Op) -> Done<Go> {
    if done_already(c, o) {
        return Ok(Go::To(c.next_ip(o)));
    }
    let (port, size) = port(c, o)?;
    let linear = operand(c, o, o.seg as usize, slot::RSI, false)?;
    let mut bytes = [0; 4];
    c.read_bytes(o, linear, &mut bytes[..size as usize])?;
    let now = c.now(o);
    c.bus().port_write(port, size, u32::from_le_bytes(bytes), now);
    c.note_access(o, port as u64, size as usize, AccessKind::PortWrite);
    c.note_io(o, port, size, string(o), linear);
    Ok(advance(c, o, slot::RSI))
}

pub(crate) fn lower(l: &mut Lower) -> End {
    const DX: u16 = 0x100;
    let string = matches!(
        l.i.mnemonic(),
        M::Insb | M::Insw | M::Insd | M::Outsb | M::Outsw | M::Outsd
    );
    if string {
        let input = matches!(l.i.mnemonic(), M::Insb | M::Insw | M::Insd);
        let size = match l.i.mnemonic() {
            M::Insb | M::Outsb => 1,
            M::Insw | M::Outsw => 2,
            _ => 4,
        };
        let address = l.address_size();
        let rep = l.i.has_rep_prefix() || l.i.has_repne_prefix();
        let seg = if input {
            ES
        } else if l.i.segment_prefix() == Register::None {
            DS
        } else {
            l.i.segment_prefix().number()
        };
        let f = if input {
            chain_flow::<Ins>()
        } else {
            chain_flow::<Outs>()
        };
        return l.flow(f, |o| {
            (o.aux, o.dst, o.scale, o.seg) = (size | DX, address, rep as u8, seg as u8);
        });
    }
    let (input, port, data) = match l.i.mnemonic() {
        M::In => (true, 1, 0),
        _ => (false, 0, 1),
    };
    let size = l.size(data) as u16;
    let (from_dx, number) = if l.i.op_kind(port) == OpKind::Register {
        (DX, 0)
    } else {
        (0, l.imm(port) & 0xff)
    };
    let f = if input { chain_flow::<In>() } else { chain_flow::<Out>() };
    l.flow(f, |o| (o.aux, o.imm) = (size | from_dx, number))
}
