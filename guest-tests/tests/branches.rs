//! The last-branch stack and the branch trace store on the engine: random programs, whose branches an observer of the host's
//! records beside them.

use std::io;
use std::sync::{Arc, Mutex};

use devices::unit::Units;
use devices::unit::debugctl::DebugCtlUnit;
use devices::unit::ds::area::DsArea;
use devices::unit::ds::bts::Bts;
use devices::unit::lbr::Gate;
use engine::{CS, Cpu, CpuState, EngineOptions, Exit, Segment};
use minivmm::machine::Machine;
use minivmm::machine::memory::{Memory, SoftEngine};
use x86::ds::DsLayout;
use x86::lbr::LbrLayout;
use x86::model::{CpuModel, MODELS};
use x86::watch::{BranchRecord, Effects, EventRecord, Flow, Interest, Processor, Recorded, Watch};

const CODE: u64 = 0x1_0000;
const STACK: u32 = 0x8000;
const TABLES: u64 = 0x10_0000;
const AREA: u32 = 0x20_0000;
const BUFFER: u64 = 0x20_1000;
const BLOCKS: u64 = 48;
/// Bytes of code that a block may have.
const BLOCK: u64 = 64;

/// Everything that went anywhere, as the host sees it.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<BranchRecord>>>);

impl Watch for Log {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        Interest {
            branches: Recorded::All,
            ..Interest::NOTHING
        }
    }

    fn branches(&mut self, records: &[BranchRecord], _: &mut dyn Processor) -> Effects {
        let taken = |r: &&BranchRecord| Flow::from_code(r.flow).is_some_and(Flow::taken);
        self.0.lock().unwrap().extend(records.iter().filter(taken));
        Effects::NONE
    }

    fn event(&mut self, event: &EventRecord, _: &mut dyn Processor) -> Effects {
        self.0.lock().unwrap().push(event.branch);
        Effects::NONE
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16) % n
    }
}

/// 64-bit code that never ends: blocks that branch to each other in every near way, by the bits of a generator in RAX. The
/// registers in `msrs` are written first.
fn program(random: &mut Random, msrs: &[(u32, u64)]) -> Vec<u8> {
    let block = |i: u64| (1 + i) * 0x100;
    let mut code = Vec::new();
    for &(msr, value) in msrs {
        code.extend([0xB9].iter().chain(&msr.to_le_bytes())); // mov ecx, msr
        code.extend([0xB8].iter().chain(&(value as u32).to_le_bytes())); // mov eax, low
        code.extend([0xBA].iter().chain(&((value >> 32) as u32).to_le_bytes())); // mov edx, high
        code.extend([0x0F, 0x30]); // wrmsr
    }
    jump(&mut code, &[0xE9], block(0));
    for i in 0..BLOCKS {
        code.resize(block(i) as usize, 0x90);
        code.extend([0x48, 0x69, 0xC0, 0x6D, 0x4E, 0xC6, 0x41]); // imul rax, rax, 41C64E6DH
        code.extend([0x48, 0x05, 0x39, 0x30, 0x00, 0x00]); // add rax, 3039H
        for _ in 0..random.below(3) {
            code.extend([0x0F, 0xBA, 0xE0, 8 + random.below(20) as u8]); // bt eax, n
            jump(&mut code, &[0x0F, 0x82], block(random.below(BLOCKS))); // jc
        }
        let target = block(random.below(BLOCKS));
        match random.below(6) {
            0 => jump(&mut code, &[0xE9], target), // jmp
            1 => {
                code.extend([0x48, 0xC7, 0xC4].iter().chain(&STACK.to_le_bytes())); // mov rsp, stack
                jump(&mut code, &[0xE8], target); // call
                jump(&mut code, &[0xE9], block(random.below(BLOCKS)));
            }
            2 => {
                jump(&mut code, &[0x48, 0x8D, 0x15], target); // lea rdx, target
                code.extend([0xFF, 0xE2]); // jmp rdx
            }
            3 => {
                code.extend([0x48, 0xC7, 0xC4].iter().chain(&STACK.to_le_bytes()));
                jump(&mut code, &[0x48, 0x8D, 0x15], target);
                code.extend([0xFF, 0xD2]); // call rdx
                jump(&mut code, &[0xE9], block(random.below(BLOCKS)));
            }
            4 => {
                jump(&mut code, &[0x48, 0x8D, 0x15], target);
                code.extend([0x52, 0xC3]); // push rdx; ret
            }
            _ => {
                code.extend([0xE8, 0, 0, 0, 0, 0x5A]); // call the next instruction; pop rdx
                jump(&mut code, &[0xE9], target);
            }
        }
        assert!(code.len() as u64 <= block(i) + 2 * BLOCK);
    }
    code
}

/// An instruction that ends in the distance to `target`.
fn jump(code: &mut Vec<u8>, opcode: &[u8], target: u64) {
    code.extend(opcode);
    let next = code.len() as u64 + 4;
    code.extend((target.wrapping_sub(next) as u32).to_le_bytes());
}

/// A machine in 64-bit mode of ring 0, RAM mapped one to one, with this code.
fn machine(model: &'static CpuModel, code: &[u8]) -> (Machine, SoftEngine, Box<Cpu>) {
    machine_in_ring(0, model, code)
}

fn machine_in_ring(ring: u16, model: &'static CpuModel, code: &[u8]) -> (Machine, SoftEngine, Box<Cpu>) {
    let memory = Memory::new(8 << 20).unwrap();
    memory.write(CODE, code).unwrap();
    let tables = [(0, TABLES + 0x1007), (0x1000, TABLES + 0x2007)];
    let pages = (0..4).map(|page| (0x2000 + page * 8, page << 21 | 0x87));
    for (at, entry) in tables.into_iter().chain(pages) {
        memory.write(TABLES + at, &entry.to_le_bytes()).unwrap();
    }
    let fields: [u64; 4] = [BUFFER, BUFFER, BUFFER + 0x4_0000, !0 >> 1];
    for (i, field) in (0..).zip(fields) {
        memory.write(u64::from(AREA) + 8 * i, &field.to_le_bytes()).unwrap();
    }
    let soft = memory.engine(model, EngineOptions::default()).unwrap();
    let machine = Machine::new(model, 1, memory, 0, 0, Box::new(io::sink()));
    let mut state = CpuState::reset(model);
    (state.rip, state.gpr[4]) = (CODE, STACK.into());
    state.cpl = ring as u8;
    state.cr0 = 0x8001_0033.into();
    (state.cr3, state.cr4, state.efer) = (TABLES, 0x6A0.into(), 0xD01.into());
    let segment = |selector: u16, attributes: u16| Segment {
        selector: selector | ring,
        base: 0,
        limit: u32::MAX,
        attributes: attributes | ring << 5,
    };
    state.segments.fill(segment(16, 0xC093));
    state.segments[CS] = segment(8, 0xA09B);
    let mut cpu = Cpu::new(model);
    cpu.set_state(&state);
    (machine, soft, cpu)
}

/// Runs for so many steps, whatever the machine makes of it in between.
fn run(machine: &mut Machine, soft: &mut SoftEngine, cpu: &mut Cpu, steps: u64) {
    let end = cpu.steps() + steps;
    while cpu.steps() < end {
        match soft.get().run(cpu, &mut machine.cpu(0), end - cpu.steps()) {
            Exit::Budget | Exit::Bus | Exit::Window | Exit::Pause => {}
            other => panic!("{other:?}"),
        }
    }
}

/// FROM and TO of the last-branch records, newest first, without flags.
fn stack(units: &Units) -> Vec<[u64; 2]> {
    let entries: Vec<_> = match (&units.lbr, &units.arch_lbr) {
        (Some(unit), _) => unit.newest().collect(),
        (_, Some(unit)) => unit.newest().collect(),
        _ => Vec::new(),
    };
    entries
        .iter()
        .map(|e| [e.from & 0xFFFF_FFFF, e.to & 0xFFFF_FFFF])
        .collect()
}

/// The models that run 64-bit code, with what switches their stack on.
fn models() -> impl Iterator<Item = (&'static CpuModel, (u32, u64), usize)> {
    MODELS.iter().filter(|model| model.features().lm()).map(|model| {
        let caps = model.units.lbr.unwrap();
        let on = match caps.layout {
            LbrLayout::Architectural => (0x14CE, 0x7F_0007),
            _ => (0x1D9, 1),
        };
        (*model, on, usize::from(caps.depth))
    })
}

// covers: lbr/engine
#[test]
fn the_stack_is_the_tail_of_the_branches_on_every_model() {
    let mut random = Random(0x1B2E);
    for (model, on, depth) in models() {
        for _ in 0..4 {
            let code = program(&mut random, &[on]);
            let (mut machine, mut soft, mut cpu) = machine(model, &code);
            let log = Log::default();
            machine.observe(0, Some(Box::new(log.clone())));
            for _ in 0..20 {
                let steps = 1 + random.below(3000);
                run(&mut machine, &mut soft, &mut cpu, steps);
                let log = log.0.lock().unwrap();
                let mut expected: Vec<_> = log.iter().rev().take(depth).map(|r| [r.from, r.to]).collect();
                expected.resize(depth, [0; 2]);
                assert_eq!(stack(machine.units(0).unwrap()), expected, "{}", model.name);
            }
            assert!(log.0.lock().unwrap().len() > 1000, "{}", model.name);
        }
    }
}

/// The two registers that people write with msr-tools while `while (1) i++;` runs on that CPU, and what they read then.
// covers: lbr/script
#[test]
fn every_record_is_the_loop_s_own_jump() {
    for (name, depth) in [("skylake-server", 32), ("icelake-server", 32), ("westmere", 16)] {
        let model = x86::model::by_name(name).unwrap();
        // 1: inc eax; jmp 1b, in ring 3.
        let (mut machine, mut soft, mut cpu) = machine_in_ring(3, model, &[0xFF, 0xC0, 0xEB, 0xFC]);
        let gate = Gate {
            enabled: true,
            ..Gate::default()
        };
        let units = machine.units(0).unwrap();
        units.debugctl.as_mut().unwrap().write_msr(0x1D9, 1).unwrap();
        units.lbr.as_mut().unwrap().write_msr(0x1C8, 1, gate).unwrap();
        run(&mut machine, &mut soft, &mut cpu, 10_001);
        let lbr = machine.units(0).unwrap().lbr.as_ref().unwrap();
        for i in 0..depth {
            assert_eq!(lbr.read_msr(0x680 + i, gate), Ok(CODE + 2), "{name} {i}");
            assert_eq!(lbr.read_msr(0x6C0 + i, gate), Ok(CODE), "{name} {i}");
        }
        assert_eq!(lbr.read_msr(0x1C9, gate), Ok(5000 % u64::from(depth)), "{name}");
        assert!(lbr.read_msr(0x680 + depth, gate).is_err(), "{name}: no more than that");
        // CPL_NEQ_0 instead: nothing more is recorded.
        let units = machine.units(0).unwrap();
        units.lbr.as_mut().unwrap().write_msr(0x1C8, 2, gate).unwrap();
        run(&mut machine, &mut soft, &mut cpu, 1000);
        let lbr = machine.units(0).unwrap().lbr.as_ref().unwrap();
        assert_eq!(lbr.read_msr(0x1C9, gate), Ok(5000 % u64::from(depth)), "{name}");
    }
}

// covers: lbr/engine
#[test]
fn the_stack_through_a_filter_is_the_tail_of_what_passes() {
    let mut random = Random(0xF117);
    for (model, on, depth) in models().filter(|(model, ..)| model.units.lbr.unwrap().select != 0) {
        for kept_out in [1 << 2, 1 << 3 | 1 << 5, 1 << 6 | 1 << 7, 0x1EE] {
            let code = program(&mut random, &[(0x1C8, kept_out), on]);
            let (mut machine, mut soft, mut cpu) = machine(model, &code);
            let log = Log::default();
            machine.observe(0, Some(Box::new(log.clone())));
            run(&mut machine, &mut soft, &mut cpu, 20_000);
            let passes = |r: &&BranchRecord| match Flow::from_code(r.flow).unwrap() {
                Flow::Cond { .. } => kept_out >> 2 & 1 == 0,
                Flow::Call => kept_out >> 3 & 1 == 0,
                Flow::CallInd => kept_out >> 4 & 1 == 0,
                Flow::Ret => kept_out >> 5 & 1 == 0,
                Flow::JumpInd => kept_out >> 6 & 1 == 0,
                Flow::Jump => kept_out >> 7 & 1 == 0,
                Flow::Far(_) => kept_out >> 8 & 1 == 0,
            };
            let log = log.0.lock().unwrap();
            let passing: Vec<_> = log.iter().filter(passes).collect();
            let mut expected: Vec<_> = passing.iter().rev().take(depth).map(|r| [r.from, r.to]).collect();
            expected.resize(depth, [0; 2]);
            assert_eq!(
                stack(machine.units(0).unwrap()),
                expected,
                "{} {kept_out:#x}",
                model.name
            );
            let tos = machine.units(0).unwrap().lbr.as_ref().map(|unit| unit.state().ring.top);
            assert_eq!(tos, Some((passing.len() % depth) as u8), "{} {kept_out:#x}", model.name);
        }
    }
}

/// Gives the units the debug store as the part has it, whatever of it is shown.
fn store_branches(units: &mut Units, model: &CpuModel) {
    let (features, bits) = (model.part_features(), model.linear_bits());
    let (debugctl, ds) = (model.units.debugctl.unwrap(), model.units.ds.unwrap());
    assert!(features.ds() && ds.bts, "{}", model.name);
    units.debugctl = Some(DebugCtlUnit::new(debugctl, features));
    units.ds_area = DsArea::new(features, bits);
    units.bts = Some(Bts::new(DsLayout::of(features), ds.bts_predicted, bits));
}

// covers: bts/engine
#[test]
fn the_branch_trace_store_is_the_branches() {
    let mut random = Random(0xB7E);
    for (model, ..) in models() {
        // TR and BTS; the buffer holds more than the run makes.
        let code = program(&mut random, &[(0x600, u64::from(AREA)), (0x1D9, 0xC0)]);
        let (mut machine, mut soft, mut cpu) = machine(model, &code);
        store_branches(machine.units(0).unwrap(), model);
        let log = Log::default();
        machine.observe(0, Some(Box::new(log.clone())));
        run(&mut machine, &mut soft, &mut cpu, 30_000);
        // A run hands over what waits when it ends.
        let word = |machine: &Machine, at: u64| {
            let mut bytes = [0; 8];
            machine.memory().read(at, &mut bytes).unwrap();
            u64::from_le_bytes(bytes)
        };
        let records = (word(&machine, u64::from(AREA) + 8) - BUFFER) / 24;
        let stored: Vec<_> = (0..records)
            .map(|i| [word(&machine, BUFFER + 24 * i), word(&machine, BUFFER + 24 * i + 8)])
            .collect();
        let log = log.0.lock().unwrap();
        let expected: Vec<_> = log.iter().map(|r| [r.from, r.to]).collect();
        assert!(expected.len() > 1000, "{}", model.name);
        assert_eq!(stored, expected, "{}", model.name);
    }
}
