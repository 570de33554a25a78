//! Counters against hand-made streams, by a stand-in for the executor that keeps the rules of the seam: records are handed
//! over before any other word and when there is no more room, and a tick comes when the appetite said so.

mod pebs;
mod transactions;

use x86::fault::PageFaultCode;
use x86::model::{
    ALDERLAKE, BROADWELL, CORE2, CpuModel, HASWELL, ICELAKE_SERVER, MODELS, NETBURST, P6, SANDYBRIDGE, SAPPHIRERAPIDS,
    SKYLAKE_SERVER, SNOWRIDGE, WESTMERE, by_name,
};
use x86::msr::*;
use x86::seam::{
    Abort, Access, AccessKind, Appetite, BadPhys, BranchRecord, Change, CodeSize, Context, Effects, Far, Flow,
    PageFault, Processor, TraceMem,
};

use super::*;

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
    records: Vec<BranchRecord>,
    appetite: Appetite,
    tick_at: u64,
    /// Retired instructions at each interrupt request.
    pmis: Vec<u64>,
    faults: Vec<PageFault>,
    /// The step of the last XBEGIN.
    begun: u64,
}

fn around() -> Around<'static> {
    Around {
        ds_area: AREA,
        last_branch: &|number| [0x100 + u64::from(number), 0x200, 0x300],
    }
}

impl Run {
    fn new(model: &'static CpuModel) -> Self {
        let mut run = Self {
            pmu: pmu(model).unwrap(),
            core: Core::default(),
            records: Vec::new(),
            appetite: Appetite::NOTHING,
            tick_at: u64::MAX,
            pmis: Vec::new(),
            faults: Vec::new(),
            begun: 0,
        };
        run.ask();
        run
    }

    fn ask(&mut self) {
        self.appetite = self.pmu.appetite(&mut self.core, &around());
        self.tick_at = self.core.retired.saturating_add(self.appetite.instructions);
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
            let effects = self
                .pmu
                .branches(&std::mem::take(&mut self.records), &mut self.core, &around());
            self.said(effects);
        }
    }

    fn tick(&mut self) {
        self.hand_over();
        let effects = self.pmu.tick(&mut self.core, &around());
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
        let effects = self.pmu.state_change(change, &mut self.core, &around());
        self.said(effects);
    }

    fn after(&mut self) {
        if self.records.len() as u64 >= u64::from(self.appetite.branch_room) {
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
                    if self.appetite.branches {
                        self.record(from, flow, self.core.cpl);
                    }
                }
                Do::Far(far, cpl) => {
                    self.hand_over();
                    if !matches!(far, Far::Exception | Far::Interrupt) {
                        self.retire(1);
                    }
                    let from_cpl = std::mem::replace(&mut self.core.cpl, cpl);
                    if self.appetite.branches || self.appetite.transfers {
                        self.record(from, Flow::Far(far), from_cpl);
                        self.hand_over();
                    }
                }
                Do::Load(address) | Do::Store(address) => {
                    self.retire(1);
                    if self.appetite.every_access {
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
                        let effects = self.pmu.access(&access, &mut self.core, &around());
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
                    if self.appetite.transfers {
                        let change = if matches!(what, Do::Halt) {
                            Change::Halt
                        } else {
                            Change::Wake { store: false }
                        };
                        let effects = self.pmu.state_change(change, &mut self.core, &around());
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
            reserved: 0,
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
        self.pmu.write_msr(msr, value, &mut self.core, &around())
    }

    fn read(&mut self, msr: u32) -> u64 {
        self.hand_over();
        self.pmu.read_msr(msr, &mut self.core, &around()).unwrap()
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

// covers: pmu/appetite
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
            false,
            false,
            false,
            false,
            "last-level cache references",
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
        let a = run.appetite;
        assert_eq!(
            (a.branches, a.transfers, a.every_access, a.every_instruction),
            (branches, transfers, every_access, every_instruction),
            "{why}"
        );
        assert!(a.instructions > 1 << 40, "{why}");
        assert_eq!(
            a == Appetite::NOTHING,
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
        run.pmu.elapsed(5000, true, &mut run.core, &around());
        assert_eq!(run.read(counter) - before, cycles, "{why}");
        run.core.step += 77;
        assert_eq!(run.read(counter) - before, cycles, "{why}: HLT is no time");
        run.pmu.elapsed(5, false, &mut run.core, &around());
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
                run.pmu.elapsed(left - 1, false, &mut run.core, &around());
                assert!(run.pmu.time_is_enough(), "{why}: {left} were left");
            }
            run.pmu.elapsed(1, false, &mut run.core, &around());
            (rounds, passed) = (rounds + 1, passed + left);
        }
        assert_eq!(run.read(IA32_PERF_GLOBAL_STATUS), 1, "{why}");
        run.ask();
        assert_eq!(run.appetite.instructions, 0, "{why}: the interrupt is to be asked for");
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
        let mut ask = |index| run.pmu.rdpmc(index, &mut run.core, &Around::NONE).is_ok();
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
                let read = run.pmu.read_msr(msr, &mut run.core, &Around::NONE);
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
    assert!(pmu(&NETBURST).is_none(), "its own counters are absent by decision");
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
        assert!(!bit(12), "{name}: there is no SMM to freeze in");
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

// covers: pmu/mispredict, pmu/llc
#[test]
fn what_is_modelled_follows_its_rule() {
    let mut run = Run::new(&WESTMERE);
    run.write(IA32_PERF_GLOBAL_CTRL, 0);
    run.write(IA32_PERFEVTSEL0, EN | OS | USR | 0x4F2E);
    run.write(IA32_PERFEVTSEL0 + 1, EN | OS | USR | 0x412E);
    run.write(IA32_PERFEVTSEL0 + 2, EN | OS | USR | 0xC5);
    let already = run.core.retired;
    run.write(IA32_PERF_GLOBAL_CTRL, 7);
    run.run(&vec![Do::Mov(0); 64 * 160 - 1]);
    assert_eq!(run.read(IA32_PMC0), 160, "one in {LLC_REFERENCE} instructions");
    assert_eq!(run.read(IA32_PMC0 + 1), 10, "one in {LLC_MISS} ({already} before)");
    // Forward and taken, seen for the first time: mispredicted. An unconditional jump never is.
    run.run(&[Do::Branch(Flow::Cond { taken: true }), JUMP]);
    assert_eq!(run.read(IA32_PMC0 + 2), 1);
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
        pmu.write_msr(IA32_PERFEVTSEL0, INSTRUCTIONS & 0xFFDF_FFFF, &mut core, &Around::NONE)
            .unwrap();
        pmu.write_msr(IA32_PMC0, 77, &mut core, &Around::NONE).unwrap();
        let _ = pmu.state_change(Change::Init { at: 0 }, &mut core, &Around::NONE);
        assert_ne!(pmu.state(), fresh, "{}: INIT leaves it alone", model.name);
        let _ = pmu.state_change(Change::Reset, &mut core, &Around::NONE);
        assert_eq!(pmu.state(), fresh, "{}", model.name);
    }
}
