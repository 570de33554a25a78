//! Calls of assembly, and ring 3: the same memory, another privilege.

use core::arch::global_asm;

use crate::exception::{Frame, selector};

/// The vector by which ring 3 comes back.
pub const RETURN: u8 = 0x80;

const STACK: usize = 16384;

static mut USER_STACK: [u128; STACK / 16] = [0; STACK / 16];

/// Calls a routine that keeps the C convention.
pub fn call(address: u64, arguments: &[u64]) -> u64 {
    let word = |n: usize| arguments.get(n).copied().unwrap_or(0);
    type Routine = extern "C" fn(u64, u64, u64, u64, u64, u64) -> u64;
    // SAFETY: the address is a label of the image, and routines take no more than six words.
    let routine: Routine = unsafe { core::mem::transmute(address) };
    routine(word(0), word(1), word(2), word(3), word(4), word(5))
}

/// The stack pointer that ring 3 starts with.
pub fn stack() -> u64 {
    // One word for a return address, as after a call.
    core::ptr::addr_of!(USER_STACK) as u64 + STACK as u64 - 8
}

/// Runs a routine in ring 3 with this argument in RDI; it ends with INT 80H and hands back RAX. `flags` are RFLAGS at its start.
pub fn run(address: u64, argument: u64, flags: u64) -> u64 {
    run_in(selector::USER_CODE, address, argument, flags)
}

/// The same with another code segment.
pub fn run_in(code: u16, address: u64, argument: u64, flags: u64) -> u64 {
    call(
        crate::label!(enter_user),
        &[
            argument,
            address,
            u64::from(code),
            flags | 2,
            stack(),
            u64::from(selector::USER_DATA),
        ],
    )
}

/// The handler of [`RETURN`].
pub(crate) fn come_back(frame: &mut Frame) {
    unsafe extern "C" {
        static kernel_stack: u64;
    }
    frame.rip = crate::label!(user_is_back);
    frame.cs = u64::from(selector::CODE);
    frame.ss = u64::from(selector::DATA);
    // SAFETY: `enter_user` stored it before it left.
    frame.rsp = unsafe { core::ptr::addr_of!(kernel_stack).read_volatile() };
    frame.rflags = 2;
}

global_asm!(
    r#"
    .text
enter_user:
    push    rbx
    push    rbp
    push    r12
    push    r13
    push    r14
    push    r15
    mov     [rip + kernel_stack], rsp
    push    r9
    push    r8
    push    rcx
    push    rdx
    push    rsi
    iretq
user_is_back:
    mov     ecx, 0x10
    mov     ds, ecx
    mov     es, ecx
    pop     r15
    pop     r14
    pop     r13
    pop     r12
    pop     rbp
    pop     rbx
    ret
    .bss
    .balign 8
kernel_stack:
    .skip   8
    .text
    .globl  enter_user, user_is_back, kernel_stack
"#
);
