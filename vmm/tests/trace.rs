//! `--trace`: small guests are recorded, and what is read back is what ran.

use crate::common;
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::*;
use iced_x86::code_asm::*;
use minivmm::recording::{Filter, RecordingOptions, When};
use minivmm::{Console, MachineConfig, Run, SerialTarget};
use minivmm::{config::DiskConfig, machine::disk::DiskMode};
use pt_flow::{Block, Event, EventKind, Visitor};
use trace::{self, Decode, Start, State, Summary, Trace};
use x86::watch::HYPERCALL;

/// A block with its bytes and CR3.
type Ran = (Block, Vec<u8>, Option<u64>);

/// Blocks and gaps.
struct Log {
    state: State,
    blocks: Vec<Ran>,
    bytes: Vec<u8>,
    gaps: Vec<Event>,
}

impl Log {
    fn new(start: &Start) -> Log {
        Log {
            state: State::new(start),
            blocks: Vec::new(),
            bytes: Vec::new(),
            gaps: Vec::new(),
        }
    }
}

impl Visitor for Log {
    const CODE: bool = true;

    fn code(&mut self, _: &Block, bytes: &[u8]) {
        self.bytes = bytes.to_vec();
    }
    fn block(&mut self, block: &Block) {
        self.blocks
            .push((*block, std::mem::take(&mut self.bytes), self.state.cr3));
    }
    fn event(&mut self, event: &Event) {
        self.state.event(event);
        if matches!(event.kind, EventKind::Gap(_)) {
            self.gaps.push(*event);
        }
    }
}

/// Everything that the first vCPU's trace holds.
fn read(folder: &Path) -> (Vec<Ran>, Vec<Event>, Summary) {
    let trace = Trace::open(folder).unwrap();
    let (mut blocks, mut gaps) = (Vec::new(), Vec::new());
    let summary = trace.decode(0, &Decode::default(), Log::new, |log, _| {
        blocks.extend(log.blocks);
        gaps.extend(log.gaps);
    });
    (blocks, gaps, summary.unwrap())
}

/// Where the routine of the guests is: behind the header, MOV ESP and a short jump over it.
const ROUTINE: u32 = BASE + 32 + 5 + 2;

/// A routine at ROUTINE whose byte at ROUTINE + 2 is what it adds to EBX.
fn routine(a: &mut CodeAssembler) {
    let mut over = a.create_label();
    a.jmp(over).unwrap();
    // 83 C3 ib
    a.add(ebx, 0x7f).unwrap();
    a.ret().unwrap();
    a.set_label(&mut over).unwrap();
}

/// Adds up 1 to 100 by a CALL a number, in the byte of an instruction that it changes each time.
fn changing(a: &mut CodeAssembler) {
    let mut again = a.create_label();
    routine(a);
    a.mov(ecx, 100).unwrap();
    a.mov(edi, ROUTINE).unwrap();
    a.set_label(&mut again).unwrap();
    a.mov(byte_ptr(edi + 2), cl).unwrap();
    a.call(edi).unwrap();
    a.dec(ecx).unwrap();
    a.jnz(again).unwrap();
    debug_exit(a, 1);
}

// covers: trace/record
// covers: trace/self-modifying
#[test]
fn code_that_changes_is_read_as_it_was_executed() {
    let folder = Folder::new();
    let kernel = folder.file("guest", guest(changing));
    let run = |trace: Option<RecordingOptions>| {
        let config = MachineConfig {
            memory: 4 << 20,
            trace,
            ..MachineConfig::new(&kernel)
        };
        let mut vm = Run::new(&config).unwrap();
        let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
        vm.run(&mut console).unwrap();
        vm.end_trace("the test").unwrap();
        vm.stats()
    };
    let at = folder.path().join("trace");
    let (traced, plain) = (run(Some(RecordingOptions::new(&at))), run(None));
    assert_eq!(traced.digest, plain.digest, "the guest cannot tell");
    let (blocks, gaps, summary) = read(&at);
    assert_eq!((&gaps[..], summary.lost, &summary.damage[..]), (&[][..], 0, &[][..]));
    assert_eq!(summary.flow.instructions, plain.instructions);
    let added: Vec<u8> = blocks
        .iter()
        .filter(|(_, bytes, _)| bytes[..2] == [0x83, 0xc3])
        .map(|(_, bytes, _)| bytes[2])
        .collect();
    assert_eq!(added, (1..=100).rev().collect::<Vec<u8>>());
    let header = Trace::open(&at).unwrap().header().clone();
    let end = header.end.unwrap();
    assert_eq!(
        (header.model.as_str(), end.steps, end.complete),
        ("westmere", plain.steps, true)
    );
}

// covers: trace/force
#[test]
fn what_is_there_is_not_overwritten() {
    let folder = Folder::new();
    let kernel = folder.file("guest", guest(changing));
    let trace = |at: &Path, more: &[&str]| {
        let mut command = minivmm();
        command
            .args(["-m", "4M", "--serial", "null", "--clock", "virtual", "--kernel"])
            .arg(&kernel)
            .arg("--trace")
            .arg(at)
            .args(more);
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), text)
    };
    let at = folder.path().join("trace");
    assert_eq!(trace(&at, &[]), (Some(3), String::new()));
    let end = Trace::open(&at).unwrap().header().end.clone().unwrap();
    assert_eq!(end.reason, "the guest wrote 1 to the debug-exit port");
    let before = fs::read(at.join("cpu0-000000.pt")).unwrap();
    let (status, text) = trace(&at, &[]);
    assert_eq!((status, text.lines().count()), (Some(2), 1), "{text}");
    assert!(text.contains("--force") && text.contains("--trace"), "{text}");
    assert_eq!(fs::read(at.join("cpu0-000000.pt")).unwrap(), before);
    assert_eq!(trace(&at, &["--force"]), (Some(3), String::new()));
    assert_eq!(
        fs::read(at.join("cpu0-000000.pt")).unwrap(),
        before,
        "a run repeats to the bit"
    );
    // Somebody's own file is no trace, whatever is beside it.
    fs::write(at.join("notes.txt"), "mine").unwrap();
    let (status, text) = trace(&at, &["--force"]);
    assert!(status == Some(2) && text.contains("notes.txt"), "{text}");
    assert_eq!(fs::read(at.join("notes.txt")).unwrap(), b"mine");
    assert_eq!(fs::read(at.join("cpu0-000000.pt")).unwrap(), before);
    // An empty directory will do.
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).unwrap();
    assert_eq!(trace(&empty, &[]), (Some(3), String::new()));
    assert!(read(&empty).1.is_empty());
    let (status, text) = trace(&folder.path().join("no/such/parent"), &[]);
    assert!(status == Some(2) && text.contains("no/such/parent"), "{text}");
}

/// Sectors of a disk, read one after the other to one place by virtio-mmio and called there: sector N is N + 1 NOPs and a RET.
fn calling_sectors(a: &mut CodeAssembler) {
    read_sectors(a, SECTOR);
    let mut again = a.create_label();
    a.xor(esi, esi).unwrap();
    a.mov(edi, SECTOR).unwrap();
    a.set_label(&mut again).unwrap();
    a.mov(dword_ptr(SECTOR_NUMBER), esi).unwrap();
    a.inc(word_ptr(AVAILABLE + 2)).unwrap();
    a.mov(dword_ptr(DISK + 0x50), 0).unwrap();
    a.call(edi).unwrap();
    a.inc(esi).unwrap();
    a.cmp(esi, 8).unwrap();
    a.jne(again).unwrap();
    debug_exit(a, 1);
}

/// Where the sectors are read to.
const SECTOR: u32 = 0x21_0000;

// covers: trace/device-written
#[test]
fn code_that_a_device_has_written_is_read_as_it_was_executed() {
    let folder = Folder::new();
    let sector = |n: usize| {
        let mut sector = vec![0x90; n + 1];
        sector.resize(512, 0xc3);
        sector
    };
    let disk = folder.file("disk", (0..8).flat_map(sector).collect::<Vec<u8>>());
    let at = folder.path().join("trace");
    let config = MachineConfig {
        memory: 4 << 20,
        disks: vec![DiskConfig {
            path: disk,
            mode: DiskMode::ReadOnly,
            format: None,
        }],
        trace: Some(RecordingOptions::new(&at)),
        ..MachineConfig::new(folder.file("guest", guest(calling_sectors)))
    };
    let mut vm = Run::new(&config).unwrap();
    let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    vm.run(&mut console).unwrap();
    vm.end_trace("the test").unwrap();
    let (blocks, gaps, summary) = read(&at);
    assert_eq!((&gaps[..], summary.lost, &summary.damage[..]), (&[][..], 0, &[][..]));
    assert_eq!(summary.flow.instructions, vm.stats().instructions);
    let ran: Vec<&[u8]> = blocks
        .iter()
        .filter(|(block, ..)| block.ip == u64::from(SECTOR))
        .map(|(_, bytes, _)| &bytes[..])
        .collect();
    let expected: Vec<Vec<u8>> = (0..8).map(|n| sector(n)[..n + 2].to_vec()).collect();
    assert_eq!(ran, expected);
}

/// Records a guest; gives the directory and what a run without `--trace` retires.
fn recorded(
    folder: &Folder,
    code: impl FnOnce(&mut CodeAssembler),
    change: impl Fn(&mut RecordingOptions),
) -> (PathBuf, u64) {
    record(folder, guest(code), change)
}

/// The same of an image.
fn record(folder: &Folder, image: Vec<u8>, change: impl Fn(&mut RecordingOptions)) -> (PathBuf, u64) {
    let kernel = folder.file("guest", image);
    let at = folder.path().join("trace");
    let _ = fs::remove_dir_all(&at);
    let mut options = RecordingOptions::new(&at);
    change(&mut options);
    let config = MachineConfig {
        memory: 4 << 20,
        trace: Some(options),
        max_instructions: Some(20_000_000),
        ..MachineConfig::new(&kernel)
    };
    let mut vm = Run::new(&config).unwrap();
    let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
    vm.run(&mut console).unwrap();
    vm.end_trace("the test").unwrap();
    (at, vm.stats().instructions)
}

/// Branches that a generator decides, a code byte that changes now and then, and an ending.
fn long(a: &mut CodeAssembler, rounds: u32) {
    let (mut again, mut skip, mut same) = (a.create_label(), a.create_label(), a.create_label());
    routine(a);
    a.mov(ecx, rounds).unwrap();
    a.mov(edi, ROUTINE).unwrap();
    a.mov(eax, 1).unwrap();
    a.set_label(&mut again).unwrap();
    a.imul_3(eax, eax, 0x0019_660d).unwrap();
    a.add(eax, 0x3c6e_f35f).unwrap();
    a.test(eax, 0x1000_0000).unwrap();
    a.jz(skip).unwrap();
    a.inc(edx).unwrap();
    a.set_label(&mut skip).unwrap();
    a.test(ecx, 0xfff).unwrap();
    a.jnz(same).unwrap();
    a.inc(byte_ptr(edi + 2)).unwrap();
    a.set_label(&mut same).unwrap();
    a.call(edi).unwrap();
    a.dec(ecx).unwrap();
    a.jnz(again).unwrap();
    debug_exit(a, 1);
}

// covers: trace/ring
#[test]
fn a_ring_keeps_the_last_and_it_decodes() {
    let folder = Folder::new();
    let size = 512 << 10;
    let (whole, instructions) = recorded(&folder, |a| long(a, 700_000), |_| {});
    let trace = Trace::open(&whole).unwrap();
    let all = trace.extent(0).end;
    assert!(all > 3 * size, "{all} bytes of packets");
    let count = |at: &Path| Trace::open(at).unwrap().count(0, &Decode::default(), |_| {}).unwrap();
    let (_, summary) = count(&whole);
    assert_eq!((summary.flow.instructions, summary.flow.gaps), (instructions, 0));

    let (ring, _) = recorded(&folder, |a| long(a, 700_000), |options| options.buffer = Some(size));
    let trace = Trace::open(&ring).unwrap();
    let extent = trace.extent(0);
    // PSBs stand elsewhere than in the whole.
    assert!(
        extent.end.abs_diff(all) < 4096 && extent.start > 0,
        "{extent:?} of {all}"
    );
    let kept = extent.end - extent.start;
    assert!(kept <= size && kept >= size * 3 / 4, "{kept}");
    let (_, summary) = count(&ring);
    assert_eq!((summary.flow.gaps, summary.lost, &summary.damage[..]), (0, 0, &[][..]));
    assert_eq!(summary.flow.bytes, kept);
    let info = trace.info(0);
    assert!(
        info.ended.is_some() && info.segments >= 6 && info.changes > 10,
        "{info:?}"
    );
    // The last instructions are those of the whole.
    let (blocks, gaps, _) = read(&ring);
    let last = blocks.last().unwrap();
    let (whole, _, _) = read(&recorded(&folder, |a| long(a, 700_000), |_| {}).0);
    assert_eq!((last, &gaps[..]), (whole.last().unwrap(), &[][..]));
}

// covers: trace/filters
#[test]
fn filters_let_through_what_they_say() {
    let folder = Folder::new();
    let (_, all) = recorded(&folder, changing, |_| {});
    let add = u64::from(ROUTINE);
    for (filter, expected) in [
        (vec![Filter::Kernel], all),
        (vec![Filter::User], 0),
        (vec![Filter::Kernel, Filter::User], all),
        (vec![Filter::Cr3(0)], all),
        (vec![Filter::Cr3(0x1000)], 0),
        (vec![Filter::Ip(add, add + 3)], 200),
        (vec![Filter::Ip(add, add)], 100),
        (vec![Filter::Ip(0, u64::from(u32::MAX)), Filter::User], 0),
    ] {
        let (at, _) = recorded(&folder, changing, |options| options.filters.clone_from(&filter));
        let (blocks, gaps, summary) = read(&at);
        assert_eq!((&gaps[..], &summary.damage[..]), (&[][..], &[][..]), "{filter:?}");
        assert_eq!(summary.flow.instructions, expected, "{filter:?}");
        if expected == 200 {
            let added: Vec<u8> = blocks.iter().map(|(_, bytes, _)| bytes[2]).collect();
            assert_eq!(
                added,
                (1..=100).rev().collect::<Vec<u8>>(),
                "code that changes between what is traced"
            );
        }
    }
}

// covers: trace/triggers
#[test]
fn recording_begins_and_stops_where_it_is_told() {
    let folder = Folder::new();
    // Ten times: VMCALL 1, an INC, VMCALL 0, a DEC; ports 80H beside them.
    let code = |a: &mut CodeAssembler| {
        let mut again = a.create_label();
        a.mov(ecx, 10).unwrap();
        a.set_label(&mut again).unwrap();
        a.mov(eax, HYPERCALL).unwrap();
        a.mov(ebx, 1).unwrap();
        a.vmcall().unwrap();
        a.inc(esi).unwrap();
        a.mov(ebx, 0).unwrap();
        a.vmcall().unwrap();
        out(a, 0x80, 1);
        a.dec(edi).unwrap();
        out(a, 0x80, 2);
        a.dec(ecx).unwrap();
        a.jnz(again).unwrap();
        debug_exit(a, 1);
    };
    let (at, all) = recorded(&folder, code, |_| {});
    let (blocks, gaps, summary) = read(&at);
    assert_eq!((&gaps[..], summary.flow.instructions), (&[][..], all));
    // Behind the first VMCALL is the INC.
    let call = blocks
        .iter()
        .position(|(_, bytes, _)| bytes.ends_with(&[0x0f, 0x01, 0xc1]));
    let (block, bytes, _) = &blocks[call.unwrap() + 1];
    let (inc, after) = (block.ip, block.ip + if bytes[0] == 0x46 { 1 } else { 2 });
    for (start, stop, expected) in [
        // INC, MOV and the VMCALL that ends it.
        (Some(When::Hypercall), Some(When::Hypercall), 30),
        // The MOV of DX and AL, and OUT, beside the DEC.
        (Some(When::Port(0x80, Some(1))), Some(When::Port(0x80, Some(2))), 40),
        (Some(When::Address(inc)), Some(When::Address(after)), 10),
        (Some(When::Instructions(5)), Some(When::Instructions(25)), 20),
        (None, Some(When::Instructions(25)), 25),
        (Some(When::Instructions(all - 7)), None, 7),
        (Some(When::Port(0x81, None)), None, 0),
    ] {
        let (at, retired) = recorded(&folder, code, |options| {
            (options.start, options.stop) = (start.clone(), stop.clone());
        });
        assert_eq!(retired, all);
        let (_, gaps, summary) = read(&at);
        assert_eq!(
            (&gaps[..], summary.flow.instructions),
            (&[][..], expected),
            "{start:?} {stop:?}"
        );
    }
}

// covers: trace/triggers
#[test]
fn a_symbol_begins_and_ends_a_recording() {
    let folder = Folder::new();
    let kernel = folder.file("guest", guest(changing));
    let map = folder.file(
        "System.map",
        format!("{BASE:08x} T _text\n{ROUTINE:08x} T adds\n{:08x} T end\n", ROUTINE + 3),
    );
    let at = folder.path().join("trace");
    let run = |start: &str, stop: &str, symbols: bool| {
        let mut command = minivmm();
        command
            .args(["-m", "4M", "--force", "--kernel"])
            .arg(&kernel)
            .arg("--trace")
            .arg(&at);
        command.args(["--trace-start", start, "--trace-stop", stop]);
        if symbols {
            command.arg("--symbols").arg(&map);
        }
        let output = run(&mut command);
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    // From ADD up to its RET, a hundred times.
    assert_eq!(run("adds", "end", true), (Some(3), String::new()));
    let (blocks, gaps, summary) = read(&at);
    assert_eq!((&gaps[..], summary.flow.instructions), (&[][..], 100));
    assert!(blocks.iter().all(|(block, ..)| block.ip == u64::from(ROUTINE)));
    for (start, symbols, says) in [
        ("subtracts", true, "no symbol subtracts"),
        ("adds", false, "--symbols FILE"),
    ] {
        let (status, text) = run(start, "end", symbols);
        assert!(status == Some(2) && text.contains(says), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }
}

/// Ticks of a trace, as packets tell them.
struct Times(Vec<u64>);

impl Visitor for Times {
    fn block(&mut self, _: &Block) {}
    fn event(&mut self, event: &Event) {
        if let EventKind::Time(time) = event.kind {
            self.0.extend(time.tsc);
        }
    }
}

// covers: trace/tsc
#[test]
fn a_tsc_that_the_guest_moves_is_told_and_moves_no_time_of_the_trace() {
    let folder = Folder::new();
    // Far ahead, and back to the beginning, with some hundred thousand instructions before, between and behind.
    let (at, _) = recorded(
        &folder,
        |a| {
            for high in [0, 0x1000, 0] {
                let mut again = a.create_label();
                a.mov(ecx, 0x10).unwrap();
                a.xor(eax, eax).unwrap();
                a.mov(edx, high).unwrap();
                a.wrmsr().unwrap();
                a.mov(ecx, 200_000).unwrap();
                a.set_label(&mut again).unwrap();
                a.dec(ecx).unwrap();
                a.jnz(again).unwrap();
            }
            debug_exit(a, 1);
        },
        |_| {},
    );
    let trace = Trace::open(&at).unwrap();
    // What the TSC is ahead by is reported at the beginning, too.
    assert_eq!(trace.info(0).tsc_moves, 1 + 3);
    let mut times = Vec::new();
    let options = Decode {
        threads: 1,
        ..Decode::default()
    };
    let make = |_: &Start| Times(Vec::new());
    trace
        .decode(0, &options, make, |found, _| times.extend(found.0))
        .unwrap();
    let end = trace.header().end.clone().unwrap().ticks;
    assert!(times.len() > 20, "{times:?}");
    assert!(
        times.is_sorted() && times.iter().all(|time| *time <= end),
        "{times:?} to {end}"
    );
}

/// SDM Vol. 3C 33.4.2.2 and table 33-50, "Interrupts and exceptions": a FUP has the address of INT n itself, as if it had not been executed.
// covers: decoder/software-interrupts
#[test]
fn software_interrupts_are_told_as_events_and_all_else_as_instructions() {
    let folder = Folder::new();
    let image = interrupt_guest(
        0xff,
        0x20,
        |a| {
            for _ in 0..10 {
                a.int(0x20).unwrap();
                a.nop().unwrap();
            }
            debug_exit(a, 1);
        },
        |_, _| {},
    );
    let (at, retired) = record(&folder, image, |_| {});
    let (blocks, gaps, summary) = read(&at);
    assert_eq!(&gaps[..], &[]);
    assert_eq!(summary.flow.instructions + 10, retired);
    assert!(blocks.iter().all(|(_, bytes, _)| !bytes.ends_with(&[0xcd, 0x20])));
}

/// Wakes from HLT are moments of the recording, too, but no decoder can begin there.
// covers: trace/window
#[test]
fn a_window_may_begin_anywhere_also_where_the_guest_slept() {
    let folder = Folder::new();
    let image = interrupt_guest(
        0xfe,
        0x20,
        |a| {
            // PIT channel 0, every 1193 ticks: a millisecond.
            for (port, value) in [(0x43, 0x34), (0x40, 0xa9), (0x40, 0x04)] {
                out(a, port, value);
            }
            a.xor(esi, esi).unwrap();
        },
        |a, quit| {
            a.inc(esi).unwrap();
            a.cmp(esi, 40).unwrap();
            a.je(quit).unwrap();
        },
    );
    let (at, _) = record(&folder, image, |_| {});
    let trace = Trace::open(&at).unwrap();
    let wakes: Vec<u64> = trace
        .clock(0)
        .syncs()
        .iter()
        .filter(|sync| !sync.psb)
        .map(|sync| sync.step)
        .collect();
    assert!(wakes.len() >= 39, "{} wakes", wakes.len());
    let (_, whole) = trace.count(0, &Decode::default(), |_| {}).unwrap();
    for step in wakes {
        let options = Decode {
            from: trace::At::Step(step + 1),
            ..Decode::default()
        };
        let (_, part) = trace.count(0, &options, |_| {}).unwrap();
        // There is one PSB, at the beginning: nothing is left out, and nothing is a gap.
        assert_eq!(
            (part.flow.instructions, part.flow.gaps),
            (whole.flow.instructions, 0),
            "from {step}"
        );
    }
}

// covers: trace/kill
#[test]
fn a_run_that_is_killed_leaves_what_was_written() {
    let folder = Folder::new();
    let kernel = folder.file("guest", guest(|a| long(a, u32::MAX)));
    let at = folder.path().join("trace");
    let mut child = minivmm()
        .args(["-m", "4M", "--serial", "null", "--clock", "virtual", "--kernel"])
        .arg(&kernel)
        .arg("--trace")
        .arg(&at)
        .spawn()
        .unwrap();
    let begun = Instant::now();
    let packets = at.join("cpu0-000000.pt");
    while fs::metadata(&packets).map_or(0, |file| file.len()) < 1 << 20 {
        assert!(begun.elapsed() < Duration::from_secs(60), "nothing is written");
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let trace = Trace::open(&at).unwrap();
    assert_eq!(trace.header().end, None);
    assert!(trace.info(0).ended.is_none());
    let (_, summary) = trace.count(0, &Decode::default(), |_| {}).unwrap();
    // What is cut off is the end: the last frame may be.
    assert!(
        summary.flow.gaps <= 1 && summary.flow.instructions > 1_000_000,
        "{summary:?}"
    );
}

/// What is left of a run whose trace found no room any more.
fn cut_short(output: &std::process::Output, at: &Path, policy: &str) {
    let status = if policy == "stop" { 2 } else { 3 };
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{policy}: {text}");
    assert!(
        text.contains("--trace") && text.lines().count() == 1,
        "{policy}: {text}"
    );
    let trace = Trace::open(at).unwrap();
    let (_, summary) = trace.count(0, &Decode::default(), |_| {}).unwrap();
    assert!(summary.flow.instructions > 1_000_000, "{policy}: {summary:?}");
    assert!(summary.flow.gaps <= 2, "{policy}: {summary:?}");
    let names = fs::read_dir(at).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(
        names.into_iter().all(|name| !name.to_string_lossy().ends_with(".new")),
        "{policy}: something half written"
    );
    // Where there is no room for that either, the header still says that the trace has not ended.
    let end = trace.header().end.as_ref();
    assert!(end.is_none_or(|end| !end.complete), "{policy}: {end:?}");
}

/// `--trace` of a guest that writes more than there is room for.
const MUCH: [&str; 8] = [
    env!("CARGO_BIN_EXE_minivmm"),
    "-m",
    "4M",
    "--serial",
    "null",
    "--clock",
    "virtual",
    "--kernel",
];

// covers: trace/full-disk
#[test]
fn a_full_disk_stops_the_run_or_does_not() {
    let folder = Folder::new();
    let kernel = folder.file("guest", guest(|a| long(a, 7_000_000)));
    let mut ends = Vec::new();
    for (policy, name) in [("stop", "stop"), ("stop", "again"), ("continue", "continue")] {
        let at = folder.path().join(name);
        // Files of 16 MiB at most, which is room for what the engine makes, and no signal for it.
        let script = "trap '' XFSZ; ulimit -f 16384; exec \"$@\"";
        let output = std::process::Command::new("bash")
            .args(["-c", script, "bash"])
            .args(MUCH)
            .arg(&kernel)
            .arg("--trace")
            .arg(&at)
            .args(["--trace-on-error", policy])
            .output()
            .unwrap();
        cut_short(&output, &at, policy);
        let end = Trace::open(&at).unwrap().header().end.clone();
        ends.extend(end.filter(|_| policy == "stop").map(|end| end.steps));
    }
    // What ends it is what was to be written, not how soon it was.
    assert!(matches!(ends[..], [first, second] if first == second), "{ends:?}");
}

/// Code that changes all the time is what makes a trace long, not its packets.
// covers: trace/limit
#[test]
fn a_limit_holds_for_packets_code_and_sideband_of_all_cpus() {
    let folder = Folder::new();
    for (what, code) in [
        ("packets", guest(|a| long(a, 7_000_000))),
        (
            "code",
            guest(|a| {
                // Each time round the instruction behind the store is another one.
                let mut again = a.create_label();
                a.mov(ecx, 100_000u32).unwrap();
                a.set_label(&mut again).unwrap();
                let mut here = a.create_label();
                a.call(here).unwrap();
                a.set_label(&mut here).unwrap();
                a.pop(esi).unwrap();
                a.mov(byte_ptr(esi + 5), cl).unwrap();
                a.db(&[0xb0, 0]).unwrap();
                a.mov(byte_ptr(esi + 5), ch).unwrap();
                a.dec(ecx).unwrap();
                a.jne(again).unwrap();
                debug_exit(a, 1);
            }),
        ),
    ] {
        let kernel = folder.file(what, code);
        for policy in ["stop", "continue"] {
            for limit in [3 << 20, 100] {
                let at = folder.path().join(format!("{what}-{policy}-{limit}"));
                let mut command = minivmm();
                command.args([
                    "--serial",
                    "null",
                    "--clock",
                    "virtual",
                    "--cpus",
                    "2",
                    "--trace-on-error",
                    policy,
                ]);
                command.arg("--kernel").arg(&kernel).arg("--trace").arg(&at);
                let result = run(command.arg("--trace-limit").arg(limit.to_string()));
                let errors = String::from_utf8_lossy(&result.stderr).into_owned();
                assert!(
                    errors.contains(&format!("no more than {limit} bytes")),
                    "{what}: {errors}"
                );
                assert_eq!(errors.lines().count(), 1, "{errors}");
                assert_eq!(result.status.code() == Some(2), policy == "stop", "{what}: {errors}");
                let segments = files(&at).into_iter().filter(|(name, _)| name.starts_with("cpu"));
                let size: usize = segments.map(|(_, bytes)| bytes.len()).sum();
                assert!(size <= limit, "{what}: {size} bytes");
                assert!(limit < 1000 || size > limit / 2, "{what}: {size} bytes");
                let trace = Trace::open(&at).unwrap();
                assert!(trace.header().end.as_ref().is_none_or(|end| !end.complete), "{what}");
                if limit > 1000 {
                    let (_, summary) = trace.count(0, &Decode::default(), |_| {}).unwrap();
                    assert!(summary.flow.instructions > 1000, "{what}: {summary:?}");
                }
            }
        }
    }
}

/// What a guest had in memory is its user's alone, whatever the umask lets others have.
// covers: trace/private
#[test]
fn a_trace_and_a_session_are_their_owners_alone() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    folder.file("kernel", echo());
    for umask in ["000", "022", "077"] {
        let script = format!(
            "umask {umask}; printf q | exec {} --kernel kernel --clock virtual --record session-{umask} --trace trace-{umask}",
            env!("CARGO_BIN_EXE_minivmm")
        );
        let mut command = std::process::Command::new("sh");
        let result = run(command.current_dir(folder.path()).args(["-c", &script]));
        assert_eq!(
            result.status.code(),
            Some(0),
            "{}",
            String::from_utf8_lossy(&result.stderr)
        );
        for directory in ["session", "trace"] {
            let path = folder.path().join(format!("{directory}-{umask}"));
            let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode(&path), 0o700, "{directory}");
            assert!(fs::read_dir(&path).unwrap().count() >= 2);
            for entry in fs::read_dir(&path).unwrap() {
                let path = entry.unwrap().path();
                assert_eq!(mode(&path), 0o600, "{}", path.display());
            }
        }
    }
}

/// The same with a file system that really is full, as large as it is made here: only the process and its children see it.
// covers: trace/full-disk
#[test]
fn a_full_file_system_stops_the_run_or_does_not() {
    let folder = Folder::new();
    let kernel = folder.file("guest", guest(|a| long(a, 7_000_000)));
    let small = folder.path().join("small");
    fs::create_dir(&small).unwrap();
    let alone = |script: &str| {
        let mut command = std::process::Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "bash", "-c", script, "bash"]);
        command.arg(&small);
        command
    };
    let possible = alone("mount -t tmpfs -o size=1m none \"$1\"").output();
    if !possible.as_ref().is_ok_and(|output| output.status.success()) {
        println!("left out: this host lets nobody mount a file system of his own: {possible:?}");
        return;
    }
    for policy in ["stop", "continue"] {
        let copy = folder.path().join(policy);
        let script = "mount -t tmpfs -o size=8m none \"$1\" || exit 99; \
                      \"${@:3}\"; status=$?; cp -r \"$1/trace\" \"$2\" || exit 98; exit $status";
        let output = alone(script)
            .arg(&copy)
            .args(MUCH)
            .arg(&kernel)
            .arg("--trace")
            .arg(small.join("trace"))
            .args(["--trace-on-error", policy])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("no space left"), "{policy}: {text}");
        cut_short(&output, &copy, policy);
    }
    assert_eq!(
        fs::read_dir(&small).unwrap().count(),
        0,
        "it was mounted for them alone"
    );
}

/// A copy of a directory, which is done something to.
fn damaged(from: &Path, to: &Path, file: &str, f: impl FnOnce(&mut Vec<u8>)) {
    let _ = fs::remove_dir_all(to);
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
    }
    let mut bytes = fs::read(to.join(file)).unwrap();
    f(&mut bytes);
    fs::write(to.join(file), bytes).unwrap();
}

// covers: trace/damage
#[test]
fn what_is_cut_or_flipped_is_missed_and_told_and_the_rest_decodes() {
    let folder = Folder::new();
    let (at, all) = recorded(&folder, |a| long(a, 300_000), |_| {});
    let (blocks, ..) = read(&at);
    let known: HashSet<Ran> = blocks.into_iter().collect();
    let copy = folder.path().join("copy");
    let rounds = if std::env::var_os("MINIVMM_FULL").is_some() {
        400
    } else {
        24
    };
    let mut random = 0x1234_5678_9abc_def1u64;
    let mut draw = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 11) as usize % below
    };
    for round in 0..rounds {
        let file = ["cpu0-000000.pt", "cpu0-000000.side"][round % 2];
        let (cut, place, bit) = (round / 2 % 2 == 0, draw(usize::MAX >> 12), draw(8));
        let mut what = String::new();
        damaged(&at, &copy, file, |bytes| {
            let place = place % bytes.len();
            what = format!(
                "{file} {} at {place:#x} of {:#x}",
                if cut { "cut" } else { "flipped" },
                bytes.len()
            );
            if cut {
                bytes.truncate(place);
            } else {
                bytes[place] ^= 1 << bit;
            }
        });
        let (blocks, gaps, summary) = read(&copy);
        // Nothing is made up: every block that is reported was executed.
        assert!(
            blocks
                .iter()
                .all(|block| known.contains(block) || block.0.end == pt_flow::End::Cut),
            "{what}: a block that never ran"
        );
        assert!(summary.flow.instructions <= all, "{what}");
        let missing = summary.flow.instructions < all;
        let reported = !gaps.is_empty() || !summary.damage.is_empty() || cut;
        assert!(reported || !missing, "{what}: {summary:?}");
        assert!(gaps.len() < 100_000, "{what}: {} gaps", gaps.len());
    }
    for (file, says) in [("trace.json", "damaged")] {
        for place in [0, 30, 200] {
            damaged(&at, &copy, file, |bytes| bytes[place] ^= 4);
            let error = Trace::open(&copy).unwrap_err().to_string();
            assert!(error.contains(says) || error.contains("not a trace"), "{error}");
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }
    for (path, says) in [
        (folder.path().join("nothing"), "no such directory"),
        (folder.path().to_path_buf(), "not a trace directory"),
        (folder.path().join("guest"), "not a directory"),
    ] {
        let error = Trace::open(&path).unwrap_err().to_string();
        assert!(error.contains(says) && error.lines().count() == 1, "{error}");
    }
}

/// The files of a trace, by their names.
fn files(folder: &Path) -> std::collections::BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            (name, fs::read(entry.path()).unwrap())
        })
        .collect()
}

// covers: trace/repeats
#[test]
fn two_runs_have_the_same_trace_to_the_byte() {
    let folder = Folder::new();
    let kernel = folder.file("guest", guest(|a| long(a, 30_000)));
    let trace = |name: &str| {
        let at = folder.path().join(name);
        let result = run(minivmm()
            .arg("--kernel")
            .arg(&kernel)
            .arg("--trace")
            .arg(&at)
            .args(["--cpus", "2"]));
        assert_eq!(
            result.status.code(),
            Some(3),
            "{}",
            String::from_utf8_lossy(&result.stderr)
        );
        files(&at)
    };
    let first = trace("first");
    // A clock of whole seconds is to show another one.
    std::thread::sleep(Duration::from_millis(1100));
    let second = trace("second");
    assert_eq!(first.keys().collect::<Vec<_>>(), second.keys().collect::<Vec<_>>());
    assert!(first.contains_key("trace.json") && first.contains_key("cpu1-000000.side"));
    for (name, bytes) in first {
        assert!(second[&name] == bytes, "{name} differs");
    }
}

/// While the guest runs on, with several batches under way, and where everything waits for each packet.
// covers: trace/thread
#[test]
fn packets_made_on_another_thread_are_those_made_at_once() {
    let folder = Folder::new();
    let kernel = folder.file("guest", guest(|a| long(a, 1_000_000)));
    let trace = |threaded: bool, buffer: Option<u64>, stops: u64| {
        let at = folder.path().join("trace");
        let _ = fs::remove_dir_all(&at);
        let config = MachineConfig {
            cpus: 2,
            memory: 4 << 20,
            trace: Some(RecordingOptions {
                threaded,
                buffer,
                ..RecordingOptions::new(&at)
            }),
            ..MachineConfig::new(&kernel)
        };
        let mut vm = Run::new(&config).unwrap();
        let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
        // A machine that is looked at under way has told all by then, and goes on.
        for _ in 0..stops {
            assert!(vm.run_for(&mut console, 12_345).unwrap().is_none());
        }
        vm.run(&mut console).unwrap();
        vm.end_trace("the test").unwrap();
        (files(&at), vm.stats().digest)
    };
    for buffer in [None, Some(256 << 20)] {
        let (at_once, digest) = trace(false, buffer, 0);
        let packets = at_once["cpu0-000000.pt"].len();
        assert!(packets > 500_000, "{packets} bytes are too few for several batches");
        for stops in [0, 40] {
            let (later, the_same) = trace(true, buffer, stops);
            assert_eq!(digest, the_same);
            assert_eq!(at_once.keys().collect::<Vec<_>>(), later.keys().collect::<Vec<_>>());
            for (name, bytes) in &at_once {
                assert!(later[name] == *bytes, "{name} differs, {buffer:?} {stops}");
            }
        }
    }
}

fn info(at: &Path) -> std::process::Output {
    run(minivmm().args(["trace", "info"]).arg(at))
}

// covers: trace/damage
#[test]
fn info_has_status_1_where_a_trace_is_damaged() {
    let folder = Folder::new();
    let (at, _) = recorded(&folder, |a| long(a, 300_000), |_| {});
    assert_eq!(info(&at).status.code(), Some(0));
    let copy = folder.path().join("copy");
    for file in ["cpu0-000000.side", "cpu0-000000.pt"] {
        let len = fs::metadata(at.join(file)).unwrap().len() as usize;
        // In the middle of a frame, and in front of the first; of the sideband, too, at the end of the last but one.
        for cut in [len - 1, len / 2, 10] {
            damaged(&at, &copy, file, |bytes| bytes.truncate(cut));
            let result = info(&copy);
            let errors = String::from_utf8_lossy(&result.stderr).into_owned();
            assert_eq!(result.status.code(), Some(1), "{file} cut at {cut}: {errors}");
            assert!(
                errors.contains(&file[..5]) && (errors.contains("damaged") || errors.contains("missing")),
                "{errors}"
            );
        }
    }
    damaged(&at, &copy, "cpu0-000000.side", Vec::clear);
    let result = info(&copy);
    let errors = String::from_utf8_lossy(&result.stderr).into_owned();
    assert_eq!(result.status.code(), Some(1), "{errors}");
    assert!(errors.contains("cpu0-*.side: the end is missing"), "{errors}");
}

// covers: trace/hostile
#[test]
fn links_and_special_files_in_a_trace_are_refused_by_name() {
    let folder = Folder::new();
    let (at, _) = recorded(&folder, |a| long(a, 3000), |_| {});
    let elsewhere = folder.path().join("elsewhere");
    let copy = folder.path().join("copy");
    let make = |kind: &str, path: &Path| match kind {
        "is a symbolic link" => std::os::unix::fs::symlink(&elsewhere, path).unwrap(),
        "is a FIFO" => {
            let made = std::process::Command::new("mkfifo").arg(path).status().unwrap();
            assert!(made.success());
        }
        "is a socket" => drop(std::os::unix::net::UnixListener::bind(path).unwrap()),
        _ => fs::create_dir(path).unwrap(),
    };
    for says in ["is a symbolic link", "is a FIFO", "is a socket", "is a directory"] {
        for file in ["trace.json", "cpu0-000000.pt", "cpu0-000000.side", "cpu0-000001.side"] {
            damaged(&at, &copy, "trace.json", |_| {});
            let path = copy.join(file);
            if path.exists() {
                // A link to it would do, were links followed.
                fs::copy(&path, &elsewhere).unwrap();
                fs::remove_file(&path).unwrap();
            }
            make(says, &path);
            for command in [&["info"][..], &["decode"], &["symbols", "--elf", "new.elf"]] {
                let mut run_it = minivmm();
                run_it
                    .current_dir(folder.path())
                    .arg("trace")
                    .arg(command[0])
                    .arg(&copy);
                assert_refused(&run(run_it.args(&command[1..])), 2, &[file, says]);
            }
        }
        // What is known of a Linux is a directory of its own.
        if says != "is a directory" {
            damaged(&at, &copy, "trace.json", |_| {});
            make(says, &copy.join("linux"));
            assert_refused(&info(&copy), 2, &["linux", "is no directory"]);
        }
        damaged(&at, &copy, "trace.json", |_| {});
        fs::create_dir(copy.join("linux")).unwrap();
        make(says, &copy.join("linux/kallsyms"));
        assert_refused(&info(&copy), 2, &["linux", "kallsyms", says]);
    }
}

// covers: trace/hostile
#[test]
fn a_trace_from_somebody_else_says_nothing_to_the_terminal() {
    let folder = Folder::new();
    let (at, _) = recorded(&folder, |a| long(a, 3000), |_| {});
    let mut header = Trace::open(&at).unwrap().header().clone();
    const EVIL: &str = "\x1b]0;owned\x07\x1b[2J\u{9b}31m\r";
    header.kernel = EVIL.into();
    header.model = EVIL.into();
    header.filters = vec![EVIL.into()];
    header.end.as_mut().unwrap().reason = EVIL.into();
    fs::write(at.join("trace.json"), header.text()).unwrap();
    fs::create_dir(at.join("linux")).unwrap();
    fs::write(at.join("linux/kallsyms"), format!("0000000000100000 T {EVIL}\n")).unwrap();
    fs::write(at.join("linux/kernel"), format!("banner Linux version {EVIL}\n")).unwrap();
    for options in [
        &["info"][..],
        &["info", "--json"],
        &["decode"],
        &["decode", "--disasm"],
        &["decode", "--json"],
    ] {
        let result = run(minivmm().arg("trace").arg(options[0]).arg(&at).args(&options[1..]));
        for bytes in [&result.stdout, &result.stderr] {
            let text = std::str::from_utf8(bytes).unwrap();
            let control = text.chars().find(|c| c.is_control() && !"\n\t".contains(*c));
            assert_eq!(control, None, "{options:?}: {text:?}");
        }
        if options.contains(&"--json") {
            for line in std::str::from_utf8(&result.stdout).unwrap().lines() {
                let value: Result<serde_json::Value, _> = serde_json::from_str(line);
                assert!(value.is_ok(), "{line}");
            }
        }
    }
}

/// Counts and offsets that a file only claims cost nothing.
// covers: trace/hostile
#[test]
fn what_a_trace_claims_is_bounded_by_its_size() {
    let folder = Folder::new();
    let (at, _) = recorded(&folder, |a| long(a, 300_000), |_| {});
    let header = Trace::open(&at).unwrap().header().clone();
    for cpus in [0, 256, usize::MAX] {
        let many = trace::Header { cpus, ..header.clone() };
        fs::write(at.join("trace.json"), many.text()).unwrap();
        assert_refused(&info(&at), 2, &["trace.json is damaged", "a machine has 1 to 255"]);
    }
    fs::write(at.join("trace.json"), header.text()).unwrap();
    // Segments far away, with 32 GiB of packets that would be missing in front of each.
    let size = fs::metadata(at.join("cpu0-000000.pt")).unwrap().len();
    for number in 1..20u64 {
        let header = trace::format::FrameHeader::of(&[0; 16], number << 35);
        let frame = [&header.bytes(trace::format::Kind::Packets)[..], &[0; 16]].concat();
        fs::write(at.join(format!("cpu0-{:06}.pt", number * 100)), frame).unwrap();
    }
    let (.., summary) = read(&at);
    assert!(summary.lost <= 16 * (size + 20 * 40) + (1 << 20), "{}", summary.lost);
    assert_eq!(info(&at).status.code(), Some(1));
}

// covers: trace/export-signal
#[test]
fn an_export_that_a_signal_ends_leaves_nothing_behind() {
    let folder = Folder::new();
    let (at, _) = recorded(&folder, |a| long(a, 20_000_000), |_| {});
    for options in [&["--raw", "out", "--folded", "stacks"][..], &["--perfetto", "out"]] {
        for signal in ["TERM", "INT"] {
            let mut command = minivmm();
            command
                .current_dir(folder.path())
                .args(["trace", "export"])
                .arg(&at)
                .args(options);
            command
                .stdout(std::process::Stdio::piped())
                .stderr(std::process::Stdio::piped());
            let mut child = Watched::new(command.spawn().unwrap());
            let names = || {
                let entries = fs::read_dir(folder.path()).unwrap();
                let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
                names.collect::<HashSet<String>>()
            };
            while !names().iter().any(|name| name.contains(".part-")) {
                if child.child.try_wait().unwrap().is_some() {
                    panic!("{options:?}: it has ended: {:?}", child.output());
                }
            }
            kill(&child.child, signal);
            let status = child.wait();
            let result = child.output();
            let errors = String::from_utf8_lossy(&result.stderr).into_owned();
            assert_eq!(status.code(), Some(2), "{options:?}: {errors}");
            assert!(errors.contains(&format!("SIG{signal}")), "{errors}");
            let mut left = names();
            left.retain(|name| name.contains("part") || name == "out" || name == "stacks");
            assert!(left.is_empty(), "{options:?}: {left:?}");
        }
    }
}

// covers: trace/raw
#[test]
fn raw_packets_and_pages_are_what_was_recorded() {
    let folder = Folder::new();
    let (at, _) = recorded(&folder, changing, |_| {});
    let trace = Trace::open(&at).unwrap();
    let out = folder.path().join("raw");
    let summary = trace::raw::export(&trace, &out, &mut |_, _| {}).unwrap();
    let packets = fs::read(out.join("cpu0.pt")).unwrap();
    assert_eq!((packets.len() as u64, summary.lost), (trace.extent(0).end, 0));
    let pages = fs::read(out.join("cpu0.pages")).unwrap();
    assert_eq!(pages.len() as u64, summary.pages * 4096);
    // Each span by itself, with the pages that hold in it.
    let map = fs::read_to_string(out.join("cpu0.map")).unwrap();
    let mut sections: HashMap<u64, usize> = HashMap::new();
    let mut spans: Vec<(usize, usize, HashMap<u64, usize>)> = Vec::new();
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(text) => u64::from_str_radix(text, 16).unwrap(),
        None => text.parse().unwrap(),
    };
    for line in map.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["span", begin, end, _] => spans.push((number(begin) as usize, number(end) as usize, sections.clone())),
            [_, address, page] => {
                sections.insert(number(address), number(page) as usize);
                if let Some(last) = spans.last_mut() {
                    last.2.clone_from(&sections);
                }
            }
            _ => panic!("{line}"),
        }
    }
    // The byte changes a hundred times, and each has its span.
    assert_eq!((spans.len() as u64, spans.len() > 99), (summary.spans, true));
    let mut added = Vec::new();
    for (begin, end, sections) in spans {
        let mut image = pt_flow::Sections::new();
        for (address, page) in &sections {
            image.add(*address, &pages[page * 4096..][..4096]);
        }
        let mut log = Log::new(&Start {
            cpu: 0,
            offset: 0,
            clock: trace.clock(0),
        });
        pt_flow::Decoder::new(image, trace.timing()).decode(&pt_flow::Chunk::whole(&packets[begin..end]), &mut log);
        assert!(log.gaps.is_empty(), "{:?}", log.gaps);
        added.extend(
            log.blocks
                .iter()
                .filter(|(_, bytes, _)| bytes.starts_with(&[0x83, 0xc3]))
                .map(|(_, bytes, _)| bytes[2]),
        );
    }
    assert_eq!(added, (1..=100).rev().collect::<Vec<u8>>());
    let again = trace::raw::export(&trace, &out, &mut |_, _| {})
        .unwrap_err()
        .to_string();
    assert!(again.contains("raw") && again.lines().count() == 1, "{again}");
}
