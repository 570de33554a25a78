use super::*;

// covers: memory/layout
#[test]
fn ram_has_a_hole_from_3_to_4_gib() {
    for (size, low, high) in [
        (2 << 20, 2 << 20, None),
        (3 << 30, 3 << 30, None),
        (5 << 30, 3 << 30, Some(4 << 30..6 << 30)),
    ] {
        let memory = Memory::new(size).unwrap();
        assert_eq!((memory.low_end(), memory.high()), (low, high.clone()));
        memory.write(low - 1, &[1]).unwrap();
        memory.write(low, &[1]).unwrap_err();
        memory.write(low - 1, &[1, 2]).unwrap_err();
        if let Some(high) = high {
            memory.write(high.end - 1, &[7]).unwrap();
            memory.write(high.start - 1, &[1]).unwrap_err();
            memory.write(high.end, &[1]).unwrap_err();
        }
        assert_eq!(memory.mmap().iter().map(GuestMemoryRegion::len).sum::<u64>(), size);
    }
}

// covers: memory/as-touched
#[test]
fn ram_costs_what_is_touched() {
    let resident = || -> u64 {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    };
    let before = resident();
    let memory = Memory::new(64 << 30).unwrap();
    memory.write(63 << 30, &[1]).unwrap();
    assert!(resident() - before < 64 << 20);
}

// covers: memory/as-touched
#[test]
fn what_was_touched_is_known_without_touching_the_rest() {
    let memory = Memory::new(64 << 30).unwrap();
    assert_eq!(memory.touched(), []);
    for gpa in [0x5000, (40 << 30) + 0x20_0000] {
        memory.write(gpa, &[1]).unwrap();
    }
    let has = |gpa: u64| memory.touched().iter().any(|range| range.contains(&gpa));
    assert!(has(0x5000) && has((40 << 30) + 0x20_0000) && !has(20 << 30));
    let before = memory.digest();
    let all: u64 = memory.touched().iter().map(|range| range.end - range.start).sum();
    assert!(all <= 8 << 20, "{all} bytes: a host's large pages");
    memory.write(20 << 30, &[1]).unwrap();
    assert_ne!(memory.digest(), before);
}

#[test]
fn an_absurd_size_is_an_error() {
    for size in [0, 4096, (2 << 20) + 1, 1 << 62, u64::MAX & !4095] {
        assert!(Memory::new(size).is_err(), "{size:#x}");
    }
}

#[test]
fn zero_wipes_exactly_its_range_and_the_digest_sees_contents_only() {
    let memory = Memory::new(2 << 20).unwrap();
    let empty = memory.digest();
    memory.write(0xfff, &[1, 2, 3, 4]).unwrap();
    assert_ne!(memory.digest(), empty);
    memory.zero(0x1000, 2).unwrap();
    let mut bytes = [0; 4];
    memory.read(0xfff, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 0, 0, 4]);
    memory.zero(0, 2 << 20).unwrap();
    assert_eq!(memory.digest(), empty);
    memory.zero(1, 2 << 20).unwrap_err();
    memory.zero(u64::MAX, 2).unwrap_err();
}
