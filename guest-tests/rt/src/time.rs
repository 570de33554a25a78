//! Time: the PIT's second channel for real microseconds, the TSC measured against it.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::cpu::{inb, outb, tsc};

/// The PIT's frequency.
pub const PIT_HZ: u64 = 1_193_182;

static TICKS: AtomicU64 = AtomicU64::new(0);

/// TSC ticks of a millisecond, measured once.
pub fn ticks_per_ms() -> u64 {
    let known = TICKS.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let ticks = measure();
    TICKS.store(ticks, Ordering::Relaxed);
    ticks
}

/// TSC ticks of a millisecond, measured now over 4 ms of the PIT: channel 2 in mode 0, whose output rises at the end.
///
/// Too high or too low by as much as something else held the CPU between the two clocks at either end.
pub fn measure() -> u64 {
    const COUNT: u64 = PIT_HZ * 4 / 1000;
    // Gate on, speaker off; then the low and the high byte.
    outb(0x61, inb(0x61) & !2 | 1);
    outb(0x43, 0xB0);
    outb(0x42, COUNT as u8);
    outb(0x42, (COUNT >> 8) as u8);
    let start = tsc();
    while inb(0x61) & 0x20 == 0 {}
    ((tsc() - start) / 4).max(1)
}

/// A moment of the TSC.
pub struct Deadline(u64);

impl Deadline {
    /// So many microseconds from now.
    pub fn after(microseconds: u64) -> Self {
        let ticks = ticks_per_ms();
        Self(tsc() + ticks * microseconds / 1000)
    }

    /// Whether it is over.
    pub fn passed(&self) -> bool {
        tsc() >= self.0
    }
}

/// Waits so many microseconds.
pub fn wait(microseconds: u64) {
    let end = Deadline::after(microseconds);
    while !end.passed() {
        crate::cpu::pause();
    }
}
