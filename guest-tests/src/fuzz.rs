//! One function per parser of untrusted bytes, for fuzzers and for the mutation test: whatever the bytes are, it must neither
//! panic nor take long. `guest-tests/fuzz` gives the same functions to libFuzzer.

mod branches;
mod control;
mod counters;
mod files;
mod gdb;
mod guest;
mod linux;
pub mod pt;
mod registers;
mod trace;
mod trace_folder;

pub use branches::branches;
use branches::recorders;
pub use control::control;
pub use counters::counters;
use counters::samplers;
use devices::virtio::block::Medium;
use engine::bus::Bus;
use engine::{CS, Cpu, CpuState, EngineOptions, Exit, Segment};
pub use files::{model_file, session, symbols, trace_header};
pub use gdb::gdb;
pub use guest::guest;
pub use linux::linux;
use minivmm::cli::{self, Job};
use minivmm::machine::Machine;
use minivmm::machine::collect::{Collector, Limits};
use minivmm::machine::loader::{self, Boot, Entry, Input, LoadError, Module};
use minivmm::machine::memory::Memory;
use minivmm::machine::newc::Archive;
use minivmm::machine::pci::{self, BusKind};
use minivmm::machine::virtio;
pub use registers::registers;
use registers::writers;
use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
pub use trace::{host_trace, trace};
use trace::{host_traces, tracers};
pub use trace_folder::trace_folder;
use trace_folder::trace_folders;
use x86::model::{CpuModel, HASWELL, WESTMERE};

/// A parser under test: its name, what feeds it, and well-formed inputs to start from.
pub struct Target {
    /// The name, which is the fuzz target's too.
    pub name: &'static str,
    /// Parses the bytes and checks what comes out.
    pub run: fn(&[u8]),
    /// Inputs that are accepted.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All of them.
pub const TARGETS: &[Target] = &[
    Target {
        name: "bzimage",
        run: bzimage,
        seeds: || vec![small_bzimage()],
    },
    Target {
        name: "multiboot",
        run: multiboot,
        seeds: multiboot_images,
    },
    Target {
        name: "initrd",
        run: initrd,
        seeds: initrds,
    },
    Target {
        name: "command_line",
        run: command_line,
        seeds: command_lines,
    },
    Target {
        name: "guest_command_line",
        run: guest_command_line,
        seeds: || vec![b"console=ttyS0".to_vec()],
    },
    Target {
        name: "instructions",
        run: instructions,
        seeds: programs,
    },
    Target {
        name: "elf",
        run: elf,
        seeds: elf_images,
    },
    Target {
        name: "virtqueue",
        run: virtqueue,
        seeds: drivers,
    },
    Target {
        name: "collect",
        run: collect,
        seeds: collected,
    },
    Target {
        name: "counters",
        run: counters,
        seeds: samplers,
    },
    Target {
        name: "registers",
        run: registers,
        seeds: writers,
    },
    Target {
        name: "gdb",
        run: gdb,
        seeds: gdb::conversations,
    },
    Target {
        name: "pt_packets",
        run: pt::packets,
        seeds: pt::traces,
    },
    Target {
        name: "host_trace",
        run: host_trace,
        seeds: host_traces,
    },
    Target {
        name: "pt_flow",
        run: pt::flow,
        seeds: pt::traces,
    },
    Target {
        name: "branches",
        run: branches,
        seeds: recorders,
    },
    Target {
        name: "trace",
        run: trace,
        seeds: tracers,
    },
    Target {
        name: "trace_folder",
        run: trace_folder,
        seeds: trace_folders,
    },
    Target {
        name: "linux",
        run: linux,
        seeds: linux::kernels,
    },
    Target {
        name: "session",
        run: session,
        seeds: files::sessions,
    },
    Target {
        name: "symbols",
        run: symbols,
        seeds: files::symbol_files,
    },
    Target {
        name: "model_file",
        run: model_file,
        seeds: files::model_files,
    },
    Target {
        name: "trace_header",
        run: trace_header,
        seeds: files::trace_headers,
    },
    Target {
        name: "control",
        run: control,
        seeds: control::lines,
    },
    Target {
        name: "guest",
        run: guest,
        seeds: guest::guests,
    },
];

/// RAM of the machines that images are loaded into.
const MEMORY: u64 = 32 << 20;

fn load(boot: &Boot) -> Result<(Entry, Memory), (Input, LoadError)> {
    let memory = Memory::new(MEMORY).expect("32 MiB are to be had");
    let entry = loader::load(&memory, boot)?;
    // An image that is taken starts in RAM.
    let start = match entry {
        Entry::Linux64 { rip, .. } => rip,
        Entry::Linux32 { eip, .. } | Entry::Pvh { eip, .. } | Entry::Multiboot { eip, .. } => u64::from(eip),
    };
    let mut byte = [0];
    memory.read(start, &mut byte).expect("the entry point is RAM");
    Ok((entry, memory))
}

fn boot<'a>(kernel: &'a [u8], modules: &'a [Module<'a>], cmdline: Option<&'a [u8]>) -> Boot<'a> {
    Boot {
        kernel,
        kernel_name: b"kernel",
        modules,
        cmdline,
        rsdp: 0xe_0000,
    }
}

fn module(bytes: &[u8]) -> Module<'_> {
    Module {
        bytes,
        name: b"module",
        words: b"words",
    }
}

/// A part of an initial RAM disk, of which Linux is told nothing.
fn part(bytes: &[u8]) -> Module<'_> {
    Module {
        words: b"",
        ..module(bytes)
    }
}

/// An error has to be a line that can be shown.
fn check<T>(result: Result<T, (Input, LoadError)>) {
    if let Err((_, error)) = result {
        assert_eq!(error.to_string().lines().count(), 1, "{error}");
    }
}

/// The bytes as a Linux kernel.
pub fn bzimage(bytes: &[u8]) {
    check(load(&boot(bytes, &[], None)));
}

/// The bytes as a multiboot kernel, with a module.
pub fn multiboot(bytes: &[u8]) {
    check(load(&boot(bytes, &[module(b"module"), module(bytes)], Some(b"words"))));
}

/// The bytes as an ELF64 kernel, with a module.
pub fn elf(bytes: &[u8]) {
    check(load(&boot(bytes, &[module(b"module"), module(bytes)], Some(b"words"))));
}

/// The bytes as an initial RAM disk.
pub fn initrd(bytes: &[u8]) {
    check(load(&boot(&small_bzimage(), &[part(bytes), part(bytes)], None)));
}

/// The bytes as the guest's command line, for both kinds of kernel.
pub fn guest_command_line(bytes: &[u8]) {
    check(load(&boot(&small_bzimage(), &[], Some(bytes))));
    check(load(&boot(&multiboot_images()[0], &[], Some(bytes))));
}

/// The bytes as minivmm's own command line, its words separated by NUL.
pub fn command_line(bytes: &[u8]) {
    use std::os::unix::ffi::OsStringExt;
    let words = bytes
        .split(|byte| *byte == 0)
        .map(|word| std::ffi::OsString::from_vec(word.to_vec()));
    match cli::parse(std::iter::once("minivmm".into()).chain(words)) {
        Ok(Job::Run { config, .. }) => assert!(config.memory > 0 && config.memory % 4096 == 0),
        Ok(Job::Print(text)) => assert!(!text.is_empty()),
        Ok(
            Job::Control { .. }
            | Job::Trace { .. }
            | Job::Replay(_)
            | Job::Query(_)
            | Job::QueryPart(_)
            | Job::Matrix(_)
            | Job::Man(_)
            | Job::Command(_),
        ) => {}
        Err(error) => assert_eq!(error.to_string().lines().count(), 1, "{error}"),
    }
}

/// Where the code of [`instructions`] stands, and its page tables.
const CODE: u64 = 0x8000;
const TABLES: u64 = 0x10_0000;

/// The bytes as code: the first one chooses among real, 32-bit and 64-bit mode, ring 0 and 3, and parts with and without
/// transactions; the rest runs for at most some thousand steps on a machine with all its devices, once interpreted and once with
/// whatever has run translated. Both leave the same.
pub fn instructions(bytes: &[u8]) {
    let Some((mode, code)) = bytes.split_first() else {
        return;
    };
    let interpreted = executed(*mode, code, None);
    let translated = executed(*mode, code, Some(1));
    assert!(
        interpreted == translated,
        "{interpreted:x?}\n{translated:x?}\n{bytes:02x?}"
    );
}

/// What code leaves: the processor, what it did to RAM, and steps; `None` where the host cannot run it.
fn executed(mode: u8, code: &[u8], translate_after: Option<u32>) -> Option<(CpuState, u64, u64)> {
    let model = if mode & 8 != 0 { transactional() } else { &WESTMERE };
    let memory = Memory::new(4 << 20).expect("4 MiB are to be had");
    let code = &code[..code.len().min(4096)];
    memory.write(CODE, code).expect("the code is in RAM");
    // The first GiB one to one in pages of 2 MiB: present, writable, user.
    let tables = [(0, TABLES + 0x1007), (0x1000, TABLES + 0x2007)];
    let pages = (0..512).map(|page| (0x2000 + page * 8, page << 21 | 0x87));
    for (at, entry) in tables.into_iter().chain(pages) {
        memory
            .write(TABLES + at, &entry.to_le_bytes())
            .expect("the page tables are in RAM");
    }
    let options = EngineOptions {
        translate_after,
        translated_bytes: 1 << 20,
        ..EngineOptions::default()
    };
    let mut soft = memory.engine(model, options).ok()?;
    let mut machine = Machine::new(model, 1, memory.clone(), 0, 0, Box::new(io::sink()));
    let mut cpu = Cpu::new(model);
    cpu.set_state(&code_state(model, mode));
    let end = 4000;
    while cpu.steps() < end {
        let left = end - cpu.steps();
        match soft.get().run(&mut cpu, &mut machine.cpu(0), left) {
            Exit::Bus | Exit::Window | Exit::Pause => {}
            Exit::Budget | Exit::Halt | Exit::Shutdown => break,
            Exit::Stop { .. } => panic!("nobody asked: {mode:#x} {code:02x?}"),
            Exit::Defect(what) => panic!("{what}: {mode:#x} {code:02x?}"),
        }
    }
    // Whatever happened, the state is one that can be handed out and taken back.
    let after = cpu.state();
    cpu.set_state(&after);
    assert_eq!(cpu.state(), after);
    Some((after, memory.digest(), cpu.steps()))
}

/// A processor that is about to run the code, in the mode that the first byte chooses.
fn code_state(model: &'static CpuModel, mode: u8) -> CpuState {
    let mut state = CpuState::reset(model);
    (state.rip, state.gpr[4]) = (CODE, 0x7000);
    let ring = u16::from(mode >> 2 & 1) * 3;
    // Type, S, DPL, P; L or D and G: SDM Vol. 3A 3.4.5 "Segment Descriptors".
    let segment = |selector: u16, attributes: u16| Segment {
        selector: selector | ring,
        base: 0,
        limit: u32::MAX,
        attributes: attributes | ring << 5,
    };
    match mode & 3 {
        0 => {
            state.segments[CS] = Segment {
                selector: 0,
                base: 0,
                limit: 0xffff,
                attributes: 0x9b,
            }
        }
        wide => {
            state.cr0 = 0x8001_0033.into();
            (state.cr3, state.cr4) = (TABLES, 0x6a0.into());
            state.efer = (if wide == 1 { 0x801 } else { 0xd01 }).into();
            state.segments.fill(segment(16, 0xc093));
            state.segments[CS] = segment(8, if wide == 3 { 0xa09b } else { 0xc09b });
            if wide == 1 {
                // Without IA32_EFER.LMA these are not the tables of this mode: run it unpaged.
                state.cr0 = 0x33.into();
            }
        }
    }
    state
}

/// A part with transactions.
fn transactional() -> &'static CpuModel {
    static MODEL: OnceLock<&CpuModel> = OnceLock::new();
    MODEL.get_or_init(|| HASWELL.with_toggles("+rtm").expect("the engine has it"))
}

/// A disk in memory, some of which fails.
#[derive(Debug)]
struct Fake(Vec<u8>);

impl Medium for Fake {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn readonly(&self) -> bool {
        false
    }

    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        bytes.copy_from_slice(&self.0[offset as usize..][..bytes.len()]);
        Ok(())
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        // The last sector is a bad one.
        if offset + bytes.len() as u64 == self.size() {
            return Err(io::Error::other("a bad sector"));
        }
        self.0[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn zero(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.write(offset, &vec![0; len as usize])
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Where the rings and requests of [`virtqueue`] are.
const RINGS: u64 = 0x1000;
/// The length of a PCI function's registers.
const FUNCTION: u64 = 0x8000;
/// The length of a register write in its input.
const WRITE: usize = 6;

/// The bytes as a driver: which device it drives, the length of what it has in memory, that memory, and then its writes to
/// registers, each an offset of 16 and a value of 32 bits.
pub fn virtqueue(bytes: &[u8]) {
    let [device, low, high, rest @ ..] = bytes else {
        return;
    };
    let len = usize::from(u16::from_le_bytes([*low, *high])).min(rest.len());
    let (image, writes) = rest.split_at(len);
    let size = 2 << 20;
    let memory = Memory::new(size).expect("2 MiB are to be had");
    memory.write(RINGS, image).expect("the rings are in RAM");
    let mut machine = Machine::new(&WESTMERE, 1, memory, 0, 0, Box::new(io::sink()));
    // The PCI function of the same device: with its registers enabled, and configuration space behind them.
    let pci = device & 2 != 0;
    if pci {
        machine.set_bus(BusKind::Pci);
    }
    let disk = Fake((0..64 * 512).map(|i| (i / 512 * 7 + i) as u8).collect());
    machine.add_disk(Box::new(disk)).expect("there is room for a disk");
    let registers = match pci {
        true => pci::MEMORY + u64::from(device % 2) * FUNCTION,
        false => virtio::address(usize::from(device % 2)),
    };
    let config = pci::ECAM + (u64::from(device % 2) + 1) * 0x8000;
    if pci {
        machine.cpu(0).write(config + 4, 2, 6, 0);
    }
    for write in writes.chunks_exact(WRITE).take(100) {
        let offset = u64::from(u16::from_le_bytes([write[0], write[1]]));
        let value = u32::from_le_bytes([write[2], write[3], write[4], write[5]]);
        let (address, size) = match pci {
            true if offset % FUNCTION >= 0x6000 => (config + offset % 0x200, if offset < FUNCTION { 4 } else { 2 }),
            true if offset >= FUNCTION => (registers + offset % FUNCTION, 8),
            // Of the common configuration's registers some are narrower than 32 bits.
            true => match offset {
                0x14 | 0x15 => (registers + offset, 1),
                0x10..0x20 => (registers + offset, 2),
                _ => (registers + offset, 4),
            },
            false => (registers + offset % virtio::SLOT, 4),
        };
        machine.cpu(0).write(address, size, value.into(), 0);
        machine.cpu(0).read(address, size, 0);
    }
    for (gpa, len) in machine.take_written() {
        let end = gpa.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= size),
            "{gpa:#x}, {len}: written beyond RAM"
        );
    }
    // Whatever happened, the state is one that can be handed out and taken back, and a reset makes all good.
    let state = machine.state();
    machine.set_state(&state).expect("its own state");
    assert_eq!(machine.state(), state);
    if pci {
        return;
    }
    machine.cpu(0).write(registers + 0x070, 4, 0, 0);
    assert_eq!(machine.cpu(0).read(registers + 0x070, 4, 0), 0);
}

/// Drivers that read, write, zero and flush the disk and ask for entropy, with a chain and with an indirect table.
fn drivers() -> Vec<Vec<u8>> {
    const SIZE: u16 = 8;
    let [avail, used, header, indirect_table, data_at] = [0x1100u64, 0x1200, 0x1300, 0x1380, 0x1400];
    let driver = |device: u8, kind: u32, data: u32, write: u16, indirect: bool| {
        let mut image = vec![0; 0x800];
        let mut put = |at: u64, bytes: &[u8]| {
            let at = (at - RINGS) as usize;
            image[at..at + bytes.len()].copy_from_slice(bytes);
        };
        let mut descriptor = |at: u64, address: u64, len: u32, flags: u16, next: u16| {
            put(at, &address.to_le_bytes());
            put(at + 8, &len.to_le_bytes());
            put(at + 12, &flags.to_le_bytes());
            put(at + 14, &next.to_le_bytes());
        };
        let table = if indirect { indirect_table } else { RINGS };
        if device % 2 == 1 {
            descriptor(table, header, 16, 1, 1);
            descriptor(table + 16, data_at, data, 1 | write, 2);
            descriptor(table + 32, header + 32, 1, 2, 0);
        } else {
            descriptor(table, data_at, data, 2, 0);
        }
        if indirect {
            descriptor(RINGS, indirect_table, 48, 4, 0);
        }
        put(header, &kind.to_le_bytes());
        put(header + 8, &5u64.to_le_bytes());
        put(data_at, &3u64.to_le_bytes());
        put(data_at + 8, &2u32.to_le_bytes());
        put(avail + 2, &1u16.to_le_bytes());
        let features = 1 << 28 | if device % 2 == 1 { 1 << 9 } else { 0 };
        let over_pci: [(u16, u32); 20] = [
            (0x14, 3),
            (0x08, 1),
            (0x0c, 1),
            (0x08, 0),
            (0x0c, features),
            (0x14, 11),
            (0x6042, 0x8000_0000),
            (0x4010, 0xfee0_0000),
            (0x401c, 0),
            (0x16, 0),
            (0x18, SIZE.into()),
            (0x1a, 1),
            (0x20, RINGS as u32),
            (0x28, avail as u32),
            (0x30, used as u32),
            (0x1c, 1),
            (0x14, 15),
            (0x3000, 0),
            (0x1000, 0),
            (0x3000, 0),
        ];
        let over_mmio: [(u16, u32); 17] = [
            (0x070, 3),
            (0x024, 1),
            (0x020, 1),
            (0x024, 0),
            (0x020, features),
            (0x070, 11),
            (0x030, 0),
            (0x038, SIZE.into()),
            (0x080, RINGS as u32),
            (0x090, avail as u32),
            (0x0a0, used as u32),
            (0x044, 1),
            (0x070, 15),
            (0x050, 0),
            (0x064, 1),
            (0x050, 0),
            (0x050, 0),
        ];
        let mut bytes = vec![device];
        bytes.extend((image.len() as u16).to_le_bytes());
        bytes.extend(image);
        let writes = if device & 2 != 0 { &over_pci[..] } else { &over_mmio[..] };
        for (offset, value) in writes {
            bytes.extend(offset.to_le_bytes());
            bytes.extend(value.to_le_bytes());
        }
        bytes
    };
    vec![
        driver(1, 0, 512, 2, false),
        driver(1, 0, 512, 2, true),
        driver(1, 1, 512, 0, false),
        driver(1, 13, 16, 0, true),
        driver(1, 8, 20, 2, false),
        driver(0, 0, 64, 2, false),
        driver(2, 0, 64, 2, true),
        driver(3, 0, 512, 2, false),
        driver(3, 1, 512, 0, true),
    ]
}

/// The bytes as what a guest sends to `--collect`: nothing may appear beside the folder.
pub fn collect(bytes: &[u8]) {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!(
        "minivmm-fuzz-{}-{}",
        std::process::id(),
        COUNT.fetch_add(1, Ordering::Relaxed)
    );
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&folder).expect("a folder is to be had");
    let limits = Limits {
        bytes: 1 << 20,
        entries: 16,
    };
    let mut collector = Collector::open(&folder.join("in"), limits).expect("a folder can be made");
    collector.write_all(bytes).expect("a collector takes everything");
    drop(collector);
    let beside: Vec<_> = std::fs::read_dir(&folder).expect("it is there").collect();
    assert_eq!(beside.len(), 1, "{beside:?}");
    let unfinished = std::fs::read_dir(folder.join("in")).expect("it is there");
    for entry in unfinished.flatten() {
        let name = entry.file_name();
        assert!(
            !name.to_string_lossy().starts_with(".minivmm-"),
            "{name:?} is left over"
        );
    }
    std::fs::remove_dir_all(&folder).expect("it can be removed");
}

fn collected() -> Vec<Vec<u8>> {
    let mut archive = Archive::default();
    archive.folder("a");
    archive.file("a/b", 0o644, b"some text\n");
    archive.file("c", 0o755, b"");
    archive.link("d", "a");
    vec![archive.finish()]
}

/// Short programs for [`instructions`]: a loop with memory operands, a bit of SSE and x87, string operations, a system register,
/// transactions.
fn programs() -> Vec<Vec<u8>> {
    let code: [&[u8]; 5] = [
        // mov ecx, 50; add [rsp], ecx; imul eax, ecx, 7; push rax; pop rdx; loop
        &[
            0xb9, 50, 0, 0, 0, 0x01, 0x0c, 0x24, 0x6b, 0xc1, 7, 0x50, 0x5a, 0xe2, 0xf5, 0xf4,
        ],
        // movdqu xmm0, [rsp]; paddd xmm1, xmm0; sqrtps xmm2, xmm1; fld1; fldpi; fpatan; fstp qword [rsp]
        &[
            0xf3, 0x0f, 0x6f, 0x04, 0x24, 0x66, 0x0f, 0xfe, 0xc8, 0x0f, 0x51, 0xd1, 0xd9, 0xe8, 0xd9, 0xeb, 0xd9, 0xf3,
            0xdd, 0x1c, 0x24, 0xf4,
        ],
        // mov edi, 2000h; mov ecx, 100; rep stosd; mov esi, 2000h; repe cmpsb
        &[
            0xbf, 0, 0x20, 0, 0, 0xb9, 100, 0, 0, 0, 0xf3, 0xab, 0xbe, 0, 0x20, 0, 0, 0xf3, 0xa6, 0xf4,
        ],
        // mov rax, cr0; mov cr0, rax; mov ecx, 1bh; rdmsr; cpuid; rdtsc; in al, 61h
        &[
            0x0f, 0x20, 0xc0, 0x0f, 0x22, 0xc0, 0xb9, 0x1b, 0, 0, 0, 0x0f, 0x32, 0x0f, 0xa2, 0x0f, 0x31, 0xe4, 0x61,
            0xf4,
        ],
        // xbegin 1f; add [rsp], ecx; xabort 7; 1: xbegin 2f; push rax; fld1; xtest; xend; 2: stosd; cmp ecx, 9; loop
        &[
            0xc7, 0xf8, 6, 0, 0, 0, 0x01, 0x0c, 0x24, 0xc6, 0xf8, 7, 0xc7, 0xf8, 9, 0, 0, 0, 0x50, 0xd9, 0xe8, 0x0f,
            0x01, 0xd6, 0x0f, 0x01, 0xd5, 0xab, 0x83, 0xf9, 9, 0xe2, 0xdf, 0xf4,
        ],
    ];
    let modes = [0, 1, 2, 3, 6, 7, 9, 11, 15];
    code.iter()
        .flat_map(|code| modes.map(|mode| [&[mode], *code].concat()))
        .collect()
}

/// The least that passes for a bzImage with a 64-bit entry point: one setup sector, 1 KiB of code.
/// Linux `Documentation/arch/x86/boot.rst` "The Linux/x86 Boot Protocol".
pub fn small_bzimage() -> Vec<u8> {
    let mut image = vec![0; 2 * 512 + 1024];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[1]); // setup_sects
    put(0x1f4, &64u32.to_le_bytes()); // syssize, in units of 16 bytes
    put(0x1fe, &0xaa55u16.to_le_bytes()); // boot_flag
    put(0x200, &[0xeb, 0x6a]); // jump over the header, which gives its length
    put(0x202, b"HdrS");
    put(0x206, &0x20fu16.to_le_bytes()); // version
    put(0x211, &[1]); // loadflags: LOADED_HIGH
    put(0x214, &0x10_0000u32.to_le_bytes()); // code32_start
    put(0x22c, &0x7fff_ffffu32.to_le_bytes()); // initrd_addr_max
    put(0x230, &0x20_0000u32.to_le_bytes()); // kernel_alignment
    put(0x234, &[1]); // relocatable_kernel
    put(0x236, &1u16.to_le_bytes()); // xloadflags: XLF_KERNEL_64
    put(0x238, &2047u32.to_le_bytes()); // cmdline_size
    put(0x258, &0x100_0000u64.to_le_bytes()); // pref_address
    put(0x260, &0x1_0000u32.to_le_bytes()); // init_size
    image
}

fn multiboot_images() -> Vec<Vec<u8>> {
    [crate::HELLO, crate::INFO, crate::LOOPS]
        .map(|path| std::fs::read(path).unwrap_or_else(|error| panic!("cannot read {path}: {error}")))
        .to_vec()
}

/// An ELF64 kernel with one segment at 1 MiB, and with a PVH note or with Linux's banner.
fn elf_images() -> Vec<Vec<u8>> {
    let note = [
        &4u32.to_le_bytes()[..],
        &4u32.to_le_bytes(),
        &18u32.to_le_bytes(),
        b"Xen\0",
        &0x10_0000u32.to_le_bytes(),
    ]
    .concat();
    [(4u32, &note[..]), (0, b"Linux version 7.0")]
        .map(|(kind, text)| {
            let mut image = b"\x7fELF\x02\x01\x01".to_vec();
            image.resize(64, 0);
            image[16..20].copy_from_slice(&[2, 0, 62, 0]); // ET_EXEC, EM_X86_64
            image[24..32].copy_from_slice(&0x10_0000u64.to_le_bytes()); // e_entry
            image[32] = 64; // e_phoff
            image[54] = 56; // e_phentsize
            image[56] = 2; // e_phnum
            let (offset, len) = (64 + 2 * 56, text.len() as u64);
            for (kind, start, size) in [(1u32, 0x10_0000u64, 0x2000), (kind, 0, len)] {
                image.extend(kind.to_le_bytes());
                image.extend([0; 4]);
                for field in [offset, start, start, len, size, 4] {
                    image.extend(field.to_le_bytes());
                }
            }
            image.extend(text);
            image
        })
        .to_vec()
}

fn initrds() -> Vec<Vec<u8>> {
    // A header's thirteen fields: all zero but the length of the name, the twelfth.
    let newc = [b"070701".as_slice(), &[b'0'; 88], b"0000000B00000000TRAILER!!!\0\0\0\0"].concat();
    let gzip = [
        &[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0][..],
        &[0; 12],
    ]
    .concat();
    vec![newc, gzip]
}

fn command_lines() -> Vec<Vec<u8>> {
    let all = "--kernel k --initrd i --cmdline ab -m 1G --cpu westmere --engine soft --serial file:x --clock paced --seed 7 \
               --rtc-base 2024-01-01T00:00:00Z --max-instructions 1000 --timeout 5 --stats -v";
    let lines = [
        all,
        "models",
        "ctl unix:socket status",
        "--kernel k --control unix:socket --cpus 4",
        "--help",
        "--kernel k --memory 0x10000000 --seed random",
    ];
    lines.map(|line| line.replace(' ', "\0").into_bytes()).to_vec()
}

/// Bytes that a fuzzer without feedback would try: one input changed in a few places. `random` gives 64 random bits.
pub fn mutate(input: &[u8], random: &mut impl FnMut() -> u64) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..=random() % 4 {
        let len = bytes.len().max(1) as u64;
        // Headers are in front: half of the changes go there.
        let reach = if random() & 1 == 0 { len.min(0x300) } else { len };
        let at = (random() % reach) as usize;
        let value = match random() % 4 {
            0 => random(),
            1 => [0, 1, 0x7f, 0x80, 0xff, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff][(random() % 8) as usize],
            2 => 1 << (random() % 64),
            _ => len.wrapping_add(random() % 32).wrapping_sub(16),
        };
        let width = 1 << (random() % 4);
        match random() % 8 {
            0 => bytes.truncate(at),
            1 => {
                bytes.splice(at.min(bytes.len())..at.min(bytes.len()), value.to_le_bytes());
            }
            2 => {
                bytes.drain(at.min(bytes.len())..(at + width).min(bytes.len()));
            }
            _ => bytes
                .iter_mut()
                .skip(at)
                .zip(&value.to_le_bytes()[..width])
                .for_each(|(byte, new)| *byte = *new),
        }
    }
    bytes
}

#[cfg(test)]
#[path = "fuzz_test.rs"]
mod tests;
