//! Counters and samples on the whole machine: small programs in 64-bit mode that program the registers themselves, with a
//! handler for the performance-monitoring interrupt behind the local APIC. The timing table is that of the experiments.

use engine::{CS, Cpu, CpuState, EngineOptions, Exit, Segment, Table};
use iced_x86::code_asm::*;
use iced_x86::{Decoder, FlowControl, Mnemonic};
use machine::Machine;
use machine::memory::{Memory, SoftEngine};
use std::sync::{Arc, Mutex};
use x86::model::{CpuModel, WESTMERE};
use x86::msr::*;
use x86::watch::{Effects, Interest, Processor, Watch};

const CODE: u64 = 0x10_0000;
const HANDLER: u64 = 0x11_0000;
const IDT: u64 = 0x12_0000;
const GDT: u64 = 0x12_1000;
/// Page tables: the first GiB one to one.
const TABLES: u64 = 0x13_0000;
/// The debug-store area, and its PEBS and BTS buffers.
const AREA: u64 = 0x14_0000;
const PEBS: u64 = 0x14_1000;
const BTS: u64 = 0x14_8000;
const STACK: u64 = 0x16_0000;
/// What the handler writes down: how often it was entered, and a row for each entry.
const LOG: u64 = 0x17_0000;
/// Data for programs.
const DATA: u64 = 0x18_0000;

const VECTOR: u64 = 0x40;
const RECORD: u64 = 0xB0;

const EN: u64 = 1 << 22;
const INT: u64 = 1 << 20;
const RINGS: u64 = 3 << 16;
const INSTRUCTIONS: u64 = EN | RINGS | 0xC0;
const BRANCHES: u64 = EN | RINGS | 0xC4;

/// LVTPC and EOI in x2APIC mode.
const LVTPC: u32 = 0x834;
const EOI: u32 = 0x80B;
const BUFFER: u64 = 1 << 62;
/// No reset would overflow soon.
const FAR: u64 = (-100_000_i64) as u64;

type Code = CodeAssembler;

fn wrmsr(a: &mut Code, msr: u32, value: u64) {
    a.mov(ecx, msr).unwrap();
    a.mov(eax, value as u32).unwrap();
    a.mov(edx, (value >> 32) as u32).unwrap();
    a.wrmsr().unwrap();
}

fn assemble(at: u64, code: impl FnOnce(&mut Code)) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).unwrap();
    code(&mut a);
    a.assemble(at).unwrap()
}

/// One entry of the handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    /// Where it will go back to.
    rip: u64,
    /// IA32_PERF_GLOBAL_STATUS.
    status: u64,
    /// Bytes of PEBS records, and of BTS records.
    pebs: u64,
    bts: u64,
}

struct Guest {
    machine: Machine,
    engine: SoftEngine,
    cpu: Box<Cpu>,
}

impl Guest {
    /// A machine whose handler does `acknowledge` beside what every handler does, and which runs `program` after the set-up
    /// that all have: x2APIC, LVTPC, the area.
    fn new(model: &'static CpuModel, acknowledge: impl FnOnce(&mut Code), program: impl FnOnce(&mut Code)) -> Self {
        let memory = Memory::new(4 << 20).unwrap();
        let write = |at: u64, bytes: &[u8]| memory.write(at, bytes).unwrap();
        let program = assemble(CODE, |a| {
            // IA32_APIC_BASE: x2APIC, enabled, bootstrap. The spurious vector with the software enable.
            wrmsr(a, IA32_APIC_BASE, 0xFEE0_0D00);
            wrmsr(a, 0x80F, 0x1FF);
            wrmsr(a, LVTPC, VECTOR);
            wrmsr(a, IA32_DS_AREA, AREA);
            wrmsr(a, IA32_PERF_GLOBAL_CTRL, 0);
            a.sti().unwrap();
            program(a);
            // Nothing more is counted.
            wrmsr(a, IA32_PERF_GLOBAL_CTRL, 0);
            a.cli().unwrap();
            a.hlt().unwrap();
        });
        write(CODE, &program);
        let handler = assemble(HANDLER, |a| {
            for register in [rax, rbx, rcx, rdx] {
                a.push(register).unwrap();
            }
            // The row of this entry.
            a.mov(rbx, qword_ptr(LOG)).unwrap();
            a.inc(qword_ptr(LOG)).unwrap();
            a.and(ebx, 63).unwrap();
            a.shl(ebx, 5).unwrap();
            a.add(ebx, LOG as u32 + 64).unwrap();
            a.mov(rax, qword_ptr(rsp + 32)).unwrap();
            a.mov(qword_ptr(rbx), rax).unwrap();
            a.mov(ecx, IA32_PERF_GLOBAL_STATUS).unwrap();
            a.rdmsr().unwrap();
            a.mov(dword_ptr(rbx + 8), eax).unwrap();
            a.mov(dword_ptr(rbx + 12), edx).unwrap();
            a.mov(rax, qword_ptr(AREA + 0x28)).unwrap();
            a.mov(qword_ptr(rbx + 16), rax).unwrap();
            a.mov(rax, qword_ptr(AREA + 0x08)).unwrap();
            a.mov(qword_ptr(rbx + 24), rax).unwrap();
            acknowledge(a);
            wrmsr(a, LVTPC, VECTOR);
            wrmsr(a, EOI, 0);
            for register in [rdx, rcx, rbx, rax] {
                a.pop(register).unwrap();
            }
            a.iretq().unwrap();
        });
        write(HANDLER, &handler);
        // An interrupt gate to the handler for its vector; every other exception shuts down.
        let gate = HANDLER & 0xFFFF | 8 << 16 | 0x8E00 << 32 | (HANDLER >> 16 & 0xFFFF) << 48;
        write(IDT + 16 * VECTOR, &gate.to_le_bytes());
        write(GDT + 8, &0x00AF_9B00_0000_FFFF_u64.to_le_bytes());
        write(GDT + 16, &0x00CF_9300_0000_FFFF_u64.to_le_bytes());
        let tables = [(0, TABLES + 0x1003), (0x1000, TABLES + 0x2003)];
        let pages = (0..512).map(|page| (0x2000 + page * 8, page << 21 | 0x83));
        for (at, entry) in tables.into_iter().chain(pages) {
            write(TABLES + at, &entry.to_le_bytes());
        }
        for (field, value) in [
            (0, BTS),
            (1, BTS),
            (2, BTS + 0x1800),
            (3, BTS + 0x1800),
            (4, PEBS),
            (5, PEBS),
        ] {
            write(AREA + 8 * field, &value.to_le_bytes());
        }

        let engine = memory.engine(model, EngineOptions::default()).unwrap();
        let machine = Machine::new(model, 1, memory, 0, 0, Box::new(std::io::sink()));
        let mut state = CpuState::reset(model);
        (state.rip, state.gpr[4]) = (CODE, STACK);
        (state.cr0, state.cr3, state.cr4, state.efer) = (0x8001_0033.into(), TABLES, 0x6A0.into(), 0xD01.into());
        let segment = |selector, attributes| Segment {
            selector,
            base: 0,
            limit: u32::MAX,
            attributes,
        };
        state.segments.fill(segment(16, 0xC093));
        state.segments[CS] = segment(8, 0xA09B);
        state.idtr = Table {
            base: IDT,
            limit: 0xFFF,
        };
        state.gdtr = Table { base: GDT, limit: 23 };
        let mut cpu = Cpu::new(model);
        cpu.set_state(&state);
        Self { machine, engine, cpu }
    }

    /// A PEBS buffer with room for so many bytes, a threshold, and what counters go on from.
    fn buffer(self, room: u64, threshold: u64, reset: u64) -> Self {
        self.set(AREA + 0x30, PEBS + room);
        self.set(AREA + 0x38, PEBS + threshold);
        (0..4).for_each(|n| self.set(AREA + 0x40 + 8 * n, reset));
        self
    }

    /// A BTS threshold after so many records.
    fn branch_threshold(self, records: u64) -> Self {
        self.set(AREA + 0x18, BTS + 24 * records);
        self
    }

    fn set(&self, at: u64, value: u64) {
        self.machine.memory().write(at, &value.to_le_bytes()).unwrap();
    }

    fn get(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.machine.memory().read(at, &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    }

    /// Runs to the HLT, delivering interrupts as the run loop does.
    fn run(mut self) -> Self {
        let cpu = &mut self.cpu;
        for _ in 0..100_000 {
            let pending = self.machine.platform().interrupt_pending(0);
            cpu.want_window = pending && !cpu.interruptible();
            if pending && cpu.interruptible() {
                let vector = self.machine.platform().acknowledge(0);
                self.engine.get().interrupt(cpu, &mut self.machine.cpu(0), vector);
            }
            match self.engine.get().run(cpu, &mut self.machine.cpu(0), 10_000) {
                Exit::Halt => return self,
                Exit::Budget | Exit::Bus | Exit::Window | Exit::Pause => {}
                other => panic!("{other:?} at {:#x}", cpu.rip()),
            }
        }
        panic!("it never halts: {:#x}", cpu.rip());
    }

    /// What the handler saw.
    fn entries(&self) -> Vec<Entry> {
        (0..self.get(LOG).min(64))
            .map(|n| {
                let field = |offset| self.get(LOG + 64 + 32 * n + offset);
                Entry {
                    rip: field(0),
                    status: field(8),
                    pebs: field(16) - PEBS,
                    bts: field(24) - BTS,
                }
            })
            .collect()
    }

    fn records(&self) -> u64 {
        (self.get(AREA + 0x28) - PEBS) / RECORD
    }

    fn field(&self, record: u64, offset: u64) -> u64 {
        self.get(PEBS + record * RECORD + offset)
    }
}

/// IA32_DEBUGCTL in the experiments: TR, BTS and FREEZE_PERFMON_ON_PMI.
const DEBUGCTL: u64 = 1 << 6 | 1 << 7 | 1 << 12;
const BTINT: u64 = 1 << 8;

/// Presets counters, enables sampling, and lets `body` follow right after the enabling WRMSR. Where it begins is in R15.
fn experiment<Body>(counters: &[(u64, i64)], pebs: u64, body: Body) -> impl FnOnce(&mut Code) + use<Body>
where
    Body: FnOnce(&mut Code),
{
    experiment_under(DEBUGCTL, counters, pebs, body)
}

/// The same with another IA32_DEBUGCTL.
fn experiment_under<Body>(
    debugctl: u64,
    counters: &[(u64, i64)],
    pebs: u64,
    body: Body,
) -> impl FnOnce(&mut Code) + use<Body>
where
    Body: FnOnce(&mut Code),
{
    let counters = counters.to_vec();
    move |a: &mut Code| {
        // Before the counters: what the body branches to is stored from its first branch on.
        wrmsr(a, IA32_DEBUGCTL, debugctl);
        for (n, &(select, preset)) in counters.iter().enumerate() {
            wrmsr(a, IA32_PERFEVTSEL0 + n as u32, select);
            wrmsr(a, IA32_PMC0 + n as u32, preset as u64);
        }
        wrmsr(a, IA32_PEBS_ENABLE, pebs);
        let mut body_at = a.create_label();
        a.lea(r15, qword_ptr(body_at)).unwrap();
        wrmsr(a, IA32_PERF_GLOBAL_CTRL, (1 << counters.len()) - 1);
        a.set_label(&mut body_at).unwrap();
        body(a);
    }
}

/// `mov eax, 1` to `mov eax, 10`: five bytes each.
fn movs(a: &mut Code) {
    (1..=10).for_each(|n| a.mov(eax, n).unwrap());
}

/// Eleven jumps to the next instruction: two bytes each.
fn jumps(a: &mut Code) {
    for _ in 0..11 {
        let mut next = a.create_label();
        a.jmp(next).unwrap();
        a.set_label(&mut next).unwrap();
        a.zero_bytes().unwrap();
    }
}

fn nothing(_: &mut Code) {}

/// Acknowledges these bits.
fn acknowledge(bits: u64) -> impl FnOnce(&mut Code) {
    move |a| wrmsr(a, IA32_PERF_GLOBAL_OVF_CTRL, bits)
}

/// After the body in the experiments.
fn body_of(guest: &Guest) -> u64 {
    guest.cpu.state().gpr[15]
}

// covers: pebs/table
#[test]
fn a_counter_at_its_end_samples_the_first_mov() {
    for (preset, sampled, why) in [
        (-1, 1, "the WRMSR overflows, the first MOV records"),
        // What hardware was seen to do, a record at the code that disables the counter, is not reproduced: nothing is late here.
        (-3, 3, "two MOVs later"),
    ] {
        let program = experiment(&[(INSTRUCTIONS | INT, preset)], 1, movs);
        let guest = Guest::new(&WESTMERE, nothing, program)
            .buffer(4 * RECORD, 4 * RECORD, FAR)
            .run();
        assert_eq!(guest.records(), 1, "{why}");
        assert_eq!(guest.field(0, 0x10), sampled, "{why}: RAX");
        assert_eq!(
            guest.field(0, 0x08),
            body_of(&guest) + 5 * sampled,
            "{why}: the next MOV"
        );
        assert_eq!(guest.field(0, 0x48), STACK, "RSP in 64 bits");
        assert_eq!(guest.field(0, 0x88), body_of(&guest), "R15");
        assert_eq!(guest.field(0, 0x90), 1, "its bit in the record");
        let entries = guest.entries();
        assert_eq!(entries.len(), 1, "{why}: INT");
        assert_eq!((entries[0].status, entries[0].pebs), (0, RECORD), "and not live");
        assert_eq!(entries[0].rip, body_of(&guest) + 5 * sampled, "at the same place");
    }
}

// covers: pebs/table
#[test]
fn a_buffer_of_one_record_enters_the_handler_twice() {
    let program = || experiment(&[(INSTRUCTIONS | INT, -1)], 1, movs);
    let guest = Guest::new(&WESTMERE, nothing, program())
        .buffer(RECORD, RECORD, FAR)
        .run();
    let entries = guest.entries();
    assert_eq!(entries.len(), 2, "{entries:x?}");
    assert_eq!(entries[0].rip, entries[1].rip, "at the same place");
    assert_eq!(
        (entries[0].status, entries[0].pebs),
        (BUFFER, RECORD),
        "both at the first entry"
    );

    let clear = |a: &mut Code| {
        acknowledge(BUFFER)(a);
        a.mov(rax, PEBS).unwrap();
        a.mov(qword_ptr(AREA + 0x28), rax).unwrap();
    };
    let guest = Guest::new(&WESTMERE, clear, program())
        .buffer(RECORD, RECORD, FAR)
        .run();
    assert_eq!(
        guest.entries().len(),
        1,
        "acknowledged and emptied, there is no second request"
    );
}

// covers: pebs/table
#[test]
fn pmc0_goes_before_pmc1() {
    let both = [(INSTRUCTIONS | INT, -1), (INSTRUCTIONS | INT, -1)];
    // PMC0 plain, PMC1 sampling.
    let guest = Guest::new(&WESTMERE, nothing, experiment(&both, 2, movs))
        .buffer(4 * RECORD, 4 * RECORD, FAR)
        .run();
    let entries = guest.entries();
    assert_eq!(
        (entries[0].rip, entries[0].status),
        (body_of(&guest), 3),
        "PMC0's, before the first MOV"
    );
    assert_eq!(entries[0].pebs, 0, "no record while the handler runs");
    // PMC0 sampling, PMC1 plain.
    let guest = Guest::new(&WESTMERE, nothing, experiment(&both, 1, movs))
        .buffer(4 * RECORD, 4 * RECORD, FAR)
        .run();
    let entries = guest.entries();
    assert_eq!(
        (guest.field(0, 0x10), guest.field(0, 0x90)),
        (1, 3),
        "the record is written"
    );
    assert_eq!(
        (entries[0].status, entries[0].pebs),
        (2, RECORD),
        "then the status reads 2"
    );
}

// covers: pebs/table
#[test]
fn an_event_that_cannot_be_sampled_is_an_ordinary_overflow() {
    // Cycles: 3CH, umask 0.
    let program = experiment(&[(EN | RINGS | INT | 0x3C, -4)], 1, movs);
    let guest = Guest::new(&WESTMERE, acknowledge(1), program)
        .buffer(RECORD, RECORD, FAR)
        .run();
    let entries = guest.entries();
    assert_eq!(entries.len(), 1);
    assert_eq!((entries[0].status, entries[0].pebs), (1, 0));
    assert_eq!(entries[0].rip, body_of(&guest) + 3 * 5, "the WRMSR and three MOVs");
}

// covers: pebs/table
#[test]
fn load_latency_samples_loads() {
    let loads = |a: &mut Code| {
        a.mov(rbx, DATA).unwrap();
        for _ in 0..8 {
            a.mov(rax, qword_ptr(rbx)).unwrap();
            a.mov(qword_ptr(rbx + 8), rax).unwrap();
            a.add(rbx, 64).unwrap();
        }
    };
    let program = |a: &mut Code| {
        wrmsr(a, MSR_PEBS_LD_LAT, 3);
        experiment(&[(EN | RINGS | 0x100B, -1)], 1 << 32 | 1, loads)(a);
    };
    let guest = Guest::new(&WESTMERE, nothing, program)
        .buffer(8 * RECORD, 8 * RECORD, u64::MAX)
        .run();
    // One overflows, the next records, and so on.
    assert_eq!(guest.records(), 4);
    for n in 0..4 {
        let (address, source, latency) = (guest.field(n, 0x98), guest.field(n, 0xA0), guest.field(n, 0xA8));
        assert_eq!(address, guest.field(n, 0x18), "the register that the load used: RBX");
        assert_eq!(address, DATA + 64 * (2 * n + 1));
        assert_eq!((source, latency), (0xA, 200), "a cold line, from memory");
    }
}

// covers: pebs/table
#[test]
fn three_conditions_of_one_jump_are_all_there_at_the_first_entry() {
    let program = experiment_under(DEBUGCTL | BTINT, &[(INSTRUCTIONS | INT, -10)], 1, jumps);
    // The handler stops branch records, looks at each condition, and counts those it found.
    let check = |a: &mut Code| {
        wrmsr(a, IA32_DEBUGCTL, 0);
    };
    let guest = Guest::new(&WESTMERE, check, program)
        .buffer(RECORD, RECORD, FAR)
        .branch_threshold(10)
        .run();
    let entries = guest.entries();
    assert_eq!(entries.len(), 2, "{entries:x?}");
    assert_eq!(
        (entries[0].status, entries[0].pebs),
        (BUFFER, RECORD),
        "record and threshold"
    );
    assert!(entries[0].bts >= 10 * 24, "ten branches: {}", entries[0].bts);
    assert_eq!(entries[0].rip, body_of(&guest) + 20, "the tenth jump has retired");
    assert_eq!(guest.field(0, 0x08), body_of(&guest) + 20);
}

// covers: pmu/pmi
#[test]
fn if_keeps_one_interrupt_and_a_masked_entry_drops_it() {
    let late = |mask: bool| {
        move |a: &mut Code| {
            a.cli().unwrap();
            if mask {
                wrmsr(a, LVTPC, VECTOR | 1 << 16);
            }
            experiment(&[(INSTRUCTIONS | INT, -2)], 0, movs)(a);
            if mask {
                wrmsr(a, LVTPC, VECTOR);
            }
            a.sti().unwrap();
            a.nop().unwrap();
        }
    };
    for (mask, entries, why) in [(false, 1, "pending in IRR"), (true, 0, "dropped")] {
        let guest = Guest::new(&WESTMERE, nothing, late(mask)).run();
        assert_eq!(guest.entries().len(), entries, "{why}");
        if let Some(entry) = guest.entries().first() {
            assert_eq!(entry.status, 1, "{why}");
        }
    }
}

// covers: pmu/engine
#[test]
fn rdpmc_and_rdmsr_agree_and_count_exactly() {
    // RDPMC of both counters into R8 and R9, RDMSR into R10 and R11.
    let read = |a: &mut Code| {
        for (n, into) in [(0, r8), (1, r9)] {
            a.mov(ecx, n).unwrap();
            a.rdpmc().unwrap();
            a.mov(into, rax).unwrap();
        }
        for (n, into) in [(0, r10), (1, r11)] {
            a.mov(ecx, IA32_PMC0 + n).unwrap();
            a.rdmsr().unwrap();
            a.mov(into, rax).unwrap();
        }
    };
    let body = |a: &mut Code| {
        jumps(a);
        a.mov(ecx, 100).unwrap();
        a.mov(rdi, DATA).unwrap();
        a.rep().stosb().unwrap();
        read(a);
    };
    let program = experiment(&[(INSTRUCTIONS, 0), (BRANCHES, 0)], 0, body);
    let guest = Guest::new(&WESTMERE, nothing, program).run();
    let state = guest.cpu.state();
    // WRMSR, eleven jumps, MOV, MOV, REP STOSB, MOV; RDPMC reads before itself. Then RDPMC, MOV, MOV.
    assert_eq!((state.gpr[8], state.gpr[9]), (16, 11));
    assert_eq!((state.gpr[10], state.gpr[11]), (22, 11), "six instructions later");
}

/// The addresses of all instructions that run, in order.
struct Log(Arc<Mutex<Vec<u64>>>);

impl Watch for Log {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        Interest {
            every_instruction: true,
            ..Interest::NOTHING
        }
    }

    fn before(&mut self, address: u64, _: &mut dyn Processor) -> Effects {
        let mut log = self.0.lock().unwrap();
        // The iterations of a REP are one instruction.
        if log.last() != Some(&address) {
            log.push(address);
        }
        Effects::NONE
    }
}

/// Arithmetic, REPs, branches of every near kind, in loops, as the seed has it.
fn random_program(a: &mut Code, seed: u64) {
    let mut state = seed | 1;
    let mut random = move |below: u32| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as u32 % below
    };
    let (mut function, mut over) = (a.create_label(), a.create_label());
    a.jmp(over).unwrap();
    a.set_label(&mut function).unwrap();
    a.add(ebx, 7).unwrap();
    a.ret().unwrap();
    a.set_label(&mut over).unwrap();
    a.mov(r14d, 5 + random(10)).unwrap();
    let mut again = a.create_label();
    a.set_label(&mut again).unwrap();
    for _ in 0..100 {
        let mut next = a.create_label();
        match random(9) {
            0 => a.add(eax, random(1000) as i32 | 1).unwrap(),
            1 => a.imul_2(ebx, eax).unwrap(),
            2 => {
                a.mov(edi, DATA as u32).unwrap();
                a.mov(ecx, random(6)).unwrap();
                a.rep().stosb().unwrap();
            }
            3 | 4 => {
                a.add(eax, random(1 << 30) as i32).unwrap();
                if random(2) == 0 { a.js(next) } else { a.jp(next) }.unwrap();
                a.inc(ebx).unwrap();
            }
            5 => a.call(function).unwrap(),
            6 => {
                a.lea(r13, qword_ptr(function)).unwrap();
                a.call(r13).unwrap();
            }
            7 => {
                a.lea(r13, qword_ptr(next)).unwrap();
                a.jmp(r13).unwrap();
            }
            _ => {
                a.push(rax).unwrap();
                a.pop(rdx).unwrap();
            }
        }
        a.set_label(&mut next).unwrap();
        a.nop().unwrap();
    }
    a.dec(r14d).unwrap();
    a.jnz(again).unwrap();
}

// covers: pmu/oracle
#[test]
fn counters_equal_the_stream_of_instructions() {
    let events = [
        (INSTRUCTIONS, 0),
        (BRANCHES, 0),
        (EN | RINGS | 0x01C4, 0),
        (EN | RINGS | 0x02C4, 0),
    ];
    for seed in 1..=12_u64 {
        let program = || {
            experiment_under(0, &events, 0, move |a: &mut Code| {
                random_program(a, seed.wrapping_mul(0x9E37_79B9_7F4A_7C15))
            })
        };
        let counters =
            |guest: &mut Guest| guest.machine.units(0).unwrap().pmu.as_ref().unwrap().state().values[..4].to_vec();
        let mut alone = Guest::new(&WESTMERE, nothing, program()).run();

        let log = Arc::new(Mutex::new(Vec::new()));
        let mut watched = Guest::new(&WESTMERE, nothing, program());
        assert!(watched.machine.observe(0, Some(Box::new(Log(log.clone())))));
        let mut watched = watched.run();
        assert_eq!(
            counters(&mut alone),
            counters(&mut watched),
            "seed {seed}: watched or not"
        );

        // From the instruction after the enabling WRMSR to the one before the last WRMSR, which disables.
        let log = log.lock().unwrap();
        let decode = |ip: u64| {
            let mut bytes = [0; 15];
            watched.machine.memory().read(ip, &mut bytes).unwrap();
            Decoder::with_ip(64, &bytes, ip, 0).decode()
        };
        let first = log.iter().position(|&ip| ip == body_of(&watched)).unwrap();
        let last = log
            .iter()
            .rposition(|&ip| decode(ip).mnemonic() == Mnemonic::Wrmsr)
            .unwrap();
        let ran: Vec<FlowControl> = log[first..last].iter().map(|&ip| decode(ip).flow_control()).collect();
        let count = |kinds: &[FlowControl]| ran.iter().filter(|flow| kinds.contains(flow)).count() as u64;
        let calls = count(&[FlowControl::Call, FlowControl::IndirectCall]);
        let conditional = count(&[FlowControl::ConditionalBranch]);
        let others = count(&[
            FlowControl::UnconditionalBranch,
            FlowControl::IndirectBranch,
            FlowControl::Return,
        ]);
        assert!(
            ran.len() > 1000 && calls > 10 && conditional > 10,
            "seed {seed}: {}",
            ran.len()
        );
        assert_eq!(
            counters(&mut alone),
            [ran.len() as u64 + 1, calls + conditional + others, conditional, calls],
            "seed {seed}"
        );
    }
}
