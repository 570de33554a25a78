//! Intel PT: filters. SDM Vol. 3C 33.2.4 "Trace Filtering".

use rt::cpu::{self, read, refuses, write};
use rt::{label, need, paging};
use x86::msr::*;
use x86::pt::{RtitStatus, TopaEntry};

use crate::pattern;
use crate::trace::Step::*;
use crate::trace::{self, ON, Output, Step, flow};

fn output() -> Output {
    Output::new(1, 4, TopaEntry::new())
}

fn address(step: &Step) -> Option<u64> {
    match *step {
        Tip(ip) | On(ip) | Fup(ip) => Some(ip),
        _ => None,
    }
}

/// OS and User: a run through both rings shows one of them.
fn rings() {
    let out = output();
    write(IA32_RTIT_CTL, ON.with_os(false).into_bits());
    pattern::user();
    write(IA32_RTIT_CTL, 0u64);
    let steps = flow(&out.packets());
    assert!(steps.contains(&On(label!(p_user))), "{steps:X?}");
    for ip in steps.iter().filter_map(address) {
        assert!(pattern::is_user(ip), "{ip:X}H is not in ring 3");
    }
    // Leaving by context gives no address.
    assert!(steps.contains(&Off(None)), "{steps:X?}");
    let out = output();
    write(IA32_RTIT_CTL, ON.with_user(false).into_bits());
    pattern::user();
    write(IA32_RTIT_CTL, 0u64);
    let steps = flow(&out.packets());
    assert!(!steps.contains(&On(label!(p_user))) && !steps.contains(&Tip(label!(p_user))));
    let neither = output();
    pattern::run(IA32_RTIT_CTL, ON.with_user(false).with_os(false).into_bits(), 0);
    assert!(flow(&neither.packets()).is_empty());
}

/// CR3 match: another CR3 is not traced, and bits 4:0 of IA32_RTIT_CR3_MATCH are reserved.
fn cr3() {
    refuses(IA32_RTIT_CR3_MATCH, 1);
    let out = output();
    write(IA32_RTIT_CR3_MATCH, paging::another_space());
    pattern::run(IA32_RTIT_CTL, ON.with_cr3_filter(true).into_bits(), 0);
    assert!(flow(&out.packets()).is_empty());
    let out = output();
    write(IA32_RTIT_CR3_MATCH, cpu::cr3());
    pattern::run(IA32_RTIT_CTL, ON.with_cr3_filter(true).into_bits(), 0);
    assert_eq!(flow(&out.packets()).first(), Some(&On(label!(p_jmp))));
}

/// A range, both ends inclusive: entered by a jump gives TIP.PGE, left gives TIP.PGD with the address.
fn a_filter_range() {
    let out = output();
    // The function of the direct call and its return.
    write(IA32_RTIT_ADDR0_A, label!(p_call_to));
    write(IA32_RTIT_ADDR0_B, label!(p_ret));
    pattern::run(IA32_RTIT_CTL, ON.with_addr_cfg(1).into_bits(), 0);
    let steps = flow(&out.packets());
    let b = pattern::branches();
    assert_eq!(steps, [On(label!(p_call_to)), Off(Some(b[3].to))]);
}

/// A TraceStop range: Stopped is set, a TraceStop packet comes, and nothing after it until it is enabled again.
fn a_tracestop_range() {
    let out = output();
    write(IA32_RTIT_ADDR0_A, label!(p_call_to));
    write(IA32_RTIT_ADDR0_B, label!(p_ret));
    pattern::run(
        IA32_RTIT_CTL,
        ON.with_addr_cfg(2).into_bits(),
        ON.with_addr_cfg(2).into_bits(),
    );
    let status = RtitStatus::from_bits(read(IA32_RTIT_STATUS));
    write(IA32_RTIT_CTL, 0u64);
    assert!(status.stopped(), "{status:?}");
    let steps = flow(&out.packets());
    assert_eq!(steps.last(), Some(&Stop), "{steps:X?}");
    assert!(!steps.contains(&Tip(label!(p_icall_to))));
}

/// Encodings 3 and up of ADDRn_CFG are refused, and so are ranges that are not there.
fn address_configurations() {
    refuses(IA32_RTIT_CTL, 3 << 32);
    let ranges = cpu::leaf(0x14, 1)[0] & 7;
    if ranges < 4 {
        refuses(IA32_RTIT_CTL, 1 << (32 + 4 * ranges));
        cpu::no_msr(IA32_RTIT_ADDR0_A + 2 * ranges);
    }
}

rt::tests! {
    "tests_pt_filters";
    rings: need::PT;
    cr3: need::PT, trace::CR3_FILTER;
    a_filter_range: need::PT, trace::RANGES;
    a_tracestop_range: need::PT, trace::RANGES;
    address_configurations: need::PT, trace::RANGES;
}
