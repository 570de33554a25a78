//! Architectural last-branch records.

use super::super::branch_test::{Random, at, branch, event, far, long, segment};
use super::*;
use x86::lbr::branch_type;
use x86::model::by_name;
use x86::watch::{Far, Flow};

const GP: MsrFault = MsrFault::GeneralProtection;
const TAKEN: Flow = Flow::Cond { taken: true };
/// LBREn, OS, USR and every kind.
const EVERYTHING: u64 = 0x7F_0007;
/// Golden Cove's leaf.
const LEAF: ArchLbrLeaf = ArchLbrLeaf {
    regs: [0x4000_000B, 0x7, 0x7, 0],
};

fn unit() -> ArchLbr {
    ArchLbr::new(LEAF, 48)
}

fn recording(control: u64) -> ArchLbr {
    let mut unit = unit();
    unit.write_msr(0x14CE, control).unwrap();
    let _ = unit.interest(false, || long(0));
    unit
}

fn read(unit: &ArchLbr, msr: u32) -> u64 {
    unit.read_msr(msr).unwrap()
}

fn entry(unit: &ArchLbr, age: u32) -> [u64; 3] {
    [0x1500, 0x1600, 0x1200].map(|first| read(unit, first + age))
}

// covers: lbr/architectural-bits
#[test]
fn every_register_bit_by_bit() {
    const USER: u64 = (1 << 47) - 1;
    for (msr, writable, dropped, what) in [
        (0x14CE, 0x7F_000F, 0, "IA32_LBR_CTL"),
        (0x14CF, 0x38, 0, "IA32_LBR_DEPTH: 8, 16, 32"),
        (0x1500, USER, 0, "FROM"),
        (0x151F, USER, 0, "FROM"),
        (0x1600, USER, 0, "TO"),
        (
            0x121F,
            0xFF00_0000_0000_FFFF,
            0x00FF_FFFF_FFFF_0000,
            "INFO: 55:16 do not fault",
        ),
        (0x1DD, USER, 0, "IA32_LER_FROM_IP"),
        (0x1DE, USER, 0, "IA32_LER_TO_IP"),
        (0x1E0, 0xFF00_0000_0000_FFFF, 0x00FF_FFFF_FFFF_0000, "IA32_LER_INFO"),
    ] {
        for bit in 0..64 {
            let value: u64 = 1 << bit;
            let mut unit = unit();
            let before = read(&unit, msr);
            let expected = if (writable | dropped) & value != 0 {
                Ok(())
            } else {
                Err(GP)
            };
            assert_eq!(unit.write_msr(msr, value), expected, "{what} bit {bit}");
            let held = match () {
                () if writable & value != 0 => value,
                () if dropped & value != 0 => 0,
                () => before,
            };
            // A smaller depth takes higher entries away, not the depth register.
            assert_eq!(unit.read_msr(msr), Ok(held), "{what} bit {bit}");
        }
    }
    for model in ["sapphirerapids", "alderlake"] {
        let model = by_name(model).unwrap();
        let leaf = model.silicon.iter().find(|row| row.leaf == 0x1C).unwrap();
        assert_eq!(
            leaf.regs[..3],
            LEAF.regs[..3],
            "{}: the leaf that these tests use",
            model.name
        );
    }
}

// covers: lbr/architectural-bits
#[test]
fn what_cpuid_does_not_name_is_reserved() {
    for (ebx, control) in [(0, 0x1u64), (1, 0x7), (2, 0x7F_0001), (4, 0x9)] {
        let leaf = ArchLbrLeaf { regs: [0xB, ebx, 0, 0] };
        for bit in 0..64 {
            let expected = if control >> bit & 1 != 0 { Ok(()) } else { Err(GP) };
            assert_eq!(
                ArchLbr::new(leaf, 48).write_msr(0x14CE, 1 << bit),
                expected,
                "{ebx} {bit}"
            );
        }
    }
}

// covers: lbr/architectural-bits
#[test]
fn other_numbers_are_unclaimed() {
    let caps = x86::lbr::ARCHITECTURAL;
    for msr in 0..0x2000 {
        let claimed = unit().read_msr(msr) != Err(MsrFault::Unclaimed);
        assert_eq!(claimed, caps.owns(msr), "{msr:#x}");
        assert_eq!(
            unit().write_msr(msr, 0) != Err(MsrFault::Unclaimed),
            claimed,
            "{msr:#x}"
        );
    }
}

// covers: lbr/architectural-depth
#[test]
fn a_write_of_the_depth_clears_the_entries_and_hides_those_beyond() {
    let mut unit = recording(EVERYTHING);
    assert_eq!(read(&unit, 0x14CF), 32, "the greatest at reset");
    let records: Vec<_> = (1..=40).map(|i| branch(Flow::Jump, i, 0x100 + i, 0)).collect();
    unit.branches(&records, false, long(0));
    unit.event(&event(14, far(Far::Exception, 0x200, 0x300, 0, 0)), false, long(0));
    assert_eq!(entry(&unit, 1)[0], 40);
    for depth in [32, 16, 8] {
        unit.write_msr(0x14CF, depth).unwrap();
        for age in 0..32 {
            for first in [0x1500, 0x1600, 0x1200] {
                let expected = if u64::from(age) < depth { Ok(0) } else { Err(GP) };
                assert_eq!(unit.read_msr(first + age), expected, "{depth} {first:#x} {age}");
                assert_eq!(unit.write_msr(first + age, 0).is_ok(), u64::from(age) < depth);
            }
        }
        assert_eq!(read(&unit, 0x1DD), 40, "the last exception record stays");
        unit.branches(&records, false, long(0));
        let newest: Vec<_> = unit.newest().map(|e| e.from).collect();
        let expected: Vec<_> = (41 - depth..=40).rev().collect();
        assert_eq!(newest, expected, "{depth}");
    }
    for depth in [0, 1, 4, 24, 40, 64, 1 << 40] {
        assert_eq!(unit.write_msr(0x14CF, depth), Err(GP), "{depth}");
    }
    assert_eq!(read(&unit, 0x14CF), 8);
}

// covers: lbr/architectural-entries
#[test]
fn entry_0_is_the_newest_and_says_what_it_is() {
    let mut unit = recording(EVERYTHING);
    let kinds = [
        (Flow::Jump, branch_type::NEAR_REL_JMP, false),
        (TAKEN, branch_type::COND, true),
        (Flow::JumpInd, branch_type::NEAR_IND_JMP, true),
        (Flow::CallInd, branch_type::NEAR_IND_CALL, true),
        (Flow::Call, branch_type::NEAR_REL_CALL, false),
        (Flow::Ret, branch_type::NEAR_RET, false),
    ];
    let records: Vec<_> = (0..)
        .zip(kinds)
        .map(|(i, (flow, ..))| at(1000 + 10 * i, branch(flow, 0x100 * i + 0x10, 0x100 * i + 0x40, 0)))
        .collect();
    unit.branches(&records, false, long(0));
    unit.branches(&[at(2000, far(Far::Syscall, 0x9000, 0xA000, 3, 0))], false, long(0));
    assert_eq!(entry(&unit, 0)[2] >> 56 & 0xF, 8, "OTHER_BRANCH");
    for (age, (i, (flow, kind, mispredicted))) in (1..).zip((0..).zip(kinds).collect::<Vec<_>>().into_iter().rev()) {
        let cycles = if i == 0 { 0 } else { 1 << 60 | 10 };
        let info = u64::from(kind) << 56 | cycles | u64::from(mispredicted) << 63;
        assert_eq!(
            entry(&unit, age),
            [0x100 * i + 0x10, 0x100 * i + 0x40, info],
            "{flow:?}"
        );
    }
    // The same on a part that tells none of it.
    let mut plain = ArchLbr::new(ArchLbrLeaf { regs: [0xB, 0, 0, 0] }, 48);
    plain.write_msr(0x14CE, 1).unwrap();
    plain.branches(&records, false, long(0));
    assert_eq!(entry(&plain, 1), [0x410, 0x440, 0]);
}

// covers: lbr/architectural-filter
#[test]
fn what_the_control_lets_in() {
    let near = |flow, cpl| branch(flow, 0x10, 0x40, cpl);
    const ALL: u64 = 0x7F_0000;
    for (control, record, from, why) in [
        (0x7, near(Flow::Jump, 0), None, "no kind is let in"),
        (ALL | 0x1, near(Flow::Jump, 0), None, "no ring is let in"),
        (ALL | 0x6, near(Flow::Jump, 0), None, "LBREn is clear"),
        (1 << 16 | 7, near(TAKEN, 0), Some(0x10), "COND"),
        (1 << 16 | 7, near(Flow::Cond { taken: false }, 0), None, "not taken"),
        (1 << 16 | 7, near(Flow::Jump, 0), None, "COND only"),
        (1 << 17 | 7, near(Flow::Jump, 0), Some(0x10), "NEAR_REL_JMP"),
        (1 << 18 | 7, near(Flow::JumpInd, 0), Some(0x10), "NEAR_IND_JMP"),
        (1 << 19 | 7, near(Flow::Call, 0), Some(0x10), "NEAR_REL_CALL"),
        (1 << 20 | 7, near(Flow::CallInd, 0), Some(0x10), "NEAR_IND_CALL"),
        (1 << 21 | 7, near(Flow::Ret, 0), Some(0x10), "NEAR_RET"),
        (
            1 << 22 | 7,
            far(Far::Iret, 0x10, 0x40, 0, 0),
            Some(0x10),
            "OTHER_BRANCH",
        ),
        (
            ALL & !(1 << 22) | 7,
            far(Far::Iret, 0x10, 0x40, 0, 0),
            None,
            "OTHER_BRANCH",
        ),
        (ALL | 3, near(Flow::Jump, 0), Some(0x10), "OS"),
        (ALL | 3, near(Flow::Jump, 3), None, "OS alone"),
        (ALL | 5, near(Flow::Jump, 3), Some(0x10), "USR"),
        (ALL | 5, near(Flow::Jump, 1), Some(0x10), "USR is rings 1 to 3"),
        (ALL | 5, far(Far::Syscall, 0x10, 0x40, 3, 0), None, "ends in ring 0"),
        (
            ALL | 5,
            far(Far::Sysret, 0x10, 0x40, 0, 3),
            Some(!0),
            "where it came from is not reported",
        ),
        (
            ALL | 3,
            far(Far::Syscall, 0x10, 0x40, 3, 0),
            Some(!0),
            "nor the other way round",
        ),
        (ALL | 7, far(Far::Sysret, 0x10, 0x40, 0, 3), Some(0x10), "both rings"),
    ] {
        let mut unit = recording(control);
        unit.branches(&[record], false, long(record.to_cpl));
        assert_eq!(entry(&unit, 0)[0], from.unwrap_or(0), "{control:#x}: {why}");
        assert_eq!(
            entry(&unit, 0)[1],
            if from.is_some() { 0x40 } else { 0 },
            "{control:#x}: {why}"
        );
    }
}

// covers: lbr/architectural-callstack
#[test]
fn a_return_takes_entry_0_off_and_the_far_end_becomes_zero() {
    // What perf programs for --call-graph lbr: user, calls and returns.
    let mut unit = recording(1 << 3 | 5 | 7 << 19);
    unit.write_msr(0x14CF, 8).unwrap();
    let calls: Vec<_> = (1..=10).map(|i| branch(Flow::Call, i * 0x10, i * 0x100, 3)).collect();
    unit.branches(&calls, false, long(3));
    let froms = |unit: &ArchLbr| unit.newest().map(|e| e.from >> 4).collect::<Vec<_>>();
    assert_eq!(froms(&unit), [10, 9, 8, 7, 6, 5, 4, 3], "the oldest two are lost");
    unit.branches(&[branch(Flow::Ret, 0x500, 0xA2, 3)], false, long(3));
    assert_eq!(froms(&unit), [9, 8, 7, 6, 5, 4, 3, 0]);
    unit.branches(&[branch(Flow::Call, 0xB0, 0xB2, 3)], false, long(3));
    assert_eq!(froms(&unit), [9, 8, 7, 6, 5, 4, 3, 0], "a call to the next instruction");
    unit.branches(&vec![branch(Flow::Ret, 0x500, 0xA2, 3); 9], false, long(3));
    assert_eq!(froms(&unit), [0; 8], "more returns than calls");
}

// covers: lbr/architectural-db
#[test]
fn a_debug_exception_clears_the_enable_and_is_not_recorded() {
    let mut unit = recording(EVERYTHING);
    unit.event(&event(1, far(Far::Exception, 0x10, 0x40, 0, 0)), false, long(0));
    assert_eq!(read(&unit, 0x14CE), EVERYTHING & !1);
    assert_eq!(entry(&unit, 0), [0; 3]);
    assert!(!unit.interest(false, || long(0)).branches.any());
    let mut unit = recording(EVERYTHING);
    unit.event(&event(3, far(Far::SoftwareInterrupt, 0x10, 0x40, 0, 0)), false, long(0));
    assert_eq!(read(&unit, 0x14CE), EVERYTHING);
    assert_eq!(entry(&unit, 0)[..2], [0x10, 0x40]);
}

// covers: lbr/architectural-freeze
#[test]
fn a_freeze_stops_recording_and_reset_and_init_do_what_the_manual_says() {
    let jump = branch(Flow::Jump, 0x10, 0x40, 0);
    let mut unit = recording(EVERYTHING);
    unit.branches(&[jump], false, long(0));
    assert!(unit.interest(false, || long(0)).branches.any());
    assert!(!unit.interest(true, || long(0)).branches.any());
    unit.branches(&[branch(Flow::Jump, 0x20, 0x80, 0)], true, long(0));
    assert_eq!(entry(&unit, 0)[0], 0x10);
    unit.write_msr(0x14CF, 16).unwrap();
    unit.branches(&[jump], false, long(0));
    unit.state_changed(Change::Init { at: 0 }, long(0));
    assert_eq!(read(&unit, 0x14CE), EVERYTHING, "INIT leaves it");
    unit.warm_reset();
    assert_eq!(read(&unit, 0x14CE), EVERYTHING & !1, "a warm reset clears LBREn");
    assert_eq!(
        (read(&unit, 0x14CF), entry(&unit, 0)[0]),
        (16, 0x10),
        "and leaves all else"
    );
    unit.state_changed(Change::Reset, long(0));
    assert_eq!(
        (read(&unit, 0x14CE), read(&unit, 0x14CF), entry(&unit, 0)),
        (0, 32, [0; 3])
    );
}

// covers: lbr/architectural-ip
#[test]
fn cpuid_says_whether_addresses_are_linear() {
    let code = segment(0x1_0000);
    let jump = branch(Flow::Jump, 0x1_0010, 0x1_0040, 0);
    for (eax, expected) in [(0x4000_000B, [0x10, 0x40]), (0xC000_000B, [0x1_0010, 0x1_0040])] {
        let mut unit = ArchLbr::new(ArchLbrLeaf { regs: [eax, 7, 7, 0] }, 48);
        unit.write_msr(0x14CE, EVERYTHING).unwrap();
        let _ = unit.interest(false, || code);
        unit.branches(&[jump], false, code);
        assert_eq!(entry(&unit, 0)[..2], expected);
    }
}

// covers: lbr/xsaves
#[test]
fn xsaves_component_15() {
    assert_eq!(image::SIZE, 0x328, "CPUID.(0DH, 15):EAX");
    let mut area = [0xEE; image::SIZE];
    assert!(unit().save(&mut area), "the initial state needs no image");
    assert_eq!(area, [0xEE; image::SIZE]);
    assert!(!recording(0x1).save(&mut area), "LBREn alone is no initial state");

    let mut unit = recording(EVERYTHING);
    let records: Vec<_> = (1..=40).map(|i| at(i, branch(Flow::Jump, i, 0x100 + i, 0))).collect();
    unit.branches(&records, false, long(0));
    unit.event(&event(14, far(Far::Exception, 0x200, 0x300, 0, 0)), false, long(0));
    let before: Vec<_> = (0..32).map(|age| entry(&unit, age)).collect();
    assert!(!unit.save(&mut area));
    assert_eq!(read(&unit, 0x14CE), EVERYTHING, "saving leaves recording on");
    let word = |at: usize| get(&area, at);
    assert_eq!((word(0), word(8)), (EVERYTHING, 32));
    assert_eq!(
        [word(16), word(24), word(32)],
        [0x1DD, 0x1DE, 0x1E0].map(|msr| read(&unit, msr))
    );
    for (age, expected) in before.iter().enumerate() {
        assert_eq!([0, 8, 16].map(|at| word(40 + 24 * age + at)), *expected, "entry {age}");
    }
    // Another task's records come between, then all is as it was.
    let mut other = recording(EVERYTHING);
    other.branches(&[branch(Flow::Jump, 0x7, 0x77, 0)], false, long(0));
    other.restore(Some(&area)).unwrap();
    assert_eq!(read(&other, 0x14CE), EVERYTHING);
    assert_eq!((0..32).map(|age| entry(&other, age)).collect::<Vec<_>>(), before);
    assert_eq!(read(&other, 0x1DD), read(&unit, 0x1DD));
    // To the initial state.
    other.restore(None).unwrap();
    assert_eq!(
        (read(&other, 0x14CE), read(&other, 0x14CF), read(&other, 0x1DD)),
        (0, 32, 0)
    );
    assert!(other.save(&mut area));
}

// covers: lbr/xsaves
#[test]
fn xrstors_refuses_what_wrmsr_would() {
    let mut area = [0; image::SIZE];
    let mut unit = recording(EVERYTHING);
    unit.branches(&[branch(Flow::Jump, 0x10, 0x40, 0)], false, long(0));
    unit.save(&mut area);
    let before = unit.state();
    for (at, value, why) in [
        (image::CTL, 1 << 4, "a reserved bit"),
        (image::LER_TO, 1 << 47, "not canonical"),
        (image::ENTRIES, 1 << 47, "not canonical"),
        (image::ENTRIES + 31 * image::ENTRY + 8, 1 << 63, "not canonical"),
    ] {
        let mut bad = area;
        put(&mut bad, at, value);
        assert_eq!(unit.restore(Some(&bad)), Err(GP), "{why}");
        assert_eq!(unit.state(), before, "{why}: nothing has changed");
    }
    // Undefined bits of INFO are dropped.
    let mut odd = area;
    put(&mut odd, image::ENTRIES + 16, !0);
    assert_eq!(unit.restore(Some(&odd)), Ok(()));
    assert_eq!(entry(&unit, 0)[2], 0xFF00_0000_0000_FFFF);
    // An image of another depth does not fit: no entries.
    unit.write_msr(0x14CF, 16).unwrap();
    assert_eq!(unit.restore(Some(&area)), Ok(()));
    assert_eq!((read(&unit, 0x14CF), entry(&unit, 0)), (16, [0; 3]));
    assert_eq!(unit.restore(Some(&[])), Ok(()), "a short area is zeros");
}

// covers: lbr/state
#[test]
fn state_goes_out_and_comes_back() {
    let mut random = Random(5);
    let mut one = recording(EVERYTHING);
    let mut step = 0;
    for round in 0..60u64 {
        one.write_msr(0x14CF, [8, 16, 32][round as usize % 3]).unwrap();
        let mut two = unit();
        two.set_state(one.state());
        assert_eq!(two.state(), one.state());
        let batch = random.near(50, 0, &mut step);
        one.branches(&batch, false, long(0));
        // One by one: batches make no difference.
        batch.iter().for_each(|record| two.branches(&[*record], false, long(0)));
        assert_eq!(two.state(), one.state());
    }
    // A state that no such part could have.
    let mut state = one.state();
    state.control = !0;
    state.ring.depth = 77;
    state.ring.top = 200;
    let mut two = unit();
    two.set_state(state);
    assert_eq!((read(&two, 0x14CE), read(&two, 0x14CF)), (0x7F_000F, 32));
    two.branches(&random.near(5, 0, &mut step), false, long(0));
}

// covers: lbr/fuzz
#[test]
fn no_writes_images_or_branches_upset_it() {
    let mut random = Random(0xA2C4);
    let mut unit = unit();
    for _ in 0..20_000 {
        match random.below(5) {
            0 | 1 => {
                let first = [0x14CE, 0x1200, 0x1500, 0x1600, 0x1DD][random.below(5) as usize];
                let value = random.next() >> random.below(64);
                let _ = unit.write_msr(first + random.below(40) as u32, value);
            }
            2 => {
                let mut step = random.next() >> 8;
                let count = random.below(80) as usize;
                unit.branches(&random.near(count, 3, &mut step), random.below(4) == 0, long(3));
            }
            3 => {
                let bytes: Vec<u8> = (0..random.below(image::SIZE as u64 + 9))
                    .map(|_| random.next() as u8)
                    .collect();
                let _ = unit.restore(Some(&bytes));
            }
            _ => {
                let mut area = vec![0; random.below(image::SIZE as u64 + 9) as usize];
                unit.save(&mut area);
            }
        }
        assert!(unit.read_msr(0x14CF).is_ok_and(|depth| [8, 16, 32].contains(&depth)));
    }
}
