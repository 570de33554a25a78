//! From the ops of a block to host code.
//!
//! RBP is the processor, RAX the guest's arithmetic flags in the form of [`crate::flags`]; RCX, RDX and RSI are free within an op;
//! the others are the guest's ([`MAPPED`]). Flags are put into RAX only where somebody may want them before they are overwritten.

use core::mem::offset_of;
use core::ops::Range;
use core::sync::atomic::AtomicU64;

use iced_x86::{Code, Instruction, MemoryOperand, Mnemonic, Register};

use super::asm::{Asm, Label, Rm, at, host, reg};
use super::form::{Form, Operands, Reach};
use super::{MAPPED, PROLOGUE, Row, Site, Stubs, Why, left, slot_at};
use crate::block::{Block, native_of};
use crate::cpu::{Cpu, Segment, mode, slot};
use crate::exec::avx::{self, aux as vex};
use crate::exec::bmi;
use crate::exec::simd::{self, aux};
use crate::flags;
use crate::fpu::FpuState;
use crate::fpu::state::QUARTERS;
use crate::fpu::state::mxcsr;
use crate::fpu::thunk::{self, Env, Placed, Slot};
use crate::jumps::Jump;
use crate::op::{Link, Op, Reason, Run, Template};
use crate::state::{Hot, offset};
use crate::tlb::Entry as TlbEntry;
use x86::cr::{Cr0, Cr4};
use x86::watch::{BranchRecord, Flow};

use host::{RAX, RBP, RCX, RDX, RSI};

const READ: i32 = offset_of!(TlbEntry, read) as i32;
const WRITE: i32 = offset_of!(TlbEntry, write) as i32;
const EXEC: i32 = offset_of!(TlbEntry, exec) as i32;
const HOST: i32 = offset_of!(TlbEntry, host) as i32;

/// Shifts and rotations as ModR/M encodes them.
const ROL: u8 = 0;
const ROR: u8 = 1;
const SHL: u8 = 4;
const SHR: u8 = 5;
const SAR: u8 = 7;

/// The bits of a linear address, seven to the right, that are the offset of its TLB entry.
const TLB_MASK: i32 = ((crate::tlb::ENTRIES - 1) * size_of::<TlbEntry>()) as i32;
const _: () = assert!(size_of::<TlbEntry>() == 32);
/// As the address, twelve to the right.
const JUMP_MASK: i32 = (crate::jumps::ENTRIES - 1) as i32;
const _: () = assert!(size_of::<Jump>() == 32);

/// The memory of a slot of the register file.
fn memory_of(slot: u8) -> Rm {
    Rm::Mem(at(RBP, slot_at(slot)))
}

fn field(offset: i32) -> Rm {
    Rm::Mem(at(RBP, offset))
}

/// Where the vector and x87 registers begin.
const FPU: i32 = (offset_of!(Cpu, hot) + offset_of!(Hot, fpu)) as i32;

const MXCSR: Rm = Rm::Mem(MemoryOperand {
    segment_prefix: Register::None,
    base: Register::RBP,
    index: Register::None,
    scale: 1,
    displacement: (FPU as usize + offset_of!(FpuState, mxcsr)) as i64,
    displ_size: 1,
    is_broadcast: false,
});

/// The flags in what a thunk returns: CF, PF, AF, ZF and SF as LAHF has them, and OF.
const FLAGS_OF_THUNK: u16 = 0xd501;

/// The operands of a VEX instruction.
fn slots(o: &Op) -> [Slot; 4] {
    [
        Slot(o.dst),
        Slot(o.src),
        Slot((o.imm >> 48) as u8),
        Slot((o.imm >> 56) as u8),
    ]
}

/// What a thunk has to do with besides its operands.
struct Effects {
    mxcsr: bool,
    /// It returns the arithmetic flags.
    flags: bool,
}

/// The memory of an XMM register.
fn xmm(number: u8) -> MemoryOperand {
    at(
        RBP,
        FPU + (offset_of!(FpuState, xmm) + (number & 15) as usize * 16) as i32,
    )
}

/// The memory of the upper half of a YMM register.
fn upper(number: u8) -> MemoryOperand {
    at(
        RBP,
        FPU + (offset_of!(FpuState, ymm_hi) + (number & 15) as usize * 16) as i32,
    )
}

/// The host register that a slot is in.
fn mapped(slot: u8) -> Option<u8> {
    if slot >= slot::ZERO || !slot.is_multiple_of(8) {
        return None;
    }
    MAPPED
        .iter()
        .find(|(guest, _)| *guest == slot / 8)
        .map(|(_, host)| *host)
}

/// Loads what is mapped, and the flags, from the processor.
pub(super) fn load_registers(a: &mut Asm) {
    for (guest, host) in MAPPED {
        a.r_rm(Code::Mov_r64_rm64, host, 8, memory_of(guest * 8), 8);
    }
    a.r_rm(Code::Mov_r64_rm64, RAX, 8, field(offset::NF), 8);
}

/// Stores the guest registers of a set, and the flags.
pub(super) fn store_registers(a: &mut Asm, set: u16) {
    for (guest, host) in MAPPED {
        if set >> guest & 1 != 0 {
            a.rm_r(Code::Mov_rm64_r64, memory_of(guest * 8), host, 8);
        }
    }
    a.rm_r(Code::Mov_rm64_r64, field(offset::NF), RAX, 8);
}

macro_rules! by_size {
    ($size:expr, $c1:ident, $c2:ident, $c4:ident, $c8:ident) => {
        match $size {
            1 => Code::$c1,
            2 => Code::$c2,
            4 => Code::$c4,
            _ => Code::$c8,
        }
    };
}

fn alu_rm_r(op: u8, size: u8) -> Code {
    match op {
        flags::ADD => by_size!(size, Add_rm8_r8, Add_rm16_r16, Add_rm32_r32, Add_rm64_r64),
        flags::OR => by_size!(size, Or_rm8_r8, Or_rm16_r16, Or_rm32_r32, Or_rm64_r64),
        flags::ADC => by_size!(size, Adc_rm8_r8, Adc_rm16_r16, Adc_rm32_r32, Adc_rm64_r64),
        flags::SBB => by_size!(size, Sbb_rm8_r8, Sbb_rm16_r16, Sbb_rm32_r32, Sbb_rm64_r64),
        flags::AND => by_size!(size, And_rm8_r8, And_rm16_r16, And_rm32_r32, And_rm64_r64),
        flags::SUB => by_size!(size, Sub_rm8_r8, Sub_rm16_r16, Sub_rm32_r32, Sub_rm64_r64),
        flags::XOR => by_size!(size, Xor_rm8_r8, Xor_rm16_r16, Xor_rm32_r32, Xor_rm64_r64),
        flags::CMP => by_size!(size, Cmp_rm8_r8, Cmp_rm16_r16, Cmp_rm32_r32, Cmp_rm64_r64),
        _ => by_size!(size, Test_rm8_r8, Test_rm16_r16, Test_rm32_r32, Test_rm64_r64),
    }
}

fn alu_rm_imm(op: u8, size: u8) -> Code {
    match op {
        flags::ADD => by_size!(size, Add_rm8_imm8, Add_rm16_imm16, Add_rm32_imm32, Add_rm64_imm32),
        flags::OR => by_size!(size, Or_rm8_imm8, Or_rm16_imm16, Or_rm32_imm32, Or_rm64_imm32),
        flags::ADC => by_size!(size, Adc_rm8_imm8, Adc_rm16_imm16, Adc_rm32_imm32, Adc_rm64_imm32),
        flags::SBB => by_size!(size, Sbb_rm8_imm8, Sbb_rm16_imm16, Sbb_rm32_imm32, Sbb_rm64_imm32),
        flags::AND => by_size!(size, And_rm8_imm8, And_rm16_imm16, And_rm32_imm32, And_rm64_imm32),
        flags::SUB => by_size!(size, Sub_rm8_imm8, Sub_rm16_imm16, Sub_rm32_imm32, Sub_rm64_imm32),
        flags::XOR => by_size!(size, Xor_rm8_imm8, Xor_rm16_imm16, Xor_rm32_imm32, Xor_rm64_imm32),
        flags::CMP => by_size!(size, Cmp_rm8_imm8, Cmp_rm16_imm16, Cmp_rm32_imm32, Cmp_rm64_imm32),
        _ => by_size!(size, Test_rm8_imm8, Test_rm16_imm16, Test_rm32_imm32, Test_rm64_imm32),
    }
}

/// INC, DEC and NEG; `None` for what has two operands.
fn one_operand(op: u8, size: u8) -> Option<Code> {
    Some(match op {
        flags::INC => by_size!(size, Inc_rm8, Inc_rm16, Inc_rm32, Inc_rm64),
        flags::DEC => by_size!(size, Dec_rm8, Dec_rm16, Dec_rm32, Dec_rm64),
        flags::NEG => by_size!(size, Neg_rm8, Neg_rm16, Neg_rm32, Neg_rm64),
        _ => return None,
    })
}

const fn writes(op: u8) -> bool {
    !matches!(op, flags::CMP | flags::TEST)
}

fn store_code(size: u8) -> Code {
    by_size!(size, Mov_rm8_r8, Mov_rm16_r16, Mov_rm32_r32, Mov_rm64_r64)
}

fn store_imm_code(size: u8) -> Code {
    by_size!(size, Mov_rm8_imm8, Mov_rm16_imm16, Mov_rm32_imm32, Mov_rm64_imm32)
}

/// The branch on a condition, as opcodes encode it.
fn jcc(k: u8) -> Code {
    const CODES: [Code; 16] = [
        Code::Jo_rel32_64,
        Code::Jno_rel32_64,
        Code::Jb_rel32_64,
        Code::Jae_rel32_64,
        Code::Je_rel32_64,
        Code::Jne_rel32_64,
        Code::Jbe_rel32_64,
        Code::Ja_rel32_64,
        Code::Js_rel32_64,
        Code::Jns_rel32_64,
        Code::Jp_rel32_64,
        Code::Jnp_rel32_64,
        Code::Jl_rel32_64,
        Code::Jge_rel32_64,
        Code::Jle_rel32_64,
        Code::Jg_rel32_64,
    ];
    CODES[k as usize & 15]
}

/// A constant as an operand of `size` bytes has it. `None`: it takes more than 32 bits.
fn immediate(imm: u64, size: u8) -> Option<i32> {
    match size {
        1 => Some((imm as i8).into()),
        2 => Some((imm as i16).into()),
        4 => Some(imm as i32),
        _ => i32::try_from(imm as i64).ok(),
    }
}

/// What an op does to the flags, and whether it may leave before it has done anything. What changes some flags and leaves the others
/// neither reads nor writes: whether the flags before it are wanted is whether those after it are.
struct Traits {
    reads: bool,
    writes: bool,
    leaves: bool,
}

fn traits(form: Form) -> Traits {
    use Form as F;
    let of = |reads, writes, leaves| Traits { reads, writes, leaves };
    match form {
        F::Alu(operands, op, _) => of(
            matches!(op, flags::ADC | flags::SBB),
            !matches!(op, flags::INC | flags::DEC),
            matches!(operands, Operands::RegMem | Operands::MemReg | Operands::MemImm),
        ),
        // Rotations leave most flags as they were.
        F::ShiftImm(op, _) => of(false, op >= SHL, false),
        F::Multiply(..)
        | F::Product(_)
        | F::ProductImm(_)
        | F::Extract(..)
        | F::CountZeros(..)
        | F::Scan(..)
        | F::CountOnes(_) => of(false, true, false),
        F::Cmov(..) | F::Set(_) => of(true, false, false),
        // One flag of them changes.
        F::Adx(..) => of(true, false, false),
        F::Nop
        | F::ShiftByCl(..)
        | F::Mulx(_)
        | F::Rorx(_)
        | F::ShiftX(..)
        | F::Bit(..)
        | F::BitImm(..)
        | F::Not(_)
        | F::MoveReg(_)
        | F::MoveImm(_)
        | F::ZeroReg(..)
        | F::SignReg(..)
        | F::Lea(..)
        | F::EaBased(_)
        | F::EaFlat(_)
        | F::ExtendA(_)
        | F::SignToD(_)
        | F::SwapBytes(_)
        | F::Exchange(_) => of(false, false, false),
        F::Load(_)
        | F::Store(_)
        | F::StoreImm(_)
        | F::ZeroLoad(..)
        | F::SignLoad(..)
        | F::PushReg(_)
        | F::PushImm(_)
        | F::PopReg(_)
        | F::EaChecked(_)
        | F::LoadT0(_)
        | F::StoreT0(_)
        | F::Vector
        | F::MoveXmm
        | F::LoadXmm(_)
        | F::StoreXmm(_)
        | F::LoadLow(_)
        | F::StoreLow(_)
        | F::XmmFromReg(_)
        | F::RegFromXmm(_)
        | F::MoveLowXmm
        | F::LogicXmm(_)
        | F::Vex
        | F::MoveYmm(_)
        | F::LoadYmm(..)
        | F::StoreYmm(..)
        | F::LoadLowYmm(_)
        | F::StoreLowYmm(_)
        | F::YmmFromReg(_)
        | F::RegFromYmm(_)
        | F::LogicYmm(..)
        | F::ZeroUpper
        | F::ClearZmmUpper => of(false, false, true),
        // What ends the block, and what is called.
        _ => of(true, false, true),
    }
}

/// Whether all slots are whole registers, or low bytes of them.
fn low(slots: &[u8]) -> bool {
    slots.iter().all(|slot| slot.is_multiple_of(8))
}

/// Pushes, or pops and perhaps a return, that a block begins with here: how many.
fn stack_row(forms: &[Form], ops: &[Op]) -> usize {
    let pushes = |(form, o): &(&Form, &Op)| matches!(form, Form::PushReg(_)) && o.src != slot::RSP;
    let pops = |(form, o): &(&Form, &Op)| matches!(form, Form::PopReg(_)) && o.dst != slot::RSP;
    let row = || forms.iter().zip(ops);
    let pushed = row().take_while(pushes).count();
    if pushed > 0 {
        return pushed.min(MOST_IN_ROW);
    }
    let popped = row().take_while(pops).count().min(MOST_IN_ROW - 1);
    let returns = popped > 0 && matches!(forms.get(popped), Some(Form::Return(_)));
    popped + usize::from(returns)
}

/// Pushes and pops that are done together: their bytes are the size of an access.
const MOST_IN_ROW: usize = 15;

/// Whether an op of this form is translated with these operands. `word`: the size of addresses, 8 in 64-bit mode and 4 in flat
/// 32-bit code.
fn is_known(form: Form, o: &Op, word: u8) -> bool {
    use Form as F;
    match form {
        F::Other => false,
        // What a locked operation does to its operand is called with the rest of it.
        F::Alu(Operands::RegReg | Operands::RegImm, ..) | F::Not(_) if o.dst >= slot::ZERO => false,
        F::Alu(operands, op, size) => {
            let fits = immediate(o.imm, size).is_some();
            match operands {
                Operands::RegReg => low(&[o.dst, o.src]),
                Operands::RegImm => low(&[o.dst]) && (fits || one_operand(op, size).is_some()),
                Operands::RegMem => low(&[o.dst]),
                Operands::MemReg => low(&[o.src]),
                Operands::MemImm => fits || one_operand(op, size).is_some(),
            }
        }
        F::Fused(operands, op, size, _) => is_known(F::Alu(operands, op, size), o, word),
        F::ShiftImm(op, size) => {
            // More than all bits of a small operand are shifted out by few.
            let small = op >= SHL && o.imm < u64::from(size) * 8;
            (size >= 4 || small) && matches!(op, ROL | ROR | SHL | SHR | SAR) && low(&[o.dst])
        }
        F::ShiftByCl(op, size) => size >= 4 && matches!(op, SHL | SHR | SAR) && low(&[o.dst]),
        F::Multiply(_, size) | F::Product(size) => size >= 4,
        F::ProductImm(size) => size >= 4 && immediate(o.imm, size).is_some(),
        F::Bit(_, size) | F::BitImm(_, size) | F::SwapBytes(size) => size >= 4,
        F::ExtendA(_) | F::SignToD(_) => true,
        F::Not(_) | F::Set(_) => low(&[o.dst]),
        F::MoveReg(_) | F::ZeroReg(..) | F::SignReg(..) => low(&[o.dst, o.src]),
        F::MoveImm(_) | F::Load(_) | F::ZeroLoad(..) | F::SignLoad(..) => low(&[o.dst]),
        F::Store(_) => low(&[o.src]),
        F::StoreImm(size) => immediate(o.imm, size).is_some(),
        F::Lea(address, size) => address >= 4 && size >= 4,
        F::PushReg(size) | F::PopReg(size) | F::Return(size) => size == word,
        F::Call(_, size) => size == word && i32::try_from(o.imm as i64).is_ok(),
        F::PushImm(size) => size == word && immediate(o.imm, word).is_some(),
        F::Cmov(_, size) | F::Exchange(size) => size >= 4,
        F::EaBased(address) => address == 8,
        F::EaFlat(_) => true,
        // The others have rights that are not those of data.
        F::EaChecked(address) => address == 4 && o.seg >= 4,
        F::JumpReg(size) | F::CallReg(size) | F::JumpMem(size) | F::CallMem(size) => size == word,
        F::Jump(_) | F::Continue(_) | F::Jcc(..) => i32::try_from(o.imm as i64).is_ok(),
        F::Nop | F::LoadT0(_) | F::StoreT0(_) => true,
        F::Mulx(_) | F::Rorx(_) | F::ShiftX(..) | F::Adx(..) => true,
        F::Extract(k, _) => matches!(k, bmi::ANDN | bmi::BLSI | bmi::BLSMSK | bmi::BLSR),
        F::CountZeros(_, size) | F::Scan(_, size) => size >= 4,
        F::CountOnes(size) => size >= 4 && std::arch::is_x86_feature_detected!("popcnt"),
        F::ZeroUpper | F::ClearZmmUpper => word == 8,
        // Others have to do with the x87 unit, or with registers that they do not name.
        F::Vector => {
            let plain = aux::SSE | aux::ALIGNED | aux::WRITE | aux::MXCSR | aux::FLAGS;
            o.aux & aux::SSE != 0 && o.aux & ((1 << aux::SIZE_SHIFT) - 1) & !plain == 0
        }
        F::Vex => {
            let plain = vex::ALIGNED | vex::WRITE | vex::MXCSR | vex::FLAGS;
            // Of what writes flags, the string compares alone have to do with general registers, and with those they do not name.
            let strings = o.aux & vex::FLAGS != 0 && slots(o).iter().any(|slot| slot.general().is_some());
            word == 8 && o.aux & ((1 << vex::SIZE_SHIFT) - 1) & !plain == 0 && !strings
        }
        F::LoadLow(size) | F::StoreLow(size) => size >= 4,
        F::LoadLowYmm(size) | F::StoreLowYmm(size) => word == 8 && size >= 4,
        F::XmmFromReg(size) => size >= 4 && low(&[o.src]),
        F::YmmFromReg(size) => word == 8 && size >= 4 && low(&[o.src]),
        F::RegFromXmm(size) => size >= 4 && low(&[o.dst]),
        F::RegFromYmm(size) => word == 8 && size >= 4 && low(&[o.dst]),
        F::MoveYmm(_) | F::LoadYmm(..) | F::StoreYmm(..) | F::LogicYmm(..) => word == 8,
        F::MoveXmm | F::LoadXmm(_) | F::StoreXmm(_) | F::MoveLowXmm | F::LogicXmm(_) => true,
    }
}

/// What comes of a translation before it is put anywhere: the code, how many ops became code, and how many are called.
pub(super) type Translated = (Vec<u8>, usize, usize);

/// A block that is being translated.
pub(super) struct Emit<'a> {
    a: Asm,
    block: &'a Block,
    first: *const Op,
    stubs: &'a Stubs,
    /// The first op's handler.
    run: Run,
    /// That of the op which returns.
    returns: Run,
    /// The guest's registers are in the host's.
    in_host: bool,
    /// Guest registers that have changed since the processor had them.
    dirty: u16,
    /// The size of addresses: 8 in 64-bit mode, 4 in flat 32-bit code.
    word: u8,
    /// RSI holds the slot EA.
    has_ea: bool,
    /// And the slot does not: who leaves now does so at the op before, which computes it.
    ea_is_here_alone: bool,
    /// Segments, FS and GS, whose accesses need no more than their base, as has been looked at.
    flat_segments: u8,
    /// The control registers allow SSE, as has been looked at.
    sse_ready: bool,
    /// And AVX.
    avx_ready: bool,
    /// All SIMD floating-point exceptions are masked, as has been looked at.
    all_masked: bool,
    /// MXCSR has its controls as Rust expects them, too, and the host's has the guest's flags, as has been seen to.
    mxcsr_in_host: bool,
    /// Where the translation leaves at an op.
    exits: Vec<(usize, Label)>,
    /// Branches to other blocks: where each one's distance is, the code that looks at its link, the link, and how far from the page it
    /// leads.
    branches: Vec<(usize, Label, u64, i32)>,
    /// The same as others want to know it.
    pub sites: Vec<Site>,
    /// Where the budget does not cover the block.
    over: Label,
    /// The block's branches are recorded.
    recorded: bool,
    /// And that in runs.
    runs: bool,
    /// Branches that are not taken have no record.
    taken_only: bool,
    /// Where a run is long enough for a record, where execution goes on after that, and how far from the page the branch leads.
    ends_of_runs: Vec<(Label, Label, i32)>,
    /// Where the buffer of records is full, and where the branch leads: so far from the page, or the address in slot T1.
    full: Vec<(Label, Option<i32>)>,
    /// Pushes and pops in a row that are done together: where they are done one by one, since they are not in one page, and where
    /// execution goes on after that.
    rows_of_stack: Vec<(Label, Label, Range<usize>)>,
    /// RSI holds what the return that comes next returns to.
    has_return: bool,
    /// What is left to the interpreter.
    pub rows: Vec<Row>,
    /// A test wants to see it found: the translation does something that the block does not.
    pub wrong: bool,
}

impl<'a> Emit<'a> {
    pub fn new(block: &'a Block, first: *const Op, stubs: &'a Stubs, start: u64, [run, returns]: [Run; 2]) -> Emit<'a> {
        let mut a = Asm::new(start);
        Emit {
            over: a.label(),
            a,
            block,
            first,
            stubs,
            run,
            returns,
            in_host: true,
            // Who came from another translation has not stored any.
            dirty: u16::MAX,
            word: if block.key.mode & mode::SIZE == mode::SIZE64 {
                8
            } else {
                4
            },
            has_ea: false,
            ea_is_here_alone: false,
            flat_segments: 0,
            sse_ready: false,
            avx_ready: false,
            all_masked: false,
            mxcsr_in_host: false,
            exits: Vec::new(),
            branches: Vec::new(),
            sites: Vec::new(),
            recorded: block.key.mode & mode::RECORD != 0,
            runs: block.key.mode & mode::RUNS != 0,
            taken_only: block.key.mode & mode::TAKEN != 0,
            ends_of_runs: Vec::new(),
            full: Vec::new(),
            rows_of_stack: Vec::new(),
            has_return: false,
            rows: Vec::new(),
            wrong: false,
        }
    }

    /// The whole block. `None`: nothing of it can be translated.
    pub fn block(&mut self) -> Option<Translated> {
        let ops = self.block.ops();
        let kinds = &self.block.kinds;
        let count = kinds.iter().position(Option::is_none)?;
        let forms: Vec<Form> = kinds[..count]
            .iter()
            .map(|kind| kind.map_or(Form::Other, |kind| kind.form))
            .zip(ops)
            .map(|(form, o)| {
                if is_known(form, o, self.word) {
                    form
                } else {
                    Form::Other
                }
            })
            .collect();
        // The flow op ends the block: if it is not known, the interpreter goes on there.
        let last = count - 1;
        let mut live = vec![true; count];
        let mut after = true;
        for n in (0..count).rev() {
            live[n] = after;
            let traits = traits(forms[n]);
            after = after && !traits.writes || traits.reads || traits.leaves;
        }
        self.prologue(&ops[0]);
        if self.wrong {
            self.a.rm(Code::Inc_rm64, Rm::Reg(MAPPED[0].1), 8);
        }
        let (mut native, mut calls) = (0, 0);
        let mut n = 0;
        while n < count {
            let known = forms[n] != Form::Other;
            if n == last && !known {
                self.count_leaving(n);
                self.leave_at(n);
                break;
            }
            if known {
                self.load_into_host();
                let had_ea = self.has_ea;
                self.ea_is_here_alone &= had_ea;
                let together = stack_row(&forms[n..], &ops[n..]);
                if together > 1 && !had_ea {
                    let end = n + together;
                    let next = self.stack_row(n, &forms[n..end], &ops[n..end]);
                    native += next - n;
                    n = next;
                    continue;
                }
                self.op(n, forms[n], &ops[n], live[n]);
                if matches!(forms[n], Form::EaBased(_) | Form::EaFlat(_) | Form::EaChecked(_)) {
                    self.keep_ea(&ops[n], &ops[n + 1..count], &forms[n + 1..count]);
                } else if had_ea {
                    self.has_ea = false;
                }
                native += 1;
                n += 1;
                continue;
            }
            let end = (n..last).find(|&k| forms[k] != Form::Other).unwrap_or(last);
            self.call(n, &ops[n..end]);
            calls += end - n;
            n = end;
        }
        self.tails(&forms);
        let a = core::mem::replace(&mut self.a, Asm::new(0));
        Some((a.finish()?, native, calls))
    }

    fn address_of(&self, n: usize) -> u64 {
        // The interpreter's handler of a first op is asked for by name, or the block's translation would be entered again.
        let tag = if n == 0 { left::INTERPRET } else { left::RUN };
        self.first.wrapping_add(n) as u64 | tag as u64
    }

    /// The interpreter goes on at an op.
    fn leave_at(&mut self, n: usize) {
        let to = self.address_of(n);
        self.a.constant(RDX, to);
        let stub = if self.in_host {
            self.stubs.leave
        } else {
            self.stubs.leave_stored
        };
        self.a.branch_to(Code::Jmp_rel32_64, stub);
    }

    /// Counts that the interpreter goes on at an op which is not known.
    fn count_leaving(&mut self, n: usize) {
        let times = Box::new(AtomicU64::new(0));
        self.a.constant(RCX, times.as_ptr() as u64);
        self.a.rm(Code::Inc_rm64, Rm::Mem(at(RCX, 0)), 8);
        self.rows.push(Row {
            _ops: Box::new([]),
            times,
            instructions: vec![(self.mnemonic(self.block.ops()[n].off), Why::Leaves)],
        });
    }

    /// The instruction at an offset in the page.
    fn mnemonic(&self, offset: u16) -> Mnemonic {
        let placed = self.block.instructions.iter().find(|placed| placed.offset == offset);
        placed.map_or(Mnemonic::INVALID, |placed| placed.mnemonic)
    }

    /// Where the translation leaves at an op before it has done anything.
    fn exit(&mut self, n: usize) -> Label {
        let n = n - usize::from(self.ea_is_here_alone);
        if let Some((_, label)) = self.exits.iter().find(|(op, _)| *op == n) {
            return *label;
        }
        let label = self.a.label();
        self.exits.push((n, label));
        label
    }

    /// The code that is seldom run.
    fn tails(&mut self, forms: &[Form]) {
        (self.has_ea, self.ea_is_here_alone) = (false, false);
        for (apart, end, row) in core::mem::take(&mut self.rows_of_stack) {
            self.a.bind(apart);
            for n in row {
                let o = &self.block.ops()[n];
                match forms[n] {
                    Form::Return(_) => self.load_return(n),
                    form => self.op(n, form, o, true),
                }
            }
            self.a.branch(Code::Jmp_rel32_64, end);
        }
        for (n, label) in core::mem::take(&mut self.exits) {
            self.a.bind(label);
            let to = self.address_of(n);
            self.a.constant(RDX, to);
            self.a.branch_to(Code::Jmp_rel32_64, self.stubs.leave);
        }
        for (at, label, link, rel) in core::mem::take(&mut self.branches) {
            self.a.bind(label);
            self.a.constant(RDX, link);
            self.a
                .emit(Instruction::with2(Code::Mov_rm64_imm32, Register::RCX, rel));
            self.a.branch_to(Code::Jmp_rel32_64, self.stubs.follow);
            if let Some(slow) = self.a.place_of(label) {
                let link = link as *mut *const Op;
                self.sites.push(Site { link, at, slow });
            }
        }
        self.a.bind(self.over);
        self.a.constant(RDX, self.first as u64);
        self.a.branch_to(Code::Jmp_rel32_64, self.stubs.budget);
        for (label, back, rel) in core::mem::take(&mut self.ends_of_runs) {
            let full = self.a.label();
            self.full.push((full, Some(rel)));
            self.a.bind(label);
            self.a.branch_to(Code::Call_rel32_64, self.stubs.end_run);
            self.a.branch(Code::Jne_rel32_64, back);
            self.a.branch(Code::Jmp_rel32_64, full);
        }
        for (label, rel) in core::mem::take(&mut self.full) {
            // As `exec::flow::full`, of a target that is canonical.
            self.a.bind(label);
            match rel {
                Some(rel) => self.instruction_pointer(RDX, rel),
                None => {
                    // What `record_landing` has pushed.
                    self.a.rm_i(Code::Add_rm64_imm8, Rm::Reg(host::RSP), 8, 16);
                    self.a.r_rm(Code::Mov_r64_rm64, RDX, 8, memory_of(slot::T1), 8);
                }
            }
            self.a.rm_r(Code::Mov_rm64_r64, field(offset::RIP), RDX, 8);
            self.end(Reason::Look);
        }
    }

    /// Ends the chain for a reason.
    fn end(&mut self, reason: Reason) {
        self.a.rm_i(Code::Mov_rm8_imm8, field(offset::STOP), 1, reason as i32);
        self.a.branch_to(Code::Jmp_rel32_64, self.stubs.end);
    }

    /// Records the branch of op `n` if the block does that: to `rel` from its page, or to the address in slot T1. As
    /// `Cpu::record_made`.
    fn record(&mut self, n: usize, taken: bool, rel: Option<i32>) {
        if !self.recorded {
            return;
        }
        const NOT_TAKEN: u8 = Flow::Cond { taken: false }.code();
        let Template { places, rest } = *self.block.ops()[n].template(taken);
        if self.taken_only && rest[1] as u8 == NOT_TAKEN {
            return;
        }
        if self.runs {
            const TAKEN: u8 = Flow::Cond { taken: true }.code();
            const JUMP: u8 = Flow::Jump.code();
            match (rest[1] as u8, rel) {
                (NOT_TAKEN | TAKEN, Some(rel)) => return self.record_bit(taken, rel),
                (JUMP, _) => return,
                _ => {}
            }
        }
        let full = self.a.label();
        self.full.push((full, rel));
        let (lea, word) = (self.lea(), self.word);
        let a = &mut self.a;
        let of = |offset: usize| Rm::Mem(at(RCX, offset as i32));
        a.r_rm(Code::Mov_r64_rm64, RCX, 8, field(offset::RECORD_AT), 8);
        a.r_rm(Code::Mov_r64_rm64, RDX, 8, memory_of(slot::PAGE), 8);
        a.r_rm(lea, RSI, word, Rm::Mem(at(RDX, places[0] as i32)), 8);
        a.rm_r(Code::Mov_rm64_r64, of(offset_of!(BranchRecord, from)), RSI, 8);
        match rel {
            Some(_) => a.r_rm(lea, RSI, word, Rm::Mem(at(RDX, places[1] as i32)), 8),
            None => a.r_rm(Code::Mov_r64_rm64, RSI, 8, memory_of(slot::T1), 8),
        }
        a.rm_r(Code::Mov_rm64_r64, of(offset_of!(BranchRecord, to)), RSI, 8);
        a.r_rm(Code::Mov_r64_rm64, RDX, 8, field(offset::RECORD_REST), 8);
        a.r_rm(Code::Sub_r64_rm64, RDX, 8, field(offset::BUDGET), 8);
        a.rm_r(Code::Mov_rm64_r64, of(offset_of!(BranchRecord, step)), RDX, 8);
        if self.runs {
            rest_with_run(a);
        } else {
            a.r_rm(Code::Mov_r64_rm64, RDX, 8, field(offset::RECORD_REST + 8), 8);
        }
        a.rm_i(Code::Add_rm64_imm32, Rm::Reg(RDX), 8, rest[1] as i32);
        a.rm_r(Code::Mov_rm64_r64, of(offset_of!(BranchRecord, flow)), RDX, 8);
        a.rm_i(Code::Add_rm64_imm8, Rm::Reg(RCX), 8, size_of::<BranchRecord>() as i32);
        a.rm_r(Code::Mov_rm64_r64, field(offset::RECORD_AT), RCX, 8);
        a.r_rm(Code::Cmp_r64_rm64, RCX, 8, field(offset::RECORD_END), 8);
        a.branch(Code::Je_rel32_64, full);
    }

    /// A conditional branch that leads to `rel` from its page joins the run. As `Cpu::pack`.
    fn record_bit(&mut self, taken: bool, rel: i32) {
        let (end, back) = (self.a.label(), self.a.label());
        self.ends_of_runs.push((end, back, rel));
        let a = &mut self.a;
        a.r_rm(Code::Mov_r64_rm64, RDX, 8, field(offset::RUN), 8);
        a.rm_i(Code::Mov_rm64_imm32, field(offset::RUN_TO), 8, rel);
        let twice =
            MemoryOperand::with_base_index_scale_displ_size(Register::RDX, Register::RDX, 1, i64::from(taken), 1);
        a.r_rm(Code::Lea_r64_m, RDX, 8, Rm::Mem(twice), 8);
        a.rm_r(Code::Mov_rm64_r64, field(offset::RUN), RDX, 8);
        a.r_rm(Code::Cmp_r64_rm64, RDX, 8, field(offset::RUN_LIMIT), 8);
        a.branch(Code::Jae_rel32_64, end);
        a.bind(back);
    }

    fn load_into_host(&mut self) {
        if !self.in_host {
            load_registers(&mut self.a);
            self.in_host = true;
            self.dirty = 0;
        }
    }

    /// Ops that their own handlers carry out.
    fn call(&mut self, n: usize, ops: &[Op]) {
        if self.in_host {
            store_registers(&mut self.a, self.dirty);
            self.in_host = false;
        }
        self.has_ea = false;
        (self.sse_ready, self.avx_ready, self.all_masked) = (false, false, false);
        self.mxcsr_in_host = false;
        self.flat_segments = 0;
        let mut row = ops.to_vec();
        if n == 0 {
            row[0].f = self.run;
        }
        let times = Box::new(AtomicU64::new(0));
        let mut returns = ops[0];
        returns.f = self.returns;
        returns.imm = times.as_ptr() as u64;
        row.push(returns);
        let row = row.into_boxed_slice();
        self.a.rm_r(Code::Mov_rm64_r64, Rm::Reg(host::RDI), RBP, 8);
        self.a.constant(RSI, row.as_ptr() as u64);
        let mut instructions: Vec<(u16, Why)> = Vec::new();
        for (o, kind) in ops.iter().zip(&self.block.kinds[n..]) {
            let why = match kind {
                Some(kind) if kind.form != Form::Other => Why::Operands,
                _ => Why::Instruction,
            };
            match instructions.last_mut() {
                Some((offset, known)) if *offset == o.off => *known = why.min(*known),
                _ => instructions.push((o.off, why)),
            }
        }
        let instructions = instructions
            .into_iter()
            .map(|(offset, why)| (self.mnemonic(offset), why))
            .collect();
        self.rows.push(Row {
            _ops: row,
            times,
            instructions,
        });
        self.a.constant(RCX, super::call as *const () as u64);
        self.a.rm(Code::Call_rm64, Rm::Reg(RCX), 8);
        self.a.rm_r(Code::Test_rm8_r8, Rm::Reg(RAX), RAX, 1);
        self.a.branch_to(Code::Je_rel32_64, self.stubs.end_stored);
    }

    /// A slot in a register of the host's: its own, or `temp`. No flag changes.
    fn value(&mut self, slot: u8, temp: u8) -> u8 {
        if let Some(host) = mapped(slot) {
            return host;
        }
        self.a.r_rm(Code::Mov_r64_rm64, temp, 8, memory_of(slot), 8);
        temp
    }

    fn rm(&self, slot: u8) -> Rm {
        match mapped(slot) {
            Some(host) => Rm::Reg(host),
            None => memory_of(slot),
        }
    }

    fn changes(&mut self, slot: u8) {
        if slot < slot::ZERO {
            self.dirty |= 1 << (slot / 8);
        }
    }

    /// Sets a slot as an instruction of this operand size does. No flag changes. RDX or RSI is overwritten where that is in memory,
    /// which is always written whole: the host forwards a store to a later load only if it covers that.
    fn set(&mut self, slot: u8, size: u8, value: u8) {
        self.changes(slot);
        if let Some(host) = mapped(slot) {
            self.a.rm_r(store_code(size), Rm::Reg(host), value, size);
            return;
        }
        let whole = match size {
            8 => value,
            4 => {
                let to = if matches!(value, RCX | RDX | RSI) { value } else { RDX };
                self.a.rm_r(Code::Mov_rm32_r32, Rm::Reg(to), value, 4);
                to
            }
            _ => {
                let to = if value == RSI { RDX } else { RSI };
                self.a.r_rm(Code::Mov_r64_rm64, to, 8, memory_of(slot), 8);
                self.a.rm_r(store_code(size), Rm::Reg(to), value, size);
                to
            }
        };
        self.a.rm_r(Code::Mov_rm64_r64, memory_of(slot), whole, 8);
    }

    /// A slot in a register that may be changed: its own, or RSI, from where [`Emit::changed`] brings it back.
    fn changeable(&mut self, slot: u8) -> u8 {
        self.changes(slot);
        self.value(slot, RSI)
    }

    /// What was changed is whole: operations of 32 bits clear the upper half of their register.
    fn changed(&mut self, slot: u8, register: u8) {
        if mapped(slot).is_none() {
            self.a.rm_r(Code::Mov_rm64_r64, memory_of(slot), register, 8);
        }
    }

    /// The flags of the instruction before go to RAX.
    fn keep_flags(&mut self) {
        self.a.op0(Code::Lahf);
        self.a.rm(Code::Seto_rm8, Rm::Reg(RAX), 1);
    }

    /// A memory operand's address sum, in RCX unless it is a register as it is. RDX is overwritten, and host flags.
    fn sum(&mut self, o: &Op) -> u8 {
        let index = (o.idx != slot::ZERO).then(|| self.value(o.idx, RDX));
        let base = if o.base == slot::ZERO {
            None
        } else if o.base == slot::EA && self.has_ea {
            Some(RSI)
        } else {
            Some(self.value(o.base, RCX))
        };
        match (base, index) {
            (None, None) => self.a.constant(RCX, o.disp as i64 as u64),
            (Some(base), None) if o.disp == 0 => return base,
            (base, index) => {
                let memory = MemoryOperand::new(
                    base.map_or(Register::None, |n| reg(n, 8)),
                    index.map_or(Register::None, |n| reg(n, 8)),
                    1 << o.scale,
                    o.disp.into(),
                    if base.is_some() { 1 } else { 8 },
                    false,
                    Register::None,
                );
                self.a.r_rm(Code::Lea_r64_m, RCX, 8, Rm::Mem(memory), 8);
            }
        }
        RCX
    }

    /// The host's address of `size` bytes at a linear address in a register, in RCX; the translation leaves at op `n` if the TLB
    /// has not got it.
    fn reach(&mut self, n: usize, linear: u8, size: u8, tag: i32) {
        let miss = self.exit(n);
        self.reach_or(miss, linear, size, tag);
    }

    /// The same that branches to a label if the TLB has not got it.
    fn reach_or(&mut self, miss: Label, linear: u8, size: u8, tag: i32) {
        let a = &mut self.a;
        a.rm_r(Code::Mov_rm64_r64, Rm::Reg(RDX), linear, 8);
        if linear != RCX {
            a.rm_r(Code::Mov_rm64_r64, Rm::Reg(RCX), linear, 8);
        }
        a.rm_i(Code::Shr_rm64_imm8, Rm::Reg(RDX), 8, 7);
        a.rm_i(Code::And_rm32_imm32, Rm::Reg(RDX), 4, TLB_MASK);
        a.r_rm(Code::Add_r64_rm64, RDX, 8, field(offset::TLB), 8);
        a.r_rm(Code::Xor_r64_rm64, RCX, 8, Rm::Mem(at(RDX, tag)), 8);
        a.rm_i(Code::Cmp_rm64_imm32, Rm::Reg(RCX), 8, 0x1000 - i32::from(size));
        a.branch(Code::Ja_rel32_64, miss);
        a.r_rm(Code::Add_r64_rm64, RCX, 8, Rm::Mem(at(RDX, HOST)), 8);
    }

    /// The host's address of a memory operand, in RCX.
    fn operand(&mut self, n: usize, o: &Op, size: u8, tag: i32) -> Rm {
        let linear = self.sum(o);
        self.reach(n, linear, size, tag);
        Rm::Mem(at(RCX, 0))
    }

    /// Loads `size` bytes, zero-extended, into a register.
    fn load(&mut self, to: u8, size: u8, from: Rm) {
        match size {
            1 => self.a.r_rm(Code::Movzx_r32_rm8, to, 4, from, 1),
            2 => self.a.r_rm(Code::Movzx_r32_rm16, to, 4, from, 2),
            4 => self.a.r_rm(Code::Mov_r32_rm32, to, 4, from, 4),
            _ => self.a.r_rm(Code::Mov_r64_rm64, to, 8, from, 8),
        }
    }

    /// Loads `from` bytes, sign-extended to 64 bits.
    fn load_signed(&mut self, to: u8, from: u8, rm: Rm) {
        match from {
            1 => self.a.r_rm(Code::Movsx_r64_rm8, to, 8, rm, 1),
            2 => self.a.r_rm(Code::Movsx_r64_rm16, to, 8, rm, 2),
            4 => self.a.r_rm(Code::Movsxd_r64_rm32, to, 8, rm, 4),
            _ => self.a.r_rm(Code::Mov_r64_rm64, to, 8, rm, 8),
        }
    }

    /// An operation of the arithmetic unit, with the host's flags as it leaves them.
    fn alu(&mut self, n: usize, operands: Operands, op: u8, size: u8, o: &Op, live: bool) {
        let carry = |e: &mut Self| match op {
            flags::ADC | flags::SBB => e.a.rm_i(Code::Bt_rm32_imm8, Rm::Reg(RAX), 4, 8),
            flags::INC | flags::DEC if live => e.a.rm_i(Code::Bt_rm32_imm8, Rm::Reg(RAX), 4, 8),
            flags::INC | flags::DEC => {}
            // LAHF and SETO change a part of RAX, and would wait for what was there.
            _ if live => e.a.rm_r(Code::Xor_rm32_r32, Rm::Reg(RAX), RAX, 4),
            _ => {}
        };
        let imm = immediate(o.imm, size).unwrap_or(0);
        let act = |e: &mut Self, rm: Rm| match one_operand(op, size) {
            Some(code) => e.a.rm(code, rm, size),
            None => e.a.rm_i(alu_rm_imm(op, size), rm, size, imm),
        };
        match operands {
            Operands::RegReg | Operands::RegImm => {
                let dst = if writes(op) { Some(self.changeable(o.dst)) } else { None };
                let rm = dst.map_or(self.rm(o.dst), Rm::Reg);
                if operands == Operands::RegReg {
                    let src = self.value(o.src, RCX);
                    carry(self);
                    self.a.rm_r(alu_rm_r(op, size), rm, src, size);
                } else {
                    carry(self);
                    act(self, rm);
                }
                if let Some(dst) = dst {
                    self.changed(o.dst, dst);
                }
            }
            Operands::RegMem => {
                let from = self.operand(n, o, size, READ);
                self.load(RCX, size, from);
                let dst = if writes(op) { Some(self.changeable(o.dst)) } else { None };
                let rm = dst.map_or(self.rm(o.dst), Rm::Reg);
                carry(self);
                self.a.rm_r(alu_rm_r(op, size), rm, RCX, size);
                if let Some(dst) = dst {
                    self.changed(o.dst, dst);
                }
            }
            Operands::MemReg => {
                let tag = if writes(op) { WRITE } else { READ };
                let to = self.operand(n, o, size, tag);
                let src = self.value(o.src, RDX);
                carry(self);
                self.a.rm_r(alu_rm_r(op, size), to, src, size);
            }
            Operands::MemImm => {
                let tag = if writes(op) { WRITE } else { READ };
                let to = self.operand(n, o, size, tag);
                carry(self);
                act(self, to);
            }
        }
    }

    /// Whether a condition of the flags in RAX holds: the branch that is taken if so. RCX and RDX are overwritten.
    fn condition(&mut self, k: u8) -> Code {
        let a = &mut self.a;
        let mask = |flag: u64| flag as i32;
        match k >> 1 {
            6 | 7 => {
                a.rm_r(Code::Mov_rm32_r32, Rm::Reg(RCX), RAX, 4);
                a.rm_i(Code::Shr_rm32_imm8, Rm::Reg(RCX), 4, 15);
                a.rm_r(Code::Xor_rm32_r32, Rm::Reg(RCX), RAX, 4);
                if k >> 1 == 7 {
                    a.rm_i(Code::And_rm32_imm32, Rm::Reg(RCX), 4, 1);
                    a.rm_r(Code::Mov_rm32_r32, Rm::Reg(RDX), RAX, 4);
                    a.rm_i(Code::And_rm32_imm32, Rm::Reg(RDX), 4, mask(flags::ZF));
                    a.rm_r(Code::Or_rm32_r32, Rm::Reg(RCX), RDX, 4);
                } else {
                    a.rm_i(Code::Test_rm32_imm32, Rm::Reg(RCX), 4, 1);
                }
            }
            n => {
                let flag = match n {
                    0 => flags::OF,
                    1 => flags::CF,
                    2 => flags::ZF,
                    3 => flags::CF | flags::ZF,
                    4 => flags::SF,
                    _ => flags::PF,
                };
                a.rm_i(Code::Test_rm32_imm32, Rm::Reg(RAX), 4, mask(flag));
            }
        }
        if k & 1 == 0 {
            Code::Jne_rel32_64
        } else {
            Code::Je_rel32_64
        }
    }

    /// As `Cpu::sse_ready`: the translation leaves at op `n` if not. Only what is called changes a control register.
    fn check_sse(&mut self, n: usize) {
        if core::mem::replace(&mut self.sse_ready, true) {
            return;
        }
        let exit = self.exit(n);
        let (cr0, cr4) = (offset_of!(Cpu, cr0) as i32, offset_of!(Cpu, cr4) as i32);
        let stops = Cr0::new().with_em(true).with_ts(true).into_bits() as i32;
        self.a.rm_i(Code::Test_rm32_imm32, field(cr0), 4, stops);
        self.a.branch(Code::Jne_rel32_64, exit);
        let needs = Cr4::new().with_osfxsr(true).into_bits() as i32;
        self.a.rm_i(Code::Test_rm32_imm32, field(cr4), 4, needs);
        self.a.branch(Code::Je_rel32_64, exit);
    }

    /// As `Cpu::avx_ready`, in 64-bit mode.
    fn check_avx(&mut self, n: usize) {
        if core::mem::replace(&mut self.avx_ready, true) {
            return;
        }
        let exit = self.exit(n);
        let (cr0, cr4) = (offset_of!(Cpu, cr0) as i32, offset_of!(Cpu, cr4) as i32);
        self.a.rm_i(
            Code::Test_rm32_imm32,
            field(cr0),
            4,
            Cr0::new().with_ts(true).into_bits() as i32,
        );
        self.a.branch(Code::Jne_rel32_64, exit);
        let needs = Cr4::new().with_osxsave(true).into_bits() as i32;
        self.a.rm_i(Code::Test_rm32_imm32, field(cr4), 4, needs);
        self.a.branch(Code::Je_rel32_64, exit);
        self.a
            .r_rm(Code::Mov_r32_rm32, RCX, 4, field(offset_of!(Cpu, xcr0) as i32), 4);
        self.a.rm(Code::Not_rm32, Rm::Reg(RCX), 4);
        self.a.rm_i(Code::Test_rm32_imm32, Rm::Reg(RCX), 4, avx::ENABLED as i32);
        self.a.branch(Code::Jne_rel32_64, exit);
    }

    /// The translation leaves at op `n` unless MXCSR masks all exceptions. Only what is called changes its masks.
    fn check_masks(&mut self, n: usize) {
        if core::mem::replace(&mut self.all_masked, true) {
            return;
        }
        let exit = self.exit(n);
        let masks = mxcsr::MASKS as i32;
        self.a.r_rm(Code::Mov_r32_rm32, RCX, 4, MXCSR, 4);
        self.a.rm_i(Code::And_rm32_imm32, Rm::Reg(RCX), 4, masks);
        self.a.rm_i(Code::Cmp_rm32_imm32, Rm::Reg(RCX), 4, masks);
        self.a.branch(Code::Jne_rel32_64, exit);
    }

    /// Stores a register of the host's as the upper half of one of the guest's.
    fn store_upper(&mut self, to: u8, register: Register) {
        self.a
            .emit(Instruction::with2(Code::Movups_xmmm128_xmm, upper(to), register));
    }

    /// The upper half of a register becomes zero.
    fn clear_upper(&mut self, to: u8) {
        self.a.emit(Instruction::with2(
            Code::Pxor_xmm_xmmm128,
            Register::XMM1,
            Register::XMM1,
        ));
        self.store_upper(to, Register::XMM1);
    }

    fn xmm_rm(&mut self, code: Code, register: Register, rm: MemoryOperand) {
        self.a.emit(Instruction::with2(code, register, rm));
    }

    fn load_xmm(&mut self, register: Register, from: u8) {
        self.xmm_rm(Code::Movups_xmm_xmmm128, register, xmm(from));
    }

    /// Stores XMM0 as a register of the guest's.
    fn store_xmm(&mut self, to: u8) {
        self.a
            .emit(Instruction::with2(Code::Movups_xmmm128_xmm, xmm(to), Register::XMM0));
    }

    /// The lower half of a guest's register, whose upper half becomes zero.
    fn set_low(&mut self, to: u8, value: u8) {
        self.a
            .emit(Instruction::with2(Code::Movq_xmm_rm64, Register::XMM0, reg(value, 8)));
        self.store_xmm(to);
    }

    /// The host's address of a vector's memory operand, which may have to be aligned.
    fn vector_operand(&mut self, n: usize, o: &Op, size: u8, tag: i32, alignment: u8) -> MemoryOperand {
        let linear = self.sum(o);
        if alignment > 1 {
            let exit = self.exit(n);
            self.a
                .rm_i(Code::Test_rm32_imm32, Rm::Reg(linear), 4, i32::from(alignment) - 1);
            self.a.branch(Code::Jne_rel32_64, exit);
        }
        self.reach(n, linear, size, tag);
        at(RCX, 0)
    }

    /// The guest's MXCSR is in the host's, whose controls stay as they are: the translation leaves at op `n` if the guest has others.
    /// So the flags are those of the guest's instructions alone, and what Rust finds afterwards differs in flags, at which nobody looks.
    fn load_mxcsr(&mut self, n: usize) {
        if core::mem::replace(&mut self.mxcsr_in_host, true) {
            return;
        }
        let exit = self.exit(n);
        self.a.r_rm(Code::Mov_r32_rm32, RCX, 4, MXCSR, 4);
        self.a
            .rm_i(Code::And_rm32_imm32, Rm::Reg(RCX), 4, !(mxcsr::FLAGS as i32));
        self.a.rm_i(Code::Cmp_rm32_imm32, Rm::Reg(RCX), 4, mxcsr::RESET as i32);
        self.a.branch(Code::Jne_rel32_64, exit);
        self.a.rm(Code::Ldmxcsr_m32, MXCSR, 4);
    }

    /// As `Cpu::vector`, of a thunk that has to do with its operands, MXCSR and the flags alone.
    fn vector(&mut self, n: usize, o: &Op) {
        self.check_sse(n);
        let effects = Effects {
            mxcsr: o.aux & aux::MXCSR != 0,
            flags: o.aux & aux::FLAGS != 0,
        };
        let size = (o.aux >> aux::SIZE_SHIFT) as u8;
        let access = (size != 0).then(|| {
            let tag = if o.aux & aux::WRITE != 0 { WRITE } else { READ };
            (size, tag, if o.aux & aux::ALIGNED != 0 { 16 } else { 1 })
        });
        let slots = [Slot(o.dst), Slot(o.src), Slot::NONE, Slot::NONE];
        self.host_instruction(n, o, slots, o.imm, effects, access);
    }

    /// As `Cpu::vex`, of such a thunk.
    fn vex(&mut self, n: usize, o: &Op) {
        self.check_avx(n);
        let effects = Effects {
            mxcsr: o.aux & vex::MXCSR != 0,
            flags: o.aux & vex::FLAGS != 0,
        };
        let size = (o.aux >> vex::SIZE_SHIFT) as u8;
        let access = (size != 0).then(|| {
            let tag = if o.aux & vex::WRITE != 0 { WRITE } else { READ };
            (size, tag, if o.aux & vex::ALIGNED != 0 { size } else { 1 })
        });
        self.host_instruction(n, o, slots(o), o.imm & avx::ENTRY, effects, access);
    }

    /// The instruction of a thunk, with its memory operand's size, tag and alignment: in place, or by a call of the thunk.
    fn host_instruction(
        &mut self,
        n: usize,
        o: &Op,
        slots: [Slot; 4],
        entry: u64,
        effects: Effects,
        access: Option<(u8, i32, u8)>,
    ) {
        let recipe = thunk::recipe_of(entry as usize);
        let placed = recipe.as_ref().and_then(|recipe| {
            let state = (Register::RBP, i64::from(FPU));
            recipe.placed(slots, state, Register::RCX, Register::RDX)
        });
        if effects.mxcsr {
            match placed {
                Some(_) => self.load_mxcsr(n),
                None => self.check_masks(n),
            }
        }
        if let Some((size, tag, alignment)) = access {
            self.vector_operand(n, o, size, tag, alignment);
        }
        let (Some(recipe), Some((before, after))) = (recipe, placed) else {
            self.mxcsr_in_host &= !effects.mxcsr;
            self.thunk(slots, entry, effects);
            return;
        };
        if effects.flags {
            self.a.rm_r(Code::Xor_rm32_r32, Rm::Reg(RAX), RAX, 4);
        }
        self.place(before);
        if effects.flags {
            self.keep_flags();
            self.a
                .rm_i(Code::And_rm32_imm32, Rm::Reg(RAX), 4, i32::from(FLAGS_OF_THUNK));
        }
        self.place(after);
        if effects.mxcsr {
            self.a.rm(Code::Stmxcsr_m32, MXCSR, 4);
        }
        if recipe.wide {
            self.a.op0(Code::VEX_Vzeroupper);
        }
    }

    fn place(&mut self, instructions: Vec<Placed>) {
        for placed in instructions {
            match placed {
                Placed::Instruction(instruction) => self.a.emit(Ok(instruction)),
                Placed::Get(number) => {
                    let from = self.rm(number * 8);
                    self.a.r_rm(Code::Mov_r64_rm64, RDX, 8, from, 8);
                }
                Placed::Set(number) => self.set(number * 8, 8, RDX),
            }
        }
    }

    /// Calls a thunk, whose memory operand is at the address in RCX.
    fn thunk(&mut self, slots: [Slot; 4], entry: u64, effects: Effects) {
        // A general register is where the processor has it, and the thunk uses RAX for it.
        let registers: Vec<u8> = slots.iter().filter_map(|slot| slot.general()).collect();
        for &number in &registers {
            if let Some(host) = mapped(number * 8) {
                self.a.rm_r(Code::Mov_rm64_r64, memory_of(number * 8), host, 8);
            }
        }
        if !registers.is_empty() {
            self.a.rm_r(Code::Mov_rm64_r64, field(offset::NF), RAX, 8);
        }
        // What a thunk uses is its pointers, R9 for the implicit operand and, with MXCSR, R8 for its environment and R11; R10 is for
        // its address.
        let saved: &[u8] = if effects.mxcsr {
            &[host::RDI, 9, 10, 8, 11]
        } else {
            &[host::RDI, 9, 10]
        };
        for &register in saved {
            self.a.emit(Instruction::with1(Code::Push_r64, reg(register, 8)));
        }
        // RCX, the last pointer, is where memory is until then.
        for (slot, pointer) in slots.into_iter().zip([host::RDI, RSI, RDX, RCX]) {
            if let Some(number) = slot.general() {
                self.a.r_rm(Code::Lea_r64_m, pointer, 8, memory_of(number * 8), 8);
            } else if let Some(offset) = slot.vector() {
                let memory = Rm::Mem(at(RBP, FPU + offset as i32));
                self.a.r_rm(Code::Lea_r64_m, pointer, 8, memory, 8);
            } else if slot.is_memory() && pointer != RCX {
                self.a.rm_r(Code::Mov_rm64_r64, Rm::Reg(pointer), RCX, 8);
            }
        }
        self.a.r_rm(Code::Lea_r64_m, 9, 8, Rm::Mem(at(RBP, FPU)), 8);
        self.a.constant(10, entry);
        let environment = |offset: usize| Rm::Mem(at(host::RSP, offset as i32));
        if effects.mxcsr {
            // All exceptions are masked: as `Thunk::run` then makes it.
            self.a
                .rm_i(Code::Sub_rm64_imm8, Rm::Reg(host::RSP), 8, size_of::<Env>() as i32);
            self.a.r_rm(Code::Mov_r32_rm32, 8, 4, MXCSR, 4);
            self.a.rm_i(Code::And_rm32_imm32, Rm::Reg(8), 4, !(mxcsr::FLAGS as i32));
            let (run, host) = (offset_of!(Env, run), offset_of!(Env, host));
            self.a.rm_r(Code::Mov_rm32_r32, environment(run), 8, 4);
            self.a
                .rm_i(Code::Mov_rm32_imm32, environment(host), 4, mxcsr::RESET as i32);
            self.a
                .rm_i(Code::Mov_rm32_imm32, environment(offset_of!(Env, unmasked)), 4, 0);
            self.a.rm_r(Code::Mov_rm64_r64, Rm::Reg(8), host::RSP, 8);
        }
        self.a.rm(Code::Call_rm64, Rm::Reg(10), 8);
        if effects.mxcsr {
            self.a
                .r_rm(Code::Mov_r32_rm32, RCX, 4, environment(offset_of!(Env, after)), 4);
            self.a.rm_i(Code::And_rm32_imm32, Rm::Reg(RCX), 4, mxcsr::FLAGS as i32);
            self.a.rm_r(Code::Or_rm32_r32, MXCSR, RCX, 4);
            self.a
                .rm_i(Code::Add_rm64_imm8, Rm::Reg(host::RSP), 8, size_of::<Env>() as i32);
        }
        if effects.flags {
            // LAHF in AH and OF in AL: the form that flags have here.
            self.a
                .rm_i(Code::And_rm32_imm32, Rm::Reg(RAX), 4, i32::from(FLAGS_OF_THUNK));
        }
        for &register in saved.iter().rev() {
            self.a.emit(Instruction::with1(Code::Pop_r64, reg(register, 8)));
        }
        if !registers.is_empty() && !effects.flags {
            self.a.r_rm(Code::Mov_r64_rm64, RAX, 8, field(offset::NF), 8);
        }
        for &number in &registers {
            if let Some(host) = mapped(number * 8) {
                self.a.r_rm(Code::Mov_r64_rm64, host, 8, memory_of(number * 8), 8);
                self.changes(number * 8);
            }
        }
    }

    fn op(&mut self, n: usize, form: Form, o: &Op, live: bool) {
        use Form as F;
        match form {
            F::Nop | F::Other => {}
            F::Alu(operands, op, size) => {
                self.alu(n, operands, op, size, o, live);
                if live {
                    self.keep_flags();
                }
            }
            F::Not(size) => {
                let dst = self.changeable(o.dst);
                let code = by_size!(size, Not_rm8, Not_rm16, Not_rm32, Not_rm64);
                self.a.rm(code, Rm::Reg(dst), size);
                self.changed(o.dst, dst);
            }
            F::ShiftImm(op, size) => self.shift(op, size, o, live),
            F::MoveReg(size) => {
                let src = self.value(o.src, RCX);
                self.set(o.dst, size, src);
            }
            F::MoveImm(size) => {
                let value = if size == 4 { o.imm as u32 as u64 } else { o.imm };
                match (mapped(o.dst), i32::try_from(value as i64)) {
                    (Some(dst), _) if size >= 4 => {
                        self.a.constant(dst, value);
                        self.changes(o.dst);
                    }
                    (None, Ok(imm)) if size >= 4 => {
                        self.a.rm_i(Code::Mov_rm64_imm32, memory_of(o.dst), 8, imm);
                        self.changes(o.dst);
                    }
                    _ => {
                        self.a.constant(RCX, value);
                        self.set(o.dst, size, RCX);
                    }
                }
            }
            F::Load(size) => {
                let from = self.operand(n, o, size, READ);
                match mapped(o.dst) {
                    Some(dst) if size >= 4 => {
                        self.load(dst, size, from);
                        self.changes(o.dst);
                    }
                    _ => {
                        self.load(RCX, size, from);
                        self.set(o.dst, size, RCX);
                    }
                }
            }
            F::ZeroLoad(from, to) => {
                let memory = self.operand(n, o, from, READ);
                self.load(RCX, from, memory);
                self.set(o.dst, to, RCX);
            }
            F::SignLoad(from, to) => {
                let memory = self.operand(n, o, from, READ);
                self.load_signed(RCX, from, memory);
                self.set(o.dst, to, RCX);
            }
            F::Store(size) => {
                let to = self.operand(n, o, size, WRITE);
                let src = self.value(o.src, RDX);
                self.a.rm_r(store_code(size), to, src, size);
            }
            F::StoreImm(size) => {
                let to = self.operand(n, o, size, WRITE);
                self.a
                    .rm_i(store_imm_code(size), to, size, immediate(o.imm, size).unwrap_or(0));
            }
            F::ZeroReg(from, to) => {
                let rm = self.rm(o.src);
                self.load(RCX, from, rm);
                self.set(o.dst, to, RCX);
            }
            F::SignReg(from, to) => {
                let rm = self.rm(o.src);
                self.load_signed(RCX, from, rm);
                self.set(o.dst, to, RCX);
            }
            F::Lea(address, size) => {
                let sum = self.sum(o);
                if address == 4 {
                    self.a.rm_r(Code::Mov_rm32_r32, Rm::Reg(RCX), sum, 4);
                    self.set(o.dst, size, RCX);
                } else {
                    self.set(o.dst, size, sum);
                }
            }
            F::PushReg(_) => {
                self.push_place(n);
                let src = self.value(o.src, RDX);
                self.a.rm_r(store_code(self.word), Rm::Mem(at(RCX, 0)), src, self.word);
                self.move_stack(-i32::from(self.word));
            }
            F::PushImm(_) => {
                self.push_place(n);
                let imm = immediate(o.imm, self.word).unwrap_or(0);
                self.a
                    .rm_i(store_imm_code(self.word), Rm::Mem(at(RCX, 0)), self.word, imm);
                self.move_stack(-i32::from(self.word));
            }
            F::PopReg(_) => {
                let sp = self.stack();
                self.reach(n, sp, self.word, READ);
                self.load(RCX, self.word, Rm::Mem(at(RCX, 0)));
                self.move_stack(self.word.into());
                self.set(o.dst, self.word, RCX);
            }
            F::Cmov(k, size) => {
                let holds = self.condition(k);
                let when_set = holds == Code::Jne_rel32_64;
                let code = match (size, when_set) {
                    (4, true) => Code::Cmovne_r32_rm32,
                    (4, false) => Code::Cmove_r32_rm32,
                    (_, true) => Code::Cmovne_r64_rm64,
                    (_, false) => Code::Cmove_r64_rm64,
                };
                let src = self.rm(o.src);
                let dst = self.value(o.dst, RDX);
                self.a.r_rm(code, dst, size, src, size);
                self.changes(o.dst);
                if dst == RDX {
                    self.set(o.dst, 8, RDX);
                }
            }
            F::Set(k) => {
                let holds = self.condition(k);
                let code = if holds == Code::Jne_rel32_64 {
                    Code::Setne_rm8
                } else {
                    Code::Sete_rm8
                };
                let dst = self.changeable(o.dst);
                self.a.rm(code, Rm::Reg(dst), 1);
                self.changed(o.dst, dst);
            }
            F::Exchange(size) => {
                let (a, b) = (self.value(o.dst, RCX), self.value(o.src, RDX));
                self.a.rm_r(Code::Mov_rm64_r64, Rm::Reg(RSI), a, 8);
                self.set(o.dst, size, b);
                self.set(o.src, size, RSI);
            }
            F::EaBased(_) => {
                let sum = self.sum(o);
                let segment = (o.seg as usize).min(5) * size_of::<Segment>();
                let base = offset_of!(Cpu, seg) + segment + offset_of!(Segment, base);
                self.a.rm_r(Code::Mov_rm64_r64, Rm::Reg(RSI), sum, 8);
                self.a.r_rm(Code::Add_r64_rm64, RSI, 8, field(base as i32), 8);
                self.has_ea = true;
            }
            F::EaFlat(address) => {
                let sum = self.sum(o);
                self.load(RSI, address, Rm::Reg(sum));
                self.has_ea = true;
            }
            F::EaChecked(_) => {
                // As `Cpu::within`, of data that may be read and written up to the last byte: the translation leaves else.
                let exit = self.exit(n);
                let segment = (offset_of!(Cpu, seg) + (o.seg as usize).min(5) * size_of::<Segment>()) as i32;
                let part = |part: usize| field(segment + part as i32);
                if self.flat_segments >> o.seg & 1 == 0 {
                    self.flat_segments |= 1 << o.seg;
                    self.a
                        .rm_i(Code::Cmp_rm32_imm8, part(offset_of!(Segment, limit)), 4, -1);
                    self.a.branch(Code::Jne_rel32_64, exit);
                    let attributes = part(offset_of!(Segment, attributes));
                    self.a.r_rm(Code::Movzx_r32_rm16, RCX, 4, attributes, 2);
                    self.a
                        .rm_i(Code::And_rm32_imm32, Rm::Reg(RCX), 4, Segment::DATA_RIGHTS.into());
                    self.a
                        .rm_i(Code::Cmp_rm32_imm32, Rm::Reg(RCX), 4, Segment::WRITABLE_DATA.into());
                    self.a.branch(Code::Jne_rel32_64, exit);
                }
                let sum = self.sum(o);
                self.load(RSI, 4, Rm::Reg(sum));
                let size = i32::from(o.aux & 0x7fff).max(1);
                self.a.rm_i(Code::Cmp_rm32_imm32, Rm::Reg(RSI), 4, -size);
                self.a.branch(Code::Ja_rel32_64, exit);
                self.a
                    .r_rm(Code::Add_r32_rm32, RSI, 4, part(offset_of!(Segment, base)), 4);
                self.has_ea = true;
            }
            F::Vector => self.vector(n, o),
            F::Vex => self.vex(n, o),
            F::MoveYmm(size) => {
                self.check_avx(n);
                self.load_xmm(Register::XMM0, o.src);
                if size == 32 {
                    self.xmm_rm(Code::Movups_xmm_xmmm128, Register::XMM1, upper(o.src));
                    self.store_upper(o.dst, Register::XMM1);
                } else {
                    self.clear_upper(o.dst);
                }
                self.store_xmm(o.dst);
            }
            F::LoadYmm(aligned, size) => {
                self.check_avx(n);
                let from = self.vector_operand(n, o, size, READ, if aligned { size } else { 1 });
                self.xmm_rm(Code::Movups_xmm_xmmm128, Register::XMM0, from);
                if size == 32 {
                    self.xmm_rm(Code::Movups_xmm_xmmm128, Register::XMM1, at(RCX, 16));
                    self.store_upper(o.dst, Register::XMM1);
                } else {
                    self.clear_upper(o.dst);
                }
                self.store_xmm(o.dst);
            }
            F::StoreYmm(aligned, size) => {
                self.check_avx(n);
                let to = self.vector_operand(n, o, size, WRITE, if aligned { size } else { 1 });
                self.load_xmm(Register::XMM0, o.src);
                self.a
                    .emit(Instruction::with2(Code::Movups_xmmm128_xmm, to, Register::XMM0));
                if size == 32 {
                    self.xmm_rm(Code::Movups_xmm_xmmm128, Register::XMM1, upper(o.src));
                    self.a.emit(Instruction::with2(
                        Code::Movups_xmmm128_xmm,
                        at(RCX, 16),
                        Register::XMM1,
                    ));
                }
            }
            F::LoadLowYmm(size) => {
                self.check_avx(n);
                let from = self.operand(n, o, size, READ);
                self.load(RCX, size, from);
                self.set_low(o.dst, RCX);
                self.clear_upper(o.dst);
            }
            F::StoreLowYmm(size) => {
                self.check_avx(n);
                let to = self.operand(n, o, size, WRITE);
                self.a.r_rm(Code::Mov_r64_rm64, RDX, 8, Rm::Mem(xmm(o.src)), 8);
                self.a.rm_r(store_code(size), to, RDX, size);
            }
            F::YmmFromReg(size) => {
                self.check_avx(n);
                let rm = self.rm(o.src);
                self.load(RCX, size, rm);
                self.set_low(o.dst, RCX);
                self.clear_upper(o.dst);
            }
            F::RegFromYmm(size) => {
                self.check_avx(n);
                self.load(RCX, size, Rm::Mem(xmm(o.src)));
                self.set(o.dst, size, RCX);
            }
            F::LogicYmm(op, size) => {
                self.check_avx(n);
                let code = match op {
                    simd::AND => Code::Pand_xmm_xmmm128,
                    simd::ANDN => Code::Pandn_xmm_xmmm128,
                    simd::OR => Code::Por_xmm_xmmm128,
                    _ => Code::Pxor_xmm_xmmm128,
                };
                // Both halves are read before either is written.
                self.load_xmm(Register::XMM0, o.src);
                self.load_xmm(Register::XMM1, o.base);
                self.a.emit(Instruction::with2(code, Register::XMM0, Register::XMM1));
                if size == 32 {
                    self.xmm_rm(Code::Movups_xmm_xmmm128, Register::XMM2, upper(o.src));
                    self.xmm_rm(Code::Movups_xmm_xmmm128, Register::XMM1, upper(o.base));
                    self.a.emit(Instruction::with2(code, Register::XMM2, Register::XMM1));
                    self.store_upper(o.dst, Register::XMM2);
                } else {
                    self.clear_upper(o.dst);
                }
                self.store_xmm(o.dst);
            }
            F::MoveXmm => {
                self.check_sse(n);
                self.load_xmm(Register::XMM0, o.src);
                self.store_xmm(o.dst);
            }
            F::LoadXmm(aligned) => {
                self.check_sse(n);
                let from = self.vector_operand(n, o, 16, READ, if aligned { 16 } else { 1 });
                self.xmm_rm(Code::Movups_xmm_xmmm128, Register::XMM0, from);
                self.store_xmm(o.dst);
            }
            F::StoreXmm(aligned) => {
                self.check_sse(n);
                let to = self.vector_operand(n, o, 16, WRITE, if aligned { 16 } else { 1 });
                self.load_xmm(Register::XMM0, o.src);
                self.a
                    .emit(Instruction::with2(Code::Movups_xmmm128_xmm, to, Register::XMM0));
            }
            F::LoadLow(size) => {
                self.check_sse(n);
                let from = self.operand(n, o, size, READ);
                self.load(RCX, size, from);
                self.set_low(o.dst, RCX);
            }
            F::StoreLow(size) => {
                self.check_sse(n);
                let to = self.operand(n, o, size, WRITE);
                self.a.r_rm(Code::Mov_r64_rm64, RDX, 8, Rm::Mem(xmm(o.src)), 8);
                self.a.rm_r(store_code(size), to, RDX, size);
            }
            F::XmmFromReg(size) => {
                self.check_sse(n);
                let rm = self.rm(o.src);
                self.load(RCX, size, rm);
                self.set_low(o.dst, RCX);
            }
            F::RegFromXmm(size) => {
                self.check_sse(n);
                self.load(RCX, size, Rm::Mem(xmm(o.src)));
                self.set(o.dst, size, RCX);
            }
            F::MoveLowXmm => {
                self.check_sse(n);
                self.load(RCX, 8, Rm::Mem(xmm(o.src)));
                self.set_low(o.dst, RCX);
            }
            F::LogicXmm(op) => {
                self.check_sse(n);
                self.load_xmm(Register::XMM0, o.dst);
                self.load_xmm(Register::XMM1, o.src);
                let code = match op {
                    simd::AND => Code::Pand_xmm_xmmm128,
                    simd::ANDN => Code::Pandn_xmm_xmmm128,
                    simd::OR => Code::Por_xmm_xmmm128,
                    _ => Code::Pxor_xmm_xmmm128,
                };
                self.a.emit(Instruction::with2(code, Register::XMM0, Register::XMM1));
                self.store_xmm(o.dst);
            }
            F::LoadT0(size) => {
                let from = self.operand(n, o, size, READ);
                self.load(RCX, size, from);
                self.a.rm_r(Code::Mov_rm64_r64, memory_of(slot::T0), RCX, 8);
            }
            F::StoreT0(size) => {
                let to = self.operand(n, o, size, WRITE);
                self.a.r_rm(Code::Mov_r64_rm64, RDX, 8, memory_of(slot::T0), 8);
                self.a.rm_r(store_code(size), to, RDX, size);
            }
            F::Fused(operands, op, size, k) => {
                self.alu(n, operands, op, size, o, true);
                self.keep_flags();
                let branch = o.off as i32 + o.len as i32;
                let (next, target) = (branch + i32::from(o.aux >> 12), i32::from(o.aux & 0xfff));
                self.branch(jcc(k), n, Reach::Near, [next, target]);
            }
            F::Jcc(k, reach) => {
                let code = self.condition(k);
                let next = o.off as i32 + o.len as i32;
                self.branch(code, n, reach, [next, o.imm as i32]);
            }
            F::Jump(reach) => self.go(n, reach, true, o.imm as i32),
            F::Continue(reach) => {
                let recorded = core::mem::take(&mut self.recorded);
                self.go(n, reach, true, o.imm as i32);
                self.recorded = recorded;
            }
            F::Call(reach, _) => {
                let rel = o.imm as i32;
                if reach == Reach::Far {
                    self.check_far(n, true, rel);
                }
                self.push_next(n, o);
                self.record(n, true, Some(rel));
                match reach {
                    Reach::Near => self.follow(Code::Jmp_rel32_64, n, true, rel),
                    Reach::Far => self.enter_far(n, true, rel),
                }
            }
            F::ShiftByCl(op, size) => self.shift_by_cl(op, size, o, live),
            F::Multiply(signed, size) => self.multiply(signed, size, o, live),
            F::Product(size) => self.product(size, o, None, live),
            F::ProductImm(size) => {
                let imm = immediate(o.imm, size);
                self.product(size, o, imm, live);
            }
            F::Mulx(size) => self.multiply_x(size, o),
            F::Adx(flag, size) => self.add_x(flag, size, o),
            F::Rorx(size) => {
                let src = self.rm(o.src);
                let (mov, ror) = if size == 8 {
                    (Code::Mov_r64_rm64, Code::Ror_rm64_imm8)
                } else {
                    (Code::Mov_r32_rm32, Code::Ror_rm32_imm8)
                };
                self.a.r_rm(mov, RSI, size, src, size);
                self.a
                    .rm_i(ror, Rm::Reg(RSI), size, o.imm as i32 & (i32::from(size) * 8 - 1));
                self.set(o.dst, size, RSI);
            }
            F::ShiftX(k, size) => {
                let count = self.rm(o.base);
                self.a.r_rm(Code::Mov_r32_rm32, RCX, 4, count, 4);
                let src = self.rm(o.src);
                let wide = size == 8;
                let mov = if wide { Code::Mov_r64_rm64 } else { Code::Mov_r32_rm32 };
                self.a.r_rm(mov, RSI, size, src, size);
                let code = match (k, wide) {
                    (bmi::SARX, true) => Code::Sar_rm64_CL,
                    (bmi::SARX, false) => Code::Sar_rm32_CL,
                    (bmi::SHLX, true) => Code::Shl_rm64_CL,
                    (bmi::SHLX, false) => Code::Shl_rm32_CL,
                    (_, true) => Code::Shr_rm64_CL,
                    (_, false) => Code::Shr_rm32_CL,
                };
                self.a.emit(Instruction::with2(code, reg(RSI, size), Register::CL));
                self.set(o.dst, size, RSI);
            }
            F::Extract(k, size) => self.extract(k, size, o, live),
            F::CountZeros(b, size) => self.count_zeros(b == 0, size, o, live),
            F::Scan(b, size) => self.scan(b == 0, size, o, live),
            F::CountOnes(size) => {
                let src = self.rm(o.src);
                let wide = size == 8;
                let code = if wide {
                    Code::Popcnt_r64_rm64
                } else {
                    Code::Popcnt_r32_rm32
                };
                self.a.r_rm(code, RCX, size, src, size);
                if live {
                    self.a.op0(Code::Lahf);
                    self.a.rm_i(Code::And_rm32_imm32, Rm::Reg(RAX), 4, flags::ZF as i32);
                }
                self.set(o.dst, size, RCX);
            }
            F::ZeroUpper => {
                self.check_avx(n);
                for register in 0..16 {
                    if register == 0 {
                        self.clear_upper(register);
                    } else {
                        self.store_upper(register, Register::XMM1);
                    }
                }
            }
            F::ClearZmmUpper => {
                let zero = Register::XMM1;
                self.a
                    .emit(Instruction::with3(Code::VEX_Vxorps_xmm_xmm_xmmm128, zero, zero, zero));
                for quarter in &QUARTERS[2..] {
                    let offset = offset_of!(FpuState, xmm) + (o.dst & 15) as usize * 16 + quarter;
                    let to = at(RBP, FPU + offset as i32);
                    self.a.emit(Instruction::with2(Code::VEX_Vmovups_xmmm128_xmm, to, zero));
                }
            }
            F::Bit(k, size) => self.bit(k, size, o, true, live),
            F::BitImm(k, size) => self.bit(k, size, o, false, live),
            F::SwapBytes(size) => {
                let src = self.value(o.src, RCX);
                self.a.rm_r(Code::Mov_rm64_r64, Rm::Reg(RCX), src, 8);
                let code = if size == 8 { Code::Bswap_r64 } else { Code::Bswap_r32 };
                self.a.rm(code, Rm::Reg(RCX), size);
                self.set(o.dst, size, RCX);
            }
            F::ExtendA(size) => {
                if let Some(a) = mapped(slot::RAX) {
                    let (code, to, from) = match size {
                        2 => (Code::Movsx_r16_rm8, 2, 1),
                        4 => (Code::Movsx_r32_rm16, 4, 2),
                        _ => (Code::Movsxd_r64_rm32, 8, 4),
                    };
                    self.a.r_rm(code, a, to, Rm::Reg(a), from);
                    self.changes(slot::RAX);
                }
            }
            F::SignToD(size) => {
                if let Some(a) = mapped(slot::RAX) {
                    self.load_signed(RCX, size, Rm::Reg(a));
                    self.a.rm_i(Code::Sar_rm64_imm8, Rm::Reg(RCX), 8, 63);
                    self.set(slot::RDX, size, RCX);
                }
            }
            F::JumpMem(_) => {
                let from = self.operand(n, o, self.word, READ);
                self.load(RSI, self.word, from);
                self.land(n, RSI);
                self.record_landing(n);
                self.a.rm_r(Code::Mov_rm64_r64, memory_of(slot::PAGE), RSI, 8);
                self.enter();
            }
            F::CallMem(_) => {
                let from = self.operand(n, o, self.word, READ);
                self.load(RSI, self.word, from);
                self.call_to(n, RSI, o);
            }
            F::JumpReg(_) => {
                let to = self.target(o.src);
                self.land(n, to);
                self.record_landing(n);
                self.a.rm_r(Code::Mov_rm64_r64, memory_of(slot::PAGE), RSI, 8);
                self.enter();
            }
            F::CallReg(_) => {
                let to = self.target(o.src);
                self.call_to(n, to, o);
            }
            F::Return(_) => {
                if !core::mem::take(&mut self.has_return) {
                    self.load_return(n);
                }
                self.land(n, RSI);
                self.move_stack(i32::from(self.word) + o.imm as i32);
                self.record_landing(n);
                self.a.rm_r(Code::Mov_rm64_r64, memory_of(slot::PAGE), RSI, 8);
                self.enter();
            }
        }
    }

    /// After an op has computed EA: the slot has it, too, if more than the next op may want it.
    fn keep_ea(&mut self, o: &Op, ops: &[Op], forms: &[Form]) {
        let wanted = |o: &Op| o.base == slot::EA;
        let later = ops.iter().skip(1).take_while(|next| next.off == o.off).any(wanted);
        let alone = !later && !wanted(o) && forms.first().is_some_and(|form| *form != Form::Other);
        self.ea_is_here_alone = alone;
        if !alone {
            self.a.rm_r(Code::Mov_rm64_r64, memory_of(slot::EA), RSI, 8);
        }
    }

    /// Bit 0 of a register, which is 0 or 1, becomes CF in RAX, where it is clear.
    fn put_carry(&mut self, from: u8) {
        self.a
            .rm_i(Code::Shl_rm32_imm8, Rm::Reg(from), 4, flags::CF.trailing_zeros() as i32);
        self.a.rm_r(Code::Or_rm32_r32, Rm::Reg(RAX), from, 4);
    }

    /// Before a shift of a register: OF as it will be, in a temporary. It is that of the first of the one-bit shifts, see
    /// `exec::shift`.
    fn shift_overflow(&mut self, op: u8, size: u8, value: u8, temp: u8) {
        // Of operands below 32 bits the register holds more, which is cut off in the end.
        let wide = size == 8;
        let bit = i32::from(size) * 8 - 1;
        let size = size.max(4);
        let shr = if wide { Code::Shr_rm64_imm8 } else { Code::Shr_rm32_imm8 };
        let mov = if wide { Code::Mov_rm64_r64 } else { Code::Mov_rm32_r32 };
        let xor = if wide { Code::Xor_rm64_r64 } else { Code::Xor_rm32_r32 };
        let add = if wide { Code::Add_rm64_r64 } else { Code::Add_rm32_r32 };
        if matches!(op, SHL | SHR) {
            self.a.rm_r(mov, Rm::Reg(temp), value, size);
            if op == SHL {
                self.a.rm_r(add, Rm::Reg(temp), temp, size);
                self.a.rm_r(xor, Rm::Reg(temp), value, size);
            }
            self.a.rm_i(shr, Rm::Reg(temp), size, bit);
            if bit < 31 {
                self.a.rm_i(Code::And_rm32_imm8, Rm::Reg(temp), 4, 1);
            }
        }
    }

    /// After it.
    fn keep_shift_flags(&mut self, op: u8, overflow: u8) {
        let kept = flags::CF | flags::PF | flags::ZF | flags::SF;
        self.a.op0(Code::Lahf);
        self.a.rm_i(Code::And_rm32_imm32, Rm::Reg(RAX), 4, kept as i32);
        if matches!(op, SHL | SHR) {
            self.a.rm_r(Code::Or_rm32_r32, Rm::Reg(RAX), overflow, 4);
        }
    }

    fn shift(&mut self, op: u8, size: u8, o: &Op, live: bool) {
        let dst = self.changeable(o.dst);
        if live && op >= SHL {
            self.shift_overflow(op, size, dst, RCX);
        }
        let code = match op {
            ROL => by_size!(size, Rol_rm8_imm8, Rol_rm16_imm8, Rol_rm32_imm8, Rol_rm64_imm8),
            ROR => by_size!(size, Ror_rm8_imm8, Ror_rm16_imm8, Ror_rm32_imm8, Ror_rm64_imm8),
            SHL => by_size!(size, Shl_rm8_imm8, Shl_rm16_imm8, Shl_rm32_imm8, Shl_rm64_imm8),
            SHR => by_size!(size, Shr_rm8_imm8, Shr_rm16_imm8, Shr_rm32_imm8, Shr_rm64_imm8),
            _ => by_size!(size, Sar_rm8_imm8, Sar_rm16_imm8, Sar_rm32_imm8, Sar_rm64_imm8),
        };
        self.a.rm_i(code, Rm::Reg(dst), size, o.imm as i32);
        if live && op >= SHL {
            self.keep_shift_flags(op, RCX);
        } else if live {
            // CF, and OF for a count of 1; the others stay.
            let one = o.imm == 1;
            self.a.rm(Code::Setb_rm8, Rm::Reg(RCX), 1);
            if one {
                self.a.rm(Code::Seto_rm8, Rm::Reg(RDX), 1);
            }
            let gone = if one { flags::CF | flags::OF } else { flags::CF };
            self.a.rm_i(Code::And_rm32_imm32, Rm::Reg(RAX), 4, !(gone as i32));
            if one {
                self.a.r_rm(Code::Movzx_r32_rm8, RDX, 4, Rm::Reg(RDX), 1);
                self.a.rm_r(Code::Or_rm32_r32, Rm::Reg(RAX), RDX, 4);
            }
            self.a.r_rm(Code::Movzx_r32_rm8, RCX, 4, Rm::Reg(RCX), 1);
            self.put_carry(RCX);
        }
        self.changed(o.dst, dst);
    }

    fn shift_by_cl(&mut self, op: u8, size: u8, o: &Op, live: bool) {
        let wide = size == 8;
        let count = self.value(slot::RCX, RCX);
        self.a.rm_r(Code::Mov_rm32_r32, Rm::Reg(RCX), count, 4);
        let value = self.value(o.dst, RSI);
        let mov = if wide { Code::Mov_rm64_r64 } else { Code::Mov_rm32_r32 };
        self.a.rm_r(mov, Rm::Reg(RSI), value, size);
        self.a
            .rm_i(Code::And_rm32_imm8, Rm::Reg(RCX), 4, if wide { 63 } else { 31 });
        let none = self.a.label();
        self.a.branch(Code::Je_rel32_64, none);
        if live {
            self.shift_overflow(op, size, RSI, RDX);
        }
        let code = match (op, wide) {
            (SHL, true) => Code::Shl_rm64_CL,
            (SHL, false) => Code::Shl_rm32_CL,
            (SHR, true) => Code::Shr_rm64_CL,
            (SHR, false) => Code::Shr_rm32_CL,
            (_, true) => Code::Sar_rm64_CL,
            (_, false) => Code::Sar_rm32_CL,
        };
        self.a.emit(Instruction::with2(code, reg(RSI, size), Register::CL));
        if live {
            self.keep_shift_flags(op, RDX);
        }
        self.a.bind(none);
        self.set(o.dst, size, RSI);
    }

    /// The flags of a product, whose low half is in a register and whose carry in CL: `exec::muldiv`.
    fn keep_product_flags(&mut self, low: u8, size: u8) {
        let test = if size == 8 {
            Code::Test_rm64_r64
        } else {
            Code::Test_rm32_r32
        };
        self.a.rm_r(test, Rm::Reg(low), low, size);
        self.a.op0(Code::Lahf);
        self.a
            .rm_i(Code::And_rm32_imm32, Rm::Reg(RAX), 4, (flags::PF | flags::SF) as i32);
        self.a.r_rm(Code::Movzx_r32_rm8, RCX, 4, Rm::Reg(RCX), 1);
        self.a.rm_r(Code::Or_rm32_r32, Rm::Reg(RAX), RCX, 4);
        self.put_carry(RCX);
    }

    fn multiply(&mut self, signed: bool, size: u8, o: &Op, live: bool) {
        let rm = self.rm(o.src);
        let (Some(a), Some(d)) = (mapped(slot::RAX), mapped(slot::RDX)) else {
            return;
        };
        // The flags that RAX holds are overwritten by this very instruction, or nobody wants them.
        self.a.rm_r(Code::Mov_rm64_r64, Rm::Reg(RAX), a, 8);
        let code = match (signed, size) {
            (false, 4) => Code::Mul_rm32,
            (false, _) => Code::Mul_rm64,
            (true, 4) => Code::Imul_rm32,
            (true, _) => Code::Imul_rm64,
        };
        self.a.rm(code, rm, size);
        if live {
            self.a.rm(Code::Setb_rm8, Rm::Reg(RCX), 1);
        }
        let mov = if size == 8 {
            Code::Mov_rm64_r64
        } else {
            Code::Mov_rm32_r32
        };
        self.a.rm_r(mov, Rm::Reg(a), RAX, size);
        self.a.rm_r(mov, Rm::Reg(d), RDX, size);
        self.changes(slot::RAX);
        self.changes(slot::RDX);
        if live {
            self.keep_product_flags(a, size);
        }
    }

    /// ANDN, BLSI, BLSMSK and BLSR: as `exec::bmi::extract`.
    fn extract(&mut self, k: u8, size: u8, o: &Op, live: bool) {
        let wide = size == 8;
        let mov = if wide { Code::Mov_rm64_r64 } else { Code::Mov_rm32_r32 };
        let and = if wide { Code::And_rm64_r64 } else { Code::And_rm32_r32 };
        let src = self.value(o.src, RSI);
        if src != RSI {
            self.a.rm_r(mov, Rm::Reg(RSI), src, size);
        }
        if k == bmi::ANDN {
            let not = if wide { Code::Not_rm64 } else { Code::Not_rm32 };
            self.a.rm(not, Rm::Reg(RSI), size);
            let with = self.value(o.base, RCX);
            self.a.rm_r(and, Rm::Reg(RSI), with, size);
        } else {
            self.a.rm_r(mov, Rm::Reg(RCX), RSI, size);
            if k == bmi::BLSI {
                let neg = if wide { Code::Neg_rm64 } else { Code::Neg_rm32 };
                self.a.rm(neg, Rm::Reg(RCX), size);
            } else {
                let sub = if wide { Code::Sub_rm64_imm8 } else { Code::Sub_rm32_imm8 };
                self.a.rm_i(sub, Rm::Reg(RCX), size, 1);
            }
            // The carry of either is CF.
            self.a.rm(Code::Setb_rm8, Rm::Reg(RDX), 1);
            let xor = if wide { Code::Xor_rm64_r64 } else { Code::Xor_rm32_r32 };
            let code = if k == bmi::BLSMSK { xor } else { and };
            self.a.rm_r(code, Rm::Reg(RSI), RCX, size);
        }
        if live {
            self.a.op0(Code::Lahf);
            self.a
                .rm_i(Code::And_rm32_imm32, Rm::Reg(RAX), 4, (flags::SF | flags::ZF) as i32);
            if k != bmi::ANDN {
                self.a.r_rm(Code::Movzx_r32_rm8, RCX, 4, Rm::Reg(RDX), 1);
                self.put_carry(RCX);
            }
        }
        self.set(o.dst, size, RSI);
    }

    /// TZCNT (`low`) and LZCNT, which not every host has.
    fn count_zeros(&mut self, low: bool, size: u8, o: &Op, live: bool) {
        let wide = size == 8;
        let bits = i32::from(size) * 8;
        let src = self.value(o.src, RSI);
        let (code, none) = match (low, wide) {
            (true, true) => (Code::Bsf_r64_rm64, bits),
            (true, false) => (Code::Bsf_r32_rm32, bits),
            // What comes of BSR counts from the other end.
            (false, true) => (Code::Bsr_r64_rm64, 2 * bits - 1),
            (false, false) => (Code::Bsr_r32_rm32, 2 * bits - 1),
        };
        self.a.constant(RCX, none as u64);
        self.a.r_rm(code, RDX, size, Rm::Reg(src), size);
        if live {
            self.a.rm(Code::Sete_rm8, Rm::Reg(RAX), 1);
        }
        self.a.r_rm(Code::Cmovne_r32_rm32, RCX, 4, Rm::Reg(RDX), 4);
        if !low {
            self.a.rm_i(Code::Xor_rm32_imm8, Rm::Reg(RCX), 4, bits - 1);
        }
        if live {
            self.a.r_rm(Code::Movzx_r32_rm8, RDX, 4, Rm::Reg(RAX), 1);
            self.a.rm_r(Code::Test_rm32_r32, Rm::Reg(RCX), RCX, 4);
            self.a.op0(Code::Lahf);
            self.a.rm_i(Code::And_rm32_imm32, Rm::Reg(RAX), 4, flags::ZF as i32);
            self.put_carry(RDX);
        }
        self.set(o.dst, size, RCX);
    }

    /// BSF (`low`) and BSR: as `exec::bit::Scan`.
    fn scan(&mut self, low: bool, size: u8, o: &Op, live: bool) {
        let code = match (low, size == 8) {
            (true, true) => Code::Bsf_r64_rm64,
            (true, false) => Code::Bsf_r32_rm32,
            (false, true) => Code::Bsr_r64_rm64,
            (false, false) => Code::Bsr_r32_rm32,
        };
        let src = self.value(o.src, RSI);
        let (none, end) = (self.a.label(), self.a.label());
        self.a.r_rm(code, RCX, size, Rm::Reg(src), size);
        self.a.branch(Code::Je_rel32_64, none);
        if live {
            self.a.rm_r(Code::Test_rm32_r32, Rm::Reg(RCX), RCX, 4);
            self.a.op0(Code::Lahf);
            self.a.rm_i(Code::And_rm32_imm32, Rm::Reg(RAX), 4, flags::PF as i32);
        }
        self.set(o.dst, size, RCX);
        self.a.branch(Code::Jmp_rel32_64, end);
        self.a.bind(none);
        if live {
            self.a.constant(RAX, flags::ZF | flags::PF);
        }
        self.a.bind(end);
    }

    /// MULX, which leaves the flags in RAX as they are.
    fn multiply_x(&mut self, size: u8, o: &Op) {
        self.a.rm_r(Code::Mov_rm64_r64, Rm::Reg(RSI), RAX, 8);
        let by = self.value(slot::RDX, RAX);
        self.a.rm_r(Code::Mov_rm64_r64, Rm::Reg(RAX), by, 8);
        let rm = self.rm(o.src);
        let (mul, mov) = if size == 8 {
            (Code::Mul_rm64, Code::Mov_rm64_r64)
        } else {
            (Code::Mul_rm32, Code::Mov_rm32_r32)
        };
        self.a.rm(mul, rm, size);
        // The high half is second, and stays if both are one register.
        self.a.rm_r(mov, Rm::Reg(RCX), RAX, size);
        self.a.rm_r(Code::Mov_rm64_r64, Rm::Reg(RAX), RSI, 8);
        self.a.rm_r(mov, Rm::Reg(RSI), RDX, size);
        self.set(o.base, 8, RCX);
        self.set(o.dst, 8, RSI);
    }

    /// ADCX, and ADOX (`flag` 1): the carry is one flag, and no other changes.
    fn add_x(&mut self, flag: u8, size: u8, o: &Op) {
        let overflow = flag != 0;
        let src = self.value(o.src, RCX);
        let dst = self.changeable(o.dst);
        let bit = if overflow { flags::OF } else { flags::CF }.trailing_zeros() as i32;
        self.a.rm_i(Code::Bt_rm32_imm8, Rm::Reg(RAX), 4, bit);
        let adc = if size == 8 {
            Code::Adc_rm64_r64
        } else {
            Code::Adc_rm32_r32
        };
        self.a.rm_r(adc, Rm::Reg(dst), src, size);
        if overflow {
            // OF is all of AL.
            self.a.rm(Code::Setb_rm8, Rm::Reg(RAX), 1);
        } else {
            self.a.rm(Code::Setb_rm8, Rm::Reg(RCX), 1);
            self.a.rm_i(Code::And_rm32_imm32, Rm::Reg(RAX), 4, !(flags::CF as i32));
            self.a.r_rm(Code::Movzx_r32_rm8, RCX, 4, Rm::Reg(RCX), 1);
            self.put_carry(RCX);
        }
        self.changed(o.dst, dst);
    }

    fn product(&mut self, size: u8, o: &Op, imm: Option<i32>, live: bool) {
        let src = self.rm(o.src);
        match imm {
            Some(imm) => {
                let code = if size == 8 {
                    Code::Imul_r64_rm64_imm32
                } else {
                    Code::Imul_r32_rm32_imm32
                };
                let to = reg(RSI, size);
                self.a.emit(match src {
                    Rm::Reg(n) => Instruction::with3(code, to, reg(n, size), imm),
                    Rm::Mem(m) => Instruction::with3(code, to, m, imm),
                });
            }
            None => {
                let dst = self.value(o.dst, RSI);
                if dst != RSI {
                    self.a.rm_r(Code::Mov_rm64_r64, Rm::Reg(RSI), dst, 8);
                }
                let code = if size == 8 {
                    Code::Imul_r64_rm64
                } else {
                    Code::Imul_r32_rm32
                };
                self.a.r_rm(code, RSI, size, src, size);
            }
        }
        if live {
            self.a.rm(Code::Setb_rm8, Rm::Reg(RCX), 1);
            self.keep_product_flags(RSI, size);
        }
        self.set(o.dst, size, RSI);
    }

    /// BT and its kin: the bit's number is an immediate or in a register.
    fn bit(&mut self, k: u8, size: u8, o: &Op, by_register: bool, live: bool) {
        let wide = size == 8;
        let dst = self.value(o.dst, RSI);
        if by_register {
            let n = self.value(o.src, RCX);
            let code = match (k, wide) {
                (0, true) => Code::Bt_rm64_r64,
                (0, false) => Code::Bt_rm32_r32,
                (1, true) => Code::Bts_rm64_r64,
                (1, false) => Code::Bts_rm32_r32,
                (2, true) => Code::Btr_rm64_r64,
                (2, false) => Code::Btr_rm32_r32,
                (_, true) => Code::Btc_rm64_r64,
                (_, false) => Code::Btc_rm32_r32,
            };
            self.a.rm_r(code, Rm::Reg(dst), n, size);
        } else {
            let code = match (k, wide) {
                (0, true) => Code::Bt_rm64_imm8,
                (0, false) => Code::Bt_rm32_imm8,
                (1, true) => Code::Bts_rm64_imm8,
                (1, false) => Code::Bts_rm32_imm8,
                (2, true) => Code::Btr_rm64_imm8,
                (2, false) => Code::Btr_rm32_imm8,
                (_, true) => Code::Btc_rm64_imm8,
                (_, false) => Code::Btc_rm32_imm8,
            };
            let n = o.imm & (u64::from(size) * 8 - 1);
            self.a.rm_i(code, Rm::Reg(dst), size, n as i32);
        }
        if live {
            self.a.rm(Code::Setb_rm8, Rm::Reg(RCX), 1);
            self.a.rm_i(Code::And_rm32_imm32, Rm::Reg(RAX), 4, !(flags::CF as i32));
            self.a.r_rm(Code::Movzx_r32_rm8, RCX, 4, Rm::Reg(RCX), 1);
            self.put_carry(RCX);
        }
        if k != 0 {
            self.changes(o.dst);
            self.changed(o.dst, dst);
        }
    }

    /// The target of a branch to what a register holds, in RSI or in a register of its own.
    fn target(&mut self, slot: u8) -> u8 {
        let to = self.value(slot, RSI);
        if self.word == 8 {
            return to;
        }
        self.a.rm_r(Code::Mov_rm32_r32, Rm::Reg(RSI), to, 4);
        RSI
    }

    /// LEA as addresses are computed: those of 32-bit code wrap at 4 GiB.
    fn lea(&self) -> Code {
        if self.word == 8 {
            Code::Lea_r64_m
        } else {
            Code::Lea_r32_m
        }
    }

    /// The instruction pointer so far from the page.
    fn instruction_pointer(&mut self, to: u8, rel: i32) {
        self.a.r_rm(Code::Mov_r64_rm64, to, 8, memory_of(slot::PAGE), 8);
        let add = by_size!(self.word, Add_rm8_imm8, Add_rm16_imm16, Add_rm32_imm32, Add_rm64_imm32);
        self.a.rm_i(add, Rm::Reg(to), self.word, rel);
    }

    /// The stack pointer, in RCX or in a register of its own.
    fn stack(&mut self) -> u8 {
        let sp = self.value(slot::RSP, RCX);
        if self.word == 8 {
            return sp;
        }
        self.a.rm_r(Code::Mov_rm32_r32, Rm::Reg(RCX), sp, 4);
        RCX
    }

    /// The host's address of what a push stores, in RCX.
    fn push_place(&mut self, n: usize) {
        let sp = self.value(slot::RSP, RCX);
        let below = Rm::Mem(at(sp, -i32::from(self.word)));
        self.a.r_rm(self.lea(), RCX, self.word, below, 8);
        self.reach(n, RCX, self.word, WRITE);
    }

    /// What a return returns to, in RSI.
    fn load_return(&mut self, n: usize) {
        let sp = self.stack();
        self.reach(n, sp, self.word, READ);
        self.load(RSI, self.word, Rm::Mem(at(RCX, 0)));
    }

    /// Pushes, or pops and a return, in a row, from op `n` on: the TLB is asked once for all of them. Where they are not in one page,
    /// or the TLB has not got it, they are done one by one. The answer is the op to go on with: a return, of which the stack alone
    /// has been read, is not done yet.
    fn stack_row(&mut self, n: usize, forms: &[Form], ops: &[Op]) -> usize {
        let (apart, end) = (self.a.label(), self.a.label());
        let bytes = |ops: usize| ops as i32 * i32::from(self.word);
        let all = bytes(forms.len());
        let (mut at_once, mut by) = (n, 0);
        if matches!(forms[0], Form::PushReg(_)) {
            let sp = self.value(slot::RSP, RCX);
            self.a.r_rm(self.lea(), RCX, self.word, Rm::Mem(at(sp, -all)), 8);
            self.reach_or(apart, RCX, all as u8, WRITE);
            for o in ops {
                by -= i32::from(self.word);
                let src = self.value(o.src, RDX);
                self.a
                    .rm_r(store_code(self.word), Rm::Mem(at(RCX, all + by)), src, self.word);
                at_once += 1;
            }
        } else {
            let sp = self.stack();
            self.reach_or(apart, sp, all as u8, READ);
            for (form, o) in forms.iter().zip(ops) {
                let from = Rm::Mem(at(RCX, by));
                if matches!(form, Form::Return(_)) {
                    self.load(RSI, self.word, from);
                    self.has_return = true;
                    break;
                }
                match mapped(o.dst) {
                    Some(dst) => {
                        self.load(dst, self.word, from);
                        self.changes(o.dst);
                    }
                    None => {
                        self.load(RDX, self.word, from);
                        self.set(o.dst, self.word, RDX);
                    }
                }
                by += i32::from(self.word);
                at_once += 1;
            }
        }
        self.move_stack(by);
        self.a.bind(end);
        self.rows_of_stack.push((apart, end, n..n + forms.len()));
        at_once
    }

    /// Pushes the address of the next instruction.
    fn push_next(&mut self, n: usize, o: &Op) {
        self.push_place(n);
        self.instruction_pointer(RDX, i32::from(o.off) + i32::from(o.len));
        self.a.rm_r(store_code(self.word), Rm::Mem(at(RCX, 0)), RDX, self.word);
        self.move_stack(-i32::from(self.word));
    }

    /// A call to an address in a register.
    fn call_to(&mut self, n: usize, to: u8, o: &Op) {
        self.land(n, to);
        // The block's first op waits where a slot of an op's own is.
        self.a.rm_r(Code::Mov_rm64_r64, memory_of(slot::T0), RDX, 8);
        self.push_next(n, o);
        self.a.r_rm(Code::Mov_r64_rm64, RDX, 8, memory_of(slot::T0), 8);
        self.record_landing(n);
        self.a.rm_r(Code::Mov_rm64_r64, memory_of(slot::PAGE), RSI, 8);
        self.enter();
    }

    /// Records a branch whose target [`Emit::land`] has found: RDX and RSI are as they were.
    fn record_landing(&mut self, n: usize) {
        if !self.recorded {
            return;
        }
        self.a.emit(Instruction::with1(Code::Push_r64, Register::RDX));
        self.a.emit(Instruction::with1(Code::Push_r64, Register::RSI));
        self.record(n, true, None);
        self.a.emit(Instruction::with1(Code::Pop_r64, Register::RSI));
        self.a.emit(Instruction::with1(Code::Pop_r64, Register::RDX));
    }

    fn move_stack(&mut self, by: i32) {
        let sp = mapped(slot::RSP).unwrap_or(RDX);
        self.a.r_rm(self.lea(), sp, self.word, Rm::Mem(at(sp, by)), 8);
        self.changes(slot::RSP);
    }

    /// A branch on a condition of the host's flags: where it leads if that does not hold, and if it does.
    fn branch(&mut self, code: Code, n: usize, reach: Reach, [next, target]: [i32; 2]) {
        if reach == Reach::Near && !self.recorded {
            self.follow(code, n, true, target);
            self.follow(Code::Jmp_rel32_64, n, false, next);
            return;
        }
        let taken = self.a.label();
        self.a.branch(code, taken);
        self.go(n, reach, false, next);
        self.a.bind(taken);
        self.go(n, reach, true, target);
    }

    fn go(&mut self, n: usize, reach: Reach, taken: bool, rel: i32) {
        match reach {
            Reach::Near => {
                self.record(n, taken, Some(rel));
                self.follow(Code::Jmp_rel32_64, n, taken, rel);
            }
            Reach::Far => {
                self.check_far(n, taken, rel);
                self.record(n, taken, Some(rel));
                self.enter_far(n, taken, rel);
            }
        }
    }

    /// The address of one of the links behind the flow op.
    fn link(&self, n: usize, taken: bool) -> u64 {
        let link = self.first.wrapping_add(n + 1) as u64;
        link + if taken {
            offset_of!(Link, taken)
        } else {
            offset_of!(Link, next)
        } as u64
    }

    /// A branch to another block in the page, or in the one that slot PAGE names now, on a condition of the host's flags: as
    /// `Cpu::follow`.
    fn follow(&mut self, code: Code, n: usize, taken: bool, rel: i32) {
        let link = self.link(n, taken);
        let slow = self.a.label();
        let at = self.a.replaceable_branch(code, slow);
        self.branches.push((at, slow, link, rel));
    }

    /// The first half of `Cpu::follow_far`: the target is known, and its page is mapped where it was. Nothing has changed if not.
    fn check_far(&mut self, n: usize, taken: bool, rel: i32) {
        let gone = self.exit(n);
        let link = self.link(n, taken);
        self.instruction_pointer(RCX, rel);
        let a = &mut self.a;
        a.rm_r(Code::Mov_rm64_r64, Rm::Reg(RDX), RCX, 8);
        a.rm_i(Code::Shr_rm64_imm8, Rm::Reg(RDX), 8, 7);
        a.rm_i(Code::And_rm32_imm32, Rm::Reg(RDX), 4, TLB_MASK);
        a.r_rm(Code::Add_r64_rm64, RDX, 8, field(offset::TLB), 8);
        a.rm_i(Code::And_rm64_imm32, Rm::Reg(RCX), 8, -0x1000);
        a.rm_r(Code::Cmp_rm64_r64, Rm::Mem(at(RDX, EXEC)), RCX, 8);
        a.branch(Code::Jne_rel32_64, gone);
        a.r_rm(Code::Mov_r64_rm64, RDX, 8, Rm::Mem(at(RDX, HOST)), 8);
        a.constant(RCX, link);
        let page = (offset_of!(Link, taken_host) - offset_of!(Link, taken)) as i32;
        a.rm_r(Code::Cmp_rm64_r64, Rm::Mem(at(RCX, page)), RDX, 8);
        a.branch(Code::Jne_rel32_64, gone);
        a.rm_i(Code::Cmp_rm64_imm8, Rm::Mem(at(RCX, 0)), 8, 0);
        a.branch(Code::Je_rel32_64, gone);
    }

    /// The second half, which cannot fail.
    fn enter_far(&mut self, n: usize, taken: bool, rel: i32) {
        self.instruction_pointer(RCX, rel);
        let a = &mut self.a;
        a.rm_i(Code::And_rm64_imm32, Rm::Reg(RCX), 8, -0x1000);
        a.rm_r(Code::Mov_rm64_r64, memory_of(slot::PAGE), RCX, 8);
        let pages = rel & !0xfff;
        if self.runs && pages != 0 {
            // As `Cpu::set_page`.
            a.rm_i(Code::Sub_rm64_imm32, field(offset::RUN_TO), 8, pages);
        }
        self.follow(Code::Jmp_rel32_64, n, taken, rel);
    }

    /// As `Cpu::lookup`, of a register: the block's first op in RDX, its page in RSI. The translation leaves at op `n`, which has
    /// changed nothing, if it was not met lately.
    fn land(&mut self, n: usize, to: u8) {
        let gone = self.exit(n);
        let mode = self.block.key.mode as i32;
        let a = &mut self.a;
        if to != RSI {
            a.rm_r(Code::Mov_rm64_r64, Rm::Reg(RSI), to, 8);
        }
        if self.recorded {
            // Of an op's own slots the one that no branch uses.
            a.rm_r(Code::Mov_rm64_r64, memory_of(slot::T1), RSI, 8);
        }
        a.rm_r(Code::Mov_rm64_r64, Rm::Reg(RCX), RSI, 8);
        a.rm_i(Code::Shr_rm64_imm8, Rm::Reg(RCX), 8, 12);
        a.rm_r(Code::Xor_rm64_r64, Rm::Reg(RCX), RSI, 8);
        a.rm_i(Code::And_rm32_imm32, Rm::Reg(RCX), 4, JUMP_MASK);
        a.rm_i(Code::Shl_rm32_imm8, Rm::Reg(RCX), 4, 5);
        a.r_rm(Code::Add_r64_rm64, RCX, 8, field(offset::JUMPS), 8);
        let of = |offset: usize| Rm::Mem(at(RCX, offset as i32));
        a.rm_r(Code::Cmp_rm64_r64, of(offset_of!(Jump, linear)), RSI, 8);
        a.branch(Code::Jne_rel32_64, gone);
        a.rm_i(Code::Cmp_rm64_imm32, of(offset_of!(Jump, mode)), 8, mode);
        a.branch(Code::Jne_rel32_64, gone);
        a.rm_r(Code::Mov_rm64_r64, Rm::Reg(RDX), RSI, 8);
        a.rm_i(Code::Shr_rm64_imm8, Rm::Reg(RDX), 8, 7);
        a.rm_i(Code::And_rm32_imm32, Rm::Reg(RDX), 4, TLB_MASK);
        a.r_rm(Code::Add_r64_rm64, RDX, 8, field(offset::TLB), 8);
        a.rm_i(Code::And_rm64_imm32, Rm::Reg(RSI), 8, -0x1000);
        a.rm_r(Code::Cmp_rm64_r64, Rm::Mem(at(RDX, EXEC)), RSI, 8);
        a.branch(Code::Jne_rel32_64, gone);
        a.r_rm(Code::Mov_r64_rm64, RDX, 8, Rm::Mem(at(RDX, HOST)), 8);
        a.rm_r(Code::Cmp_rm64_r64, of(offset_of!(Jump, host)), RDX, 8);
        a.branch(Code::Jne_rel32_64, gone);
        a.r_rm(Code::Mov_r64_rm64, RDX, 8, of(offset_of!(Jump, ops)), 8);
    }

    /// As `Cpu::enter`, of the block whose first op is in RDX.
    fn enter(&mut self) {
        enter(&mut self.a, Some(self.stubs.interpret));
    }

    /// As `Cpu::enter` of this block.
    fn prologue(&mut self, first: &Op) {
        let start = self.a.here();
        let steps = i32::from(first.rem);
        self.a.rm_i(Code::Sub_rm64_imm32, field(offset::BUDGET), 8, steps);
        self.a.branch(Code::Js_rel32_64, self.over);
        debug_assert_eq!(self.a.here() - start, PROLOGUE as u64);
    }
}

/// What a record's last word begins with, in RDX: the privilege level, and the conditional branches that have waited for the record.
fn rest_with_run(a: &mut Asm) {
    a.r_rm(Code::Mov_r64_rm64, RDX, 8, field(offset::RUN), 8);
    let shift = 8 * (offset_of!(BranchRecord, run) - offset_of!(BranchRecord, flow));
    a.rm_i(Code::Shl_rm64_imm8, Rm::Reg(RDX), 8, shift as i32);
    a.r_rm(Code::Add_r64_rm64, RDX, 8, field(offset::RECORD_REST + 8), 8);
    a.rm_i(Code::Mov_rm64_imm32, field(offset::RUN), 8, 1);
}

/// The conditional branches that wait become a record, as in `Cpu::pack`, and the caller goes on.
pub(super) fn end_run(a: &mut Asm) {
    let of = |offset: usize| Rm::Mem(at(RCX, offset as i32));
    a.r_rm(Code::Mov_r64_rm64, RCX, 8, field(offset::RECORD_AT), 8);
    a.rm_i(Code::Mov_rm64_imm32, of(offset_of!(BranchRecord, from)), 8, 0);
    a.r_rm(Code::Mov_r64_rm64, RDX, 8, memory_of(slot::PAGE), 8);
    a.r_rm(Code::Add_r64_rm64, RDX, 8, field(offset::RUN_TO), 8);
    a.r_rm(Code::And_r64_rm64, RDX, 8, field(offset::IP_MASK), 8);
    a.rm_r(Code::Mov_rm64_r64, of(offset_of!(BranchRecord, to)), RDX, 8);
    a.r_rm(Code::Mov_r64_rm64, RDX, 8, field(offset::RECORD_REST), 8);
    a.r_rm(Code::Sub_r64_rm64, RDX, 8, field(offset::BUDGET), 8);
    a.rm_r(Code::Mov_rm64_r64, of(offset_of!(BranchRecord, step)), RDX, 8);
    rest_with_run(a);
    a.rm_i(Code::Add_rm64_imm8, Rm::Reg(RDX), 8, i32::from(BranchRecord::RUN));
    a.rm_r(Code::Mov_rm64_r64, of(offset_of!(BranchRecord, flow)), RDX, 8);
    a.r_rm(Code::Mov_r64_rm64, RDX, 8, field(offset::RUN_NEXT), 8);
    a.rm_r(Code::Mov_rm64_r64, field(offset::RUN_LIMIT), RDX, 8);
    a.rm_i(Code::Add_rm64_imm8, Rm::Reg(RCX), 8, size_of::<BranchRecord>() as i32);
    a.rm_r(Code::Mov_rm64_r64, field(offset::RECORD_AT), RCX, 8);
    a.r_rm(Code::Cmp_r64_rm64, RCX, 8, field(offset::RECORD_END), 8);
    a.op0(Code::Retnq);
}

/// Goes on with the block whose first op is in RDX. Without its translation the code at an address does that, or what follows.
pub(super) fn enter(a: &mut Asm, interpret: Option<u64>) {
    let here = a.label();
    a.r_rm(Code::Mov_r64_rm64, RCX, 8, Rm::Mem(at(RDX, native_of())), 8);
    a.rm_r(Code::Test_rm64_r64, Rm::Reg(RCX), RCX, 8);
    match interpret {
        Some(interpret) => a.branch_to(Code::Je_rel32_64, interpret),
        None => a.branch(Code::Je_rel32_64, here),
    }
    a.rm(Code::Jmp_rm64, Rm::Reg(RCX), 8);
    a.bind(here);
}

/// The block whose first op is in RDX is interpreted.
pub(super) fn interpret(a: &mut Asm, budget: u64, leave: u64) {
    let rem = Rm::Mem(at(RDX, offset_of!(Op, rem) as i32));
    a.r_rm(Code::Movzx_r32_rm8, RCX, 4, rem, 1);
    a.rm_r(Code::Sub_rm64_r64, field(offset::BUDGET), RCX, 8);
    a.branch_to(Code::Js_rel32_64, budget);
    a.branch_to(Code::Jmp_rel32_64, leave);
}

/// The chain ends: the run loop is to find the block that is so far from the page as RCX says, for the link in RDX.
pub(super) fn resolve(a: &mut Asm, end: u64) {
    a.rm_r(Code::Mov_rm64_r64, field(offset::LINK), RDX, 8);
    a.r_rm(Code::Add_r64_rm64, RCX, 8, memory_of(slot::PAGE), 8);
    a.rm_r(Code::Mov_rm64_r64, field(offset::RIP), RCX, 8);
    a.rm_i(Code::Mov_rm8_imm8, field(offset::STOP), 1, Reason::Resolve as i32);
    a.branch_to(Code::Jmp_rel32_64, end);
}
