//! Instructions, one file a family. Each has its bodies and a `lower` that picks among them.

pub(crate) mod arith;
pub(crate) mod avx;
pub(crate) mod bcd;
pub(crate) mod bit;
pub(crate) mod bmi;
pub(crate) mod cond;
pub(crate) mod evex;
pub(crate) mod exchange;
pub(crate) mod flags;
pub(crate) mod flow;
pub(crate) mod fuse;
pub(crate) mod host;
pub(crate) mod io;
pub(crate) mod mov;
pub(crate) mod msr;
pub(crate) mod muldiv;
pub(crate) mod portable;
pub(crate) mod segment;
pub(crate) mod shift;
pub(crate) mod simd;
pub(crate) mod stack;
pub(crate) mod string;
pub(crate) mod system;
pub(crate) mod trace;
pub(crate) mod transaction;
pub(crate) mod x87;
pub(crate) mod xsave;

use iced_x86::{ConditionCode, EncodingKind, Mnemonic as M};

use crate::lower::{End, Lower};

/// Emits the ops of one instruction.
pub(crate) fn lower(l: &mut Lower) -> End {
    if let Some(end) = crate::vmx::lower(l) {
        return end;
    }
    if let Some(lower) = system::lowering(l) {
        return lower(l);
    }
    match l.i.mnemonic() {
        M::Add
        | M::Or
        | M::Adc
        | M::Sbb
        | M::And
        | M::Sub
        | M::Xor
        | M::Cmp
        | M::Test
        | M::Inc
        | M::Dec
        | M::Neg
        | M::Not => arith::lower(l),
        M::Mov | M::Movzx | M::Movsx | M::Movsxd | M::Lea | M::Push | M::Pop | M::Nop | M::Xchg | M::Leave => {
            mov::lower(l)
        }
        M::Jmp | M::Call | M::Ret | M::Pause | M::Loop | M::Loope | M::Loopne | M::Jcxz | M::Jecxz | M::Jrcxz => {
            flow::lower(l)
        }
        M::Sal | M::Shl | M::Shr | M::Sar | M::Rol | M::Ror | M::Rcl | M::Rcr | M::Shld | M::Shrd => shift::lower(l),
        M::Mul | M::Imul | M::Div | M::Idiv => muldiv::lower(l),
        M::Cbw | M::Cwde | M::Cdqe | M::Cwd | M::Cdq | M::Cqo => muldiv::lower(l),
        M::Bt | M::Bts | M::Btr | M::Btc | M::Bsf | M::Bsr | M::Tzcnt | M::Lzcnt => bit::lower(l),
        M::Adcx | M::Adox => bmi::lower_adx(l),
        M::Ptwrite | M::Vmcall => trace::lower(l),
        M::Xbegin | M::Xend | M::Xabort | M::Xtest => transaction::lower(l),
        m if xsave::handles(m) => xsave::lower(l),
        _ if evex::handles(l.i) => evex::lower(l),
        _ if l.i.encoding() == EncodingKind::VEX => bmi::lower_vex(l),
        M::Popcnt | M::Bswap | M::Movbe | M::Crc32 => bit::lower(l),
        M::Xadd | M::Cmpxchg | M::Cmpxchg8b | M::Cmpxchg16b | M::Xlatb => exchange::lower(l),
        M::Aaa | M::Aas | M::Aam | M::Aad | M::Daa | M::Das | M::Salc => bcd::lower(l),
        M::Enter | M::Pusha | M::Pushad | M::Popa | M::Popad => stack::lower(l),
        _ if string::is(l) => string::lower(l),
        _ if l.i.is_jcc_short_or_near() => flow::lower(l),
        _ if simd::handles(l.i) => simd::lower(l),
        _ if x87::handles(l.i) => x87::lower(l),
        // CMOVcc and SETcc.
        _ if l.i.condition_code() != ConditionCode::None => cond::lower(l),
        _ => l.ud(),
    }
}
