//! Intel PT: which packets. The guest decodes its own trace. SDM Vol. 3C 33.4 "Trace Packets and Data Types".

use alloc::vec;

use pt_packet::Packet;
use rt::cpu::{self, leaf, read, refuses, write, wrmsr};
use rt::exception::{BP, Fault};
use rt::{call, exception, label, need};
use x86::msr::*;
use x86::pt::{RtitCtl, TopaEntry};

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
    let status = x86::pt::RtitStatus::from_bits(read(IA32_RTIT_STATUS));
    assert!(
        !status.error() && !status.stopped() && !status.trigger_en(),
        "{status:?}"
    );
    if trace::ebx() & 2 != 0 {
        assert_ne!(status.packet_byte_cnt(), 0);
    }
    assert_eq!(read(IA32_RTIT_CTL), RtitCtl::new().into_bits());
}

rt::tests! {
    "tests_pt_packets";
    registers: need::PT;
    unsupported_encodings: need::PT;
    packets_of_each_branch: need::PT;
    returns_without_compression: need::PT;
    a_trace_begins_with_psb: need::PT;
    a_run_repeats: need::PT;
    exceptions_are_fup_and_tip: need::PT;
    mov_cr3_gives_pip: need::PT;
    ptwrite: need::PT, trace::PTWRITE;
    status_after_a_trace: need::PT;
}
