//! Each packet is put together as one little-endian number and stored in one go: a fixed-size store has no branches, and the
//! caller keeps as many of its bytes as the packet has.

use crate::{ExecMode, ItemSize, LastIp, PSB, Packet, Tnt};

/// The longest packet, which is also the room that encoding wants.
pub const MAX_LEN: usize = 16;

/// The packets with an IP, which share their layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum IpKind {
    /// TIP.
    Tip = 0x0d,
    /// TIP.PGE.
    TipPge = 0x11,
    /// TIP.PGD.
    TipPgd = 0x01,
    /// FUP.
    Fup = 0x1d,
}

/// What is written when the header is longer than a byte.
const EXTENDED: u8 = 0x02;

#[inline(always)]
fn put(out: &mut [u8; MAX_LEN], bytes: u128, len: usize) -> usize {
    *out = bytes.to_le_bytes();
    len
}

/// An extended packet: its second byte, and a payload of `len` bytes.
#[inline(always)]
fn extended(out: &mut [u8; MAX_LEN], opcode: u8, payload: u128, len: usize) -> usize {
    put(out, EXTENDED as u128 | (opcode as u128) << 8 | payload << 16, 2 + len)
}

/// Writes TIP, TIP.PGE, TIP.PGD or FUP in the shortest form and gives its length, 3 to 9; the IP becomes the last IP.
/// All of `out` may be overwritten.
#[inline]
pub fn encode_tip(kind: IpKind, ip: u64, last: &mut LastIp, out: &mut [u8; MAX_LEN]) -> usize {
    let bytes = last.shortest(ip);
    last.0 = ip;
    // Bytes of the IP that the packet has no room for lie behind its end.
    let header = kind as u8 | (bytes as u8) << 5;
    put(out, header as u128 | (ip as u128) << 8, 1 + bytes.len())
}

/// Writes TIP, TIP.PGE, TIP.PGD or FUP without an IP. All of `out` may be overwritten.
#[inline]
pub fn encode_suppressed(kind: IpKind, out: &mut [u8; MAX_LEN]) -> usize {
    put(out, kind as u128, 1)
}

/// Writes a short TNT packet of the bits, of which there must be 1 to 6: what is above is cut off, and no bits make a PAD.
#[inline]
pub fn encode_short_tnt(tnt: Tnt, out: &mut [u8; MAX_LEN]) -> usize {
    // A stop bit alone would be the header of extended packets.
    out[0] = if tnt.is_empty() { 0 } else { (tnt.bits() << 1) as u8 };
    1
}

/// Writes a long TNT packet of the bits, 1 to 47. All of `out` may be overwritten.
#[inline]
pub fn encode_long_tnt(tnt: Tnt, out: &mut [u8; MAX_LEN]) -> usize {
    extended(out, 0xa3, tnt.bits() as u128, 6)
}

/// Writes MTC. All of `out` may be overwritten.
#[inline]
pub fn encode_mtc(ctc: u8, out: &mut [u8; MAX_LEN]) -> usize {
    put(out, 0x59 | (ctc as u128) << 8, 2)
}

/// Writes CYC and gives its length, 1 to 10. All of `out` may be overwritten.
#[inline]
pub fn encode_cyc(cycles: u64, out: &mut [u8; MAX_LEN]) -> usize {
    // The first byte has 5 bits of the counter below a flag that more follow, the others 7 bits and the flag.
    let mut bytes = 0x03 | (cycles as u128 & 0x1f) << 3;
    let mut rest = cycles >> 5;
    let mut flag = 0x04u128;
    let mut len = 1;
    while rest != 0 {
        bytes |= flag | (rest as u128 & 0x7f) << (8 * len + 1);
        flag = 1 << (8 * len);
        rest >>= 7;
        len += 1;
    }
    put(out, bytes, len)
}

/// Writes a packet and gives its length; the rest of `out` may be overwritten too.
///
/// IP packets take the shortest form and move the last IP; PSB and OVF reset it.
#[inline]
pub fn encode(packet: &Packet, last: &mut LastIp, out: &mut [u8; MAX_LEN]) -> usize {
    match *packet {
        Packet::Pad => put(out, 0, 1),
        Packet::ShortTnt(tnt) => encode_short_tnt(tnt, out),
        Packet::LongTnt(tnt) => encode_long_tnt(tnt, out),
        Packet::Tip(ip) => encode_ip(IpKind::Tip, ip, last, out),
        Packet::TipPge(ip) => encode_ip(IpKind::TipPge, ip, last, out),
        Packet::TipPgd(ip) => encode_ip(IpKind::TipPgd, ip, last, out),
        Packet::Fup(ip) => encode_ip(IpKind::Fup, ip, last, out),
        Packet::Pip { cr3, non_root } => {
            extended(out, 0x43, (cr3 >> 4 & 0xffff_ffff_fffe | non_root as u64) as u128, 6)
        }
        Packet::ModeExec { mode, interrupts } => {
            let mode = match mode {
                ExecMode::Bits16 => 0,
                ExecMode::Bits64 => 1,
                ExecMode::Bits32 => 2,
            };
            put(out, 0x99 | (mode | (interrupts as u128) << 2) << 8, 2)
        }
        Packet::ModeTsx { in_tx, abort } => put(out, 0x99 | (0x20 | in_tx as u128 | (abort as u128) << 1) << 8, 2),
        Packet::TraceStop => extended(out, 0x83, 0, 0),
        Packet::Cbr(ratio) => extended(out, 0x03, ratio as u128, 2),
        Packet::Tsc(tsc) => put(out, 0x19 | (tsc as u128) << 8, 8),
        Packet::Mtc(ctc) => encode_mtc(ctc, out),
        Packet::Tma { ctc, fast } => extended(out, 0x73, ctc as u128 | (fast as u128 & 0x1ff) << 24, 5),
        Packet::Cyc(cycles) => encode_cyc(cycles, out),
        Packet::Vmcs(pointer) => extended(out, 0xc8, (pointer >> 12) as u128, 5),
        Packet::Ovf => {
            last.reset();
            extended(out, 0xf3, 0, 0)
        }
        Packet::Psb => {
            last.reset();
            *out = PSB;
            PSB.len()
        }
        Packet::PsbEnd => extended(out, 0x23, 0, 0),
        Packet::Mnt(payload) => extended(out, 0xc3, 0x88 | (payload as u128) << 8, 9),
        Packet::Ptw { value, size, ip } => {
            let opcode = 0x12 | wide(size) << 5 | (ip as u8) << 7;
            extended(out, opcode, value as u128, size.len())
        }
        Packet::ExStop { ip } => extended(out, 0x62 | (ip as u8) << 7, 0, 0),
        Packet::Mwait { hints, extensions } => extended(out, 0xc2, hints as u128 | (extensions as u128) << 32, 8),
        Packet::Pwre {
            hardware,
            state,
            sub_state,
        } => {
            let states = (state & 15) << 4 | sub_state & 15;
            extended(out, 0x22, (hardware as u128) << 7 | (states as u128) << 8, 2)
        }
        Packet::Pwrx { last, deepest, reason } => {
            let states = (last & 15) << 4 | deepest & 15;
            extended(out, 0xa2, states as u128 | (reason as u128 & 15) << 8, 5)
        }
        Packet::Bbp { size, kind } => extended(out, 0x63, (kind & 31 | (1 - wide(size)) << 7) as u128, 1),
        Packet::Bip { id, size, value } => put(out, (id << 3 | 4) as u128 | (value as u128) << 8, 1 + size.len()),
        Packet::Bep { ip } => extended(out, 0x33 | (ip as u8) << 7, 0, 0),
        Packet::Cfe { kind, vector, ip } => {
            let payload = (kind & 31 | (ip as u8) << 7) as u128 | (vector as u128) << 8;
            extended(out, 0x13, payload, 2)
        }
        Packet::Evd { kind, value } => extended(out, 0x53, (kind & 63) as u128 | (value as u128) << 8, 9),
    }
}

#[inline]
fn encode_ip(kind: IpKind, ip: Option<u64>, last: &mut LastIp, out: &mut [u8; MAX_LEN]) -> usize {
    match ip {
        Some(ip) => encode_tip(kind, ip, last, out),
        None => encode_suppressed(kind, out),
    }
}

const fn wide(size: ItemSize) -> u8 {
    match size {
        ItemSize::Four => 0,
        ItemSize::Eight => 1,
    }
}
