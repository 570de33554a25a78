//! What the tables must say, checked against the manual's encodings, real parts' dumps and QEMU's models.

extern crate std;

use super::*;
use crate::cpuid::Feature::{self, *};
use crate::msr::*;
use std::format;
use std::string::{String, ToString};
use std::vec::Vec;

fn hex(word: &str) -> u32 {
    u32::from_str_radix(word, 16).unwrap()
}

/// The rows of a dump: leaf, subleaf, registers.
fn rows_of(dump: &str) -> Vec<CpuidRow> {
    dump.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let words: Vec<u32> = line.split_whitespace().map(hex).collect();
            CpuidRow {
                leaf: words[0],
                subleaf: Some(words[1]),
                regs: [words[2], words[3], words[4], words[5]],
            }
        })
        .collect()
}

fn model(name: &str) -> &'static CpuModel {
    by_name(name).unwrap_or_else(|| panic!("{name}"))
}

macro_rules! dump {
    ($file:literal) => {
        include_str!(concat!("../../../../resources/cpuid/", $file, ".txt"))
    };
}

// covers: cpu/model-cpuid
#[test]
fn every_model_s_part_is_the_dumped_one() {
    let mut checked = Vec::new();
    for (name, dump) in [
        // covers: cpu/models-p6
        ("p6", dump!("pentium-iii-733")),
        // covers: cpu/models-netburst
        ("netburst", dump!("pentium-4-2800")),
        // covers: cpu/models-core2
        ("core2", dump!("core-2-e6750")),
        // covers: cpu/models-westmere
        ("westmere", dump!("xeon-x5650")),
        // covers: cpu/models-sandybridge
        ("sandybridge", dump!("core-i7-2600")),
        // covers: cpu/models-haswell
        ("haswell", dump!("core-i7-4770")),
        // covers: cpu/models-broadwell
        ("broadwell", dump!("xeon-e5-2697-v4")),
        // covers: cpu/models-skylake-server
        ("skylake-server", dump!("xeon-platinum-8160")),
        // covers: cpu/models-icelake-server
        ("icelake-server", dump!("xeon-platinum-8351n")),
        // covers: cpu/models-snowridge
        ("snowridge", dump!("atom-p5942b")),
        // covers: cpu/models-sapphirerapids
        ("sapphirerapids", dump!("xeon-platinum-8480plus")),
        // covers: cpu/models-alderlake
        ("alderlake", dump!("core-i9-12900k")),
    ] {
        let model = model(name);
        let dump = rows_of(dump);
        for row in &dump {
            let own = model
                .silicon
                .iter()
                .find(|own| own.leaf == row.leaf && Some(row.subleaf.unwrap()) == own.subleaf.or(Some(0)));
            assert_eq!(
                own.map(|own| own.regs),
                Some(row.regs),
                "{name} {:X}H.{:X}H",
                row.leaf,
                row.subleaf.unwrap()
            );
        }
        // A row that says "nothing more" may stand in the model alone.
        let alone = |own: &&CpuidRow| {
            !dump
                .iter()
                .any(|row| (own.leaf, own.subleaf.or(Some(0))) == (row.leaf, row.subleaf))
        };
        for own in model.silicon.iter().filter(alone) {
            assert_eq!(own.regs, [0; 4], "{name} {:X}H", own.leaf);
        }
        checked.push(model.name);
    }
    assert_eq!(checked, MODELS.iter().map(|m| m.name).collect::<Vec<_>>());
}

// covers: cpu/model-cpuid
#[test]
fn every_difference_from_the_part_has_its_reason() {
    for model in MODELS {
        let mut rows = model.silicon.to_vec();
        let at = rows.partition_point(|row| row.leaf < HYPERVISOR_LEAVES);
        rows.insert(
            at,
            CpuidRow {
                regs: [0; 4],
                ..policy::HYPERVISOR
            },
        );
        let differences = model.differences();
        assert!(differences.len() > 5);
        for d in &differences {
            let place = format!("{} {:X}H.{:X}H {:?}", model.name, d.leaf, d.subleaf, d.register);
            assert!(
                !d.reason.is_empty() && d.reason != UNEXPLAINED,
                "{place}: {:X}H {:X}H",
                d.clear,
                d.set
            );
            let row = rows
                .iter_mut()
                .find(|row| row.leaf == d.leaf && row.answers(d.subleaf))
                .unwrap();
            let was = row.regs[d.register as usize];
            assert_eq!((was & d.clear, was & d.set), (d.clear, 0), "{place}");
            row.regs[d.register as usize] = was & !d.clear | d.set;
        }
        assert_eq!(
            rows, model.cpuid,
            "{}: the part and the differences are the model",
            model.name
        );
    }
}

// covers: cpu/models-policy
#[test]
fn every_feature_of_a_part_is_shown_or_hidden_for_a_reason() {
    for &(feature, why) in policy::HIDDEN {
        assert!(
            !policy::ENGINE.has(feature) && !why.is_empty(),
            "{} is in both lists",
            feature.name()
        );
    }
    for &(feature, why) in policy::ON_DEMAND {
        assert!(policy::executes(feature), "{}", feature.name());
        assert_eq!(
            policy::why_hidden(feature),
            Some(why),
            "{} is off by default",
            feature.name()
        );
    }
    for model in MODELS {
        for feature in model.part_features().iter() {
            let listed = policy::ENGINE.has(feature) || policy::why_hidden(feature).is_some();
            assert!(listed, "{}: {} is in neither list", model.name, feature.name());
            assert_eq!(
                model.features().has(feature),
                policy::ENGINE.has(feature),
                "{}: {}",
                model.name,
                feature.name()
            );
        }
        let more = model
            .features()
            .minus(model.part_features())
            .minus(Features::list(&[Hypervisor, X2apic]));
        assert_eq!(more, Features::NONE, "{} shows what the part has not", model.name);
    }
    assert!(Feature::ALL.is_sorted_by_key(|f| (
        f.place().leaf,
        f.place().subleaf,
        f.place().register as u8,
        f.place().bit
    )));
}

// covers: cpu/models-policy
#[test]
fn no_part_and_no_model_contradicts_itself() {
    for model in MODELS {
        for features in [model.part_features(), model.features()] {
            let wrong: Vec<_> = policy::contradictions(features)
                .iter()
                .map(|(f, n)| (f.name(), n.name()))
                .collect();
            assert!(wrong.is_empty(), "{}: {wrong:?}", model.name);
        }
    }
    let mut bare = Features::all();
    for &(feature, needed) in policy::NEEDS {
        bare = bare.without(needed);
        assert!(policy::contradictions(bare).contains(&(feature, needed)) || !bare.has(feature));
    }
}

// covers: cpu/models-policy
#[test]
fn every_bit_of_a_feature_word_has_a_name() {
    // Leaf, subleaf, register, bits that are no features: OSXSAVE; OSPKE and MAWAU.
    for (leaf, subleaf, register, other) in [
        (0x1, 0, Register::Ecx, 1 << 27),
        (0x1, 0, Register::Edx, 0),
        (0x7, 0, Register::Ebx, 0),
        (0x7, 0, Register::Ecx, 0x3E_0010),
        (0x7, 0, Register::Edx, 0),
        (0x7, 1, Register::Eax, 0),
        (0xD, 1, Register::Eax, 0),
        (0x8000_0001, 0, Register::Ecx, 0),
        (0x8000_0001, 0, Register::Edx, 0),
        (0x8000_0007, 0, Register::Edx, 0),
        (0x8000_0008, 0, Register::Ebx, 0),
    ] {
        let named = Feature::ALL
            .iter()
            .map(|f| f.place())
            .filter(|p| (p.leaf, p.subleaf, p.register) == (leaf, subleaf, register))
            .fold(other, |bits: u32, p| bits | 1 << p.bit);
        for model in MODELS {
            let part = model
                .silicon
                .iter()
                .find(|row| row.leaf == leaf && row.answers(subleaf));
            let bits = part.map_or(0, |row| row.regs[register as usize]);
            // PCOMMIT and what else was never sold has no name; no part here shows it.
            let unnamed = bits & !named;
            assert_eq!(
                unnamed, 0,
                "{} {leaf:X}H.{subleaf} {register:?}: {unnamed:X}H",
                model.name
            );
        }
    }
}

/// What QEMU's model has and the part has not, or the other way round, and why. `None` as the model: every one.
const QEMU_DIFFERS: &[(Option<&str>, &[Feature], &str)] = &[
    (
        None,
        &[Hypervisor],
        "QEMU sets it in every model; we add it to every part's",
    ),
    (None, &[Vme], "QEMU's translator turns it off"),
    (
        None,
        &[
            Acpi,
            Dts,
            Eist,
            Tm,
            Tm2,
            TurboBoost,
            HardwareCoordination,
            EnergyBias,
            Hwp,
            Pbe,
            XtprUpdate,
            Dca,
            Htt,
            Ss,
            Psn,
        ],
        "power, pins and topology: QEMU's models leave them to the machine",
    ),
    (
        None,
        &[Ds, Dtes64, DsCpl, Pdcm, Sdbg, IntelPt],
        "debug and trace: QEMU's models have none",
    ),
    (None, &[RdtM, RdtA], "resources: QEMU's models have none"),
    (None, &[Monitor, InvariantTsc], "QEMU leaves them off by default"),
    (None, &[Vmx, Smx], "QEMU's translator has neither"),
    (
        None,
        &[NoFcsFds, FdpExceptionOnly, TscAdjust, L1dFlush, MdClear, Stibp],
        "left out of QEMU's definitions, which KVM adds",
    ),
    (Some("core2"), &[Cmpxchg16b], "QEMU's Conroe is a Celeron without it"),
    (
        Some("westmere"),
        &[Page1gb, Pcid, Rdtscp],
        "QEMU's Westmere lacks them; parts and later versions have them",
    ),
    (Some("sandybridge"), &[Pcid], "QEMU's SandyBridge lacks it"),
    (Some("sandybridge"), &[Ssbd], "QEMU's IBRS versions predate it"),
    (Some("haswell"), &[Ssbd], "QEMU's IBRS versions predate it"),
    (
        Some("haswell"),
        &[Hle, Rtm],
        "microcode took transactions away; QEMU has -noTSX versions for that",
    ),
    (Some("haswell"), &[Page1gb], "QEMU's client models lack it"),
    (Some("broadwell"), &[Ssbd], "QEMU's IBRS versions predate it"),
    (Some("broadwell"), &[Page1gb], "QEMU's Broadwell is a client part"),
    (Some("skylake-server"), &[Ssbd], "QEMU's IBRS versions predate it"),
    (
        Some("skylake-server"),
        &[Clflushopt, Xsaves],
        "QEMU's second version lost the one and has not got the other yet",
    ),
    (
        Some("skylake-server"),
        &[Mpx, TsxForceAbort],
        "QEMU dropped MPX, and never had the other",
    ),
    (
        Some("icelake-server"),
        &[ArchCapabilities, Avx512ifma, Fsrm, Rdpid, Sha, Xsaves],
        "QEMU adds them in later versions of the model (3, 4, 5)",
    ),
    (
        Some("icelake-server"),
        &[Pconfig, Sgx, SgxKeys, SgxLc, Tme],
        "enclaves and memory encryption: QEMU's models have none",
    ),
    (
        Some("snowridge"),
        &[CoreCapabilities],
        "QEMU's third version took split-lock detection away",
    ),
    (
        Some("snowridge"),
        &[Rdpid, Waitpkg],
        "QEMU's Snowridge lacks them; Tremont parts have them",
    ),
];

// covers: cpu/models-qemu
#[test]
fn every_difference_from_qemu_s_models_is_listed() {
    let mut used = std::vec![0; QEMU_DIFFERS.len()];
    let mut compared = 0;
    for line in dump!("qemu-7.2-models").lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split_whitespace();
        let model = model(words.next().unwrap());
        let qemu = words.next().unwrap();
        let [family, _, _]: [u32; 3] = core::array::from_fn(|_| words.next().unwrap().parse().unwrap());
        assert_eq!(family, model.silicon[1].regs[0] >> 8 & 0xF, "{qemu}");
        let theirs = words.fold(Features::NONE, |set, name| {
            set.with(feature_named(name).unwrap_or_else(|| panic!("{qemu}: {name}")))
        });
        let ours = model.part_features();
        for feature in ours.minus(theirs).or(theirs.minus(ours)).iter() {
            let why = QEMU_DIFFERS.iter().position(|(only, features, _)| {
                only.is_none_or(|only| only == model.name) && features.contains(&feature)
            });
            let why = why.unwrap_or_else(|| panic!("{} and QEMU's {qemu} differ in {}", model.name, feature.name()));
            used[why] += 1;
        }
        compared += 1;
    }
    assert_eq!(compared, 9);
    for (row, count) in QEMU_DIFFERS.iter().zip(used) {
        assert!(
            count > 0 && !row.2.is_empty(),
            "a row about nothing: {:?} {}",
            row.0,
            row.2
        );
    }
}

fn text(words: &[u32]) -> String {
    let bytes: Vec<u8> = words
        .iter()
        .flat_map(|w| w.to_le_bytes())
        .take_while(|&b| b != 0)
        .collect();
    String::from_utf8(bytes).unwrap()
}

/// Family, model and stepping of a signature. SDM Vol. 2A "CPUID—CPU Identification", figure "Version Information Returned
/// by CPUID in EAX".
fn signature(eax: u32) -> (u32, u32, u32) {
    let (family, low, high) = (eax >> 8 & 0xF, eax >> 4 & 0xF, eax >> 16 & 0xF);
    let family = if family == 0xF {
        family + (eax >> 20 & 0xFF)
    } else {
        family
    };
    let model = if family == 6 || family == 0xF {
        high << 4 | low
    } else {
        low
    };
    (family, model, eax & 0xF)
}

// covers: cpu/model-cpuid, cpu/models-identity
#[test]
fn every_model_says_who_it_is() {
    let mut checked = Vec::new();
    // Name, family, model, stepping, brand string, physical and linear address bits, microcode, TSC and APIC timer in kHz.
    for (name, family, number, stepping, brand, physical, linear, microcode, tsc, apic) in [
        ("p6", 0x6, 0x08, 3, "", 36, 32, 0x13, 733_331, 133_333),
        (
            "netburst",
            0xF,
            0x02,
            9,
            "              Intel(R) Pentium(R) 4 CPU 2.80GHz",
            36,
            32,
            0x2E,
            2_800_000,
            200_000,
        ),
        (
            "core2",
            0x6,
            0x0F,
            11,
            "Intel(R) Core(TM)2 Duo CPU     E6750  @ 2.66GHz",
            36,
            48,
            0xB3,
            2_666_664,
            333_333,
        ),
        (
            "westmere",
            0x6,
            0x2C,
            2,
            "Intel(R) Xeon(R) CPU           X5650  @ 2.67GHz",
            40,
            48,
            0x1A,
            2_666_660,
            133_333,
        ),
        (
            "sandybridge",
            0x6,
            0x2A,
            7,
            "        Intel(R) Core(TM) i7-2600 CPU @ 3.40GHz",
            36,
            48,
            0x2F,
            3_400_000,
            100_000,
        ),
        (
            "haswell",
            0x6,
            0x3C,
            3,
            "Intel(R) Core(TM) i7-4770 CPU @ 3.40GHz",
            39,
            48,
            0x28,
            3_400_000,
            100_000,
        ),
        (
            "broadwell",
            0x6,
            0x4F,
            1,
            "Intel(R) Xeon(R) CPU E5-2697 v4 @ 2.30GHz",
            46,
            48,
            0xB00_0040,
            2_300_000,
            100_000,
        ),
        (
            "skylake-server",
            0x6,
            0x55,
            4,
            "Intel(R) Xeon(R) Platinum 8160 CPU @ 2.10GHz",
            46,
            48,
            0x200_7006,
            2_100_000,
            25_000,
        ),
        (
            "icelake-server",
            0x6,
            0x6A,
            6,
            "Intel(R) Xeon(R) Platinum 8351N CPU @ 2.40GHz",
            46,
            57,
            0xD00_03A5,
            2_400_000,
            25_000,
        ),
        (
            "snowridge",
            0x6,
            0x86,
            5,
            "Intel Atom(R) P5942B Processor @ 2.20GHz",
            42,
            48,
            0x4C00_0023,
            2_200_000,
            25_000,
        ),
        (
            "sapphirerapids",
            0x6,
            0x8F,
            8,
            "Intel(R) Xeon(R) Platinum 8480+",
            52,
            57,
            0x2B00_04D0,
            2_000_000,
            25_000,
        ),
        (
            "alderlake",
            0x6,
            0x97,
            2,
            "12th Gen Intel(R) Core(TM) i9-12900K",
            46,
            48,
            0x2E,
            3_187_200,
            38_400,
        ),
    ] {
        let model = model(name);
        assert_eq!(signature(model.cpuid(1, 0)[0]), (family, number, stepping), "{name}");
        let [_, b, c, d] = model.cpuid(0, 0);
        assert_eq!(text(&[b, d, c]), "GenuineIntel");
        let brands = (0x8000_0002..=0x8000_0004).flat_map(|leaf| model.rows(leaf).iter().flat_map(|row| row.regs));
        assert_eq!(text(&brands.collect::<Vec<u32>>()), brand, "{name}");
        let [_, b, c, d] = model.cpuid(0x4000_0000, 0);
        assert_eq!(text(&[b, c, d]), "minivmm     ");
        assert_eq!(
            (model.physical_bits(), model.linear_bits()),
            (physical, linear),
            "{name}"
        );
        assert_eq!(model.microcode, microcode, "{name}");
        assert_eq!((model.tsc_khz, model.apic_timer_khz), (tsc, apic), "{name}");
        assert!(!model.description.is_empty());
        checked.push(model.name);
    }
    assert_eq!(checked, MODELS.iter().map(|m| m.name).collect::<Vec<_>>());
}

// covers: cpu/models-leaves
#[test]
fn the_leaves_of_every_model_fit_together() {
    for model in MODELS {
        let name = model.name;
        let highest = |first: u32| model.rows(first).first().map_or(0, |row| row.regs[0]);
        for row in model.cpuid {
            let first = row.leaf & 0xC000_0000;
            let listed = row.leaf <= highest(first);
            assert!(
                listed || (name, row.leaf) == ("p6", 3),
                "{name}: {:X}H is above the highest leaf",
                row.leaf
            );
        }
        assert!(model.rows(1).len() == 1 && model.cpuid(0, 0)[0] >= 2, "{name}");
        if highest(0) >= 2 {
            assert_eq!(model.cpuid(2, 0)[0] & 0xFF, 1, "{name}: one round of leaf 2");
        }
        let clflush = model.cpuid(1, 0)[1] >> 8 & 0xFF;
        assert_eq!(
            clflush * 8,
            if model.features().clfsh() { 64 } else { 0 },
            "{name}: CLFLUSH line"
        );

        // Leaf 4: levels do not go down, every cache is shared by one thread, no type ends the list.
        if !model.rows(4).is_empty() {
            let caches = (0..).map(|i| model.cpuid(4, i)).take_while(|regs| regs[0] & 0x1F != 0);
            let levels: Vec<u32> = caches.clone().map(|regs| regs[0] >> 5 & 7).collect();
            assert!(
                levels.is_sorted() && levels.len() >= 3 && levels[0] == 1,
                "{name}: {levels:?}"
            );
            for [a, b, ..] in caches {
                assert_eq!(
                    (a >> 14, b & 0xFFF),
                    (0, 63),
                    "{name}: one core, one thread, lines of 64 bytes"
                );
            }
        }
        // Topology: one thread, one core; both leaves say the same.
        for leaf in TOPOLOGY_LEAVES.into_iter().filter(|&leaf| !model.rows(leaf).is_empty()) {
            assert_eq!(model.cpuid(leaf, 0), [0, 1, 0x100, 0], "{name} {leaf:X}H");
            assert_eq!(model.cpuid(leaf, 1), [0, 1, 0x201, 0], "{name} {leaf:X}H");
            assert_eq!(model.cpuid(leaf, 2), [0, 0, 2, 0], "{name} {leaf:X}H");
        }
        assert_eq!(
            model.cpuid(1, 0)[1] >> 16,
            u32::from(name != "p6"),
            "{name}: one APIC ID, number 0"
        );
        if model.features().x2apic() {
            assert!(model.features().apic() && !model.rows(0xB).is_empty(), "{name}");
        }
        // Widths. SDM Vol. 3A 4.1.4 "Enumeration of Paging Features by CPUID".
        assert!((36..=52).contains(&model.physical_bits()), "{name}");
        let linear = if model.part_features().la57() {
            57
        } else if model.features().lm() {
            48
        } else {
            32
        };
        assert_eq!(model.linear_bits(), linear, "{name}");
        // The clocks. SDM Vol. 3B 20.7.3 "Determining the Processor Base Frequency".
        let [denominator, numerator, crystal, _] = model.rows(0x15).first().map_or([0; 4], |row| row.regs);
        let [base, most, bus, _] = model.rows(0x16).first().map_or([0; 4], |row| row.regs);
        if let Some(derived) = (base * 1000 * denominator).checked_div(numerator) {
            let crystal = if crystal == 0 { derived } else { crystal / 1000 };
            assert_eq!(
                model.apic_timer_khz, crystal,
                "{name}: the crystal drives the APIC timer"
            );
            assert_eq!(model.tsc_khz, crystal * numerator / denominator, "{name}");
            assert!(base <= most && bus == 100, "{name}");
        } else if let Some(row) = model.msr(MSR_PLATFORM_INFO) {
            let ratio = u32::try_from(row.reset >> 8 & 0xFF).unwrap();
            assert_eq!(model.tsc_khz, ratio * model.apic_timer_khz, "{name}");
        }
    }
}

/// The rows of a model's part, narrowed to what a machine without limits would show.
fn unlimited(model: &CpuModel) -> Vec<CpuidRow> {
    let mut rows = model.silicon.to_vec();
    policy::narrow_rows(&mut rows, model.part_features());
    rows
}

// covers: cpu/models-xsave
#[test]
fn leaf_0dh_follows_from_the_features_that_remain() {
    let leaf = |rows: &[CpuidRow], subleaf| {
        let row = rows.iter().find(|row| (row.leaf, row.subleaf) == (0xD, Some(subleaf)));
        row.map_or([0; 4], |row| row.regs)
    };
    // What a part shows when nothing is hidden: XCR0's bits and the size of the area for all of them, as the dumps have it.
    for (name, xcr0, size) in [
        ("sandybridge", 0x7, 0x340),
        ("haswell", 0x7, 0x340),
        ("broadwell", 0x7, 0x340),
        ("skylake-server", 0x2FF, 0xA88),
        ("icelake-server", 0x2E7, 0xA88),
        ("snowridge", 0x3, 0x240),
        ("sapphirerapids", 0x6_02E7, 0x2B00),
        ("alderlake", 0x207, 0xA88),
    ] {
        let model = model(name);
        let part = leaf(model.silicon, 0);
        assert_eq!((part[0], part[2]), (xcr0, size), "{name}");
        let [a, b, c, d] = leaf(&unlimited(model), 0);
        assert_eq!((a, c, d), (xcr0, size, 0), "{name}");
        assert_eq!(b, policy::XSAVE_LEGACY, "{name}: XCR0 is 1 at reset");
        // What the machine shows of them: x87, SSE, AVX, AVX-512 and PKRU; above XCR0's, what a unit holds, where XSAVES reaches it.
        let (user, area) = match xcr0 & 0x2E7 {
            0x3 => (0x3, 0x240),
            0x7 => (0x7, 0x340),
            all => (all, 0xA88),
        };
        assert_eq!(model.cpuid(0xD, 0), [user, 0x240, area, 0], "{name}");
        let [features, ..] = leaf(model.silicon, 1);
        let [shown, compacted, supervisor, high] = model.cpuid(0xD, 1);
        assert_eq!((shown, high), (features & 0xF, 0), "{name}");
        assert_eq!(compacted, if features & 2 != 0 { 0x240 } else { 0 }, "{name}");
        for subleaf in 2..63 {
            let held = u64::from(user | supervisor) >> subleaf & 1 != 0;
            let expected = if held { leaf(model.silicon, subleaf) } else { [0; 4] };
            assert_eq!(model.cpuid(0xD, subleaf), expected, "{name}.{subleaf}");
        }
        assert!(model.features().xsave());
    }
    // One more feature, one more component.
    let mut rows = SKYLAKE_SERVER.silicon.to_vec();
    policy::narrow_rows(&mut rows, SKYLAKE_SERVER.features().with(Avx512f).without(Xsaves));
    assert_eq!(leaf(&rows, 0), [0x2E7, 0x240, 0xA88, 0]);
    assert_eq!(leaf(&rows, 2), [0x100, 0x240, 0, 0]);
    assert_eq!((leaf(&rows, 1)[0], leaf(&rows, 1)[1]), (0x7, 0x240));
    assert_eq!(leaf(&rows, 9), [0x8, 0xA80, 0, 0]);
    policy::narrow_rows(&mut rows, SKYLAKE_SERVER.features().without(Xsave));
    assert!(
        (0..64).all(|subleaf| leaf(&rows, subleaf) == [0; 4]),
        "no XSAVE, no leaf"
    );
    // The area of a choice of components, in both formats.
    let skylake = CpuModel {
        cpuid: unlimited(&SKYLAKE_SERVER).leak(),
        ..SKYLAKE_SERVER
    };
    let rapids = CpuModel {
        cpuid: unlimited(&SAPPHIRERAPIDS).leak(),
        ..SAPPHIRERAPIDS
    };
    for (model, mask, standard, compacted) in [
        (&skylake, 0x1, 0x240, 0x240),
        (&skylake, 0x7, 0x340, 0x340),
        (&skylake, 0x2FF, 0xA88, 0xA08),
        (&skylake, 0x203, 0xA88, 0x248),
        (&rapids, 0x6_02E7, 0x2B00, 0x2A00),
        // PKRU ends at 248H; tile configuration starts on a line of 64 bytes.
        (&rapids, 0x2_0203, 0xB00, 0x2C0),
    ] {
        assert_eq!(model.xsave_area(mask, false), standard, "{} {mask:X}H", model.name);
        assert_eq!(
            model.xsave_area(mask, true),
            compacted,
            "{} {mask:X}H compacted",
            model.name
        );
    }
}

// covers: rdt/cpuid
#[test]
fn the_resource_directors_leaves_are_the_parts() {
    for (name, leaf, subleaf, part) in [
        ("broadwell", 0xF, 1, [0, 0x1_2000, 0x8F, 0x7]),
        ("broadwell", 0x10, 1, [0x13, 0xC_0000, 0x4, 0xF]),
        ("sapphirerapids", 0x10, 3, [0x59, 0, 0x4, 0xE]),
        ("snowridge", 0x10, 2, [0x11, 0, 0, 0xF]),
        ("alderlake", 0xF, 0, [0; 4]),
    ] {
        assert_eq!(model(name).cpuid(leaf, subleaf), part, "{name} {leaf:X}H.{subleaf}");
    }
    let without = SKYLAKE_SERVER.with_toggles("-rdt_m,-rdt_a").unwrap();
    assert_eq!((without.cpuid(0xF, 1), without.cpuid(0x10, 1)), ([0; 4], [0; 4]));
    assert_eq!(crate::rdt::RdtCaps::of(without), None);
}

// covers: lbr/shown
#[test]
fn architectural_last_branch_records_are_shown() {
    for model in MODELS {
        let there = matches!(model.name, "sapphirerapids" | "alderlake");
        assert_eq!(model.features().arch_lbr(), there, "{}", model.name);
        if there {
            assert_eq!(model.cpuid(0x1C, 0), [0x4000_000B, 0x7, 0x7, 0], "{}", model.name);
            // The XSAVE component is shown with XSAVES.
            let component = model.features().xsaves();
            assert_eq!(model.cpuid(0xD, 1)[2] >> 15 & 1 != 0, component, "{}", model.name);
            let size = if component { [0x328, 0, 1, 0] } else { [0; 4] };
            assert_eq!(model.cpuid(0xD, 15), size, "{}", model.name);
        }
    }
    let without = model("alderlake").with_toggles("-arch_lbr").unwrap();
    assert!(!without.features().arch_lbr());
    assert_eq!(without.cpuid(0x1C, 0), [0; 4]);
    assert_eq!(without.cpuid(0xD, 15), [0; 4]);
}

// covers: pt/cpuid
#[test]
fn processor_trace_is_what_leaf_14h_of_the_part_says() {
    for (name, rows, why) in [
        ("broadwell", [[0, 0x1, 0x1, 0], [0; 4]], "CR3 filter, one region"),
        (
            "skylake-server",
            [[1, 0xF, 7, 0], [0x0249_0002, 0x003F_3FFF, 0, 0]],
            "filters, MTC, CYC, single range",
        ),
        (
            "icelake-server",
            [[1, 0xF, 7, 0], [0x0249_0002, 0x003F_1FFF, 0, 0]],
            "the same",
        ),
        (
            "sapphirerapids",
            [[1, 0x5F, 7, 0], [0x0249_0002, 0x003F_003F, 0, 0]],
            "and PTWRITE, PSB and PMI preserved",
        ),
        (
            "alderlake",
            [[1, 0x5F, 7, 0], [0x0249_0002, 0x003F_003F, 0, 0]],
            "the same",
        ),
        (
            "snowridge",
            [[1, 0x7F, 0x8000_0007, 0], [0x0249_0002, 0x003F_3FFF, 0, 0]],
            "and power events, LIP",
        ),
    ] {
        let model = model(name);
        assert!(model.features().intel_pt(), "{name}");
        assert_eq!([model.cpuid(0x14, 0), model.cpuid(0x14, 1)], rows, "{name}: {why}");
        let caps = model.units.pt.unwrap();
        assert_eq!([caps.ebx, caps.ecx], [rows[0][1], rows[0][2]], "{name}");
        assert_eq!(u32::from(caps.physical_bits), model.physical_bits(), "{name}");
        assert_eq!(u32::from(caps.linear_bits), model.linear_bits(), "{name}");
        let [denominator, numerator, ..] = model.cpuid(0x15, 0);
        let crystal = if denominator == 0 {
            (1, 1)
        } else {
            (numerator, denominator)
        };
        assert_eq!(caps.crystal, crystal, "{name}");
        let without = model.with_toggles("-intel_pt").unwrap();
        assert_eq!((without.units.pt, without.cpuid(0x14, 0)), (None, [0; 4]), "{name}");
    }
    for model in MODELS.iter().filter(|model| model.units.pt.is_none()) {
        assert!(!model.part_features().intel_pt(), "{}", model.name);
    }
}

// covers: cpu/models-hidden
#[test]
fn what_comes_later_is_hidden_and_kept() {
    // Leaves of the debug, trace and resource units: the model shows none, the part's rows keep them.
    for (name, leaf, subleaf, part) in [
        ("sapphirerapids", 0x1D, 1, [0x0400_2000, 0x0008_0040, 0x10, 0]),
        ("alderlake", 0x1A, 0, [0x4000_0001, 0, 0, 0]),
    ] {
        let model = model(name);
        let row = model
            .silicon
            .iter()
            .find(|row| row.leaf == leaf && row.answers(subleaf))
            .unwrap();
        assert_eq!(row.regs, part, "{name} {leaf:X}H.{subleaf}");
        assert_eq!(model.cpuid(leaf, subleaf), [0; 4], "{name} {leaf:X}H.{subleaf}");
    }
    // The 32-bit models have no long mode and what comes with it.
    for model in [&P6, &NETBURST] {
        let f = model.features();
        assert!(
            !f.lm() && !f.nx() && !f.syscall() && !f.x2apic() && f.pae() && f.sse(),
            "{}",
            model.name
        );
    }
    assert_eq!(
        (P6.cpuid(0, 0)[0], P6.cpuid(3, 0)),
        (2, P6.cpuid(2, 0)),
        "no serial number, no leaf 3"
    );
    assert_eq!(P6.cpuid(0x8000_0000, 0), P6.cpuid(2, 0), "no extended leaves");
    assert_eq!(
        NETBURST.cpuid(0x8000_0005, 0),
        NETBURST.cpuid(2, 0),
        "extended leaves to 80000004H"
    );
    // x86-64-v2 and what the machine has beside it.
    for model in MODELS.iter().skip(4) {
        let f = model.features();
        assert!(
            f.sse42() && f.popcnt() && f.cmpxchg16b() && f.lahf_sahf() && f.xsave(),
            "{}",
            model.name
        );
        assert!(
            f.tsc_deadline() && f.invariant_tsc() && f.spec_ctrl() && f.x2apic(),
            "{}",
            model.name
        );
        let servers = ["skylake-server", "icelake-server", "sapphirerapids"];
        assert_eq!(f.avx512f(), servers.contains(&model.name), "{}", model.name);
        assert_eq!(f.avx512fp16(), model.name == "sapphirerapids", "{}", model.name);
        assert!(!f.amx_tile() && !f.rtm(), "{}", model.name);
        let v3 = [Avx2, Fma, F16c, Bmi1, Bmi2, Lzcnt, Movbe];
        let has = |model: &CpuModel| v3.map(|feature| model.features().has(feature));
        match model.name {
            "sandybridge" => assert!(f.avx() && f.xsaveopt() && has(model) == [false; 7]),
            "snowridge" => assert!(!f.avx() && f.sha() && f.movbe() && f.xsaves() && f.rdseed()),
            name => assert!(f.avx() && has(model) == [true; 7], "{name}"),
        }
    }
    assert!(HASWELL.features().fsgsbase() && HASWELL.features().invpcid() && HASWELL.features().rdrand());
    assert!(!SANDYBRIDGE.features().fsgsbase() && !SNOWRIDGE.features().pcid());
}

// covers: cpu/model-cpuid
#[test]
fn westmere_shows_what_qemu_shows_and_what_its_part_has() {
    let rows = rows_of(dump!("qemu-7.2-tcg-westmere"));
    let (qemu, ours) = (Features::of(&rows), WESTMERE.features());
    // The real part has them, but for x2APIC, which the local APIC unit adds. Its translator or its model lacks them.
    let more = [
        Vme,
        Monitor,
        Ss,
        Page1gb,
        Rdtscp,
        Pcid,
        X2apic,
        EnergyBias,
        InvariantTsc,
        Ds,
        Dtes64,
        DsCpl,
        Pdcm,
        Vmx,
    ];
    for &feature in Feature::ALL {
        assert_eq!(
            ours.has(feature),
            qemu.has(feature) || more.contains(&feature),
            "{}",
            feature.name()
        );
    }
    for leaf in [0x8000_0000u32, 0x8000_0008] {
        let row = rows.iter().find(|row| row.leaf == leaf).unwrap();
        assert_eq!(WESTMERE.cpuid(leaf, 0)[0], row.regs[0], "{leaf:X}H");
    }
}

// covers: cpu/model-cpuid
#[test]
fn leaf_4_describes_the_caches() {
    // type: 1 data, 2 instruction, 3 unified
    for (subleaf, kind, level, kib, ways, sharers) in [
        (0, 1, 1, 32, 8, 1),
        (1, 2, 1, 32, 4, 1),
        (2, 3, 2, 256, 8, 1),
        (3, 3, 3, 12 * 1024, 16, 1),
    ] {
        let [a, b, c, _] = WESTMERE.cpuid(4, subleaf);
        assert_eq!(
            (a & 0x1F, a >> 5 & 7),
            (kind, level),
            "kind and level of cache {subleaf}"
        );
        let (w, partitions, line, sets) = ((b >> 22) + 1, (b >> 12 & 0x3FF) + 1, (b & 0xFFF) + 1, c + 1);
        assert_eq!(
            (w, line, w * partitions * line * sets / 1024),
            (ways, 64, kib),
            "geometry of cache {subleaf}"
        );
        assert_eq!(
            ((a >> 14 & 0xFFF) + 1, (a >> 26) + 1),
            (sharers, 1),
            "sharing of cache {subleaf}"
        );
    }
    for subleaf in [4, 5, u32::MAX] {
        assert_eq!(WESTMERE.cpuid(4, subleaf), [0; 4], "no more caches");
    }
}

// covers: cpu/model-cpuid
#[test]
fn leaves_out_of_range_follow_the_manual() {
    let topology = WESTMERE.cpuid(0xB, 0);
    for (leaf, subleaf, expected, why) in [
        (0xC, 0, topology, "above the highest basic leaf: that leaf"),
        (0x7FFF_FFFF, 0, topology, "far above"),
        (
            0x8000_0009,
            0,
            topology,
            "above the highest extended leaf: the highest basic leaf",
        ),
        (0x4000_0001, 0, topology, "above the highest hypervisor leaf"),
        (0xC000_0000, 0, topology, "another vendor's range"),
        (u32::MAX, 0, topology, "the last leaf"),
        (0xC, 1, WESTMERE.cpuid(0xB, 1), "ECX is honoured"),
        (0xB, 2, [0, 0, 2, 0], "an invalid level gives ECX[7:0] back"),
        (
            0xB,
            0x1234_5678,
            [0, 0, 0x78, 0],
            "an invalid level gives only ECX[7:0] back",
        ),
        (0x7, 0, [0; 4], "an absent leaf below the highest"),
        (0x8, 0, [0; 4], "a reserved leaf"),
        (0x1, 7, WESTMERE.cpuid(1, 0), "leaf 1 ignores ECX"),
    ] {
        assert_eq!(WESTMERE.cpuid(leaf, subleaf), expected, "{leaf:X}H.{subleaf:X}H: {why}");
    }
}

// covers: cpu/model-cpuid
#[test]
fn westmere_shows_x86_64_v2_and_hides_what_is_not_modelled() {
    let features = WESTMERE.features();
    // x86-64 psABI "Micro-architecture levels": the baseline and v2.
    let v2 = [
        Cmov, Cx8, Fpu, Fxsr, Mmx, Syscall, Sse, Sse2, Cmpxchg16b, LahfSahf, Popcnt, Sse3, Sse41, Sse42, Ssse3,
    ];
    let more = [
        Vme,
        Monitor,
        Aesni,
        Pclmulqdq,
        Pae,
        Pse,
        Pse36,
        Pge,
        Pat,
        Mtrr,
        Mca,
        Mce,
        Apic,
        X2apic,
        Sep,
        Tsc,
        InvariantTsc,
        Rdtscp,
        Nx,
        Page1gb,
        Pcid,
        Clfsh,
        Msr,
        De,
        Lm,
        Ss,
        Hypervisor,
        Arat,
        EnergyBias,
        Ds,
        Dtes64,
        DsCpl,
        Pdcm,
        Vmx,
    ];
    for &feature in Feature::ALL {
        let expected = v2.contains(&feature) || more.contains(&feature);
        assert_eq!(features.has(feature), expected, "{}", feature.name());
    }
    assert!(features.pcid() && !features.xsave() && !features.fsgsbase());
}

#[test]
fn every_model_is_sorted_and_found_by_name() {
    for model in MODELS {
        assert!(
            model.cpuid.is_sorted_by_key(|row| (row.leaf, row.subleaf)),
            "{}",
            model.name
        );
        assert!(model.msrs.is_sorted_by(|a, b| a.msr < b.msr), "{}", model.name);
        assert_eq!(by_name(model.name).map(|m| m.name), Some(model.name));
        for row in model.msrs {
            assert_eq!(model.msr(row.msr), Some(row));
        }
    }
    assert!(by_name("pentium").is_none());
}

// covers: cpu/model-msrs
#[test]
fn msr_rows_carry_the_manual_names() {
    for model in MODELS {
        for row in model.msrs {
            // Numbers to which parts give other names.
            let other = match (model.name, row.msr) {
                ("netburst", MSR_EBL_CR_POWERON) => Some("MSR_EBC_HARD_POWERON"),
                ("skylake-server" | "icelake-server" | "sapphirerapids", MSR_TURBO_RATIO_LIMIT1) => {
                    Some("MSR_TURBO_RATIO_LIMIT_CORES")
                }
                _ => None,
            };
            let known = NAMES
                .iter()
                .find(|(number, _)| *number == row.msr)
                .map(|(_, name)| *name);
            if let Some(name) = other.or(known) {
                assert_eq!(row.name, name, "{:X}H", row.msr);
            }
        }
    }
}

// covers: cpu/model-msrs
#[test]
fn every_msr_that_linux_reads_on_this_part_answers_as_it_should() {
    // Registers that a stock 6.1 kernel reads at boot and that no other part of the machine holds.
    let mut present = std::vec![
        0x17, 0x34, 0x3A, 0x8B, 0xCE, 0xFE, 0x179, 0x17A, 0x1A0, 0x1B0, 0x250, 0x258, 0x259, 0x277, 0x2FF
    ];
    present.extend(0x200..=0x20F);
    present.extend(0x268..=0x26F);
    present.extend(0x400..=0x423);
    for msr in present {
        assert!(WESTMERE.msr(msr).is_some(), "{msr:X}H");
    }
    for (msr, why) in [
        (0x48, "IA32_SPEC_CTRL: older microcode"),
        (0x4E, "MSR_PPIN_CTL: Ivy Bridge and later"),
        (0x140, "MSR_MISC_FEATURE_ENABLES: Ivy Bridge and later"),
        (0x345, "IA32_PERF_CAPABILITIES: the counters'"),
        (0x64E, "MSR_PPERF: Skylake and later"),
        (0x6E0, "IA32_TSC_DEADLINE: TSC-Deadline is 0"),
        (0x3B, "IA32_TSC_ADJUST: leaf 7 is 0"),
        (0x210, "a ninth variable range: MTRRCAP[7:0] is 8"),
        (0x424, "a tenth bank: MCG_CAP[7:0] is 9"),
        (0x1D9, "IA32_DEBUGCTL: comes with its unit"),
        (0xC001_0015, "another vendor's"),
        (0xC001_1029, "another vendor's"),
        (0x10, "the clock's"),
        (0x1B, "the local APIC's"),
        (0xC000_0080, "the core's"),
    ] {
        assert!(WESTMERE.msr(msr).is_none(), "{msr:X}H is not a plain MSR here: {why}");
    }
}

// covers: cpu/model-msrs
#[test]
fn writes_follow_the_manual() {
    const GP: Result<u64, MsrFault> = Err(MsrFault::GeneralProtection);
    for (msr, value, expected, why) in [
        (IA32_MTRRCAP, 0xD08, GP, "read-only, even with its own value"),
        (IA32_FEATURE_CONTROL, 0x1, GP, "locked"),
        (MSR_PLATFORM_INFO, 0, GP, "read-only"),
        (
            IA32_PAT,
            0x0007_0106_0007_0106,
            Ok(0x0007_0106_0007_0106),
            "what Linux writes, near enough: WC in entry 1",
        ),
        (IA32_PAT, 0x0000_0000_0000_0002, GP, "type 2 is reserved"),
        (
            IA32_PAT,
            0x0300_0000_0000_0000,
            GP,
            "type 3 is reserved, in the last entry too",
        ),
        (IA32_PAT, 0x0000_0000_0000_0008, GP, "bits 7:3 of an entry are reserved"),
        (
            0x200,
            0x0000_00FF_FFFF_F006,
            Ok(0x0000_00FF_FFFF_F006),
            "a base with type WB",
        ),
        (0x200, 0x0000_0100_0000_0006, GP, "a base above MAXPHYADDR"),
        (0x200, 0x0000_0000_0000_0106, GP, "bits 11:8 of a base are reserved"),
        (0x200, 0x0000_0000_0000_0002, GP, "type 2 does not exist"),
        (0x200, 0x0000_0000_0000_0007, GP, "UC- is a type of the PAT only"),
        (0x201, 0x0000_00FF_F000_0800, Ok(0x0000_00FF_F000_0800), "a valid mask"),
        (0x201, 0x0000_0000_0000_0400, GP, "bit 10 of a mask is reserved"),
        (
            0x250,
            0x0605_0401_0006_0606,
            Ok(0x0605_0401_0006_0606),
            "all five types",
        ),
        (0x250, 0x0600_0000_0000_0200, GP, "type 2 does not exist"),
        (0x26F, 0x0700_0000_0000_0000, GP, "UC- is a type of the PAT only"),
        (IA32_MTRR_DEF_TYPE, 0xC00, Ok(0xC00), "enabled, UC"),
        (IA32_MTRR_DEF_TYPE, 0x000, Ok(0), "disabled"),
        (IA32_MTRR_DEF_TYPE, 0xD06, GP, "bit 8 is reserved"),
        (IA32_MTRR_DEF_TYPE, 0x1C06, GP, "bit 12 is reserved"),
        (IA32_MTRR_DEF_TYPE, 0xC02, GP, "type 2 does not exist"),
        (IA32_MC0_CTL, u64::MAX, Ok(u64::MAX), "all errors enabled"),
        (IA32_MC0_STATUS, 0, Ok(0), "cleared"),
        (IA32_MC0_STATUS, 1, GP, "only zeros can be written"),
        (0x423, 1, GP, "only zeros can be written, in the last bank too"),
        (IA32_MCG_STATUS, 4, GP, "MCIP can only be cleared"),
        (IA32_BIOS_SIGN_ID, 0, Ok(0), "preloaded with 0 before CPUID"),
        (IA32_ENERGY_PERF_BIAS, 6, Ok(6), "balanced"),
        (IA32_ENERGY_PERF_BIAS, 0x10, GP, "bits 63:4 are reserved"),
        (IA32_MISC_ENABLE, 0x4_0080, Ok(0x4_0080), "fast strings off"),
        (IA32_MISC_ENABLE, 0x81, Ok(0x81), "MONITOR off"),
        (IA32_MISC_ENABLE, 0x4_0881, GP, "bit 11 is read-only"),
        (IA32_MISC_ENABLE, 0x44_0081, GP, "limiting CPUID is not modelled"),
        (
            IA32_THERM_STATUS,
            0,
            Ok(0x8840_0000),
            "the log bits are clear already; the rest is read-only",
        ),
    ] {
        let row = WESTMERE.msr(msr).unwrap();
        assert_eq!(
            row.write(row.reset, value),
            expected,
            "{} <- {value:X}H: {why}",
            row.name
        );
    }
}

// covers: cpu/model-msrs, cpu/msrs
#[test]
fn every_row_but_the_read_only_ones_takes_its_own_start_value() {
    for row in MODELS.iter().flat_map(|model| model.msrs) {
        let expected = if row.check == Check::ReadOnly {
            Err(MsrFault::GeneralProtection)
        } else {
            Ok(row.reset)
        };
        assert_eq!(row.write(row.reset, row.reset), expected, "{}", row.name);
    }
}

// covers: cpu/model-msrs, cpu/msrs
#[test]
fn capabilities_agree_with_the_registers_they_count() {
    // Name, variable ranges, banks, more of IA32_MCG_CAP, ratio of MSR_PLATFORM_INFO.
    for (name, ranges, banks, more, ratio) in [
        ("p6", 8, 5, 0x100, None),
        ("netburst", 8, 4, 0, None),
        ("core2", 8, 6, 0x800, None),
        ("westmere", 8, 9, 0, Some(20)),
        ("sandybridge", 10, 9, 0xC00, Some(34)),
        ("haswell", 10, 9, 0xC00, Some(34)),
        ("broadwell", 10, 22, 0x100_0C00, Some(23)),
        ("skylake-server", 10, 20, 0x100_0C00, Some(21)),
        ("icelake-server", 10, 28, 0x100_0C00, Some(24)),
        ("snowridge", 10, 8, 0xC00, Some(22)),
        ("sapphirerapids", 10, 21, 0x100_0C00, Some(20)),
        ("alderlake", 10, 14, 0xC00, Some(32)),
    ] {
        let model = model(name);
        let value = |msr: u32| model.msr(msr).map(|row| row.reset);
        let count = |numbers: core::ops::Range<u32>| numbers.filter(|&msr| model.msr(msr).is_some()).count() as u64;
        // The architectural registers came with Nehalem.
        let smrr = u64::from(!["p6", "netburst", "core2"].contains(&name));
        assert_eq!(value(IA32_MTRRCAP), Some(0x500 | smrr << 11 | ranges), "{name}");
        assert_eq!(count(IA32_SMRR_PHYSBASE..IA32_SMRR_PHYSMASK + 1), 2 * smrr, "{name}");
        assert_eq!(count(0x200..0x250), 2 * ranges, "{name}");
        assert_eq!(value(IA32_MCG_CAP), Some(more | banks), "{name}");
        assert_eq!(count(0x400..0x480), 4 * banks, "{name}");
        let corrected = if more & 0x400 != 0 { banks } else { 0 };
        assert_eq!(
            count(0x280..0x2A0),
            corrected,
            "{name}: IA32_MCi_CTL2 where there is CMCI"
        );
        assert_eq!(value(IA32_MCG_CTL).is_some(), more & 0x100 != 0, "{name}");
        assert_eq!(
            value(IA32_BIOS_SIGN_ID),
            Some(u64::from(model.microcode) << 32),
            "{name}"
        );
        assert_eq!(value(MSR_PLATFORM_INFO).map(|v| v >> 8 & 0xFF), ratio, "{name}");
        if let Some(ratio) = ratio.filter(|_| name != "westmere") {
            assert_eq!(value(IA32_PERF_STATUS), Some(ratio << 8), "{name}");
        }
        let frames = model.msr(IA32_MTRR_PHYSMASK0).unwrap().writable;
        assert_eq!(
            frames,
            ((1 << model.physical_bits()) - 0x1000) | 0x800,
            "{name}: MTRRs as wide as addresses"
        );
    }
}

// covers: cpu/msrs
#[test]
fn registers_are_there_where_cpuid_enumerates_them() {
    for model in MODELS {
        for &(msr, by) in msrs::ENUMERATED {
            let enumerated = by.iter().any(|&feature| model.features().has(feature));
            assert_eq!(model.msr(msr).is_some(), enumerated, "{}: {msr:X}H", model.name);
        }
        if let Some(row) = model.msr(IA32_SPEC_CTRL) {
            let f = model.features();
            let bits = u64::from(f.spec_ctrl()) | u64::from(f.stibp()) << 1 | u64::from(f.ssbd()) << 2;
            assert_eq!(row.writable, bits, "{}", model.name);
        }
    }
}

// covers: cpu/msrs
#[test]
fn what_linux_asks_of_a_model_has_the_model_s_answer() {
    const GP: Result<u64, MsrFault> = Err(MsrFault::GeneralProtection);
    let read = |name: &str, msr: u32| model(name).msr(msr).map_or(GP, |row| row.read(row.reset));
    for (name, msr, expected, why) in [
        ("sandybridge", IA32_SPEC_CTRL, Ok(0), "microcode of 2018"),
        ("sandybridge", IA32_PRED_CMD, GP, "a command cannot be read"),
        ("sandybridge", IA32_FLUSH_CMD, GP, "a command cannot be read"),
        ("sandybridge", MSR_MISC_FEATURE_ENABLES, GP, "Ivy Bridge and later"),
        (
            "haswell",
            MSR_MISC_FEATURE_ENABLES,
            Ok(0),
            "no CPUID faulting, no MWAIT in ring 3",
        ),
        ("haswell", IA32_ARCH_CAPABILITIES, GP, "Cascade Lake and later"),
        ("skylake-server", IA32_ARCH_CAPABILITIES, GP, "Cascade Lake and later"),
        (
            "icelake-server",
            IA32_ARCH_CAPABILITIES,
            Ok(0x2_006B),
            "not vulnerable to Meltdown, L1TF and MDS",
        ),
        (
            "snowridge",
            IA32_ARCH_CAPABILITIES,
            Ok(0x2_002B),
            "the same but for IF_PSCHANGE_MC_NO",
        ),
        (
            "sapphirerapids",
            IA32_ARCH_CAPABILITIES,
            Ok(0xE16B),
            "nor to stale data of devices",
        ),
        ("alderlake", IA32_CORE_CAPABILITIES, Ok(0), "no faults on split locks"),
        ("icelake-server", IA32_CORE_CAPABILITIES, GP, "Tremont and Golden Cove"),
        ("snowridge", MSR_TEST_CTRL, GP, "IA32_CORE_CAPABILITIES[5] is 0"),
        ("icelake-server", IA32_TSX_CTRL, GP, "IA32_ARCH_CAPABILITIES[7] is 0"),
        ("skylake-server", MSR_PPIN_CTL, GP, "MSR_PLATFORM_INFO[23] is 0"),
        (
            "skylake-server",
            MSR_PLATFORM_INFO,
            Ok(21 << 8 | 8 << 40),
            "base ratio 21, lowest 8",
        ),
        (
            "sapphirerapids",
            MSR_TURBO_RATIO_LIMIT,
            Ok(0x1414_1414_1414_1414),
            "no Turbo Boost",
        ),
        (
            "haswell",
            MSR_PLATFORM_INFO,
            Ok(34 << 8 | 8 << 40),
            "nothing that could be programmed",
        ),
        ("haswell", IA32_PLATFORM_ID, Ok(1 << 50), "platform 1"),
        (
            "haswell",
            IA32_MISC_ENABLE,
            Ok(0x4_0081),
            "fast strings, performance monitoring, BTS, PEBS, MONITOR",
        ),
        ("haswell", IA32_FEATURE_CONTROL, Ok(5), "locked, with VMX on"),
        ("haswell", MSR_CORE_THREAD_COUNT, Ok(0x1_0001), "one core, one thread"),
        ("core2", MSR_FSB_FREQ, Ok(0x804), "333 MHz"),
        ("core2", IA32_ENERGY_PERF_BIAS, GP, "CPUID.06H:ECX[3] is 0"),
        ("core2", IA32_SPEC_CTRL, GP, "never got it"),
        ("netburst", MSR_EBC_FREQUENCY_ID, Ok(0x0E12_000E), "14 times 200 MHz"),
        ("netburst", IA32_PERF_STATUS, GP, "model 3 and later"),
        ("p6", IA32_MISC_ENABLE, GP, "Pentium 4 and later"),
        ("p6", MSR_BBL_CR_CTL, Ok(0x20_0000), "the serial number is disabled"),
        ("alderlake", IA32_PERF_CAPABILITIES, GP, "with the performance counters"),
        ("alderlake", IA32_LBR_CTL, GP, "with its unit"),
        ("broadwell", IA32_RTIT_CTL, GP, "with its unit"),
    ] {
        assert_eq!(read(name, msr), expected, "{name} {msr:X}H: {why}");
    }
    for (name, msr, value, expected, why) in [
        ("sandybridge", IA32_PRED_CMD, 1, Ok(0), "IBPB leaves nothing behind"),
        ("sandybridge", IA32_PRED_CMD, 2, GP, "a reserved bit"),
        ("sandybridge", IA32_FLUSH_CMD, 1, Ok(0), "L1D flush"),
        ("sandybridge", IA32_FLUSH_CMD, 3, GP, "a reserved bit"),
        ("sandybridge", IA32_SPEC_CTRL, 7, Ok(7), "IBRS, STIBP and SSBD"),
        ("sandybridge", IA32_SPEC_CTRL, 8, GP, "a reserved bit"),
        ("haswell", MSR_MISC_FEATURE_ENABLES, 0, Ok(0), "what Linux writes"),
        ("haswell", MSR_MISC_FEATURE_ENABLES, 1, GP, "no CPUID faulting"),
        (
            "haswell",
            IA32_MISC_ENABLE,
            0x81,
            Ok(0x81),
            "without bit 18 there is no MONITOR",
        ),
        (
            "haswell",
            IA32_MC0_CTL2,
            0x4000_0001,
            Ok(0x4000_0001),
            "CMCI on, threshold 1",
        ),
        ("haswell", IA32_MC0_CTL2, 0x8000_0000, GP, "a reserved bit"),
        (
            "haswell",
            IA32_PERF_CTL,
            0x1_0000_2200,
            Ok(0x1_0000_2200),
            "a ratio, turbo disengaged",
        ),
        ("alderlake", IA32_ARCH_CAPABILITIES, 0, GP, "read-only"),
        (
            "sapphirerapids",
            IA32_MTRR_PHYSBASE0,
            0x000F_FFFF_FFFF_F006,
            Ok(0x000F_FFFF_FFFF_F006),
            "52 address bits",
        ),
        (
            "sapphirerapids",
            0x213,
            0x0000_0000_0000_0800,
            Ok(0x800),
            "a tenth variable range",
        ),
        ("core2", 0x210, 0, GP, "no ninth variable range"),
        ("core2", IA32_MTRR_PHYSBASE0, 0x10_0000_0006, GP, "36 address bits"),
        (
            "core2",
            IA32_MISC_ENABLE,
            0x4_0081 | 1 << 39,
            Ok(0x4_0081 | 1 << 39),
            "a prefetcher off",
        ),
        (
            "netburst",
            IA32_MISC_ENABLE,
            0x2C1,
            Ok(0x2C1),
            "the prefetch queue off, fast strings on",
        ),
        ("p6", ROB_CR_BKUPTMPDR6, 0, Ok(0), "fast strings off"),
        (
            "p6",
            MSR_EBL_CR_POWERON,
            0xC514_001E,
            Ok(0xC514_001E),
            "error checks on",
        ),
        ("p6", MSR_EBL_CR_POWERON, 0xC514_0001, GP, "a reserved bit"),
        ("p6", IA32_MCG_CTL, u64::MAX, Ok(u64::MAX), "all reporting on"),
    ] {
        let row = model(name).msr(msr);
        let written = row.map_or(GP, |row| row.write(row.reset, value));
        assert_eq!(written, expected, "{name} {msr:X}H <- {value:X}H: {why}");
    }
}

// covers: cpu/model-toggles
#[test]
fn toggles_switch_features_or_say_why_not() {
    let shown = |m: &CpuModel| m.features();
    // Model, toggles, features that are there afterwards, features that are not.
    for (name, toggles, with, without) in [
        ("haswell", "-rdrand", &[Xsave, Invpcid][..], &[Rdrand][..]),
        (
            "haswell",
            "-RDRAND,-invpcid,-pcid",
            &[Xsave][..],
            &[Rdrand, Invpcid, Pcid][..],
        ),
        ("haswell", "+rdrand", &[Rdrand][..], &[][..]),
        ("westmere", "+fsgsbase", &[Fsgsbase, X2apic][..], &[][..]),
        ("westmere", "-x2apic", &[Pcid][..], &[X2apic][..]),
        ("westmere", "+tsc-deadline", &[TscDeadline][..], &[][..]),
        (
            "westmere",
            "+tsc_deadline_timer,+spec-ctrl",
            &[TscDeadline, SpecCtrl][..],
            &[][..],
        ),
        (
            "skylake-server",
            "-sse4.2,-xsave",
            &[Sse41][..],
            &[
                Sse42, Xsave, Xsaveopt, Xsavec, Xgetbv1, Xsaves, Avx, Avx2, Fma, F16c, Pku, Avx512f, Avx512cd,
                Avx512bw, Avx512dq, Avx512vl,
            ][..],
        ),
        (
            "skylake-server",
            "-avx",
            &[Xsave, Bmi2][..],
            &[Avx, Avx2, Fma, F16c, Avx512f, Avx512cd, Avx512bw, Avx512dq, Avx512vl][..],
        ),
        ("alderlake", "-avx2", &[Avx, Fma, Vaes, Sha][..], &[Avx2, AvxVnni][..]),
        ("haswell", "-pcid", &[Xsave][..], &[Pcid, Invpcid][..]),
        (
            "skylake-server",
            "-ibrs,-stibp,-ssbd,-flush_l1d",
            &[][..],
            &[SpecCtrl, Stibp, Ssbd, L1dFlush][..],
        ),
        (
            "icelake-server",
            "-hypervisor,-invtsc",
            &[][..],
            &[Hypervisor, InvariantTsc][..],
        ),
        ("p6", "-sse,-pse36", &[Fxsr][..], &[Sse, Pse36][..]),
    ] {
        let model = model(name)
            .with_toggles(toggles)
            .unwrap_or_else(|why| panic!("{name},{toggles}: {why}"));
        for &feature in with {
            assert!(shown(model).has(feature), "{name},{toggles}: {}", feature.name());
        }
        for &feature in without {
            assert!(!shown(model).has(feature), "{name},{toggles}: {}", feature.name());
        }
        assert!(
            model.differences().iter().all(|d| d.reason != UNEXPLAINED),
            "{name},{toggles}"
        );
        assert!(model.cpuid.is_sorted_by_key(|row| (row.leaf, row.subleaf)));
        // Nothing else moved.
        let before = self::model(name);
        let moved: Features = with.iter().chain(without).fold(Features::NONE, |set, &f| set.with(f));
        assert_eq!(
            shown(model).minus(moved),
            shown(before).minus(moved),
            "{name},{toggles}"
        );
        for &(msr, by) in msrs::ENUMERATED {
            let enumerated = by.iter().any(|&feature| shown(model).has(feature));
            assert_eq!(model.msr(msr).is_some(), enumerated, "{name},{toggles}: {msr:X}H");
        }
    }
    for (name, toggles, expected) in [
        ("haswell", "+frobnicate", "unknown feature `frobnicate`"),
        ("haswell", "+", "unknown feature ``"),
        ("haswell", "", "`` is no toggle: write +feature or -feature"),
        ("haswell", "avx2", "`avx2` is no toggle: write +feature or -feature"),
        ("haswell", "-rdrand,,", "`` is no toggle: write +feature or -feature"),
        ("haswell", "+a\x1b[2J", "unknown feature `a?[2J`"),
        (
            "haswell",
            "+avx512f",
            "avx512f: haswell has no CPUID leaf DH to show it in",
        ),
        (
            "haswell",
            "+hle",
            "hle: the engine does not have it (not modelled: lock elision and the switches of transactions)",
        ),
        ("p6", "+fsgsbase", "fsgsbase: p6 has no CPUID leaf 7H to show it in"),
        ("p6", "+nx", "nx: p6 has no CPUID leaf 80000001H to show it in"),
        ("core2", "+invpcid", "invpcid needs pcid"),
        ("haswell", "-pcid,+invpcid", "invpcid needs pcid"),
        ("haswell", "-sse", "lm needs sse2"),
        ("netburst", "+nx,+lm", "lm needs syscall"),
        ("haswell", "+rdrand,-rdrand", "rdrand is switched both on and off"),
        (
            "haswell",
            "-apic",
            "apic is the machine's interrupt controller and cannot be switched",
        ),
    ] {
        assert_eq!(
            model(name).with_toggles(toggles).unwrap_err().to_string(),
            expected,
            "{name},{toggles}"
        );
    }
    let many = model("haswell")
        .with_toggles("-xsave,+avx,+xsaveopt")
        .unwrap_err()
        .to_string();
    assert_eq!(many, "xsaveopt needs xsave; avx needs xsave");
    let narrow = model("haswell").with_toggles("-lm").unwrap().features();
    assert!(
        !narrow.syscall() && !narrow.cmpxchg16b() && narrow.avx2(),
        "what needs long mode goes with it"
    );
}

// covers: cpu/model-toggles
#[test]
fn features_are_found_by_linux_s_qemu_s_and_the_manual_s_names() {
    for &feature in Feature::ALL {
        assert_eq!(feature_named(feature.flag()), Some(feature), "{}", feature.flag());
        assert_eq!(feature_named(feature.name()), Some(feature), "{}", feature.name());
        let qemu: String = feature.flag().replace('_', "-");
        assert_eq!(feature_named(&qemu), Some(feature), "{qemu}");
    }
    for (name, feature) in [
        ("sse4.1", Sse41),
        ("SSE4_2", Sse42),
        ("sse3", Sse3),
        ("pni", Sse3),
        ("tsc-deadline", TscDeadline),
        ("xd", Nx),
        ("lzcnt", Lzcnt),
        ("abm", Lzcnt),
        ("sha-ni", Sha),
        ("avx512-vpopcntdq", Avx512vpopcntdq),
        ("ibpb", SpecCtrl),
    ] {
        assert_eq!(feature_named(name), Some(feature), "{name}");
    }
    for name in ["", "-", "__", "sse5", "avx 2", "\u{0}"] {
        assert_eq!(feature_named(name), None, "{name:?}");
    }
}

// covers: cpu/model-file
#[test]
fn a_model_of_one_s_own_is_checked_before_it_runs() {
    let base = || OwnedModel::from(&HASWELL);
    let copy = base().build().unwrap();
    assert_eq!(
        (copy.name, copy.cpuid, copy.msrs),
        (HASWELL.name, HASWELL.cpuid, HASWELL.msrs),
        "a copy is the same"
    );
    assert_eq!(OwnedModel::from(&WESTMERE).build().unwrap().cpuid, WESTMERE.cpuid);
    assert_eq!(OwnedModel::from(&P6).build().unwrap().cpuid, P6.cpuid);

    let mut own = base();
    own.set_cpuid(leaf(0x1, [0x0003_06C4, 0x0010_0800, 0x7FFA_FBFF, 0xBFEB_FBFF]));
    own.set_cpuid(subleaf(0xD, 3, [0x40, 0x340, 0, 0]));
    own.set_msr(MsrRow::read_only(0x1234, "MSR_OWN", 7)).unwrap();
    own.set_msr(MsrRow::storage(IA32_PERF_CTL, "IA32_PERF_CTL", 1, 3))
        .unwrap();
    own.remove_msr(MSR_SMI_COUNT);
    own.microcode = 0x29;
    let own = own.build().unwrap();
    assert_eq!(own.cpuid(1, 0)[0], 0x0003_06C4);
    assert_eq!(
        own.cpuid(1, 0)[2],
        HASWELL.cpuid(1, 0)[2],
        "the policy holds for a part of one's own too"
    );
    assert_eq!(own.msr(0x1234).map(|row| row.reset), Some(7));
    assert_eq!(own.msr(IA32_PERF_CTL).map(|row| row.writable), Some(3));
    assert_eq!(own.msr(IA32_BIOS_SIGN_ID).map(|row| row.reset), Some(0x29 << 32));
    assert!(own.msr(MSR_SMI_COUNT).is_none());

    type Change = fn(&mut OwnedModel);
    let changes: [(Change, &str); 12] = [
        (
            |m| m.set_cpuid(leaf(0, [0, 0, 0, 0])),
            "CPUID leaf 0 must name a highest leaf",
        ),
        (
            |m| m.set_cpuid(leaf(0x30, [1, 0, 0, 0])),
            "CPUID leaf 30H is above the highest, DH",
        ),
        (
            |m| m.set_cpuid(leaf(0x8000_0020, [1, 0, 0, 0])),
            "CPUID leaf 80000020H is above the highest, 80000008H",
        ),
        (
            |m| m.set_cpuid(leaf(0x4000_0001, [1, 0, 0, 0])),
            "CPUID leaf 40000001H is neither a basic nor an extended one",
        ),
        (
            |m| m.set_cpuid(leaf(0x8000_0008, [0x3099, 0, 0, 0])),
            "153 physical and 48 linear address bits",
        ),
        (
            |m| m.set_cpuid(subleaf(0xD, 2, [u32::MAX, u32::MAX, 0, 0])),
            "a component beyond 64 KiB",
        ),
        (|m| m.tsc_khz = 0, "tsc_khz is 0"),
        (|m| m.apic_timer_khz = 0, "apic_timer_khz is 0"),
        (|m| m.apic_timer_khz = u32::MAX, "apic_timer_khz is 4294967295"),
        (|m| m.remove_msr(0x213), "IA32_MTRRCAP counts 10 variable ranges"),
        (|m| m.remove_msr(IA32_SMRR_PHYSMASK), "IA32_MTRRCAP[11] is 1"),
        (|m| m.remove_msr(0x423), "IA32_MCG_CAP counts 9 banks"),
    ];
    for (change, expected) in changes {
        let mut model = base();
        change(&mut model);
        let why = model.build().map(|_| expected).unwrap_err().to_string();
        assert!(why.contains(expected), "{why} / {expected}");
    }
    let bad = MsrRow::storage(IA32_PAT, "IA32_PAT", 2, !0).checked(Check::PatTypes);
    let mut model = base();
    model.set_msr(bad).unwrap();
    assert!(
        model
            .build()
            .unwrap_err()
            .to_string()
            .contains("would refuse its own value 2H")
    );
    for msr in [
        IA32_TIME_STAMP_COUNTER,
        IA32_APIC_BASE,
        IA32_EFER,
        IA32_GS_BASE,
        0x830,
        IA32_TSC_DEADLINE,
        IA32_DEBUGCTL,
        IA32_PERF_GLOBAL_CTRL,
        0x4C8,
        IA32_RTIT_CTL,
        IA32_PQR_ASSOC,
        IA32_LBR_DEPTH,
    ] {
        let why = base().set_msr(MsrRow::read_only(msr, "X", 0)).unwrap_err().to_string();
        assert!(why.contains("the machine itself holds it"), "{msr:X}H: {why}");
    }
}

// covers: pmu/caps
#[test]
fn what_a_model_counts_agrees_with_its_leaf_0ah() {
    use crate::pmu::{ARCHITECTURAL, EventSelect, capabilities};
    for model in MODELS {
        let row = model.silicon.iter().find(|row| row.leaf == 0xA).map(|row| row.regs);
        let caps = model.units.pmu.expect("every part counts");
        let Some([eax, ebx, _, edx]) = row else {
            assert!(["p6", "netburst"].contains(&model.name), "{}", model.name);
            assert_eq!((caps.version, caps.netburst.is_some()), (0, model.name == "netburst"));
            continue;
        };
        let name = model.name;
        assert_eq!(u32::from(caps.version), eax & 0xFF, "{name}");
        // Alder Lake's leaf shows what both kinds of cores have; it stands for the performance core, which has more.
        let more = if name == "alderlake" { (2, 1) } else { (0, 0) };
        assert_eq!(u32::from(caps.general), (eax >> 8 & 0xFF) + more.0, "{name}");
        assert_eq!(u32::from(caps.general_width), eax >> 16 & 0xFF, "{name}");
        assert_eq!(u32::from(caps.architectural), !ebx & ((1 << (eax >> 24)) - 1), "{name}");
        assert_eq!(u32::from(caps.fixed), (edx & 0x1F) + more.1, "{name}");
        assert_eq!(u32::from(caps.fixed_width), edx >> 5 & 0xFF, "{name}");
        // AnyThread: since version 3, and gone where EDX[15] says so.
        let any = caps.version >= 3 && edx >> 15 & 1 == 0;
        assert_eq!(caps.any_thread, any, "{name}");
        assert_eq!(caps.select >> 21 & 1 != 0, any, "{name}");
        for (bit, event) in ARCHITECTURAL.iter().enumerate() {
            let select = EventSelect::new().with_event(event.event).with_umask(event.umask);
            let found = caps.event(select);
            assert!(found.is_none_or(|row| row.count == event.count), "{name} {event:?}");
            assert!(
                found.is_some() || caps.architectural >> bit & 1 == 0,
                "{name} {event:?}"
            );
        }
        // The clock that reference cycles count is the bus clock, or the crystal.
        let ratio = f64::from(model.tsc_khz) / f64::from(model.apic_timer_khz);
        assert!((ratio - f64::from(caps.reference)).abs() < 0.01, "{name}: {ratio}");
        let value = caps.capabilities.expect("PDCM");
        assert!(model.part_features().pdcm(), "{name}");
        assert_eq!(
            value & (capabilities::LBR_FORMAT | capabilities::FREEZE_WHILE_SMM),
            capabilities::FREEZE_WHILE_SMM,
            "{name}"
        );
        let pebs = model
            .units
            .ds
            .and_then(|ds| ds.pebs)
            .expect("every one of them samples");
        assert_eq!(value >> 8 & 0xF, pebs.format as u64, "{name}");
        assert_eq!(value & capabilities::PEBS_BASELINE != 0, pebs.data_cfg != 0, "{name}");
        assert_eq!(value & capabilities::METRICS != 0, caps.fixed == 4, "{name}");
        assert_eq!(pebs.enable & 0xFF & !((1 << caps.general) - 1), 0, "{name}");
    }
}

// covers: pmu/cpuid
#[test]
fn counters_and_the_debug_store_are_shown_and_said_to_be_available() {
    for (name, leaf, misc_enable) in [
        ("netburst", None, Some(0xC1)),
        ("core2", Some([0x0728_0202, 0, 0, 0x503]), Some(0x4_0081)),
        ("westmere", Some([0x0730_0403, 0x4, 0, 0x603]), Some(0x4_0081)),
        ("skylake-server", Some([0x0730_0404, 0, 0, 0x603]), Some(0x4_0081)),
        ("icelake-server", Some([0x0830_0805, 0, 0xF, 0x8604]), Some(0x4_0081)),
        ("snowridge", Some([0x0730_0405, 0, 0x7, 0x8603]), Some(0x4_0081)),
        ("alderlake", Some([0x0730_0605, 0, 0x7, 0x8603]), Some(0x4_0081)),
    ] {
        let model = model(name);
        let enable = |model: &CpuModel| model.msr(IA32_MISC_ENABLE).map(|row| row.reset);
        assert_eq!(model.features().pdcm(), leaf.is_some(), "{name}");
        assert!(model.features().ds(), "{name}");
        assert_eq!(enable(model), misc_enable, "{name}");
        let Some(leaf) = leaf else { continue };
        assert_eq!(model.cpuid(0xA, 0), leaf, "{name}");
        // Switched off, they are not there.
        let without = model.with_toggles("-pdcm").unwrap();
        assert_eq!(without.cpuid(0xA, 0), [0; 4], "{name}");
        assert_eq!(enable(without), Some(0x4_0001), "{name}");
        let without = model.with_toggles("-ds,-dtes64,-ds_cpl").unwrap();
        assert_eq!(enable(without), Some(0x4_1881), "{name}");
    }
    assert!(
        !P6.features().ds() && !P6.features().pdcm(),
        "P6's two counters need no leaf"
    );
}

// covers: tsc/khz
#[test]
fn another_frequency_is_said_wherever_a_guest_looks() {
    // Beyond the highest leaf CPUID answers for another.
    let row = |model: &CpuModel, leaf| model.rows(leaf).first().map_or([0; 4], |row| row.regs);
    for model in MODELS {
        let name = model.name;
        assert!(
            core::ptr::eq(model.with_tsc_khz(model.tsc_khz).unwrap(), *model),
            "{name}"
        );
        for khz in [model.apic_timer_khz, 1_000_000, 2_750_500, 3_333_300, 10_000_000] {
            let other = model.with_tsc_khz(khz).unwrap();
            assert_eq!(
                (other.tsc_khz, other.apic_timer_khz),
                (khz, model.apic_timer_khz),
                "{name}"
            );
            assert_eq!(other.features(), model.features(), "{name}");
            let [denominator, numerator, crystal, _] = row(other, 0x15);
            let (before, ratio) = (row(model, 0x15), (denominator, numerator));
            assert_eq!(ratio == (0, 0), before[1] == 0, "{name}");
            if numerator != 0 {
                // As Linux computes it, in 32 bits of kHz.
                let product = (crystal / 1000).checked_mul(numerator).unwrap();
                assert_eq!(product / denominator, khz, "{name}");
                assert_eq!(
                    u64::from(crystal) * u64::from(numerator) / u64::from(denominator),
                    u64::from(khz) * 1000
                );
                assert_eq!(crystal, model.apic_timer_khz * 1000, "{name}: the crystal stays");
            }
            let [base, most, ..] = row(other, 0x16);
            assert_eq!(
                base,
                if row(model, 0x16)[0] == 0 {
                    0
                } else {
                    (khz + 500) / 1000
                },
                "{name}"
            );
            assert!(most >= base, "{name}");
            let bus = if numerator != 0 { 100_000 } else { model.apic_timer_khz };
            if let Some(row) = other.msr(MSR_PLATFORM_INFO) {
                let ratio = u32::try_from(row.reset >> 8 & 0xFF).unwrap();
                assert!(
                    (ratio * bus).abs_diff(khz) <= bus / 2 + 1,
                    "{name}: {ratio} times {bus}"
                );
                let others = model.msr(MSR_PLATFORM_INFO).unwrap().reset ^ row.reset;
                assert_eq!(others & !0xFF00, 0, "{name}");
            }
            if let (Some(pt), true) = (other.units.pt, numerator != 0) {
                assert_eq!(pt.crystal, (numerator, denominator), "{name}: CTC of trace packets");
            }
            if let Some(pmu) = other.units.pmu {
                let reference = f64::from(khz) / f64::from(pmu.reference);
                assert!(
                    reference / f64::from(model.apic_timer_khz) < 1.5,
                    "{name}: reference cycles"
                );
            }
        }
        for khz in [0, model.apic_timer_khz - 1, 10_000_001, u32::MAX] {
            let why = model.with_tsc_khz(khz).unwrap_err().to_string();
            assert!(why.contains(name) && why.contains("10000000"), "{why}");
        }
        let odd = model.with_tsc_khz(2_999_999);
        assert_eq!(odd.is_err(), row(model, 0x15)[1] != 0, "{name}");
        if let Err(why) = odd {
            assert!(why.to_string().ends_with("give a multiple of 100, as 3000000"), "{why}");
        }
    }
}

// covers: kvm/irqchip-kvm-clock
#[test]
fn another_apic_timer_is_what_leaf_15h_says() {
    for model in MODELS {
        let name = model.name;
        for tsc in [1_000_000, 2_293_200, 2_595_100, 3_699_900] {
            let model = model.with_tsc_khz(tsc).unwrap();
            let other = model.with_apic_timer_khz(1_000_000).unwrap();
            assert_eq!((other.tsc_khz, other.apic_timer_khz), (tsc, 1_000_000), "{name}");
            let at = |model: &CpuModel| model.rows(0x15).first().map_or([0; 4], |row| row.regs);
            let [denominator, numerator, crystal, _] = at(other);
            assert_eq!(numerator == 0, at(model)[1] == 0, "{name}");
            if numerator != 0 {
                assert_eq!(crystal, 1_000_000_000, "{name}");
                // As Linux computes it, in 32 bits of kHz.
                let khz = (crystal / 1000).checked_mul(numerator).unwrap() / denominator;
                assert!(khz.abs_diff(tsc) <= tsc / 20_000, "{name}: {khz} for {tsc}");
            }
            let why = model.with_apic_timer_khz(tsc + 1).unwrap_err().to_string();
            assert!(why.contains("is slower"), "{why}");
        }
    }
}

// covers: cpu/power-msrs
#[test]
fn power_and_idle_states_are_unmeasured_and_locked() {
    const GP: Result<u64, MsrFault> = Err(MsrFault::GeneralProtection);
    let row = |model: &CpuModel, msr| model.msr(msr).copied();
    for model in MODELS {
        let nehalem = !["p6", "netburst", "core2"].contains(&model.name);
        let sandy_bridge = nehalem && model.name != "westmere";
        for (msr, there, value) in [
            (MSR_PKG_C3_RESIDENCY, nehalem, 0),
            (MSR_PKG_C6_RESIDENCY, nehalem, 0),
            (MSR_CORE_C6_RESIDENCY, nehalem, 0),
            (MSR_PKG_C2_RESIDENCY, sandy_bridge, 0),
            (MSR_RAPL_POWER_UNIT, sandy_bridge, 0),
            (MSR_PKG_ENERGY_STATUS, sandy_bridge, 0),
            (MSR_PKG_PERF_STATUS, sandy_bridge, 0),
            // Bits 14:0, in units of 1 W.
            (MSR_PKG_POWER_INFO, sandy_bridge, 100),
        ] {
            let row = row(model, msr);
            assert_eq!(
                row.map(|row| row.reset),
                there.then_some(value),
                "{} {msr:X}H",
                model.name
            );
            if let Some(row) = row {
                assert_eq!(row.write(row.reset, 0), GP, "{} {msr:X}H is read-only", model.name);
            }
        }
        // Lock (bit 63, or 31): "all write attempts to this MSR are ignored until next RESET", those to the plane's policy, too.
        for (msr, value) in [
            (MSR_PKG_POWER_LIMIT, 1 << 63),
            (MSR_DRAM_POWER_LIMIT, 1 << 31),
            (MSR_PP0_POWER_LIMIT, 1 << 31),
            (MSR_PP1_POWER_LIMIT, 1 << 31),
            (MSR_PP0_POLICY, 0),
            (MSR_PP1_POLICY, 0),
        ] {
            let row = row(model, msr);
            assert_eq!(row.is_some(), sandy_bridge, "{} {msr:X}H", model.name);
            if let Some(row) = row {
                assert_eq!(row.reset, value, "{} {msr:X}H", model.name);
                assert_eq!(
                    row.write(row.reset, 0x8000),
                    Ok(value),
                    "{} {msr:X}H is locked",
                    model.name
                );
            }
        }
    }
}
