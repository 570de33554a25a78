//! Where a trace begins and ends in the middle of straight-line code, where code changes under way, and where it has two addresses.

use guest_tests::flat::{CODE, Flat};
use guest_tests::observer::Unit;
use guest_tests::traced::Random;
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use x86::model::{CpuModel, MODELS};

use crate::boot::sets;
use crate::judge::{End, Judge, Verdict};
use crate::programs::judged;

/// What is added to an address to come to the same memory by another way.
const ALIAS: u64 = 1 << 30;

/// Runs a program of ring 0 to its HLT under a judge.
fn run(
    model: &'static CpuModel,
    on: &[Unit],
    prepare: impl FnOnce(&mut Judge),
    program: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Verdict {
    let mut flat = Flat::new(model, 0, program);
    // The second GiB is the first one.
    flat.write(0x8008, &0x9007u64.to_le_bytes());
    let (mut judge, verdict) = Judge::new(model, on, End::Halt, 0..0);
    prepare(&mut judge);
    assert!(flat.machine.observe(0, Some(Box::new(judge))));
    assert_eq!(flat.run(), Ok(()), "{}", model.name);
    flat.machine.observe(0, None);
    std::mem::take(&mut verdict.lock().unwrap())
}

fn models() -> impl Iterator<Item = &'static CpuModel> {
    MODELS.iter().copied().filter(|model| model.features().lm())
}

/// Bytes of the straight-line code of [`straight`].
const STRAIGHT: u64 = 60;

/// Rounds of straight-line code of instructions of many lengths.
fn straight(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut again = a.create_label();
    a.mov(ecx, 20)?;
    a.set_label(&mut again)?;
    for _ in 0..3 {
        a.nop()?;
        a.add(eax, 1)?;
        a.mov(rdx, 0x1234_5678_9ABCu64)?;
        a.inc(rbx)?;
        a.lea(rsi, qword_ptr(rax + rbx * 2))?;
    }
    a.dec(ecx)?;
    a.jnz(again)?;
    a.hlt()
}

// covers: trace/oracle-edges
#[test]
fn a_trace_begins_and_ends_in_straight_line_code() {
    let mut random = Random(0xED6E);
    let ranged = |model: &&CpuModel| model.units.pt.is_some_and(|pt| pt.ranges() > 0);
    for model in models().filter(ranged) {
        let (mut some, mut none) = (0, 0);
        for _ in 0..60 {
            // In the middle of instructions, too, and in front of all and behind.
            let first = CODE + random.below(STRAIGHT);
            let last = first + random.below(STRAIGHT);
            let found = run(model, &[Unit::Pt], |judge| judge.filter(first..=last, false), straight);
            let what = format!("{} {first:x} to {last:x}", model.name);
            assert_eq!((&found.wrong, found.ended), (&None, true), "{what}");
            assert_eq!(found.hashes[0], found.hashes[1], "{what}");
            *(if found.instructions > 0 { &mut some } else { &mut none }) += 1;
        }
        assert!(some > 40, "{}: {some} and {none}", model.name);
        // What begins in straight-line code and is left by a branch or at the end libipt can follow, too.
        for first in CODE..CODE + STRAIGHT {
            let range = first..=CODE + 0x1000;
            let found = run(model, &[Unit::Pt], |judge| judge.filter(range, true), straight);
            let [instructions, _] = judged(&found, &[Unit::Pt], &format!("{} from {first:x}", model.name));
            assert!(instructions >= 20, "{} from {first:x}", model.name);
        }
    }
}

// covers: trace/oracle-edges
#[test]
fn code_changes_in_the_block_that_runs() {
    for model in models() {
        for on in sets(model) {
            let program = |a: &mut CodeAssembler| {
                let (mut again, mut one, mut two, mut three, mut skip) = (
                    a.create_label(),
                    a.create_label(),
                    a.create_label(),
                    a.create_label(),
                    a.create_label(),
                );
                a.mov(ecx, 200)?;
                a.set_label(&mut again)?;
                // INC EAX and DEC EAX; two NOPs and one of two bytes; JZ and JNZ: each is changed by the instruction before it.
                a.lea(rbx, ptr(one))?;
                a.xor(byte_ptr(rbx + 1), 8)?;
                a.set_label(&mut one)?;
                a.inc(eax)?;
                a.lea(rbx, ptr(two))?;
                a.xor(byte_ptr(rbx), 0x66 ^ 0x90)?;
                a.set_label(&mut two)?;
                a.db(&[0x90, 0x90])?;
                a.lea(rbx, ptr(three))?;
                a.cmp(ecx, 100)?;
                a.pushfq()?;
                a.xor(byte_ptr(rbx + 1), 1)?;
                a.popfq()?;
                a.nop()?;
                a.set_label(&mut three)?;
                // By its long form.
                a.db(&[0x0F, 0x84, 3, 0, 0, 0])?;
                a.add(edx, 3)?;
                a.set_label(&mut skip)?;
                a.dec(ecx)?;
                a.jnz(again)?;
                a.hlt()
            };
            let found = run(model, &on, |_| {}, program);
            let what = format!("{} {on:?}", model.name);
            judged(&found, &on, &what);
            assert!(found.changes >= 599, "{what}: {} changes of code", found.changes);
        }
    }
}

// covers: trace/oracle-edges
#[test]
fn a_page_has_two_addresses() {
    for model in models() {
        for on in sets(model) {
            let program = |a: &mut CodeAssembler| {
                let (mut again, mut function, mut start) = (a.create_label(), a.create_label(), a.create_label());
                a.jmp(start)?;
                a.set_label(&mut function)?;
                a.inc(eax)?;
                a.test(cl, 1)?;
                a.db(&[0x74, 2])?; // jz, over the next
                a.db(&[0x90, 0x90])?;
                a.ret()?;
                a.set_label(&mut start)?;
                a.mov(ecx, 100)?;
                a.lea(rsi, ptr(function))?;
                a.mov(rdi, ALIAS)?;
                a.add(rdi, rsi)?;
                a.set_label(&mut again)?;
                a.call(rsi)?;
                a.call(rdi)?;
                // Changed at one address, called at both: INC EAX and DEC EAX; the two NOPs and one.
                a.xor(byte_ptr(rdi + 1), 8)?;
                a.call(rsi)?;
                a.xor(byte_ptr(rsi + 7), 0x66 ^ 0x90)?;
                a.call(rdi)?;
                a.dec(ecx)?;
                a.jnz(again)?;
                a.hlt()
            };
            let found = run(model, &on, |_| {}, program);
            let what = format!("{} {on:?}", model.name);
            judged(&found, &on, &what);
            assert!(found.changes >= 199, "{what}: {} changes of code", found.changes);
        }
    }
}
