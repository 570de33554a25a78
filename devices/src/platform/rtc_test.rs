use super::*;

/// 2024-02-29 23:59:58 UTC, a Thursday.
const LEAP: i64 = 1_709_251_198;
const S: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;

fn get(rtc: &mut Rtc, index: u8, now: u64) -> u8 {
    rtc.write(0, index, now);
    rtc.read(1, now)
}

fn put(rtc: &mut Rtc, index: u8, value: u8, now: u64) {
    rtc.write(0, index, now);
    rtc.write(1, value, now);
}

fn time(rtc: &mut Rtc, now: u64) -> [u8; 8] {
    [CENTURY, YEAR, MONTH, DAY, DAY_OF_WEEK, HOURS, MINUTES, SECONDS].map(|i| get(rtc, i, now))
}

// covers: devices/rtc
#[test]
fn the_calendar() {
    // Binary, 24-hour: century, year, month, day, day of week from Sunday = 1, hour, minute, second.
    for (base, want, why) in [
        (0, [19, 70, 1, 1, 5, 0, 0, 0], "the epoch was a Thursday"),
        (LEAP, [20, 24, 2, 29, 5, 23, 59, 58], "a leap day"),
        (LEAP + 2, [20, 24, 3, 1, 6, 0, 0, 0], "and the day after"),
        (951_782_400, [20, 0, 2, 29, 3, 0, 0, 0], "2000 is a leap year"),
        (4_107_542_399, [21, 0, 2, 28, 1, 23, 59, 59], "2100 is not"),
        (4_107_542_400, [21, 0, 3, 1, 2, 0, 0, 0], "2100 is not"),
        (946_684_799, [19, 99, 12, 31, 6, 23, 59, 59], "the last of a century"),
        (946_684_800, [20, 0, 1, 1, 7, 0, 0, 0], "the first of one"),
        (-1, [19, 69, 12, 31, 4, 23, 59, 59], "before the epoch"),
        (i64::MAX, [99, 99, 12, 31, 6, 23, 59, 59], "as late as can be said"),
        (i64::MIN, [0, 0, 1, 1, 7, 0, 0, 0], "as early as can be said"),
    ] {
        let mut rtc = Rtc::new(base);
        put(&mut rtc, REG_B, BINARY | HOURS_24, 0);
        assert_eq!(time(&mut rtc, 0), want, "{why}");
    }
}

// covers: devices/rtc
#[test]
fn formats_of_the_hour() {
    for (hour, bcd24, binary24, bcd12, binary12) in [
        (0, 0x00, 0, 0x12, 12),
        (1, 0x01, 1, 0x01, 1),
        (11, 0x11, 11, 0x11, 11),
        (12, 0x12, 12, 0x92, 0x8c),
        (13, 0x13, 13, 0x81, 0x81),
        (23, 0x23, 23, 0x91, 0x8b),
    ] {
        for (b, want) in [
            (HOURS_24, bcd24),
            (HOURS_24 | BINARY, binary24),
            (0, bcd12),
            (BINARY, binary12),
        ] {
            let mut rtc = Rtc::new(hour * 3600 + 59 * 60);
            put(&mut rtc, REG_B, b, 0);
            assert_eq!(get(&mut rtc, HOURS, 0), want, "{hour} h with register B {b:#x}");
            assert_eq!(get(&mut rtc, MINUTES, 0), if b & BINARY != 0 { 59 } else { 0x59 });
            // What is read can be written.
            put(&mut rtc, REG_B, b | SET, 0);
            put(&mut rtc, HOURS, want, 0);
            put(&mut rtc, REG_B, b, 0);
            assert_eq!(get(&mut rtc, HOURS, 0), want);
        }
    }
}

// covers: devices/rtc
#[test]
fn setting_the_time() {
    let mut rtc = Rtc::new(0);
    let now = 700 * MS;
    put(&mut rtc, REG_B, SET | HOURS_24, now);
    for (index, value) in [
        (CENTURY, 0x20),
        (YEAR, 0x24),
        (MONTH, 2),
        (DAY, 0x29),
        (DAY_OF_WEEK, 3),
        (HOURS, 0x23),
        (MINUTES, 0x59),
        (SECONDS, 0x58),
    ] {
        put(&mut rtc, index, value, now);
    }
    assert_eq!(get(&mut rtc, SECONDS, 5 * S), 0x58, "SET: no update, however long");
    put(&mut rtc, REG_B, HOURS_24, 5 * S + 700 * MS);
    assert_eq!(
        time(&mut rtc, 5 * S + 999 * MS),
        [0x20, 0x24, 2, 0x29, 3, 0x23, 0x59, 0x58]
    );
    assert_eq!(
        get(&mut rtc, SECONDS, 6 * S),
        0x59,
        "the divider chain has gone on: updates keep their phase"
    );
    assert_eq!(
        time(&mut rtc, 7 * S),
        [0x20, 0x24, 3, 1, 4, 0, 0, 0],
        "the day of the week counts for itself"
    );
}

// covers: devices/rtc
#[test]
fn impossible_dates_are_survived() {
    for value in 0..=255 {
        for b in [0, BINARY, HOURS_24, BINARY | HOURS_24] {
            let mut rtc = Rtc::new(LEAP);
            put(&mut rtc, REG_B, SET | b, 0);
            for index in [SECONDS, MINUTES, HOURS, DAY_OF_WEEK, DAY, MONTH, YEAR, CENTURY] {
                put(&mut rtc, index, value, 0);
                assert_eq!(get(&mut rtc, index, 0), value, "while SET the registers are memory");
            }
            put(&mut rtc, REG_B, b, 0);
            let date = date_from_seconds(rtc.seconds_at(0));
            assert!((1..=12).contains(&date.month) && (1..=31).contains(&date.day) && date.time < DAY_SECONDS);
        }
    }
}

// covers: devices/rtc
#[test]
fn update_in_progress() {
    let mut rtc = Rtc::new(0);
    for (now, uip, why) in [
        (0, 0, "the update is over"),
        (S - 2_228_001, 0, "244 us before the 1984 us of the update begin"),
        (S - 2_228_000, UIP, "t(BUC)"),
        (S - 1, UIP, "t(UC)"),
        (S, 0, "over"),
    ] {
        assert_eq!(get(&mut rtc, REG_A, now) & UIP, uip, "{why}");
    }
    put(&mut rtc, REG_B, SET | HOURS_24, S);
    assert_eq!(get(&mut rtc, REG_A, 2 * S - 1) & UIP, 0, "no update while SET");
    put(&mut rtc, REG_A, 0xa6, 2 * S);
    assert_eq!(get(&mut rtc, REG_A, 2 * S), 0x26, "UIP is read-only");
}

// covers: devices/rtc
#[test]
fn divider_reset() {
    let mut rtc = Rtc::new(0);
    put(&mut rtc, REG_A, 0x76, 300 * MS);
    assert_eq!(get(&mut rtc, SECONDS, 90 * S), 0, "11x holds the divider");
    put(&mut rtc, REG_A, 0x26, 100 * S);
    assert_eq!(get(&mut rtc, SECONDS, 100 * S + 499 * MS), 0);
    assert_eq!(
        get(&mut rtc, SECONDS, 100 * S + 500 * MS),
        1,
        "first update half a second after the release"
    );
}

// covers: devices/rtc
#[test]
fn periodic_interrupt_rates() {
    // RS3:0 and the period in units of 1/32768 s: table 5 of the data sheet.
    for (rs, period) in [
        (1, 128),
        (2, 256),
        (3, 4),
        (4, 8),
        (5, 16),
        (6, 32),
        (7, 64),
        (8, 128),
        (9, 256),
        (10, 512),
        (11, 1024),
        (12, 2048),
        (13, 4096),
        (14, 8192),
        (15, 16384),
    ] {
        let mut rtc = Rtc::new(0);
        put(&mut rtc, REG_A, 0x20 | rs, 0);
        put(&mut rtc, REG_B, PF | HOURS_24, 0);
        for k in 1..=5_u128 {
            let want = (k * period * u128::from(S)).div_ceil(32_768) as u64;
            assert_eq!(rtc.next_event(), Some(want), "rate {rs}");
            rtc.advance(want - 1);
            assert!(!rtc.irq());
            rtc.advance(want);
            assert!(rtc.irq());
            assert_eq!(rtc.next_event(), None, "the line is high until C is read");
            assert_eq!(get(&mut rtc, REG_C, want) & (IRQF | PF), IRQF | PF);
            assert!(!rtc.irq(), "reading C clears it");
            assert_eq!(get(&mut rtc, REG_C, want), 0);
        }
    }
    let mut rtc = Rtc::new(0);
    put(&mut rtc, REG_A, 0x20, 0);
    put(&mut rtc, REG_B, PF | HOURS_24, 0);
    assert_eq!(rtc.next_event(), None, "rate 0 is none");
}

// covers: devices/rtc
#[test]
fn update_ended_interrupt() {
    let mut rtc = Rtc::new(0);
    assert_eq!(
        get(&mut rtc, REG_C, S) & (IRQF | UF),
        UF,
        "the flag comes without the enable"
    );
    put(&mut rtc, REG_B, UF | HOURS_24, S);
    assert_eq!(rtc.next_event(), Some(2 * S));
    rtc.advance(2 * S);
    assert!(rtc.irq());
    put(&mut rtc, REG_B, SET | UF | HOURS_24, 2 * S);
    assert_eq!(get(&mut rtc, REG_B, 2 * S), SET | HOURS_24, "SET clears UIE");
    assert!(!rtc.irq());
}

// covers: devices/rtc
#[test]
fn alarms() {
    const ANY: u8 = 0xc0;
    // Hour, minute and second of the alarm; seconds until it goes off, from 23:59:58.
    for (alarm, after, why) in [
        ([ANY, ANY, ANY], 1, "every second"),
        ([ANY, ANY, 0x00], 2, "once a minute"),
        ([ANY, 0x30, 0x00], 1802, "once an hour"),
        ([0x00, 0x00, 0x00], 2, "midnight"),
        ([0x23, 0x59, 0x59], 1, "the next second"),
        ([0x23, 0x59, 0x58], 86_400, "this very second: tomorrow"),
        ([0x12, 0xff, ANY], 2 + 43_200, "from noon on"),
        ([0x07, 0x30, 0x15], 2 + 27_015, "a time of day"),
    ] {
        let mut rtc = Rtc::new(LEAP);
        for (index, value) in [HOURS_ALARM, MINUTES_ALARM, SECONDS_ALARM].into_iter().zip(alarm) {
            put(&mut rtc, index, value, 0);
        }
        put(&mut rtc, REG_B, AF | HOURS_24, 0);
        assert_eq!(rtc.next_event(), Some(after * S), "{why}");
        rtc.advance(after * S - 1);
        assert!(!rtc.irq(), "{why}");
        rtc.advance(after * S);
        assert!(rtc.irq(), "{why}");
        assert_eq!(get(&mut rtc, REG_C, after * S) & (IRQF | AF), IRQF | AF);
    }
    // 12-hour mode: 1 PM.
    let mut rtc = Rtc::new(LEAP);
    put(&mut rtc, REG_B, AF, 0);
    put(&mut rtc, HOURS_ALARM, 0x81, 0);
    assert_eq!(rtc.next_event(), Some((2 + 13 * 3600) * S));
    put(&mut rtc, HOURS_ALARM, 0x24, 0);
    assert_eq!(rtc.next_event(), None, "an hour that there is not");
}

// covers: devices/rtc
#[test]
fn memory_and_the_other_registers() {
    let mut rtc = Rtc::new(0);
    for index in (0x0e..0x80).filter(|i| *i != CENTURY) {
        put(&mut rtc, index, !index, 0);
    }
    for index in (0x0e..0x80).filter(|i| *i != CENTURY) {
        assert_eq!(
            get(&mut rtc, 0x80 | index, S),
            !index,
            "bit 7 is the NMI mask, not the index"
        );
    }
    assert_eq!(rtc.index(), 0xff, "and it is kept");
    assert_eq!(get(&mut rtc, REG_D, S), 0x80, "valid RAM and time");
    assert_eq!(rtc.read(0, S), 0xff, "the index is write-only");
    assert_eq!((get(&mut rtc, REG_A, S), get(&mut rtc, REG_B, S)), (0x26, 0x02));
}
