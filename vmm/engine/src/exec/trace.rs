//! Instructions that only those hear of who watch. SDM Vol. 2B "PTWRITE—Write Data to a Processor Trace Packet", Vol. 3C 31.3
//! "VMX Instructions", VMCALL.

use x86::watch::{Change, Far, HYPERCALL};

use crate::cpu::Cpu;
use crate::exec::system::{Go, cold_bodies, cold_flows};
use crate::lower::{End, Lower};
use crate::op::{Done, Op, chain, chain_flow};

cold_bodies! {
    /// PTWRITE of `aux` bytes from `src`.
    Ptwrite = ptwrite;
}

cold_flows! {
    /// VMCALL.
    Vmcall = vmcall;
}

/// What becomes of the operand is the trace unit's business. Nobody listens most of the time, and then it is a NOP.
fn ptwrite(c: &mut Cpu, o: &Op) -> Done {
    if !c.watched.tell {
        return Ok(());
    }
    c.drain_records_first()?;
    c.need_solo()?;
    let (value, at) = (c.get_sized(o.src, o.aux as u8), c.linear(c.ip(o)));
    c.change(Change::PtWrite {
        value,
        size: o.aux as u8,
        at,
    });
    Ok(())
}

/// Nobody is called but whoever records the guest. To those who watch it is a far transfer there and back, as decoders of
/// Intel PT take it.
pub(crate) fn vmcall(c: &mut Cpu, o: &Op) -> Done<Go> {
    if c.get::<4>(0) as u32 != HYPERCALL {
        return Err(c.ud());
    }
    c.far(o, Far::Call, |c, o| {
        let function = c.get::<4>(3 * 8) as u32;
        c.change(Change::Hypercall { function });
        Ok(Go::Look(c.next_ip(o)))
    })
}

pub(crate) fn lower(l: &mut Lower) -> End {
    if l.i.mnemonic() == iced_x86::Mnemonic::Vmcall {
        return l.flow(chain_flow::<Vmcall>(), |_| ());
    }
    let size = l.size(0);
    let src = l.read(0, size);
    l.emit(chain::<Ptwrite>(), |o| (o.src, o.aux) = (src, size.into()));
    End::Open
}
