//! `--trace`: small guests are recorded, and what is read back is what ran.

mod common;

use std::fs;
use std::path::Path;

use common::*;
use iced_x86::code_asm::*;
use minivmm::trace::{Decode, Start, State, Summary, Trace};
use minivmm::{Console, MachineConfig, SerialTarget, Vm, trace::Options};
use pt_flow::{Block, Event, EventKind, Visitor};

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

/// Adds up 1 to 100 by a CALL a number, in the byte of an instruction that it changes each time.
fn changing(a: &mut CodeAssembler) {
    let (mut again, mut add) = (a.create_label(), a.create_label());
    a.mov(ecx, 100).unwrap();
    a.xor(ebx, ebx).unwrap();
    a.set_label(&mut again).unwrap();
    a.lea(edi, dword_ptr(add)).unwrap();
    a.mov(byte_ptr(edi + 2), cl).unwrap();
    a.call(add).unwrap();
    a.dec(ecx).unwrap();
    a.jnz(again).unwrap();
    debug_exit(a, 1);
    a.set_label(&mut add).unwrap();
    // 83 C3 ib
    a.add(ebx, 0x7f).unwrap();
    a.ret().unwrap();
}

// covers: 5/trace-record
// covers: 5/trace-self-modifying
#[test]
fn code_that_changes_is_read_as_it_was_executed() {
    let folder = Folder::new();
    let kernel = folder.file("guest", guest(changing));
    let run = |trace: Option<Options>| {
        let config = MachineConfig {
            memory: 4 << 20,
            trace,
            ..MachineConfig::new(&kernel)
        };
        let mut vm = Vm::new(&config).unwrap();
        let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).unwrap();
        vm.run(&mut console).unwrap();
        vm.end_trace("the test").unwrap();
        vm.stats()
    };
    let at = folder.path().join("trace");
    let (traced, plain) = (run(Some(Options::new(&at))), run(None));
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

// covers: 5/trace-force
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
