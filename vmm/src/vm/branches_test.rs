use super::*;

// covers: library/last-branches
#[test]
fn each_format_gives_what_it_records_and_nothing_else() {
    let entry = Entry {
        from: 1 << 63 | 1 << 61 | 0x0000_8000_0000_1234,
        to: 0x0007_ffff_8000_5678,
        info: 1 << 63 | 1 << 60 | 5 << 56 | 9,
    };
    let same = LastBranch {
        from: entry.from,
        to: entry.to,
        ..LastBranch::default()
    };
    let short = LastBranch {
        from: 0xffff_8000_0000_1234,
        to: 0xffff_ffff_8000_5678,
        mispredicted: Some(true),
        ..same
    };
    let info = LastBranch {
        mispredicted: Some(true),
        in_transaction: Some(false),
        aborted: Some(false),
        cycles: Some(9),
        ..same
    };
    for (format, want, why) in [
        (LbrFormat::Linear, same, "addresses alone"),
        (
            LbrFormat::EffectiveFlags,
            short,
            "48 bits, and MISPRED in bit 63 of FROM",
        ),
        (
            LbrFormat::EffectiveTsx,
            LastBranch {
                in_transaction: Some(false),
                aborted: Some(true),
                ..short
            },
            "IN_TSX and TSX_ABORT in bits 62 and 61",
        ),
        (
            LbrFormat::LinearCycles,
            LastBranch {
                cycles: Some(7),
                ..short
            },
            "cycles in bits 63:48 of TO",
        ),
        (LbrFormat::LinearInfo, info, "flags and cycles in INFO"),
        (
            LbrFormat::Architectural,
            LastBranch {
                kind: Some(BranchKind::Return),
                ..info
            },
            "and the kind in bits 59:56",
        ),
    ] {
        assert_eq!(LastBranch::of(&entry, format), want, "{format:?}: {why}");
    }
    // Bit 60 says whether the cycles mean something, in architectural records alone.
    let unknown = Entry {
        info: entry.info & !(1 << 60),
        ..entry
    };
    assert_eq!(LastBranch::of(&unknown, LbrFormat::Architectural).cycles, None);
    assert_eq!(LastBranch::of(&unknown, LbrFormat::LinearInfo).cycles, Some(9));
}
