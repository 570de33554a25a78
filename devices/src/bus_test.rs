use super::*;

// covers: devices/bus-access-sizes
#[test]
fn claims_do_not_overlap() {
    let mut map = AddressMap::new(0xffff);
    map.claim(0x3f8, 8, Width::Byte, 'a').unwrap();
    for (first, len, ok, why) in [
        (0x3f0, 8, true, "ends just below"),
        (0x400, 8, true, "begins just above"),
        (0x3ff, 1, false, "the last port"),
        (0x3f8, 1, false, "the first port"),
        (0x3ff, 4, false, "straddles the end"),
        (0x000, 0x1000, false, "swallows it"),
        (0x200, 0, false, "empty"),
        (0xffff, 1, true, "the last of the space"),
        (0xfffe, 3, false, "leaves the space"),
        (u64::MAX, 2, false, "wraps"),
    ] {
        assert_eq!(map.claim(first, len, Width::Byte, 'b').is_ok(), ok, "{why}");
    }
    assert_eq!(
        map.claim(0x3f9, 2, Width::Byte, 'c').unwrap_err().to_string(),
        "0x3f9-0x3fa overlaps 0x3f8-0x3ff"
    );
}

// covers: devices/bus-access-sizes
#[test]
fn wide_accesses_split_for_byte_devices() {
    let mut map = AddressMap::new(0xffff);
    map.claim(0x70, 2, Width::Byte, 'r').unwrap();
    map.claim(0x608, 4, Width::Whole, 't').unwrap();
    let got = |a, n| map.pieces(a, n).map(|p| (p.owner, p.size, p.shift)).collect::<Vec<_>>();
    assert_eq!(got(0x70, 1), [(Some(('r', 0)), 1, 0)]);
    assert_eq!(got(0x71, 2), [(Some(('r', 1)), 1, 0), (None, 1, 8)]);
    assert_eq!(got(0x608, 4), [(Some(('t', 0)), 4, 0)]);
    assert_eq!(got(0x60a, 2), [(Some(('t', 2)), 2, 0)]);
    assert_eq!(got(0x60b, 2), [(Some(('t', 3)), 1, 0), (None, 1, 8)]);
    assert_eq!(got(0xffff, 2), [(None, 1, 0), (None, 1, 8)]);
}
