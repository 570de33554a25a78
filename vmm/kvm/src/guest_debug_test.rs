use super::*;

// covers: kvm/points
#[test]
fn the_registers_hold_what_was_asked_for() {
    use Watched::*;
    let point = |watched, first, len| Breakpoint {
        watched,
        first,
        len,
        enabled: true,
    };
    let points = [
        execution(0xffff_8000_0000_1235),
        point(Write, 0x1000, 8),
        point(ReadWrite, 0x2004, 4),
        point(Write, 0x3002, 2),
    ];
    for count in 1..=points.len() {
        let registers = registers(&points[..count]);
        let dr7 = Dr7::from_bits(registers[7]);
        assert!(dr7.general_detect() && dr7.one());
        for (n, address) in registers[..ROOM].iter().enumerate() {
            let there = dr7.breakpoint(n as u8, *address, true).filter(|there| there.enabled);
            assert_eq!(there, points[..count].get(n).copied(), "{n} of {count}");
        }
    }
    assert_eq!(registers(&points[..1])[7], 0x2402);
}

// covers: kvm/points
#[test]
fn dr6_says_whose_exception_it_is() {
    let hit = |points, guest_steps| Hit { points, guest_steps };
    for (dr6, count, expected, why) in [
        (0xffff_0ff1, 1, hit(1, false), "the first"),
        (0xffff_0ff6, 4, hit(6, false), "two at once"),
        (0xffff_0ff3, 1, hit(1, false), "one that is not set is none"),
        (0xffff_4ff0, 1, hit(0, true), "the guest steps"),
        (0xffff_4ff2, 2, hit(2, true), "both"),
        (0xffff_2ff0, 1, hit(0, false), "MOV DR"),
        (0xffff_0ff0, 4, hit(0, false), "INT1"),
    ] {
        assert_eq!(Hit::of(dr6, count), expected, "{why}");
    }
}
