//! Linux's own driver of the counters on the machine: it finds them, and what it counts is exact.

use guest_tests::{Folder, NETBURST_EVENTS, Outcome, full, in_minivmm, linux_in_minivmm, linux_kernels, run};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(300);
/// Where the program is loaded, its headers first.
const BASE: u64 = 0x40_0000;
const HEADERS: u64 = 64 + 56;

/// A static 64-bit ELF program of one writable segment.
fn program(code: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).unwrap();
    code(&mut a).unwrap();
    let text = a.assemble(BASE + HEADERS).unwrap();
    let size = HEADERS + text.len() as u64;
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    // EXEC, x86-64, version 1; entry, program headers, no sections; sizes.
    elf.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [BASE + HEADERS, 64, 0] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    // LOAD, readable, writable, executable.
    elf.extend([1, 0, 0, 0, 7, 0, 0, 0]);
    for word in [0, BASE, BASE, size, size + 0x1000, 0x1000] {
        elf.extend(word.to_le_bytes());
    }
    elf.extend(text);
    elf
}

/// Counts each event of `events`, (type, config), in user mode around a loop of `rounds` DECs and JNZs, and prints a line of 16
/// hexadecimal digits for each: perf_event_open, reset, enable, the loop, disable, read.
fn counting(a: &mut CodeAssembler, events: &[(u32, u64)], rounds: u32) -> Result<(), IcedError> {
    const PERF_EVENT_OPEN: u32 = 298;
    const IOCTL: u32 = 16;
    for &(kind, config) in events {
        // struct perf_event_attr of 64 bytes on the stack: type and size, config, and the flags disabled, exclude_kernel and
        // exclude_hv.
        a.sub(rsp, 64)?;
        a.mov(rdi, rsp)?;
        a.xor(eax, eax)?;
        a.mov(ecx, 64)?;
        a.rep().stosb()?;
        a.mov(dword_ptr(rsp), kind)?;
        a.mov(dword_ptr(rsp + 4), 64)?;
        a.mov(rax, config)?;
        a.mov(qword_ptr(rsp + 8), rax)?;
        a.mov(dword_ptr(rsp + 40), 1 | 1 << 5 | 1 << 6)?;
        // This process, any CPU, no group.
        a.mov(rdi, rsp)?;
        a.xor(esi, esi)?;
        a.mov(rdx, -1_i64)?;
        a.mov(r10, -1_i64)?;
        a.xor(r8d, r8d)?;
        a.mov(eax, PERF_EVENT_OPEN)?;
        a.syscall()?;
        a.mov(r12, rax)?;
        for request in [0x2403_u32, 0x2400] {
            a.mov(rdi, r12)?;
            a.mov(esi, request)?;
            a.xor(edx, edx)?;
            a.mov(eax, IOCTL)?;
            a.syscall()?;
        }
        // What is counted begins here: MOV, the loop, four more, SYSCALL.
        a.mov(ecx, rounds)?;
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.dec(ecx)?;
        a.jnz(again)?;
        a.mov(rdi, r12)?;
        a.mov(esi, 0x2401_u32)?;
        a.xor(edx, edx)?;
        a.mov(eax, IOCTL)?;
        a.syscall()?;
        // If there is no such event, the error is what is printed.
        a.mov(qword_ptr(rsp), r12)?;
        a.mov(rdi, r12)?;
        a.mov(rsi, rsp)?;
        a.mov(edx, 8)?;
        a.xor(eax, eax)?;
        a.syscall()?;
        a.mov(rbx, qword_ptr(rsp))?;
        a.mov(ecx, 16)?;
        let mut digit = a.create_label();
        a.set_label(&mut digit)?;
        let mut letter = a.create_label();
        a.mov(eax, ebx)?;
        a.and(eax, 15)?;
        a.add(al, 48)?;
        a.cmp(al, 58)?;
        a.jb(letter)?;
        a.add(al, 39)?;
        a.set_label(&mut letter)?;
        a.mov(byte_ptr(rsp + rcx - 1), al)?;
        a.shr(rbx, 4)?;
        a.dec(ecx)?;
        a.jnz(digit)?;
        a.mov(byte_ptr(rsp + 16), 10)?;
        a.mov(edi, 1)?;
        a.mov(rsi, rsp)?;
        a.mov(edx, 17)?;
        a.mov(eax, 1)?;
        a.syscall()?;
    }
    a.mov(eax, 60)?;
    a.xor(edi, edi)?;
    a.syscall()
}

/// Boots `model` with the program as /inject/count and a script that runs it.
fn boot(model: &str, events: &[(u32, u64)], rounds: u32) -> Outcome {
    let folder = Folder::new(&format!("counters-{model}"));
    let inject = folder.join("inject");
    fs::create_dir_all(&inject).unwrap();
    let write = |name: &str, bytes: &[u8]| {
        fs::write(inject.join(name), bytes).unwrap();
        fs::set_permissions(inject.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    };
    write("count", &program(|a| counting(a, events, rounds)));
    write(
        "run",
        b"#!/bin/sh\necho counts:\n./count\necho end of counts\ncat /proc/sys/kernel/nmi_watchdog\ngrep -E 'NMI|PMI' /proc/interrupts\ndmesg | grep -iE 'perf|pmu|pebs|watchdog|bts'\n",
    );
    let mut command = linux_in_minivmm("console=ttyS0 panic=-1 quiet");
    command.args(["--cpu-model", model, "--inject"]).arg(&inject);
    run(&mut command, LIMIT).must_end_with(0)
}

// covers: pmu/linux
#[test]
fn perf_events_count_exactly_in_a_linux_guest() {
    const HARDWARE: u32 = 0;
    const RAW: u32 = 4;
    let rounds = 1_000_000;
    // Cycles, instructions, branches, branch misses; conditional branches of this generation.
    let events = [
        (HARDWARE, 1),
        (HARDWARE, 4),
        (HARDWARE, 5),
        (HARDWARE, 0),
        (RAW, 0x01C4),
    ];
    let guest = boot("westmere", &events, rounds);
    let console = &guest.console;
    let mut lines = console.lines().skip_while(|line| *line != "counts:").skip(1);
    let mut count = || u64::from_str_radix(lines.next().unwrap_or_default(), 16).expect(console);
    let rounds = u64::from(rounds);
    assert_eq!(count(), 2 * rounds + 6, "instructions\n{console}");
    assert_eq!(count(), rounds + 1, "branches: the loop's and SYSCALL\n{console}");
    assert!(count() <= 2, "mispredicted: the end of the loop\n{console}");
    let cycles = count();
    assert!(
        cycles >= 2 * rounds && cycles < 2 * rounds + 1000,
        "cycles: {cycles}\n{console}"
    );
    assert_eq!(count(), rounds, "conditional branches\n{console}");
    assert!(console.contains("PEBS fmt1+"), "{console}");
    assert!(
        console.contains("Westmere events, 16-deep LBR, Intel PMU driver"),
        "{console}"
    );
    for word in ["disabled", "Broken", "WARNING", "Call Trace", "unchecked MSR"] {
        assert!(!console.contains(word), "{word}\n{console}");
    }
}

/// Linux's `p4` driver on Debian's kernels for 32-bit CPUs: it finds the counters, counts exactly, samples, and has the lockup watchdog
/// interrupt. The watchdog has the counter of cycles, so that cycles are counted by another event's threshold.
// covers: pmu/netburst-linux
#[test]
fn the_pentium_4_s_driver_counts_samples_and_watches() {
    let is_pae = |kernel: &std::path::PathBuf| kernel.to_string_lossy().ends_with("-686-pae");
    let mut kernels: Vec<_> = linux_kernels().into_iter().filter(is_pae).collect();
    assert!(
        !kernels.is_empty(),
        "cargo xtask guest --kernels fetches one, without target/guest/kernels/ends"
    );
    if !full() {
        kernels.truncate(1);
    }
    for kernel in kernels {
        let name = kernel.file_name().unwrap().to_string_lossy().into_owned();
        let folder = Folder::new(&format!("counters-{}", name.replace('.', "-")));
        let inject = folder.join("inject");
        fs::create_dir_all(&inject).unwrap();
        fs::copy(NETBURST_EVENTS, inject.join("init")).unwrap();
        let mut command = in_minivmm(&kernel);
        // A slow part: the watchdog's period is a second of cycles.
        command
            .args([
                "--cpu-model",
                "netburst",
                "--tsc-khz",
                "200000",
                "-m",
                "256M",
                "--inject",
            ])
            .arg(&inject)
            .args(["--cmdline", "console=ttyS0 panic=-1 nmi_watchdog=1 watchdog_thresh=1"]);
        let guest = run(&mut command, LIMIT).must_end_with(0);
        let console = &guest.console;
        assert!(console.contains("all said"), "{name}\n{console}");
        for said in [
            "Netburst events, Netburst P4/Xeon PMU driver",
            "... generic registers:      18",
            "... bit width:              40",
            "/proc/sys/kernel/nmi_watchdog 1",
        ] {
            assert!(console.contains(said), "{name}: {said}\n{console}");
        }
        let fact = |what: &str| {
            let line = console
                .lines()
                .find_map(|line| line.trim_end().strip_prefix(what)?.strip_prefix(' '));
            u64::from_str_radix(line.unwrap_or_default(), 16).unwrap_or_else(|_| panic!("{name}: {what}\n{console}"))
        };
        let rounds = 1_000_000;
        assert_eq!(fact("instructions"), 2 * rounds + 6, "{name}\n{console}");
        assert_eq!(fact("branches"), rounds, "INT is none of the kinds\n{console}");
        assert_eq!(fact("taken"), rounds, "the loop's but the last, and INT\n{console}");
        assert!(fact("branch-misses") < 10, "the end of the loop\n{console}");
        assert!(fact("load-misses") < 100, "{name}\n{console}");
        assert_eq!(fact("completed") as i64, -22, "EINVAL\n{console}");
        // By a threshold that every cycle meets, in both rings.
        let cycles = fact("cycles");
        assert!(
            (2 * rounds..2 * rounds + 100_000).contains(&cycles),
            "{name}: {cycles}\n{console}"
        );
        // One in 100000 instructions: the driver makes up for the one more with which the interrupt comes. Kernels since 6.1 begin with what
        // was left of the last period.
        let samples = fact("samples");
        assert!((19..=21).contains(&samples), "{name}: {samples}\n{console}");
        assert_eq!(fact("samples in the loop"), samples, "{name}\n{console}");
        assert_eq!(fact("other records"), 0, "{name}\n{console}");
        // 6e8 cycles at 2e8 a period.
        let interrupts = fact("watchdog interrupts");
        assert!((2..=4).contains(&interrupts), "{name}: {interrupts}\n{console}");
        for word in [
            "Broken",
            "WARNING",
            "Call Trace",
            "unchecked MSR",
            "Uhhuh",
            "dazed",
            "LOCKUP",
            "lockup",
        ] {
            assert!(!console.contains(word), "{name}: {word}\n{console}");
        }
    }
}
