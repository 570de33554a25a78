//! IA32_DEBUGCTL, bit by bit on every model.

use super::*;
use x86::cpuid::Feature;
use x86::model::{CpuModel, MODELS, by_name};
use x86::watch::{BranchRecord, Far, Flow};

const GP: Result<(), MsrFault> = Err(MsrFault::GeneralProtection);

/// The register of a model as the part has it, all features shown.
fn part(model: &CpuModel) -> DebugCtlUnit {
    DebugCtlUnit::new(model.units.debugctl.unwrap(), model.part_features())
}

fn named(name: &str) -> DebugCtlUnit {
    part(by_name(name).unwrap())
}

fn event(vector: u8, flow: Far, debug: bool) -> EventRecord {
    EventRecord {
        branch: BranchRecord {
            flow: Flow::Far(flow).code(),
            ..BranchRecord::default()
        },
        vector,
        debug,
        error: None,
        address: None,
    }
}

// covers: debugctl/bits
#[test]
fn every_bit_of_every_model() {
    for (name, writable, ignored) in [
        ("p6", 0x7F, 0),
        // No DS-CPL on Northwood: BTS_OFF_OS and BTS_OFF_USR are reserved.
        ("netburst", 0x1F, 0),
        ("core2", 0x5FC3, 0),
        ("westmere", 0x7FC3, 0),
        ("sandybridge", 0x7FC3, 0),
        // These have RTM, or had it until a microcode update; the dumps show it where it is.
        ("haswell", 0x7FC3, 0),
        ("broadwell", 0xFFC3, 0),
        ("skylake-server", 0xFFC3, 0),
        ("icelake-server", 0xFFC3, 0),
        ("snowridge", 0x7FC3, 0),
        ("sapphirerapids", 0xFFC6, 0x1),
        ("alderlake", 0x7FC2, 0x1),
    ] {
        let model = by_name(name).unwrap();
        let rtm = model.part_features().rtm();
        assert_eq!(
            writable >> 15 & 1 != 0,
            rtm,
            "{name}: the table and the dump agree on RTM"
        );
        for bit in 0..64 {
            let mut unit = part(model);
            let value = 1 << bit;
            if writable & value != 0 {
                assert_eq!(unit.write_msr(IA32_DEBUGCTL, value), Ok(()), "{name} {bit}");
                assert_eq!(unit.read_msr(IA32_DEBUGCTL), Ok(value), "{name} {bit}");
            } else if ignored & value != 0 {
                assert_eq!(unit.write_msr(IA32_DEBUGCTL, value), Ok(()), "{name} {bit}");
                assert_eq!(unit.read_msr(IA32_DEBUGCTL), Ok(0), "{name} {bit}: dropped");
            } else {
                unit.write_msr(IA32_DEBUGCTL, writable).unwrap();
                assert_eq!(unit.write_msr(IA32_DEBUGCTL, value), GP, "{name} {bit}");
                assert_eq!(
                    unit.read_msr(IA32_DEBUGCTL),
                    Ok(writable),
                    "{name} {bit}: a fault changes nothing"
                );
            }
        }
    }
    assert_eq!(MODELS.len(), 12, "a new model needs its row");
}

// covers: debugctl/smm
#[test]
fn freeze_while_smm_is_there_where_the_capabilities_say_so() {
    use x86::pmu::capabilities::FREEZE_WHILE_SMM;
    for model in MODELS {
        let capabilities = model.units.pmu.and_then(|caps| caps.capabilities).unwrap_or(0);
        let expected = if capabilities & FREEZE_WHILE_SMM != 0 {
            Ok(())
        } else {
            GP
        };
        assert_eq!(
            part(model).write_msr(IA32_DEBUGCTL, 1 << 14),
            expected,
            "{}",
            model.name
        );
    }
}

/// LBR, BTF, TR and BTS fall, the rest stays, and RSM brings all back. Without the bit nothing changes.
// covers: debugctl/smm
#[test]
fn what_freezes_in_smm_comes_back() {
    for (before, inside) in [(0x5FC3, 0x5F00), (0x1FC3, 0x1FC3)] {
        let mut unit = named("haswell");
        unit.write_msr(IA32_DEBUGCTL, before).unwrap();
        unit.state_changed(Change::Smi { at: 0 });
        assert_eq!(unit.read_msr(IA32_DEBUGCTL), Ok(inside));
        let state = unit.state();
        let mut other = named("haswell");
        other.set_state(state);
        other.state_changed(Change::Rsm);
        assert_eq!(other.read_msr(IA32_DEBUGCTL), Ok(before));
    }
}

// covers: debugctl/bits
#[test]
fn other_registers_are_somebody_else_s() {
    let mut unit = named("westmere");
    for msr in [0x1D8, 0x1DA, 0x1C8, 0x14CE] {
        assert_eq!(unit.read_msr(msr), Err(MsrFault::Unclaimed));
        assert_eq!(unit.write_msr(msr, 0), Err(MsrFault::Unclaimed));
    }
}

// covers: debugctl/db
#[test]
fn a_debug_exception_clears_lbr_and_btf_and_nothing_else() {
    for (name, before, after) in [
        ("p6", 0x7F, 0x7C),
        ("netburst", 0x1F, 0x1C),
        ("core2", 0x1FC3, 0x1FC0),
        ("skylake-server", 0xBFC3, 0xBFC0),
        ("alderlake", 0x3FC2, 0x3FC0),
    ] {
        for (event, clears, why) in [
            (event(1, Far::Exception, true), true, "a breakpoint or a single step"),
            (event(1, Far::SoftwareInterrupt, true), true, "INT1"),
            (
                event(1, Far::SoftwareInterrupt, false),
                false,
                "INT 1 is no debug exception",
            ),
            (event(3, Far::SoftwareInterrupt, false), false, "#BP"),
            (event(14, Far::Exception, false), false, "#PF"),
            (event(2, Far::Interrupt, false), false, "NMI"),
        ] {
            let mut unit = named(name);
            unit.write_msr(IA32_DEBUGCTL, before).unwrap();
            unit.event(&event);
            let expected = if clears { after } else { before };
            assert_eq!(unit.read_msr(IA32_DEBUGCTL), Ok(expected), "{name}: {why}");
        }
    }
}

// covers: debugctl/freeze
#[test]
fn a_pmi_freezes_by_clearing_enables_or_by_setting_status() {
    const LBRS: u64 = 1 << 11;
    const PERFMON: u64 = 1 << 12;
    let frozen = |lbr_status, counters_status, counters_control| Frozen {
        lbr_status,
        counters_status,
        counters_control,
    };
    for (name, before, after, elsewhere) in [
        ("p6", 1, 1, frozen(false, false, false)),
        ("netburst", 1, 1, frozen(false, false, false)),
        ("core2", LBRS | 1, LBRS, frozen(false, false, false)),
        ("westmere", LBRS | 1, LBRS, frozen(false, false, false)),
        ("westmere", PERFMON | 1, PERFMON | 1, frozen(false, false, true)),
        (
            "broadwell",
            LBRS | PERFMON | 1,
            LBRS | PERFMON,
            frozen(false, false, true),
        ),
        ("westmere", 1, 1, frozen(false, false, false)),
        ("skylake-server", LBRS | 1, LBRS | 1, frozen(true, false, false)),
        ("skylake-server", PERFMON | 1, PERFMON | 1, frozen(false, true, false)),
        ("alderlake", LBRS | PERFMON, LBRS | PERFMON, frozen(true, true, false)),
    ] {
        let mut unit = named(name);
        unit.write_msr(IA32_DEBUGCTL, before).unwrap();
        assert_eq!(unit.freeze_on_pmi(), elsewhere, "{name} {before:#x}");
        assert_eq!(unit.read_msr(IA32_DEBUGCTL), Ok(after), "{name} {before:#x}");
    }
}

// covers: debugctl/tr
#[test]
fn tr_alone_moves_the_stack_on_the_core_microarchitecture_only() {
    for (name, tr, moves) in [
        ("p6", 0x40, false),
        ("netburst", 0x4, false),
        ("core2", 0x40, true),
        ("westmere", 0x40, false),
        ("skylake-server", 0x40, false),
    ] {
        let mut unit = named(name);
        unit.write_msr(IA32_DEBUGCTL, tr).unwrap();
        assert_eq!(unit.records_branches(), moves, "{name}");
        assert!(unit.control().tr() && !unit.control().bts(), "{name}");
        unit.write_msr(IA32_DEBUGCTL, tr | 1).unwrap();
        assert!(unit.records_branches(), "{name}: LBR");
    }
}

// covers: debugctl/features
#[test]
fn what_a_guest_is_not_shown_is_reserved() {
    let model = by_name("skylake-server").unwrap();
    let caps = model.units.debugctl.unwrap();
    let shown = model.part_features();
    for (without, bits) in [(Feature::Ds, 0x180), (Feature::DsCpl, 0x600), (Feature::Rtm, 0x8000)] {
        let mut unit = DebugCtlUnit::new(caps, shown.without(without));
        assert_eq!(unit.write_msr(IA32_DEBUGCTL, bits), GP, "{without:?}");
        assert_eq!(part(model).write_msr(IA32_DEBUGCTL, bits), Ok(()), "{without:?}");
    }
}

// covers: debugctl/state
#[test]
fn state_goes_out_and_comes_back_and_reset_clears_it() {
    let mut unit = named("skylake-server");
    unit.write_msr(IA32_DEBUGCTL, 0x1FC3).unwrap();
    let mut other = named("skylake-server");
    other.set_state(unit.state());
    assert_eq!(other.state(), unit.state());
    assert_eq!(other.read_msr(IA32_DEBUGCTL), Ok(0x1FC3));
    other.state_changed(Change::Init { at: 0 });
    assert_eq!(other.read_msr(IA32_DEBUGCTL), Ok(0x1FC3), "INIT leaves it");
    other.state_changed(Change::Reset);
    assert_eq!(other.read_msr(IA32_DEBUGCTL), Ok(0));
    // A state of another model's making cannot set what is reserved here.
    other.set_state(DebugCtlState {
        value: !0,
        frozen: None,
    });
    assert_eq!(other.read_msr(IA32_DEBUGCTL), Ok(0xFFC3));
}
