//! The stream of retired instruction pointers: what follows from branch records, events and the bytes of the code is what is
//! seen when every instruction is announced. Random programs, in pieces of random length.

use crate::{bench, rig};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use bench::{Bench, handler};
use engine::Exit;
use engine::bus::{Processor, Watch};
use iced_x86::code_asm::*;
use iced_x86::{Decoder, DecoderOptions, FlowControl};
use rig::CODE;
use x86::watch::{BranchRecord, Effects, EventRecord, Far, Flow, Interest, Recorded};

/// What one run has heard.
#[derive(Default)]
struct Heard {
    every_instruction: bool,
    room: u32,
    /// Conditional branches of a run.
    run: u8,
    /// Of branches, those that are taken.
    taken_only: bool,
    /// Instruction pointers by number of the instruction; what did not retire is overwritten by what did.
    retired: BTreeMap<u64, u64>,
    transfers: Vec<BranchRecord>,
}

#[derive(Clone, Default)]
struct Ear(Rc<RefCell<Heard>>);

impl Watch for Ear {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        let heard = self.0.borrow();
        let recorded = match heard.taken_only {
            true => Recorded::Taken,
            false => Recorded::All,
        };
        Interest {
            every_instruction: heard.every_instruction,
            branches: recorded.when(!heard.every_instruction),
            branch_room: heard.room,
            run: heard.run,
            ..Interest::NOTHING
        }
    }
    fn before(&mut self, address: u64, cpu: &mut dyn Processor) -> Effects {
        self.0.borrow_mut().retired.insert(cpu.retired(), address);
        Effects::NONE
    }
    fn branches(&mut self, records: &[BranchRecord], _: &mut dyn Processor) -> Effects {
        self.0.borrow_mut().transfers.extend_from_slice(records);
        Effects::NONE
    }
    fn event(&mut self, event: &EventRecord, _: &mut dyn Processor) -> Effects {
        self.0.borrow_mut().transfers.push(event.branch);
        Effects::NONE
    }
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % n
    }
}

const BLOCKS: usize = 60;
/// Loads from here fault; the instruction is 7 bytes long.
const NOWHERE: i32 = 0x7000_0000;

/// A program of blocks that lead to one another in every way, until its fuel in R15 is used up.
fn program(b: &mut Bench, seed: u64) {
    let mut r = Random(seed);
    let mut a = CodeAssembler::new(64).unwrap();
    let mut labels: Vec<_> = (0..BLOCKS).map(|_| a.create_label()).collect();
    let mut exit = a.create_label();
    a.mov(r15d, 400).unwrap();
    for i in 0..BLOCKS {
        a.set_label(&mut labels[i]).unwrap();
        a.dec(r15).unwrap();
        a.jz(exit).unwrap();
        for _ in 0..r.below(6) {
            match r.below(10) {
                0 => a.add(eax, ebx),
                1 => a.imul_3(ebx, eax, 7),
                2 => a.push(rax).and_then(|()| a.pop(rdx)),
                3 => a.xor(ecx, 5),
                4 => a.mov(qword_ptr(0x30_0000), rax),
                5 => a
                    .mov(ecx, r.below(5) as u32)
                    .and_then(|()| a.mov(edi, 0x30_1000))
                    .and_then(|()| a.rep().stosb()),
                6 => a.pause(),
                7 => a.cpuid(),
                8 => a.mov(edx, dword_ptr(NOWHERE)),
                _ => a.cmp(ebx, r.below(100) as i32),
            }
            .unwrap();
        }
        let to = labels[r.below(BLOCKS as u64) as usize];
        match r.below(14) {
            0 => a.jmp(to),
            1 => a.call(to),
            2 => a.lea(rax, ptr(to)).and_then(|()| a.jmp(rax)),
            3 => a.lea(rax, ptr(to)).and_then(|()| a.call(rax)),
            4 => a.lea(rax, ptr(to)).and_then(|()| a.push(rax)).and_then(|()| a.ret()),
            5 => a
                .lea(rax, ptr(to))
                .and_then(|()| a.mov(qword_ptr(0x30_2000), rax))
                .and_then(|()| a.jmp(qword_ptr(0x30_2000))),
            6 => a.int(0x40),
            7 => a.ud2(),
            8 => a.int3(),
            9 => a.cmp(ebx, eax).and_then(|()| a.jb(to)),
            10 => a.test(ebx, ebx).and_then(|()| a.jnz(to)),
            11 => a.and(eax, 3).and_then(|()| a.jp(to)),
            12 => a.dec(edx).and_then(|()| a.js(to)),
            _ => a.jno(to),
        }
        .unwrap();
    }
    a.set_label(&mut exit).unwrap();
    a.hlt().unwrap();
    let bytes = a.assemble(CODE).unwrap();
    b.write(CODE, &bytes);
    // Handlers: INT n and INT3 come back, the others skip what faulted.
    for (vector, skip) in [(0x40, None), (3, None), (6, Some(2)), (14, Some(7))] {
        b.at(handler(vector), |a| match skip {
            None => a.iretq(),
            Some(skip) => {
                let error = 8 * i32::from(vector == 14);
                a.add(rsp, error)?;
                a.add(qword_ptr(rsp), skip)?;
                a.iretq()
            }
        });
    }
}

fn run(seed: u64, every_instruction: bool) -> (Heard, u64, Bench) {
    let ear = Heard {
        every_instruction,
        ..Heard::default()
    };
    listen(seed, ear)
}

/// Of an ear that wants something particular, in pieces of random length.
fn listen(seed: u64, wants: Heard) -> (Heard, u64, Bench) {
    let mut b = Bench::long();
    program(&mut b, seed);
    let kind = u64::from(wants.every_instruction) ^ u64::from(wants.run) << 8 ^ u64::from(wants.taken_only) << 16;
    let mut r = Random(seed ^ kind | 1);
    let room = 1 << r.below(12);
    let ear = Ear(Rc::new(RefCell::new(Heard { room, ..wants })));
    let heard = ear.0.clone();
    b.world.watch = Some(Box::new(ear));
    loop {
        match b.run(1 + r.below(3000)) {
            Exit::Halt => break,
            Exit::Budget | Exit::Bus => {}
            exit => panic!("{exit:?} at {:x}", b.cpu.rip()),
        }
    }
    let retired = b.cpu.retired();
    b.world.watch = None;
    (heard.take(), retired, b)
}

/// The retired instruction pointers that follow from the transfers, with what each instruction is by its bytes.
fn walk(b: &Bench, transfers: &[BranchRecord], end: u64) -> Vec<u64> {
    let (mut ip, mut ips) = (CODE, Vec::new());
    let decode = |ip: u64| Decoder::with_ip(64, &b.read::<15>(ip), ip, DecoderOptions::NONE).decode();
    let straight = |ips: &mut Vec<u64>, ip: &mut u64, to: u64| {
        while *ip != to {
            let i = decode(*ip);
            let flow = i.flow_control();
            assert!(
                matches!(flow, FlowControl::Next | FlowControl::Exception),
                "{:x}: {i:?} leads on without a record",
                *ip
            );
            ips.push(*ip);
            *ip = i.next_ip();
            assert!(ips.len() < 100_000, "{to:x} is not reached");
        }
    };
    for t in transfers {
        straight(&mut ips, &mut ip, t.from);
        let flow = Flow::from_code(t.flow).unwrap();
        let i = decode(t.from);
        let expected = match flow {
            Flow::Cond { .. } => FlowControl::ConditionalBranch,
            Flow::Jump => FlowControl::UnconditionalBranch,
            Flow::JumpInd => FlowControl::IndirectBranch,
            Flow::Call => FlowControl::Call,
            Flow::CallInd => FlowControl::IndirectCall,
            Flow::Ret | Flow::Far(Far::Iret) => FlowControl::Return,
            Flow::Far(Far::SoftwareInterrupt) => FlowControl::Interrupt,
            Flow::Far(Far::Exception) => {
                // The instruction did not retire.
                assert_eq!(t.length, 0);
                ip = t.to;
                continue;
            }
            _ => panic!("{t:x?}"),
        };
        assert_eq!(i.flow_control(), expected, "{i:?}: {t:x?}");
        assert_eq!(usize::from(t.length), i.len(), "{i:?}");
        if matches!(flow, Flow::Cond { .. } | Flow::Jump | Flow::Call) {
            let to = if flow.taken() {
                i.near_branch_target()
            } else {
                i.next_ip()
            };
            assert_eq!(t.to, to, "{i:?}");
        }
        ips.push(t.from);
        ip = t.to;
    }
    straight(&mut ips, &mut ip, end);
    ips
}

// covers: interest/stream
#[test]
fn the_stream_from_branches_is_the_stream_of_every_instruction() {
    let mut longest = 0;
    for seed in 1..60 {
        let (each, n, b) = run(seed, true);
        let (branches, m, c) = run(seed, false);
        assert_eq!(b.cpu.state(), c.cpu.state(), "watching changes nothing, seed {seed}");
        assert_eq!(n, m);
        let ips = walk(&c, &branches.transfers, c.cpu.rip());
        let expected: Vec<_> = each.retired.values().copied().collect();
        assert_eq!(each.retired.len() as u64, n);
        let differ = ips.iter().zip(&expected).position(|(a, b)| a != b);
        assert!(
            differ.is_none() && ips.len() == expected.len(),
            "seed {seed}: {} and {} instructions, differing from {differ:?}",
            ips.len(),
            expected.len()
        );
        longest = longest.max(ips.len());
    }
    assert!(longest > 1000, "the programs are too short: {longest}");
}

// covers: interest/runs
#[test]
fn runs_of_conditional_branches_are_what_each_of_them_would_have_been() {
    let (mut bits, mut longest) = (0, 0);
    for seed in 1..60 {
        let (each, n, b) = run(seed, false);
        let expected: Vec<_> = each.transfers.iter().filter(|r| r.flow != Flow::Jump.code()).collect();
        for limit in [1, 2, 7, BranchRecord::RUN_BITS] {
            let ear = Heard {
                run: limit,
                ..Heard::default()
            };
            let (packed, m, c) = listen(seed, ear);
            assert_eq!(b.cpu.state(), c.cpu.state(), "watching changes nothing, seed {seed}");
            assert_eq!(n, m);
            let mut expected = expected.iter().copied();
            let mut last = None;
            for (at, record) in packed.transfers.iter().enumerate() {
                let run = record.run();
                let len = 31 - run.leading_zeros();
                for bit in (0..len).rev() {
                    let next = expected.next().unwrap();
                    assert_eq!(next.flow, (run >> bit & 1) as u8, "seed {seed}, record {at}");
                    last = Some(next);
                }
                assert!(len <= limit.into(), "{len}");
                (bits, longest) = (bits + len, longest.max(len));
                if record.flow != BranchRecord::RUN {
                    let whole = BranchRecord { run: [0; 3], ..*record };
                    assert_eq!(Some(&whole), expected.next(), "seed {seed}, record {at}");
                    last = None;
                    continue;
                }
                let last = last.unwrap();
                assert_eq!(record.to, last.to, "seed {seed}, record {at}");
                assert_eq!(record.from_cpl, last.to_cpl);
                assert!(len > 0 && record.step >= last.step);
                // What is full is recorded at once.
                if len == u32::from(limit) {
                    assert_eq!(record.step, last.step, "seed {seed}, record {at}");
                }
            }
            assert_eq!(expected.next(), None, "seed {seed}");
        }
    }
    assert!(bits > 20_000 && longest == 23, "{bits} {longest}");
}

// covers: interest/taken
#[test]
fn taken_branches_alone_are_the_taken_ones_among_all() {
    let (mut taken, mut not_taken) = (0, 0);
    for seed in 1..60 {
        let (all, n, b) = run(seed, false);
        let ear = Heard {
            taken_only: true,
            ..Heard::default()
        };
        let (alone, m, c) = listen(seed, ear);
        assert_eq!(b.cpu.state(), c.cpu.state(), "watching changes nothing, seed {seed}");
        assert_eq!(n, m);
        let expected: Vec<_> = all.transfers.iter().filter(|r| r.flow != 0).copied().collect();
        assert_eq!(alone.transfers, expected, "seed {seed}");
        taken += expected.len();
        not_taken += all.transfers.len() - expected.len();
    }
    assert!(taken > 10_000 && not_taken > 5000, "{taken} {not_taken}");
}
