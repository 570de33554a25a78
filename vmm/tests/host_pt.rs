//! A guest on KVM whose Intel PT is the host's, with a recording in the host's place: the packets arrive in the guest's tables, its
//! interrupts come, and what the host cannot do the software engine does. Where there is no KVM the tests say so and skip.

use crate::common;
use common::long::{Result, STRINGS, guest};
use common::{Folder, assert_refused, kvm_is_missing, minivmm};
use devices::unit::pt::Served;
use iced_x86::code_asm::*;
use kvm::Limit;
use kvm::tracer::{Taken, Tracer, Traces};
use kvm::units::{Unit, UnitRequest, UnitRequests};
use minivmm::StopReason;
use minivmm::config::{EngineChoice, KvmDefects};
use minivmm::{Console, End, MachineConfig, Run, SerialTarget};
use pt_flow::{Block, Blocks, Chunk, Decoder, Sections, Timing};
use pt_packet::{Decoder as Packets, ExecMode, LastIp, MAX_LEN, Packet, encode};
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex};
use x86::model::SAPPHIRERAPIDS;
use x86::msr::*;
use x86::pt::{PtCaps, RtitCtl, RtitMaskPtrs};

/// The guest's table, and its two regions: one that asks for an interrupt, and one that is large enough.
const TABLE: u32 = 0x28_0000;
const FIRST: u64 = 0x30_0000;
const SECOND: u64 = 0x31_0000;
const CODE: u64 = 0x10_0000;
/// Packets of an iteration take some bytes; all of them more than the first region.
const ROUNDS: u32 = 3000;
const VECTOR: u32 = 0x40;

fn control() -> RtitCtl {
    RtitCtl::new()
        .with_trace_en(true)
        .with_os(true)
        .with_user(true)
        .with_topa(true)
        .with_branch_en(true)
        .with_dis_retc(true)
}

fn wrmsr(a: &mut CodeAssembler, msr: u32, value: u64) -> Result {
    a.mov(ecx, msr)?;
    a.mov(eax, value as u32)?;
    a.mov(edx, (value >> 32) as u32)?;
    a.wrmsr()
}

/// Registers that the guest reads at the end, into [`STRINGS`].
const LEFT: [u32; 4] = [
    IA32_RTIT_STATUS,
    IA32_RTIT_OUTPUT_MASK_PTRS,
    IA32_X2APIC_BASE + 0x22,
    IA32_X2APIC_BASE + 0x34,
];

/// Traces a loop of its own, with indirect jumps and calls, and reads what has become of the trace.
fn program(a: &mut CodeAssembler) -> Result {
    for (at, entry) in [(0, FIRST | 4), (8, SECOND | 4 << 6), (16, u64::from(TABLE) | 1)] {
        a.mov(dword_ptr(TABLE + at), entry as u32)?;
        a.mov(dword_ptr(TABLE + at + 4), 0)?;
    }
    wrmsr(a, IA32_APIC_BASE, 0xfee0_0d00)?;
    wrmsr(a, IA32_X2APIC_BASE + 0xf, 0x1ff)?;
    wrmsr(a, IA32_X2APIC_BASE + 0x34, VECTOR.into())?;
    wrmsr(a, IA32_RTIT_OUTPUT_BASE, TABLE.into())?;
    wrmsr(a, IA32_RTIT_OUTPUT_MASK_PTRS, 0x7f)?;
    wrmsr(a, IA32_RTIT_CTL, control().into_bits())?;
    for rounds in [ROUNDS, 100] {
        rounds_of_branches(a, rounds)?;
        if rounds == ROUNDS {
            elsewhere(a)?;
        }
    }
    wrmsr(a, IA32_RTIT_CTL, 0)?;
    for (msr, at) in LEFT.into_iter().zip((STRINGS..).step_by(8)) {
        a.mov(ecx, msr)?;
        a.rdmsr()?;
        a.mov(dword_ptr(at), eax)?;
        a.mov(dword_ptr(at + 4), edx)?;
    }
    a.cli()?;
    a.hlt()
}

/// Exits up to OUT: six registers are written before it.
const EXITS: u64 = 7;

/// Instructions from OUT to the second of the indirect jumps behind it, both left out.
const BEHIND: u64 = 4;

/// An indirect jump to OUT, which is an exit, and some behind it.
fn elsewhere(a: &mut CodeAssembler) -> Result {
    let (mut out, mut first, mut second) = (a.create_label(), a.create_label(), a.create_label());
    a.lea(rax, ptr(out))?;
    a.jmp(rax)?;
    a.set_label(&mut out)?;
    a.out(0x80, al)?;
    a.lea(rax, ptr(first))?;
    a.jmp(rax)?;
    a.set_label(&mut first)?;
    a.nop()?;
    a.lea(rax, ptr(second))?;
    a.jmp(rax)?;
    a.set_label(&mut second)
}

fn rounds_of_branches(a: &mut CodeAssembler, rounds: u32) -> Result {
    let (mut again, mut there, mut sub, mut over) =
        (a.create_label(), a.create_label(), a.create_label(), a.create_label());
    a.mov(ebp, rounds)?;
    a.set_label(&mut again)?;
    a.lea(rax, ptr(there))?;
    a.jmp(rax)?;
    a.set_label(&mut sub)?;
    a.inc(rbx)?;
    a.ret()?;
    a.set_label(&mut there)?;
    a.call(sub)?;
    a.test(ebp, 4)?;
    a.je(over)?;
    a.nop()?;
    a.set_label(&mut over)?;
    a.dec(ebp)?;
    a.jne(again)
}

/// What a run leaves behind.
struct Left {
    trace: Vec<u8>,
    registers: [u64; 4],
    code: Vec<u8>,
    /// Handovers for a unit; none in the software engine.
    watched: u64,
}

fn run(engine: EngineChoice, traces: Option<Arc<dyn Traces>>) -> Left {
    run_until(engine, traces, |vm, console| vm.run(console).unwrap())
}

fn run_until(
    engine: EngineChoice,
    traces: Option<Arc<dyn Traces>>,
    drive: impl FnOnce(&mut Run, &mut Console) -> StopReason,
) -> Left {
    let folder = Folder::new();
    let config = MachineConfig {
        memory: 8 << 20,
        engine,
        kvm_defects: KvmDefects::Accept,
        model: &SAPPHIRERAPIDS,
        units: UnitRequests::default().with(Unit::Pt, traces.is_some().then_some(UnitRequest::Host)),
        host_trace: traces,
        ..MachineConfig::new(folder.file("program", guest(program)))
    };
    let mut vm = Run::new(&config).unwrap();
    let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    let end = drive(&mut vm, &mut console);
    assert!(matches!(end, StopReason::Ended(End::Halted(_))), "{end:?}");
    let read = |at: u64, len: usize| {
        let mut bytes = vec![0; len];
        vm.read_physical(at, &mut bytes).unwrap();
        bytes
    };
    let words = read(STRINGS.into(), 32);
    let registers = [0, 8, 16, 24].map(|at| u64::from_le_bytes(words[at..at + 8].try_into().unwrap()));
    let ptrs = RtitMaskPtrs::from_bits(registers[1]);
    let offset = ptrs.output_offset() as usize;
    let trace = match ptrs.mask_or_table_offset() {
        0 => read(FIRST, offset),
        1 => [read(FIRST, 4096), read(SECOND, offset)].concat(),
        other => panic!("in the table's entry {other}"),
    };
    Left {
        trace,
        registers,
        code: read(CODE, 0x3000),
        watched: vm.stats().native.map_or(0, |native| native.watched),
    }
}

/// The addresses of the instructions that a trace tells of.
fn instructions(left: &Left) -> Vec<u64> {
    let mut sections = Sections::new();
    sections.add(CODE, &left.code);
    let mut decoder = Decoder::new(sections, Timing::default());
    let mut log = Blocks::default();
    decoder.decode(&Chunk::whole(&left.trace), &mut log);
    assert_eq!(log.gaps, []);
    let one_by_one = |block: &Block| {
        let code = &left.code[(block.ip - CODE) as usize..];
        let decoder = iced_x86::Decoder::with_ip(64, code, block.ip, 0);
        let ips: Vec<u64> = decoder
            .into_iter()
            .take(block.count.into())
            .map(|one| one.ip())
            .collect();
        ips
    };
    log.blocks.iter().flat_map(one_by_one).collect()
}

/// Gives what was recorded, in pieces while the guest runs and the rest when it is stopped.
#[derive(Debug)]
struct Replay {
    recorded: Vec<u8>,
    stopped: bool,
}

impl Tracer for Replay {
    fn take(&mut self, into: &mut Vec<u8>) -> Taken {
        let len = if self.stopped {
            self.recorded.len()
        } else {
            self.recorded.len().min(1000)
        };
        into.extend(self.recorded.drain(..len));
        Taken::default()
    }

    fn stop(&mut self) -> io::Result<()> {
        self.stopped = true;
        Ok(())
    }
}

/// A host that has recorded this, and can trace with these bits.
#[derive(Debug)]
struct Recording {
    recorded: Mutex<VecDeque<Vec<u8>>>,
    bits: RtitCtl,
    fails: bool,
    asked: Mutex<Vec<RtitCtl>>,
}

impl Traces for Recording {
    fn served(&self, _caps: &PtCaps) -> Served {
        Served {
            bits: self.bits,
            ..Served::default()
        }
    }

    fn start(&self, ctl: RtitCtl, filter: &[(u64, u64)]) -> io::Result<Box<dyn Tracer>> {
        assert!(filter.is_empty());
        self.asked.lock().unwrap().push(ctl);
        if self.fails {
            return Err(io::Error::from_raw_os_error(16));
        }
        Ok(Box::new(Replay {
            recorded: self.recorded.lock().unwrap().pop_front().expect("another recording"),
            stopped: false,
        }))
    }
}

fn recording(recorded: impl Into<VecDeque<Vec<u8>>>, bits: RtitCtl, fails: bool) -> Arc<Recording> {
    Arc::new(Recording {
        recorded: Mutex::new(recorded.into()),
        bits,
        fails,
        asked: Mutex::default(),
    })
}

/// The packets of a guest's trace from the first instruction's TIP.PGE on, which is left out, and that instruction.
fn packets(trace: &[u8]) -> (u64, Vec<Packet>) {
    let packets: Vec<Packet> = Packets::new(trace).map(|item| item.unwrap().packet).collect();
    let begin = packets
        .iter()
        .position(|packet| matches!(packet, Packet::TipPge(_)))
        .unwrap();
    let Packet::TipPge(Some(first)) = packets[begin] else {
        panic!("a TIP.PGE without an IP");
    };
    (first, packets[begin + 1..].to_vec())
}

/// What a host's processor would have recorded of a guest that begins at `first` and has these packets: exits every now and then,
/// and the host in between. It ends in an exit, whose FUP is the guest's last packet.
fn by_a_host(first: u64, packets: &[Packet]) -> Vec<u8> {
    let (mut out, mut last_ip) = (Vec::new(), LastIp::new());
    let mut put = |packets: &[Packet]| {
        for packet in packets {
            let mut bytes = [0; MAX_LEN];
            let len = encode(packet, &mut last_ip, &mut bytes);
            out.extend(&bytes[..len]);
        }
    };
    const HOST: u64 = 0xffff_ffff_c000_1000;
    let pip = |non_root| Packet::Pip {
        cr3: if non_root { 0x20_0000 } else { 0x7_7000 },
        non_root,
    };
    let host_psb = [
        Packet::Psb,
        Packet::Cbr(30),
        pip(false),
        Packet::Vmcs(0x9000),
        Packet::ModeExec {
            mode: ExecMode::Bits64,
            interrupts: false,
        },
        Packet::Fup(Some(HOST)),
        Packet::PsbEnd,
    ];
    put(&host_psb);
    put(&[Packet::TipPge(Some(HOST)), pip(true), Packet::Tip(Some(first))]);
    let mut tips = 0;
    for &packet in packets {
        match packet {
            Packet::Pip { .. } => put(&[pip(true)]),
            other => put(&[other]),
        }
        if let Packet::Tip(ip) = packet {
            tips += 1;
            if tips % 50 == 0 {
                put(&[Packet::Fup(ip), pip(false), Packet::Tip(Some(HOST))]);
                if tips % 500 == 0 {
                    put(&host_psb);
                }
                put(&[pip(true), Packet::Tip(ip)]);
            }
        }
    }
    put(&[pip(false), Packet::Tip(Some(HOST + 0x40))]);
    assert!(tips > 100, "{tips}");
    out
}

fn branches() -> RtitCtl {
    RtitCtl::new().with_branch_en(true)
}

// covers: host-units/pt-kvm
#[test]
fn a_hosts_packets_arrive_in_the_guests_table() {
    if kvm_is_missing("a host's Intel PT for a guest") {
        return;
    }
    let engines = run(EngineChoice::Soft, None);
    let expected = instructions(&engines);
    assert!(expected.len() > ROUNDS as usize * 8, "{}", expected.len());
    let (first, mut packets) = packets(&engines.trace);
    // The end of the trace is an exit at the WRMSR.
    assert_eq!(packets.pop(), Some(Packet::TipPgd(None)));
    let host = recording([by_a_host(first, &packets)], branches(), false);
    let hosts = run(EngineChoice::Kvm, Some(host.clone()));
    assert_eq!(hosts.watched, 0, "the machine has not left KVM");
    assert_eq!(*host.asked.lock().unwrap(), [control()]);
    let found = instructions(&hosts);
    let differs = found.iter().zip(&expected).position(|(a, b)| a != b);
    assert_eq!((found.len(), differs), (expected.len(), None));
    for item in Packets::new(&hosts.trace) {
        let packet = item.unwrap().packet;
        assert!(!matches!(
            packet,
            Packet::Vmcs(_) | Packet::Pip { non_root: true, .. } | Packet::Ovf
        ));
    }
    // The first region asked for an interrupt, and the second goes on being filled.
    for left in [&engines, &hosts] {
        let [status, ptrs, pending, entry] = left.registers;
        assert_eq!(status & 0x34, 0, "neither TriggerEn nor Error nor Stopped");
        assert_eq!(RtitMaskPtrs::from_bits(ptrs).mask_or_table_offset(), 1);
        assert_eq!(pending, 1, "vector 40H");
        assert_eq!(entry, u64::from(VECTOR) | 1 << 16, "masked by its own interrupt");
    }
}

// covers: kvm/panic
#[test]
fn a_panic_on_a_cpus_thread_ends_the_run() {
    if kvm_is_missing("a panic on a CPU's thread") {
        return;
    }
    let without_recordings = recording([], branches(), false);
    let panic = std::panic::catch_unwind(|| run(EngineChoice::Kvm, Some(without_recordings)));
    let panic = panic.err().expect("the run panics");
    assert_eq!(
        panic.downcast_ref::<String>().map(String::as_str),
        Some("another recording")
    );
}

// covers: host-units/pt-join
#[test]
fn a_guest_that_the_engine_takes_over_has_one_trace() {
    if kvm_is_missing("a host's Intel PT joined with the engine's") {
        return;
    }
    let engines = run(EngineChoice::Soft, None);
    let expected = instructions(&engines);
    let (first, mut packets) = packets(&engines.trace);
    assert_eq!(packets.pop(), Some(Packet::TipPgd(None)));
    // OUT is the only instruction of its kind, E6H, and a TIP leads to it; another to the first label behind it.
    let out = *expected
        .iter()
        .find(|&&ip| engines.code[(ip - CODE) as usize] == 0xe6)
        .unwrap();
    let at = expected.iter().position(|ip| *ip == out).unwrap();
    let tip_to = |ip: u64| {
        packets
            .iter()
            .position(|packet| *packet == Packet::Tip(Some(ip)))
            .unwrap()
            + 1
    };
    let (before, behind) = (tip_to(out), tip_to(expected[at + 3]));
    let mut until_out = packets[..before].to_vec();
    until_out.push(Packet::Fup(Some(out)));
    let resumed = expected[at + 1 + BEHIND as usize];
    let recordings = [by_a_host(first, &until_out), by_a_host(resumed, &packets[behind..])];
    let host = recording(recordings, branches(), false);
    let left = run_until(EngineChoice::Kvm, Some(host.clone()), |vm, console| {
        let end = vm.run_native(console, Limit::Exits(EXITS)).unwrap();
        assert!(end.is_none(), "{end:?}");
        assert_eq!(vm.cpu_state(0).unwrap().rip, out + 2, "behind OUT");
        let end = vm.run_for(console, BEHIND).unwrap();
        assert!(end.is_none(), "{end:?}");
        assert_eq!(vm.cpu_state(0).unwrap().rip, resumed);
        vm.run(console).unwrap()
    });
    assert_eq!(host.asked.lock().unwrap().len(), 2);
    let found = instructions(&left);
    let differs = found.iter().zip(&expected).position(|(a, b)| a != b);
    assert_eq!((found.len(), differs), (expected.len(), None));
    assert!(!Packets::new(&left.trace).any(|item| item.unwrap().packet == Packet::Ovf));
}

// covers: host-units/pt-kvm, host-units/pt-served
#[test]
fn what_the_host_cannot_trace_the_engine_does() {
    if kvm_is_missing("an Intel PT of the host's that cannot do what is asked for") {
        return;
    }
    let expected = instructions(&run(EngineChoice::Soft, None));
    // It has no branches; or it has, and refuses.
    for (bits, fails) in [(RtitCtl::new(), false), (branches(), true)] {
        let host = recording([], bits, fails);
        let left = run(EngineChoice::Kvm, Some(host.clone()));
        assert_eq!(left.watched, 1, "fails: {fails}");
        assert_eq!(host.asked.lock().unwrap().len(), usize::from(fails));
        assert!(instructions(&left) == expected);
        assert_eq!(left.registers[2], 1, "its interrupt comes, too");
    }
}

// covers: host-units/pt-refused
#[test]
fn a_host_without_it_says_so() {
    if kvm_is_missing("--pt=host") {
        return;
    }
    let folder = Folder::new();
    let image = folder.file("program", guest(program));
    if std::fs::metadata(kvm::tracer::PMU).is_err() {
        let mut command = minivmm();
        command.args([
            "--engine",
            "kvm",
            "--kvm-defects",
            "accept",
            "--cpu-model",
            "sapphirerapids",
            "--pt=host",
        ]);
        let output = common::run(command.arg("--kernel").arg(&image));
        assert_refused(&output, 2, &["--pt=host"]);
    }
}
