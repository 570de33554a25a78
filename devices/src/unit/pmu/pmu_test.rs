//! Counters against hand-made streams, by a stand-in for the executor that keeps the rules of [`Watch`](x86::watch::Watch): records are handed
//! over before any other callback and when there is no more room, and a tick comes when the interest said so.

#[path = "pebs_test.rs"]
mod pebs;
#[path = "netburst_test.rs"]
mod pentium4;
#[path = "transactions_test.rs"]
mod transactions;

use x86::fault::PageFaultCode;
use x86::model::{
    ALDERLAKE, BROADWELL, CORE2, CpuModel, HASWELL, ICELAKE_SERVER, MODELS, NETBURST, P6, SANDYBRIDGE, SAPPHIRERAPIDS,
    SKYLAKE_SERVER, SNOWRIDGE, WESTMERE, by_name,
};
use x86::msr::*;
use x86::pmu::{Caches, Count};
use x86::watch::{
    Abort, Access, AccessKind, BadPhys, BranchRecord, Change, CodeSize, Context, Effects, Far, Flow, Interest,
    PageFault, Processor, TraceMem,
};

use super::*;
use crate::unit::cache::{Hierarchy, HitLevel, Memory, Translation};

const GP: MsrFault = MsrFault::GeneralProtection;
const AREA: u64 = 0x1000;
const BUFFER: u64 = 0x2000;
/// The first address that does not translate.
const END: u64 = 0x4000;

/// A processor as a unit sees it.
struct Core {
    memory: Vec<u8>,
    gpr: [u64; 16],
    rip: u64,
    cpl: u8,
    retired: u64,
    step: u64,
}

impl Default for Core {
    fn default() -> Self {
        Self {
            memory: vec![0; END as usize],
            gpr: std::array::from_fn(|i| 0x1111 * i as u64),
            rip: 0x7000,
            cpl: 0,
            retired: 0,
            step: 0,
        }
    }
}

impl Core {
    fn place(&self, la: u64, len: u64, write: bool) -> Result<std::ops::Range<usize>, PageFault> {
        match la.checked_add(len) {
            Some(end) if end <= END => Ok(la as usize..end as usize),
            _ => Err(PageFault {
                address: la.max(END),
                code: PageFaultCode::new().with_write(write),
            }),
        }
    }

    fn word(&self, la: u64) -> u64 {
        u64::from_le_bytes(self.memory[la as usize..][..8].try_into().unwrap())
    }

    fn set_word(&mut self, la: u64, value: u64) {
        self.memory[la as usize..][..8].copy_from_slice(&value.to_le_bytes());
    }
}

impl TraceMem for Core {
    fn read_linear(&mut self, la: u64, bytes: &mut [u8]) -> Result<(), PageFault> {
        let range = self.place(la, bytes.len() as u64, false)?;
        bytes.copy_from_slice(&self.memory[range]);
        Ok(())
    }

    fn probe_linear(&mut self, la: u64, len: u64) -> Result<(), PageFault> {
        self.place(la, len, true).map(drop)
    }

    fn write_linear(&mut self, la: u64, bytes: &[u8]) -> Result<(), PageFault> {
        let range = self.place(la, bytes.len() as u64, true)?;
        self.memory[range].copy_from_slice(bytes);
        Ok(())
    }

    fn read_phys(&mut self, pa: u64, _: &mut [u8]) -> Result<(), BadPhys> {
        Err(BadPhys { address: pa })
    }

    fn write_phys(&mut self, pa: u64, _: &[u8]) -> Result<(), BadPhys> {
        Err(BadPhys { address: pa })
    }
}

impl Processor for Core {
    fn gpr(&self, number: u8) -> u64 {
        self.gpr[usize::from(number)]
    }

    fn xmm(&self, number: u8) -> u128 {
        0x1_0000_0000_0000_0000_u128 * u128::from(number)
    }

    fn rip(&self) -> u64 {
        self.rip
    }

    fn rflags(&self) -> u64 {
        0x202
    }

    fn context(&self) -> Context {
        Context {
            cpl: self.cpl,
            code: CodeSize::Bits64,
            long_mode: true,
            ..Context::default()
        }
    }

    fn retired(&self) -> u64 {
        self.retired
    }

    fn step(&self) -> u64 {
        self.step
    }

    fn tsc(&mut self) -> u64 {
        self.step + 1_000_000
    }
}

/// An instruction of a stream.
#[derive(Clone, Copy, Debug)]
enum Do {
    /// MOV EAX, imm: one byte long, as all of them.
    Mov(u64),
    /// A REP with so many iterations.
    Rep(u64),
    Branch(Flow),
    /// A far transfer to this ring.
    Far(Far, u8),
    Load(u64),
    Store(u64),
    Halt,
    Wake,
    /// XBEGIN, whose fallback is at 500H.
    Begin,
    /// XEND.
    Commit,
    /// The instruction here does not retire.
    Abort(Abort),
}

/// The executor's side.
struct Run {
    pmu: Pmu,
    core: Core,
    caches: Hierarchy,
    records: Vec<BranchRecord>,
    interest: Interest,
    tick_at: u64,
    /// Retired instructions at each interrupt request.
    pmis: Vec<u64>,
    faults: Vec<PageFault>,
    /// The step of the last XBEGIN.
    begun: u64,
}

fn inputs() -> PebsInputs<'static> {
    PebsInputs {
        ds_area: AREA,
        last_branch: &|number| [0x100 + u64::from(number), 0x200, 0x300],
    }
}

impl Run {
    fn new(model: &'static CpuModel) -> Self {
        let mut run = Self {
            pmu: pmu(model).unwrap(),
            core: Core::default(),
            caches: Hierarchy::of(model),
            records: Vec::new(),
            interest: Interest::NOTHING,
            tick_at: u64::MAX,
            pmis: Vec::new(),
            faults: Vec::new(),
            begun: 0,
        };
        run.ask();
        run
    }

    fn ask(&mut self) {
        self.interest = self.pmu.interest(&mut self.core, &inputs());
        self.tick_at = self.core.retired.saturating_add(self.interest.instructions);
    }

    fn said(&mut self, effects: Effects) {
        if effects.pmi {
            self.pmis.push(self.core.retired);
        }
        self.faults.extend(effects.fault);
        self.ask();
        if effects.abort {
            self.abort(Abort::Event);
        }
    }

    fn hand_over(&mut self) {
        if !self.records.is_empty() {
            let records = std::mem::take(&mut self.records);
            let mut effects = self.pmu.branches(&records, &mut self.core, &inputs());
            if self.pmu.counts_fetches() {
                let fetched = self.caches.branches(&records, Some);
                effects = effects.and(self.pmu.fetched(&fetched, &mut self.core, &inputs()));
            }
            self.said(effects);
        }
    }

    fn tick(&mut self) {
        self.hand_over();
        let effects = self.pmu.tick(&mut self.core, &inputs());
        self.said(effects);
    }

    /// An instruction retires.
    fn retire(&mut self, steps: u64) {
        self.core.retired += 1;
        self.core.step += steps;
        self.core.rip += 1;
    }

    /// The transaction is undone.
    fn abort(&mut self, cause: Abort) {
        let from = self.core.rip;
        self.core.rip = 0x500;
        self.core.gpr[0] = cause.status().into();
        let steps = self.core.step - self.begun;
        self.change(Change::TransactionAbort { from, cause, steps });
    }

    fn change(&mut self, change: Change) {
        self.hand_over();
        let effects = self.pmu.state_change(change, &mut self.core, &inputs());
        self.said(effects);
    }

    fn after(&mut self) {
        if self.records.len() as u64 >= u64::from(self.interest.branch_room) {
            self.hand_over();
        }
        if self.core.retired >= self.tick_at {
            self.tick();
        }
    }

    fn run(&mut self, stream: &[Do]) {
        for &what in stream {
            let from = self.core.rip;
            match what {
                Do::Mov(value) => {
                    self.retire(1);
                    self.core.gpr[0] = value;
                }
                Do::Rep(iterations) => self.retire(iterations),
                Do::Branch(flow) => {
                    self.retire(1);
                    if self.interest.branches.includes(flow) {
                        self.record(from, flow, self.core.cpl);
                    }
                }
                Do::Far(far, cpl) => {
                    self.hand_over();
                    if !matches!(far, Far::Exception | Far::Interrupt) {
                        self.retire(1);
                    }
                    let from_cpl = std::mem::replace(&mut self.core.cpl, cpl);
                    if self.interest.branches.any() || self.interest.transfers {
                        self.record(from, Flow::Far(far), from_cpl);
                        self.hand_over();
                    }
                }
                Do::Load(address) | Do::Store(address) => {
                    self.retire(1);
                    if self.interest.every_access {
                        self.hand_over();
                        let kind = if matches!(what, Do::Load(_)) {
                            AccessKind::Read
                        } else {
                            AccessKind::Write
                        };
                        let access = Access {
                            address,
                            size: 8,
                            kind,
                            ip: from,
                        };
                        let asked = self.pmu.counts_accesses();
                        let memory = asked.then(|| self.caches.access(&access, Some)).flatten();
                        let effects = self.pmu.access(&access, memory, &mut self.core, &inputs());
                        self.said(effects);
                    }
                }
                Do::Begin => {
                    self.begun = self.core.step;
                    self.retire(1);
                    self.change(Change::TransactionBegin { at: from });
                }
                Do::Commit => {
                    let steps = self.core.step - self.begun;
                    self.retire(1);
                    self.change(Change::TransactionCommit { at: from, steps });
                }
                Do::Abort(cause) => self.abort(cause),
                Do::Halt | Do::Wake => {
                    if matches!(what, Do::Halt) {
                        self.retire(1);
                    }
                    if self.interest.transfers {
                        let change = if matches!(what, Do::Halt) {
                            Change::Halt
                        } else {
                            Change::Wake { store: false }
                        };
                        let effects = self.pmu.state_change(change, &mut self.core, &inputs());
                        self.said(effects);
                    }
                }
            }
            self.after();
        }
    }

    fn record(&mut self, from: u64, flow: Flow, from_cpl: u8) {
        self.records.push(BranchRecord {
            from,
            to: self.core.rip,
            step: self.core.step,
            flow: flow.code(),
            length: 1,
            from_cpl,
            to_cpl: self.core.cpl,
            loads_cr3: false,
            run: [0; 3],
        });
    }

    /// WRMSR, which retires.
    fn write(&mut self, msr: u32, value: u64) {
        self.hand_over();
        self.try_write(msr, value)
            .unwrap_or_else(|fault| panic!("{msr:#x} = {value:#x}: {fault:?}"));
        self.retire(1);
        self.tick();
    }

    fn try_write(&mut self, msr: u32, value: u64) -> Result<(), MsrFault> {
        self.pmu.write_msr(msr, value, &mut self.core, &inputs())
    }

    fn read(&mut self, msr: u32) -> u64 {
        self.hand_over();
        self.pmu.read_msr(msr, &mut self.core, &inputs()).unwrap()
    }

    /// The debug-store area: room for so many bytes, threshold after so many, and the counters' resets.
    fn area(&mut self, bytes: u64, threshold: u64, reset: u64) {
        for (field, value) in [(4, BUFFER), (5, BUFFER), (6, BUFFER + bytes), (7, BUFFER + threshold)] {
            self.core.set_word(AREA + 8 * field, value);
        }
        (8..20).for_each(|field| self.core.set_word(AREA + 8 * field, reset));
    }

    fn index(&self) -> u64 {
        self.core.word(AREA + 0x28) - BUFFER
    }
}

/// The counters of a part with all that it has, whatever of it is shown.
fn pmu(model: &'static CpuModel) -> Option<Pmu> {
    Pmu::with_features(model, model.part_features())
}

const EN: u64 = 1 << 22;
const INT: u64 = 1 << 20;
const OS: u64 = 1 << 17;
const USR: u64 = 1 << 16;
const INSTRUCTIONS: u64 = EN | OS | USR | 0xC0;
const CYCLES: u64 = EN | OS | USR | 0x3C;
const BRANCHES: u64 = EN | OS | USR | 0xC4;
const JUMP: Do = Do::Branch(Flow::Jump);

fn movs(n: u64) -> Vec<Do> {
    (1..=n).map(Do::Mov).collect()
}

// covers: pmu/exact
#[test]
fn counters_count_what_retires() {
    let stream = [
        Do::Mov(1),
        Do::Rep(100),
        JUMP,
        Do::Branch(Flow::Cond { taken: false }),
        Do::Branch(Flow::Ret),
        Do::Far(Far::Exception, 0),
        Do::Far(Far::Iret, 0),
    ];
    for (select, fixed, expected, why) in [
        (INSTRUCTIONS, 0, 7, "six and the WRMSR"),
        (CYCLES, 1, 106, "each iteration"),
        (BRANCHES, 0, 4, "an exception is no instruction"),
        (CYCLES | 1 << 24 | 1 << 23, 0, 0, "no cycle is none"),
        (
            INSTRUCTIONS | 1 << 24 | 1 << 23,
            0,
            99,
            "cycles without a retired instruction",
        ),
        (
            INSTRUCTIONS | 16 << 24 | 1 << 23,
            0,
            106,
            "all cycles, as Linux asks for them",
        ),
        (INSTRUCTIONS | 2 << 24, 0, 0, "never two"),
        (BRANCHES | 0x0100, 0, 1, "conditional"),
        (BRANCHES | 0x0200, 0, 0, "near calls"),
        (
            BRANCHES | 1 << 18,
            0,
            2,
            "bursts: the three, then IRET right after, and so no second burst",
        ),
        (CYCLES | 1 << 18, 0, 1, "cycles begin once"),
    ] {
        let mut run = Run::new(&WESTMERE);
        run.write(IA32_PERF_GLOBAL_CTRL, 0);
        run.write(IA32_PERFEVTSEL0, select);
        run.write(IA32_FIXED_CTR_CTRL, 0x33);
        run.write(IA32_PERF_GLOBAL_CTRL, 0x3_0000_0001);
        let before = run.core.retired;
        run.run(&stream);
        run.hand_over();
        run.write(IA32_PERF_GLOBAL_CTRL, 0);
        let instructions = run.core.retired - before - 1;
        run.run(&movs(5));
        // The burst row depends on which steps follow each other.
        let value = run.read(IA32_PMC0);
        if select & 1 << 18 != 0 && select & 0xFF == 0xC4 {
            assert!((1..=2).contains(&value), "{why}: {value}");
        } else {
            assert_eq!(value, expected, "{why}");
        }
        assert_eq!(run.read(IA32_FIXED_CTR0), instructions + 1, "fixed counter 0: {why}");
        assert_eq!(run.read(IA32_FIXED_CTR0 + 1), 106, "fixed counter 1: {why} {fixed}");
    }
}

// covers: pmu/rings
#[test]
fn rings_are_told_apart_at_each_transfer() {
    let stream = [
        Do::Mov(0),
        Do::Far(Far::Sysret, 3),
        Do::Mov(0),
        Do::Mov(0),
        JUMP,
        Do::Far(Far::Exception, 0),
        Do::Mov(0),
        Do::Far(Far::Iret, 3),
        Do::Far(Far::Syscall, 0),
        Do::Mov(0),
    ];
    for (select, expected, why) in [
        (INSTRUCTIONS & !USR, 1 + 2 + 2 + 1, "WRMSR, MOV, SYSRET; MOV, IRET; MOV"),
        (INSTRUCTIONS & !OS, 3 + 1, "two MOVs and JMP; SYSCALL"),
        (INSTRUCTIONS, 10, "all"),
        (INSTRUCTIONS & !OS & !USR, 0, "no ring"),
        (BRANCHES & !USR, 2, "SYSRET, IRET"),
        (BRANCHES & !OS, 2, "JMP, SYSCALL"),
        (CYCLES & !OS, 4, "the same as instructions"),
        (CYCLES & !OS | 1 << 18, 2, "entries into ring 3"),
        (CYCLES & !USR | 1 << 18, 3, "ring 0 begins thrice"),
    ] {
        let mut run = Run::new(&WESTMERE);
        run.write(IA32_PERFEVTSEL0, select);
        run.run(&stream);
        run.hand_over();
        // GLOBAL_CTRL has the counters on since reset, so the WRMSR of the event select is the enabling one.
        assert_eq!(run.read(IA32_PMC0), expected, "{why}");
    }
}

// covers: pmu/halt
#[test]
fn cycles_do_not_pass_in_hlt() {
    let mut run = Run::new(&WESTMERE);
    run.write(IA32_PERFEVTSEL0, CYCLES);
    run.run(&[Do::Mov(0), Do::Halt]);
    // Other processors run.
    run.core.step += 1_000_000;
    run.run(&[Do::Wake, Do::Mov(0)]);
    assert_eq!(run.read(IA32_PMC0), 4, "WRMSR, MOV, HLT, MOV");
}

// covers: pmu/overflow
#[test]
fn an_overflow_interrupts_after_the_very_instruction_or_branch() {
    for (select, preset, stream, at, why) in [
        (
            INSTRUCTIONS,
            -10_i64,
            movs(20),
            Some(10),
            "instruction 10, the WRMSR first",
        ),
        (INSTRUCTIONS, -1, movs(20), Some(1), "the WRMSR itself"),
        (
            BRANCHES,
            -3,
            vec![JUMP, Do::Mov(0), JUMP, JUMP, JUMP],
            Some(5),
            "the third branch",
        ),
        (CYCLES, -7, movs(20), Some(7), "a cycle each"),
        (
            CYCLES,
            -7,
            vec![Do::Rep(100), Do::Mov(0)],
            Some(3),
            "not within an instruction, and at the end of the run at the latest",
        ),
        (INSTRUCTIONS & !INT, -10, movs(20), None, "no INT, no interrupt"),
    ] {
        let select = if at.is_some() { select | INT } else { select };
        let mut run = Run::new(&WESTMERE);
        run.write(IA32_PERF_GLOBAL_CTRL, 0);
        run.write(IA32_PERFEVTSEL0, select);
        run.write(IA32_PMC0, preset as u64);
        let before = run.core.retired;
        run.write(IA32_PERF_GLOBAL_CTRL, 1);
        run.run(&stream);
        run.tick();
        let pmis: Vec<u64> = run.pmis.iter().map(|pmi| pmi - before).collect();
        assert_eq!(pmis, Vec::from_iter(at), "{why}");
        assert_eq!(run.read(IA32_PERF_GLOBAL_STATUS), 1, "{why}");
        run.write(IA32_PERF_GLOBAL_OVF_CTRL, 1);
        assert_eq!(run.read(IA32_PERF_GLOBAL_STATUS), 0, "{why}");
    }
}

// covers: pmu/interest
#[test]
fn clocks_never_ask_for_branches_or_accesses() {
    for (select, branches, transfers, every_access, every_instruction, why) in [
        (
            CYCLES,
            false,
            true,
            false,
            false,
            "cycles, as the lockup watchdog counts them",
        ),
        (INSTRUCTIONS, false, false, false, false, "instructions"),
        (INSTRUCTIONS & !OS, false, true, false, false, "of one ring"),
        (
            EN | OS | USR | 0x4F2E,
            true,
            false,
            true,
            false,
            "last-level cache references, of data and of code",
        ),
        (BRANCHES, true, false, false, false, "branches"),
        (EN | OS | USR | 0x10CB, false, false, true, false, "loads"),
        (EN | OS | USR | 0x02C0, false, false, false, true, "x87"),
        (0, false, false, false, false, "nothing"),
        (
            EN | OS | USR | 0xEEEE,
            false,
            false,
            false,
            false,
            "an event that does not exist",
        ),
    ] {
        let mut run = Run::new(&WESTMERE);
        run.write(IA32_PERFEVTSEL0, select);
        let a = run.interest;
        assert_eq!(
            (a.branches.any(), a.transfers, a.every_access, a.every_instruction),
            (branches, transfers, every_access, every_instruction),
            "{why}"
        );
        assert!(a.instructions > 1 << 40, "{why}");
        assert_eq!(
            a == Interest::NOTHING,
            select == 0 || select & 0xFFFF == 0xEEEE,
            "{why}"
        );
    }
}

// covers: kvm/native-counters
#[test]
fn what_counts_time_alone_counts_while_the_guest_is_elsewhere() {
    const FIXED_CYCLES: u64 = 0x30;
    for (select, fixed, cycles, enough, why) in [
        (CYCLES, 0, 5000, true, "cycles"),
        (
            0,
            FIXED_CYCLES,
            5000,
            true,
            "the fixed counter, as the lockup watchdog has it",
        ),
        (CYCLES | INT, 0, 5000, true, "with an interrupt that is far away"),
        (0, 0, 0, true, "nothing is counted"),
        (
            CYCLES & !USR,
            0,
            0,
            false,
            "one ring alone: nobody says when it is left",
        ),
        (0, FIXED_CYCLES & 0x10, 0, false, "the same of the fixed one"),
        (INSTRUCTIONS, 0, 0, false, "instructions"),
        (BRANCHES, 0, 0, false, "branches"),
        (CYCLES | 1 << 18, 0, 0, false, "edges"),
        (CYCLES, 3, 0, false, "instructions beside cycles"),
    ] {
        let mut run = Run::new(&WESTMERE);
        run.write(IA32_FIXED_CTR_CTRL, fixed);
        run.write(IA32_PERF_GLOBAL_CTRL, 7 << 32 | 1);
        run.write(IA32_PERFEVTSEL0, select);
        assert_eq!(run.pmu.time_is_enough(), enough, "{why}");
        if !enough {
            continue;
        }
        let counter = if fixed != 0 { IA32_FIXED_CTR0 + 1 } else { IA32_PMC0 };
        let before = run.read(counter);
        run.pmu.elapsed(5000, true, &mut run.core, &inputs());
        assert_eq!(run.read(counter) - before, cycles, "{why}");
        run.core.step += 77;
        assert_eq!(run.read(counter) - before, cycles, "{why}: HLT is no time");
        run.pmu.elapsed(5, false, &mut run.core, &inputs());
        run.core.step += 10;
        let more = if cycles == 0 { 0 } else { 15 };
        assert_eq!(run.read(counter) - before, cycles + more, "{why}: it has been woken");
    }
}

// covers: kvm/native-counters
#[test]
fn an_overflow_elsewhere_comes_when_it_was_said_to() {
    for (select, model, why) in [
        (CYCLES | INT, &WESTMERE, "cycles"),
        (EN | OS | USR | INT | 0x013C, &SAPPHIRERAPIDS, "reference cycles"),
        (EN | OS | USR | INT | 0x01A4, &SAPPHIRERAPIDS, "slots"),
    ] {
        let mut run = Run::new(model);
        run.write(IA32_PERFEVTSEL0, select);
        run.write(IA32_PMC0, -1000i32 as u32 as u64);
        let (mut rounds, mut passed) = (0, 0);
        while run.pmu.time_is_enough() {
            let left = run
                .pmu
                .cycles_left()
                .unwrap_or_else(|| panic!("{why}: {rounds} {passed}"));
            assert!(left > 0 && rounds < 3, "{why}: {rounds} rounds, {passed} cycles");
            assert_eq!(run.read(IA32_PERF_GLOBAL_STATUS), 0, "{why}: early");
            if left > 1 {
                run.pmu.elapsed(left - 1, false, &mut run.core, &inputs());
                assert!(run.pmu.time_is_enough(), "{why}: {left} were left");
            }
            run.pmu.elapsed(1, false, &mut run.core, &inputs());
            (rounds, passed) = (rounds + 1, passed + left);
        }
        assert_eq!(run.read(IA32_PERF_GLOBAL_STATUS), 1, "{why}");
        run.ask();
        assert_eq!(run.interest.instructions, 0, "{why}: the interrupt is to be asked for");
        run.tick();
        assert_eq!(run.pmis.len(), 1, "{why}");
    }
}

// covers: pmu/freeze
#[test]
fn a_freeze_stops_the_counters_as_the_version_does_it() {
    for (model, control, status) in [(&WESTMERE, 0, 0), (&SKYLAKE_SERVER, 1, status::COUNTERS_FROZEN)] {
        let mut run = Run::new(model);
        run.write(IA32_PERFEVTSEL0, INSTRUCTIONS);
        run.write(IA32_PERF_GLOBAL_CTRL, 1);
        run.run(&movs(3));
        let frozen = run.read(IA32_PMC0);
        run.pmu.freeze();
        run.run(&movs(3));
        assert_eq!(run.read(IA32_PMC0), frozen, "{}", model.name);
        assert_eq!(run.read(IA32_PERF_GLOBAL_CTRL), control, "{}", model.name);
        assert_eq!(run.read(IA32_PERF_GLOBAL_STATUS), status, "{}", model.name);
        if status != 0 {
            run.write(IA32_PERF_GLOBAL_OVF_CTRL, status);
            run.run(&movs(3));
            assert_eq!(run.read(IA32_PMC0), frozen + 4, "thawed, the WRMSR counts");
        }
    }
}

// covers: pmu/rdpmc
#[test]
fn rdpmc_reads_the_counters_that_there_are() {
    for (name, general, fixed, metrics) in [
        ("p6", 2, 0, false),
        ("core2", 2, 3, false),
        ("westmere", 4, 3, false),
        ("icelake-server", 8, 4, true),
        ("alderlake", 8, 4, true),
    ] {
        let mut run = Run::new(by_name(name).unwrap());
        let mut ask = |index| run.pmu.rdpmc(index, &mut run.core, &PebsInputs::NONE).is_ok();
        for index in 0..16 {
            assert_eq!(ask(index), index < general, "{name} {index}");
            assert_eq!(ask(1 << 30 | index), index < fixed, "{name} fixed {index}");
        }
        assert_eq!(ask(1 << 29), metrics, "{name}");
        for index in [1 << 31, 1 << 31 | 1, 1 << 28, 3 << 29, u32::MAX] {
            assert!(!ask(index), "{name} {index:#x}");
        }
    }
}

/// How a register takes each bit.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bits {
    /// These can be written and read back, the others are #GP.
    Storage(u64),
    /// Every write is #GP.
    ReadOnly,
    /// Bits 31:0 are sign-extended to this width; the others are ignored.
    SignExtended(u32),
    /// These can be written, and it reads 0.
    Command(u64),
    Absent,
}

// covers: pmu/registers, pebs/registers
#[test]
fn every_bit_of_every_register_on_every_model() {
    use Bits::*;
    const V3_STATUS: u64 = 0xE000_0007_0000_000F;
    const V4_STATUS: u64 = 0xFC80_0007_0000_000F;
    const V5_STATUS: u64 = 0xFC81_000F_0000_00FF;
    const SELECT3: u64 = 0xFFFF_FFFF;
    const SELECT5: u64 = 0x4_FFDF_FFFF;
    let w48 = (1 << 48) - 1;
    for (model, rows) in [
        (
            &P6,
            &[
                (IA32_PMC0, SignExtended(40)),
                (IA32_PMC0 + 1, SignExtended(40)),
                (IA32_PMC0 + 2, Absent),
                (IA32_PERFEVTSEL0, Storage(0xFFDF_FFFF)),
                (IA32_PERFEVTSEL0 + 1, Storage(0xFFDF_FFFF)),
                (IA32_PERFEVTSEL0 + 2, Absent),
                (IA32_FIXED_CTR0, Absent),
                (IA32_PERF_GLOBAL_CTRL, Absent),
                (IA32_PERF_GLOBAL_STATUS, Absent),
                (IA32_PERF_CAPABILITIES, Absent),
                (IA32_PEBS_ENABLE, Absent),
            ][..],
        ),
        (
            &CORE2,
            &[
                (IA32_PMC0 + 1, SignExtended(40)),
                (IA32_PMC0 + 2, Absent),
                (IA32_A_PMC0, Absent),
                (IA32_PERFEVTSEL0 + 1, Storage(0xFFDF_FFFF)),
                (IA32_FIXED_CTR0 + 2, Storage((1 << 40) - 1)),
                (IA32_FIXED_CTR0 + 3, Absent),
                (IA32_PERF_CAPABILITIES, ReadOnly),
                (IA32_FIXED_CTR_CTRL, Storage(0xBBB)),
                (IA32_PERF_GLOBAL_STATUS, ReadOnly),
                (IA32_PERF_GLOBAL_CTRL, Storage(0x7_0000_0003)),
                (IA32_PERF_GLOBAL_OVF_CTRL, Command(0xC000_0007_0000_0003)),
                (IA32_PERF_GLOBAL_STATUS_SET, Absent),
                (IA32_PEBS_ENABLE, Storage(1)),
                (MSR_PEBS_LD_LAT, Absent),
                (MSR_OFFCORE_RSP_0, Absent),
            ][..],
        ),
        (
            &WESTMERE,
            &[
                (IA32_PMC0 + 3, SignExtended(48)),
                (IA32_PMC0 + 4, Absent),
                (IA32_A_PMC0, Absent),
                (IA32_PERFEVTSEL0 + 3, Storage(SELECT3)),
                (IA32_PERFEVTSEL0 + 4, Absent),
                (IA32_FIXED_CTR0, Storage(w48)),
                (IA32_FIXED_CTR_CTRL, Storage(0xFFF)),
                (IA32_PERF_CAPABILITIES, ReadOnly),
                (IA32_PERF_GLOBAL_STATUS, ReadOnly),
                (IA32_PERF_GLOBAL_CTRL, Storage(0x7_0000_000F)),
                (IA32_PERF_GLOBAL_OVF_CTRL, Command(V3_STATUS)),
                (IA32_PERF_GLOBAL_STATUS_SET, Absent),
                (IA32_PERF_GLOBAL_INUSE, Absent),
                (IA32_PEBS_ENABLE, Storage(0xF_0000_000F)),
                (MSR_PEBS_LD_LAT, Storage(0xFFFF)),
                (MSR_PEBS_DATA_CFG, Absent),
                (MSR_PEBS_FRONTEND, Absent),
                (MSR_OFFCORE_RSP_0, Storage(0xF7FF)),
                (MSR_OFFCORE_RSP_1, Storage(0xF7FF)),
            ][..],
        ),
        (
            &SANDYBRIDGE,
            &[
                (IA32_PMC0 + 3, SignExtended(48)),
                (IA32_A_PMC0 + 3, Storage(w48)),
                (IA32_A_PMC0 + 4, Absent),
                (IA32_PERFEVTSEL0, Storage(SELECT3)),
                (IA32_PEBS_ENABLE, Storage(1 << 63 | 0xF_0000_000F)),
                (MSR_OFFCORE_RSP_1, Storage(0x3F_FFFF_8FFF)),
            ][..],
        ),
        (
            &HASWELL,
            &[
                (IA32_A_PMC0, Storage(w48)),
                (IA32_PEBS_ENABLE, Storage(0xF_0000_000F)),
                (MSR_PEBS_LD_LAT, Storage(0xFFFF)),
                (MSR_PEBS_FRONTEND, Absent),
            ][..],
        ),
        (
            &BROADWELL,
            &[
                (IA32_PEBS_ENABLE, Storage(0xF_0000_000F)),
                (IA32_PERF_GLOBAL_OVF_CTRL, Command(V3_STATUS | status::TRACE_TOPA)),
            ][..],
        ),
        (
            &SKYLAKE_SERVER,
            &[
                (IA32_PERF_GLOBAL_OVF_CTRL, Command(V4_STATUS)),
                (IA32_PERF_GLOBAL_STATUS_SET, Command(V4_STATUS & !(1 << 63))),
                (IA32_PERF_GLOBAL_INUSE, ReadOnly),
                (MSR_PEBS_FRONTEND, Storage(0x7F_FFFF)),
                (MSR_PEBS_DATA_CFG, Absent),
                (MSR_PERF_METRICS, Absent),
            ][..],
        ),
        (
            &ICELAKE_SERVER,
            &[
                (IA32_PMC0 + 7, SignExtended(48)),
                // Parts with transactions: IN_TX, and IN_TXCP of counter 2.
                (IA32_PERFEVTSEL0 + 2, Storage(SELECT5 | 3 << 32)),
                (IA32_PERFEVTSEL0 + 7, Storage(SELECT5 | 1 << 32)),
                (IA32_FIXED_CTR0 + 3, Storage(w48)),
                (IA32_FIXED_CTR_CTRL, Storage(0x1111_0000_BBBB)),
                (IA32_PERF_GLOBAL_CTRL, Storage(0x1_000F_0000_00FF)),
                (IA32_PERF_GLOBAL_OVF_CTRL, Command(V5_STATUS)),
                (MSR_PERF_METRICS, Storage(!0)),
                (IA32_PEBS_ENABLE, Storage(0xF_0000_00FF)),
                (MSR_PEBS_DATA_CFG, Storage(0xFF00_000F)),
                (MSR_PEBS_LD_LAT, Storage(0xFFFF)),
            ][..],
        ),
        (
            &SNOWRIDGE,
            &[
                (IA32_PMC0 + 4, Absent),
                (IA32_FIXED_CTR_CTRL, Storage(0x111_0000_0BBB)),
                // Output to the trace, and an interrupt with each record.
                (IA32_PEBS_ENABLE, Storage(0x3000_0007_0000_000F)),
                (MSR_RELOAD_PMC0 + 3, Storage(w48)),
                (MSR_RELOAD_PMC0 + 4, Absent),
                (MSR_RELOAD_FIXED_CTR0 + 2, Storage(w48)),
                (MSR_RELOAD_FIXED_CTR0 + 3, Absent),
                (MSR_PEBS_LD_LAT, Absent),
                (MSR_PERF_METRICS, Absent),
            ][..],
        ),
        (
            &SAPPHIRERAPIDS,
            &[
                (IA32_PERFEVTSEL0 + 7, Storage(SELECT5 | 1 << 32)),
                (IA32_PEBS_ENABLE, Storage(0xF_0000_00FF)),
                (MSR_PERF_METRICS, Storage(!0)),
            ][..],
        ),
        (
            &ALDERLAKE,
            &[
                (IA32_PMC0 + 7, SignExtended(48)),
                (IA32_PMC0 + 8, Absent),
                (IA32_PEBS_ENABLE, Storage(0xF_0000_00FF)),
                (IA32_FIXED_CTR0 + 3, Storage(w48)),
                (IA32_PERF_GLOBAL_CTRL, Storage(0x1_000F_0000_00FF)),
            ][..],
        ),
    ] {
        for &(msr, bits) in rows {
            let what = format!("{} {msr:#x}", model.name);
            let mut run = Run::new(model);
            if bits == Absent {
                assert_eq!(run.try_write(msr, 0), Err(MsrFault::Unclaimed), "{what}");
                let read = run.pmu.read_msr(msr, &mut run.core, &PebsInputs::NONE);
                assert_eq!(read, Err(MsrFault::Unclaimed), "{what}");
                continue;
            }
            let start = run.read(msr);
            for bit in 0..64 {
                let value = 1_u64 << bit;
                let what = format!("{what} bit {bit}");
                let written = run.try_write(msr, value);
                match bits {
                    Storage(writable) => {
                        assert_eq!(written.is_ok(), writable & value != 0, "{what}");
                        if written.is_ok() {
                            // What was enabled may have begun to count; no instruction has retired.
                            assert_eq!(run.read(msr), value, "{what}");
                            run.try_write(msr, 0).unwrap();
                        }
                    }
                    ReadOnly => {
                        assert_eq!(written, Err(GP), "{what}");
                        assert_eq!(run.read(msr), start, "{what}");
                    }
                    SignExtended(width) => {
                        assert_eq!(written, Ok(()), "{what}");
                        let extended = value as u32 as i32 as i64 as u64 & ((1 << width) - 1);
                        assert_eq!(run.read(msr), extended, "{what}");
                    }
                    Command(writable) => {
                        assert_eq!(written.is_ok(), writable & value != 0, "{what}");
                        assert_eq!(run.read(msr), 0, "{what}");
                    }
                    Absent => unreachable!(),
                }
            }
        }
    }
}

// covers: pmu/registers
#[test]
fn capabilities_read_as_the_manual_s_fields() {
    for (name, lbr, pebs, full_width, baseline, metrics) in [
        ("core2", 0x01, 0, false, false, false),
        ("westmere", 0x03, 1, false, false, false),
        ("sandybridge", 0x03, 1, true, false, false),
        ("haswell", 0x04, 2, true, false, false),
        ("broadwell", 0x04, 2, true, false, false),
        ("skylake-server", 0x05, 3, true, false, false),
        ("icelake-server", 0x05, 4, true, true, true),
        ("snowridge", 0x07, 4, true, true, false),
        ("sapphirerapids", 0x3F, 4, true, true, true),
        ("alderlake", 0x3F, 4, true, true, true),
    ] {
        let mut run = Run::new(by_name(name).unwrap());
        let value = run.read(IA32_PERF_CAPABILITIES);
        let bit = |n: u32| value >> n & 1 != 0;
        assert!(value & 0x3F == lbr || value & 0x3F != 0, "{name}: {:#x}", value & 0x3F);
        assert_eq!(value >> 8 & 0xF, pebs, "{name}");
        assert!(bit(6) && bit(7), "{name}: traps, with registers");
        assert!(bit(12), "{name}: counters can freeze in SMM");
        assert_eq!((bit(13), bit(14), bit(15)), (full_width, baseline, metrics), "{name}");
        assert_eq!(bit(16), name == "snowridge", "{name}: records in the trace");
    }
}

// covers: pmu/status
#[test]
fn version_4_sets_and_resets_status_and_says_what_is_in_use() {
    let mut run = Run::new(&SKYLAKE_SERVER);
    run.write(IA32_PERF_GLOBAL_STATUS_SET, 0x2_0000_0005);
    assert_eq!(run.read(IA32_PERF_GLOBAL_STATUS), 0x2_0000_0005);
    run.write(IA32_PERF_GLOBAL_OVF_CTRL, 0x4);
    assert_eq!(run.read(IA32_PERF_GLOBAL_STATUS), 0x2_0000_0001);
    assert!(run.pmis.is_empty(), "a bit that software sets interrupts nobody");
    assert_eq!(run.read(IA32_PERF_GLOBAL_INUSE), 0);
    run.write(IA32_PERFEVTSEL0 + 2, 0xC0);
    run.write(IA32_FIXED_CTR_CTRL, 0x20);
    assert_eq!(run.read(IA32_PERF_GLOBAL_INUSE), 0x2_0000_0004);
    run.write(IA32_PERFEVTSEL0 + 2, 0xC0 | INT);
    assert_eq!(run.read(IA32_PERF_GLOBAL_INUSE), 1 << 63 | 0x2_0000_0004);
}

// covers: pmu/p6
#[test]
fn p6_has_one_enable_for_both_counters() {
    let mut run = Run::new(&P6);
    run.write(IA32_PERFEVTSEL0 + 1, OS | USR | 0xC0);
    run.run(&movs(4));
    assert_eq!(run.read(IA32_PMC0 + 1), 0, "not enabled yet");
    run.write(IA32_PERFEVTSEL0, EN | OS | USR | INT | 0xC4);
    run.write(IA32_PMC0, (-2_i64) as u64);
    run.run(&[JUMP, Do::Mov(0), JUMP, Do::Mov(0)]);
    assert_eq!(run.read(IA32_PMC0 + 1), 6, "two WRMSRs and four more");
    assert_eq!(run.read(IA32_PMC0), 0);
    assert_eq!(run.pmis.len(), 1, "at the second jump");
}

// covers: pmu/metrics
#[test]
fn metrics_share_out_the_slots() {
    let mut run = Run::new(&ICELAKE_SERVER);
    run.write(IA32_FIXED_CTR_CTRL, 0x3000);
    run.write(IA32_FIXED_CTR0 + 3, 0);
    run.write(MSR_PERF_METRICS, 0);
    run.write(IA32_PERF_GLOBAL_CTRL, 1 << 48 | 1 << 35);
    run.run(&[Do::Rep(9)]);
    assert_eq!(run.read(IA32_FIXED_CTR0 + 3), 50, "five slots in each of ten cycles");
    let metrics = run.read(MSR_PERF_METRICS);
    assert_eq!(
        metrics,
        10 | 245 << 24,
        "two of fifty retired, the rest waited: {metrics:#x}"
    );
    run.write(MSR_PERF_METRICS, 0x1234);
    run.write(IA32_PERF_GLOBAL_CTRL, 0);
    run.write(MSR_PERF_METRICS, 0x1234);
    assert_eq!(run.read(MSR_PERF_METRICS), 0x1234);
}

// covers: pmu/mispredict
#[test]
fn what_is_modelled_follows_its_rule() {
    let mut run = Run::new(&WESTMERE);
    run.write(IA32_PERF_GLOBAL_CTRL, 0);
    run.write(IA32_PERFEVTSEL0, EN | OS | USR | 0xC5);
    run.write(IA32_PERF_GLOBAL_CTRL, 1);
    // Forward and taken, seen for the first time: mispredicted. An unconditional jump never is.
    run.run(&[Do::Branch(Flow::Cond { taken: true }), JUMP]);
    assert_eq!(run.read(IA32_PMC0), 1);
}

/// The counters beside the accesses that were made, which another instance of the model sees.
// covers: pmu/llc, pmu/caches
#[test]
fn counters_of_the_caches_agree_with_the_accesses_and_with_each_other() {
    for model in MODELS.iter().copied().filter(|model| model.units.pmu.is_some()) {
        let pmu = pmu(model).unwrap();
        let mut found: Vec<(Caches, u64)> = Vec::new();
        let mut random = 1u64;
        let stream: Vec<Do> = (0..20_000)
            .map(|n| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // Small and large strides: something is found everywhere.
                let range = [1 << 12, 1 << 18, 1 << 25][(random >> 20) as usize % 3];
                let address = 0x10_0000 + (random >> 33) % range;
                match n % 4 {
                    0 | 1 => Do::Load(address),
                    2 => Do::Store(address),
                    _ => Do::Branch(Flow::Jump),
                }
            })
            .collect();
        let mut witness = Hierarchy::of(model);
        let (mut loads, mut stores) = (Vec::<Memory>::new(), Vec::<Memory>::new());
        for what in &stream {
            let (address, kind) = match *what {
                Do::Load(address) => (address, AccessKind::Read),
                Do::Store(address) => (address, AccessKind::Write),
                _ => continue,
            };
            let access = Access {
                address,
                size: 8,
                kind,
                ip: 0,
            };
            let memory = witness.access(&access, Some).unwrap();
            if memory.load { &mut loads } else { &mut stores }.push(memory);
        }
        let count = |of: &[Memory], what: fn(&Memory) -> bool| of.iter().filter(|memory| what(memory)).count() as u64;
        for row in pmu.caps.events.iter().flat_map(|rows| rows.iter()) {
            let (Count::Caches(what), false) = (row.count, matches!(row.count, Count::Caches(Caches::Offcore(_))))
            else {
                continue;
            };
            let mut run = Run::new(model);
            run.write(
                IA32_PERFEVTSEL0,
                u64::from(row.event) | u64::from(row.umask) << 8 | EN | OS | USR,
            );
            run.run(&stream);
            run.write(IA32_PERFEVTSEL0, 0);
            let counted = run.read(IA32_PMC0);
            let expected = match what {
                Caches::LoadReferences => Some(count(&loads, |memory| memory.asked)),
                Caches::LoadMisses => Some(count(&loads, |memory| memory.place == HitLevel::Memory)),
                Caches::StoreReferences => Some(count(&stores, |memory| memory.asked)),
                Caches::StoreMisses => Some(count(&stores, |memory| memory.place == HitLevel::Memory)),
                Caches::StoreFills => Some(count(&stores, |memory| memory.place > HitLevel::L1)),
                Caches::DataFills => Some(
                    count(&stores, |memory| memory.place > HitLevel::L1)
                        + count(&loads, |memory| memory.place > HitLevel::L1),
                ),
                Caches::LoadTlbMisses => Some(count(&loads, |memory| memory.translation > Translation::First)),
                Caches::LoadWalks => Some(count(&loads, |memory| memory.translation == Translation::Walk)),
                Caches::StoreWalks => Some(count(&stores, |memory| memory.translation == Translation::Walk)),
                _ => None,
            };
            if let Some(expected) = expected {
                assert_eq!(counted, expected, "{} {what:?}", model.name);
            }
            // Code that runs straight on comes to no page twice.
            assert_eq!(counted > 0, what != Caches::FetchTlbSecond, "{} {what:?}", model.name);
            found.push((what, counted));
        }
        let of = |what| {
            found
                .iter()
                .find(|(found, _)| *found == what)
                .map(|(_, counted)| *counted)
        };
        for (part, whole) in [
            (Caches::Misses, Caches::References),
            (Caches::LoadMisses, Caches::LoadReferences),
            (Caches::FetchMisses, Caches::Fetches),
            (Caches::LoadWalks, Caches::LoadTlbMisses),
        ] {
            if let (Some(part), Some(whole)) = (of(part), of(whole)) {
                assert!(part <= whole, "{}: {part} of {whole}", model.name);
            }
        }
    }
}

/// Loads by where they found their data add up to all loads.
// covers: pmu/caches
#[test]
fn loads_add_up() {
    let loads: Vec<Do> = (0..3000u64).map(|n| Do::Load(n * n % 977 * 64)).collect();
    for (model, all, parts) in [
        (&WESTMERE, 0x010B, &[0x01CB, 0x02CB, 0x04CB, 0x10CB][..]),
        (&SKYLAKE_SERVER, 0x81D0, &[0x01D1, 0x02D1, 0x04D1, 0x20D1]),
        (&SAPPHIRERAPIDS, 0x81D0, &[0x01D1, 0x08D1]),
        (&ALDERLAKE, 0x81D0, &[0x01D1, 0x02D1, 0x10D1]),
        (&SNOWRIDGE, 0x81D0, &[0x01D1, 0x08D1]),
    ] {
        let count = |code: u64| {
            let mut run = Run::new(model);
            run.write(IA32_PERFEVTSEL0, EN | OS | USR | code);
            run.run(&loads);
            run.read(IA32_PMC0)
        };
        assert_eq!(count(all), 3000, "{}", model.name);
        let sum: u64 = parts.iter().map(|code| count(*code)).sum();
        assert_eq!(sum, 3000, "{}", model.name);
    }
}

/// A counter that is stopped for an interrupt and started again goes on with the caches as they were; after a time slice they are empty.
// covers: pmu/caches
#[test]
fn caches_stay_while_counting_pauses() {
    let mut core = crate::unit::cache::Core::of(&SKYLAKE_SERVER);
    let mut shared = crate::unit::cache::SharedCache::of(&SKYLAKE_SERVER);
    let access = Access {
        address: 0x1000,
        size: 8,
        kind: AccessKind::Read,
        ip: 0,
    };
    let slice = crate::unit::cache::SLICE;
    for (step, place) in [
        (10, HitLevel::Memory),
        (11, HitLevel::L1),
        (11 + slice, HitLevel::L1),
        (12 + 2 * slice, HitLevel::L3),
    ] {
        let owner = crate::unit::cache::Owner::ANYBODY;
        let memory = core.access(&access, step, Some, &mut shared, owner).unwrap();
        assert_eq!(memory.place, place, "{step}");
    }
}

/// MSR_OFFCORE_RSP_0 and 1 with the values that Linux has in `hw_cache_extra_regs`: `LLC-loads`, `LLC-load-misses`, `LLC-stores`,
/// `node-loads`, `node-load-misses`.
// covers: pmu/offcore
#[test]
fn offcore_responses_choose_by_request_and_supplier() {
    for (model, code, [loads, misses, stores, local, remote]) in [
        (&WESTMERE, 0x01B7, [0xF701, 0xF001, 0xF702, 0x7001, 0x2001]),
        (
            &SKYLAKE_SERVER,
            0x01B7,
            [0x10001, 0x3F_BC00_0001, 0x10002, 0x1F_8400_0001, 0x1F_B800_0001],
        ),
        (
            &SAPPHIRERAPIDS,
            0x012A,
            [0x10001, 0x3F_BFC0_0001, 0x3F_3FFC_0002, 0x1_0C00_0001, 0x7_3000_0001],
        ),
    ] {
        let accesses: Vec<Do> = (0..100u64).map(|n| Do::Load(n * 4096)).collect();
        let writes: Vec<Do> = (1000..1030u64).map(|n| Do::Store(n * 4096)).collect();
        for (value, expected, what) in [
            (loads, 100, "loads"),
            (misses, 100, "cold ones"),
            (stores, 30, "stores"),
            (local, 100, "all memory is local"),
            (remote, 0, "none is remote"),
        ] {
            let mut run = Run::new(model);
            run.write(MSR_OFFCORE_RSP_0, value & model.units.pmu.unwrap().offcore[0]);
            run.write(IA32_PERFEVTSEL0, EN | OS | USR | code);
            run.run(&accesses);
            run.run(&writes);
            assert_eq!(run.read(IA32_PMC0), expected, "{} {value:#x}: {what}", model.name);
        }
    }
}

/// The codes that Linux programs for its generic cache events (`hw_cache_event_ids` of `arch/x86/events/intel/core.c` and `p6.c`): each
/// model knows each of them.
// covers: pmu/linux-events
#[test]
fn every_generic_event_of_linux_is_known() {
    const SKYLAKE: &[u64] = &[
        0x81D0, 0x151, 0x82D0, 0x283, 0x1B7, 0xE08, 0xE49, 0x2085, 0xE85, 0xC4, 0xC5,
    ];
    const HASWELL_CODES: &[u64] = &[
        0x81D0, 0x151, 0x82D0, 0x280, 0x1B7, 0x108, 0x149, 0x6085, 0x185, 0xC4, 0xC5,
    ];
    const GOLDEN_COVE: &[u64] = &[0x81D0, 0xE124, 0x82D0, 0xE424, 0x12A, 0xE12, 0xE13, 0xE11, 0x4C4, 0x4C5];
    for (model, codes) in [
        (&P6, &[0x43, 0x45, 0x0F29, 0x80, 0x0F28, 0x25, 0x85, 0xC4, 0xC5][..]),
        (
            &CORE2,
            &[
                0x0F40, 0x0140, 0x0F41, 0x0141, 0x104E, 0x80, 0x81, 0x4F29, 0x4129, 0x4F2A, 0x412A, 0x0208, 0x0808,
                0xC0, 0x1282, 0xC4, 0xC5,
            ],
        ),
        (
            &WESTMERE,
            &[
                0x010B, 0x0151, 0x020B, 0x0251, 0x014E, 0x024E, 0x0380, 0x0280, 0x01B7, 0x0108, 0x010C, 0x01C0, 0x0185,
                0xC4, 0x03E8,
            ],
        ),
        (
            &SANDYBRIDGE,
            &[
                0xF1D0, 0x0151, 0xF2D0, 0x0851, 0x024E, 0x0280, 0x01B7, 0x81D0, 0x0108, 0x82D0, 0x0149, 0x1085, 0x0185,
                0xC4, 0xC5,
            ],
        ),
        (&HASWELL, HASWELL_CODES),
        (&BROADWELL, HASWELL_CODES),
        (&SKYLAKE_SERVER, SKYLAKE),
        (&ICELAKE_SERVER, SKYLAKE),
        (&SAPPHIRERAPIDS, GOLDEN_COVE),
        (&ALDERLAKE, GOLDEN_COVE),
        (
            &SNOWRIDGE,
            &[
                0x81D0, 0x82D0, 0x0380, 0x0280, 0x01B7, 0xE08, 0xE49, 0xC0, 0xE85, 0xC4, 0xC5,
            ],
        ),
    ] {
        let caps = model.units.pmu.unwrap();
        for code in codes {
            let select = EventSelect::from_bits(*code);
            assert!(caps.event(select).is_some(), "{} {code:#x}", model.name);
        }
    }
}

/// What mispredicted branches lose is bad speculation, and the four parts are the whole.
// covers: pmu/metrics
#[test]
fn metrics_have_what_mispredicted_branches_lose() {
    let mut shares = Vec::new();
    for taken in [false, true] {
        let mut run = Run::new(&ICELAKE_SERVER);
        run.write(IA32_FIXED_CTR_CTRL, 0x3000);
        run.write(IA32_FIXED_CTR0 + 3, 0);
        run.write(MSR_PERF_METRICS, 0);
        run.write(IA32_PERF_GLOBAL_CTRL, 1 << 48 | 1 << 35);
        // Forward branches at addresses of their own: those that are taken are mispredicted.
        run.run(&[Do::Branch(Flow::Cond { taken }), Do::Mov(0), Do::Mov(0)].repeat(100));
        let metrics = run.read(MSR_PERF_METRICS);
        let parts: Vec<u64> = (0..4).map(|n| metrics >> (8 * n) & 0xFF).collect();
        assert_eq!(parts.iter().sum::<u64>(), 255, "{metrics:#x}");
        shares.push(parts[1]);
    }
    assert_eq!(shares[0], 0);
    assert!((80..=85).contains(&shares[1]), "a third of all cycles: {shares:?}");
}

// covers: pmu/state
#[test]
fn the_state_goes_out_and_comes_back_at_every_instruction() {
    let stream: Vec<Do> = (0..400)
        .map(|n| match n % 7 {
            0 | 3 => JUMP,
            1 => Do::Load(n * 64),
            2 => Do::Rep(n % 5 + 1),
            4 => Do::Far(Far::Syscall, 0),
            5 => Do::Far(Far::Sysret, 3),
            _ => Do::Mov(n),
        })
        .collect();
    let start = || {
        let mut run = Run::new(&SKYLAKE_SERVER);
        run.area(0x1000, 0x800, (-7_i64) as u64);
        for (n, select) in [INSTRUCTIONS & !OS, BRANCHES, CYCLES | INT, EN | OS | USR | 0x01D1]
            .into_iter()
            .enumerate()
        {
            run.write(IA32_PERFEVTSEL0 + n as u32, select);
            run.write(IA32_PMC0 + n as u32, (-13_i64) as u64);
        }
        run.write(IA32_PEBS_ENABLE, 0xA);
        run.write(IA32_PERF_GLOBAL_CTRL, 0xF);
        run
    };
    let mut whole = start();
    whole.run(&stream);
    whole.hand_over();
    let mut pieces = start();
    for what in &stream {
        pieces.run(&[*what]);
        let state = pieces.pmu.state();
        let mut fresh = pmu(&SKYLAKE_SERVER).unwrap();
        fresh.set_state(&state);
        assert_eq!(fresh.state(), state);
        pieces.pmu = fresh;
    }
    pieces.hand_over();
    assert_eq!(pieces.pmu.state(), whole.pmu.state());
    assert_eq!(pieces.core.memory, whole.core.memory);
    assert_eq!(pieces.pmis, whole.pmis);
    assert!(whole.index() > 0 && whole.pmis.len() > 3, "something happened");
}

// covers: pmu/reset
#[test]
fn reset_clears_and_enables_the_general_counters() {
    for model in MODELS {
        let Some(mut pmu) = pmu(model) else {
            continue;
        };
        let caps = *pmu.caps();
        assert_eq!(
            pmu.state().global_control,
            if caps.version >= 2 { (1 << caps.general) - 1 } else { 0 },
            "{}",
            model.name
        );
        let fresh = pmu.state();
        let mut core = Core::default();
        let [select, counter] = match caps.netburst {
            Some(_) => [(MSR_BPU_CCCR0, 0x3_F000), (MSR_BPU_COUNTER0, 77)],
            None => [(IA32_PERFEVTSEL0, INSTRUCTIONS & 0xFFDF_FFFF), (IA32_PMC0, 77)],
        };
        for (msr, value) in [select, counter] {
            pmu.write_msr(msr, value, &mut core, &PebsInputs::NONE).unwrap();
        }
        let _ = pmu.state_change(Change::Init { at: 0 }, &mut core, &PebsInputs::NONE);
        assert_ne!(pmu.state(), fresh, "{}: INIT leaves it alone", model.name);
        let _ = pmu.state_change(Change::Reset, &mut core, &PebsInputs::NONE);
        assert_eq!(pmu.state(), fresh, "{}", model.name);
    }
}
