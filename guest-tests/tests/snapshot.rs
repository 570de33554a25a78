//! All state at every instruction of a program that traces itself in every way, put into another machine: what follows is the
//! same to the byte.

use minivmm::StopReason;
use std::sync::{Arc, Mutex, MutexGuard};

use guest_tests::flat::{self, CODE, DATA, TRACE, wrmsr};
use guest_tests::observer::{Observer, ObserverState, Unit};
use guest_tests::{SMP, linux};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use minivmm::{Console, End, MachineConfig, Run, Snapshot};
use x86::model::{ALDERLAKE, BROADWELL, CpuModel, HASWELL, SAPPHIRERAPIDS, SKYLAKE_SERVER, SNOWRIDGE, WESTMERE};
use x86::msr::*;
use x86::pmu::Count;
use x86::pt::RtitCtl;
use x86::watch::{Access, BranchRecord, Change, Effects, EventRecord, Interest, Processor, Watch};

const TOPA: u64 = DATA;
const AREA: u64 = DATA + 0x1000;
const SCRATCH: u64 = DATA + 0x2000;
const BTS: u64 = DATA + 0x4000;
const PEBS: u64 = DATA + 0x8000;
/// A page whose entry in the page tables changes under way, and pages of tables for it.
const MOVES: u64 = 0x4000_0000;
const DIRECTORY: u64 = DATA + 0x1_0000;
const TABLE: u64 = DATA + 0x1_1000;
const PLACES: [u64; 2] = [DATA + 0x1_2000, DATA + 0x1_3000];
/// The second entry of the page-directory-pointer table that `flat` has made.
const POINTER: u64 = 0x8008;

const BTS_RECORDS: u64 = 60;
const BTS_THRESHOLD: u64 = 24;
const PMI: u8 = 0x61;
/// Where the program has its handlers, from its beginning.
const ON_PMI: u32 = 0x10;
const ON_DEBUG: u32 = 0x180;
const MAIN: u32 = 0x200;

fn set(a: &mut CodeAssembler, at: u64, value: u64) -> Result<(), IcedError> {
    a.mov(rax, value)?;
    a.mov(qword_ptr(at), rax)
}

/// Goes on at an offset from the program's beginning.
fn pad(a: &mut CodeAssembler, to: u32) -> Result<(), IcedError> {
    let len = a.assemble(CODE)?.len();
    a.db(&vec![0x90; to as usize - len])
}

/// IA32_DEBUGCTL of the program: BTS with interrupts, and last-branch records where they are not architectural ones.
fn control(model: &CpuModel) -> u64 {
    0x1C0 | u64::from(!model.features().arch_lbr())
}

/// Leaves the buffers empty again and lets the next interrupt in, as the manual says: with BTS off meanwhile.
fn on_pmi(a: &mut CodeAssembler, model: &CpuModel) -> Result<(), IcedError> {
    for register in [rax, rcx, rdx] {
        a.push(register)?;
    }
    wrmsr(a, IA32_DEBUGCTL, 0)?;
    set(a, AREA + 0x08, BTS)?;
    set(a, AREA + 0x28, PEBS)?;
    let frozen = if model.cpuid(0xA, 0)[0] & 0xFF >= 4 { 3 << 58 } else { 0 };
    wrmsr(a, IA32_PERF_GLOBAL_OVF_CTRL, 1 << 62 | frozen | 3 << 32 | 3)?;
    // LVTPC, EOI.
    wrmsr(a, 0x834, PMI.into())?;
    wrmsr(a, 0x80B, 0)?;
    wrmsr(a, IA32_DEBUGCTL, control(model))?;
    for register in [rdx, rcx, rax] {
        a.pop(register)?;
    }
    a.iretq()
}

/// The event of branches that a counter of the model samples.
fn precise_branches(model: &CpuModel) -> u64 {
    let events = model.units.pmu.map_or(&[][..], |pmu| pmu.events);
    let row = events.iter().flat_map(|rows| rows.iter());
    let row = row
        .filter(|row| row.precise)
        .find(|row| matches!(row.count, Count::Branches(_)))
        .unwrap_or_else(|| panic!("{} samples branches", model.name));
    u64::from(row.umask) << 8 | u64::from(row.event)
}

/// Switches on what the model has, and then branches in every near way some hundred times, with interrupts of full buffers,
/// breakpoints, single steps, a page that changes its place unsaid, and transactions where there are some.
fn program(model: &'static CpuModel) -> impl Fn(&mut CodeAssembler) -> Result<(), IcedError> {
    let features = model.features();
    move |a| {
        let mut main = a.create_label();
        a.jmp(main)?;
        pad(a, ON_PMI)?;
        on_pmi(a, model)?;
        pad(a, ON_DEBUG)?;
        // #DB: its conditions are kept, and forgotten.
        a.push(rax)?;
        a.mov(rax, dr6)?;
        a.mov(qword_ptr(SCRATCH + 0x100), rax)?;
        a.mov(eax, 0xFFFF_0FF0u32)?;
        a.mov(dr6, rax)?;
        a.pop(rax)?;
        a.iretq()?;
        pad(a, MAIN)?;
        a.set_label(&mut main)?;

        // The local APIC, in x2APIC mode, on; the page that moves.
        wrmsr(a, 0x1B, 0xFEE0_0D00)?;
        wrmsr(a, 0x80F, 0x1FF)?;
        wrmsr(a, 0x834, PMI.into())?;
        set(a, POINTER, DIRECTORY | 7)?;
        set(a, DIRECTORY, TABLE | 7)?;
        set(a, TABLE, PLACES[0] | 7)?;

        if let Some(pt) = model.units.pt {
            set(a, TOPA, TRACE | 4 << 6)?;
            set(a, TOPA + 8, TOPA | 1)?;
            let ctl = RtitCtl::new()
                .with_topa(true)
                .with_os(true)
                .with_tsc_en(true)
                .with_branch_en(true)
                .with_mtc_en(pt.mtc())
                .with_cyc_en(pt.psb_cyc())
                .with_ptw_en(pt.ptwrite())
                .with_fup_on_ptw(pt.ptwrite())
                .with_trace_en(true);
            wrmsr(a, IA32_RTIT_OUTPUT_BASE, TOPA)?;
            wrmsr(a, IA32_RTIT_OUTPUT_MASK_PTRS, 0x7F)?;
            wrmsr(a, IA32_RTIT_CTL, ctl.into_bits())?;
        }
        let fields = [BTS, BTS, BTS + 24 * BTS_RECORDS, BTS + 24 * BTS_THRESHOLD, PEBS, PEBS];
        for (at, value) in (AREA..)
            .step_by(8)
            .zip(fields.into_iter().chain([PEBS + 0x2000, PEBS + 0x190]))
        {
            set(a, at, value)?;
        }
        // Counter 0 samples branches, and goes on 8 before its end.
        set(a, AREA + 0x40, (1 << 48) - 8)?;
        wrmsr(a, IA32_DS_AREA, AREA)?;
        wrmsr(a, IA32_PERFEVTSEL0, 0x43_0000 | precise_branches(model))?;
        wrmsr(a, IA32_PERFEVTSEL0 + 1, 0x53_00C4)?;
        wrmsr(a, IA32_PMC0, 0xFFFF_FFF8)?;
        wrmsr(a, IA32_PMC0 + 1, 0xFFFF_FF80)?;
        wrmsr(a, IA32_PEBS_ENABLE, 1)?;
        wrmsr(a, IA32_FIXED_CTR_CTRL, 0x33)?;
        wrmsr(a, IA32_PERF_GLOBAL_CTRL, 3 << 32 | 3)?;
        if features.arch_lbr() {
            wrmsr(a, IA32_LBR_CTL, 0x7F_0007)?;
        }
        wrmsr(a, IA32_DEBUGCTL, control(model))?;
        a.sti()?;

        let [
            mut top,
            mut skip,
            mut callee,
            mut done,
            mut over,
            mut fallback,
            mut committed,
        ] = std::array::from_fn(|_| a.create_label());
        a.mov(esi, 24)?;
        a.mov(ebx, 1)?;
        a.mov(rdi, SCRATCH)?;
        a.mov(r8, MOVES)?;
        a.set_label(&mut top)?;
        a.imul_3(ebx, ebx, 1_103_515_245)?;
        a.add(ebx, 12345)?;
        a.test(ebx, 0x1_0000)?;
        a.je(skip)?;
        a.mov(dword_ptr(rdi), ebx)?;
        a.set_label(&mut skip)?;
        a.call(callee)?;
        a.lea(rax, ptr(callee))?;
        a.call(rax)?;
        // The page's entry changes while the old one may be remembered; every fourth time it is said.
        a.mov(rax, qword_ptr(TABLE))?;
        a.xor(rax, (PLACES[0] ^ PLACES[1]) as i32)?;
        a.and(rax, !0x60)?;
        a.mov(qword_ptr(TABLE), rax)?;
        a.test(esi, 3)?;
        a.jne(over)?;
        a.invlpg(ptr(r8))?;
        a.set_label(&mut over)?;
        a.add(dword_ptr(r8), esi)?;
        a.mov(eax, dword_ptr(r8))?;
        a.mov(ecx, 3)?;
        a.push(rdi)?;
        a.rep().stosb()?;
        a.pop(rdi)?;
        // Some rounds with a breakpoint on data, and in others every instruction steps for a while.
        a.mov(rax, SCRATCH)?;
        a.mov(dr0, rax)?;
        a.mov(eax, 0x400)?;
        a.test(esi, 4)?;
        let mut quiet = a.create_label();
        a.je(quiet)?;
        a.mov(eax, 0xD_0402)?;
        a.set_label(&mut quiet)?;
        a.mov(dr7, rax)?;
        a.test(esi, 7)?;
        let mut straight = a.create_label();
        a.jne(straight)?;
        a.pushfq()?;
        a.or(dword_ptr(rsp), 0x100)?;
        a.popfq()?;
        a.mov(ss, dword_ptr(rsp))?;
        a.mov(dword_ptr(rdi), eax)?;
        a.cpuid()?;
        a.mov(ebx, 7)?;
        a.pushfq()?;
        a.and(dword_ptr(rsp), !0x100)?;
        a.popfq()?;
        a.set_label(&mut straight)?;
        if model.units.pt.is_some_and(|pt| pt.ptwrite()) {
            a.ptwrite(rbx)?;
        }
        if features.rtm() {
            a.xbegin(fallback)?;
            a.mov(dword_ptr(rdi + 0x40), esi)?;
            a.add(dword_ptr(rdi + 0x80), 1)?;
            a.test(esi, 1)?;
            let mut commits = a.create_label();
            a.je(commits)?;
            a.mov(dword_ptr(rdi + 0x40), ebx)?;
            a.xabort(7)?;
            a.set_label(&mut commits)?;
            a.xend()?;
            a.jmp(committed)?;
            a.set_label(&mut fallback)?;
            a.mov(dword_ptr(rdi + 0xC0), eax)?;
            a.set_label(&mut committed)?;
        }
        if features.monitor() {
            // A line that is stored to before the wait, so that there is none.
            a.mov(rax, SCRATCH)?;
            a.xor(ecx, ecx)?;
            a.xor(edx, edx)?;
            a.monitor()?;
            a.mov(dword_ptr(rdi + 8), esi)?;
            a.xor(eax, eax)?;
            a.mwait()?;
        }
        a.xor(edi, edi)?;
        a.mov(rdi, SCRATCH)?;
        a.dec(esi)?;
        a.jne(top)?;
        a.jmp(done)?;
        let mut leave = a.create_label();
        a.set_label(&mut callee)?;
        a.inc(edx)?;
        a.test(ebx, 0x8_0000)?;
        a.jne(leave)?;
        a.nop()?;
        a.set_label(&mut leave)?;
        a.ret()?;
        a.set_label(&mut done)?;
        a.xor(eax, eax)?;
        a.mov(dr7, rax)?;
        if model.units.pt.is_some() {
            wrmsr(a, IA32_RTIT_CTL, 0)?;
        }
        wrmsr(a, IA32_DEBUGCTL, 0)?;
        a.xor(eax, eax)?;
        a.out(0xF4, al)?;
        a.hlt()
    }
}

/// The vectors that the program handles, and where.
const JUMPS: [(u8, u32); 2] = [(1, ON_DEBUG), (PMI, ON_PMI)];

/// An observer whose state can be taken and given while it watches.
#[derive(Clone)]
struct Shared(Arc<Mutex<Observer>>);

impl Shared {
    fn new(model: &'static CpuModel) -> Shared {
        let mut on = vec![Unit::Lbr, Unit::BranchCounter];
        if model.units.pt.is_some() {
            on.push(Unit::Pt);
        }
        Shared(Arc::new(Mutex::new(Observer::new(model, &on))))
    }

    fn lock(&self) -> MutexGuard<'_, Observer> {
        self.0.lock().unwrap()
    }
}

impl Watch for Shared {
    fn interest(&mut self, cpu: &mut dyn Processor) -> Interest {
        self.lock().interest(cpu)
    }
    fn before(&mut self, address: u64, cpu: &mut dyn Processor) -> Effects {
        self.lock().before(address, cpu)
    }
    fn access(&mut self, access: &Access, cpu: &mut dyn Processor) -> Effects {
        self.lock().access(access, cpu)
    }
    fn branches(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor) -> Effects {
        self.lock().branches(records, cpu)
    }
    fn event(&mut self, event: &EventRecord, cpu: &mut dyn Processor) -> Effects {
        self.lock().event(event, cpu)
    }
    fn state(&mut self, change: Change, cpu: &mut dyn Processor) -> Effects {
        Watch::state(&mut *self.lock(), change, cpu)
    }
    fn tick(&mut self, cpu: &mut dyn Processor) -> Effects {
        self.lock().tick(cpu)
    }
}

/// A machine, its console, and who observes it.
struct Observed {
    vm: Run,
    console: Console,
    observer: Shared,
}

/// All of it.
#[derive(Clone, PartialEq)]
struct Whole {
    machine: Snapshot,
    observer: ObserverState,
}

impl Observed {
    fn new(model: &'static CpuModel) -> Observed {
        let (mut vm, console) = flat::whole(model, 0, &JUMPS, program(model));
        let observer = Shared::new(model);
        assert!(vm.machine().observe(0, Some(Box::new(observer.clone()))));
        Observed { vm, console, observer }
    }

    fn save(&mut self) -> Whole {
        let machine = self.vm.save();
        Whole {
            machine,
            observer: self.observer.lock().save(),
        }
    }

    fn set_state(&mut self, state: &Whole) {
        self.observer.lock().restore(&state.observer);
        self.vm.set_state(&state.machine).unwrap();
    }

    fn run_out(&mut self) -> Whole {
        let end = self.vm.run(&mut self.console).unwrap();
        assert!(matches!(end, StopReason::Ended(End::DebugExit(0))), "{end:?}");
        self.save()
    }
}

/// Says in which fields two states differ.
#[track_caller]
fn equal<T: std::fmt::Debug + PartialEq>(what: &str, came: &T, should: &T) {
    if came == should {
        return;
    }
    let (came, should) = (format!("{came:#x?}"), format!("{should:#x?}"));
    let mut differ = String::new();
    for (number, (came, should)) in came.lines().zip(should.lines()).enumerate() {
        if came != should {
            differ += &format!("line {number}: {} instead of {}\n", came.trim(), should.trim());
        }
    }
    let lines: Vec<&str> = differ.lines().take(20).collect();
    panic!("{what}:\n{}", lines.join("\n"));
}

/// Says where two states of all differ.
#[track_caller]
fn same(what: &str, came: &Whole, should: &Whole) {
    let (a, b) = (&came.machine, &should.machine);
    same_machine(what, a, b);
    equal(what, &came.observer.units, &should.observer.units);
    assert!(
        came.observer == should.observer,
        "{what}: what the observer has written"
    );
}

#[track_caller]
fn same_machine(what: &str, a: &Snapshot, b: &Snapshot) {
    equal(what, &a.soft.cpus, &b.soft.cpus);
    equal(what, &a.machine, &b.machine);
    equal(what, &a.soft.translations, &b.soft.translations);
    let pages = a.pages.iter().chain(b.pages.iter());
    let differ: Vec<u64> = pages
        .map(|(gpa, _)| gpa)
        .filter(|gpa| a.pages.get(*gpa) != b.pages.get(*gpa))
        .collect();
    if let Some(&gpa) = differ.first() {
        let bytes = |state: &Snapshot| state.pages.get(gpa).map_or(vec![0; 4096], |page| page.to_vec());
        let (came, should) = (bytes(a), bytes(b));
        let first = (0..4096).find(|&at| came[at] != should[at]).unwrap_or(0) & !7;
        let words = |bytes: &[u8]| format!("{:x?}", &bytes[first..][..8]);
        panic!(
            "{what}: pages {differ:x?}; at {:#x} there is {} instead of {}",
            gpa + first as u64,
            words(&came),
            words(&should)
        );
    }
    assert!(a == b, "{what}");
}

fn written(state: &Whole, from: u64, len: u64) -> usize {
    let pages = (from..from + len).step_by(4096);
    let pages = pages.filter_map(|gpa| state.machine.pages.get(gpa));
    pages.flatten().filter(|byte| **byte != 0).count()
}

fn at_every_instruction(model: &'static CpuModel) {
    let end = Observed::new(model).run_out();
    let steps = end.machine.soft.steps;
    assert!(steps > 2000, "{}: {steps}", model.name);
    if model.units.pt.is_some() {
        assert!(written(&end, TRACE, 0x1_0000) > 200, "{}: a trace", model.name);
    }
    let excluded = model.units.lbr.is_some_and(|lbr| lbr.excluded_by_pt);
    assert!(excluded || written(&end, BTS, 0x4000) > 100, "{}: branches", model.name);
    assert!(written(&end, PEBS, 0x4000) > 10, "{}: samples", model.name);

    let (mut walker, mut other) = (Observed::new(model), Observed::new(model));
    for step in 0..steps - 1 {
        assert!(walker.vm.step(&mut walker.console).unwrap().is_none());
        let state = walker.save();
        assert_eq!(state.machine.soft.steps, step + 1);
        // Every so often a machine that has never run, and otherwise one that has come to its end.
        if step % 64 == 0 {
            other = Observed::new(model);
        }
        other.set_state(&state);
        let what = format!("{} after step {step}", model.name);
        same(&what, &other.save(), &state);
        same(&what, &other.run_out(), &end);
    }
}

// covers: snapshot/every-instruction
#[test]
fn the_state_at_every_instruction_goes_on_to_the_same_bytes() {
    for model in models() {
        at_every_instruction(model);
    }
}

/// The models that the program runs on, in the default form the first one alone.
fn models() -> Vec<&'static CpuModel> {
    let rtm = |model: &CpuModel| model.with_toggles("+rtm").unwrap();
    let all: [&'static CpuModel; 7] = [
        rtm(&SKYLAKE_SERVER),
        rtm(&HASWELL),
        &SAPPHIRERAPIDS,
        &SNOWRIDGE,
        &ALDERLAKE,
        &WESTMERE,
        &BROADWELL,
    ];
    let full = guest_tests::full();
    all[..if full { 7 } else { 1 }].to_vec()
}

// covers: reverse/units
#[test]
fn going_back_takes_what_every_unit_has_under_way_along() {
    for model in models() {
        let config = MachineConfig {
            reverse: Some(minivmm::config::ReverseOptions {
                spacing: 301,
                ..minivmm::config::ReverseOptions::default()
            }),
            ..flat::config(model)
        };
        let (mut vm, mut console) = flat::whole_of(&config, 0, &JUMPS, program(model));
        let look = |vm: &mut Run| {
            let state = vm.save();
            (state.soft.steps, state.soft.cpus, state.pages)
        };
        let mut seen = Vec::new();
        while vm.run_for(&mut console, 17).unwrap().is_none() {
            seen.push(look(&mut vm));
        }
        let end = look(&mut vm);
        assert!(seen.len() > 100, "{}: {}", model.name, seen.len());
        for round in 0..seen.len() {
            let known = &seen[round * 71 % seen.len()];
            assert!(vm.seek(&mut console, known.0).unwrap().is_none());
            assert!(look(&mut vm) == *known, "{}: step {}", model.name, known.0);
            if round % 8 == 0 {
                vm.run(&mut console).unwrap();
                assert!(look(&mut vm) == end, "{}: from step {}", model.name, known.0);
            }
        }
    }
}

fn open(config: &MachineConfig) -> (Run, Console) {
    let vm = Run::new(config).unwrap();
    let console = Console::open(&config.serial, &[], vm.line()).unwrap();
    (vm, console)
}

/// Runs a machine with stops at which its state is taken, and from each state another machine: all come to the same.
fn stops(config: &MachineConfig, steps: impl Iterator<Item = u64>) {
    let (mut vm, mut console) = open(config);
    let mut states = Vec::new();
    for step in steps {
        if vm.run_for(&mut console, step - vm.steps()).unwrap().is_some() {
            break;
        }
        states.push(vm.save());
    }
    assert!(states.len() > 3, "{}", states.len());
    // Without a stop, in one go.
    let (mut whole, mut console) = open(config);
    whole.run(&mut console).unwrap();
    let end = whole.save();
    let said = console.take_output();
    let (mut again, _) = open(config);
    for state in states.iter().rev() {
        again.set_state(state).unwrap();
        // What was said before the state was taken has been said elsewhere.
        let mut console = Console::open(&config.serial, &[], again.line()).unwrap();
        again.run(&mut console).unwrap();
        let came = again.save();
        let what = format!("from step {}", state.soft.steps);
        same_machine(&what, &came, &end);
        assert!(said.ends_with(&console.take_output()), "{what}");
    }
}

// covers: snapshot/machine
#[test]
fn a_machine_with_several_cpus_goes_on_from_any_turn() {
    let config = MachineConfig {
        cpus: 3,
        cmdline: Some(b"3".to_vec()),
        model: &SKYLAKE_SERVER,
        ..MachineConfig::new(SMP)
    };
    // Odd distances, so that no turn's end is always met.
    stops(&config, (1..60).map(|n| n * 4001));
}

// covers: snapshot/machine
#[test]
fn a_booting_linux_goes_on_from_any_state() {
    let config = MachineConfig {
        cpus: 2,
        memory: 256 << 20,
        initrd: vec![linux().initrd.clone().into()],
        cmdline: Some(b"console=ttyS0 panic=-1 minivmm.script=nothing".to_vec()),
        model: &SKYLAKE_SERVER,
        max_instructions: Some(60_000_000),
        ..MachineConfig::new(&linux().kernel)
    };
    stops(&config, (1..5).map(|n| n * 12_345_679));
}

// covers: snapshot/machine
#[test]
fn a_state_of_another_machine_is_refused() {
    let config = MachineConfig {
        memory: 4 << 20,
        ..MachineConfig::new(guest_tests::HELLO)
    };
    let (mut vm, _) = open(&config);
    let before = vm.save();
    for config in [
        MachineConfig {
            cpus: 2,
            ..config.clone()
        },
        MachineConfig {
            memory: 8 << 20,
            ..config.clone()
        },
        MachineConfig {
            model: &SKYLAKE_SERVER,
            ..config.clone()
        },
    ] {
        let other = open(&config).0.save();
        let why = vm.set_state(&other).unwrap_err().to_string();
        assert_eq!(why.lines().count(), 1, "{why}");
        assert!(vm.save() == before, "{why}");
    }
    // One that is of this machine but for a device.
    let mut state = before.clone();
    state.machine.virtio.clear();
    let why = vm.set_state(&state).unwrap_err().to_string();
    assert!(vm.save() == before, "{why}");
}
