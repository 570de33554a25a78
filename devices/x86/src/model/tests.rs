//! What the tables must say, checked against the manual's encodings and a real part's dump.

extern crate std;

use super::*;
use crate::cpuid::Feature;
use crate::msr::*;
use std::string::String;
use std::vec::Vec;

fn hex(word: &str) -> u32 {
    u32::from_str_radix(word, 16).unwrap()
}

// covers: 2/cpu-model-cpuid
#[test]
fn westmere_is_the_dumped_part_but_for_the_listed_differences() {
    let dump = include_str!("../../../../resources/cpuid/xeon-x5650.txt");
    let mut leaves = 0;
    for line in dump.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<u32> = line.split_whitespace().map(hex).collect();
        let (leaf, subleaf) = (words[0], words[1]);
        let mut expected = [words[2], words[3], words[4], words[5]];
        for d in WESTMERE
            .differences
            .iter()
            .filter(|d| (d.leaf, d.subleaf) == (leaf, subleaf))
        {
            assert!(!d.reason.is_empty());
            let register = &mut expected[d.register as usize];
            *register = *register & !d.clear | d.set;
        }
        assert_eq!(WESTMERE.cpuid(leaf, subleaf), expected, "leaf {leaf:X}H.{subleaf}");
        leaves += 1;
    }
    assert_eq!(leaves, 25);
}

// covers: 2/cpu-model-cpuid
#[test]
fn westmere_shows_what_qemu_shows_and_seven_features_more() {
    let rows: Vec<CpuidRow> = include_str!("../../../../resources/cpuid/qemu-7.2-tcg-westmere.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let words: Vec<u32> = line.split_whitespace().map(hex).collect();
            CpuidRow {
                leaf: words[0],
                subleaf: Some(words[1]),
                regs: [words[2], words[3], words[4], words[5]],
            }
        })
        .collect();
    let (qemu, ours) = (Features::of(&rows), WESTMERE.features());
    // The real part has them, but for x2APIC, which the local APIC unit adds. Its translator or its model lacks them.
    let more = [
        Feature::Ss,
        Feature::Page1gb,
        Feature::Rdtscp,
        Feature::Pcid,
        Feature::X2apic,
        Feature::EnergyBias,
        Feature::InvariantTsc,
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

// covers: 2/cpu-model-cpuid
#[test]
fn signature_decodes_to_family_6_model_2ch_stepping_2() {
    for model in MODELS {
        let signature = model.cpuid(1, 0)[0];
        let (stepping, low, family, high) = (
            signature & 0xF,
            signature >> 4 & 0xF,
            signature >> 8 & 0xF,
            signature >> 16 & 0xF,
        );
        let expected = match model.name {
            "westmere" => (0x6, 0x2C, 2),
            other => panic!("a model without a signature in this table: {other}"),
        };
        assert_eq!((family, high << 4 | low, stepping), expected);
    }
}

// covers: 2/cpu-model-cpuid
#[test]
fn vendor_and_brand_strings_decode() {
    let text = |words: &[u32]| -> String {
        let bytes: Vec<u8> = words
            .iter()
            .flat_map(|w| w.to_le_bytes())
            .take_while(|&b| b != 0)
            .collect();
        String::from_utf8(bytes).unwrap()
    };
    let [_, b, c, d] = WESTMERE.cpuid(0, 0);
    assert_eq!(text(&[b, d, c]), "GenuineIntel");
    let brand: Vec<u32> = (0x8000_0002..=0x8000_0004)
        .flat_map(|leaf| WESTMERE.cpuid(leaf, 0))
        .collect();
    assert_eq!(text(&brand), "Intel(R) Xeon(R) CPU           X5650  @ 2.67GHz");
    let [_, b, c, d] = WESTMERE.cpuid(0x4000_0000, 0);
    assert_eq!(text(&[b, c, d]), "minivmm     ");
}

// covers: 2/cpu-model-cpuid
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

// covers: 2/cpu-model-cpuid
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
        (0xA, 0, [0; 4], "no performance monitoring: version 0"),
        (0x1, 7, WESTMERE.cpuid(1, 0), "leaf 1 ignores ECX"),
    ] {
        assert_eq!(WESTMERE.cpuid(leaf, subleaf), expected, "{leaf:X}H.{subleaf:X}H: {why}");
    }
}

// covers: 2/cpu-model-cpuid
#[test]
fn westmere_shows_x86_64_v2_and_hides_what_is_not_modelled() {
    use Feature::*;
    let features = WESTMERE.features();
    // x86-64 psABI "Micro-architecture levels": the baseline and v2.
    let v2 = [
        Cmov, Cx8, Fpu, Fxsr, Mmx, Syscall, Sse, Sse2, Cmpxchg16b, LahfSahf, Popcnt, Sse3, Sse41, Sse42, Ssse3,
    ];
    let more = [
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
    ];
    for &feature in Feature::ALL {
        let expected = v2.contains(&feature) || more.contains(&feature);
        assert_eq!(features.has(feature), expected, "{}", feature.name());
    }
    assert!(features.pcid() && !features.xsave() && !features.fsgsbase());
}

#[test]
fn widths_are_40_and_48_bits() {
    assert_eq!((WESTMERE.physical_bits(), WESTMERE.linear_bits()), (40, 48));
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

// covers: 2/cpu-model-msrs
#[test]
fn msr_rows_carry_the_manual_names() {
    for model in MODELS {
        for row in model.msrs {
            if let Some((_, name)) = NAMES.iter().find(|(number, _)| *number == row.msr) {
                assert_eq!(row.name, *name, "{:X}H", row.msr);
            }
        }
    }
}

// covers: 2/cpu-model-msrs
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
        (0x345, "IA32_PERF_CAPABILITIES: PDCM is 0"),
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

// covers: 2/cpu-model-msrs
#[test]
fn capabilities_agree_with_the_registers_they_count() {
    for model in MODELS {
        let value = |msr: u32| model.msr(msr).map_or(0, |row| row.reset);
        let variable_ranges = u32::try_from(value(IA32_MTRRCAP) & 0xFF).unwrap();
        let pairs = (0x200..0x250).filter(|&msr| model.msr(msr).is_some()).count();
        assert_eq!(pairs, 2 * variable_ranges as usize, "{}", model.name);
        let banks = (value(IA32_MCG_CAP) & 0xFF) as usize;
        assert_eq!(
            (0x400..0x480).filter(|&msr| model.msr(msr).is_some()).count(),
            4 * banks,
            "{}",
            model.name
        );
        assert_eq!(
            value(IA32_BIOS_SIGN_ID) >> 32,
            u64::from(model.microcode),
            "{}",
            model.name
        );
        let ratio = u32::try_from(value(MSR_PLATFORM_INFO) >> 8 & 0xFF).unwrap();
        assert_eq!(model.tsc_khz, ratio * model.apic_timer_khz, "{}", model.name);
        assert_eq!(ratio, 20);
    }
}

// covers: 2/cpu-model-msrs
#[test]
fn writes_follow_the_manual() {
    const GP: Result<u64, MsrFault> = Err(MsrFault::GeneralProtection);
    for (msr, value, expected, why) in [
        (IA32_MTRRCAP, 0x508, GP, "read-only, even with its own value"),
        (IA32_FEATURE_CONTROL, 0x5, GP, "locked"),
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
        (IA32_MISC_ENABLE, 0x1800, Ok(0x1800), "fast strings off"),
        (IA32_MISC_ENABLE, 0x40_1801, GP, "limiting CPUID is not modelled"),
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

// covers: 2/cpu-model-msrs
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
