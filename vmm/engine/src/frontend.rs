//! From bytes to blocks: what iced-x86 makes of them, which instructions the model has, and where a block ends.
//!
//! A block is a run of instructions within one page, at most [`MAX`] of them, that ends with the first instruction that may
//! go elsewhere. Blocks hold page-relative addresses only (base [`slot::PAGE`](crate::cpu::slot::PAGE)), so that they are keyed by
//! physical address and serve every mapping of the page. An instruction that straddles two pages has a block of its own, which
//! checks first that the second page is still mapped where it was.

use iced_x86::{CpuidFeature, Decoder, DecoderError, DecoderOptions, Instruction, Mnemonic};
use x86::cpuid::Features;
use x86::model::CpuModel;
use x86::vmx::controls::Secondary;

use crate::EngineOptions;
use crate::cpu::mode;
use crate::exec;
use crate::lower::control::{CheckSecond, Continue, ContinueFar, ContinueSlow, Observe, Pause};
use crate::lower::{End, Lower, Lowered};
use crate::op::{chain, chain_flow};

/// Bytes of the longest instruction.
const LONGEST: usize = 15;

/// Instructions in a block at most.
pub(crate) const MAX: usize = 64;

/// A decoded block, not yet in the cache.
pub(crate) struct Decoded {
    /// Bytes of the first page that it was decoded from.
    pub bytes: u64,
    /// Bytes of the page after it.
    pub second: u64,
    pub instructions: Vec<Placed>,
}

/// Where an instruction of a block is, and where its ops begin, which end where the next one's begin. An instruction that was
/// joined to the one before has no ops of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    /// Offset in the block's page.
    pub offset: u16,
    /// Index of its first op in the block.
    pub first_op: u16,
    /// Length in bytes.
    pub len: u8,
    pub mnemonic: Mnemonic,
}

/// Where a block is decoded from.
pub(crate) struct Source<'a> {
    /// The page's bytes.
    pub page: &'a [u8],
    /// The first bytes of the page after it, if it can be fetched.
    pub next: Option<&'a [u8]>,
    /// Its host address.
    pub next_host: u64,
    /// Offset of the first instruction.
    pub offset: usize,
    /// Bytes of the code segment that are left from there.
    pub limit: u64,
    pub mode: u32,
    /// Instructions at most.
    pub max: usize,
    /// Stop after them rather than go on in the next block.
    pub pause: bool,
    /// Linear addresses that only a block's first instruction may have.
    pub boundaries: &'a [u64],
}

/// Why nothing could be decoded.
pub(crate) enum Trouble {
    /// The instruction runs into the next page, which was not given.
    NeedsSecondPage,
    /// It runs past the code segment's limit, or is longer than 15 bytes.
    Protection,
}

/// Decodes and lowers a block into `out`, which is emptied first.
pub(crate) fn decode(shown: &Shown, s: &Source, out: &mut Lowered) -> Result<Decoded, Trouble> {
    out.clear();
    let bits = bits(s.mode);
    let mut at = s.offset;
    let mut instructions: Vec<Placed> = Vec::with_capacity(s.max);
    let mut i = Instruction::default();
    let mut joined = [0u8; 32];
    let mut closed = false;
    let mut compared = None;
    while !closed && instructions.len() < s.max && at < s.page.len() {
        // Blocks serve every mapping of the page, so that the place in the page decides here and the op looks closer.
        let boundary = s.boundaries.iter().any(|b| b & 0xfff == at as u64);
        if boundary && !instructions.is_empty() {
            break;
        }
        let left = s.limit.saturating_sub((at - s.offset) as u64).min(LONGEST as u64) as usize;
        let here = &s.page[at..];
        let whole = here.len() >= left;
        let mut decoder = Decoder::with_ip(bits, &here[..here.len().min(left)], at as u64, DecoderOptions::NONE);
        decoder.decode_out(&mut i);
        let mut straddles = false;
        if i.is_invalid() && wants_more(&decoder, bits, here) {
            // A block with something in it ends here; the next one looks into the matter.
            if !instructions.is_empty() {
                break;
            }
            if whole {
                return Err(Trouble::Protection);
            }
            let Some(next) = s.next else {
                return Err(Trouble::NeedsSecondPage);
            };
            let take = (left - here.len()).min(next.len());
            joined[..here.len()].copy_from_slice(here);
            joined[here.len()..here.len() + take].copy_from_slice(&next[..take]);
            let mut decoder = Decoder::with_ip(bits, &joined[..here.len() + take], at as u64, DecoderOptions::NONE);
            decoder.decode_out(&mut i);
            if i.is_invalid() && wants_more(&decoder, bits, &joined[..here.len() + take]) {
                return Err(Trouble::Protection);
            }
            straddles = true;
        }
        let len = i.len().max(1) as u8;
        instructions.push(Placed {
            offset: at as u16,
            first_op: out.ops.len() as u16,
            len,
            mnemonic: i.mnemonic(),
        });
        let mut lower = Lower::new(shown, &i, s.mode, at as u16, len, out).after(compared);
        if straddles {
            lower.emit(chain::<CheckSecond>(), |op| op.imm = s.next_host);
        }
        if boundary {
            lower.emit(chain::<Observe>(), |_| ());
        }
        let end = if i.is_invalid() || !shown.has(&i) {
            lower.ud()
        } else if s.mode & mode::TRANSACTION != 0
            && let Some(cause) = exec::transaction::aborts(&i)
        {
            exec::transaction::lower_abort(&mut lower, cause)
        } else {
            if s.mode & mode::NON_ROOT != 0 {
                crate::vmx::intercept::lower(&mut lower);
            }
            exec::lower(&mut lower)
        };
        closed = end == End::Closed;
        compared = lower.compare;
        at += len as usize;
    }
    if !closed {
        let mut lower = Lower::new(shown, &i, s.mode, at as u16, 0, out);
        let f = if s.pause {
            chain_flow::<Pause>()
        } else if !lower.flat_code() {
            chain_flow::<ContinueSlow>()
        } else if at >= s.page.len() {
            chain_flow::<ContinueFar>()
        } else {
            chain_flow::<Continue>()
        };
        lower.flow(f, |op| op.imm = at as u64);
    }
    let n = instructions.len();
    for (k, placed) in instructions.iter().enumerate() {
        let end = match instructions.get(k + 1) {
            Some(next) => next.first_op.into(),
            // The last one's ops end with the link slot and what stands behind it.
            None => out.ops.len() - 1 - out.templates,
        };
        for op in out.ops[placed.first_op.into()..end].iter_mut().filter(|op| op.len != 0) {
            op.rem = (n - k) as u8;
        }
    }
    Ok(Decoded {
        bytes: (at.min(s.page.len()) - s.offset) as u64,
        second: at.saturating_sub(s.page.len()) as u64,
        instructions,
    })
}

/// The decoder's bitness for the mode of a block.
pub(crate) fn bits(mode: u32) -> u32 {
    match mode & mode::SIZE {
        mode::SIZE64 => 64,
        mode::SIZE32 => 32,
        _ => 16,
    }
}

/// The bytes given ended before the instruction did. Of fifteen bytes iced says only that they are no instruction: one more
/// was wanted, which is #GP and not #UD (SDM Vol. 3A 7.15, "Interrupt 13—General Protection Exception (#GP)"), unless they
/// are one but for a prefix that it must not have.
fn wants_more(decoder: &Decoder, bits: u32, bytes: &[u8]) -> bool {
    decoder.last_error() == DecoderError::NoMoreBytes
        || decoder.position() == LONGEST
            && Decoder::new(bits, bytes, DecoderOptions::NO_INVALID_CHECK)
                .decode()
                .is_invalid()
}

/// Which instructions the model has.
pub(crate) struct Shown {
    pub features: Features,
    pub undefined: crate::Undefined,
    pub vectors: crate::Vectors,
    known: [bool; 256],
}

impl Shown {
    pub fn new(model: &CpuModel, options: EngineOptions) -> Shown {
        let f = model.features();
        let mut known = [false; 256];
        for feature in CpuidFeature::values() {
            use CpuidFeature as F;
            known[feature as usize] = match feature {
                F::INTEL8086
                | F::INTEL186
                | F::INTEL286
                | F::INTEL386
                | F::INTEL486
                | F::CPUID
                | F::MULTIBYTENOP
                | F::PAUSE => true,
                F::INTEL8086_ONLY | F::INTEL286_ONLY | F::INTEL386_ONLY | F::INTEL386_A0_ONLY | F::INTEL486_A_ONLY => {
                    false
                }
                F::X64 => f.lm(),
                F::RDPMC => true,
                F::FPU | F::FPU287 | F::FPU387 => f.fpu(),
                F::ADX => f.adx(),
                F::AES => f.aesni(),
                F::AVX => f.avx(),
                F::AVX2 => f.avx2(),
                F::AVX_VNNI => f.avx_vnni(),
                F::AVX512F => f.avx512f(),
                F::AVX512CD => f.avx512cd(),
                F::AVX512DQ => f.avx512dq(),
                F::AVX512BW => f.avx512bw(),
                F::AVX512VL => f.avx512vl(),
                F::AVX512_IFMA => f.avx512ifma(),
                F::AVX512_VBMI => f.avx512vbmi(),
                F::AVX512_VBMI2 => f.avx512vbmi2(),
                F::AVX512_VNNI => f.avx512vnni(),
                F::AVX512_BITALG => f.avx512bitalg(),
                F::AVX512_VPOPCNTDQ => f.avx512vpopcntdq(),
                F::AVX512_BF16 => f.avx512bf16(),
                F::AVX512_FP16 => f.avx512fp16(),
                F::BMI1 => f.bmi1(),
                F::BMI2 => f.bmi2(),
                F::CLFLUSHOPT => f.clflushopt(),
                F::CLFSH => f.clfsh(),
                F::CLWB => f.clwb(),
                F::CMOV => f.cmov(),
                F::CMPXCHG16B => f.cmpxchg16b(),
                F::CX8 => f.cx8(),
                F::F16C => f.f16c(),
                F::FMA => f.fma(),
                F::FSGSBASE => f.fsgsbase(),
                F::FXSR => f.fxsr(),
                F::GFNI => f.gfni(),
                F::INVPCID => f.invpcid(),
                F::LZCNT => f.lzcnt(),
                F::MMX => f.mmx(),
                F::MONITOR => f.monitor(),
                F::MOVBE => f.movbe(),
                F::MOVDIR64B => f.movdir64b(),
                F::MOVDIRI => f.movdiri(),
                F::MSR => f.msr(),
                F::PCLMULQDQ => f.pclmulqdq(),
                F::PKU => f.pku(),
                F::POPCNT => f.popcnt(),
                F::PREFETCHW => true,
                // A feature of the trace unit's leaf, which is empty where the unit is hidden.
                F::PTWRITE => model.cpuid(0x14, 0)[1] >> 4 & 1 != 0,
                F::RDPID => f.rdpid(),
                F::RDRAND => f.rdrand(),
                F::RDSEED => f.rdseed(),
                F::RDTSCP => f.rdtscp(),
                // A part whose transactions always abort has the instructions, shown or not.
                F::RTM => f.rtm() || f.rtm_always_abort(),
                F::HLE_or_RTM => f.hle() || f.rtm() || f.rtm_always_abort(),
                F::SEP => f.sep(),
                F::SERIALIZE => f.serialize(),
                F::SHA => f.sha(),
                F::SMAP => f.smap(),
                F::SSE => f.sse(),
                F::SSE2 => f.sse2(),
                F::SSE3 => f.sse3(),
                F::SSSE3 => f.ssse3(),
                F::SSE4_1 => f.sse41(),
                F::SSE4_2 => f.sse42(),
                F::SYSCALL => f.syscall(),
                F::TSC => f.tsc(),
                F::WAITPKG => f.waitpkg(),
                F::VAES => f.vaes(),
                // VMCALL alone, which whoever records the guest listens to.
                F::VMX => true,
                // RSM, which every part has, and which is undefined outside system-management mode.
                F::SMM => true,
                F::INVEPT => model
                    .shown_vmx()
                    .is_some_and(|caps| caps.secondary.contains(Secondary::EPT)),
                F::INVVPID => model
                    .shown_vmx()
                    .is_some_and(|caps| caps.secondary.contains(Secondary::VPID)),
                F::VPCLMULQDQ => f.vpclmulqdq(),
                F::XSAVE => f.xsave(),
                F::XSAVEC => f.xsavec(),
                F::XSAVEOPT => f.xsaveopt(),
                F::XSAVES => f.xsaves(),
                _ => false,
            };
        }
        Shown {
            features: f,
            undefined: options.undefined,
            vectors: options.vectors,
            known,
        }
    }

    fn has(&self, i: &Instruction) -> bool {
        // TZCNT and LZCNT without their features are BSF and BSR; `exec::bit` sees to that.
        if matches!(i.mnemonic(), Mnemonic::Tzcnt | Mnemonic::Lzcnt) {
            return true;
        }
        use iced_x86::Mnemonic as M;
        // Encodings that were NOPs before they got a meaning, and still are on parts without it; WBNOINVD was WBINVD.
        if matches!(
            i.mnemonic(),
            M::Endbr32
                | M::Endbr64
                | M::Rdsspd
                | M::Rdsspq
                | M::Cldemote
                | M::Bndmk
                | M::Bndcl
                | M::Bndcu
                | M::Bndcn
                | M::Bndmov
                | M::Bndldx
                | M::Bndstx
                | M::Prefetchit0
                | M::Prefetchit1
                | M::Prefetchwt1
                | M::Reservednop
                | M::Wbnoinvd
        ) {
            return true;
        }
        i.cpuid_features().iter().all(|&f| self.known[f as usize])
    }
}
