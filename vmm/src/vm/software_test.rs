//! How virtual time follows wall time, and how it passes while nobody runs.

use super::*;
use crate::config::MachineConfig;

/// A flat multiboot image of some code, loaded at 1 MiB.
fn image(code: &[u8]) -> Vec<u8> {
    let flags = 1u32 << 16;
    let checksum = 0u32.wrapping_sub(0x1bad_b002).wrapping_sub(flags);
    let words = [0x1bad_b002, flags, checksum, 0x10_0000, 0x10_0000, 0, 0, 0x10_0020];
    let header = words.iter().flat_map(|word| word.to_le_bytes());
    header.chain(code.iter().copied()).collect()
}

// covers: cli/clock
#[test]
fn paced_time_catches_up_without_losing_ticks() {
    const SECOND: u64 = 1_000_000_000;
    let path = std::env::temp_dir().join(format!("minivmm-paced-{}", std::process::id()));
    // JMP to itself.
    std::fs::write(&path, image(&[0xeb, 0xfe])).unwrap();
    let mut vm = crate::Run::new(&MachineConfig {
        memory: 4 << 20,
        clock: ClockMode::Paced,
        ..MachineConfig::new(&path)
    })
    .unwrap();
    std::fs::remove_file(&path).unwrap();
    let platform = vm.machine.platform();
    // The 8259 with vectors from 20H and IRQ 0 alone; the PIT every 1193 of its ticks, a millisecond.
    for (port, value) in [(0x20, 0x11), (0x21, 0x20), (0x21, 4), (0x21, 1), (0x21, 0xfe)] {
        platform.port_write(port, 1, value, 0);
    }
    for (port, value) in [(0x43, 0x34), (0x40, 1193 & 0xff), (0x40, 1193 >> 8)] {
        platform.port_write(port, 1, value, 0);
    }
    let mut ticks = 0;
    for _ in 0..20 {
        let event = vm.machine.platform().next_event().unwrap();
        vm.catch_up(SECOND);
        vm.catch_up(SECOND);
        assert!(
            vm.now() >= event && vm.now() < event + 2,
            "to the event and no further: {} {event}",
            vm.now()
        );
        vm.machine.advance(0);
        if vm.machine.platform().interrupt_pending(0) {
            let before = vm.now();
            vm.catch_up(SECOND);
            assert!(
                vm.now() - before <= PENDING_JUMP_NS + 1,
                "time all but waits for the guest"
            );
            assert_eq!(vm.machine.platform().acknowledge(0), 0x20);
            let now = vm.now();
            vm.machine.platform().port_write(0x20, 1, 0x20, now);
            ticks += 1;
        }
    }
    assert!(ticks >= 9, "{ticks}");
    let now = vm.now();
    vm.catch_up(now - 1);
    assert_eq!(vm.now(), now, "never back");
}

// covers: cpu/waitpkg-clock
#[test]
fn time_passes_to_the_deadline_of_a_user_wait_however_the_run_is_cut() {
    const TICKS: u64 = 0x4000_0000;
    // XOR ECX, ECX; RDTSC; ADD EAX, TICKS; ADC EDX, 0; TPAUSE ECX; JNC over UD2; RDTSC; HLT, with interrupts disabled.
    let code = [
        0x31, 0xC9, 0x0F, 0x31, 0x05, 0, 0, 0, 0x40, 0x83, 0xD2, 0, 0x66, 0x0F, 0xAE, 0xF1, 0x73, 2, 0x0F, 0x0B, 0x0F,
        0x31, 0xF4,
    ];
    let path = std::env::temp_dir().join(format!("minivmm-tpause-{}", std::process::id()));
    std::fs::write(&path, image(&code)).unwrap();
    let ran = |steps: u64| {
        let mut run = crate::Run::new(&MachineConfig {
            memory: 4 << 20,
            model: crate::model::find("sapphirerapids").unwrap(),
            serial: crate::SerialTarget::Buffer,
            ..MachineConfig::new(&path)
        })
        .unwrap();
        let mut console = crate::Console::open(&crate::SerialTarget::Buffer, &[], run.line()).unwrap();
        let mut end = None;
        for _ in 0..100 {
            end = run.run_for(&mut console, steps).unwrap();
            if end.is_some() {
                break;
            }
        }
        let state = run.cpu_state(0).unwrap();
        (format!("{end:?}"), run.steps(), run.now(), state)
    };
    let whole = ran(1000);
    assert_eq!(whole.1, 8, "{}", whole.0);
    let tsc = whole.3.gpr[0] & 0xFFFF_FFFF | whole.3.gpr[2] << 32;
    assert!((TICKS..TICKS + 100).contains(&tsc), "{tsc:#x}");
    assert!(whole.0.contains("Halted"), "{}", whole.0);
    assert_eq!(ran(1), whole);
    std::fs::remove_file(&path).unwrap();
}
