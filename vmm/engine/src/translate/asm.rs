//! iced-x86's encoder with labels.

use crate::code_memory::LINE;
use iced_x86::{Code, Encoder, IcedError, Instruction, MemoryOperand, Register};

/// A place in the code that is being made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Label(usize);

/// A register or memory, for the operand that may be either.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rm {
    Reg(u8),
    Mem(MemoryOperand),
}

/// Numbers of host registers as instructions encode them.
pub(super) mod host {
    pub const RAX: u8 = 0;
    pub const RCX: u8 = 1;
    pub const RDX: u8 = 2;
    pub const RBX: u8 = 3;
    pub const RSP: u8 = 4;
    pub const RBP: u8 = 5;
    pub const RSI: u8 = 6;
    pub const RDI: u8 = 7;
}

const BYTES: [Register; 16] = [
    Register::AL,
    Register::CL,
    Register::DL,
    Register::BL,
    Register::SPL,
    Register::BPL,
    Register::SIL,
    Register::DIL,
    Register::R8L,
    Register::R9L,
    Register::R10L,
    Register::R11L,
    Register::R12L,
    Register::R13L,
    Register::R14L,
    Register::R15L,
];

/// `size` bytes of a host register.
pub(super) fn reg(number: u8, size: u8) -> Register {
    match size {
        1 => BYTES[number as usize],
        2 => Register::AX + u32::from(number),
        4 => Register::EAX + u32::from(number),
        _ => Register::RAX + u32::from(number),
    }
}

/// Memory at a base and a displacement.
pub(super) fn at(base: u8, displacement: i32) -> MemoryOperand {
    MemoryOperand::with_base_displ(reg(base, 8), displacement.into())
}

/// Code that is being made, for an address.
pub(super) struct Asm {
    encoder: Encoder,
    start: u64,
    len: usize,
    /// Where labels are.
    labels: Vec<Option<usize>>,
    /// Where 32-bit distances are that lead to labels.
    jumps: Vec<(usize, Label)>,
    /// What could not be encoded: a defect of the caller's.
    failed: Option<IcedError>,
}

impl Asm {
    pub fn new(start: u64) -> Asm {
        Asm {
            encoder: Encoder::new(64),
            start,
            len: 0,
            labels: Vec::new(),
            jumps: Vec::new(),
            failed: None,
        }
    }

    /// Where the next instruction will be.
    pub fn here(&self) -> u64 {
        self.start + self.len as u64
    }

    /// Appends an instruction.
    pub fn emit(&mut self, instruction: Result<Instruction, IcedError>) {
        let here = self.here();
        match instruction.and_then(|instruction| self.encoder.encode(&instruction, here)) {
            Ok(len) => self.len += len,
            Err(e) => self.failed = Some(e),
        }
    }

    pub fn op0(&mut self, code: Code) {
        self.emit(Ok(Instruction::with(code)));
    }

    pub fn rm(&mut self, code: Code, rm: Rm, size: u8) {
        self.emit(match rm {
            Rm::Reg(n) => Instruction::with1(code, reg(n, size)),
            Rm::Mem(m) => Instruction::with1(code, m),
        });
    }

    /// With the destination in `rm`.
    pub fn rm_r(&mut self, code: Code, rm: Rm, r: u8, size: u8) {
        self.emit(match rm {
            Rm::Reg(n) => Instruction::with2(code, reg(n, size), reg(r, size)),
            Rm::Mem(m) => Instruction::with2(code, m, reg(r, size)),
        });
    }

    /// With the destination in a register of `to` bytes, the source of `from`.
    pub fn r_rm(&mut self, code: Code, r: u8, to: u8, rm: Rm, from: u8) {
        self.emit(match rm {
            Rm::Reg(n) => Instruction::with2(code, reg(r, to), reg(n, from)),
            Rm::Mem(m) => Instruction::with2(code, reg(r, to), m),
        });
    }

    pub fn rm_i(&mut self, code: Code, rm: Rm, size: u8, imm: i32) {
        self.emit(match rm {
            Rm::Reg(n) => Instruction::with2(code, reg(n, size), imm),
            Rm::Mem(m) => Instruction::with2(code, m, imm),
        });
    }

    /// Loads a constant of 64 bits, in the shortest way. No flag changes.
    pub fn constant(&mut self, r: u8, value: u64) {
        if let Ok(value) = u32::try_from(value) {
            self.emit(Instruction::with2(Code::Mov_r32_imm32, reg(r, 4), value));
        } else if value as i32 as i64 as u64 == value {
            self.emit(Instruction::with2(Code::Mov_rm64_imm32, reg(r, 8), value as i32));
        } else {
            self.emit(Instruction::with2(Code::Mov_r64_imm64, reg(r, 8), value));
        }
    }

    pub fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    /// The label is here.
    pub fn bind(&mut self, label: Label) {
        self.labels[label.0] = Some(self.len);
    }

    /// A branch with a distance of 32 bits to a label.
    pub fn branch(&mut self, code: Code, to: Label) {
        let here = self.here();
        self.emit(Instruction::with_branch(code, here));
        self.jumps.push((self.len - 4, to));
    }

    /// The same where the distance will be replaced: it lies in one line of the cache. The answer is where.
    pub fn replaceable_branch(&mut self, code: Code, to: Label) -> usize {
        let opcode = if code == Code::Jmp_rel32_64 { 1 } else { 2 };
        while (self.here() as usize + opcode) % LINE > LINE - 4 {
            self.op0(Code::Nopd);
        }
        self.branch(code, to);
        self.len - 4
    }

    /// Where a label is, once everything has been appended.
    pub fn place_of(&self, label: Label) -> Option<usize> {
        self.labels[label.0]
    }

    /// A branch with a distance of 32 bits to an address.
    pub fn branch_to(&mut self, code: Code, to: u64) {
        self.emit(Instruction::with_branch(code, to));
    }

    /// The code. `None`: something could not be encoded.
    pub fn finish(mut self) -> Option<Vec<u8>> {
        let mut code = self.encoder.take_buffer();
        if let Some(e) = self.failed {
            debug_assert!(false, "{e}");
            return None;
        }
        for (at, label) in self.jumps {
            let to = self.labels[label.0]? as i32;
            code[at..at + 4].copy_from_slice(&(to - (at as i32 + 4)).to_le_bytes());
        }
        Some(code)
    }
}
