//! Instructions whose only effect is a packet. SDM Vol. 2B "PTWRITE—Write Data to a Processor Trace Packet".

use x86::seam::Change;

use crate::cpu::Cpu;
use crate::decode::{End, Lower};
use crate::exec::system::cold_bodies;
use crate::op::{Done, Op, chain};

cold_bodies! {
    /// PTWRITE of `aux` bytes from `src`.
    Ptwrite = ptwrite;
}

/// What becomes of the operand is the trace unit's business. Nobody listens most of the time, and then it is a NOP.
fn ptwrite(c: &mut Cpu, o: &Op) -> Done {
    if !c.watched.tell {
        return Ok(());
    }
    c.settle()?;
    c.need_solo()?;
    let (value, at) = (c.get_sized(o.src, o.aux as u8), c.linear(c.ip(o)));
    c.change(Change::PtWrite {
        value,
        size: o.aux as u8,
        at,
    });
    Ok(())
}

pub(crate) fn lower(l: &mut Lower) -> End {
    let size = l.size(0);
    let src = l.read(0, size);
    l.emit(chain::<Ptwrite>, |o| (o.src, o.aux) = (src, size.into()));
    End::Open
}
