use super::*;

#[test]
fn elements_next_to_each_other_are_accessed_together() {
    for (chosen, size, expected) in [
        (0, 4, vec![]),
        (0b1, 4, vec![(0, 4)]),
        (0b1101_1100, 2, vec![(4, 6), (12, 4)]),
        (1 << 63, 1, vec![(63, 1)]),
        (u64::MAX, 1, vec![(0, 64)]),
    ] {
        assert_eq!(runs(chosen, size).collect::<Vec<_>>(), expected, "{chosen:b}");
    }
}

#[test]
fn a_mask_chooses_elements() {
    let lanes = |count, bits, packed| Lanes {
        size: 4,
        count,
        bits,
        packed,
        probes_all: false,
    };
    for (lanes, mask, chosen, why) in [
        (
            lanes(16, 16, false),
            0x1_0005,
            5,
            "bits beyond the elements do not count",
        ),
        (
            lanes(1, 16, false),
            0x8000,
            1,
            "a broadcast element is read for whoever takes it",
        ),
        (lanes(1, 16, false), 0x1_0000, 0, "and not where nobody does"),
        (lanes(4, 16, false), 0x0410, 0b101, "four elements repeated"),
        (
            lanes(16, 16, true),
            0x8421,
            0b1111,
            "a compress store is as long as the mask has bits",
        ),
        (lanes(16, 16, true), 0, 0, "or nothing"),
        (lanes(1, 1, false), 2, 0, "a scalar has the lowest bit"),
    ] {
        assert_eq!(lanes.chosen(mask), chosen, "{why}");
    }
}
