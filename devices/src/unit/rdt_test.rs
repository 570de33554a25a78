use super::*;
use x86::model::{BROADWELL, ICELAKE_SERVER, MODELS, SAPPHIRERAPIDS, SKYLAKE_SERVER, SNOWRIDGE, WESTMERE};

/// An L3 in which every RMID has a thousand lines for each of its number, and has moved ten times that.
struct Full;

impl Meter for Full {
    fn occupancy(&self, rmid: u32) -> Option<u64> {
        Some(u64::from(rmid) * 1000 * 64)
    }

    fn traffic(&self, rmid: u32) -> Option<u64> {
        Some(u64::from(rmid) * 10_000 * 64)
    }
}

fn at_reset(model: &CpuModel) -> (Package, Thread) {
    (Package::new(model), Thread::new(model))
}

// covers: rdt/registers
#[test]
fn registers_take_what_the_models_cpuid_allows() {
    let ok = Ok(());
    let gp = Err(GP);
    let none = Err(MsrFault::Unclaimed);
    for (model, msr, value, expected) in [
        (&SKYLAKE_SERVER, IA32_PQR_ASSOC, 0xBF, ok),
        (&SKYLAKE_SERVER, IA32_PQR_ASSOC, 0xC0, gp), // above CPUID.0FH.0:EBX
        (&SKYLAKE_SERVER, IA32_PQR_ASSOC, 0xF << 32 | 1, ok),
        (&SKYLAKE_SERVER, IA32_PQR_ASSOC, 0x10 << 32, gp), // above the highest class of all resources
        (&SKYLAKE_SERVER, IA32_PQR_ASSOC, 1 << 63, gp),
        (&SKYLAKE_SERVER, IA32_QM_EVTSEL, 0xBF << 32 | 0xFF, ok),
        (&SKYLAKE_SERVER, IA32_QM_EVTSEL, 0xC0 << 32 | 1, gp),
        (&SKYLAKE_SERVER, IA32_QM_EVTSEL, 0x101, gp),
        (&SKYLAKE_SERVER, IA32_QM_CTR, 0, gp), // read-only
        (&SKYLAKE_SERVER, IA32_L3_QOS_MASK_0 + 15, 0x7FF, ok),
        (&SKYLAKE_SERVER, IA32_L3_QOS_MASK_0 + 15, 0x800, gp),
        (&SKYLAKE_SERVER, IA32_L3_QOS_MASK_0, 0x5, gp), // in two pieces
        (&SKYLAKE_SERVER, IA32_L3_QOS_MASK_0, 0, gp),
        (&SKYLAKE_SERVER, IA32_L3_QOS_MASK_0 + 16, 1, gp), // above the highest class
        (&SKYLAKE_SERVER, IA32_L3_QOS_CFG, 1, ok),
        (&SKYLAKE_SERVER, IA32_L3_QOS_CFG, 2, gp),
        (&SKYLAKE_SERVER, IA32_L2_QOS_CFG, 1, none),
        (&SKYLAKE_SERVER, IA32_L2_QOS_MASK_0, 1, none),
        (&SKYLAKE_SERVER, IA32_MBA_THRTL_0 + 7, 90, ok),
        (&SKYLAKE_SERVER, IA32_MBA_THRTL_0 + 7, 91, gp),
        (&SKYLAKE_SERVER, IA32_MBA_THRTL_0 + 8, 10, gp),
        (&ICELAKE_SERVER, IA32_L3_QOS_MASK_0 + 14, 0xFFF, ok),
        (&ICELAKE_SERVER, IA32_L3_QOS_MASK_0 + 15, 0xFFF, gp),
        (&ICELAKE_SERVER, IA32_L3_QOS_CFG, 0, none),
        (&SNOWRIDGE, IA32_L2_QOS_MASK_0 + 15, 0x3FFFF, ok),
        (&SNOWRIDGE, IA32_L2_QOS_MASK_0 + 15, 0x40000, gp),
        (&SNOWRIDGE, IA32_L2_QOS_CFG, 1, none),
        (&SNOWRIDGE, IA32_QM_EVTSEL, 1, none), // allocation without monitoring
        (&SNOWRIDGE, IA32_PQR_ASSOC, 0xF << 32, ok),
        (&SNOWRIDGE, IA32_PQR_ASSOC, 1, gp),
        (&SAPPHIRERAPIDS, IA32_L2_QOS_CFG, 1, ok),
        (&BROADWELL, IA32_L3_QOS_MASK_0 + 3, 0xF_FFFF, ok),
        (&BROADWELL, IA32_MBA_THRTL_0, 0, none),
        (&WESTMERE, IA32_PQR_ASSOC, 0, none),
        (&WESTMERE, IA32_L3_QOS_MASK_0, 1, none),
    ] {
        let (mut package, mut thread) = at_reset(model);
        let (before, thread_before) = (package.state(), thread.clone());
        assert_eq!(
            package.write_msr(&mut thread, msr, value),
            expected,
            "{} {msr:#x} {value:#x}",
            model.name
        );
        if expected == ok {
            let read = package.read_msr(&thread, msr, &Unmetered);
            assert_eq!(read, Ok(value), "{} {msr:#x}", model.name);
        } else {
            assert_eq!((package.state(), thread), (before, thread_before), "{msr:#x}");
        }
    }
}

// covers: rdt/registers
#[test]
fn masks_allow_everything_at_reset_and_models_without_rdt_have_no_registers() {
    for model in MODELS {
        let (package, thread) = at_reset(model);
        for msr in [IA32_PQR_ASSOC, IA32_QM_EVTSEL, IA32_L3_QOS_MASK_0, IA32_L2_QOS_MASK_0] {
            let expected = match (RdtCaps::of(model), msr) {
                (Some(_), IA32_PQR_ASSOC) => Ok(0),
                (Some(caps), IA32_QM_EVTSEL) if caps.max_rmid.is_some() => Ok(0),
                (Some(caps), IA32_L3_QOS_MASK_0) if caps.l3.is_some() => Ok(caps.l3.unwrap().full()),
                (Some(caps), IA32_L2_QOS_MASK_0) if caps.l2.is_some() => Ok(caps.l2.unwrap().full()),
                _ => Err(MsrFault::Unclaimed),
            };
            assert_eq!(
                package.read_msr(&thread, msr, &Full),
                expected,
                "{} {msr:#x}",
                model.name
            );
        }
    }
    assert!(MODELS.iter().filter(|model| RdtCaps::of(model).is_some()).count() >= 6);
}

// covers: rdt/counter
#[test]
fn the_counter_answers_for_the_selected_rmid_and_event() {
    let (mut package, mut thread) = at_reset(&SKYLAKE_SERVER);
    let unit = 0x18000;
    for (event, rmid, expected) in [
        (0, 1, ERROR), // no monitoring
        (4, 1, ERROR), // reserved
        (1, 5, 5 * 64_000 / unit),
        (2, 5, 5 * 640_000 / unit),
        (3, 5, 5 * 640_000 / unit),
        (1, 0, 0),
    ] {
        package
            .write_msr(&mut thread, IA32_QM_EVTSEL, rmid << 32 | event)
            .unwrap();
        let read = package.read_msr(&thread, IA32_QM_CTR, &Full);
        assert_eq!(read, Ok(expected), "event {event}, RMID {rmid}");
        if expected != ERROR {
            assert_eq!(package.read_msr(&thread, IA32_QM_CTR, &Unmetered), Ok(UNAVAILABLE));
        }
    }
    // An RMID that IA32_QM_EVTSEL takes, but the L3 does not monitor.
    let mut narrow = *package.caps().unwrap();
    narrow.l3_monitor.as_mut().unwrap().max_rmid = 3;
    package.caps = Some(narrow);
    package.write_msr(&mut thread, IA32_QM_EVTSEL, 4 << 32 | 1).unwrap();
    assert_eq!(package.read_msr(&thread, IA32_QM_CTR, &Full), Ok(ERROR));
}

// covers: rdt/counter
#[test]
fn bandwidth_counters_wrap_at_their_width() {
    struct Wide;
    impl Meter for Wide {
        fn occupancy(&self, _: u32) -> Option<u64> {
            None
        }
        fn traffic(&self, _: u32) -> Option<u64> {
            Some(((1 << 24) + 3) * 0x12000)
        }
    }
    // 24 bits, in units of 72 KiB.
    let (mut package, mut thread) = at_reset(&BROADWELL);
    package.write_msr(&mut thread, IA32_QM_EVTSEL, 1 << 32 | 2).unwrap();
    assert_eq!(package.read_msr(&thread, IA32_QM_CTR, &Wide), Ok(3));
}

/// A processor that walks over so many lines, from this one on.
fn walk(probe: &mut Probe, from: u64, lines: u64) {
    for line in from..from + lines {
        let access = Access {
            address: line * 64,
            size: 8,
            kind: x86::watch::AccessKind::Read,
            ip: 0,
        };
        probe.access(&access, 0, Some);
    }
}

// covers: rdt/occupancy
#[test]
fn occupancy_and_traffic_follow_the_association_and_the_capacity_mask() {
    let (mut package, mut thread) = at_reset(&SKYLAKE_SERVER);
    assert!(!package.in_use(&thread));
    package.write_msr(&mut thread, IA32_PQR_ASSOC, 1 << 32 | 7).unwrap();
    assert!(package.in_use(&thread));
    let ways = Geometry::of(&SKYLAKE_SERVER, 3).ways;
    let last = LastLevel::new(&SKYLAKE_SERVER);
    let mut probe = Probe::new(Core::of(&SKYLAKE_SERVER), last.clone());
    probe.set_owners(package.owners(&thread, &SKYLAKE_SERVER));
    // Half a megabyte for RMID 7, twice: the second time it is there.
    walk(&mut probe, 0, 8192);
    walk(&mut probe, 0, 8192);
    assert_eq!((last.occupancy(7), last.traffic(7)), (Some(8192 * 64), Some(8192 * 64)));
    assert_eq!(last.occupancy(0), Some(0));
    // One way of eleven is all that class 1 may fill: what is walked over twice its size does not stay.
    package.write_msr(&mut thread, IA32_L3_QOS_MASK_0 + 1, 1).unwrap();
    package.write_msr(&mut thread, IA32_PQR_ASSOC, 1 << 32 | 8).unwrap();
    probe.set_owners(package.owners(&thread, &SKYLAKE_SERVER));
    let way = last.contents().size() / 64 / u64::from(ways);
    walk(&mut probe, 1 << 30, 2 * way);
    assert_eq!(last.occupancy(8), Some(way * 64));
    assert_eq!(last.traffic(8), Some(2 * way * 64));
    package.write_msr(&mut thread, IA32_QM_EVTSEL, 8 << 32 | 1).unwrap();
    let counted = package.read_msr(&thread, IA32_QM_CTR, &last).unwrap();
    assert_eq!(counted, way * 64 / 0x18000);
}

/// Linux never takes a selection back, and looks at the bandwidth of a mounted file system's groups once in a second; the TSC of no model
/// is faster than 2.7 GHz.
// covers: rdt/followed
#[test]
fn a_selection_is_followed_until_nobody_has_looked_at_it_for_a_while() {
    let (mut package, mut thread) = at_reset(&SKYLAKE_SERVER);
    let looks = |package: &mut Package, thread: &mut Thread, select: u64, step: u64| {
        package.write_msr(thread, IA32_QM_EVTSEL, select).unwrap();
        package.looked(thread, step);
        package.followed(thread)
    };
    assert_eq!(package.followed(&thread), 0);
    // Nobody is associated with it: a time slice a look.
    let end = looks(&mut package, &mut thread, 3 << 32 | 1, 1000);
    assert!((1_001..100_000_000).contains(&end), "{end}");
    // For as long as somebody is, whatever is selected, and no longer.
    package.write_msr(&mut thread, IA32_PQR_ASSOC, 3).unwrap();
    assert_eq!(package.followed(&thread), u64::MAX);
    package.write_msr(&mut thread, IA32_PQR_ASSOC, 1 << 32).unwrap();
    assert_eq!(package.followed(&thread), u64::MAX);
    package.write_msr(&mut thread, IA32_PQR_ASSOC, 0).unwrap();
    assert_eq!(package.followed(&thread), end);
    // Everybody is associated with RMID 0: from one look to the next, and not for ever.
    let end = looks(&mut package, &mut thread, 2, 1000);
    assert!((2_700_000_000..6_000_000_000).contains(&end), "{end}");
    assert_eq!(looks(&mut package, &mut thread, 0, 2000), 0);
}

// covers: rdt/masks
#[test]
fn a_mask_of_another_length_than_the_cache_has_ways_stands_for_shares() {
    let l3 = RdtCaps::of(&SKYLAKE_SERVER).unwrap().l3;
    assert_eq!(l3.unwrap().length, 11);
    for (ways, expected) in [(11, 0b11), (22, 0b1111), (1, 1), (0, 0), (32, 0b11_1111)] {
        assert_eq!(share(0b11, l3, ways), expected, "{ways} ways");
    }
    let (package, thread) = at_reset(&WESTMERE);
    let owners = package.owners(&thread, &WESTMERE);
    assert_eq!(
        (owners.data.ways, owners.data.second),
        (0xFFFF, 0xFF),
        "no masks, no limit"
    );
}

// covers: rdt/cdp
#[test]
fn with_cdp_even_masks_are_for_data_and_odd_ones_for_code() {
    let (mut package, mut thread) = at_reset(&SKYLAKE_SERVER);
    for n in 0..16 {
        let mask = 1 << (n % 11);
        package.write_msr(&mut thread, IA32_L3_QOS_MASK_0 + n, mask).unwrap();
    }
    for code in [false, true] {
        assert_eq!(package.l3_mask(3, code), 1 << 3);
    }
    package.write_msr(&mut thread, IA32_L3_QOS_CFG, 1).unwrap();
    assert_eq!((package.l3_mask(3, false), package.l3_mask(3, true)), (1 << 6, 1 << 7));
    assert_eq!(package.l3_mask(8, false), 0x7FF, "a class that CDP leaves no masks for");
}

/// Code that is executed from here, a jump a line, over so many lines.
fn run(probe: &mut Probe, from: u64, lines: u64) {
    for line in from..from + lines {
        let record = BranchRecord {
            from: line * 64,
            to: line * 64 + 64,
            ..BranchRecord::default()
        };
        probe.branches(&[record], Some);
    }
}

/// SDM Vol. 3B 18.19.5.1 "Mapping Between L3 CDP Masks and CAT Masks": code and data of one class have masks of their own.
// covers: rdt/cdp, rdt/l2-masks
#[test]
fn code_and_data_stay_in_the_ways_of_their_masks() {
    let (mut package, mut thread) = at_reset(&SKYLAKE_SERVER);
    let mut write = |package: &mut Package, msr, value| package.write_msr(&mut thread, msr, value).unwrap();
    write(&mut package, IA32_PQR_ASSOC, 1 << 32 | 5);
    write(&mut package, IA32_L3_QOS_CFG, 1);
    // Class 1: one way for data, two for code.
    write(&mut package, IA32_L3_QOS_MASK_0 + 2, 1);
    write(&mut package, IA32_L3_QOS_MASK_0 + 3, 6);
    let last = LastLevel::new(&SKYLAKE_SERVER);
    let mut probe = Probe::new(Core::of(&SKYLAKE_SERVER), last.clone());
    probe.set_owners(package.owners(&thread, &SKYLAKE_SERVER));
    let way = last.contents().size() / 64 / u64::from(Geometry::of(&SKYLAKE_SERVER, 3).ways);
    walk(&mut probe, 1 << 30, 4 * way);
    assert_eq!(last.occupancy(5), Some(way * 64), "data");
    run(&mut probe, 1 << 31, 4 * way);
    assert_eq!(last.occupancy(5), Some(3 * way * 64), "and code beside it");
    // The other way about, data throws code out.
    package.write_msr(&mut thread, IA32_L3_QOS_CFG, 0).unwrap();
    package.write_msr(&mut thread, IA32_L3_QOS_MASK_0 + 1, 3).unwrap();
    probe.set_owners(package.owners(&thread, &SKYLAKE_SERVER));
    walk(&mut probe, 1 << 32, 4 * way);
    assert_eq!(
        last.occupancy(5),
        Some(3 * way * 64),
        "without CDP one mask is for both"
    );
    assert_eq!(last.traffic(5), Some(12 * way * 64));
}

// covers: rdt/l2-masks
#[test]
fn l2_masks_limit_what_stays_in_the_l2() {
    let (mut package, mut thread) = at_reset(&SNOWRIDGE);
    let l2 = Geometry::of(&SNOWRIDGE, 2);
    package.write_msr(&mut thread, IA32_PQR_ASSOC, 1 << 32).unwrap();
    let way = u64::from(l2.sets);
    let mut found = Vec::new();
    for ways in [1, l2.ways] {
        let mask = (1 << RdtCaps::of(&SNOWRIDGE).unwrap().l2.unwrap().length) - 1;
        let mask = if ways == 1 { 1 } else { mask };
        package.write_msr(&mut thread, IA32_L2_QOS_MASK_0 + 1, mask).unwrap();
        let mut probe = Probe::new(Core::of(&SNOWRIDGE), LastLevel::new(&SNOWRIDGE));
        probe.set_owners(package.owners(&thread, &SNOWRIDGE));
        // Half of the cache, twice.
        let lines = way * u64::from(l2.ways) / 2;
        walk(&mut probe, 0, lines);
        let read = |line: u64| Access {
            address: line * 64,
            size: 8,
            kind: x86::watch::AccessKind::Read,
            ip: 0,
        };
        let places = (0..lines).map(|line| probe.access(&read(line), 0, Some).unwrap().place);
        found.push(
            places
                .filter(|place| *place == super::super::cache::HitLevel::L2)
                .count() as u64,
        );
    }
    assert_eq!(found[0], 0, "one way does not hold half of it: {found:?}");
    assert!(found[1] > way * u64::from(l2.ways) / 4, "all ways do: {found:?}");
}

// covers: rdt/mba
#[test]
fn a_linear_delay_reads_back_as_the_step_that_it_becomes() {
    let (mut package, mut thread) = at_reset(&SKYLAKE_SERVER);
    package.write_msr(&mut thread, IA32_MBA_THRTL_0 + 1, 55).unwrap();
    assert_eq!(package.read_msr(&thread, IA32_MBA_THRTL_0 + 1, &Unmetered), Ok(50));
}

// covers: rdt/registers
#[test]
fn the_state_goes_out_and_comes_back_to_a_package_of_its_shape() {
    let (mut a, mut thread) = at_reset(&SKYLAKE_SERVER);
    a.write_msr(&mut thread, IA32_L3_QOS_MASK_0 + 2, 0x70).unwrap();
    a.write_msr(&mut thread, IA32_MBA_THRTL_0, 30).unwrap();
    let mut b = Package::new(&SKYLAKE_SERVER);
    b.set_state(&a.state()).unwrap();
    assert_eq!(a, b);
    let mut other = Package::new(&WESTMERE);
    other.set_state(&a.state()).unwrap_err();
    assert_eq!(other, Package::new(&WESTMERE));
}
