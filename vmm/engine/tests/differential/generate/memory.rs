//! What memory holds where an instruction looks.

use iced_x86::{MemorySize, Mnemonic, OpCodeOperandKind, OpKind, Register};

use super::{Draft, Generator, RAX, RCX, RDI, RDX, RSI, code_selectors, gpr_index};
use crate::arena;
use crate::forms::Family;
use crate::state::{base_of, flag};

impl Generator {
    /// Fills the memory that an operand reads.
    pub(super) fn poke_operand(&mut self, draft: &mut Draft, target: u64, size: u64) {
        use Mnemonic as M;
        let code = draft.instruction.code();
        let mut bytes = vec![0; size as usize + 48];
        self.rng.fill(&mut bytes);
        match code.op_code().memory_size() {
            MemorySize::Float80 => {
                let (significand, top) = self.rng.f80();
                bytes[16..24].copy_from_slice(&significand.to_le_bytes());
                bytes[24..26].copy_from_slice(&top.to_le_bytes());
            }
            MemorySize::Float64 => bytes[16..24].copy_from_slice(&self.rng.f64().to_le_bytes()),
            MemorySize::Float32 => bytes[16..20].copy_from_slice(&self.rng.f32().to_le_bytes()),
            MemorySize::Bcd => {
                for byte in &mut bytes[16..26] {
                    *byte = (self.rng.below(10) << 4 | self.rng.below(10)) as u8;
                }
            }
            MemorySize::Int16 | MemorySize::Int32 | MemorySize::Int64 => {
                bytes[16..24].copy_from_slice(&self.rng.value().to_le_bytes());
            }
            MemorySize::FpuEnv14 | MemorySize::FpuEnv28 | MemorySize::FpuState94 | MemorySize::FpuState108 => {
                let mut random = self.fpu(Family::X87);
                if self.rng.percent(70) {
                    random.fsw &= !0x80ff;
                }
                let wide = matches!(
                    code.op_code().memory_size(),
                    MemorySize::FpuEnv28 | MemorySize::FpuState108
                );
                let stride = if wide { 4 } else { 2 };
                for (i, word) in [random.fcw, random.fsw, self.rng.next() as u16].into_iter().enumerate() {
                    bytes[16 + stride * i..18 + stride * i].copy_from_slice(&word.to_le_bytes());
                }
            }
            MemorySize::Fxsave_512Byte | MemorySize::Fxsave64_512Byte => {
                let random = self.fpu(Family::X87);
                let mut image = [0; 512];
                random.to_image(&mut image);
                if self.rng.percent(5) {
                    image[27] = 1;
                }
                bytes[16..528].copy_from_slice(&image);
            }
            MemorySize::Xsave | MemorySize::Xsave64 => self.xsave_area(&mut bytes[16..16 + 832]),
            _ if size == 16 || size == 32 => {
                for lane in bytes[16..16 + size as usize].chunks_mut(16) {
                    lane.copy_from_slice(&self.rng.vector().to_le_bytes());
                }
            }
            _ => {}
        }
        match code.mnemonic() {
            M::Jmp | M::Call => {
                let branch = self.branch_target(draft, false);
                let far = code.is_jmp_far_indirect() || code.is_call_far_indirect();
                let offset_bytes = if far { size as usize - 2 } else { size as usize };
                bytes[16..16 + offset_bytes].copy_from_slice(&branch.to_le_bytes()[..offset_bytes]);
                if far {
                    let cs = if self.rng.percent(80) {
                        self.rng.pick(code_selectors(draft.bits))
                    } else {
                        self.selector()
                    };
                    let branch = branch.wrapping_add(base_of(draft.state.cs)).wrapping_sub(base_of(cs));
                    bytes[16..16 + offset_bytes].copy_from_slice(&branch.to_le_bytes()[..offset_bytes]);
                    bytes[16 + offset_bytes..18 + offset_bytes].copy_from_slice(&cs.to_le_bytes());
                }
            }
            M::Lss | M::Lfs | M::Lgs | M::Lds | M::Les => {
                let register = match code.mnemonic() {
                    M::Lfs | M::Lgs => Register::FS,
                    _ => Register::SS,
                };
                let selector = self.selector_for(register).to_le_bytes();
                bytes[16 + size as usize - 2..16 + size as usize].copy_from_slice(&selector);
            }
            M::Mov if draft.instruction.op0_register().is_segment_register() => {
                let selector = self.selector_for(draft.instruction.op0_register()).to_le_bytes();
                bytes[16..18].copy_from_slice(&selector);
            }
            M::Cmpxchg if self.rng.percent(50) => {
                let value = draft.state.gpr[RAX].to_le_bytes();
                bytes[16..16 + size as usize].copy_from_slice(&value[..size as usize]);
            }
            M::Cmpxchg8b | M::Cmpxchg16b => {
                let half = size as usize / 2;
                for (register, at) in [(RAX, 16), (RDX, 16 + half)] {
                    let value = draft.state.gpr[register];
                    draft.fix(register, value);
                    if self.rng.percent(70) {
                        bytes[at..at + half].copy_from_slice(&value.to_le_bytes()[..half]);
                    }
                }
            }
            M::Bound => {
                let half = size as usize / 2;
                let value = draft.state.gpr[gpr_index(draft.instruction.op0_register())];
                draft.fix(gpr_index(draft.instruction.op0_register()), value);
                for (at, delta) in [
                    (16, self.rng.below(40)),
                    (16 + half, 0_u64.wrapping_sub(self.rng.below(40))),
                ] {
                    let bound = value.wrapping_sub(delta).wrapping_add(self.rng.below(3));
                    bytes[at..at + half].copy_from_slice(&bound.to_le_bytes()[..half]);
                }
            }
            M::Div | M::Idiv if self.rng.percent(50) => {
                bytes[16..24].copy_from_slice(&(self.rng.below(200) + 1).to_le_bytes())
            }
            _ => {}
        }
        draft.poke(target.wrapping_sub(16), &bytes);
    }

    /// An area for XRSTOR, in either format, mostly one that it takes. SDM Vol. 1 13.4 "XSAVE Area".
    fn xsave_area(&mut self, area: &mut [u8]) {
        let random = self.fpu(Family::Xstate);
        let mut image = [0; 512];
        random.to_image(&mut image);
        if self.rng.percent(5) {
            image[27] = 1;
        }
        area[..512].copy_from_slice(&image);
        area[512..576].fill(0);
        let mut present = self.rng.below(8);
        let mut compacted = 0;
        if self.rng.percent(40) {
            let holds = self.rng.below(8);
            if self.rng.percent(90) {
                present &= holds;
            }
            compacted = 1 << 63 | holds;
        }
        if self.rng.percent(6) {
            // Bits that no XCR0 has: some are of supervisor state (SDM Vol. 1 13.1).
            present |= 1 << self.rng.pick(&[11, 12, 10, 40, 63]);
        }
        if self.rng.percent(6) {
            compacted |= 1 << self.rng.pick(&[0, 11, 12, 40, 61]);
        }
        area[512..520].copy_from_slice(&present.to_le_bytes());
        area[520..528].copy_from_slice(&compacted.to_le_bytes());
        if self.rng.percent(6) {
            area[self.rng.pick(&[528, 535, 536, 575])] = 1;
        }
        for (half, to) in random.ymm_hi.iter().zip(area[576..].chunks_mut(16)) {
            to.copy_from_slice(&half.to_le_bytes());
        }
    }

    /// RSI, RDI and RCX of string instructions, and their prefixes.
    pub(super) fn string_operands(&mut self, draft: &mut Draft, kinds: &[OpCodeOperandKind]) {
        use OpCodeOperandKind as K;
        let code = draft.instruction.code();
        let bits = draft.bits;
        let addr32 = match bits {
            64 => self.rng.percent(15),
            32 => true,
            _ => self.rng.percent(30),
        };
        let element = code.op_code().memory_size().size().max(1) as u64;
        if self.rng.percent(30) {
            draft.state.rflags |= flag::DF;
        }
        let repeatable = code.op_code().can_use_rep_prefix() || code.op_code().can_use_repne_prefix();
        let mut count = 1;
        if repeatable && self.rng.percent(65) {
            count = match self.rng.below(6) {
                0 => self.rng.below(3),
                5 => self.rng.below(0x500),
                _ => self.rng.below(40),
            };
            if self.rng.percent(50) && code.op_code().can_use_repne_prefix() {
                draft.instruction.set_has_repne_prefix(true);
            } else if code.op_code().can_use_rep_prefix() {
                draft.instruction.set_has_rep_prefix(true);
            } else {
                draft.instruction.set_has_repne_prefix(true);
            }
            // Whether a count of zero is allowed to make an I/O instruction do nothing differs.
            if code.is_privileged() {
                count = count.max(1);
            }
            let rcx = match (addr32, bits) {
                (true, _) => count | self.rng.next() << 32,
                (false, 16) => count | self.rng.next() << 16,
                _ => count,
            };
            draft.fix(RCX, rcx);
        }
        let span = (count * element).min(0x600);
        let mut source = None;
        for (i, kind) in kinds.iter().enumerate() {
            let i = i as u32;
            let narrow = bits == 16;
            let (register, op_kind, op_kind32) = match kind {
                K::seg_rSI if narrow => (RSI, OpKind::MemorySegSI, OpKind::MemorySegESI),
                K::es_rDI if narrow => (RDI, OpKind::MemoryESDI, OpKind::MemoryESEDI),
                K::seg_rDI if narrow => (RDI, OpKind::MemorySegDI, OpKind::MemorySegEDI),
                K::seg_rSI => (RSI, OpKind::MemorySegRSI, OpKind::MemorySegESI),
                K::es_rDI => (RDI, OpKind::MemoryESRDI, OpKind::MemoryESEDI),
                K::seg_rDI => (RDI, OpKind::MemorySegRDI, OpKind::MemorySegEDI),
                K::seg_rBX_al => {
                    // XLAT: RBX was solved for in `implicit`.
                    draft.instruction.set_op_kind(i, OpKind::Memory);
                    let base = match (addr32, bits) {
                        (_, 16) => Register::BX,
                        (true, _) => Register::EBX,
                        _ => Register::RBX,
                    };
                    draft.instruction.set_memory_base(base);
                    draft.instruction.set_memory_index(Register::AL);
                    continue;
                }
                _ => continue,
            };
            draft
                .instruction
                .set_op_kind(i, if addr32 { op_kind32 } else { op_kind });
            let size = if self.rng.percent(70) { span.max(1) } else { element };
            let mut target = self.target(if addr32 { 32 } else { bits }, size, 1);
            // Overlapping moves are where the order of the iterations shows.
            if let Some(source) = source
                && self.rng.percent(30)
            {
                target = source + self.rng.below(24) - 12;
            }
            source = Some(target);
            if arena::contained(target, 1) {
                let mut bytes = vec![0; span as usize + 64];
                self.rng.fill(&mut bytes);
                if self.rng.percent(50) {
                    let fill = draft.state.gpr[RAX] as u8;
                    bytes.fill(fill);
                    if self.rng.percent(70) {
                        let at = self.rng.below(bytes.len() as u64) as usize;
                        bytes[at] ^= 1;
                    }
                }
                draft.poke(target.wrapping_sub(16), &bytes);
            }
            if draft.state.rflags & flag::DF != 0 && count > 1 && arena::contained(target, 1) {
                target += span.saturating_sub(element);
            }
            let value = if addr32 {
                target & 0xffff_ffff | self.rng.next() << 32
            } else {
                target
            };
            draft.fix(register, value);
        }
        let overridable = kinds.iter().any(|kind| matches!(kind, K::seg_rSI | K::seg_rBX_al));
        if overridable && self.rng.percent(10) {
            let segments = [Register::ES, Register::CS, Register::SS, Register::DS];
            draft.instruction.set_segment_prefix(self.rng.pick(&segments));
        }
    }
}
