//! What the counter tests share: counters, the PMI, the debug-store area's PEBS fields.

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rt::cpu::{read, write};
use rt::exception::{self, Frame};
use rt::{apic, need, paging};
use x86::ds::PebsFormat;
use x86::msr::*;
use x86::pmu::EventSelect;

/// The vector of the PMI.
pub const PMI: u8 = 0x64;

/// How often it came.
pub static COUNT: AtomicU64 = AtomicU64::new(0);
/// RIP, IA32_PERF_GLOBAL_STATUS and the PEBS index at each of the first entries.
pub static ENTRIES: [[AtomicU64; 3]; 4] = [const { [const { AtomicU64::new(0) }; 3] }; 4];

/// RIP, status and PEBS index at entry `n`.
pub fn entry(n: usize) -> (u64, u64, u64) {
    let [rip, status, index] = &ENTRIES[n];
    (rip.load(SeqCst), status.load(SeqCst), index.load(SeqCst))
}

/// To be called first by a handler of the PMI.
pub fn note(frame: &Frame) {
    let n = COUNT.fetch_add(1, SeqCst) as usize;
    if let Some([rip, status, index]) = ENTRIES.get(n) {
        rip.store(frame.rip, SeqCst);
        status.store(read(IA32_PERF_GLOBAL_STATUS), SeqCst);
        let area = rt::cpu::rdmsr(IA32_DS_AREA).unwrap_or(0);
        index.store(if area == 0 { 0 } else { paging::peek(area + 40) }, SeqCst);
    }
    assert!(n < 1000, "a storm of interrupts, the last at {:X}H", frame.rip);
}

/// Sets the handler of the PMI and opens LVTPC.
pub fn interrupts(handler: exception::Handler) {
    COUNT.store(0, SeqCst);
    apic::enable();
    exception::on(PMI, handler);
    apic::write(apic::reg::LVT_PC, u32::from(PMI));
}

/// A handler that notes, acknowledges the interrupt and opens LVTPC again.
pub fn note_and_unmask(frame: &mut Frame) {
    note(frame);
    apic::write(apic::reg::LVT_PC, u32::from(PMI));
    apic::eoi();
}

/// A handler that also clears everything in IA32_PERF_GLOBAL_STATUS.
pub fn note_and_clear(frame: &mut Frame) {
    note(frame);
    write(IA32_PERF_GLOBAL_OVF_CTRL, read(IA32_PERF_GLOBAL_STATUS));
    apic::write(apic::reg::LVT_PC, u32::from(PMI));
    apic::eoi();
}

/// Programs general counter `n` with an event, so far from its overflow.
pub fn counter(n: u32, select: EventSelect, before_overflow: u32) {
    // Power-up enables the general counters there.
    write(IA32_PERF_GLOBAL_CTRL, 0u64);
    write(IA32_PERFEVTSEL0 + n, 0u64);
    // Bit 31 is sign-extended.
    write(IA32_PMC0 + n, u64::from(before_overflow.wrapping_neg()));
    write(IA32_PERFEVTSEL0 + n, select.into_bits());
}

/// An event at every ring, counting.
pub const fn event(event: u8, umask: u8) -> EventSelect {
    EventSelect::new()
        .with_event(event)
        .with_umask(umask)
        .with_os(true)
        .with_usr(true)
        .with_enable(true)
}

/// Instructions retired.
pub const INSTRUCTIONS: EventSelect = event(0xC0, 0);
/// Branch instructions retired.
pub const BRANCHES: EventSelect = event(0xC4, 0);

/// The PEBS half of a debug-store area.
pub struct Pebs {
    /// The management area.
    pub at: u64,
    /// The buffer.
    pub base: u64,
    /// Bytes of a record.
    pub size: u64,
}

impl Pebs {
    /// Room for so many records, the threshold after `threshold` of them, BTS records up to 20 elsewhere.
    pub fn new(records: u64, threshold: u64) -> Self {
        let at = paging::pages(4);
        let size = match need::pebs_format() {
            0 => PebsFormat::Core.size(),
            1 => PebsFormat::Nehalem.size(),
            2 => PebsFormat::Haswell.size(),
            3 => PebsFormat::Skylake.size(),
            _ => 0x20,
        };
        let base = at + 8192;
        let fields = [
            at + 4096,
            at + 4096,
            at + 4096 + 20 * 24,
            at + 4096 + 20 * 24,
            base,
            base,
            base + records * size,
            base + threshold * size,
        ];
        for (n, value) in fields.into_iter().enumerate() {
            paging::poke(at + 8 * n as u64, value);
        }
        write(IA32_DS_AREA, at);
        Self { at, base, size }
    }

    /// Records up to the index.
    pub fn written(&self) -> u64 {
        (paging::peek(self.at + 40) - self.base) / self.size
    }

    /// A field of a record, by its offset.
    pub fn field(&self, record: u64, offset: u64) -> u64 {
        paging::peek(self.base + record * self.size + offset)
    }

    /// The reset value of general counter `n`.
    pub fn reset(&self, n: u64, value: u64) {
        paging::poke(self.at + 64 + 8 * n, value);
    }
}
