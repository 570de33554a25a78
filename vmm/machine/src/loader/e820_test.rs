use super::*;

// covers: loader/e820
#[test]
fn the_map_is_sorted_and_its_usable_part_is_ram() {
    for size in [2 << 20, 512 << 20, 3 << 30, (3 << 30) + 4096, 9 << 30] {
        let memory = Memory::new(size).unwrap();
        let map = map(&memory);
        assert!(map.iter().all(|e| e.range.start < e.range.end));
        assert!(map.windows(2).all(|w| w[0].range.end <= w[1].range.start), "{map:x?}");
        let usable: u64 = map
            .iter()
            .filter(|e| e.kind == Kind::Usable)
            .map(|e| e.range.end - e.range.start)
            .sum();
        assert_eq!(
            usable,
            size - (EXTENDED_START - EBDA_START),
            "all RAM but the PC's hole below 1 MiB"
        );
        for entry in map.iter().filter(|e| e.kind == Kind::Usable) {
            memory.write(entry.range.start, &[1]).unwrap();
            memory.write(entry.range.end - 1, &[1]).unwrap();
        }
    }
    assert_eq!(
        usable_low(&Memory::new(5 << 30).unwrap()),
        [0..EBDA_START, EXTENDED_START..3 << 30]
    );
}

// covers: loader/bios-data
#[test]
fn the_bios_data_area_says_what_the_map_says() {
    // SeaBIOS and every PC since the AT: 40:13 is conventional memory in KiB, 40:0E the segment of the area behind it.
    let memory = Memory::new(64 << 20).unwrap();
    write_bios_data(&memory).unwrap();
    let word = |at: u64| {
        let mut bytes = [0; 2];
        memory.read(at, &mut bytes).unwrap();
        u64::from(u16::from_le_bytes(bytes))
    };
    let conventional = &map(&memory)[0];
    assert_eq!((conventional.range.start, conventional.kind), (0, Kind::Usable));
    assert_eq!(word(0x413) << 10, conventional.range.end);
    assert_eq!(word(0x40e) << 4, conventional.range.end);
    assert_eq!(word(conventional.range.end) & 0xff, 1, "it ends at the video memory");
}
