//! Intel PT packets: bytes to packets and back. SDM Vol. 3C 33.4 "Trace Packets and Data Types".
//!
//! Bytes only: which packet is due when, filters and output regions are the tracing unit's matter, and what code ran is the
//! flow decoder's. [`encode()`] and its faster relatives ([`encode_tip`], [`encode_short_tnt`], [`encode_long_tnt`]) write one
//! packet into sixteen bytes of room; [`Decoder`] walks a trace.
//!
//! TRIG packets (trigger tracing) are unknown here: no processor that the project models has them.
#![no_std]

mod decode;
mod encode;
mod ip;
mod packet;
mod tnt;

pub use decode::{BadPayload, Carry, DecodeError, Decoder, ErrorKind, Item, find_psb};
pub use encode::{
    IpKind, MAX_LEN, encode, encode_cyc, encode_long_tnt, encode_mtc, encode_short_tnt, encode_suppressed, encode_tip,
};
pub use ip::{IpBytes, LastIp};
pub use packet::{ExecMode, ItemSize, Packet};
pub use tnt::Tnt;

/// The sixteen bytes of a PSB packet. SDM Vol. 3C 33.4.2.17 "PSB Packet".
pub const PSB: [u8; 16] = [
    0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82,
];
