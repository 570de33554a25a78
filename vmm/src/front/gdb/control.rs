//! Changes of registers that decide how a CPU works: segments, control registers, EFER, XCR0, DR6 and DR7.
//!
//! A debugger's user may put into them what the guest itself could, by the instruction that is for it, at CPL 0: the same checks
//! are made, and what hangs on the register follows. So a state that no processor can be in is refused. Other than by the
//! instruction nothing is written to memory: the accessed bit is set in the hidden part of the segment register alone.

use engine::{CS, CpuState, SS, Segment};
use x86::cr::{Cr0, Cr3, Cr4};
use x86::debug::{Dr6, Dr7};
use x86::model::CpuModel;

use machine::{descriptor, memory::Memory};

/// A value that a register does not take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// Bits of a descriptor. SDM Vol. 3A 3.4.5 "Segment Descriptors".
const ACCESSED: u64 = 1 << 40;
/// Writable data, or readable code.
const RIGHT: u64 = 1 << 41;
const CONFORMING: u64 = 1 << 42;
const CODE: u64 = 1 << 43;
/// Code or data, no system segment.
const ORDINARY: u64 = 1 << 44;
const PRESENT: u64 = 1 << 47;
const LONG: u64 = 1 << 53;
const BIG: u64 = 1 << 54;

/// Loads a segment register as MOV does, and CS as a far jump does: the privilege level stays what it is.
///
/// # Errors
/// The instruction would fault.
pub fn load_segment(state: &mut CpuState, memory: &Memory, index: usize, selector: u16) -> Result<(), Refused> {
    let virtual8086 = state.rflags.vm();
    if !state.cr0.pe() || virtual8086 {
        let register = &mut state.segments[index];
        (register.selector, register.base) = (selector, u64::from(selector) << 4);
        if virtual8086 {
            (register.limit, register.attributes) = (0xffff, 0xf3);
        }
        return Ok(());
    }
    let (rpl, cpl) = ((selector & 3) as u8, state.cpl);
    let long = state.efer.lma();
    if selector & !3 == 0 {
        let none = match index {
            CS => return Err(Refused),
            // For 64-bit code above CPL 3 only.
            SS if !(long && state.segments[CS].long() && cpl != 3 && rpl == cpl) => return Err(Refused),
            SS => Segment {
                selector,
                attributes: u16::from(cpl) << 5,
                ..Segment::default()
            },
            _ => Segment {
                selector,
                ..Segment::default()
            },
        };
        state.segments[index] = none;
        return Ok(());
    }
    let bits = descriptor::descriptor(memory, state, selector).ok_or(Refused)?;
    let dpl = (bits >> 45 & 3) as u8;
    let has = |bit: u64| bits & bit != 0;
    let conforming = has(CODE) && has(CONFORMING);
    let sound = match index {
        CS if has(LONG) && long && has(BIG) => false,
        CS if conforming => has(CODE) && dpl <= cpl,
        CS => has(CODE) && dpl == cpl && rpl == cpl,
        SS => !has(CODE) && has(RIGHT) && dpl == cpl && rpl == cpl,
        _ => (!has(CODE) || has(RIGHT)) && (conforming || rpl.max(cpl) <= dpl),
    };
    if !sound || !has(ORDINARY) || !has(PRESENT) {
        return Err(Refused);
    }
    let mut loaded = descriptor::segment(selector, bits | ACCESSED);
    if index == CS {
        loaded.selector = selector & !3 | u16::from(cpl);
        // Code of 32 bits has an instruction pointer of as many.
        let wide = long && loaded.long();
        if !wide && state.rip >> 32 != 0 {
            return Err(Refused);
        }
    }
    state.segments[index] = loaded;
    Ok(())
}

/// The entries that PAE paging keeps in the processor. SDM Vol. 3A 5.4.1 "PDPTE Registers".
fn check_pdptes(model: &CpuModel, memory: &Memory, cr3: u64) -> Result<(), Refused> {
    let reserved = !0u64 << model.physical_bits() | 0x1e6;
    for index in 0..4 {
        let mut entry = [0xff; 8];
        // Nobody answers with all ones.
        let _ = memory.read((cr3 & 0xffff_ffe0) + index * 8, &mut entry);
        let entry = u64::from_le_bytes(entry);
        if entry & 1 != 0 && entry & reserved != 0 {
            return Err(Refused);
        }
    }
    Ok(())
}

/// CR0, as MOV to it (SDM Vol. 2B "MOV—Move to/from Control Registers").
///
/// # Errors
/// The instruction would fault.
pub fn set_cr0(state: &mut CpuState, model: &CpuModel, memory: &Memory, value: u64) -> Result<(), Refused> {
    let (old, cr4, efer) = (state.cr0, state.cr4, state.efer);
    let new = Cr0::accept(value).map_err(|_| Refused)?;
    // Without protection there is one privilege level.
    let leaves = old.pe() && !new.pe() && state.cpl != 0;
    if leaves || !old.may_become(new, cr4, efer, state.segments[CS].long()) {
        return Err(Refused);
    }
    let enters = !old.pg() && new.pg() && efer.lme();
    if enters && state.tr.present() && state.tr.kind() & 8 == 0 {
        return Err(Refused);
    }
    const PG_CD_NW: u64 = 7 << 29;
    let changed = old.into_bits() ^ new.into_bits();
    if new.pg() && cr4.pae() && !efer.lme() && changed & PG_CD_NW != 0 {
        check_pdptes(model, memory, state.cr3)?;
    }
    state.cr0 = new;
    if old.pg() != new.pg() {
        state.efer = efer.with_lma(enters);
    }
    Ok(())
}

/// CR3, as MOV to it.
///
/// # Errors
/// The instruction would fault.
pub fn set_cr3(state: &mut CpuState, model: &CpuModel, memory: &Memory, value: u64) -> Result<(), Refused> {
    let (cr0, cr4, efer) = (state.cr0, state.cr4, state.efer);
    if value & Cr3::reserved(model.physical_bits(), cr4.pcide()) != 0 {
        return Err(Refused);
    }
    if cr0.pg() && cr4.pae() && !efer.lma() {
        check_pdptes(model, memory, value)?;
    }
    state.cr3 = value & !(1 << 63);
    Ok(())
}

/// CR4, as MOV to it.
///
/// # Errors
/// The instruction would fault.
pub fn set_cr4(state: &mut CpuState, model: &CpuModel, memory: &Memory, value: u64) -> Result<(), Refused> {
    let (cr0, cr3, efer) = (state.cr0, Cr3::from_bits(state.cr3), state.efer);
    let new = Cr4::accept(value, model.features()).map_err(|_| Refused)?;
    if !state.cr4.may_become(new, cr0, cr3, efer) {
        return Err(Refused);
    }
    if cr0.pg() && new.pae() && !efer.lma() {
        check_pdptes(model, memory, state.cr3)?;
    }
    state.cr4 = new;
    Ok(())
}

/// IA32_EFER, as WRMSR to it: LMA keeps its value.
///
/// # Errors
/// The instruction would fault.
pub fn set_efer(state: &mut CpuState, model: &CpuModel, value: u64) -> Result<(), Refused> {
    let written = state.efer.write(value, model.features(), state.cr0);
    state.efer = written.map_err(|_| Refused)?;
    Ok(())
}

/// XCR0, as XSETBV (SDM Vol. 1 13.3 "Enabling the XSAVE Feature Set and XSAVE-Enabled Features").
///
/// # Errors
/// The instruction would fault.
pub fn set_xcr0(state: &mut CpuState, model: &CpuModel, value: u64) -> Result<(), Refused> {
    const LEAF: u32 = 0xd;
    const X87: u64 = 1;
    const SSE: u64 = 2;
    const AVX: u64 = 4;
    // Opmasks and ZMM registers, on or off as a whole.
    const AVX512: u64 = 7 << 5;
    const PKRU: u64 = 1 << 9;
    if !model.features().xsave() || !state.cr4.osxsave() {
        return Err(Refused);
    }
    let [low, .., high] = model.cpuid(LEAF, 0);
    let known = (u64::from(low) | u64::from(high) << 32) & (X87 | SSE | AVX | AVX512 | PKRU);
    let needs = |what: u64, needed: u64| value & what == 0 || value & needed == needed;
    let sound = value & X87 != 0 && needs(AVX, SSE) && needs(AVX512, AVX | AVX512);
    if !sound || value & !known != 0 {
        return Err(Refused);
    }
    state.xcr0 = value;
    Ok(())
}

/// DR6 or DR7, as MOV to it: reserved bits keep their values.
///
/// # Errors
/// The instruction would fault.
pub fn set_debug(state: &mut CpuState, model: &CpuModel, number: usize, value: u64) -> Result<(), Refused> {
    if value >> 32 != 0 {
        return Err(Refused);
    }
    state.dr[number] = match number {
        6 => Dr6::written(value, model.features()),
        _ => Dr7::written(value, model.features()),
    };
    Ok(())
}
