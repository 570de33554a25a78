//! PUSHF, POPF, LAHF, SAHF, CLC, STC, CMC, CLD, STD, CLI, STI, CLAC, STAC.

use iced_x86::Mnemonic as M;
use x86::watch::Change;

use crate::cpu::{Cpu, SS, slot};
use crate::flags;
use crate::lower::{End, Lower, body, sized_wide};
use crate::op::{Done, Op, chain};
use crate::segment::rf;

impl Cpu {
    /// Changes IF. When that opens a window somebody waits for, or starts single-stepping, the instruction must be the last of
    /// its block, so that the run loop looks right after it.
    #[inline(always)]
    fn set_system_flags(&mut self, new: u64) -> Done {
        let opens = self.want_window && new & !self.rflags & rf::IF != 0;
        let steps = new & rf::TF != 0;
        let privilege = (new ^ self.rflags) & rf::AC != 0;
        let reported = self.watched.tell_interrupts && (new ^ self.rflags) & rf::IF != 0;
        if opens || steps || privilege || reported {
            return flags_slow(self, new);
        }
        self.rflags = new;
        Ok(())
    }
}

#[cold]
#[inline(never)]
fn flags_slow(c: &mut Cpu, new: u64) -> Done {
    let access = (new ^ c.rflags) & rf::AC != 0;
    let reported = c.watched.tell_interrupts && (new ^ c.rflags) & rf::IF != 0;
    if reported {
        c.drain_records_first()?;
    }
    if new & rf::TF != 0 || c.want_window || reported {
        c.need_solo()?;
    }
    if reported {
        c.change(Change::Interrupts);
    }
    c.rflags = new;
    if access {
        // AC lifts SMAP (SDM Vol. 3A 5.6.1 "Determination of Access Rights").
        c.select_tlb();
    }
    Ok(())
}

/// CLAC and STAC (SDM Vol. 2A "CLAC", Vol. 2B "STAC").
#[inline(never)]
fn set_ac<const ON: u8>(c: &mut Cpu) -> Done {
    if c.cpl != 0 {
        return Err(c.ud());
    }
    c.rflags = c.rflags & !rf::AC | if ON != 0 { rf::AC } else { 0 };
    c.select_tlb();
    Ok(())
}

/// CLI and STI where the privilege does not reach IF: VIF, or #GP.
#[cold]
#[inline(never)]
fn virtual_if<const ON: u8>(c: &mut Cpu) -> Done {
    let flag = c.interrupt_flag()?;
    if ON != 0 && c.rflags & rf::VIP != 0 {
        return Err(c.gp(0));
    }
    c.rflags = c.rflags & !flag | if ON != 0 { flag } else { 0 };
    Ok(())
}

/// CLI and STI may change IF itself (SDM Vol. 2A "CLI", 2B "STI").
#[inline(always)]
fn reaches_if(c: &Cpu) -> bool {
    !c.cr0.pe() || c.cpl <= c.iopl()
}

/// PUSHF and POPF in virtual-8086 mode below IOPL 3: the monitor's, but with VME and 16 bits.
#[inline(always)]
fn flags_are_virtual(c: &Cpu) -> bool {
    c.rflags & rf::VM != 0 && c.iopl() < 3
}

#[cold]
#[inline(never)]
fn push_virtual<const S: u8>(c: &mut Cpu, o: &Op) -> Done {
    if S != 2 || !c.has_virtual_if() {
        return Err(c.gp(0));
    }
    let v = c.virtual_flags();
    c.push::<S>(o, v)
}

#[cold]
#[inline(never)]
fn pop_virtual<const S: u8>(c: &mut Cpu, o: &Op) -> Done {
    if S != 2 || !c.has_virtual_if() {
        return Err(c.gp(0));
    }
    let image = c.peek::<S>(o, 0)?;
    c.rflags = c.load_virtual_flags(image)?;
    c.nf = flags::from_rflags(image);
    c.drop_stack::<S>(S as u64);
    Ok(())
}

body! {
    Pushf<S>(c, o) {
        if flags_are_virtual(c) {
            return push_virtual::<S>(c, o);
        }
        // The image never shows VM and RF (SDM Vol. 2B "PUSHF/PUSHFD/PUSHFQ").
        let v = c.rflags() & !(rf::VM | rf::RF);
        c.push::<S>(o, v)
    }
    Popf<S>(c, o) {
        if flags_are_virtual(c) {
            return pop_virtual::<S>(c, o);
        }
        let image = c.peek::<S>(o, 0)?;
        let mut mask = rf::TF | rf::DF | rf::NT;
        if S > 2 {
            mask |= rf::AC | rf::ID;
        }
        let real = !c.cr0.pe();
        if real || c.cpl == 0 {
            mask |= rf::IOPL;
        }
        if real || c.cpl <= c.iopl() {
            mask |= rf::IF;
        }
        if S > 2 {
            // "VIP and VIF are cleared" (SDM Vol. 2B Table 4-16 "Effect of POPF/POPFD on the EFLAGS Register") but in
            // virtual-8086 mode.
            let keep = if c.rflags & rf::VM != 0 { u64::MAX } else { !(rf::VIP | rf::VIF) };
            let new = c.rflags & !mask & keep | image & mask;
            c.set_system_flags(new)?;
        } else {
            let new = c.rflags & !mask | image & mask;
            c.set_system_flags(new)?;
        }
        c.nf = flags::from_rflags(image);
        c.drop_stack::<S>(S as u64);
        Ok(())
    }
    Lahf(c, _o) {
        let v = c.rflags() & 0xd5 | 2;
        c.set::<1>(slot::RAX + 1, v);
        Ok(())
    }
    Sahf(c, _o) {
        let v = c.get::<1>(slot::RAX + 1);
        c.nf = flags::from_rflags(v) | c.nf & flags::OF;
        Ok(())
    }
    Clc(c, _o) {
        c.nf &= !flags::CF;
        Ok(())
    }
    Stc(c, _o) {
        c.nf |= flags::CF;
        Ok(())
    }
    Cmc(c, _o) {
        c.nf ^= flags::CF;
        Ok(())
    }
    Cld(c, _o) {
        c.rflags &= !rf::DF;
        Ok(())
    }
    Std(c, _o) {
        c.rflags |= rf::DF;
        Ok(())
    }
    Clac(c, _o) {
        set_ac::<0>(c)
    }
    Stac(c, _o) {
        set_ac::<1>(c)
    }
    Cli(c, _o) {
        if !reaches_if(c) {
            return virtual_if::<0>(c);
        }
        if c.watched.tell_interrupts {
            let new = c.rflags & !rf::IF;
            return c.set_system_flags(new);
        }
        c.rflags &= !rf::IF;
        Ok(())
    }
    Sti(c, o) {
        if !reaches_if(c) {
            return virtual_if::<1>(c);
        }
        if c.rflags & rf::IF == 0 {
            let reported = c.watched.tell_interrupts;
            if c.want_window || reported {
                c.drain_records_first()?;
                c.need_solo()?;
            }
            if reported {
                c.change(Change::Interrupts);
            }
            c.rflags |= rf::IF;
            c.shadow_at = c.steps_after(o);
        }
        Ok(())
    }
}

/// The operand size of PUSHF and POPF.
fn size(l: &Lower) -> u8 {
    match l.i.mnemonic() {
        M::Pushf | M::Popf => 2,
        M::Pushfd | M::Popfd => 4,
        _ => 8,
    }
}

pub(crate) fn lower(l: &mut Lower) -> End {
    let size = size(l);
    let f = match l.i.mnemonic() {
        M::Pushf | M::Pushfd | M::Pushfq => {
            l.emit(sized_wide!(size, Pushf), |o| o.seg = SS as u8);
            return End::Open;
        }
        M::Popf | M::Popfd | M::Popfq => {
            l.emit(sized_wide!(size, Popf), |o| o.seg = SS as u8);
            return End::Open;
        }
        // In 64-bit mode a feature of its own (SDM Vol. 2A "LAHF").
        M::Lahf | M::Sahf if l.is64() && !l.features.lahf_sahf() => return l.ud(),
        M::Lahf => chain::<Lahf>(),
        M::Sahf => chain::<Sahf>(),
        M::Clc => chain::<Clc>(),
        M::Stc => chain::<Stc>(),
        M::Cmc => chain::<Cmc>(),
        M::Cld => chain::<Cld>(),
        M::Std => chain::<Std>(),
        M::Clac => chain::<Clac>(),
        M::Stac => chain::<Stac>(),
        M::Cli => chain::<Cli>(),
        _ => chain::<Sti>(),
    };
    l.emit(f, |_| ());
    End::Open
}
