//! Random programs: of 64-bit code in two rings with interrupts, faults and transactions, and of 32-bit code on all models.

use engine::{CS, Cpu, CpuState, Exit, Options, Segment, Table};
use guest_tests::observer::Unit;
use guest_tests::traced::{self, Plan};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use minivmm::machine::Machine;
use minivmm::machine::memory::Memory;
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

/// 32-bit code: blocks that branch to each other in every near way and by software interrupts, so many times, then HLT.
/// EAX has numbers that decide, EBP counts. Gives the addresses of the blocks, too, which it wants for the second time.
fn program(seed: u64, blocks: &[u32]) -> Result<(Vec<u8>, Vec<u32>, u64), IcedError> {
    let mut random = traced::Random(seed);
    let mut a = CodeAssembler::new(32)?;
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
        match random.below(8) {
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
            _ => a.int(0x80)?,
        }
    }
    a.nop()?;
    a.jmp(labels[0])?;
    a.set_label(&mut done)?;
    a.hlt()?;
    a.set_label(&mut handler)?;
    a.inc(edx)?;
    a.iretd()?;
    let options = iced_x86::BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
    let assembled = a.assemble_options(CODE, options)?;
    let handler = assembled.label_ip(&handler)?;
    let blocks: Result<_, IcedError> = labels
        .iter()
        .map(|label| Ok(assembled.label_ip(label)? as u32))
        .collect();
    Ok((assembled.inner.code_buffer, blocks?, handler))
}

/// A processor in 32-bit protected mode without paging.
fn protected(model: &'static CpuModel, memory: &Memory, handler: u64) -> Box<Cpu> {
    for (n, descriptor) in [0, 0x00CF_9B00_0000_FFFF, 0x00CF_9300_0000_FFFFu64]
        .into_iter()
        .enumerate()
    {
        memory.write(TABLES + 8 * n as u64, &descriptor.to_le_bytes()).unwrap();
    }
    // An interrupt gate.
    let gate = handler & 0xFFFF | 8 << 16 | 0x8E00 << 32 | (handler >> 16) << 48;
    memory.write(TABLES + 0x100 + 8 * 0x80, &gate.to_le_bytes()).unwrap();
    let mut state = CpuState::reset(model);
    (state.rip, state.gpr[4], state.cr0) = (CODE, STACK, 0x31.into());
    let segment = |selector, attributes| Segment {
        selector,
        base: 0,
        limit: u32::MAX,
        attributes,
    };
    state.segments.fill(segment(16, 0xC093));
    state.segments[CS] = segment(8, 0xC09B);
    let table = |base, limit| Table { base, limit };
    (state.gdtr, state.idtr) = (table(TABLES, 0x17), table(TABLES + 0x100, 0x7FF));
    let mut cpu = Cpu::new(model);
    cpu.set_state(&state);
    cpu
}

// covers: trace/oracle-programs
#[test]
fn programs_of_32_bit_code_as_the_units_tell_them_are_what_ran() {
    for model in MODELS.iter().copied() {
        let mut sums = [0; 2];
        for seed in 1..=seeds() {
            let (_, blocks, _) = program(seed * 7919, &[0; BLOCKS]).unwrap();
            let (code, _, handler) = program(seed * 7919, &blocks).unwrap();
            for on in sets(model) {
                let memory = Memory::new(2 << 20).unwrap();
                memory.write(CODE, &code).unwrap();
                let mut cpu = protected(model, &memory, handler);
                let mut soft = memory.engine(model, Options::default()).unwrap();
                let mut machine = Machine::new(model, 1, memory, 0, 0, Box::new(std::io::sink()));
                let (judge, verdict) = Judge::new(model, &on, End::Halt, 0..0);
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
                let [instructions, taken] = judged(&found, &on, &format!("{} {seed} {on:?}", model.name));
                sums = [sums[0] + instructions, sums[1] + taken];
            }
        }
        assert!(
            sums[0] > 2000 * seeds() && sums[1] > 500 * seeds(),
            "{}: {sums:?}",
            model.name
        );
    }
}
