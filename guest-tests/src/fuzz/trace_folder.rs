//! Trace directories, as whoever hands one over may have made them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use minivmm::recording::RecordingOptions;
use minivmm::{Console, MachineConfig, Run, SerialTarget};
use trace::export::{self, Callgrind, Export, FlameGraph, Folded, Html, OutFile, Perfetto, TraceEvents, perf};
use trace::format::{FrameHeader, Kind};
use trace::linux::Recorded;
use trace::symbols::{GuestFiles, SymbolTable};
use trace::view::{Names, Totals, Window};
use trace::{Decode, Trace, raw};

/// The files that a directory may have, by number.
fn file(number: u8) -> (PathBuf, Option<Kind>) {
    let (name, kind) = match number % 10 {
        0 => ("trace.json".into(), None),
        1 => ("linux/kernel".into(), None),
        2 => ("linux/kallsyms".into(), None),
        3 => ("linux/modules".into(), None),
        4 => ("linux/tasks".into(), None),
        n => {
            let kind = if n & 1 == 1 { Kind::Packets } else { Kind::Side };
            (kind.file(usize::from(n == 9), u32::from(n == 7 || n == 8)), Some(kind))
        }
    };
    (name.into(), kind)
}

/// Bytes of an entry's head: the file, an offset, a length.
const HEAD: usize = 8;

/// Writes what the bytes say into a directory. With an odd first byte frames are made for each piece, so that damage gets past the
/// checks of sums.
fn unpack(bytes: &[u8], folder: &Path) {
    let Some((&mode, mut rest)) = bytes.split_first() else {
        return;
    };
    fs::create_dir_all(folder.join("linux")).expect("a folder");
    let mut files: [Vec<u8>; 10] = Default::default();
    while let Some((head, behind)) = rest.split_at_checked(HEAD) {
        let offset = u64::from(u32::from_le_bytes([head[1], head[2], head[3], head[4]]));
        let len = usize::from(head[5]) | usize::from(head[6]) << 8;
        // Some pieces are as far away as there are numbers.
        let offset = if head[7] == 0xff { offset << 40 } else { offset };
        let (piece, next) = behind.split_at(len.min(behind.len()));
        let content = &mut files[usize::from(head[0] % 10)];
        if let (Some(kind), 1) = (file(head[0]).1, mode & 1) {
            content.extend(FrameHeader::of(piece, offset).bytes(kind));
        }
        content.extend_from_slice(piece);
        rest = next;
    }
    for (number, content) in files.iter().enumerate().filter(|(_, content)| !content.is_empty()) {
        fs::write(folder.join(file(number as u8).0), content).expect("a file");
    }
}

/// Whatever a directory holds, it is refused with a line, or read to its end.
pub fn trace_folder(bytes: &[u8]) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("minivmm-fuzz-{}-{number}", std::process::id()));
    fs::create_dir(&folder).expect("a folder");
    unpack(bytes, &folder);
    read(&folder);
    fs::remove_dir_all(&folder).expect("it can be removed");
}

fn line(error: impl std::fmt::Display) {
    let text = error.to_string();
    assert!(!text.is_empty() && text.lines().count() == 1, "{text}");
}

fn read(folder: &Path) {
    let trace = match Trace::open(folder) {
        Ok(trace) => trace,
        Err(error) => return line(error),
    };
    let recorded = match Recorded::read(&folder.join("linux")) {
        Ok(recorded) => recorded.unwrap_or_default(),
        Err(error) => return line(error),
    };
    // No files of the guest: a directory may name any, and what is read of them is another target's.
    let names = Names::new(recorded.symbols.clone(), recorded)
        .with_mappings(trace.mappings(), &mut GuestFiles::default())
        .with_threads(trace.thread_switches());
    let options = Decode {
        threads: 1,
        ..Decode::default()
    };
    let mut cpus = Vec::new();
    for cpu in 0..trace.cpus().min(2) {
        trace.info(cpu);
        let (_, summary) = trace.count(cpu, &options, |_| {}).expect("files can be read");
        let window = Window {
            threads: 1,
            ..Window::default()
        };
        let file = |name| OutFile::create(&folder.join(name), true).expect("a file of ours");
        let mut forms: [Box<dyn Export>; 6] = [
            Box::new(Folded::new(file("folded"))),
            Box::new(FlameGraph::new(file("svg"), "title")),
            Box::new(Callgrind::new(file("callgrind"), "command")),
            Box::new(TraceEvents::new(file("json"), "title", 2, u64::MAX).expect("a file of ours")),
            Box::new(Perfetto::new(file("perfetto"), "title", 2).expect("a file of ours")),
            Box::new(Html::new(file("html"), "title", "facts", trace.header())),
        ];
        let job = export::Job {
            trace: &trace,
            names: &names,
            window,
            cpus: &[cpu],
        };
        let totals = export::calls(&job, &mut forms, &mut |_, _| {}).expect("files can be read");
        let seen = |totals: &Totals| (totals.instructions, totals.gaps, totals.lost);
        assert_eq!(
            seen(&totals),
            (summary.flow.instructions, summary.flow.gaps, summary.lost)
        );
        for form in forms {
            form.finish(&names).expect("files of ours can be written");
        }
        let folded = fs::read_to_string(folder.join("folded")).expect("it was written");
        let count = |line: &str| line.rsplit(' ').next().and_then(|count| count.parse::<u64>().ok());
        let all: u64 = folded.lines().filter_map(count).sum();
        assert_eq!(all, totals.instructions, "each instruction is in one stack");
        cpus.push(cpu);
    }
    if let Err(error) = raw::export(&trace, &folder.join("raw"), &mut |_, _| {}) {
        line(error);
    }
    let job = perf::Job {
        trace: &trace,
        names: &names,
        window: Window::default(),
        cpus: &cpus,
        path: &folder.join("perf"),
        force: false,
        totals: None,
    };
    if let Err(error) = perf::export(&job, &mut |_, _, _| {}) {
        line(error);
    }
}

/// A guest of some instructions, one of which changes, recorded: as its files are, and as pieces to be framed.
pub fn trace_folders() -> Vec<Vec<u8>> {
    use iced_x86::code_asm::*;
    let folder = std::env::temp_dir().join(format!("minivmm-fuzz-seed-{}", std::process::id()));
    fs::create_dir(&folder).expect("a folder");
    let mut a = CodeAssembler::new(32).expect("an assembler");
    let (mut again, mut over) = (a.create_label(), a.create_label());
    // The routine is behind a short jump, and its immediate byte the fifth one.
    let routine = 0x10_0022;
    let mut code = || -> Result<Vec<u8>, IcedError> {
        a.jmp(over)?;
        a.add(ebx, 1)?;
        a.ret()?;
        a.set_label(&mut over)?;
        a.mov(esp, 0x10_2000)?;
        a.mov(ecx, 20)?;
        a.mov(edi, routine)?;
        a.set_label(&mut again)?;
        a.inc(byte_ptr(edi + 2))?;
        a.call(edi)?;
        a.dec(ecx)?;
        a.jnz(again)?;
        a.mov(dx, 0xf4)?;
        a.out(dx, al)?;
        a.assemble(0x10_0020)
    };
    let code = code().expect("code");
    let mut image: Vec<u8> = [
        0x1bad_b002u32,
        1 << 16,
        0xe451_4ffe,
        0x10_0000,
        0x10_0000,
        0,
        0x10_2000,
        0x10_0020,
    ]
    .iter()
    .flat_map(|word| word.to_le_bytes())
    .collect();
    image.extend(code);
    let kernel = folder.join("kernel");
    fs::write(&kernel, image).expect("a file");
    let at = folder.join("trace");
    let config = MachineConfig {
        memory: 4 << 20,
        max_instructions: Some(10_000),
        trace: Some(RecordingOptions::new(&at)),
        ..MachineConfig::new(&kernel)
    };
    let mut vm = Run::new(&config).expect("a machine");
    let mut console = Console::open(&SerialTarget::Buffer, &[], vm.line()).expect("a console");
    vm.run(&mut console).expect("a run");
    vm.end_trace("the seed").expect("a trace");
    let linux = [
        (1u8, "banner Linux version 6.1\nslide 0x0\n"),
        (
            2,
            "0000000000100000 T _text\n0000000000100030 T adds\n0000000000110000 T _etext\n",
        ),
        (3, "module 4096 0 - Live 0x0000000000100020\n"),
        (4, "0 0x1000 1 1 init\n"),
    ];
    let entry = |number: u8, offset: u64, piece: &[u8]| -> Vec<u8> {
        let mut bytes = vec![number];
        bytes.extend((offset as u32).to_le_bytes());
        bytes.extend((piece.len() as u16).to_le_bytes());
        bytes.push(0);
        bytes.extend(piece);
        bytes
    };
    let (mut whole, mut pieces) = (vec![0], vec![1]);
    for number in 0..10 {
        let (name, kind) = file(number);
        let Ok(bytes) = fs::read(at.join(name)) else { continue };
        for part in bytes.chunks(0x8000) {
            whole.extend(entry(number, 0, part));
        }
        let Some(kind) = kind else {
            pieces.extend(entry(number, 0, &bytes));
            continue;
        };
        let mut rest = &bytes[..];
        while let Some((head, behind)) = rest.split_first_chunk() {
            let head = FrameHeader::parse(head, kind).expect("a frame");
            let (payload, next) = behind.split_at(head.len as usize);
            pieces.extend(entry(number, head.offset, payload));
            rest = next;
        }
    }
    let symbols = SymbolTable::parse(linux[1].1).expect("symbols");
    assert!(symbols.address("adds").is_some());
    let mut named = pieces.clone();
    linux
        .iter()
        .for_each(|(number, text)| named.extend(entry(*number, 0, text.as_bytes())));
    fs::remove_dir_all(&folder).expect("it can be removed");
    vec![whole, pieces, named]
}
