use super::*;
use x86::model::{ICELAKE_SERVER, MODELS, P6, WESTMERE};

fn read(address: u64) -> Access {
    Access {
        address,
        size: 8,
        kind: AccessKind::Read,
        ip: 0,
    }
}

// covers: rdt/cache-geometry
#[test]
fn caches_have_the_sizes_of_leaf_4() {
    for (model, level, sets, ways) in [
        (&WESTMERE, 1, 64, 8),
        (&WESTMERE, 2, 512, 8),
        (&WESTMERE, 3, 12288, 16),
        (&ICELAKE_SERVER, 1, 64, 12),
        (&ICELAKE_SERVER, 3, 73728, 12),
        (&P6, 1, 64, 8),
        (&P6, 3, 0, 0),
    ] {
        assert_eq!(
            Geometry::of(model, level),
            Geometry { sets, ways },
            "{} L{level}",
            model.name
        );
    }
    for model in MODELS {
        let size = SharedCache::of(model).size();
        assert!(size <= 32 * u64::from(SETS) * LINE, "{}: {size}", model.name);
    }
}

// covers: rdt/cache-places
#[test]
fn a_line_is_found_where_it_was_left() {
    let mut caches = Hierarchy::of(&WESTMERE);
    let place = |caches: &mut Hierarchy, address| caches.access(&read(address), Some).unwrap().place;
    assert_eq!(place(&mut caches, 0x1000), HitLevel::Memory, "cold");
    assert_eq!(place(&mut caches, 0x1008), HitLevel::L1, "the same line");
    assert_eq!(place(&mut caches, 0x1040), HitLevel::Memory, "the next one");
    // Eight more lines in the same set of L1, which is 4 KiB a way.
    (2..10).for_each(|n| _ = place(&mut caches, n << 12));
    assert_eq!(place(&mut caches, 0x1000), HitLevel::L2);
    // Eight more in the same set of L2, 32 KiB a way.
    (2..10).for_each(|n| _ = place(&mut caches, 0x1000 + (n << 15)));
    assert_eq!(place(&mut caches, 0x1000), HitLevel::L3);
    // Across the boundary of two lines: the slower one counts.
    assert_eq!(place(&mut caches, 0x107C), HitLevel::Memory);
    assert_eq!(place(&mut caches, 0x107C), HitLevel::L1);
    let port = Access {
        kind: AccessKind::PortRead,
        ..read(0x60)
    };
    assert_eq!(caches.access(&port, Some), None);
}

// covers: rdt/cache-places
#[test]
fn a_line_is_its_physical_address_whatever_leads_there() {
    let mut caches = Hierarchy::of(&WESTMERE);
    // Two processes' pages: 7FFF0000H is another page for each, 10000H is one that they share, and 11000H leads to it, too.
    let page = |process: u64, linear: u64| match linear & !0xFFF {
        0x7FFF_0000 => Some(process << 12 | linear & 0xFFF),
        0x1_0000 | 0x1_1000 => Some(0x9_0000 | linear & 0xFFF),
        _ => None,
    };
    for (address, process, place) in [
        (0x7FFF_0000, 1, HitLevel::Memory),
        (0x7FFF_0000, 1, HitLevel::L1),
        (0x7FFF_0000, 2, HitLevel::Memory),
        (0x1_0040, 1, HitLevel::Memory),
        (0x1_0040, 2, HitLevel::L1),
        (0x1_1040, 2, HitLevel::L1),
        // Not mapped any more.
        (0x5000, 1, HitLevel::Memory),
        (0x5000, 1, HitLevel::L1),
        // From one page into another that is not in the cache.
        (0x1_0FFC, 1, HitLevel::Memory),
        (0x1_0FFC, 1, HitLevel::L1),
    ] {
        let found = caches.access(&read(address), |linear| page(process, linear));
        assert_eq!(found.unwrap().place, place, "{address:#x} {process}");
    }
}

// covers: pmu/caches
#[test]
fn what_is_fetched_does_not_depend_on_the_batches() {
    let record = |n: u64| BranchRecord {
        from: 0x1000 * (n % 7) + 0x80,
        to: 0x1000 * ((n + 1) % 7),
        step: n * 3 + n / 50 * 2 * SLICE,
        ..BranchRecord::default()
    };
    let records: Vec<_> = (0..200).map(record).collect();
    let mut found = Vec::new();
    for size in [1, 7, 200] {
        let (mut core, mut shared) = (Core::of(&WESTMERE), SharedCache::of(&WESTMERE));
        let (mut lines, mut walks) = (0, 0);
        for batch in records.chunks(size) {
            let fetched = core.branches(batch, Some, &mut shared, Owner::ANYBODY);
            (lines, walks) = (lines + fetched.lines, walks + fetched.walks);
        }
        found.push((core, shared, lines, walks));
    }
    assert_eq!(found[0], found[1]);
    assert_eq!(found[0], found[2]);
    // Three lines from where a branch lands to the next one; seven pages, walked to again after each of three pauses.
    let (_, _, lines, walks) = &found[0];
    assert!(
        *lines >= 3 * 190 && (7 * 4..7 * 4 + 8).contains(walks),
        "{lines} {walks}"
    );
}

// covers: rdt/cache-owners
#[test]
fn owners_fill_their_ways_and_no_others() {
    let mut core = Core::of(&WESTMERE);
    let mut shared = SharedCache::of(&WESTMERE);
    let owner = |rmid, ways| Owner {
        rmid,
        ways,
        ..Owner::ANYBODY
    };
    let (a, b) = (owner(1, 0x3), owner(2, 0xFFFC));
    let stride = u64::from(shared.l3.sets) * LINE;
    // Far more lines of one set than there are ways.
    for n in 0..64 {
        core.access(&read(n * stride), 0, Some, &mut shared, a);
    }
    assert_eq!(shared.occupancy(1), 2 * LINE, "two ways");
    assert_eq!(shared.traffic(1), 64 * LINE);
    for n in 100..164 {
        core.access(&read(n * stride), 0, Some, &mut shared, b);
    }
    assert_eq!((shared.occupancy(1), shared.occupancy(2)), (2 * LINE, 14 * LINE));
    for n in 200..264 {
        core.access(&read(n * stride), 0, Some, &mut shared, owner(3, !0));
    }
    assert_eq!(shared.occupancy(3), 16 * LINE, "the others' lines went");
    assert_eq!((shared.occupancy(1), shared.occupancy(2)), (0, 0));
    core.access(&read(1 << 40), 0, Some, &mut shared, owner(4, 0));
    assert_eq!((shared.occupancy(4), shared.traffic(4)), (0, LINE), "no way, no line");
}

// covers: rdt/cache-sources
#[test]
fn records_say_where_data_came_from() {
    for (load, store, place, source, latency) in [
        (true, false, HitLevel::L1, 0x1, 4),
        (true, false, HitLevel::L2, 0x3, 12),
        (true, false, HitLevel::L3, 0x4, 40),
        (true, true, HitLevel::Memory, 0xA, 200),
        (false, true, HitLevel::L1, 1, 4),
        (false, true, HitLevel::L2, 0, 12),
    ] {
        let memory = Memory {
            load,
            store,
            place,
            latency: place.latency(),
            ..Memory::default()
        };
        assert_eq!((memory.source(), memory.latency), (source, latency), "{place:?}");
    }
}
