//! What a branch costs the trace unit: `cargo run --release -p minivmm-devices --example pt_speed`, or under `perf record`.

use std::hint::black_box;
use std::time::Instant;

use devices::unit::pt::Pt;
use x86::model::SKYLAKE_SERVER;
use x86::msr::*;
use x86::pt::RtitCtl;
use x86::watch::{BadPhys, BranchRecord, CodeSize, Context, Flow, PageFault, Processor, TraceMem};

/// RAM and nothing else.
struct Guest {
    ram: Vec<u8>,
    step: u64,
}

impl TraceMem for Guest {
    fn read_linear(&mut self, la: u64, _: &mut [u8]) -> Result<(), PageFault> {
        panic!("{la:#x} is linear")
    }
    fn probe_linear(&mut self, la: u64, _: u64) -> Result<(), PageFault> {
        panic!("{la:#x} is linear")
    }
    fn write_linear(&mut self, la: u64, _: &[u8]) -> Result<(), PageFault> {
        panic!("{la:#x} is linear")
    }
    fn read_phys(&mut self, pa: u64, bytes: &mut [u8]) -> Result<(), BadPhys> {
        let from = self.ram.get(pa as usize..).and_then(|ram| ram.get(..bytes.len()));
        bytes.copy_from_slice(from.ok_or(BadPhys { address: pa })?);
        Ok(())
    }
    fn write_phys(&mut self, pa: u64, bytes: &[u8]) -> Result<(), BadPhys> {
        let to = self
            .ram
            .get_mut(pa as usize..)
            .and_then(|ram| ram.get_mut(..bytes.len()));
        to.ok_or(BadPhys { address: pa })?.copy_from_slice(bytes);
        Ok(())
    }
}

impl Processor for Guest {
    fn gpr(&self, _: u8) -> u64 {
        0
    }
    fn xmm(&self, _: u8) -> u128 {
        0
    }
    fn rip(&self) -> u64 {
        0x1000
    }
    fn rflags(&self) -> u64 {
        2
    }
    fn context(&self) -> Context {
        Context {
            code: CodeSize::Bits64,
            long_mode: true,
            paging: true,
            ..Context::default()
        }
    }
    fn retired(&self) -> u64 {
        self.step
    }
    fn step(&self) -> u64 {
        self.step
    }
    fn tsc(&mut self) -> u64 {
        self.step
    }
}

/// Records of a batch: as many as the executor hands over at once.
const BATCH: usize = 512;

fn main() {
    let branches = RtitCtl::new()
        .with_trace_en(true)
        .with_os(true)
        .with_user(true)
        .with_branch_en(true)
        .with_tsc_en(true)
        .with_topa(true);
    let mut random = 88172645463325252u64;
    let mut draw = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random >> 11
    };
    let mut make = |mix: &dyn Fn(u64) -> Flow| -> Vec<BranchRecord> {
        let mut ip = 0x1000;
        let mut calls = Vec::new();
        (0..BATCH as u64)
            .map(|n| {
                let flow = mix(draw());
                let from = ip;
                ip = match flow {
                    Flow::Cond { taken: false } => from + 2,
                    Flow::Ret => calls.pop().unwrap_or(0x2000),
                    _ => 0xFFFF_FFFF_8100_0000 + draw() % 0x10_0000,
                };
                if flow == Flow::Call {
                    calls.push(from + 5);
                }
                BranchRecord {
                    from,
                    to: ip,
                    step: n * 5,
                    flow: flow.code(),
                    length: 5,
                    ..BranchRecord::default()
                }
            })
            .collect()
    };
    let cond = |n: u64| Flow::Cond { taken: n & 1 != 0 };
    let mixed = |n: u64| match n % 100 {
        0..70 => Flow::Cond { taken: n & 128 != 0 },
        70..82 => Flow::Jump,
        82..89 => Flow::Call,
        89..96 => Flow::Ret,
        _ => Flow::JumpInd,
    };
    for (name, records, ctl) in [
        ("conditional", make(&cond), branches),
        ("mixed", make(&mixed), branches),
        ("mixed, MTC", make(&mixed), branches.with_mtc_en(true).with_mtc_freq(3)),
        (
            "mixed, MTC and CYC",
            make(&mixed),
            branches.with_mtc_en(true).with_mtc_freq(3).with_cyc_en(true),
        ),
        ("indirect", make(&|_| Flow::JumpInd), branches),
    ] {
        let mut guest = Guest {
            ram: vec![0; 1 << 20],
            step: 0,
        };
        guest.ram[0x8000..0x8008].copy_from_slice(&(0x4_0000u64 | 6 << 6).to_le_bytes());
        guest.ram[0x8008..0x8010].copy_from_slice(&0x8001u64.to_le_bytes());
        let caps = SKYLAKE_SERVER.units.pt.expect("the model has a trace unit");
        let mut pt = Pt::new(caps);
        let set = |pt: &mut Pt, guest: &mut Guest, msr, value| {
            let _ = pt.write_msr(msr, value, guest).expect("the model takes it");
        };
        set(&mut pt, &mut guest, IA32_RTIT_OUTPUT_BASE, 0x8000);
        set(&mut pt, &mut guest, IA32_RTIT_CTL, ctl.into_bits());
        let mut best = f64::MAX;
        let mut records = records;
        for _ in 0..7 {
            const ROUNDS: usize = 4000;
            let start = Instant::now();
            for _ in 0..ROUNDS {
                guest.step += BATCH as u64 * 5;
                if ctl.mtc_en() {
                    records.iter_mut().for_each(|r| r.step += BATCH as u64 * 5);
                }
                let _ = black_box(pt.branches(black_box(&records), &mut guest));
            }
            best = best.min(start.elapsed().as_secs_f64() / (ROUNDS * BATCH) as f64);
        }
        println!("{name:20} {:6.2} ns a branch", best * 1e9);
    }
}
