use super::*;
use iced_x86::{Code, CpuidFeature, Instruction, Register, RflagsBits};
use std::collections::BTreeSet;

/// The instruction sets of x86-64-v2, and what came before CPUID.
const V2: &[CpuidFeature] = &[
    CpuidFeature::INTEL8086,
    CpuidFeature::INTEL186,
    CpuidFeature::INTEL286,
    CpuidFeature::INTEL386,
    CpuidFeature::INTEL486,
    CpuidFeature::X64,
    CpuidFeature::CMOV,
    CpuidFeature::CX8,
    CpuidFeature::CMPXCHG16B,
    CpuidFeature::FPU,
    CpuidFeature::FPU287,
    CpuidFeature::FPU387,
    CpuidFeature::FXSR,
    CpuidFeature::MMX,
    CpuidFeature::POPCNT,
    CpuidFeature::SSE,
    CpuidFeature::SSE2,
    CpuidFeature::SSE3,
    CpuidFeature::SSSE3,
    CpuidFeature::SSE4_1,
    CpuidFeature::SSE4_2,
    CpuidFeature::SYSCALL,
    CpuidFeature::SEP,
];

const FLAGS: [(u32, &str); 6] = [
    (RflagsBits::OF, "OF"),
    (RflagsBits::SF, "SF"),
    (RflagsBits::ZF, "ZF"),
    (RflagsBits::AF, "AF"),
    (RflagsBits::CF, "CF"),
    (RflagsBits::PF, "PF"),
];

// covers: cpu/undefined-table
#[test]
fn every_undefined_flag_of_x86_64_v2_has_a_pin() {
    let (mut seen, mut missing) = (BTreeSet::new(), BTreeSet::new());
    for code in Code::values() {
        if !code.cpuid_features().iter().all(|feature| V2.contains(feature)) {
            continue;
        }
        let mut instruction = Instruction::default();
        instruction.set_code(code);
        // Undefined flags of a shift by an immediate depend on it.
        for (operand, kind) in code.op_code().op_kinds().iter().enumerate() {
            if *kind == iced_x86::OpCodeOperandKind::imm8 {
                instruction.set_op_kind(operand as u32, iced_x86::OpKind::Immediate8);
                instruction.set_immediate8(5);
            } else {
                instruction.set_op_kind(operand as u32, iced_x86::OpKind::Register);
                instruction.set_op_register(operand as u32, Register::CL);
            }
        }
        let mnemonic = format!("{:?}", code.mnemonic()).to_uppercase();
        for (flag, name) in FLAGS {
            if instruction.rflags_undefined() & flag != 0 {
                let pinned = PINS.iter().any(|pin| {
                    pin.instruction.split(' ').any(|i| i == mnemonic)
                        && pin.what.replace([';', ','], "").split(' ').any(|w| w == name)
                });
                if !pinned {
                    missing.insert(format!("{name} after {mnemonic}"));
                }
                seen.insert(mnemonic.clone());
            }
        }
    }
    assert!(missing.is_empty(), "no pin: {missing:?}");
    // The sweep must have found the families that the manual is known for.
    for mnemonic in [
        "AND", "SHL", "ROL", "SHLD", "IMUL", "DIV", "BSF", "BT", "AAA", "DAA", "AAM",
    ] {
        assert!(seen.contains(mnemonic), "{mnemonic} was not swept; swept: {seen:?}");
    }
}

// covers: cpu/undefined-table
#[test]
fn every_pin_has_a_rule_and_a_source_and_no_instruction_is_pinned_twice() {
    let mut names = BTreeSet::new();
    for pin in PINS {
        assert!(
            !pin.what.is_empty() && !pin.rule.is_empty() && !pin.source.is_empty(),
            "{}",
            pin.instruction
        );
        for name in pin.instruction.split(' ') {
            assert!(names.insert(name), "{name} twice");
        }
    }
}

/// The rule in its own words: one-bit steps as the manual defines them, OF of the first, the rest of the last.
fn step_by_step(op: Shift, bits: u32, dst: u64, src: u64, count: u8, flags: u64) -> (u64, u64) {
    let mask = u64::MAX >> (64 - bits);
    let (first, mut value, mut carry) = (dst & mask, dst & mask, flags & CF != 0);
    let mut count = u32::from(count) & if bits == 64 { 63 } else { 31 };
    if matches!(op, Shift::Rcl | Shift::Rcr) {
        count %= bits + 1;
    }
    let mut overflow = None;
    for step in 0..count {
        // What SHLD and SHRD shift in: the source, then the destination as it was.
        let (queue, at) = if step < bits { (src, step) } else { (first, step - bits) };
        let (before, high, low) = (value, value >> (bits - 1) & 1 != 0, value & 1 != 0);
        let (left, incoming) = match op {
            Shift::Rol => (true, high),
            Shift::Ror => (false, low),
            Shift::Rcl => (true, carry),
            Shift::Rcr => (false, carry),
            Shift::Shl => (true, false),
            Shift::Shr => (false, false),
            Shift::Sar => (false, high),
            Shift::Shld => (true, queue >> (bits - 1 - at) & 1 != 0),
            Shift::Shrd => (false, queue >> at & 1 != 0),
        };
        value = if left {
            value << 1 & mask | u64::from(incoming)
        } else {
            value >> 1 | u64::from(incoming) << (bits - 1)
        };
        carry = if left { high } else { low };
        // A change of sign, for every one of them.
        overflow.get_or_insert((value ^ before) >> (bits - 1) & 1 != 0);
    }
    let Some(overflow) = overflow else {
        return (value, flags);
    };
    let mut after = flags & !(CF | OF);
    if !matches!(op, Shift::Rol | Shift::Ror | Shift::Rcl | Shift::Rcr) {
        after &= !STATUS;
        after |= if value == 0 { ZF } else { 0 };
        after |= if value >> (bits - 1) != 0 { SF } else { 0 };
        after |= if (value as u8).count_ones().is_multiple_of(2) {
            PF
        } else {
            0
        };
    }
    (
        value,
        after | if carry { CF } else { 0 } | if overflow { OF } else { 0 },
    )
}

// covers: cpu/undefined-table
#[test]
fn shifts_by_any_count_are_one_bit_shifts_repeated() {
    use Shift::*;
    let patterns = [
        0,
        1,
        0x80,
        0x8000,
        0x8000_0000,
        1 << 63,
        u64::MAX,
        0x7F7F_7F7F_7F7F_7F7F,
        0x1234_5678_9ABC_DEF0,
        0xC001_D00D_4002_A55A,
    ];
    for op in [Rol, Ror, Rcl, Rcr, Shl, Shr, Sar, Shld, Shrd] {
        for bits in [8, 16, 32, 64] {
            if bits == 8 && matches!(op, Shld | Shrd) {
                continue;
            }
            for dst in patterns {
                for src in patterns {
                    for count in 0..=255u8 {
                        for flags in [0x202, 0x2 | STATUS, 0x2 | CF, 0x2 | OF | AF] {
                            assert_eq!(
                                shift(op, bits, dst, src, count, flags),
                                step_by_step(op, bits, dst, src, count, flags),
                                "{op:?} {bits} {dst:X} {src:X} by {count}, flags {flags:X}"
                            );
                        }
                    }
                }
            }
        }
    }
}

// covers: cpu/undefined-table
#[test]
fn shifts_by_hand() {
    use Shift::*;
    for (op, bits, dst, src, count, flags, result, after, why) in [
        (
            Shl,
            8,
            0x81,
            0,
            8,
            0,
            0x00,
            CF | OF | ZF | PF,
            "the last bit out is bit 0; the first shift changed the sign",
        ),
        (
            Shl,
            8,
            0xFF,
            0,
            9,
            AF,
            0x00,
            ZF | PF,
            "beyond the size nothing is left to go out",
        ),
        (
            Shr,
            16,
            0x8000,
            0,
            16,
            0,
            0x0000,
            CF | OF | ZF | PF,
            "OF is the old sign, for any count",
        ),
        (Sar, 8, 0x80, 0, 31, OF | AF, 0xFF, CF | SF | PF, "OF and AF cleared"),
        (Rol, 8, 0x40, 0, 8, 0, 0x40, OF, "a whole turn still writes CF and OF"),
        (
            Rcl,
            8,
            0x40,
            0,
            9,
            CF,
            0x40,
            CF,
            "a whole turn through CF writes nothing",
        ),
        (Rcr, 16, 0x8000, 0, 2, 0, 0x2000, OF, "CF before is 0, the sign was 1"),
        (
            Shld,
            16,
            0x1234,
            0x5678,
            20,
            0,
            0x6781,
            CF | PF,
            "16 bits of source, then the destination's highest four",
        ),
        (
            Shrd,
            16,
            0x1234,
            0x5678,
            20,
            0,
            0x4567,
            CF,
            "16 bits of source, then the destination's lowest four",
        ),
        (
            Shld,
            32,
            0x8000_0000,
            0xFFFF_FFFF,
            4,
            0,
            0xF,
            OF | PF,
            "the sign changed in the first shift",
        ),
    ] {
        assert_eq!(
            shift(op, bits, dst, src, count, flags),
            (result, after),
            "{op:?} {bits} {dst:X} by {count}: {why}"
        );
    }
}

// covers: cpu/undefined-table
#[test]
fn multiplications_and_scans_leave_the_flags_of_intel_parts() {
    for (bits, low, carry, expected, why) in [
        (8, 0x00, false, PF, "ZF is cleared even for 0"),
        (8, 0x00, true, CF | OF | PF, "the upper half is not empty"),
        (8, 0x80, false, SF, "SF of the lower half"),
        (32, 0x8000_0003, true, CF | OF | SF | PF, "PF of the lowest byte"),
        (64, 1 << 63, false, SF | PF, "64 bits"),
    ] {
        assert_eq!(multiply(bits, low, carry), expected, "{bits} {low:X}: {why}");
    }
    for (index, expected, why) in [
        (None, ZF | PF, "nothing found"),
        (Some(0), PF, "PF of the index, and not ZF"),
        (Some(1), 0, "one bit in the index"),
        (Some(63), PF, "six bits in the index"),
    ] {
        assert_eq!(bit_scan(index), expected, "{why}");
    }
}

// covers: cpu/undefined-table
#[test]
fn decimal_adjustments() {
    use Adjust::*;
    let ten = core::num::NonZeroU8::new(10).unwrap();
    for (op, ax, flags, expected, after, why) in [
        (Aaa, 0x000A, 0, 0x0100, AF | CF | ZF | PF, "ten"),
        (Aaa, 0x0005, OF | CF, 0x0005, PF, "five: OF and CF cleared"),
        (Aaa, 0x00FF, 0, 0x0205, AF | CF | PF, "the carry out of AL goes to AH"),
        (Aas, 0x0205, AF, 0x000F, AF | CF | PF, "the borrow out of AL goes to AH"),
        (Aas, 0x0100, AF, 0xFF0A, AF | CF | PF, "AH wraps"),
        (Daa, 0x0079, AF, 0x007F, AF, "the low digit only"),
        (Daa, 0x009A, 0, 0x0000, AF | CF | ZF | PF, "both digits"),
        (Das, 0x0047, CF, 0x00E7, CF | SF | PF, "the high digit only"),
        (
            Das,
            0x0003,
            AF,
            0x00FD,
            AF | CF | SF,
            "a borrow from the low digit sets CF",
        ),
        (Aam(ten), 0xFF2B, OF | AF | CF, 0x0403, PF, "43"),
        (Aad(10), 0x0403, OF | AF | CF, 0x002B, PF, "43"),
        (Aad(16), 0xFFFF, 0, 0x00EF, CF | SF, "AL wraps"),
        (
            Aad(10),
            0x0808,
            0,
            0x0058,
            0,
            "80 and 8: no carry out of the lower digit, none at all",
        ),
        (
            Aad(10),
            0x0C08,
            0,
            0x0080,
            AF | OF | SF,
            "120 and 8: out of the lower digit, and into the sign",
        ),
    ] {
        assert_eq!(adjust(op, ax, flags), (expected, after), "{op:?} {ax:X}: {why}");
    }
}
