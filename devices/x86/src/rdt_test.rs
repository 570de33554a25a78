use super::*;

// covers: rdt/masks
#[test]
fn capacity_masks_are_contiguous_and_within_their_length() {
    let cache = CacheAllocation {
        length: 11,
        cdp: true,
        sparse: false,
        max_cos: 15,
    };
    assert_eq!(cache.full(), 0x7FF);
    for (mask, accepted) in [
        (0, false),
        (1, true),
        (0x7FF, true),
        (0x400, true),
        (0x3C0, true),
        (0x5, false),
        (0x401, false),
        (0x800, false),
        (0xFFF, false),
        (u64::MAX, false),
        (1 << 63, false),
    ] {
        assert_eq!(cache.accepts(mask), accepted, "{mask:#x}");
    }
    let sparse = CacheAllocation { sparse: true, ..cache };
    assert!(sparse.accepts(0x401) && !sparse.accepts(0) && !sparse.accepts(0x801));
}

// covers: rdt/mba
#[test]
fn a_linear_delay_is_rounded_down_to_a_step() {
    let linear = BandwidthAllocation {
        max_delay: 90,
        linear: true,
        max_cos: 7,
    };
    for (written, taken) in [(0, 0), (9, 0), (10, 10), (55, 50), (90, 90)] {
        assert_eq!(linear.step(written), taken, "{written}");
    }
    for other in [
        BandwidthAllocation {
            linear: false,
            ..linear
        },
        BandwidthAllocation {
            max_delay: 100,
            ..linear
        },
        BandwidthAllocation {
            max_delay: 4096,
            ..linear
        },
    ] {
        assert_eq!(other.step(55), 55);
    }
}
