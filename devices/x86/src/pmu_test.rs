use super::*;

// covers: pmu/select
#[test]
fn event_select_has_the_manual_s_layout() {
    let s = |bits| EventSelect::from_bits(bits);
    assert_eq!((s(0x4F2E).event(), s(0x4F2E).umask()), (0x2E, 0x4F));
    for (bit, set) in [
        (16, s(1 << 16).usr()),
        (17, s(1 << 17).os()),
        (18, s(1 << 18).edge()),
        (19, s(1 << 19).pin_control()),
        (20, s(1 << 20).int()),
        (21, s(1 << 21).any()),
        (22, s(1 << 22).enable()),
        (23, s(1 << 23).invert()),
        (32, s(1 << 32).in_tx()),
        (33, s(1 << 33).in_tx_checkpointed()),
        (34, s(1 << 34).adaptive()),
    ] {
        assert!(set, "bit {bit}");
    }
    assert_eq!(s(0xAB << 24).counter_mask(), 0xAB);
}

// covers: pmu/fixed
#[test]
fn fixed_control_has_four_bits_a_counter_and_one_above() {
    let field = FixedControl::of(0xB0, 1);
    assert!(field.os && field.usr && field.pmi && !field.adaptive);
    assert_eq!(FixedControl::of(0xB0, 0), FixedControl::default());
    assert!(FixedControl::of(1 << 40, 2).adaptive);
    assert_eq!(FixedControl::writable(1, true, false), 0xF0);
    assert_eq!(FixedControl::writable(2, false, true), 0xB00 | 1 << 40);
}

// covers: pmu/branches
#[test]
fn branch_kinds_choose_among_flows() {
    for (kinds, count, what) in [
        (
            Branches::ALL,
            17,
            "all but exceptions, interrupts, VM entries, VM exits and SMIs",
        ),
        (Branches::CONDITIONAL, 2, "taken and not"),
        (Branches::CALLS, 2, "direct and indirect"),
        (Branches::INDIRECT, 2, "jump and call"),
        (Branches::RETURNS, 1, "near"),
        (Branches::FAR, 10, "fifteen kinds less five"),
        (Branches::NEAR_TAKEN, 6, "seven kinds less one"),
        (Branches::ALL_TAKEN, 16, "all less one"),
    ] {
        assert_eq!(Flow::ALL.iter().filter(|&&f| kinds.has(f)).count(), count, "{what}");
    }
}
