//! The clock that a guest has in KVM: the host's time-stamp counter.

use crate::sys;

/// Whether Linux has given up the host's time-stamp counter as a clock. Whenever a CPU of a guest was put aside KVM sets its
/// counter anew then, from what the guest saw last and the wall clock; ours is the host's and an offset that stays.
pub fn host_tsc_is_unstable() -> bool {
    let path = "/sys/devices/system/clocksource/clocksource0/available_clocksource";
    std::fs::read_to_string(path).is_ok_and(|clocks| no_tsc_among(&clocks))
}

fn no_tsc_among(clocks: &str) -> bool {
    !clocks.split_whitespace().any(|clock| clock == "tsc")
}

/// A machine's clock that the host's time-stamp counter moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostClock {
    /// The counter when the clock was at 0.
    pub(crate) base: u64,
    /// It stands, and shows this.
    stands: Option<u64>,
}

impl HostClock {
    /// A clock that shows so many ticks now.
    pub fn at(ticks: u64) -> Self {
        HostClock {
            base: sys::host_tsc().wrapping_sub(ticks),
            stands: None,
        }
    }

    /// What it shows.
    pub fn ticks(self) -> u64 {
        self.stands.unwrap_or_else(|| sys::host_tsc().wrapping_sub(self.base))
    }

    /// It stands from now on.
    pub fn stop(&mut self) {
        self.stands = Some(self.ticks());
    }

    /// It goes on from where it stands.
    pub fn go_on(&mut self) {
        if let Some(ticks) = self.stands {
            *self = HostClock::at(ticks);
        }
    }
}

#[cfg(test)]
#[path = "clock_test.rs"]
mod tests;
