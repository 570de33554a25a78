//! System instructions, and the delivery of events, against what the manual's tables say.

mod bench;
mod rig;

use bench::{Bench, KCODE, KDATA, UCODE, UDATA};
use engine::Exit;
use iced_x86::code_asm::*;

// covers: 2/cpu-syscall
#[test]
fn syscall_and_sysret_go_there_and_back() {
    let mut b = Bench::long();
    b.msr(0xc000_0081, (0x1b << 48) | (KCODE as u64) << 32);
    b.msr(0xc000_0082, 0x10_8000);
    b.msr(0xc000_0084, 0x700);
    b.at(0x10_8000, |a| {
        a.mov(rax, rcx)?;
        a.sysretq()
    });
    b.user();
    b.code(|a| {
        a.syscall()?;
        a.mov(ebx, ss)?;
        a.syscall()
    });
    b.state(|s| s.rflags = 0x3202);
    assert_eq!(b.run(1), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!(
        (s.rip, s.gpr[1], s.gpr[11], s.cpl),
        (0x10_8000, rig::CODE + 2, 0x3202, 0)
    );
    assert_eq!(
        (s.rflags, s.segments[1].selector, s.segments[2].selector),
        (0x3002, KCODE, KDATA)
    );
    assert_eq!(b.run(4), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!(
        (s.gpr[0], s.gpr[3], s.rip),
        (rig::CODE + 2, UDATA as u64 | 3, 0x10_8000)
    );
    b.run(2);
    let s = b.cpu.state();
    assert_eq!((s.segments[1].selector, s.rflags, s.cpl), (UCODE | 3, 0x3202, 3));
}

// covers: 2/cpu-gates
#[test]
fn an_exception_in_user_code_switches_to_the_kernel_stack_and_iretq_returns() {
    let mut b = Bench::long();
    b.user();
    b.at(bench::handler(6), |a| {
        a.add(qword_ptr(rsp), 2)?;
        a.iretq()
    });
    b.code(|a| {
        a.ud2()?;
        a.inc(eax)?;
        a.int(0x30)
    });
    assert_eq!(b.run(3), Exit::Budget);
    let s = b.cpu.state();
    assert_eq!((s.gpr[0], s.cpl, s.gpr[4]), (1, 3, rig::STACK));
    let t = b.trap();
    assert_eq!((t.vector, t.error), (13, Some(0x30 * 8 + 2)), "the gate's DPL is 0");
}
