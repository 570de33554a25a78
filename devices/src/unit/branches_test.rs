//! The units that watch branches, joined.

use super::super::branch_test::{Random, Still, branch, event, far};
use super::*;
use x86::cpuid::Feature;
use x86::model::{MODELS, by_name};
use x86::seam::{Far, Flow};

const NOBODY: Outside = Outside {
    lbr_frozen: false,
    tracing: false,
};

fn units(name: &str) -> Branches {
    let model = by_name(name).unwrap();
    Branches::new(model, model.part_features())
}

// covers: 4/debugctl-routing
#[test]
fn every_register_has_one_owner() {
    for model in MODELS {
        let mut units = units(model.name);
        let caps = model.units;
        for msr in 0..0x2000 {
            let owned = caps.debugctl.is_some() && msr == 0x1D9
                || caps.lbr.is_some_and(|lbr| lbr.owns(msr))
                || model.part_features().ds() && msr == 0x600;
            assert_eq!(
                units.read_msr(msr, NOBODY) != Err(MsrFault::Unclaimed),
                owned,
                "{} {msr:#x}",
                model.name
            );
            assert_eq!(
                units.write_msr(msr, 0, NOBODY) != Err(MsrFault::Unclaimed),
                owned,
                "{} {msr:#x}",
                model.name
            );
        }
    }
}

// covers: 4/debugctl-routing
#[test]
fn what_is_not_shown_is_not_there() {
    let model = by_name("sapphirerapids").unwrap();
    let shown = model.part_features();
    let units = Branches::new(model, shown.without(Feature::ArchLbr).without(Feature::Ds));
    for msr in [0x14CE, 0x14CF, 0x1200, 0x1500, 0x1600, 0x1DD, 0x600] {
        assert_eq!(units.read_msr(msr, NOBODY), Err(MsrFault::Unclaimed), "{msr:#x}");
    }
    assert!(units.bts.is_none());
    assert_eq!(units.last_branch(0), Entry::default());
}

// covers: 4/debugctl-btf
#[test]
fn btf_asks_for_steps_on_branches_until_a_debug_exception() {
    for (name, btf) in [("p6", 2), ("netburst", 2), ("westmere", 2), ("alderlake", 2)] {
        let mut units = units(name);
        let mut cpu = Still::default();
        assert_eq!(units.appetite(NOBODY, &mut cpu), Appetite::NOTHING, "{name}");
        units.write_msr(0x1D9, btf, NOBODY).unwrap();
        let appetite = units.appetite(NOBODY, &mut cpu);
        assert!(appetite.step_on_branches && !appetite.branches, "{name}");
        let step = event(1, far(Far::Exception, 0x10, 0x40, 0, 0));
        let _ = units.event(&step, NOBODY, &mut cpu);
        assert_eq!(units.appetite(NOBODY, &mut cpu), Appetite::NOTHING, "{name}");
    }
}

// covers: 4/debugctl-db
#[test]
fn a_debug_exception_stops_the_stack_and_not_the_store() {
    // TR, BTS and LBR; on core2 TR alone keeps the stack moving, but a debug exception is recorded nowhere but in the store.
    for (name, control, after) in [("westmere", 0xC1, 0xC0), ("core2", 0xC1, 0xC0)] {
        let mut units = units(name);
        let mut cpu = Still::with_buffer();
        units.write_msr(0x1D9, control, NOBODY).unwrap();
        units.write_msr(0x600, Still::AREA, NOBODY).unwrap();
        let appetite = units.appetite(NOBODY, &mut cpu);
        assert!(appetite.branches && appetite.branch_room == 4, "{name}: {appetite:?}");
        let _ = units.branches(&[branch(Flow::Jump, 0x10, 0x20, 0)], NOBODY, &mut cpu);
        let debug = event(1, far(Far::Exception, 0x30, 0x40, 0, 0));
        let _ = units.event(&debug, NOBODY, &mut cpu);
        assert_eq!(units.read_msr(0x1D9, NOBODY), Ok(after), "{name}");
        assert_eq!(units.read_msr(0x1C9, NOBODY), Ok(1), "{name}: one record in the stack");
        assert_eq!(cpu.stored(), [[0x10, 0x20], [0x30, 0x40]], "{name}: two in the store");
        let _ = units.branches(&[branch(Flow::Jump, 0x50, 0x60, 0)], NOBODY, &mut cpu);
        let moved = if name == "core2" { 2 } else { 1 };
        assert_eq!(units.read_msr(0x1C9, NOBODY), Ok(moved), "{name}: TR alone");
        assert_eq!(cpu.stored().len(), 3, "{name}");
    }
}

// covers: 4/debugctl-tr
#[test]
fn tr_without_bts_writes_no_memory() {
    for name in ["netburst", "core2", "skylake-server"] {
        let mut units = units(name);
        let mut cpu = Still::with_buffer();
        let tr = if name == "netburst" { 4 } else { 0x40 };
        units.write_msr(0x1D9, tr, NOBODY).unwrap();
        units.write_msr(0x600, Still::AREA, NOBODY).unwrap();
        let _ = units.appetite(NOBODY, &mut cpu);
        let effects = units.branches(&[branch(Flow::Jump, 0x10, 0x20, 0)], NOBODY, &mut cpu);
        assert_eq!((effects, cpu.stored().len()), (Effects::NONE, 0), "{name}");
    }
}

// covers: 4/debugctl-freeze
#[test]
fn a_pmi_freezes_the_stack() {
    let jump = [branch(Flow::Jump, 0x10, 0x20, 0)];
    for (name, control, legacy) in [("westmere", 0x801, true), ("skylake-server", 0x801, false)] {
        let mut units = units(name);
        let mut cpu = Still::default();
        units.write_msr(0x1D9, control, NOBODY).unwrap();
        let _ = units.appetite(NOBODY, &mut cpu);
        let _ = units.branches(&jump, NOBODY, &mut cpu);
        let frozen = units.freeze_on_pmi();
        assert_eq!(frozen.lbr_status, !legacy, "{name}");
        let outside = Outside {
            lbr_frozen: frozen.lbr_status,
            ..NOBODY
        };
        assert_eq!(units.appetite(outside, &mut cpu), Appetite::NOTHING, "{name}");
        let _ = units.branches(&jump, outside, &mut cpu);
        assert_eq!(units.read_msr(0x1C9, outside), Ok(1), "{name}: what was recorded stays");
        // The streamlined freeze ends with the status bit.
        assert_eq!(units.appetite(NOBODY, &mut cpu).branches, !legacy, "{name}");
    }
}

// covers: 4/lbr-pt-exclusion
#[test]
fn intel_pt_pauses_the_store_too_where_they_exclude_each_other() {
    let tracing = Outside {
        tracing: true,
        ..NOBODY
    };
    for (name, stored) in [("broadwell", 0), ("skylake-server", 1)] {
        let mut units = units(name);
        let mut cpu = Still::with_buffer();
        units.write_msr(0x1D9, 0xC0, NOBODY).unwrap();
        units.write_msr(0x600, Still::AREA, NOBODY).unwrap();
        assert_eq!(units.appetite(tracing, &mut cpu).branches, stored == 1, "{name}");
        let _ = units.branches(&[branch(Flow::Jump, 0x10, 0x20, 0)], tracing, &mut cpu);
        assert_eq!(cpu.stored().len(), stored, "{name}");
    }
}

// covers: 4/lbr-xsaves
#[test]
fn component_15_is_there_where_architectural_records_are() {
    let mut area = [0; image::SIZE];
    for model in MODELS {
        let mut units = units(model.name);
        let there = model.part_features().arch_lbr();
        assert_eq!(
            units.save_component(15, &mut area),
            there.then_some(false),
            "{}",
            model.name
        );
        assert_eq!(units.save_component(8, &mut area), None);
        assert_eq!(units.restore_component(15, None).is_ok(), there, "{}", model.name);
        assert_eq!(units.restore_component(8, None), Err(MsrFault::Unclaimed));
        if there {
            units.write_msr(0x14CE, 7, NOBODY).unwrap();
            assert_eq!(units.save_component(15, &mut area), Some(true), "in use");
            assert_eq!(units.restore_component(15, Some(&area)), Ok(()));
            assert_eq!(units.read_msr(0x14CE, NOBODY), Ok(7));
        }
    }
}

// covers: 4/lbr-state
#[test]
fn the_whole_state_of_every_model_goes_out_and_comes_back() {
    let mut random = Random(0x5747);
    for model in MODELS {
        let mut one = units(model.name);
        let mut cpu = Still::with_buffer();
        let all = one.debugctl.as_ref().map_or(0, |_| 0xC1);
        // As much as the part takes.
        for bit in 0..16 {
            let value = one.read_msr(0x1D9, NOBODY).unwrap() | 1 << bit & all;
            let _ = one.write_msr(0x1D9, value, NOBODY);
        }
        let _ = one.write_msr(0x14CE, 0x7F_0007, NOBODY);
        let _ = one.write_msr(0x600, Still::AREA, NOBODY);
        let mut step = 0;
        for _ in 0..10 {
            let mut two = units(model.name);
            two.set_state(one.state());
            assert_eq!(two.state(), one.state(), "{}", model.name);
            let batch = random.near(40, 0, &mut step);
            let mut same = cpu.clone();
            let _ = one.appetite(NOBODY, &mut cpu);
            let _ = two.appetite(NOBODY, &mut same);
            assert_eq!(
                one.branches(&batch, NOBODY, &mut cpu),
                two.branches(&batch, NOBODY, &mut same)
            );
            assert_eq!((one.state(), &cpu), (two.state(), &same), "{}", model.name);
        }
        assert_ne!(one.last_branch(0), Entry::default(), "{}", model.name);
        one.state_changed(Change::Reset, &mut cpu);
        let mut fresh = units(model.name);
        fresh.state_changed(Change::Reset, &mut cpu);
        assert_eq!(one.state(), fresh.state(), "{}", model.name);
    }
}
