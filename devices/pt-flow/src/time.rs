/// What turns crystal clock ticks into TSC ticks. SDM Vol. 3C 33.8.3 "Tracking Time" and CPUID leaf 15H.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// CPUID.15H:EBX over EAX: TSC ticks per crystal clock tick.
    pub tsc_per_crystal: (u32, u32),
    /// IA32_RTIT_CTL.MTCFreq: MTC packets carry the crystal clock's counter shifted right by this.
    pub mtc_shift: u8,
    /// The ratio of TSC and bus clock (MSR_PLATFORM_INFO\[15:8\]), which with CBR turns cycles into TSC ticks; 0 if unknown.
    pub nominal_ratio: u8,
}

impl Default for Timing {
    fn default() -> Timing {
        Timing {
            tsc_per_crystal: (1, 1),
            mtc_shift: 0,
            nominal_ratio: 0,
        }
    }
}

/// The time as the packets so far tell it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    /// The TSC: exact at a TSC packet, within a crystal clock tick at an MTC packet, and estimated from the core's ratio at
    /// a CYC packet. `None` before the first TSC packet.
    pub tsc: Option<u64>,
    /// Cycles of all CYC packets since decoding began at a PSB.
    pub cycles: u64,
    /// The core:bus ratio of the last CBR packet.
    pub ratio: Option<u8>,
}

/// Follows the time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PacketClock {
    timing: Timing,
    now: Time,
    /// The TSC at a tick of the crystal clock, and the clock's counter then.
    tick: Option<(u64, u64)>,
    /// The counter is TMA's, of which sixteen bits are reported.
    tma: bool,
    /// The TSC at the last packet other than CYC, and the cycles since then.
    anchor: u64,
    since: u64,
}

impl PacketClock {
    pub fn new(timing: Timing) -> PacketClock {
        PacketClock {
            timing,
            ..PacketClock::default()
        }
    }

    pub fn now(&self) -> Time {
        self.now
    }

    /// Forgets what went before, at a PSB at which decoding begins.
    pub fn reset(&mut self) {
        *self = PacketClock::new(self.timing);
    }

    fn anchor_at(&mut self, tsc: u64) {
        self.now.tsc = Some(tsc);
        self.anchor = tsc;
        self.since = 0;
    }

    fn ticks(&self, crystal: u64) -> u64 {
        let (numerator, denominator) = self.timing.tsc_per_crystal;
        (crystal as u128 * numerator as u128 / denominator.max(1) as u128) as u64
    }

    pub fn tsc(&mut self, tsc: u64) {
        self.tick = None;
        self.anchor_at(tsc);
    }

    pub fn tma(&mut self, ctc: u16, fast: u16) {
        if let Some(tsc) = self.now.tsc {
            self.tick = Some((tsc.wrapping_sub(fast as u64), ctc as u64));
            self.tma = true;
        }
    }

    pub fn mtc(&mut self, ctc: u8) {
        let Some((tsc, counter)) = self.tick else { return };
        // Eight bits of the counter are reported, as of a moment at which those below are zero. With a large MTCFreq TMA has not all of
        // them: then the next moment is taken that fits those that it has.
        let shift = self.timing.mtc_shift & 15;
        let bits = if self.tma { 16.min(shift + 8) } else { shift + 8 };
        let reported = (ctc as u64) << shift;
        let mut now = counter >> bits << bits | reported & ((1 << bits) - 1);
        // The counter of TMA may be ahead of an MTC that was due already.
        if now < counter >> shift << shift {
            now += 1 << bits;
        }
        let tsc = tsc.wrapping_add(self.ticks(now.saturating_sub(counter)));
        self.tick = Some((tsc, reported + counter.saturating_sub(now)));
        self.tma = false;
        self.anchor_at(tsc);
    }

    pub fn cbr(&mut self, ratio: u8) {
        if let Some(tsc) = self.now.tsc {
            self.anchor_at(tsc);
        }
        self.now.ratio = Some(ratio);
    }

    pub fn cyc(&mut self, cycles: u64) {
        self.now.cycles = self.now.cycles.wrapping_add(cycles);
        self.since = self.since.saturating_add(cycles);
        let (Some(ratio), Some(_), nominal) = (self.now.ratio, self.now.tsc, self.timing.nominal_ratio) else {
            return;
        };
        if ratio != 0 && nominal != 0 {
            let ticks = self.since as u128 * nominal as u128 / ratio as u128;
            self.now.tsc = Some(self.anchor.wrapping_add(ticks as u64));
        }
    }
}

#[cfg(test)]
#[path = "time_test.rs"]
mod tests;
