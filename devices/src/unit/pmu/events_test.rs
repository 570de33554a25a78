use super::*;

// covers: pmu/qualifiers
#[test]
fn counter_masks_invert_and_edge_choose_what_is_added() {
    let plain = EventSelect::new();
    let masked = |mask, invert| plain.with_counter_mask(mask).with_invert(invert);
    // 10 instructions in 14 steps: REPs had 4 more iterations.
    for (select, count, added, why) in [
        (plain, Count::Instructions, 10, "each instruction"),
        (plain.with_invert(true), Count::Instructions, 10, "INV needs a mask"),
        (masked(1, false), Count::Instructions, 10, "cycles with one"),
        (masked(2, false), Count::Instructions, 0, "no cycle has two"),
        (masked(1, true), Count::Instructions, 4, "cycles without one"),
        (
            masked(16, true),
            Count::Instructions,
            14,
            "every cycle has fewer than 16",
        ),
        (plain, Count::Cycles, 14, "each step"),
        (masked(1, true), Count::Cycles, 0, "no cycle is none"),
        (plain, Count::Slots, 56, "four a cycle"),
        (masked(1, false), Count::Slots, 14, "cycles with a slot"),
        (plain, Count::Reference, 1, "one in ten steps from 5"),
        (plain, Count::Nothing, 0, "nothing"),
        (plain.with_edge(true), Count::Cycles, 0, "true all along"),
    ] {
        let line = CountRule::new(count, select);
        assert_eq!(line.moved([60, 5], 10, 14, None, 4, 10), added, "{why}");
    }
}

// covers: pmu/overflow-distance
#[test]
fn the_distance_to_an_overflow_is_never_too_far() {
    let line = |count| CountRule::new(count, EventSelect::new());
    for (count, left, instructions, branches, why) in [
        (Count::Instructions, 7, 7, None, "exact"),
        (Count::Caches(Caches::LoadWalks), 7, u64::MAX, None, "heard of singly"),
        (
            Count::Caches(Caches::Fetches),
            700,
            u64::MAX,
            Some(10),
            "no more than 65 lines a branch",
        ),
        (Count::Cycles, 7, 7, None, "an instruction takes a cycle at least"),
        (Count::Slots, 9, 2, None, "at most eight a cycle"),
        (
            Count::Branches(Branches::ALL),
            7,
            u64::MAX,
            Some(7),
            "by the room for records",
        ),
        (Count::Stores, 7, u64::MAX, None, "heard of singly"),
    ] {
        let distance = line(count).distance(left);
        assert_eq!(distance, Distance { instructions, branches }, "{why}");
    }
}
