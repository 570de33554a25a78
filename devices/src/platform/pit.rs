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
#[path = "pit_test.rs"]
mod tests;
