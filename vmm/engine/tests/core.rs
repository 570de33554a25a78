//! The machinery under the instructions: blocks, links, budget, self-modifying code, straddling.

mod rig;

use engine::Exit;
use iced_x86::code_asm::*;
use rig::{CODE, Rig, STACK};

fn assemble(f: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).unwrap();
    f(&mut a).unwrap();
    a.assemble(CODE).unwrap()
}

use iced_x86::IcedError;

// covers: cpu/step-budget, engine/block-cache
#[test]
fn a_budget_is_used_to_the_instruction() {
    let code = assemble(|a| {
        let mut top = a.create_label();
        a.xor(eax, eax)?;
        a.mov(ecx, 1000)?;
        a.set_label(&mut top)?;
        a.add(rax, rcx)?;
        a.dec(ecx)?;
        a.jne(top)?;
        a.jmp(CODE + 0x800)
    });
    // State after n steps must not depend on how the steps were cut.
    let mut whole = Rig::new();
    whole.write(CODE, &code);
    for n in 1..200u64 {
        let mut rig = Rig::new();
        rig.write(CODE, &code);
        assert_eq!(rig.run(n), Exit::Budget);
        assert_eq!(rig.cpu.steps(), n);
        assert_eq!(whole.run(1), Exit::Budget);
        assert_eq!(rig.cpu.state(), whole.cpu.state(), "after {n} steps");
    }
    let mut rig = Rig::new();
    rig.write(CODE, &code);
    assert_eq!(rig.run(2 + 3000), Exit::Budget);
    assert_eq!(rig.cpu.state().gpr[0], 500_500);
}

// covers: cpu/dispatch-stack, engine/dispatch
#[test]
fn a_hundred_million_instructions_run_on_a_256_kib_stack() {
    let code = assemble(|a| {
        let mut top = a.create_label();
        let mut sub = a.create_label();
        let mut other = a.create_label();
        a.set_label(&mut top)?;
        a.call(sub)?;
        a.mov(qword_ptr(STACK - 0x1000), rax)?;
        a.add(rax, qword_ptr(STACK - 0x1000))?;
        a.test(al, 1)?;
        a.je(other)?;
        a.set_label(&mut other)?;
        a.jmp(top)?;
        a.set_label(&mut sub)?;
        a.inc(rbx)?;
        a.lea(rax, qword_ptr(rbx + rbx * 2 + 5))?;
        a.ret()
    });
    std::thread::Builder::new()
        .stack_size(256 << 10)
        .spawn(move || {
            let mut rig = Rig::new();
            rig.write(CODE, &code);
            assert_eq!(rig.run(100_000_000), Exit::Budget);
            assert_eq!(rig.cpu.steps(), 100_000_000);
            assert_eq!(rig.cpu.state().gpr[3], 11_111_111);
        })
        .unwrap()
        .join()
        .unwrap();
}

// covers: cpu/self-modifying-code
#[test]
fn a_store_into_the_running_block_is_seen_by_the_next_instruction() {
    let code = assemble(|a| {
        a.mov(byte_ptr(CODE + 8 + 1), 7)?; // 8 bytes; changes the immediate of the next instruction
        a.mov(al, 1)?;
        a.jmp(CODE)
    });
    let mut rig = Rig::new();
    rig.write(CODE, &code);
    assert_eq!(rig.run(2), Exit::Budget);
    assert_eq!(rig.cpu.state().gpr[0], 7);
    // And again, with a block that is linked to.
    rig.run(1);
    rig.write(CODE + 9, &[9]);
    assert_eq!(rig.run(2 + 3 * 10), Exit::Budget);
    assert_eq!(rig.cpu.state().gpr[0], 7);
}

// covers: cpu/self-modifying-code
#[test]
fn a_store_ahead_is_seen_however_the_steps_are_cut() {
    let code = assemble(|a| {
        a.inc(byte_ptr(CODE + 12))?; // 7 bytes; the immediate two instructions on
        a.nop()?;
        a.nop()?;
        a.nop()?;
        a.nop()?;
        a.mov(al, 1)?;
        a.add(rbx, rax)?;
        a.jmp(CODE)
    });
    assert_eq!(code[11..13], [0xb0, 1]);
    let mut whole = Rig::new();
    whole.write(CODE, &code);
    assert_eq!(whole.run(8 * 50), Exit::Budget);
    assert_eq!(whole.cpu.state().gpr[3], (2..52).sum::<u64>());
    for cut in 1..12 {
        let mut rig = Rig::new();
        rig.write(CODE, &code);
        let mut left = 8 * 50;
        while left > 0 {
            assert_eq!(rig.run(cut.min(left)), Exit::Budget);
            left -= cut.min(left);
        }
        assert_eq!(rig.cpu.state(), whole.cpu.state(), "cut {cut}");
    }
}

// covers: cpu/straddling-instruction
#[test]
fn an_instruction_may_straddle_two_pages() {
    let mut rig = Rig::new();
    let at = CODE + 0x1000 - 3;
    // mov eax, 0x12345678 across the page boundary, then jmp to itself
    rig.write(at, &[0xb8, 0x78, 0x56, 0x34, 0x12, 0xff, 0xc3, 0xeb, 0xf7]);
    let mut s = rig.cpu.state();
    s.rip = at;
    rig.cpu.set_state(&s);
    assert_eq!(rig.run(3000), Exit::Budget);
    let s = rig.cpu.state();
    assert_eq!((s.gpr[0], s.gpr[3], s.rip), (0x1234_5678, 1000, at));
    // The second page changes: the instruction does too.
    rig.write(CODE + 0x1000, &[0xaa, 0xbb]);
    rig.run(1);
    assert_eq!(rig.cpu.state().gpr[0], 0xbbaa_5678);
}

// covers: smp/code-is-shared
#[test]
fn a_store_by_one_processor_to_code_of_another_is_seen() {
    let mut rig = Rig::new();
    // The second processor writes its EAX into the immediate of the first one's MOV, then waits.
    let first = assemble(|a| {
        a.mov(eax, 0x1111)?;
        a.pause()?;
        a.jmp(CODE)
    });
    let writer = CODE + 0x800;
    let mut a = CodeAssembler::new(64).unwrap();
    a.mov(dword_ptr(CODE + 1), ecx).unwrap();
    a.inc(ecx).unwrap();
    a.pause().unwrap();
    a.jmp(writer).unwrap();
    rig.write(CODE, &first);
    rig.write(writer, &a.assemble(writer).unwrap());
    let mut other = engine::Cpu::new(&x86::model::WESTMERE);
    let mut s = rig.cpu.state();
    s.rip = writer;
    s.gpr[1] = 5;
    other.set_state(&s);
    rig.cpu.yield_on_pause = true;
    other.yield_on_pause = true;
    // The second one stores first, while the page is not code yet, so that its TLB holds a write tag.
    for round in 0..2000u64 {
        assert_eq!(rig.engine.run(&mut other, &mut rig::Nothing, 100), Exit::Pause);
        assert_eq!(rig.run(100), Exit::Pause, "round {round}");
        assert_eq!(rig.cpu.state().gpr[0], 5 + round);
    }
}

// covers: smp/init-sipi
#[test]
fn a_start_up_ipi_begins_at_its_page_once() {
    let mut rig = Rig::new();
    rig.write(0x9_a000, &[0xb8, 0x34, 0x12, 0xf4]); // mov ax, 1234h; hlt
    let steps = rig.cpu.steps();
    rig.cpu.init(false);
    assert_eq!(rig.run(10), Exit::Halt, "it waits");
    rig.cpu.start(0x9a);
    rig.cpu.start(0x55);
    assert_eq!(rig.run(10), Exit::Halt);
    let s = rig.cpu.state();
    assert_eq!((s.gpr[0], s.rip, s.segments[engine::CS].base), (0x1234, 4, 0x9_a000));
    assert_eq!(rig.cpu.steps(), steps + 2);
}
