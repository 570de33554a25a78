//! The engine's handlers lead to each other by sibling calls: a compiler that makes ordinary ones would have the stack grow with every
//! instruction of the guest's. So what was compiled is read: all handlers in the program.

use crate::common;
use std::{collections::BTreeSet, fs};

use common::skipped;
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};
use object::{Object, ObjectSection, ObjectSymbol};

/// What leads on from a handler.
#[derive(Debug, Default, PartialEq, Eq)]
struct Leads {
    /// Jumps to an address that a register holds.
    jumps: usize,
    /// Calls of such an address, or of one in memory.
    calls: Vec<u64>,
}

/// Reads a handler. Calls of functions that the linker knows are left out: they take the address from a slot relative to RIP, maybe by
/// way of a register.
fn leads(code: &[u8], at: u64) -> Leads {
    let instructions: Vec<Instruction> = Decoder::with_ip(64, code, at, DecoderOptions::NONE)
        .into_iter()
        .collect();
    let known =
        |i: &Instruction, operand: u32| i.op_kind(operand) == OpKind::Memory && i.memory_base() == Register::RIP;
    let loads = |i: &&Instruction| i.mnemonic() == Mnemonic::Mov && i.op0_kind() == OpKind::Register && known(i, 1);
    let functions: BTreeSet<Register> = instructions
        .iter()
        .filter(loads)
        .map(Instruction::op0_register)
        .collect();
    let mut leads = Leads::default();
    for i in &instructions {
        let through_register = i.op0_kind() == OpKind::Register;
        match i.flow_control() {
            FlowControl::IndirectBranch if through_register || !known(i, 0) => leads.jumps += 1,
            FlowControl::IndirectCall if through_register && functions.contains(&i.op0_register()) => {}
            FlowControl::IndirectCall if !known(i, 0) => leads.calls.push(i.ip()),
            _ => {}
        }
    }
    leads
}

/// The program's functions with these words in their names: name, address and code.
fn functions<'a>(file: &object::File<'a>, words: &[&str]) -> Vec<(String, u64, &'a [u8])> {
    let text = file.section_by_name(".text").unwrap();
    let (start, bytes) = (text.address(), text.data().unwrap());
    let mut found: Vec<_> = file
        .symbols()
        .filter(|symbol| symbol.size() > 0)
        .filter_map(|symbol| Some((symbol.name().ok()?, symbol.address(), symbol.size())))
        .filter(|(name, ..)| words.iter().any(|word| name.contains(word)))
        .map(|(name, at, size)| {
            let offset = (at - start) as usize;
            (name.to_string(), at, &bytes[offset..offset + size as usize])
        })
        .collect();
    // Handlers that are alike to the byte may share their code.
    found.sort_by_key(|(_, at, _)| *at);
    found.dedup_by_key(|(_, at, _)| *at);
    found
}

// covers: engine/sibling-calls
#[test]
fn handlers_lead_to_each_other_by_jumps() {
    if !engine::CHAINED {
        return skipped("sibling calls of the engine", &"this build has the plain loop");
    }
    let program = fs::read(env!("CARGO_BIN_EXE_minivmm")).unwrap();
    let file = object::File::parse(&*program).unwrap();
    // As `engine::op` has them, in both manglings of names.
    let handlers = functions(
        &file,
        &[
            "6engine2op8run_body",
            "6engine2op8run_flow",
            "2op8run_body",
            "2op8run_flow",
        ],
    );
    assert!(handlers.len() > 1000, "{} handlers", handlers.len());
    let mut ends = 0;
    for (name, at, code) in &handlers {
        let leads = leads(code, *at);
        assert_eq!(
            leads.calls,
            Vec::<u64>::new(),
            "{name} at {at:x} calls what it should jump to"
        );
        ends += usize::from(leads.jumps == 0);
    }
    // Of those that always leave the chain, for the run loop to look, there are few.
    assert!(
        ends * 100 < handlers.len(),
        "{ends} of {} handlers lead nowhere",
        handlers.len()
    );
}

// covers: engine/sibling-calls
#[test]
fn blocks_begin_by_jumps() {
    if !engine::CHAINED {
        return skipped(
            "sibling calls at the beginning of blocks",
            &"this build has the plain loop",
        );
    }
    let program = fs::read(env!("CARGO_BIN_EXE_minivmm")).unwrap();
    let file = object::File::parse(&*program).unwrap();
    // The second one calls the translation, and jumps to what comes after it.
    for (word, calls) in [("5block5count", 0), ("5block15run_translation", 1)] {
        let found = functions(&file, &[word]);
        let found: Vec<_> = found.iter().filter(|(name, ..)| name.contains("6engine")).collect();
        assert!(!found.is_empty(), "{word}");
        for (name, at, code) in found {
            let leads = leads(code, *at);
            assert!(leads.jumps > 0 && leads.calls.len() == calls, "{name}: {leads:x?}");
        }
    }
}

/// What a compiler without sibling calls makes of a handler is found.
#[test]
fn a_handler_that_calls_the_next_one_is_found() {
    let jumps = |code: &[u8]| leads(code, 0x1000).jumps;
    let calls = |code: &[u8]| leads(code, 0x1000).calls;
    // mov rax, [rsi+20h]; add rsi, 20h; jmp rax
    let sibling = [0x48, 0x8b, 0x46, 0x20, 0x48, 0x83, 0xc6, 0x20, 0xff, 0xe0];
    assert_eq!((jumps(&sibling), calls(&sibling)), (1, vec![]));
    // push rax; add rsi, 20h; call [rsi]; pop rax; ret
    let in_memory = [0x50, 0x48, 0x83, 0xc6, 0x20, 0xff, 0x16, 0x58, 0xc3];
    assert_eq!((jumps(&in_memory), calls(&in_memory)), (0, vec![0x1005]));
    // push rax; mov rax, [rsi+20h]; add rsi, 20h; call rax; pop rax; ret
    let in_register = [
        0x50, 0x48, 0x8b, 0x46, 0x20, 0x48, 0x83, 0xc6, 0x20, 0xff, 0xd0, 0x58, 0xc3,
    ];
    assert_eq!((jumps(&in_register), calls(&in_register)), (0, vec![0x1009]));
    // mov r12, [rip]; call r12; call [rip]; jmp [rip]: functions that the linker knows
    let linked = [
        0x4c, 0x8b, 0x25, 0, 0, 0, 0, 0x41, 0xff, 0xd4, 0xff, 0x15, 0, 0, 0, 0, 0xff, 0x25, 0, 0, 0, 0,
    ];
    assert_eq!((jumps(&linked), calls(&linked)), (0, vec![]));
}
