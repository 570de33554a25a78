//! Random accesses to every register at random times: nothing panics, nothing takes long, and state goes out and comes back.

use std::time::{Duration, Instant};

use super::*;
use crate::testing::XorShift;

pub fn caps() -> LapicCaps {
    LapicCaps {
        timer_khz: 133_000,
        tsc_khz: 2_666_000,
        x2apic: true,
        tsc_deadline: true,
        cmci: true,
        suppress_eoi_broadcast: true,
        physical_bits: 40,
    }
}

const PORTS: [u16; 48] = [
    0x20, 0x21, 0x40, 0x41, 0x42, 0x43, 0x60, 0x61, 0x64, 0x70, 0x71, 0x72, 0x80, 0x92, 0xa0, 0xa1, 0xf0, 0xf1, 0xf4,
    0xf5, 0x2f8, 0x3f8, 0x3f9, 0x3fa, 0x3fb, 0x3fc, 0x3fd, 0x3fe, 0x3ff, 0x4d0, 0x4d1, 0x600, 0x601, 0x602, 0x603,
    0x604, 0x605, 0x608, 0x60a, 0x60b, 0xcf8, 0xcf9, 0xcfa, 0xcfc, 0x400, 0x3d4, 0xfffe, 0xffff,
];

/// Steps of time from nothing to half the range.
fn later(random: &mut XorShift, now: u64) -> u64 {
    let step = random.next() >> random.below(64);
    now.saturating_add(if random.below(50) == 0 {
        step >> 1
    } else {
        step % 10_000_000
    })
}

fn act(platform: &mut Platform, random: &mut XorShift, now: u64) {
    let cpu = random.below(3) as usize;
    let value = random.next() >> random.below(64);
    let size = [1, 2, 4][random.below(3) as usize];
    match random.below(16) {
        0..=3 => {
            platform.port_write(PORTS[random.below(48) as usize], size, value as u32, now);
        }
        4..=6 => {
            let got = platform.port_read(PORTS[random.below(48) as usize], size, now);
            assert_eq!(u64::from(got) & !all_ones(size), 0);
        }
        7 => platform.mmio_write(cpu, ioapic::IOAPIC, 4, random.below(0x40), now),
        8 => platform.mmio_write(cpu, ioapic::IOAPIC + 0x10, 4, value, now),
        9 => platform.mmio_write(cpu, 0xfee0_0000 + 16 * random.below(0x40), 4, value, now),
        10 => {
            let address = [ioapic::IOAPIC, 0xfee0_0000, 0][random.below(3) as usize] + random.below(0x1000);
            let got = platform.mmio_read(cpu, address, size, now);
            assert_eq!(got & !all_ones(size), 0);
        }
        11 => {
            let msr = [0x1b, 0x6e0, 0x800 + random.below(0x100) as u32][random.below(3) as usize];
            let _ = platform.read_msr(cpu, msr, now);
            let value = if msr == 0x1b {
                0xfee0_0000 | (value & 0xd00)
            } else {
                value
            };
            let _ = platform.write_msr(cpu, msr, value, now);
        }
        12 => {
            if platform.interrupt_pending(cpu) {
                platform.acknowledge(cpu);
            }
            platform.take_nmi(cpu);
        }
        13 => {
            let bytes = value.to_le_bytes();
            assert!(platform.serial_enqueue(&bytes) <= bytes.len());
        }
        14 => {
            platform.set_cr8(cpu, value as u8);
            platform.set_gsi(random.below(30) as u8, value & 1 != 0);
        }
        _ => platform.advance(now),
    }
}

// covers: devices/bad-input
// covers: devices/state-round-trip
#[test]
fn random_accesses_neither_panic_nor_linger_and_state_round_trips() {
    for seed in 1..=40 {
        let mut random = XorShift(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
        let mut platform = Platform::with_caps(&caps(), 2, 1_700_000_000, Box::new(io::sink()));
        let mut twin = Platform::with_caps(&caps(), 2, 0, Box::new(io::sink()));
        let mut now = 0;
        let mut longest = Duration::ZERO;
        for step in 0..3000 {
            now = later(&mut random, now);
            let start = Instant::now();
            act(&mut platform, &mut random, now);
            if random.below(4) == 0 {
                platform.advance(now);
                if let Some(next) = platform.next_event() {
                    assert!(
                        next > now || next == u64::MAX,
                        "seed {seed} step {step}: {next} is past at {now}"
                    );
                }
            }
            longest = longest.max(start.elapsed());
            assert!(platform.effects.len() < 1100, "effects do not pile up");
            if random.below(150) == 0 {
                // The twin takes the state and must then behave alike.
                twin.set_state(&platform.state()).unwrap();
                assert_eq!(twin.state(), platform.state());
                let seed = random.0;
                let mut at = now;
                for _ in 0..200 {
                    at = later(&mut random, at);
                    act(&mut platform, &mut random, at);
                }
                let mut again = XorShift(seed);
                let mut at = now;
                for _ in 0..200 {
                    at = later(&mut again, at);
                    act(&mut twin, &mut again, at);
                }
                assert_eq!(twin.state(), platform.state(), "seed {seed}");
                now = at;
            }
        }
        // A call takes microseconds; anything that loops over elapsed time would take minutes.
        assert!(longest < Duration::from_secs(2), "{longest:?}");
    }
}
