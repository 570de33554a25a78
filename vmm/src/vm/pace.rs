//! Virtual and wall time side by side.

use std::time::{Duration, Instant};

/// Where both stand in a run.
pub(super) struct Pace {
    pub started: Instant,
    /// Virtual time at the start.
    pub base: u64,
    pub deadline: Option<Instant>,
    /// When the outside was last looked at.
    pub looked: Instant,
    /// The step and the virtual time of the idle machine, and since when it has been there.
    pub idle_since: Option<(u64, u64, Instant)>,
    /// The step, and virtual time, since when the CPU has been halted with interrupts off.
    pub dead_since: (u64, u64),
}

impl Pace {
    /// A run that starts at `started`, when virtual time is `base` nanoseconds.
    pub fn new(base: u64, started: Instant, deadline: Option<Instant>) -> Self {
        Pace {
            started,
            base,
            deadline,
            looked: started,
            idle_since: None,
            dead_since: (u64::MAX, 0),
        }
    }

    /// What virtual time would be if it had followed wall time.
    pub fn now(&self) -> u64 {
        let elapsed = self.started.elapsed();
        let elapsed = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        self.base.saturating_add(elapsed)
    }

    /// Whether the run has come to its deadline.
    pub fn time_is_up(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// How long a wait may take that would like to take `wanted`.
    pub fn time_left(&self, wanted: Option<Duration>) -> Option<Duration> {
        let left = self
            .deadline
            .map(|deadline| deadline.saturating_duration_since(Instant::now()));
        match (wanted, left) {
            (Some(wanted), Some(left)) => Some(wanted.min(left)),
            (wanted, left) => wanted.or(left),
        }
    }

    /// Since when a CPU that is halted at this step and time has been so.
    pub fn dead_since(&mut self, step: u64, now: u64) -> u64 {
        if self.dead_since.0 != step {
            self.dead_since = (step, now);
        }
        self.dead_since.1
    }

    /// What virtual time, `now` at this step, would be if it had followed wall time since the machine became idle there.
    pub fn idle_now(&mut self, step: u64, now: u64) -> u64 {
        let since = match self.idle_since {
            Some((at, time, since)) if (at, time) == (step, now) => since,
            _ => Instant::now(),
        };
        self.idle_since = Some((step, now, since));
        now.saturating_add(u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    pub fn outside_is_due(&mut self) -> bool {
        let due = self.looked.elapsed() >= Duration::from_millis(1);
        if due {
            self.looked = Instant::now();
        }
        due
    }
}
