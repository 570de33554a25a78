use super::*;

// covers: decoder/time
#[test]
fn packets_of_time_add_up() {
    let mut clock = PacketClock::new(Timing {
        tsc_per_crystal: (84, 1),
        mtc_shift: 3,
        nominal_ratio: 20,
    });
    clock.mtc(7);
    assert_eq!(clock.now().tsc, None, "nothing is known before a TSC packet");
    clock.tsc(1_000_000);
    clock.tma(0x7f8, 40);
    assert_eq!(clock.now().tsc, Some(1_000_000));
    // The counter goes from 7f8 to 800, and its bits 10:3 wrap.
    clock.mtc(0x00);
    assert_eq!(clock.now().tsc, Some(1_000_000 - 40 + 8 * 84));
    clock.mtc(0x01);
    assert_eq!(clock.now().tsc, Some(1_000_000 - 40 + 16 * 84));
    // Half the nominal ratio: a cycle is two ticks.
    clock.cbr(10);
    clock.cyc(5);
    clock.cyc(6);
    assert_eq!(clock.now().tsc, Some(1_000_000 - 40 + 16 * 84 + 22));
    assert_eq!((clock.now().cycles, clock.now().ratio), (11, Some(10)));
    clock.tsc(2_000_000);
    assert_eq!(clock.now().tsc, Some(2_000_000));
}

// covers: decoder/time
#[test]
fn a_counter_of_which_tma_tells_too_little_is_taken_up_at_the_next_mtc() {
    let mut clock = PacketClock::new(Timing {
        mtc_shift: 15,
        ..Timing::default()
    });
    // The counter is 35_9000H, of which TMA tells 9000H, and MTC bits 22:15.
    clock.tsc(0x1_0000);
    clock.tma(0x9000, 0);
    for (ctc, ticks) in [
        (0x6c, 0x7000),
        (0x6d, 0xf000),
        (0xff, 0x4a_0000 - 0x1000),
        (0x01, 0x4a_0000 - 0x1000 + 0x1_0000),
    ] {
        clock.mtc(ctc);
        assert_eq!(clock.now().tsc, Some(0x1_0000 + ticks), "{ctc:#x}");
    }
}
