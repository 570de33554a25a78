//! The general-protection fault of an RDPMC that a host's KVM does not let the guest execute, taken back.
//!
//! KVM without counters answers RDPMC with #GP, and nobody else hears of it. A breakpoint of the host's before the handler's first
//! instruction does: there the frame on the stack says where the guest was, and the delivery has changed nothing but what the
//! frame holds. What lay on the stack below it is gone, as after any interrupt that might have come there.

use engine::{CS, CpuState, SS, Segment};
use iced_x86::{Decoder, DecoderOptions, Mnemonic};

use x86::rflags::RFlags;

use machine::{descriptor, memory::Memory, walk};

/// #GP.
const VECTOR: u64 = 13;
/// Bits of a segment's attributes.
const LONG: u16 = 1 << 13;
const BIG: u16 = 1 << 14;

fn read<const N: usize>(memory: &Memory, state: &CpuState, linear: u64) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    for (byte, at) in bytes.iter_mut().zip((0..).map(|n| linear.wrapping_add(n))) {
        *byte = walk::read_byte(memory, state, at)?;
    }
    Some(bytes)
}

fn number(memory: &Memory, state: &CpuState, linear: u64, size: u64) -> Option<u64> {
    Some(match size {
        8 => u64::from_le_bytes(read(memory, state, linear)?),
        _ => u32::from_le_bytes(read(memory, state, linear)?).into(),
    })
}

/// The segment that a selector names; `None` for the null one and where there is no descriptor.
fn segment(memory: &Memory, state: &CpuState, selector: u16) -> Option<Segment> {
    if selector & !3 == 0 {
        return None;
    }
    descriptor::descriptor(memory, state, selector).map(|bits| descriptor::segment(selector, bits))
}

fn is_long(state: &CpuState) -> bool {
    state.efer.lma()
}

/// Linear address of the first instruction of a CPU's handler of #GP; `None` where the fault cannot be taken back: in
/// real-address mode, with a task gate, a 16-bit gate or none. SDM Vol. 3A 7.11 "IDT Descriptors", 7.14.1 "64-Bit Mode IDT".
pub fn handler(memory: &Memory, state: &CpuState) -> Option<u64> {
    if !state.cr0.pe() {
        return None;
    }
    let size = if is_long(state) { 16 } else { 8 };
    let last = (VECTOR + 1) * size - 1;
    if last > u64::from(state.idtr.limit) {
        return None;
    }
    let at = state.idtr.base.wrapping_add(VECTOR * size);
    let gate = u64::from_le_bytes(read(memory, state, at)?);
    // Present, an interrupt or a trap gate of 32 or 64 bits.
    if !matches!(gate >> 40 & 0x9f, 0x8e | 0x8f) {
        return None;
    }
    let offset = gate & 0xffff | gate >> 32 & 0xffff_0000;
    if is_long(state) {
        let upper: [u8; 4] = read(memory, state, at.wrapping_add(8))?;
        return Some(offset | u64::from(u32::from_le_bytes(upper)) << 32);
    }
    let code = segment(memory, state, (gate >> 16) as u16)?;
    Some(code.base.wrapping_add(offset) & 0xffff_ffff)
}

/// The state before an RDPMC whose #GP has brought a CPU to its handler; `None`: it was not RDPMC.
pub fn before_rdpmc(memory: &Memory, state: &CpuState) -> Option<CpuState> {
    let size = if is_long(state) { 8 } else { 4 };
    let stack = match is_long(state) {
        true => state.gpr[4],
        false => state.segments[SS].base.wrapping_add(state.gpr[4]) & 0xffff_ffff,
    };
    // The error code, and above it what IRET takes.
    let item = |n: u64| number(memory, state, stack.wrapping_add(n * size), size);
    let (error, rip, selector, rflags) = (item(0)?, item(1)?, item(2)? as u16, RFlags::from_bits(item(3)?));
    if error != 0 || rflags.vm() {
        return None;
    }
    let cs = segment(memory, state, selector)?;
    let mut before = state.clone();
    before.cpl = (selector & 3) as u8;
    (before.rip, before.rflags) = (rip, rflags);
    if is_long(state) || before.cpl != state.cpl {
        let (sp, ss) = (item(4)?, item(5)? as u16);
        before.gpr[4] = sp;
        // 64-bit code may run with none.
        before.segments[SS] = match segment(memory, state, ss) {
            Some(segment) => segment,
            None => Segment {
                selector: ss,
                ..Segment::default()
            },
        };
    } else {
        // Without a change of level the frame is on the stack that was there.
        before.gpr[4] = state.gpr[4].wrapping_add(4 * size) & 0xffff_ffff;
    }
    let bits = match (cs.attributes & LONG != 0 && is_long(state), cs.attributes & BIG != 0) {
        (true, _) => 64,
        (false, true) => 32,
        (false, false) => 16,
    };
    let at = if bits == 64 {
        rip
    } else {
        cs.base.wrapping_add(rip) & 0xffff_ffff
    };
    before.segments[CS] = cs;
    // As many as are mapped.
    let bytes: Vec<u8> = (0..15)
        .map_while(|n| walk::read_byte(memory, &before, at.wrapping_add(n)))
        .collect();
    let instruction = Decoder::new(bits, &bytes, DecoderOptions::NONE).decode();
    (instruction.mnemonic() == Mnemonic::Rdpmc).then_some(before)
}
