use alloc::{format, string::ToString};

use super::*;
use crate::model::{CORE2, HASWELL, ICELAKE_SERVER, MODELS, NETBURST, P6, SAPPHIRERAPIDS, SNOWRIDGE, WESTMERE};

// covers: smp/cpuid
#[test]
fn alone_a_cpu_is_what_the_rows_say() {
    for model in MODELS {
        for row in model.cpuid {
            let subleaf = row.subleaf.unwrap_or(0);
            assert_eq!(
                model.cpuid_at(row.leaf, subleaf, CpuPosition::ALONE),
                model.cpuid(row.leaf, subleaf),
                "{}",
                model.name
            );
        }
        for (index, row) in model.msrs.iter().enumerate() {
            assert_eq!(model.msr_at(index, CpuPosition::ALONE), row.reset);
        }
    }
}

// covers: smp/cpuid
#[test]
fn each_cpu_finds_its_ids_and_its_package() {
    // CPU, CPUs; then: IDs a package in leaf 1, HTT, bits of the core field and CPUs of the package in leaf 0BH.
    for (model, cpu, cpus, ids, htt, bits, package) in [
        (&WESTMERE, 0, 2, 2, 1, 1, 2),
        (&WESTMERE, 1, 2, 2, 1, 1, 2),
        (&WESTMERE, 2, 3, 4, 1, 2, 3),
        (&HASWELL, 3, 4, 4, 1, 2, 4),
        (&SAPPHIRERAPIDS, 63, 64, 64, 1, 6, 64),
        (&SAPPHIRERAPIDS, 64, 65, 64, 1, 6, 1),
        (&ICELAKE_SERVER, 254, 255, 64, 1, 6, 63),
        (&SNOWRIDGE, 127, 255, 64, 1, 6, 64),
    ] {
        let place = Topology::of(cpus).at(cpu);
        let name = format!("{} {place:?}", model.name);
        let [_, ebx, _, edx] = model.cpuid_at(1, 0, place);
        assert_eq!(
            (ebx >> 24, ebx >> 16 & 0xFF, edx >> 28 & 1),
            (cpu, ids, htt),
            "leaf 1 of {name}"
        );
        assert_eq!(model.cpuid_at(0xB, 0, place), [0, 1, 0x100, cpu], "threads of {name}");
        assert_eq!(
            model.cpuid_at(0xB, 1, place),
            [bits, package, 0x201, cpu],
            "cores of {name}"
        );
        assert_eq!(model.cpuid_at(0xB, 2, place)[3], cpu, "no such level of {name}");
    }
    let place = Topology::of(6).at(5);
    let topology = WESTMERE.cpuid_at(0xB, 1, place);
    assert_eq!(
        WESTMERE.cpuid_at(0x7FFF_FFFF, 1, place),
        topology,
        "above the highest leaf"
    );
    assert_eq!(SAPPHIRERAPIDS.cpuid_at(0x1F, 1, place), [3, 6, 0x201, 5]);
    let index = HASWELL
        .msrs
        .iter()
        .position(|row| row.msr == MSR_CORE_THREAD_COUNT)
        .unwrap();
    assert_eq!(HASWELL.msr_at(index, place), 0x6_0006);
}

// covers: smp/cpuid
#[test]
fn parts_without_leaf_4_are_a_package_each() {
    for model in [&P6, &NETBURST] {
        let place = Topology::of(2).at(1);
        let [_, ebx, _, edx] = model.cpuid_at(1, 0, place);
        assert_eq!((ebx >> 24, edx >> 28 & 1), (1, 0), "{}", model.name);
        assert_eq!(ebx & 0x00FF_FFFF, model.cpuid(1, 0)[1] & 0x00FF_FFFF, "{}", model.name);
    }
}

// covers: smp/cpuid
#[test]
fn caches_are_shared_as_on_the_part() {
    // Cores that share L1D, L1I, L2, L3; cores of the package.
    for (model, cpus, sharers, cores) in [
        (&CORE2, 4, &[1, 1, 2][..], 4),
        (&WESTMERE, 4, &[1, 1, 1, 4], 4),
        (&WESTMERE, 64, &[1, 1, 1, 16], 64),
        (&SNOWRIDGE, 8, &[1, 1, 4, 8], 8),
        (&SAPPHIRERAPIDS, 3, &[1, 1, 1, 4], 4),
    ] {
        for (subleaf, sharers) in (0..).zip(sharers) {
            let place = Topology::of(cpus).at(0);
            let eax = model.cpuid_at(4, subleaf, place)[0];
            let found = ((eax >> 14 & 0xFFF) + 1, (eax >> 26) + 1);
            assert_eq!(found, (*sharers, cores), "{}: cache {subleaf}", model.name);
            assert_eq!(eax & 0x3FFF, model.cpuid(4, subleaf)[0] & 0x3FFF);
        }
        assert_eq!(model.cpuid_at(4, 5, Topology::of(cpus).at(0)), [0; 4], "no more caches");
    }
}

// covers: smp/topology
#[test]
fn threads_cores_and_packages_are_told_apart() {
    // Eight CPUs: SDM Vol. 3A 9.9.3, with one bit for the thread and two for the core.
    let topology = Topology::new(8, Some(1), Some(4), Some(2)).unwrap();
    for cpu in 0..8 {
        let place = topology.at(cpu);
        let leaf = |leaf, subleaf| ICELAKE_SERVER.cpuid_at(leaf, subleaf, place);
        assert_eq!(leaf(0xB, 0), [1, 2, 0x100, cpu]);
        assert_eq!(leaf(0xB, 1), [3, 8, 0x201, cpu]);
        assert_eq!((leaf(1, 0)[1] >> 16 & 0xFF, leaf(1, 0)[3] >> 28 & 1), (8, 1));
        // Caches of a core are its two threads', the last level is the package's.
        let sharing = [0, 1, 2, 3].map(|cache| ((leaf(4, cache)[0] >> 14 & 0xFFF) + 1, (leaf(4, cache)[0] >> 26) + 1));
        assert_eq!(sharing, [(2, 4), (2, 4), (2, 4), (8, 4)]);
        assert_eq!(place.package(&ICELAKE_SERVER), 0);
    }
    let topology = Topology::new(8, Some(2), None, Some(2)).unwrap();
    assert_eq!(topology, Topology::new(8, None, Some(2), Some(2)).unwrap());
    assert_eq!(topology.packages(&SAPPHIRERAPIDS), 2);
    for cpu in 0..8 {
        let place = topology.at(cpu);
        assert_eq!(place.package(&SAPPHIRERAPIDS), cpu / 4);
        assert_eq!(SAPPHIRERAPIDS.cpuid_at(0x1F, 1, place), [2, 4, 0x201, cpu]);
    }
    // MSR_CORE_THREAD_COUNT: cores in 31:16, threads in 15:0.
    let index = HASWELL.msrs.iter().position(|row| row.msr == MSR_CORE_THREAD_COUNT);
    assert_eq!(HASWELL.msr_at(index.unwrap(), topology.at(7)), 0x2_0004);
}

// covers: smp/topology
#[test]
fn arrangements_that_cannot_be_are_refused() {
    let new = |cpus, sockets, cores, threads| Topology::new(cpus, sockets, cores, threads).unwrap_err();
    for (error, text) in [
        (
            new(8, Some(1), Some(4), None),
            "1 packages of 4 cores of 1 threads are not 8 CPUs",
        ),
        (
            new(7, None, None, Some(2)),
            "1 packages of 3 cores of 2 threads are not 7 CPUs",
        ),
        (
            new(8, None, Some(0), None),
            "0 packages of 0 cores of 1 threads are not 8 CPUs",
        ),
        (
            new(8, Some(0), None, None),
            "0 packages of 0 cores of 1 threads are not 8 CPUs",
        ),
        (new(8, None, None, Some(4)), "a core has 1 or 2 threads, not 4"),
        (new(8, None, None, Some(0)), "a core has 1 or 2 threads, not 0"),
        (new(65, None, None, None), "a package has up to 64 cores, not 65"),
        (
            new(6, Some(2), None, None),
            "3 cores in each of several packages leave holes between the APIC IDs: take a power of two",
        ),
        (
            new(u32::MAX, Some(u32::MAX), Some(u32::MAX), Some(2)),
            "4294967295 packages of 4294967295 cores of 2 threads are not 4294967295 CPUs",
        ),
    ] {
        assert_eq!(error.to_string(), text);
    }
    let threads = Topology::new(4, None, None, Some(2)).unwrap();
    assert_eq!(threads.check(&HASWELL), Ok(()));
    for model in [&CORE2, &SNOWRIDGE, &NETBURST, &P6] {
        let text = format!("{}'s cores have one thread each", model.name);
        assert_eq!(threads.check(model).unwrap_err().to_string(), text);
    }
    let cores = Topology::new(4, None, Some(2), None).unwrap();
    assert_eq!(cores.check(&CORE2), Ok(()));
    let text = "p6 is one CPU a package: it has no CPUID leaf that tells of cores or threads";
    assert_eq!(cores.check(&P6).unwrap_err().to_string(), text);
    assert_eq!(Topology::of(4).check(&P6), Ok(()));
}
