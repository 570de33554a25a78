//! perf's records: include/uapi/linux/perf_event.h and tools/lib/perf/include/perf/event.h of Linux.

// Types of records.
pub const MMAP: u32 = 1;
pub const COMM: u32 = 3;
pub const MMAP2: u32 = 10;
pub const AUX: u32 = 11;
pub const SWITCH: u32 = 14;
pub const TEXT_POKE: u32 = 20;
pub const FINISHED_ROUND: u32 = 68;
pub const ID_INDEX: u32 = 69;
pub const AUXTRACE_INFO: u32 = 70;
pub const AUXTRACE: u32 = 71;
// And what stands beside them.
pub const MISC_KERNEL: u16 = 1;
pub const MISC_USER: u16 = 2;
pub const MISC_GUEST_KERNEL: u16 = 4;
pub const MISC_GUEST_USER: u16 = 5;
pub const MISC_COMM_EXEC: u16 = 1 << 13;

/// The event that the packets are of.
pub const ID_PT: u64 = 11;
/// The event that the rest comes with.
pub const ID_DUMMY: u64 = 12;
/// The first of those that records of guests of a hypervisor come with: one for each guest.
pub const ID_GUEST: u64 = 32;

/// A record under way.
#[derive(Debug)]
pub struct Rec(pub Vec<u8>);

impl Rec {
    /// Begins one.
    pub fn new(kind: u32, misc: u16) -> Rec {
        let mut rec = Rec(Vec::new());
        rec.u32(kind);
        rec.u16(misc);
        rec.u16(0);
        rec
    }

    pub fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub fn text(&mut self, text: &str) {
        self.0.extend_from_slice(text.as_bytes());
        self.0.push(0);
        self.pad();
    }

    pub fn pad(&mut self) {
        self.0.resize(self.0.len().next_multiple_of(8), 0);
    }

    /// What follows every record that is not perf's own: the fields of [`super::data`]'s sample type.
    pub fn id(mut self, pid: u32, time: u64, cpu: u32, id: u64) -> Vec<u8> {
        self.u32(pid);
        self.u32(pid);
        self.u64(time);
        self.u32(cpu);
        self.u32(0);
        self.u64(id);
        self.done()
    }

    /// The record with its length.
    pub fn done(mut self) -> Vec<u8> {
        let len = self.0.len() as u16;
        self.0[6..8].copy_from_slice(&len.to_le_bytes());
        self.0
    }
}

/// Turns ticks into nanoseconds as perf does.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    pub shift: u16,
    pub mult: u64,
}

impl Scale {
    /// For this frequency.
    pub fn new(khz: u32) -> Scale {
        let khz = u64::from(khz.max(1));
        let mult = |shift: u16| ((1_000_000u64 << shift) + khz / 2) / khz;
        let shift = (0..=31)
            .rev()
            .find(|shift| mult(*shift) <= u64::from(u32::MAX))
            .unwrap_or(0);
        Scale {
            shift,
            mult: mult(shift),
        }
    }

    /// Nanoseconds, which perf turns back into these ticks or a few less.
    pub fn ns(self, ticks: u64) -> u64 {
        let (quotient, rest) = (ticks >> self.shift, ticks & ((1 << self.shift) - 1));
        quotient * self.mult + (rest * self.mult >> self.shift)
    }
}

#[cfg(test)]
#[path = "record_test.rs"]
mod tests;
