//! XBEGIN, XEND, XABORT, XTEST, and what ends a transaction (SDM Vol. 1 16.3.8.1 "Instruction Based Considerations").

use iced_x86::{Instruction, Mnemonic as M};
use x86::watch::{Abort, Change};

use super::system::{Go, cold_flows};
use crate::cpu::{Cpu, mode};
use crate::flags;
use crate::lower::{End, Lower, body, flow};
use crate::op::{Done, Op, Stop, chain, chain_flow};
use crate::transaction::MAX_NESTING;

cold_flows! {
    /// XBEGIN: the fallback is at `imm`, relative to the page.
    Begin = begin;
    /// XEND in a transaction.
    Commit = end;
}

flow! {
    /// What a transaction cannot hold.
    Unfriendly(c, o) {
        let Stop = c.abort(Abort::Instruction);
        c.abandon(o)
    }
    /// XABORT in a transaction.
    Explicit(c, o) {
        let Stop = c.abort(Abort::Explicit(o.imm as u8));
        c.abandon(o)
    }
    /// INT3 and INT1.
    Breakpoint(c, o) {
        let Stop = c.abort(Abort::Debug);
        c.abandon(o)
    }
    /// XEND without a transaction.
    EndOfNothing(c, o) {
        let Stop = c.gp(0);
        c.abandon(o)
    }
}

body! {
    /// XTEST: `imm` is RFLAGS.ZF.
    Test(c, o) {
        c.nf = flags::from_rflags(o.imm);
        Ok(())
    }
}

fn begin(c: &mut Cpu, o: &Op) -> Done<Go> {
    let next = c.next_ip(o);
    if let Some(transaction) = c.transaction.clone() {
        let mut transaction = transaction.borrow_mut();
        if transaction.nesting == MAX_NESTING {
            return Err(c.abort(Abort::Instruction));
        }
        transaction.nesting += 1;
        return Ok(Go::To(next));
    }
    let fallback = c.page_ip().wrapping_add(o.imm) & c.ip_mask;
    c.check_target(fallback)?;
    c.drain_records_first()?;
    let (begin, clock) = (c.ip(o), c.now(o));
    c.begin_transaction(begin, fallback, clock);
    let at = c.linear(begin);
    c.change_always(Change::TransactionBegin { at });
    Ok(Go::Look(next))
}

fn end(c: &mut Cpu, o: &Op) -> Done<Go> {
    let next = c.next_ip(o);
    if let Some(transaction) = &c.transaction {
        let mut transaction = transaction.borrow_mut();
        if transaction.nesting > 1 {
            transaction.nesting -= 1;
            drop(transaction);
            return Ok(Go::To(next));
        }
    }
    c.drain_records_first()?;
    let (at, now) = (c.linear(c.ip(o)), c.now(o));
    let begun = c.commit_transaction();
    let steps = now.wrapping_sub(begun);
    c.change_always(Change::TransactionCommit { at, steps });
    Ok(Go::Look(next))
}

/// Ends the block with the abort that `aborts` gave.
pub(crate) fn lower_abort(l: &mut Lower, cause: Abort) -> End {
    let f = match cause {
        Abort::Debug => chain_flow::<Breakpoint>(),
        _ => chain_flow::<Unfriendly>(),
    };
    l.flow(f, |_| ())
}

/// The four instructions.
pub(crate) fn lower(l: &mut Lower) -> End {
    let inside = l.mode & mode::TRANSACTION != 0;
    match l.i.mnemonic() {
        M::Xbegin => {
            let target = l.target();
            l.flow(chain_flow::<Begin>(), |o| o.imm = target)
        }
        M::Xend if inside => l.flow(chain_flow::<Commit>(), |_| ()),
        M::Xend => l.flow(chain_flow::<EndOfNothing>(), |_| ()),
        M::Xabort if inside => {
            let operand = l.imm(0);
            l.flow(chain_flow::<Explicit>(), |o| o.imm = operand)
        }
        M::Xabort => {
            l.emit(chain::<super::mov::Nop>(), |_| ());
            End::Open
        }
        _ => {
            const ZF: u64 = 1 << 6;
            l.emit(chain::<Test>(), |o| o.imm = if inside { 0 } else { ZF });
            End::Open
        }
    }
}

/// The abort that an instruction is in a transaction, if it is one. The manual asks it of XABORT, CPUID and
/// PAUSE and leaves the others to the part: here all that it names abort, but for x87 and MMX instructions, whose state is
/// put back like any other.
pub(crate) fn aborts(i: &Instruction) -> Option<Abort> {
    let m = i.mnemonic();
    if matches!(m, M::Int3 | M::Int1) {
        return Some(Abort::Debug);
    }
    let writes_special = || {
        let r = i.op0_register();
        r.is_segment_register() || r.is_cr() || r.is_dr() || r.is_tr()
    };
    let aborts = match m {
        M::Cpuid | M::Pause | M::Hlt | M::Monitor | M::Mwait | M::Serialize | M::Vzeroupper => true,
        M::Umonitor | M::Umwait | M::Tpause => true,
        // The part of RFLAGS that is not status.
        M::Cli | M::Sti | M::Clac | M::Stac | M::Popf | M::Popfd | M::Popfq => true,
        M::Mov | M::Pop => writes_special(),
        M::Lds | M::Les | M::Lfs | M::Lgs | M::Lss | M::Swapgs | M::Wrfsbase | M::Wrgsbase => true,
        M::Lgdt | M::Sgdt | M::Lidt | M::Sidt | M::Lldt | M::Sldt | M::Ltr | M::Str | M::Clts | M::Lmsw => true,
        M::Jmp | M::Call => i.is_jmp_far() || i.is_jmp_far_indirect() || i.is_call_far() || i.is_call_far_indirect(),
        M::Retf | M::Iret | M::Iretd | M::Iretq | M::Int | M::Into => true,
        M::Syscall | M::Sysret | M::Sysretq | M::Sysenter | M::Sysexit | M::Sysexitq => true,
        M::Clflush | M::Clflushopt | M::Clwb | M::Invd | M::Wbinvd | M::Wbnoinvd | M::Invlpg | M::Invpcid => true,
        // Past the caches.
        M::Movntdqa
        | M::Movntdq
        | M::Movnti
        | M::Movntpd
        | M::Movntps
        | M::Movntq
        | M::Maskmovq
        | M::Maskmovdqu
        | M::Vmovntdqa
        | M::Vmovntdq
        | M::Vmovntpd
        | M::Vmovntps
        | M::Vmaskmovdqu
        | M::Movdiri
        | M::Movdir64b => true,
        M::Fxsave | M::Fxsave64 | M::Fxrstor | M::Fxrstor64 => true,
        m if super::xsave::handles(m) => m != M::Xgetbv,
        M::In | M::Out | M::Insb | M::Insw | M::Insd | M::Outsb | M::Outsw | M::Outsd => true,
        M::Rdmsr | M::Wrmsr => true,
        _ => false,
    };
    aborts.then_some(Abort::Instruction)
}
