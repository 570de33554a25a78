//! The units that watch branches, among the others: who stops whom.

use super::Units;
use super::branch_ring::Entry;
use super::branch_test::{Random, Still, branch, event, far};
use super::debugctl::DebugCtlUnit;
use super::ds::area::DsArea;
use super::ds::bts::Bts;
use super::lbr::Lbr;
use x86::ds::DsLayout;
use x86::lbr::LbrLayout;
use x86::model::{MODELS, by_name};
use x86::msr::MsrFault;
use x86::watch::{Change, Effects, Far, Flow, Interest, Watch};

/// The units of a model with the branch units as the part has them, whatever of it is shown.
fn units(name: &str) -> Units {
    let model = by_name(name).unwrap();
    let (features, bits, caps) = (model.part_features(), model.linear_bits(), model.units);
    let legacy = caps.lbr.filter(|lbr| lbr.layout != LbrLayout::Architectural);
    let bts = caps.ds.filter(|ds| ds.bts);
    let mut units = Units::new(model);
    units.debugctl = caps.debugctl.map(|caps| DebugCtlUnit::new(caps, features));
    units.lbr = legacy.map(|caps| Lbr::new(caps, features, bits));
    units.ds_area = DsArea::new(features, bits);
    units.bts = bts.map(|ds| Bts::new(DsLayout::of(features), ds.bts_predicted, bits));
    units
}

/// The units with branch trace store into the processor's page.
fn storing(name: &str, debugctl: u64) -> (Units, Still) {
    let mut units = units(name);
    let mut cpu = Still::with_buffer();
    units.write_msr(0x600, Still::AREA, &mut cpu).unwrap();
    units.write_msr(0x1D9, debugctl, &mut cpu).unwrap();
    (units, cpu)
}

fn quiet(interest: Interest) -> bool {
    !interest.branches.any() && !interest.step_on_branches && interest.branch_room == u32::MAX
}

// covers: debugctl/btf
#[test]
fn btf_asks_for_steps_on_branches_until_a_debug_exception() {
    for name in ["p6", "netburst", "westmere", "alderlake"] {
        let mut units = units(name);
        let mut cpu = Still::default();
        assert!(quiet(units.interest(&mut cpu)), "{name}");
        units.write_msr(0x1D9, 2, &mut cpu).unwrap();
        let interest = units.interest(&mut cpu);
        assert!(
            interest.step_on_branches && !interest.branches.any() && interest.transfers,
            "{name}"
        );
        let step = event(1, far(Far::Exception, 0x10, 0x40, 0, 0));
        let _ = units.event(&step, &mut cpu);
        assert!(quiet(units.interest(&mut cpu)), "{name}");
        assert_eq!(units.read_msr(0x1D9, &mut cpu), Ok(0), "{name}");
    }
}

// covers: debugctl/db
#[test]
fn a_debug_exception_stops_the_stack_and_not_the_store() {
    // LBR, TR and BTS. On core2 TR alone keeps the stack moving, but a debug exception is in the store only.
    for (name, control, after) in [("westmere", 0xC1, 0xC0), ("core2", 0xC1, 0xC0)] {
        let (mut units, mut cpu) = storing(name, control);
        let interest = units.interest(&mut cpu);
        assert!(
            interest.branches.any() && interest.branch_room == 4,
            "{name}: {interest:?}"
        );
        let _ = units.branches(&[branch(Flow::Jump, 0x10, 0x20, 0)], &mut cpu);
        let debug = event(1, far(Far::Exception, 0x30, 0x40, 0, 0));
        let _ = units.event(&debug, &mut cpu);
        assert_eq!(units.read_msr(0x1D9, &mut cpu), Ok(after), "{name}");
        assert_eq!(
            units.read_msr(0x1C9, &mut cpu),
            Ok(1),
            "{name}: one record in the stack"
        );
        assert_eq!(cpu.stored(), [[0x10, 0x20], [0x30, 0x40]], "{name}: two in the store");
        let _ = units.branches(&[branch(Flow::Jump, 0x50, 0x60, 0)], &mut cpu);
        let moved = if name == "core2" { 2 } else { 1 };
        assert_eq!(units.read_msr(0x1C9, &mut cpu), Ok(moved), "{name}: TR alone");
        assert_eq!(cpu.stored().len(), 3, "{name}");
    }
}

// covers: debugctl/tr
#[test]
fn tr_without_bts_writes_no_memory() {
    for (name, tr) in [("netburst", 0x4), ("core2", 0x40), ("skylake-server", 0x40)] {
        let (mut units, mut cpu) = storing(name, tr);
        assert_eq!(units.interest(&mut cpu).branch_room, u32::MAX, "{name}");
        let effects = units.branches(&[branch(Flow::Jump, 0x10, 0x20, 0)], &mut cpu);
        assert_eq!((effects, cpu.stored().len()), (Effects::NONE, 0), "{name}");
    }
}

// covers: debugctl/freeze
#[test]
fn the_interrupt_of_a_full_buffer_freezes_the_stack() {
    // LBR, TR, BTS, BTINT, FREEZE_LBRS_ON_PMI: four records to the threshold, and the fourth is in the stack as well.
    let jump = branch(Flow::Jump, 0x10, 0x20, 0);
    for (name, legacy) in [("westmere", true), ("skylake-server", false)] {
        let (mut units, mut cpu) = storing(name, 0x9C1);
        for i in 1..=4 {
            let _ = units.interest(&mut cpu);
            assert_eq!(units.branches(&[jump], &mut cpu).pmi, i == 4, "{name}");
        }
        assert_eq!(units.read_msr(0x1C9, &mut cpu), Ok(4), "{name}");
        let left = units.read_msr(0x1D9, &mut cpu).unwrap();
        assert_eq!(
            left & 1 == 0,
            legacy,
            "{name}: LBR is cleared by the legacy freeze alone"
        );
        // The streamlined freeze is a status bit of the counters; without counters shown there is none.
        if legacy || units.pmu.is_some() {
            let _ = units.branches(&[jump], &mut cpu);
            assert_eq!(units.read_msr(0x1C9, &mut cpu), Ok(4), "{name}: frozen");
        }
    }
}

// covers: lbr/pt-exclusion
#[test]
fn intel_pt_pauses_the_stack_and_the_store_where_they_exclude_each_other() {
    for (name, stored) in [("broadwell", 0), ("skylake-server", 1)] {
        // LBR, TR, BTS, and a record; then TraceEn with BranchEn, ToPA and both rings, into nowhere.
        let (mut units, mut cpu) = storing(name, 0xC1);
        let _ = units.interest(&mut cpu);
        let _ = units.branches(&[branch(Flow::Jump, 0x50, 0x60, 0)], &mut cpu);
        assert_eq!(units.read_msr(0x1C9, &mut cpu), Ok(1), "{name}");
        units.write_msr(0x570, 0x210C, &mut cpu).unwrap();
        units.write_msr(0x570, 0x210D, &mut cpu).unwrap();
        assert!(units.pt.as_ref().unwrap().trace_en(), "{name}");
        let _ = units.interest(&mut cpu);
        let _ = units.branches(&[branch(Flow::Jump, 0x10, 0x20, 0)], &mut cpu);
        assert_eq!(
            units.read_msr(0x1C9, &mut cpu),
            Ok(2 * stored),
            "{name}: or 0 while excluded"
        );
        assert_eq!(cpu.stored().len() as u64, 1 + stored, "{name}");
        // Tracing off, the stack is reset where it was excluded (SDM Vol. 3C 33.3.1.2), and both go on.
        units.write_msr(0x570, 0, &mut cpu).unwrap();
        let records = |units: &mut Units, cpu: &mut Still| {
            let from = (0x680..0x690).map(|msr| units.read_msr(msr, cpu).unwrap() & 0xFFFF);
            from.filter(|from| *from != 0).collect::<Vec<_>>()
        };
        let left = if stored == 0 { vec![] } else { vec![0x50, 0x10] };
        assert_eq!(records(&mut units, &mut cpu), left, "{name}");
        let _ = units.interest(&mut cpu);
        let _ = units.branches(&[branch(Flow::Jump, 0x30, 0x40, 0)], &mut cpu);
        assert_eq!(units.read_msr(0x1C9, &mut cpu), Ok(2 * stored + 1), "{name}");
        assert_eq!(records(&mut units, &mut cpu).len() as u64, 2 * stored + 1, "{name}");
        assert_eq!(cpu.stored().len() as u64, 2 + stored, "{name}");
    }
}

// covers: lbr/xsaves
#[test]
fn component_15_is_there_where_architectural_records_are() {
    let mut area = [0; x86::lbr::image::SIZE];
    for model in MODELS {
        let mut units = Units::new(model);
        let mut cpu = Still::default();
        let there = model.features().arch_lbr();
        assert_eq!(units.arch_lbr.is_some(), there, "{}", model.name);
        assert!(!units.save_component(15, &mut area, 4, &mut cpu), "{}", model.name);
        if there {
            units.write_msr(0x14CE, 7, &mut cpu).unwrap();
            assert!(units.save_component(15, &mut area, 4, &mut cpu));
            assert_eq!(units.read_msr(0x14CE, &mut cpu), Ok(7), "XSAVES leaves recording on");
            units.write_msr(0x14CE, 0, &mut cpu).unwrap();
            assert_eq!(units.load_component(15, Some(&area), 4, &mut cpu), Ok(()));
            assert_eq!(units.read_msr(0x14CE, &mut cpu), Ok(7));
            area[1] = 0xFF;
            let refused = units.load_component(15, Some(&area), 4, &mut cpu);
            assert_eq!(refused, Err(MsrFault::GeneralProtection));
            area[1] = 0;
        } else {
            assert_eq!(
                units.read_msr(0x14CE, &mut cpu),
                Err(MsrFault::Unclaimed),
                "{}",
                model.name
            );
        }
    }
}

// covers: lbr/state
#[test]
fn the_whole_state_of_every_model_goes_out_and_comes_back() {
    let mut random = Random(0x5747);
    for model in MODELS {
        let mut one = units(model.name);
        let mut cpu = Still::with_buffer();
        // As much of LBR, TR and BTS as the part takes.
        for bit in [0, 2, 3, 6, 7] {
            let value = one.read_msr(0x1D9, &mut cpu).unwrap() | 1 << bit;
            let _ = one.write_msr(0x1D9, value, &mut cpu);
        }
        let _ = one.write_msr(0x14CE, 0x7F_0007, &mut cpu);
        let _ = one.write_msr(0x600, Still::AREA, &mut cpu);
        let mut step = 0;
        for _ in 0..10 {
            let mut two = units(model.name);
            two.set_state(&one.state());
            assert_eq!(two.state(), one.state(), "{}", model.name);
            let batch = random.near(40, 0, &mut step);
            let mut same = cpu.clone();
            let _ = one.interest(&mut cpu);
            let _ = two.interest(&mut same);
            assert_eq!(one.branches(&batch, &mut cpu), two.branches(&batch, &mut same));
            assert_eq!((one.state(), &cpu), (two.state(), &same), "{}", model.name);
        }
        let newest = match (&one.lbr, &one.arch_lbr) {
            (Some(unit), _) => unit.newest().next(),
            (_, Some(unit)) => unit.newest().next(),
            _ => None,
        };
        assert_ne!(newest.unwrap_or_default(), Entry::default(), "{}", model.name);
        let _ = Watch::state(&mut one, Change::Reset, &mut cpu);
        let mut fresh = units(model.name);
        let _ = Watch::state(&mut fresh, Change::Reset, &mut cpu);
        assert_eq!(one.state(), fresh.state(), "{}", model.name);
    }
}
