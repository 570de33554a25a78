//! Ops that hold a block together and are no instructions, and the one that stands for what is none.

use super::{body, flow};
use crate::op::{OpKind, Reason, Stop};
use crate::translate::form::{Form, Reach};

/// Whether an op stands behind a block's instructions and leads on to the next block.
pub(crate) fn leads_on(kind: &OpKind) -> bool {
    kind.is::<Continue>() || kind.is::<ContinueFar>() || kind.is::<ContinueSlow>() || kind.is::<Pause>()
}

flow! {
    /// In the place of the first op of a block whose bytes have changed: leaves for the run loop, which decodes them anew.
    Stale(c, o) {
        c.stop = Reason::Resolve;
        c.abandon(o)
    }
    /// #UD.
    Undefined(c, o) {
        let Stop = c.ud();
        c.abandon(o)
    }
    /// The block goes on in the next one, in the same page: not an instruction.
    Continue(c, o) [Form::Continue(Reach::Near)] {
        c.follow(o.link(), true, o.imm)
    }
    /// The block goes on in the next page: not an instruction.
    ContinueFar(c, o) [Form::Continue(Reach::Far)] {
        c.follow_far::<0>(o, true, o.imm)
    }
    /// The block goes on in a code segment that is not flat: not an instruction.
    ContinueSlow(c, o) {
        let rip = c.page_ip().wrapping_add(o.imm) & c.ip_mask;
        c.jump(rip)
    }
    /// Stops after what came before: the end of a block that was cut short.
    Pause(c, o) {
        let rip = c.page_ip().wrapping_add(o.imm);
        c.end(rip, Reason::Look)
    }
}

body! {
    /// The units want [`Watch::before`](x86::watch::Watch::before) called before the instruction at this place in the page, if it is the page they mean.
    Observe(c, o) {
        let linear = c.linear(c.ip(o));
        if !c.is_boundary(linear) || c.watched.observed == (c.steps_after(o).wrapping_sub(1), linear) {
            return Ok(());
        }
        c.stop = Reason::Observe;
        Err(Stop)
    }
    /// The second page of a straddling instruction is still mapped where it was decoded from.
    CheckSecond(c, o) {
        let linear = c.linear(c.page_ip().wrapping_add(0x1000));
        let e = c.tlb.entry(linear);
        if e.exec == linear && e.host == o.imm {
            return Ok(());
        }
        c.stop = Reason::Resolve;
        c.second_page_moved = true;
        Err(Stop)
    }
}
