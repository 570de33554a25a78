use super::*;

/// Channel 2 with its gate high, programmed at tick 0 with a control word and a count of one byte.
fn channel2(mode: u8, count: u8) -> Pit {
    let mut pit = Pit::new();
    pit.set_gate2(true, 0);
    pit.write(3, 0x80 | 0x10 | mode << 1, 0);
    pit.write(2, count, 0);
    pit
}

fn at(pit: &mut Pit, tick: u64) -> (bool, u16) {
    pit.advance(ns_of(tick));
    (pit.out(2), pit.channels[2].encoded(pit.tick))
}

// covers: devices/pit
#[test]
fn the_clock_is_exact() {
    for (now, want) in [
        (0, 0),
        (838, 0),
        (839, 1),
        (1_000_000_000, 1_193_182),
        (1_000_000_000_000_000, 1_193_182_000_000),
    ] {
        assert_eq!(ticks(now), want, "{now} ns");
    }
    for tick in [1, 2, 3, 1_193_181, 1_193_182, 1_193_183, 0xffff_ffff_ffff] {
        assert_eq!((ticks(ns_of(tick)), ticks(ns_of(tick) - 1)), (tick, tick - 1));
    }
}

// covers: devices/pit
#[test]
fn the_waveforms_of_the_data_sheet() {
    // Figures 15 to 20: OUT and the count at every clock after the count was written. The modes with a hardware trigger get
    // it (the gate's rising edge) at the moment of the write.
    let (h, l) = (true, false);
    for (mode, count, trigger, wave) in [
        (
            0,
            4,
            false,
            &[(l, 4), (l, 3), (l, 2), (l, 1), (h, 0), (h, 0xffff), (h, 0xfffe)][..],
        ),
        (1, 3, true, &[(l, 3), (l, 2), (l, 1), (h, 0), (h, 0xffff), (h, 0xfffe)]),
        (2, 3, false, &[(h, 3), (h, 2), (l, 1), (h, 3), (h, 2), (l, 1), (h, 3)]),
        (
            3,
            4,
            false,
            &[(h, 4), (h, 2), (l, 4), (l, 2), (h, 4), (h, 2), (l, 4), (l, 2)],
        ),
        (
            3,
            5,
            false,
            &[(h, 4), (h, 2), (h, 0), (l, 4), (l, 2), (h, 4), (h, 2), (h, 0)],
        ),
        (
            4,
            3,
            false,
            &[(h, 3), (h, 2), (h, 1), (l, 0), (h, 0xffff), (h, 0xfffe), (h, 0xfffd)],
        ),
        (
            5,
            3,
            true,
            &[(h, 3), (h, 2), (h, 1), (l, 0), (h, 0xffff), (h, 0xfffe), (h, 0xfffd)],
        ),
        (6, 3, false, &[(h, 3), (h, 2), (l, 1), (h, 3)]),
        (7, 4, false, &[(h, 4), (h, 2), (l, 4), (l, 2), (h, 4)]),
    ] {
        let mut pit = channel2(mode, count);
        assert_eq!(pit.out(2), mode != 0, "mode {mode}: OUT right after the control word");
        if trigger {
            assert_eq!(at(&mut pit, 5).0, h, "mode {mode}: armed, not started");
            pit.set_gate2(false, ns_of(6));
            pit.set_gate2(true, ns_of(7));
        }
        let start = if trigger { 8 } else { 1 };
        for (i, want) in wave.iter().enumerate() {
            assert_eq!(
                at(&mut pit, start + i as u64),
                *want,
                "mode {mode}, count {count}, clock {}",
                i + 1
            );
        }
    }
}

// covers: devices/pit
#[test]
fn the_gate() {
    // Modes 0 and 4: the gate holds the count. Modes 2 and 3: it also sets OUT high, and its rise reloads.
    for (mode, held, after, why) in [
        (0, (false, 7), (false, 6), "mode 0 goes on"),
        (4, (true, 7), (true, 6), "mode 4 goes on"),
        (
            2,
            (true, 7),
            (true, 9),
            "mode 2 reloads on the next clock and has counted one",
        ),
        (3, (true, 4), (true, 8), "mode 3 reloads likewise"),
    ] {
        let mut pit = channel2(mode, 10);
        at(&mut pit, 4);
        pit.set_gate2(false, ns_of(4));
        assert_eq!(at(&mut pit, 100), held, "{why}");
        pit.set_gate2(true, ns_of(100));
        let clocks = if matches!(mode, 0 | 4) { 101 } else { 102 };
        assert_eq!(at(&mut pit, clocks), after, "{why}");
    }
    // Mode 1 can be retriggered: the pulse starts again.
    let mut pit = channel2(1, 4);
    for trigger in [0, 3] {
        pit.set_gate2(false, ns_of(trigger));
        pit.set_gate2(true, ns_of(trigger));
    }
    assert_eq!(at(&mut pit, 7), (false, 1));
    assert_eq!(at(&mut pit, 8), (true, 0), "3 + 1 + 4");
}

// covers: devices/pit
#[test]
fn a_new_count_while_counting() {
    // The tick of the write, then the ticks with their outputs and counts.
    for (mode, wave, why) in [
        (
            0,
            &[(4, (false, 3)), (6, (false, 1)), (7, (true, 0))][..],
            "mode 0: on the next clock",
        ),
        (
            4,
            &[(4, (true, 3)), (7, (false, 0)), (8, (true, 0xffff))],
            "mode 4: on the next clock",
        ),
        (
            2,
            &[
                (4, (true, 7)),
                (10, (false, 1)),
                (11, (true, 3)),
                (13, (false, 1)),
                (14, (true, 3)),
            ],
            "mode 2: after the period",
        ),
        (
            3,
            &[(4, (true, 4)), (6, (false, 2)), (7, (true, 2))],
            "mode 3: after the half",
        ),
    ] {
        let mut pit = channel2(mode, 10);
        pit.write(2, 3, ns_of(3));
        for (tick, want) in wave {
            assert_eq!(at(&mut pit, *tick), *want, "{why}, tick {tick}");
        }
    }
    // Mode 1: not before the next trigger.
    let mut pit = channel2(1, 4);
    pit.set_gate2(false, 0);
    pit.set_gate2(true, 0);
    pit.write(2, 2, ns_of(2));
    assert_eq!(
        (at(&mut pit, 4).0, at(&mut pit, 5).0),
        (false, true),
        "the pulse under way keeps its length"
    );
    pit.set_gate2(false, ns_of(10));
    pit.set_gate2(true, ns_of(10));
    assert_eq!(
        (at(&mut pit, 12).0, at(&mut pit, 13).0),
        (false, true),
        "the next has the new one"
    );
}

// covers: devices/pit
#[test]
fn mode_0_with_a_two_byte_count() {
    let mut pit = Pit::new();
    pit.set_gate2(true, 0);
    pit.write(3, 0xb0, 0);
    pit.write(2, 2, 0);
    pit.write(2, 0, 0);
    assert!(at(&mut pit, 3).0);
    pit.write(2, 4, ns_of(3));
    assert!(!at(&mut pit, 50).0, "the first byte sets OUT low and stops the count");
    pit.write(2, 1, ns_of(50));
    assert_eq!(at(&mut pit, 51), (false, 0x104));
    assert_eq!(at(&mut pit, 51 + 0x104), (true, 0));
}

// covers: devices/pit
#[test]
fn the_gate_of_mode_0_does_not_hold_the_load() {
    let mut pit = channel2(0, 5);
    pit.set_gate2(false, 0);
    assert_eq!(at(&mut pit, 30), (false, 5), "loaded, held");
    pit.set_gate2(true, ns_of(30));
    assert_eq!(at(&mut pit, 34), (false, 1));
    assert_eq!(at(&mut pit, 35), (true, 0), "N clocks after the gate");
}

// covers: devices/pit
#[test]
fn reading() {
    let mut pit = Pit::new();
    // Channel 0, two bytes, mode 2, 1234H.
    pit.write(3, 0x34, 0);
    pit.write(0, 0x34, 0);
    pit.write(0, 0x12, 0);
    let now = ns_of(1);
    assert_eq!((pit.read(0, now), pit.read(0, now)), (0x34, 0x12), "low, then high");
    // A latched count stays until it is read; a second latch command is ignored.
    pit.write(3, 0x00, now);
    pit.write(3, 0x00, ns_of(0x35));
    assert_eq!((pit.read(0, ns_of(0x40)), pit.read(0, ns_of(0x50))), (0x34, 0x12));
    let now = ns_of(0x51);
    assert_eq!(
        (pit.read(0, now), pit.read(0, now)),
        (0xe4, 0x11),
        "then the count itself: 1234H - 50H"
    );
}

// covers: devices/pit
#[test]
fn read_back() {
    let mut pit = Pit::new();
    for (control, channel) in [(0x34, 0), (0x54, 1), (0xb8, 2)] {
        pit.write(3, control, 0);
        assert_eq!(control >> 6, channel);
    }
    pit.write(1, 18, 0);
    pit.advance(ns_of(5));
    // Status of all three: OUT, null count, and the control word.
    pit.write(3, 0xe0 | 0x0e, ns_of(5));
    for (channel, status, why) in [
        (0, 0xc0 | 0x34, "OUT high, null count: nothing was written"),
        (1, 0x80 | 0x14, "OUT high, loaded"),
        (2, 0xc0 | 0x38, "OUT high, null count"),
    ] {
        assert_eq!(pit.read(channel, ns_of(5)), status, "{why}");
    }
    // Count and status of channel 1: status comes first.
    pit.write(3, 0xc0 | 0x04, ns_of(5));
    pit.advance(ns_of(9));
    assert_eq!(pit.read(1, ns_of(9)), 0x94);
    assert_eq!(pit.read(1, ns_of(9)), 18 - 4, "the count at the command, at tick 5");
    assert_eq!(pit.read(1, ns_of(9)), 18 - 8, "and then unlatched");
    // A count written and not yet loaded is null for one clock.
    pit.write(3, 0x90, ns_of(20));
    pit.write(2, 7, ns_of(20));
    pit.write(3, 0xe0 | 0x08, ns_of(20));
    pit.write(3, 0xe0 | 0x08, ns_of(21));
    assert_eq!(
        pit.read(2, ns_of(21)),
        0x40 | 0x10,
        "a second command does not overwrite the first's status"
    );
    pit.write(3, 0xe0 | 0x08, ns_of(21));
    assert_eq!(pit.read(2, ns_of(21)), 0x10);
    assert_eq!(pit.read(3, ns_of(21)), 0xff, "the control register cannot be read");
}

// covers: devices/pit
#[test]
fn bcd_counting_and_the_largest_count() {
    let mut pit = Pit::new();
    pit.set_gate2(true, 0);
    pit.write(3, 0xb1, 0);
    pit.write(2, 0x00, 0);
    pit.write(2, 0x10, 0);
    assert_eq!(at(&mut pit, 2), (false, 0x0999), "1000 - 1");
    assert_eq!(at(&mut pit, 1001), (true, 0));
    assert_eq!(at(&mut pit, 1002), (true, 0x9999), "counts on through zero");
    for (control, length) in [(0xb0, 0x1_0000), (0xb1, 10_000)] {
        let mut pit = Pit::new();
        pit.set_gate2(true, 0);
        pit.write(3, control, 0);
        pit.write(2, 0, 0);
        pit.write(2, 0, 0);
        assert_eq!(
            (at(&mut pit, length).0, at(&mut pit, length + 1).0),
            (false, true),
            "0 is {length}"
        );
    }
}

// covers: devices/pit
#[test]
fn channel_0_interrupts_to_the_nanosecond() {
    // HZ=1000 as an OS programs it: mode 2, 1193.
    let mut pit = Pit::new();
    pit.write(3, 0x34, 0);
    pit.write(0, (1193_u16 & 0xff) as u8, 0);
    pit.write(0, (1193_u16 >> 8) as u8, 0);
    let mut edges = Vec::new();
    while edges.len() < 100 {
        let next = pit.next_event().unwrap();
        pit.advance(next - 1);
        assert!(!pit.take_edge());
        pit.advance(next);
        if pit.take_edge() {
            edges.push(next);
        }
    }
    for (k, at) in (1..).zip(edges) {
        assert_eq!(at, ns_of(1 + 1193 * k), "loaded at clock 1, then every 1193 clocks");
    }
    // However late somebody looks: one edge, and the next one where it belongs.
    pit.advance(3_600_000_000_000);
    assert!(pit.take_edge());
    let next = pit.next_event().unwrap();
    assert_eq!((ticks(next) - 1) % 1193, 0);
    assert!(next - 3_600_000_000_000 <= 1_000_000);
}

// covers: devices/pit
#[test]
fn a_control_word_moves_the_output_at_once() {
    let mut pit = Pit::new();
    pit.write(3, 0x30, 0);
    assert!(!pit.out(0) && !pit.take_edge(), "mode 0 begins low");
    pit.write(3, 0x34, 0);
    assert!(pit.out(0) && pit.take_edge(), "mode 2 begins high");
    pit.write(3, 0x36, 0);
    assert!(pit.out(0) && !pit.take_edge(), "mode 3 too: no edge");
}

// covers: devices/pit
#[test]
fn one_shot_interrupts_once() {
    // Mode 0 ("interrupt on terminal count") and mode 4 (as Linux's one-shot clock event has it).
    for (mode, edge) in [(0, 1 + 500), (4, 1 + 500 + 1)] {
        let mut pit = Pit::new();
        pit.write(3, 0x30 | mode << 1, 0);
        pit.take_edge();
        pit.write(0, (500_u16 & 0xff) as u8, 0);
        pit.write(0, (500_u16 >> 8) as u8, 0);
        pit.advance(ns_of(edge) - 1);
        assert!(!pit.take_edge(), "mode {mode}");
        pit.advance(ns_of(edge));
        assert!(pit.take_edge(), "mode {mode}");
        assert_eq!(pit.next_event(), None, "mode {mode}");
        pit.advance(u64::MAX / 2);
        assert!(!pit.take_edge(), "mode {mode}");
    }
}
