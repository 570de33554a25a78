//! The units together: who answers for a register, what they want to hear, state out and in.

use x86::model::{CpuModel, MODELS};
use x86::msr::{IA32_DEBUGCTL, MsrFault};
use x86::watch::{Access, AccessKind, BadPhys, Context, Effects, PageFault, Processor, TraceMem, Watch};

use super::Units;

/// A processor that stands still, with debug registers.
struct Still {
    dr: [u64; 8],
    cr4: u64,
}

impl Still {
    fn new() -> Self {
        Still {
            dr: [0, 0, 0, 0, 0, 0, 0xFFFF_0FF0, 0x400],
            cr4: 0,
        }
    }
}

impl TraceMem for Still {
    fn read_linear(&mut self, _: u64, bytes: &mut [u8]) -> Result<(), PageFault> {
        bytes.fill(0);
        Ok(())
    }
    fn probe_linear(&mut self, _: u64, _: u64) -> Result<(), PageFault> {
        Ok(())
    }
    fn write_linear(&mut self, _: u64, _: &[u8]) -> Result<(), PageFault> {
        Ok(())
    }
    fn read_phys(&mut self, _: u64, bytes: &mut [u8]) -> Result<(), BadPhys> {
        bytes.fill(0);
        Ok(())
    }
    fn write_phys(&mut self, _: u64, _: &[u8]) -> Result<(), BadPhys> {
        Ok(())
    }
}

impl Processor for Still {
    fn gpr(&self, _: u8) -> u64 {
        0
    }
    fn xmm(&self, _: u8) -> u128 {
        0
    }
    fn rip(&self) -> u64 {
        0x1000
    }
    fn rflags(&self) -> u64 {
        2
    }
    fn context(&self) -> Context {
        Context::default()
    }
    fn debug_register(&self, number: u8) -> u64 {
        self.dr[usize::from(number)]
    }
    fn cr4(&self) -> u64 {
        self.cr4
    }
    fn retired(&self) -> u64 {
        0
    }
    fn step(&self) -> u64 {
        0
    }
    fn tsc(&mut self) -> u64 {
        0
    }
}

// covers: units/msr
#[test]
fn every_register_has_one_owner_and_refuses_nothing_it_reads_back() {
    for model in MODELS {
        let (mut units, mut cpu) = (Units::new(model), Still::new());
        for msr in (0..0x2000).chain(0xC000_0000..0xC000_0200) {
            match units.read_msr(msr, &mut cpu) {
                Err(MsrFault::Unclaimed) => {
                    let answer = units.write_msr(msr, 0, &mut cpu);
                    assert_ne!(answer, Ok(()), "{}: {msr:#x} is written and not read", model.name);
                }
                // A unit's register is not at the same time one of the model's plain ones.
                Ok(_) => assert!(
                    model.msrs.binary_search_by_key(&msr, |row| row.msr).is_err(),
                    "{}: {msr:#x} has two owners",
                    model.name
                ),
                Err(MsrFault::GeneralProtection) => {}
            }
        }
    }
}

// covers: units/state
#[test]
fn the_whole_state_goes_out_and_comes_back_on_every_model() {
    for model in MODELS {
        let (mut a, mut cpu) = (Units::new(model), Still::new());
        // Whatever takes a 1 has it.
        for msr in 0..0x2000 {
            let _ = a.write_msr(msr, 1, &mut cpu);
        }
        let mut b = Units::new(model);
        b.set_state(&a.state());
        assert_eq!(a.state(), b.state(), "{}", model.name);
        assert_eq!(a.interest(&mut cpu), b.interest(&mut cpu), "{}", model.name);
    }
}

/// Breakpoints with what they have watched and what they make of a callback.
// covers: dr/units
#[test]
fn breakpoints_become_boundaries_and_ranges_and_set_their_bits() {
    let model: &'static CpuModel = MODELS[0];
    let (mut units, mut cpu) = (Units::new(model), Still::new());
    assert!(!units.interest(&mut cpu).ranges && units.boundaries().is_empty());
    // DR0 execute (L), DR1 write 4 (G), DR2 I/O 2, DR3 read or write, disabled, at the address of DR1.
    cpu.dr[0] = 0x2000;
    cpu.dr[1] = 0x3000;
    cpu.dr[2] = 0x3F8;
    cpu.dr[3] = 0x3002;
    cpu.dr[7] = 0x36D0_0419;
    for (de, ports, why) in [
        (0, 0, "R/W 10 is nothing without CR4.DE"),
        (8, 1, "with CR4.DE it is I/O"),
    ] {
        cpu.cr4 = de;
        let generation = units.generation();
        assert!(units.interest(&mut cpu).ranges, "{why}");
        assert_ne!(units.generation(), generation, "{why}");
        assert_eq!(units.boundaries(), [0x2000], "{why}");
        assert_eq!(units.ranges().len(), 1 + ports, "{why}");
        assert_eq!(units.ranges().iter().filter(|r| r.ports).count(), ports, "{why}");
    }
    let debug = |effects: Effects| effects.debug;
    assert_eq!(debug(units.before(0x2000, &mut cpu)), Some(1));
    assert_eq!(debug(units.before(0x2001, &mut cpu)), None);
    for (address, size, kind, expected, why) in [
        (0x3000, 1, AccessKind::Write, Some(2), "the first byte"),
        (0x2FFF, 1, AccessKind::Write, None, "just below"),
        (0x2FFF, 2, AccessKind::Write, Some(2), "crossing into it"),
        (
            0x3002,
            8,
            AccessKind::Write,
            Some(0b1010),
            "with the condition of DR3 met, too",
        ),
        (0x3000, 8, AccessKind::Read, None, "DR3 alone is met, and off"),
        (0x3000, 1, AccessKind::ReadWrite, Some(2), "a read-modify-write writes"),
        (0x3F8, 1, AccessKind::PortWrite, Some(4), "OUT"),
        (
            0x3F9,
            4,
            AccessKind::PortRead,
            Some(4),
            "IN that touches the second port",
        ),
        (0x3FA, 1, AccessKind::PortRead, None, "beyond it"),
    ] {
        let access = Access {
            address,
            size,
            kind,
            ip: 0x1000,
        };
        assert_eq!(debug(units.access(&access, &mut cpu)), expected, "{why}");
    }
}

// covers: units/msr
#[test]
fn btf_has_single_steps_come_after_branches() {
    for model in MODELS {
        let (mut units, mut cpu) = (Units::new(model), Still::new());
        if units.write_msr(IA32_DEBUGCTL, 2, &mut cpu) == Ok(()) {
            assert!(units.interest(&mut cpu).step_on_branches, "{}", model.name);
        }
    }
}

// covers: pt/units
#[test]
fn a_full_region_of_the_trace_is_an_interrupt_and_a_status_bit() {
    use x86::msr::{IA32_PERF_GLOBAL_STATUS, IA32_RTIT_ADDR0_A, IA32_RTIT_ADDR0_B, IA32_RTIT_CTL, IA32_RTIT_STATUS};
    use x86::pt::{RtitCtl, RtitStatus};

    for model in MODELS.iter().filter(|model| model.features().intel_pt()) {
        let mut units = Units::new(model);
        let mut cpu = Still::new();
        let caps = model.units.pt.expect("CPUID says so");
        if caps.ranges() > 0 {
            units.write_msr(IA32_RTIT_ADDR0_A, 0x2000, &mut cpu).unwrap();
            units.write_msr(IA32_RTIT_ADDR0_B, 0x2FFF, &mut cpu).unwrap();
        }
        // Without memory behind it this machine's table is zeros: a region of 4 KiB, which on the first generation no END follows.
        let ctl = RtitCtl::new()
            .with_trace_en(true)
            .with_topa(true)
            .with_os(true)
            .with_branch_en(true)
            .with_addr_cfg(u16::from(caps.ranges() > 0));
        units.write_msr(IA32_RTIT_CTL, ctl.into_bits(), &mut cpu).unwrap();
        let interest = units.interest(&mut cpu);
        let status = RtitStatus::from_bits(units.read_msr(IA32_RTIT_STATUS, &mut cpu).unwrap());
        assert_eq!(status.error(), !caps.topa_multiple(), "{}", model.name);
        assert_eq!(interest.branches.any(), caps.topa_multiple(), "{}", model.name);
        // Ranges count where branches land, so that no instruction has to be announced.
        assert!(units.boundaries().is_empty(), "{}", model.name);

        // A PMI that waits is delivered with the next word.
        if caps.psb_pmi_preservation() {
            units.write_msr(IA32_RTIT_CTL, 0, &mut cpu).unwrap();
            let pending = RtitStatus::new().with_pend_topa_pmi(true).into_bits();
            units.write_msr(IA32_RTIT_STATUS, pending, &mut cpu).unwrap();
            let ctl = ctl.with_inject_psb_pmi_on_enable(true);
            units.write_msr(IA32_RTIT_CTL, ctl.into_bits(), &mut cpu).unwrap();
            assert_eq!(units.interest(&mut cpu).instructions, 1, "{}", model.name);
            assert!(units.tick(&mut cpu).pmi, "{}", model.name);
            let global = units.read_msr(IA32_PERF_GLOBAL_STATUS, &mut cpu).unwrap_or(0);
            let shown = units.pmu.is_some();
            assert_eq!(global >> 55 & 1 != 0, shown, "{}: Trace_ToPA_PMI", model.name);
            assert!(!units.tick(&mut cpu).pmi, "{}: once", model.name);
        }
    }
    let mut units = Units::new(&x86::model::HASWELL);
    let answer = units.read_msr(IA32_RTIT_CTL, &mut Still::new());
    assert_eq!(answer, Err(MsrFault::Unclaimed), "no such unit, so nobody's register");
}
