//! The MC146818 real-time clock with 128 bytes of CMOS memory. Motorola MC146818A data sheet; the century byte at 32H is where
//! PCs keep it (FADT "CENTURY").
//!
//! The time is kept as a count of seconds and the ns of a second's boundary, not as registers that are stepped. While the clock
//! stands (SET, or a divider that does not run) the registers are plain memory.

use serde::{Deserialize, Serialize};
use serde_big_array::BigArray;

/// Index port, with the NMI mask in bit 7; the data port follows.
pub const RTC: u16 = 0x70;

const SECONDS: u8 = 0x00;
const SECONDS_ALARM: u8 = 0x01;
const MINUTES: u8 = 0x02;
const MINUTES_ALARM: u8 = 0x03;
const HOURS: u8 = 0x04;
const HOURS_ALARM: u8 = 0x05;
const DAY_OF_WEEK: u8 = 0x06;
const DAY: u8 = 0x07;
const MONTH: u8 = 0x08;
const YEAR: u8 = 0x09;
const REG_A: u8 = 0x0a;
const REG_B: u8 = 0x0b;
const REG_C: u8 = 0x0c;
const REG_D: u8 = 0x0d;
/// The register that holds the year's hundreds.
pub const CENTURY: u8 = 0x32;

/// Register A: update in progress.
const UIP: u8 = 0x80;
/// Register A: the divider for a 32768 Hz crystal, the only one there is.
const DIVIDER_RUNS: u8 = 0x20;
const DIVIDER: u8 = 0x70;
/// Register B.
const SET: u8 = 0x80;
const BINARY: u8 = 0x04;
const HOURS_24: u8 = 0x02;
/// Register C flags; register B has the enables of PF, AF and UF at the same places.
const IRQF: u8 = 0x80;
const PF: u8 = 0x40;
const AF: u8 = 0x20;
const UF: u8 = 0x10;
const PM: u8 = 0x80;

const SECOND: i128 = 1_000_000_000;
/// UIP comes up 244 us before an update, which takes 1984 us.
const UIP_NS: i128 = 244_000 + 1_984_000;
const DAY_SECONDS: i64 = 86_400;
/// 0000-01-01 and the last second of 9999: all that four digits of year can say.
const FIRST: i64 = -62_167_219_200;
const LAST: i64 = 253_402_300_799;

/// A calendar date and time of day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Date {
    year: i64,
    month: i64,
    day: i64,
    /// 0 to 6 from Sunday.
    weekday: i64,
    /// Seconds since midnight.
    time: i64,
}

/// Days from 1970-01-01, in the Gregorian calendar; years start in March so that the leap day is the last.
fn days_from_date(year: i64, month: i64, day: i64) -> i64 {
    let y = if month <= 2 { year - 1 } else { year };
    let era = y.div_euclid(400);
    let year_of_era = y.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

fn date_from_seconds(seconds: i64) -> Date {
    let days = seconds.div_euclid(DAY_SECONDS);
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let from_march = (5 * doy + 2) / 153;
    let day = doy - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 {
        from_march + 3
    } else {
        from_march - 9
    };
    let year = yoe + era * 400 + i64::from(month <= 2);
    Date {
        year,
        month,
        day,
        weekday: (days + 4).rem_euclid(7),
        time: seconds.rem_euclid(DAY_SECONDS),
    }
}

fn month_length(year: i64, month: i64) -> i64 {
    match month {
        4 | 6 | 9 | 11 => 30,
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        _ => 31,
    }
}

/// The clock and its memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rtc {
    /// Port 70H as last written: the index, and the NMI mask that nothing here obeys.
    index: u8,
    /// The registers that are memory; those of the time only while the clock stands.
    #[serde(with = "BigArray")]
    ram: [u8; 128],
    a: u8,
    b: u8,
    c: u8,
    /// The time at `anchor`, in seconds from 1970-01-01.
    seconds: i64,
    /// The ns of a second's boundary; may lie before the beginning of time.
    anchor: i128,
    /// The day-of-week register counts for itself: how far it is from the calendar's.
    weekday_shift: i64,
    now: u64,
}

impl Rtc {
    /// A running clock, 24-hour and BCD, that shows `base` (seconds from 1970-01-01 UTC) at 0 ns.
    pub fn new(base: i64) -> Rtc {
        Rtc {
            index: 0,
            ram: [0; 128],
            a: DIVIDER_RUNS | 0x06,
            b: HOURS_24,
            c: 0,
            seconds: base.clamp(FIRST, LAST),
            anchor: 0,
            weekday_shift: 0,
            now: 0,
        }
    }

    /// Moves to `now` ns: sets the flags of what has happened on the way.
    pub fn advance(&mut self, now: u64) {
        if now <= self.now {
            return;
        }
        let (from, to) = (i128::from(self.now), i128::from(now));
        self.now = now;
        if let Some(rate) = self.rate()
            && self.periods(to, rate) != self.periods(from, rate)
        {
            self.c |= PF;
        }
        if self.runs() {
            let (was, is) = (self.seconds_at(from), self.seconds_at(to));
            if was != is {
                self.c |= UF;
                if self.next_alarm(was).is_some_and(|at| at <= is) {
                    self.c |= AF;
                }
            }
        }
    }

    /// The ns at which the interrupt line will next rise by itself.
    pub fn next_event(&self) -> Option<u64> {
        if self.irq() {
            return None;
        }
        let now = i128::from(self.now);
        let mut next: Option<i128> = None;
        let mut offer = |at: i128| next = Some(next.map_or(at, |n: i128| n.min(at)));
        if self.b & PF != 0
            && let Some(rate) = self.rate()
        {
            // Rounded up: the first ns at which the period is over.
            let passed = self.periods(now, rate) + 1;
            offer(self.anchor - (-passed * SECOND).div_euclid(rate));
        }
        if self.runs() {
            let second = self.seconds_at(now);
            if self.b & UF != 0 {
                offer(self.boundary(second.saturating_add(1)));
            }
            if self.b & AF != 0
                && let Some(at) = self.next_alarm(second)
            {
                offer(self.boundary(at));
            }
        }
        next.map(|at| u64::try_from(at).unwrap_or(u64::MAX).max(self.now.saturating_add(1)))
    }

    /// The level of IRQ 8.
    pub fn irq(&self) -> bool {
        self.c & self.b & (PF | AF | UF) != 0
    }

    /// Whether the divider counts.
    fn divides(&self) -> bool {
        self.a & DIVIDER == DIVIDER_RUNS
    }

    /// Whether the time advances.
    fn runs(&self) -> bool {
        self.divides() && self.b & SET == 0
    }

    /// Periodic interrupts a second: table "Periodic Interrupt Rate".
    fn rate(&self) -> Option<i128> {
        match self.a & 0x0f {
            _ if !self.divides() => None,
            0 => None,
            1 => Some(256),
            2 => Some(128),
            rs => Some(32_768 >> (rs - 1)),
        }
    }

    fn periods(&self, at: i128, rate: i128) -> i128 {
        ((at - self.anchor) * rate).div_euclid(SECOND)
    }

    fn seconds_at(&self, at: i128) -> i64 {
        let passed = (at - self.anchor).div_euclid(SECOND) as i64;
        self.seconds.saturating_add(passed)
    }

    fn boundary(&self, second: i64) -> i128 {
        self.anchor + i128::from(second.saturating_sub(self.seconds)) * SECOND
    }

    /// The first second after `second` at which the alarm registers match.
    fn next_alarm(&self, second: i64) -> Option<i64> {
        let matches = |register: u8, now: u8| {
            let alarm = self.ram[usize::from(register)];
            // "Don't care" is anything from C0H up.
            alarm >= 0xc0 || alarm == now
        };
        let first = |limit: i64, from: i64, register: u8, encode: &dyn Fn(i64) -> u8| {
            (from..limit).find(|v| matches(register, encode(*v)))
        };
        let plain = |v: i64| self.encode(v);
        let hour = |v: i64| self.encode_hour(v);
        // Registers that match no second or no minute match nothing; from here on every search ends soon.
        first(60, 0, SECONDS_ALARM, &plain)?;
        first(60, 0, MINUTES_ALARM, &plain)?;
        // The smallest hour, minute and second of the day, in this order, from `start` on.
        let from = |start: i64| {
            let (h0, m0, s0) = (start / 3600, start / 60 % 60, start % 60);
            let mut h = first(24, h0, HOURS_ALARM, &hour)?;
            loop {
                let mut m = first(60, if h == h0 { m0 } else { 0 }, MINUTES_ALARM, &plain);
                while let Some(minute) = m {
                    let s = if (h, minute) == (h0, m0) { s0 } else { 0 };
                    if let Some(s) = first(60, s, SECONDS_ALARM, &plain) {
                        return Some(h * 3600 + minute * 60 + s);
                    }
                    m = first(60, minute + 1, MINUTES_ALARM, &plain);
                }
                h = first(24, h + 1, HOURS_ALARM, &hour)?;
            }
        };
        let start = second.saturating_add(1);
        let (midnight, time) = (start - start.rem_euclid(DAY_SECONDS), start.rem_euclid(DAY_SECONDS));
        from(time)
            .map(|t| midnight + t)
            .or_else(|| from(0).map(|t| midnight + DAY_SECONDS + t))
    }

    fn encode(&self, value: i64) -> u8 {
        let value = value.rem_euclid(100) as u8;
        if self.b & BINARY != 0 {
            value
        } else {
            ((value / 10) << 4) | (value % 10)
        }
    }

    fn decode(&self, value: u8) -> i64 {
        if self.b & BINARY != 0 {
            i64::from(value)
        } else {
            i64::from(value >> 4) * 10 + i64::from(value & 0xf)
        }
    }

    fn encode_hour(&self, hour: i64) -> u8 {
        if self.b & HOURS_24 != 0 {
            return self.encode(hour);
        }
        let twelve = if hour % 12 == 0 { 12 } else { hour % 12 };
        self.encode(twelve) | if hour >= 12 { PM } else { 0 }
    }

    fn decode_hour(&self, value: u8) -> i64 {
        if self.b & HOURS_24 != 0 {
            return self.decode(value);
        }
        self.decode(value & !PM) % 12 + if value & PM != 0 { 12 } else { 0 }
    }

    /// A register of the time as the running clock shows it; `None` for any other.
    fn time_register(&self, index: u8) -> Option<u8> {
        let date = || date_from_seconds(self.seconds_at(i128::from(self.now)));
        Some(match index {
            SECONDS => self.encode(date().time % 60),
            MINUTES => self.encode(date().time / 60 % 60),
            HOURS => self.encode_hour(date().time / 3600),
            DAY_OF_WEEK => ((date().weekday + self.weekday_shift).rem_euclid(7) + 1) as u8,
            DAY => self.encode(date().day),
            MONTH => self.encode(date().month),
            YEAR => self.encode(date().year),
            CENTURY => self.encode(date().year.div_euclid(100)),
            _ => return None,
        })
    }

    /// Stops the clock into its registers.
    fn hold(&mut self) {
        for index in [SECONDS, MINUTES, HOURS, DAY_OF_WEEK, DAY, MONTH, YEAR, CENTURY] {
            if let Some(value) = self.time_register(index) {
                self.ram[usize::from(index)] = value;
            }
        }
    }

    /// Starts the clock from its registers; what is no time or date counts as the nearest one.
    fn release(&mut self) {
        let at = |index: u8| self.ram[usize::from(index)];
        let year = (self.decode(at(CENTURY)).min(99) * 100 + self.decode(at(YEAR)).min(99)).clamp(0, 9999);
        let month = self.decode(at(MONTH)).clamp(1, 12);
        let day = self.decode(at(DAY)).clamp(1, month_length(year, month));
        let time = self.decode_hour(at(HOURS)).min(23) * 3600
            + self.decode(at(MINUTES)).min(59) * 60
            + self.decode(at(SECONDS)).min(59);
        let weekday = i64::from(at(DAY_OF_WEEK)).clamp(1, 7) - 1;
        self.seconds = days_from_date(year, month, day) * DAY_SECONDS + time;
        self.weekday_shift = (weekday - date_from_seconds(self.seconds).weekday).rem_euclid(7);
        // Setting the time leaves the divider chain alone: the second under way goes on.
        self.anchor += (i128::from(self.now) - self.anchor).div_euclid(SECOND) * SECOND;
    }

    /// Reads port 70H + `offset`. The index cannot be read back.
    pub fn read(&mut self, offset: u8, now: u64) -> u8 {
        self.advance(now);
        if offset == 0 {
            return 0xff;
        }
        let index = self.index & 0x7f;
        match index {
            REG_A => self.a | if self.update_in_progress() { UIP } else { 0 },
            REG_B => self.b,
            REG_C => {
                let flags = self.c | if self.irq() { IRQF } else { 0 };
                self.c = 0;
                flags
            }
            // Valid RAM and time: the battery is good.
            REG_D => 0x80,
            _ => {
                let shown = if self.runs() { self.time_register(index) } else { None };
                shown.unwrap_or(self.ram[usize::from(index)])
            }
        }
    }

    fn update_in_progress(&self) -> bool {
        self.runs() && (i128::from(self.now) - self.anchor).rem_euclid(SECOND) >= SECOND - UIP_NS
    }

    /// Writes port 70H + `offset`.
    pub fn write(&mut self, offset: u8, value: u8, now: u64) {
        self.advance(now);
        if offset == 0 {
            self.index = value;
            return;
        }
        let index = self.index & 0x7f;
        match index {
            REG_A => self.write_a(value),
            REG_B => self.write_b(value),
            REG_C | REG_D => {}
            _ if self.runs() && self.time_register(index).is_some() => {
                self.hold();
                self.ram[usize::from(index)] = value;
                self.release();
            }
            _ => self.ram[usize::from(index)] = value,
        }
    }

    fn write_a(&mut self, value: u8) {
        let (ran, divided) = (self.runs(), self.divides());
        if ran {
            self.hold();
        }
        self.a = value & !UIP;
        if self.divides() && !divided {
            // "The first update cycle begins one-half second after the divider reset is removed."
            self.anchor = i128::from(self.now) - SECOND / 2;
        }
        if self.runs() {
            self.release();
        }
    }

    fn write_b(&mut self, value: u8) {
        let ran = self.runs();
        if ran && value & SET != 0 {
            self.hold();
        }
        self.b = value;
        if value & SET != 0 {
            // "UIE is cleared by the SET bit going high."
            self.b &= !UF;
        }
        if !ran && self.runs() {
            self.release();
        }
    }

    /// The byte that port 70H was last written with: bit 7 masks NMI on a PC.
    pub fn index(&self) -> u8 {
        self.index
    }

    /// The whole state: the clock is registers only.
    pub fn state(&self) -> Rtc {
        self.clone()
    }

    /// Takes a state back.
    pub fn set_state(&mut self, state: &Rtc) {
        self.clone_from(state);
    }
}

#[cfg(test)]
#[path = "rtc_test.rs"]
mod tests;
