//! Histories of branches as gdb reads them: blocks and packets, against the instructions that retired.

use std::sync::{Arc, Mutex};

use guest_tests::flat::{self, CODE, DATA, wrmsr};
use guest_tests::retired::Each;
use iced_x86::code_asm::*;
use iced_x86::{Decoder, DecoderOptions, IcedError};
use minivmm::front::btrace::{Annex, Block, Btrace, Format, LARGEST, Read, SMALLEST, SUPPORTED, Unread};
use minivmm::{Console, Run};
use pt_oracle::libipt;
use x86::model::WESTMERE;

const ON_UD: u32 = 0x10;
const ON_IPI: u32 = 0x30;
const IPI: u8 = 0x61;
/// Further than a short jump reaches.
const MAIN: usize = 0x100;

/// Branches in every near way, faults, takes interrupts, and repeats a string instruction.
fn program(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let pad = |a: &mut CodeAssembler, to: usize| -> Result<(), IcedError> {
        let len = a.assemble(CODE)?.len();
        a.db(&vec![0x90; to - len])
    };
    let mut main = a.create_label();
    a.jmp(main)?;
    pad(a, ON_UD as usize)?;
    // Behind UD2.
    a.add(qword_ptr(rsp), 2)?;
    a.iretq()?;
    pad(a, ON_IPI as usize)?;
    for register in [rax, rcx, rdx] {
        a.push(register)?;
    }
    wrmsr(a, 0x80B, 0)?;
    for register in [rdx, rcx, rax] {
        a.pop(register)?;
    }
    a.iretq()?;
    pad(a, MAIN)?;
    a.set_label(&mut main)?;
    wrmsr(a, 0x1B, 0xFEE0_0D00)?;
    wrmsr(a, 0x80F, 0x1FF)?;
    a.sti()?;
    let [mut top, mut skip, mut callee, mut other, mut leave] = std::array::from_fn(|_| a.create_label());
    a.mov(esi, 1000)?;
    a.mov(ebx, 1)?;
    a.set_label(&mut top)?;
    a.imul_3(ebx, ebx, 1_103_515_245)?;
    a.add(ebx, 12345)?;
    a.test(ebx, 0x1_0000)?;
    a.je(skip)?;
    a.ud2()?;
    a.set_label(&mut skip)?;
    a.call(callee)?;
    a.lea(rax, ptr(other))?;
    a.call(rax)?;
    a.mov(ecx, 5)?;
    a.mov(rdi, DATA)?;
    a.rep().stosb()?;
    // An interrupt to itself, which comes behind WRMSR.
    a.mov(ecx, 0x83F)?;
    a.mov(eax, u32::from(IPI))?;
    a.xor(edx, edx)?;
    a.wrmsr()?;
    // UD2 as the first instruction behind a branch.
    a.test(ebx, 0x4_0000)?;
    let mut fault = a.create_label();
    a.jne(fault)?;
    a.nop()?;
    a.set_label(&mut fault)?;
    a.ud2()?;
    a.dec(esi)?;
    a.jne(top)?;
    a.hlt()?;
    a.set_label(&mut callee)?;
    a.test(ebx, 0x8_0000)?;
    a.jne(leave)?;
    a.nop()?;
    a.set_label(&mut leave)?;
    a.ret()?;
    a.set_label(&mut other)?;
    a.ret()
}

fn machine() -> (Run, Console) {
    flat::whole(&WESTMERE, 0, &[(6, ON_UD), (IPI, ON_IPI)], program)
}

/// The instructions that the program retires in its first steps.
fn retired(steps: u64) -> Vec<u64> {
    let retired = Arc::<Mutex<Vec<u64>>>::default();
    let (mut vm, mut console) = machine();
    let log = Arc::clone(&retired);
    let each = Each::new(None, move |ip| log.lock().unwrap().push(ip));
    vm.machine().observe(0, Some(Box::new(each)));
    vm.run_for(&mut console, steps).unwrap();
    let retired = retired.lock().unwrap();
    retired.clone()
}

/// The instructions of blocks, the oldest first; the last one comes next.
fn expand(vm: &Run, blocks: &[Block]) -> Vec<u64> {
    let mut all = Vec::new();
    for block in blocks.iter().rev() {
        let mut bytes = vec![0; (block.end - block.begin) as usize + 15];
        vm.read_linear(0, block.begin, &mut bytes).unwrap();
        let mut decoder = Decoder::with_ip(64, &bytes, block.begin, DecoderOptions::NONE);
        while decoder.ip() <= block.end {
            all.push(decoder.decode().ip());
        }
        assert_eq!(all.last(), Some(&block.end), "{block:x?} ends with an instruction");
    }
    all
}

/// The code for libipt: the program, and where interrupts go first.
fn image(vm: &Run) -> libipt::Image {
    let sections = [0x1_0000, CODE].map(|at| {
        let mut bytes = vec![0; 0x1000];
        vm.read_linear(0, at, &mut bytes).unwrap();
        (at, bytes)
    });
    libipt::Image::new(sections.iter().map(|(at, bytes)| (*at, &bytes[..])))
}

fn blocks(read: Result<Read, Unread>) -> Vec<Block> {
    match read {
        Ok(Read::Blocks(blocks)) => blocks,
        other => panic!("{other:?}"),
    }
}

/// Where a run is looked at: after every step at first, then further and further apart.
fn stops() -> Vec<u64> {
    let near = 1..120;
    let far = (0..60).map(|n| 120 + n * n * 7);
    near.chain(far).collect()
}

// covers: btrace/bts, btrace/delta, btrace/events
#[test]
fn blocks_are_the_instructions_that_retired() {
    let log = retired(30_000);
    let (mut vm, mut console) = machine();
    let mut btrace = Btrace::new();
    assert!(btrace.enable(&mut vm, 0, Format::Bts));
    // What gdb has read, as it puts it together.
    let mut known = vec![CODE];
    let mut gaps = 0;
    for stop in stops() {
        let steps = stop - vm.steps();
        assert!(vm.run_for(&mut console, steps).unwrap().is_none());
        let next = vm.cpu_state(0).unwrap().rip;
        match btrace.read(&mut vm, 0, Annex::Delta) {
            Ok(Read::Blocks(mut new)) => {
                let oldest = new.last_mut().unwrap();
                assert_eq!(oldest.begin, 0);
                // gdb's own check.
                assert!(oldest.end >= *known.last().unwrap(), "step {stop}");
                if new.len() > 1 || new[0].end != *known.last().unwrap() {
                    new.last_mut().unwrap().begin = known.pop().unwrap();
                    known.extend(expand(&vm, &new));
                }
            }
            // The instruction that was to come next has faulted.
            Err(Unread::Gap) => {
                gaps += 1;
                let all = blocks(btrace.read(&mut vm, 0, Annex::New));
                known = expand(&vm, &all);
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(*known.last().unwrap(), next, "step {stop}");
        let (ran, all) = (known.len() - 1, vm.instructions() as usize);
        assert!(log[..all].ends_with(&known[..ran]), "step {stop}");
        // What a ring has lost is known as long as nothing had to be read anew.
        assert!(ran == all || ran > 7000, "step {stop}: {ran} of {all}");
        let all = blocks(btrace.read(&mut vm, 0, Annex::All));
        let all = expand(&vm, &all);
        assert!(known.ends_with(&all), "step {stop}");
        assert!(
            all.len() == known.len() || all.len() > 7000,
            "step {stop}: {}",
            all.len()
        );
        assert_eq!(btrace.read(&mut vm, 0, Annex::New), Ok(Read::Nothing));
    }
    assert!(gaps > 2, "{gaps}");
}

// covers: btrace/pt
#[test]
fn packets_decode_to_the_instructions_that_retired() {
    let log = retired(30_000);
    let (mut vm, mut console) = machine();
    let mut btrace = Btrace::new();
    assert!(btrace.enable(&mut vm, 0, Format::Pt));
    let image = image(&vm);
    let mut cut = false;
    let mut before = 0;
    for stop in stops() {
        let steps = stop - vm.steps();
        assert!(vm.run_for(&mut console, steps).unwrap().is_none());
        assert_eq!(btrace.read(&mut vm, 0, Annex::Delta), Err(Unread::Gap));
        let now = vm.instructions();
        let bytes = match btrace.read(&mut vm, 0, Annex::New).unwrap() {
            Read::Packets(bytes) => bytes,
            // An iteration of a string instruction.
            other => {
                assert_eq!((other, now), (Read::Nothing, before), "step {stop}");
                continue;
            }
        };
        before = now;
        assert_eq!(btrace.read(&mut vm, 0, Annex::New), Ok(Read::Nothing));
        assert_eq!(btrace.read(&mut vm, 0, Annex::All), Ok(Read::Packets(bytes.clone())));
        let mut decoded = Vec::new();
        libipt::instructions(&bytes, &image, |ip| decoded.push(ip)).unwrap_or_else(|e| panic!("step {stop}: {e:?}"));
        let all = &log[..now as usize];
        cut |= decoded.len() < all.len();
        assert!(
            all.ends_with(&decoded),
            "step {stop}: {} of {}",
            decoded.len(),
            all.len()
        );
        assert!(
            decoded.len() == all.len() || bytes.len() > 16 << 10,
            "all, until the ring is full"
        );
    }
    assert!(cut, "the ring is too small for all of it");
}

// covers: btrace/size
#[test]
fn rings_keep_the_newest() {
    let log = retired(30_000);
    for (format, setting) in [(Format::Bts, "bts"), (Format::Pt, "pt")] {
        let (mut vm, mut console) = machine();
        let mut btrace = Btrace::new();
        let mut say = |vm: &mut Run, packet: &str| btrace.packet(vm, 0, packet).unwrap();
        assert_eq!(say(&mut vm, &format!("Qbtrace-conf:{setting}:size=0x1000")), "OK");
        assert_eq!(say(&mut vm, &format!("Qbtrace:{setting}")), "OK");
        let conf = say(&mut vm, "qXfer:btrace-conf:read::0,ffff");
        assert!(conf.contains(&format!("<{setting} size=\"0x1000\"/>")), "{conf}");
        vm.run_for(&mut console, 25_000).unwrap();
        let count = vm.instructions() as usize;
        let ran = match btrace.read(&mut vm, 0, Annex::All).unwrap() {
            Read::Blocks(blocks) => {
                assert_eq!(blocks.len(), 0x1000 / 24 + 1);
                let mut all = expand(&vm, &blocks);
                all.pop();
                all
            }
            Read::Packets(bytes) => {
                assert!(bytes.len() >= 0x1000 && bytes.len() < 0x1040, "{}", bytes.len());
                let mut decoded = Vec::new();
                libipt::instructions(&bytes, &image(&vm), |ip| decoded.push(ip)).unwrap();
                decoded
            }
            Read::Nothing => panic!("{format:?}"),
        };
        assert!(
            ran.len() > 100 && ran.len() < count,
            "{format:?}: {} of {count}",
            ran.len()
        );
        assert!(ran == log[count - ran.len()..count], "{format:?}");
    }
}

/// A guest that is listened to is the guest that is not, whatever is read of it.
// covers: btrace/unseen
#[test]
fn the_guest_does_not_notice() {
    let (mut alone, mut other) = machine();
    for _ in 0..20 {
        alone.run_for(&mut other, 1000).unwrap();
    }
    for format in [Format::Bts, Format::Pt] {
        let (mut vm, mut console) = machine();
        let mut btrace = Btrace::new();
        assert!(btrace.enable(&mut vm, 0, format) && !btrace.enable(&mut vm, 0, format));
        for _ in 0..20 {
            vm.run_for(&mut console, 1000).unwrap();
            let before = vm.save();
            btrace.read(&mut vm, 0, Annex::All).unwrap();
            assert!(vm.save() == before);
        }
        let (one, other) = (vm.save(), alone.save());
        assert_eq!(one.soft, other.soft, "{format:?}");
        assert!(one.pages == other.pages, "{format:?}");
        // Units that count lazily remember up to where.
        assert_eq!(one.machine.platform, other.machine.platform, "{format:?}");
        assert_eq!(one.machine.clock, other.machine.clock, "{format:?}");
        btrace.close(&mut vm);
        assert_eq!(btrace.read(&mut vm, 0, Annex::All), Err(Unread::Off));
    }
}

// covers: btrace/restore
#[test]
fn another_state_has_a_history_from_there_on() {
    let log = retired(30_000);
    let (mut vm, mut console) = machine();
    let mut btrace = Btrace::new();
    assert!(btrace.enable(&mut vm, 0, Format::Bts));
    vm.run_for(&mut console, 500).unwrap();
    let early = (vm.save(), vm.instructions() as usize);
    vm.run_for(&mut console, 5000).unwrap();
    btrace.read(&mut vm, 0, Annex::All).unwrap();
    vm.set_state(&early.0).unwrap();
    assert_eq!(
        btrace.read(&mut vm, 0, Annex::All),
        Ok(Read::Blocks(vec![Block {
            begin: vm.cpu_state(0).unwrap().rip,
            end: vm.cpu_state(0).unwrap().rip,
        }]))
    );
    vm.run_for(&mut console, 300).unwrap();
    let read = blocks(btrace.read(&mut vm, 0, Annex::All));
    let mut all = expand(&vm, &read);
    all.pop();
    assert!(all == log[early.1..vm.instructions() as usize]);
}

/// A document in as many parts as it takes.
fn document(vm: &mut Run, btrace: &mut Btrace, object: &str, part: usize) -> String {
    let mut text = String::new();
    loop {
        let packet = format!("qXfer:{object}:{:x},{part:x}", text.len());
        let answer = btrace.packet(vm, 0, &packet).unwrap();
        let (kind, rest) = answer.split_at(1);
        assert!(rest.len() <= part);
        text += rest;
        match kind {
            "m" => assert_eq!(rest.len(), part),
            "l" => return text,
            _ => panic!("{answer}"),
        }
    }
}

// covers: btrace/packets
#[test]
fn packets_are_answered_as_gdb_needs() {
    let (mut vm, mut console) = machine();
    let mut btrace = Btrace::new();
    let mut say = |packet: &str| btrace.packet(&mut vm, 0, packet);
    for feature in SUPPORTED.split(';') {
        assert!(feature.ends_with('+'), "{feature}");
    }
    for (packet, answer) in [
        ("Qbtrace:off", "E.Branch tracing is not on for this CPU."),
        ("Qbtrace:lbr", "E.Branch tracing is bts, pt or off."),
        (
            "qXfer:btrace:read:all:0,100",
            "E.Branch tracing is not on for this CPU.",
        ),
        (
            "qXfer:btrace-conf:read::0,100",
            "E.Branch tracing is not on for this CPU.",
        ),
        (
            "qXfer:btrace:read:all:zero,100",
            "E.That is not annex, offset and length.",
        ),
        ("qXfer:btrace:read:all:0", "E.That is not annex, offset and length."),
        (
            "qXfer:btrace:read:all:+0,100",
            "E.That is not annex, offset and length.",
        ),
        (
            "qXfer:btrace:read:all:10,100",
            "E.Documents are read from their beginning.",
        ),
        ("Qbtrace-conf:bts:size=", "E.A size is a hexadecimal number."),
        (
            "Qbtrace-conf:bts:size=0x10000000000000000",
            "E.A size is a hexadecimal number.",
        ),
        ("Qbtrace-conf:lbr:size=0x10", "E.Settings are bts:size and pt:size."),
        ("Qbtrace-conf:bts:size=0x0", "OK"),
        ("Qbtrace:bts", "OK"),
        ("Qbtrace:pt", "E.Branch tracing is on for this CPU already."),
        (
            "qXfer:btrace:read:some:0,100",
            "E.Histories are read as all, new or delta.",
        ),
        ("qXfer:btrace-conf:read:x:0,100", "E.The configuration has no parts."),
    ] {
        assert_eq!(say(packet).as_deref(), Some(answer), "{packet}");
    }
    for packet in ["qXfer:features:read:target.xml:0,100", "g", "", "Qbtrac", "qSupported"] {
        assert_eq!(say(packet), None, "{packet}");
    }
    let conf = document(&mut vm, &mut btrace, "btrace-conf:read:", 7);
    assert!(conf.contains(&format!("<bts size=\"{LARGEST:#x}\"/>")), "{conf}");
    vm.run_for(&mut console, 1000).unwrap();
    let whole = document(&mut vm, &mut btrace, "btrace:read:all", 1 << 20);
    assert_eq!(document(&mut vm, &mut btrace, "btrace:read:all", 13), whole);
    let read = blocks(btrace.read(&mut vm, 0, Annex::All));
    let lines: Vec<String> = read
        .iter()
        .map(|block| format!("<block begin=\"{:#x}\" end=\"{:#x}\"/>", block.begin, block.end))
        .collect();
    let expected = format!(
        "<!DOCTYPE btrace SYSTEM \"btrace.dtd\">\n<btrace version=\"1.0\">\n{}\n</btrace>\n",
        lines.join("\n")
    );
    assert_eq!(whole, expected);
    // Beyond the end there is nothing, and it is the end.
    btrace.packet(&mut vm, 0, "qXfer:btrace:read:all:0,1").unwrap();
    assert_eq!(
        btrace
            .packet(&mut vm, 0, "qXfer:btrace:read:all:ffffffffffffffff,1")
            .unwrap(),
        "l"
    );
    assert_eq!(btrace.packet(&mut vm, 0, "Qbtrace:off").unwrap(), "OK");
    assert_eq!(btrace.packet(&mut vm, 0, "Qbtrace-conf:pt:size=0x1").unwrap(), "OK");
    assert_eq!(btrace.packet(&mut vm, 0, "Qbtrace:pt").unwrap(), "OK");
    let conf = document(&mut vm, &mut btrace, "btrace-conf:read:", 100);
    assert!(conf.contains(&format!("<pt size=\"{SMALLEST:#x}\"/>")), "{conf}");
    assert_eq!(
        btrace.packet(&mut vm, 0, "qXfer:btrace:read:delta:0,100").unwrap(),
        "E01"
    );
    vm.run_for(&mut console, 100).unwrap();
    let text = document(&mut vm, &mut btrace, "btrace:read:new", 100);
    let Ok(Read::Packets(bytes)) = btrace.read(&mut vm, 0, Annex::All) else {
        panic!("{text}")
    };
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(
        text.contains("<pt-config>\n</pt-config>") && text.contains(&format!("<raw>\n{hex}\n</raw>")),
        "{text}"
    );
    let nothing = document(&mut vm, &mut btrace, "btrace:read:new", 100);
    assert!(
        !nothing.contains("<pt>") && nothing.ends_with("<btrace version=\"1.0\">\n</btrace>\n"),
        "{nothing}"
    );
    assert_eq!(
        btrace.packet(&mut vm, 7, "Qbtrace:bts").unwrap(),
        "E.There is no such CPU."
    );
}
