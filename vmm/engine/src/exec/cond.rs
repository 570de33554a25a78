//! CMOVcc and SETcc.

use crate::flags::condition;
use crate::lower::{End, Lower, body, sized_wide};
use crate::op::chain;
use crate::translate::Form;

body! {
    /// A 32-bit destination is zero-extended even if nothing moves (SDM Vol. 2A "CMOVcc").
    Cmov<K, S>(c, o) [Form::Cmov(K, S)] {
        let v = c.get::<S>(if condition::<K>(c.nf) { o.src } else { o.dst });
        c.set::<S>(o.dst, v);
        Ok(())
    }
    Set<K>(c, o) [Form::Set(K)] {
        let v = condition::<K>(c.nf);
        c.set::<1>(o.dst, v as u64);
        Ok(())
    }
}

macro_rules! by_condition {
    ($k:expr, $t:ident, [$($n:literal)*], $last:literal) => {
        match $k { $($n => $t!($n),)* _ => $t!($last) }
    };
}

pub(crate) fn lower(l: &mut Lower) -> End {
    let k = l.i.condition_code() as u8 - 1;
    if l.i.op_count() == 1 {
        macro_rules! set {
            ($n:literal) => {
                chain::<Set<$n>>()
            };
        }
        let f = by_condition!(k, set, [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14], 15);
        l.write(0, 1, |l, slot| l.emit(f, |o| o.dst = slot));
        return End::Open;
    }
    let (size, dst) = (l.size(0), l.reg(0));
    let src = l.read(1, size);
    macro_rules! cmov {
        ($n:literal) => {
            sized_wide!(size, Cmov, $n)
        };
    }
    let f = by_condition!(k, cmov, [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14], 15);
    l.emit(f, |o| (o.dst, o.src) = (dst, src));
    End::Open
}
