//! Guests that are bad for translation: how much is translated, and how much memory that takes, stays within bounds, and they leave what
//! they leave interpreted. The times that are printed are for the guide; no test depends on them.

use crate::rig;
use std::time::{Duration, Instant};

use engine::translate::Statistics;
use engine::{CpuState, EngineOptions, Exit, TRANSLATE_AFTER};
use iced_x86::IcedError;
use iced_x86::code_asm::*;
use rig::{CODE, Rig, STACK, TABLES};
use x86::model::SKYLAKE_SERVER;

const DATA: u64 = 0x30_0000;
/// Code for 32-bit mode.
const NARROW: u64 = 0x11_0000;
const GDT: u64 = 0x50_0000;
/// Bytes of host code that may be kept in most of these tests.
const ROOM: usize = 256 << 10;

type Assembled = Result<(), IcedError>;

fn assembled(bits: u32, at: u64, f: impl FnOnce(&mut CodeAssembler) -> Assembled) -> Vec<u8> {
    let mut a = CodeAssembler::new(bits).unwrap();
    f(&mut a).unwrap();
    a.assemble(at).unwrap()
}

/// How a run came out.
struct Came {
    state: CpuState,
    data: [u8; 0x1000],
    code: [u8; 0x1000],
    steps: u64,
    made: Option<Statistics>,
    time: Duration,
}

/// Runs so many steps, or to a HLT, translated after so many runs of a block or not at all.
fn run(after: Option<u32>, steps: u64, prepare: &impl Fn(&mut Rig)) -> Came {
    let after = after.filter(|_| rig::translate_after().is_some());
    let options = EngineOptions {
        translate_after: after,
        translated_bytes: ROOM,
        ..EngineOptions::default()
    };
    let mut rig = Rig::with_options(&SKYLAKE_SERVER, options);
    prepare(&mut rig);
    let start = Instant::now();
    while rig.cpu.steps() < steps {
        match rig.run(steps - rig.cpu.steps()) {
            Exit::Budget | Exit::Bus => {}
            Exit::Halt => break,
            exit => panic!("{exit:?}: {:x?}", rig.cpu.state()),
        }
    }
    Came {
        time: start.elapsed(),
        state: rig.cpu.state(),
        data: rig.read(DATA),
        code: rig.read(CODE),
        steps: rig.cpu.steps(),
        made: rig.engine.translated(),
    }
}

/// Runs a guest interpreted, translated as it is by itself, and, for fewer steps, with whatever has run once translated: all
/// leave the same, and the bounds hold. The answer is what the second one has translated.
fn bounded(what: &str, steps: u64, prepare: impl Fn(&mut Rig)) -> Option<Statistics> {
    let [usual, _] = [(TRANSLATE_AFTER, steps), (1, 200_000)].map(|(after, steps)| {
        let interpreted = run(None, steps, &prepare);
        let came = run(Some(after), steps, &prepare);
        assert_eq!(came.state, interpreted.state, "{what}, translated after {after}");
        assert!(
            came.data == interpreted.data,
            "{what}, translated after {after}: data differs"
        );
        assert!(
            came.code == interpreted.code,
            "{what}, translated after {after}: code differs"
        );
        if let Some(made) = came.made {
            // A block is translated once it has run so often, and each time makes a step at least.
            let most = came.steps / u64::from(after);
            assert!(
                made.blocks + made.left <= most,
                "{what}: {made:?} in {} steps",
                came.steps
            );
            assert!(made.held <= ROOM as u64, "{what}: {made:?}");
            // Of no block more than what its 64 instructions can take.
            assert!(made.bytes <= made.blocks * (64 << 7), "{what}: {made:?}");
        }
        let factor = came.time.as_secs_f64() / interpreted.time.as_secs_f64();
        println!(
            "{what}, after {after}: {factor:.2} of the interpreter's time; {:?}",
            came.made
        );
        came.made
    });
    usual
}

fn place(code: Vec<u8>) -> impl Fn(&mut Rig) {
    move |rig| rig.write(CODE, &code)
}

/// The operand of an instruction behind is another one in each round.
// covers: translate/hostile
#[test]
fn a_guest_that_writes_its_code_in_every_round() {
    let code = assembled(64, CODE, |a| {
        let (mut again, mut there) = (a.create_label(), a.create_label());
        a.lea(rdi, qword_ptr(there))?;
        a.set_label(&mut again)?;
        a.inc(dword_ptr(rdi + 1))?;
        a.jmp(there)?;
        a.set_label(&mut there)?;
        a.add(eax, 0x0101_0101)?;
        a.xor(rbx, rax)?;
        a.jmp(again)
    });
    let made = bounded("written in every round", 1_000_000, place(code));
    // Each block lives for one round, so none is worth it.
    assert_eq!(made.map_or(0, |made| made.blocks), 0);
}

/// Code is written once its block has just been translated: the worst that a threshold can meet.
// covers: translate/hostile
#[test]
fn a_guest_that_writes_its_code_when_it_has_been_translated() {
    let code = assembled(64, CODE, |a| {
        let (mut again, mut round) = (a.create_label(), a.create_label());
        a.lea(rdi, qword_ptr(round))?;
        a.set_label(&mut again)?;
        a.mov(ecx, TRANSLATE_AFTER as i32 + 3)?;
        a.set_label(&mut round)?;
        a.add(eax, 0x0101_0101)?;
        a.rol(rax, 3)?;
        a.dec(ecx)?;
        a.jne(round)?;
        a.inc(dword_ptr(rdi + 1))?;
        a.jmp(again)
    });
    let made = bounded("written when translated", 4_000_000, place(code));
    if let Some(made) = made {
        // Once in each two hundred rounds of four steps, and so the memory is filled again and again.
        assert!((3000..6000).contains(&made.blocks), "{made:?}");
        assert!(made.forgotten > 0, "{made:?}");
    }
}

/// Every byte of a page is the beginning of an instruction, of bytes that are the middle of others.
// covers: translate/hostile
#[test]
fn a_guest_that_jumps_into_the_middle_of_instructions() {
    // MOV EAX, imm32 whose operand is three more instructions and the opcode of the next: B8 05 91 F9 90 ...; whatever byte one begins
    // with, all of them are known, and a RET ends the page.
    const BYTES: [u8; 5] = [0xb8, 0x05, 0x91, 0xf9, 0x90];
    let code = assembled(64, CODE, |a| {
        let mut again = a.create_label();
        a.mov(r12, 0x2545_f491_4f6c_dd1du64)?;
        a.set_label(&mut again)?;
        a.imul_3(r12, r12, 0x5851_f42d)?;
        a.add(r12, 0x14057)?;
        a.mov(r13, r12)?;
        a.shr(r13, 40)?;
        a.and(r13d, 0x7f)?;
        a.add(r13, NARROW as i32 + 0x780)?;
        a.call(r13)?;
        a.jmp(again)
    });
    let made = bounded("jumps into the middle", 2_000_000, |rig: &mut Rig| {
        rig.write(CODE, &code);
        let mut page: Vec<u8> = BYTES.iter().copied().cycle().take(0x800).collect();
        // Whatever the last instruction takes of them, one RET is left.
        page.extend([0xc3; 16]);
        rig.write(NARROW, &page);
    });
    if let Some(made) = made {
        assert!(made.blocks > 100, "{made:?}");
    }
}

/// One page of code at five hundred addresses, one after the other.
// covers: translate/hostile, translate/aliases
#[test]
fn a_guest_that_runs_one_page_at_many_addresses() {
    // Page tables for 2 MiB from 800000H on, each of whose pages is the one at [`NARROW`].
    const MANY: u64 = 0x80_0000;
    let code = assembled(64, CODE, |a| {
        let (mut again, mut next) = (a.create_label(), a.create_label());
        a.set_label(&mut again)?;
        a.mov(r12, MANY)?;
        a.mov(ecx, 512)?;
        a.set_label(&mut next)?;
        a.call(r12)?;
        a.add(r12, 0x1000)?;
        a.dec(ecx)?;
        a.jne(next)?;
        a.jmp(again)
    });
    let shared = assembled(64, MANY, |a| {
        let mut here = a.create_label();
        a.set_label(&mut here)?;
        // What it gives depends on where it runs.
        a.lea(rdx, qword_ptr(here))?;
        a.add(rbx, rdx)?;
        a.ret()
    });
    let made = bounded("one page at many addresses", 4_000_000, |rig: &mut Rig| {
        rig.write(CODE, &code);
        rig.write(NARROW, &shared);
        for page in 0..512u64 {
            rig.write(TABLES + 0x4000 + page * 8, &(NARROW | 7).to_le_bytes());
        }
        rig.write(
            TABLES + 0x2000 + (MANY >> 21) * 8,
            &((TABLES + 0x4000) | 7).to_le_bytes(),
        );
    });
    // They are found by the physical address: the page's code is translated once.
    if let Some(made) = made {
        assert!((3..10).contains(&made.blocks), "{made:?}");
    }
}

/// Five times as much code as there is room for translations, round and round.
// covers: translate/hostile, translate/eviction
#[test]
fn a_guest_that_fills_the_memory_of_translations() {
    let code = assembled(64, DATA, |a| {
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        for n in 0..8000 {
            let mut next = a.create_label();
            a.add(rax, n)?;
            a.rol(rax, 7)?;
            a.xor(rbx, rax)?;
            a.jno(next)?;
            a.inc(rbx)?;
            a.set_label(&mut next)?;
        }
        a.jmp(again)
    });
    let made = bounded("more code than there is room for", 30_000_000, |rig: &mut Rig| {
        rig.write(DATA, &code);
        let mut state = rig.cpu.state();
        state.rip = DATA;
        rig.cpu.set_state(&state);
    });
    // What there is no room for stays interpreted: nothing is forgotten for it as long as no more code comes.
    if let Some(made) = made {
        assert!(made.bytes > ROOM as u64 * 3 / 4 && made.blocks < 8000, "{made:?}");
        assert!(made.forgotten <= 1, "{made:?}");
    }
}

/// From 64-bit code to 32-bit code and back by far returns and jumps, in each round.
// covers: translate/hostile, translate/modes
#[test]
fn a_guest_that_flips_modes() {
    let wide = assembled(64, CODE, |a| {
        let mut again = a.create_label();
        a.mov(edi, DATA as i32)?;
        a.set_label(&mut again)?;
        a.add(rax, 3)?;
        a.mov(dword_ptr(rdi), eax)?;
        a.push(0x18)?;
        a.push(NARROW as i32)?;
        // RETF with a 64-bit operand.
        a.db(&[0x48, 0xcb])?;
        // Where the 32-bit code jumps back to.
        a.jmp(again)
    });
    let back = CODE + wide.len() as u64 - 2;
    let mut narrow = assembled(32, NARROW, |a| {
        a.add(ebx, dword_ptr(edi))?;
        a.dec(eax)?;
        a.inc(ecx)
    });
    // JMP FAR 8:back
    narrow.push(0xea);
    narrow.extend((back as u32).to_le_bytes());
    narrow.extend([8, 0]);
    let made = bounded("modes in turn", 2_000_000, |rig: &mut Rig| {
        rig.write(CODE, &wide);
        rig.write(NARROW, &narrow);
        // 64-bit code, data, 32-bit code.
        for (at, descriptor) in [
            (8, 0x00af_9b00_0000_ffffu64),
            (0x10, 0x00cf_9300_0000_ffff),
            (0x18, 0x00cf_9b00_0000_ffff),
        ] {
            rig.write(GDT + at, &descriptor.to_le_bytes());
        }
        let mut state = rig.cpu.state();
        (state.gdtr.base, state.gdtr.limit) = (GDT, 0x1f);
        state.gpr[4] = STACK;
        rig.cpu.set_state(&state);
    });
    // What there is of code, in each mode once.
    if let Some(made) = made {
        assert!(made.blocks + made.left <= 6 && made.blocks > 0, "{made:?}");
    }
}
