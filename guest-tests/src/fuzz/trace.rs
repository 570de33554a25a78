//! The bytes as what a guest and its processor do to the trace unit: registers and tables of anything, and `Watch` callbacks in
//! any order.

use devices::unit::pt::Pt;
use pt_packet::{Decoder, LastIp, MAX_LEN, Packet, encode};
use x86::model::{ALDERLAKE, BROADWELL, CpuModel, SKYLAKE_SERVER, SNOWRIDGE};
use x86::msr::*;
use x86::pt::{PtCaps, RtitCtl};
use x86::watch::{
    BadPhys, BranchRecord, Change, CodeSize, Context, EventRecord, Far, Flow, PageFault, Processor, TraceMem,
};

const MODELS: [&CpuModel; 4] = [&BROADWELL, &SKYLAKE_SERVER, &ALDERLAKE, &SNOWRIDGE];

/// RAM of the guest in bytes.
const MEMORY: usize = 0x1_0000;
/// Where the table is.
const TABLE: u64 = 0x1000;
/// Bytes of an operation: kind, argument, value.
const OPERATION: usize = 10;
/// Bytes that a word can bring about at most: records, packets for each, a PSB now and then.
const MOST: usize = 1 << 16;

const REGISTERS: [u32; 8] = [
    IA32_RTIT_CTL,
    IA32_RTIT_CTL,
    IA32_RTIT_STATUS,
    IA32_RTIT_OUTPUT_BASE,
    IA32_RTIT_OUTPUT_MASK_PTRS,
    IA32_RTIT_CR3_MATCH,
    IA32_RTIT_ADDR0_A,
    IA32_RTIT_ADDR0_B,
];

/// The processor: it stands where the bytes put it.
struct Core {
    memory: Vec<u8>,
    context: Context,
    rip: u64,
    step: u64,
    written: usize,
}

impl TraceMem for Core {
    fn read_linear(&mut self, la: u64, _: &mut [u8]) -> Result<(), PageFault> {
        panic!("{la:#x}: the trace unit knows no linear memory")
    }
    fn probe_linear(&mut self, la: u64, _: u64) -> Result<(), PageFault> {
        panic!("{la:#x}: the trace unit knows no linear memory")
    }
    fn write_linear(&mut self, la: u64, _: &[u8]) -> Result<(), PageFault> {
        panic!("{la:#x}: the trace unit knows no linear memory")
    }
    fn read_phys(&mut self, pa: u64, bytes: &mut [u8]) -> Result<(), BadPhys> {
        let at = usize::try_from(pa).unwrap_or(usize::MAX);
        let from = self.memory.get(at..).and_then(|memory| memory.get(..bytes.len()));
        bytes.copy_from_slice(from.ok_or(BadPhys { address: pa })?);
        Ok(())
    }
    fn write_phys(&mut self, pa: u64, bytes: &[u8]) -> Result<(), BadPhys> {
        self.written += bytes.len();
        let at = usize::try_from(pa).unwrap_or(usize::MAX);
        let to = self
            .memory
            .get_mut(at..)
            .and_then(|memory| memory.get_mut(..bytes.len()));
        to.ok_or(BadPhys { address: pa })?.copy_from_slice(bytes);
        Ok(())
    }
}

impl Processor for Core {
    fn gpr(&self, _: u8) -> u64 {
        0
    }
    fn xmm(&self, _: u8) -> u128 {
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
    fn debug_register(&self, _: u8) -> u64 {
        0
    }
    fn cr4(&self) -> u64 {
        0
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

fn record(core: &Core, argument: u8, value: u64, n: u64) -> BranchRecord {
    BranchRecord {
        from: value.wrapping_add(n),
        to: value.rotate_left(n as u32),
        step: core.step.wrapping_add(n),
        flow: value.rotate_right(n as u32) as u8 % (Flow::ALL.len() as u8 + 2),
        length: argument,
        ..BranchRecord::default()
    }
}

/// What a host's tracer writes, in two pieces: the guest gets packets, and none of the host's.
pub fn host_trace(bytes: &[u8]) {
    let Some((&[settings, cut], recorded)) = bytes.split_first_chunk() else {
        return;
    };
    let caps = ALDERLAKE.units.pt.expect("it has a trace unit");
    let mut core = Core {
        memory: Vec::new(),
        context: Context {
            code: CodeSize::Bits64,
            ..Context::default()
        },
        rip: 0x40_0000,
        step: 0,
        written: 0,
    };
    let bit = |n: u8| settings >> n & 1 != 0;
    let ctl = RtitCtl::new()
        .with_trace_en(true)
        .with_os(true)
        .with_user(true)
        .with_branch_en(bit(0))
        .with_tsc_en(bit(1))
        .with_mtc_en(bit(2))
        .with_cyc_en(bit(3))
        .with_ptw_en(bit(4))
        .with_event_en(bit(5) && caps.event_trace());
    let mut pt = Pt::with_output(caps, Vec::new());
    pt.program(ctl, &mut core).expect("settings of the model");
    pt.host_begins(0, 77, &mut core);
    let (first, second) = recorded.split_at(recorded.len() * usize::from(cut) / 256);
    for piece in [first, second] {
        let _ = pt.host_bytes(piece, &mut core);
        if bit(6) {
            pt.host_lost();
        }
    }
    core.rip = core.rip.wrapping_add(u64::from(cut));
    let _ = pt.host_ends(0, &mut core);
    for item in Decoder::new(pt.output()) {
        match item.expect("a packet").packet {
            Packet::Vmcs(_) | Packet::Pip { non_root: true, .. } => panic!("the host shows"),
            _ => {}
        }
    }
}

/// Traces whose beginning is a VM entry.
pub(super) fn host_traces() -> Vec<Vec<u8>> {
    let (mut last_ip, mut bytes) = (LastIp::new(), [0; MAX_LEN]);
    let mut entry = vec![0x1f, 100];
    let (cr3, non_root) = (0x1000, true);
    for packet in [Packet::Pip { cr3, non_root }, Packet::Tip(Some(0x40_0000))] {
        let len = encode(&packet, &mut last_ip, &mut bytes);
        entry.extend_from_slice(&bytes[..len]);
    }
    super::pt::traces()
        .into_iter()
        .map(|trace| [&entry[..], &trace].concat())
        .collect()
}

/// A table that traces: one region and its END.
pub(super) fn tracers() -> Vec<Vec<u8>> {
    let operation = |kind: u8, argument: u8, value: u64| {
        let mut bytes = vec![kind, argument];
        bytes.extend_from_slice(&value.to_le_bytes());
        bytes
    };
    let program = |model: u8, ctl: u64| {
        let mut bytes = vec![model];
        bytes.extend(operation(1, 0, 0x2000));
        bytes.extend(operation(1, 1, TABLE | 1));
        bytes.extend(operation(0, 3, TABLE));
        bytes.extend(operation(0, 0, ctl));
        for n in 0..40u64 {
            bytes.extend(operation(2 + (n % 6) as u8, 200, n.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
        }
        bytes
    };
    vec![
        program(0, 0x2D0D),
        program(1, 0x2D0D),
        program(3, 0x0100_0000_0000_3F1F),
        program(4, 0x210D),
    ]
}

/// A model and operations on its trace unit.
pub fn trace(bytes: &[u8]) {
    let [model, operations @ ..] = bytes else { return };
    let caps = MODELS[usize::from(*model) % MODELS.len()].units.pt;
    let mut caps = caps.expect("a model with processor trace");
    if model & 0x80 != 0 {
        // Everything that CPUID can enumerate.
        caps = PtCaps {
            ebx: 0x1FF,
            ecx: 7,
            encodings: 0xFFFF_0004,
            frequencies: !0,
            ..caps
        };
    }
    let mut pt = Pt::new(caps);
    let mut core = Core {
        memory: vec![0; MEMORY],
        context: Context::default(),
        rip: 0x1000,
        step: 0,
        written: 0,
    };
    for operation in operations.chunks_exact(OPERATION).take(500) {
        let (kind, argument) = (operation[0], operation[1]);
        let value = u64::from_le_bytes(operation[2..].try_into().expect("eight bytes"));
        let before = core.written;
        match kind % 8 {
            0 => {
                let msr = REGISTERS[usize::from(argument) % REGISTERS.len()];
                if pt.write_msr(msr, value, &mut core).is_ok() {
                    let read = pt.read_msr(msr);
                    assert!(read.is_ok(), "what can be written can be read");
                }
            }
            1 => {
                let at = TABLE as usize + usize::from(argument) * 8;
                core.memory[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            2 | 3 => {
                let count = u64::from(argument);
                let records: Vec<BranchRecord> = (0..count).map(|n| record(&core, argument, value, n)).collect();
                core.step = core.step.wrapping_add(count);
                let _ = pt.branches(&records, &mut core);
            }
            4 => {
                core.context = Context {
                    cpl: argument & 3,
                    code: [CodeSize::Bits16, CodeSize::Bits32, CodeSize::Bits64][usize::from(argument >> 2) % 3],
                    cr3: value & 0xF000,
                    interrupts: argument & 0x40 != 0,
                    cs_base: value >> 32,
                    ..Context::default()
                };
                let mut branch = record(&core, argument, value, 0);
                branch.flow = Flow::Far(if argument & 0x80 != 0 {
                    Far::Exception
                } else {
                    Far::Interrupt
                })
                .code();
                let event = EventRecord {
                    branch,
                    vector: argument,
                    debug: argument == 1,
                    error: None,
                    address: Some(value),
                };
                let _ = pt.event(&event, &mut core);
            }
            5 => {
                core.rip = value;
                let changes = [
                    Change::Cr3,
                    Change::Mode,
                    Change::Interrupts,
                    Change::Halt,
                    Change::Wake { store: true },
                    Change::TransactionBegin { at: 0x1000 },
                    Change::TransactionAbort {
                        from: 0x1000,
                        cause: x86::watch::Abort::Conflict,
                        steps: 1,
                    },
                    Change::Init { at: 0 },
                    Change::StartUp(argument),
                    Change::Shutdown,
                    Change::Reset,
                    Change::PtWrite {
                        value,
                        size: argument,
                        at: value,
                    },
                    Change::Mwait {
                        hints: value as u32,
                        extensions: argument.into(),
                    },
                ];
                let _ = pt.change(changes[usize::from(argument) % changes.len()], &mut core);
            }
            6 => {
                core.step = core.step.wrapping_add(value >> (argument % 64));
                let _ = pt.tick(&mut core);
            }
            _ => {
                let boundary = pt.boundaries().get(usize::from(argument)).copied();
                let _ = pt.before(boundary.unwrap_or(value), &mut core);
                let state = pt.state();
                pt.set_state(state.clone());
                assert!(pt.state() == state);
            }
        }
        assert!(
            core.written - before < MOST,
            "one word writes {} bytes",
            core.written - before
        );
    }
}
