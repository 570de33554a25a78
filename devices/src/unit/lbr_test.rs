//! The last-branch stack of every part before the architectural records.

use super::super::branch_test::{Random, at, branch, event, far, long, segment};
use super::*;
use x86::cpuid::Feature;
use x86::lbr;
use x86::model::{MODELS, by_name};
use x86::watch::{Far, Flow};

const GP: MsrFault = MsrFault::GeneralProtection;
const ON: Gate = Gate {
    enabled: true,
    frozen: false,
    tracing: false,
};
const OFF: Gate = Gate { enabled: false, ..ON };
const TAKEN: Flow = Flow::Cond { taken: true };
const NOT_TAKEN: Flow = Flow::Cond { taken: false };

fn named(name: &str) -> Lbr {
    let model = by_name(name).unwrap();
    Lbr::new(model.units.lbr.unwrap(), model.part_features(), model.linear_bits())
}

/// Of any part, with recording on in 64-bit code of ring 0.
fn recording(caps: LbrCaps) -> Lbr {
    let tsx = Features::list(&[Feature::Rtm]);
    let mut unit = Lbr::new(caps, tsx, 48);
    let _ = unit.interest(ON, || long(0));
    unit
}

fn read(unit: &Lbr, msr: u32) -> u64 {
    unit.read_msr(msr, ON).unwrap()
}

/// The models with a stack of this kind.
fn models() -> impl Iterator<Item = &'static str> {
    let legacy = |caps: LbrCaps| caps.layout != LbrLayout::Architectural;
    MODELS
        .iter()
        .filter(move |m| m.units.lbr.is_some_and(legacy))
        .map(|m| m.name)
}

// covers: lbr/msr-bits
#[test]
fn every_register_of_every_model_bit_by_bit() {
    const NONE: u64 = 0;
    const FLAG: u64 = 1 << 63;
    const TSX: u64 = 7 << 61;
    const USER: u64 = (1 << 47) - 1;
    const CYCLES: u64 = 0xFFFF;
    // Bits that can be set alone; in an address bit 47 and those above are sign.
    for (name, msr, writable, what) in [
        ("p6", 0x1DB, NONE, "LastBranchFromIP"),
        ("p6", 0x1DC, NONE, "LastBranchToIP"),
        ("p6", 0x1DD, NONE, "LastExceptionFromIP"),
        ("p6", 0x1DE, NONE, "LastExceptionToIP"),
        ("netburst", 0x1DA, NONE, "TOS"),
        ("netburst", 0x1DB, NONE, "MSR_LASTBRANCH_0"),
        ("netburst", 0x1DE, NONE, "MSR_LASTBRANCH_3"),
        ("netburst", 0x1D7, NONE, "MSR_LER_FROM_LIP"),
        ("netburst", 0x1D8, NONE, "MSR_LER_TO_LIP"),
        ("core2", 0x1C9, 0x3, "TOS"),
        ("core2", 0x40, USER, "FROM"),
        ("core2", 0x63, USER, "TO"),
        ("core2", 0x1DD, NONE, "MSR_LER_FROM_LIP"),
        ("westmere", 0x1C8, 0x1FF, "MSR_LBR_SELECT"),
        ("westmere", 0x1C9, 0xF, "TOS"),
        ("westmere", 0x680, USER | FLAG, "FROM: MISPRED"),
        ("westmere", 0x6CF, USER, "TO"),
        ("westmere", 0x1DE, NONE, "MSR_LER_TO_LIP"),
        ("sandybridge", 0x1C8, 0x1FF, "MSR_LBR_SELECT"),
        ("haswell", 0x1C8, 0x3FF, "MSR_LBR_SELECT: EN_CALLSTACK"),
        ("broadwell", 0x680, USER | TSX, "FROM: MISPRED, IN_TSX, TSX_ABORT"),
        ("broadwell", 0x6C0, USER, "TO"),
        ("skylake-server", 0x1C8, 0x3FF, "MSR_LBR_SELECT"),
        ("skylake-server", 0x1C9, 0x1F, "TOS"),
        ("skylake-server", 0x69F, USER, "FROM: all address"),
        ("skylake-server", 0x6DF, USER, "TO"),
        ("skylake-server", 0xDC0, CYCLES | TSX, "INFO"),
        ("icelake-server", 0xDDF, CYCLES | TSX, "INFO"),
        ("snowridge", 0xDC0, CYCLES | FLAG, "INFO: no transactions"),
    ] {
        for bit in 0..64 {
            let value = 1 << bit;
            let mut unit = named(name);
            let expected = if writable & value != 0 { Ok(()) } else { Err(GP) };
            assert_eq!(unit.write_msr(msr, value, ON), expected, "{name} {what} bit {bit}");
            let held = if writable & value != 0 { value } else { 0 };
            assert_eq!(unit.read_msr(msr, ON), Ok(held), "{name} {what} bit {bit}");
        }
    }
}

// covers: lbr/msr-bits
#[test]
fn what_a_part_has_not_is_unclaimed() {
    for name in models() {
        let caps = by_name(name).unwrap().units.lbr.unwrap();
        let mut unit = named(name);
        for msr in 0..0x2000 {
            let claimed = unit.read_msr(msr, ON) != Err(MsrFault::Unclaimed);
            assert_eq!(claimed, caps.owns(msr), "{name} {msr:#x}");
            let written = unit.write_msr(msr, 0, ON);
            assert_eq!(written != Err(MsrFault::Unclaimed), claimed, "{name} {msr:#x}");
        }
    }
}

// covers: lbr/sign
#[test]
fn a_written_address_is_sign_extended_below_the_flags() {
    const KERNEL: u64 = 0xFFFF_FFFF_8100_0000;
    let without_tsx = |caps| Lbr::new(caps, Features::NONE, 48);
    let with_tsx = |caps| Lbr::new(caps, Features::list(&[Feature::Rtm]), 48);
    for (mut unit, msr, value, accepted, why) in [
        (with_tsx(lbr::CORE2), 0x40, KERNEL, true, "canonical"),
        (with_tsx(lbr::CORE2), 0x40, KERNEL & !(1 << 63), false, "no flags here"),
        (
            with_tsx(lbr::NEHALEM),
            0x680,
            KERNEL,
            true,
            "MISPRED and a kernel address",
        ),
        (
            with_tsx(lbr::NEHALEM),
            0x680,
            KERNEL & !(1 << 63),
            true,
            "MISPRED clear",
        ),
        (with_tsx(lbr::NEHALEM), 0x680, KERNEL & !(1 << 62), false, "62 is sign"),
        (
            with_tsx(lbr::NEHALEM),
            0x6C0,
            KERNEL & !(1 << 63),
            false,
            "no flag in TO",
        ),
        (with_tsx(lbr::HASWELL), 0x680, KERNEL & !(7 << 61), true, "three flags"),
        (with_tsx(lbr::HASWELL), 0x680, KERNEL & !(1 << 60), false, "60 is sign"),
        (
            without_tsx(lbr::HASWELL),
            0x680,
            KERNEL & !(3 << 61),
            false,
            "no transactions: 62:61 are sign",
        ),
        (
            without_tsx(lbr::HASWELL),
            0x680,
            KERNEL & !(1 << 63),
            true,
            "MISPRED stays a flag",
        ),
        (
            without_tsx(lbr::HASWELL),
            0x680,
            0x1000 | 3 << 61,
            false,
            "nor in a user's address",
        ),
        (
            with_tsx(lbr::SKYLAKE),
            0x680,
            KERNEL & !(1 << 63),
            false,
            "flags are in INFO",
        ),
        (with_tsx(lbr::TREMONT), 0x680, 1 << 47, false, "not canonical"),
    ] {
        let expected = if accepted { Ok(()) } else { Err(GP) };
        assert_eq!(unit.write_msr(msr, value, ON), expected, "{msr:#x} {value:#x}: {why}");
    }
    // Five levels of paging: ten bits more.
    let mut wide = Lbr::new(lbr::SKYLAKE, Features::NONE, 57);
    assert_eq!(wide.write_msr(0x680, 1 << 47, ON), Ok(()));
    assert_eq!(wide.write_msr(0x680, 1 << 56, ON), Err(GP));
}

// covers: lbr/formats
#[test]
fn an_entry_in_every_format() {
    let ring = |format, info| LbrCaps {
        format,
        layout: LbrLayout::Ring {
            tos: 0x1C9,
            writable: true,
            from: 0x680,
            to: 0x6C0,
            info,
        },
        ..lbr::HASWELL
    };
    let kernel = (0xFFFF_FFFF_8100_0010, 0xFFFF_FFFF_8100_0080);
    let based = (0x1_0010, 0x1_0080);
    // A forward branch never seen is mispredicted; 100 steps after the one before.
    for (format, code, (from, to), expected) in [
        (LbrFormat::Offset32, segment(0x1_0000), based, [0x10, 0x80, 0]),
        (LbrFormat::Linear, segment(0x1_0000), based, [0x1_0010, 0x1_0080, 0]),
        (LbrFormat::Linear, long(0), kernel, [kernel.0, kernel.1, 0]),
        (LbrFormat::Effective, segment(0x1_0000), based, [0x10, 0x80, 0]),
        (
            LbrFormat::EffectiveFlags,
            segment(0x1_0000),
            based,
            [1 << 63 | 0x10, 0x80, 0],
        ),
        (LbrFormat::EffectiveFlags, long(0), kernel, [kernel.0, kernel.1, 0]),
        (
            LbrFormat::EffectiveTsx,
            long(0),
            kernel,
            // MISPRED set, IN_TSX and TSX_ABORT clear.
            [0x9FFF_FFFF_8100_0010, kernel.1, 0],
        ),
        (
            LbrFormat::EffectiveInfo,
            long(0),
            kernel,
            [kernel.0, kernel.1, 1 << 63 | 100],
        ),
        (
            LbrFormat::EffectiveInfo,
            segment(0xFFFF_0000),
            (0xFFFF_0010, 0xFFFF_0080),
            [0x10, 0x80, 1 << 63 | 100],
        ),
        (
            LbrFormat::LinearCycles,
            long(0),
            kernel,
            [kernel.0, 100 << 48 | 0xFFFF_8100_0080, 0],
        ),
        (
            LbrFormat::LinearInfo,
            segment(0x1_0000),
            based,
            [0x1_0010, 0x1_0080, 1 << 63 | 100],
        ),
    ] {
        let info = matches!(format, LbrFormat::EffectiveInfo | LbrFormat::LinearInfo).then_some(0xDC0);
        let mut unit = recording(ring(format, info));
        let _ = unit.interest(ON, || code);
        unit.branches(
            &[
                at(1000, branch(Flow::Jump, from - 0x10, from, 0)),
                at(1100, branch(TAKEN, from, to, 0)),
            ],
            ON,
            code,
        );
        let tos = read(&unit, 0x1C9) as u32;
        assert_eq!(tos, 2);
        let info = info.map_or(0, |first| read(&unit, first + tos));
        let got = [read(&unit, 0x680 + tos), read(&unit, 0x6C0 + tos), info];
        assert_eq!(got, expected, "{format:?} {code:?}: {got:x?}");
    }
}

// covers: lbr/formats
#[test]
fn a_predicted_branch_has_no_flag_and_a_transaction_has_one() {
    let mut unit = recording(lbr::HASWELL);
    let jump = branch(Flow::Jump, 0xFFFF_8000_0000_1000, 0x2000, 0);
    unit.branches(&[jump], ON, long(0));
    assert_eq!(
        read(&unit, 0x681),
        0x1FFF_8000_0000_1000,
        "bits 63:61 are flags, all clear"
    );
    unit.state_changed(Change::TransactionBegin { at: 0x1000 }, long(0));
    unit.branches(&[jump], ON, long(0));
    assert_eq!(read(&unit, 0x682), 0x5FFF_8000_0000_1000, "IN_TSX");
    unit.state_changed(Change::TransactionCommit { at: 0x1000, steps: 1 }, long(0));
    unit.branches(&[jump], ON, long(0));
    assert_eq!(read(&unit, 0x683), 0x1FFF_8000_0000_1000);
    let mut unit = recording(lbr::SKYLAKE);
    unit.state_changed(Change::TransactionBegin { at: 0x1000 }, long(0));
    unit.branches(&[jump], ON, long(0));
    assert_eq!(read(&unit, 0xDC1), 1 << 62);
}

// covers: lbr/tsx-abort
#[test]
fn the_abort_of_a_transaction_is_an_entry() {
    let abort = super::super::branch_ring::abort_record(0x1000, 7, 0x2000, long(0));
    let (from, to) = (0x681, 0x6C1);
    for (caps, flags) in [(lbr::HASWELL, 0x681), (lbr::SKYLAKE, 0xDC1)] {
        let mut unit = recording(caps);
        unit.state_changed(Change::TransactionBegin { at: 0x900 }, long(0));
        unit.transaction_aborted(&abort, ON, long(0));
        let change = Change::TransactionAbort {
            from: 0x1000,
            cause: x86::watch::Abort::Conflict,
            steps: 3,
        };
        unit.state_changed(change, long(0));
        assert_eq!(read(&unit, from) & 0xFFFF_FFFF, 0x1000);
        assert_eq!(read(&unit, to), 0x2000, "the fallback");
        assert_eq!(read(&unit, flags) >> 61 & 3, 3, "IN_TSX, TSX_ABORT");
        let jump = branch(Flow::Jump, 0x2000, 0x3000, 0);
        unit.branches(&[jump], ON, long(0));
        assert_eq!(read(&unit, flags + 1) >> 61 & 3, 0, "it is over");
        // Filtered as a far branch is.
        let mut unit = recording(caps);
        unit.write_msr(0x1C8, 1 << 8, ON).unwrap();
        unit.transaction_aborted(&abort, ON, long(0));
        assert_eq!(read(&unit, to), 0);
    }
}

// covers: lbr/cycles
#[test]
fn cycles_count_from_the_record_before_and_saturate() {
    let mut unit = recording(lbr::SKYLAKE);
    let jump = branch(Flow::Jump, 0x1000, 0x1000, 0);
    let cycles = |unit: &Lbr, i: u32| read(unit, 0xDC0 + i) & 0xFFFF;
    unit.branches(
        &[at(500, jump), at(510, branch(NOT_TAKEN, 0x20, 0x22, 0)), at(530, jump)],
        ON,
        long(0),
    );
    unit.branches(&[at(600_000, jump)], ON, long(0));
    assert_eq!((cycles(&unit, 1), cycles(&unit, 2), cycles(&unit, 3)), (0, 30, 0xFFFF));
    // Switched off and on again: the first record has nothing to count from.
    let _ = unit.interest(OFF, || long(0));
    let _ = unit.interest(ON, || long(0));
    unit.branches(&[at(600_001, jump)], ON, long(0));
    assert_eq!(cycles(&unit, 4), 0);
}

// covers: lbr/select
#[test]
fn what_the_filter_lets_in() {
    let jcc = branch(TAKEN, 0x10, 0x40, 0);
    let user = |record: BranchRecord| BranchRecord {
        from_cpl: 3,
        to_cpl: 3,
        ..record
    };
    let call = branch(Flow::Call, 0x10, 0x40, 0);
    let syscall = far(Far::Syscall, 0x10, 0x40, 3, 0);
    let sysret = far(Far::Sysret, 0x40, 0x12, 0, 3);
    for (select, record, kept, why) in [
        (0, jcc, true, "no filter at reset"),
        (0, branch(NOT_TAKEN, 0x10, 0x12, 0), false, "not taken is no branch"),
        (1 << 0, jcc, false, "CPL_EQ_0: ring 0 kept out"),
        (1 << 0, user(jcc), true, "CPL_EQ_0: ring 3 is let in"),
        (1 << 1, user(jcc), false, "CPL_NEQ_0"),
        (1 << 1, jcc, true, "CPL_NEQ_0 is about rings above 0"),
        (1 << 0, syscall, false, "CPL_EQ_0: it ends in ring 0"),
        (1 << 0, sysret, true, "CPL_EQ_0: it ends in ring 3"),
        (1 << 1, sysret, false, "CPL_NEQ_0: it ends in ring 3"),
        (1 << 2, jcc, false, "JCC"),
        (1 << 3, jcc, true, "a conditional branch is no call"),
        (1 << 3, call, false, "NEAR_REL_CALL"),
        (1 << 4, call, true, "a direct call is no indirect one"),
        (1 << 4, branch(Flow::CallInd, 0x10, 0x40, 0), false, "NEAR_IND_CALL"),
        (1 << 5, branch(Flow::Ret, 0x10, 0x40, 0), false, "NEAR_RET"),
        (1 << 5, call, true, "a call is no return"),
        (1 << 6, branch(Flow::JumpInd, 0x10, 0x40, 0), false, "NEAR_IND_JMP"),
        (1 << 6, branch(Flow::Ret, 0x10, 0x40, 0), true, "except near returns"),
        (
            1 << 6,
            branch(Flow::CallInd, 0x10, 0x40, 0),
            true,
            "except near indirect calls",
        ),
        (1 << 7, branch(Flow::Jump, 0x10, 0x40, 0), false, "NEAR_REL_JMP"),
        (1 << 7, call, true, "except near relative calls"),
        (1 << 8, syscall, false, "FAR_BRANCH"),
        (1 << 8, far(Far::Iret, 0x10, 0x40, 0, 0), false, "FAR_BRANCH: IRET"),
        (1 << 8, jcc, true, "a near branch is no far one"),
        (0x1FF, jcc, false, "nothing"),
    ] {
        let mut unit = recording(lbr::NEHALEM);
        unit.write_msr(0x1C8, select, ON).unwrap();
        unit.branches(&[record], ON, long(record.to_cpl));
        assert_eq!(read(&unit, 0x1C9), u64::from(kept), "{select:#x}: {why}");
        assert_eq!(read(&unit, 0x6C1) != 0, kept, "{select:#x}: {why}");
    }
}

// covers: lbr/select
#[test]
fn interrupts_and_exceptions_are_far_branches() {
    for (select, vector, kind, kept) in [
        (0, 0x20, Far::Interrupt, true),
        (0, 14, Far::Exception, true),
        (0, 0x80, Far::SoftwareInterrupt, true),
        (1 << 8, 0x20, Far::Interrupt, false),
        (1 << 8, 14, Far::Exception, false),
        (1 << 0, 14, Far::Exception, false),
    ] {
        let mut unit = recording(lbr::NEHALEM);
        unit.write_msr(0x1C8, select, ON).unwrap();
        let record = far(kind, 0x10, 0x40, 3, 0);
        unit.event(&event(vector, record), ON, long(0));
        assert_eq!(read(&unit, 0x1C9), u64::from(kept), "{select:#x} {kind:?}");
    }
}

// covers: lbr/db
#[test]
fn a_debug_exception_is_not_recorded() {
    for name in models() {
        let mut unit = named(name);
        let _ = unit.interest(ON, || long(0));
        unit.branches(&[branch(Flow::Jump, 0x1000, 0x2000, 0)], ON, long(0));
        let before = unit.state().ring.entries;
        unit.event(&event(1, far(Far::Exception, 0x2000, 0x9000, 0, 0)), ON, long(0));
        assert_eq!(unit.state().ring.entries, before, "{name}");
        assert_eq!(unit.state().ring.last_exception, Entry::default(), "{name}");
        unit.event(
            &event(3, far(Far::SoftwareInterrupt, 0x2000, 0x9000, 0, 0)),
            ON,
            long(0),
        );
        assert_ne!(unit.state().ring.entries, before, "{name}: #BP is");
    }
}

// covers: lbr/order
#[test]
fn tos_moves_first_and_points_at_the_newest() {
    for (name, tos, from, to, depth) in [
        ("core2", 0x1C9, 0x40, 0x60, 4),
        ("westmere", 0x1C9, 0x680, 0x6C0, 16),
        ("skylake-server", 0x1C9, 0x680, 0x6C0, 32),
    ] {
        let mut unit = named(name);
        let _ = unit.interest(ON, || long(0));
        for i in 1..=3 * depth {
            unit.branches(&[branch(Flow::Jump, i, 0x1000 + i, 0)], ON, long(0));
            assert_eq!(read(&unit, tos), i % depth, "{name}");
            let newest = (i % depth) as u32;
            assert_eq!(
                (read(&unit, from + newest), read(&unit, to + newest)),
                (i, 0x1000 + i),
                "{name}"
            );
        }
        let newest: Vec<_> = unit.newest().map(|entry| entry.from).collect();
        let expected: Vec<_> = (2 * depth + 1..=3 * depth).rev().collect();
        assert_eq!(newest, expected, "{name}");
    }
}

// covers: lbr/netburst-models
#[test]
fn the_pentium_4_packs_from_and_to() {
    let mut unit = named("netburst");
    let code = segment(0x1_0000);
    let _ = unit.interest(ON, || code);
    for i in 1..=5u64 {
        unit.branches(&[branch(Flow::Jump, 0x1_0000 + i, 0x1_1000 + i, 0)], ON, code);
    }
    assert_eq!(read(&unit, 0x1DA), 1);
    assert_eq!(read(&unit, 0x1DC), 0x0001_1005_0001_0005, "linear addresses, TO above");
    assert_eq!(read(&unit, 0x1DB), 0x0001_1004_0001_0004);
    unit.event(&event(14, far(Far::Exception, 0x1_1005, 0x9000, 0, 0)), ON, code);
    assert_eq!((read(&unit, 0x1D7), read(&unit, 0x1D8)), (0x1_0005, 0x1_1005));
    // Model 3 and later: 16 pairs that cannot be written.
    let mut prescott = Lbr::new(lbr::netburst(0xF34), Features::NONE, 48);
    let _ = prescott.interest(ON, || code);
    prescott.branches(&[branch(Flow::Jump, 0x1_0000, 0x1_1000, 0)], ON, code);
    assert_eq!(read(&prescott, 0x1DA), 1);
    assert_eq!((read(&prescott, 0x681), read(&prescott, 0x6C1)), (0x1_0000, 0x1_1000));
    assert_eq!(prescott.write_msr(0x681, 0, ON), Err(GP));
}

// covers: lbr/p6
#[test]
fn p6_keeps_one_branch_and_copies_it_at_an_exception() {
    let mut unit = named("p6");
    let code = segment(0x1000);
    let _ = unit.interest(ON, || code);
    let all = |unit: &Lbr| [0x1DB, 0x1DC, 0x1DD, 0x1DE].map(|msr| read(unit, msr));
    unit.branches(
        &[branch(TAKEN, 0x1010, 0x1020, 0), branch(Flow::Jump, 0x1030, 0x1040, 0)],
        ON,
        code,
    );
    assert_eq!(all(&unit), [0x30, 0x40, 0, 0], "offsets in the code segment");
    // The handler's segment starts at 0.
    unit.event(&event(13, far(Far::Exception, 0x1040, 0x8000, 0, 0)), ON, segment(0));
    assert_eq!(
        all(&unit),
        [0x40, 0x8000, 0x30, 0x40],
        "the branch is copied, then the exception recorded"
    );
    unit.event(&event(0x20, far(Far::Interrupt, 0x8000, 0x9000, 0, 0)), ON, segment(0));
    assert_eq!(all(&unit), [0x8000, 0x9000, 0x40, 0x8000]);
    unit.event(&event(1, far(Far::Exception, 0x9000, 0xA000, 0, 0)), ON, segment(0));
    assert_eq!(
        all(&unit),
        [0x8000, 0x9000, 0x40, 0x8000],
        "a debug exception touches none of them"
    );
}

// covers: lbr/ler
#[test]
fn the_last_exception_record_is_the_branch_before_whatever_the_filter() {
    for name in models() {
        let caps = by_name(name).unwrap().units.lbr.unwrap();
        let first = caps.ler.unwrap();
        let mut unit = named(name);
        let _ = unit.interest(ON, || long(0));
        if caps.select != 0 {
            unit.write_msr(0x1C8, 0x1FF, ON).unwrap();
        }
        unit.branches(
            &[branch(TAKEN, 0x30, 0x10, 0), branch(NOT_TAKEN, 0x14, 0x16, 0)],
            ON,
            long(0),
        );
        assert_eq!(read(&unit, first), 0, "{name}: no exception yet");
        unit.event(&event(0x30, far(Far::Interrupt, 0x18, 0x8000, 0, 0)), ON, long(0));
        assert_eq!((read(&unit, first), read(&unit, first + 1)), (0x30, 0x10), "{name}");
    }
}

// covers: lbr/callstack
#[test]
fn call_stack_mode_keeps_the_frames_that_are_open() {
    let call = |from, to| branch(Flow::Call, from, to, 0);
    let ret = |from, to| branch(Flow::Ret, from, to, 0);
    for (records, frames, why) in [
        (vec![call(1, 0x10)], vec![1], "a call is put on"),
        (vec![call(1, 0x10), call(2, 0x20)], vec![2, 1], "and another"),
        (vec![call(1, 0x10), ret(0x15, 3)], vec![], "a return takes it off"),
        (
            vec![call(1, 0x10), call(2, 0x20), ret(0x25, 4), call(5, 0x30)],
            vec![5, 1],
            "leaves that have returned are gone",
        ),
        (
            vec![call(1, 0x10), call(2, 4), call(3, 0x30)],
            vec![3, 1],
            "a call to the next instruction has no return",
        ),
        (
            vec![call(1, 0x10), branch(Flow::CallInd, 2, 4, 0)],
            vec![2, 1],
            "an indirect one may",
        ),
        (
            vec![call(1, 0x10), branch(Flow::Jump, 2, 0x40, 0), branch(TAKEN, 3, 0x50, 0)],
            vec![1],
            "jumps are filtered",
        ),
    ] {
        for split in [1, 2, records.len()] {
            let mut unit = recording(lbr::HASWELL);
            // EN_CALLSTACK, and all but calls and returns out: what perf programs for --call-graph lbr.
            unit.write_msr(0x1C8, 0x3C4, ON).unwrap();
            for batch in records.chunks(split) {
                unit.branches(batch, ON, long(0));
            }
            let newest: Vec<_> = unit
                .newest()
                .map(|e| e.from << 3 >> 3)
                .take_while(|&from| from != 0)
                .collect();
            assert_eq!(newest, frames, "{why}");
            assert_eq!(read(&unit, 0x1C9), frames.len() as u64, "{why}: TOS");
        }
    }
}

/// What the stack should hold: the manual's rules, one record at a time.
struct Reference {
    depth: usize,
    tos: usize,
    /// Newest first.
    entries: Vec<(u64, u64)>,
}

impl Reference {
    fn record(&mut self, record: &BranchRecord, select: u64) {
        let flow = Flow::from_code(record.flow).unwrap();
        let bit = match flow {
            Flow::Cond { taken: false } => return,
            Flow::Cond { .. } => 2,
            Flow::Call => 3,
            Flow::CallInd => 4,
            Flow::Ret => 5,
            Flow::JumpInd => 6,
            Flow::Jump => 7,
            Flow::Far(_) => 8,
        };
        let ring = if record.to_cpl == 0 { 0 } else { 1 };
        if select >> bit & 1 != 0 || select >> ring & 1 != 0 {
            return;
        }
        if select >> 9 & 1 != 0 {
            if flow == Flow::Ret {
                self.entries.remove(0);
                self.entries.push((0, 0));
                self.tos = (self.tos + self.depth - 1) % self.depth;
                return;
            }
            if flow == Flow::Call && record.to == record.from + u64::from(record.length) {
                return;
            }
        }
        self.tos = (self.tos + 1) % self.depth;
        self.entries.pop();
        self.entries.insert(0, (record.from, record.to));
    }
}

// covers: lbr/tail
#[test]
fn the_stack_is_the_tail_of_the_branches_however_they_are_batched() {
    let mut random = Random(0x1B2);
    for round in 0..300 {
        let caps = [lbr::CORE2, lbr::NEHALEM, lbr::HASWELL, lbr::SKYLAKE, lbr::TREMONT][round % 5];
        let depth = usize::from(caps.depth);
        let mut unit = recording(caps);
        let select = if round % 3 == 0 { 0 } else { random.next() & caps.select };
        if caps.select != 0 {
            unit.write_msr(0x1C8, select, ON).unwrap();
        }
        let mut reference = Reference {
            depth,
            tos: 0,
            entries: vec![(0, 0); depth],
        };
        let mut single = unit.clone();
        let (mut step, mut cpl) = (0, 0);
        for _ in 0..20 {
            let batch = if random.below(4) == 0 {
                // A far transfer to the other ring comes alone.
                let record = far(Far::Iret, 0x40_0000, 0x40_0100, cpl, 3 - cpl);
                cpl = 3 - cpl;
                step += 7;
                vec![at(step, record)]
            } else {
                let count = random.below(200) as usize;
                random.near(count, cpl, &mut step)
            };
            unit.branches(&batch, ON, long(cpl));
            for record in &batch {
                reference.record(record, select);
                single.branches(&[*record], ON, long(cpl));
            }
            let tos_msr = 0x1C9;
            assert_eq!(read(&unit, tos_msr), reference.tos as u64, "round {round} {select:#x}");
            let shown: Vec<_> = unit
                .newest()
                .map(|e| (e.from & 0xFFFF_FFFF, e.to & 0xFFFF_FFFF))
                .collect();
            assert_eq!(shown, reference.entries, "round {round} {select:#x}");
            // Flags, cycles and all.
            assert_eq!(unit.state(), single.state(), "round {round}: in batches and one by one");
        }
    }
}

// covers: lbr/freeze
#[test]
fn nothing_is_recorded_while_it_is_off_or_frozen_and_nothing_is_lost() {
    let jump = branch(Flow::Jump, 0x1000, 0x2000, 0);
    for (gate, why) in [(OFF, "off"), (Gate { frozen: true, ..ON }, "frozen")] {
        let mut unit = recording(lbr::SKYLAKE);
        unit.branches(&[jump], ON, long(0));
        assert!(unit.interest(ON, || long(0)).branches.any());
        assert_eq!(unit.interest(gate, || long(0)), Interest::NOTHING, "{why}");
        unit.branches(&[branch(Flow::Jump, 0x3000, 0x4000, 0)], gate, long(0));
        unit.event(&event(14, far(Far::Exception, 0x4000, 0x5000, 0, 0)), gate, long(0));
        assert_eq!(
            (read(&unit, 0x1C9), read(&unit, 0x681), read(&unit, 0x1DD)),
            (1, 0x1000, 0),
            "{why}"
        );
    }
}

// covers: lbr/pt-exclusion
#[test]
fn intel_pt_and_the_stack_exclude_each_other_on_broadwell() {
    let tracing = Gate { tracing: true, ..ON };
    for (name, excluded) in [("broadwell", true), ("haswell", false), ("skylake-server", false)] {
        let mut unit = named(name);
        let _ = unit.interest(ON, || long(0));
        unit.branches(&[branch(Flow::Jump, 0x1000, 0x2000, 0)], ON, long(0));
        assert_eq!(unit.interest(tracing, || long(0)).branches.any(), !excluded, "{name}");
        let seen = if excluded { 0 } else { 0x2000 };
        assert_eq!(
            unit.read_msr(0x6C1, tracing),
            Ok(seen),
            "{name}: reads 0 while PT traces"
        );
        assert_eq!(unit.write_msr(0x6C1, 0x7000, tracing), Ok(()));
        assert_eq!(
            unit.write_msr(0x6C1, 1 << 47, tracing),
            Err(GP),
            "{name}: what is reserved stays so"
        );
        let kept = if excluded { 0x2000 } else { 0x7000 };
        assert_eq!(read(&unit, 0x6C1), kept, "{name}: the write is dropped");
    }
}

// covers: lbr/segments
#[test]
fn a_far_transfer_leaves_one_segment_and_ends_in_another() {
    let mut unit = recording(lbr::NEHALEM);
    let _ = unit.interest(ON, || segment(0x1_0000));
    unit.branches(&[far(Far::Jump, 0x1_0010, 0x2_0040, 0, 0)], ON, segment(0x2_0000));
    assert_eq!((read(&unit, 0x681), read(&unit, 0x6C1)), (0x10, 0x40));
    // To 64-bit mode: the upper half is the target's alone.
    unit.branches(&[far(Far::Jump, 0x2_0010, 0xFFFF_8000_0000_0040, 0, 0)], ON, long(0));
    assert_eq!((read(&unit, 0x682), read(&unit, 0x6C2)), (0x10, 0xFFFF_8000_0000_0040));
}

// covers: lbr/state
#[test]
fn state_goes_out_and_comes_back_at_any_point() {
    let mut random = Random(77);
    for name in models() {
        let mut unit = named(name);
        let _ = unit.interest(ON, || long(0));
        let mut step = 0;
        for _ in 0..20 {
            let batch = random.near(30, 0, &mut step);
            let mut copy = named(name);
            copy.set_state(unit.state());
            assert_eq!(copy.state(), unit.state(), "{name}");
            unit.branches(&batch, ON, long(0));
            copy.branches(&batch, ON, long(0));
            assert_eq!(copy.state(), unit.state(), "{name}: goes on the same way");
        }
        unit.state_changed(Change::Init { at: 0 }, long(0));
        let mut same = unit.clone();
        same.state_changed(Change::Reset, long(0));
        assert_ne!(unit.state(), same.state(), "{name}: INIT leaves the stack");
        let mut fresh = named(name).state();
        fresh.ring.code = long(0);
        assert_eq!(same.state(), fresh, "{name}: reset clears it");
    }
}

// covers: lbr/fuzz
#[test]
fn no_writes_and_no_branches_upset_the_stack() {
    let mut random = Random(0xF022);
    for name in models() {
        let mut unit = named(name);
        for _ in 0..4000 {
            let gate = Gate {
                enabled: random.below(8) != 0,
                frozen: random.below(8) == 0,
                tracing: random.below(8) == 0,
            };
            let code = if random.below(2) == 0 {
                long(3)
            } else {
                segment(random.next())
            };
            match random.below(4) {
                0 => {
                    let msr = [0x40, 0x60, 0x1C8, 0x1D7, 0x680, 0x6C0, 0xDC0][random.below(7) as usize];
                    let _ = unit.write_msr(msr + random.below(40) as u32, random.next() >> random.below(64), gate);
                }
                1 => {
                    let records: Vec<_> = (0..random.below(70))
                        .map(|_| BranchRecord {
                            from: random.next(),
                            to: random.next(),
                            step: random.next(),
                            flow: random.next() as u8,
                            length: random.next() as u8,
                            from_cpl: random.next() as u8,
                            to_cpl: random.next() as u8,
                            loads_cr3: false,
                            run: [0; 3],
                        })
                        .collect();
                    unit.branches(&records, gate, code);
                }
                2 => unit.event(&event(random.next() as u8, BranchRecord::default()), gate, code),
                _ => {
                    let _ = unit.interest(gate, || code);
                }
            }
            let tos = unit.state().ring.top;
            assert!(tos < by_name(name).unwrap().units.lbr.unwrap().depth);
        }
    }
}
