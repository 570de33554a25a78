//! Memory operands: a place, and an address form whose registers are solved for.

use iced_x86::{Instruction, MemorySize, Mnemonic, OpCodeOperandKind, OpKind, Register};

use super::{Draft, Generator, RBX, RSP, at, gpr_index, register_value};
use crate::arena;
use crate::state::{State, base_of};

impl Generator {
    /// Draws an address form for operand `operand` and solves for its registers.
    pub(super) fn memory_operand(&mut self, draft: &mut Draft, operand: u32) -> Option<()> {
        use Mnemonic as M;
        let code = draft.instruction.code();
        let mnemonic = code.mnemonic();
        let bits = draft.bits;
        let moffs = code.op_code().op_kinds()[operand as usize] == OpCodeOperandKind::mem_offs;
        draft.instruction.set_op_kind(operand, OpKind::Memory);

        let declared = code.op_code().memory_size().size() as u64;
        let (size, align) = match code.op_code().memory_size() {
            MemorySize::Fxsave_512Byte | MemorySize::Fxsave64_512Byte => (512, 16),
            MemorySize::FpuState94 => (94, 2),
            MemorySize::FpuState108 => (108, 4),
            MemorySize::Xsave | MemorySize::Xsave64 => (832, 64),
            _ if declared == 0 => (64, 64),
            _ => (declared, declared.next_power_of_two()),
        };
        let mut target = if mnemonic == M::Lea {
            self.rng.value()
        } else {
            self.target(bits, size, align)
        };
        // A locked access that crosses a cache line stalls the whole machine, and some hosts fault on it.
        let locked = code.op_code().can_use_lock_prefix() || mnemonic == M::Xchg;
        if locked && target % 64 + size > 64 {
            target &= !63;
        }
        if matches!(mnemonic, M::Bt | M::Bts | M::Btr | M::Btc) {
            target &= !(size - 1);
        }
        if mnemonic != M::Lea && arena::contained(target, 1) {
            self.poke_operand(draft, target, size);
        }

        if moffs {
            let (displ_size, address) = match bits {
                64 if self.rng.percent(70) => (8, target),
                64 => (4, target & 0xffff_ffff),
                32 => (4, target),
                _ => (
                    self.rng.pick(&[2, 4]),
                    target.wrapping_sub(base_of(draft.state.es_ds[1])) & 0xffff,
                ),
            };
            draft.instruction.set_memory_displ_size(displ_size);
            draft.instruction.set_memory_displacement64(address);
            return Some(());
        }

        let addr32 =
            bits != 64 || (self.rng.percent(12) && target < 1 << 32 || mnemonic == M::Lea && self.rng.percent(30));
        if bits == 32 && mnemonic == M::Lea && self.rng.percent(30) {
            let offset = self.rng.next() & 0xffff;
            return self.address16(draft, offset);
        }
        if bits == 16 {
            return self.address_in_segments(draft, target);
        }
        let mask = if addr32 { 0xffff_ffff } else { u64::MAX };
        // A segment override: FS and GS change the address, the others do nothing in 64-bit mode.
        let mut base_of_segment = 0;
        if self.rng.percent(if bits == 64 { 14 } else { 8 }) && mnemonic != M::Lea {
            let with_bases = bits == 64 && self.abilities.bases;
            let segments = [
                Register::ES,
                Register::CS,
                Register::SS,
                Register::DS,
                Register::FS,
                Register::GS,
            ];
            let segment = segments[self.rng.below(if with_bases { 6 } else { 4 }) as usize];
            draft.instruction.set_segment_prefix(segment);
            base_of_segment = match segment {
                Register::FS => draft.state.fs_base,
                Register::GS => draft.state.gs_base,
                _ => 0,
            };
            if addr32 && base_of_segment != 0 && target.wrapping_sub(base_of_segment) > mask {
                return None;
            }
        }
        let offset = target.wrapping_sub(base_of_segment) & mask;
        self.address(draft, offset, addr32)
    }

    /// The base, the vector of indices and the mask of a gather: three registers, so that each element that is wanted lands
    /// where `target` says.
    pub(super) fn gather_operand(&mut self, draft: &mut Draft, operand: u32) -> Option<()> {
        use OpCodeOperandKind as K;
        let wide = draft.bits == 64;
        let registers = if wide { 16 } else { 8 };
        let first = self.rng.below(registers);
        let second = (first + 1 + self.rng.below(registers - 2)) % registers;
        let third = (0..registers).find(|n| *n != first && *n != second && self.rng.percent(30))?;
        let instruction = &mut draft.instruction;
        for (n, number) in [(0, first), (2, second)] {
            let start = if instruction.op_register(n).is_ymm() {
                Register::YMM0
            } else {
                Register::XMM0
            };
            instruction.set_op_register(n, at(start, number as u32));
        }
        let kind = instruction.code().op_code().op_kinds()[operand as usize];
        let start = if matches!(kind, K::mem_vsib32y | K::mem_vsib64y) {
            Register::YMM0
        } else {
            Register::XMM0
        };
        let index_size = if matches!(kind, K::mem_vsib64x | K::mem_vsib64y) {
            8
        } else {
            4
        };
        instruction.set_op_kind(operand, OpKind::Memory);
        let addr32 = !wide || self.rng.percent(12);
        let shift = self.rng.below(4);
        let base = self.rng.below(registers) as usize;
        let displacement = if self.rng.percent(50) {
            0
        } else {
            self.rng.next() as i8 as i64
        };
        let anchor = arena::DATA + 0x800 + self.rng.below(0x800);
        draft.fix(base, anchor.wrapping_sub(displacement as u64));
        let instruction = &mut draft.instruction;
        instruction.set_memory_base(at(if addr32 { Register::EAX } else { Register::RAX }, base as u32));
        instruction.set_memory_index(at(start, third as u32));
        instruction.set_memory_index_scale(1 << shift);
        instruction.set_memory_displ_size(1);
        instruction.set_memory_displacement64(if addr32 {
            displacement as u32 as u64
        } else {
            displacement as u64
        });
        let mut lanes = [0; 32];
        for lane in lanes.chunks_mut(index_size) {
            let target = if self.rng.percent(85) {
                arena::DATA + 0x80 + self.rng.below(0x1e00)
            } else {
                self.target(32, 8, 4)
            };
            let index = target.wrapping_sub(anchor) as i64 >> shift;
            lane.copy_from_slice(&index.to_le_bytes()[..index_size]);
        }
        let half = |from: usize| u128::from_le_bytes(std::array::from_fn(|i| lanes[from + i]));
        (
            draft.state.fpu.xmm[third as usize],
            draft.state.fpu.ymm_hi[third as usize],
        ) = (half(0), half(16));
        Some(())
    }

    /// The same for a gather or a scatter with an EVEX prefix, whose mask is an opmask.
    pub(super) fn elements_operand(&mut self, draft: &mut Draft, operand: u32) -> Option<()> {
        use OpCodeOperandKind as K;
        let wide = draft.bits == 64;
        let registers = if wide { 32 } else { 8 };
        let kind = draft.instruction.code().op_code().op_kinds()[operand as usize];
        let data = draft.instruction.op_register(1 - operand).number() as u64;
        let third = (0..registers).find(|n| *n != data && self.rng.percent(20))?;
        let start = match kind {
            K::mem_vsib32x | K::mem_vsib64x => Register::XMM0,
            K::mem_vsib32y | K::mem_vsib64y => Register::YMM0,
            _ => Register::ZMM0,
        };
        let index_size = if matches!(kind, K::mem_vsib64x | K::mem_vsib64y | K::mem_vsib64z) {
            8
        } else {
            4
        };
        draft.instruction.set_op_kind(operand, OpKind::Memory);
        let addr32 = !wide || self.rng.percent(12);
        let shift = self.rng.below(4);
        let base = self.rng.below(if wide { 16 } else { 8 }) as usize;
        let displacement = if self.rng.percent(50) {
            0
        } else {
            self.rng.next() as i8 as i64
        };
        let anchor = arena::DATA + 0x800 + self.rng.below(0x800);
        draft.fix(base, anchor.wrapping_sub(displacement as u64));
        let instruction = &mut draft.instruction;
        instruction.set_memory_base(at(if addr32 { Register::EAX } else { Register::RAX }, base as u32));
        instruction.set_memory_index(at(start, third as u32));
        instruction.set_memory_index_scale(1 << shift);
        instruction.set_memory_displ_size(1);
        instruction.set_memory_displacement64(if addr32 {
            displacement as u32 as u64
        } else {
            displacement as u64
        });
        let mut lanes = [0; 64];
        for lane in lanes.chunks_mut(index_size) {
            let target = if self.rng.percent(92) {
                arena::DATA + 0x80 + self.rng.below(0x1e00)
            } else {
                self.target(32, 8, 4)
            };
            let index = target.wrapping_sub(anchor) as i64 >> shift;
            lane.copy_from_slice(&index.to_le_bytes()[..index_size]);
        }
        let quarter = |q: usize| u128::from_le_bytes(std::array::from_fn(|i| lanes[16 * q + i]));
        draft
            .state
            .fpu
            .set_register(third as usize, std::array::from_fn(quarter));
        Some(())
    }

    /// Addresses in 16-bit code: either size, in a segment that reaches the target or does not.
    fn address_in_segments(&mut self, draft: &mut Draft, target: u64) -> Option<()> {
        let lea = draft.instruction.mnemonic() == Mnemonic::Lea;
        let segment = self.rng.pick(&[
            Register::DS,
            Register::DS,
            Register::DS,
            Register::ES,
            Register::SS,
            Register::CS,
        ]);
        let explicit = !lea && (segment != Register::DS || self.rng.percent(15));
        let base = |selector: u16| base_of(selector);
        let selector = match segment {
            Register::ES => draft.state.es_ds[0],
            Register::SS => draft.state.ss,
            Register::CS => draft.state.cs,
            _ => draft.state.es_ds[1],
        };
        // Segments that do not reach the target: a random offset inside, or the honest one, which faults.
        let mut offset = target.wrapping_sub(base(selector));
        if offset >= 0x2000 && self.rng.percent(80) {
            offset = 0x80 + self.rng.below(0xe00);
            if selector == draft.state.cs {
                offset = 0x20 + self.rng.below(0x40);
            }
        }
        if explicit {
            draft.instruction.set_segment_prefix(segment);
        }
        if self.rng.percent(70) {
            self.address16(draft, offset & 0xffff)
        } else {
            self.address(draft, offset & 0xffff_ffff, true)
        }
    }

    /// 16-bit addressing: any of the eight combinations, or a displacement alone.
    fn address16(&mut self, draft: &mut Draft, offset: u64) -> Option<()> {
        use Register as R;
        let combinations = [
            (R::BX, R::SI),
            (R::BX, R::DI),
            (R::BP, R::SI),
            (R::BP, R::DI),
            (R::SI, R::None),
            (R::DI, R::None),
            (R::BP, R::None),
            (R::BX, R::None),
            (R::None, R::None),
        ];
        let (base, index) = self.rng.pick(&combinations);
        let mut sum = 0_u64;
        let mut solvable = None;
        for register in [base, index] {
            if register == R::None {
                continue;
            }
            let at = gpr_index(register);
            if !draft.is_fixed(at) {
                solvable = Some(at);
                draft.fixed |= 1 << at;
            }
            sum = sum.wrapping_add(draft.state.gpr[at]);
        }
        let mut displacement = offset.wrapping_sub(sum) & 0xffff;
        if let Some(at) = solvable {
            // A short displacement, or none, and the register makes up for it.
            let wanted = match self.rng.below(3) {
                0 => 0,
                1 => i64::from(self.rng.next() as i8) as u64 & 0xffff,
                _ => self.rng.next() & 0xffff,
            };
            let value = draft.state.gpr[at].wrapping_add(displacement).wrapping_sub(wanted);
            draft.state.gpr[at] = draft.state.gpr[at] & !0xffff | value & 0xffff;
            displacement = wanted;
        }
        draft.instruction.set_memory_base(base);
        draft.instruction.set_memory_index(index);
        let short = displacement as u16 as i16 == i16::from(displacement as i8);
        draft.instruction.set_memory_displ_size(if base == R::None {
            2
        } else if short {
            1
        } else {
            2
        });
        draft.instruction.set_memory_displacement64(displacement);
        Some(())
    }

    /// Finds a base, index, scale and displacement that give `offset`.
    fn address(&mut self, draft: &mut Draft, offset: u64, addr32: bool) -> Option<()> {
        let wide = draft.bits == 64;
        let first = if addr32 { Register::EAX } else { Register::RAX };
        let mask = if addr32 { 0xffff_ffff } else { u64::MAX };
        let fits = |displacement: u64| addr32 || displacement as i64 == i64::from(displacement as i32);
        let full = if addr32 { 4 } else { 8 };
        for _ in 0..12 {
            let shape = self.rng.below(if wide { 12 } else { 11 });
            let rng = &mut self.rng;
            let displacement = match rng.below(10) {
                0..3 => 0,
                3..7 => rng.next() as i8 as i64 as u64,
                _ => rng.value() as i32 as i64 as u64,
            };
            let instruction = &mut draft.instruction;
            instruction.set_memory_base(Register::None);
            instruction.set_memory_index(Register::None);
            instruction.set_memory_index_scale(1);
            if shape == 11 {
                // RIP-relative: iced holds the target.
                instruction.set_memory_base(if addr32 { Register::EIP } else { Register::RIP });
                instruction.set_memory_displ_size(full);
                instruction.set_memory_displacement64(offset);
                if !addr32 && !(-0x7fff_0000..0x7fff_0000).contains(&(offset.wrapping_sub(draft.state.rip) as i64)) {
                    continue;
                }
                return Some(());
            }
            if shape == 10 {
                if !fits(offset) {
                    continue;
                }
                instruction.set_memory_displ_size(full);
                instruction.set_memory_displacement64(offset);
                return Some(());
            }
            let base = rng.below(if wide { 16 } else { 8 }) as usize;
            let mut index = rng.below(if wide { 16 } else { 8 }) as usize;
            if index == RSP {
                index = RBX;
            }
            let scale_shift = rng.below(4) as u32;
            let scale = 1_u64 << scale_shift;
            let has_base = shape < 8;
            let has_index = (4..10).contains(&shape);
            let index_value = if draft.is_fixed(index) {
                draft.state.gpr[index]
            } else {
                rng.value()
            } & mask;
            let displacement = match (has_base, has_index) {
                (true, false) if draft.is_fixed(base) => offset.wrapping_sub(draft.state.gpr[base]) & mask,
                (true, false) => {
                    draft.fix(base, offset.wrapping_sub(displacement) & mask);
                    displacement
                }
                (true, true) if base == index => {
                    if draft.is_fixed(base) {
                        offset.wrapping_sub(index_value.wrapping_mul(1 + scale)) & mask
                    } else {
                        let value = offset / (1 + scale);
                        draft.fix(base, value);
                        offset.wrapping_sub(value.wrapping_mul(1 + scale)) & mask
                    }
                }
                (true, true) if draft.is_fixed(base) => {
                    if !draft.is_fixed(index) && !addr32 {
                        draft.fix(index, rng.below(0x1000));
                    } else {
                        draft.fix(index, index_value);
                    }
                    let index_value = draft.state.gpr[index];
                    offset
                        .wrapping_sub(draft.state.gpr[base])
                        .wrapping_sub(index_value.wrapping_mul(scale))
                        & mask
                }
                (true, true) => {
                    draft.fix(index, index_value);
                    draft.fix(
                        base,
                        offset
                            .wrapping_sub(displacement)
                            .wrapping_sub(index_value.wrapping_mul(scale))
                            & mask,
                    );
                    displacement
                }
                _ if draft.is_fixed(index) => offset.wrapping_sub(index_value.wrapping_mul(scale)) & mask,
                _ => {
                    let displacement = (displacement & !(scale - 1)).wrapping_add(offset & (scale - 1));
                    if displacement as i64 != i64::from(displacement as i32) {
                        continue;
                    }
                    let mut value = (offset.wrapping_sub(displacement) & mask) >> scale_shift;
                    // Bits that the scaling shifts out.
                    if !addr32 && scale_shift > 0 {
                        value |= rng.next() << (64 - scale_shift);
                    }
                    draft.fix(index, value);
                    displacement
                }
            };
            if !fits(displacement) {
                continue;
            }
            let displacement = if addr32 {
                displacement as u32 as i32 as i64 as u64
            } else {
                displacement
            };
            let instruction = &mut draft.instruction;
            if has_base {
                instruction.set_memory_base(at(first, base as u32));
            }
            if has_index {
                instruction.set_memory_index(at(first, index as u32));
                instruction.set_memory_index_scale(1 << scale_shift);
            }
            let displ_size = match displacement {
                _ if !has_base => full,
                0 if rng.percent(60) => 0,
                _ if displacement as i64 == i64::from(displacement as i8) && rng.percent(70) => 1,
                _ => full,
            };
            instruction.set_memory_displ_size(displ_size);
            instruction.set_memory_displacement64(if addr32 {
                displacement & 0xffff_ffff
            } else {
                displacement
            });
            if addr32 && wide {
                // What 32-bit addressing must ignore.
                for (used, register) in [(has_base, base), (has_index, index)] {
                    if used {
                        draft.state.gpr[register] = draft.state.gpr[register] & 0xffff_ffff | rng.next() << 32;
                    }
                }
            }
            return Some(());
        }
        None
    }
}

/// The bytes of a vector register.
fn vector(state: &State, register: Register) -> [u8; 64] {
    let mut bytes = [0; 64];
    let quarters = state.fpu.register(register.number());
    for (part, quarter) in bytes.chunks_exact_mut(16).zip(quarters) {
        part.copy_from_slice(&quarter.to_le_bytes());
    }
    bytes
}

/// Whether a gather's indices have 8 bytes.
pub fn has_wide_indices(instruction: &Instruction) -> bool {
    use Mnemonic as M;
    matches!(
        instruction.mnemonic(),
        M::Vgatherqps
            | M::Vgatherqpd
            | M::Vpgatherqd
            | M::Vpgatherqq
            | M::Vscatterqps
            | M::Vscatterqpd
            | M::Vpscatterqd
            | M::Vpscatterqq
    )
}

/// Where the elements of a gather or a scatter are whose mask is set.
pub fn gathered(instruction: &Instruction, state: &State) -> Vec<u64> {
    let wide = instruction.memory_size().element_size() == 8;
    let wide_index = has_wide_indices(instruction);
    let (size, index_size) = (if wide { 8 } else { 4 }, if wide_index { 8 } else { 4 });
    let opmask = instruction.has_op_mask();
    let data = instruction.op_register(if instruction.op_kind(0) == OpKind::Memory { 1 } else { 0 });
    let mask = if opmask {
        [0; 64]
    } else {
        vector(state, instruction.op_register(2))
    };
    let chosen = |i: usize| match opmask {
        true => state.fpu.wide.k[instruction.op_mask().number()] >> i & 1 != 0,
        false => mask[size * i + size - 1] & 0x80 != 0,
    };
    let indices = vector(state, instruction.memory_index());
    let base = register_value(state, instruction.memory_base()).unwrap_or(0);
    let count = (data.size() / size).min(instruction.memory_index().size() / index_size);
    (0..count)
        .filter(|&i| chosen(i))
        .map(|i| {
            let at = index_size * i;
            let index = if wide_index {
                i64::from_le_bytes(std::array::from_fn(|k| indices[at + k]))
            } else {
                i64::from(i32::from_le_bytes(std::array::from_fn(|k| indices[at + k])))
            };
            let offset = index.wrapping_mul(i64::from(instruction.memory_index_scale())) as u64;
            let sum = base
                .wrapping_add(instruction.memory_displacement64())
                .wrapping_add(offset);
            if instruction.memory_base().size() == 4 {
                sum & 0xffff_ffff
            } else {
                sum
            }
        })
        .collect()
}
