//! Each packet in the situation that brings it about, and each filter.

use super::*;
use crate::unit::ds::pebs_trace::TraceRecord;
use pt_packet::{ExecMode, ItemSize, Packet::*, Tnt};
use x86::pt::RtitStatus;
use x86::watch::{Abort, Change, EventRecord, Far};

const INTERRUPT: Far = Far::Interrupt;

fn tnt(bits: &str) -> Packet {
    let bits = bits.bytes().fold(1, |bits, c| bits << 1 | u64::from(c == b'T'));
    let tnt = Tnt::from_bits(bits).unwrap();
    if tnt.len() <= 6 { ShortTnt(tnt) } else { LongTnt(tnt) }
}

fn mode64() -> Packet {
    ModeExec {
        mode: ExecMode::Bits64,
        interrupts: false,
    }
}

fn skylake() -> PtCaps {
    caps(&SKYLAKE_SERVER)
}

/// An event that finds the processor at `from` and leads to `to`.
fn event(bench: &mut Bench, far: Far, vector: u8, from: u64, to: u64) -> x86::watch::Effects {
    let branch = bench.record(Flow::Far(far), from, to);
    bench.guest.rip = to;
    let event = EventRecord {
        branch,
        vector,
        debug: vector == 1 && far == Far::Exception,
        error: None,
        address: (vector == 14).then_some(0xDEAD_0000),
    };
    bench.pt.event(&event, &mut bench.guest)
}

fn change(bench: &mut Bench, change: Change) {
    bench.guest.step += 1;
    let _ = bench.pt.change(change, &mut bench.guest);
}

// covers: pt/psb-start
#[test]
fn a_trace_begins_with_psb_unless_bytes_have_been_counted() {
    let all = all_rings().with_tsc_en(true).with_mtc_en(true);
    let (step, cbr) = (1_000_000u64, 21);
    // Leaf 15H: 168 to 2.
    let tma = Tma {
        ctc: (step * 2 / 168) as u16,
        fast: (step - (step * 2 / 168) * 84) as u16,
    };
    let psb = [
        Psb,
        Pip {
            cr3: 0x5000,
            non_root: false,
        },
        Tsc(step),
        tma,
        Cbr(cbr),
        ModeTsx {
            in_tx: false,
            abort: false,
        },
        PsbEnd,
        mode64(),
        TipPge(Some(0x1000)),
    ];
    let mut bench = Bench::start(skylake(), all);
    assert_eq!(bench.packets_from(0), psb);
    bench.stop();
    let from = bench.offset();
    assert_ne!(bench.rdmsr(IA32_RTIT_STATUS) >> 32, 0, "PacketByteCnt");
    let mut from = from;
    for ip in [0xFFFF_8000_0000_1000, 0x1000, 0x7F00_0000_1000] {
        bench.guest.rip = ip;
        bench.wrmsr(IA32_RTIT_CTL, all.with_trace_en(true).into_bits());
        let again = [Tsc(step), tma, Cbr(cbr), mode64(), TipPge(Some(ip))];
        assert_eq!(bench.packets_from(from), again, "a start in the middle, at {ip:#x}");
        bench.stop();
        from = bench.offset();
    }

    let bench = Bench::start(skylake(), all_rings());
    assert!(
        !bench.packets_from(0).iter().any(|p| matches!(p, Tsc(_) | Tma { .. })),
        "neither is enabled"
    );
    let user = Bench::start(skylake(), all_rings().with_user(true).with_os(false));
    let expected = [Psb, Cbr(cbr), PsbEnd];
    assert_eq!(
        user.packets_from(0),
        expected,
        "out of context neither CR3 nor mode is reported"
    );

    // The first generation does not count.
    let mut first = Bench::new(caps(&BROADWELL));
    first.guest.ram[0x8000..0x8008].copy_from_slice(&RANGE.to_le_bytes());
    first.guest.ram[0x8008..0x8010].copy_from_slice(&0x8001u64.to_le_bytes());
    first.wrmsr(IA32_RTIT_OUTPUT_BASE, 0x8000);
    for _ in 0..2 {
        let ctl = all_rings().with_topa(true).with_trace_en(true);
        let found = first.packets(|b| b.wrmsr(IA32_RTIT_CTL, ctl.into_bits()));
        assert_eq!(found[0], Psb);
        assert_eq!(first.rdmsr(IA32_RTIT_STATUS) >> 32, 0, "no PacketByteCnt");
        first.stop();
    }
}

// covers: pt/trace-en-falls
#[test]
fn a_trace_ends_with_fup_and_tip_pgd() {
    let mut bench = Bench::start(skylake(), all_rings());
    bench.branch(Flow::Cond { taken: true }, 0x1010, 0x1100);
    bench.guest.rip = 0x1122;
    let found = bench.packets(|b| b.stop());
    assert_eq!(
        found,
        [tnt("T"), Fup(Some(0x1120)), TipPgd(None)],
        "the WRMSR's own address"
    );
    let mut bench = Bench::start(skylake(), all_rings().with_os(false));
    assert_eq!(bench.packets(|b| b.stop()), [], "PacketEn is clear");
}

// covers: pt/near
#[test]
fn near_branches() {
    let cond = |taken| Flow::Cond { taken };
    type Row<'a> = (&'a [(Flow, u64, u64)], &'a [Packet], &'a str);
    let rows: [Row<'_>; 8] = [
        (
            &[(cond(true), 0x1000, 0x1100), (cond(false), 0x1100, 0x1102)],
            &[tnt("TN")],
            "conditional",
        ),
        (&[(Flow::Jump, 0x1000, 0x1100)], &[], "direct jump"),
        (&[(Flow::Call, 0x1000, 0x1100)], &[], "direct call"),
        (
            &[(Flow::JumpInd, 0x1000, 0x1100)],
            &[Tip(Some(0x1100))],
            "indirect jump",
        ),
        (
            &[(Flow::CallInd, 0x1000, 0x1100)],
            &[Tip(Some(0x1100))],
            "indirect call",
        ),
        (
            &[(Flow::Call, 0x1000, 0x1100), (Flow::Ret, 0x1100, 0x1002)],
            &[tnt("T")],
            "a return to behind its call",
        ),
        (
            &[(Flow::Call, 0x1000, 0x1100), (Flow::Ret, 0x1100, 0x1003)],
            &[Tip(Some(0x1003))],
            "a return to elsewhere",
        ),
        (
            &[
                (cond(true), 0x1000, 0x1100),
                (Flow::JumpInd, 0x1100, 0x1200),
                (cond(false), 0x1200, 0x1202),
            ],
            &[tnt("T"), Tip(Some(0x1200)), tnt("N")],
            "bits come out before the TIP",
        ),
    ];
    for (branches, expected, why) in rows {
        let mut bench = Bench::start(skylake(), all_rings());
        let mut found = bench.packets(|b| {
            let records: Vec<_> = branches
                .iter()
                .map(|&(flow, from, to)| b.record(flow, from, to))
                .collect();
            b.branches(&records);
            b.stop();
        });
        assert!(matches!(found[found.len() - 2..], [Fup(_), TipPgd(None)]), "{why}");
        found.truncate(found.len() - 2);
        assert_eq!(found, expected, "{why}");
    }
}

// covers: pt/tnt
#[test]
fn tnt_packets_hold_up_to_47_branches() {
    let mut bench = Bench::start(skylake(), all_rings());
    let found = bench.packets(|b| {
        for n in 0..100u64 {
            b.branch(Flow::Cond { taken: n % 3 == 0 }, 0x1000, 0x1000);
        }
        b.stop();
    });
    let bits: String = (0..100).map(|n| if n % 3 == 0 { 'T' } else { 'N' }).collect();
    assert_eq!(found[..3], [tnt(&bits[..47]), tnt(&bits[47..94]), tnt(&bits[94..])]);
}

// covers: pt/ret-compression
#[test]
fn returns_that_can_and_cannot_be_compressed() {
    let call = |b: &mut Bench, n: u64| b.branch(Flow::Call, 0x1000 + 16 * n, 0x1010 + 16 * n);
    let ret = |b: &mut Bench, n: u64| b.branch(Flow::Ret, 0x9000, 0x1002 + 16 * n);
    let compressed = |ctl: RtitCtl, what: &dyn Fn(&mut Bench)| {
        let mut bench = Bench::start(skylake(), ctl);
        let found = bench.packets(|b| {
            what(b);
            b.stop();
        });
        let tips = found.iter().filter(|p| matches!(p, Tip(_))).count();
        let bits: u32 = found
            .iter()
            .map(|p| match p {
                ShortTnt(tnt) | LongTnt(tnt) => tnt.len(),
                _ => 0,
            })
            .sum();
        (bits, tips)
    };
    let nested = |depth: u64| {
        move |b: &mut Bench| {
            (0..depth).for_each(|n| call(b, n));
            (0..depth).rev().for_each(|n| ret(b, n));
        }
    };
    assert_eq!(compressed(all_rings(), &nested(64)), (64, 0), "64 deep");
    assert_eq!(
        compressed(all_rings(), &nested(66)),
        (64, 2),
        "the two oldest are forgotten"
    );
    assert_eq!(
        compressed(all_rings().with_dis_retc(true), &nested(5)),
        (0, 5),
        "DisRETC"
    );
    let own_address = |b: &mut Bench| {
        b.branch(Flow::Call, 0x1000, 0x1002);
        b.branch(Flow::Ret, 0x1002, 0x1002);
    };
    assert_eq!(
        compressed(all_rings(), &own_address),
        (0, 1),
        "a direct call of the next instruction does not count"
    );
    for ctl in [all_rings(), all_rings().with_cyc_en(true)] {
        let indirect = |b: &mut Bench| {
            b.branch(Flow::CallInd, 0x1000, 0x1002);
            b.branch(Flow::Ret, 0x1002, 0x1002);
        };
        // The call itself is a TIP.
        assert_eq!(compressed(ctl, &indirect), (1, 1), "an indirect one does");
    }
    let elsewhere = |b: &mut Bench| {
        call(b, 0);
        call(b, 1);
        b.branch(Flow::Ret, 0x9000, 0x7777);
        ret(b, 0);
    };
    assert_eq!(
        compressed(all_rings(), &elsewhere),
        (0, 2),
        "a return that leads elsewhere forgets the others"
    );
    let across_psb = |b: &mut Bench| {
        call(b, 0);
        while b.packets_from(0).iter().filter(|p| **p == Psb).count() < 2 {
            b.branch(Flow::JumpInd, 0x2000, 0x3000);
            b.branch(Flow::JumpInd, 0x3000, 0x1_2000);
        }
        ret(b, 0);
    };
    let (bits, _) = compressed(all_rings(), &across_psb);
    assert_eq!(bits, 0, "only calls since the last PSB count");
}

// covers: pt/ip-compression
#[test]
fn ips_are_sent_in_the_shortest_form() {
    let all = all_rings();
    let mut bench = Bench::start(skylake(), all);
    let jumps = [
        (0x1234, 3, "16 bits"),
        (0x5_1234, 5, "32 bits"),
        (0x7F00_0005_1234, 7, "48 bits"),
        (0x7F00_0005_0000, 3, "16 bits more"),
        (0xFFFF_8000_0000_0000, 7, "48 bits, sign-extended"),
    ];
    for (to, len, what) in jumps {
        let from = bench.offset();
        bench.sync(to);
        assert_eq!(bench.offset() - from, len, "{what}");
    }
    // A stop there, and a start at a low address.
    bench.stop();
    bench.guest.rip = 0x1_2345;
    bench.wrmsr(IA32_RTIT_CTL, all.with_trace_en(true).into_bits());
    bench.sync(0x1_2300);
    // The whole trace from its one PSB on gives the addresses back.
    let ips: Vec<u64> = bench
        .packets_from(0)
        .into_iter()
        .filter_map(|packet| match packet {
            Tip(ip) | TipPge(ip) => ip,
            _ => None,
        })
        .collect();
    let mut expected = vec![0x1000];
    expected.extend(jumps.map(|(to, ..)| to));
    expected.extend([0x1_2345, 0x1_2300]);
    assert_eq!(ips, expected);
}

// covers: pt/far
#[test]
fn far_transfers() {
    let mut bench = Bench::start(skylake(), all_rings());
    for far in [
        Far::Jump,
        Far::Call,
        Far::Ret,
        Far::Iret,
        Far::Syscall,
        Far::Sysret,
        Far::Sysenter,
        Far::Sysexit,
    ] {
        let found = bench.packets(|b| b.branch(Flow::Far(far), 0x1000, 0x2000));
        assert_eq!(found, [Tip(Some(0x2000))], "{far:?}: the source is in the code");
    }
    for far in [INTERRUPT, Far::Exception, Far::SoftwareInterrupt] {
        let found = bench.packets(|b| {
            let _ = event(b, far, 3, 0x1234, 0x3000);
        });
        assert_eq!(found, [Fup(Some(0x1234)), Tip(Some(0x3000))], "{far:?}");
    }
    let found = bench.packets(|b| {
        b.guest.context.code = CodeSize::Bits32;
        b.branch(Flow::Far(Far::Ret), 0x3000, 0x4000);
    });
    let mode = ModeExec {
        mode: ExecMode::Bits32,
        interrupts: false,
    };
    assert_eq!(found, [mode, Tip(Some(0x4000))], "another code size");
    let pip = Pip {
        cr3: 0xA000,
        non_root: false,
    };
    // The second loads the same value.
    for why in ["a task switch", "and another"] {
        let found = bench.packets(|b| {
            b.guest.context.cr3 = 0xA000;
            b.loads_cr3 = true;
            let _ = event(b, INTERRUPT, 0x20, 0x4000, 0x5000);
        });
        assert_eq!(found, [Fup(Some(0x4000)), pip, Tip(Some(0x5000))], "{why}");
        let found = bench.packets(|b| b.branch(Flow::Far(Far::Jump), 0x4000, 0x5000));
        assert_eq!(found, [pip, Tip(Some(0x5000))], "{why} by JMP");
        bench.loads_cr3 = false;
    }
}

/// SDM Vol. 3C 33.4.2.7 "Paging Information (PIP) Packet", 33.4.2.15 "VMCS Packet", 33.5.2 "Using Intel PT in VMX Operation".
// covers: pt/vmx
#[test]
fn entries_and_exits_of_a_vmm() {
    const VMCS: u64 = 0x12_3000;
    let pip = |cr3, non_root| Pip { cr3, non_root };
    let mut bench = Bench::start(skylake(), all_rings());
    let found = bench.packets(|b| {
        b.guest.context.vmcs = Some(VMCS);
        change(b, Change::VmcsPointer);
    });
    assert_eq!(found, [Vmcs(VMCS)], "VMPTRLD");
    let mut transfer = |far, from, to, cr3, non_root, told| {
        bench.guest.context.cr3 = cr3;
        bench.guest.context.non_root = non_root;
        bench.loads_cr3 = told;
        let found = bench.packets(|b| {
            b.branch(Flow::Far(far), from, to);
            change(b, Change::Vmx { exit: None });
        });
        bench.loads_cr3 = false;
        found
    };
    let found = transfer(Far::VmEntry, 0x2000, 0x40_0000, 0x9000, true, true);
    assert_eq!(found, [pip(0x9000, true), Tip(Some(0x40_0000))], "VM entry: NR is 1");
    let found = transfer(Far::VmExit, 0x40_0010, 0x3000, 0x5000, false, true);
    let expected = [Fup(Some(0x40_0010)), pip(0x5000, false), Tip(Some(0x3000))];
    assert_eq!(found, expected, "VM exit: the source has no instruction of its own");
    let found = transfer(Far::VmEntry, 0x2000, 0x40_0000, 0x9000, false, false);
    assert_eq!(found, [Tip(Some(0x40_0000))], "concealed");
    let found = transfer(Far::VmExit, 0x40_0010, 0x3000, 0x5000, false, false);
    assert_eq!(found, [Fup(Some(0x40_0010)), Tip(Some(0x3000))], "concealed");
    // "Conceal VMX from PT" is the guest's affair, and no observer's.
    for observer in [false, true] {
        let mut bench = Bench::new(skylake());
        if observer {
            bench.pt.tell_cr3();
        }
        bench.guest.context.cr3 = 0x9000;
        bench.guest.context.vmcs = Some(VMCS);
        bench.guest.context.non_root = true;
        bench.guest.context.concealed = true;
        bench.begin(all_rings());
        let found = bench.packets_from(0);
        let told = [Vmcs(VMCS), pip(0x9000, true)].map(|packet| found.contains(&packet));
        assert_eq!(told, [observer; 2], "{found:?}");
        bench.guest.context.non_root = false;
        bench.guest.context.concealed = false;
        bench.guest.context.cr3 = 0x5000;
        let found = bench.packets(|b| b.branch(Flow::Far(Far::VmExit), 0x40_0010, 0x3000));
        assert_eq!(found.contains(&pip(0x5000, false)), observer, "{found:?}");
    }
    // PSB+ tells both anew.
    let mut bench = Bench::new(skylake());
    bench.guest.context.vmcs = Some(VMCS);
    bench.guest.context.non_root = true;
    bench.begin(all_rings());
    let found = bench.packets_from(0);
    assert!(
        found.contains(&Vmcs(VMCS)) && found.contains(&pip(0x5000, true)),
        "{found:?}"
    );
    // Where ring 0 is not traced, neither is the VMM.
    let mut bench = Bench::start(skylake(), all_rings().with_os(false));
    bench.guest.context.vmcs = Some(VMCS);
    assert_eq!(bench.packets(|b| change(b, Change::VmcsPointer)), [], "no ContextEn");
}

// covers: pt/filter-cpl
#[test]
fn rings() {
    let user = all_rings().with_os(false);
    let mut bench = Bench::start(skylake(), user);
    let mut go = |cpl, far, from, to| {
        bench.guest.context.cpl = cpl;
        let interest = bench.pt.interest(bench.guest.step);
        let found = bench.packets(|b| {
            if matches!(far, Far::Exception | Far::Interrupt) {
                let _ = event(b, far, 14, from, to);
            } else {
                b.branch(Flow::Far(far), from, to);
            }
        });
        (interest.transfers, interest.branches.any(), found)
    };
    let found = go(3, Far::Sysret, 0x1000, 0x40_0000);
    assert_eq!(
        found,
        (true, false, vec![mode64(), TipPge(Some(0x40_0000))]),
        "into ring 3"
    );
    let found = go(3, Far::Jump, 0x40_0000, 0x40_1000);
    assert_eq!(found, (true, true, vec![Tip(Some(0x40_1000))]), "within it");
    let found = go(0, Far::Exception, 0x40_1008, 0x2000);
    let left = vec![Fup(Some(0x40_1008)), TipPgd(None)];
    assert_eq!(found, (true, true, left), "out of it: no address of ring 0");
    assert_eq!(go(0, Far::Jump, 0x2000, 0x3000).2, [], "not traced");
    assert_eq!(go(3, Far::Iret, 0x3000, 0x40_1008).2, [TipPge(Some(0x40_1008))], "back");
    assert_eq!(go(0, Far::Syscall, 0x40_1010, 0x2000).2, [TipPgd(None)], "SYSCALL");

    let mut bench = Bench::start(skylake(), all_rings().with_user(false));
    bench.guest.context.cpl = 3;
    let found = bench.packets(|b| b.branch(Flow::Far(Far::Iret), 0x1000, 0x40_0000));
    assert_eq!(found, [TipPgd(None)], "OS alone");
}

/// What an observer does not want has no packets, whatever happens there.
// covers: trace/filter-process
#[test]
fn what_an_observer_does_not_want_is_left_out() {
    let mut bench = Bench::start(skylake(), all_rings());
    let admit = |bench: &mut Bench, admits, rip| {
        bench.guest.rip = rip;
        bench.packets(|b| b.pt.admit(admits, &mut b.guest))
    };
    assert_eq!(admit(&mut bench, true, 0x1000), [], "as it was");
    bench.branch(Flow::Cond { taken: true }, 0x1000, 0x1100);
    let found = admit(&mut bench, false, 0x1100);
    assert!(
        matches!(found[..], [ShortTnt(_), Fup(Some(0x1100)), TipPgd(None)]),
        "the branch before, and where it ends: {found:?}"
    );
    assert_eq!(admit(&mut bench, false, 0x1100), [], "as it was");
    let unseen = bench.packets(|b| {
        b.branch(Flow::Cond { taken: true }, 0x1100, 0x1200);
        b.branch(Flow::JumpInd, 0x1200, 0x1300);
        b.guest.context.cpl = 3;
        b.branch(Flow::Far(Far::Iret), 0x1300, 0x40_0000);
        b.guest.context.cr3 = 0x9000;
        change(b, Change::Cr3);
    });
    assert_eq!(unseen, [], "branches, rings and tables");
    let found = admit(&mut bench, true, 0x40_0010);
    assert_eq!(found.last(), Some(&TipPge(Some(0x40_0010))), "{found:?}");
    // Before a trace begins it is noted, and holds when it does.
    let mut bench = Bench::new(skylake());
    assert_eq!(admit(&mut bench, false, 0x1000), []);
    bench.begin(all_rings());
    assert!(!bench.packets_from(0).iter().any(|packet| matches!(packet, TipPge(_))));
    assert_eq!(admit(&mut bench, true, 0x1000).last(), Some(&TipPge(Some(0x1000))));
}

// covers: pt/filter-cr3
#[test]
fn cr3() {
    let mut bench = Bench::new(skylake());
    bench.wrmsr(IA32_RTIT_CR3_MATCH, 0x7000);
    bench.begin(all_rings().with_cr3_filter(true));
    assert!(
        !bench
            .packets_from(0)
            .iter()
            .any(|p| matches!(p, TipPge(_) | Pip { .. })),
        "another CR3"
    );
    let mut load = |cr3: u64| {
        bench.guest.context.cr3 = cr3;
        bench.guest.rip = 0x1234;
        bench.packets(|b| change(b, Change::Cr3))
    };
    let pip = |cr3| Pip { cr3, non_root: false };
    assert_eq!(load(0x8000), [], "still another");
    assert_eq!(load(0x7000), [pip(0x7000), mode64(), TipPge(Some(0x1234))], "the one");
    assert_eq!(
        load(0x7018),
        [pip(0x7000)],
        "bits 4:0 are not compared, and PIP has none"
    );
    assert_eq!(load(0x8000), [TipPgd(None)], "another");
    let mut bench = Bench::start(skylake(), all_rings());
    bench.guest.context.cr3 = 0x9000;
    assert_eq!(
        bench.packets(|b| change(b, Change::Cr3)),
        [pip(0x9000)],
        "without the filter PIP alone"
    );
    let mut bench = Bench::start(skylake(), all_rings().with_branch_en(false));
    assert_eq!(
        bench.packets(|b| change(b, Change::Cr3)),
        [pip(0x5000)],
        "without BranchEn too"
    );
    let mut bench = Bench::start(skylake(), all_rings().with_os(false));
    bench.guest.context.cpl = 3;
    bench.branch(Flow::Far(Far::Iret), 0x1000, 0x40_0000);
    assert_eq!(bench.packets(|b| change(b, Change::Cr3)), [], "no PIP without OS");
}

/// A bench with two ranges in use, which traces from 1000H on.
fn ranged(configuration: u16, ranges: [(u64, u64); 2], ctl: RtitCtl) -> Bench {
    let mut bench = Bench::new(skylake());
    for (n, (first, last)) in ranges.into_iter().enumerate() {
        bench.wrmsr(IA32_RTIT_ADDR0_A + 2 * n as u32, first);
        bench.wrmsr(IA32_RTIT_ADDR0_B + 2 * n as u32, last);
    }
    bench.begin(ctl.with_addr_cfg(configuration));
    bench
}

// covers: pt/filter-ip
#[test]
fn branches_into_and_out_of_ranges() {
    let mut bench = ranged(0x11, [(0x2000, 0x2FFF), (0x8000, 0x8000)], all_rings());
    let filter_en = |b: &Bench| RtitStatus::from_bits(b.rdmsr(IA32_RTIT_STATUS)).filter_en();
    assert!(!bench.packets_from(0).iter().any(|p| matches!(p, TipPge(_))));
    let cond = Flow::Cond { taken: true };
    for (flow, from, to, expected, within, why) in [
        (Flow::JumpInd, 0x1000, 0x1800, vec![], false, "outside"),
        (
            Flow::Jump,
            0x1800,
            0x2000,
            vec![mode64(), TipPge(Some(0x2000))],
            true,
            "the first address",
        ),
        (Flow::JumpInd, 0x2000, 0x2FFF, vec![Tip(Some(0x2FFF))], true, "the last"),
        (
            Flow::Jump,
            0x2FFF,
            0x3000,
            vec![TipPgd(Some(0x3000))],
            false,
            "out by a direct jump",
        ),
        (
            cond,
            0x3000,
            0x8000,
            vec![TipPge(Some(0x8000))],
            true,
            "into a range of one address",
        ),
        (
            cond,
            0x8000,
            0x8001,
            vec![TipPgd(Some(0x8001))],
            false,
            "out by a conditional one: no TNT bit",
        ),
        (
            Flow::CallInd,
            0x8001,
            0x2222,
            vec![TipPge(Some(0x2222))],
            true,
            "in by a call",
        ),
        (
            Flow::Ret,
            0x2222,
            0x8003,
            vec![TipPgd(Some(0x8003))],
            false,
            "out by its return",
        ),
        (Flow::JumpInd, 0x8003, 0x8000, vec![TipPge(Some(0x8000))], true, "in"),
        (
            Flow::JumpInd,
            0x8000,
            0x2100,
            vec![Tip(Some(0x2100))],
            true,
            "from range to range",
        ),
        (
            Flow::Far(Far::Jump),
            0x2100,
            0x7000,
            vec![TipPgd(Some(0x7000))],
            false,
            "out by a far jump",
        ),
        (
            Flow::Far(Far::Jump),
            0x7000,
            0x2100,
            vec![TipPge(Some(0x2100))],
            true,
            "in by one",
        ),
    ] {
        let found = bench.packets(|b| b.branch(flow, from, to));
        assert_eq!(found, expected, "{why}");
        assert_eq!(filter_en(&bench), within, "{why}: FilterEn");
    }
    let found = bench.packets(|b| {
        let _ = event(b, INTERRUPT, 0x20, 0x2104, 0x9000);
    });
    assert_eq!(
        found,
        [Fup(Some(0x2104)), TipPgd(Some(0x9000))],
        "out by an interrupt, in context"
    );
}

// covers: pt/filter-straight
#[test]
fn an_observer_sees_straight_line_code_walk_over_edges() {
    let mut bench = ranged(0x01, [(0x2000, 0x20FF), (0, 0)], all_rings());
    assert!(bench.pt.boundaries().is_empty(), "the guest's unit does not look");
    bench.pt.follow_edges();
    // The first instruction beyond an edge starts at one of fifteen addresses.
    let expected: Vec<u64> = (0x2000..0x200F).chain(0x2100..0x210F).collect();
    assert_eq!(bench.pt.boundaries(), expected);
    let generation = bench.pt.generation();
    let mut at = |address: u64| {
        bench.guest.rip = address;
        bench.guest.step += 1;
        bench.packets(|b| {
            let _ = b.pt.before(address, &mut b.guest);
        })
    };
    assert_eq!(
        at(0x2003),
        [mode64(), TipPge(Some(0x2003))],
        "an instruction lies across the edge"
    );
    assert_eq!(at(0x2006), [], "within");
    assert_eq!(at(0x20FF), [], "the last address");
    assert_eq!(at(0x2100), [TipPgd(Some(0x2100))], "out");
    assert_eq!(at(0x2103), [], "outside");
    assert_eq!(at(0x2000), [TipPge(Some(0x2000))], "in again");
    bench.stop();
    assert!(bench.pt.boundaries().is_empty());
    assert_ne!(bench.pt.generation(), generation);
}

/// SDM Vol. 3C 33.2.5.3 "Filtering by IP": detected when a taken branch or event lands; Table "TIP.PGE Packet Definition": any branch
/// instruction, control flow transfer or MOV CR3, or the WRMSR that enables.
// covers: pt/filter-landing
#[test]
fn ranges_count_where_execution_lands() {
    let range = [(0x2000, 0x20FF), (0, 0)];
    let filter_en = |b: &Bench| RtitStatus::from_bits(b.rdmsr(IA32_RTIT_STATUS)).filter_en();
    let [taken, not_taken] = [true, false].map(|taken| Flow::Cond { taken });
    let mut bench = ranged(0x01, range, all_rings());
    for (flow, from, to, expected, within, why) in [
        (
            not_taken,
            0x1FFE,
            0x2000,
            vec![],
            false,
            "walks in over a branch not taken",
        ),
        (
            taken,
            0x2002,
            0x2010,
            vec![mode64(), TipPge(Some(0x2010))],
            true,
            "lands in",
        ),
        (
            not_taken,
            0x20FE,
            0x2100,
            vec![],
            true,
            "walks out over a branch not taken",
        ),
        (not_taken, 0x2100, 0x2102, vec![], true, "is out, and traced"),
    ] {
        let found = bench.packets(|b| b.branch(flow, from, to));
        assert_eq!((found, filter_en(&bench)), (expected, within), "{why}");
    }
    // What was not taken outside is in the packet before the one of the branch that is.
    let found = bench.packets(|b| b.branch(Flow::JumpInd, 0x2102, 0x3000));
    let bits = found.first().map(|packet| match packet {
        ShortTnt(tnt) => tnt.bits(),
        _ => 0,
    });
    assert_eq!(
        (bits, found.last()),
        (Some(0b100), Some(&TipPgd(Some(0x3000)))),
        "{found:?}"
    );
    assert!(!filter_en(&bench));
    // MOV to CR3 within the range, and behind it.
    for (rip, expected) in [
        (0x2005, Some(TipPge(Some(0x2005)))),
        (0x2105, Some(TipPgd(Some(0x2105)))),
    ] {
        bench.guest.rip = rip;
        bench.guest.context.cr3 ^= 0x1000;
        let found = bench.packets(|b| change(b, Change::Cr3));
        assert_eq!(found.last().copied(), expected, "MOV to CR3 at {rip:#x}");
    }
}

// covers: pt/trace-stop
#[test]
fn trace_stop() {
    for (filter, outside, why) in [
        (false, false, "a branch enters"),
        (true, true, "while FilterEn is clear"),
    ] {
        let configuration = if filter { 0x12 } else { 0x02 };
        let mut bench = ranged(configuration, [(0x6000, 0x6FFF), (0x2000, 0x2FFF)], all_rings());
        // Straight-line code does not land there.
        let walked = bench.packets(|b| {
            b.branch(Flow::Cond { taken: false }, 0x5FFE, 0x6000);
            b.branch(Flow::Cond { taken: false }, 0x6000, 0x6002);
        });
        assert_eq!(walked, [], "{why}");
        let stopped = |b: &Bench| RtitStatus::from_bits(b.rdmsr(IA32_RTIT_STATUS)).stopped();
        assert!(!stopped(&bench), "{why}");
        let found = bench.packets(|b| {
            b.branch(Flow::JumpInd, 0x1000, 0x6002);
            b.branch(Flow::JumpInd, 0x6002, 0x2000);
        });
        let found: Vec<Packet> = found.into_iter().filter(|p| !matches!(p, ShortTnt(_))).collect();
        let expected = if outside {
            vec![TraceStop]
        } else {
            vec![TipPgd(Some(0x6002)), TraceStop]
        };
        assert_eq!(found, expected, "{why}");
        let status = RtitStatus::from_bits(bench.rdmsr(IA32_RTIT_STATUS));
        assert!(status.stopped() && !status.trigger_en(), "{why}");
        assert!(!status.filter_en(), "{why}: 33.4.2.9");
        assert_eq!(bench.packets(|b| b.stop()), [], "{why}: off until it is enabled again");
        bench.wrmsr(IA32_RTIT_STATUS, 0);
        bench.guest.rip = 0x2000;
        let ctl = all_rings().with_addr_cfg(configuration).with_trace_en(true);
        let found = bench.packets(|b| b.wrmsr(IA32_RTIT_CTL, ctl.into_bits()));
        assert_eq!(found.last(), Some(&TipPge(Some(0x2000))), "{why}: enabled again");
    }
    // In a context that is not traced a TraceStop range is entered without consequence.
    let mut bench = ranged(0x02, [(0x6000, 0x6FFF), (0, 0)], all_rings().with_os(false));
    assert_eq!(bench.packets(|b| b.branch(Flow::JumpInd, 0x1000, 0x6000)), []);
    assert!(!RtitStatus::from_bits(bench.rdmsr(IA32_RTIT_STATUS)).stopped());
    // Enabled within one.
    let mut bench = Bench::new(skylake());
    bench.wrmsr(IA32_RTIT_ADDR0_B, 0xFFFF);
    bench.begin(all_rings().with_addr_cfg(2));
    assert_eq!(bench.packets_from(0).last(), Some(&TraceStop));
}

// covers: pt/lip
#[test]
fn effective_and_linear_addresses() {
    for (model, tip) in [(&SKYLAKE_SERVER, 0x800), (&SNOWRIDGE, 0x1_0800)] {
        let mut bench = Bench::new(caps(model));
        bench.guest.context.code = CodeSize::Bits16;
        bench.guest.context.cs_base = 0x1_0000;
        bench.guest.rip = 0x10;
        // What ranges hold is what packets hold.
        bench.wrmsr(IA32_RTIT_ADDR0_A, tip);
        bench.wrmsr(IA32_RTIT_ADDR0_B, tip);
        bench.begin(all_rings().with_addr_cfg(1));
        let found = bench.packets(|b| {
            let record = b.record(Flow::JumpInd, 0x1_0010, 0x1_0800);
            let _ = b.pt.branches(&[record], &mut b.guest);
        });
        assert_eq!(found.last(), Some(&TipPge(Some(tip))), "{}", model.name);
        bench.pt.follow_edges();
        assert_eq!(bench.pt.boundaries()[0], 0x1_0800, "boundaries are linear");
    }
}

// covers: pt/ptwrite
#[test]
fn ptwrite() {
    let caps = caps(&SNOWRIDGE);
    let write = |size| Change::PtWrite {
        value: 0x1122_3344_5566_7788,
        size,
        at: 0x1230,
    };
    let ptw = |size, ip| {
        let value = if size == ItemSize::Four {
            0x5566_7788
        } else {
            0x1122_3344_5566_7788
        };
        Ptw { value, size, ip }
    };
    for (ctl, size, expected, why) in [
        (all_rings(), 8, vec![], "PTWEn is clear"),
        (
            all_rings().with_ptw_en(true),
            8,
            vec![ptw(ItemSize::Eight, false)],
            "eight bytes",
        ),
        (
            all_rings().with_ptw_en(true),
            4,
            vec![ptw(ItemSize::Four, false)],
            "four",
        ),
        (
            all_rings().with_ptw_en(true).with_fup_on_ptw(true),
            8,
            vec![ptw(ItemSize::Eight, true), Fup(Some(0x1230))],
            "FUPonPTW",
        ),
        (
            all_rings().with_ptw_en(true).with_branch_en(false),
            8,
            vec![ptw(ItemSize::Eight, false)],
            "without BranchEn",
        ),
        (
            all_rings().with_ptw_en(true).with_os(false),
            8,
            vec![],
            "out of context",
        ),
    ] {
        let mut bench = Bench::start(caps, ctl);
        assert_eq!(bench.packets(|b| change(b, write(size))), expected, "{why}");
    }
}

// covers: pt/power
#[test]
fn power_events() {
    let ctl = all_rings().with_pwr_evt_en(true).with_tsc_en(true);
    let pwre = |state, sub_state| Pwre {
        hardware: false,
        state,
        sub_state,
    };
    let mwait = Change::Mwait {
        hints: 0x21,
        extensions: 1,
    };
    let reported = Mwait {
        hints: 0x21,
        extensions: 1,
    };
    let exstop = [ExStop { ip: true }, Fup(Some(0x11FF))];
    let halted = vec![pwre(1, 0), exstop[0], exstop[1]];
    let waiting = vec![reported, pwre(3, 1), exstop[0], exstop[1]];
    for (what, rip, expected, state, store) in [
        (Change::Halt, 0x1200, halted, 1, false),
        (mwait, 0x1202, waiting.clone(), 3, true),
        (mwait, 0x1202, waiting, 3, false),
    ] {
        let mut bench = Bench::start(caps(&SNOWRIDGE), ctl);
        bench.guest.rip = rip;
        assert_eq!(bench.packets(|b| change(b, what)), expected, "{what:?}");
        bench.guest.step += 1_000_000_000;
        let now = bench.guest.step + 1;
        let woken = [
            Tsc(now),
            Cbr(22),
            Pwrx {
                last: state,
                deepest: state,
                reason: if store { 4 } else { 1 },
            },
        ];
        assert_eq!(bench.packets(|b| change(b, Change::Wake { store })), woken, "{what:?}");
        assert_eq!(bench.packets(|b| change(b, Change::Wake { store })), [], "once");
    }
    let mut bench = Bench::start(caps(&SNOWRIDGE), ctl.with_os(false));
    let found = bench.packets(|b| change(b, mwait));
    assert_eq!(
        found,
        [pwre(3, 1), ExStop { ip: false }],
        "out of context: neither hints nor address"
    );
    let mut bench = Bench::start(caps(&SNOWRIDGE), all_rings().with_tsc_en(true));
    assert_eq!(bench.packets(|b| change(b, Change::Halt)), [], "PwrEvtEn is clear");
    let found = bench.packets(|b| change(b, Change::Wake { store: false }));
    assert!(
        matches!(found[..], [Tsc(_), Cbr(22)]),
        "the time is reported after a sleep: {found:?}"
    );
}

// covers: pt/events
#[test]
fn event_trace() {
    let ctl = all_rings().with_event_en(true);
    let mut bench = Bench::start(everything(), ctl);
    let cfe = |kind, vector, ip| Cfe { kind, vector, ip };
    let found = bench.packets(|b| {
        let _ = event(b, INTERRUPT, 0x31, 0x1000, 0x2000);
    });
    assert_eq!(
        found,
        [cfe(1, 0x31, true), Fup(Some(0x1000)), Tip(Some(0x2000))],
        "an interrupt"
    );
    let found = bench.packets(|b| b.branch(Flow::Far(Far::Iret), 0x2008, 0x1000));
    assert_eq!(
        found,
        [cfe(2, 0, true), Fup(Some(0x2008)), Tip(Some(0x1000))],
        "its end"
    );
    let found = bench.packets(|b| {
        let _ = event(b, Far::Exception, 14, 0x1004, 0x2000);
    });
    let cr2 = Evd {
        kind: 0,
        value: 0xDEAD_0000,
    };
    assert_eq!(
        found,
        [cr2, cfe(1, 14, true), Fup(Some(0x1004)), Tip(Some(0x2000))],
        "a page fault"
    );
    bench.guest.context.interrupts = true;
    bench.guest.rip = 0x2010;
    let iflag = ModeExec {
        mode: ExecMode::Bits64,
        interrupts: true,
    };
    let found = bench.packets(|b| change(b, Change::Interrupts));
    assert_eq!(found, [iflag, Fup(Some(0x2010))], "STI");
    assert_eq!(bench.packets(|b| change(b, Change::Interrupts)), [], "STI again");
    let found = bench.packets(|b| change(b, Change::Shutdown));
    assert_eq!(found, [cfe(10, 0, true), Fup(Some(0x2010))], "shutdown");

    let mut bench = Bench::start(everything(), ctl.with_branch_en(false));
    let found = bench.packets(|b| {
        let _ = event(b, INTERRUPT, 0x31, 0x1000, 0x2000);
    });
    assert_eq!(found, [cfe(1, 0x31, true), Fup(Some(0x1000))], "without BranchEn");
    let mut bench = Bench::start(everything(), all_rings());
    bench.guest.context.interrupts = true;
    assert_eq!(bench.packets(|b| change(b, Change::Interrupts)), [], "EventEn is clear");
}

// covers: pt/init
#[test]
fn init_and_start_up() {
    let mut bench = Bench::start(everything(), all_rings().with_event_en(true));
    bench.guest.context = Context {
        cs_base: 0xFFFF_0000,
        ..Context::default()
    };
    bench.guest.rip = 0xFFF0;
    // Straight-line code has run since the last packet.
    let found = bench.packets(|b| change(b, Change::Init { at: 0x1234 }));
    let cfe = |kind, vector, ip| Cfe { kind, vector, ip };
    let pip = Pip {
        cr3: 0,
        non_root: false,
    };
    assert_eq!(
        found,
        [cfe(6, 0, true), Fup(Some(0x1234)), pip],
        "INIT: the target is not known yet"
    );
    let mut bsp = bench.clone();
    bench.guest.context.cs_base = 0x9_A000;
    bench.guest.rip = 0;
    let found = bench.packets(|b| change(b, Change::StartUp(0x9A)));
    let mode = ModeExec {
        mode: ExecMode::Bits16,
        interrupts: false,
    };
    assert_eq!(found, [cfe(5, 0x9A, false), mode, Tip(Some(0))], "SIPI");
    let found = bsp.packets(|b| {
        let record = b.record(Flow::JumpInd, 0xFFFF_FFF0, 0xFFFF_FF00);
        let _ = b.pt.branches(&[record], &mut b.guest);
    });
    assert_eq!(
        found,
        [mode, Tip(Some(0xFFF0)), Tip(Some(0xFF00))],
        "the bootstrap processor starts by itself"
    );
}

// covers: pt/init
#[test]
fn a_psb_waits_until_a_processor_starts_after_init() {
    let ctl = all_rings().with_mtc_en(true).with_mtc_freq(0).with_psb_freq(0);
    let mut bench = Bench::start(everything(), ctl);
    change(&mut bench, Change::Init { at: 0x1000 });
    let found = bench.packets(|b| {
        // More bytes than PSBFreq 0 leaves between two PSBs: 2048.
        for _ in 0..3000 {
            b.guest.step += 100;
            let _ = b.pt.tick(&mut b.guest);
        }
    });
    assert!(found.len() > 1024, "{}", found.len());
    assert_eq!(found.iter().find(|packet| !matches!(packet, Mtc(_))), None);
    bench.guest.rip = 0x9_A000;
    let found = bench.packets(|b| change(b, Change::StartUp(0x9A)));
    assert_eq!(found.first(), Some(&Tip(Some(0x9_A000))));
    assert!(found.contains(&Psb), "{found:?}");
}

/// The host's unit may be asked to trace a processor that waits already.
// covers: pt/init
#[test]
fn a_start_without_an_init_tells_where_the_processor_waited() {
    let mut bench = Bench::start(everything(), all_rings());
    bench.guest.rip = 0x9_A000;
    let found = bench.packets(|b| change(b, Change::StartUp(0x9A)));
    assert_eq!(found, [Fup(Some(0x1000)), Tip(Some(0x9_A000))]);
}

// covers: pt/tsx
#[test]
fn transactions() {
    let mut bench = Bench::start(skylake(), all_rings());
    let tsx = |in_tx, abort| ModeTsx { in_tx, abort };
    bench.guest.rip = 0x1006;
    let found = bench.packets(|b| change(b, Change::TransactionBegin { at: 0x1000 }));
    assert_eq!(found, [tsx(true, false), Fup(Some(0x1000))], "XBEGIN");
    bench.guest.rip = 0x1103;
    let found = bench.packets(|b| change(b, Change::TransactionCommit { at: 0x1100, steps: 9 }));
    assert_eq!(found, [tsx(false, false), Fup(Some(0x1100))], "XEND");
    bench.branch(Flow::JumpInd, 0x1103, 0x1200);
    change(&mut bench, Change::TransactionBegin { at: 0x1200 });
    bench.guest.rip = 0x1300;
    let abort = Change::TransactionAbort {
        from: 0x1208,
        cause: Abort::Explicit(1),
        steps: 3,
    };
    let found = bench.packets(|b| change(b, abort));
    assert_eq!(
        found,
        [tsx(false, true), Fup(Some(0x1208)), Tip(Some(0x1300))],
        "an abort"
    );
}

// covers: pt/overflow
#[test]
fn overflow() {
    let mut bench = Bench::start(skylake(), all_rings());
    bench.branch(Flow::Call, 0x1000, 0x1100);
    bench.branch(Flow::Cond { taken: true }, 0x1100, 0x1200);
    let found = bench.packets(|b| {
        let _ = b.pt.overflow(&mut b.guest);
        b.branch(Flow::Ret, 0x1200, 0x1002);
    });
    assert_eq!(
        found,
        [Ovf, Fup(Some(0x1200)), Tip(Some(0x1002))],
        "bits and calls are lost"
    );
    let mut bench = Bench::start(skylake(), all_rings().with_os(false));
    let found = bench.packets(|b| {
        let _ = b.pt.overflow(&mut b.guest);
        b.guest.context.cpl = 3;
        b.branch(Flow::Far(Far::Iret), 0x1000, 0x4000);
    });
    assert_eq!(
        found,
        [Ovf, mode64(), TipPge(Some(0x4000))],
        "out of context: TIP.PGE follows"
    );
}

// covers: pt/tnt-disable
#[test]
fn without_tnt() {
    let mut bench = Bench::start(everything(), all_rings().with_dis_tnt(true));
    let found = bench.packets(|b| {
        for _ in 0..100 {
            b.branch(Flow::Cond { taken: true }, 0x1000, 0x1000);
        }
        b.sync(0x2000);
    });
    assert_eq!(found, [Tip(Some(0x2000))]);
}

// covers: pt/pebs
#[test]
fn pebs_records_in_the_trace() {
    let mut bench = Bench::start(caps(&SNOWRIDGE), all_rings());
    bench.guest.rip = 0x1238;
    let record = TraceRecord {
        groups: vec![(4, vec![0x1234, 2]), (8, vec![7])],
    };
    let found = bench.packets(|b| {
        b.branch(Flow::Cond { taken: true }, 0x1234, 0x1238);
        let _ = b.pt.pebs(&record, &mut b.guest);
    });
    let size = ItemSize::Eight;
    let expected = [
        Bbp { size, kind: 4 },
        Bip {
            id: 0,
            size,
            value: 0x1234,
        },
        Bip { id: 1, size, value: 2 },
        Bbp { size, kind: 8 },
        Bip { id: 0, size, value: 7 },
        Bep { ip: true },
        Fup(Some(0x1238)),
    ];
    assert!(
        matches!(found[0], ShortTnt(_)),
        "the branch that had the event comes first"
    );
    assert_eq!(found[1..], expected);
    let mut bench = Bench::start(caps(&SNOWRIDGE), all_rings().with_os(false));
    let found = bench.packets(|b| {
        let _ = b.pt.pebs(&record, &mut b.guest);
    });
    assert_eq!(found, [], "out of context it is lost");
}

// covers: pt/inject
#[test]
fn a_pending_psb_is_injected() {
    let caps = caps(&SAPPHIRERAPIDS);
    let ctl = all_rings().with_inject_psb_pmi_on_enable(true);
    for (inject, pending) in [(true, true), (true, false), (false, true)] {
        let mut bench = Bench::new(caps);
        let status = RtitStatus::new().with_pend_psb(pending).with_packet_byte_cnt(100);
        bench.wrmsr(IA32_RTIT_STATUS, status.into_bits());
        bench.begin(ctl.with_inject_psb_pmi_on_enable(inject));
        let psb = bench.packets_from(0).contains(&Psb);
        assert_eq!(psb, inject && pending, "inject {inject}, pending {pending}");
        let status = RtitStatus::from_bits(bench.rdmsr(IA32_RTIT_STATUS));
        assert_eq!(
            status.pend_psb(),
            pending && !inject,
            "the bit is cleared by the packet"
        );
    }
}

// covers: pt/lbr
#[test]
fn last_branch_records_pause_on_the_first_generation() {
    for model in MODELS {
        let mut bench = Bench::new(caps(model));
        assert!(!bench.pt.pauses_lbr());
        let topa = all_rings().with_topa(true).with_trace_en(true);
        bench.wrmsr(IA32_RTIT_CTL, topa.into_bits());
        assert_eq!(bench.pt.pauses_lbr(), model.name == "broadwell", "{}", model.name);
    }
}
