//! The guest's part of a host's trace, packet by packet, and where it goes. What decoders make of whole traces is tested in
//! `guest-tests/pt-oracle`.

use pt_packet::{ExecMode, LastIp, MAX_LEN, Packet, Tnt, encode};
use x86::pt::RtitMaskPtrs;

use super::super::Served;
use super::*;

const HOST: u64 = 0x7_7000;
const CR3: u64 = 0x5000;

/// What a host's processor writes.
#[derive(Default)]
struct Recorded {
    bytes: Vec<u8>,
    last_ip: LastIp,
}

impl Recorded {
    fn put(&mut self, packets: &[Packet]) -> &mut Self {
        for packet in packets {
            let mut bytes = [0; MAX_LEN];
            let len = encode(packet, &mut self.last_ip, &mut bytes);
            self.bytes.extend(&bytes[..len]);
        }
        self
    }

    fn exit(&mut self, ip: u64) -> &mut Self {
        self.put(&[
            Packet::Fup(Some(ip)),
            Packet::Pip {
                cr3: HOST,
                non_root: false,
            },
            Packet::Tip(Some(0xffff_ffff_c012_3456)),
            Packet::ShortTnt(Tnt::from_bits(0b1011).unwrap()),
        ])
    }

    fn entry(&mut self, cr3: u64, ip: u64) -> &mut Self {
        self.put(&[
            Packet::Vmcs(0x9000),
            Packet::Pip { cr3, non_root: true },
            Packet::Tip(Some(ip)),
        ])
    }

    fn host_psb(&mut self, tsc: u64) -> &mut Self {
        self.put(&[
            Packet::Psb,
            Packet::Tsc(tsc),
            Packet::Tma { ctc: 7, fast: 3 },
            Packet::Cbr(33),
            Packet::Pip {
                cr3: HOST,
                non_root: false,
            },
            Packet::Vmcs(0x9000),
            Packet::ModeExec {
                mode: ExecMode::Bits64,
                interrupts: false,
            },
            Packet::Fup(Some(0xffff_ffff_c000_0000)),
            Packet::PsbEnd,
        ])
    }
}

fn jump() -> Packet {
    Packet::Tip(Some(0x2000))
}

/// A guest that stands at 1000H, traced by its host.
fn hosted(ctl: RtitCtl) -> Bench {
    let mut bench = Bench::start(everything(), ctl);
    bench.pt.host_begins(0, 0x100_0000, &mut bench.guest);
    bench
}

fn reported(ctl: RtitCtl, recorded: &Recorded) -> Vec<Packet> {
    let mut bench = hosted(ctl);
    bench.packets(|bench| {
        let _ = bench.pt.host_bytes(&recorded.bytes, &mut bench.guest);
    })
}

// covers: host-units/pt-strip
#[test]
fn a_guest_that_goes_on_needs_no_packet_and_one_that_is_led_away_two() {
    let fup = |ip| Packet::Fup(Some(ip));
    let tip = |ip| Packet::Tip(Some(ip));
    let pip = |cr3| Packet::Pip { cr3, non_root: false };
    let on = |from: u64, cr3: u64, to: u64| {
        let mut recorded = Recorded::default();
        recorded.entry(CR3, 0x1000).exit(from).entry(cr3, to).put(&[jump()]);
        reported(all_rings(), &recorded)
    };
    for (from, cr3, to, expected, why) in [
        (0x1010, CR3, 0x1010, vec![jump()], "where it was"),
        (0x1010, CR3, 0x1012, vec![jump()], "behind what the host has executed"),
        (
            0x1010,
            0x6000,
            0x1010,
            vec![jump()],
            "CR3 changes by instructions alone",
        ),
        (0x1010, 0x6000, 0x1013, vec![pip(0x6000), jump()], "behind MOV to CR3"),
        (
            0x1010,
            CR3,
            0x4010,
            vec![fup(0x1010), tip(0x4010), jump()],
            "somewhere else",
        ),
        (0x1010, CR3, 0x100e, vec![fup(0x1010), tip(0x100e), jump()], "backwards"),
        (
            0x1010,
            0x6000,
            0x4010,
            vec![fup(0x1010), pip(0x6000), tip(0x4010), jump()],
            "as a task switch",
        ),
    ] {
        assert_eq!(on(from, cr3, to), expected, "{why}");
    }
}

// covers: host-units/pt-strip
#[test]
fn what_leads_to_an_exit_is_told_from_the_guests_own_fups() {
    let abort = Packet::ModeTsx {
        in_tx: false,
        abort: true,
    };
    let commit = Packet::ModeTsx {
        in_tx: false,
        abort: false,
    };
    let fup = |ip| Packet::Fup(Some(ip));
    let tip = |ip| Packet::Tip(Some(ip));
    let mut recorded = Recorded::default();
    // An interrupt of the guest's own; a commit right before an exit; an abort by one.
    recorded.entry(CR3, 0x1000).put(&[fup(0x1004), tip(0x3000)]);
    recorded.put(&[commit, fup(0x3004)]).exit(0x3004).entry(CR3, 0x3004);
    recorded.put(&[abort]).exit(0x3008).entry(CR3, 0x3010).put(&[jump()]);
    let expected = [
        fup(0x1004),
        tip(0x3000),
        commit,
        fup(0x3004),
        abort,
        fup(0x3008),
        tip(0x3010),
        jump(),
    ];
    assert_eq!(reported(all_rings(), &recorded), expected);
}

// covers: host-units/pt-strip
#[test]
fn time_goes_on_while_the_host_runs() {
    let ctl = all_rings().with_tsc_en(true).with_mtc_en(true).with_cyc_en(true);
    let mut recorded = Recorded::default();
    recorded
        .host_psb(5000)
        .entry(CR3, 0x1000)
        .put(&[Packet::Tsc(0x200_0000)]);
    recorded
        .exit(0x1004)
        .put(&[Packet::Cyc(5), jump(), Packet::Mtc(9), Packet::Cyc(6)]);
    recorded.put(&[Packet::Tsc(!0), Packet::Cyc(7)]).entry(CR3, 0x1004);
    recorded.put(&[Packet::Cyc(1), jump()]);
    let reported = reported(ctl, &recorded);
    let at = |packet| {
        reported
            .iter()
            .position(|p| *p == packet)
            .unwrap_or_else(|| panic!("{packet:?}: {reported:?}"))
    };
    // The guest's PSB, where it stands, with the host's time and the guest's offset.
    assert_eq!(
        (reported[0], at(Packet::Tsc(0x100_0000 + 5000))),
        (Packet::Psb, 2),
        "{reported:?}"
    );
    assert_eq!(reported[3..5], [Packet::Tma { ctc: 7, fast: 3 }, Packet::Cbr(33)]);
    assert!(at(Packet::Fup(Some(0x1000))) < at(Packet::PsbEnd));
    let rest = &reported[at(Packet::PsbEnd) + 1..];
    let expected = [
        // RDTSC of a guest has the offset already.
        Packet::Tsc(0x200_0000),
        Packet::Cyc(5),
        Packet::Mtc(9),
        Packet::Cyc(6),
        Packet::Tsc(0xff_ffff),
        Packet::Cyc(8),
        jump(),
    ];
    assert_eq!(rest, expected);
}

// covers: host-units/pt-lost
#[test]
fn lost_packets_are_an_overflow_where_the_guest_is_found_again() {
    let resync = |ip: u64| [Packet::Ovf, Packet::Fup(Some(ip)), Packet::Psb];
    let mut after_overflow = Recorded::default();
    after_overflow.entry(CR3, 0x1000).put(&[jump(), Packet::Ovf]);
    // Whose it is nobody knows until a PIP says.
    after_overflow.put(&[Packet::Fup(Some(0x9000)), jump()]);
    let mut by_entry = Recorded::default();
    by_entry.bytes.clone_from(&after_overflow.bytes);
    by_entry.put(&[Packet::Pip {
        cr3: HOST,
        non_root: false,
    }]);
    by_entry.entry(CR3, 0x5000).put(&[jump()]);
    let found = reported(all_rings(), &by_entry);
    assert_eq!(found[..4], [&[jump()][..], &resync(0x5000)].concat(), "{found:?}");
    assert_eq!(found.last(), Some(&jump()));

    // Bytes that mean nothing: only a PSB goes on behind them.
    let mut garbage = Recorded::default();
    garbage.entry(CR3, 0x1000).put(&[jump()]);
    garbage.bytes.extend([0xff, 0xff, 0x05, 0xc9, 0x02, 0x00]);
    garbage
        .put(&[Packet::Tip(Some(0x1234_5678))])
        .host_psb(1)
        .entry(CR3, 0x6000);
    let found = reported(all_rings(), &garbage);
    assert_eq!(found[0], jump());
    assert!(found.windows(3).any(|w| w == resync(0x6000)), "{found:?}");

    // What the kernel had no room for.
    let mut bench = hosted(all_rings());
    let found = bench.packets(|bench| {
        bench.pt.host_lost();
        let mut recorded = Recorded::default();
        recorded.host_psb(1).entry(CR3, 0x7000);
        let _ = bench.pt.host_bytes(&recorded.bytes, &mut bench.guest);
    });
    assert_eq!(found.iter().filter(|p| **p == Packet::Ovf).count(), 1);
    assert!(found.windows(3).any(|w| w == resync(0x7000)), "{found:?}");
}

// covers: host-units/pt-join
#[test]
fn the_unit_goes_on_where_the_host_left_the_guest() {
    let mut bench = hosted(all_rings());
    let mut recorded = Recorded::default();
    recorded.host_psb(1).entry(CR3, 0x1000).put(&[jump()]).exit(0x2004);
    let found = bench.packets(|bench| {
        let _ = bench.pt.host_bytes(&recorded.bytes, &mut bench.guest);
        bench.guest.rip = 0x2006;
        let _ = bench.pt.host_ends(2, &mut bench.guest);
        assert!(!bench.pt.host_traces());
        // From here on as always: a branch, and TraceEn is cleared by a WRMSR at 3000H.
        bench.branch(Flow::JumpInd, 0x2008, 0x3000);
        bench.guest.rip = 0x3002;
        bench.stop();
    });
    let end = [
        jump(),
        Packet::Tip(Some(0x3000)),
        Packet::Fup(Some(0x3000)),
        Packet::TipPgd(None),
    ];
    assert_eq!(found[found.len() - 4..], end, "{found:?}");
    assert_eq!(found[0], Packet::Psb, "they join at a PSB");

    // A guest that is found elsewhere; and one whose exit is missing.
    let ends = |recorded: &Recorded| {
        let mut bench = hosted(all_rings());
        bench.packets(|bench| {
            let _ = bench.pt.host_bytes(&recorded.bytes, &mut bench.guest);
            bench.guest.rip = 0x8000;
            let _ = bench.pt.host_ends(0, &mut bench.guest);
        })
    };
    let elsewhere = ends(Recorded::default().entry(CR3, 0x1000).exit(0x1004));
    assert_eq!(elsewhere, [Packet::Fup(Some(0x1004)), Packet::Tip(Some(0x8000))]);
    let cut_off = ends(Recorded::default().entry(CR3, 0x1000).put(&[jump()]));
    assert_eq!(cut_off[..3], [jump(), Packet::Ovf, Packet::Fup(Some(0x8000))]);
}

/// So many indirect jumps of three bytes each, all in the guest.
fn jumps(count: usize) -> Recorded {
    let mut recorded = Recorded::default();
    recorded.entry(CR3, 0x1000);
    for n in 0..count {
        recorded.put(&[Packet::Tip(Some(0x1000 + 2 * (n as u64 & 0xff)))]);
    }
    recorded
}

// covers: host-units/pt-output
#[test]
fn regions_that_fill_ask_for_interrupts_and_end_the_trace() {
    const TABLE: u64 = 0x8000;
    let mut bench = Bench::new(everything());
    let entries: [u64; 4] = [
        0x1_0000 | 1 << 2, // INT
        0x1_1000,
        0x1_2000 | 1 << 2 | 1 << 4, // INT, STOP
        TABLE | 1,
    ];
    for (entry, at) in entries.iter().zip((TABLE as usize..).step_by(8)) {
        bench.guest.ram[at..at + 8].copy_from_slice(&entry.to_le_bytes());
    }
    bench.wrmsr(IA32_RTIT_OUTPUT_BASE, TABLE);
    bench.wrmsr(IA32_RTIT_OUTPUT_MASK_PTRS, 0x7f);
    let ctl = all_rings().with_topa(true).with_trace_en(true);
    bench.wrmsr(IA32_RTIT_CTL, ctl.into_bits());
    bench.pt.host_begins(0, 0, &mut bench.guest);
    let recorded = jumps(10_000);
    let mut interrupts = Vec::new();
    for chunk in recorded.bytes.chunks(100) {
        if bench.pt.host_bytes(chunk, &mut bench.guest).pmi {
            let ptrs = RtitMaskPtrs::from_bits(bench.rdmsr(IA32_RTIT_OUTPUT_MASK_PTRS));
            interrupts.push((ptrs.mask_or_table_offset(), bench.pt.take_topa_pmi()));
        }
    }
    assert_eq!(interrupts, [(1, true), (2, true)]);
    let status = bench.rdmsr(IA32_RTIT_STATUS);
    assert_eq!((status >> 2 & 1, status >> 5 & 1), (0, 1), "TriggerEn, Stopped");
    let ptrs = RtitMaskPtrs::from_bits(bench.rdmsr(IA32_RTIT_OUTPUT_MASK_PTRS));
    assert_eq!((ptrs.mask_or_table_offset(), ptrs.output_offset()), (2, 4096));
    assert!(!bench.pt.is_served());
    // The three regions are one stream.
    let mut tips = 0;
    for item in Decoder::new(&bench.guest.ram[0x1_0000..0x1_3000]) {
        match item {
            Ok(item) => tips += usize::from(matches!(item.packet, Packet::Tip(_))),
            Err(error) => assert!(error.offset > 0x2ff0, "{error}"),
        }
    }
    assert!(tips > 4000, "{tips}");
    let _ = bench.pt.host_ends(0, &mut bench.guest);
    bench.wrmsr(IA32_RTIT_CTL, 0);
}

// covers: host-units/pt-served
#[test]
fn a_host_traces_both_rings_and_what_its_tracer_can() {
    let bits = RtitCtl::new().with_branch_en(true).with_tsc_en(true).with_mtc_en(true);
    let served = Served {
        bits,
        mtc_frequencies: 1 << 3,
        cyc_thresholds: 1,
        psb_frequencies: 1 << 2,
        ranges: 1,
        lip: false,
    };
    let caps = caps(&SAPPHIRERAPIDS);
    let range = |uses: u16| all_rings().with_addr_cfg(uses);
    for (ctl, takes, why) in [
        (all_rings(), true, "both rings"),
        (
            all_rings().with_topa(true).with_dis_retc(true),
            true,
            "the unit's output",
        ),
        (all_rings().with_user(false), false, "one ring alone"),
        (all_rings().with_os(false), false, "one ring alone"),
        (
            all_rings().with_cr3_filter(true),
            false,
            "CR3 is where no IP is reported",
        ),
        (all_rings().with_mtc_en(true).with_mtc_freq(3), true, "MTC"),
        (all_rings().with_mtc_en(true).with_mtc_freq(5), false, "not so often"),
        (all_rings().with_mtc_freq(5), true, "a field without its bit"),
        (all_rings().with_psb_freq(2), true, "PSB"),
        (all_rings().with_psb_freq(3), false, "not so often"),
        (all_rings().with_cyc_en(true), false, "it has no CYC"),
        (all_rings().with_ptw_en(true), false, "it has no PTW"),
        (range(1), true, "a filter"),
        (range(0x11), false, "one more than there are"),
        (range(2), false, "the host's own code would stop it"),
    ] {
        assert_eq!(served.takes(ctl, &caps), takes, "{why}: {ctl:?}");
    }
    let linear = PtCaps {
        ecx: caps.ecx | 1 << 31,
        ..caps
    };
    assert!(!served.takes(all_rings(), &linear), "IPs of another kind");

    let mut bench = Bench::start(caps, all_rings());
    assert!(!bench.pt.is_served(), "by nobody");
    bench.pt.serve(Some(served));
    assert!(bench.pt.is_served());
    bench.stop();
    assert!(!bench.pt.is_served(), "nothing to trace");
}

// covers: host-units/pt-strip
#[test]
fn filters_of_the_hosts_switch_packets_on_and_off() {
    let ctl = all_rings().with_addr_cfg(1);
    let mut bench = Bench::new(everything());
    bench.wrmsr(IA32_RTIT_ADDR0_A, 0x1000);
    bench.wrmsr(IA32_RTIT_ADDR0_A + 1, 0x1fff);
    bench.begin(ctl);
    assert_eq!(bench.pt.filter(), [(0x1000, 0x1fff)]);
    bench.pt.host_begins(0, 0, &mut bench.guest);
    let mut recorded = Recorded::default();
    let pge = |ip| Packet::TipPge(Some(ip));
    let pgd = |ip| Packet::TipPgd(Some(ip));
    let out_of_sight = [
        Packet::Pip {
            cr3: HOST,
            non_root: false,
        },
        Packet::Vmcs(0x9000),
        Packet::Pip {
            cr3: CR3,
            non_root: true,
        },
    ];
    recorded.put(&[
        Packet::Pip {
            cr3: CR3,
            non_root: true,
        },
        pge(0x1000),
        pgd(0x2000),
    ]);
    // An exit and an entry where nothing is traced, and the way back.
    recorded
        .put(&out_of_sight)
        .put(&[pge(0x1800), Packet::Tip(Some(0x1900))]);
    // An exit where something is, and the guest goes on elsewhere.
    recorded.put(&[Packet::Fup(Some(0x1904))]).put(&out_of_sight);
    recorded.put(&[pge(0x1a00)]);
    let reported = bench.packets(|bench| {
        let _ = bench.pt.host_bytes(&recorded.bytes, &mut bench.guest);
    });
    let expected = [
        pgd(0x2000),
        pge(0x1800),
        Packet::Tip(Some(0x1900)),
        Packet::Fup(Some(0x1904)),
        Packet::Tip(Some(0x1a00)),
    ];
    assert_eq!(reported, expected);
}
