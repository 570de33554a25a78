//! The machinery under the instructions: blocks, links, budget, self-modifying code, straddling.

use crate::{bench, rig};
use bench::{Bench, IDT, KCODE32, KDATA, descriptor, gate};
use engine::bus::{Processor, Watch};
use engine::{CS, Exit, SS};
use iced_x86::code_asm::*;
use rig::{CODE, Rig, STACK};
use x86::model::HASWELL;
use x86::watch::{Code, Effects, Interest};

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

/// A machine in 32-bit mode whose first and last pages of linear addresses are two pages of RAM beside each other.
fn wrapping(base: u64, rip: u64) -> Bench {
    const DIRECTORY: u64 = 0x7e_0000;
    const TABLE: u64 = 0x7e_1000;
    let mut b = Bench::protected();
    let mut put = |at: u64, entry: u64| b.write(at, &(entry as u32).to_le_bytes());
    put(DIRECTORY, 0x87);
    put(DIRECTORY + 4, 0x40_0087);
    put(DIRECTORY + 1023 * 4, TABLE | 7);
    put(TABLE + 1023 * 4, CODE | 7);
    b.state(|s| {
        s.cr3 = DIRECTORY;
        s.cr4 = 0x10.into();
        s.cr0.set_pg(true);
        s.segments[CS].base = base;
        s.rip = rip;
    });
    b
}

// SDM Vol. 3A 3.4 "Logical and Linear Addresses": outside 64-bit mode a linear address has 32 bits, and so has the sum of base and
// offset that it is.
// covers: cpu/linear-address-wrap
#[test]
fn an_instruction_straddles_pages_where_base_and_eip_wrap_at_4_gib() {
    for (base, rip, first, second, why) in [
        (
            0xffff_0000u64,
            CODE + 0x1_0ffd,
            CODE + 0xffd,
            CODE + 0x1000,
            "the sum wraps before the instruction",
        ),
        (
            0xffff_f123,
            CODE + 0xeda + 0x1000,
            CODE + 0xffd,
            CODE + 0x1000,
            "and the base is in the middle of a page",
        ),
        (0xffff_0000, 0xfffd, CODE + 0xffd, 0, "the instruction itself wraps"),
        (
            0xc000_0000,
            0x3fff_fffd,
            CODE + 0xffd,
            0,
            "as that of a kernel with a segment of its own",
        ),
    ] {
        let mut b = wrapping(base, rip);
        // mov eax, 0x12345678; inc ebx; jmp to the first
        b.write(first, &[0xb8, 0x78, 0x56]);
        b.write(second, &[0x34, 0x12, 0x43, 0xeb, 0xf8]);
        assert_eq!(b.run(3000), Exit::Budget, "{why}");
        let s = b.cpu.state();
        assert_eq!((s.gpr[0], s.gpr[3], s.rip), (0x1234_5678, 1000, rip), "{why}");
        assert_eq!(s.linear_rip(), (base + rip) & 0xffff_ffff, "{why}");
        // The second page changes, and so does the instruction.
        b.write(second, &[0xaa, 0xbb]);
        assert_eq!(b.run(1), Exit::Budget, "{why}");
        assert_eq!(b.cpu.state().gpr[0], 0xbbaa_5678, "{why}");
    }
}

// covers: cpu/linear-address-wrap
#[test]
fn branches_and_returns_wrap_at_4_gib() {
    // The base and the offsets are such that each linear address is a sum beyond 4 GiB.
    let (base, rip) = (0xffff_0000u64, CODE + 0x1_0000);
    let mut b = wrapping(base, rip);
    let mut a = CodeAssembler::new(32).unwrap();
    let (mut top, mut sub) = (a.create_label(), a.create_label());
    a.set_label(&mut top).unwrap();
    a.call(sub).unwrap();
    a.inc(ecx).unwrap();
    a.jmp(top).unwrap();
    a.nops_with_size(0x1000).unwrap();
    a.set_label(&mut sub).unwrap();
    a.inc(ebx).unwrap();
    a.ret().unwrap();
    let bytes = a.assemble(rip).unwrap();
    b.write(CODE, &bytes);
    assert_eq!(b.run(5 * 1000), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!((s.gpr[1], s.gpr[3], s.rip), (1000, 1000, rip));
}

/// A unit that never knows the code it has been notified of, and has the translations of it forgotten each time.
struct Forgetful;

impl Watch for Forgetful {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        Interest {
            code: 1,
            every_instruction: true,
            ..Interest::NOTHING
        }
    }
    fn knows(&mut self, _: &Code, _: &mut dyn Processor) -> bool {
        false
    }
    fn code(&mut self, _: &Code, _: &mut dyn Processor) -> bool {
        true
    }
}

// covers: cpu/no-progress
#[test]
fn a_run_that_makes_no_progress_ends_with_a_defect() {
    let mut b = Bench::long_with(&HASWELL);
    b.world.watch = Some(Box::new(Forgetful));
    // An instruction that straddles two pages begins with a look at the translation of the second, which is gone by then.
    let at = CODE + 0x1000 - 3;
    b.write(at, &[0xb8, 0x78, 0x56, 0x34, 0x12]);
    b.state(|s| s.rip = at);
    let steps = b.cpu.steps();
    let Exit::Defect(what) = b.run(3000) else {
        panic!("the run went on");
    };
    assert!(
        what.contains("no progress") && what.contains(&format!("{at:#x}")),
        "{what}"
    );
    assert_eq!(b.cpu.steps(), steps);
}

// What the guest brings upon itself is no defect: its exceptions may never come to an end.
// covers: cpu/no-progress
#[test]
fn exceptions_without_end_give_the_host_its_turn() {
    let mut b = Bench::protected();
    // The handler of #UD is itself no instruction, and the stack is a segment of 64 KiB that wraps round.
    b.put(IDT + 6 * 8, gate(KCODE32, CODE, 14, 0, 0));
    b.put(bench::GDT + KDATA as u64, descriptor(0, 0xffff, 0x0093));
    b.state(|s| {
        s.rip = CODE;
        s.segments[SS].attributes = 0x0093;
        s.segments[SS].limit = 0xffff;
        s.gpr[4] = 0x8000;
        s.gdtr.base = 0x12_0000;
        s.idtr.base = 0x13_0000;
    });
    for (from, to, len) in [(bench::GDT, 0x12_0000u64, 0x800u64), (IDT, 0x13_0000, 0x800)] {
        for at in (0..len).step_by(8) {
            let entry = b.read::<8>(from + at);
            b.write(to + at, &entry);
        }
    }
    b.write(CODE, &[0x0f, 0x0b]);
    let steps = b.cpu.steps();
    assert_eq!(b.run(10), Exit::Bus);
    assert_eq!((b.cpu.steps(), b.cpu.rip()), (steps, CODE));
    // The same for faults that units raise: a breakpoint on the first instruction of the debug exception's own handler.
    b.put(0x13_0000 + 8, gate(KCODE32, CODE, 14, 0, 0));
    b.world.watch = Some(Box::new(Breakpoint([CODE])));
    assert_eq!(b.run(10), Exit::Bus);
    assert_eq!((b.cpu.steps(), b.cpu.rip()), (steps, CODE));
}

/// A breakpoint that faults each time.
struct Breakpoint([u64; 1]);

impl Watch for Breakpoint {
    fn interest(&mut self, _: &mut dyn Processor) -> Interest {
        Interest::NOTHING
    }
    fn boundaries(&self) -> &[u64] {
        &self.0
    }
    fn before(&mut self, _: u64, _: &mut dyn Processor) -> Effects {
        Effects {
            debug: Some(1),
            ..Effects::NONE
        }
    }
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
    assert_eq!((s.gpr[0], s.rip, s.segments[CS].base), (0x1234, 4, 0x9_a000));
    assert_eq!(rig.cpu.steps(), steps + 2);
}
