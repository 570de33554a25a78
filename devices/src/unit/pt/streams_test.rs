//! Properties of whole streams: PSBs, time, snapshots, and what random registers and tables do.

use super::super::PtState;
use super::super::output::{GuestMemory, Writer};
use super::*;
use x86::pt::RtitStatus;
use x86::watch::{Change, EventRecord, Far};

/// Numbers that look random and are the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 16) % n
    }
}

/// A `Watch` callback, and where the processor stands when it is said.
#[derive(Clone)]
enum Word {
    Branches(Vec<BranchRecord>),
    Event(EventRecord),
    Change(Change),
    Before(u64),
    Tick,
}

#[derive(Clone)]
struct Said {
    word: Word,
    context: Context,
    rip: u64,
    step: u64,
}

/// A program that does everything, as words.
fn program(random: &mut Random, words: usize, batch: u64) -> Vec<Said> {
    let mut context = Guest::default().context;
    let (mut ip, mut step) = (0x1000u64, 1_000_000u64);
    let mut calls = Vec::new();
    let near = [
        Flow::Cond { taken: true },
        Flow::Cond { taken: false },
        Flow::Cond { taken: true },
        Flow::Jump,
        Flow::JumpInd,
        Flow::Call,
        Flow::CallInd,
        Flow::Ret,
    ];
    let mut said = Vec::new();
    for _ in 0..words {
        let record = |flow: Flow, from, to, step| BranchRecord {
            from,
            to,
            step,
            flow: flow.code(),
            length: 2,
            ..BranchRecord::default()
        };
        let word = match random.below(20) {
            0 => {
                context.cpl = if random.below(2) == 0 { 0 } else { 3 };
                context.interrupts = random.below(2) == 0;
                step += 1 + random.below(50);
                let (from, far) = (ip, random.below(4));
                ip = 0x1000 + random.below(0x8000);
                match far {
                    0 => Word::Branches(vec![record(Flow::Far(Far::Iret), from, ip, step)]),
                    1 => Word::Branches(vec![record(Flow::Far(Far::Syscall), from, ip, step)]),
                    _ => Word::Event(EventRecord {
                        branch: record(Flow::Far(Far::Exception), from, ip, step),
                        vector: 14,
                        debug: false,
                        error: Some(0),
                        address: Some(random.next()),
                    }),
                }
            }
            1 => {
                step += 1 + random.below(1000);
                Word::Change(match random.below(6) {
                    0 => {
                        context.cr3 = random.below(4) << 12;
                        Change::Cr3
                    }
                    1 => Change::Halt,
                    2 => {
                        step += random.below(10_000_000);
                        Change::Wake { store: false }
                    }
                    3 => Change::PtWrite {
                        value: random.next(),
                        size: 8,
                        at: ip,
                    },
                    4 => Change::Mwait {
                        hints: 0x20,
                        extensions: 0,
                    },
                    _ => Change::Interrupts,
                })
            }
            2 => Word::Before(ip),
            3 => Word::Tick,
            _ => {
                let count = 1 + random.below(batch);
                let records = (0..count).map(|_| {
                    // An IRET that changes nothing of the context is among others.
                    let flow = match random.below(24) {
                        0 => Flow::Far(Far::Iret),
                        _ => near[random.below(8) as usize],
                    };
                    let from = ip + random.below(30);
                    ip = match flow {
                        Flow::Cond { taken: false } => from + 2,
                        Flow::Ret => calls.pop().unwrap_or(0x4000),
                        _ => 0x1000 + random.below(0x8000),
                    };
                    if matches!(flow, Flow::Call | Flow::CallInd) {
                        calls.push(from + 2);
                    }
                    step += 1 + random.below(40);
                    record(flow, from, ip, step)
                });
                Word::Branches(records.collect())
            }
        };
        said.push(Said {
            word,
            context,
            rip: ip,
            step,
        });
    }
    said
}

fn say(pt: &mut Pt, guest: &mut Guest, said: &Said) {
    guest.context = said.context;
    guest.rip = said.rip;
    guest.step = said.step;
    let _ = match &said.word {
        Word::Branches(records) => pt.branches(records, guest),
        Word::Event(event) => pt.event(event, guest),
        Word::Change(change) => pt.change(*change, guest),
        Word::Before(address) => pt.before(*address, guest),
        Word::Tick => pt.tick(guest),
    };
}

/// Hands branches over as an executor does to whom runs are allowed: in batches that end where the unit's interest says, and
/// anywhere else.
fn say_in_runs(pt: &mut Pt, guest: &mut Guest, said: &Said, random: &mut Random, runs: &mut u64) {
    let Word::Branches(records) = &said.word else {
        say(pt, guest, said);
        return;
    };
    let mut records = records.as_slice();
    while let Some(first) = records.first() {
        guest.context = said.context;
        // Before the first of them has retired.
        guest.step = first.step - 1;
        let interest = pt.interest(guest.step);
        let far = first.flow > Flow::Ret.code();
        if interest.run == 0 || far {
            let count = if far { 1 } else { 1 + random.below(3) as usize };
            let count = count.min(records.iter().take_while(|r| far || r.flow <= Flow::Ret.code()).count());
            let (now, rest) = records.split_at(count);
            let word = Word::Branches(now.to_vec());
            let (rip, step) = (now[count - 1].to, now[count - 1].step);
            say(
                pt,
                guest,
                &Said {
                    word,
                    context: said.context,
                    rip,
                    step,
                },
            );
            records = rest;
            continue;
        }
        let end = guest.step.saturating_add(interest.instructions);
        let room = random.below(400).clamp(1, interest.branch_room.into()) as usize;
        let (mut batch, mut run, mut last) = (Vec::new(), 1u32, *first);
        let mut limit = 1;
        while let Some((r, rest)) = records.split_first() {
            let among = r.flow <= Flow::Ret.code() || r.flow == Flow::Far(Far::Iret).code();
            if batch.len() >= room || r.step > end || !among {
                break;
            }
            records = rest;
            let packed = |flow: u8, run: u32| {
                let [a, b, c, _] = run.to_le_bytes();
                BranchRecord {
                    flow,
                    run: [a, b, c],
                    ..*r
                }
            };
            match r.flow {
                taken @ (0 | 1) => {
                    (run, last) = (run << 1 | u32::from(taken), *r);
                    if run >> limit != 0 {
                        *runs += u64::from(limit > 1);
                        batch.push(packed(BranchRecord::RUN, run));
                        (run, limit) = (1, interest.run);
                    }
                }
                2 => {}
                flow => {
                    *runs += u64::from(run > 1);
                    batch.push(packed(flow, run));
                    run = 1;
                }
            }
        }
        // Whoever hands over ends the run that waits, a while after its last branch.
        let next = records.first().map_or(said.step, |r| r.step - 1);
        guest.step = next.min(end);
        if run != 1 {
            let [a, b, c, _] = run.to_le_bytes();
            batch.push(BranchRecord {
                flow: BranchRecord::RUN,
                run: [a, b, c],
                step: guest.step,
                ..last
            });
        }
        guest.rip = last.to;
        let _ = pt.branches(&batch, guest);
        if guest.step == end {
            let _ = pt.tick(guest);
        }
    }
    guest.rip = said.rip;
    guest.step = said.step;
}

/// Conditional branches that come as bits of other records are the same trace to the byte: packets do not tell how the executor
/// has recorded.
// covers: pt/runs
#[test]
fn branches_in_runs_make_the_same_trace() {
    let coarse = all_rings().with_tsc_en(true).with_mtc_en(true).with_mtc_freq(9);
    let timed = all_rings().with_tsc_en(true).with_mtc_en(true).with_cyc_en(true);
    for (ctl, seed) in [all_rings(), all_rings().with_tsc_en(true), coarse, timed]
        .into_iter()
        .flat_map(|ctl| [0, 1, 3].map(|freq| ctl.with_psb_freq(freq)))
        .zip(1..)
    {
        let words = program(&mut Random(seed), 1500, 300);
        let mut one = Bench::start(skylake(), ctl);
        words.iter().for_each(|said| say(&mut one.pt, &mut one.guest, said));
        let (mut other, mut random, mut runs) = (Bench::start(skylake(), ctl), Random(seed), 0);
        for said in &words {
            say_in_runs(&mut other.pt, &mut other.guest, said, &mut random, &mut runs);
        }
        // Where each packet is to have its time there are none.
        assert_eq!(runs > 1000, !ctl.cyc_en(), "{ctl:?}: {runs}");
        assert_eq!(one.offset(), other.offset(), "{ctl:?}");
        let bytes = |b: &Bench| b.guest.ram[RANGE as usize..][..b.offset()].to_vec();
        let differ = bytes(&one).iter().zip(&bytes(&other)).position(|(a, b)| a != b);
        assert_eq!(differ, None, "{ctl:?} of {}", one.offset());
    }
}

fn full() -> RtitCtl {
    all_rings()
        .with_tsc_en(true)
        .with_mtc_en(true)
        .with_mtc_freq(3)
        .with_cyc_en(true)
        .with_ptw_en(true)
        .with_fup_on_ptw(true)
        .with_pwr_evt_en(true)
        .with_event_en(true)
}

// covers: pt/psb-period
#[test]
fn psb_comes_every_period() {
    for freq in 0..6 {
        let mut bench = Bench::start(skylake(), all_rings().with_psb_freq(freq));
        let mut random = Random(7);
        for said in program(&mut random, 6000, 200) {
            say(&mut bench.pt, &mut bench.guest, &said);
            if bench.offset() > 0x3_0000 {
                break;
            }
        }
        let bytes = &bench.guest.ram[RANGE as usize..][..bench.offset()];
        let psbs: Vec<usize> = Decoder::new(bytes)
            .map(|item| item.unwrap())
            .filter(|item| item.packet == Packet::Psb)
            .map(|item| item.offset)
            .collect();
        let period = 2048usize << freq;
        assert!(psbs.len() > 0x3_0000 / period - 2, "freq {freq}");
        for pair in psbs.windows(2) {
            let distance = pair[1] - pair[0];
            assert!((period..period + 600).contains(&distance), "freq {freq}: {distance}");
        }
    }
}

fn skylake() -> PtCaps {
    caps(&SKYLAKE_SERVER)
}

// covers: pt/time
#[test]
fn mtc_packets_are_ticks_of_the_crystal_clock() {
    for (model, ticks) in [(&SKYLAKE_SERVER, 84u64), (&ICELAKE_SERVER, 96), (&ALDERLAKE, 83)] {
        for freq in [0u8, 3, 6] {
            let ctl = all_rings().with_tsc_en(true).with_mtc_en(true).with_mtc_freq(freq);
            let mut bench = Bench::start(caps(model), ctl);
            let period = ticks << freq;
            let from = bench.offset();
            let start = bench.guest.step;
            let mut expected = Vec::new();
            for n in 1..=400u64 {
                let last = bench.guest.step;
                bench.guest.step = start + n * period / 3;
                for step in last + 1..=bench.guest.step {
                    // The counter is the step count over the ratio: a bit toggles when it reaches a multiple.
                    if step % period == 0 {
                        expected.push(Packet::Mtc((step / period) as u8));
                    }
                }
                let _ = bench.pt.tick(&mut bench.guest);
            }
            let found: Vec<Packet> = bench.packets_from(from);
            let found: Vec<_> = found.into_iter().filter(|p| matches!(p, Packet::Mtc(_))).collect();
            assert_eq!(found, expected, "{} at {freq}", model.name);
            assert!(
                bench.pt.interest(bench.guest.step).instructions <= 255 * period,
                "none is missed"
            );
        }
    }
}

// covers: pt/time
#[test]
fn a_long_gap_is_told_as_a_time() {
    let ctl = all_rings().with_tsc_en(true).with_mtc_en(true);
    let mut bench = Bench::start(skylake(), ctl);
    bench.guest.step += 84 * 300;
    let step = bench.guest.step;
    let found = bench.packets(|b| {
        let _ = b.pt.tick(&mut b.guest);
    });
    assert!(matches!(found[..], [Packet::Tsc(tsc), Packet::Tma { .. }, Packet::Cbr(_)] if tsc == step));
}

/// As wall time moves it. What ports take is little, and a write that sets it back is seen at the next TSC packet.
// covers: pt/time
#[test]
fn a_tsc_that_leaps_is_told_at_once() {
    let ctl = all_rings().with_tsc_en(true).with_mtc_en(true);
    for (ahead, reported) in [
        (1 << 16, true),
        (1 << 40, true),
        ((1 << 16) - 1, false),
        (1u64.wrapping_neg(), false),
    ] {
        let mut bench = Bench::start(skylake(), ctl);
        bench.guest.tsc_offset = ahead;
        let now = bench.guest.step.wrapping_add(ahead);
        let found = bench.packets(|b| {
            let _ = b.pt.change(Change::Interrupts, &mut b.guest);
            let _ = b.pt.change(Change::Interrupts, &mut b.guest);
        });
        match found[..] {
            [Packet::Tsc(tsc), Packet::Tma { .. }, Packet::Cbr(_)] => assert!(reported && tsc == now, "{ahead}: {tsc}"),
            _ => assert!(!reported && found.is_empty(), "{ahead}: {found:?}"),
        }
    }
}

// covers: pt/time
#[test]
fn tsc_packets_follow_the_tsc() {
    let mut bench = Bench::new(skylake());
    bench.guest.tsc_offset = 1 << 60;
    bench.begin(all_rings().with_tsc_en(true));
    let tsc = (1u64 << 60) + bench.guest.step;
    assert!(
        bench.packets_from(0).contains(&Packet::Tsc(tsc & ((1 << 56) - 1))),
        "bits 55:0"
    );
    bench.guest.tsc_offset = 500;
    let _ = bench.pt.change(Change::Halt, &mut bench.guest);
    let _ = bench.pt.change(Change::Wake { store: false }, &mut bench.guest);
    let tsc = bench.guest.step + 500;
    assert!(
        bench.packets_from(0).contains(&Packet::Tsc(tsc)),
        "a write to it is seen"
    );
}

// covers: pt/cyc
#[test]
fn cycles_add_up() {
    for thresh in [0u8, 1, 4, 8] {
        let ctl = all_rings().with_cyc_en(true).with_cyc_thresh(thresh);
        let mut bench = Bench::start(skylake(), ctl);
        let start = bench.guest.step;
        let mut reported = 0;
        let mut random = Random(11);
        let from = bench.offset();
        for _ in 0..500 {
            bench.guest.step += random.below(100);
            bench.branch(Flow::JumpInd, 0x1000, 0x2000);
        }
        let elapsed = bench.guest.step - start;
        let least = if thresh == 0 { 1 } else { 1 << (thresh - 1) };
        for pair in bench.packets_from(from).windows(2) {
            if let Packet::Cyc(cycles) = pair[0] {
                assert!(cycles >= least, "threshold {thresh}: {cycles}");
                assert!(matches!(pair[1], Packet::Tip(_)), "it goes before what it times");
                reported += cycles;
            }
        }
        assert!(
            reported <= elapsed && elapsed - reported < least,
            "threshold {thresh}: {reported} of {elapsed}"
        );
    }
}

// covers: pt/stream-decodes
#[test]
fn every_byte_is_part_of_a_packet() {
    for seed in 1..20 {
        let mut random = Random(seed * 0x9E37_79B9);
        let mut bench = Bench::new(everything());
        bench.wrmsr(IA32_RTIT_ADDR0_A, 0x2000);
        bench.wrmsr(IA32_RTIT_ADDR0_B, 0x5FFF);
        let ctl = full().with_addr_cfg(random.below(2) as u16);
        bench.begin(ctl.with_cyc_en(seed % 2 == 0));
        for said in program(&mut random, 400, 60) {
            say(&mut bench.pt, &mut bench.guest, &said);
        }
        bench.stop();
        let bytes = &bench.guest.ram[RANGE as usize..][..bench.offset()];
        let mut on = false;
        let mut count = 0;
        for item in Decoder::new(bytes) {
            match item.expect("a packet").packet {
                Packet::TipPge(_) => {
                    assert!(!on, "PacketEn rises once");
                    on = true;
                }
                Packet::TipPgd(_) => {
                    assert!(on, "PacketEn falls once");
                    on = false;
                }
                Packet::Tip(_) | Packet::ShortTnt(_) | Packet::LongTnt(_) => assert!(on, "PacketEn is set"),
                _ => {}
            }
            count += 1;
        }
        assert!(!on && count > 100);
    }
}

// covers: pt/snapshot
#[test]
fn a_snapshot_at_every_record_gives_the_same_bytes() {
    for (ctl, freq) in [(full(), 0), (all_rings(), 1)] {
        let mut random = Random(99);
        let words = program(&mut random, 2000, 1);
        let run = |snapshot: bool| {
            let mut bench = Bench::new(everything());
            bench.wrmsr(IA32_RTIT_ADDR0_A, 0x2000);
            bench.wrmsr(IA32_RTIT_ADDR0_B, 0x7FFF);
            bench.begin(ctl.with_psb_freq(freq).with_addr_cfg(1));
            for said in &words {
                say(&mut bench.pt, &mut bench.guest, said);
                if snapshot {
                    let state: PtState = bench.pt.state();
                    bench.pt = Pt::new(everything());
                    bench.pt.set_state(state.clone());
                    assert!(bench.pt.state() == state);
                }
            }
            bench.stop();
            bench
        };
        let (plain, restored) = (run(false), run(true));
        assert!(
            plain.offset() > 3000,
            "there is something to compare: {}",
            plain.offset()
        );
        assert!(plain.pt.state() == restored.pt.state());
        assert!(plain.guest.ram == restored.guest.ram);
    }
}

// covers: pt/batches
#[test]
fn batches_do_not_matter() {
    let mut random = Random(5);
    let words = program(&mut random, 500, 100);
    let run = |size: usize| {
        let mut bench = Bench::start(skylake(), all_rings().with_mtc_en(true).with_tsc_en(true));
        for said in &words {
            match &said.word {
                Word::Branches(records) => {
                    for part in records.chunks(size) {
                        let word = Word::Branches(part.to_vec());
                        // Where the processor stands at the end of the part.
                        let last = part.last().unwrap();
                        let said = Said {
                            word,
                            rip: last.to,
                            step: last.step,
                            ..said.clone()
                        };
                        say(&mut bench.pt, &mut bench.guest, &said);
                    }
                }
                _ => say(&mut bench.pt, &mut bench.guest, said),
            }
        }
        bench.stop();
        bench.packets_from(0)
    };
    let whole = run(1000);
    assert!(whole.iter().filter(|p| **p == Packet::Psb).count() > 3);
    for size in [1, 7, 64] {
        assert!(run(size) == whole, "{size}");
    }
}

// covers: pt/host-sink
#[test]
fn an_observer_s_unit_writes_to_the_host() {
    let mut random = Random(3);
    let words = program(&mut random, 300, 50);
    let mut guest = Guest::default();
    let mut bench = Bench::start(everything(), full());
    let mut host = Pt::with_output(everything(), Vec::new());
    let mut writer = Pt::with_output(everything(), Writer::new(Vec::new()));
    let ctl = full().with_trace_en(true).into_bits();
    let _ = host.write_msr(IA32_RTIT_CTL, ctl, &mut guest).unwrap();
    let _ = writer.write_msr(IA32_RTIT_CTL, ctl, &mut guest).unwrap();
    for said in &words {
        say(&mut bench.pt, &mut bench.guest, said);
        guest.context = said.context;
        guest.rip = said.rip;
        guest.step = said.step;
        macro_rules! both {
            ($pt:ident) => {
                let _ = match &said.word {
                    Word::Branches(records) => $pt.branches(records, &mut guest),
                    Word::Event(event) => $pt.event(event, &mut guest),
                    Word::Change(change) => $pt.change(*change, &mut guest),
                    Word::Before(address) => $pt.before(*address, &mut guest),
                    Word::Tick => $pt.tick(&mut guest),
                };
            };
        }
        both!(host);
        both!(writer);
    }
    let bytes = &bench.guest.ram[RANGE as usize..][..bench.offset()];
    assert!(bytes.len() > 1000);
    assert!(host.output() == bytes, "the same bytes as the guest's own unit");
    assert!(writer.output().get_mut() == bytes);
    assert!(guest.ram.iter().all(|&byte| byte == 0), "and none in guest memory");
}

// covers: pt/host-sink
#[test]
fn a_sink_that_fails_ends_the_trace() {
    let mut guest = Guest::default();
    let full: &mut [u8] = &mut [0; 8];
    let mut pt = Pt::with_output(skylake(), Writer::new(full));
    let ctl = all_rings().with_trace_en(true).into_bits();
    let _ = pt.write_msr(IA32_RTIT_CTL, ctl, &mut guest).unwrap();
    assert!(RtitStatus::from_bits(pt.read_msr(IA32_RTIT_STATUS).unwrap()).error());
    assert!(pt.output().take_error().is_some());
}

// covers: pt/fuzz
#[test]
fn random_registers_and_tables_harm_nothing() {
    let rounds = if std::env::var_os("MINIVMM_FULL").is_some() {
        20_000
    } else {
        400
    };
    let mut ended = [0; 3];
    for round in 0..rounds {
        let mut random = Random((round + 1u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let caps = match random.below(7) {
            6 => everything(),
            n => caps(MODELS[n as usize]),
        };
        let mut bench = Bench::new(caps);
        // A table of entries that are nearly right.
        for slot in bench.guest.ram[0x8000..0x9000].chunks_exact_mut(8) {
            let entry = match random.below(8) {
                0 => random.next(),
                1 => 0x8001,
                2 => 0x4_0000 | random.below(1 << 11),
                _ => random.below(0x100) << 12 | random.below(4) << 6 | random.below(2) << 2 | random.below(2) << 4,
            };
            slot.copy_from_slice(&entry.to_le_bytes());
        }
        let words = program(&mut random, 60, 80);
        for said in &words {
            let msr = match random.below(6) {
                0 => IA32_RTIT_OUTPUT_BASE,
                1 => IA32_RTIT_OUTPUT_MASK_PTRS,
                2 => IA32_RTIT_STATUS,
                3 => IA32_RTIT_ADDR0_A + random.below(8) as u32,
                4 => IA32_RTIT_CR3_MATCH,
                _ => IA32_RTIT_CTL,
            };
            let value = match random.below(5) {
                0 => random.next(),
                1 => 1 << random.below(64),
                2 => 0,
                _ => match msr {
                    IA32_RTIT_CTL => all_rings()
                        .with_trace_en(true)
                        .with_topa(random.below(3) != 0)
                        .with_addr_cfg(random.below(2) as u16 * 0x12)
                        .into_bits(),
                    IA32_RTIT_OUTPUT_BASE => 0x8000,
                    _ => random.below(0x10) << 7 | random.below(0x1000) << 32,
                },
            };
            let _ = bench.pt.write_msr(msr, value, &mut bench.guest);
            say(&mut bench.pt, &mut bench.guest, said);
            for bound in bench.pt.boundaries().windows(2) {
                assert!(bound[0] < bound[1]);
            }
        }
        let status = RtitStatus::from_bits(bench.rdmsr(IA32_RTIT_STATUS));
        ended[0] += u32::from(status.error());
        ended[1] += u32::from(status.stopped());
        ended[2] += u32::from(status.trigger_en());
        let state: PtState<GuestMemory> = bench.pt.state();
        bench.pt.set_state(state);
    }
    assert!(
        ended.iter().all(|&count| count > 0),
        "errors, stops and live traces were met: {ended:?}"
    );
}
