//! The x87, MMX, SSE, AVX and AVX-512 registers as plain data, and every memory image the instruction set has of them.
//!
//! Nothing here touches guest memory: the functions turn the state into bytes and bytes into state, and the caller does the
//! address translation and its faults. SDM Vol. 1 chapter 8 "Programming with the x87 FPU", 10.5 "FXSAVE and FXRSTOR
//! Instructions" and chapter 13 "Managing State Using the XSAVE Feature Set".

use std::mem::offset_of;

use serde::{Deserialize, Serialize};

/// Bits of the x87 status word. SDM Vol. 1 8.1.3 "x87 FPU Status Register".
pub mod sw {
    /// Invalid operation.
    pub const IE: u16 = 1 << 0;
    /// Denormal operand.
    pub const DE: u16 = 1 << 1;
    /// Zero divide.
    pub const ZE: u16 = 1 << 2;
    /// Overflow.
    pub const OE: u16 = 1 << 3;
    /// Underflow.
    pub const UE: u16 = 1 << 4;
    /// Precision.
    pub const PE: u16 = 1 << 5;
    /// Stack fault: IE was a stack overflow (C1 set) or underflow (C1 clear).
    pub const SF: u16 = 1 << 6;
    /// Error summary: an unmasked exception is pending.
    pub const ES: u16 = 1 << 7;
    /// Condition code 0.
    pub const C0: u16 = 1 << 8;
    /// Condition code 1: also "rounded up" and the direction of a stack fault.
    pub const C1: u16 = 1 << 9;
    /// Condition code 2: also "reduction incomplete".
    pub const C2: u16 = 1 << 10;
    /// Condition code 3.
    pub const C3: u16 = 1 << 14;
    /// FPU busy; a copy of ES since the 387.
    pub const B: u16 = 1 << 15;
    /// The top-of-stack pointer.
    pub const TOP: u16 = 7 << 11;
    /// The six exception flags.
    pub const EXCEPTIONS: u16 = 0x3f;
}

/// Bits of MXCSR. SDM Vol. 1 10.2.3 "MXCSR Control and Status Register".
pub mod mxcsr {
    /// The six sticky exception flags IE, DE, ZE, OE, UE, PE.
    pub const FLAGS: u32 = 0x3f;
    /// Denormals are zeros.
    pub const DAZ: u32 = 1 << 6;
    /// The six mask bits, in the order of the flags.
    pub const MASKS: u32 = 0x3f << 7;
    /// The mask of the underflow exception.
    pub const UM: u32 = 1 << 11;
    /// Rounding control.
    pub const RC: u32 = 3 << 13;
    /// Flush to zero.
    pub const FTZ: u32 = 1 << 15;
    /// The value after reset and after an XRSTOR that initialises SSE.
    pub const RESET: u32 = 0x1f80;
}

/// XCR0 and XSTATE_BV bits. SDM Vol. 1 13.1 "XSAVE-Supported Features and State-Component Bitmaps".
pub mod xstate {
    /// x87 state.
    pub const X87: u64 = 1 << 0;
    /// SSE state: the XMM registers (MXCSR is shared with AVX).
    pub const SSE: u64 = 1 << 1;
    /// AVX state: the upper halves of the YMM registers.
    pub const AVX: u64 = 1 << 2;
    /// Opmask state: k0 to k7.
    pub const OPMASK: u64 = 1 << 5;
    /// ZMM_Hi256 state: the upper halves of ZMM0 to ZMM15.
    pub const ZMM_HI256: u64 = 1 << 6;
    /// Hi16_ZMM state: ZMM16 to ZMM31.
    pub const HI16_ZMM: u64 = 1 << 7;
    /// AVX-512 state, which is enabled as a whole.
    pub const AVX512: u64 = OPMASK | ZMM_HI256 | HI16_ZMM;
    /// Length of the legacy region and the header: an area that holds x87 and SSE.
    pub const LEGACY_AND_HEADER: usize = 576;
}

/// A register image that cannot be loaded: the guest gets #GP(0).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadImage;

/// How x87 environments lie in memory: operand size and mode. SDM Vol. 1 8.1.10 "Saving the x87 FPU's State with
/// FSTENV/FNSTENV and FSAVE/FNSAVE", figures 8-9 to 8-12.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnvironmentFormat {
    /// The 32-bit layouts (28 bytes), else the 16-bit ones (14 bytes).
    pub wide: bool,
    /// Real-address or virtual-8086 mode: linear pointers and the opcode in place of selectors.
    pub real: bool,
}

impl EnvironmentFormat {
    /// Length of the environment: FSTENV, FLDENV.
    pub const fn environment_len(self) -> usize {
        if self.wide { 28 } else { 14 }
    }

    /// Length of environment and registers: FSAVE, FRSTOR.
    pub const fn save_len(self) -> usize {
        self.environment_len() + 80
    }
}

/// All floating-point and vector registers of one CPU.
///
/// The x87 registers are in *physical* order: ST(i) is `r[(TOP + i) & 7]` and MMi is the low half of `r[i]`. Each holds an
/// 80-bit value (sign and exponent in bits 79:64); bits 127:80 are zero. `tag` has one bit a physical register, set when the
/// register is not empty, as FXSAVE has it; the two-bit tags of FSTENV follow from the contents.
#[repr(C, align(64))]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FpuState {
    /// XMM0 to XMM15.
    pub xmm: [u128; 16],
    /// Bits 255:128 of YMM0 to YMM15.
    pub ymm_hi: [u128; 16],
    /// R0 to R7, the physical x87 registers.
    pub r: [u128; 8],
    /// Address of the last non-control x87 instruction.
    pub fip: u64,
    /// Address of its memory operand, if it had one.
    pub fdp: u64,
    /// MXCSR.
    pub mxcsr: u32,
    /// Bits of MXCSR that exist.
    pub mxcsr_mask: u32,
    /// The control word.
    pub cw: u16,
    /// The status word, TOP included.
    pub sw: u16,
    /// Opcode (11 bits) of the last x87 instruction that raised an unmasked exception.
    pub fop: u16,
    /// Code segment that belongs to `fip`.
    pub fcs: u16,
    /// Data segment that belongs to `fdp`.
    pub fds: u16,
    /// One bit a physical register: not empty.
    pub tag: u8,
    /// What AVX-512 adds.
    #[serde(with = "unless_initial")]
    pub avx512: Avx512State,
}

/// The opmask registers, and of the ZMM registers what is not in [`FpuState::xmm`] and [`FpuState::ymm_hi`].
///
/// A register is kept in quarters. Those of ZMM0 to ZMM15 are in [`FpuState::xmm`], [`FpuState::ymm_hi`] and `upper`, those of ZMM16 to
/// ZMM31 in `high` and `high_upper`, at the same distances from each other: host code that is given the address of a register's
/// lowest quarter finds the others ([`QUARTERS`]).
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Avx512State {
    /// Bits 383:256 of ZMM0 to ZMM15, then bits 511:384.
    upper: [[u128; 16]; 2],
    /// Bits 127:0 of ZMM16 to ZMM31, then bits 255:128.
    high: [[u128; 16]; 2],
    /// k0 to k7.
    pub k: [u64; 8],
    /// Makes the distances the same.
    #[serde(skip)]
    gap: [u64; 16],
    /// Bits 383:256 of ZMM16 to ZMM31, then bits 511:384.
    high_upper: [[u128; 16]; 2],
}

/// How far behind a register's lowest quarter each of its quarters is.
pub const QUARTERS: [usize; 4] = {
    let upper = offset_of!(FpuState, avx512) + offset_of!(Avx512State, upper) - offset_of!(FpuState, xmm);
    [
        0,
        offset_of!(FpuState, ymm_hi) - offset_of!(FpuState, xmm),
        upper,
        upper + 256,
    ]
};

/// Where ZMM16 begins in the state.
pub const HIGH: usize = offset_of!(FpuState, avx512) + offset_of!(Avx512State, high);

/// Where k0 is.
pub const OPMASKS: usize = offset_of!(FpuState, avx512) + offset_of!(Avx512State, k);

const _: () = {
    let high_upper = offset_of!(FpuState, avx512) + offset_of!(Avx512State, high_upper);
    assert!(QUARTERS[1] == 256 && high_upper == HIGH + QUARTERS[2]);
};

impl Avx512State {
    /// The initial configuration: all zero.
    pub const INITIAL: Avx512State = Avx512State {
        upper: [[0; 16]; 2],
        high: [[0; 16]; 2],
        k: [0; 8],
        gap: [0; 16],
        high_upper: [[0; 16]; 2],
    };
}

/// Avx512State in what is stored: nothing where it is in its initial configuration, as on every model without AVX-512.
mod unless_initial {
    use super::Avx512State;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(state: &Avx512State, to: S) -> Result<S::Ok, S::Error> {
        (*state != Avx512State::INITIAL).then_some(state).serialize(to)
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Avx512State, D::Error> {
        let state = Option::<Box<Avx512State>>::deserialize(from)?;
        Ok(state.map_or(Avx512State::INITIAL, |state| *state))
    }
}

impl Default for FpuState {
    fn default() -> Self {
        Self::new()
    }
}

const SIGNIFICAND_TOP: u64 = 1 << 63;

impl FpuState {
    /// The state after power-up or RESET. SDM Vol. 3A table 9-1 "IA-32 and Intel 64 Processor States Following Power-up,
    /// Reset, or INIT": CW 40H, every register +0 and valid.
    pub fn new() -> Self {
        FpuState {
            xmm: [0; 16],
            ymm_hi: [0; 16],
            r: [0; 8],
            fip: 0,
            fdp: 0,
            mxcsr: mxcsr::RESET,
            mxcsr_mask: 0xffff,
            cw: 0x40,
            sw: 0,
            fop: 0,
            fcs: 0,
            fds: 0,
            tag: 0xff,
            avx512: Avx512State::INITIAL,
        }
    }

    /// The quarters of ZMM `number`, 0 to 31, from the lowest.
    #[inline]
    pub fn zmm(&self, number: usize) -> [u128; 4] {
        let wide = &self.avx512;
        match number {
            0..16 => [
                self.xmm[number],
                self.ymm_hi[number],
                wide.upper[0][number],
                wide.upper[1][number],
            ],
            _ => {
                let n = number & 15;
                [
                    wide.high[0][n],
                    wide.high[1][n],
                    wide.high_upper[0][n],
                    wide.high_upper[1][n],
                ]
            }
        }
    }

    /// Writes them.
    #[inline]
    pub fn set_zmm(&mut self, number: usize, value: [u128; 4]) {
        let wide = &mut self.avx512;
        if number < 16 {
            [
                self.xmm[number],
                self.ymm_hi[number],
                wide.upper[0][number],
                wide.upper[1][number],
            ] = value;
            return;
        }
        let n = number & 15;
        [
            wide.high[0][n],
            wide.high[1][n],
            wide.high_upper[0][n],
            wide.high_upper[1][n],
        ] = value;
    }

    /// Clears bits 511:256 of ZMM `number`, 0 to 15, as an instruction with a VEX prefix does that writes its YMM register.
    /// SDM Vol. 1 15.5 "Accessing XMM, YMM AND ZMM Registers".
    #[inline]
    pub fn clear_zmm_upper(&mut self, number: usize) {
        self.avx512.upper[0][number & 15] = 0;
        self.avx512.upper[1][number & 15] = 0;
    }

    /// ZMM_Hi256 state as far as register `count`, 8 or 16: bits 511:256 of each.
    pub fn zmm_hi256(&self, count: usize) -> impl Iterator<Item = [u128; 2]> {
        let [low, high] = &self.avx512.upper;
        low.iter().zip(high).map(|(&low, &high)| [low, high]).take(count)
    }

    /// Loads it, 32 bytes a register; without bytes it becomes zero.
    pub fn load_zmm_hi256(&mut self, image: Option<&[u8]>, count: usize) {
        for n in 0..count {
            for (half, upper) in self.avx512.upper.iter_mut().enumerate() {
                upper[n] = image.map_or(0, |image| load128(&image[32 * n + 16 * half..]));
            }
        }
    }

    /// Loads ZMM16 to ZMM31, 64 bytes a register; without bytes they become zero.
    pub fn load_hi16_zmm(&mut self, image: Option<&[u8]>) {
        for n in 0..16 {
            let value = core::array::from_fn(|q| image.map_or(0, |image| load128(&image[64 * n + 16 * q..])));
            self.set_zmm(16 + n, value);
        }
    }

    /// Loads k0 to k7, 8 bytes a register; without bytes they become zero.
    pub fn load_opmasks(&mut self, image: Option<&[u8]>) {
        self.avx512.k = core::array::from_fn(|n| image.map_or(0, |image| load64(&image[8 * n..])));
    }

    /// FNINIT. The registers keep their contents but are empty.
    pub fn fninit(&mut self) {
        self.cw = 0x37f;
        self.sw = 0;
        self.tag = 0;
        self.fop = 0;
        self.fip = 0;
        self.fdp = 0;
        self.fcs = 0;
        self.fds = 0;
    }

    /// EMMS: all registers empty, TOP 0. SDM Vol. 3A Table 13-1 "Action Taken By MMX Instructions on the x87 FPU State".
    pub fn emms(&mut self) {
        self.tag = 0;
        self.set_top(0);
    }

    /// What every MMX instruction but EMMS does besides its own work: TOP to 0, all registers valid. SDM Vol. 1 9.6.2
    /// "Transitions Between x87 FPU and MMX Code".
    #[inline]
    pub fn enter_mmx(&mut self) {
        self.sw &= !sw::TOP;
        self.tag = 0xff;
    }

    /// A write to MMi sets the exponent and sign of the register to ones. SDM Vol. 1 9.2.1.
    #[inline]
    pub fn set_mm(&mut self, i: usize, value: u64) {
        self.r[i & 7] = 0xffff << 64 | value as u128;
    }

    /// The contents of MMi.
    #[inline]
    pub fn mm(&self, i: usize) -> u64 {
        self.r[i & 7] as u64
    }

    /// TOP.
    #[inline]
    pub fn top(&self) -> usize {
        (self.sw >> 11 & 7) as usize
    }

    /// Sets TOP.
    #[inline]
    pub fn set_top(&mut self, top: usize) {
        self.sw = self.sw & !sw::TOP | (top as u16 & 7) << 11;
    }

    /// An unmasked x87 exception is pending: the next waiting x87, MMX or FWAIT instruction raises #MF (or asserts FERR#
    /// when CR0.NE is clear).
    #[inline]
    pub fn pending(&self) -> bool {
        self.sw & sw::ES != 0
    }

    /// Makes ES and B follow from flags and masks.
    #[inline]
    pub fn summarise(&mut self) {
        if self.sw & !self.cw & sw::EXCEPTIONS != 0 {
            self.sw |= sw::ES | sw::B;
        } else {
            self.sw &= !(sw::ES | sw::B);
        }
    }

    /// FLDCW. Reserved bits read back as the hardware has them: bit 6 as 1, bits 7 and 15:13 as 0. An exception that was
    /// flagged before and is unmasked now becomes pending.
    pub fn fldcw(&mut self, cw: u16) {
        self.cw = cw & 0x1f7f | 0x40;
        self.summarise();
    }

    /// FNCLEX.
    pub fn fnclex(&mut self) {
        self.sw &= !(sw::EXCEPTIONS | sw::SF | sw::ES | sw::B);
    }

    /// LDMXCSR.
    pub fn ldmxcsr(&mut self, value: u32) -> Result<(), BadImage> {
        if value & !self.mxcsr_mask != 0 {
            return Err(BadImage);
        }
        self.mxcsr = value;
        Ok(())
    }

    /// The full tag word: two bits a physical register. 00 valid, 01 zero, 10 special, 11 empty.
    pub fn full_tags(&self) -> u16 {
        let mut tags = 0;
        for (i, &r) in self.r.iter().enumerate() {
            let (significand, exponent) = (r as u64, (r >> 64) as u16 & 0x7fff);
            let tag = if self.tag >> i & 1 == 0 {
                3
            } else if exponent == 0 && significand == 0 {
                1
            } else if exponent == 0 || exponent == 0x7fff || significand & SIGNIFICAND_TOP == 0 {
                2
            } else {
                0
            };
            tags |= tag << (2 * i);
        }
        tags
    }

    fn set_full_tags(&mut self, tags: u16) {
        self.tag = 0;
        for i in 0..8 {
            if tags >> (2 * i) & 3 != 3 {
                self.tag |= 1 << i;
            }
        }
    }

    /// FNSTENV: writes the environment to the first [`EnvironmentFormat::environment_len`] bytes and masks all exceptions.
    pub fn fnstenv(&mut self, format: EnvironmentFormat) -> [u8; 28] {
        let image = self.environment(format);
        self.cw |= sw::EXCEPTIONS;
        self.summarise();
        image
    }

    fn environment(&self, format: EnvironmentFormat) -> [u8; 28] {
        let ip = (self.fip as u32).wrapping_add((self.fcs as u32) << 4);
        let dp = (self.fdp as u32).wrapping_add((self.fds as u32) << 4);
        let fop = (self.fop & 0x7ff) as u32;
        let (cw, sw, tw) = (self.cw as u32, self.sw as u32, self.full_tags() as u32);
        let fields: [u32; 7] = match format {
            EnvironmentFormat { real: false, .. } => [
                cw,
                sw,
                tw,
                self.fip as u32,
                self.fcs as u32 | fop << 16,
                self.fdp as u32,
                self.fds as u32 | 0xffff_0000,
            ],
            EnvironmentFormat { real: true, wide: true } => [
                cw,
                sw,
                tw,
                ip | 0xffff_0000,
                ip >> 16 << 12 | fop,
                dp | 0xffff_0000,
                dp >> 16 << 12,
            ],
            EnvironmentFormat {
                real: true,
                wide: false,
            } => [cw, sw, tw, ip, (ip >> 16 & 0xf) << 12 | fop, dp, (dp >> 16 & 0xf) << 12],
        };
        let mut image = [0; 28];
        for (i, &field) in fields.iter().enumerate() {
            if format.wide {
                // The upper halves of the first three words are reserved; the hardware writes ones.
                let field = if i < 3 { field | 0xffff_0000 } else { field };
                image[i * 4..i * 4 + 4].copy_from_slice(&field.to_le_bytes());
            } else {
                image[i * 2..i * 2 + 2].copy_from_slice(&(field as u16).to_le_bytes());
            }
        }
        image
    }

    /// FLDENV, from the first [`EnvironmentFormat::environment_len`] bytes.
    pub fn fldenv(&mut self, image: &[u8; 28], format: EnvironmentFormat) {
        let field = |i: usize| -> u32 {
            if format.wide {
                u32::from_le_bytes([image[i * 4], image[i * 4 + 1], image[i * 4 + 2], image[i * 4 + 3]])
            } else {
                u16::from_le_bytes([image[i * 2], image[i * 2 + 1]]) as u32
            }
        };
        self.cw = field(0) as u16 & 0x1f7f | 0x40;
        self.sw = field(1) as u16;
        self.set_full_tags(field(2) as u16);
        match format {
            EnvironmentFormat { real: false, wide } => {
                self.fip = field(3) as u64;
                self.fcs = field(4) as u16;
                // The 16-bit protected layout has no room for the opcode.
                self.fop = if wide { (field(4) >> 16) as u16 & 0x7ff } else { 0 };
                self.fdp = field(5) as u64;
                self.fds = field(6) as u16;
            }
            EnvironmentFormat { real: true, wide } => {
                let high = |w: u32| {
                    if wide {
                        (w >> 12 & 0xffff) << 16
                    } else {
                        (w >> 12 & 0xf) << 16
                    }
                };
                self.fip = (field(3) & 0xffff | high(field(4))) as u64;
                self.fop = field(4) as u16 & 0x7ff;
                self.fdp = (field(5) & 0xffff | high(field(6))) as u64;
                self.fcs = 0;
                self.fds = 0;
            }
        }
        self.summarise();
    }

    /// FNSAVE: environment and registers in stack order, in the first [`EnvironmentFormat::save_len`] bytes; then FNINIT.
    pub fn fnsave(&mut self, format: EnvironmentFormat) -> [u8; 108] {
        let mut image = [0; 108];
        let at = format.environment_len();
        image[..at].copy_from_slice(&self.environment(format)[..at]);
        for i in 0..8 {
            image[at + i * 10..at + i * 10 + 10].copy_from_slice(&self.st(i).to_le_bytes()[..10]);
        }
        self.fninit();
        image
    }

    /// FRSTOR.
    pub fn frstor(&mut self, image: &[u8; 108], format: EnvironmentFormat) {
        let mut environment = [0; 28];
        environment.copy_from_slice(&image[..28]);
        self.fldenv(&environment, format);
        let at = format.environment_len();
        for i in 0..8 {
            self.set_st(i, load80(&image[at + i * 10..]));
        }
    }

    /// The 80 bits of ST(i), empty or not.
    #[inline]
    pub fn st(&self, i: usize) -> u128 {
        self.r[(self.top() + i) & 7]
    }

    /// Writes the 80 bits of ST(i); the tag stays.
    #[inline]
    pub fn set_st(&mut self, i: usize, value: u128) {
        let i = (self.top() + i) & 7;
        self.r[i] = value & ((1 << 80) - 1);
    }

    /// The x87 half of the FXSAVE layout: bytes 0 to 23, with 64-bit instruction and data pointers (REX.W) or without.
    fn legacy_x87(&self, rex_w: bool) -> [u8; 24] {
        let mut image = [0; 24];
        image[0..2].copy_from_slice(&self.cw.to_le_bytes());
        image[2..4].copy_from_slice(&self.sw.to_le_bytes());
        image[4] = self.tag;
        image[6..8].copy_from_slice(&(self.fop & 0x7ff).to_le_bytes());
        if rex_w {
            image[8..16].copy_from_slice(&self.fip.to_le_bytes());
            image[16..24].copy_from_slice(&self.fdp.to_le_bytes());
        } else {
            image[8..12].copy_from_slice(&(self.fip as u32).to_le_bytes());
            image[12..14].copy_from_slice(&self.fcs.to_le_bytes());
            image[16..20].copy_from_slice(&(self.fdp as u32).to_le_bytes());
            image[20..22].copy_from_slice(&self.fds.to_le_bytes());
        }
        image
    }

    /// XRSTOR and FXRSTOR of the x87 registers, from the legacy region.
    pub fn load_x87(&mut self, image: &[u8], rex_w: bool) {
        self.cw = u16::from_le_bytes([image[0], image[1]]) & 0x1f7f | 0x40;
        self.sw = u16::from_le_bytes([image[2], image[3]]);
        self.tag = image[4];
        self.fop = u16::from_le_bytes([image[6], image[7]]) & 0x7ff;
        if rex_w {
            self.fip = load64(&image[8..]);
            self.fdp = load64(&image[16..]);
            self.fcs = 0;
            self.fds = 0;
        } else {
            self.fip = load64(&image[8..]) as u32 as u64;
            self.fcs = u16::from_le_bytes([image[12], image[13]]);
            self.fdp = load64(&image[16..]) as u32 as u64;
            self.fds = u16::from_le_bytes([image[20], image[21]]);
        }
        self.summarise();
        for i in 0..8 {
            self.set_st(i, load80(&image[32 + i * 16..]));
        }
    }

    /// FXSAVE. `long`: 64-bit mode, where XMM8 to XMM15 are saved too; `rex_w`: 64-bit pointers. Of the result the first
    /// [`fxsave_len`] bytes are to be written; the rest of the 512 bytes in memory stays as it is.
    pub fn fxsave(&self, long: bool, rex_w: bool) -> [u8; 416] {
        let mut image = [0; 416];
        image[..24].copy_from_slice(&self.legacy_x87(rex_w));
        image[24..28].copy_from_slice(&self.mxcsr.to_le_bytes());
        image[28..32].copy_from_slice(&self.mxcsr_mask.to_le_bytes());
        for i in 0..8 {
            image[32 + i * 16..48 + i * 16].copy_from_slice(&self.st(i).to_le_bytes());
        }
        for i in 0..if long { 16 } else { 8 } {
            image[160 + i * 16..176 + i * 16].copy_from_slice(&self.xmm[i].to_le_bytes());
        }
        image
    }

    /// FXRSTOR, from the first 416 bytes of the image.
    ///
    /// # Errors
    /// A reserved bit of MXCSR is set: #GP(0), and nothing was loaded.
    pub fn fxrstor(&mut self, image: &[u8; 416], long: bool, rex_w: bool) -> Result<(), BadImage> {
        self.ldmxcsr(load64(&image[24..]) as u32)?;
        self.load_x87(image, rex_w);
        self.load_xmm(image, long);
        Ok(())
    }

    /// The same of the XMM registers.
    pub fn load_xmm(&mut self, image: &[u8], long: bool) {
        for i in 0..if long { 16 } else { 8 } {
            self.xmm[i] = load128(&image[160 + i * 16..]);
        }
    }

    /// XINUSE: which of x87, SSE, AVX and AVX-512 state are not in their initial configuration. SDM Vol. 1 13.6 "Processor Tracking of
    /// XSAVE-Managed State". Outside 64-bit mode the registers from 8 up do not count for what is saved, but they do here,
    /// as the manual leaves a set bit always allowed.
    pub fn xinuse(&self) -> u64 {
        let x87 = self.cw != 0x37f
            || self.sw != 0
            || self.tag != 0
            || self.fop != 0
            || self.fip != 0
            || self.fdp != 0
            || self.fcs != 0
            || self.fds != 0
            || self.r != [0; 8];
        let sse = self.xmm != [0; 16];
        let avx = self.ymm_hi != [0; 16];
        let wide = &self.avx512;
        let opmask = wide.k != [0; 8];
        let hi256 = wide.upper != [[0; 16]; 2];
        let hi16 = (&wide.high, &wide.high_upper) != (&[[0; 16]; 2], &[[0; 16]; 2]);
        x87 as u64 * xstate::X87
            + sse as u64 * xstate::SSE
            + avx as u64 * xstate::AVX
            + opmask as u64 * xstate::OPMASK
            + hi256 as u64 * xstate::ZMM_HI256
            + hi16 as u64 * xstate::HI16_ZMM
    }
}

/// How many bytes FXSAVE writes: with XMM8 to XMM15 in 64-bit mode, without them elsewhere.
pub const fn fxsave_len(long: bool) -> usize {
    if long { 416 } else { 288 }
}

fn load64(bytes: &[u8]) -> u64 {
    let mut le = [0; 8];
    le.copy_from_slice(&bytes[..8]);
    u64::from_le_bytes(le)
}

fn load80(bytes: &[u8]) -> u128 {
    let mut le = [0; 16];
    le[..10].copy_from_slice(&bytes[..10]);
    u128::from_le_bytes(le)
}

fn load128(bytes: &[u8]) -> u128 {
    let mut le = [0; 16];
    le.copy_from_slice(&bytes[..16]);
    u128::from_le_bytes(le)
}

#[cfg(test)]
#[path = "state_test.rs"]
mod tests;
