use super::*;
use crate::units::UNITS;

fn has(ranges: &[Allowed], msr: u32) -> bool {
    ranges.iter().any(|range| {
        let bit = msr.wrapping_sub(range.base);
        bit < range.count && range.bitmap[bit as usize / 8] >> (bit % 8) & 1 != 0
    })
}

/// KVM refuses more than 16 ranges, which counters, branch records and PEBS together came to.
// covers: kvm/msr-filter
#[test]
fn all_units_of_kvms_fit_into_its_filter() {
    let passed: Vec<(u32, u32)> = UNITS.iter().flat_map(|row| row.passed).copied().collect();
    let core = [(0x174, 3), (0xC000_0080, 5), (0xC000_0100, 4), (0xDA0, 1)];
    assert!(passed.len() + core.len() > 16, "what this is about");
    let ranges = allowed(core.into_iter().chain(passed.iter().copied()));
    assert!(ranges.len() <= 16, "{}", ranges.len());
    for range in &ranges {
        assert!(range.bitmap.len() <= 0x600 && range.count as usize <= 8 * range.bitmap.len());
        assert_eq!(range.bitmap.len() % 8, 0);
    }
    let wanted = |msr: u32| {
        let all = core.iter().chain(&passed);
        all.into_iter().any(|&(first, count)| msr.wrapping_sub(first) < count)
    };
    for msr in (0..0x2000).chain(0xC000_0000..0xC000_0200) {
        assert_eq!(has(&ranges, msr), wanted(msr), "{msr:x}");
    }
}

// covers: kvm/msr-filter
#[test]
fn registers_that_are_far_apart_have_ranges_of_their_own() {
    let ranges = allowed([(SPAN + 7, 1), (7, 1), (SPAN + 6, 1)]);
    let spans: Vec<(u32, u32)> = ranges.iter().map(|range| (range.base, range.count)).collect();
    assert_eq!(spans, [(7, SPAN), (SPAN + 7, 1)]);
    assert!(allowed([]).is_empty());
}
