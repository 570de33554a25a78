//! Branch trace store. SDM Vol. 3B 18.4.5 "Branch Trace Store (BTS)", 18.4.9 "BTS and DS Save Area".

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rt::cpu::{self, read, refuses, write};
use rt::exception::{self, BP};
use rt::{apic, call, label, need, paging};
use x86::debugctl::DebugCtl;
use x86::msr::*;
use x86::pmu::status;

use crate::pattern;
use crate::sampling::{BRANCHES, counter};

const RECORD: u64 = 24;
/// The vector of the PMI in these tests.
const PMI: u8 = 0x61;

const ON: DebugCtl = DebugCtl::new().with_tr(true).with_bts(true);

/// A debug-store area with room for so many records, the threshold after `threshold` of them.
pub struct Area {
    at: u64,
    base: u64,
}

impl Area {
    /// Made, with IA32_DS_AREA on it.
    pub fn new(records: u64, threshold: u64) -> Self {
        let at = paging::pages(4);
        let area = Self { at, base: at + 4096 };
        for (field, value) in [
            area.base,
            area.base,
            area.base + records * RECORD,
            area.base + threshold * RECORD,
        ]
        .into_iter()
        .enumerate()
        {
            paging::poke(at + 8 * field as u64, value);
        }
        write(IA32_DS_AREA, at);
        area
    }

    /// Records up to the index.
    fn written(&self) -> u64 {
        (paging::peek(self.at + 8) - self.base) / RECORD
    }

    fn reset(&self) {
        paging::poke(self.at + 8, self.base);
    }

    /// FROM and TO of a record.
    fn record(&self, n: u64) -> (u64, u64) {
        let at = self.base + n * RECORD;
        (paging::peek(at), paging::peek(at + 8))
    }

    fn flags(&self, n: u64) -> u64 {
        paging::peek(self.base + n * RECORD + 16)
    }

    /// FROM and TO of all records up to the index.
    pub fn records(&self) -> Vec<(u64, u64)> {
        (0..self.written()).map(|n| self.record(n)).collect()
    }
}

/// The pattern's branches as pairs.
fn expected() -> Vec<(u64, u64)> {
    pattern::branches().iter().map(|b| (b.from, b.to)).collect()
}

/// IA32_DS_AREA takes canonical addresses; IA32_MISC_ENABLE\[11\] is read-only.
fn registers() {
    write(IA32_DS_AREA, 0xFFFF_8000_0000_0000u64);
    assert_eq!(read(IA32_DS_AREA), 0xFFFF_8000_0000_0000);
    refuses(IA32_DS_AREA, 0x8000_0000_0000_0000);
    let before = read(IA32_MISC_ENABLE);
    let _ = cpu::wrmsr(IA32_MISC_ENABLE, before | 1 << 11);
    assert_eq!(read(IA32_MISC_ENABLE), before, "BTS unavailable is read-only");
}

/// Every taken branch is a record of 24 bytes, in order.
fn every_branch_is_a_record() {
    let area = Area::new(100, 100);
    pattern::run(IA32_DEBUGCTL, ON.into_bits(), 0);
    assert_eq!(area.records(), expected());
    assert_eq!(area.record(7), (0, 0));
}

/// Bit 4 of the flags, predicted, on parts that have it (not the Core and Atom microarchitectures); the others are 0.
fn flags_say_predicted() {
    let area = Area::new(100, 100);
    pattern::run(IA32_DEBUGCTL, ON.into_bits(), 0);
    let flags: Vec<_> = (0..7).map(|n| area.flags(n)).collect();
    assert!(flags.iter().all(|flags| flags & !0x10 == 0), "{flags:X?}");
    let (_, model) = cpu::family_model();
    let without = matches!(
        model,
        0x0F | 0x16 | 0x17 | 0x1D | 0x1C | 0x26 | 0x27 | 0x35 | 0x36 | 0x37 | 0x4D | 0x5C | 0x7A | 0x86
    );
    assert_eq!(flags.iter().any(|flags| *flags != 0), !without, "{flags:X?}");
}

/// TR alone or BTS alone stores nothing.
fn both_switches() {
    for half in [DebugCtl::new().with_tr(true), DebugCtl::new().with_bts(true)] {
        let area = Area::new(100, 100);
        pattern::run(IA32_DEBUGCTL, half.into_bits(), 0);
        assert_eq!(area.written(), 0, "{half:?}");
    }
}

/// With BTINT clear and the threshold above the maximum the buffer is a ring: the index starts again at the base, and no interrupt
/// comes.
fn without_btint_it_is_a_ring() {
    interrupts(|| {});
    let area = Area::new(5, 6);
    pattern::run(IA32_DEBUGCTL, ON.into_bits(), 0);
    let every = expected();
    cpu::enable_interrupts();
    cpu::pause();
    cpu::disable_interrupts();
    assert_eq!(COUNT.load(SeqCst), 0);
    assert_eq!(area.written(), 2);
    assert_eq!(
        (area.record(0), area.record(1), area.record(2)),
        (every[5], every[6], every[2])
    );
}

/// 18.4.9.3, notes: it is not enough to clear BTINT, a threshold inside the buffer asks for an interrupt.
fn without_btint_a_threshold_inside_interrupts() {
    interrupts(|| {});
    let area = Area::new(100, 3);
    cpu::enable_interrupts();
    pattern::run(IA32_DEBUGCTL, ON.into_bits(), 0);
    cpu::disable_interrupts();
    assert_eq!((COUNT.load(SeqCst), area.written() >= 3), (1, true));
    assert_eq!(&area.records()[..3], &expected()[..3]);
}

static COUNT: AtomicU64 = AtomicU64::new(0);
static AT: AtomicU64 = AtomicU64::new(0);
static INDEX: AtomicU64 = AtomicU64::new(0);
static THEN: AtomicU64 = AtomicU64::new(0);

/// Sets up the PMI: its handler stops the trace, counts, keeps where it came, and does `then`.
fn interrupts(then: fn()) {
    COUNT.store(0, SeqCst);
    THEN.store(then as usize as u64, SeqCst);
    apic::enable();
    apic::write(apic::reg::LVT_PC, u32::from(PMI));
    exception::on(PMI, |frame| {
        write(IA32_DEBUGCTL, 0u64);
        COUNT.fetch_add(1, SeqCst);
        AT.store(frame.rip, SeqCst);
        INDEX.store(paging::peek(read(IA32_DS_AREA) + 8), SeqCst);
        assert_ne!(apic::read(apic::reg::LVT_PC) & apic::MASKED, 0, "delivery masks LVTPC");
        // SAFETY: `interrupts` stored a routine of this type.
        let then: fn() = unsafe { core::mem::transmute(THEN.load(SeqCst)) };
        then();
        apic::eoi();
    });
}

/// 18.4.9.5: with BTINT the record that reaches the threshold asks for a PMI, at that branch.
fn btint_interrupts_at_the_threshold() {
    interrupts(|| {});
    let area = Area::new(100, 3);
    cpu::enable_interrupts();
    pattern::run(
        IA32_DEBUGCTL,
        ON.with_btint(true).with_bts_off_usr(false).into_bits(),
        0,
    );
    cpu::disable_interrupts();
    assert_eq!(COUNT.load(SeqCst), 1);
    // The third branch is the call: the interrupt comes at its target. The delivery itself is a branch and a record, too.
    assert_eq!(AT.load(SeqCst), pattern::branches()[2].to);
    let every = expected();
    assert_eq!(area.records()[..3], every[..3]);
    let index = (INDEX.load(SeqCst) - area.base) / RECORD;
    assert!(index >= 4, "index {index}");
    assert_eq!(area.record(3), (every[2].1, exception::entry(PMI)));
}

/// The index past the absolute maximum: the processor does not stop at a full buffer by itself.
fn a_full_buffer_goes_on() {
    interrupts(|| {});
    let area = Area::new(4, 4);
    // IF is 0: the request waits in IRR.
    pattern::run(IA32_DEBUGCTL, ON.with_btint(true).into_bits(), 0);
    let every = expected();
    assert_eq!(
        (area.written(), area.record(0), area.record(3)),
        (3, every[4], every[3])
    );
    assert!(apic::bit(apic::reg::IRR, PMI));
    assert_eq!(COUNT.load(SeqCst), 0);
    cpu::enable_interrupts();
    cpu::pause();
    cpu::disable_interrupts();
    assert_eq!(COUNT.load(SeqCst), 1);
}

/// A masked LVTPC drops the request.
fn a_masked_lvtpc_drops_it() {
    interrupts(|| {});
    apic::write(apic::reg::LVT_PC, u32::from(PMI) | apic::MASKED);
    let area = Area::new(100, 7);
    pattern::run(IA32_DEBUGCTL, ON.with_btint(true).into_bits(), 0);
    assert_eq!(area.written(), 7);
    apic::write(apic::reg::LVT_PC, u32::from(PMI));
    cpu::enable_interrupts();
    cpu::pause();
    cpu::disable_interrupts();
    assert_eq!(COUNT.load(SeqCst), 0);
}

/// The handler's work: copy up to the index, reset it, unmask, go on. No branch is lost over many buffers.
fn a_handler_loses_nothing() {
    static TOTAL: AtomicU64 = AtomicU64::new(0);
    TOTAL.store(0, SeqCst);
    fn count() {
        let area = read(IA32_DS_AREA);
        let (base, index) = (paging::peek(area), paging::peek(area + 8));
        let own = (base..index)
            .step_by(RECORD as usize)
            .filter(|at| paging::peek(*at) == label!(p_count_jmp) + 3)
            .count();
        TOTAL.fetch_add(own as u64, SeqCst);
        paging::poke(area + 8, base);
        apic::write(apic::reg::LVT_PC, u32::from(PMI));
    }
    interrupts(|| {
        count();
        write(IA32_DEBUGCTL, ON.with_btint(true).into_bits());
    });
    let area = Area::new(200, 100);
    cpu::enable_interrupts();
    write(IA32_DEBUGCTL, ON.with_btint(true).into_bits());
    call!(p_count(2000));
    write(IA32_DEBUGCTL, 0u64);
    cpu::disable_interrupts();
    count();
    assert!(COUNT.load(SeqCst) >= 20, "{} interrupts", COUNT.load(SeqCst));
    // The last iteration's branch is not taken.
    assert_eq!(TOTAL.load(SeqCst), 1999);
    area.reset();
}

/// Table 18-6: BTS_OFF_OS and BTS_OFF_USR split by ring.
fn filters_by_ring() {
    let area = Area::new(100, 100);
    write(IA32_DEBUGCTL, ON.with_bts_off_os(true).into_bits());
    pattern::user();
    write(IA32_DEBUGCTL, 0u64);
    let seen = area.records();
    let near = seen
        .iter()
        .filter(|(from, to)| pattern::is_user(*from) && pattern::is_user(*to))
        .count();
    assert_eq!(near, pattern::USER, "{seen:X?}");
    // The IRET that went there was executed in ring 0. What came back is of ring 3.
    assert!(seen.iter().all(|(from, _)| pattern::is_user(*from)), "{seen:X?}");
    assert_eq!(seen.len(), pattern::USER + 1, "{seen:X?}");
    area.reset();
    write(IA32_DEBUGCTL, ON.with_bts_off_usr(true).into_bits());
    pattern::user();
    write(IA32_DEBUGCTL, 0u64);
    let seen = area.records();
    assert!(
        seen.iter().any(|(_, to)| pattern::is_user(*to)) && seen.iter().all(|(from, _)| !pattern::is_user(*from)),
        "{seen:X?}"
    );
    area.reset();
    write(
        IA32_DEBUGCTL,
        ON.with_bts_off_os(true).with_bts_off_usr(true).into_bits(),
    );
    pattern::user();
    write(IA32_DEBUGCTL, 0u64);
    assert_eq!(area.written(), 0);
}

/// Exceptions and their returns are branches.
fn exceptions_are_records() {
    exception::on(BP, |_| {});
    let area = Area::new(150, 150);
    write(IA32_DEBUGCTL, ON.into_bits());
    call!(dr_int3());
    write(IA32_DEBUGCTL, 0u64);
    let seen = area.records();
    let at = seen
        .iter()
        .position(|r| *r == (label!(dr_int3_here), exception::entry(BP)));
    assert!(at.is_some(), "{seen:X?}");
    assert!(seen.iter().any(|r| r.1 == label!(dr_int3_next)), "the IRET: {seen:X?}");
}

/// What is left after the request of a full buffer: IA32_DEBUGCTL, IA32_PERF_GLOBAL_CTRL, IA32_PERF_GLOBAL_STATUS.
struct After {
    debugctl: DebugCtl,
    counters: u64,
    status: u64,
}

/// Fills a buffer with its threshold at the third record and some records behind it, counter 0 counting branches and the
/// last-branch stack recording. Both stand from the request on if the freeze bits say so.
fn fill(freeze: DebugCtl) -> After {
    interrupts(|| {});
    let area = Area::new(100, 3);
    let stack = need::LbrStack::here();
    let ctl = ON.with_btint(true).with_lbr(stack.is_some());
    counter(0, BRANCHES, 0);
    write(IA32_PERF_GLOBAL_CTRL, 1u64);
    // IF is 0: the request freezes, and the interrupt waits.
    write(IA32_DEBUGCTL, ctl.into_bits() | freeze.into_bits());
    call!(p_count(20));
    let after = After {
        debugctl: DebugCtl::from_bits(read(IA32_DEBUGCTL)),
        counters: read(IA32_PERF_GLOBAL_CTRL),
        status: read(IA32_PERF_GLOBAL_STATUS),
    };
    write(IA32_DEBUGCTL, 0u64);
    write(IA32_PERF_GLOBAL_CTRL, 0u64);
    let counted = read(IA32_PMC0);
    assert!(apic::bit(apic::reg::IRR, PMI), "the request");
    // The store itself goes on.
    assert!(area.written() > 20 && after.debugctl.tr() && after.debugctl.bts());
    // The third record's branch is one of the first.
    assert_eq!(
        counted < 10,
        freeze.freeze_perfmon_on_pmi(),
        "{counted} branches counted"
    );
    // On the Core microarchitecture TR, which stays, keeps the stack moving (18.4.4 "Branch Trace Messages").
    if let Some(stack) = stack.filter(|_| cpu::family_model() != (6, 0x0F)) {
        let newest = read(MSR_LASTBRANCH_TOS) as u32;
        let from = read(stack.from + newest) << 3 >> 3;
        let third = area.record(2).0;
        assert_eq!(
            from == third << 3 >> 3,
            freeze.freeze_lbrs_on_pmi(),
            "the newest is of {from:X}H, the third of {third:X}H"
        );
    }
    after
}

const LBRS: DebugCtl = DebugCtl::new().with_freeze_lbrs_on_pmi(true);
const COUNTERS: DebugCtl = DebugCtl::new().with_freeze_perfmon_on_pmi(true);

/// 18.4.7 "Freezing LBR and Performance Counters on PMI": the threshold of this buffer freezes as an overflow does. The legacy
/// freeze clears IA32_DEBUGCTL.LBR, or IA32_PERF_GLOBAL_CTRL.
fn the_threshold_freezes_by_the_enables() {
    for (freeze, lbr, counters) in [(DebugCtl::new(), true, 1), (LBRS, false, 1), (COUNTERS, true, 0)] {
        let after = fill(freeze);
        assert_eq!((after.debugctl.lbr(), after.counters), (lbr, counters), "{freeze:?}");
    }
}

/// The streamlined freeze leaves the enables, and says LBR_FRZ and CTR_FRZ in IA32_PERF_GLOBAL_STATUS.
fn the_threshold_freezes_by_the_status() {
    for (freeze, bits) in [
        (DebugCtl::new(), 0),
        (LBRS, status::LBR_FROZEN),
        (COUNTERS, status::COUNTERS_FROZEN),
    ] {
        let after = fill(freeze);
        let seen = after.status & (status::LBR_FROZEN | status::COUNTERS_FROZEN);
        assert_eq!((seen, after.counters), (bits, 1), "{freeze:?}");
        assert_eq!(after.debugctl.lbr(), need::LbrStack::here().is_some());
        write(IA32_PERF_GLOBAL_OVF_CTRL, after.status);
    }
}

rt::tests! {
    "tests_bts";
    registers: need::BTS;
    every_branch_is_a_record: need::BTS;
    flags_say_predicted: need::BTS;
    both_switches: need::BTS;
    without_btint_it_is_a_ring: need::BTS;
    without_btint_a_threshold_inside_interrupts: need::BTS;
    btint_interrupts_at_the_threshold: need::BTS;
    a_full_buffer_goes_on: need::BTS;
    a_masked_lvtpc_drops_it: need::BTS;
    a_handler_loses_nothing: need::BTS;
    filters_by_ring: need::DS_CPL;
    exceptions_are_records: need::BTS;
    the_threshold_freezes_by_the_enables: need::BTS, need::LEGACY_FREEZE;
    the_threshold_freezes_by_the_status: need::BTS, need::PMU4;
}
