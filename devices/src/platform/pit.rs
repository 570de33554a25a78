//! The 8254 programmable interval timer. Intel 8254 data sheet (231164).
//!
//! A counting element is not stepped. It is kept as the tick at which its count was loaded and the ticks it has counted since,
//! so that its count, its output and its next edge are arithmetic, however long the guest looks away.

use serde::{Deserialize, Serialize};

/// Port of channel 0; channels 1 and 2 and the control register follow.
pub const PIT: u16 = 0x40;
/// The input frequency in Hz.
pub const PIT_HZ: u64 = 1_193_182;

const NS: u128 = 1_000_000_000;

/// Whole input clocks that have passed at `now` ns.
pub fn ticks(now: u64) -> u64 {
    (u128::from(now) * u128::from(PIT_HZ) / NS) as u64
}

/// The first ns at which `tick` input clocks have passed.
pub fn ns_of(tick: u64) -> u64 {
    (u128::from(tick) * NS)
        .div_ceil(u128::from(PIT_HZ))
        .try_into()
        .unwrap_or(u64::MAX)
}

/// The six modes of "Mode Definitions".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    TerminalCount,
    OneShot,
    RateGenerator,
    SquareWave,
    SoftwareStrobe,
    HardwareStrobe,
}

impl Mode {
    /// Control word, bits 3:1; the highest bit of modes 2 and 3 is "don't care".
    fn from_control(control: u8) -> Mode {
        match (control >> 1) & 7 {
            0 => Mode::TerminalCount,
            1 => Mode::OneShot,
            2 | 6 => Mode::RateGenerator,
            3 | 7 => Mode::SquareWave,
            4 => Mode::SoftwareStrobe,
            _ => Mode::HardwareStrobe,
        }
    }

    /// The count is reloaded by itself.
    fn periodic(self) -> bool {
        matches!(self, Mode::RateGenerator | Mode::SquareWave)
    }

    /// A rising edge of the gate starts the count.
    fn triggered(self) -> bool {
        matches!(self, Mode::OneShot | Mode::HardwareStrobe)
    }
}

/// Counting element (CE).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Element {
    /// Stands still with this count and output.
    Idle { count: u32, out: bool },
    /// Was loaded with `n`, had counted `elapsed` ticks at tick `from`, and counts on if `running`.
    Counting {
        n: u32,
        from: u64,
        elapsed: u64,
        running: bool,
    },
}

/// The count register will go into the counting element at this tick, as if `elapsed` ticks had passed already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Load {
    at: u64,
    elapsed: LoadAt,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum LoadAt {
    Start,
    /// Mode 3: at the beginning of the low half.
    LowHalf,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Channel {
    /// Control word, bits 5:0.
    control: u8,
    gate: bool,
    /// Count register (CR), 1 to 10000H (or 10000); 0 until one was written.
    count: u32,
    /// The low byte of a count whose high byte has not come yet.
    low: Option<u8>,
    /// The next read of an unlatched two-byte count is the high byte.
    high_next: bool,
    /// Output latch (OL) and whether its low byte is gone.
    latch: Option<(u16, bool)>,
    /// Latched status byte.
    status: Option<u8>,
    /// Null count: the count register has not reached the counting element.
    null: bool,
    load: Option<Load>,
    element: Element,
}

impl Channel {
    fn new() -> Channel {
        Channel {
            control: 0x30,
            gate: true,
            count: 0,
            low: None,
            high_next: false,
            latch: None,
            status: None,
            null: true,
            load: None,
            // The state after power-up is undefined: stopped and high, so that no edge comes from it.
            element: Element::Idle { count: 0, out: true },
        }
    }

    fn mode(&self) -> Mode {
        Mode::from_control(self.control)
    }

    fn bcd(&self) -> bool {
        self.control & 1 != 0
    }

    fn access(&self) -> u8 {
        (self.control >> 4) & 3
    }

    /// Carries out a load whose tick has come.
    fn load_due(&mut self, tick: u64) {
        let Some(load) = self.load.filter(|load| load.at <= tick) else {
            return;
        };
        let n = self.count;
        let elapsed = match load.elapsed {
            LoadAt::Start => 0,
            LoadAt::LowHalf => high_half(n),
        };
        self.load = None;
        self.null = false;
        let running = self.gate || self.mode().triggered();
        self.element = Element::Counting {
            n,
            from: load.at,
            elapsed,
            running,
        };
    }

    /// Ticks counted since the load, and the count loaded.
    fn elapsed(&self, tick: u64) -> Option<(u64, u64)> {
        match self.element {
            Element::Idle { .. } => None,
            Element::Counting {
                n,
                from,
                elapsed,
                running,
            } => {
                let more = if running { tick.saturating_sub(from) } else { 0 };
                Some((u64::from(n.max(1)), elapsed.saturating_add(more)))
            }
        }
    }

    /// The OUT pin; `settle` has been called for this tick.
    fn out(&self, tick: u64) -> bool {
        let Some((n, e)) = self.elapsed(tick) else {
            return matches!(self.element, Element::Idle { out: true, .. });
        };
        match self.mode() {
            Mode::TerminalCount | Mode::OneShot => e >= n,
            Mode::RateGenerator => e % n != n - 1,
            Mode::SquareWave => e % n < high_half(n as u32),
            Mode::SoftwareStrobe | Mode::HardwareStrobe => e != n,
        }
    }

    /// The count as a number; `settle` has been called for this tick.
    fn value(&self, tick: u64) -> u32 {
        let modulus = if self.bcd() { 10_000 } else { 0x1_0000 };
        let Some((n, e)) = self.elapsed(tick) else {
            let Element::Idle { count, .. } = self.element else {
                return 0;
            };
            return count % modulus as u32;
        };
        let count = match self.mode() {
            Mode::RateGenerator => n - e % n,
            Mode::SquareWave => {
                // Counts down by two, once for each half; an odd count is loaded one less.
                let (phase, high) = (e % n, high_half(n as u32));
                let in_half = if phase < high { phase } else { phase - high };
                (n & !1).saturating_sub(2 * in_half)
            }
            // These count through zero and on.
            _ => n + modulus - e % modulus,
        };
        (count % modulus) as u32
    }

    fn encoded(&self, tick: u64) -> u16 {
        let v = self.value(tick);
        if self.bcd() {
            (v / 1000 % 10 * 0x1000 + v / 100 % 10 * 0x100 + v / 10 % 10 * 0x10 + v % 10) as u16
        } else {
            v as u16
        }
    }

    /// The first tick after `tick` at which OUT rises, as far as the element counts as it does now.
    fn next_rise(&self, tick: u64) -> Option<u64> {
        let Element::Counting {
            from,
            elapsed,
            running: true,
            ..
        } = self.element
        else {
            return None;
        };
        let (n, e) = self.elapsed(tick)?;
        let at = match self.mode() {
            Mode::TerminalCount | Mode::OneShot => n,
            Mode::SoftwareStrobe | Mode::HardwareStrobe => n + 1,
            // A count of one is illegal here and never changes the output.
            Mode::RateGenerator | Mode::SquareWave if n == 1 => return None,
            Mode::RateGenerator | Mode::SquareWave => (e / n + 1).checked_mul(n)?,
        };
        (at > e).then(|| from.saturating_add(at.saturating_sub(elapsed)))
    }

    /// The first tick after `tick` at which OUT rises or the element is loaded anew.
    fn next_event(&self, tick: u64) -> Option<u64> {
        match (self.next_rise(tick), self.load.map(|load| load.at)) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Moves from tick `from` to tick `to`; whether OUT rose on the way.
    fn advance(&mut self, from: u64, to: u64) -> bool {
        let mut rose = false;
        let mut at = from;
        // At most one load is under way, and a load starts none.
        if let Some(load) = self.load.filter(|load| load.at <= to) {
            let before = load.at.saturating_sub(1).max(at);
            rose |= self.next_rise(at).is_some_and(|r| r <= before);
            let low = !self.out(before);
            self.load_due(load.at);
            rose |= low && self.out(load.at);
            at = load.at.max(at);
        }
        rose | self.next_rise(at).is_some_and(|r| r <= to)
    }

    fn control_word(&mut self, control: u8, tick: u64) {
        let count = self.value(tick);
        self.control = control & 0x3f;
        self.low = None;
        self.high_next = false;
        self.latch = None;
        self.status = None;
        self.load = None;
        self.count = 0;
        self.null = true;
        self.element = Element::Idle {
            count,
            out: self.mode() != Mode::TerminalCount,
        };
    }

    fn latch_count(&mut self, tick: u64) {
        if self.latch.is_none() {
            self.latch = Some((self.encoded(tick), false));
        }
    }

    fn latch_status(&mut self, tick: u64) {
        if self.status.is_none() {
            self.status = Some(u8::from(self.out(tick)) << 7 | u8::from(self.null) << 6 | self.control);
        }
    }

    fn write(&mut self, value: u8, tick: u64) {
        let raw = match (self.access(), self.low) {
            (1, _) => u16::from(value),
            (2, _) => u16::from(value) << 8,
            (_, None) => {
                self.low = Some(value);
                if self.mode() == Mode::TerminalCount {
                    // "Writing the first byte disables counting. OUT is set low immediately."
                    self.load = None;
                    self.element = Element::Idle {
                        count: self.value(tick),
                        out: false,
                    };
                }
                return;
            }
            (_, Some(low)) => u16::from_le_bytes([low, value]),
        };
        self.low = None;
        self.count = if self.bcd() { from_bcd(raw) } else { u32::from(raw) };
        if self.count == 0 {
            self.count = if self.bcd() { 10_000 } else { 0x1_0000 };
        }
        self.null = true;
        let next = Load {
            at: tick.saturating_add(1),
            elapsed: LoadAt::Start,
        };
        match self.mode() {
            Mode::TerminalCount => {
                self.element = Element::Idle {
                    count: self.value(tick),
                    out: false,
                };
                self.load = Some(next);
            }
            Mode::SoftwareStrobe => self.load = Some(next),
            // The count waits for a trigger.
            Mode::OneShot | Mode::HardwareStrobe => {}
            // Counting is enabled by the gate; its rising edge will load.
            Mode::RateGenerator | Mode::SquareWave if !self.gate => {}
            Mode::RateGenerator | Mode::SquareWave => {
                if self.load.is_none() {
                    self.load = Some(self.end_of_cycle(tick).unwrap_or(next));
                }
            }
        }
    }

    /// When a periodic mode takes a new count: at the end of the period, in mode 3 of the half.
    fn end_of_cycle(&self, tick: u64) -> Option<Load> {
        let (n, e) = self.elapsed(tick)?;
        let (phase, high) = (e % n, high_half(n as u32));
        let square = self.mode() == Mode::SquareWave;
        let (left, elapsed) = if square && phase < high && high < n {
            (high - phase, LoadAt::LowHalf)
        } else {
            (n - phase, LoadAt::Start)
        };
        Some(Load {
            at: tick.saturating_add(left),
            elapsed,
        })
    }

    fn set_gate(&mut self, gate: bool, tick: u64) {
        if gate == self.gate {
            return;
        }
        self.gate = gate;
        let mode = self.mode();
        if mode.triggered() {
            if gate && self.count != 0 {
                self.load = Some(Load {
                    at: tick.saturating_add(1),
                    elapsed: LoadAt::Start,
                });
            }
        } else if mode.periodic() {
            if gate {
                if self.count != 0 {
                    self.load = Some(Load {
                        at: tick.saturating_add(1),
                        elapsed: LoadAt::Start,
                    });
                }
            } else {
                // OUT is set high at once; the count stands until the gate's rising edge reloads it.
                self.load = None;
                self.element = Element::Idle {
                    count: self.value(tick),
                    out: true,
                };
            }
        } else if let Some((n, elapsed)) = self.elapsed(tick) {
            self.element = Element::Counting {
                n: n as u32,
                from: tick,
                elapsed,
                running: gate,
            };
        }
    }

    fn read(&mut self, tick: u64) -> u8 {
        if let Some(status) = self.status.take() {
            return status;
        }
        if let Some((value, low_gone)) = self.latch {
            let [low, high] = value.to_le_bytes();
            return match (self.access(), low_gone) {
                (1, _) => {
                    self.latch = None;
                    low
                }
                (3, false) => {
                    self.latch = Some((value, true));
                    low
                }
                _ => {
                    self.latch = None;
                    high
                }
            };
        }
        let [low, high] = self.encoded(tick).to_le_bytes();
        match self.access() {
            1 => low,
            2 => high,
            _ => {
                self.high_next = !self.high_next;
                if self.high_next { low } else { high }
            }
        }
    }
}

/// Mode 3: ticks of a period for which OUT is high; an odd count gives the high half one more.
fn high_half(n: u32) -> u64 {
    u64::from(n).div_ceil(2)
}

/// Four decimal digits; a digit above nine counts for what it is.
fn from_bcd(raw: u16) -> u32 {
    let digit = |i: u32| u32::from(raw >> (4 * i) & 0xf);
    (digit(3) * 1000 + digit(2) * 100 + digit(1) * 10 + digit(0)) % 10_000
}

/// Three channels: 0 is wired to IRQ 0, 1 once refreshed memory, 2 has its gate and its output at port 61H.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pit {
    channels: [Channel; 3],
    /// Tick up to which channel 0 has been watched for edges.
    tick: u64,
    /// Channel 0 has risen since the last [`Pit::take_edge`].
    rose: bool,
}

impl Default for Pit {
    fn default() -> Self {
        Pit::new()
    }
}

impl Pit {
    /// Three stopped channels; the gates of channels 0 and 1 are tied high, that of channel 2 is low as port 61H is at reset.
    pub fn new() -> Pit {
        let mut pit = Pit {
            channels: [Channel::new(), Channel::new(), Channel::new()],
            tick: 0,
            rose: false,
        };
        pit.channels[2].gate = false;
        pit
    }

    /// Moves to `now` ns.
    pub fn advance(&mut self, now: u64) {
        let to = ticks(now).max(self.tick);
        self.rose |= self.channels[0].advance(self.tick, to);
        self.channels[1].load_due(to);
        self.channels[2].load_due(to);
        self.tick = to;
    }

    /// The ns at which channel 0's output will next rise (or be loaded anew).
    pub fn next_event(&self) -> Option<u64> {
        self.channels[0].next_event(self.tick).map(ns_of)
    }

    /// Whether IRQ 0 had a rising edge since the last call, even if it has fallen again.
    pub fn take_edge(&mut self) -> bool {
        std::mem::take(&mut self.rose)
    }

    /// The OUT pin of a channel (0 to 2).
    pub fn out(&self, channel: usize) -> bool {
        self.channels.get(channel).is_some_and(|c| c.out(self.tick))
    }

    /// The refresh request at port 61H: it changes with every period of channel 1 as the BIOS programs it (mode 2, 18 clocks,
    /// about 15 us), whether or not anybody has.
    pub fn refresh(&self) -> bool {
        (self.tick / 18) & 1 != 0
    }

    /// Drives the gate of channel 2.
    pub fn set_gate2(&mut self, gate: bool, now: u64) {
        self.advance(now);
        self.channels[2].set_gate(gate, self.tick);
    }

    /// The gate of channel 2.
    pub fn gate2(&self) -> bool {
        self.channels[2].gate
    }

    /// Reads port 40H + `offset`. The control register cannot be read.
    pub fn read(&mut self, offset: u8, now: u64) -> u8 {
        self.advance(now);
        match self.channels.get_mut(usize::from(offset)) {
            Some(channel) => channel.read(self.tick),
            None => 0xff,
        }
    }

    /// Writes port 40H + `offset`.
    pub fn write(&mut self, offset: u8, value: u8, now: u64) {
        self.advance(now);
        let was = self.out(0);
        match offset {
            0..=2 => self.channels[usize::from(offset)].write(value, self.tick),
            _ => self.control(value),
        }
        // A control word moves the output at once.
        self.rose |= !was && self.out(0);
    }

    fn control(&mut self, value: u8) {
        let tick = self.tick;
        let select = usize::from(value >> 6);
        match (self.channels.get_mut(select), value & 0x30) {
            (Some(channel), 0) => channel.latch_count(tick),
            (Some(channel), _) => channel.control_word(value, tick),
            (None, _) => {
                // "Read-Back Command": D5 and D4 low latch count and status of the channels selected in D3 to D1.
                for (i, channel) in self.channels.iter_mut().enumerate() {
                    if value & (2 << i) == 0 {
                        continue;
                    }
                    if value & 0x20 == 0 {
                        channel.latch_count(tick);
                    }
                    if value & 0x10 == 0 {
                        channel.latch_status(tick);
                    }
                }
            }
        }
    }

    /// The whole state: the timer is registers only.
    pub fn state(&self) -> Pit {
        self.clone()
    }

    /// Takes a state back.
    pub fn set_state(&mut self, state: &Pit) {
        self.clone_from(state);
    }
}

#[cfg(test)]
mod tests {
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
}
