use super::*;
use crate::cpuid::Feature;

// covers: dr/fixed-bits
#[test]
fn reserved_bits_of_dr6_and_dr7_keep_their_values() {
    let plain = Features::NONE;
    let rtm = plain.with(Feature::Rtm);
    let lock = plain.with(Feature::BusLockDetect);
    for (features, value, dr6, dr7, why) in [
        (plain, 0, 0xFFFF_0FF0, 0x400, "all that is writable clear"),
        (plain, 0xFFFF_FFFF, 0xFFFF_EFFF, 0xFFFF_27FF, "all set"),
        (rtm, 0, 0xFFFE_0FF0, 0x400, "RTM of DR6 is active low"),
        (rtm, 0xFFFF_FFFF, 0xFFFF_EFFF, 0xFFFF_2FFF, "RTM of DR7"),
        (lock, 0, 0xFFFF_07F0, 0x400, "BLD is active low"),
    ] {
        assert_eq!(Dr6::written(value, features), dr6, "DR6, {why}");
        assert_eq!(Dr7::written(value, features), dr7, "DR7, {why}");
    }
}

// covers: dr/decode
#[test]
fn each_breakpoint_has_its_kind_length_and_enables() {
    use Watched::*;
    for (n, dr7, de, expected, why) in [
        (0, 0x0000_0001, false, Some((Execute, 0x1003, 1, true)), "L0, execute"),
        (0, 0x0000_0002, false, Some((Execute, 0x1003, 1, true)), "G0"),
        (0, 0x0000_0000, false, Some((Execute, 0x1003, 1, false)), "off"),
        (
            0,
            0x000D_0001,
            false,
            Some((Write, 0x1000, 4, true)),
            "write, 4 bytes, aligned down",
        ),
        (
            0,
            0x0007_0001,
            false,
            Some((ReadWrite, 0x1002, 2, true)),
            "read or write, 2 bytes",
        ),
        (0, 0x000B_0001, false, Some((ReadWrite, 0x1000, 8, true)), "8 bytes"),
        (1, 0x0020_0004, false, None, "R/W 10 without CR4.DE"),
        (1, 0x0020_0004, true, Some((Port, 0x1003, 1, true)), "I/O"),
        (3, 0x1000_0080, false, Some((Write, 0x1003, 1, true)), "the fourth, G3"),
        (3, 0x1000_0020, false, Some((Write, 0x1003, 1, false)), "G2 is not G3"),
    ] {
        let b = Dr7::from_bits(dr7).breakpoint(n, 0x1003, de);
        assert_eq!(b.map(|b| (b.watched, b.first, b.len, b.enabled)), expected, "{why}");
    }
}

// covers: dr/decode
#[test]
fn any_touched_byte_counts() {
    let b = Breakpoint {
        watched: Watched::Write,
        first: 0x1004,
        len: 4,
        enabled: true,
    };
    for (address, size, hit) in [
        (0x1000, 4, false),
        (0x1000, 5, true),
        (0x1003, 1, false),
        (0x1003, 2, true),
        (0x1004, 1, true),
        (0x1007, 1, true),
        (0x1007, 8, true),
        (0x1008, 8, false),
        (0xFFFF_FFFF_FFFF_FFFF, 8, false),
        (0xFC0, 0x1000, true),
    ] {
        assert_eq!(b.touches(address, size), hit, "{address:x} {size}");
    }
}
