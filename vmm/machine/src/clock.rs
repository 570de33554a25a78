//! Virtual time.
//!
//! One tick is one cycle of the model's time-stamp counter, and by default one step (an instruction or a REP iteration). The
//! rest is *skew*: idle time that nobody waited for, the time port accesses take on a real machine, and jumps towards wall
//! time.

use serde::{Deserialize, Serialize};

/// An ISA port access takes about a microsecond on a real machine, and drivers count on it: the PIT is calibrated against
/// so and so many reads.
const PORT_ACCESS_NS: u64 = 1000;

/// The clock. All arithmetic is exact: the same steps and skew give the same nanoseconds on every host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clock {
    tsc_khz: u32,
    skew: u64,
    /// The host's time-stamp counter moves it ([`Clock::follow`]), so nothing else has to count for time.
    hosts: bool,
}

impl Clock {
    /// A clock at 0 whose ticks have this frequency.
    pub fn new(tsc_khz: u32) -> Self {
        Clock {
            tsc_khz: tsc_khz.max(1),
            skew: 0,
            hosts: false,
        }
    }

    /// Follows the host's time-stamp counter: shows this many ticks, or what it showed before if that is more.
    pub fn follow(&mut self, ticks: u64, steps: u64) {
        self.hosts = true;
        self.skew = self.skew.wrapping_add(ticks.saturating_sub(self.ticks(steps)));
    }

    /// Ticks after so many steps of the machine.
    pub fn ticks(&self, steps: u64) -> u64 {
        steps.wrapping_add(self.skew)
    }

    /// Nanoseconds after so many steps of the machine.
    pub fn ns(&self, steps: u64) -> u64 {
        self.ns_of(self.ticks(steps))
    }

    /// Nanoseconds in so many ticks, rounded down.
    pub fn ns_of(&self, ticks: u64) -> u64 {
        let ns = u128::from(ticks) * 1_000_000 / u128::from(self.tsc_khz);
        u64::try_from(ns).unwrap_or(u64::MAX)
    }

    /// Nanoseconds in so many ticks, rounded up: the first whose [tick](Clock::tick_at) is no earlier.
    pub fn ns_at(&self, ticks: u64) -> u64 {
        let ns = self.ns_of(ticks);
        if self.tick_at(ns) < ticks {
            ns.saturating_add(1)
        } else {
            ns
        }
    }

    /// The first tick at which [`Clock::ns_of`] is at least `ns`.
    pub fn tick_at(&self, ns: u64) -> u64 {
        let ticks = (u128::from(ns) * u128::from(self.tsc_khz)).div_ceil(1_000_000);
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }

    /// Steps from `steps` on until the clock shows `ns`; 0 if it does already.
    pub fn steps_until(&self, ns: u64, steps: u64) -> u64 {
        self.tick_at(ns).saturating_sub(self.ticks(steps))
    }

    /// Lets time pass without steps until the clock shows `ns`; it never goes back.
    pub fn skip_to(&mut self, ns: u64, steps: u64) {
        self.skew = self.skew.wrapping_add(self.steps_until(ns, steps));
    }

    /// The same until it shows so many ticks.
    pub fn skip_to_tick(&mut self, ticks: u64, steps: u64) {
        self.skew = self.skew.wrapping_add(ticks.saturating_sub(self.ticks(steps)));
    }

    /// Lets the time of one port access pass.
    pub fn port_access(&mut self) {
        if !self.hosts {
            self.skew = self.skew.wrapping_add(self.tick_at(PORT_ACCESS_NS));
        }
    }
}

#[cfg(test)]
#[path = "clock_test.rs"]
mod tests;
