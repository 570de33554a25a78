//! BT, BTS, BTR, BTC, BSF, BSR, TZCNT, LZCNT, POPCNT, BSWAP, MOVBE, CRC32.

use iced_x86::Mnemonic as M;

use crate::Undefined;
use crate::cpu::{Cpu, slot};
use crate::exec::host;
use crate::exec::mov::extend;
use crate::flags::{CF, PF, ZF, from_rflags, to_rflags};
use crate::lower::{End, Lower, Mem, body, sized, sized_wide};
use crate::op::{Handler, chain};
use crate::translate::Form;

const BT: u8 = 0;
const BTS: u8 = 1;
const BTR: u8 = 2;
const BTC: u8 = 3;

/// Tests bit `n` of `v` into CF, and returns `v` with the bit as `K` leaves it.
#[inline(always)]
fn bit<const K: u8, const S: u8>(c: &mut Cpu, v: u64, n: u64) -> u64 {
    let n = n & (8 * S as u64 - 1);
    c.nf = c.nf & !CF | (v >> n & 1) << 8;
    let bit = 1 << n;
    match K {
        BTS => v | bit,
        BTR => v & !bit,
        BTC => v ^ bit,
        _ => v,
    }
}

body! {
    /// A slot, by a register.
    BitR<K, S>(c, o) [Form::Bit(K, S)] {
        let (v, n) = (c.get::<S>(o.dst), c.get::<S>(o.src));
        let r = bit::<K, S>(c, v, n);
        if K != BT {
            c.set::<S>(o.dst, r);
        }
        Ok(())
    }
    /// A slot, by an immediate.
    BitI<K, S>(c, o) [Form::BitImm(K, S)] {
        let v = c.get::<S>(o.dst);
        let r = bit::<K, S>(c, v, o.imm);
        if K != BT {
            c.set::<S>(o.dst, r);
        }
        Ok(())
    }
    /// Memory, by a register whose bits above the operand size have gone into the address.
    BitMr<K, S>(c, o) {
        let ea = c.ea(o);
        let n = c.get::<S>(o.src);
        c.modify::<S>(o, ea, |c, v| bit::<K, S>(c, v, n))
    }
    /// Memory, by an immediate.
    BitMi<K, S>(c, o) {
        let ea = c.ea(o);
        let n = o.imm;
        c.modify::<S>(o, ea, |c, v| bit::<K, S>(c, v, n))
    }
    /// Before `BitMr`: the address sum plus the operand that holds the bit, counted from the one addressed, either way
    /// (SDM Vol. 2A 3.1.1.9 "Operation Section", "Bit(BitBase, BitOffset)").
    BitSum<S>(c, o) {
        let n = extend::<S>(c.get::<S>(o.src)) as i64;
        let operand = n >> (8 * S as u32).trailing_zeros();
        let ea = c.ea(o).wrapping_add((operand * S as i64) as u64);
        c.set::<8>(slot::EA, ea);
        Ok(())
    }
    /// The undefined flags of BT and its kin, from the host: `src` is the bit's number, or `imm` where that is ZERO.
    HostBit<S>(c, o) {
        let n = c.get::<S>(o.src) | o.imm;
        let v = c.get::<S>(o.dst);
        c.nf = from_rflags(host::bit_test(8 * S as u32, v, n, to_rflags(c.nf)));
        Ok(())
    }
    /// BSF (`B` 0) and BSR (1): flags and a destination that keeps its value as `undefined::PINS` has them.
    Scan<B, S>(c, o) [Form::Scan(B, S)] {
        let v = c.get::<S>(o.src);
        if v == 0 {
            c.nf = ZF | PF;
            return Ok(());
        }
        let n = if B == 0 { v.trailing_zeros() } else { 63 - v.leading_zeros() } as u64;
        // Parity of six bits: one bit for each number.
        c.nf = 0x9669_6996_6996_9669u64.rotate_right(n as u32) << 10 & PF;
        c.set::<S>(o.dst, n);
        Ok(())
    }
    HostScan<B, S>(c, o) {
        let (d, v) = (c.get::<8>(o.dst), c.get::<S>(o.src));
        let (r, flags) = host::bit_scan(B == 0, 8 * S as u32, d, v, to_rflags(c.nf));
        c.nf = from_rflags(flags);
        c.set::<8>(o.dst, r);
        Ok(())
    }
    /// TZCNT (`B` 0) and LZCNT (1).
    Count<B, S>(c, o) [Form::CountZeros(B, S)] {
        let v = c.get::<S>(o.src);
        let bits = 8 * S as u64;
        let n = if v == 0 {
            bits
        } else if B == 0 {
            v.trailing_zeros() as u64
        } else {
            v.leading_zeros() as u64 + bits - 64
        };
        c.nf = if n == bits { CF } else { 0 } | if n == 0 { ZF } else { 0 };
        c.set::<S>(o.dst, n);
        Ok(())
    }
    /// The same with the undefined flags from the host.
    HostCounted<B, S>(c, o) {
        let (v, before) = (c.get::<S>(o.src), to_rflags(c.nf));
        <Count<B, S> as crate::op::Body>::run(c, o)?;
        c.nf = from_rflags(host::bit_count(B == 0, 8 * S as u32, v, before));
        Ok(())
    }
    Popcnt<S>(c, o) [Form::CountOnes(S)] {
        let v = c.get::<S>(o.src);
        c.nf = if v == 0 { ZF } else { 0 };
        c.set::<S>(o.dst, v.count_ones() as u64);
        Ok(())
    }
    /// From slot to slot with the bytes in the opposite order.
    Swap<S>(c, o) [Form::SwapBytes(S)] {
        let v = c.get::<S>(o.src);
        c.set::<S>(o.dst, v.swap_bytes() >> (64 - 8 * S as u32));
        Ok(())
    }
    /// BSWAP with a 16-bit operand: undefined.
    Swap16(c, o) {
        c.set::<2>(o.dst, 0);
        Ok(())
    }
    HostSwap16(c, o) {
        let v = host::swap16(c.get::<8>(o.dst));
        c.set::<2>(o.dst, v);
        Ok(())
    }
    /// CRC32 of `S` bytes; `imm` 1: a 64-bit destination, which is as much as zero-extending.
    Crc32<S>(c, o) {
        let mut crc = c.get::<4>(o.dst) as u32;
        let v = c.get::<S>(o.src);
        for i in 0..S as u32 {
            crc = CRC32C[(crc as u8 ^ (v >> (8 * i)) as u8) as usize] ^ crc >> 8;
        }
        c.set::<4>(o.dst, crc as u64);
        Ok(())
    }
}

/// The polynomial of CRC32 (SDM Vol. 2A "CRC32", 11EDC6F41H), bits reversed, byte by byte.
static CRC32C: [u32; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let mut crc = i as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = crc >> 1 ^ if crc & 1 != 0 { 0x82f6_3b78 } else { 0 };
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
};

macro_rules! by_operation {
    ($op:expr, $size:expr, $t:ident) => {
        match $op {
            BT => sized_wide!($size, $t, BT),
            BTS => sized_wide!($size, $t, BTS),
            BTR => sized_wide!($size, $t, BTR),
            _ => sized_wide!($size, $t, BTC),
        }
    };
}

fn test(l: &mut Lower, op: u8) {
    let size = l.size(0);
    let by = l.is_reg(1).then(|| l.reg(1));
    let (src, imm) = match by {
        Some(src) => (src, 0),
        None => (slot::ZERO, l.imm(1)),
    };
    let host = l.undefined == Undefined::Host;
    let on_slot: Handler = match by {
        Some(_) => by_operation!(op, size, BitR),
        None => by_operation!(op, size, BitI),
    };
    let body = |l: &mut Lower, slot| {
        if host {
            l.emit(sized_wide!(size, HostBit), |o| (o.dst, o.src, o.imm) = (slot, src, imm));
        }
        l.emit(on_slot, |o| (o.dst, o.src, o.imm) = (slot, src, imm));
    };
    if l.is_reg(0) {
        let dst = l.reg(0);
        return body(l, dst);
    }
    let mut sum = l.sum();
    if let Some(src) = by {
        l.emit_mem(sized_wide!(size, BitSum), sum, |o| o.src = src);
        sum = Mem {
            base: slot::EA,
            idx: slot::ZERO,
            scale: 0,
            seg: 3,
            disp: 0,
        };
    }
    let m = l.place(sum, size as u16, op != BT);
    if op == BT {
        l.load_t0(size, m);
        body(l, slot::T0);
    } else if l.i.has_lock_prefix() || host {
        l.modify_at(m, size, body);
    } else {
        let f = match by {
            Some(_) => by_operation!(op, size, BitMr),
            None => by_operation!(op, size, BitMi),
        };
        l.emit_mem(f, m, |o| (o.src, o.imm) = (src, imm));
    }
}

pub(crate) fn lower(l: &mut Lower) -> End {
    let host = l.undefined == Undefined::Host;
    match l.i.mnemonic() {
        M::Bt => test(l, BT),
        M::Bts => test(l, BTS),
        M::Btr => test(l, BTR),
        M::Btc => test(l, BTC),
        M::Bswap => {
            let dst = l.reg(0);
            let f = match (l.size(0), host) {
                (2, false) => chain::<Swap16>(),
                (2, true) => chain::<HostSwap16>(),
                (4, _) => chain::<Swap<4>>(),
                _ => chain::<Swap<8>>(),
            };
            l.emit(f, |o| (o.dst, o.src) = (dst, dst));
        }
        M::Movbe => {
            let size = l.size(0);
            if l.is_reg(0) {
                let dst = l.reg(0);
                let src = l.read(1, size);
                l.emit(sized_wide!(size, Swap), |o| (o.dst, o.src) = (dst, src));
            } else {
                let src = l.reg(1);
                l.write(0, size, |l, slot| {
                    l.emit(sized_wide!(size, Swap), |o| (o.dst, o.src) = (slot, src))
                });
            }
        }
        M::Crc32 => {
            let (dst, size) = (l.reg(0), l.size(1));
            let src = l.read(1, size);
            l.emit(sized!(size, Crc32), |o| (o.dst, o.src) = (dst, src));
        }
        m => {
            let (size, dst) = (l.size(0), l.reg(0));
            let src = l.read(1, size);
            // Without their features TZCNT and LZCNT are BSF and BSR with a prefix that means nothing.
            let counts = match m {
                M::Tzcnt => l.features.bmi1(),
                M::Lzcnt => l.features.lzcnt(),
                _ => false,
            };
            if counts && host {
                let f = match m {
                    M::Tzcnt => sized_wide!(size, HostCounted, 0),
                    _ => sized_wide!(size, HostCounted, 1),
                };
                l.emit(f, |o| (o.dst, o.src) = (dst, src));
                return End::Open;
            }
            let f = match m {
                M::Popcnt => sized_wide!(size, Popcnt),
                M::Tzcnt if counts => sized_wide!(size, Count, 0),
                M::Lzcnt if counts => sized_wide!(size, Count, 1),
                M::Bsf | M::Tzcnt if host => sized_wide!(size, HostScan, 0),
                M::Bsf | M::Tzcnt => sized_wide!(size, Scan, 0),
                _ if host => sized_wide!(size, HostScan, 1),
                _ => sized_wide!(size, Scan, 1),
            };
            l.emit(f, |o| (o.dst, o.src) = (dst, src));
        }
    }
    End::Open
}

#[cfg(test)]
#[path = "bit_test.rs"]
mod tests;
