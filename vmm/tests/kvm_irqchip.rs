//! A machine on this host's KVM whose interrupt controllers are KVM's: what its devices' lines lead to, and how it ends. Where there
//! is no KVM the tests say so and skip.

use crate::common;
use std::io::Write;
use std::process::{Output, Stdio};

use common::{Folder, forever, guest, kvm_is_missing, minivmm, run_guest};
use iced_x86::code_asm::*;

const KVMS: [&str; 6] = ["--engine", "kvm", "--kvm-defects", "accept", "--irqchip", "kvm"];

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Adds `bit` to BL if `mask` is set in EAX within a while in which `read` fetches it.
fn expect(a: &mut CodeAssembler, mask: u32, bit: u32, read: impl Fn(&mut CodeAssembler)) {
    let (mut again, mut there, mut done) = (a.create_label(), a.create_label(), a.create_label());
    a.mov(ecx, 4_000_000).unwrap();
    a.set_label(&mut again).unwrap();
    read(a);
    a.test(eax, mask).unwrap();
    a.jne(there).unwrap();
    a.dec(ecx).unwrap();
    a.jne(again).unwrap();
    a.jmp(done).unwrap();
    a.set_label(&mut there).unwrap();
    a.or(ebx, bit).unwrap();
    a.set_label(&mut done).unwrap();
    a.nop().unwrap();
}

/// Looks at the controllers' request registers with interrupts off: a bit of its debug-exit value for each line that arrives.
fn lines(a: &mut CodeAssembler) {
    const LAPIC: u32 = 0xfee0_0000;
    const IOAPIC: u32 = 0xfec0_0000;
    const VIRTIO: u32 = 0xfeb0_0000;
    let store = |a: &mut CodeAssembler, address: u32, value: u32| {
        a.mov(dword_ptr(address), value).unwrap();
    };
    let out = |a: &mut CodeAssembler, port: u32, value: u32| common::out(a, port as u16, value as u8);
    a.cli().unwrap();
    a.xor(ebx, ebx).unwrap();
    for (port, value) in [
        // Both 8259s: vectors from 20H and 28H, all unmasked; reads are of the requests.
        (0x20, 0x11),
        (0x21, 0x20),
        (0x21, 4),
        (0x21, 1),
        (0x21, 0),
        (0x20, 0x0a),
        (0xa0, 0x11),
        (0xa1, 0x28),
        (0xa1, 2),
        (0xa1, 1),
        (0xa1, 0),
        (0xa0, 0x0a),
        // The interval timer's first channel, a kilohertz.
        (0x43, 0x34),
        (0x40, 0xa9),
        (0x40, 0x04),
        // The serial port: empty transmitter, OUT2.
        (0x3fc, 8),
        (0x3f9, 2),
        // The real-time clock's update interrupt, 1024 Hz as the periodic one.
        (0x70, 0x0a),
        (0x71, 0x26),
        (0x70, 0x0b),
        (0x71, 0x42),
    ] {
        out(a, port, value);
    }
    let requests = |port: u32| {
        move |a: &mut CodeAssembler| {
            a.xor(eax, eax).unwrap();
            a.mov(edx, port).unwrap();
            a.in_(al, dx).unwrap();
        }
    };
    expect(a, 1 << 0, 1, requests(0x20));
    expect(a, 1 << 4, 2, requests(0x20));
    expect(a, 1 << 0, 4, requests(0xa0));
    // The first virtio device's pin: vector 50H, a level, for APIC 0.
    store(a, LAPIC + 0xf0, 0x1ff);
    for (register, value) in [(0x31, 0), (0x30, 0x8050)] {
        store(a, IOAPIC, register);
        store(a, IOAPIC + 0x10, value);
    }
    let request = |a: &mut CodeAssembler| a.mov(eax, dword_ptr(LAPIC + 0x220)).unwrap();
    // Nothing yet: bit 3 stays clear if something is there too early.
    let (mut early, mut done) = (a.create_label(), a.create_label());
    request(a);
    a.test(eax, 1 << 16).unwrap();
    a.jne(early).unwrap();
    a.or(ebx, 8).unwrap();
    a.set_label(&mut early).unwrap();
    // A queue at 0 is nonsense, of which a driver that is at work learns by an interrupt.
    store(a, VIRTIO + 0x070, 15);
    store(a, VIRTIO + 0x044, 1);
    expect(a, 1 << 16, 16, request);
    expect(a, 1 << 14, 32, |a| {
        a.mov(dword_ptr(IOAPIC), 0x30).unwrap();
        a.mov(eax, dword_ptr(IOAPIC + 0x10)).unwrap();
    });
    a.set_label(&mut done).unwrap();
    a.mov(eax, ebx).unwrap();
    a.out(0xf4, al).unwrap();
    forever(a);
}

// covers: kvm/irqchip-kvm-lines
#[test]
fn the_devices_lines_reach_the_controllers_whosever_they_are() {
    let program = guest(lines);
    let runs: &[&[&str]] = &[
        &["--engine", "soft"],
        &["--engine", "kvm", "--kvm-defects", "accept", "--irqchip", "minivmm"],
        &KVMS,
    ];
    let runs = if kvm_is_missing("lines of interrupts") {
        &runs[..1]
    } else {
        runs
    };
    for options in runs {
        let ended = run_guest(&program, options);
        // 0x3f, as the debug-exit port makes it.
        assert_eq!(ended.status.code(), Some(0x7f), "{options:?}: {}", errors(&ended));
    }
}

/// It halts between characters, and only their interrupts wake it.
// covers: kvm/irqchip-kvm-lines
#[test]
fn what_is_typed_wakes_a_cpu_that_kvm_halts() {
    if kvm_is_missing("input with KVM's interrupt controllers") {
        return;
    }
    let folder = Folder::new();
    let mut command = minivmm();
    command
        .arg("--kernel")
        .arg(folder.file("kernel", common::interrupt_echo()))
        .args(KVMS);
    command
        .args(["--timeout", "60"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    for typed in ["a", "bc", "q"] {
        // Long enough for it to be asleep, and for whoever looks at the outside to look rarely.
        std::thread::sleep(std::time::Duration::from_millis(700));
        input.write_all(typed.as_bytes()).unwrap();
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", errors(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ready\nabcq");
}

/// A timer of KVM's wakes it long after the first look at whether anything will; once the timer is off, nothing does.
// covers: kvm/irqchip-kvm-ends
#[test]
fn a_cpu_that_a_timer_of_kvms_will_wake_does_not_sleep_for_good() {
    if kvm_is_missing("timers of KVM's interrupt controllers") {
        return;
    }
    // Longer than it takes to find one asleep; a clock of a gigahertz, divided by 2.
    const SECONDS: u32 = 2;
    let timer = |again: bool| {
        common::interrupt_guest(
            0xff,
            0x24,
            |a| {
                for (register, value) in [(0xf0, 0x1ff), (0x3e0, 0), (0x320, 0x24), (0x380, SECONDS * 500_000_000)] {
                    a.mov(dword_ptr(0xfee0_0000u32 + register), value).unwrap();
                }
            },
            move |a, quit| {
                common::print(a, "woken\n");
                a.mov(dword_ptr(0xfee0_00b0u32), 0).unwrap();
                if again {
                    a.jmp(quit).unwrap();
                }
            },
        )
    };
    // The interval timer at 18 Hz, whose interrupt both controllers keep to themselves or the 8259 lets in.
    let interval = |mask: u8| {
        common::interrupt_guest(
            mask,
            0x20,
            |a| {
                for (port, value) in [(0x43, 0x34), (0x40, 0), (0x40, 0)] {
                    common::out(a, port, value);
                }
            },
            |a, quit| {
                common::print(a, "woken\n");
                a.jmp(quit).unwrap();
            },
        )
    };
    for (program, status, prints) in [
        (timer(true), 0, "woken\n"),
        (timer(false), 4, "woken\n"),
        (interval(0xfe), 0, "woken\n"),
        (interval(0xff), 4, ""),
    ] {
        let ended = run_guest(&program, &[&KVMS[..], &["--timeout", "30"]].concat());
        let errors = errors(&ended);
        assert_eq!(ended.status.code(), Some(status), "{errors}");
        assert_eq!(String::from_utf8_lossy(&ended.stdout), prints);
        assert_eq!(status == 4, errors.contains("with no timer armed"), "{errors}");
    }
}

/// A guest that takes so many interrupts of a timer, and is content if two seconds of the machine's own clock have passed then: port
/// 608H counts 3,579,545 in one.
fn two_seconds(mask: u8, vector: u32, interrupts: u32, setup: impl FnOnce(&mut CodeAssembler)) -> Vec<u8> {
    const HZ: u32 = 3_579_545;
    let clock = |a: &mut CodeAssembler| {
        a.mov(dx, 0x608).unwrap();
        a.in_(eax, dx).unwrap();
    };
    common::interrupt_guest(
        mask,
        vector,
        |a| {
            a.mov(dword_ptr(0xfee0_00f0u32), 0x1ff).unwrap();
            clock(a);
            a.mov(edi, eax).unwrap();
            a.xor(esi, esi).unwrap();
            setup(a);
        },
        |a, quit| {
            let (mut early, mut more) = (a.create_label(), a.create_label());
            a.mov(dword_ptr(0xfee0_00b0u32), 0).unwrap();
            a.inc(esi).unwrap();
            a.cmp(esi, interrupts).unwrap();
            a.jb(more).unwrap();
            clock(a);
            a.sub(eax, edi).unwrap();
            a.and(eax, 0xff_ffff).unwrap();
            a.cmp(eax, HZ / 10 * 19).unwrap();
            a.jb(early).unwrap();
            a.cmp(eax, HZ * 4).unwrap();
            a.jb(quit).unwrap();
            a.set_label(&mut early).unwrap();
            // What has passed, in 64ths of a second.
            a.xor(edx, edx).unwrap();
            a.mov(ecx, HZ / 64).unwrap();
            a.div(ecx).unwrap();
            a.out(0xf4, al).unwrap();
            a.set_label(&mut more).unwrap();
            a.nop().unwrap();
        },
    )
}

/// While the machine is paused for longer than a timer would take, none of KVM's goes on.
// covers: kvm/irqchip-kvm-pause
#[test]
fn kvms_timers_stand_while_the_machine_does() {
    let Ok(host) = kvm::Host::open() else {
        assert!(kvm_is_missing("a pause with KVM's interrupt controllers"));
        return;
    };
    let khz = host.tsc_khz;
    let registers = |values: &'static [(u32, u32)]| {
        move |a: &mut CodeAssembler| {
            for &(register, value) in values {
                a.mov(dword_ptr(0xfee0_0000 + register), value).unwrap();
            }
        }
    };
    // A clock of a gigahertz, divided by 1.
    let once = two_seconds(
        0xff,
        0x24,
        1,
        registers(&[(0x3e0, 11), (0x320, 0x24), (0x380, 2_000_000_000)]),
    );
    let again = two_seconds(
        0xff,
        0x24,
        4,
        registers(&[(0x3e0, 11), (0x320, 0x2_0024), (0x380, 500_000_000)]),
    );
    // By the counter that it is a time of: it goes on in a pause on a KVM that does not let it be set.
    const THEN: u32 = 0x7000;
    let deadline = common::interrupt_guest(
        0xff,
        0x24,
        |a| {
            a.mov(dword_ptr(0xfee0_00f0u32), 0x1ff).unwrap();
            a.mov(dword_ptr(0xfee0_0320u32), 0x4_0024).unwrap();
            a.rdtsc().unwrap();
            for _ in 0..2 {
                a.add(eax, khz * 1000).unwrap();
                a.adc(edx, 0).unwrap();
            }
            a.mov(dword_ptr(THEN), eax).unwrap();
            a.mov(dword_ptr(THEN + 4), edx).unwrap();
            a.mov(ecx, 0x6e0).unwrap();
            a.wrmsr().unwrap();
        },
        |a, quit| {
            a.rdtsc().unwrap();
            a.sub(eax, dword_ptr(THEN)).unwrap();
            a.sbb(edx, dword_ptr(THEN + 4)).unwrap();
            a.jns(quit).unwrap();
            // Early.
            common::debug_exit(a, 1);
        },
    );
    // 65536 of 1,193,182 Hz, 36 times.
    let intervals = two_seconds(0xfe, 0x20, 37, |a| {
        for (port, value) in [(0x43, 0x34), (0x40, 0), (0x40, 0)] {
            common::out(a, port, value);
        }
    });
    std::thread::scope(|scope| {
        for (name, program) in [
            ("once", once),
            ("again", again),
            ("deadline", deadline),
            ("intervals", intervals),
        ] {
            scope.spawn(move || paused(name, &program));
        }
    });
}

/// Runs it with a pause of three seconds.
fn paused(name: &str, program: &[u8]) {
    let folder = Folder::new();
    let socket = folder.path().join("control");
    let mut command = minivmm();
    command
        .args(KVMS)
        .args(["--cpu-model", "haswell", "--timeout", "60", "--paused", "--kernel"])
        .arg(folder.file("kernel", program))
        .arg(format!("--control=unix:{}", socket.display()));
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let limit = std::time::Instant::now() + std::time::Duration::from_secs(30);
    let ctl = |command: &str| loop {
        let answer = minivmm().arg("ctl").arg(&socket).arg(command).output().unwrap();
        if answer.status.success() {
            break;
        }
        // It is not there yet.
        let late = std::time::Instant::now() > limit;
        assert!(!late, "{name}, {command}: {}", errors(&answer));
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    ctl("resume");
    std::thread::sleep(std::time::Duration::from_millis(300));
    ctl("pause");
    std::thread::sleep(std::time::Duration::from_secs(3));
    ctl("resume");
    let output = child.wait_with_output().unwrap();
    let status = output.status.code();
    assert_eq!(
        status,
        Some(0),
        "{name} (2 n + 1 for n 64ths of a second): {}",
        errors(&output)
    );
}

// covers: kvm/irqchip-kvm-ends
#[test]
fn crashes_resets_and_limits_are_told() {
    if kvm_is_missing("ends with KVM's interrupt controllers") {
        return;
    }
    let crash = guest(|a| a.ud2().unwrap());
    let hang = guest(forever);
    let halt = guest(|a| {
        a.cli().unwrap();
        a.hlt().unwrap();
    });
    // It lets interrupts in, and there are none: the APIC's timer has a count, but its entry is masked.
    let listen = guest(|a| {
        a.mov(dword_ptr(0xfee0_00f0u32), 0x1ff).unwrap();
        a.mov(dword_ptr(0xfee0_0320u32), 0x1_0040).unwrap();
        a.mov(dword_ptr(0xfee0_0380u32), 0x7fff_ffff).unwrap();
        a.sti().unwrap();
        a.hlt().unwrap();
    });
    // INIT for the boot CPU by itself, which would go on in firmware.
    let init = guest(|a| {
        a.mov(dword_ptr(0xfee0_00f0u32), 0x1ff).unwrap();
        a.mov(dword_ptr(0xfee0_0310u32), 0).unwrap();
        a.mov(dword_ptr(0xfee0_0300u32), 0x4500).unwrap();
        forever(a);
    });
    for (program, options, status, says) in [
        (crash, &[][..], 4, "triple fault"),
        (hang, &["--timeout", "0.5"], 8, "--timeout 0.5"),
        (halt.clone(), &[], 4, "interrupts disabled"),
        // The other two wait for a start-up IPI that nobody sends.
        (halt, &["--cpus", "3"], 4, "interrupts disabled"),
        (listen, &["--timeout", "20"], 4, "with no timer armed and no more input"),
        (init, &["--timeout", "20"], 0, ""),
    ] {
        let ended = run_guest(&program, &[&KVMS, options].concat());
        let errors = errors(&ended);
        assert_eq!(ended.status.code(), Some(status), "{says}: {errors}");
        assert!(errors.contains(says), "{errors}");
    }
}

/// What KVM cannot execute the engine does, unless it reaches for an interrupt controller: MOVD to memory that is none is no
/// instruction of KVM's.
// covers: kvm/irqchip-kvm-emulation
#[test]
fn an_instruction_of_the_engines_does_not_reach_kvms_controllers() {
    if kvm_is_missing("the engine beside KVM's interrupt controllers") {
        return;
    }
    let store = |address: u32| {
        guest(move |a| {
            // CR4.OSFXSR, for SSE.
            a.mov(eax, cr4).unwrap();
            a.or(eax, 0x600).unwrap();
            a.mov(cr4, eax).unwrap();
            a.mov(eax, 0x50).unwrap();
            a.movd(xmm0, eax).unwrap();
            a.movd(dword_ptr(address), xmm0).unwrap();
            common::debug_exit(a, 7);
        })
    };
    let nobody = run_guest(&store(0xfd00_0000), &KVMS);
    assert_eq!(nobody.status.code(), Some(15), "{}", errors(&nobody));
    let task_priority = store(0xfee0_0080);
    let ours = run_guest(
        &task_priority,
        &["--engine", "kvm", "--kvm-defects", "accept", "--irqchip", "minivmm"],
    );
    assert_eq!(ours.status.code(), Some(15), "{}", errors(&ours));
    let kvms = run_guest(&task_priority, &KVMS);
    let errors = errors(&kvms);
    assert_eq!(kvms.status.code(), Some(2), "{errors}");
    assert!(
        errors.contains("the interrupt controllers are KVM's") && errors.contains("use --irqchip minivmm"),
        "{errors}"
    );
}

// covers: kvm/irqchip-choice
#[test]
fn what_does_not_go_with_kvms_controllers_is_refused() {
    let folder = Folder::new();
    let kernel = folder.file("kernel", guest(forever));
    let refused = |options: &[&str]| {
        let output = minivmm().arg("--kernel").arg(&kernel).args(options).output().unwrap();
        let errors = errors(&output);
        assert_eq!(output.status.code(), Some(2), "{options:?}: {errors}");
        assert_eq!(errors.lines().count(), 1, "{errors}");
        errors
    };
    let said = refused(&["--engine", "soft", "--irqchip", "kvm"]);
    assert!(said.contains("--irqchip kvm: the software engine"), "{said}");
    let said = refused(&["--engine", "kvm", "--kvm-defects", "accept", "--irqchip", "ours"]);
    assert!(said.contains("--irqchip"), "{said}");
    if kvm_is_missing("refusals with KVM's interrupt controllers") {
        return;
    }
    for (options, says) in [
        (
            &["--lbr=emulated"][..],
            "--lbr=emulated has the guest run in the software engine",
        ),
        (
            &["--gdb", "tcp:127.0.0.1:0"],
            "--gdb has the guest run in the software engine",
        ),
        (&["--max-instructions", "5"], "--max-instructions counts instructions"),
    ] {
        let said = refused(&[&KVMS, options].concat());
        assert!(said.contains(says) && said.contains("use --"), "{said}");
    }
}
