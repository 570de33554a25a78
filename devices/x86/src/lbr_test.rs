use super::*;
use crate::model::MODELS;

// covers: lbr/formats
#[test]
fn perf_capabilities_names_the_format() {
    for (format, number, linear) in [
        (LbrFormat::Offset32, 0, false),
        (LbrFormat::Linear, 1, true),
        (LbrFormat::Effective, 2, false),
        (LbrFormat::EffectiveFlags, 3, false),
        (LbrFormat::EffectiveTsx, 4, false),
        (LbrFormat::EffectiveInfo, 5, false),
        (LbrFormat::LinearCycles, 6, true),
        (LbrFormat::LinearInfo, 7, true),
        (LbrFormat::Architectural, 0x3F, false),
    ] {
        let caps = LbrCaps { format, ..NEHALEM };
        assert_eq!(perf_capabilities(Some(caps)), number, "{format:?}");
        assert_eq!(format.linear(), linear, "{format:?}");
    }
    assert_eq!(perf_capabilities(None), 0);
}

// covers: lbr/architectural-leaf
#[test]
fn leaf_1ch_says_what_architectural_records_can_do() {
    // Golden Cove: depths 8, 16 and 32, all filters, all of INFO, effective addresses.
    let leaf = ArchLbrLeaf {
        regs: [0x4000_000B, 0x7, 0x7, 0],
    };
    for (depth, there) in [
        (0, false),
        (1, false),
        (8, true),
        (12, false),
        (16, true),
        (24, false),
        (32, true),
        (40, false),
        (64, false),
        (72, false),
        (u64::MAX, false),
    ] {
        assert_eq!(leaf.has_depth(depth), there, "{depth}");
    }
    assert_eq!((leaf.max_depth(), leaf.linear()), (32, false));
    for (depths, deepest) in [(0x1, 8), (0x3, 16), (0x80, 64), (0xFF, 64), (0, 0)] {
        let leaf = ArchLbrLeaf {
            regs: [depths, 0, 0, 0],
        };
        assert_eq!(leaf.max_depth(), deepest, "{depths:#x}");
    }
    for (ebx, bits) in [(0, 0x1), (1, 0x7), (2, 0x7F_0001), (4, 0x9), (7, 0x7F_000F)] {
        let leaf = ArchLbrLeaf { regs: [0xB, ebx, 0, 0] };
        assert_eq!(leaf.control(), bits, "{ebx}");
    }
}

// covers: lbr/models
#[test]
fn every_model_has_the_stack_of_its_microarchitecture() {
    for (name, depth, format, some, none) in [
        (
            "p6",
            1,
            0,
            &[0x1DB, 0x1DC, 0x1DD, 0x1DE][..],
            &[0x1C8, 0x1C9, 0x680][..],
        ),
        (
            "netburst",
            4,
            1,
            &[0x1D7, 0x1D8, 0x1DA, 0x1DB, 0x1DE],
            &[0x1C8, 0x1C9, 0x1DF, 0x680],
        ),
        (
            "core2",
            4,
            1,
            &[0x40, 0x43, 0x60, 0x63, 0x1C9, 0x1DD],
            &[0x44, 0x64, 0x1C8, 0x680],
        ),
        (
            "westmere",
            16,
            3,
            &[0x1C8, 0x1C9, 0x1DD, 0x1DE, 0x680, 0x68F, 0x6C0, 0x6CF],
            &[0x40, 0x690, 0x6D0, 0xDC0],
        ),
        ("sandybridge", 16, 3, &[0x680, 0x68F], &[0x690, 0xDC0]),
        ("haswell", 16, 4, &[0x680, 0x68F], &[0x690, 0xDC0]),
        ("broadwell", 16, 4, &[0x680, 0x68F], &[0x690, 0xDC0]),
        (
            "skylake-server",
            32,
            5,
            &[0x680, 0x69F, 0x6C0, 0x6DF, 0xDC0, 0xDDF],
            &[0x6A0, 0x6E0, 0xDE0, 0x14CE],
        ),
        ("icelake-server", 32, 5, &[0x69F, 0x6DF, 0xDDF], &[0x6A0, 0x14CE]),
        ("snowridge", 32, 7, &[0x69F, 0x6DF, 0xDDF], &[0x6A0, 0x14CE]),
        (
            "sapphirerapids",
            32,
            0x3F,
            &[
                0x14CE, 0x14CF, 0x1200, 0x121F, 0x1500, 0x151F, 0x1600, 0x161F, 0x1DD, 0x1DE, 0x1E0,
            ],
            &[0x680, 0x6C0, 0x1C8, 0x1C9, 0xDC0, 0x1220, 0x1520, 0x1620],
        ),
        ("alderlake", 32, 0x3F, &[0x14CE, 0x1500], &[0x680, 0x1C8, 0x1C9]),
    ] {
        let model = MODELS.iter().find(|model| model.name == name).unwrap();
        let caps = model.units.lbr.unwrap();
        assert_eq!(caps.depth, depth, "{name}");
        assert_eq!(perf_capabilities(Some(caps)), format, "{name}");
        for &msr in some {
            assert!(caps.owns(msr), "{name} {msr:#x}");
        }
        for &msr in none {
            assert!(!caps.owns(msr), "{name} {msr:#x}");
        }
    }
    assert_eq!(MODELS.iter().filter(|model| model.units.lbr.is_some()).count(), 12);
}

// covers: lbr/netburst-models
#[test]
fn the_pentium_4_s_model_number_decides() {
    for (signature, packed) in [
        (0xF07, true),
        (0xF12, true),
        (0xF29, true),
        (0xF34, false),
        (0xF62, false),
    ] {
        let caps = netburst(signature);
        assert_eq!(caps.layout == LbrLayout::NetBurst, packed, "{signature:#x}");
        assert_eq!(caps.owns(0x1DB), packed);
        assert_eq!(caps.owns(0x680) && caps.owns(0x6CF), !packed);
    }
}
