//! Random programs: of 64-bit code in two rings with interrupts, faults and transactions, and of 32-bit code with task switches
//! on all models.

use engine::{CS, Cpu, CpuState, EngineOptions, Exit, Segment, Table};
use guest_tests::observer::Unit;
use guest_tests::traced::{self, Plan};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use minivmm::machine::Machine;
use minivmm::machine::memory::Memory;
use pt_packet::Packet;
use x86::model::{CpuModel, MODELS};
use x86::pt::RtitCtl;

use crate::boot::sets;
use crate::judge::{End, Judge, Verdict};

fn seeds() -> u64 {
    if guest_tests::full() { 100 } else { 6 }
}

/// What every verdict has to be; gives how many instructions and taken branches there were.
pub fn judged(found: &Verdict, on: &[Unit], what: &str) -> [u64; 2] {
    assert_eq!(found.wrong, None, "{what}");
    assert!(found.ended, "{what}: {found:?}");
    if on.contains(&Unit::Pt) {
        let [log, ours, libipt] = found.hashes;
        assert_eq!([ours, libipt], [log, log], "{what}");
    }
    [found.instructions, found.taken]
}

// covers: trace/oracle-programs
#[test]
fn programs_as_the_units_tell_them_are_what_ran() {
    for model in MODELS.iter().copied().filter(|model| model.features().lm()) {
        let mut sums = [0; 2];
        for seed in 1..=seeds() {
            let traces = model.units.pt.is_some();
            // Every other program has transactions, where the part can have them.
            let model = match model.with_toggles("+rtm") {
                Ok(with) if seed % 2 == 0 => with,
                _ => model,
            };
            let plan = Plan {
                model,
                seed: seed * 104_729,
                // The guest's own trace beside the observer's.
                ctl: RtitCtl::new().with_branch_en(traces).with_os(true).with_user(true),
                range: None,
                blocks: 3000,
                interrupts: if seed % 3 == 0 { 0 } else { 41 },
            };
            for on in sets(model) {
                let (judge, verdict) = Judge::new(model, &on, End::Halt, 0..0);
                traced::observe(&plan, Box::new(judge));
                let found = std::mem::take(&mut *verdict.lock().unwrap());
                let [instructions, taken] = judged(&found, &on, &format!("{} {seed} {on:?}", model.name));
                sums = [sums[0] + instructions, sums[1] + taken];
            }
        }
        let least = [2000 * seeds(), 500 * seeds()];
        assert!(sums[0] > least[0] && sums[1] > least[1], "{}: {sums:?}", model.name);
    }
}

const CODE: u64 = 0x1_0000;
const TABLES: u64 = 0x1000;
const STACK: u64 = 0x8000;
const BLOCKS: usize = 32;

/// Task states, the program's own first, and the page directories of every other one.
const TASKS: u64 = 0x2000;
const APART: u64 = 0x100;
const DIRECTORIES: [u64; 2] = [0x3000, 0x4000];
/// How often a task other than the program's own was entered.
const ENTERED: u64 = 0x5000;
const TASK_STACKS: u64 = 0x6000;
/// Their selectors in the GDT, the first one's at 18H, and a task gate to the last but one.
const TASK: u16 = 0x18;
const TASK_GATE: u16 = TASK + 8 * Tasks::COUNT as u16;

/// Where the tasks that the program goes to begin: one comes back by JMP, one by IRET, and one by IRET behind the instruction
/// that it was entered for, which is UD2.
#[derive(Default)]
struct Tasks([u64; Tasks::COUNT - 1]);

impl Tasks {
    const COUNT: usize = 4;
}

/// What [`program`] gives.
struct Program {
    code: Vec<u8>,
    blocks: Vec<u32>,
    handler: u64,
    tasks: Tasks,
}

/// A far JMP (EAH) or CALL (9AH) to a selector.
fn far(opcode: u8, selector: u16) -> [u8; 7] {
    let [low, high] = selector.to_le_bytes();
    [opcode, 0, 0, 0, 0, low, high]
}

/// 32-bit code: blocks that branch to each other in every near way, by software interrupts and by task switches, so many times,
/// then HLT. EAX has numbers that decide, EBP counts. Gives the addresses of the blocks, too, which it wants for the second time.
fn program(seed: u64, blocks: &[u32]) -> Result<Program, IcedError> {
    let mut random = traced::Random(seed);
    let mut a = CodeAssembler::new(32)?;
    let mut tasks: [_; Tasks::COUNT - 1] = std::array::from_fn(|_| a.create_label());
    let mut labels: Vec<CodeLabel> = (0..BLOCKS).map(|_| a.create_label()).collect();
    let (mut done, mut handler) = (a.create_label(), a.create_label());
    a.mov(eax, random.draw() as u32 | 1)?;
    a.mov(ebp, 3000)?;
    for n in 0..BLOCKS {
        a.nop()?;
        a.set_label(&mut labels[n])?;
        a.dec(ebp)?;
        a.jz(done)?;
        a.imul_3(eax, eax, 0x41C6_4E6D)?;
        a.add(eax, 0x3039)?;
        for _ in 0..random.below(3) {
            a.bt(eax, 8 + random.below(20) as u32)?;
            a.jc(labels[random.below(BLOCKS as u64) as usize])?;
        }
        let block = random.below(BLOCKS as u64) as usize;
        let target = labels[block];
        a.mov(esp, STACK as u32)?;
        match random.below(13) {
            0 => a.jmp(target)?,
            1 => a.call(target)?,
            2 | 3 => {
                a.mov(edx, blocks[block])?;
                if random.below(2) == 0 {
                    a.jmp(edx)?
                } else {
                    a.call(edx)?
                }
            }
            4 => {
                a.mov(edx, blocks[block])?;
                a.push(edx)?;
                a.ret()?;
            }
            5 => {
                let mut here = a.create_label();
                a.call(here)?;
                a.set_label(&mut here)?;
                a.pop(edx)?;
            }
            6 => {
                let mut again = a.create_label();
                a.mov(ecx, 1 + random.below(9) as u32)?;
                a.set_label(&mut again)?;
                a.add(edx, ecx)?;
                a.loop_(again)?;
            }
            7 => a.int(0x80)?,
            8 => a.db(&far(0xEA, TASK + 8))?,
            9 => a.db(&far(0x9A, TASK + 16))?,
            10 => a.db(&far(0x9A, TASK_GATE))?,
            11 => a.int(0x81)?,
            _ => a.ud2()?,
        }
    }
    a.nop()?;
    a.jmp(labels[0])?;
    a.set_label(&mut done)?;
    a.hlt()?;
    a.set_label(&mut handler)?;
    a.inc(edx)?;
    a.iretd()?;
    for (n, task) in tasks.iter_mut().enumerate() {
        let (mut odd, mut back) = (a.create_label(), a.create_label());
        a.set_label(task)?;
        a.inc(dword_ptr(ENTERED as u32))?;
        a.test(byte_ptr(ENTERED as u32), 1)?;
        a.jnz(odd)?;
        a.call(back)?;
        a.set_label(&mut odd)?;
        a.nop()?;
        a.set_label(&mut back)?;
        match n {
            0 => a.db(&far(0xEA, TASK))?,
            1 => a.iretd()?,
            _ => {
                a.add(dword_ptr((TASKS + 0x20) as u32), 2)?;
                a.iretd()?;
            }
        }
        a.mov(esp, TASK_STACKS as u32 + 0x200 * (n as u32 + 1))?;
        a.jmp(*task)?;
    }
    let options = iced_x86::BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
    let assembled = a.assemble_options(CODE, options)?;
    let handler = assembled.label_ip(&handler)?;
    let blocks: Result<_, IcedError> = labels
        .iter()
        .map(|label| Ok(assembled.label_ip(label)? as u32))
        .collect();
    let begins: Result<Vec<u64>, IcedError> = tasks.iter().map(|label| assembled.label_ip(label)).collect();
    Ok(Program {
        code: assembled.inner.code_buffer,
        blocks: blocks?,
        handler,
        tasks: Tasks(begins?.try_into().expect("a place for each")),
    })
}

/// A processor in 32-bit protected mode, with a task for each that the program has, and paging, which each task loads CR3 for:
/// every other one has a page directory of its own. All of memory is where it is.
fn protected(model: &'static CpuModel, memory: &Memory, program: &Program) -> Box<Cpu> {
    let write = |at: u64, value: u64| memory.write(at, &value.to_le_bytes()).unwrap();
    let word = |at: u64, value: u64| memory.write(at, &(value as u32).to_le_bytes()).unwrap();
    let task_gate = |selector: u16| u64::from(selector) << 16 | 0x8500 << 32;
    let last = TASK_GATE - 8;
    for (n, descriptor) in [0, 0x00CF_9B00_0000_FFFF, 0x00CF_9300_0000_FFFFu64]
        .into_iter()
        .enumerate()
    {
        write(TABLES + 8 * n as u64, descriptor);
    }
    write(TABLES + u64::from(TASK_GATE), task_gate(last - 8));
    for n in 0..Tasks::COUNT as u64 {
        let at = TASKS + APART * n;
        // A free 32-bit TSS; the first is busy.
        let kind = if n == 0 { 0x8B } else { 0x89 };
        write(TABLES + u64::from(TASK) + 8 * n, 0x67 | at << 16 | kind << 40);
        // SDM Vol. 3A Figure 9-2 "32-Bit Task-State Segment (TSS)".
        word(at + 0x1C, DIRECTORIES[n as usize % 2]);
        if n > 0 {
            word(at + 0x20, program.tasks.0[n as usize - 1]);
            word(at + 0x24, 2);
            word(at + 0x38, TASK_STACKS + 0x200 * n);
        }
        for (field, selector) in [(0x48, 16), (0x4C, 8), (0x50, 16), (0x54, 16), (0x58, 16), (0x5C, 16)] {
            word(at + field, selector);
        }
        word(at + 0x64, 0x68 << 16);
    }
    for directory in DIRECTORIES {
        // A page of 4 MiB.
        word(directory, 0xE7);
    }
    // An interrupt gate, and task gates.
    let gate = program.handler & 0xFFFF | 8 << 16 | 0x8E00 << 32 | (program.handler >> 16) << 48;
    for (vector, gate) in [(0x80, gate), (0x81, task_gate(last - 8)), (6, task_gate(last))] {
        write(TABLES + 0x100 + 8 * vector, gate);
    }
    let mut state = CpuState::reset(model);
    (state.rip, state.gpr[4], state.cr0) = (CODE, STACK, 0x8000_0031.into());
    (state.cr3, state.cr4) = (DIRECTORIES[0], 0x10.into());
    state.tr = Segment {
        selector: TASK,
        base: TASKS,
        limit: 0x67,
        attributes: 0x8B,
    };
    let segment = |selector, attributes| Segment {
        selector,
        base: 0,
        limit: u32::MAX,
        attributes,
    };
    state.segments.fill(segment(16, 0xC093));
    state.segments[CS] = segment(8, 0xC09B);
    let table = |base, limit| Table { base, limit };
    (state.gdtr, state.idtr) = (table(TABLES, TASK_GATE + 7), table(TABLES + 0x100, 0x7FF));
    let mut cpu = Cpu::new(model);
    cpu.set_state(&state);
    cpu
}

/// How many PIPs there are besides those that follow a PSB. Each is where a far transfer has it: behind the FUP of its source,
/// where there is one, and in front of MODE.Exec and its TIP. SDM Vol. 3C Table "Packet Generation under Different Enable
/// Conditions", far branches, interrupts and exceptions.
fn paged(packets: &[u8]) -> usize {
    let mut decoder = pt_packet::Decoder::new(packets);
    let all: Vec<_> = std::iter::from_fn(|| decoder.next_packet())
        .map(|item| item.expect("packets").packet)
        .filter(|packet| !matches!(packet, Packet::Pad))
        .collect();
    let (mut count, mut beginning) = (0, false);
    for (n, packet) in all.iter().enumerate() {
        match packet {
            Packet::Psb => beginning = true,
            Packet::PsbEnd => beginning = false,
            Packet::Pip { .. } if !beginning => {
                count += 1;
                let mut behind = all[n + 1..]
                    .iter()
                    .filter(|packet| !matches!(packet, Packet::ModeExec { .. }));
                let next = behind.next();
                assert!(matches!(next, Some(Packet::Tip(Some(_)))), "a PIP in front of {next:?}");
            }
            _ => {}
        }
    }
    count
}

// covers: trace/oracle-programs
#[test]
fn programs_of_32_bit_code_as_the_units_tell_them_are_what_ran() {
    for model in MODELS.iter().copied() {
        let (mut sums, mut switches) = ([0; 2], 0);
        for seed in 1..=seeds() {
            let Program { blocks, .. } = program(seed * 7919, &[0; BLOCKS]).unwrap();
            let program = program(seed * 7919, &blocks).unwrap();
            for on in sets(model) {
                let memory = Memory::new(2 << 20).unwrap();
                memory.write(CODE, &program.code).unwrap();
                let mut cpu = protected(model, &memory, &program);
                let entered = memory.clone();
                let mut soft = memory.engine(model, EngineOptions::default()).unwrap();
                let mut machine = Machine::new(model, 1, memory, 0, 0, Box::new(std::io::sink()));
                let (mut judge, verdict) = Judge::new(model, &on, End::Halt, 0..0);
                judge.keep_packets();
                assert!(machine.observe(0, Some(Box::new(judge))));
                loop {
                    match soft.get().run(&mut cpu, &mut machine.cpu(0), 1 + seed * 1009) {
                        Exit::Halt => break,
                        Exit::Budget | Exit::Bus | Exit::Pause | Exit::Window => {}
                        other => panic!("{}: {other:?}", model.name),
                    }
                }
                machine.observe(0, None);
                let found = std::mem::take(&mut *verdict.lock().unwrap());
                let what = format!("{} {seed} {on:?}", model.name);
                let [instructions, taken] = judged(&found, &on, &what);
                let mut count = [0; 4];
                entered.read(ENTERED, &mut count).unwrap();
                let count = u32::from_le_bytes(count) as usize;
                if on.contains(&Unit::Pt) {
                    assert_eq!(
                        paged(&found.kept),
                        2 * count,
                        "{what}: CR3 by task switches, there and back"
                    );
                }
                switches += count;
                sums = [sums[0] + instructions, sums[1] + taken];
            }
        }
        assert!(switches > 100 * seeds() as usize, "{}: {switches}", model.name);
        assert!(
            sums[0] > 2000 * seeds() && sums[1] > 500 * seeds(),
            "{}: {sums:?}",
            model.name
        );
    }
}
