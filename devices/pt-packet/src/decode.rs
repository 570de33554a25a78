use crate::{ExecMode, IpBytes, ItemSize, LastIp, PSB, Packet, Tnt};
use core::error::Error;
use core::fmt;

/// Walks the packets of a trace, from its first byte.
///
/// An error ends the walk until [`Decoder::sync_forward`] finds the next PSB: behind bytes that mean nothing no packet's
/// beginning is known, and neither is the last IP.
#[derive(Clone, Debug)]
pub struct Decoder<'a> {
    bytes: &'a [u8],
    at: usize,
    last_ip: LastIp,
    block: Option<ItemSize>,
    failed: bool,
}

/// What a packet may borrow from those before it: what goes along where a trace comes in pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carry {
    last_ip: LastIp,
    block: Option<ItemSize>,
}

/// A packet and where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The offset of its first byte.
    pub offset: usize,
    /// How many bytes it has.
    pub len: usize,
    /// The packet.
    pub packet: Packet,
}

/// Bytes that are no packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeError {
    /// The offset of the first of them.
    pub offset: usize,
    /// What is wrong with them.
    pub kind: ErrorKind,
}

/// What can be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// No packet begins with this byte, or with 02H and this one, as `extended` tells.
    UnknownOpcode {
        /// Whether 02H stands before it.
        extended: bool,
        /// The byte.
        byte: u8,
    },
    /// The trace ends within a packet, which has at least this many bytes.
    Truncated {
        /// Bytes from the packet's first on.
        needed: usize,
    },
    /// The opcode is known, but what follows is reserved.
    Bad(BadPayload),
}

/// A reserved encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadPayload {
    /// IPBytes is 5 or 7.
    IpBytes(u8),
    /// A long TNT without a stop bit, or with nothing but that.
    Tnt,
    /// A MODE leaf other than Exec and TSX.
    ModeLeaf(u8),
    /// MODE.Exec with both CS.L and CS.D.
    ExecMode,
    /// PayloadBytes of PTW is 2 or 3.
    PtwSize(u8),
    /// Bytes 02H 82H that no whole PSB follows.
    Psb,
    /// 02H C3H is followed by something other than 88H.
    Mnt(u8),
    /// A CYC counter of more than 64 bits.
    Cyc,
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            ErrorKind::UnknownOpcode { extended: false, byte } => write!(f, "no packet begins with {byte:02x}"),
            ErrorKind::UnknownOpcode { extended: true, byte } => write!(f, "no packet begins with 02 {byte:02x}"),
            ErrorKind::Truncated { needed } => write!(f, "the trace ends within a packet of at least {needed} bytes"),
            ErrorKind::Bad(BadPayload::IpBytes(bits)) => write!(f, "IPBytes {bits} is reserved"),
            ErrorKind::Bad(BadPayload::Tnt) => write!(f, "a TNT packet without branches"),
            ErrorKind::Bad(BadPayload::ModeLeaf(leaf)) => write!(f, "MODE leaf {leaf} is reserved"),
            ErrorKind::Bad(BadPayload::ExecMode) => write!(f, "MODE.Exec with both CS.L and CS.D"),
            ErrorKind::Bad(BadPayload::PtwSize(bits)) => write!(f, "PayloadBytes {bits} of PTW is reserved"),
            ErrorKind::Bad(BadPayload::Psb) => write!(f, "a PSB that breaks off"),
            ErrorKind::Bad(BadPayload::Mnt(byte)) => write!(f, "no packet begins with 02 c3 {byte:02x}"),
            ErrorKind::Bad(BadPayload::Cyc) => write!(f, "a CYC packet of more than 64 bits"),
        }
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at offset {:#x}: {}", self.offset, self.kind)
    }
}

impl Error for DecodeError {}

/// Finds the first PSB that begins at `from` or later.
///
/// Payload right before a PSB can look like its beginning; of a run of such bytes the last sixteen count.
pub fn find_psb(bytes: &[u8], from: usize) -> Option<usize> {
    // Whatever a PSB's alignment is, one aligned group of eight lies wholly within it.
    const EVEN: u64 = u64::from_le_bytes([0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82]);
    const ODD: u64 = EVEN.rotate_left(8);
    let tail = bytes.get(from..)?;
    // The first offset that has not been looked at as a PSB's beginning.
    let mut next = 0;
    for (group, eight) in tail.chunks_exact(8).enumerate() {
        let word = u64::from_le_bytes(eight.try_into().ok()?);
        if word != EVEN && word != ODD {
            continue;
        }
        // Begins of PSBs that hold this group.
        for start in next.max((group * 8).saturating_sub(8))..=group * 8 + 1 {
            if !tail[start..].starts_with(&PSB) {
                continue;
            }
            let mut start = start;
            while tail[start + 2..].starts_with(&PSB) {
                start += 2;
            }
            return Some(from + start);
        }
        next = group * 8 + 2;
    }
    None
}

impl<'a> Decoder<'a> {
    /// A decoder at the first byte. IPs before the first PSB lack what their packets borrow from those before the trace.
    pub const fn new(bytes: &'a [u8]) -> Decoder<'a> {
        Decoder {
            bytes,
            at: 0,
            last_ip: LastIp::new(),
            block: None,
            failed: false,
        }
    }

    /// A decoder at the first byte of the next piece of a trace: `carry` is what [`Decoder::carry`] was at the end of the last.
    pub const fn resume(bytes: &'a [u8], carry: Carry) -> Decoder<'a> {
        Decoder {
            last_ip: carry.last_ip,
            block: carry.block,
            ..Decoder::new(bytes)
        }
    }

    /// What the next packet may borrow.
    pub const fn carry(&self) -> Carry {
        Carry {
            last_ip: self.last_ip,
            block: self.block,
        }
    }

    /// The offset of the next packet.
    pub const fn offset(&self) -> usize {
        self.at
    }

    /// The last IP.
    pub const fn last_ip(&self) -> LastIp {
        self.last_ip
    }

    /// Goes on at `offset`, where a packet begins, as if nothing was known of what stands before it.
    pub const fn seek(&mut self, offset: usize) {
        *self = Decoder {
            at: offset,
            ..Decoder::new(self.bytes)
        };
    }

    /// Goes to the next PSB, at the present position or behind it, and gives its offset. After an error the bytes that
    /// caused it are behind. Without a PSB the walk is over.
    pub fn sync_forward(&mut self) -> Option<usize> {
        let found = find_psb(self.bytes, self.at.saturating_add(self.failed as usize));
        self.seek(found.unwrap_or(self.bytes.len()));
        found
    }

    /// Takes the packet at the present position; `None` at the end of the trace, and after an error.
    #[inline]
    pub fn next_packet(&mut self) -> Option<Result<Item, DecodeError>> {
        if self.failed || self.at >= self.bytes.len() {
            return None;
        }
        let offset = self.at;
        let packet = decode(&self.bytes[offset..], self.block, &mut self.last_ip);
        Some(match packet {
            Ok((packet, len)) => {
                self.at += len;
                self.follow_block(&packet);
                Ok(Item { offset, len, packet })
            }
            Err(kind) => {
                self.failed = true;
                Err(DecodeError { offset, kind })
            }
        })
    }

    /// A block lasts from its BBP to BEP, or to anything that cannot stand within one. SDM Vol. 3C 33.4.2.26 "Block Begin
    /// Packet (BBP)".
    #[inline]
    fn follow_block(&mut self, packet: &Packet) {
        match packet {
            Packet::Bbp { size, .. } => self.block = Some(*size),
            Packet::Bip { .. }
            | Packet::Pad
            | Packet::Tsc(_)
            | Packet::Tma { .. }
            | Packet::Mtc(_)
            | Packet::Cyc(_)
            | Packet::Cbr(_)
            | Packet::Fup(_) => {}
            _ => self.block = None,
        }
    }
}

impl Iterator for Decoder<'_> {
    type Item = Result<Item, DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_packet()
    }
}

/// The `N` bytes at `at` in front of a number's zeroes, or how many bytes the packet needs at least.
#[inline]
fn number<const N: usize>(bytes: &[u8], at: usize) -> Result<u64, ErrorKind> {
    let mut eight = [0; 8];
    let Some(payload) = bytes.get(at..at + N) else {
        return Err(ErrorKind::Truncated { needed: at + N });
    };
    eight[..N].copy_from_slice(payload);
    Ok(u64::from_le_bytes(eight))
}

#[inline]
fn sized(bytes: &[u8], at: usize, size: ItemSize) -> Result<u64, ErrorKind> {
    match size {
        ItemSize::Four => number::<4>(bytes, at),
        ItemSize::Eight => number::<8>(bytes, at),
    }
}

/// The packet at the head of `bytes`, which is not empty, and its length. `block` is the size of the items of the block that it
/// stands in.
#[inline]
fn decode(bytes: &[u8], block: Option<ItemSize>, last_ip: &mut LastIp) -> Result<(Packet, usize), ErrorKind> {
    let head = bytes[0];
    if let (Some(size), 4) = (block, head & 7) {
        let value = sized(bytes, 1, size)?;
        let id = head >> 3;
        return Ok((Packet::Bip { id, size, value }, 1 + size.len()));
    }
    Ok(match head {
        0 => (Packet::Pad, 1),
        0x02 => return extended(bytes, last_ip),
        _ if head & 1 == 0 => match Tnt::from_bits((head >> 1) as u64) {
            Some(tnt) => (Packet::ShortTnt(tnt), 1),
            None => return Err(ErrorKind::Bad(BadPayload::Tnt)),
        },
        _ if head & 3 == 3 => return cyc(bytes),
        0x99 => (mode(number::<1>(bytes, 1)? as u8)?, 2),
        0x19 => (Packet::Tsc(number::<7>(bytes, 1)?), 8),
        0x59 => (Packet::Mtc(number::<1>(bytes, 1)? as u8), 2),
        _ => {
            let packet = match head & 0x1f {
                0x0d => Packet::Tip,
                0x11 => Packet::TipPge,
                0x01 => Packet::TipPgd,
                0x1d => Packet::Fup,
                _ => {
                    return Err(ErrorKind::UnknownOpcode {
                        extended: false,
                        byte: head,
                    });
                }
            };
            let Some(form) = IpBytes::from_bits(head >> 5) else {
                return Err(ErrorKind::Bad(BadPayload::IpBytes(head >> 5)));
            };
            let payload = match form {
                IpBytes::Suppressed => 0,
                IpBytes::Update16 => number::<2>(bytes, 1)?,
                IpBytes::Update32 => number::<4>(bytes, 1)?,
                IpBytes::Sext48 | IpBytes::Update48 => number::<6>(bytes, 1)?,
                IpBytes::Full => number::<8>(bytes, 1)?,
            };
            (packet(last_ip.expand(form, payload)), 1 + form.len())
        }
    })
}

/// A packet that begins with 02H.
#[inline]
fn extended(bytes: &[u8], last_ip: &mut LastIp) -> Result<(Packet, usize), ErrorKind> {
    let opcode = number::<1>(bytes, 1)? as u8;
    Ok(match opcode {
        0x03 => (Packet::Cbr(number::<2>(bytes, 2)? as u8), 4),
        0x23 => (Packet::PsbEnd, 2),
        0x43 => {
            let payload = number::<6>(bytes, 2)?;
            let (cr3, non_root) = ((payload & !1) << 4, payload & 1 != 0);
            (Packet::Pip { cr3, non_root }, 8)
        }
        0x63 => {
            let payload = number::<1>(bytes, 2)? as u8;
            let size = if payload & 0x80 != 0 {
                ItemSize::Four
            } else {
                ItemSize::Eight
            };
            let kind = payload & 31;
            (Packet::Bbp { size, kind }, 3)
        }
        0x73 => {
            let payload = number::<5>(bytes, 2)?;
            let (ctc, fast) = (payload as u16, (payload >> 24) as u16 & 0x1ff);
            (Packet::Tma { ctc, fast }, 7)
        }
        0x82 => {
            let found = &bytes[..bytes.len().min(PSB.len())];
            if found == PSB {
                last_ip.reset();
                (Packet::Psb, PSB.len())
            } else if PSB.starts_with(found) {
                return Err(ErrorKind::Truncated { needed: PSB.len() });
            } else {
                return Err(ErrorKind::Bad(BadPayload::Psb));
            }
        }
        0x83 => (Packet::TraceStop, 2),
        0xf3 => {
            last_ip.reset();
            (Packet::Ovf, 2)
        }
        0xa3 => match Tnt::from_bits(number::<6>(bytes, 2)?) {
            Some(tnt) if !tnt.is_empty() => (Packet::LongTnt(tnt), 8),
            _ => return Err(ErrorKind::Bad(BadPayload::Tnt)),
        },
        0xc3 => match number::<1>(bytes, 2)? as u8 {
            0x88 => (Packet::Mnt(number::<8>(bytes, 3)?), 11),
            byte => return Err(ErrorKind::Bad(BadPayload::Mnt(byte))),
        },
        0xc8 => (Packet::Vmcs(number::<5>(bytes, 2)? << 12), 7),
        0x62 | 0xe2 => (Packet::ExStop { ip: opcode >= 0x80 }, 2),
        0x33 | 0xb3 => (Packet::Bep { ip: opcode >= 0x80 }, 2),
        0xc2 => {
            let payload = number::<8>(bytes, 2)?;
            let (hints, extensions) = (payload as u32, (payload >> 32) as u32);
            (Packet::Mwait { hints, extensions }, 10)
        }
        0x22 => {
            let [flags, states, ..] = number::<2>(bytes, 2)?.to_le_bytes();
            let packet = Packet::Pwre {
                hardware: flags & 0x80 != 0,
                state: states >> 4,
                sub_state: states & 15,
            };
            (packet, 4)
        }
        0xa2 => {
            let [states, reason, ..] = number::<5>(bytes, 2)?.to_le_bytes();
            let packet = Packet::Pwrx {
                last: states >> 4,
                deepest: states & 15,
                reason: reason & 15,
            };
            (packet, 7)
        }
        0x13 => {
            let [kind, vector, ..] = number::<2>(bytes, 2)?.to_le_bytes();
            let packet = Packet::Cfe {
                kind: kind & 31,
                vector,
                ip: kind & 0x80 != 0,
            };
            (packet, 4)
        }
        0x53 => {
            let kind = number::<1>(bytes, 2)? as u8 & 63;
            let value = number::<8>(bytes, 3)?;
            (Packet::Evd { kind, value }, 11)
        }
        _ if opcode & 0x1f == 0x12 => {
            let size = match opcode >> 5 & 3 {
                0 => ItemSize::Four,
                1 => ItemSize::Eight,
                bits => return Err(ErrorKind::Bad(BadPayload::PtwSize(bits))),
            };
            let value = sized(bytes, 2, size)?;
            let ip = opcode >= 0x80;
            (Packet::Ptw { value, size, ip }, 2 + size.len())
        }
        byte => return Err(ErrorKind::UnknownOpcode { extended: true, byte }),
    })
}

fn mode(payload: u8) -> Result<Packet, ErrorKind> {
    match payload >> 5 {
        0 => {
            let mode = match payload & 3 {
                0 => ExecMode::Bits16,
                1 => ExecMode::Bits64,
                2 => ExecMode::Bits32,
                _ => return Err(ErrorKind::Bad(BadPayload::ExecMode)),
            };
            let interrupts = payload & 4 != 0;
            Ok(Packet::ModeExec { mode, interrupts })
        }
        1 => Ok(Packet::ModeTsx {
            in_tx: payload & 1 != 0,
            abort: payload & 2 != 0,
        }),
        leaf => Err(ErrorKind::Bad(BadPayload::ModeLeaf(leaf))),
    }
}

fn cyc(bytes: &[u8]) -> Result<(Packet, usize), ErrorKind> {
    let mut cycles = (bytes[0] >> 3) as u64;
    let mut more = bytes[0] & 4 != 0;
    let mut len = 1;
    let mut shift = 5;
    while more {
        let Some(&byte) = bytes.get(len) else {
            return Err(ErrorKind::Truncated { needed: len + 1 });
        };
        let part = (byte >> 1) as u64;
        if shift >= 64 || part << shift >> shift != part {
            return Err(ErrorKind::Bad(BadPayload::Cyc));
        }
        cycles |= part << shift;
        more = byte & 1 != 0;
        shift += 7;
        len += 1;
    }
    Ok((Packet::Cyc(cycles), len))
}
