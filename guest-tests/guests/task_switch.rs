//! Hardware task switches and debugging, in protected mode on every part. SDM Vol. 3A 7.3 "Task Switching", Vol. 3B 18.2.4 "Debug
//! Control Register (DR7)", 18.3.1.5 "Task-Switch Exception Condition".

use rt::at;
use rt::monitor::{Field, Op};

core::arch::global_asm!(
    r#"
    .text
    .code32
    .globl  ts_prepare, ts_jump, ts_call, ts_called, ts_int, ts_other, ts_other_2, ts_nested, ts_count, ts_unused
    # The other task as if it had never run: free, at ts_other, with the monitor's segments and a stack of its own.
ts_prepare:
    mov     edi, offset m_other
    xor     eax, eax
    mov     ecx, 26
    rep     stosd
    mov     dword ptr [m_other + 0x20], offset ts_other
    mov     dword ptr [m_other + 0x24], 2
    mov     dword ptr [m_other + 0x38], offset ts_stack_end
    mov     eax, 0x10
    mov     [m_other + 0x48], eax
    mov     [m_other + 0x50], eax
    mov     [m_other + 0x54], eax
    mov     dword ptr [m_other + 0x4c], 8
    mov     dword ptr [m_other + 0x64], 0x680000
    mov     byte ptr [m_gdt + 0x25], 0x89
    mov     dword ptr [m_task + 0x64], 0x680000
    mov     dword ptr [ts_count], 0
    mov     eax, 0x400
    mov     dr7, eax
    ret

    # To the other task by JMP, which comes back by JMP.
ts_jump:
    pushad
    .byte   0xea
    .long   0
    .word   0x20
    popad
    ret
ts_other:
    inc     dword ptr [ts_count]
ts_other_2:
    nop
    .byte   0xea
    .long   0
    .word   0x18
    ud2

    # By CALL and by an interrupt through a task gate, to code that comes back by IRET.
ts_call:
    pushad
    .byte   0x9a
    .long   0
    .word   0x20
ts_called:
    popad
    ret
ts_int:
    pushad
    int     0x40
    popad
    ret
ts_nested:
    inc     dword ptr [ts_count]
    iretd
    ud2

    .data
    .balign 4
ts_count:   .long 0
ts_unused:  .long 0
    .bss
    .balign 16
    .skip   4096
ts_stack_end:
    .text
    .code64
"#
);

const T: u32 = 1;
const BT: u64 = 1 << 15;
const BS: u64 = 1 << 14;
/// The bits of DR6 that say what came.
const CAUSES: u64 = 0xE00F;
/// Fields of a task state. Figure 7-2 "32-Bit Task-State Segment (TSS)".
const LINK: u32 = 0x00;
const EIP: u32 = 0x20;
const EFLAGS: u32 = 0x24;
const TRAP: u32 = 0x64;

rt::tests32! {
    "tests32_task_switch";

    a_task_runs_and_comes_back {
        Op::call(at!(ts_prepare)),
        Op::watch(),
        Op::call(at!(ts_jump)),
        Op::load(at!(ts_count), 0),
        Op::expect(0xFFFF_FFFF, 1),
        Op::hits(),
        Op::expect(!0, 0),
    }

    // TSS.T: a trap after the switch, before the task's first instruction.
    the_t_bit_traps_in_the_new_task {
        Op::call(at!(ts_prepare)),
        Op::store(at!(m_other), TRAP, 0x68_0000 | T),
        Op::watch(),
        Op::call(at!(ts_jump)),
        Op::hits(),
        Op::expect(!0, 1),
        Op::hit(0, Field::Eip),
        Op::expect_at(at!(ts_other)),
        Op::hit(0, Field::Dr6),
        Op::expect(CAUSES, BT),
        Op::hit(0, Field::Task),
        Op::expect(!0, 0x20),
        Op::load(at!(ts_count), 0),
        Op::expect(0xFFFF_FFFF, 1),
    }

    // A switch clears L0 to L3 and LE; G0 to G3 and GE stay.
    a_switch_clears_local_enables {
        Op::call(at!(ts_prepare)),
        Op::set_dr0_at(at!(ts_unused)),
        Op::set_dr(7, 0x7FF),
        Op::call(at!(ts_jump)),
        Op::dr(7),
        Op::expect(0x3FF, 0x2AA),
    }

    // A local breakpoint of the old task is none in the new one; a global one is.
    a_local_breakpoint_stays_behind {
        Op::call(at!(ts_prepare)),
        Op::set_dr0_at(at!(ts_other)),
        Op::set_dr(7, 0x401),
        Op::watch(),
        Op::call(at!(ts_jump)),
        Op::hits(),
        Op::expect(!0, 0),
        Op::call(at!(ts_prepare)),
        Op::set_dr(7, 0x402),
        Op::watch(),
        Op::call(at!(ts_jump)),
        Op::hits(),
        Op::expect(!0, 1),
        Op::hit(0, Field::Eip),
        Op::expect_at(at!(ts_other)),
        Op::hit(0, Field::Dr6),
        Op::expect(CAUSES, 1),
    }

    // The switch loads RF from the TSS, and the first instruction's breakpoint is passed over.
    rf_comes_from_the_tss {
        Op::call(at!(ts_prepare)),
        Op::store(at!(m_other), EFLAGS, 0x1_0002),
        Op::set_dr0_at(at!(ts_other)),
        Op::set_dr(7, 0x402),
        Op::watch(),
        Op::call(at!(ts_jump)),
        Op::hits(),
        Op::expect(!0, 0),
    }

    // TF set by a TSS: one trap, after the first instruction.
    tf_from_the_tss_steps_after_the_first_instruction {
        Op::call(at!(ts_prepare)),
        Op::store(at!(m_other), EFLAGS, 0x102),
        Op::watch(),
        Op::call(at!(ts_jump)),
        Op::hits(),
        Op::expect(!0, 1),
        Op::hit(0, Field::Eip),
        Op::expect_at(at!(ts_other_2)),
        Op::hit(0, Field::Dr6),
        Op::expect(CAUSES, BS),
        Op::hit(0, Field::Eflags),
        Op::expect(0x100, 0x100),
    }

    // T and a breakpoint on the first instruction: the trap of the switch comes first, then the instruction's fault.
    the_t_bit_comes_before_the_first_breakpoint {
        Op::call(at!(ts_prepare)),
        Op::store(at!(m_other), TRAP, 0x68_0000 | T),
        Op::store(at!(m_other), EFLAGS, 0x102),
        Op::watch(),
        Op::call(at!(ts_jump)),
        Op::hit(0, Field::Dr6),
        Op::expect(BT, BT),
        Op::hit(0, Field::Eip),
        Op::expect_at(at!(ts_other)),
    }

    // CALL links back, IRET with NT follows the link.
    a_nested_task_returns_by_its_link {
        Op::call(at!(ts_prepare)),
        Op::store_at(at!(m_other), EIP, at!(ts_nested)),
        Op::watch(),
        Op::call(at!(ts_call)),
        Op::load(at!(ts_count), 0),
        Op::expect(0xFFFF_FFFF, 1),
        Op::load(at!(m_other), LINK),
        Op::expect(0xFFFF, 0x18),
        Op::hits(),
        Op::expect(!0, 0),
    }

    // T of the task that is gone back to: the trap is at the instruction behind the CALL.
    returning_to_a_task_with_t_traps {
        Op::call(at!(ts_prepare)),
        Op::store_at(at!(m_other), EIP, at!(ts_nested)),
        Op::store(at!(m_task), TRAP, 0x68_0000 | T),
        Op::watch(),
        Op::call(at!(ts_call)),
        Op::store(at!(m_task), TRAP, 0x68_0000),
        Op::hits(),
        Op::expect(!0, 1),
        Op::hit(0, Field::Eip),
        Op::expect_at(at!(ts_called)),
        Op::hit(0, Field::Dr6),
        Op::expect(CAUSES, BT),
        Op::hit(0, Field::Task),
        Op::expect(!0, 0x18),
    }

    // An interrupt through a task gate, with T.
    a_task_gate_switches {
        Op::call(at!(ts_prepare)),
        Op::store_at(at!(m_other), EIP, at!(ts_nested)),
        Op::store(at!(m_other), TRAP, 0x68_0000 | T),
        Op::store(at!(m_idt), 0x40 * 8, 0x20 << 16),
        Op::store(at!(m_idt), 0x40 * 8 + 4, 0x8500),
        Op::watch(),
        Op::call(at!(ts_int)),
        Op::load(at!(ts_count), 0),
        Op::expect(0xFFFF_FFFF, 1),
        Op::hits(),
        Op::expect(!0, 1),
        Op::hit(0, Field::Dr6),
        Op::expect(CAUSES, BT),
    }
}
