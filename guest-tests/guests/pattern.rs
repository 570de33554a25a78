//! Seven taken branches, one of each kind, between a WRMSR that switches something on and one that switches it off.

use rt::{call, label};

core::arch::global_asm!(
    r#"
    .text
    .globl p_off, p_run, p_jmp, p_jmp_to, p_jz, p_jz_to, p_call, p_call_to, p_ret, p_ret_to, p_icall, p_icall_to, p_iret
    .globl p_iret_to, p_ijmp, p_ijmp_to, p_user, p_count, p_count_jmp
    # run(MSR, value that switches on, value that switches off)
p_run:
    push    rbx
    push    r12
    mov     rbx, rdx
    mov     ecx, edi
    mov     eax, esi
    mov     rdx, rsi
    shr     rdx, 32
    wrmsr
p_jmp:
    jmp     p_jmp_to
    nop
p_jmp_to:
    xor     eax, eax
p_jz:
    jz      p_jz_to
    nop
p_jz_to:
    jnz     p_jz_to
p_call:
    call    p_call_to
p_ret_to:
    lea     rax, [rip + p_icall_to]
p_icall:
    call    rax
p_iret_to:
    lea     rax, [rip + p_ijmp_to]
p_ijmp:
    jmp     rax
    nop
p_ijmp_to:
    mov     ecx, edi
    mov     eax, ebx
    mov     rdx, rbx
    shr     rdx, 32
p_off:
    wrmsr
    pop     r12
    pop     rbx
    ret
p_call_to:
    nop
p_ret:
    ret
p_icall_to:
    nop
p_iret:
    ret

    # In ring 3: the same branches, then back.
p_user:
    jmp     2f
2:  xor     eax, eax
    jz      3f
    nop
3:  call    p_call_to
    int     0x80

    # count(times): a loop of one instruction and its jump back
p_count:
    mov     rcx, rdi
p_count_jmp:
    dec     rcx
    jnz     p_count_jmp
    ret

    # In ring 3: for ever.
    .globl p_spin, p_spin_jmp
p_spin:
    inc     rax
p_spin_jmp:
    jmp     p_spin
    .globl  p_leave
p_leave:
    int     0x80
"#
);

/// What kind of branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// JMP rel.
    Jump,
    /// Jcc.
    Cond,
    /// CALL rel.
    Call,
    /// RET.
    Ret,
    /// CALL r/m.
    CallInd,
    /// JMP r/m.
    JumpInd,
}

/// A taken branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Branch {
    /// The branch instruction.
    pub from: u64,
    /// Its target.
    pub to: u64,
    /// What it is.
    pub kind: Kind,
}

/// The branches of [`run`], oldest first.
pub fn branches() -> [Branch; 7] {
    let b = |from, to, kind| Branch { from, to, kind };
    [
        b(label!(p_jmp), label!(p_jmp_to), Kind::Jump),
        b(label!(p_jz), label!(p_jz_to), Kind::Cond),
        b(label!(p_call), label!(p_call_to), Kind::Call),
        b(label!(p_ret), label!(p_ret_to), Kind::Ret),
        b(label!(p_icall), label!(p_icall_to), Kind::CallInd),
        b(label!(p_iret), label!(p_iret_to), Kind::Ret),
        b(label!(p_ijmp), label!(p_ijmp_to), Kind::JumpInd),
    ]
}

/// The branches of the routine that [`user`] runs in ring 3, the far one back aside.
pub const USER: usize = 4;

/// Sets the MSR to `on`, runs the seven branches, and sets it to `off`.
pub fn run(msr: u32, on: u64, off: u64) {
    call!(p_run(msr, on, off));
}

/// Runs [`USER`] branches in ring 3.
pub fn user() {
    rt::user::run(label!(p_user), 0, 0);
}

/// Whether an address is in the ring-3 routine, its function included.
pub fn is_user(address: u64) -> bool {
    (label!(p_user)..label!(p_count)).contains(&address) || (label!(p_call_to)..label!(p_icall_to)).contains(&address)
}
