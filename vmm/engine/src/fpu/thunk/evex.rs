//! Thunks of instructions with an EVEX prefix, and of those on opmask registers; and the tables that stand in for them.
#![allow(unsafe_code)] // Calling generated code is what this file is for.

use std::collections::HashSet;
use std::sync::OnceLock;

use iced_x86::{
    Code, CpuidFeature, EncodingKind, Instruction, InstructionInfoFactory, MemoryOperand, MemorySize, Mnemonic,
    OpAccess, OpKind, Register,
};

use super::assemble::{Parts, instruction};
use super::evex_form::{EvexForm, Execution, Lanes};
use super::evex_place::Place;
use super::recipe::POINTERS;
use super::{Entry, MemoryUse, NoThunk, SimdException, Traits, call, forms, kept};
use crate::Vectors;
use crate::fpu::portable::{Table, Vector, complex};
use crate::fpu::state::{FpuState, QUARTERS, mxcsr};

/// What an operand is renamed to, by its place.
const VECTORS: [u32; 3] = [16, 17, 18];
const OPMASK_OPERANDS: [Register; 3] = [Register::K2, Register::K3, Register::K4];
const WRITEMASK: Register = Register::K1;
/// The place of the writemask's pointer.
const MASK: usize = 3;

/// One instruction, ready to be executed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EvexThunk {
    pub form: &'static EvexForm,
    /// The operands; the last is the writemask.
    pub places: [Place; 4],
}

impl EvexThunk {
    /// The mask that counts for the memory operand's elements.
    pub fn mask(&self, fpu: &FpuState) -> u64 {
        self.places[MASK].opmask().map_or(u64::MAX, |n| fpu.avx512.k[n])
    }

    /// Whether there is a writemask.
    pub fn is_masked(&self) -> bool {
        self.places[MASK].opmask().is_some()
    }

    /// Executes the instruction: as [`super::Thunk::run`].
    ///
    /// # Safety
    /// As for [`super::Thunk::run`]; of the memory operand only the elements that [`EvexForm::lanes`] names under the mask have to be
    /// there if the rest is memory of the process all the same.
    #[inline(always)]
    pub unsafe fn run(&self, fpu: *mut FpuState, general: *mut u64, memory: *mut u8) -> Result<u32, SimdException> {
        let entry = match &self.form.execution {
            Execution::Host(entry) => *entry,
            // SAFETY: the caller's promise about `fpu`.
            Execution::HostUnlessUnderflow(entry, _) if unsafe { (*fpu).mxcsr } & mxcsr::UM != 0 => *entry,
            Execution::Table(table) | Execution::HostUnlessUnderflow(_, table) => {
                // SAFETY: the caller's promise.
                return unsafe { self.compute(table, fpu, general, memory) };
            }
        };
        let p = self
            .places
            .map(|place| place.pointer(fpu.cast(), general.cast(), memory));
        // SAFETY: `prepare_evex` put the address of a thunk there, which is kept for the life of the process.
        let entry = unsafe { core::mem::transmute::<usize, Entry>(entry) };
        // SAFETY: the caller's promise.
        unsafe { call(entry, p, fpu, self.form.traits) }
    }

    /// The same by a table.
    ///
    /// # Safety
    /// As for [`EvexThunk::run`].
    #[inline(never)]
    unsafe fn compute(
        &self,
        table: &Table,
        fpu: *mut FpuState,
        general: *mut u64,
        memory: *mut u8,
    ) -> Result<u32, SimdException> {
        let mut source = Vector::ZERO;
        if let Some(operand) = self.form.memory.filter(|operand| operand.read) {
            let size = usize::from(operand.size).min(Vector::BYTES);
            // SAFETY: the caller's promise about `memory`, and `size` is at most the vector's. The copy is by pointer, as another
            // processor may write guest RAM.
            unsafe { memory.copy_to_nonoverlapping(source.0.as_mut_ptr(), size) };
        }
        // SAFETY: the caller's promise: both are valid, and no one else has them while an instruction executes.
        let (fpu, general) = unsafe { (&mut *fpu, &mut *general.cast::<[u64; 16]>()) };
        let finished = table.run(fpu, general, self.places, &source)?;
        if let Some(operand) = self.form.memory.filter(|operand| operand.write) {
            let (lane, size) = (finished.lane, usize::from(operand.size));
            for k in (0..64).filter(|k| finished.chosen >> k & 1 != 0 && (k + 1) * lane <= size) {
                let from = &finished.value.0[k * lane..(k + 1) * lane];
                // SAFETY: the caller's promise about `memory`: the element ends within the operand.
                unsafe { memory.add(k * lane).copy_from_nonoverlapping(from.as_ptr(), lane) };
            }
        }
        Ok(finished.flags)
    }
}

/// Whether the host executes what thunks are made of, and the instruction itself.
fn host(insn: &Instruction) -> bool {
    use std::arch::is_x86_feature_detected as host;
    host!("avx512f") && host!("avx512bw") && host!("avx512dq") && host!("avx512vl") && forms::host_executes(insn)
}

/// The mnemonics that obey MXCSR: those of which some form takes embedded rounding or SAE; and the classification and the
/// approximations, which obey DAZ, the latter FTZ as well, and raise nothing.
/// SDM Vol. 1 15.6.4 "Static Rounding Support and "Suppress All Exceptions"".
fn uses_mxcsr(mnemonic: Mnemonic) -> bool {
    static MNEMONICS: OnceLock<HashSet<Mnemonic>> = OnceLock::new();
    MNEMONICS
        .get_or_init(|| {
            let controlled = |code: &Code| {
                let op = code.op_code();
                op.encoding() == EncodingKind::EVEX
                    && (op.can_use_rounding_control() || op.can_suppress_all_exceptions())
            };
            Code::values().filter(controlled).map(|code| code.mnemonic()).collect()
        })
        .contains(&mnemonic)
        || raises_nothing(mnemonic)
}

fn raises_nothing(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        mnemonic,
        Vfpclassps
            | Vfpclasspd
            | Vfpclassss
            | Vfpclasssd
            | Vrcp14ps
            | Vrcp14pd
            | Vrcp14ss
            | Vrcp14sd
            | Vrsqrt14ps
            | Vrsqrt14pd
            | Vrsqrt14ss
            | Vrsqrt14sd
    )
}

/// Arithmetic whose exceptions are invalid operation and precision alone, or that has none.
fn no_underflow(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    raises_nothing(mnemonic)
        || matches!(
            mnemonic,
            Vreduceps
                | Vreducepd
                | Vreducess
                | Vreducesd
                | Vreduceph
                | Vreducesh
                | Vrndscaleps
                | Vrndscalepd
                | Vrndscaless
                | Vrndscalesd
        )
}

/// Instructions that read or write the whole of their memory operand, whatever the mask says: those whose elements move, and those
/// that the manual has in exception classes E4NF, E5NF and E6NF. SDM Vol. 2A 2.8 "Exception Classifications of EVEX-Encoded
/// Instructions".
fn faults_whole(insn: &Instruction) -> bool {
    use Mnemonic::*;
    // A shift of all elements by one count, which is not an element.
    let count = matches!(
        insn.mnemonic(),
        Vpsllw | Vpslld | Vpsllq | Vpsrlw | Vpsrld | Vpsrlq | Vpsraw | Vpsrad | Vpsraq
    );
    if count {
        return insn.op_kind(2) == OpKind::Memory;
    }
    matches!(
        insn.mnemonic(),
        Valignd
            | Valignq
            | Vcvtne2ps2bf16
            | Vdbpsadbw
            | Vextractf32x4
            | Vextractf32x8
            | Vextractf64x2
            | Vextractf64x4
            | Vextracti32x4
            | Vextracti32x8
            | Vextracti64x2
            | Vextracti64x4
            | Vgf2p8affineinvqb
            | Vgf2p8affineqb
            | Vinsertf32x4
            | Vinsertf32x8
            | Vinsertf64x2
            | Vinsertf64x4
            | Vinserti32x4
            | Vinserti32x8
            | Vinserti64x2
            | Vinserti64x4
            | Vmovddup
            | Vmovshdup
            | Vmovsldup
            | Vpackssdw
            | Vpacksswb
            | Vpackusdw
            | Vpackuswb
            | Vpalignr
            | Vpconflictd
            | Vpconflictq
            | Vpermb
            | Vpermd
            | Vpermi2b
            | Vpermi2d
            | Vpermi2pd
            | Vpermi2ps
            | Vpermi2q
            | Vpermi2w
            | Vpermilpd
            | Vpermilps
            | Vpermpd
            | Vpermps
            | Vpermq
            | Vpermt2b
            | Vpermt2d
            | Vpermt2pd
            | Vpermt2ps
            | Vpermt2q
            | Vpermt2w
            | Vpermw
            | Vpmaddubsw
            | Vpmaddwd
            | Vpmultishiftqb
            | Vpshufb
            | Vpshufd
            | Vpshufhw
            | Vpshuflw
            | Vpunpckhbw
            | Vpunpckhdq
            | Vpunpckhqdq
            | Vpunpckhwd
            | Vpunpcklbw
            | Vpunpckldq
            | Vpunpcklqdq
            | Vpunpcklwd
            | Vshuff32x4
            | Vshuff64x2
            | Vshufi32x4
            | Vshufi64x2
            | Vshufpd
            | Vshufps
            | Vunpckhpd
            | Vunpckhps
            | Vunpcklpd
            | Vunpcklps
    )
}

fn packed(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        mnemonic,
        Vcompressps
            | Vcompresspd
            | Vpcompressb
            | Vpcompressw
            | Vpcompressd
            | Vpcompressq
            | Vexpandps
            | Vexpandpd
            | Vpexpandb
            | Vpexpandw
            | Vpexpandd
            | Vpexpandq
    )
}

/// Loads of a few elements that are repeated.
fn repeats(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        mnemonic,
        Vbroadcastss
            | Vbroadcastsd
            | Vbroadcastf32x2
            | Vbroadcastf32x4
            | Vbroadcastf32x8
            | Vbroadcastf64x2
            | Vbroadcastf64x4
            | Vbroadcasti32x2
            | Vbroadcasti32x4
            | Vbroadcasti32x8
            | Vbroadcasti64x2
            | Vbroadcasti64x4
            | Vpbroadcastb
            | Vpbroadcastw
            | Vpbroadcastd
            | Vpbroadcastq
    )
}

/// Bytes of the elements that a mask's bits stand for, in memory.
fn element_size(mnemonic: Mnemonic, memory: MemorySize) -> usize {
    use Mnemonic::*;
    match mnemonic {
        // Sums of four bytes or two words.
        Vpdpbusd | Vpdpbusds | Vpdpwssd | Vpdpwssds | Vdpbf16ps => 4,
        // Products of every other doubleword.
        Vpmuldq | Vpmuludq => 8,
        _ if complex(mnemonic) => 4,
        _ => memory.element_size(),
    }
}

/// How the writemask of an instruction decides on its memory operand; `None` where all of it is accessed.
fn lanes(insn: &Instruction) -> Option<Lanes> {
    let mnemonic = insn.mnemonic();
    let store = insn.op_kind(0) == OpKind::Memory;
    let whole = faults_whole(insn);
    // VCVTPS2PH raises its exceptions before its operand's segment is checked.
    let late = store && mnemonic == Mnemonic::Vcvtps2ph;
    if !(insn.has_op_mask() || late) || whole && !store {
        return None;
    }
    let memory = insn.memory_size();
    let op = insn.code().op_code();
    let size = element_size(mnemonic, memory);
    let count = memory.size() / size;
    let bits = if insn.is_broadcast() {
        op.memory_size().size() / size
    } else if repeats(mnemonic) {
        insn.op0_register().size() / size
    } else {
        count
    };
    Some(Lanes {
        size: size as u8,
        count: count as u8,
        bits: bits as u8,
        packed: packed(mnemonic),
        probes_all: whole,
    })
}

/// The alignment that the memory operand must have.
fn alignment(insn: &Instruction) -> u8 {
    use Mnemonic::*;
    match insn.mnemonic() {
        Vmovaps | Vmovapd | Vmovdqa32 | Vmovdqa64 | Vmovntps | Vmovntpd | Vmovntdq | Vmovntdqa => {
            insn.memory_size().size() as u8
        }
        _ => 1,
    }
}

/// The host's register `number` of the same width.
fn renamed_vector(register: Register, number: u32) -> Register {
    let first = if register.is_xmm() {
        Register::XMM0
    } else if register.is_ymm() {
        Register::YMM0
    } else {
        Register::ZMM0
    };
    first + number
}

/// Loads operand `n` from where its pointer says.
fn load(code: &mut Vec<Instruction>, register: Register, pointer: Register) -> Result<(), NoThunk> {
    let at = |displacement: usize| MemoryOperand::with_base_displ(pointer, displacement as i64);
    if register.is_k() {
        code.push(instruction(Instruction::with2(
            Code::VEX_Kmovq_kr_km64,
            register,
            at(0),
        ))?);
        return Ok(());
    }
    if register.is_gpr() {
        code.push(instruction(Instruction::with2(
            Code::Mov_r64_rm64,
            Register::RAX,
            at(0),
        ))?);
        return Ok(());
    }
    let number = register.number() as u32;
    let (xmm, ymm, zmm) = (
        Register::XMM0 + number,
        Register::YMM0 + number,
        Register::ZMM0 + number,
    );
    code.push(instruction(Instruction::with2(
        Code::EVEX_Vmovups_xmm_k1z_xmmm128,
        xmm,
        at(0),
    ))?);
    if !register.is_xmm() {
        let insert = Code::EVEX_Vinsertf32x4_ymm_k1z_ymm_xmmm128_imm8;
        code.push(instruction(Instruction::with4(insert, ymm, ymm, at(QUARTERS[1]), 1))?);
    }
    if register.is_zmm() {
        let insert = Code::EVEX_Vinsertf32x4_zmm_k1z_zmm_xmmm128_imm8;
        for quarter in [2, 3] {
            code.push(instruction(Instruction::with4(
                insert,
                zmm,
                zmm,
                at(QUARTERS[quarter]),
                quarter as i32,
            ))?);
        }
    }
    Ok(())
}

/// The opposite; of a vector register always all of it.
fn store(code: &mut Vec<Instruction>, register: Register, pointer: Register) -> Result<(), NoThunk> {
    let at = |displacement: usize| MemoryOperand::with_base_displ(pointer, displacement as i64);
    if register.is_k() {
        code.push(instruction(Instruction::with2(
            Code::VEX_Kmovq_m64_kr,
            at(0),
            register,
        ))?);
        return Ok(());
    }
    if register.is_gpr() {
        code.push(instruction(Instruction::with2(
            Code::Mov_rm64_r64,
            at(0),
            Register::RAX,
        ))?);
        return Ok(());
    }
    let number = register.number() as u32;
    code.push(instruction(Instruction::with2(
        Code::EVEX_Vmovups_xmmm128_k1z_xmm,
        at(0),
        Register::XMM0 + number,
    ))?);
    for (quarter, &distance) in QUARTERS.iter().enumerate().skip(1) {
        code.push(instruction(Instruction::with3(
            Code::EVEX_Vextractf32x4_xmmm128_k1z_zmm_imm8,
            at(distance),
            Register::ZMM0 + number,
            quarter as i32,
        ))?);
    }
    Ok(())
}

/// Prepares `insn` for execution, by the host where it has the instruction and `vectors` does not ask for tables; `address` is the size
/// of its addresses, in bytes.
///
/// # Errors
/// [`NoThunk::Unsupported`] for an instruction that is neither EVEX-encoded nor on opmask registers, and for gathers and scatters.
pub(crate) fn prepare_evex(insn: &Instruction, address: u8, vectors: Vectors) -> Result<EvexThunk, NoThunk> {
    if insn.is_vsib() {
        return Err(NoThunk::Unsupported);
    }
    let mnemonic = insn.mnemonic();
    let table = vectors != Vectors::Host || !host(insn);
    let mut factory = InstructionInfoFactory::new();
    let info = factory.info(insn);
    let written = |i: u32| {
        matches!(
            info.op_access(i),
            OpAccess::Write | OpAccess::ReadWrite | OpAccess::CondWrite | OpAccess::ReadCondWrite
        )
    };
    let mut renamed = *insn;
    renamed.set_segment_prefix(Register::None);
    let mut places = [Place::NONE; 4];
    let mut parts = Parts::default();
    let mut memory = None;
    // What merging keeps is read.
    let merges = insn.has_op_mask() && !insn.zeroing_masking();
    for i in 0..insn.op_count() {
        let n = i as usize;
        match insn.op_kind(i) {
            OpKind::Register if n < MASK => {
                let register = insn.op_register(i);
                let name = if register.is_vector_register() {
                    renamed_vector(register, VECTORS[n])
                } else if register.is_k() {
                    OPMASK_OPERANDS[n]
                } else if register.is_gpr64() {
                    Register::RAX
                } else if register.is_gpr32() {
                    Register::EAX
                } else {
                    return Err(NoThunk::Unsupported);
                };
                places[n] = Place::of(register);
                renamed.set_op_register(i, name);
                if info.op_access(i) != OpAccess::Write || i == 0 && merges {
                    load(&mut parts.before, name, POINTERS[n])?;
                }
                if written(i) {
                    store(&mut parts.after, name, POINTERS[n])?;
                }
            }
            OpKind::Memory if n < MASK => {
                renamed.set_memory_base(POINTERS[n]);
                renamed.set_memory_index(Register::None);
                renamed.set_memory_index_scale(1);
                renamed.set_memory_displacement64(0);
                renamed.set_memory_displ_size(0);
                places[n] = Place::MEMORY;
                memory = Some(MemoryUse {
                    size: insn.memory_size().size() as u8,
                    alignment: alignment(insn),
                    read: i != 0 || !written(i),
                    write: written(i),
                });
            }
            OpKind::Immediate8 | OpKind::Immediate8_2nd => {}
            _ => return Err(NoThunk::Unsupported),
        }
    }
    if insn.has_op_mask() {
        places[MASK] = Place::of(insn.op_mask());
        renamed.set_op_mask(WRITEMASK);
        load(&mut parts.before, WRITEMASK, POINTERS[MASK])?;
    }
    let suppressed = insn.suppress_all_exceptions() || insn.rounding_control() != iced_x86::RoundingControl::None;
    let traits = Traits {
        flags: forms::writes_flags(mnemonic),
        mxcsr: insn.encoding() == EncodingKind::EVEX && uses_mxcsr(mnemonic),
        no_underflow: suppressed || no_underflow(mnemonic) || complex(mnemonic),
        // SDM Vol. 2C "VFCMULCPH/VFMULCPH".
        masked: complex(mnemonic),
        ..Traits::default()
    };
    let execution = if table {
        Execution::Table(Table::prepare(insn, traits)?)
    } else {
        let entry = parts.keep(vec![renamed], traits)? as usize;
        let half = insn.cpuid_features().contains(&CpuidFeature::AVX512_FP16);
        if half && traits.mxcsr && !traits.no_underflow {
            Execution::HostUnlessUnderflow(entry, Table::prepare(insn, traits)?)
        } else {
            Execution::Host(entry)
        }
    };
    let halves = match insn.code() {
        _ if table => 0,
        Code::EVEX_Vcvtps2ph_xmmm64_k1z_xmm_imm8 => 4,
        Code::EVEX_Vcvtps2ph_xmmm128_k1z_ymm_imm8 => 8,
        Code::EVEX_Vcvtps2ph_ymmm256_k1z_zmm_imm8_sae if !suppressed => 16,
        _ => 0,
    };
    let lanes = if memory.is_some() { lanes(insn) } else { None };
    let form = kept::form(EvexForm {
        execution,
        traits,
        memory,
        lanes,
        halves,
        address: if lanes.is_some() { address } else { 0 },
    });
    Ok(EvexThunk { form, places })
}
