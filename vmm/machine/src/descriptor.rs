//! Segment descriptors in the guest's memory, looked at without a trace. SDM Vol. 3A 3.4.5 "Segment Descriptors".

use engine::{CpuState, Segment};

use crate::{memory::Memory, walk};

const GRANULAR: u64 = 1 << 55;

/// The eight bytes that a selector names, out of GDT or LDT; `None` where there are none. The null selector names the GDT's first.
pub fn descriptor(memory: &Memory, state: &CpuState, selector: u16) -> Option<u64> {
    let (base, limit) = match selector & 4 {
        0 => (state.gdtr.base, u32::from(state.gdtr.limit)),
        _ if state.ldtr.present() => (state.ldtr.base, state.ldtr.limit),
        _ => return None,
    };
    let offset = selector & !7;
    if u32::from(offset) + 7 > limit {
        return None;
    }
    let mut bytes = [0; 8];
    for (byte, at) in bytes.iter_mut().zip(u64::from(offset)..) {
        *byte = walk::read_byte(memory, state, base.wrapping_add(at))?;
    }
    Some(u64::from_le_bytes(bytes))
}

/// The segment that a descriptor of code or data describes.
pub fn segment(selector: u16, bits: u64) -> Segment {
    let limit = (bits & 0xffff | bits >> 32 & 0xf_0000) as u32;
    Segment {
        selector,
        base: bits >> 16 & 0xff_ffff | bits >> 32 & 0xff00_0000,
        limit: match bits & GRANULAR {
            0 => limit,
            _ => limit << 12 | 0xfff,
        },
        attributes: (bits >> 40) as u16 & 0xf0ff,
    }
}
