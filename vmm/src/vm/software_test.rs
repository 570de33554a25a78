//! How virtual time follows wall time.

use super::*;
use crate::config::MachineConfig;

/// A flat multiboot image of `jmp $`, loaded at 1 MiB.
fn image() -> Vec<u8> {
    let flags = 1u32 << 16;
    let checksum = 0u32.wrapping_sub(0x1bad_b002).wrapping_sub(flags);
    let words = [
        0x1bad_b002,
        flags,
        checksum,
        0x10_0000,
        0x10_0000,
        0,
        0,
        0x10_0020,
        0xfeeb,
    ];
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

// covers: cli/clock
#[test]
fn paced_time_catches_up_without_losing_ticks() {
    const SECOND: u64 = 1_000_000_000;
    let path = std::env::temp_dir().join(format!("minivmm-paced-{}", std::process::id()));
    std::fs::write(&path, image()).unwrap();
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
