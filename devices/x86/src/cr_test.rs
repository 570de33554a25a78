use super::*;
use crate::cpuid::Feature;
use crate::model::WESTMERE;

const GP: GeneralProtection = GeneralProtection;

// covers: cpu/control-registers
#[test]
fn cr0_takes_what_the_manual_allows() {
    for (value, expected, why) in [
        (0x6000_0010, Ok(0x6000_0010), "the reset value"),
        (0x0000_0000, Ok(0x0000_0010), "ET reads 1"),
        (0x8005_0033, Ok(0x8005_0033), "what Linux runs with"),
        (0x1FFA_FFC0, Ok(0x0000_0010), "reserved bits of 31:0 ignore writes"),
        (0x8000_0000, Err(GP), "PG without PE"),
        (0x2000_0001, Err(GP), "NW without CD"),
        (0x1_0000_0011, Err(GP), "a bit above 31"),
    ] {
        assert_eq!(Cr0::accept(value).map(Cr0::into_bits), expected, "{value:X}H: {why}");
    }
}

// covers: cpu/control-registers
#[test]
fn cr0_paging_changes_follow_the_mode() {
    let off = Cr0::from_bits(0x11);
    let on = Cr0::from_bits(0x8000_0011);
    let pae = Cr4::new().with_pae(true);
    let pcid = pae.with_pcide(true);
    let lme = Efer::new().with_lme(true);
    let lma = lme.with_lma(true);
    for (from, to, cr4, efer, cs_l, expected, why) in [
        (off, on, Cr4::new(), Efer::new(), false, true, "32-bit paging"),
        (off, on, pae, lme, false, true, "into IA-32e mode"),
        (off, on, Cr4::new(), lme, false, false, "IA-32e mode needs PAE"),
        (off, on, pae, lme, true, false, "IA-32e mode from a segment with L"),
        (on, off, pae, lma, false, true, "out of compatibility mode"),
        (on, off, pae, lma, true, false, "not out of 64-bit mode"),
        (on, off, pcid, lma, false, false, "not with PCIDs"),
        (on, on, pcid, lma, true, true, "no change of paging"),
        (
            on.with_wp(true),
            on,
            pae.with_cet(true),
            lma,
            true,
            false,
            "WP with CET",
        ),
    ] {
        assert_eq!(from.may_become(to, cr4, efer, cs_l), expected, "{why}");
    }
}

// covers: cpu/control-registers
#[test]
fn cr3_reserved_bits_start_at_maxphyaddr() {
    for (bits, pcide, expected) in [
        (40, false, 0xFFFF_FF00_0000_0000),
        (40, true, 0x7FFF_FF00_0000_0000),
        (52, false, 0xFFF0_0000_0000_0000),
        (36, true, 0x7FFF_FFF0_0000_0000),
    ] {
        assert_eq!(Cr3::reserved(bits, pcide), expected, "{bits} bits, PCIDE {pcide}");
    }
    let cr3 = Cr3::from_bits(0x0000_0012_3456_7FE5);
    assert_eq!(
        (cr3.low(), cr3.base(), cr3.pae_base()),
        (0xFE5, 0x12_3456_7000, 0x3456_7FE0)
    );
    assert!(Cr3::from_bits(1 << 63).no_invalidate());
}

// covers: cpu/control-registers
#[test]
fn cr4_has_the_bits_of_the_model() {
    let westmere = WESTMERE.features();
    // SDM Vol. 3A Figure 2-7: VME to OSXMMEXCPT are 10:0, VMXE is 13, PCIDE 17.
    assert_eq!(Cr4::reserved(westmere), !0x2_27FF);
    for (bit, feature) in [
        (11, Feature::Umip),
        (12, Feature::La57),
        (13, Feature::Vmx),
        (14, Feature::Smx),
        (16, Feature::Fsgsbase),
        (18, Feature::Xsave),
        (20, Feature::Smep),
        (21, Feature::Smap),
        (22, Feature::Pku),
        (24, Feature::Pks),
    ] {
        let value = 1u64 << bit;
        assert_eq!(
            Cr4::accept(value, westmere.without(feature)),
            Err(GP),
            "bit {bit} without {}",
            feature.name()
        );
        assert_eq!(
            Cr4::accept(value, westmere.with(feature)).map(Cr4::into_bits),
            Ok(value),
            "{}",
            feature.name()
        );
    }
    for bit in [0, 1] {
        assert_eq!(
            Cr4::accept(1 << bit, westmere.without(Feature::Vme)),
            Err(GP),
            "VME and PVI"
        );
    }
    for bit in [15, 26, 32, 63] {
        assert_eq!(Cr4::accept(1 << bit, Features::all()), Err(GP), "bit {bit} is nobody's");
    }
}

// covers: cpu/control-registers
#[test]
fn cr4_changes_follow_the_mode() {
    let pae = Cr4::new().with_pae(true);
    let long = Efer::new().with_lme(true).with_lma(true);
    let cr0 = Cr0::from_bits(0x8000_0011);
    for (from, to, cr3, efer, expected, why) in [
        (pae, Cr4::new(), 0, Efer::new(), true, "PAE off outside IA-32e mode"),
        (pae, Cr4::new(), 0, long, false, "PAE stays on in IA-32e mode"),
        (pae, pae.with_pcide(true), 0x1000, long, true, "PCIDs from PCID 0"),
        (
            pae,
            pae.with_pcide(true),
            0x1001,
            long,
            false,
            "PCIDs from another PCID",
        ),
        (
            pae,
            pae.with_pcide(true),
            0x1000,
            Efer::new(),
            false,
            "PCIDs outside IA-32e mode",
        ),
        (
            pae.with_pcide(true),
            pae.with_pcide(true),
            0x1001,
            long,
            true,
            "PCIDs are on already",
        ),
        (
            pae,
            pae.with_la57(true),
            0,
            long,
            false,
            "LA57 changes outside IA-32e mode only",
        ),
        (pae, pae.with_cet(true), 0, long, false, "CET needs CR0.WP"),
    ] {
        assert_eq!(from.may_become(to, cr0, Cr3::from_bits(cr3), efer), expected, "{why}");
    }
}

// covers: cpu/control-registers
#[test]
fn cr4_writes_flush_what_the_manual_lists() {
    let base = Cr4::new().with_pae(true).with_pge(true);
    for (from, to, expected, why) in [
        (base, base, false, "nothing changes"),
        (base, base.with_pge(false), true, "PGE changes"),
        (base, base.with_pae(false), true, "PAE changes"),
        (base, base.with_pse(true), true, "PSE changes"),
        (base, base.with_pcide(true), false, "PCIDE set"),
        (base.with_pcide(true), base, true, "PCIDE cleared"),
        (base, base.with_smep(true), true, "SMEP set"),
        (base.with_smep(true), base, false, "SMEP cleared"),
        (base, base.with_tsd(true), false, "TSD has nothing to do with paging"),
    ] {
        assert_eq!(from.flushes_all(to), expected, "{why}");
    }
}

// covers: cpu/control-registers
#[test]
fn efer_takes_what_the_manual_allows() {
    let features = WESTMERE.features();
    let on = Cr0::from_bits(0x8000_0011);
    let off = Cr0::from_bits(0x11);
    for (current, value, features, cr0, expected, why) in [
        (0x000, 0x101, features, off, Ok(0x101), "SCE and LME"),
        (0x500, 0xD01, features, on, Ok(0xD01), "what Linux runs with"),
        (0x500, 0x901, features, on, Ok(0xD01), "LMA ignores writes of 0"),
        (0x000, 0x400, features, off, Ok(0x000), "LMA ignores writes of 1"),
        (0x500, 0x000, features, on, Err(GP), "LME cleared with paging on"),
        (0x000, 0x100, features, on, Err(GP), "LME set with paging on"),
        (0x000, 0x002, features, off, Err(GP), "bit 1 is reserved"),
        (0x000, 0x4000, features, off, Err(GP), "FFXSR is another vendor's"),
        (
            0x000,
            0x800,
            features.without(Feature::Nx),
            off,
            Err(GP),
            "NXE without NX",
        ),
        (
            0x000,
            0x001,
            features.without(Feature::Syscall),
            off,
            Err(GP),
            "SCE without SYSCALL",
        ),
    ] {
        let result = Efer::from_bits(current)
            .write(value, features, cr0)
            .map(Efer::into_bits);
        assert_eq!(result, expected, "{value:X}H: {why}");
    }
}
