//! The monitor's commands on a program that uses every unit, against what an observer has seen and what a snapshot holds.

use std::sync::{Arc, Mutex};

use guest_tests::flat::{self, CODE, DATA, TRACE, wrmsr};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use minivmm::debug::StopCause;
use minivmm::{
    Console, End, Run, StopReason,
    front::{controls::Controls, monitor},
};
use x86::model::{BROADWELL, CpuModel, HASWELL, SAPPHIRERAPIDS, SKYLAKE_SERVER, WESTMERE};
use x86::msr::*;
use x86::pt::RtitCtl;
use x86::watch::{BranchRecord, Effects, EventRecord, Flow, Interest, Processor, Recorded, Watch};

const TOPA: u64 = DATA;
const AREA: u64 = DATA + 0x1000;
const BTS: u64 = DATA + 0x4000;
const PEBS: u64 = DATA + 0x8000;

fn set(a: &mut CodeAssembler, at: u64, value: u64) -> Result<(), IcedError> {
    a.mov(rax, value)?;
    a.mov(qword_ptr(at), rax)
}

/// Switches on what the model has, branches for a while, and halts with all of it on.
fn program(model: &'static CpuModel) -> impl Fn(&mut CodeAssembler) -> Result<(), IcedError> {
    let features = model.features();
    let pmu = model.units.pmu.map_or(0, |pmu| pmu.version);
    move |a| {
        if model.units.pt.is_some() && !model.units.pt.is_some_and(|pt| pt.excludes_lbr) {
            // Two regions of 4 KiB, over and over.
            for (at, entry) in [(0, TRACE | 1 << 2), (8, TRACE + 0x1000), (16, TOPA | 1)] {
                set(a, TOPA + at, entry)?;
            }
            let ctl = RtitCtl::new()
                .with_topa(true)
                .with_os(true)
                .with_branch_en(true)
                .with_trace_en(true);
            wrmsr(a, IA32_RTIT_OUTPUT_BASE, TOPA)?;
            wrmsr(a, IA32_RTIT_OUTPUT_MASK_PTRS, 0x7F)?;
            wrmsr(a, IA32_RTIT_CTL, ctl.into_bits())?;
        }
        if pmu >= 2 {
            let fields = [
                BTS,
                BTS,
                BTS + 24 * 100,
                BTS + 24 * 100,
                PEBS,
                PEBS,
                PEBS + 0x2000,
                PEBS + 0x2000,
            ];
            for (at, value) in (AREA..).step_by(8).zip(fields) {
                set(a, at, value)?;
            }
            set(a, AREA + 0x40, (1 << 48) - 8)?;
            wrmsr(a, IA32_DS_AREA, AREA)?;
            // Instructions, which every part samples.
            wrmsr(a, IA32_PERFEVTSEL0, 0x43_00C0)?;
            wrmsr(a, IA32_PMC0, 0xFFFF_FFF8)?;
            wrmsr(a, IA32_PEBS_ENABLE, 1)?;
            wrmsr(a, IA32_FIXED_CTR_CTRL, 0x3)?;
            wrmsr(a, IA32_PERF_GLOBAL_CTRL, 1 << 32 | 1)?;
        }
        if features.rdt_m() {
            wrmsr(a, IA32_PQR_ASSOC, 2 << 32 | 5)?;
            wrmsr(a, IA32_QM_EVTSEL, 5 << 32 | 1)?;
        }
        a.mov(rax, 0x1234u64)?;
        a.mov(dr1, rax)?;
        a.mov(eax, 0x00D0_0404u32)?;
        a.mov(dr7, rax)?;
        if features.arch_lbr() {
            wrmsr(a, IA32_LBR_CTL, 0x7F_0007)?;
        }
        let store = if pmu >= 2 { 0xC0 } else { 0 };
        wrmsr(a, IA32_DEBUGCTL, store | u64::from(!features.arch_lbr()))?;
        let [mut top, mut skip, mut callee, mut out] = std::array::from_fn(|_| a.create_label());
        a.mov(esi, 20)?;
        a.mov(ebx, 1)?;
        a.set_label(&mut top)?;
        a.imul_3(ebx, ebx, 1_103_515_245)?;
        a.add(ebx, 12345)?;
        a.test(ebx, 0x1_0000)?;
        a.je(skip)?;
        a.nop()?;
        a.set_label(&mut skip)?;
        a.call(callee)?;
        a.dec(esi)?;
        a.jne(top)?;
        a.jmp(out)?;
        a.set_label(&mut callee)?;
        a.ret()?;
        a.set_label(&mut out)?;
        a.hlt()
    }
}

/// Collects the branches that were taken.
#[derive(Clone, Default)]
struct Taken(Arc<Mutex<Vec<BranchRecord>>>);

impl Watch for Taken {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        Interest {
            branches: Recorded::All,
            ..Interest::NOTHING
        }
    }
    fn branches(&mut self, records: &[BranchRecord], _: &mut dyn Processor) -> Effects {
        let taken = records
            .iter()
            .filter(|record| Flow::from_code(record.flow).is_some_and(Flow::taken));
        self.0.lock().unwrap().extend(taken);
        Effects::NONE
    }
    fn event(&mut self, event: &EventRecord, _: &mut dyn Processor) -> Effects {
        self.0.lock().unwrap().push(event.branch);
        Effects::NONE
    }
}

/// The program at its end, and the branches that it took, the newest first.
fn at_the_end(model: &'static CpuModel) -> (Run, Console, Vec<(u64, u64)>) {
    let taken = Taken::default();
    let (mut vm, mut console) = flat::whole(model, 0, &[], program(model));
    vm.machine().observe(0, Some(Box::new(taken.clone())));
    let end = vm.run(&mut console).unwrap();
    assert!(
        matches!(end, StopReason::Ended(End::Halted(_))),
        "{}: {end:?}",
        model.name
    );
    let branches = taken.0.lock().unwrap().iter().rev().map(|b| (b.from, b.to)).collect();
    (vm, console, branches)
}

/// The hexadecimal number that text begins with.
fn address(text: &str) -> u64 {
    let word = text.trim().split(' ').next().unwrap();
    u64::from_str_radix(word.strip_prefix("0x").unwrap_or_else(|| panic!("{text:?}")), 16).unwrap()
}

/// The branches that `lbr` and `bts` print.
fn printed(text: &str) -> Vec<(u64, u64)> {
    let lines = text
        .lines()
        .filter(|line| line.contains(" -> ") && !line.starts_with("last exception"));
    lines
        .map(|line| {
            let (from, to) = line.trim().split_once("  ").unwrap().1.split_once(" -> ").unwrap();
            (address(from), address(to))
        })
        .collect()
}

const MODELS: [&CpuModel; 5] = [&WESTMERE, &HASWELL, &BROADWELL, &SKYLAKE_SERVER, &SAPPHIRERAPIDS];

// covers: monitor/lbr, monitor/bts
#[test]
fn branch_records_are_the_branches_that_were_taken() {
    for model in MODELS {
        let (mut vm, _, taken) = at_the_end(model);
        let lbr = monitor::run(&mut Controls::new(&mut vm), 0, "lbr");
        let entries = printed(&lbr);
        assert!(lbr.starts_with("on") && entries.len() >= 16, "{}: {lbr}", model.name);
        assert_eq!(entries, taken[..entries.len()], "{}: {lbr}", model.name);
        assert_eq!(
            printed(&monitor::run(&mut Controls::new(&mut vm), 0, "lbr 3")),
            taken[..3]
        );
        let bts = monitor::run(&mut Controls::new(&mut vm), 0, "bts");
        assert!(
            bts.starts_with("on") && bts.contains(&format!("buffer {BTS:#x}")),
            "{bts}"
        );
        assert_eq!(printed(&bts), taken[..16], "{}: {bts}", model.name);
    }
}

// covers: monitor/pt
#[test]
fn packets_of_the_guests_trace_are_shown() {
    for model in [&SKYLAKE_SERVER, &SAPPHIRERAPIDS] {
        let (mut vm, _, taken) = at_the_end(model);
        let text = monitor::run(&mut Controls::new(&mut vm), 0, "pt 400");
        for part in [
            "TraceEn OS ToPA BranchEn",
            "ContextEn TriggerEn",
            "ToPA table at 0x200000, entry 0",
            "*0: 0x400000, 0x1000 bytes INT",
            "1: 0x401000, 0x1000 bytes",
            "END, goes on with the table at 0x200000",
            "TIP.PGE 0x1000",
        ] {
            assert!(text.contains(part), "{}: {part}: {text}", model.name);
        }
        // The program has no indirect branches, and its returns are compressed: what is left is TNT, one bit a condition and
        // a return.
        let (conditions, returns) = (2 * 20, 20);
        assert!(taken.len() > returns);
        let bits: usize = text
            .lines()
            .filter_map(|line| Some(line.split_once("Tnt(")?.1.matches(['0', '1', 'T', 'N']).count()))
            .sum();
        assert!(
            bits <= conditions + returns && bits + 47 > conditions + returns,
            "{bits}: {text}"
        );
    }
}

// covers: monitor/dr, monitor/debugctl, monitor/pmu, monitor/pebs, monitor/tsc, monitor/rdt, monitor/msr, monitor/cpuid, monitor/irq
#[test]
fn registers_are_decoded() {
    let (mut vm, _, _) = at_the_end(&SAPPHIRERAPIDS);
    let state = vm.save();
    let (cpu, units) = (&state.soft.cpus[0], &state.machine.units[0]);
    let pmu = units.pmu.as_ref().unwrap();
    let tsc = state.machine.clock.ticks(vm.steps());
    let samples = u64::from_le_bytes({
        let mut index = [0; 8];
        vm.read_physical(AREA + 0x28, &mut index).unwrap();
        index
    });
    assert!(samples > PEBS, "something was sampled");
    for (line, parts) in [
        (
            "dr",
            vec!["DR1 0x1234: write 4, L\n".into(), "DR7 0xd00404: L1\n".into()],
        ),
        ("debugctl", vec!["IA32_DEBUGCTL 0xc0: TR BTS\n".into()]),
        (
            "pmu",
            vec![
                format!("PMC0 {:#x}: event 0xc0 umask 0x00 (instructions) usr os", pmu.values[0]),
                "IA32_PERF_GLOBAL_CTRL 0x100000001: PMC0 FIXED0\n".into(),
                "FIXED1 0x0: cycles disabled\n".into(),
            ],
        ),
        (
            "pebs",
            vec![
                "IA32_PEBS_ENABLE 0x1: PMC0\n".into(),
                format!("index {samples:#x}"),
                " 0  0x1002".into(),
                " counters 0x1 tsc ".into(),
            ],
        ),
        (
            "tsc",
            vec![format!("TSC {tsc:#x} ({tsc})"), "IA32_TSC_ADJUST 0x0".into()],
        ),
        (
            "rdt",
            vec![
                "IA32_PQR_ASSOC 0x200000005: RMID 5, class of service 2\n".into(),
                "L3 occupancy of RMID 5\n".into(),
                "L3 masks".into(),
            ],
        ),
        ("msr read IA32_DS_AREA", vec![format!("0x600 IA32_DS_AREA {AREA:#x}\n")]),
        (
            "msr read 0xc0000080",
            vec![format!("0xc0000080 IA32_EFER {:#x}\n", cpu.efer.into_bits())],
        ),
        ("cpuid 0", vec!["vendor GenuineIntel".into()]),
        ("cpuid 0x80000003", vec!["brand ".into()]),
        (
            "irq",
            vec![
                "CPU 0: interrupts off\n".into(),
                "local APIC 0: xAPIC".into(),
                "  LINT0 0x700: vector 0x0 ExtINT\n".into(),
                "  24 pins masked\n".into(),
                "8259A, first: masked 0b11111111".into(),
            ],
        ),
        (
            "info",
            vec![
                "* CPU 0 at 0x1002".into(),
                "halted".into(),
                "model sapphirerapids".into(),
            ],
        ),
    ] {
        let text = monitor::run(&mut Controls::new(&mut vm), 0, line);
        for part in parts {
            assert!(text.contains(&part), "{line}: {part:?} is not in\n{text}");
        }
    }
    // CPUID is what the guest's own reads: OSXSAVE follows CR4.
    let shown = |vm: &Run| vm.peek_cpuid(0, 1, 0)[2] >> 27 & 1;
    assert_eq!(shown(&vm), 0);
    let mut other = state.clone();
    other.soft.cpus[0].cr4.set_osxsave(true);
    vm.set_state(&other).unwrap();
    assert_eq!(shown(&vm), 1);
}

// covers: monitor/msr
#[test]
fn msrs_are_written_as_the_guest_would() {
    let (mut vm, _, _) = at_the_end(&SKYLAKE_SERVER);
    for (line, says) in [
        (
            "msr write IA32_LSTAR 0xffffffff81000000",
            "0xc0000082 IA32_LSTAR 0xffffffff81000000 written\n",
        ),
        ("msr read ia32_lstar", "0xc0000082 IA32_LSTAR 0xffffffff81000000\n"),
        (
            "msr write IA32_LSTAR 0x8000000000000000",
            "WRMSR of 0x8000000000000000 to 0xc0000082 is #GP here; nothing is written\n",
        ),
        ("msr write IA32_DEBUGCTL 0", "0x1d9 IA32_DEBUGCTL 0x0 written\n"),
        ("msr read 0x1d9", "0x1d9 IA32_DEBUGCTL 0x0\n"),
        (
            "msr write 0x1d9 0x8000000000000000",
            "WRMSR of 0x8000000000000000 to 0x1d9 is #GP here; nothing is written\n",
        ),
        ("msr read 0xdeadbeef", "RDMSR of 0xdeadbeef is #GP here\n"),
        (
            "msr read IA32_NOTHING",
            "\"IA32_NOTHING\" is neither a number nor the manual's name of an MSR that is known here\n",
        ),
        ("msr", "msr read MSR, or msr write MSR VALUE\n"),
    ] {
        assert_eq!(monitor::run(&mut Controls::new(&mut vm), 0, line), says, "{line}");
    }
    assert!(monitor::run(&mut Controls::new(&mut vm), 0, "lbr").starts_with("off"));
    assert_eq!(vm.cpu_state(0).unwrap().msrs.lstar, 0xffff_ffff_8100_0000);
}

// covers: monitor/pagewalk
#[test]
fn addresses_are_translated() {
    let (mut vm, _, _) = at_the_end(&WESTMERE);
    assert!(monitor::run(&mut Controls::new(&mut vm), 0, "gva2gpa 0x212345").ends_with("is at physical 0x212345\n"));
    assert!(monitor::run(&mut Controls::new(&mut vm), 0, "gva2gpa 0x40000000").ends_with("is not mapped\n"));
    let walk = monitor::run(&mut Controls::new(&mut vm), 0, "pagewalk 0x212345");
    let expected = [
        "0x212345, CR3 0x7000",
        "PML4E 0x7000: 0x8027, 0x8000 P W U A",
        "PDPTE 0x8000: 0x9027, 0x9000 P W U A",
        "PDE   0x9008: 0x2000e7, 0x200000 P W U A D PS",
        "physical 0x212345",
    ];
    assert_eq!(walk.lines().collect::<Vec<_>>(), expected);
    assert!(monitor::run(&mut Controls::new(&mut vm), 0, "pagewalk 0x40000000").ends_with("not mapped\n"));
    assert!(monitor::run(&mut Controls::new(&mut vm), 0, "gva2gpa nowhere").contains("neither a number nor a symbol"));
}

/// Every command that reads, at many steps of the program: a run that is looked at is the run that is not.
// covers: monitor/pure
#[test]
fn looking_changes_nothing() {
    for model in MODELS {
        let lines = [
            "lbr", "bts", "pt", "pebs", "pmu", "dr", "debugctl", "tsc", "rdt", "irq", "info", "kaslr", "help", "hash",
        ];
        let mut lines: Vec<String> = lines.map(String::from).into();
        lines.extend(["cpuid 1", "cpuid 0xd 1", "pagewalk 0x212345", "gva2gpa 0x100000"].map(String::from));
        lines.extend(NAMES.iter().map(|(msr, _)| format!("msr read {msr:#x}")));
        lines.extend((0x800..0x840).map(|msr| format!("msr read {msr:#x}")));
        let (mut vm, mut console) = flat::whole(model, 0, &[], program(model));
        let (mut alone, mut other) = flat::whole(model, 0, &[], program(model));
        let mut end = None;
        while end.is_none() {
            let before = vm.save();
            for line in &lines {
                let text = monitor::run(&mut Controls::new(&mut vm), 0, line);
                assert!(text.ends_with('\n') && text.len() > 1, "{line}: {text:?}");
            }
            assert!(
                vm.save() == before,
                "{} at step {}: something has changed",
                model.name,
                vm.steps()
            );
            end = vm.run_for(&mut console, 37).unwrap();
            alone.run_for(&mut other, 37).unwrap();
        }
        assert!(vm.steps() > 100, "{}", model.name);
        assert!(vm.save() == alone.save(), "{}: another end", model.name);
    }
}

// covers: monitor/catch
#[test]
fn exceptions_are_caught() {
    let (mut vm, mut console) = flat::whole(&WESTMERE, 0, &[], |a| {
        a.nop()?;
        a.ud2()
    });
    let refused = monitor::run(&mut Controls::new(&mut vm), 0, "catch 6");
    assert!(refused.contains("--gdb"), "{refused}");
    // As the stub does.
    vm.debugger();
    for (line, says) in [
        ("catch", "nothing is caught\n"),
        ("catch 14", "14 (#PF) is caught\n"),
        ("catch pf", "14 (#PF) is caught already\n"),
        ("catch #UD", "6 (#UD) is caught\n"),
        ("catch 0x61", "97 is caught\n"),
        ("catch", "caught: 6 (#UD), 14 (#PF), 97\n"),
        (
            "catch 256",
            "\"256\" is no exception: a vector from 0 to 255, or one of DE, DB, NMI, BP, OF, BR, UD, NM, DF, TS, NP, SS, GP, PF, MF, AC, MC, XM, VE, CP\n",
        ),
        (
            "catch XX",
            "\"XX\" is no exception: a vector from 0 to 255, or one of DE, DB, NMI, BP, OF, BR, UD, NM, DF, TS, NP, SS, GP, PF, MF, AC, MC, XM, VE, CP\n",
        ),
        ("catch 1 2", "\"2\" is one word too many\n"),
    ] {
        assert_eq!(monitor::run(&mut Controls::new(&mut vm), 0, line), says, "{line}");
    }
    let end = vm.run(&mut console).unwrap();
    assert!(
        matches!(end, StopReason::Debugger(stop) if matches!(stop.why, StopCause::Exception { vector: 6, .. })),
        "{end:?}"
    );
    assert_eq!(
        monitor::run(&mut Controls::new(&mut vm), 0, "catch none"),
        "nothing is caught\n"
    );
    assert!(matches!(
        vm.run(&mut console).unwrap(),
        StopReason::Ended(End::Halted(_))
    ));
}

// covers: monitor/help
#[test]
fn what_is_wrong_with_a_line_is_said() {
    let (mut vm, _, _) = at_the_end(&WESTMERE);
    for (line, says) in [
        ("explode", "\"explode\" is no monitor command: try `help`\n"),
        ("dr 1", "\"1\" is one word too many\n"),
        ("lbr many", "\"many\" is no number: 10 and 0x10 are\n"),
        ("pt", "model westmere has no Intel PT here\n"),
        ("rdt", "model westmere has no resource director here\n"),
        ("cpuid", "cpuid LEAF [SUBLEAF]\n"),
        ("cpuid 0x100000000", "0x100000000: a leaf has 32 bits\n"),
        ("gva2gpa", "one address: a number, a symbol, or a symbol+NUMBER\n"),
        (
            "kaslr",
            "no Linux kernel is found in memory: it is there once it is decompressed\n",
        ),
        (
            "help dr",
            "dr  Debug registers: what each breakpoint watches, DR6, DR7\n",
        ),
    ] {
        assert_eq!(monitor::run(&mut Controls::new(&mut vm), 0, line), says, "{line}");
    }
    assert_eq!(
        monitor::run(&mut Controls::new(&mut vm), 1, "dr"),
        "there is no CPU 1\n"
    );
    assert_eq!(
        monitor::run(&mut Controls::new(&mut vm), 0, ""),
        monitor::run(&mut Controls::new(&mut vm), 0, "help")
    );
    assert!(address(monitor::run(&mut Controls::new(&mut vm), 0, "gva2gpa 0x100000").as_str()) == CODE);
}
