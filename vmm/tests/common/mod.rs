//! Small guests, and minivmm run as a user runs it.
#![allow(dead_code, reason = "every test program uses its part of this")]

pub mod faults;
pub mod long;

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use iced_x86::code_asm::*;

/// Where the guests are loaded, and their entry point.
pub const BASE: u32 = 0x10_0000;
const HEADER: usize = 32;
/// Where a guest's data is: two pages of zeroes.
pub const DATA: u32 = BASE + 0x2000;

/// The program that is tested.
pub fn minivmm() -> Command {
    Command::new(env!("CARGO_BIN_EXE_minivmm"))
}

/// A folder of its own for a test, removed with all that is in it.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "minivmm-test-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, contents).unwrap();
        path
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A flat multiboot image of 32-bit code that starts with a stack and its data zeroed.
pub fn guest(code: impl FnOnce(&mut CodeAssembler)) -> Vec<u8> {
    let mut a = CodeAssembler::new(32).unwrap();
    a.mov(esp, DATA + 0x2000).unwrap();
    code(&mut a);
    let code = a.assemble(u64::from(BASE) + HEADER as u64).unwrap();
    let flags = 1u32 << 16;
    let checksum = 0u32.wrapping_sub(0x1bad_b002).wrapping_sub(flags);
    let words = [
        0x1bad_b002,
        flags,
        checksum,
        BASE,
        BASE,
        0,
        DATA + 0x2000,
        BASE + HEADER as u32,
    ];
    let mut image: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    image.extend(code);
    assert!(image.len() < 0x2000);
    image
}

/// OUT of a byte.
pub fn out(a: &mut CodeAssembler, port: u16, value: u8) {
    a.mov(dx, u32::from(port)).unwrap();
    a.mov(al, u32::from(value)).unwrap();
    a.out(dx, al).unwrap();
}

/// Sends text by the serial port.
pub fn print(a: &mut CodeAssembler, text: &str) {
    for byte in text.bytes() {
        out(a, 0x3f8, byte);
    }
}

/// Ends the run with `(value << 1) | 1`.
pub fn debug_exit(a: &mut CodeAssembler, value: u8) {
    out(a, 0xf4, value);
    forever(a);
}

pub fn forever(a: &mut CodeAssembler) {
    let mut here = a.create_label();
    a.set_label(&mut here).unwrap();
    a.jmp(here).unwrap();
}

/// ACPI soft-off.
pub fn power_off(a: &mut CodeAssembler) {
    a.mov(dx, 0x604).unwrap();
    a.mov(ax, 5 << 10 | 1 << 13).unwrap();
    a.out(dx, ax).unwrap();
    forever(a);
}

/// The registers of the first virtio-mmio device, a disk.
pub const DISK: u32 = 0xfeb0_1000;
/// The ring of requests that [`start_disk`] has made: its index is at 2.
pub const AVAILABLE: u32 = 0x20_1000;
/// The ring of answers: its index is at 2.
pub const USED: u32 = 0x20_2000;
/// Where requests have their header and their status.
pub const REQUEST: u32 = 0x20_3000;
pub const STATUS: u32 = 0x20_3100;
/// The number of the sector that is read next.
pub const SECTOR_NUMBER: u32 = REQUEST + 8;
/// Flags of descriptors.
pub const NEXT: u32 = 1;
pub const WRITE: u32 = 2;

/// Makes descriptors (address, length, flags, the next one) and has the disk begin with them and eight places in its rings; `features`:
/// those of bits 31:0 that are taken. virtio 1.2, 4.2.2 "MMIO Device Register Layout" and 2.7 "Split Virtqueues".
pub fn start_disk(a: &mut CodeAssembler, descriptors: &[(u32, u32, u32, u32)], features: u32) {
    const DESCRIPTORS: u32 = 0x20_0000;
    for (n, &(address, len, flags, following)) in (0..).zip(descriptors) {
        let at = DESCRIPTORS + n * 16;
        for (offset, value) in [(0, address), (8, len), (12, flags | following << 16)] {
            a.mov(dword_ptr(at + offset), value).unwrap();
        }
    }
    // No interrupts; VIRTIO_F_VERSION_1; DRIVER_OK.
    a.mov(word_ptr(AVAILABLE), 1).unwrap();
    for (register, value) in [
        (0x70, 3),
        (0x24, 0),
        (0x20, features),
        (0x24, 1),
        (0x20, 1),
        (0x70, 11),
        (0x30, 0),
        (0x38, 8),
        (0x80, DESCRIPTORS),
        (0x90, AVAILABLE),
        (0xa0, USED),
        (0x44, 1),
        (0x70, 15),
    ] {
        a.mov(dword_ptr(DISK + register), value).unwrap();
    }
}

/// Makes the disk read a sector of 512 bytes to an address for each entry of its ring, which are all the same one: the index moves,
/// and a write to QueueNotify (50H) has it look.
pub fn read_sectors(a: &mut CodeAssembler, to: u32) {
    let request = [
        (REQUEST, 16, NEXT, 1),
        (to, 512, NEXT | WRITE, 2),
        (STATUS, 1, WRITE, 0),
    ];
    start_disk(a, &request, 0);
}

/// A guest that prints and then never stops.
pub fn spinner() -> Vec<u8> {
    guest(|a| {
        print(a, "spinning\n");
        forever(a);
    })
}

/// A guest that prints and powers off.
pub fn hello() -> Vec<u8> {
    guest(|a| {
        print(a, "hello\n");
        power_off(a);
    })
}

/// A guest that sends back what it receives, by polling, until a `q`.
pub fn echo() -> Vec<u8> {
    guest(|a| {
        print(a, "ready\n");
        let mut again = a.create_label();
        a.set_label(&mut again).unwrap();
        a.mov(dx, 0x3fd).unwrap();
        a.in_(al, dx).unwrap();
        a.test(al, 1).unwrap();
        a.je(again).unwrap();
        a.mov(dx, 0x3f8).unwrap();
        a.in_(al, dx).unwrap();
        a.out(dx, al).unwrap();
        a.cmp(al, i32::from(b'q')).unwrap();
        a.jne(again).unwrap();
        power_off(a);
    })
}

/// A guest that sends back what it receives, by interrupts with HLT between them, until a `q`.
pub fn interrupt_echo() -> Vec<u8> {
    interrupt_guest(
        0xef,
        0x24,
        |a| {
            // OUT2, interrupt on received data.
            out(a, 0x3fc, 0x08);
            out(a, 0x3f9, 0x01);
            print(a, "ready\n");
        },
        |a, quit| {
            // The line stays up as long as there is a byte, and the 8259 wants to see it rise again: so take all there are.
            let (mut again, mut done) = (a.create_label(), a.create_label());
            a.set_label(&mut again).unwrap();
            a.mov(dx, 0x3fd).unwrap();
            a.in_(al, dx).unwrap();
            a.test(al, 1).unwrap();
            a.je(done).unwrap();
            a.mov(dx, 0x3f8).unwrap();
            a.in_(al, dx).unwrap();
            a.out(dx, al).unwrap();
            a.cmp(al, i32::from(b'q')).unwrap();
            a.je(quit).unwrap();
            a.jmp(again).unwrap();
            a.set_label(&mut done).unwrap();
        },
    )
}

/// A guest that sleeps between interrupts of the first 8259: its mask, the vector that is served, what to do first, and what
/// to do at each interrupt (with a label to jump to for power-off).
pub fn interrupt_guest(
    mask: u8,
    vector: u32,
    setup: impl FnOnce(&mut CodeAssembler),
    serve: impl FnOnce(&mut CodeAssembler, CodeLabel),
) -> Vec<u8> {
    // An IDT, a GDT of null, flat code (8) and flat data (10H), and what LIDT and LGDT read.
    const IDT: u32 = DATA;
    const GDT: u32 = DATA + 0x1000;
    const IDTR: u32 = DATA + 0x1100;
    const GDTR: u32 = DATA + 0x1108;
    let gate = IDT + vector * 8;
    guest(|a| {
        let (mut start, mut quit, mut sleep) = (a.create_label(), a.create_label(), a.create_label());
        // Pushes the address of the handler, which follows.
        a.call(start).unwrap();
        serve(a, quit);
        a.mov(al, 0x20).unwrap();
        a.out(0x20, al).unwrap();
        a.iretd().unwrap();
        a.set_label(&mut quit).unwrap();
        power_off(a);

        a.set_label(&mut start).unwrap();
        // An interrupt gate: the handler's address in two halves around the selector and the type.
        a.pop(eax).unwrap();
        a.mov(word_ptr(gate), ax).unwrap();
        a.shr(eax, 16).unwrap();
        a.mov(word_ptr(gate + 6), ax).unwrap();
        for (at, value) in [
            (gate + 2, 0x8e00_0008u32),
            (GDT + 8, 0x0000_ffff),
            (GDT + 12, 0x00cf_9b00),
            (GDT + 16, 0x0000_ffff),
            (GDT + 20, 0x00cf_9300),
            (IDTR, 0x7ff | IDT << 16),
            (IDTR + 4, IDT >> 16),
            (GDTR, 23 | GDT << 16),
            (GDTR + 4, GDT >> 16),
        ] {
            a.mov(dword_ptr(at), value).unwrap();
        }
        a.lgdt(ptr(GDTR)).unwrap();
        a.lidt(ptr(IDTR)).unwrap();
        // Vectors from 20H on.
        for (port, value) in [(0x20, 0x11), (0x21, 0x20), (0x21, 4), (0x21, 1), (0x21, mask)] {
            out(a, port, value);
        }
        setup(a);
        a.set_label(&mut sleep).unwrap();
        a.sti().unwrap();
        a.hlt().unwrap();
        a.jmp(sleep).unwrap();
    })
}

/// Whether this host has no KVM, so that this test is to be skipped: a message says so, which `cargo xtask test` counts.
pub fn kvm_is_missing(test: &str) -> bool {
    let missing = kvm::Host::open().err();
    if let Some(why) = &missing {
        skipped(test, why);
    }
    missing.is_some()
}

/// A test is skipped for this reason.
pub fn skipped(test: &str, why: &dyn std::fmt::Display) {
    println!("SKIPPED {test}: {why}");
    if let Some(path) = std::env::var_os("MINIVMM_SKIPPED") {
        let file = fs::OpenOptions::new().create(true).append(true).open(path);
        // In one write, as tests run side by side.
        file.unwrap().write_all(format!("{test}: {why}\n").as_bytes()).unwrap();
    }
}

/// A system call of minivmm's that does nothing but fail.
#[derive(Clone, Copy, Debug)]
pub enum Call {
    /// An ioctl by its request.
    Ioctl(u64),
    /// An ioctl by its request and the number that is its argument.
    IoctlOf(u64, u64),
    /// Opening a file to read and write it, as /dev/kvm.
    OpenReadWrite,
}

/// Does something in a thread whose own and whose children's calls of this kind fail with this error; with 0 they return 0 and
/// do nothing.
pub fn denied<T: Send>(call: Call, errno: i32, f: impl FnOnce() -> T + Send) -> T {
    use seccompiler::{
        BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
        TargetArch, apply_filter,
    };
    let equals = |argument: u8, value: u64| {
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value).unwrap()
    };
    let (number, conditions) = match call {
        Call::Ioctl(request) => (libc::SYS_ioctl, vec![equals(1, request)]),
        Call::IoctlOf(request, argument) => (libc::SYS_ioctl, vec![equals(1, request), equals(2, argument)]),
        Call::OpenReadWrite => {
            let flags = libc::O_RDWR | libc::O_CLOEXEC;
            (libc::SYS_openat, vec![equals(2, flags as u64)])
        }
    };
    let rules = BTreeMap::from([(number, vec![SeccompRule::new(conditions).unwrap()])]);
    let action = SeccompAction::Errno(errno as u32);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, action, TargetArch::x86_64).unwrap();
    let program: BpfProgram = filter.try_into().unwrap();
    std::thread::scope(|scope| {
        let filtered = scope.spawn(|| {
            apply_filter(&program).unwrap();
            f()
        });
        filtered.join().unwrap()
    })
}

/// Runs minivmm to its end with nothing on standard input.
pub fn run(command: &mut Command) -> Output {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    Watched::new(child).output()
}

/// Runs a guest with options.
pub fn run_guest(image: &[u8], options: &[&str]) -> Output {
    let folder = Folder::new();
    let kernel = folder.file("kernel", image);
    run(minivmm().arg("--kernel").arg(kernel).args(options))
}

/// A child that is killed when it takes too long, or is forgotten.
pub struct Watched {
    pub child: Child,
    started: Instant,
}

/// No test takes nearly so long, but a broken one would never end.
const LIMIT: Duration = Duration::from_secs(120);

impl Watched {
    pub fn new(child: Child) -> Self {
        Watched {
            child,
            started: Instant::now(),
        }
    }

    pub fn wait(&mut self) -> ExitStatus {
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(self.started.elapsed() < LIMIT, "minivmm does not end");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits for its end and collects its output.
    pub fn output(mut self) -> Output {
        fn collect(mut from: impl Read + Send + 'static) -> std::thread::JoinHandle<Vec<u8>> {
            std::thread::spawn(move || {
                let mut bytes = Vec::new();
                let _ = from.read_to_end(&mut bytes);
                bytes
            })
        }
        let stdout = self.child.stdout.take().map(collect);
        let stderr = self.child.stderr.take().map(collect);
        let status = self.wait();
        let bytes =
            |thread: Option<std::thread::JoinHandle<Vec<u8>>>| thread.map_or_else(Vec::new, |t| t.join().unwrap());
        Output {
            status,
            stdout: bytes(stdout),
            stderr: bytes(stderr),
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The status is `code`, and the error output is one line of ours that has all of `says` in it.
#[track_caller]
pub fn assert_refused(output: &Output, code: i32, says: &[&str]) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{errors}");
    assert_eq!(errors.lines().count(), 1, "not one line: {errors}");
    assert!(errors.starts_with("minivmm: ") && errors.ends_with('\n'), "{errors}");
    for text in says {
        assert!(errors.contains(text), "no {text:?} in: {errors}");
    }
}

/// A signal to a child.
pub fn kill(child: &Child, signal: &str) {
    let status = Command::new("kill")
        .arg(format!("-{signal}"))
        .arg(child.id().to_string())
        .status()
        .unwrap();
    assert!(status.success());
}
