//! Intel PT: output by a table of physical addresses, and to one range. SDM Vol. 3C 33.2.7 "Trace Output".

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rt::cpu::{self, read, write};
use rt::{apic, call, exception, need, paging};
use x86::msr::*;
use x86::pmu::status;
use x86::pt::{RtitStatus, TopaEntry};

use crate::sampling::PMI;
use crate::trace::{self, ON, Output, flow, packets};

/// Fills some pages: 200,000 conditional branches under the trace.
fn fill(ctl: u64) {
    write(IA32_RTIT_CTL, ctl);
    call!(p_count(200_000));
    write(IA32_RTIT_CTL, 0u64);
}

fn state() -> RtitStatus {
    RtitStatus::from_bits(read(IA32_RTIT_STATUS))
}

/// Regions one after the other, and packets that go on across them.
fn regions_follow_each_other() {
    let out = Output::new(16, 0, TopaEntry::new());
    fill(ON.into_bits());
    let bytes = out.bytes();
    assert!(bytes.len() > 4096, "{} bytes", bytes.len());
    let steps = flow(&packets(&bytes));
    let taken = steps.iter().filter(|step| **step == trace::Step::Taken).count();
    assert!(taken >= 199_999, "{taken} taken branches");
    assert!(!state().error());
}

static COUNT: AtomicU64 = AtomicU64::new(0);
static SEEN: AtomicU64 = AtomicU64::new(0);

/// INT raises a PMI with GLOBAL_STATUS\[55\] when the region is full; the trace goes on.
fn int_raises_a_pmi() {
    COUNT.store(0, SeqCst);
    SEEN.store(0, SeqCst);
    apic::enable();
    exception::on(PMI, |_| {
        let ctl = read(IA32_RTIT_CTL);
        write(IA32_RTIT_CTL, ctl & !1);
        COUNT.fetch_add(1, SeqCst);
        SEEN.fetch_or(read(IA32_PERF_GLOBAL_STATUS), SeqCst);
        write(IA32_PERF_GLOBAL_OVF_CTRL, status::TRACE_TOPA);
        apic::write(apic::reg::LVT_PC, u32::from(PMI));
        apic::eoi();
        write(IA32_RTIT_CTL, ctl);
    });
    apic::write(apic::reg::LVT_PC, u32::from(PMI));
    let out = Output::new(16, 0, TopaEntry::new().with_int(true));
    cpu::enable_interrupts();
    fill(ON.into_bits());
    cpu::disable_interrupts();
    let full = out.bytes().len() as u64 / 4096;
    assert!(full >= 1);
    assert!(
        COUNT.load(SeqCst) >= full,
        "{} interrupts, {full} full regions",
        COUNT.load(SeqCst)
    );
    assert_ne!(SEEN.load(SeqCst) & status::TRACE_TOPA, 0);
    // Nothing is lost over the interrupts.
    let steps = flow(&packets(&out.bytes()));
    let taken = steps.iter().filter(|step| **step == trace::Step::Taken).count();
    assert!(taken >= 199_999, "{taken} taken branches");
}

/// 33.2.8.4: with InjectPsbPmiOnEnable the region's interrupt is also left as PendTopaPMI, for whoever saves the registers before
/// it is delivered; where they are loaded again it comes at the enable.
fn a_pending_pmi_is_injected() {
    COUNT.store(0, SeqCst);
    SEEN.store(0, SeqCst);
    apic::enable();
    exception::on(PMI, |_| {
        COUNT.fetch_add(1, SeqCst);
        SEEN.fetch_or(read(IA32_PERF_GLOBAL_STATUS), SeqCst);
        write(IA32_PERF_GLOBAL_OVF_CTRL, status::TRACE_TOPA);
        apic::write(apic::reg::LVT_PC, u32::from(PMI));
        apic::eoi();
    });
    // As if the request were lost.
    apic::write(apic::reg::LVT_PC, apic::MASKED);
    for inject in [false, true] {
        let _out = Output::new(16, 0, TopaEntry::new().with_int(true));
        fill(ON.with_inject_psb_pmi_on_enable(inject).into_bits());
        assert_eq!(state().pend_topa_pmi(), inject);
    }
    write(IA32_PERF_GLOBAL_OVF_CTRL, status::TRACE_TOPA);
    apic::write(apic::reg::LVT_PC, u32::from(PMI));
    for inject in [false, true] {
        let out = Output::new(16, 0, TopaEntry::new());
        write(IA32_RTIT_STATUS, RtitStatus::new().with_pend_topa_pmi(true).into_bits());
        cpu::enable_interrupts();
        write(IA32_RTIT_CTL, ON.with_inject_psb_pmi_on_enable(inject).into_bits());
        cpu::pause();
        write(IA32_RTIT_CTL, 0u64);
        cpu::disable_interrupts();
        assert_eq!(COUNT.load(SeqCst), u64::from(inject));
        assert!(!out.bytes().is_empty());
    }
    assert_eq!(SEEN.load(SeqCst) & status::TRACE_TOPA, status::TRACE_TOPA);
}

/// STOP ends the trace at the end of the region.
fn stop_ends_the_trace() {
    let out = Output::new(1, 0, TopaEntry::new().with_stop(true));
    write(IA32_RTIT_CTL, ON.into_bits());
    call!(p_count(200_000));
    let at_end = state();
    write(IA32_RTIT_CTL, 0u64);
    assert!(at_end.stopped() && !at_end.trigger_en(), "{at_end:?}");
    assert_ne!(paging::peek(out.regions[0] + 4088), 0, "the region is full");
}

/// END with INT or STOP is an operational error, and so are reserved bits.
fn malformed_tables() {
    for bits in [1 | 1 << 2, 1 | 1 << 4, 1 << 1, 1 << 10] {
        let out = Output::new(1, 0, TopaEntry::new());
        paging::poke(out.table, paging::peek(out.table) | bits);
        write(IA32_RTIT_CTL, ON.into_bits());
        call!(p_count(20_000));
        let at_end = state();
        write(IA32_RTIT_CTL, 0u64);
        assert!(at_end.error(), "entry bits {bits:X}H: {at_end:?}");
        write(IA32_RTIT_STATUS, 0u64);
    }
}

/// END leads back to the table: the regions are a ring.
fn end_makes_a_ring() {
    let out = Output::new(2, 0, TopaEntry::new());
    fill(ON.into_bits());
    let place = read(IA32_RTIT_OUTPUT_MASK_PTRS);
    assert_eq!(read(IA32_RTIT_OUTPUT_BASE), out.table);
    assert!(place >> 32 < 4096 && place >> 7 & 0x1FF_FFFF < 2, "{place:X}H");
    assert!(!state().error());
}

/// One range wraps at its mask.
fn a_single_range_wraps() {
    let base = paging::pages(1);
    write(IA32_RTIT_OUTPUT_BASE, base);
    write(IA32_RTIT_OUTPUT_MASK_PTRS, 0xFFFu64);
    write(IA32_RTIT_STATUS, 0u64);
    let beyond = paging::peek(base + 4096);
    fill(ON.with_topa(false).into_bits());
    let place = read(IA32_RTIT_OUTPUT_MASK_PTRS);
    assert!(place >> 32 < 4096 && place & 0xFFF_FFFF == 0xFFF, "{place:X}H");
    assert_ne!(paging::peek(base + 4088), 0);
    assert_eq!(paging::peek(base + 4096), beyond);
}

rt::tests! {
    "tests_pt_topa";
    regions_follow_each_other: need::PT, trace::TABLES;
    int_raises_a_pmi: need::PT, trace::TABLES;
    a_pending_pmi_is_injected: need::PT, trace::TABLES, trace::INJECT;
    stop_ends_the_trace: need::PT;
    malformed_tables: need::PT;
    end_makes_a_ring: need::PT, trace::TABLES;
    a_single_range_wraps: need::PT, trace::RANGE;
}
