use super::*;

// covers: interest/vocabulary
#[test]
fn flow_codes_round_trip() {
    for (code, flow) in Flow::ALL.into_iter().enumerate() {
        assert_eq!(usize::from(flow.code()), code, "{flow:?}");
        assert_eq!(Flow::from_code(flow.code()), Some(flow));
        assert_eq!(flow.taken(), flow != Flow::Cond { taken: false });
    }
    for code in Flow::ALL.len() as u8..=u8::MAX {
        assert_eq!(Flow::from_code(code), None);
    }
}

// covers: interest/vocabulary
#[test]
fn a_record_has_the_layout_that_machine_code_writes() {
    use core::mem::offset_of;
    for (offset, expected, field) in [
        (offset_of!(BranchRecord, from), 0, "from"),
        (offset_of!(BranchRecord, to), 8, "to"),
        (offset_of!(BranchRecord, step), 16, "step"),
        (offset_of!(BranchRecord, flow), 24, "flow"),
        (offset_of!(BranchRecord, length), 25, "length"),
        (offset_of!(BranchRecord, from_cpl), 26, "from_cpl"),
        (offset_of!(BranchRecord, to_cpl), 27, "to_cpl"),
        (offset_of!(BranchRecord, loads_cr3), 28, "loads_cr3"),
        (offset_of!(BranchRecord, run), 29, "run"),
    ] {
        assert_eq!(offset, expected, "{field}");
    }
}

// covers: interest/vocabulary
#[test]
fn two_appetites_make_one_that_satisfies_both() {
    let exact = Interest {
        branches: Recorded::All,
        branch_room: 1,
        ..Interest::NOTHING
    };
    let counting = Interest {
        transfers: true,
        interrupts: true,
        branch_room: 7,
        instructions: 100,
        ..Interest::NOTHING
    };
    assert_eq!(Interest::NOTHING.and(exact), exact);
    assert_eq!(
        exact.and(counting),
        Interest {
            instructions: 100,
            transfers: true,
            interrupts: true,
            ..exact
        }
    );
    assert_eq!(exact.and(counting), counting.and(exact));
}

// covers: interest/vocabulary
#[test]
fn effects_add_up() {
    let trap = |bits| Effects {
        debug: Some(bits),
        ..Effects::NONE
    };
    let pmi = Effects {
        pmi: true,
        ..Effects::NONE
    };
    assert_eq!(trap(1).and(trap(4)), trap(5));
    assert_eq!(Effects::NONE.and(trap(2)), trap(2));
    let both = trap(1).and(pmi);
    assert!(both.pmi && both.debug == Some(1) && both.fault.is_none() && !both.stop);
    let stop = Effects {
        stop: true,
        ..Effects::NONE
    };
    assert!(both.and(stop).stop && stop.and(both).pmi);
}
