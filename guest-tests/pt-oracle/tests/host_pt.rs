//! The guest's part of a trace of guest and host, as the processor trace unit gives it to the guest: libipt and our flow decoder
//! find in it what the guest walked, and nothing of the host.

use devices::unit::pt::Pt;
use pt_flow::{Blocks, Chunk, Decoder, Sections, Timing};
use pt_oracle::program::{Plan, Program};
use pt_oracle::tracer::Style;
use pt_oracle::{Random, libipt};
use pt_packet::{Decoder as Packets, Packet};
use x86::model::SAPPHIRERAPIDS;
use x86::pt::RtitCtl;
use x86::watch::{BadPhys, CodeSize, Context, Effects, PageFault, Processor, TraceMem};

/// A processor that stands still.
struct Stands {
    rip: u64,
    cr3: u64,
}

impl TraceMem for Stands {
    fn read_linear(&mut self, _la: u64, _bytes: &mut [u8]) -> Result<(), PageFault> {
        unreachable!()
    }
    fn probe_linear(&mut self, _la: u64, _len: u64) -> Result<(), PageFault> {
        unreachable!()
    }
    fn write_linear(&mut self, _la: u64, _bytes: &[u8]) -> Result<(), PageFault> {
        unreachable!()
    }
    fn read_phys(&mut self, pa: u64, _bytes: &mut [u8]) -> Result<(), BadPhys> {
        Err(BadPhys { address: pa })
    }
    fn write_phys(&mut self, pa: u64, _bytes: &[u8]) -> Result<(), BadPhys> {
        Err(BadPhys { address: pa })
    }
}

impl Processor for Stands {
    fn gpr(&self, _number: u8) -> u64 {
        0
    }
    fn xmm(&self, _number: u8) -> u128 {
        0
    }
    fn rip(&self) -> u64 {
        self.rip
    }
    fn rflags(&self) -> u64 {
        2
    }
    fn context(&self) -> Context {
        Context {
            cpl: 0,
            code: CodeSize::Bits64,
            long_mode: true,
            paging: true,
            cr3: self.cr3,
            interrupts: false,
            cs_base: 0,
            non_root: false,
            vmcs: None,
            concealed: false,
        }
    }
    fn retired(&self) -> u64 {
        0
    }
    fn step(&self) -> u64 {
        0
    }
    fn tsc(&mut self) -> u64 {
        0
    }
}

fn settings(timing: bool) -> RtitCtl {
    RtitCtl::new()
        .with_trace_en(true)
        .with_os(true)
        .with_user(true)
        .with_branch_en(true)
        .with_ptw_en(true)
        .with_fup_on_ptw(true)
        .with_tsc_en(timing)
        .with_cyc_en(timing)
        .with_mtc_en(timing)
}

/// What the unit makes of such a trace, given to it in pieces.
fn guests_part(trace: &[u8], entry: u64, ctl: RtitCtl, random: &mut Random) -> Vec<u8> {
    let caps = SAPPHIRERAPIDS.units.pt.unwrap();
    let mut cpu = Stands {
        rip: entry,
        cr3: 0x1000,
    };
    let mut pt = Pt::with_output(caps, Vec::new());
    pt.program(ctl, &mut cpu).unwrap();
    pt.host_begins(0, 1 << 40, &mut cpu);
    let mut rest = trace;
    while !rest.is_empty() {
        let (now, later) = rest.split_at(rest.len().min(1 + random.below(3000)));
        assert_eq!(pt.host_bytes(now, &mut cpu), Effects::NONE);
        rest = later;
    }
    std::mem::take(pt.output())
}

// covers: host-units/pt-strip
#[test]
fn decoders_find_what_the_guest_walked_and_nothing_of_the_host() {
    for seed in 0..64u64 {
        let mut random = Random(seed);
        let program = Program::new(&mut random, 60 + seed as usize % 5 * 200);
        let plan = Plan::of(seed);
        let walk = program.walk_hosted(&mut random, &plan);
        let trace = guests_part(&walk.trace, program.entry(), settings(plan.style.timing), &mut random);
        let what = format!("seed {seed} {plan:?}");
        for item in Packets::new(&trace) {
            match item.unwrap().packet {
                Packet::Vmcs(_) | Packet::Pip { non_root: true, .. } => panic!("{what}: the host shows"),
                _ => {}
            }
        }
        assert!(trace.len() < walk.trace.len());

        let image = libipt::Image::new(program.sections());
        let mut theirs = Vec::new();
        let end = libipt::instructions(&trace, &image, |ip| theirs.push(ip));
        let at = theirs.iter().zip(&walk.log).position(|(a, b)| a != b);
        let at = at.unwrap_or(theirs.len().min(walk.log.len()));
        let near = |log: &[u64]| {
            format!(
                "{:x?}",
                &log[at.saturating_sub(4).min(log.len())..(at + 4).min(log.len())]
            )
        };
        assert!(
            end.is_ok() && theirs == walk.log,
            "{what}: libipt: {end:?}, {} of {}, differ at {at}: {} {}",
            theirs.len(),
            walk.log.len(),
            near(&theirs),
            near(&walk.log)
        );

        let mut sections = Sections::new();
        program.sections().for_each(|(ip, bytes)| sections.add(ip, bytes));
        let mut decoder = Decoder::new(sections, Timing::default());
        let mut log = Blocks::default();
        decoder.decode(&Chunk::whole(&trace), &mut log);
        assert_eq!(log.gaps, [], "{what}");
        let summary = decoder.summary();
        assert_eq!(summary.instructions, walk.log.len() as u64, "{what}");
        assert_eq!(summary.overflows, walk.overflows, "{what}");
    }
}

// covers: host-units/pt-bad-bytes
#[test]
fn bytes_that_mean_nothing_neither_panic_nor_reach_the_guest() {
    let mut random = Random(77);
    let program = Program::new(&mut random, 200);
    let plan = Plan {
        style: Style {
            compress_returns: false,
            long_tnt: true,
            defer: false,
            psb_period: 256,
            timing: true,
        },
        length: 4000,
        events: Some(2),
        ptwrite_ip: true,
    };
    let walk = program.walk_hosted(&mut random, &plan);
    let mut found = 0;
    for round in 0..600 {
        let mut trace = walk.trace.clone();
        match round % 3 {
            0 => trace = (0..4000).map(|_| random.draw() as u8).collect(),
            1 => (0..1 + random.below(20)).for_each(|_| {
                let at = random.below(trace.len());
                trace[at] ^= 1 << random.below(8);
            }),
            _ => {
                let (from, len) = (random.below(trace.len()), 1 + random.below(40));
                trace.drain(from..(from + len).min(trace.len()));
            }
        }
        let part = guests_part(&trace, program.entry(), settings(true), &mut random);
        let mut overflows = 0;
        for item in Packets::new(&part) {
            match item.unwrap_or_else(|error| panic!("round {round}: {error}")).packet {
                Packet::Vmcs(_) | Packet::Pip { non_root: true, .. } => panic!("round {round}: the host shows"),
                Packet::Ovf => overflows += 1,
                _ => {}
            }
        }
        found += usize::from(overflows > 0);
    }
    assert!(found > 200, "only {found} of 600 were found out");
}
