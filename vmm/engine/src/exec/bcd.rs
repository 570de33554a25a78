//! AAA, AAS, AAM, AAD, DAA, DAS, SALC: none of them in 64-bit mode, where the decoder knows no such instruction.
//!
//! The host, in 64-bit mode itself, has none of them either: their undefined flags are the model's always.

use core::num::NonZeroU8;

use iced_x86::Mnemonic as M;

use crate::cpu::{Cpu, slot};
use crate::flags::{CF, from_rflags, to_rflags};
use crate::lower::{End, Lower, body};
use crate::op::{Done, Op, chain};
use crate::undefined::{self, Adjust};

body! {
    Decimal(c, o) {
        decimal(c, o)
    }
    /// SALC: AL from CF.
    Salc(c, _o) {
        let v = if c.nf & CF != 0 { 0xff } else { 0 };
        c.set::<1>(slot::RAX, v);
        Ok(())
    }
}

const AAA: u16 = 0;
const AAS: u16 = 1;
const DAA: u16 = 2;
const DAS: u16 = 3;
const AAM: u16 = 4;
const AAD: u16 = 5;

#[inline(never)]
fn decimal(c: &mut Cpu, o: &Op) -> Done {
    let op = match o.aux {
        AAA => Adjust::Aaa,
        AAS => Adjust::Aas,
        DAA => Adjust::Daa,
        DAS => Adjust::Das,
        AAM => match NonZeroU8::new(o.imm as u8) {
            Some(base) => Adjust::Aam(base),
            None => return Err(c.fault(0, None)),
        },
        _ => Adjust::Aad(o.imm as u8),
    };
    let (ax, flags) = undefined::adjust(op, c.get::<2>(slot::RAX) as u16, to_rflags(c.nf));
    c.nf = from_rflags(flags);
    c.set::<2>(slot::RAX, ax as u64);
    Ok(())
}

pub(crate) fn lower(l: &mut Lower) -> End {
    let (op, imm) = match l.i.mnemonic() {
        M::Aaa => (AAA, 0),
        M::Aas => (AAS, 0),
        M::Daa => (DAA, 0),
        M::Das => (DAS, 0),
        M::Aam => (AAM, l.imm(0)),
        M::Aad => (AAD, l.imm(0)),
        _ => {
            l.emit(chain::<Salc>(), |_| ());
            return End::Open;
        }
    };
    l.emit(chain::<Decimal>(), |o| (o.aux, o.imm) = (op, imm));
    End::Open
}
