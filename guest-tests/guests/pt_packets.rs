//! Intel PT: which packets. The guest decodes its own trace. SDM Vol. 3C 33.4 "Trace Packets and Data Types".

use alloc::vec;
use alloc::vec::Vec;

use pt_packet::Packet;
use rt::cpu::{self, leaf, read, refuses, write, wrmsr};
use rt::exception::{BP, Fault};
use rt::need::{self, Need};
use rt::{call, exception, label};
use x86::msr::*;
use x86::pt::{RtitCtl, RtitStatus, TopaEntry};

use crate::pattern;
use crate::trace::Step::*;
use crate::trace::{self, ON, Output, flow};

fn output() -> Output {
    Output::new(1, 4, TopaEntry::new())
}

/// 33.2.8: #GP for reserved bits, and on writes while TraceEn but of the same value or to clear it.
fn registers() {
    let out = output();
    refuses(IA32_RTIT_CTL, 1 << 63);
    refuses(IA32_RTIT_CTL, 1 << 18);
    refuses(IA32_RTIT_STATUS, 1 << 63);
    write(IA32_RTIT_CTL, ON.into_bits());
    write(IA32_RTIT_CTL, ON.into_bits());
    let changed = wrmsr(IA32_RTIT_CTL, ON.with_user(false).into_bits());
    let base = wrmsr(IA32_RTIT_OUTPUT_BASE, out.table);
    let pointers = wrmsr(IA32_RTIT_OUTPUT_MASK_PTRS, 0x7F);
    let status = wrmsr(IA32_RTIT_STATUS, 0);
    write(IA32_RTIT_CTL, 0u64);
    assert_eq!([changed, base, pointers, status], [Err(Fault::GP0); 4]);
    // The enables of STATUS ignore writes.
    let enables = read(IA32_RTIT_STATUS) & 7;
    assert_eq!(enables & 4, 0, "TriggerEn follows TraceEn");
    for value in [7u64, 0] {
        write(IA32_RTIT_STATUS, value);
        assert_eq!(read(IA32_RTIT_STATUS) & 7, enables);
    }
}

/// Encodings that CPUID.14H does not enumerate.
fn unsupported_encodings() {
    let [_, ebx, _, _] = leaf(0x14, 0);
    for (bit, needed) in [(7, 0), (1, 1), (19, 1), (9, 3), (14, 3), (12, 4), (5, 4), (4, 5)] {
        if bit == 7 {
            if leaf(0x14, 0)[2] & 1 == 0 && leaf(0x14, 0)[2] & 8 == 0 {
                refuses(IA32_RTIT_CTL, 1 << 7);
            }
        } else if ebx >> needed & 1 == 0 {
            refuses(IA32_RTIT_CTL, 1 << bit);
        }
    }
}

/// Direct jumps and calls give nothing, conditional ones TNT, indirect ones TIP, matched returns a taken bit.
fn packets_of_each_branch() {
    let out = output();
    pattern::run(IA32_RTIT_CTL, ON.into_bits(), 0);
    let steps = flow(&out.packets());
    let b = pattern::branches();
    // The trace begins at the instruction after the WRMSR, and ends with a FUP at the other WRMSR.
    let first = label!(p_jmp);
    let expected = vec![
        On(first),
        Taken,
        NotTaken,
        Taken,
        Tip(b[4].to),
        Taken,
        Tip(b[6].to),
        Fup(label!(p_off)),
        Off(None),
    ];
    assert_eq!(steps, expected);
}

/// DisRETC: returns are TIPs.
fn returns_without_compression() {
    let out = output();
    pattern::run(IA32_RTIT_CTL, ON.with_dis_retc(true).into_bits(), 0);
    let b = pattern::branches();
    let expected = vec![
        On(label!(p_jmp)),
        Taken,
        NotTaken,
        Tip(b[3].to),
        Tip(b[4].to),
        Tip(b[5].to),
        Tip(b[6].to),
        Fup(label!(p_off)),
        Off(None),
    ];
    assert_eq!(flow(&out.packets()), expected);
}

/// 33.4.2.17: a trace begins with PSB, and PSB+ ends with PSBEND; its FUP is the first address.
fn a_trace_begins_with_psb() {
    let out = output();
    pattern::run(IA32_RTIT_CTL, ON.with_tsc_en(true).into_bits(), 0);
    let packets = out.packets();
    assert_eq!(packets[0], Packet::Psb);
    let end = packets.iter().position(|p| *p == Packet::PsbEnd).expect("PSBEND");
    assert!(
        packets[..end].iter().any(|p| matches!(p, Packet::Tsc(_))),
        "TSC: {packets:?}"
    );
    assert!(
        packets[..end].iter().any(|p| matches!(p, Packet::Cbr(_))),
        "CBR: {packets:?}"
    );
    // The next start is without PSB while PacketByteCnt says that one was there.
    if trace::ebx() & 2 != 0 {
        let before = out.bytes().len();
        pattern::run(IA32_RTIT_CTL, ON.into_bits(), 0);
        let all = out.bytes();
        assert!(pt_packet::find_psb(&all[before..], 0).is_none(), "a second PSB");
    }
}

/// Configurable PSB frequency: CPUID.14H.0:EBX\[1\].
const PSB_FREQ: Need = Need {
    reason: "no choice of PSB frequency (CPUID.14H.0:EBX[1] is 0)",
    present: || (need::PT.present)() && trace::ebx() & 2 != 0,
    absent: || {
        if (need::PT.present)() {
            refuses(IA32_RTIT_CTL, 1 << 24);
        }
    },
};

/// 33.2.8.2, PSBFreq: a PSB about every 2 KiB shifted left by it, for the values of CPUID.14H.1:EBX\[31:16\].
fn psb_comes_every_period() {
    for freq in (0..4u8).filter(|freq| leaf(0x14, 1)[1] >> (16 + freq) & 1 != 0) {
        let out = output();
        write(IA32_RTIT_CTL, ON.with_psb_freq(freq).into_bits());
        call!(p_count(340_000));
        write(IA32_RTIT_CTL, 0u64);
        let bytes = out.bytes();
        let (mut at, mut psbs) = (0, Vec::new());
        while let Some(psb) = pt_packet::find_psb(&bytes, at) {
            psbs.push(psb);
            at = psb + 16;
        }
        let period = 2048usize << freq;
        assert!(
            psbs.len() >= bytes.len() / period - 1,
            "{psbs:X?} in {:X}H",
            bytes.len()
        );
        for pair in psbs.windows(2) {
            let distance = pair[1] - pair[0];
            assert!(
                (period..period + period / 4).contains(&distance),
                "{distance} for {period}"
            );
        }
    }
}

core::arch::global_asm!(
    r#"
    .text
    .globl pt_sleep, pt_sleep_hlt, pt_sleep_next
    # sleep(): HLT until an interrupt
pt_sleep:
    sti
pt_sleep_hlt:
    hlt
pt_sleep_next:
    cli
    ret
"#
);

/// Power-event trace: CPUID.14H.0:EBX\[5\].
const POWER: Need = Need {
    reason: "no power-event trace (CPUID.14H.0:EBX[5] is 0)",
    present: || (need::PT.present)() && trace::ebx() & 32 != 0,
    absent: || {
        if (need::PT.present)() {
            refuses(IA32_RTIT_CTL, 1 << 4);
        }
    },
};

/// 33.2.3 "Power Event Tracing": a sleep in HLT is PWRE, EXSTOP with HLT's address, and when it ends PWRX, with the time before what
/// woke the processor.
fn a_sleep_is_told() {
    static WOKEN: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(0);
    rt::apic::enable();
    exception::on(0x62, |_| {
        WOKEN.store(cpu::tsc(), core::sync::atomic::Ordering::SeqCst);
        rt::apic::eoi();
    });
    let out = output();
    rt::apic::write(rt::apic::reg::DIVIDE, 0xB);
    rt::apic::write(rt::apic::reg::LVT_TIMER, 0x62);
    rt::apic::write(rt::apic::reg::INITIAL_COUNT, 300_000);
    write(IA32_RTIT_CTL, ON.with_tsc_en(true).with_pwr_evt_en(true).into_bits());
    let before = cpu::tsc();
    call!(pt_sleep());
    write(IA32_RTIT_CTL, 0u64);
    let woken = WOKEN.load(core::sync::atomic::Ordering::SeqCst);
    let all = out.packets();
    let place = |what: fn(&Packet) -> bool| {
        all.iter()
            .position(what)
            .unwrap_or_else(|| panic!("it is not there: {all:X?}"))
    };
    let sleeps = place(|p| matches!(p, Packet::Pwre { state: 1.., .. }));
    let stops = place(|p| matches!(p, Packet::ExStop { ip: true }));
    let wakes = place(|p| matches!(p, Packet::Pwrx { .. }));
    let interrupt = Packet::Tip(Some(exception::entry(0x62)));
    let handler = all.iter().position(|p| *p == interrupt).expect("the interrupt");
    assert!(sleeps < stops && stops < wakes && wakes < handler, "{all:X?}");
    // IRET of the timer's handler is no part of it: the instruction that stopped is HLT, and what would come next is behind it.
    assert_eq!(all[stops + 1], Packet::Fup(Some(label!(pt_sleep_hlt))), "{all:X?}");
    assert_eq!(all[handler - 1], Packet::Fup(Some(label!(pt_sleep_next))), "{all:X?}");
    let time = all[stops..handler].iter().find_map(|p| match *p {
        Packet::Tsc(tsc) => Some(tsc),
        _ => None,
    });
    let time = time.expect("the time is reported when it wakes");
    assert!(time > before && time <= woken, "{before} {time} {woken}");
}

/// 33.2.8.4: a PSB that was due when the trace was switched off comes first in the next, where InjectPsbPmiOnEnable says so.
fn a_pending_psb_is_injected() {
    // Not at the start of a stream, which has one anyway.
    let due = RtitStatus::new().with_packet_byte_cnt(100);
    for (inject, pending) in [(false, true), (true, false), (true, true)] {
        let out = output();
        write(IA32_RTIT_STATUS, due.with_pend_psb(pending).into_bits());
        pattern::run(IA32_RTIT_CTL, ON.with_inject_psb_pmi_on_enable(inject).into_bits(), 0);
        let first = pt_packet::find_psb(&out.bytes(), 0) == Some(0);
        let left = RtitStatus::from_bits(read(IA32_RTIT_STATUS)).pend_psb();
        assert_eq!(
            (first, left),
            (inject && pending, pending && !inject),
            "inject {inject}, pending {pending}"
        );
    }
}

/// Clearing TraceEn flushes: the bytes are in memory, and a later run has the same packets.
fn a_run_repeats() {
    let out = output();
    pattern::run(IA32_RTIT_CTL, ON.into_bits(), 0);
    let first = out.bytes();
    out.rewind();
    pattern::run(IA32_RTIT_CTL, ON.into_bits(), 0);
    assert_eq!(out.bytes(), first);
}

/// Exceptions: FUP with the source, TIP with the handler; IRET is a TIP.
fn exceptions_are_fup_and_tip() {
    exception::on(BP, |_| {});
    let out = output();
    write(IA32_RTIT_CTL, ON.into_bits());
    call!(dr_int3());
    write(IA32_RTIT_CTL, 0u64);
    let steps = flow(&out.packets());
    let at = steps.iter().position(|step| *step == Tip(exception::entry(BP)));
    let at = at.unwrap_or_else(|| panic!("no TIP to the handler: {steps:X?}"));
    assert_eq!(steps[at - 1], Fup(label!(dr_int3_here)));
    assert!(steps[at..].contains(&Tip(label!(dr_int3_next))), "the IRET");
}

/// MOV CR3 gives a PIP.
fn mov_cr3_gives_pip() {
    let other = rt::paging::another_space();
    let out = output();
    write(IA32_RTIT_CTL, ON.into_bits());
    cpu::set_cr3(other);
    write(IA32_RTIT_CTL, 0u64);
    let packets = out.packets();
    let end = packets.iter().position(|p| *p == Packet::PsbEnd).expect("PSBEND");
    let found = packets[end..]
        .iter()
        .any(|p| matches!(p, Packet::Pip { cr3, .. } if *cr3 == other));
    assert!(found, "{packets:X?}");
}

core::arch::global_asm!(
    r#"
    .text
    .globl pt_ptw, pt_ptw_here
    # ptw(IA32_RTIT_CTL, payload)
pt_ptw:
    mov     ecx, 0x570
    mov     eax, edi
    xor     edx, edx
    wrmsr
pt_ptw_here:
    .byte   0xf3, 0x48, 0x0f, 0xae, 0xe6
    xor     eax, eax
    wrmsr
    ret
"#
);

/// PTWRITE gives PTW, and FUP where CTL says so.
fn ptwrite() {
    for fup in [false, true] {
        let out = output();
        let ctl = ON.with_ptw_en(true).with_fup_on_ptw(fup);
        call!(pt_ptw(ctl.into_bits(), 0x1122_3344_5566_7788_u64));
        let steps = flow(&out.packets());
        assert_eq!(steps[1], Ptw(0x1122_3344_5566_7788), "{steps:X?}");
        assert_eq!(steps[2] == Fup(label!(pt_ptw_here)), fup, "{steps:X?}");
    }
}

/// STATUS after a trace: nothing traces, no error, and PacketByteCnt moved.
fn status_after_a_trace() {
    let _out = output();
    pattern::run(IA32_RTIT_CTL, ON.into_bits(), 0);
    let status = RtitStatus::from_bits(read(IA32_RTIT_STATUS));
    assert!(
        !status.error() && !status.stopped() && !status.trigger_en(),
        "{status:?}"
    );
    if trace::ebx() & 2 != 0 {
        assert_ne!(status.packet_byte_cnt(), 0);
    }
    assert_eq!(read(IA32_RTIT_CTL), RtitCtl::new().into_bits());
}

/// MTC: CPUID.14H.0:EBX\[3\], with the frequencies of 14H.1:EAX\[31:16\].
const MTC: Need = Need {
    reason: "no MTC packets (CPUID.14H.0:EBX[3] is 0)",
    present: || trace::ebx() & 8 != 0,
    absent: || {
        if (need::PT.present)() {
            refuses(IA32_RTIT_CTL, ON.with_mtc_en(true).into_bits());
        }
    },
};

/// Cycle-accurate mode: CPUID.14H.0:EBX\[1\].
const CYC: Need = Need {
    reason: "no cycle-accurate mode (CPUID.14H.0:EBX[1] is 0)",
    present: || trace::ebx() & 2 != 0,
    absent: || {
        if (need::PT.present)() {
            refuses(IA32_RTIT_CTL, ON.with_cyc_en(true).into_bits());
        }
    },
};

/// 33.4.2.12, 33.4.2.13: TMA follows TSC in PSB+ and ties it to the counter that MTC shows; MTC packets come with the crystal's clock, each one
/// more than the one before.
fn mtc_ticks_from_tma_on() {
    let freq = (0..16).rfind(|n| leaf(0x14, 1)[0] >> (16 + n) & 1 != 0 && *n <= 6);
    let Some(freq) = freq else {
        rt::report::skip("no MTC frequency up to 6 (CPUID.14H.1:EAX[31:16])")
    };
    let out = Output::new(2, 3, TopaEntry::new());
    let ctl = ON.with_tsc_en(true).with_mtc_en(true).with_mtc_freq(freq);
    write(IA32_RTIT_CTL, ctl.into_bits());
    call!(p_count(20_000));
    write(IA32_RTIT_CTL, 0u64);
    let packets = out.packets();
    let tsc = packets.iter().position(|p| matches!(p, Packet::Tsc(_))).expect("TSC");
    assert!(matches!(packets[tsc + 1], Packet::Tma { .. }), "{:?}", &packets[..8]);
    let ticks: Vec<u8> = packets
        .iter()
        .filter_map(|p| if let Packet::Mtc(ctc) = p { Some(*ctc) } else { None })
        .collect();
    assert!(ticks.len() > 3, "{} MTC packets", ticks.len());
    for pair in ticks.windows(2) {
        assert_eq!(pair[1], pair[0].wrapping_add(1), "{ticks:?}");
    }
}

/// 33.4.2.14: with CYCEn a CYC says how many cycles passed since the last, before the packets that it times; together they are no more
/// than the clock.
fn cycles_are_counted() {
    let out = Output::new(2, 3, TopaEntry::new());
    let before = cpu::tsc();
    write(IA32_RTIT_CTL, ON.with_cyc_en(true).with_tsc_en(true).into_bits());
    call!(p_count(2000));
    write(IA32_RTIT_CTL, 0u64);
    let passed = cpu::tsc() - before;
    let packets = out.packets();
    let cycles: Vec<u64> = packets
        .iter()
        .filter_map(|p| if let Packet::Cyc(n) = p { Some(*n) } else { None })
        .collect();
    assert!(!cycles.is_empty(), "{packets:?}");
    let sum: u64 = cycles.iter().sum();
    assert!(
        (2000..=passed).contains(&sum),
        "{sum} cycles, the TSC moved by {passed}"
    );
    // A TNT that is full has its time.
    let full = |p: &Packet| matches!(p, Packet::ShortTnt(_) | Packet::LongTnt(_));
    let timed = packets
        .windows(2)
        .filter(|pair| full(&pair[1]))
        .all(|pair| matches!(pair[0], Packet::Cyc(_)));
    assert!(timed, "{packets:?}");
}

/// 33.3.8: nothing here is faster than the output, so a trace of any length has no OVF.
fn nothing_overflows() {
    let out = output();
    write(IA32_RTIT_CTL, ON.with_dis_retc(true).into_bits());
    for _ in 0..200 {
        call!(p_count(20));
    }
    write(IA32_RTIT_CTL, 0u64);
    let packets = out.packets();
    assert!(
        packets.len() > 500 && !packets.contains(&Packet::Ovf),
        "{} packets",
        packets.len()
    );
}

/// Broadwell, the first generation: the last-branch stack stands still under TraceEn, reads 0 and drops writes.
const EXCLUDES_LBR: Need = Need {
    reason: "Intel PT and last-branch records go together here",
    present: || (need::PT.present)() && matches!(cpu::family_model(), (6, 0x3D | 0x47 | 0x4F | 0x56)),
    absent: || {
        if (need::PT.present)()
            && let Some(stack) = need::LbrStack::here()
        {
            let _out = output();
            write(stack.from, 0x1234u64);
            write(IA32_RTIT_CTL, ON.into_bits());
            let during = read(stack.from);
            write(IA32_RTIT_CTL, 0u64);
            assert_eq!(during, 0x1234);
        }
    },
};

/// 33.3.1.2 "Model Specific Capability Restrictions": while TraceEn is set nothing is recorded, reads give 0 and writes are dropped; when it
/// is cleared the array of records is reset, and recording goes on.
fn last_branches_pause_under_trace_en() {
    let stack = need::LbrStack::here().expect("the part has both");
    let _out = output();
    write(stack.from, 0x1234u64);
    assert_eq!(read(stack.from), 0x1234);
    write(IA32_RTIT_CTL, ON.into_bits());
    let during = read(stack.from);
    write(stack.from, 0x5678u64);
    write(IA32_DEBUGCTL, 1u64);
    call!(p_count(100));
    write(IA32_DEBUGCTL, 0u64);
    write(IA32_RTIT_CTL, 0u64);
    let records = (0..stack.depth).map(|n| read(stack.from + n));
    assert_eq!((during, records.filter(|from| *from != 0).count()), (0, 0));
    write(IA32_DEBUGCTL, 1u64);
    call!(p_count(2));
    write(IA32_DEBUGCTL, 0u64);
    let records = (0..stack.depth).map(|n| read(stack.from + n));
    assert_ne!(records.filter(|from| *from != 0).count(), 0, "recording goes on");
}

core::arch::global_asm!(
    r#"
    .text
    .globl pt_tx, pt_tx_abort
    # tx(): a transaction that commits, and one that aborts
pt_tx:
    .byte   0xc7, 0xf8, 4, 0, 0, 0
    nop
    .byte   0x0f, 0x01, 0xd5
    nop
    .byte   0xc7, 0xf8, 4, 0, 0, 0
    nop
    .byte   0xc6, 0xf8, 7
pt_tx_abort:
    ret
"#
);

/// Transactions, by CPUID alone: that XBEGIN is #UD without them is a test of `cpuid_msrs`, and where a hypervisor's processor
/// does otherwise, whether it is that one which executes it here would depend on the time.
const RTM: Need = Need {
    reason: need::RTM.reason,
    present: need::RTM.present,
    absent: || {},
};

/// Transactions: MODE.TSX says that one begins, commits, aborts; an abort is an asynchronous branch, with FUP and TIP.
fn transactions_show() {
    let out = output();
    write(IA32_RTIT_CTL, ON.into_bits());
    call!(pt_tx());
    write(IA32_RTIT_CTL, 0u64);
    let packets = out.packets();
    let states: Vec<(bool, bool)> = packets
        .iter()
        .filter_map(|p| match *p {
            Packet::ModeTsx { in_tx, abort } => Some((in_tx, abort)),
            _ => None,
        })
        .collect();
    // PSB+ says that there is none.
    let states: Vec<_> = states
        .into_iter()
        .skip_while(|state| *state == (false, false))
        .collect();
    assert_eq!(
        states,
        [(true, false), (false, false), (true, false), (false, true)],
        "{packets:X?}"
    );
    let at = packets
        .iter()
        .position(|p| matches!(p, Packet::ModeTsx { abort: true, .. }));
    let after = &packets[at.expect("it is there")..];
    assert!(matches!(after[1], Packet::Fup(Some(_))), "{after:X?}");
    assert!(matches!(after[2], Packet::Tip(Some(_))), "{after:X?}");
}

rt::tests! {
    "tests_pt_packets";
    registers: need::PT;
    unsupported_encodings: need::PT;
    packets_of_each_branch: need::PT;
    returns_without_compression: need::PT;
    a_trace_begins_with_psb: need::PT;
    psb_comes_every_period: PSB_FREQ;
    a_sleep_is_told: POWER;
    a_pending_psb_is_injected: need::PT, trace::INJECT;
    a_run_repeats: need::PT;
    exceptions_are_fup_and_tip: need::PT;
    mov_cr3_gives_pip: need::PT;
    ptwrite: need::PT, trace::PTWRITE;
    status_after_a_trace: need::PT;
    mtc_ticks_from_tma_on: need::PT, MTC;
    cycles_are_counted: need::PT, CYC;
    nothing_overflows: need::PT;
    last_branches_pause_under_trace_en: need::PT, EXCLUDES_LBR;
    transactions_show: need::PT, RTM;
}
