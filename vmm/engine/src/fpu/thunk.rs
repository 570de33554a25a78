//! MMX, SSE to SSE4.2, AES and PCLMULQDQ by the host's own copy of the instruction.
//!
//! # Theory
//! A vector instruction computes the same bits on every CPU that has it (RCPPS, RSQRTPS and their scalar forms apart, see
//! [`super::approx`]); also NaN propagation and the rounding inside DPPS, HADDPS and the conversions are laid down by the
//! manual. So the instruction itself, with its operands renamed to fixed registers, is the cheapest exact implementation.
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
//! process, in one arena that is mapped twice, writable at one address and executable at another.
//!
//! # Exceptions
//! All exceptions are masked on the host while a thunk runs, so it never traps. Invalid, denormal and zero-divide are
//! detected before the computation and their flags do not depend on the masks. Overflow is flagged alike masked or not.
//! Underflow is not: masked, it needs a tiny *and* inexact result; unmasked, a tiny one. So when the guest unmasks it the host
//! runs with FTZ set, which flags every tiny result. If an unmasked exception of the first kind occurs in any element, no
//! element's overflow, underflow or precision is reported (SDM Vol. 1 11.5.3.3 "Handling Combinations of Masked and Unmasked
//! Exceptions"). Chosen: with an unmasked overflow or underflow the precision flag is the one of the masked response.
#![allow(unsafe_code)] // Generating machine code and calling it is what this file is for.

use super::state::{FpuState, mxcsr};
use iced_x86::{
    Code, CpuidFeature, Encoder, EncodingKind, IcedError, Instruction, InstructionInfoFactory, MandatoryPrefix,
    MemoryOperand, Mnemonic, OpAccess, OpKind, Register,
};
use std::collections::HashMap;
use std::mem::offset_of;
use std::sync::{Mutex, OnceLock};

/// The instruction has no thunk: not a vector instruction, or one whose effects are not all in its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoThunk {
    /// Not in the families that thunks serve.
    Unsupported,
    /// The arena could not be mapped or is full.
    NoMemory,
}

/// An unmasked SIMD floating-point exception: #XM, or #UD when CR4.OSXMMEXCPT is clear. The flags are in MXCSR already; the
/// destination is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimdException;

/// The memory operand of a vector instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// What its pointers are to point at. The last one is unused so far: it is for the fourth operand of AVX blends.
    pub slots: [Slot; 4],
    /// The memory operand, if there is one.
    pub memory: Option<MemoryUse>,
    /// What else there is to know.
    pub traits: Traits,
}

/// What a vector instruction does besides writing its operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traits {
    /// The arithmetic flags are written.
    pub flags: bool,
    /// Rounding and exceptions come from and go to MXCSR.
    pub mxcsr: bool,
    /// MMX registers are involved: the x87 unit is taken to MMX use, and a pending x87 exception comes first.
    pub mmx: bool,
    /// Operand 0 is an MMX register and is written.
    pub writes_mm: bool,
}

/// The environment of a thunk, opaque to its caller.
#[repr(C)]
pub struct Env {
    run: u32,
    after: u32,
    host: u32,
    unmasked: u32,
}

/// The CPUID features of the instructions that thunks execute.
const FAMILIES: &[CpuidFeature] = &[
    CpuidFeature::MMX,
    CpuidFeature::SSE,
    CpuidFeature::SSE2,
    CpuidFeature::SSE3,
    CpuidFeature::SSSE3,
    CpuidFeature::SSE4_1,
    CpuidFeature::SSE4_2,
    CpuidFeature::AES,
    CpuidFeature::PCLMULQDQ,
];

/// Vector instructions that are arithmetic on floating-point values: they obey MXCSR's controls and set its flags.
/// SDM Vol. 1 11.5.1 "SIMD Floating-Point Exceptions" and the exception lists of Vol. 2.
pub fn uses_mxcsr(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        mnemonic,
        Addps
            | Addss
            | Addpd
            | Addsd
            | Addsubps
            | Addsubpd
            | Subps
            | Subss
            | Subpd
            | Subsd
            | Mulps
            | Mulss
            | Mulpd
            | Mulsd
            | Divps
            | Divss
            | Divpd
            | Divsd
            | Sqrtps
            | Sqrtss
            | Sqrtpd
            | Sqrtsd
            | Maxps
            | Maxss
            | Maxpd
            | Maxsd
            | Minps
            | Minss
            | Minpd
            | Minsd
            | Haddps
            | Haddpd
            | Hsubps
            | Hsubpd
            | Cmpps
            | Cmpss
            | Cmppd
            | Cmpsd
            | Comiss
            | Comisd
            | Ucomiss
            | Ucomisd
            | Dpps
            | Dppd
            | Roundps
            | Roundss
            | Roundpd
            | Roundsd
            | Cvtdq2ps
            | Cvtpi2ps
            | Cvtsi2ss
            | Cvtsi2sd
            | Cvtps2dq
            | Cvttps2dq
            | Cvtpd2dq
            | Cvttpd2dq
            | Cvtps2pi
            | Cvttps2pi
            | Cvtpd2pi
            | Cvttpd2pi
            | Cvtss2si
            | Cvttss2si
            | Cvtsd2si
            | Cvttsd2si
            | Cvtps2pd
            | Cvtss2sd
            | Cvtpd2ps
            | Cvtsd2ss
    )
}

/// The alignment that the memory operand of a legacy-encoded vector instruction must have; 1 for none. Every 16-byte operand
/// must be aligned but those of the instructions made for unaligned ones. SDM Vol. 2A 2.4 "AVX and SSE Instruction Exception
/// Classification".
pub fn needs_alignment(insn: &Instruction) -> u8 {
    use Mnemonic::*;
    let exempt = matches!(
        insn.mnemonic(),
        Movups
            | Movupd
            | Movdqu
            | Lddqu
            | Pcmpestri
            | Pcmpestri64
            | Pcmpestrm
            | Pcmpestrm64
            | Pcmpistri
            | Pcmpistrm
            | Maskmovdqu
    );
    if insn.memory_size().size() == 16 && !exempt {
        16
    } else {
        1
    }
}

/// CVTSS2SI and its like, whose form with a memory operand names no vector register.
pub fn scalar_to_integer(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(mnemonic, Cvtss2si | Cvttss2si | Cvtsd2si | Cvttsd2si)
}

/// Whether a thunk can do this instruction.
fn supported(insn: &Instruction) -> bool {
    use Mnemonic::*;
    let elsewhere = matches!(
        insn.mnemonic(),
        Ldmxcsr | Stmxcsr | Maskmovq | Maskmovdqu | Rcpps | Rcpss | Rsqrtps | Rsqrtss | Movnti
    );
    let features = insn.cpuid_features();
    insn.encoding() == EncodingKind::Legacy
        && !elsewhere
        && !features.is_empty()
        && features.iter().all(|f| FAMILIES.contains(f))
        && (scalar_to_integer(insn.mnemonic())
            || (0..insn.op_count()).any(|i| {
                insn.op_kind(i) == OpKind::Register && (insn.op_register(i).is_xmm() || insn.op_register(i).is_mm())
            }))
}

/// Implicit operands of the string compares and the variable blends.
struct Implicit {
    /// XMM0 is the mask of a variable blend.
    reads_xmm0: bool,
    /// PCMPxSTRM leaves its mask in XMM0.
    writes_xmm0: bool,
    /// PCMPESTRx takes lengths from RAX and RDX.
    lengths: bool,
    /// PCMPxSTRI leaves its index in RCX.
    index: bool,
}

impl Implicit {
    fn of(mnemonic: Mnemonic) -> Implicit {
        use Mnemonic::*;
        Implicit {
            reads_xmm0: matches!(mnemonic, Blendvps | Blendvpd | Pblendvb),
            writes_xmm0: matches!(mnemonic, Pcmpestrm | Pcmpestrm64 | Pcmpistrm),
            lengths: matches!(mnemonic, Pcmpestrm | Pcmpestrm64 | Pcmpestri | Pcmpestri64),
            index: matches!(mnemonic, Pcmpestri | Pcmpestri64 | Pcmpistri),
        }
    }
}

fn writes_flags(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        mnemonic,
        Comiss
            | Comisd
            | Ucomiss
            | Ucomisd
            | Ptest
            | Pcmpestri
            | Pcmpestri64
            | Pcmpestrm
            | Pcmpestrm64
            | Pcmpistri
            | Pcmpistrm
    )
}

/// Prepares `insn` for execution.
///
/// # Errors
/// [`NoThunk::Unsupported`] for an instruction outside the families named above, RCPPS and RSQRTPS, MASKMOVQ and MASKMOVDQU,
/// LDMXCSR and STMXCSR, and those that have no vector operand.
pub fn prepare(insn: &Instruction) -> Result<Thunk, NoThunk> {
    if !supported(insn) {
        return Err(NoThunk::Unsupported);
    }
    let mnemonic = insn.mnemonic();
    let implicit = Implicit::of(mnemonic);
    let mut factory = InstructionInfoFactory::new();
    let info = factory.info(insn);
    let written = |i: u32| {
        matches!(
            info.op_access(i),
            OpAccess::Write | OpAccess::ReadWrite | OpAccess::CondWrite | OpAccess::ReadCondWrite
        )
    };
    let read = |i: u32| {
        matches!(
            info.op_access(i),
            OpAccess::Read | OpAccess::ReadWrite | OpAccess::CondRead | OpAccess::ReadCondWrite
        )
    };

    let mut renamed = *insn;
    renamed.set_has_lock_prefix(false);
    if !matches!(insn.code().op_code().mandatory_prefix(), MandatoryPrefix::PF2) {
        renamed.set_has_repne_prefix(false);
    }
    if !matches!(insn.code().op_code().mandatory_prefix(), MandatoryPrefix::PF3) {
        renamed.set_has_rep_prefix(false);
    }
    renamed.set_segment_prefix(Register::None);

    let mut slots = [Slot::NONE; 4];
    let mut memory = None;
    let mut traits = Traits {
        flags: writes_flags(mnemonic),
        mxcsr: uses_mxcsr(mnemonic),
        ..Traits::default()
    };
    let mut before = Vec::new();
    let mut after = Vec::new();

    for i in 0..insn.op_count() {
        let n = i as usize;
        if n >= 4 {
            return Err(NoThunk::Unsupported);
        }
        let at = MemoryOperand::with_base(POINTERS[n]);
        match insn.op_kind(i) {
            OpKind::Register => {
                let register = insn.op_register(i);
                let number = register.number();
                // `name` is what the instruction calls the host register, `whole` what is loaded and stored.
                let (load, store, name, whole);
                if register.is_xmm() {
                    (load, store) = (Code::Movups_xmm_xmmm128, Code::Movups_xmmm128_xmm);
                    (name, whole) = (XMM[n], XMM[n]);
                    slots[n] = Slot::xmm(number);
                } else if register.is_mm() {
                    (load, store) = (Code::Movq_mm_mmm64, Code::Movq_mmm64_mm);
                    (name, whole) = (MM[n], MM[n]);
                    slots[n] = Slot::mm(number);
                    traits.mmx = true;
                    traits.writes_mm |= written(i);
                } else if register.is_gpr32() || register.is_gpr64() {
                    (load, store) = (Code::Mov_r64_rm64, Code::Mov_rm64_r64);
                    // A write to EAX clears the upper half, as the guest's register wants it.
                    (name, whole) = (
                        if register.is_gpr64() {
                            Register::RAX
                        } else {
                            Register::EAX
                        },
                        Register::RAX,
                    );
                    slots[n] = Slot::gpr(number);
                } else {
                    return Err(NoThunk::Unsupported);
                }
                renamed.set_op_register(i, name);
                before.push(instruction(Instruction::with2(load, whole, at))?);
                if written(i) {
                    after.push(instruction(Instruction::with2(store, at, whole))?);
                }
            }
            OpKind::Memory => {
                renamed.set_memory_base(POINTERS[n]);
                renamed.set_memory_index(Register::None);
                renamed.set_memory_index_scale(1);
                renamed.set_memory_displacement64(0);
                renamed.set_memory_displ_size(0);
                slots[n] = Slot::MEMORY;
                memory = Some(MemoryUse {
                    size: insn.memory_size().size() as u8,
                    alignment: needs_alignment(insn),
                    read: read(i),
                    write: written(i),
                });
            }
            OpKind::Immediate8 | OpKind::Immediate8_2nd => {}
            _ => return Err(NoThunk::Unsupported),
        }
    }

    // CVTPI2PS takes the x87 unit to MMX use from memory too, CVTPI2PD does not (SDM Vol. 2A).
    traits.mmx |= mnemonic == Mnemonic::Cvtpi2ps;

    // The implicit operands come last: RDX is a pointer until the lengths are loaded.
    let xmm0 = MemoryOperand::with_base(Register::R9);
    if implicit.reads_xmm0 {
        before.push(instruction(Instruction::with2(
            Code::Movups_xmm_xmmm128,
            Register::XMM0,
            xmm0,
        ))?);
    }
    if implicit.writes_xmm0 {
        after.push(instruction(Instruction::with2(
            Code::Movups_xmmm128_xmm,
            xmm0,
            Register::XMM0,
        ))?);
    }
    if implicit.lengths || implicit.index {
        // Operand 2 is the immediate, so its pointer is free for the general registers.
        slots[2] = Slot::GPRS;
        let gpr = |number: i64| MemoryOperand::with_base_displ(Register::R10, number * 8);
        before.push(instruction(Instruction::with2(
            Code::Mov_r64_rm64,
            Register::R10,
            Register::RDX,
        ))?);
        if implicit.lengths {
            before.push(instruction(Instruction::with2(
                Code::Mov_r64_rm64,
                Register::RAX,
                gpr(0),
            ))?);
            before.push(instruction(Instruction::with2(
                Code::Mov_r64_rm64,
                Register::RDX,
                gpr(2),
            ))?);
        }
        if implicit.index {
            after.push(instruction(Instruction::with2(
                Code::Mov_rm64_r64,
                gpr(1),
                Register::RCX,
            ))?);
        }
    }

    let code = Parts {
        before: &before,
        body: &renamed,
        after: &after,
        traits,
    }
    .assemble()?;
    Ok(Thunk {
        entry: arena_entry(&code)?,
        slots,
        memory,
        traits,
    })
}

const POINTERS: [Register; 4] = [Register::RDI, Register::RSI, Register::RDX, Register::RCX];
const XMM: [Register; 4] = [Register::XMM1, Register::XMM2, Register::XMM3, Register::XMM4];
const MM: [Register; 4] = [Register::MM0, Register::MM1, Register::MM2, Register::MM3];

fn instruction(made: Result<Instruction, IcedError>) -> Result<Instruction, NoThunk> {
    made.map_err(|_| NoThunk::Unsupported)
}

/// Appends machine code.
fn encode(code: &mut Vec<u8>, insns: &[Instruction]) -> Result<(), NoThunk> {
    let mut encoder = Encoder::new(64);
    for insn in insns {
        encoder.encode(insn, 0).map_err(|_| NoThunk::Unsupported)?;
    }
    code.extend(encoder.take_buffer());
    Ok(())
}

/// What a thunk is made of.
struct Parts<'a> {
    before: &'a [Instruction],
    body: &'a Instruction,
    after: &'a [Instruction],
    traits: Traits,
}

impl Parts<'_> {
    fn assemble(&self) -> Result<Vec<u8>, NoThunk> {
        let env = |at: usize| MemoryOperand::with_base_displ(Register::R8, at as i64);
        let mut code = Vec::new();
        encode(&mut code, self.before)?;
        if self.traits.mxcsr {
            let run = instruction(Instruction::with1(Code::Ldmxcsr_m32, env(offset_of!(Env, run))))?;
            encode(&mut code, &[run])?;
        }
        encode(&mut code, &[*self.body])?;
        if self.traits.flags {
            let seto = instruction(Instruction::with1(Code::Seto_rm8, Register::AL))?;
            encode(&mut code, &[Instruction::with(Code::Lahf), seto])?;
        }
        let mut stores = Vec::new();
        encode(&mut stores, self.after)?;
        if self.traits.mxcsr {
            let after = env(offset_of!(Env, after));
            let mut restore = Vec::new();
            let host = instruction(Instruction::with1(Code::Ldmxcsr_m32, env(offset_of!(Env, host))))?;
            encode(&mut restore, &[host])?;
            let (run, reset) = (env(offset_of!(Env, run)), mxcsr::RESET as i32);
            encode(
                &mut code,
                &[
                    instruction(Instruction::with1(Code::Stmxcsr_m32, after))?,
                    instruction(Instruction::with2(Code::Cmp_rm32_imm32, run, reset))?,
                ],
            )?;
            // JE over the restoring: the controls were Rust's own, and its flags nobody looks at.
            code.extend([0x74, restore.len() as u8]);
            code.extend(restore);
            let unmasked = env(offset_of!(Env, unmasked));
            encode(
                &mut code,
                &[
                    instruction(Instruction::with2(Code::Mov_r32_rm32, Register::R11D, unmasked))?,
                    instruction(Instruction::with2(Code::Test_rm32_r32, after, Register::R11D))?,
                ],
            )?;
            // JNZ over the stores.
            code.extend([0x75, stores.len() as u8]);
        }
        code.extend(stores);
        if self.traits.mmx {
            code.extend([0x0f, 0x77]); // EMMS: the host's x87 registers are to be found empty.
        }
        code.push(0xc3);
        Ok(code)
    }
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
        let flags;
        if self.traits.mxcsr {
            // SAFETY: the caller's promise about `fpu`.
            let guest = unsafe { (*fpu).mxcsr };
            let unmasked = !guest >> 7 & mxcsr::FLAGS;
            let mut run = guest & !mxcsr::FLAGS | mxcsr::MASKS;
            if guest & mxcsr::UM == 0 {
                run |= mxcsr::FTZ;
            }
            let mut env = Env {
                run,
                after: 0,
                host: mxcsr::RESET,
                unmasked,
            };
            // SAFETY: the pointers are what the code was made for, by the caller's promise; `env` is live.
            flags = unsafe { (self.entry)(p[0], p[1], p[2], p[3], &mut env, fpu) };
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
            flags = unsafe { (self.entry)(p[0], p[1], p[2], p[3], std::ptr::null_mut(), fpu) };
        }
        if self.traits.writes_mm {
            // SAFETY: operand 0 is one of the state's x87 registers.
            unsafe { p[0].cast::<u16>().add(4).write(0xffff) };
        }
        // LAHF has SF, ZF, AF, PF and CF in their places.
        Ok(if self.traits.flags {
            flags >> 8 & 0xd5 | (flags & 1) << 11
        } else {
            0
        })
    }
}

/// IE, DE and ZE: found before anything is computed.
const PRE_COMPUTATION: u32 = 7;

/// Room for every form with every immediate, several times over; touched as it fills.
const ARENA: usize = 8 << 20;

/// The code of all thunks, at two addresses.
struct Arena {
    writable: *mut u8,
    executable: *const u8,
    used: usize,
    known: HashMap<Vec<u8>, usize>,
}

// SAFETY: the mappings are process-wide and never unmapped; the pointers are used under the mutex.
unsafe impl Send for Arena {}

/// The process's one arena; none where the system gives no executable memory.
fn shared() -> Option<&'static Mutex<Arena>> {
    static SHARED: OnceLock<Option<Mutex<Arena>>> = OnceLock::new();
    SHARED.get_or_init(|| Arena::map().map(Mutex::new)).as_ref()
}

/// Whether thunks can be made here: to be asked before a guest runs, which could only be told #UD.
pub fn available() -> bool {
    shared().is_some()
}

/// The address of `code` in the arena, added if it is new.
fn arena_entry(code: &[u8]) -> Result<Entry, NoThunk> {
    let arena = shared().ok_or(NoThunk::NoMemory)?;
    // A panic cannot leave an entry half made: the table is written last.
    let mut arena = arena.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    arena.entry(code)
}

impl Arena {
    fn map() -> Option<Arena> {
        // SAFETY: plain system calls on a descriptor that we own; the results are checked.
        unsafe {
            let fd = libc::memfd_create(c"engine-thunks".as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 {
                return None;
            }
            let map = |protection| {
                let at = libc::mmap(std::ptr::null_mut(), ARENA, protection, libc::MAP_SHARED, fd, 0);
                if at == libc::MAP_FAILED {
                    None
                } else {
                    Some(at.cast::<u8>())
                }
            };
            let arena = if libc::ftruncate(fd, ARENA as libc::off_t) == 0 {
                match (
                    map(libc::PROT_READ | libc::PROT_WRITE),
                    map(libc::PROT_READ | libc::PROT_EXEC),
                ) {
                    (Some(writable), Some(executable)) => Some(Arena {
                        writable,
                        executable,
                        used: 0,
                        known: HashMap::new(),
                    }),
                    _ => None,
                }
            } else {
                None
            };
            libc::close(fd);
            arena
        }
    }

    fn entry(&mut self, code: &[u8]) -> Result<Entry, NoThunk> {
        let at = match self.known.get(code) {
            Some(&at) => at,
            None => {
                let at = self.used;
                let end = at + code.len().next_multiple_of(16);
                if end > ARENA {
                    return Err(NoThunk::NoMemory);
                }
                // SAFETY: [at, end) lies within the mapping, and nothing has been told of these bytes yet.
                unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), self.writable.add(at), code.len()) };
                // Code written through another linear address wants a serialising instruction before it is fetched
                // (SDM Vol. 3A 8.1.3 "Handling Self- and Cross-Modifying Code").
                std::arch::x86_64::__cpuid(0);
                self.used = end;
                self.known.insert(code.to_vec(), at);
                at
            }
        };
        // SAFETY: complete code of this signature stands there, and the arena is never unmapped or overwritten.
        Ok(unsafe { std::mem::transmute::<*const u8, Entry>(self.executable.add(at)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions, OpCodeOperandKind};

    fn decode(hex: &str) -> Instruction {
        let bytes: Vec<u8> = hex
            .split_whitespace()
            .map(|byte| u8::from_str_radix(byte, 16).expect("two hex digits"))
            .collect();
        let insn = Decoder::with_ip(64, &bytes, 0, DecoderOptions::NONE).decode();
        assert!(!insn.is_invalid() && insn.len() == bytes.len(), "{hex}");
        insn
    }

    #[repr(align(64))]
    struct Bounce([u8; 64]);

    struct Machine {
        fpu: FpuState,
        gpr: [u64; 16],
        memory: Bounce,
    }

    impl Machine {
        fn new() -> Machine {
            let mut fpu = FpuState::new();
            fpu.fninit();
            Machine {
                fpu,
                gpr: [0; 16],
                memory: Bounce([0; 64]),
            }
        }

        fn run(&mut self, insn: &Instruction) -> Result<u32, SimdException> {
            let thunk = prepare(insn).expect("a vector instruction");
            // SAFETY: the three are live, and no operand is longer than the bounce buffer or wants more alignment.
            unsafe { thunk.run(&mut self.fpu, self.gpr.as_mut_ptr(), self.memory.0.as_mut_ptr()) }
        }
    }

    /// Every form with a thunk, with operands xmm5/xmm6, mm5/mm6, rbx and [rax].
    fn all_forms() -> Vec<Instruction> {
        let mut forms = Vec::new();
        for code in Code::values() {
            if !code.cpuid_features().iter().all(|f| FAMILIES.contains(f)) {
                continue;
            }
            let op_code = code.op_code();
            if !op_code.is_instruction() || !op_code.mode64() {
                continue;
            }
            for memory in [false, true] {
                let mut insn = Instruction::default();
                insn.set_code(code);
                let mut known = true;
                let mut has_memory = false;
                for (i, &kind) in op_code.op_kinds().iter().enumerate() {
                    use OpCodeOperandKind::*;
                    let i = i as u32;
                    let mut register = |r| {
                        insn.set_op_kind(i, OpKind::Register);
                        insn.set_op_register(i, r);
                    };
                    match kind {
                        xmm_reg => register(Register::XMM5),
                        xmm_rm => register(Register::XMM6),
                        xmm_or_mem if !memory => register(Register::XMM6),
                        mm_reg => register(Register::MM5),
                        mm_rm => register(Register::MM6),
                        mm_or_mem if !memory => register(Register::MM6),
                        r32_reg | r32_rm => register(Register::EBX),
                        r64_reg | r64_rm => register(Register::RBX),
                        r32_or_mem if !memory => register(Register::EBX),
                        r64_or_mem if !memory => register(Register::RBX),
                        xmm_or_mem | mm_or_mem | r32_or_mem | r64_or_mem | mem => {
                            has_memory = true;
                            insn.set_op_kind(i, OpKind::Memory);
                            insn.set_memory_base(Register::RAX);
                        }
                        imm8 => {
                            insn.set_op_kind(i, OpKind::Immediate8);
                            insn.set_immediate8(1);
                        }
                        _ => known = false,
                    }
                }
                if known && has_memory == memory && supported(&insn) {
                    forms.push(insn);
                }
            }
        }
        forms
    }

    // covers: 2/cpu-sse, 2/cpu-mmx
    #[test]
    fn every_form_touches_its_operands_only() {
        let forms = all_forms();
        assert!(forms.len() > 500, "{} forms", forms.len());
        for insn in &forms {
            let mut m = Machine::new();
            for i in 0..16 {
                m.fpu.xmm[i] = 0x3ff0_0000_3f80_0000_4010_0000_4090_0000 + ((i as u128) << 50 | i as u128);
                m.gpr[i] = 3 + i as u64;
            }
            for i in 0..8 {
                m.fpu.set_mm(i, 0x0102_0304_0506_0708 + i as u64);
            }
            m.memory.0 = std::array::from_fn(|i| i as u8 + 1);
            let before = m.fpu.clone();
            let gpr = m.gpr;
            let thunk = prepare(insn).unwrap_or_else(|e| panic!("{:?}: {e:?}", insn.code()));
            m.run(insn).unwrap_or_else(|_| panic!("{:?}", insn.code()));
            let implicit = Implicit::of(insn.mnemonic());
            for (i, &before_gpr) in gpr.iter().enumerate() {
                let may = i == 5 || i == 6 || i == 0 && implicit.writes_xmm0;
                assert!(may || m.fpu.xmm[i] == before.xmm[i], "{:?}: xmm{i}", insn.code());
                let may = i == 3 || i == 1 && implicit.index;
                assert!(may || m.gpr[i] == before_gpr, "{:?}: gpr {i}", insn.code());
            }
            for i in 0..8 {
                assert!(
                    i == 5 || i == 6 || m.fpu.r[i] == before.r[i],
                    "{:?}: mm{i}",
                    insn.code()
                );
            }
            assert_eq!(m.fpu.tag, if thunk.traits.mmx { 0xff } else { 0 }, "{:?}", insn.code());
            let written = match thunk.memory {
                Some(MemoryUse { write: true, size, .. }) => size as usize,
                _ => 0,
            };
            for (i, &byte) in m.memory.0.iter().enumerate().skip(written) {
                assert_eq!(byte, i as u8 + 1, "{:?}: memory {i}", insn.code());
            }
            if let Some(memory) = thunk.memory {
                assert!(memory.size > 0 && (memory.read || memory.write), "{:?}", insn.code());
            }
            if !thunk.traits.mxcsr {
                assert_eq!(m.fpu.mxcsr, before.mxcsr, "{:?}", insn.code());
            }
        }
    }

    // covers: 2/cpu-sse
    #[test]
    fn thunks_are_shared_by_all_register_numbers() {
        let entry = |hex: &str| prepare(&decode(hex)).expect("a vector instruction").entry as usize;
        let paddb = entry("66 0f fc c1");
        assert_eq!(paddb, entry("66 45 0f fc f7"), "paddb xmm14,xmm15");
        assert_ne!(paddb, entry("66 0f fc 03"), "paddb xmm0,[rbx]");
        assert_eq!(
            entry("66 0f fc 03"),
            entry("66 42 0f fc 94 a7 00 00 00 01"),
            "paddb xmm2,[rdi+r12*4+1000000h]"
        );
        assert_eq!(
            entry("66 0f fc 03"),
            entry("64 67 66 0f fc 43 08"),
            "paddb xmm0,fs:[ebx+8]"
        );
    }

    // covers: 2/cpu-sse, 2/cpu-sse2, 2/cpu-sse3, 2/cpu-ssse3, 2/cpu-sse41, 2/cpu-sse42, 2/cpu-aes, 2/cpu-pclmul
    #[test]
    fn results_by_family() {
        // XMM1, XMM2 in; XMM1 out.
        for (hex, a, b, expected, why) in [
            ("0f 58 ca", 0x3f80_0000_u128, 0x4000_0000, 0x4040_0000, "addps: 1 + 2"),
            ("0f 57 ca", 0xff, 0x0f, 0xf0, "xorps"),
            (
                "f3 0f 59 ca",
                0xdead << 32 | 0x4040_0000,
                0x4000_0000,
                0xdead << 32 | 0x40c0_0000,
                "mulss: 3 * 2",
            ),
            ("f2 0f 5e ca", 0x4018 << 48, 0x4000 << 48, 0x4008 << 48, "divsd: 6 / 2"),
            ("66 0f fe ca", 0xffff_ffff, 1, 0, "paddd wraps"),
            (
                "66 0f 70 ca 1b",
                0,
                4 << 96 | 3 << 64 | 2 << 32 | 1,
                1 << 96 | 2 << 64 | 3 << 32 | 4,
                "pshufd",
            ),
            ("f2 0f 7c ca", 0x3f80_0000_3f80_0000, 0, 0x4000_0000, "haddps"),
            ("66 0f 38 1c ca", 0, 0xff80_7f01, 0x0180_7f01, "pabsb"),
            (
                "66 0f 38 00 ca",
                0x4433_2211,
                0x8000_0102,
                0x1111_1111_1111_1111_1111_1111_0011_2233,
                "pshufb",
            ),
            ("66 0f 38 40 ca", 0x1_0001, 0x1_0001, 0x2_0001, "pmulld"),
            ("66 0f 3a 0a ca 01", 0, 0xbfc0_0000, 0xc000_0000, "roundss down: -1.5"),
            (
                "66 0f 38 37 ca",
                1 << 64 | 5,
                4,
                u64::MAX as u128 | (u64::MAX as u128) << 64,
                "pcmpgtq",
            ),
            ("66 0f 3a 44 ca 00", 0b111, 0b101, 0b11011, "pclmulqdq"),
            ("66 0f 38 db ca", 0, 0x1, 0x0b0d_090e, "aesimc of one byte"),
        ] {
            let mut m = Machine::new();
            m.fpu.xmm[1] = a;
            m.fpu.xmm[2] = b;
            m.run(&decode(hex)).expect("all masked");
            assert_eq!(m.fpu.xmm[1], expected, "{why}: {:x}", m.fpu.xmm[1]);
            // The same with the second operand in memory.
            let mut in_memory: Vec<&str> = hex.split_whitespace().collect();
            let at = in_memory.iter().position(|&byte| byte == "ca").expect("a ModRM byte");
            in_memory[at] = "0b";
            let mut m = Machine::new();
            m.fpu.xmm[1] = a;
            m.memory.0[..16].copy_from_slice(&b.to_le_bytes());
            m.run(&decode(&in_memory.join(" "))).expect("all masked");
            assert_eq!(m.fpu.xmm[1], expected, "{why} from memory");
        }
    }

    // covers: 2/cpu-mmx
    #[test]
    fn mmx_goes_through_the_x87_registers() {
        let mut m = Machine::new();
        m.fpu.sw = 5 << 11;
        m.fpu.r[1] = 0x3fff_0102_0304_0506_0708;
        m.fpu.r[2] = 0x3fff_ff02_0304_0506_0708;
        m.run(&decode("0f fc ca")).expect("no exception"); // paddb mm1,mm2
        assert_eq!(
            m.fpu.r[1], 0xffff_0004_0608_0a0c_0e10,
            "the exponent is all ones after a write"
        );
        assert_eq!(m.fpu.r[2], 0x3fff_ff02_0304_0506_0708, "a source stays as it is");
        assert_eq!((m.fpu.top(), m.fpu.tag), (0, 0xff));
        m.run(&decode("0f 6e da")).expect("no exception"); // movd mm3,edx
        assert_eq!(m.fpu.mm(3), 0);
        m.gpr[2] = 0xaaaa_bbbb_cccc_dddd;
        m.run(&decode("0f 6e da")).expect("no exception");
        assert_eq!(m.fpu.mm(3), 0xcccc_dddd);
        m.run(&decode("0f d7 c3")).expect("no exception"); // pmovmskb eax,mm3
        assert_eq!(m.gpr[0], 0x0f);
        assert!(!prepare(&decode("f3 0f e6 ca")).expect("cvtdq2pd").traits.mmx);
        assert!(prepare(&decode("0f 2a 0b")).expect("cvtpi2ps xmm1,[rbx]").traits.mmx);
        assert!(!prepare(&decode("66 0f 2a 0b")).expect("cvtpi2pd xmm1,[rbx]").traits.mmx);
    }

    // covers: 2/cpu-sse2, 2/cpu-sse41
    #[test]
    fn general_registers_go_in_and_out() {
        let mut m = Machine::new();
        m.gpr = std::array::from_fn(|i| 0xffff_ffff_0000_0000 | i as u64);
        m.run(&decode("66 41 0f 6e cb")).expect("no exception"); // movd xmm1,r11d
        assert_eq!(m.fpu.xmm[1], 11);
        m.run(&decode("66 4d 0f 6e cb")).expect("no exception"); // movq xmm9,r11
        assert_eq!(m.fpu.xmm[9], 0xffff_ffff_0000_000b);
        m.run(&decode("66 45 0f 7e cc")).expect("no exception"); // movd r12d,xmm9
        assert_eq!(m.gpr[12], 11, "a 32-bit destination is zero-extended");
        m.run(&decode("66 4d 0f 7e cc")).expect("no exception"); // movq r12,xmm9
        assert_eq!(m.gpr[12], 0xffff_ffff_0000_000b);
        m.fpu.xmm[1] = 0xc008 << 48;
        m.run(&decode("f2 48 0f 2c e1")).expect("no exception"); // cvttsd2si rsp,xmm1
        assert_eq!(m.gpr[4] as i64, -3);
        m.run(&decode("66 0f 3a 20 cf 02")).expect("no exception"); // pinsrb xmm1,edi,2
        assert_eq!(m.fpu.xmm[1], 0xc008 << 48 | 7 << 16);
        m.run(&decode("66 0f c5 c1 03")).expect("no exception"); // pextrw eax,xmm1,3
        assert_eq!(m.gpr[0], 0xc008);
        m.run(&decode("66 0f 3a 17 0b 01")).expect("no exception"); // extractps [rbx],xmm1,1
        assert_eq!(m.memory.0[..6], [0, 0, 0x08, 0xc0, 0, 0]);
    }

    // covers: 2/cpu-sse42
    #[test]
    fn string_compares_use_their_implicit_operands() {
        let load = |text: &[u8]| {
            let mut bytes = [0; 16];
            bytes[..text.len()].copy_from_slice(text);
            u128::from_le_bytes(bytes)
        };
        let mut m = Machine::new();
        m.fpu.xmm[1] = load(b"needle");
        m.fpu.xmm[2] = load(b"in a needlework");
        m.gpr[1] = !0;
        // pcmpistri xmm1,xmm2,0Ch: equal ordered, bytes.
        let flags = m.run(&decode("66 0f 3a 63 ca 0c")).expect("no exception");
        assert_eq!(m.gpr[1], 5);
        assert_eq!(flags, 1 | 1 << 6 | 1 << 7, "CF: found; ZF, SF: both strings end");
        // pcmpestri xmm1,xmm2,0Ch with explicit lengths 6 and 8: the needle is cut off but may continue.
        (m.gpr[0], m.gpr[2]) = (6, 4);
        let flags = m.run(&decode("66 0f 3a 61 ca 0c")).expect("no exception");
        assert_eq!((m.gpr[1], flags), (16, 1 << 6 | 1 << 7));
        assert_eq!((m.gpr[0], m.gpr[2]), (6, 4));
        // pcmpistrm xmm1,xmm2,40h: which bytes of xmm2 are any of xmm1's.
        m.run(&decode("66 0f 3a 62 ca 40")).expect("no exception");
        let mask = b"in a needlework".iter().rev().fold(0u128, |mask, c| {
            mask << 8 | if b"needle".contains(c) { 0xff } else { 0 }
        });
        assert_eq!(m.fpu.xmm[0], mask);
    }

    // covers: 2/cpu-sse41
    #[test]
    fn variable_blends_read_xmm0() {
        let mut m = Machine::new();
        m.fpu.xmm[0] = 0x80 << 120 | 0x7f;
        m.fpu.xmm[3] = 0x11 << 120 | 0x22;
        m.fpu.xmm[4] = 0x33 << 120 | 0x44;
        m.run(&decode("66 0f 38 10 dc")).expect("no exception"); // pblendvb xmm3,xmm4
        assert_eq!(m.fpu.xmm[3], 0x33 << 120 | 0x22);
        m.run(&decode("66 0f 38 10 c4")).expect("no exception"); // pblendvb xmm0,xmm4
        assert_eq!(m.fpu.xmm[0], 0x33 << 120 | 0x7f, "XMM0 as mask and destination");
    }

    // covers: 2/cpu-sse, 2/cpu-sse2, 2/cpu-sse41
    #[test]
    fn compares_return_flags() {
        let (cf, pf, zf) = (1, 1 << 2, 1 << 6);
        for (hex, a, b, flags, why) in [
            ("0f 2f ca", 0x3f80_0000_u128, 0x4000_0000_u128, cf, "comiss less"),
            ("0f 2f ca", 0x4000_0000, 0x3f80_0000, 0, "comiss greater"),
            ("0f 2e ca", 0x8000_0000, 0, zf, "ucomiss -0 = +0"),
            ("66 0f 2e ca", 0x7ff8 << 48, 0, cf | pf | zf, "ucomisd unordered"),
            ("66 0f 38 17 ca", 1, 2, zf, "ptest: no common bit"),
            ("66 0f 38 17 ca", 3, 2, cf, "ptest: all of the second"),
        ] {
            let mut m = Machine::new();
            m.fpu.xmm[1] = a;
            m.fpu.xmm[2] = b;
            assert_eq!(m.run(&decode(hex)), Ok(flags), "{why}");
        }
    }

    // covers: 2/cpu-mxcsr-exceptions
    #[test]
    fn exceptions_are_sticky_or_stop_the_instruction() {
        use mxcsr::{DAZ, FTZ};
        const IE: u32 = 1;
        const DE: u32 = 2;
        const ZE: u32 = 4;
        const OE: u32 = 8;
        const UE: u32 = 16;
        const PE: u32 = 32;
        const MASKED: u32 = 0x1f80;
        let down = 1 << 13;
        let unmask = |flag: u32| MASKED & !(flag << 7);
        // XMM1, XMM2, MXCSR in; flags raised, low element of XMM1 out (`None`: #XM, destination unchanged).
        let (one, three, tiny, huge, denormal) = (0x3f80_0000u32, 0x4040_0000, 0x0080_0000, 0x7f00_0000, 1);
        for (hex, a, b, control, raised, low, why) in [
            ("0f 5e ca", [one; 4], [three; 4], MASKED, PE, Some(0x3eaa_aaab), "1/3"),
            (
                "0f 5e ca",
                [one; 4],
                [three; 4],
                MASKED | down,
                PE,
                Some(0x3eaa_aaaa),
                "1/3 rounded down",
            ),
            (
                "0f 5e ca",
                [one; 4],
                [three; 4],
                unmask(PE),
                PE,
                None,
                "inexact, unmasked",
            ),
            ("0f 5e ca", [one; 4], [0; 4], MASKED, ZE, Some(0x7f80_0000), "1/0"),
            ("0f 5e ca", [one; 4], [0; 4], unmask(ZE), ZE, None, "1/0 unmasked"),
            (
                "0f 5e ca",
                [one, one, 0, 0],
                [0, three, 0, 0],
                unmask(ZE),
                IE | ZE,
                None,
                "IE beside ZE, but no PE",
            ),
            (
                "0f 5e ca",
                [0; 4],
                [0; 4],
                MASKED,
                IE,
                Some(0xffc0_0000),
                "0/0 is the indefinite",
            ),
            ("0f 5e ca", [0; 4], [0; 4], unmask(IE), IE, None, "0/0 unmasked"),
            (
                "0f 59 ca",
                [huge; 4],
                [huge; 4],
                MASKED,
                OE | PE,
                Some(0x7f80_0000),
                "overflow",
            ),
            (
                "0f 59 ca",
                [huge; 4],
                [huge; 4],
                MASKED | down,
                OE | PE,
                Some(0x7f7f_ffff),
                "overflow rounded down",
            ),
            (
                "0f 59 ca",
                [huge; 4],
                [huge; 4],
                unmask(OE),
                OE | PE,
                None,
                "overflow unmasked",
            ),
            (
                "0f 59 ca",
                [tiny; 4],
                [0x3f00_0000; 4],
                MASKED,
                0,
                Some(0x0040_0000),
                "tiny but exact",
            ),
            (
                "0f 59 ca",
                [tiny; 4],
                [0x3f00_0000; 4],
                unmask(UE),
                UE | PE,
                None,
                "tiny but exact, unmasked",
            ),
            (
                "0f 59 ca",
                [tiny; 4],
                [0x3f00_0000; 4],
                MASKED | FTZ,
                UE | PE,
                Some(0),
                "flushed",
            ),
            (
                "0f 59 ca",
                [tiny; 4],
                [0x3f00_0000; 4],
                unmask(UE) | FTZ,
                UE | PE,
                None,
                "FTZ needs UE masked",
            ),
            ("0f 59 ca", [one; 4], [one; 4], unmask(UE), 0, Some(one), "nothing tiny"),
            (
                "0f 58 ca",
                [denormal; 4],
                [one; 4],
                MASKED,
                DE | PE,
                Some(one),
                "a denormal operand",
            ),
            (
                "0f 58 ca",
                [denormal; 4],
                [one; 4],
                MASKED | DAZ,
                0,
                Some(one),
                "denormals are zeros",
            ),
            (
                "0f 58 ca",
                [denormal; 4],
                [one; 4],
                unmask(DE),
                DE,
                None,
                "a denormal operand, unmasked",
            ),
            (
                "0f 58 ca",
                [0x7f80_0001; 4],
                [one; 4],
                MASKED,
                IE,
                Some(0x7fc0_0001),
                "SNaN is made quiet",
            ),
            (
                "0f 58 ca",
                [one; 4],
                [0x7fc0_0042; 4],
                MASKED,
                0,
                Some(0x7fc0_0042),
                "QNaN passes",
            ),
            (
                "0f 5d ca",
                [one; 4],
                [0x7fc0_0042; 4],
                MASKED,
                IE,
                Some(0x7fc0_0042),
                "minps returns its second operand",
            ),
            (
                "0f 54 ca",
                [0x7f80_0001; 4],
                [!0; 4],
                0,
                0,
                Some(0x7f80_0001),
                "andps is not arithmetic",
            ),
        ] {
            let pack = |v: [u32; 4]| v.iter().rev().fold(0u128, |all, &x| all << 32 | x as u128);
            let mut m = Machine::new();
            m.fpu.mxcsr = control;
            m.fpu.xmm[1] = pack(a);
            m.fpu.xmm[2] = pack(b);
            let outcome = m.run(&decode(hex));
            assert_eq!(m.fpu.mxcsr, control | raised, "{why}: MXCSR");
            match low {
                Some(low) => assert_eq!((outcome, m.fpu.xmm[1] as u32), (Ok(0), low), "{why}"),
                None => assert_eq!((outcome, m.fpu.xmm[1]), (Err(SimdException), pack(a)), "{why}"),
            }
        }
    }

    // covers: 2/cpu-mxcsr-exceptions
    #[test]
    fn the_hosts_mxcsr_is_left_alone() {
        let mut m = Machine::new();
        m.fpu.mxcsr = 0x7fff & !mxcsr::MASKS | mxcsr::FTZ;
        m.fpu.mxcsr |= mxcsr::MASKS;
        m.fpu.xmm[1] = 0x3f80_0000;
        m.run(&decode("f3 0f 58 c9")).expect("masked");
        let mut now = 0u32;
        // SAFETY: stores four bytes to a local.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &mut now, options(nostack)) };
        assert_eq!(now & !mxcsr::FLAGS, mxcsr::RESET);
    }

    // covers: 2/cpu-sse
    #[test]
    fn alignment_is_demanded_of_sixteen_byte_operands() {
        for (hex, alignment, read, write, why) in [
            ("0f 28 03", 16, true, false, "movaps xmm0,[rbx]"),
            ("0f 29 03", 16, false, true, "movaps [rbx],xmm0"),
            ("0f 10 03", 1, true, false, "movups xmm0,[rbx]"),
            ("f3 0f 7f 03", 1, false, true, "movdqu [rbx],xmm0"),
            ("66 0f ef 03", 16, true, false, "pxor xmm0,[rbx]"),
            ("f2 0f f0 03", 1, true, false, "lddqu xmm0,[rbx]"),
            ("66 0f 3a 63 03 0c", 1, true, false, "pcmpistri xmm0,[rbx],0Ch"),
            ("f3 0f 58 03", 1, true, false, "addss xmm0,[rbx]"),
            ("0f 16 03", 1, true, false, "movhps xmm0,[rbx]"),
            ("66 0f 38 2a 03", 16, true, false, "movntdqa xmm0,[rbx]"),
        ] {
            let memory = prepare(&decode(hex)).expect(why).memory.expect(why);
            assert_eq!(
                (memory.alignment, memory.read, memory.write),
                (alignment, read, write),
                "{why}"
            );
        }
    }

    // covers: 2/cpu-sse
    #[test]
    fn others_are_refused() {
        for (hex, why) in [
            ("0f ae 13", "ldmxcsr"),
            ("0f 53 c1", "rcpps"),
            ("66 0f f7 c1", "maskmovdqu"),
            ("c5 f8 58 c1", "vaddps"),
            ("d8 c1", "fadd"),
            ("db 0b", "fisttp"),
            ("0f 77", "emms"),
            ("0f c3 03", "movnti"),
            ("f2 0f 38 f1 c1", "crc32"),
        ] {
            assert_eq!(prepare(&decode(hex)).err(), Some(NoThunk::Unsupported), "{why}");
        }
    }
}
