//! libipt, our packet decoder and our flow decoder on the traces of random programs.

use pt_flow::{Block, Blocks, Chunk, Chunks, Decoder, Sections, Summary, Timing, decode_parallel};
use pt_oracle::program::{Plan, Program, Walk};
use pt_oracle::{Random, libipt};
use pt_packet::{Decoder as Packets, ExecMode, IpBytes, Item, ItemSize, LastIp, MAX_LEN, PSB, Packet, Tnt, encode};
use std::io::Read;

fn image(program: &Program) -> Sections<'_> {
    let mut image = Sections::new();
    program.sections().for_each(|(ip, bytes)| image.add(ip, bytes));
    image
}

fn plan(seed: u64) -> (Program, Walk, Plan) {
    let mut random = Random(seed);
    let program = Program::new(&mut random, 60 + seed as usize % 5 * 200);
    let plan = Plan::of(seed);
    let walk = program.walk(&mut random, &plan);
    (program, walk, plan)
}

/// Blocks against single instructions: each block's first must be the next one, and as many as it has follow.
fn compare(blocks: &[Block], log: &[u64], what: &str) {
    let mut at = 0;
    for (number, block) in blocks.iter().enumerate() {
        let found = log.get(at..at + block.count as usize);
        let whole = found
            .is_some_and(|ips| ips[0] == block.ip && ips.iter().all(|ip| ip.wrapping_sub(block.ip) < block.len as u64));
        assert!(
            whole,
            "{what}: block {number} {block:x?}\nbefore it {:x?}\nlog at {at}: {:x?}",
            &blocks[number.saturating_sub(5)..number],
            &log[at.saturating_sub(3)..(at + 5).min(log.len())]
        );
        at += block.count as usize;
    }
    assert_eq!(
        at,
        log.len(),
        "{what}: instructions are missing, from {:x?}",
        log.get(at)
    );
}

// covers: decoder/flow
// covers: decoder/oracle
#[test]
fn both_decoders_give_the_instructions_that_were_walked() {
    for seed in 0..64 {
        let (program, walk, plan) = plan(seed);
        let chunk = Chunk::whole(&walk.trace);
        let mut decoder = Decoder::new(image(&program), Timing::default());
        let mut log = Blocks::default();
        decoder.decode(&chunk, &mut log);
        let what = format!("seed {seed} {plan:?}");
        assert_eq!(log.gaps, [], "{what}");
        compare(&log.blocks, &walk.log, &what);
        let summary = decoder.summary();
        assert_eq!((summary.gaps, summary.overflows), (0, walk.overflows), "{what}");
        assert_eq!(summary.instructions, walk.log.len() as u64);

        let image = libipt::Image::new(program.sections());
        let mut theirs = Vec::new();
        libipt::instructions(&walk.trace, &image, |ip| theirs.push(ip))
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        if theirs != walk.log {
            let at = theirs.iter().zip(&walk.log).position(|(a, b)| a != b);
            let from = at.unwrap_or(0).saturating_sub(5);
            panic!(
                "{what}: libipt has other instructions, {} and {}, from {at:?} on:\n{:x?}\n{:x?}",
                theirs.len(),
                walk.log.len(),
                &theirs[from..(from + 10).min(theirs.len())],
                &walk.log[from..(from + 10).min(walk.log.len())]
            );
        }
    }
}

/// What libipt must say of a packet: the type's number in `enum pt_packet_type`, and the payload.
fn expected(item: &Item, trace: &[u8], last_ip: LastIp) -> (i32, [u64; 2]) {
    let ip = |kind| {
        // libipt leaves the compression to the caller.
        let form = trace[item.offset] >> 5;
        let len = IpBytes::from_bits(form).unwrap().len();
        let mut payload = [0; 8];
        payload[..len].copy_from_slice(&trace[item.offset + 1..][..len]);
        (kind, [form as u64, u64::from_le_bytes(payload)])
    };
    let tnt = |kind, tnt: Tnt| (kind, [tnt.len() as u64, tnt.bits() & !(1 << tnt.len())]);
    let sent = |to: Option<u64>, (kind, [form, payload]): (i32, [u64; 2])| {
        let form_is = IpBytes::from_bits(form as u8).unwrap();
        assert_eq!(last_ip.clone().expand(form_is, payload), to);
        (kind, [form, payload])
    };
    match item.packet {
        Packet::Pad => (2, [0; 2]),
        Packet::Psb => (3, [0; 2]),
        Packet::PsbEnd => (4, [0; 2]),
        Packet::Fup(to) => sent(to, ip(5)),
        Packet::Tip(to) => sent(to, ip(6)),
        Packet::TipPge(to) => sent(to, ip(7)),
        Packet::TipPgd(to) => sent(to, ip(8)),
        Packet::ShortTnt(bits) => tnt(9, bits),
        Packet::LongTnt(bits) => tnt(10, bits),
        Packet::ModeExec { mode, .. } => {
            let bits = [ExecMode::Bits16, ExecMode::Bits64, ExecMode::Bits32]
                .iter()
                .position(|known| *known == mode);
            (11, [(bits.unwrap() as u64) << 32, 0])
        }
        Packet::ModeTsx { in_tx, abort } => (11, [0x20 | (in_tx as u64 | (abort as u64) << 1) << 32, 0]),
        Packet::Pip { cr3, non_root } => (12, [cr3, non_root as u64]),
        Packet::Vmcs(pointer) => (13, [pointer, 0]),
        Packet::Cbr(ratio) => (14, [ratio as u64, 0]),
        Packet::Tsc(tsc) => (15, [tsc, 0]),
        Packet::Tma { ctc, fast } => (16, [ctc as u64 | (fast as u64) << 16, 0]),
        Packet::Mtc(ctc) => (17, [ctc as u64, 0]),
        Packet::Cyc(cycles) => (18, [cycles, 0]),
        Packet::TraceStop => (19, [0; 2]),
        Packet::Ovf => (20, [0; 2]),
        Packet::Mnt(value) => (21, [value, 0]),
        Packet::ExStop { ip } => (22, [ip as u64, 0]),
        Packet::Mwait { hints, extensions } => (23, [hints as u64 | (extensions as u64) << 32, 0]),
        // libipt 2.0.5 takes bit 3 of the payload for HW, which is bit 7 in the manual's table.
        Packet::Pwre { state, sub_state, .. } => (24, [state as u64 | (sub_state as u64) << 8, 0]),
        Packet::Pwrx { last, deepest, reason } => {
            let reason = (reason & 1) as u64 | (reason as u64 >> 1 & 6);
            (25, [last as u64 | (deepest as u64) << 8 | reason << 16, 0])
        }
        Packet::Ptw { value, size, ip } => (26, [value, (size == ItemSize::Eight) as u64 | (ip as u64) << 8]),
        packet => panic!("{packet:?} is not for libipt"),
    }
}

/// Every packet that libipt knows, with random payload.
fn all_packets(random: &mut Random) -> Vec<u8> {
    let mut trace = PSB.to_vec();
    let mut last_ip = LastIp::new();
    for round in 0..4000 {
        let value = random.draw() >> (random.below(8) * 8);
        let flag = random.one_in(2);
        let ip = (!random.one_in(5)).then_some((value as i64 >> random.below(40)) as u64);
        let mut tnt = Tnt::EMPTY;
        let many = if flag { 47 } else { 6 };
        (0..=random.below(many)).for_each(|_| tnt.push(random.one_in(2)));
        let packet = match round % 28 {
            0 => Packet::Pad,
            1 if flag => Packet::LongTnt(tnt),
            1 => Packet::ShortTnt(tnt),
            2 => Packet::Tip(ip),
            3 => Packet::TipPge(ip),
            4 => Packet::TipPgd(ip),
            5 => Packet::Fup(ip),
            6 => Packet::Pip {
                cr3: value,
                non_root: flag,
            },
            7 => Packet::ModeExec {
                mode: *random.of(&[ExecMode::Bits16, ExecMode::Bits32, ExecMode::Bits64]),
                interrupts: false,
            },
            8 => Packet::ModeTsx {
                in_tx: flag,
                abort: random.one_in(2),
            },
            9 => Packet::TraceStop,
            10 => Packet::Cbr(value as u8),
            11 => Packet::Tsc(value),
            12 => Packet::Mtc(value as u8),
            13 => Packet::Tma {
                ctc: value as u16,
                fast: (value >> 16) as u16,
            },
            14 => Packet::Cyc(value >> 5),
            15 => Packet::Vmcs(value),
            16 => Packet::Ovf,
            17 => Packet::Psb,
            18 => Packet::PsbEnd,
            19 => Packet::Mnt(value),
            20 | 21 => Packet::Ptw {
                value: value & if flag { u32::MAX as u64 } else { u64::MAX },
                size: if flag { ItemSize::Four } else { ItemSize::Eight },
                ip: random.one_in(2),
            },
            22 => Packet::ExStop { ip: flag },
            23 => Packet::Mwait {
                hints: value as u32,
                extensions: (value >> 32) as u32,
            },
            24 => Packet::Pwre {
                hardware: flag,
                state: value as u8,
                sub_state: (value >> 8) as u8,
            },
            _ => Packet::Pwrx {
                last: value as u8,
                deepest: (value >> 8) as u8,
                reason: (value >> 16) as u8 & 13,
            },
        };
        let mut out = [0; MAX_LEN];
        let len = encode(&packet, &mut last_ip, &mut out);
        trace.extend(&out[..len]);
    }
    trace
}

// covers: pt/packet-libipt
#[test]
fn libipt_sees_the_same_packets() {
    let mut traces: Vec<Vec<u8>> = (0..8).map(|seed| all_packets(&mut Random(seed))).collect();
    traces.extend((64..72).map(|seed| plan(seed).1.trace));
    for trace in traces {
        let theirs = libipt::packets(&trace).unwrap();
        let mut decoder = Packets::new(&trace);
        let mut count = 0;
        for packet in &theirs {
            let last_ip = decoder.last_ip();
            let item = decoder.next_packet().expect("libipt has more packets").unwrap();
            let (kind, payload) = expected(&item, &trace, last_ip);
            let ours = (item.offset as u64, item.len as u8, kind, payload);
            assert_eq!(
                (packet.offset, packet.size, packet.kind, packet.payload),
                ours,
                "{item:?}"
            );
            count += 1;
        }
        assert_eq!(decoder.next_packet(), None, "libipt has {count} packets");
        assert!(count > 1000);
    }
}

/// A reader that gives little at a time.
struct Drops<'a>(&'a [u8], Random);

impl Read for Drops<'_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let len = (1 + self.1.below(3000)).min(out.len()).min(self.0.len());
        let (now, later) = self.0.split_at(len);
        out[..len].copy_from_slice(now);
        self.0 = later;
        Ok(len)
    }
}

// covers: decoder/parallel
#[test]
fn threads_and_chunks_do_not_change_the_result() {
    for seed in [3, 8, 21, 46] {
        let (program, walk, _) = plan(seed);
        let mut trace = vec![0x77; seed as usize];
        trace.extend(&walk.trace);
        let mut whole = Blocks::default();
        let mut decoder = Decoder::new(image(&program), Timing::default());
        let chunk = Chunk::whole(&trace);
        assert_eq!(chunk.skipped(), seed);
        decoder.decode(&chunk, &mut whole);
        let sum = decoder.summary();
        assert_eq!(sum.gaps, 1, "what was skipped");
        for (threads, size) in [(1, 1), (1, 5000), (2, 1), (2, 700), (3, 20_000), (4, 1 << 30)] {
            let chunks = Chunks::new(Drops(&trace, Random(seed)), size, 1 << 30);
            let mut log = Blocks::default();
            let mut pieces = Summary::default();
            let found = decode_parallel(
                chunks,
                threads,
                Timing::default(),
                || image(&program),
                |_| Blocks::default(),
                |piece, summary| {
                    log.blocks.extend(piece.blocks);
                    log.gaps.extend(piece.gaps);
                    pieces += summary;
                },
            )
            .unwrap();
            assert_eq!((found, pieces), (sum, sum), "{threads} threads, chunks of {size}");
            assert!(log.blocks == whole.blocks && log.gaps == whole.gaps);
        }
        compare(&whole.blocks, &walk.log, "whole");
    }
}

// covers: decoder/parallel
#[test]
fn errors_in_reading_come_behind_what_was_read() {
    struct Broken<'a>(&'a [u8]);
    impl Read for Broken<'_> {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            match self.0.read(out)? {
                0 => Err(std::io::Error::other("a bad sector")),
                len => Ok(len),
            }
        }
    }
    let (program, walk, _) = plan(1);
    let mut instructions = 0;
    let error = decode_parallel(
        Chunks::new(Broken(&walk.trace), 1 << 10, 1 << 20),
        2,
        Timing::default(),
        || image(&program),
        |_| Blocks::default(),
        |_, summary| instructions += summary.instructions,
    )
    .unwrap_err();
    assert_eq!(error.to_string(), "a bad sector");
    assert!(instructions <= walk.log.len() as u64);
}

// covers: decoder/damage
#[test]
fn a_trace_that_was_cut_gives_the_beginning() {
    let (program, walk, _) = plan(5);
    let mut random = Random(99);
    let mut decoder = Decoder::new(image(&program), Timing::default());
    for _ in 0..200 {
        let cut = random.below(walk.trace.len());
        let mut log = Blocks::default();
        decoder.decode(&Chunk::whole(&walk.trace[..cut]), &mut log);
        let count = decoder.summary().instructions as usize;
        compare(&log.blocks, &walk.log[..count], "cut");
        // A packet that breaks off, and the TIP that did not come behind its TNT.
        assert!(log.gaps.len() <= 3, "{:?}", log.gaps);
    }
}

// covers: decoder/damage
#[test]
fn damage_is_told_and_ends_at_the_next_psb() {
    let (program, walk, _) = plan(10);
    let mut random = Random(7);
    let mut decoder = Decoder::new(image(&program), Timing::default());
    for _ in 0..300 {
        let mut trace = walk.trace.clone();
        // Bytes that begin no packet, more than any packet takes for its payload.
        let at = random.below(trace.len() / 2);
        let wrong = [0xd9; 12];
        trace.splice(at..at + wrong.len(), wrong);
        let mut log = Blocks::default();
        decoder.decode(&Chunk::whole(&trace), &mut log);
        let summary = decoder.summary();
        assert!(summary.gaps > 0 && log.gaps.len() as u64 == summary.gaps);
        // The end is as it was.
        let tail: u64 = log.blocks.iter().rev().take(100).map(|block| block.count as u64).sum();
        let from = walk.log.len() - tail as usize;
        compare(
            &log.blocks[log.blocks.len() - 100..],
            &walk.log[from..],
            "behind the damage",
        );
    }
    // Whatever the bytes are.
    for _ in 0..3000 {
        let mut trace = walk.trace[..1 + random.below(5000)].to_vec();
        for _ in 0..1 + random.below(20) {
            let at = random.below(trace.len());
            trace[at] = random.draw() as u8;
        }
        decoder.decode(&Chunk::whole(&trace), &mut Blocks::default());
    }
}
