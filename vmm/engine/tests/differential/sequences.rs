//! Random programs: 5 to 40 instructions with loops, branches, calls, string moves and stores into their own code.
//!
//! A single instruction shows its result; a program shows that the block cache, the links between blocks and the flags that are
//! computed late give the same result together. Addresses are formed from registers that no instruction of the program writes,
//! and flags are only read where an instruction has defined them, so every program is predictable without running it.

use std::fmt::Write as _;
use std::time::Instant;

use iced_x86::{
    Code, ConditionCode, Decoder, DecoderOptions, Encoder, Instruction, Mnemonic, OpCodeOperandKind, OpKind, Register,
    RflagsBits,
};

use crate::arena::{CODE, DATA, PAGE, STACK};
use crate::compare::Undefined;
use crate::families::{Findings, Pair, Verdict, seconds, seed};
use crate::forms::{Family, Form, forms};
use crate::generate::{Abilities, Case, Generator};
use crate::rng::Rng;
use crate::state::{State, USER32_CS, flag};

/// One line of a program.
#[derive(Clone, Debug)]
enum Item {
    Plain(Instruction),
    /// A near branch to a label.
    Branch(Code, usize),
    /// An instruction whose memory displacement is the address of a label plus an offset.
    At(Instruction, usize, u64),
    /// An instruction whose immediate is the address of a label.
    Address(Instruction, usize),
    Label(usize),
}

/// Registers with a duty, which drawn instructions do not write.
struct Roles {
    base: Register,
    counters: [Register; 2],
    free: &'static [u32],
}

const ROLES64: Roles = Roles {
    base: Register::R15,
    counters: [Register::R13, Register::R14],
    free: &[0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 12],
};
const ROLES32: Roles = Roles {
    base: Register::EBP,
    counters: [Register::ESI, Register::EDI],
    free: &[0, 1, 2, 3],
};

struct Writer<'a> {
    rng: Rng,
    bits: u32,
    roles: &'static Roles,
    pool: &'a [Form],
    items: Vec<Item>,
    subroutines: Vec<Vec<Item>>,
    labels: usize,
    /// Status flags that may hold anything at this point.
    open: u64,
    left: usize,
}

/// A program, placed and ready to run.
pub struct Program {
    case: Case,
    open: Undefined,
}

fn wide(bits: u32, code32: Code, code64: Code) -> Code {
    if bits == 64 { code64 } else { code32 }
}

impl Writer<'_> {
    fn label(&mut self) -> usize {
        self.labels += 1;
        self.labels - 1
    }

    fn push(&mut self, instruction: Instruction) {
        self.items.push(Item::Plain(instruction));
    }

    fn place(&mut self, label: usize) {
        self.items.push(Item::Label(label));
        // Several ways lead here.
        self.open = flag::STATUS;
    }

    fn free(&mut self, first: Register) -> Register {
        first + self.rng.pick(self.roles.free)
    }

    /// A branch, short as often as not; a program in which that does not reach is dropped.
    fn length(&mut self, code: Code) -> Code {
        if self.rng.percent(50) {
            code.as_short_branch()
        } else {
            code
        }
    }

    /// CMP of two registers, which defines all six flags.
    fn define_flags(&mut self) {
        let (a, b) = (self.free(Register::EAX), self.free(Register::EAX));
        self.push(Instruction::with2(Code::Cmp_r32_rm32, a, b).expect("cmp"));
        self.open = 0;
    }

    /// An instruction from the pool with operands that stay in bounds.
    fn draw(&mut self) -> Option<Instruction> {
        use OpCodeOperandKind as K;
        let form = self.rng.pick(self.pool);
        let code = form.code;
        let op = code.op_code();
        let mut instruction = Instruction::default();
        instruction.set_code(code);
        let mut memory = false;
        for (i, kind) in op.op_kinds().iter().enumerate() {
            let i = i as u32;
            match kind {
                K::r8_or_mem | K::r16_or_mem | K::r32_or_mem | K::r64_or_mem | K::mm_or_mem | K::xmm_or_mem
                    if self.rng.percent(45) =>
                {
                    memory = true;
                    self.memory(&mut instruction, i);
                }
                K::mem => {
                    memory = true;
                    self.memory(&mut instruction, i);
                }
                K::r8_or_mem | K::r8_reg | K::r8_opcode => {
                    // AL to BH without REX, or any low byte with it.
                    let n = self.rng.below(8) as u32;
                    let free = self.rng.pick(self.roles.free);
                    let register = if self.bits == 64 && self.rng.percent(60) {
                        if free < 4 {
                            Register::AL + free
                        } else {
                            Register::SPL + (free - 4)
                        }
                    } else {
                        Register::AL + n
                    };
                    instruction.set_op_register(i, register);
                }
                K::r16_or_mem | K::r16_reg | K::r16_rm | K::r16_opcode => {
                    instruction.set_op_register(i, self.free(Register::AX))
                }
                K::r32_or_mem | K::r32_reg | K::r32_rm | K::r32_opcode => {
                    instruction.set_op_register(i, self.free(Register::EAX))
                }
                K::r64_or_mem | K::r64_reg | K::r64_rm | K::r64_opcode => {
                    instruction.set_op_register(i, self.free(Register::RAX))
                }
                K::mm_or_mem | K::mm_reg | K::mm_rm => {
                    instruction.set_op_register(i, Register::MM0 + self.rng.below(8) as u32)
                }
                K::xmm_or_mem | K::xmm_reg | K::xmm_rm => {
                    let n = self.rng.below(u64::from(self.bits / 4)) as u32;
                    instruction.set_op_register(i, Register::XMM0 + n)
                }
                K::al => instruction.set_op_register(i, Register::AL),
                K::cl => instruction.set_op_register(i, Register::CL),
                K::ax => instruction.set_op_register(i, Register::AX),
                K::eax => instruction.set_op_register(i, Register::EAX),
                K::rax => instruction.set_op_register(i, Register::RAX),
                K::st0 => instruction.set_op_register(i, Register::ST0),
                K::sti_opcode => instruction.set_op_register(i, Register::ST0 + self.rng.below(8) as u32),
                K::imm8 => {
                    instruction.set_op_kind(i, OpKind::Immediate8);
                    instruction.set_immediate8(self.rng.value() as u8);
                }
                K::imm8_const_1 => {
                    instruction.set_op_kind(i, OpKind::Immediate8);
                    instruction.set_immediate8(1);
                }
                K::imm8sex16 => {
                    instruction.set_op_kind(i, OpKind::Immediate8to16);
                    instruction.set_immediate8to16(i16::from(self.rng.value() as i8));
                }
                K::imm8sex32 => {
                    instruction.set_op_kind(i, OpKind::Immediate8to32);
                    instruction.set_immediate8to32(i32::from(self.rng.value() as i8));
                }
                K::imm8sex64 => {
                    instruction.set_op_kind(i, OpKind::Immediate8to64);
                    instruction.set_immediate8to64(i64::from(self.rng.value() as i8));
                }
                K::imm16 => {
                    instruction.set_op_kind(i, OpKind::Immediate16);
                    instruction.set_immediate16(self.rng.value() as u16);
                }
                K::imm32 => {
                    instruction.set_op_kind(i, OpKind::Immediate32);
                    instruction.set_immediate32(self.rng.value() as u32);
                }
                K::imm32sex64 => {
                    instruction.set_op_kind(i, OpKind::Immediate32to64);
                    instruction.set_immediate32to64(i64::from(self.rng.value() as i32));
                }
                K::imm64 => {
                    instruction.set_op_kind(i, OpKind::Immediate64);
                    instruction.set_immediate64(self.rng.value());
                }
                _ => return None,
            }
        }
        if memory && op.can_use_lock_prefix() && self.rng.percent(15) {
            instruction.set_has_lock_prefix(true);
        }
        // Undefined results must not spread.
        let short_double = matches!(code.mnemonic(), Mnemonic::Shld | Mnemonic::Shrd) && op.operand_size() == 16;
        let bit_offset = matches!(
            code.mnemonic(),
            Mnemonic::Bt | Mnemonic::Bts | Mnemonic::Btr | Mnemonic::Btc
        ) && memory
            && instruction.op1_kind() == OpKind::Register;
        if short_double || bit_offset {
            return None;
        }
        let mut encoder = Encoder::new(self.bits);
        encoder.encode(&instruction, CODE).ok()?;
        Some(instruction)
    }

    /// Memory near the base register, aligned to 16 bytes, sometimes near the end of a page.
    fn memory(&mut self, instruction: &mut Instruction, operand: u32) {
        let displacement = self.rng.below(0x90) * 16;
        let displacement = (displacement as i64 - 0x480) as u64;
        instruction.set_op_kind(operand, OpKind::Memory);
        instruction.set_memory_base(self.roles.base);
        instruction.set_memory_displ_size(if displacement as i64 == i64::from(displacement as i8) {
            1
        } else {
            self.bits / 8
        });
        instruction.set_memory_displacement64(if self.bits == 64 {
            displacement
        } else {
            displacement & 0xffff_ffff
        });
    }

    /// Adds an instruction from the pool, with a definition of the flags in front if it reads open ones.
    fn simple(&mut self) {
        let Some(instruction) = (0..50).find_map(|_| self.draw()) else {
            return;
        };
        let reads = flags_of(instruction.rflags_read());
        if reads & self.open != 0 {
            self.define_flags();
        }
        let counted = matches!(
            instruction.mnemonic(),
            Mnemonic::Shl
                | Mnemonic::Sal
                | Mnemonic::Shr
                | Mnemonic::Sar
                | Mnemonic::Rol
                | Mnemonic::Ror
                | Mnemonic::Rcl
                | Mnemonic::Rcr
                | Mnemonic::Shld
                | Mnemonic::Shrd
        );
        if counted {
            // Depending on the count: written, undefined, or as they were.
            self.open |= flag::OF | flag::AF | flag::CF;
        } else {
            let undefined = flags_of(instruction.rflags_undefined());
            self.open &= !flags_of(instruction.rflags_modified());
            self.open |= undefined;
        }
        self.push(instruction);
        self.left = self.left.saturating_sub(1);
    }

    /// A run of code; `depth` loops are around it.
    fn block(&mut self, mut lines: usize, depth: usize) {
        while lines > 0 && self.left > 0 {
            lines -= 1;
            match self.rng.below(100) {
                0..7 if depth < 2 => self.repeat(depth),
                7..16 => self.skip(depth),
                16..20 if depth < 2 && self.subroutines.len() < 3 => self.call(depth),
                20..25 => self.push_pop(depth),
                25..30 if self.bits == 64 || depth == 0 => self.string(),
                30..34 => self.indirect_jump(),
                34..41 => self.modify(),
                _ => self.simple(),
            }
        }
    }

    /// A counted loop: DEC and JNE, or LOOP's relatives are left to the single-instruction test.
    fn repeat(&mut self, depth: usize) {
        let counter = self.roles.counters[depth];
        let times = if self.rng.percent(10) {
            40 + self.rng.below(80)
        } else {
            1 + self.rng.below(6)
        } as u32;
        let set = if self.bits == 64 {
            Instruction::with2(Code::Mov_rm64_imm32, counter, times)
        } else {
            Instruction::with2(Code::Mov_r32_imm32, counter, times)
        };
        self.push(set.expect("mov"));
        let head = self.label();
        self.place(head);
        let lines = 1 + self.rng.below(6) as usize;
        self.block(lines, depth + 1);
        let dec = wide(self.bits, Code::Dec_rm32, Code::Dec_rm64);
        self.push(Instruction::with1(dec, counter).expect("dec"));
        let code = self.length(wide(self.bits, Code::Jne_rel32_32, Code::Jne_rel32_64));
        self.items.push(Item::Branch(code, head));
        self.open = flag::STATUS;
        self.left = self.left.saturating_sub(2);
    }

    /// A conditional branch over a few lines.
    fn skip(&mut self, depth: usize) {
        if self.open != 0 && self.rng.percent(50) {
            // Let the branch depend on what is already there, where that is defined.
            while self.open & !flag::AF != 0 {
                self.define_flags();
            }
        } else {
            self.define_flags();
        }
        let conditions64 = [
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
        let conditions32 = [
            Code::Jo_rel32_32,
            Code::Jno_rel32_32,
            Code::Jb_rel32_32,
            Code::Jae_rel32_32,
            Code::Je_rel32_32,
            Code::Jne_rel32_32,
            Code::Jbe_rel32_32,
            Code::Ja_rel32_32,
            Code::Js_rel32_32,
            Code::Jns_rel32_32,
            Code::Jp_rel32_32,
            Code::Jnp_rel32_32,
            Code::Jl_rel32_32,
            Code::Jge_rel32_32,
            Code::Jle_rel32_32,
            Code::Jg_rel32_32,
        ];
        let n = self.rng.below(16) as usize;
        let over = self.label();
        let code = self.length(wide(self.bits, conditions32[n], conditions64[n]));
        self.items.push(Item::Branch(code, over));
        let lines = 1 + self.rng.below(4) as usize;
        self.block(lines, depth);
        self.place(over);
        self.left = self.left.saturating_sub(1);
    }

    /// CALL of a subroutine behind the program, two times as often as not.
    fn call(&mut self, depth: usize) {
        let entry = self.label();
        let outer = std::mem::take(&mut self.items);
        self.open = flag::STATUS;
        self.items.push(Item::Label(entry));
        let lines = 1 + self.rng.below(5) as usize;
        // No loops inside: the counters may be in use around the call.
        self.block(lines, depth.max(2));
        self.push(Instruction::with(wide(self.bits, Code::Retnd, Code::Retnq)));
        let body = std::mem::replace(&mut self.items, outer);
        self.subroutines.push(body);
        let call = wide(self.bits, Code::Call_rel32_32, Code::Call_rel32_64);
        self.items.push(Item::Branch(call, entry));
        if self.rng.percent(60) {
            self.open = flag::STATUS;
            self.simple();
            self.items.push(Item::Branch(call, entry));
        }
        self.open = flag::STATUS;
        self.left = self.left.saturating_sub(1);
    }

    fn push_pop(&mut self, depth: usize) {
        let first = wide_register(self.bits);
        let (from, to) = (self.free(first), self.free(first));
        self.push(Instruction::with1(wide(self.bits, Code::Push_r32, Code::Push_r64), from).expect("push"));
        let lines = self.rng.below(3) as usize;
        self.block(lines, depth.max(2));
        self.push(Instruction::with1(wide(self.bits, Code::Pop_r32, Code::Pop_r64), to).expect("pop"));
        self.left = self.left.saturating_sub(2);
    }

    /// A repeated string instruction on the data.
    fn string(&mut self) {
        let first = wide_register(self.bits);
        let direction = if self.rng.percent(25) { Code::Std } else { Code::Cld };
        self.push(Instruction::with(direction));
        for register in [first + 7, first + 6] {
            let at = DATA + 0x600 + self.rng.below(0x1000);
            let mov = wide(self.bits, Code::Mov_r32_imm32, Code::Mov_rm64_imm32);
            self.push(Instruction::with2(mov, register, at as u32).expect("mov"));
        }
        let most = if self.rng.percent(20) { 200 } else { 20 };
        let count = self.rng.below(most) as u32;
        self.push(Instruction::with2(Code::Mov_r32_imm32, Register::ECX, count).expect("mov"));
        use iced_x86::RepPrefixKind as R;
        let string = match self.rng.below(8) {
            0 => Instruction::with_stosb(self.bits, R::Repe),
            1 => Instruction::with_stosd(self.bits, R::Repe),
            2 => Instruction::with_movsb(self.bits, Register::None, R::Repe),
            3 => Instruction::with_movsd(self.bits, Register::None, R::Repe),
            4 => Instruction::with_lodsb(self.bits, Register::None, R::Repe),
            5 => Instruction::with_scasb(self.bits, R::Repne),
            6 => Instruction::with_cmpsb(self.bits, Register::None, R::Repe),
            _ => Instruction::with_movsw(self.bits, Register::None, R::None),
        };
        let string = string.expect("string");
        if matches!(string.mnemonic(), Mnemonic::Scasb | Mnemonic::Cmpsb) && count > 0 {
            self.open = 0;
        }
        self.push(string);
        self.push(Instruction::with(Code::Cld));
        self.left = self.left.saturating_sub(2);
    }

    /// A jump through a register to what follows.
    fn indirect_jump(&mut self) {
        let first = wide_register(self.bits);
        let register = self.free(first);
        let next = self.label();
        let mov = wide(self.bits, Code::Mov_r32_imm32, Code::Mov_rm64_imm32);
        let load = Instruction::with2(mov, register, 0_u32).expect("mov");
        self.items.push(Item::Address(load, next));
        self.push(Instruction::with1(wide(self.bits, Code::Jmp_rm32, Code::Jmp_rm64), register).expect("jmp"));
        for _ in 0..self.rng.below(3) {
            self.push(Instruction::with(Code::Ud2));
        }
        self.items.push(Item::Label(next));
        self.left = self.left.saturating_sub(1);
    }

    /// A store into the code that is about to run, or that has just run inside a loop.
    fn modify(&mut self) {
        let target = self.label();
        // MOV r32, imm32 has its immediate one byte in; without REX for these registers.
        let register = Register::EAX + self.rng.below(4) as u32;
        let value = self.rng.next() as u32;
        let patched = Instruction::with2(Code::Mov_r32_imm32, register, value).expect("mov");
        let mut store = match self.rng.below(3) {
            0 => Instruction::with2(
                Code::Mov_rm8_imm8,
                iced_x86::MemoryOperand::with_displ(0, 4),
                self.rng.next() as u8 as u32,
            ),
            1 => Instruction::with2(
                Code::Mov_rm32_imm32,
                iced_x86::MemoryOperand::with_displ(0, 4),
                self.rng.next() as u32,
            ),
            _ => Instruction::with2(
                Code::Add_rm8_imm8,
                iced_x86::MemoryOperand::with_displ(0, 4),
                self.rng.next() as u8 as u32,
            ),
        }
        .expect("store");
        store.set_memory_displ_size(if self.bits == 64 { 8 } else { 4 });
        if store.code() == Code::Add_rm8_imm8 {
            self.open = 0;
        }
        let store = Item::At(store, target, 1);
        let behind = self.rng.percent(40);
        if !behind {
            self.items.push(store.clone());
            for _ in 0..self.rng.below(3) {
                self.simple();
            }
        }
        self.items.push(Item::Label(target));
        self.push(patched);
        if behind {
            self.items.push(store);
        }
        self.left = self.left.saturating_sub(2);
    }
}

fn wide_register(bits: u32) -> Register {
    if bits == 64 { Register::RAX } else { Register::EAX }
}

/// iced's flag bits as RFLAGS bits.
fn flags_of(bits: u32) -> u64 {
    [
        (RflagsBits::OF, flag::OF),
        (RflagsBits::SF, flag::SF),
        (RflagsBits::ZF, flag::ZF),
        (RflagsBits::AF, flag::AF),
        (RflagsBits::CF, flag::CF),
        (RflagsBits::PF, flag::PF),
    ]
    .into_iter()
    .filter_map(|(theirs, ours)| (bits & theirs != 0).then_some(ours))
    .sum()
}

/// Encodes at `origin`: once to learn the labels, once with them.
fn encode(bits: u32, items: &[Item], labels: usize, origin: u64) -> Option<Vec<u8>> {
    let mut places = vec![origin; labels];
    let mut bytes = Vec::new();
    for _ in 0..2 {
        let mut encoder = Encoder::new(bits);
        let mut at = origin;
        for item in items {
            let instruction = match item {
                Item::Label(label) => {
                    places[*label] = at;
                    continue;
                }
                Item::Plain(instruction) => *instruction,
                Item::Branch(code, label) => Instruction::with_branch(*code, places[*label]).ok()?,
                Item::At(instruction, label, offset) => {
                    let mut instruction = *instruction;
                    instruction.set_memory_displacement64(places[*label] + offset);
                    instruction
                }
                Item::Address(instruction, label) => {
                    let mut instruction = *instruction;
                    if instruction.op1_kind() == OpKind::Immediate32to64 {
                        instruction.set_immediate32to64(places[*label] as i64);
                    } else {
                        instruction.set_immediate32(places[*label] as u32);
                    }
                    instruction
                }
            };
            at += encoder.encode(&instruction, at).ok()? as u64;
        }
        bytes = encoder.take_buffer();
    }
    Some(bytes)
}

/// The forms that programs are made of: no control flow, no stack, no addresses of their own, no approximations,
/// nor dot products: which of several NaNs they give differs from vendor to vendor.
pub fn pool(bits: u32, amd: bool) -> Vec<Form> {
    let (families, _) = forms(bits, amd);
    let mut pool = Vec::new();
    for (family, forms) in families {
        // Integer code is what blocks and flags are about: give it the larger part.
        let weight = match family {
            Family::Alu | Family::Mov => 4,
            Family::Shift | Family::Bit | Family::Cond | Family::Xchg | Family::Flags => 3,
            Family::MulDiv => 2,
            Family::Sse | Family::Sse2 | Family::Sse3 | Family::Ssse3 | Family::Sse41 | Family::Mmx | Family::X87 => 1,
            Family::Aes | Family::Pclmul | Family::Bcd => 1,
            _ => 0,
        };
        for form in forms {
            use Mnemonic as M;
            let mnemonic = form.code.mnemonic();
            let op = form.code.op_code();
            let unfit = matches!(
                mnemonic,
                M::Div
                    | M::Idiv
                    | M::Bsf
                    | M::Bsr
                    | M::Bswap
                    | M::Xlatb
                    | M::Aam
                    | M::Maskmovdqu
                    | M::Maskmovq
                    | M::Cvtpi2ps
                    | M::Rcpps
                    | M::Rcpss
                    | M::Rsqrtps
                    | M::Rsqrtss
                    | M::Dpps
                    | M::Dppd
                    | M::Ldmxcsr
                    | M::Stmxcsr
                    | M::Fsin
                    | M::Fcos
                    | M::Fsincos
                    | M::Fptan
                    | M::Fpatan
                    | M::F2xm1
                    | M::Fyl2x
                    | M::Fyl2xp1
                    | M::Fldcw
                    | M::Fldenv
                    | M::Fnstenv
                    | M::Frstor
                    | M::Fnsave
                    | M::Fnstsw
                    | M::Popf
                    | M::Popfd
                    | M::Popfq
                    | M::Pushf
                    | M::Pushfd
                    | M::Pushfq
                    | M::Std
            );
            let addresses = op
                .op_kinds()
                .iter()
                .any(|kind| matches!(kind, OpCodeOperandKind::mem_offs | OpCodeOperandKind::seg_reg));
            if !unfit && !addresses {
                pool.extend(std::iter::repeat_n(form, weight));
            }
        }
    }
    pool
}

/// A program of about `lines` lines.
pub fn program(bits: u32, pool: &[Form], seed: u64, abilities: Abilities) -> Option<Program> {
    let mut rng = Rng::new(seed);
    let lines = 5 + rng.below(36) as usize;
    // Over the border between the two pages of code, now and then.
    let origin = if rng.percent(15) {
        CODE + PAGE - rng.below(100)
    } else {
        CODE + rng.below(0x800)
    };
    let mut generator = Generator::new(rng.next(), abilities);
    let mut state = State::new(origin);
    for value in &mut state.gpr {
        *value = rng.value();
    }
    let (roles, base) = if bits == 64 { (&ROLES64, 15) } else { (&ROLES32, 5) };
    state.gpr[base] = match rng.below(12) {
        // A page border in reach, the end of the data in reach.
        0 => DATA + PAGE - 8 * rng.below(4),
        1 => DATA + 2 * PAGE - 0x400,
        _ => DATA + PAGE,
    };
    state.gpr[4] = STACK + 0x800;
    if bits == 32 {
        state.gpr[8..].fill(0);
        state.cs = USER32_CS;
    }
    state.rflags |= rng.next() & flag::STATUS;
    state.fpu = generator.fpu(Family::Sse);
    state.fpu.mxcsr |= 0x1f80;
    state.fpu.fcw |= 0x3f;
    state.fpu.fsw &= !0x8080;
    let mut writer = Writer {
        rng,
        bits,
        roles,
        pool,
        items: Vec::new(),
        subroutines: Vec::new(),
        labels: 0,
        open: 0,
        left: lines,
    };
    while writer.left > 0 {
        writer.block(lines, 0);
    }
    let open = writer.open;
    let mut items = writer.items;
    items.push(Item::Plain(Instruction::with(Code::Int3)));
    for body in writer.subroutines {
        items.extend(body);
    }
    let bytes = encode(bits, &items, writer.labels, origin)?;
    if origin + bytes.len() as u64 > CODE + 2 * PAGE - 16 {
        return None;
    }
    let instruction = Decoder::with_ip(bits, &bytes, origin, DecoderOptions::NONE).decode();
    let mut data = vec![0; 2 * PAGE as usize];
    for chunk in data.chunks_mut(64) {
        writer.rng.fill(chunk);
    }
    let pokes = vec![(DATA, data), (origin, bytes.clone())];
    Some(Program {
        case: Case {
            instruction,
            bytes,
            state,
            pokes,
        },
        open: Undefined {
            flags: open,
            fsw: 0x4700,
            ..Undefined::default()
        },
    })
}

/// The program as a listing.
fn listing(program: &Program, bits: u32) -> String {
    let mut text = String::new();
    for instruction in Decoder::with_ip(bits, &program.case.bytes, program.case.state.rip, DecoderOptions::NONE).iter()
    {
        let _ = writeln!(text, "  {:#x}: {instruction}", instruction.ip());
    }
    text
}

/// Runs programs until `count` of them, or the time, are used up.
fn run(bits: u32, count: u64) {
    let mut pair = Pair::take(engine::EngineOptions::default());
    let pool = pool(bits, pair.host.amd);
    let begin = Instant::now();
    let mut findings = Findings::default();
    let first = std::env::var("DIFF_PROGRAM").ok().and_then(|text| text.parse().ok());
    let mut n = first.unwrap_or_else(|| seed() << 32);
    let mut ended = [0_u64; 2];
    let mut done = 0;
    pair.reset(0);
    loop {
        if let Some(program) = program(bits, &pool, n, pair.abilities()) {
            findings.case();
            let (verdict, host) = pair.compare_program(&program.case, &program.open);
            if let Verdict::Differs(report) = verdict {
                findings.add(
                    format!("program DIFF_PROGRAM={n}/{bits}"),
                    format!("{}{report}", listing(&program, bits)),
                );
            }
            if let Some(host) = host {
                ended[usize::from(host.vector == 3)] += 1;
            }
        }
        n += 1;
        done += 1;
        if first.is_some() || done >= count && seconds().is_none_or(|limit| begin.elapsed() >= limit) {
            break;
        }
    }
    findings.judge(&format!(
        "programs, {bits}-bit ({} ran to their end, {} to a fault)",
        ended[1], ended[0]
    ));
    assert!(
        first.is_some() || ended[1] > ended[0] && ended[0] > 0,
        "programs end as they should: {ended:?}"
    );
}

// covers: differential/sequences
#[test]
fn programs_64() {
    run(64, 4000);
}

// covers: differential/sequences, cpu/modes-compatibility
#[test]
fn programs_32() {
    run(32, 4000);
}

/// A condition that any program can be asked about, to see that the pool reads flags at all.
#[test]
fn the_pool_reads_and_writes_flags() {
    let pool = pool(64, true);
    assert!(
        pool.iter()
            .any(|form| form.code.condition_code() != ConditionCode::None)
    );
    assert!(pool.len() > 1000);
}
