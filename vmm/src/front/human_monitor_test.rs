use super::*;

fn memory() -> Memory {
    let memory = Memory::new((3 << 30) + (2 << 20)).unwrap();
    let bytes: Vec<u8> = (0x10..0x30).collect();
    memory.write(0x1004, &bytes).unwrap();
    memory
}

// covers: qmp/human-monitor
#[test]
fn memory_is_shown_in_all_widths() {
    let memory = memory();
    let rows = [
        ("xp /3xb 0x1004", "0000000000001004: 0x10 0x11 0x12\n"),
        ("xp /1xh 0x1004", "0000000000001004: 0x1110\n"),
        ("xp 4100", "0000000000001004: 0x13121110\n"),
        ("xp /xg 0x1004", "0000000000001004: 0x1716151413121110\n"),
        (
            "xp /3xg 0x1004",
            "0000000000001004: 0x1716151413121110 0x1f1e1d1c1b1a1918\n0000000000001014: 0x2726252423222120\n",
        ),
        ("xp /0xb 0x1004", ""),
        ("xp /1xb 0xc0000000", "00000000c0000000: Cannot access memory\n"),
        ("xp /1xb 0xffffffffffffffff", "ffffffffffffffff: Cannot access memory\n"),
        ("xp /1xz 0x1000", "xp: a format is /COUNT, x, and b, h, w or g\n"),
        (
            "xp /99999999999999999999xb 0",
            "xp: a count or an address that is no number\n",
        ),
        ("xp /65537xb 0", "xp: more than 65536 bytes\n"),
        ("xp /18446744073709551615xg 0", "xp: more than 65536 bytes\n"),
        ("xp /1xb zero", "xp: a count or an address that is no number\n"),
        ("xp /é 0", "xp: a format is /COUNT, x, and b, h, w or g\n"),
        ("balloon 3", "unknown command: 'balloon'\n"),
        ("", "unknown command: ''\n"),
        ("gpa2hva 0xc0000000", "No memory is mapped at address 0xc0000000\n"),
        ("gpa2hva here", "gpa2hva: an address that is no number\n"),
    ];
    for (line, says) in rows {
        assert_eq!(answer(&memory, line), says, "{line}");
    }
}

// covers: qmp/human-monitor
#[test]
fn regions_of_ram_are_listed_and_their_host_addresses_hold_them() {
    let memory = memory();
    let said = answer(&memory, "info mtree -f");
    let ram: Vec<&str> = said.lines().filter(|line| line.contains("(prio 0, ram)")).collect();
    assert_eq!(
        ram,
        [
            "  0000000000000000-00000000bfffffff (prio 0, ram): ram",
            "  0000000100000000-00000001001fffff (prio 0, ram): ram"
        ]
    );
    let said = answer(&memory, "gpa2hva 0x1004");
    let host = said.trim_end().rsplit("is 0x").next().unwrap();
    let host = u64::from_str_radix(host, 16).unwrap();
    // As a debugger reads it.
    let mut bytes = [0; 4];
    let file = std::fs::File::open("/proc/self/mem").unwrap();
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, host).unwrap();
    assert_eq!(bytes, [0x10, 0x11, 0x12, 0x13]);
}
