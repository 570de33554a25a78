//! Where CPUs differ, and all of them are right.
//!
//! # Theory
//! The manuals leave results and the order of faults open, and vendors fill that in each in their own way. The engine does as
//! Intel's parts do. So a host of Intel's is compared with whole, but for what is named in [`pin`] and [`intels`]; on other
//! hosts what they do otherwise is named here and left out.
//!
//! # Practice
//! The Intel hosts were an Emerald Rapids (family 6, model 207) and, with AVX-512, a Cascade Lake (model 85); the others were AMD's.

use std::sync::OnceLock;

use iced_x86::{Code, Instruction, MemorySize, Mnemonic, OpKind, Register, RflagsBits};

use crate::compare::{Undefined, address};
use crate::generate::{Case, register_value};
use crate::state::{Fpu, Outcome, flag, ldt};

/// Whether the host is one of Intel's.
pub fn intel() -> bool {
    static INTEL: OnceLock<bool> = OnceLock::new();
    *INTEL.get_or_init(|| std::arch::x86_64::__cpuid(0).ebx == u32::from_le_bytes(*b"Genu"))
}

/// What stays open on a host of Intel's: results that the engine computes rather than knows.
pub fn pin(instruction: &Instruction, open: &mut Undefined) {
    let approximate = !matches!(
        instruction.mnemonic(),
        Mnemonic::Rcpps
            | Mnemonic::Rcpss
            | Mnemonic::Rsqrtps
            | Mnemonic::Rsqrtss
            | Mnemonic::Vrcpps
            | Mnemonic::Vrcpss
            | Mnemonic::Vrsqrtps
            | Mnemonic::Vrsqrtss
    ) && open.approximate;
    let transcendental = if approximate { 1 << 9 | 1 << 5 } else { 0 };
    *open = Undefined {
        approximate,
        fsw: open.fsw & transcendental,
        memory: std::mem::take(&mut open.memory),
        ..Undefined::default()
    };
}

/// Why the outcomes of a case are not compared: an order of things, or a result, that CPUs differ in.
pub fn excuse(case: &Case, host: &Outcome, engine: &Outcome) -> Option<&'static str> {
    // Linux keeps the CPU's number in a segment of its own.
    let kernels = [host.state.es_ds[0], host.state.es_ds[1], host.state.ss]
        .iter()
        .any(|selector| selector >> 3 == 15);
    if kernels || engine.vector == 13 && engine.error == 0x78 {
        return Some("a segment of the host's kernel");
    }
    if case.instruction.is_vsib() && host.vector == 1 && matches!(engine.vector, 12..=14) {
        return Some("a single step in place of the fault of a later element of a gather or a scatter");
    }
    let restores = matches!(case.instruction.mnemonic(), Mnemonic::Xrstor | Mnemonic::Xrstor64);
    if restores && (host.vector, engine.vector) == (13, 13) {
        return Some(
            "how much XRSTOR has loaded when it finds reserved bits of MXCSR, in which Intel's parts differ as well",
        );
    }
    if intel() {
        intels(case, host, engine)
    } else {
        other(case, host, engine)
    }
}

/// What the engine does in a way of its own.
fn intels(case: &Case, host: &Outcome, engine: &Outcome) -> Option<&'static str> {
    match (case.instruction.mnemonic(), host.vector, engine.vector) {
        (Mnemonic::Call, 12 | 14, 13) => Some("the stack and the target of a call, where neither can be used"),
        (
            Mnemonic::Xsave
            | Mnemonic::Xsave64
            | Mnemonic::Xsaveopt
            | Mnemonic::Xsaveopt64
            | Mnemonic::Xsavec
            | Mnemonic::Xsavec64
            | Mnemonic::Xrstor
            | Mnemonic::Xrstor64,
            12..=14,
            12..=14,
        ) if (host.vector, host.cr2) != (engine.vector, engine.cr2) => {
            Some("which part of an XSAVE area faults first, and whether before its header is checked")
        }
        (Mnemonic::Fxsave | Mnemonic::Fxrstor, 12 | 13, 14) if passes_64k(case) => {
            Some("where the end of an area is that 16-bit addresses do not reach")
        }
        _ => outside_domain(case),
    }
}

/// Whether an operand begins below offset 64K and ends above it, with 16-bit addresses: what comes of that differs among parts
/// (SDM Vol. 3B 24.33.1 "Segment Wraparound").
fn passes_64k(case: &Case) -> bool {
    let instruction = &case.instruction;
    let short = match instruction.memory_base() {
        Register::None => instruction.memory_displ_size() == 2,
        base => base.size() == 2,
    };
    let base = register_value(&case.state, instruction.memory_segment()).unwrap_or(0);
    let offset = address(instruction, &case.state).map(|address| address.wrapping_sub(base) & 0xffff);
    short && offset.is_some_and(|offset| offset + instruction.memory_size().size() as u64 > 0x1_0000)
}

/// Functions whose results beyond what they are defined for are nobody's.
fn outside_domain(case: &Case) -> Option<&'static str> {
    let exponent = case.state.fpu.st[0].1 & 0x7fff;
    match case.instruction.mnemonic() {
        Mnemonic::F2xm1 if exponent >= 0x3fff => Some("F2XM1 outside its domain"),
        Mnemonic::Fyl2xp1 if exponent > 0x3ffc => Some("FYL2XP1 outside its domain"),
        _ => None,
    }
}

/// Why the outcomes of a fault are not compared, wherever in a program the instruction is that it is of.
pub fn excuse_fault(instruction: &Instruction, host: &Outcome) -> Option<&'static str> {
    let stores_mmx = matches!(
        instruction.mnemonic(),
        Mnemonic::Movd | Mnemonic::Movq | Mnemonic::Movntq
    ) && instruction.op0_kind() == OpKind::Memory
        && instruction.op1_register().is_mm();
    (!intel() && matches!(host.vector, 12..=14) && stores_mmx).then_some("what MMX state the fault of a store leaves")
}

/// What AMD's CPUs, and others, do in another way than Intel's: what it is about.
fn other(case: &Case, host: &Outcome, engine: &Outcome) -> Option<&'static str> {
    use Mnemonic as M;
    let instruction = &case.instruction;
    let alignment = match instruction.memory_size() {
        MemorySize::Xsave | MemorySize::Xsave64 => 64,
        size => (size.size() as u64).max(16),
    };
    let misaligned = address(instruction, &case.state).is_some_and(|address| address % alignment != 0);
    let both_fault = |vector: u8| matches!(vector, 12..=14);
    let fault_addresses = host.vector == 14 && engine.vector == 14 && host.error == engine.error;
    match (instruction.mnemonic(), host.vector, engine.vector) {
        (M::Arpl, _, _) if host.vector != 3 || engine.vector != 3 => {
            Some("whether ARPL writes a destination that it leaves as it is")
        }
        (M::Maskmovq | M::Maskmovdqu | M::Vmaskmovdqu, _, _) if host.vector != 3 || engine.vector != 3 => {
            Some("which of the bytes that are not written are checked, and what MMX state a fault leaves")
        }
        (
            M::Sha1msg1 | M::Sha1msg2 | M::Sha1nexte | M::Sha1rnds4 | M::Sha256msg1 | M::Sha256msg2 | M::Sha256rnds2,
            _,
            13,
        ) if misaligned => Some("whether SHA's operand in memory is aligned, which AMD's need not be"),
        (_, 13, 12) | (_, 12, 13) if misaligned && alignment >= 16 => {
            Some("limit and alignment of an operand that violates both")
        }
        (M::Iret | M::Iretd | M::Iretq | M::Retf, h, e)
            if (both_fault(h) || both_fault(e)) && (h, host.error, host.cr2) != (e, engine.error, engine.cr2) =>
        {
            Some("how much of the frame is read, and whether before what it holds is checked and cut to size")
        }
        (M::Call, h, e)
            if (h, host.error, host.cr2) != (e, engine.error, engine.cr2)
                && (instruction.is_call_far_indirect() || instruction.is_call_far())
                && (both_fault(h) || both_fault(e)) =>
        {
            Some(
                "whether a far call to code of another size pushes in the mode that it leaves, and checks its target before",
            )
        }
        (M::Lds | M::Les | M::Lss | M::Lfs | M::Lgs, h, e) if both_fault(h) && both_fault(e) => {
            Some("which half of a far pointer is read first")
        }
        (M::Bound, 12..=14, 5) => Some("whether the upper bound is read where the lower one fails"),
        (M::Ldmxcsr | M::Vldmxcsr | M::Fxrstor | M::Fxrstor64, _, 13) if host.state.fpu.mxcsr & 1 << 17 != 0 => {
            Some("MXCSR.MM, which AMD's CPUs have")
        }
        (M::Enter, h, e) if both_fault(h) && both_fault(e) => {
            Some("whether the display is read before anything is pushed")
        }
        (M::Dpps | M::Dppd | M::Vdpps | M::Vdppd, h, e) if h == e && only_nans_differ(instruction, host, engine) => {
            Some("which of several NaNs a dot product gives")
        }
        (M::Vreduceps | M::Vreducepd | M::Vreducess | M::Vreducesd, h, e)
            if (h == e || e == 19)
                && case.state.fpu.mxcsr & 1 << 15 != 0
                && keeps_denormals(instruction, host, engine) =>
        {
            Some("whether MXCSR.FTZ makes zero of what VREDUCEPD leaves")
        }
        (M::Ud1, 6, 12 | 13) => Some("whether UD1's operand is checked"),
        (M::Fld, _, _)
            if host.state.fpu.fsw & 0x82 == 0x82 && case.state.fpu.fsw & 0x80 == 0 && case.state.fpu.fcw & 2 == 0 =>
        {
            Some("whether a denormal is loaded that raises an unmasked exception")
        }
        (M::Call, 12 | 14, 13) => Some("the stack and the target, where neither can be used"),
        (M::Xsave | M::Xsaveopt | M::Xsavec | M::Xrstor, 12 | 13, 3) if case.state.bits() == 16 => {
            Some("whether a limit is checked for registers that code outside 64-bit mode does not have")
        }
        (_, 6, 14) if engine.error & 0x10 != 0 => {
            Some("whether an instruction is fetched to its end whose prefixes, or opcode, make it none")
        }
        (
            M::Vgatherdpd
            | M::Vgatherdps
            | M::Vgatherqpd
            | M::Vgatherqps
            | M::Vpgatherdd
            | M::Vpgatherdq
            | M::Vpgatherqd
            | M::Vpgatherqq,
            1,
            12..=14,
        ) => Some("whether a single step comes in place of the fault of a later element"),
        (
            M::Xsave
            | M::Xsave64
            | M::Xsaveopt
            | M::Xsaveopt64
            | M::Xsavec
            | M::Xsavec64
            | M::Xrstor
            | M::Xrstor64
            | M::Fxsave
            | M::Fxsave64
            | M::Fxrstor
            | M::Fxrstor64,
            h,
            e,
        ) if (both_fault(h) || both_fault(e)) && (h, host.cr2) != (e, engine.cr2) => {
            Some("how much of the area is probed, whatever is asked for, and whether before its header is checked")
        }
        (M::Movsxd, 14, _) if instruction.op0_register().size() == 2 => Some("whether 16 or 32 bits are read"),
        (M::Cmpsb | M::Cmpsw | M::Cmpsd | M::Cmpsq, h, e) if both_fault(h) && both_fault(e) => {
            Some("which of the two operands is read first")
        }
        (
            M::Iret
            | M::Iretd
            | M::Iretq
            | M::Retf
            | M::Call
            | M::Enter
            | M::Popa
            | M::Popad
            | M::Pusha
            | M::Pushad
            | M::Fxsave
            | M::Fxsave64
            | M::Fxrstor
            | M::Fxrstor64
            | M::Xsave
            | M::Xsave64
            | M::Xsaveopt
            | M::Xsaveopt64
            | M::Xsavec
            | M::Xsavec64
            | M::Xrstor
            | M::Xrstor64
            | M::Fnsave
            | M::Frstor
            | M::Fnstenv
            | M::Fldenv
            | M::Lds
            | M::Les
            | M::Lss
            | M::Lfs
            | M::Lgs
            | M::Jmp
            | M::Bound,
            _,
            _,
        ) if fault_addresses && host.cr2 != engine.cr2 => Some("which part of a long operand is accessed first"),
        (_, 14, 14) if fault_addresses && is_masked_move(instruction) => {
            Some("which address of a masked store's operand CR2 gets")
        }
        (M::Vmaskmovps | M::Vmaskmovpd | M::Vpmaskmovd | M::Vpmaskmovq, h, e) if h != e && case.state.bits() != 64 => {
            Some("whether the addresses of a masked move's elements wrap")
        }
        (M::Vcvtps2ph, h, e) if h != e && (both_fault(h) || both_fault(e)) => {
            Some("whether VCVTPS2PH's exceptions come before its operand's")
        }
        (M::Push, h, e) if instruction.op0_register().is_segment_register() && h != e => {
            Some("how much of the stack the push of a selector writes")
        }
        (M::Pop, h, e)
            if instruction.op0_register().is_segment_register()
                && (h, host.error, host.cr2) != (e, engine.error, engine.cr2) =>
        {
            Some("how much of the stack the pop of a selector reads")
        }
        (M::Fst | M::Fstp | M::Fist | M::Fistp | M::Fisttp | M::Fbstp, h, _)
            if both_fault(h) && engine.state.fpu.fsw & 0x80 != 0 =>
        {
            Some("whether an x87 exception that keeps a result from memory comes before the operand's")
        }
        (M::Cvtpi2ps, _, _) if instruction.op1_kind() == OpKind::Memory => {
            Some("whether a memory operand makes the transition to MMX state")
        }
        (M::Fsin, 3, 3)
            if case.state.fpu.st[0].1 & 0x7fff <= 1 && (host.state.fpu.fsw ^ engine.state.fpu.fsw) & 0x10 != 0 =>
        {
            Some("whether the sine of the smallest normal number, which is a little less, is tiny")
        }
        // PE, UE, and the summary that follows from them.
        (M::Fyl2x, _, _)
            if case.state.fpu.st[0].0.is_power_of_two()
                && host.state.fpu.st == engine.state.fpu.st
                && (host.state.fpu.fsw ^ engine.state.fpu.fsw) & !0x80b0 == 0 =>
        {
            Some("whether the logarithm of a power of two, which is exact, counts as inexact")
        }
        _ => outside_domain(case),
    }
}

/// Whether the registers differ, and in nothing but elements that are NaNs in both.
fn only_nans_differ(instruction: &Instruction, host: &Outcome, engine: &Outcome) -> bool {
    let double = matches!(instruction.mnemonic(), Mnemonic::Dppd | Mnemonic::Vdppd);
    let nan = |v: u128, lane: u32| {
        if double {
            f64::from_bits((v >> (64 * (lane / 2))) as u64).is_nan()
        } else {
            f32::from_bits((v >> (32 * lane)) as u32).is_nan()
        }
    };
    let (host, engine) = (&host.state.fpu, &engine.state.fpu);
    let halves = host
        .xmm
        .iter()
        .chain(&host.ymm_hi)
        .zip(engine.xmm.iter().chain(&engine.ymm_hi));
    let mut differ = halves.filter(|(h, e)| h != e).peekable();
    differ.peek().is_some()
        && differ
            .all(|(&h, &e)| (0..4).all(|lane| ((h ^ e) >> (32 * lane)) as u32 == 0 || nan(h, lane) && nan(e, lane)))
}

/// Whether the host's destination has denormal numbers where the engine's has zeros, and is the same elsewhere; or where it has any, if the
/// engine's has not been written.
fn keeps_denormals(instruction: &Instruction, host: &Outcome, engine: &Outcome) -> bool {
    let size = match instruction.mnemonic() {
        Mnemonic::Vreducepd | Mnemonic::Vreducesd => 64,
        _ => 32,
    };
    let lanes = |outcome: &Outcome| -> Vec<u64> {
        let quarters = outcome.state.fpu.register(instruction.op0_register().number());
        let of = |quarter: u128| (0..128 / size).map(move |n| (quarter >> (n * size)) as u64 & u64::MAX >> (64 - size));
        quarters.into_iter().flat_map(of).collect()
    };
    // The exponent is zero, the significand is not.
    let (exponent, sign) = if size == 64 {
        (0x7ff << 52, 1 << 63)
    } else {
        (0xff << 23, 1 << 31)
    };
    let denormal = |lane: u64| lane & exponent == 0 && lane & !sign != 0;
    let (host_lanes, engine_lanes) = (lanes(host), lanes(engine));
    if engine.vector == 19 && host.vector != 19 {
        return host_lanes.into_iter().any(denormal);
    }
    let mut differ = host_lanes
        .into_iter()
        .zip(engine_lanes)
        .filter(|(h, e)| h != e)
        .peekable();
    differ.peek().is_some() && differ.all(|(h, e)| denormal(h) && e & !sign == 0)
}

/// A store, or a VEX load, under a mask.
fn is_masked_move(instruction: &Instruction) -> bool {
    let vex = matches!(
        instruction.mnemonic(),
        Mnemonic::Vmaskmovps | Mnemonic::Vmaskmovpd | Mnemonic::Vpmaskmovd | Mnemonic::Vpmaskmovq
    );
    let evex = instruction.has_op_mask() && instruction.op0_kind() == OpKind::Memory && !instruction.is_vsib();
    vex || evex
}

fn is_repeated(case: &Case) -> bool {
    case.instruction.has_rep_prefix() || case.instruction.has_repne_prefix()
}

fn has_not_moved(case: &Case, host: &Outcome) -> bool {
    host.state.rip == case.state.rip && host.vector != 3
}

fn to_flags(case: &Case) -> bool {
    matches!(
        case.instruction.mnemonic(),
        Mnemonic::Fcomi | Mnemonic::Fcomip | Mnemonic::Fucomi | Mnemonic::Fucomip
    )
}

fn x87_pending(case: &Case, host: &Outcome) -> bool {
    host.state.fpu.fsw & 0x80 != 0 && case.state.fpu.fsw & 0x80 == 0
}

/// RFLAGS bits that this host need not have as the engine has them.
pub fn open_flags(case: &Case, host: &Outcome) -> u64 {
    let mut open = 0;
    // An interrupt after the last instruction of a segment: the kernel's IRET is then what finds the limit, and nothing sets RF.
    if host.vector == 13 && case.state.bits() == 16 && !has_not_moved(case, host) {
        open |= flag::RF;
    }
    if intel() {
        return open;
    }
    if is_repeated(case) && has_not_moved(case, host) {
        // A trap between two iterations: Intel pushes RF set, AMD does not.
        if host.vector == 1 {
            open |= flag::RF;
        }
        // And Intel writes flags only after the last one.
        open |= flag::STATUS;
    }
    // A comparison with an unmasked exception: whether its result is stored all the same.
    if x87_pending(case, host) && (to_flags(case) || case.instruction.rflags_modified() & RflagsBits::C0 != 0) {
        open |= flag::STATUS;
    }
    open
}

/// Parts of the floating-point state that this host need not have as the engine has them.
pub fn open_fpu(case: &Case, host: &Outcome, open: &mut Undefined) {
    let fpu = &host.state.fpu;
    // Which of two exceptions a logarithm of zero finds first.
    if open.approximate && fpu.fsw & 4 != 0 {
        open.fsw |= 2;
    }
    // The additions of a dot product may find what its multiplications left.
    let dot_product = matches!(
        case.instruction.mnemonic(),
        Mnemonic::Dpps | Mnemonic::Dppd | Mnemonic::Vdpps | Mnemonic::Vdppd
    );
    if host.vector == 19 && dot_product {
        open.mxcsr |= 0x3f;
    }
    // With overflow or underflow unmasked, PE tells whether the result is inexact in a wider exponent range.
    if host.vector == 19 && (fpu.mxcsr & 0x810 == 0x10 || fpu.mxcsr & 0x408 == 0x08) {
        open.mxcsr |= 0x20;
    }
    if intel() {
        return;
    }
    if x87_pending(case, host) {
        open.fsw |= 0x4700;
    }
    // Comparisons that set RFLAGS leave C1 alone on Intel's CPUs, unless the stack underflows, and FFREE clears it.
    if to_flags(case) || matches!(case.instruction.mnemonic(), Mnemonic::Ffree | Mnemonic::Ffreep) {
        open.fsw |= 1 << 9;
    }
    // Whether VCVTPS2PH has flagged its exceptions when its operand faults.
    if case.instruction.mnemonic() == Mnemonic::Vcvtps2ph && matches!(host.vector, 12..=14) {
        open.mxcsr |= 0x3f;
    }
    // Of the least normal number Intel's sines are that number, however they round: no underflow.
    if open.approximate && case.state.fpu.st[0].1 & 0x7fff == 1 {
        open.fsw |= 0x10;
    }
}

/// General registers that this host need not have as the engine has them.
pub fn open_gprs(case: &Case, open: &mut Undefined) {
    // Whether a repetition without an iteration, with 32-bit addresses in 64-bit mode, writes its registers.
    if !intel() && is_repeated(case) && case.instruction.is_string_instruction() && case.state.bits() == 64 {
        open.upper_gprs |= 1 << 1 | 1 << 6 | 1 << 7;
    }
}

/// Memory that this host need not have as the engine has it.
pub fn open_memory(case: &Case, host: &Outcome, open: &mut Undefined) {
    if intel() {
        return;
    }
    match case.instruction.code() {
        // Above a selector that is pushed with 32 bits.
        Code::Pushd_ES | Code::Pushd_CS | Code::Pushd_SS | Code::Pushd_DS | Code::Pushd_FS | Code::Pushd_GS => {
            let base = register_value(&case.state, Register::SS).unwrap_or(0);
            let mask = if case.state.ss == ldt::STACK16 {
                0xffff
            } else {
                0xffff_ffff
            };
            let sp = case.state.gpr[4].wrapping_sub(4) & mask;
            open.memory
                .push((base.wrapping_add(sp).wrapping_add(2) & 0xffff_ffff, 2));
        }
        // The first of two stores, when the second faults.
        Code::Fstp_m80fp | Code::Fbstp_m80bcd if host.vector != 3 => {
            if let Some(address) = address(&case.instruction, &case.state) {
                open.memory.push((address, 8));
            }
        }
        _ => {}
    }
}

/// The registers after the fault of a gather, for CPUs that write others of their bits than Intel's: the mask reduced to the top
/// bits of the elements that there are, the upper half of a short destination taken away, and bits 511:256 of a VEX form.
pub fn decisive(instruction: &Instruction, fpu: &Fpu) -> Fpu {
    let mut fpu = *fpu;
    if instruction.has_op_mask() {
        let dst = instruction.op0_register();
        if dst.is_vector_register() {
            let quarters = fpu.register(dst.number());
            let kept = |q: usize| if 16 * q < dst.size() { quarters[q] } else { 0 };
            fpu.set_register(dst.number(), std::array::from_fn(kept));
        }
        return fpu;
    }
    if instruction.op0_register().is_xmm() {
        fpu.ymm_hi[instruction.op0_register().number()] = 0;
    }
    let mask = instruction.op_register(2).number();
    fpu.wide.zmm_hi[mask] = [0; 2];
    fpu.wide.zmm_hi[instruction.op0_register().number()] = [0; 2];
    let (dst, index) = (instruction.op0_register().size(), instruction.memory_index().size());
    let size = instruction.memory_size().size();
    let index_size = if crate::generate::has_wide_indices(instruction) {
        8
    } else {
        4
    };
    let count = (dst / size).min(index / index_size);
    let (mut low, mut high) = (0, 0);
    for i in 0..count {
        let at = 8 * (size * (i + 1)) - 1;
        if at < 128 {
            low |= fpu.xmm[mask] & 1 << at;
        } else {
            high |= fpu.ymm_hi[mask] & 1 << (at - 128);
        }
    }
    (fpu.xmm[mask], fpu.ymm_hi[mask]) = (low, high);
    fpu
}
