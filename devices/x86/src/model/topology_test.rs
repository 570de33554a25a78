use alloc::format;

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
        let place = CpuPosition { cpu, cpus };
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
    let place = CpuPosition { cpu: 5, cpus: 6 };
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
        let place = CpuPosition { cpu: 1, cpus: 2 };
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
            let place = CpuPosition { cpu: 0, cpus };
            let eax = model.cpuid_at(4, subleaf, place)[0];
            let found = ((eax >> 14 & 0xFFF) + 1, (eax >> 26) + 1);
            assert_eq!(found, (*sharers, cores), "{}: cache {subleaf}", model.name);
            assert_eq!(eax & 0x3FFF, model.cpuid(4, subleaf)[0] & 0x3FFF);
        }
        assert_eq!(
            model.cpuid_at(4, 5, CpuPosition { cpu: 0, cpus }),
            [0; 4],
            "no more caches"
        );
    }
}
