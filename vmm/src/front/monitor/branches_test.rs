use super::*;
use devices::unit::branch_ring::Entry;
use x86::lbr::{LbrFormat, LbrInfo, branch_type};

// covers: monitor/lbr
#[test]
fn addresses_and_flags_of_each_format() {
    let kernel = 0xffff_ffff_8100_0000;
    for (format, from, says) in [
        (LbrFormat::Effective, kernel, ""),
        (LbrFormat::EffectiveFlags, kernel, " mispredicted"),
        (LbrFormat::EffectiveFlags, kernel & !(1 << 63), ""),
        (LbrFormat::EffectiveTsx, kernel & !(3 << 62), " abort"),
        (LbrFormat::EffectiveTsx, kernel & !(5 << 61), " in-tsx"),
    ] {
        let entry = Entry {
            from,
            to: kernel,
            info: 0,
        };
        let branch = LastBranch::of(&entry, format);
        assert_eq!(
            (branch.from, beside(&branch).as_str()),
            (kernel, says),
            "{format:?} {from:x}"
        );
    }
    let cycles = Entry {
        from: 0x40_1000,
        to: 7 << 48 | 0x40_2000,
        info: 0,
    };
    let branch = LastBranch::of(&cycles, LbrFormat::LinearCycles);
    assert_eq!((branch.to, beside(&branch).as_str()), (0x40_2000, " 7 cycles"));
    let info = LbrInfo::new()
        .with_cycles(9)
        .with_cycles_valid(true)
        .with_branch_type(branch_type::NEAR_RET);
    let entry = Entry {
        info: info.with_mispred(true).into_bits(),
        ..cycles
    };
    let says = |format| beside(&LastBranch::of(&entry, format));
    assert_eq!(says(LbrFormat::Architectural), " mispredicted ret 9 cycles");
    assert_eq!(says(LbrFormat::LinearInfo), " mispredicted 9 cycles");
}
