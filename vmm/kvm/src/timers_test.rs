use super::*;

// covers: kvm/irqchip-kvm-pause
#[test]
fn what_a_timer_has_left_goes_by_its_mode() {
    let state = |entry: u32, initial: u32, current: u32| {
        let mut state = kvm_lapic_state::default();
        for (at, value) in [(LVT_TIMER, entry), (INITIAL_COUNT, initial), (CURRENT_COUNT, current)] {
            set_register(&mut state, at, value);
        }
        state
    };
    let counts = |initial, current| Left::Counts { initial, current };
    for (state, deadline, expected) in [
        (state(0x40, 9, 5), 7, counts(9, 5)),
        (state(0x40, 9, 0), 7, Left::Nothing),
        (state(0x2_0040, 9, 5), 0, counts(9, 5)),
        (state(0x2_0040, 9, 0), 0, counts(9, 0)),
        (state(0x2_0040, 0, 0), 7, Left::Nothing),
        (state(0x4_0040, 9, 5), 7, Left::Deadline(7)),
        (state(0x4_0040, 9, 5), 0, Left::Nothing),
    ] {
        assert_eq!(left(&state, deadline), expected);
    }
}

// covers: kvm/irqchip-kvm-ends
#[test]
fn an_interval_timer_counts_until_its_end_or_for_ever() {
    let channel = |mode| kvm_pit_channel_state {
        mode,
        // A millisecond.
        count: 1193,
        count_load_time: 5_000_000,
        ..Default::default()
    };
    for (mode, soon, late) in [
        (0, true, false),
        (2, true, true),
        (3, true, true),
        (4, true, false),
        (5, false, false),
        (NO_MODE, false, false),
    ] {
        assert_eq!(counts(&channel(mode), 5_900_000), soon, "{mode}");
        assert_eq!(counts(&channel(mode), 6_100_000), late, "{mode}");
    }
}
