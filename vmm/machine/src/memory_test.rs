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

/// What /proc/self/maps says of an address: whether it can be read or written.
fn accessible(address: u64) -> Option<bool> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (from, to) = range.split_once('-')?;
        let number = |word| u64::from_str_radix(word, 16).ok();
        let inside = (number(from)?..number(to)?).contains(&address);
        inside.then(|| !rest.starts_with("---"))
    })
}

// covers: memory/guards
#[test]
fn there_are_guards_around_ram() {
    let memory = Memory::new(LOW_LIMIT + (16 << 20)).unwrap();
    assert_eq!(memory.mmap().num_regions(), 2);
    for region in memory.mmap().iter() {
        let (start, len) = (region.get_mmap().as_ptr().addr() as u64, region.len());
        for at in [start, start + len - 1] {
            assert_eq!(accessible(at), Some(true), "{at:#x}");
        }
        for at in [
            start - GUARD as u64,
            start - 1,
            start + len,
            start + len + GUARD as u64 - 1,
        ] {
            assert_eq!(accessible(at), Some(false), "{at:#x}");
        }
    }
    // An engine on it keeps it.
    let engine = memory.engine(&x86::model::WESTMERE, EngineOptions::default()).unwrap();
    let start = memory.mmap().iter().next().unwrap().get_mmap().as_ptr().addr() as u64;
    drop(memory);
    assert_eq!(accessible(start), Some(true));
    drop(engine);
}
