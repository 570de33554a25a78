//! Random cases: an instruction form with operands, prefixes, registers and memory.
//!
//! # Theory
//! Operands are drawn first, then the registers that form addresses are solved for, so that each access lands where it was
//! meant to: in the middle of a page, over the edge of one, in a hole, on a read-only page, or at a non-canonical address.
//!
//! # Practice
//! What a case may touch is limited to the arena, and is checked again on the encoded instruction with iced's own account of
//! its accesses, because the host executes it in the test's process.

mod address;
mod memory;

pub use address::has_wide_indices;

use iced_x86::{
    Decoder, DecoderOptions, Encoder, EncodingKind, Instruction, InstructionInfoFactory, Mnemonic, OpCodeOperandKind,
    OpKind, Register,
};

use crate::arena::{self, CODE, DATA, PAGE, READ_ONLY, STACK};
use crate::forms::{Family, Form, family, is_gather};
use crate::rng::Rng;
use crate::state::{Fpu, State, USER_DS, USER32_CS, USER64_CS, base_of, flag, ldt};

pub const RAX: usize = 0;
pub const RCX: usize = 1;
pub const RDX: usize = 2;
pub const RBX: usize = 3;
pub const RSP: usize = 4;
pub const RBP: usize = 5;
pub const RSI: usize = 6;
pub const RDI: usize = 7;

/// One instruction and everything it starts from.
#[derive(Clone, Debug)]
pub struct Case {
    /// The instruction as decoded from `bytes`.
    pub instruction: Instruction,
    /// Its encoding, at `state.linear_rip()`.
    pub bytes: Vec<u8>,
    /// Registers.
    pub state: State,
    /// Memory that differs from what the case before left.
    pub pokes: Vec<(u64, Vec<u8>)>,
}

/// Where the generator may go beyond what every host has.
#[derive(Clone, Copy, Debug)]
pub struct Abilities {
    /// FS.base and GS.base can be set.
    pub bases: bool,
    /// There are upper halves of YMM registers.
    pub avx: bool,
    /// There are ZMM registers and opmasks.
    pub wide: bool,
}

/// Draws cases.
pub struct Generator {
    /// The randomness, which is all that a case depends on.
    pub rng: Rng,
    abilities: Abilities,
    info: InstructionInfoFactory,
}

/// A case under construction.
struct Draft {
    bits: u32,
    instruction: Instruction,
    state: State,
    /// Registers whose value is already decided.
    fixed: u16,
    pokes: Vec<(u64, Vec<u8>)>,
    /// Legacy prefixes to put in front of the encoding.
    prefixes: Vec<u8>,
    /// Bytes that the encoding will take, at most, for branch targets.
    keep_clear: u64,
}

impl Draft {
    fn fix(&mut self, register: usize, value: u64) {
        self.state.gpr[register] = value;
        self.fixed |= 1 << register;
    }

    fn is_fixed(&self, register: usize) -> bool {
        self.fixed >> register & 1 != 0
    }

    fn poke(&mut self, address: u64, bytes: &[u8]) {
        self.pokes.push((address, bytes.to_vec()));
    }
}

/// The register that holds part `register` of a 64-bit register, as an index into [`State::gpr`].
pub fn gpr_index(register: Register) -> usize {
    register.full_register().number()
}

impl Generator {
    /// The cases that belong to `seed`.
    pub fn new(seed: u64, abilities: Abilities) -> Generator {
        Generator {
            rng: Rng::new(seed),
            abilities,
            info: InstructionInfoFactory::new(),
        }
    }

    /// A case of `form`; `None` if what was drawn cannot be encoded or could leave the arena. Try again.
    pub fn case(&mut self, form: Form) -> Option<Case> {
        let mut draft = self.start(form);
        self.implicit(&mut draft)?;
        self.operands(&mut draft)?;
        self.finish(draft)
    }

    /// Random registers, and a place for the instruction.
    fn start(&mut self, form: Form) -> Draft {
        let rng = &mut self.rng;
        let at = match rng.below(100) {
            // Over the border between the two pages, and up to the very end.
            0..3 => CODE + PAGE - 1 - rng.below(14),
            3 => CODE + 2 * PAGE - 1 - rng.below(14),
            _ => CODE + 0x180 + rng.below(0x1d00),
        };
        let mut state = State::new(at);
        for value in &mut state.gpr {
            *value = rng.value();
        }
        match form.bits {
            64 => {}
            32 => state.cs = USER32_CS,
            _ => {
                state.cs = ldt::CODE16;
                state.rip = at - CODE;
                state.ss = if rng.percent(80) { ldt::STACK16 } else { ldt::STACK32 };
                state.es_ds = [ldt::DATA32; 2];
                for selector in &mut state.es_ds {
                    if rng.percent(10) {
                        *selector = rng.pick(&[ldt::READ_ONLY, ldt::EXPAND_DOWN, ldt::STACK16, ldt::STACK32]);
                    }
                }
            }
        }
        if form.bits != 64 {
            state.gpr[8..].fill(0);
        }
        state.rflags |= rng.next() & flag::STATUS;
        for (bit, percent) in [(flag::DF, 8), (flag::TF, 3), (flag::ID, 8), (flag::NT, 2)] {
            if rng.percent(percent) {
                state.rflags |= bit;
            }
        }
        if self.abilities.bases && form.bits == 64 {
            for base in [&mut state.fs_base, &mut state.gs_base] {
                *base = match rng.below(3) {
                    0 => arena::BASE - rng.below(0x10000),
                    1 => (rng.next() as i64 >> 17) as u64,
                    _ => DATA + rng.below(0x100),
                };
            }
        }
        state.fpu = self.fpu(family(form.code));
        let mut instruction = Instruction::default();
        instruction.set_code(form.code);
        Draft {
            bits: form.bits,
            instruction,
            state,
            fixed: 0,
            pokes: Vec::new(),
            prefixes: Vec::new(),
            keep_clear: 15,
        }
    }

    /// x87 and SSE registers; mostly with exceptions masked.
    pub fn fpu(&mut self, family: Family) -> Fpu {
        let rng = &mut self.rng;
        let mut fpu = Fpu::INIT;
        let floating = matches!(
            family,
            Family::Sse
                | Family::Sse2
                | Family::Sse3
                | Family::Sse41
                | Family::X87
                | Family::Mmx
                | Family::Xsave
                | Family::Flow
                | Family::Avx
                | Family::Avx2
                | Family::Fma
                | Family::F16c
                | Family::Xstate
                | Family::Avx512f
                | Family::Avx512dq
                | Family::Avx512more
                | Family::Avx512half
        );
        if floating || rng.percent(10) {
            for xmm in &mut fpu.xmm {
                *xmm = rng.vector();
            }
            for st in &mut fpu.st {
                *st = rng.f80();
            }
            let masks = if rng.percent(85) {
                0x3f
            } else {
                rng.next() as u32 & 0x3f
            };
            fpu.mxcsr = masks << 7 | (rng.next() as u32 & 0x6000);
            if rng.percent(25) {
                fpu.mxcsr |= rng.pick(&[0x40, 0x8000, 0x8040]);
            }
            if rng.percent(30) {
                fpu.mxcsr |= rng.next() as u32 & 0x3f;
            }
            let masks = if rng.percent(85) {
                0x3f
            } else {
                rng.next() as u16 & 0x3f
            };
            fpu.fcw = 0x40 | masks | rng.pick(&[0x000_u16, 0x200, 0x300, 0x300]) | (rng.next() as u16 & 0xc00);
            fpu.fsw = (rng.next() as u16) & 0x7f00;
            if rng.percent(25) {
                fpu.fsw |= rng.next() as u16 & 0x7f & (masks | if rng.percent(20) { 0x7f } else { 0x40 });
            }
            if fpu.fsw & 0x3f & !masks != 0 {
                fpu.fsw |= 0x8080;
            }
            fpu.ftw = match rng.below(10) {
                0 => 0,
                1..5 => rng.next() as u8,
                _ => 0xff,
            };
        } else {
            for xmm in &mut fpu.xmm {
                *xmm = rng.vector();
            }
        }
        if self.abilities.avx && rng.percent(90) {
            for half in &mut fpu.ymm_hi {
                *half = rng.vector();
            }
        }
        if self.abilities.wide && rng.percent(95) {
            let rest = fpu.wide.zmm_hi.iter_mut().flatten();
            for quarter in rest.chain(fpu.wide.zmm.iter_mut().flatten()) {
                *quarter = rng.vector();
            }
        }
        if self.abilities.wide {
            for k in &mut fpu.wide.k {
                *k = match rng.below(8) {
                    0 => 0,
                    1 => rng.next() & rng.next() & rng.next(),
                    2 => 1 << rng.below(64),
                    3 => u64::MAX,
                    _ => rng.next(),
                };
            }
        }
        fpu
    }

    /// An address for an access of `size` bytes that should be aligned to `align`.
    fn target(&mut self, bits: u32, size: u64, align: u64) -> u64 {
        let rng = &mut self.rng;
        let size = size.max(1);
        let end = DATA + 2 * PAGE;
        match rng.below(100) {
            0..70 => {
                let at = DATA + 0x80 + rng.below(2 * PAGE - 0x100 - size);
                if rng.percent(80) { at & !(align.max(1) - 1) } else { at }
            }
            70..76 => DATA + PAGE - rng.below(size + 1),
            76..81 => READ_ONLY + 0x80 + (rng.below(PAGE - 0x100 - size) & !(align.max(1) - 1)),
            81..83 => READ_ONLY + PAGE - rng.below(size + 1),
            83..85 => READ_ONLY + PAGE + (rng.below(PAGE - size) & !(align.max(1) - 1)),
            85..90 => end - rng.below(size + 1),
            90..92 => DATA - rng.below(size + 1),
            92..95 => end + (rng.below(0x800) & !(align.max(1) - 1)),
            95..98 => STACK + (rng.below(PAGE - size) & !(align.max(1) - 1)),
            _ if bits == 64 => 0x4141_4141_4141_4140 + rng.below(64),
            _ => DATA + 0x100,
        }
    }

    /// A place in the code area that is not the instruction itself, or nowhere; as an offset in a segment.
    fn branch_target(&mut self, draft: &Draft, near: bool) -> u64 {
        let base = if draft.bits == 64 { 0 } else { base_of(draft.state.cs) };
        self.linear_target(draft, near).wrapping_sub(base)
    }

    fn linear_target(&mut self, draft: &Draft, near: bool) -> u64 {
        let at = draft.state.linear_rip();
        loop {
            let target = match self.rng.below(100) {
                0..4 if !near => CODE + 2 * PAGE + self.rng.below(64),
                4..6 if !near => DATA + self.rng.below(64),
                6..8 if !near && draft.bits == 64 => 0x4141_4141_4141_4140,
                8..40 if !near => CODE + self.rng.below(2 * PAGE),
                _ => at.wrapping_add(self.rng.below(240)).wrapping_sub(110),
            };
            if target < CODE - 0x100 || !(at.wrapping_sub(15)..at + draft.keep_clear).contains(&target) {
                return target;
            }
        }
    }

    /// Registers and memory that the form uses without naming them.
    fn implicit(&mut self, draft: &mut Draft) -> Option<()> {
        use Mnemonic as M;
        let code = draft.instruction.code();
        let mnemonic = code.mnemonic();
        let op = code.op_code();
        let bits = draft.bits;
        let slot = u64::from(bits / 8);
        let wide = |address: u64, rng: &mut Rng| match bits {
            64 => address,
            32 => address | rng.next() << 32,
            _ => address & 0xffff | rng.next() << 16,
        };

        let mut probe = Instruction::default();
        probe.set_code(code);
        if probe.is_stack_instruction() || matches!(mnemonic, M::Iret | M::Iretd | M::Iretq | M::Retf) {
            let mut rsp = match self.rng.below(100) {
                0..3 => STACK + self.rng.below(24),
                3..6 => STACK + PAGE - self.rng.below(24),
                6 if bits == 64 => 0x4141_4141_4141_4148,
                _ => STACK + 0x400 + self.rng.below(0x800),
            };
            if self.rng.percent(75) {
                rsp &= !7;
            }
            let offset = rsp.wrapping_sub(if bits == 64 { 0 } else { base_of(draft.state.ss) });
            let mut rsp = wide(offset, &mut self.rng);
            if bits == 16 && draft.state.ss == ldt::STACK32 {
                rsp = offset;
            }
            draft.fix(RSP, rsp);
        }
        let rsp = match bits {
            64 => draft.state.gpr[RSP],
            32 => draft.state.gpr[RSP] & 0xffff_ffff,
            _ => base_of(draft.state.ss) + (draft.state.gpr[RSP] & 0xffff),
        };
        match mnemonic {
            M::Ret => {
                let target = self.branch_target(draft, false);
                draft.poke(rsp, &target.to_le_bytes());
            }
            M::Popf | M::Popfd | M::Popfq => {
                let mut flags = self.rng.next();
                if self.rng.percent(90) {
                    flags &= !flag::TF;
                }
                draft.poke(rsp, &flags.to_le_bytes());
            }
            M::Iret | M::Iretd | M::Iretq | M::Retf => {
                let size = u64::from(op.operand_size()) / 8;
                let size = if size == 0 { slot } else { size };
                let target = self.linear_target(draft, false);
                let good = code_selectors(bits);
                let cs = if self.rng.percent(85) {
                    self.rng.pick(good)
                } else {
                    self.selector()
                };
                let target = target.wrapping_sub(base_of(cs));
                let ss = if self.rng.percent(85) { USER_DS } else { self.selector() };
                let flags = self.rng.next() & !(flag::TF | 1 << 17);
                let fresh = STACK + 0x100 + self.rng.below(0xc00);
                for (i, word) in [target, u64::from(cs), flags, fresh, u64::from(ss)]
                    .into_iter()
                    .enumerate()
                {
                    // RETF takes its stack pointer and segment only when it changes rings, which it cannot here.
                    if mnemonic == M::Retf && i > 1 {
                        break;
                    }
                    draft.poke(rsp.wrapping_add(size * i as u64), &word.to_le_bytes()[..size as usize]);
                }
            }
            M::Pop if op.op_kinds().iter().any(is_segment) => {
                use OpCodeOperandKind as K;
                let selector = match op.op_kinds() {
                    [K::fs | K::gs] => self.selector_for(Register::FS),
                    [K::ss] if self.rng.percent(60) => draft.state.ss,
                    _ => self.selector(),
                };
                draft.poke(rsp, &selector.to_le_bytes());
            }
            M::Leave => {
                let rbp = self.stack_or_edge(draft);
                draft.fix(RBP, rbp);
            }
            M::Enter => {
                let rbp = self.stack_or_edge(draft);
                draft.fix(RBP, rbp);
            }
            M::Xlatb => {
                let target = self.target(bits, 1, 1);
                let al = draft.state.gpr[RAX] & 0xff;
                let rax = draft.state.gpr[RAX];
                draft.fix(RAX, rax);
                let mut bytes = [0; 64];
                self.rng.fill(&mut bytes);
                draft.poke(target.wrapping_sub(16), &bytes);
                let base = if bits == 64 { 0 } else { base_of(draft.state.es_ds[1]) };
                let rbx = wide(target.wrapping_sub(base).wrapping_sub(al), &mut self.rng);
                draft.fix(RBX, rbx);
            }
            M::Div | M::Idiv => {
                let rdx = match self.rng.below(4) {
                    0 => 0,
                    1 => (draft.state.gpr[RAX] as i64 >> 63) as u64,
                    2 => self.rng.below(3),
                    _ => self.rng.value(),
                };
                draft.fix(RDX, rdx);
                let mut rax = self.rng.value();
                match self.rng.below(3) {
                    0 => rax &= !0xff00,
                    1 => rax = rax as i8 as i16 as u16 as u64 | rax & !0xffff,
                    _ => {}
                }
                draft.fix(RAX, rax);
            }
            M::Shl | M::Sal | M::Shr | M::Sar | M::Rol | M::Ror | M::Rcl | M::Rcr | M::Shld | M::Shrd => {
                let count = if self.rng.percent(80) {
                    self.rng.below(70)
                } else {
                    self.rng.next() & 0xff
                };
                let rcx = draft.state.gpr[RCX] & !0xff | count;
                draft.fix(RCX, rcx);
            }
            M::Pcmpestrm | M::Pcmpestri | M::Pcmpestrm64 | M::Pcmpestri64 => {
                for register in [RAX, RDX] {
                    if self.rng.percent(80) {
                        let mut length = self.rng.below(40).wrapping_sub(20);
                        if self.rng.percent(30) {
                            length = length & 0xffff_ffff | self.rng.next() << 32;
                        }
                        draft.fix(register, length);
                    }
                }
            }
            M::Cmpxchg => {
                let rax = draft.state.gpr[RAX];
                draft.fix(RAX, rax);
            }
            M::Xsave | M::Xsave64 | M::Xsaveopt | M::Xsaveopt64 | M::Xsavec | M::Xsavec64 | M::Xrstor | M::Xrstor64 => {
                // x87, SSE and AVX as they come, and bits that no XCR0 has: what else there is depends on the host's.
                let rax = self.rng.below(8) | self.rng.next() & (3 << 11 | !0 << 30);
                draft.fix(RAX, rax);
                let rdx = draft.state.gpr[RDX];
                draft.fix(RDX, rdx);
            }
            _ => {}
        }
        if code.is_loop() || code.is_loopcc() || code.is_jcx_short() {
            let count = self.rng.below(3);
            if self.rng.percent(70) {
                let rcx = match self.rng.below(3) {
                    0 => count,
                    1 => count | self.rng.next() << 32,
                    _ => count | self.rng.next() << 16,
                };
                draft.fix(RCX, rcx);
            }
        }
        Some(())
    }

    fn stack_or_edge(&mut self, draft: &Draft) -> u64 {
        let bits = draft.bits;
        let address = match self.rng.below(20) {
            0 => STACK + self.rng.below(16),
            1 => STACK + PAGE - self.rng.below(16),
            2 => STACK - self.rng.below(300),
            _ => STACK + 0x400 + (self.rng.below(0x800) & !7),
        };
        if bits == 32 {
            address | self.rng.next() << 32
        } else {
            address
        }
    }

    /// A selector: null, user, kernel's, out of the table, in no table.
    fn selector(&mut self) -> u16 {
        self.rng.pick(&[
            0,
            1,
            2,
            3,
            USER_DS,
            USER_DS,
            USER_DS,
            0x28,
            USER32_CS,
            USER64_CS,
            0x10,
            0x18,
            0x13,
            0xfff8,
            0x8003,
            0x47,
            ldt::DATA32,
            ldt::READ_ONLY,
            ldt::STACK16,
            ldt::EXPAND_DOWN,
            ldt::NOT_PRESENT,
            ldt::DATA32 & !3,
        ])
    }

    /// Draws every operand that the form has.
    fn operands(&mut self, draft: &mut Draft) -> Option<()> {
        use OpCodeOperandKind as K;
        let code = draft.instruction.code();
        let op = code.op_code();
        let kinds = op.op_kinds().to_vec();
        let mut memory = None;
        let mut immediates = 0;
        for (i, kind) in kinds.iter().enumerate() {
            let i = i as u32;
            let draft = &mut *draft;
            let wide = draft.bits == 64;
            let bits16 = draft.bits == 16;
            match kind {
                K::r8_or_mem
                | K::r16_or_mem
                | K::r32_or_mem
                | K::r64_or_mem
                | K::mm_or_mem
                | K::xmm_or_mem
                | K::ymm_or_mem
                | K::zmm_or_mem
                | K::k_or_mem
                    if self.rng.percent(55) =>
                {
                    memory = Some(i)
                }
                K::mem
                | K::mem_offs
                | K::mem_vsib32x
                | K::mem_vsib64x
                | K::mem_vsib32y
                | K::mem_vsib64y
                | K::mem_vsib32z
                | K::mem_vsib64z => {
                    memory = Some(i);
                }
                K::r8_or_mem | K::r8_reg | K::r8_opcode => {
                    let register = self.rng.below(if wide { 20 } else { 8 }) as u32;
                    draft.instruction.set_op_register(i, at(Register::AL, register));
                }
                K::r16_or_mem | K::r16_reg | K::r16_reg_mem | K::r16_rm | K::r16_opcode => draft
                    .instruction
                    .set_op_register(i, at(Register::AX, self.register(wide))),
                K::r32_or_mem | K::r32_reg | K::r32_reg_mem | K::r32_rm | K::r32_opcode | K::r32_vvvv => draft
                    .instruction
                    .set_op_register(i, at(Register::EAX, self.register(wide))),
                K::r64_or_mem | K::r64_reg | K::r64_reg_mem | K::r64_rm | K::r64_opcode | K::r64_vvvv => draft
                    .instruction
                    .set_op_register(i, at(Register::RAX, self.register(wide))),
                K::mm_or_mem | K::mm_reg | K::mm_rm => draft
                    .instruction
                    .set_op_register(i, at(Register::MM0, self.rng.below(8) as u32)),
                K::xmm_or_mem | K::xmm_reg | K::xmm_rm | K::xmm_vvvv | K::xmm_is4 => draft
                    .instruction
                    .set_op_register(i, at(Register::XMM0, self.vector_register(wide, code))),
                K::ymm_or_mem | K::ymm_reg | K::ymm_rm | K::ymm_vvvv | K::ymm_is4 => draft
                    .instruction
                    .set_op_register(i, at(Register::YMM0, self.vector_register(wide, code))),
                K::zmm_or_mem | K::zmm_reg | K::zmm_rm | K::zmm_vvvv => draft
                    .instruction
                    .set_op_register(i, at(Register::ZMM0, self.vector_register(wide, code))),
                K::k_or_mem | K::k_reg | K::k_rm | K::k_vvvv => draft
                    .instruction
                    .set_op_register(i, at(Register::K0, self.rng.below(8) as u32)),
                K::seg_reg => {
                    // MOV to CS is #UD and has no encoding in iced's eyes.
                    let registers = [
                        Register::ES,
                        Register::SS,
                        Register::DS,
                        Register::FS,
                        Register::GS,
                        Register::CS,
                    ];
                    let n = if i == 0 { 5 } else { 6 };
                    let n = self.rng.below(n) as usize;
                    draft.instruction.set_op_register(i, registers[n]);
                }
                K::cr_reg => draft
                    .instruction
                    .set_op_register(i, at(Register::CR0, self.rng.pick(&[0, 2, 3, 4, 8]))),
                K::dr_reg => draft
                    .instruction
                    .set_op_register(i, at(Register::DR0, self.rng.below(8) as u32)),
                K::es => draft.instruction.set_op_register(i, Register::ES),
                K::cs => draft.instruction.set_op_register(i, Register::CS),
                K::ss => draft.instruction.set_op_register(i, Register::SS),
                K::ds => draft.instruction.set_op_register(i, Register::DS),
                K::fs => draft.instruction.set_op_register(i, Register::FS),
                K::gs => draft.instruction.set_op_register(i, Register::GS),
                K::al => draft.instruction.set_op_register(i, Register::AL),
                K::cl => draft.instruction.set_op_register(i, Register::CL),
                K::ax => draft.instruction.set_op_register(i, Register::AX),
                K::dx => draft.instruction.set_op_register(i, Register::DX),
                K::eax => draft.instruction.set_op_register(i, Register::EAX),
                K::rax => draft.instruction.set_op_register(i, Register::RAX),
                K::st0 => draft.instruction.set_op_register(i, Register::ST0),
                K::sti_opcode => draft
                    .instruction
                    .set_op_register(i, at(Register::ST0, self.rng.below(8) as u32)),
                K::imm8 => {
                    let mut value = self.rng.value() as u8;
                    if code.mnemonic() == Mnemonic::Int {
                        // INT 80H is a system call.
                        value = if value == 0x80 { 0x81 } else { value };
                    }
                    if immediates == 0 {
                        draft.instruction.set_op_kind(i, OpKind::Immediate8);
                        draft.instruction.set_immediate8(value);
                    } else {
                        draft.instruction.set_op_kind(i, OpKind::Immediate8_2nd);
                        draft
                            .instruction
                            .set_immediate8_2nd(if self.rng.percent(50) { value & 3 } else { value });
                    }
                    immediates += 1;
                }
                K::imm8_const_1 => {
                    draft.instruction.set_op_kind(i, OpKind::Immediate8);
                    draft.instruction.set_immediate8(1);
                }
                K::imm8sex16 => {
                    draft.instruction.set_op_kind(i, OpKind::Immediate8to16);
                    draft.instruction.set_immediate8to16(i16::from(self.rng.value() as i8));
                }
                K::imm8sex32 => {
                    draft.instruction.set_op_kind(i, OpKind::Immediate8to32);
                    draft.instruction.set_immediate8to32(i32::from(self.rng.value() as i8));
                }
                K::imm8sex64 => {
                    draft.instruction.set_op_kind(i, OpKind::Immediate8to64);
                    draft.instruction.set_immediate8to64(i64::from(self.rng.value() as i8));
                }
                K::imm16 => {
                    let mut value = self.rng.value() as u16;
                    let mostly = matches!(code.mnemonic(), Mnemonic::Enter | Mnemonic::Ret) && self.rng.percent(80);
                    if mostly || code.mnemonic() == Mnemonic::Retf {
                        value &= 0x1ff;
                    }
                    draft.instruction.set_op_kind(i, OpKind::Immediate16);
                    draft.instruction.set_immediate16(value);
                    immediates += 1;
                }
                K::imm32 => {
                    draft.instruction.set_op_kind(i, OpKind::Immediate32);
                    draft.instruction.set_immediate32(self.rng.value() as u32);
                }
                K::imm32sex64 => {
                    draft.instruction.set_op_kind(i, OpKind::Immediate32to64);
                    draft
                        .instruction
                        .set_immediate32to64(i64::from(self.rng.value() as i32));
                }
                K::imm64 => {
                    draft.instruction.set_op_kind(i, OpKind::Immediate64);
                    draft.instruction.set_immediate64(self.rng.value());
                }
                K::br64_1 => {
                    let target = self.branch_target(draft, true);
                    draft.instruction.set_op_kind(i, OpKind::NearBranch64);
                    draft.instruction.set_near_branch64(target);
                }
                K::br64_4 => {
                    let target = self.branch_target(draft, false);
                    draft.instruction.set_op_kind(i, OpKind::NearBranch64);
                    draft.instruction.set_near_branch64(target);
                }
                K::br32_1 | K::br32_4 => {
                    let target = self.branch_target(draft, *kind == K::br32_1);
                    draft.instruction.set_op_kind(i, OpKind::NearBranch32);
                    draft.instruction.set_near_branch32(target as u32);
                }
                K::br16_1 | K::br16_2 => {
                    // The target loses its upper half, so that the fetch faults in the first 64 KiB.
                    let target = if bits16 {
                        self.branch_target(draft, true)
                    } else {
                        draft.state.rip.wrapping_add(self.rng.below(200)).wrapping_sub(80)
                    };
                    draft.instruction.set_op_kind(i, OpKind::NearBranch16);
                    draft.instruction.set_near_branch16(target as u16);
                }
                K::farbr2_2 | K::farbr4_2 => {
                    let target = self.linear_target(draft, false);
                    let cs = if self.rng.percent(80) {
                        self.rng.pick(code_selectors(draft.bits))
                    } else {
                        self.selector()
                    };
                    let target = target.wrapping_sub(base_of(cs));
                    if *kind == K::farbr2_2 {
                        draft.instruction.set_op_kind(i, OpKind::FarBranch16);
                        draft.instruction.set_far_branch16(target as u16);
                    } else {
                        draft.instruction.set_op_kind(i, OpKind::FarBranch32);
                        draft.instruction.set_far_branch32(target as u32);
                    }
                    draft.instruction.set_far_branch_selector(cs);
                }
                K::seg_rSI | K::es_rDI | K::seg_rDI | K::seg_rBX_al => {}
                _ => return None,
            }
        }
        self.evex(draft, memory);
        self.operand_values(draft);
        match memory {
            Some(operand) if is_gather(code) && code.encoding() == EncodingKind::EVEX => {
                self.elements_operand(draft, operand)?
            }
            Some(operand) if is_gather(code) => self.gather_operand(draft, operand)?,
            Some(operand) => self.memory_operand(draft, operand)?,
            None => {}
        }
        if kinds
            .iter()
            .any(|kind| matches!(kind, K::seg_rSI | K::es_rDI | K::seg_rDI | K::seg_rBX_al))
        {
            self.string_operands(draft, &kinds);
        }
        self.prefixes(draft, memory.is_some());
        Some(())
    }

    fn register(&mut self, wide: bool) -> u32 {
        self.rng.below(if wide { 16 } else { 8 }) as u32
    }

    /// A vector register; with EVEX there are 32 in 64-bit mode.
    fn vector_register(&mut self, wide: bool, code: iced_x86::Code) -> u32 {
        let high = wide && code.encoding() == EncodingKind::EVEX && self.rng.percent(50);
        self.register(wide) + if high { 16 } else { 0 }
    }

    /// Writemask, zeroing, broadcast, rounding and the suppression of exceptions.
    fn evex(&mut self, draft: &mut Draft, memory: Option<u32>) {
        let op = draft.instruction.code().op_code();
        if op.encoding() != EncodingKind::EVEX {
            return;
        }
        let instruction = &mut draft.instruction;
        if op.can_use_op_mask_register() && (op.require_op_mask_register() || self.rng.percent(70)) {
            instruction.set_op_mask(at(Register::K1, self.rng.below(7) as u32));
            if op.can_use_zeroing_masking() && memory != Some(0) && self.rng.percent(40) {
                instruction.set_zeroing_masking(true);
            }
        }
        if memory.is_some() {
            if op.can_broadcast() && self.rng.percent(35) {
                instruction.set_is_broadcast(true);
            }
        } else if op.can_use_rounding_control() && self.rng.percent(40) {
            use iced_x86::RoundingControl as R;
            instruction.set_rounding_control(self.rng.pick(&[
                R::RoundToNearest,
                R::RoundDown,
                R::RoundUp,
                R::RoundTowardZero,
            ]));
        } else if op.can_suppress_all_exceptions() && !op.can_use_rounding_control() && self.rng.percent(40) {
            instruction.set_suppress_all_exceptions(true);
        }
    }

    /// Values that register operands should have for the instruction to be interesting.
    fn operand_values(&mut self, draft: &mut Draft) {
        use Mnemonic as M;
        let instruction = draft.instruction;
        let mnemonic = instruction.mnemonic();
        let code = instruction.code();
        match mnemonic {
            // The bit offset reaches memory up to 2^63 bits away: keep it near.
            M::Bt | M::Bts | M::Btr | M::Btc
                if instruction.op_kind(1) == OpKind::Register && instruction.op0_register() == Register::None =>
            {
                let register = instruction.op1_register();
                let offset = self.rng.below(800).wrapping_sub(400);
                let value = match register.size() {
                    2 => offset & 0xffff | self.rng.next() << 16,
                    4 => offset & 0xffff_ffff | self.rng.next() << 32,
                    _ => offset,
                };
                draft.fix(gpr_index(register), value);
            }
            M::Jmp | M::Call
                if code.op_code().op_kinds().len() == 1 && instruction.op0_register() != Register::None =>
            {
                let target = self.branch_target(draft, false);
                let register = gpr_index(instruction.op0_register());
                if !draft.is_fixed(register) {
                    draft.fix(register, target);
                }
            }
            M::Mov
                if instruction.op0_register().is_segment_register() && instruction.op1_register() != Register::None =>
            {
                let selector = self.selector_for(instruction.op0_register());
                let value = self.rng.next() & !0xffff | u64::from(selector);
                draft.fix(gpr_index(instruction.op1_register()), value);
            }
            _ => {}
        }
    }

    /// A selector to load: FS and GS take no null selector, which clears the base on Intel only.
    fn selector_for(&mut self, register: Register) -> u16 {
        let selector = self.selector();
        if matches!(register, Register::FS | Register::GS) && selector < 4 {
            USER_DS
        } else {
            selector
        }
    }

    /// LOCK where it is allowed and, rarely, where it is not; prefixes that do nothing.
    fn prefixes(&mut self, draft: &mut Draft, memory: bool) {
        let code = draft.instruction.code();
        if code.op_code().can_use_lock_prefix() && memory && self.rng.percent(25) {
            draft.instruction.set_has_lock_prefix(true);
        } else if self.rng.percent(1) && !code.is_privileged() {
            // Not with MOV CR0, which AMD takes for MOV CR8 then.
            draft.prefixes.push(0xf0);
        }
        // What may not stand before a VEX prefix: #UD.
        if matches!(code.encoding(), EncodingKind::VEX | EncodingKind::EVEX) && self.rng.percent(4) {
            let rex = 0x40 | self.rng.below(16) as u8;
            let mut refused = vec![0x66, 0xf2, 0xf3];
            if draft.bits == 64 {
                refused.extend([rex, rex]);
            }
            draft.prefixes.push(self.rng.pick(&refused));
            return;
        }
        let flow = code.op_code().op_kinds().iter().any(|kind| {
            use OpCodeOperandKind as K;
            matches!(
                kind,
                K::br64_1 | K::br64_4 | K::br32_1 | K::br32_4 | K::br16_1 | K::br16_2
            )
        });
        // Intel ignores an operand size of 16 bits for near branches of 64-bit code, AMD does not.
        let flow =
            flow || draft.bits == 64 && matches!(code.mnemonic(), Mnemonic::Call | Mnemonic::Jmp | Mnemonic::Ret);
        if self.rng.percent(3) && !flow && !code.is_privileged() {
            draft
                .prefixes
                .push(self.rng.pick(&[0x26, 0x2e, 0x36, 0x3e, 0x66, 0xf2, 0xf3]));
        }
    }

    /// Encodes, and checks that the result is the form asked for and stays in the arena.
    fn finish(&mut self, mut draft: Draft) -> Option<Case> {
        let code = draft.instruction.code();
        let mut encoder = Encoder::new(draft.bits);
        let at = draft.state.rip + draft.prefixes.len() as u64;
        encoder.encode(&draft.instruction, at).ok()?;
        let mut bytes = draft.prefixes.clone();
        bytes.extend(encoder.take_buffer());
        if bytes.len() > 15 {
            return None;
        }
        let instruction = decode(draft.bits, &bytes, draft.state.rip);
        let before_vex = |byte: &u8| matches!(byte, 0x66 | 0xf2 | 0xf3 | 0x40..0x50);
        let vex = matches!(code.encoding(), EncodingKind::VEX | EncodingKind::EVEX);
        let lock_refused = draft.prefixes.contains(&0xf0) || vex && draft.prefixes.iter().any(before_vex);
        if lock_refused {
            // Not a legal encoding; what is asked of both machines is #UD.
            if decode_lax(draft.bits, &bytes, draft.state.rip).code() != code || instruction.code() == code {
                return None;
            }
        } else if instruction.code() != code || instruction.len() != bytes.len() {
            return None;
        }
        let instruction = if lock_refused {
            decode_lax(draft.bits, &bytes, draft.state.rip)
        } else {
            instruction
        };
        if !self.contained(&instruction, &draft.state) {
            return None;
        }
        // The instruction goes in last: nothing that fills memory may change it.
        if draft
            .pokes
            .iter()
            .any(|(address, bytes)| *address + bytes.len() as u64 > CODE && *address < CODE + 2 * PAGE)
        {
            return None;
        }
        draft.pokes.push((draft.state.linear_rip(), bytes.clone()));
        Some(Case {
            instruction,
            bytes,
            state: draft.state,
            pokes: draft.pokes,
        })
    }

    /// Whether every access of the instruction, as iced lists them, is inside the arena or cannot succeed.
    fn contained(&mut self, instruction: &Instruction, state: &State) -> bool {
        let bits = state.bits();
        if bits == 16 {
            // Every segment has a limit inside the arena.
            return state
                .es_ds
                .iter()
                .chain([&state.ss])
                .all(|selector| *selector != ldt::EXPAND_DOWN)
                || {
                    let info = self.info.info(instruction);
                    let value = |register: Register, _: usize, _: usize| register_value(state, register);
                    info.used_memory().iter().all(|used| {
                        used.virtual_address(0, value)
                            .is_some_and(|address| arena::contained(address & 0xffff_ffff, 0x800))
                    })
                };
        }
        let mnemonic = instruction.mnemonic();
        if matches!(mnemonic, Mnemonic::Lea | Mnemonic::Nop) {
            return true;
        }
        if instruction.is_vsib() {
            let mut elements = address::gathered(instruction, state).into_iter();
            return elements
                .all(|at| arena::contained(at, 8) || arena::never_canonical(at) || bits == 32 && at < 0x8000);
        }
        let info = self.info.info(instruction);
        let value = |register: Register, _: usize, _: usize| register_value(state, register);
        for used in info.used_memory() {
            let Some(mut address) = used.virtual_address(0, value) else {
                return false;
            };
            if bits != 64 {
                address &= 0xffff_ffff;
            }
            let size = used.memory_size().size() as u64;
            let low_fault = bits == 32 && address < 0x8000;
            let ok = arena::contained(address, size.max(1) + 0x800) || arena::never_canonical(address) || low_fault;
            if !ok {
                return false;
            }
        }
        true
    }
}

/// A register's value in a state, as address computation wants it.
pub fn register_value(state: &State, register: Register) -> Option<u64> {
    if register.is_segment_register() {
        return Some(match register {
            Register::FS => state.fs_base,
            Register::GS => state.gs_base,
            _ if state.bits() == 64 => 0,
            Register::ES => base_of(state.es_ds[0]),
            Register::DS => base_of(state.es_ds[1]),
            Register::SS => base_of(state.ss),
            _ => base_of(state.cs),
        });
    }
    if register == Register::RIP || register == Register::EIP {
        return Some(state.rip);
    }
    if !register.is_gpr() {
        return None;
    }
    let full = state.gpr[gpr_index(register)];
    Some(match register.size() {
        1 if matches!(register, Register::AH | Register::CH | Register::DH | Register::BH) => full >> 8 & 0xff,
        1 => full & 0xff,
        2 => full & 0xffff,
        4 => full & 0xffff_ffff,
        _ => full,
    })
}

/// A segment register that the opcode itself names.
fn is_segment(kind: &OpCodeOperandKind) -> bool {
    use OpCodeOperandKind as K;
    matches!(kind, K::es | K::cs | K::ss | K::ds | K::fs | K::gs)
}

/// Code segments to go to from code of a mode: between 16-bit code and flat segments offsets differ too much to matter.
fn code_selectors(bits: u32) -> &'static [u16] {
    if bits == 16 {
        &[ldt::CODE16, ldt::CODE32, ldt::CODE16, ldt::CODE16]
    } else {
        &[USER64_CS, USER32_CS, ldt::CODE32]
    }
}

/// Decodes one instruction.
pub fn decode(bits: u32, bytes: &[u8], rip: u64) -> Instruction {
    Decoder::with_ip(bits, bytes, rip, DecoderOptions::NONE).decode()
}

/// Decodes one instruction, whatever its LOCK prefix.
fn decode_lax(bits: u32, bytes: &[u8], rip: u64) -> Instruction {
    Decoder::with_ip(bits, bytes, rip, DecoderOptions::NO_INVALID_CHECK).decode()
}

/// The register `n` places behind `first`.
fn at(first: Register, n: u32) -> Register {
    if first == Register::AL {
        // AL CL DL BL AH CH DH BH, then SPL BPL SIL DIL, then R8L on: iced's own order.
        return Register::AL + n;
    }
    first + n
}
