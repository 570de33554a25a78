//! What the units hear of a program: branches, far transfers, events and changes, in its order.

use crate::{bench, rig};
use std::cell::RefCell;
use std::rc::Rc;

use bench::{Bench, KCODE, UCODE, UDATA, handler};
use engine::bus::{Processor, Watch};
use engine::{Exit, Vectors};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rig::{CODE, STACK};
use x86::model::SAPPHIRERAPIDS;
use x86::watch::{Access, BranchRecord, Change, Context, Effects, EventRecord, Far, Flow, Interest, Range, Recorded};

/// A word as a test writes it down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    Branch(BranchRecord),
    Event(EventRecord),
    Change(Change),
    Before(u64),
    Access(Access),
    Tick(u64),
}

/// What a [`Listener`] wants, and what it has heard.
#[derive(Default)]
struct Notes {
    interest: Interest,
    boundaries: Vec<u64>,
    ranges: Vec<Range>,
    generation: u64,
    /// Answers `before` at this address, `access` or `branches`.
    effects: Effects,
    words: Vec<Word>,
    /// Sizes of the batches of branches.
    batches: Vec<usize>,
    /// The context at each batch of branches and each event.
    contexts: Vec<Context>,
}

#[derive(Clone, Default)]
struct Listener(Rc<RefCell<Notes>>, Vec<u64>, Vec<Range>);

impl Watch for Listener {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        let notes = self.0.borrow();
        (self.1, self.2) = (notes.boundaries.clone(), notes.ranges.clone());
        notes.interest
    }
    fn boundaries(&self) -> &[u64] {
        &self.1
    }
    fn ranges(&self) -> &[Range] {
        &self.2
    }
    fn generation(&self) -> u64 {
        self.0.borrow().generation
    }
    fn before(&mut self, address: u64, _: &mut dyn Processor) -> Effects {
        let mut notes = self.0.borrow_mut();
        notes.words.push(Word::Before(address));
        notes.effects
    }
    fn access(&mut self, access: &Access, _: &mut dyn Processor) -> Effects {
        let mut notes = self.0.borrow_mut();
        notes.words.push(Word::Access(*access));
        notes.effects
    }
    fn branches(&mut self, records: &[BranchRecord], cpu: &mut dyn Processor) -> Effects {
        let mut notes = self.0.borrow_mut();
        notes.batches.push(records.len());
        notes.contexts.push(cpu.context());
        notes.words.extend(records.iter().copied().map(Word::Branch));
        Effects::NONE
    }
    fn event(&mut self, event: &EventRecord, cpu: &mut dyn Processor) -> Effects {
        let mut notes = self.0.borrow_mut();
        notes.contexts.push(cpu.context());
        notes.words.push(Word::Event(*event));
        Effects::NONE
    }
    fn state(&mut self, change: Change, _: &mut dyn Processor) -> Effects {
        self.0.borrow_mut().words.push(Word::Change(change));
        Effects::NONE
    }
    fn tick(&mut self, cpu: &mut dyn Processor) -> Effects {
        let mut notes = self.0.borrow_mut();
        notes.words.push(Word::Tick(cpu.step()));
        notes.effects
    }
}

const BRANCHES: Interest = Interest {
    branches: Recorded::All,
    ..Interest::NOTHING
};

/// Has a machine listened to; what is heard arrives in the notes.
fn listen(b: &mut Bench, interest: Interest) -> Rc<RefCell<Notes>> {
    let listener = Listener::default();
    listener.0.borrow_mut().interest = interest;
    let notes = listener.0.clone();
    b.world.watch = Some(Box::new(listener));
    notes
}

/// Runs code up to its HLT and gives the flows that were heard, with source and target relative to where the code begins.
fn flows(
    mut b: Bench,
    base: u64,
    f: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Vec<(Flow, i64, i64, u8)> {
    let notes = listen(&mut b, BRANCHES);
    b.code(f);
    assert_eq!(b.run(1000), Exit::Halt, "{:x?}", b.cpu.state());
    let relative = |address: u64| address.wrapping_sub(base) as i64;
    let notes = notes.borrow();
    notes
        .words
        .iter()
        .filter_map(|word| match word {
            Word::Branch(r) | Word::Event(EventRecord { branch: r, .. }) => Some((
                Flow::from_code(r.flow).unwrap(),
                relative(r.from),
                relative(r.to),
                r.length,
            )),
            _ => None,
        })
        .collect()
}

const TAKEN: Flow = Flow::Cond { taken: true };
const NOT_TAKEN: Flow = Flow::Cond { taken: false };

// covers: interest/branches
#[test]
fn near_branches_are_recorded_with_their_kind_and_length() {
    // Conditional branches, joined with their compare and alone, and one that leads to where it would go anyway.
    let heard = flows(Bench::long(), CODE, |a| {
        let (mut one, mut two, mut three) = (a.create_label(), a.create_label(), a.create_label());
        a.mov(ecx, 2)?; // 0
        a.cmp(ecx, 2)?; // 5
        a.je(one)?; // 8
        a.nop()?; // 10
        a.set_label(&mut one)?;
        a.cmp(ecx, 3)?; // 11
        a.je(one)?; // 14
        a.nop()?; // 16
        a.jne(two)?; // 17
        a.set_label(&mut two)?;
        a.jmp(three)?; // 19
        a.nop()?; // 21
        a.set_label(&mut three)?;
        a.loop_(two)?; // 22
        a.hlt()
    });
    assert_eq!(
        heard,
        [
            (TAKEN, 8, 11, 2),
            (NOT_TAKEN, 14, 16, 2),
            (TAKEN, 17, 19, 2),
            (Flow::Jump, 19, 22, 2),
            (TAKEN, 22, 19, 2),
            (Flow::Jump, 19, 22, 2),
            (NOT_TAKEN, 22, 24, 2),
        ]
    );
}

// covers: interest/branches
#[test]
fn calls_returns_and_indirect_branches_are_told_apart() {
    let heard = flows(Bench::long(), CODE, |a| {
        let (mut function, mut after) = (a.create_label(), a.create_label());
        a.call(function)?; // 0
        a.lea(rax, ptr(function))?; // 5
        a.call(rax)?; // 12
        a.push(rax)?; // 14
        a.call(qword_ptr(rsp))?; // 15
        a.lea(rax, ptr(after))?; // 18
        a.jmp(rax)?; // 25
        a.set_label(&mut function)?;
        a.ret()?; // 27
        a.set_label(&mut after)?;
        a.mov(qword_ptr(rsp), rax)?; // 28
        a.add(qword_ptr(rsp), 12)?; // 32
        a.jmp(qword_ptr(rsp))?; // 37
        a.hlt()
    });
    assert_eq!(
        heard,
        [
            (Flow::Call, 0, 27, 5),
            (Flow::Ret, 27, 5, 1),
            (Flow::CallInd, 12, 27, 2),
            (Flow::Ret, 27, 14, 1),
            (Flow::CallInd, 15, 27, 3),
            (Flow::Ret, 27, 18, 1),
            (Flow::JumpInd, 25, 28, 2),
            (Flow::JumpInd, 37, 40, 3),
        ]
    );
}

// covers: interest/branches
#[test]
fn outside_64_bit_mode_addresses_are_linear() {
    // Code segment 1000H: base 10000H.
    let heard = flows(Bench::real(), 0x1_0000, |a| {
        let (mut far, mut out) = (a.create_label(), a.create_label());
        a.mov(cx, 1)?; // 0
        a.jcxz(out)?; // 3
        a.jmp(far)?; // 5
        a.nop()?;
        a.set_label(&mut far)?;
        a.call(out)?; // 8
        a.set_label(&mut out)?;
        a.hlt()
    });
    assert_eq!(
        heard,
        [(NOT_TAKEN, 3, 5, 2), (Flow::Jump, 5, 8, 2), (Flow::Call, 8, 11, 3)]
    );
}

// covers: interest/branches
#[test]
fn what_did_not_retire_or_is_no_branch_leaves_no_record() {
    // A REP, PAUSE, a block that ends for its length, and a call whose push faults.
    let mut b = Bench::long();
    let notes = listen(&mut b, BRANCHES);
    b.code(|a| {
        a.mov(ecx, 5)?;
        a.mov(rdi, STACK - 0x1000)?;
        a.rep().stosb()?;
        a.pause()?;
        for _ in 0..200 {
            a.nop()?;
        }
        a.mov(rsp, 0x8000_0000_0000_0010u64)?;
        a.call(CODE)
    });
    // The double fault's stack is good.
    b.gate64(8, KCODE, handler(8), 14, 0, 1);
    b.gate64(12, KCODE, handler(12), 14, 0, 1);
    b.put(bench::TSS + 0x24, bench::KERNEL_STACK);
    assert_eq!(b.run(1000), Exit::Halt);
    let notes = notes.borrow();
    let words: Vec<_> = notes.words.iter().filter(|w| !matches!(w, Word::Change(_))).collect();
    let [Word::Event(event)] = words[..] else {
        panic!("{words:x?}")
    };
    assert_eq!(event.vector, 12);
    assert_eq!(event.branch.length, 0);
}

/// Far transfers at CPL 0 and across levels, each with what is heard of it.
// covers: interest/transfers
#[test]
fn far_transfers_come_alone_with_the_processor_where_they_lead() {
    let transfers = Interest {
        transfers: true,
        ..Interest::NOTHING
    };
    for interest in [BRANCHES, transfers] {
        let mut b = Bench::long();
        let notes = listen(&mut b, interest);
        b.msr(x86::msr::IA32_STAR, (UDATA as u64 - 8 | 3) << 48 | (KCODE as u64) << 32);
        b.msr(x86::msr::IA32_LSTAR, CODE + 0x200);
        b.msr(x86::msr::IA32_EFER, 0xd01);
        notes.borrow_mut().words.clear();
        notes.borrow_mut().contexts.clear();
        // IRET to ring 3, SYSCALL, INT n.
        b.code(|a| {
            a.push(UDATA as i32 | 3)?;
            a.push(0x1f_0000)?;
            a.push(2)?;
            a.push(UCODE as i32 | 3)?;
            a.push((CODE + 0x100) as i32)?;
            a.iretq()
        });
        b.at(CODE + 0x100, |a| {
            let mut l = a.create_label();
            a.jmp(l)?;
            a.set_label(&mut l)?;
            a.syscall()
        });
        b.at(CODE + 0x200, |a| {
            let mut l = a.create_label();
            a.jmp(l)?;
            a.set_label(&mut l)?;
            a.int(0x40)
        });
        assert_eq!(b.run(1000), Exit::Halt);
        let notes = notes.borrow();
        let near = usize::from(interest.branches.any());
        let heard: Vec<_> = notes
            .words
            .iter()
            .filter_map(|word| match word {
                Word::Branch(r) => Some((Flow::from_code(r.flow).unwrap(), r.from, r.to, r.from_cpl, r.to_cpl)),
                Word::Event(e) => Some((
                    Flow::from_code(e.branch.flow).unwrap(),
                    e.branch.from,
                    e.branch.to,
                    e.branch.from_cpl,
                    e.branch.to_cpl,
                )),
                _ => None,
            })
            .collect();
        let mut expected = vec![
            (Flow::Far(Far::Iret), CODE + 14, CODE + 0x100, 0, 3),
            (Flow::Jump, CODE + 0x100, CODE + 0x102, 3, 3),
            (Flow::Far(Far::Syscall), CODE + 0x102, CODE + 0x200, 3, 0),
            (Flow::Jump, CODE + 0x200, CODE + 0x202, 0, 0),
            (Flow::Far(Far::SoftwareInterrupt), CODE + 0x202, handler(0x40), 0, 0),
        ];
        if near == 0 {
            expected.retain(|e| e.0 != Flow::Jump);
        }
        assert_eq!(heard[0].0, Flow::Far(Far::Iret));
        expected[0].1 = heard[0].1;
        assert_eq!(heard, expected);
        let levels: Vec<_> = notes.contexts.iter().map(|c| c.cpl).collect();
        assert_eq!(levels, if near == 1 { vec![3, 3, 0, 0, 0] } else { vec![3, 0, 0] });
        assert_eq!(notes.words.last(), Some(&Word::Change(Change::Halt)));
    }
}

/// A jump, an IRET and a jump: where the IRET stays in its code, no unit can tell when it hears of it, unless it has asked for RFLAGS.IF or
/// for each branch at once. Where it goes to ring 3, what was before it is heard in ring 0.
// covers: interest/returns
#[test]
fn an_iret_that_stays_in_its_code_comes_with_other_branches() {
    let of = |interest: Interest, user: bool| {
        let mut b = Bench::long();
        let notes = listen(&mut b, interest);
        let (code, stack) = match user {
            true => (i32::from(UCODE) | 3, i32::from(UDATA) | 3),
            false => (i32::from(KCODE), 0),
        };
        b.code(|a| {
            let (mut over, mut on, mut again) = (a.create_label(), a.create_label(), a.create_label());
            a.jmp(over)?;
            a.set_label(&mut over)?;
            a.cmp(rsp, rsp)?;
            a.jne(on)?;
            a.set_label(&mut on)?;
            a.jne(again)?;
            a.set_label(&mut again)?;
            a.push(stack)?;
            a.push(0x1f_0000)?;
            a.push(0x202)?;
            a.push(code)?;
            a.push((CODE + 0x100) as i32)?;
            a.iretq()
        });
        b.at(CODE + 0x100, |a| {
            let mut on = a.create_label();
            a.jmp(on)?;
            a.set_label(&mut on)?;
            // #GP in ring 3.
            a.hlt()
        });
        assert_eq!(b.run(1000), Exit::Halt);
        let notes = notes.borrow();
        let heard: Vec<(Flow, u64, u8, u32)> = notes
            .words
            .iter()
            .filter_map(|word| match word {
                Word::Branch(r) => Some((Flow::from_code(r.flow)?, r.to, r.to_cpl, r.run())),
                _ => None,
            })
            .collect();
        let levels: Vec<u8> = notes.contexts.iter().map(|context| context.cpl).collect();
        (heard, notes.batches.clone(), levels)
    };
    let (cond, iret) = (Flow::Cond { taken: false }, Flow::Far(Far::Iret));
    let all = [Flow::Jump, cond, cond, iret, Flow::Jump];
    let each = Interest {
        branch_room: 1,
        ..BRANCHES
    };
    let flag = Interest {
        interrupts: true,
        ..BRANCHES
    };
    let runs = Interest {
        run: BranchRecord::RUN_BITS,
        ..BRANCHES
    };
    let taken = Interest {
        branches: Recorded::Taken,
        ..BRANCHES
    };
    for (interest, user, flows, batches, levels) in [
        (BRANCHES, false, &all[..], &[5][..], &[0][..]),
        (each, false, &all, &[1; 5], &[0; 5]),
        (flag, false, &all, &[3, 1, 1], &[0; 3]),
        // The first conditional branch has a record of its own kind, the second is a bit in that of the IRET.
        (runs, false, &[iret], &[2], &[0]),
        (taken, false, &[Flow::Jump, iret, Flow::Jump], &[3], &[0]),
        (BRANCHES, true, &all, &[3, 1, 1], &[0, 3, 3, 0]),
        (taken, true, &[Flow::Jump, iret, Flow::Jump], &[1, 1, 1], &[0, 3, 3, 0]),
    ] {
        let (heard, sizes, cpls) = of(interest, user);
        let kinds: Vec<Flow> = heard.iter().map(|(flow, ..)| *flow).collect();
        let what = format!("{interest:?} {user} {heard:x?}");
        assert_eq!((&kinds[..], &sizes[..], &cpls[..]), (flows, batches, levels), "{what}");
        let back = heard.iter().find(|(flow, ..)| *flow == iret).unwrap();
        let bits = if interest.run == 0 { 1 } else { 0b10 };
        assert_eq!(
            (back.1, back.2, back.3),
            (CODE + 0x100, if user { 3 } else { 0 }, bits),
            "{what}"
        );
    }
}

// covers: interest/transfers
#[test]
fn exceptions_and_interrupts_say_vector_error_and_address() {
    let mut b = Bench::long();
    let notes = listen(&mut b, BRANCHES);
    b.code(|a| {
        a.mov(rax, 0x4000_0000_0000u64)?;
        a.mov(eax, dword_ptr(rax))
    });
    assert_eq!(b.run(100), Exit::Halt);
    b.state(|s| s.rflags = (s.rflags.into_bits() | 0x200).into());
    let rip = b.cpu.rip();
    b.interrupt(0x55);
    let notes = notes.borrow();
    let events: Vec<_> = notes
        .words
        .iter()
        .filter_map(|word| match word {
            Word::Event(e) => Some((
                e.vector,
                e.error,
                e.address,
                Flow::from_code(e.branch.flow).unwrap(),
                e.branch.from,
                e.branch.to,
            )),
            _ => None,
        })
        .collect();
    assert_eq!(
        events,
        [
            (
                14,
                Some(0),
                Some(0x4000_0000_0000),
                Flow::Far(Far::Exception),
                CODE + 10,
                handler(14)
            ),
            (0x55, None, None, Flow::Far(Far::Interrupt), rip, handler(0x55)),
        ]
    );
    assert!(notes.words.contains(&Word::Change(Change::Wake { store: false })));
}

// covers: interest/changes
#[test]
fn changes_are_announced_in_the_order_of_the_program() {
    let all = |interrupts: bool| {
        let flag = interrupts.then_some("Interrupts");
        let mut kinds: Vec<_> = flag
            .into_iter()
            .chain(["branch"])
            .chain(flag)
            .chain(["Cr3", "branch"])
            .collect();
        kinds.extend(flag.into_iter().chain(["Halt"]));
        kinds
    };
    for interrupts in [true, false] {
        assert_eq!(changes_heard(interrupts), all(interrupts), "{interrupts}");
    }
}

/// What is heard of a program that changes RFLAGS.IF three times, by who wants to hear of that or not.
fn changes_heard(interrupts: bool) -> Vec<String> {
    let mut b = Bench::long();
    let notes = listen(&mut b, Interest { interrupts, ..BRANCHES });
    b.code(|a| {
        let (mut one, mut two) = (a.create_label(), a.create_label());
        a.sti()?;
        a.jmp(one)?;
        a.set_label(&mut one)?;
        a.cli()?;
        a.cli()?;
        a.mov(rax, cr3)?;
        a.mov(cr3, rax)?;
        a.jmp(two)?;
        a.set_label(&mut two)?;
        a.pushfq()?;
        a.or(dword_ptr(rsp), 0x200)?;
        a.popfq()?;
        a.hlt()
    });
    assert_eq!(b.run(100), Exit::Halt);
    let notes = notes.borrow();
    let words = notes.words.iter().map(|word| match word {
        Word::Change(c) => format!("{c:?}"),
        Word::Branch(_) => "branch".into(),
        other => format!("{other:?}"),
    });
    words.collect()
}

// covers: interest/room
#[test]
fn records_are_handed_over_when_the_room_is_used_up_and_at_the_end_of_a_run() {
    for room in [1, 7, 100, u32::MAX] {
        let mut b = Bench::long();
        let notes = listen(
            &mut b,
            Interest {
                branch_room: room,
                ..BRANCHES
            },
        );
        b.code(|a| {
            let mut again = a.create_label();
            a.mov(ecx, 5000)?;
            a.set_label(&mut again)?;
            a.dec(ecx)?;
            a.jnz(again)?;
            a.hlt()
        });
        // In pieces that end anywhere.
        let mut runs = 0;
        while b.run(997) != Exit::Halt {
            runs += 1;
        }
        let notes = notes.borrow();
        let room = room.min(512) as usize;
        assert!(notes.batches.iter().all(|&n| n <= room), "{room}");
        assert_eq!(notes.batches.iter().sum::<usize>(), 5000);
        assert!(notes.batches.len() <= 5000_usize.div_ceil(room) + runs + 1);
        let steps: Vec<_> = notes
            .words
            .iter()
            .filter_map(|word| match word {
                Word::Branch(r) => Some(r.step),
                _ => None,
            })
            .collect();
        assert!(
            steps.iter().enumerate().all(|(i, &step)| step == 3 + 2 * i as u64),
            "{room}"
        );
    }
}

/// Reads DR6 and what arrived at the handler of #DB.
fn debug(b: &mut Bench) -> (u64, u64, u64) {
    let t = b.trap();
    assert_eq!(t.vector, 1, "{t:x?}");
    (t.rip, t.flags >> 16 & 1, b.cpu.state().dr[6] & 0xf00f)
}

// covers: interest/before
#[test]
fn before_is_said_wherever_control_comes_from_and_not_for_other_addresses_of_the_offset() {
    let mut b = Bench::long();
    let notes = listen(&mut b, Interest::NOTHING);
    let target = CODE + 0x40;
    // The same offset in the next page runs, too, and is nobody's boundary.
    b.code(|a| {
        a.mov(ecx, 10)?;
        a.jmp(target)
    });
    b.at(CODE + 0x3e, |a| {
        let (mut again, mut out) = (a.create_label(), a.create_label());
        a.nop()?; // 3e
        a.nop()?; // 3f
        a.nop()?; // 40: straight on, by links and by the jump cache
        a.nop()?;
        a.call(CODE + 0x1040)?;
        a.dec(ecx)?;
        a.jz(out)?;
        a.test(ecx, 1)?;
        a.jz(again)?;
        a.lea(rax, ptr(CODE + 0x3e))?;
        a.jmp(rax)?;
        a.set_label(&mut again)?;
        a.jmp(CODE + 0x40)?;
        a.set_label(&mut out)?;
        a.hlt()
    });
    b.at(CODE + 0x1040, |a| a.ret());
    notes.borrow_mut().boundaries = vec![target];
    notes.borrow_mut().generation = 1;
    assert_eq!(b.run(10_000), Exit::Halt);
    let heard = notes.borrow().words.clone();
    assert_eq!(heard, vec![Word::Before(target); 10]);
    // Gone again.
    notes.borrow_mut().boundaries.clear();
    notes.borrow_mut().generation = 2;
    b.state(|s| (s.rip, s.activity) = (CODE, engine::Activity::Running));
    assert_eq!(b.run(10_000), Exit::Halt);
    assert_eq!(notes.borrow().words.len(), 10);
}

// covers: dr/execute
#[test]
fn an_instruction_breakpoint_is_a_fault_and_rf_lets_it_pass() {
    let mut b = Bench::long();
    let notes = listen(&mut b, Interest::NOTHING);
    {
        let mut notes = notes.borrow_mut();
        notes.boundaries = vec![CODE + 5];
        notes.generation = 1;
        notes.effects.debug = Some(1);
    }
    b.code(|a| {
        a.mov(eax, 1)?; // 0
        a.mov(eax, 2)?; // 5
        a.hlt()
    });
    let (rip, rf, bits) = debug(&mut b);
    // SDM Vol. 3B 17.3.1.1 "Instruction-Breakpoint Exception Condition": of all faults' frames this one has RF clear.
    assert_eq!((rip, rf, bits), (CODE + 5, 0, 1));
    assert_eq!(b.cpu.state().gpr[0], 1, "before the instruction");
    // A handler that just returns meets it again, and has the same frame.
    let frame = b.cpu.state().gpr[4];
    b.at(handler(1), |a| a.iretq());
    b.state(|s| (s.rip, s.activity) = (handler(1), engine::Activity::Running));
    let words = notes.borrow().words.len();
    assert_eq!(b.run(20), Exit::Budget, "it goes round and round");
    assert!(notes.borrow().words.len() > words + 10);
    // One that sets RF gets past.
    b.at(handler(1), |a| {
        a.bts(qword_ptr(rsp + 16), 16)?;
        a.iretq()
    });
    b.state(|s| (s.rip, s.gpr[4], s.activity) = (handler(1), frame, engine::Activity::Running));
    b.state(|s| (s.rip, s.activity) = (handler(1), engine::Activity::Running));
    assert_eq!(b.run(100), Exit::Halt);
    assert_eq!((b.cpu.rip(), b.cpu.state().gpr[0]), (CODE + 11, 2));
    // A load of SS lets it pass, too.
    b.at(handler(1), |a| a.hlt());
    b.at(CODE, |a| {
        a.mov(eax, ss)?; // 0
        a.mov(ss, eax)?; // 2
        a.nop()?;
        a.mov(eax, 3)?;
        a.hlt()
    });
    notes.borrow_mut().boundaries = vec![CODE + 4];
    notes.borrow_mut().generation = 2;
    b.state(|s| (s.rip, s.activity) = (CODE, engine::Activity::Running));
    assert_eq!(b.run(100), Exit::Halt);
    assert_eq!(b.cpu.state().gpr[0], 3);
}

const DATA: u64 = 0x30_0000;

fn watched(b: &mut Bench, first: u64, len: u64, reads: bool, effect: bool) -> Rc<RefCell<Notes>> {
    let ranges = Interest {
        ranges: true,
        ..Interest::NOTHING
    };
    let notes = listen(b, ranges);
    {
        let mut notes = notes.borrow_mut();
        notes.ranges = vec![Range {
            first,
            last: first + len - 1,
            ports: false,
            reads,
            writes: true,
        }];
        notes.generation = 1;
        notes.effects.debug = effect.then_some(2);
    }
    notes
}

// covers: interest/access
#[test]
fn accesses_that_touch_a_range_are_announced_and_no_others() {
    use x86::watch::AccessKind::{Read, ReadWrite, Write};
    let mut b = Bench::long();
    let notes = watched(&mut b, DATA + 4, 4, true, false);
    b.code(|a| {
        a.mov(edi, DATA as u32)?;
        a.mov(eax, dword_ptr(rdi))?; // below
        a.mov(rax, qword_ptr(rdi))?; // over it
        a.mov(byte_ptr(rdi + 3), al)?; // below
        a.mov(word_ptr(rdi + 3), ax)?; // its first byte
        a.inc(byte_ptr(rdi + 7))?; // its last
        a.lock().add(dword_ptr(rdi + 4), 1)?;
        a.mov(byte_ptr(rdi + 8), al)?; // above
        a.movups(xmm0, xmmword_ptr(rdi))?;
        a.movups(xmmword_ptr(rdi), xmm0)?;
        a.mov(ecx, 12)?;
        a.rep().stosb()?;
        a.mov(edi, DATA as u32 + 8)?;
        a.push(qword_ptr(rdi - 4))?;
        a.hlt()
    });
    assert_eq!(b.run(1000), Exit::Halt);
    let heard: Vec<_> = notes
        .borrow()
        .words
        .iter()
        .map(|word| match word {
            Word::Access(a) => (a.address - DATA, a.size, a.kind),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(
        heard,
        [
            (0, 8, Read),
            (3, 2, Write),
            (7, 1, ReadWrite),
            (4, 4, ReadWrite),
            (0, 16, Read),
            (0, 16, Write),
            (4, 1, Write),
            (5, 1, Write),
            (6, 1, Write),
            (7, 1, Write),
            (4, 8, Read),
        ]
    );
}

// covers: dr/data
#[test]
fn a_data_breakpoint_is_a_trap_after_the_instruction_or_the_iteration() {
    let mut b = Bench::long();
    let _notes = watched(&mut b, DATA, 4, false, true);
    b.code(|a| {
        a.mov(ecx, dword_ptr(DATA))?; // 0: a read
        a.mov(dword_ptr(DATA), 7)?; // 7
        a.hlt()
    });
    assert_eq!(debug(&mut b), (CODE + 18, 0, 2));
    assert_eq!(u32::from_le_bytes(b.read(DATA)), 7, "the store was made");

    let mut b = Bench::long();
    let _notes = watched(&mut b, DATA + 2, 1, false, true);
    b.code(|a| {
        a.mov(edi, DATA as u32)?;
        a.mov(ecx, 8)?;
        a.rep().stosb()?; // a
        a.hlt()
    });
    assert_eq!(debug(&mut b), (CODE + 10, 1, 2), "between iterations RF is saved set");
    assert_eq!(b.cpu.state().gpr[1], 5, "after the third iteration");
    assert_eq!(b.cpu.retired(), 3, "MOV, MOV and the handler's HLT");
}

/// SDM Vol. 1 15.6.1 "Opmask Register to Predicate Vector Data Processing", Vol. 2A "VMASKMOV": what the mask leaves out is not accessed.
// covers: dr/masked
#[test]
fn an_element_that_a_mask_leaves_out_meets_no_data_breakpoint() {
    type Code = fn(&mut CodeAssembler) -> Result<(), IcedError>;
    let load: Code = |a| a.vmovdqu32(zmm1.k1(), zmmword_ptr(rbx));
    let store: Code = |a| a.vmovdqu8(zmmword_ptr(rbx).k1(), zmm2);
    let sum: Code = |a| a.vaddph(zmm1.k1().z(), zmm2, zmmword_ptr(rbx));
    let broadcast: Code = |a| a.vaddps(zmm1.k1(), zmm2, dword_bcst(rbx));
    let scalar: Code = |a| a.vmovsh(word_ptr(rbx).k1(), xmm2);
    let expand: Code = |a| a.vpexpandd(zmm1.k1(), zmmword_ptr(rbx));
    let compress: Code = |a| a.vpcompressd(zmmword_ptr(rbx).k1(), zmm2);
    let narrow: Code = |a| a.vcvtps2ph(ymmword_ptr(rbx).k1(), zmm2, 0);
    let extract: Code = |a| a.vextracti32x4(xmmword_ptr(rbx).k1(), zmm2, 1);
    let permute: Code = |a| a.vpermd(zmm1.k1(), zmm2, zmmword_ptr(rbx));
    let gather: Code = |a| a.vpgatherdd(zmm1.k1(), dword_ptr(rbx + zmm3));
    let scatter: Code = |a| a.vpscatterdd(dword_ptr(rbx + zmm3).k1(), zmm2);
    let masked_load: Code = |a| a.vmaskmovps(ymm1, ymm4, ymmword_ptr(rbx));
    let masked_store: Code = |a| a.vpmaskmovd(ymmword_ptr(rbx), ymm4, ymm2);
    let gather_by_sign: Code = |a| a.vpgatherdd_3(ymm1, dword_ptr(rbx + ymm3), ymm4);
    // Instruction, mask, the four bytes that are watched, and whether the breakpoint is met.
    for (why, code, k, watched_at, met) in [
        ("a load of elements beside it", load, 0b1011_u64, 8, false),
        ("a load of the element", load, 0b0100, 8, true),
        ("a load of nothing", load, 0, 8, false),
        ("a store of its bytes", store, 0x0ff0_f00f, 20, true),
        ("a store of none of its bytes", store, 0xfff0_ffff, 16, false),
        ("words beside it", sum, !0b11_u64, 0, false),
        ("one of two words", sum, 0b10, 0, true),
        ("a broadcast that nobody takes", broadcast, 0x1_0000, 0, false),
        ("a broadcast that one takes", broadcast, 0x8000, 0, true),
        ("a word that is not stored", scalar, 0b10, 0, false),
        ("a word that is stored", scalar, 0b1, 0, true),
        ("an expansion of three", expand, 0b1_0101, 12, false),
        ("an expansion of four", expand, 0b101_0101, 12, true),
        ("a compression of three", compress, 0b1_0101, 12, false),
        ("a compression of four", compress, 0b101_0101, 12, true),
        ("halves beside it", narrow, 0xfff3, 4, false),
        ("a half of it", narrow, 0x0008, 4, true),
        ("elements beside it of what is extracted", extract, 0b1011, 8, false),
        ("an element of what is extracted", extract, 0b0100, 8, true),
        ("a permutation reads all", permute, 0b0001, 32, true),
        ("a gather of others", gather, 0b1011, 8, false),
        ("a gather of the element", gather, 0b0100, 8, true),
        ("a scatter of others", scatter, 0b1011, 8, false),
        ("a scatter of the element", scatter, 0b0100, 8, true),
        ("VMASKMOVPS of others", masked_load, 0b1011, 8, false),
        ("VMASKMOVPS of the element", masked_load, 0b0100, 8, true),
        ("VPMASKMOVD of others", masked_store, 0b1011, 8, false),
        ("VPMASKMOVD of the element", masked_store, 0b0100, 8, true),
        ("a gather of others by their signs", gather_by_sign, 0b1011, 8, false),
        ("a gather of the element by its sign", gather_by_sign, 0b0100, 8, true),
    ] {
        // Within a page, and over two.
        for at in [DATA, DATA + 0x1000 - 24] {
            for vectors in [Vectors::Host, Vectors::Portable] {
                let mut b = Bench::long_by(&SAPPHIRERAPIDS, vectors);
                let notes = watched(&mut b, at + watched_at, 4, true, true);
                b.state(|s| {
                    s.cr4.set_osxsave(true);
                    s.xcr0 = 0xe7;
                    s.gpr[3] = at;
                    s.fpu.avx512.k[1] = k;
                    let dwords = |of: &dyn Fn(u128) -> u128| {
                        [0, 4, 8, 12].map(|first| (0..4).map(|i| of(first + i) << (32 * i)).sum::<u128>())
                    };
                    s.fpu.set_zmm(3, dwords(&|i| 4 * i));
                    s.fpu.set_zmm(4, dwords(&|i| (u128::from(k) >> i & 1) << 31));
                });
                b.code(|a| {
                    code(a)?;
                    a.hlt()
                });
                let exit = b.run(1000);
                let heard = notes.borrow().words.len();
                assert_eq!(
                    heard != 0,
                    met,
                    "{why}, at {at:x}, {vectors:?}: {exit:?}, {heard} accesses"
                );
                // The trap comes behind the instruction.
                let handled = b.cpu.state().rip == handler(1) + 1;
                assert_eq!(handled, met, "{why}, at {at:x}, {vectors:?}: {:x}", b.cpu.state().rip);
            }
        }
    }
}

// covers: dr/stack-switch
#[test]
fn a_data_breakpoint_of_a_load_of_ss_comes_one_instruction_later_or_not_at_all() {
    for (fault, why) in [
        (false, "it is held off"),
        (true, "it is lost when that instruction faults"),
    ] {
        let mut b = Bench::long();
        let _notes = watched(&mut b, DATA, 2, true, true);
        b.write(DATA, &bench::KDATA.to_le_bytes());
        b.code(|a| {
            a.mov(ss, word_ptr(DATA))?;
            if fault { a.ud2() } else { a.mov(eax, 5) }?;
            a.hlt()
        });
        let t = b.trap();
        if fault {
            assert_eq!((t.vector, b.cpu.state().dr[6] & 0xf), (6, 0), "{why}");
        } else {
            assert_eq!((t.vector, t.rip - CODE, b.cpu.state().gpr[0]), (1, 12, 5), "{why}");
            assert_eq!(b.cpu.state().dr[6] & 0xf, 2);
        }
    }
    // Before INT n it comes in the handler.
    let mut b = Bench::long();
    let _notes = watched(&mut b, DATA, 2, true, true);
    b.write(DATA, &bench::KDATA.to_le_bytes());
    b.code(|a| {
        a.mov(ss, word_ptr(DATA))?;
        a.int(0x40)
    });
    let t = b.trap();
    assert_eq!((t.vector, t.rip), (1, handler(0x40)));
}

// covers: dr/io
#[test]
fn ports_are_watched_and_trap_after_the_instruction() {
    let mut b = Bench::long();
    let notes = watched(&mut b, 0, 1, true, true);
    notes.borrow_mut().ranges = vec![Range {
        first: 0x3f8,
        last: 0x3f9,
        ports: true,
        reads: true,
        writes: true,
    }];
    b.code(|a| {
        a.mov(edx, 0x3f4)?; // 0
        a.out(dx, eax)?; // 5: up to 3f7
        a.mov(edx, 0x3f6)?; // 6
        a.out(dx, eax)?; // b: up to 3f9
        a.hlt()
    });
    let mut exit = b.run(100);
    while exit == Exit::Bus {
        exit = b.run(100);
    }
    assert_eq!(exit, Exit::Halt);
    let t = b.arrived();
    assert_eq!((t.vector, t.rip - CODE, b.cpu.state().dr[6] & 0xf), (1, 12, 2));
    assert_eq!(b.world.out.len(), 2, "the write was made");
}

// covers: interest/tick
#[test]
fn ticks_come_after_exactly_so_many_steps_each_iteration_of_a_rep_counting() {
    // The first, 20 rounds of 30 iterations and five instructions, and HLT.
    const STEPS: u64 = 1 + 20 * (30 + 5) + 1;
    for distance in [1, 3, 10, 32] {
        let mut b = Bench::long();
        let counting = Interest {
            instructions: distance,
            ..Interest::NOTHING
        };
        let notes = listen(&mut b, counting);
        notes.borrow_mut().effects.pmi = true;
        b.code(|a| {
            let mut again = a.create_label();
            a.mov(edx, 20)?;
            a.set_label(&mut again)?;
            a.mov(ecx, 30)?;
            a.mov(edi, DATA as u32)?;
            a.rep().stosb()?;
            a.cmp(eax, eax)?;
            a.dec(edx)?;
            a.jnz(again)?;
            a.hlt()
        });
        let mut exits = 0;
        loop {
            match b.run(10_000) {
                Exit::Halt => break,
                Exit::Bus => exits += 1,
                exit => panic!("{exit:?}"),
            }
            // A PMI is asked for between two instructions or iterations, and the run ends there.
            assert_eq!(b.cpu.steps() % distance, 0, "{distance}");
        }
        // One more tick as each run ends.
        let ticks: Vec<_> = notes.borrow().words.clone();
        let mut exact: Vec<_> = ticks
            .iter()
            .filter(|w| matches!(w, Word::Tick(n) if n % distance == 0))
            .collect();
        exact.dedup();
        assert_eq!(exact.len() as u64, STEPS / distance, "{distance}: {ticks:?}");
        assert_eq!(exits, STEPS / distance, "{distance}");
    }
}

// covers: dr/btf
#[test]
fn with_btf_a_single_step_comes_after_taken_branches_only() {
    let mut b = Bench::long();
    let stepping = Interest {
        step_on_branches: true,
        ..Interest::NOTHING
    };
    let _notes = listen(&mut b, stepping);
    b.code(|a| {
        let mut l = a.create_label();
        a.pushfq()?; // 0
        a.or(dword_ptr(rsp), 0x100)?; // 1
        a.popfq()?; // 8
        a.nop()?; // 9
        a.cmp(eax, eax)?; // a
        a.jne(l)?; // c: not taken
        a.je(l)?; // e: taken
        a.nop()?;
        a.set_label(&mut l)?;
        a.nop()?; // 11
        a.hlt()
    });
    assert_eq!(debug(&mut b), (CODE + 0x11, 0, 0x4000));
}
