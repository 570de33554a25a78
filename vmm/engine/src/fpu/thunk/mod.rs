//! MMX, SSE to SSE4.2, AES, PCLMULQDQ, SHA, GFNI, AVX, AVX2, FMA and F16C by the host's own copy of the instruction.
//!
//! # Theory
//! A vector instruction computes the same bits on every CPU that has it, but for a few. RCPPS, RSQRTPS and their scalar forms are
//! computed ([`super::approx`]); dot products and half precision's approximations always have tables ([`forms::host_executes`]).
//! VRCP14PS, VRSQRT14PS and their like, which Intel has published exactly, are the same on AMD's; NaN propagation and the rounding
//! inside HADDPS and the conversions are laid down by the manual. So the instruction itself, with its operands renamed to fixed
//! registers, is the cheapest exact implementation.
//!
//! # Practice
//! A *thunk* is a few host instructions: load the operands from where four pointers say, execute, store what was written.
//!
//! ```text
//! sysv64 fn(p0: rdi, p1: rsi, p2: rdx, p3: rcx, env: r8, fpu: r9) -> eax (LAHF in AH, OF in AL)
//!     movups  xmm1, [rdi]        ; operand 0 is a register
//!     ldmxcsr [r8]               ; arithmetic only: the guest's rounding, DAZ and FTZ, everything masked
//!     addps   xmm1, [rsi]        ; operand 1 is memory (or xmm2, loaded from [rsi])
//!     stmxcsr [r8+4]
//!     cmp     [r8], 1f80h
//!     je      same
//!     ldmxcsr [r8+8]             ; what Rust expects
//! same:
//!     test    [r8+4], unmasked   ; an unmasked exception leaves the destination as it was
//!     jnz     end
//!     movups  [rdi], xmm1
//! end: ret
//! ```
//!
//! Operand i is host register xmm(i+1) or mm(i), a general register is RAX, memory is `[pi]`; so the guest's register numbers
//! are not part of a thunk and thunks are few: one for each instruction form and immediate. They are kept for the life of the
//! process, in executable memory of their own ([`crate::code_memory`]).
//!
//! # VEX
//! An instruction with a VEX prefix has a thunk of the same kind, made of VEX instructions throughout. A YMM register is kept in
//! two halves, [`FpuState::xmm`] and [`FpuState::ymm_hi`], a fixed distance apart: a 256-bit operand is loaded from both. What is
//! written is stored to both, so that the upper half of a register that a 128-bit instruction writes becomes zero, as the host
//! has it (SDM Vol. 1 14.1.3 "SIMD Instruction Width"). A thunk that used 256 bits ends with VZEROUPPER: legacy thunks, and
//! Rust's own code, then never wait for upper halves. Legacy thunks load and store 128 bits as ever, and leave the guest's upper
//! halves where they are. Where the host has no AVX, or a run is not to use it, most are made of SSE2's instructions instead, one for
//! each half ([`halves`]).
//!
//! # EVEX
//! An instruction with an EVEX prefix, and one on opmask registers, has a thunk of the same kind ([`EvexThunk`]). Its operands are
//! renamed to registers from ZMM16 up, which leave nothing for VZEROUPPER to clear, and to k2 and up; the writemask is k1 and has the
//! fourth pointer. Masking, broadcast, rounding and the suppression of exceptions are the instruction's own, on the host as in the
//! guest. A memory operand of which the mask may leave out elements is passed by pointer where all of it is there, so that the host
//! leaves them out; elsewhere the caller fetches or stores the others one by one, through a buffer ([`Lanes`]). What the host does not
//! execute, and everything where a run asks for it, has a table instead of a thunk ([`super::portable`]), and the same operands.
//!
//! # Exceptions
//! All exceptions are masked on the host while a thunk runs, so it never traps. Invalid, denormal and zero-divide are
//! detected before the computation and their flags do not depend on the masks. Overflow is flagged alike masked or not.
//! Underflow is not: masked, it needs a tiny *and* inexact result; unmasked, a tiny one. So when the guest unmasks it the host
//! runs with FTZ set, which flags every tiny result. FTZ does not concern results of half precision: their instructions have a table
//! besides the thunk, for a guest that unmasks underflow. If an unmasked exception of the first kind occurs in any element, no
//! element's overflow, underflow or precision is reported (SDM Vol. 1 11.5.3.3 "Handling Combinations of Masked and Unmasked
//! Exceptions"). Chosen: with an unmasked overflow or underflow the precision flag is the one of the masked response.
#![allow(unsafe_code)] // Generating machine code and calling it is what this file is for.

mod assemble;
mod evex;
mod evex_form;
mod evex_place;
mod forms;
mod halves;
mod kept;
mod recipe;

pub use assemble::prepare;
pub(crate) use evex::{EvexThunk, prepare_evex};
#[cfg(test)]
pub(crate) use evex_form::Execution;
pub(crate) use evex_form::{EvexForm, Lanes};
pub(crate) use evex_place::Place;
#[cfg(test)]
pub(crate) use forms::{FAMILIES, VEX_FAMILIES};
pub(crate) use forms::{every_host_executes, host_executes, legacy, supported, writes_flags};
pub use forms::{needs_alignment, scalar_to_integer, uses_mxcsr};
pub(crate) use halves::{halved, prepare_halved};
pub use kept::available;
pub(crate) use kept::recipe as recipe_of;
pub(crate) use recipe::Placed;

use super::state::{FpuState, mxcsr};
use std::mem::offset_of;

/// The instruction has no thunk: not a vector instruction, or one whose effects are not all in its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoThunk {
    /// Not in the families that thunks serve.
    Unsupported,
    /// There is no executable memory, or no more.
    NoMemory,
}

/// An unmasked SIMD floating-point exception: #XM, or #UD when CR4.OSXMMEXCPT is clear. The flags are in MXCSR already; the
/// destination is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimdException;

/// The memory operand of a vector instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryUse {
    /// Length in bytes.
    pub size: u8,
    /// Alignment that the instruction demands; 1 for none. A violation is #GP(0), ahead of any page fault.
    pub alignment: u8,
    /// The operand is read.
    pub read: bool,
    /// The operand is written.
    pub write: bool,
}

/// Where one of the four pointers points: a base in the top two bits (FPU state, general registers, memory, nothing) and an
/// index of registers from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(pub u8);

impl Slot {
    const FPU: u8 = 0 << 6;
    const GPR: u8 = 1 << 6;
    const MEMORY: Slot = Slot(2 << 6);
    /// No operand.
    pub const NONE: Slot = Slot(3 << 6);
    /// All general registers: where the string compares have their lengths and their index.
    pub const GPRS: Slot = Slot(Slot::GPR);

    fn xmm(number: usize) -> Slot {
        Slot(Slot::FPU | (offset_of!(FpuState, xmm) / 16 + number) as u8)
    }

    fn mm(number: usize) -> Slot {
        Slot(Slot::FPU | (offset_of!(FpuState, r) / 16 + number) as u8)
    }

    fn gpr(number: usize) -> Slot {
        Slot(Slot::GPR | number as u8)
    }

    /// The number of a general register, where it points at one.
    pub(crate) fn general(self) -> Option<u8> {
        (self.0 >> 6 == 1).then_some(self.0 & 0x3f)
    }

    /// It points at the memory operand.
    pub(crate) fn is_memory(self) -> bool {
        self.0 >> 6 == 2
    }

    /// The offset in the state, where it points there.
    pub(crate) fn vector(self) -> Option<usize> {
        (self.0 >> 6 == 0).then_some((self.0 & 0x3f) as usize * 16)
    }

    /// Registers of the state are 16 bytes apart, general registers 8. An absent operand's pointer is never used.
    #[inline(always)]
    fn pointer(self, fpu: *mut u8, gpr: *mut u8, memory: *mut u8) -> *mut u8 {
        let index = (self.0 & 0x3f) as usize;
        match self.0 >> 6 {
            0 => fpu.wrapping_add(index * 16),
            1 => gpr.wrapping_add(index * 8),
            _ => memory,
        }
    }
}

/// The machine code of a thunk.
pub type Entry = unsafe extern "sysv64" fn(*mut u8, *mut u8, *mut u8, *mut u8, *mut Env, *mut FpuState) -> u32;

/// One instruction, ready to be executed: shared machine code and this instruction's own registers.
#[derive(Clone, Copy, Debug)]
pub struct Thunk {
    /// The code.
    pub entry: Entry,
    /// What its pointers are to point at. The last one is for the fourth operand of AVX blends.
    pub slots: [Slot; 4],
    /// The memory operand, if there is one.
    pub memory: Option<MemoryUse>,
    /// What else there is to know.
    pub traits: Traits,
}

/// What a vector instruction does besides writing its operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Traits {
    /// The arithmetic flags are written.
    pub flags: bool,
    /// Rounding and exceptions come from and go to MXCSR.
    pub mxcsr: bool,
    /// MMX registers are involved: the x87 unit is taken to MMX use, and a pending x87 exception comes first.
    pub mmx: bool,
    /// Operand 0 is an MMX register and is written.
    pub writes_mm: bool,
    /// Underflow is never reported, whatever MXCSR unmasks: exceptions are suppressed, or the instruction does not have this one.
    pub no_underflow: bool,
    /// Exceptions set flags and are masked, whatever MXCSR says.
    pub masked: bool,
}

/// The environment of a thunk that has to do with MXCSR.
#[repr(C)]
pub struct Env {
    /// What the instruction runs with.
    pub(crate) run: u32,
    /// What it has left.
    pub(crate) after: u32,
    /// What Rust expects.
    pub(crate) host: u32,
    /// Flags whose exceptions are not masked.
    pub(crate) unmasked: u32,
}

impl Thunk {
    /// Executes the instruction. The result is the arithmetic flags (CF PF AF ZF SF OF in their RFLAGS positions) where
    /// [`Traits::flags`], else 0.
    ///
    /// # Errors
    /// An unmasked SIMD floating-point exception.
    ///
    /// # Safety
    /// `fpu` points at a state and `gpr` at 16 registers (RAX RCX RDX RBX RSP RBP RSI RDI R8 to R15), both valid for reads
    /// and writes. Where [`Thunk::memory`] says so, `memory` is valid for that many bytes and for that kind of access, and has
    /// that alignment.
    #[inline(always)]
    pub unsafe fn run(&self, fpu: *mut FpuState, gpr: *mut u64, memory: *mut u8) -> Result<u32, SimdException> {
        let pointer = |slot: Slot| slot.pointer(fpu.cast(), gpr.cast(), memory);
        let p = [
            pointer(self.slots[0]),
            pointer(self.slots[1]),
            pointer(self.slots[2]),
            pointer(self.slots[3]),
        ];
        if self.traits.mmx {
            // SAFETY: the caller's promise about `fpu`.
            unsafe { (*fpu).enter_mmx() };
        }
        // SAFETY: the pointers are what the code was made for, by the caller's promise.
        let flags = unsafe { call(self.entry, p, fpu, self.traits) }?;
        if self.traits.writes_mm {
            // SAFETY: operand 0 is one of the state's x87 registers.
            unsafe { p[0].cast::<u16>().add(4).write(0xffff) };
        }
        Ok(flags)
    }
}

/// Executes the machine code of a thunk. The result is the arithmetic flags where [`Traits::flags`], else 0.
///
/// # Errors
/// An unmasked SIMD floating-point exception.
///
/// # Safety
/// `entry` is the code of an instruction with these traits; the pointers point at its operands; `fpu` points at a state. All are valid
/// for what the instruction does to them.
#[inline(always)]
unsafe fn call(entry: Entry, p: [*mut u8; 4], fpu: *mut FpuState, traits: Traits) -> Result<u32, SimdException> {
    let flags;
    if traits.mxcsr {
        // SAFETY: the caller's promise about `fpu`.
        let guest = unsafe { (*fpu).mxcsr };
        let unmasked = if traits.masked { 0 } else { !guest >> 7 & mxcsr::FLAGS };
        let mut run = guest & !mxcsr::FLAGS | mxcsr::MASKS;
        if guest & mxcsr::UM == 0 && !traits.no_underflow {
            run |= mxcsr::FTZ;
        }
        let mut env = Env {
            run,
            after: 0,
            host: mxcsr::RESET,
            unmasked,
        };
        // SAFETY: the caller's promise; `env` is live.
        flags = unsafe { entry(p[0], p[1], p[2], p[3], &mut env, fpu) };
        let mut raised = env.after & mxcsr::FLAGS;
        if raised & unmasked & PRE_COMPUTATION != 0 {
            raised &= PRE_COMPUTATION;
        }
        // SAFETY: the caller's promise about `fpu`.
        unsafe { (*fpu).mxcsr = guest | raised };
        if raised & unmasked != 0 {
            return Err(SimdException);
        }
    } else {
        // SAFETY: as above; this code does not look at its environment.
        flags = unsafe { entry(p[0], p[1], p[2], p[3], std::ptr::null_mut(), fpu) };
    }
    // LAHF has SF, ZF, AF, PF and CF in their places.
    Ok(if traits.flags {
        flags >> 8 & 0xd5 | (flags & 1) << 11
    } else {
        0
    })
}

/// IE, DE and ZE: found before anything is computed.
pub(crate) const PRE_COMPUTATION: u32 = 7;

#[cfg(test)]
#[path = "thunk_test.rs"]
mod tests;
