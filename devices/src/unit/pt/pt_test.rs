//! A processor that does nothing by itself, and what the tables have in common.

#[path = "messages_test.rs"]
mod messages;
#[path = "output_test.rs"]
mod output;
#[path = "registers_test.rs"]
mod registers;
#[path = "relay_test.rs"]
mod relay;
#[path = "streams_test.rs"]
mod streams;

use pt_packet::{Decoder, Packet};
use x86::model::{ALDERLAKE, BROADWELL, CpuModel, ICELAKE_SERVER, SAPPHIRERAPIDS, SKYLAKE_SERVER, SNOWRIDGE};
use x86::msr::*;
use x86::pt::{PtCaps, RtitCtl};
use x86::watch::{BadPhys, BranchRecord, CodeSize, Context, Flow, PageFault, Processor, TraceMem};

use super::Pt;

/// Every model with processor trace.
const MODELS: [&CpuModel; 6] = [
    &BROADWELL,
    &SKYLAKE_SERVER,
    &ICELAKE_SERVER,
    &SAPPHIRERAPIDS,
    &ALDERLAKE,
    &SNOWRIDGE,
];

fn caps(model: &CpuModel) -> PtCaps {
    model.units.pt.expect("a model with processor trace")
}

/// Everything that CPUID can enumerate.
fn everything() -> PtCaps {
    PtCaps {
        ebx: 0x1FF,
        ecx: 0x7,
        encodings: 0xFFFF_0004,
        frequencies: 0xFFFF_FFFF,
        ..caps(&ALDERLAKE)
    }
}

/// RAM in the mebibyte from 0 on, and a processor that stands where a test puts it.
#[derive(Clone)]
struct Guest {
    ram: Vec<u8>,
    context: Context,
    rip: u64,
    step: u64,
    tsc_offset: u64,
}

impl Default for Guest {
    fn default() -> Self {
        Self {
            ram: vec![0; 1 << 20],
            context: Context {
                cpl: 0,
                code: CodeSize::Bits64,
                long_mode: true,
                paging: true,
                cr3: 0x5000,
                interrupts: false,
                cs_base: 0,
                ..Context::default()
            },
            rip: 0x1000,
            step: 1_000_000,
            tsc_offset: 0,
        }
    }
}

impl TraceMem for Guest {
    fn read_linear(&mut self, _la: u64, _bytes: &mut [u8]) -> Result<(), PageFault> {
        unreachable!("processor trace knows no linear memory")
    }

    fn probe_linear(&mut self, _la: u64, _len: u64) -> Result<(), PageFault> {
        unreachable!("processor trace knows no linear memory")
    }

    fn write_linear(&mut self, _la: u64, _bytes: &[u8]) -> Result<(), PageFault> {
        unreachable!("processor trace knows no linear memory")
    }

    fn read_phys(&mut self, pa: u64, bytes: &mut [u8]) -> Result<(), BadPhys> {
        let at = usize::try_from(pa).map_err(|_| BadPhys { address: pa })?;
        let from = self.ram.get(at..).and_then(|ram| ram.get(..bytes.len()));
        bytes.copy_from_slice(from.ok_or(BadPhys { address: pa })?);
        Ok(())
    }

    fn write_phys(&mut self, pa: u64, bytes: &[u8]) -> Result<(), BadPhys> {
        let at = usize::try_from(pa).map_err(|_| BadPhys { address: pa })?;
        let to = self.ram.get_mut(at..).and_then(|ram| ram.get_mut(..bytes.len()));
        to.ok_or(BadPhys { address: pa })?.copy_from_slice(bytes);
        Ok(())
    }
}

impl Processor for Guest {
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
        self.context
    }
    fn retired(&self) -> u64 {
        self.step
    }
    fn step(&self) -> u64 {
        self.step
    }
    fn tsc(&mut self) -> u64 {
        self.step.wrapping_add(self.tsc_offset)
    }
}

/// Where a single range is.
const RANGE: u64 = 0x4_0000;
/// Its size less 1.
const MASK: u64 = 0x3_FFFF;

/// Ring 0 and 3, branches.
fn all_rings() -> RtitCtl {
    RtitCtl::new().with_os(true).with_user(true).with_branch_en(true)
}

/// A unit and what it watches.
#[derive(Clone)]
struct Bench {
    pt: Pt,
    guest: Guest,
    /// Branches and events are task switches that load CR3.
    loads_cr3: bool,
}

impl Bench {
    fn new(caps: PtCaps) -> Self {
        Self {
            pt: Pt::new(caps),
            guest: Guest::default(),
            loads_cr3: false,
        }
    }

    fn wrmsr(&mut self, msr: u32, value: u64) {
        let _ = self.pt.write_msr(msr, value, &mut self.guest).expect("no #GP");
    }

    fn rdmsr(&self, msr: u32) -> u64 {
        self.pt.read_msr(msr).expect("no #GP")
    }

    /// Traces into the single range with these settings.
    fn start(caps: PtCaps, ctl: RtitCtl) -> Self {
        let mut bench = Self::new(caps);
        bench.begin(ctl);
        bench
    }

    fn begin(&mut self, ctl: RtitCtl) {
        self.wrmsr(IA32_RTIT_OUTPUT_BASE, RANGE);
        self.wrmsr(IA32_RTIT_OUTPUT_MASK_PTRS, MASK);
        self.wrmsr(IA32_RTIT_CTL, ctl.with_trace_en(true).into_bits());
    }

    fn stop(&mut self) {
        self.wrmsr(IA32_RTIT_CTL, 0);
    }

    /// The offset that the next byte goes to.
    fn offset(&self) -> usize {
        (self.rdmsr(IA32_RTIT_OUTPUT_MASK_PTRS) >> 32) as usize
    }

    /// The packets in the range from an offset on.
    fn packets_from(&self, from: usize) -> Vec<Packet> {
        let bytes = &self.guest.ram[RANGE as usize..][..self.offset()];
        Decoder::new(bytes)
            .map(|item| item.expect("a packet"))
            .filter(|item| item.offset >= from)
            .map(|item| item.packet)
            .collect()
    }

    /// The packets that `what` brings about.
    fn packets(&mut self, what: impl FnOnce(&mut Self)) -> Vec<Packet> {
        let from = self.offset();
        what(self);
        self.packets_from(from)
    }

    fn branches(&mut self, records: &[BranchRecord]) {
        if let Some(last) = records.last() {
            self.guest.rip = last.to;
            self.guest.step = self.guest.step.max(last.step);
        }
        let _ = self.pt.branches(records, &mut self.guest);
    }

    /// A branch, one step after what came before it.
    fn branch(&mut self, flow: Flow, from: u64, to: u64) {
        let record = self.record(flow, from, to);
        self.branches(&[record]);
    }

    fn record(&mut self, flow: Flow, from: u64, to: u64) -> BranchRecord {
        self.guest.step += 1;
        BranchRecord {
            from,
            to,
            step: self.guest.step,
            flow: flow.code(),
            length: 2,
            loads_cr3: self.loads_cr3,
            ..BranchRecord::default()
        }
    }

    /// A jump to `to` and then to `back`, so that bits which wait come out.
    fn sync(&mut self, to: u64) {
        self.branch(Flow::JumpInd, self.guest.rip, to);
    }
}
