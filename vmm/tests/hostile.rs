//! Guests that do their worst, under each feature: how long a run takes to end that is told to, what it takes of memory beside the guest's
//! RAM, and how many bytes a trace has of it. `cargo xtask test --full` tries every guest with every feature for longer; the figures of
//! the guide are what this prints:
//! `MINIVMM_FULL=1 cargo test --release -p minivmm --test all hostile:: -- --nocapture`

use crate::common;
use std::{
    fs,
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use common::*;
use iced_x86::code_asm::*;

/// RAM of the guests, in KiB.
const RAM: u64 = 64 << 10;
/// What --reverse may take.
const REVERSE: u64 = 64 << 10;
/// A trace of at most 16 MiB, whatever the guest does.
const LIMITED: [&str; 6] = ["--trace", "out", "--trace-limit", "16M", "--trace-on-error", "continue"];

/// Jumps between two places whose addresses have nothing in common, each by a register: a packet with an address for each instruction.
fn jumps() -> Vec<u8> {
    guest(|a| {
        let (mut here, mut next) = (a.create_label(), a.create_label());
        // JMP EAX at 8 MiB.
        a.mov(word_ptr(0x80_0000), 0xe0ff).unwrap();
        a.mov(ebx, 0x80_0000).unwrap();
        a.call(next).unwrap();
        a.set_label(&mut next).unwrap();
        a.pop(eax).unwrap();
        // Of POP itself, and of ADD.
        a.add(eax, 4).unwrap();
        a.set_label(&mut here).unwrap();
        a.jmp(ebx).unwrap();
    })
}

/// Writes other code in front of itself every third instruction: a page for the trace each time.
fn rewrites() -> Vec<u8> {
    guest(|a| {
        let mut again = a.create_label();
        a.set_label(&mut again).unwrap();
        // The immediate operand of the next instruction, behind this one's six bytes and the five in front of it.
        a.inc(dword_ptr(BASE + 0x20 + 5 + 6 + 1)).unwrap();
        a.mov(eax, 0).unwrap();
        a.jmp(again).unwrap();
    })
}

/// Writes to every page of RAM, over and over, something else each time.
fn writes() -> Vec<u8> {
    guest(|a| {
        let (mut again, mut page) = (a.create_label(), a.create_label());
        a.set_label(&mut again).unwrap();
        a.mov(edi, 0x20_0000).unwrap();
        a.set_label(&mut page).unwrap();
        a.inc(dword_ptr(edi + 8)).unwrap();
        a.add(edi, 4096).unwrap();
        a.cmp(edi, (RAM << 10) as u32).unwrap();
        a.jb(page).unwrap();
        a.jmp(again).unwrap();
    })
}

/// Floods its serial port.
fn prints() -> Vec<u8> {
    guest(|a| {
        let mut again = a.create_label();
        a.mov(dx, 0x3f8).unwrap();
        a.set_label(&mut again).unwrap();
        a.mov(esi, BASE).unwrap();
        a.mov(ecx, 0x1000).unwrap();
        a.rep().outsb().unwrap();
        a.jmp(again).unwrap();
    })
}

/// Fills memory with code, all of which runs often enough to be translated.
fn much_code() -> Vec<u8> {
    guest(|a| {
        let (mut again, mut block, mut rounds) = (a.create_label(), a.create_label(), a.create_label());
        // Blocks of ADD EAX, 1; JMP +9 every 16 bytes from 4 MiB to 60 MiB, and a jump back to the loop behind them.
        a.mov(edi, 0x40_0000).unwrap();
        a.set_label(&mut block).unwrap();
        a.mov(dword_ptr(edi), 0xeb01_c083u32 as i32).unwrap();
        a.mov(dword_ptr(edi + 3), 0x0bebu32 as i32).unwrap();
        a.add(edi, 16).unwrap();
        a.cmp(edi, 0x3c0_0000).unwrap();
        a.jb(block).unwrap();
        a.mov(byte_ptr(edi), 0xc3).unwrap();
        a.set_label(&mut again).unwrap();
        a.mov(ecx, 300).unwrap();
        a.set_label(&mut rounds).unwrap();
        a.mov(eax, 0x40_0000).unwrap();
        a.call(eax).unwrap();
        a.dec(ecx).unwrap();
        a.jnz(rounds).unwrap();
        a.jmp(again).unwrap();
    })
}

/// A guest, by its name.
type Guest = (&'static str, fn() -> Vec<u8>);

const GUESTS: [Guest; 6] = [
    ("spins", spinner),
    ("jumps", jumps),
    ("rewrites", rewrites),
    ("writes", writes),
    ("prints", prints),
    ("much code", much_code),
];

/// A feature: its name, its options, what it may take of memory beside RAM, in KiB.
struct Feature(&'static str, &'static [&'static str], u64);

const FEATURES: [Feature; 6] = [
    Feature("no option", &[], 256 << 10),
    Feature("--translate off", &["--translate", "off"], 256 << 10),
    Feature("--trace-limit", &LIMITED, 384 << 10),
    Feature(
        "--reverse",
        &["--reverse", "--reverse-memory", "64M"],
        (256 << 10) + REVERSE,
    ),
    Feature("--record", &["--record", "out"], 256 << 10),
    Feature(
        "--gdb, --control",
        &["--gdb", "unix:gdb", "--control", "unix:control"],
        256 << 10,
    ),
];

/// What one run came to.
#[derive(Clone, Copy, Default)]
struct Figures {
    /// From SIGTERM to the end.
    end: Duration,
    /// The most that was resident, in KiB.
    peak: u64,
    /// Files of the output, in bytes.
    written: u64,
}

fn size_of(path: &Path) -> u64 {
    match fs::read_dir(path) {
        Ok(entries) => entries.map(|entry| size_of(&entry.unwrap().path())).sum(),
        Err(_) => fs::metadata(path).map_or(0, |metadata| metadata.len()),
    }
}

fn run(image: &[u8], options: &[&str], time: Duration) -> Figures {
    let folder = Folder::new();
    folder.file("kernel", image);
    let mut command = minivmm();
    command.current_dir(folder.path());
    command.args([
        "--kernel",
        "kernel",
        "-m",
        &format!("{RAM}K"),
        "--serial",
        "null",
        "--engine",
        "soft",
    ]);
    command.args(["--clock", "virtual"]).args(options);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut process = Watched::new(command.spawn().unwrap());
    std::thread::sleep(time);
    let status = fs::read_to_string(format!("/proc/{}/status", process.child.id())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse().ok());
    assert!(process.child.try_wait().unwrap().is_none(), "it has ended by itself");
    let start = Instant::now();
    kill(&process.child, "TERM");
    process.wait();
    let end = start.elapsed();
    let output = process.output();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(!errors.contains("panicked"), "{errors}");
    Figures {
        end,
        peak: peak.unwrap(),
        written: size_of(&folder.path().join("out")),
    }
}

// covers: hostile/end, hostile/memory
#[test]
fn hostile_guests_end_when_told_and_take_no_more_than_they_may() {
    let full = std::env::var_os("MINIVMM_FULL").is_some();
    let time = Duration::from_secs_f64(if full { 5.0 } else { 0.7 });
    println!("{:18} {:>12} {:>14}", "feature", "end ms", "over RAM MiB");
    for (number, Feature(name, options, most)) in FEATURES.iter().enumerate() {
        let mut worst = Figures::default();
        for (at, (guest, image)) in GUESTS.iter().enumerate() {
            // In the short form each feature has two guests, and each guest two features.
            if !full && at != number % GUESTS.len() && (at + 3) % GUESTS.len() != number % GUESTS.len() {
                continue;
            }
            let figures = run(&image(), options, time);
            let beside = figures.peak.saturating_sub(RAM);
            assert!(
                beside <= *most,
                "{name}, {guest}: {beside} KiB beside RAM, and {most} are allowed"
            );
            assert!(
                figures.end < Duration::from_secs(20),
                "{name}, {guest}: {:?}",
                figures.end
            );
            worst.end = worst.end.max(figures.end);
            worst.peak = worst.peak.max(beside);
            worst.written = worst.written.max(figures.written);
        }
        if options.contains(&"--trace-limit") {
            // The header and what is known of the guest's system are beside the limit.
            assert!(worst.written <= 17 << 20, "{name}: {} bytes", worst.written);
        }
        println!("{name:18} {:>12} {:>14}", worst.end.as_millis(), worst.peak >> 10);
    }
}

/// Without a limit a trace has at worst a page of code for every third instruction. The runs are short: that is 41 MB of each 30,000.
// covers: hostile/trace
#[test]
fn a_trace_has_at_worst_a_page_for_each_write_of_code() {
    const STEPS: u64 = 30_000;
    println!("{:18} {:>22}", "guest", "bytes/million steps");
    for (name, image) in GUESTS {
        let folder = Folder::new();
        folder.file("kernel", image());
        let mut command = minivmm();
        command.current_dir(folder.path());
        command.args([
            "--kernel", "kernel", "-m", "64M", "--serial", "null", "--engine", "soft", "--trace", "out",
        ]);
        let output = common::run(command.args(["--max-instructions", &STEPS.to_string()]));
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(8), "{name}: {errors}");
        let rate = size_of(&folder.path().join("out")) * 1_000_000 / STEPS;
        assert!(rate < 1_500_000_000, "{name}: {rate} bytes for a million steps");
        println!("{name:18} {rate:>22}");
    }
}
