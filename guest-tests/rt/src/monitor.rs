//! Tests without 64-bit mode. Only the host's own target is installed, so there is no Rust in 32-bit code: a monitor in assembly
//! executes tables of operations, which are constants of Rust, and reports in TAP 14. It stays in protected mode without paging, so
//! that its images run on every part from P6 on, and can switch tasks by hardware.
//!
//! An operation leaves its result in R, of 64 bits, and the fault of RDMSR and WRMSR in F.

use core::arch::global_asm;
use core::ffi::CStr;

/// A number, or the address of a label.
#[repr(C)]
#[derive(Clone, Copy)]
pub union Word {
    number: u64,
    label: *const u8,
}

/// An operation.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Op {
    code: u32,
    a: u32,
    value: Word,
    second: Word,
}

const NONE: Word = Word { number: 0 };

/// CPUID's registers for [`Op::cpuid`].
#[derive(Clone, Copy)]
pub enum Register {
    /// EAX.
    Eax,
    /// EBX.
    Ebx,
    /// ECX.
    Ecx,
    /// EDX.
    Edx,
}

/// Fields of what [`Op::hit`] reads.
#[derive(Clone, Copy)]
pub enum Field {
    /// EIP in the handler's frame.
    Eip = 0,
    /// DR6 at the handler's start.
    Dr6 = 4,
    /// EFLAGS in the frame.
    Eflags = 8,
    /// The task register.
    Task = 12,
}

impl Op {
    const fn new(code: u32, a: u32, value: Word, second: Word) -> Self {
        Self { code, a, value, second }
    }

    /// RDMSR to R.
    pub const fn rdmsr(msr: u32) -> Self {
        Self::new(0, msr, NONE, NONE)
    }

    /// WRMSR.
    pub const fn wrmsr(msr: u32, value: u64) -> Self {
        Self::new(1, msr, Word { number: value }, NONE)
    }

    /// WRMSR of an address.
    pub const fn wrmsr_at(msr: u32, label: *const u8) -> Self {
        Self::new(1, msr, Word { label }, NONE)
    }

    /// The last RDMSR or WRMSR was #GP.
    pub const fn is_gp() -> Self {
        Self::new(2, 0x10D, NONE, NONE)
    }

    /// The last RDMSR or WRMSR was none.
    pub const fn is_fine() -> Self {
        Self::new(2, 0, NONE, NONE)
    }

    /// These bits of R have this value.
    pub const fn expect(mask: u64, value: u64) -> Self {
        Self::new(3, 0, Word { number: value }, Word { number: mask })
    }

    /// The low half of R is the address of a label.
    pub const fn expect_at(label: *const u8) -> Self {
        Self::new(3, 0, Word { label }, Word { number: 0xFFFF_FFFF })
    }

    /// The halves of R change places.
    pub const fn swap() -> Self {
        Self::new(4, 0, NONE, NONE)
    }

    /// Eight bytes of memory to R.
    pub const fn load(label: *const u8, offset: u32) -> Self {
        Self::new(5, offset, Word { label }, NONE)
    }

    /// Four bytes to memory.
    pub const fn store(label: *const u8, offset: u32, value: u32) -> Self {
        let number = value as u64;
        Self::new(6, offset, Word { label }, Word { number })
    }

    /// The address of a label to memory, four bytes.
    pub const fn store_at(label: *const u8, offset: u32, address: *const u8) -> Self {
        Self::new(6, offset, Word { label }, Word { label: address })
    }

    /// Calls a routine; EDX:EAX to R.
    pub const fn call(label: *const u8) -> Self {
        Self::new(7, 0, Word { label }, NONE)
    }

    /// CPUID to R; leaves that are not there are 0.
    pub const fn cpuid(leaf: u32, register: Register) -> Self {
        let number = leaf as u64;
        Self::new(8, register as u32, Word { number }, NONE)
    }

    /// Where these bits of R do not have this value, the test is left here: RDMSR of `absent` (unless 0) has to be #GP, and then it
    /// is a skip with the reason.
    pub const fn needs(mask: u32, value: u32, absent: u32, reason: &'static CStr) -> Self {
        let number = mask as u64 | (value as u64) << 32;
        let label = reason.as_ptr().cast();
        Self::new(9, absent, Word { label }, Word { number })
    }

    /// MOV to DR0, DR6 or DR7.
    pub const fn set_dr(n: u32, value: u32) -> Self {
        let number = value as u64;
        Self::new(10, n, Word { number }, NONE)
    }

    /// MOV of an address to DR0.
    pub const fn set_dr0_at(label: *const u8) -> Self {
        Self::new(10, 0, Word { label }, NONE)
    }

    /// MOV from DR0, DR6 or DR7.
    pub const fn dr(n: u32) -> Self {
        Self::new(11, n, NONE, NONE)
    }

    /// Forgets the debug exceptions so far.
    pub const fn watch() -> Self {
        Self::new(12, 0, NONE, NONE)
    }

    /// How many debug exceptions there were since.
    pub const fn hits() -> Self {
        Self::new(13, 0, NONE, NONE)
    }

    /// A field of the nth, from 0 on.
    pub const fn hit(n: u32, field: Field) -> Self {
        let number = field as u64;
        Self::new(14, n, Word { number }, NONE)
    }
}

/// A test by name.
#[repr(C)]
pub struct Test {
    name: *const u8,
    name_len: usize,
    ops: *const Op,
    ops_len: usize,
}

impl Test {
    /// Of these operations, in their order.
    pub const fn new(name: &'static str, ops: &'static [Op]) -> Self {
        Self {
            name: name.as_ptr(),
            name_len: name.len(),
            ops: ops.as_ptr(),
            ops_len: ops.len(),
        }
    }
}

/// What an image exports as `guest_tests32`.
#[repr(C)]
pub struct Table {
    tests: *const Test,
    len: usize,
}

// SAFETY: nobody writes what it points to.
unsafe impl Sync for Table {}

impl Table {
    /// Of these tests.
    pub const fn new(tests: &'static [Test]) -> Self {
        Self {
            tests: tests.as_ptr(),
            len: tests.len(),
        }
    }
}

/// A label of `global_asm!` as an operand.
#[macro_export]
macro_rules! at {
    ($name:ident) => {{
        unsafe extern "C" {
            static $name: u8;
        }
        &raw const $name
    }};
}

global_asm!(
    r#"
    .text
    .code32
    .globl  monitor32
monitor32:
    mov     esp, offset boot_stack_end
    lgdt    [m_gdt_pointer]
    .byte   0xea
    .long   2f
    .word   8
2:  mov     eax, 16
    mov     ds, eax
    mov     es, eax
    mov     ss, eax
    xor     eax, eax
    mov     fs, eax
    mov     gs, eax
    mov     al, 0xff
    out     0x21, al
    out     0xa1, al
    # Gates of all exceptions; others stay absent.
    mov     edi, offset m_idt
    mov     eax, offset m_stubs
    mov     ecx, 32
3:  mov     edx, eax
    and     edx, 0xffff
    or      edx, 0x80000
    mov     [edi], edx
    mov     edx, eax
    and     edx, 0xffff0000
    or      edx, 0x8e00
    mov     [edi + 4], edx
    add     eax, 16
    add     edi, 8
    loop    3b
    lidt    [m_idt_pointer]
    # The descriptors of both tasks.
    mov     eax, offset m_task
    mov     edi, offset m_gdt + 0x18
    call    m_descriptor
    mov     eax, offset m_other
    mov     edi, offset m_gdt + 0x20
    call    m_descriptor
    mov     word ptr [m_task + 0x66], 0x68
    mov     eax, 0x18
    ltr     ax
    mov     esi, offset m_version
    call    m_text
    mov     eax, [guest_tests32 + 8]
    call    m_decimal
    call    m_line
    mov     eax, [guest_tests32]
    mov     [m_test], eax
m_test_begins:
    mov     esp, offset boot_stack_end
    mov     eax, [m_number]
    cmp     eax, [guest_tests32 + 8]
    jae     m_over
    inc     dword ptr [m_number]
    mov     ebx, [m_test]
    mov     eax, [ebx + 16]
    mov     [m_op], eax
    imul    ecx, [ebx + 24], 24
    add     eax, ecx
    mov     [m_op_end], eax
    mov     dword ptr [m_hits], 0
m_next:
    mov     esp, offset boot_stack_end
    mov     ebx, [m_op]
    cmp     ebx, [m_op_end]
    jae     m_passed
    add     dword ptr [m_op], 24
    mov     eax, [ebx]
    mov     ecx, [ebx + 4]
    mov     edx, [ebx + 8]
    mov     edi, [ebx + 12]
    jmp     [m_ops + eax * 4]

m_op_rdmsr:
    mov     dword ptr [m_fault], 0
    xor     eax, eax
    xor     edx, edx
m_rdmsr:
    rdmsr
    mov     [m_r], eax
    mov     [m_r + 4], edx
    jmp     m_next
m_op_wrmsr:
    mov     dword ptr [m_fault], 0
    mov     eax, edx
    mov     edx, edi
m_wrmsr:
    wrmsr
    jmp     m_next
m_op_fault:
    mov     eax, [m_fault]
    mov     [m_r], eax
    mov     dword ptr [m_r + 4], 0
    mov     edx, ecx
    xor     edi, edi
    cmp     eax, ecx
    jne     m_failed
    jmp     m_next
m_op_expect:
    mov     eax, [m_r]
    and     eax, [ebx + 16]
    cmp     eax, edx
    jne     m_failed
    mov     eax, [m_r + 4]
    and     eax, [ebx + 20]
    cmp     eax, edi
    jne     m_failed
    jmp     m_next
m_op_swap:
    mov     eax, [m_r]
    xchg    eax, [m_r + 4]
    mov     [m_r], eax
    jmp     m_next
m_op_load:
    mov     eax, [edx + ecx]
    mov     [m_r], eax
    mov     eax, [edx + ecx + 4]
    mov     [m_r + 4], eax
    jmp     m_next
m_op_store:
    mov     eax, [ebx + 16]
    mov     [edx + ecx], eax
    jmp     m_next
m_op_call:
    call    edx
    mov     [m_r], eax
    mov     [m_r + 4], edx
    jmp     m_next
m_op_cpuid:
    mov     esi, ecx
    mov     edi, edx
    mov     eax, edx
    and     eax, 0x80000000
    cpuid
    cmp     edi, eax
    mov     eax, 0
    ja      4f
    mov     eax, edi
    xor     ecx, ecx
    cpuid
    mov     [m_cpuid], eax
    mov     [m_cpuid + 4], ebx
    mov     [m_cpuid + 8], ecx
    mov     [m_cpuid + 12], edx
    mov     eax, [m_cpuid + esi * 4]
4:  mov     [m_r], eax
    mov     dword ptr [m_r + 4], 0
    jmp     m_next
m_op_needs:
    mov     eax, [m_r]
    and     eax, [ebx + 16]
    cmp     eax, [ebx + 20]
    je      m_next
    mov     [m_reason], edx
    test    ecx, ecx
    jz      m_skipped
    mov     dword ptr [m_fault], 0
m_absent:
    rdmsr
    mov     eax, [m_fault]
    mov     [m_r], eax
    mov     dword ptr [m_r + 4], 0
    mov     edx, 0x10d
    xor     edi, edi
    cmp     eax, edx
    jne     m_failed
    jmp     m_skipped
m_op_set_dr:
    cmp     ecx, 6
    je      5f
    ja      6f
    mov     dr0, edx
    jmp     m_next
5:  mov     dr6, edx
    jmp     m_next
6:  mov     dr7, edx
    jmp     m_next
m_op_dr:
    mov     eax, dr0
    cmp     ecx, 6
    jb      8f
    mov     eax, dr6
    je      8f
    mov     eax, dr7
8:  mov     [m_r], eax
    mov     dword ptr [m_r + 4], 0
    jmp     m_next
m_op_watch:
    mov     dword ptr [m_hits], 0
    mov     eax, 0xffff0ff0
    mov     dr6, eax
    jmp     m_next
m_op_hits:
    mov     eax, [m_hits]
    mov     [m_r], eax
    mov     dword ptr [m_r + 4], 0
    jmp     m_next
m_op_hit:
    shl     ecx, 4
    mov     eax, [m_log + ecx + edx]
    mov     [m_r], eax
    mov     dword ptr [m_r + 4], 0
    jmp     m_next

m_passed:
    mov     esi, offset m_ok
    call    m_name
m_done:
    call    m_line
m_after:
    # Puts back what a test may have left on.
    mov     eax, 0x400
    mov     dr7, eax
    mov     ecx, 0x1d9
    xor     eax, eax
    xor     edx, edx
m_quiet:
    wrmsr
    add     dword ptr [m_test], 32
    jmp     m_test_begins
m_skipped:
    mov     esi, offset m_ok
    call    m_name
    mov     esi, offset m_skip
    call    m_text
    mov     esi, [m_reason]
    call    m_text
    jmp     m_done
m_failed:
    # R is what was seen, EDI:EDX what was wanted.
    push    edx
    push    edi
    mov     esi, offset m_not_ok
    call    m_name
    mov     esi, offset m_where
    call    m_text
    mov     ebx, [m_test]
    mov     eax, [m_op]
    sub     eax, [ebx + 16]
    xor     edx, edx
    mov     ecx, 24
    div     ecx
    call    m_decimal
    mov     esi, offset m_seen
    call    m_text
    mov     eax, [m_r + 4]
    call    m_hex
    mov     eax, [m_r]
    call    m_hex
    mov     esi, offset m_wanted
    call    m_text
    pop     eax
    call    m_hex
    pop     eax
    call    m_hex
    mov     esi, offset m_end
    call    m_text
    inc     dword ptr [m_failures]
    jmp     m_after
m_over:
    xor     eax, eax
    cmp     [m_failures], eax
    setne   al
    out     0xf4, al
9:  cli
    hlt
    jmp     9b

    # EDI is a descriptor, EAX the address of its task state: 32 bits, available.
m_descriptor:
    mov     edx, eax
    shl     edx, 16
    or      edx, 0x67
    mov     [edi], edx
    mov     edx, eax
    shr     edx, 16
    and     edx, 0xff
    and     eax, 0xff000000
    or      eax, edx
    or      eax, 0x8900
    mov     [edi + 4], eax
    ret

m_name:
    call    m_text
    mov     eax, [m_number]
    call    m_decimal
    mov     esi, offset m_dash
    call    m_text
    mov     ebx, [m_test]
    mov     esi, [ebx]
    mov     ecx, [ebx + 8]
2:  jecxz   3f
    lodsb
    call    m_char
    dec     ecx
    jmp     2b
3:  ret
m_line:
    mov     al, 10
m_char:
    push    edx
    push    eax
    mov     edx, 0x3fd
2:  in      al, dx
    test    al, 0x20
    jz      2b
    pop     eax
    mov     edx, 0x3f8
    out     dx, al
    pop     edx
    ret
m_text:
    lodsb
    test    al, al
    jz      2f
    call    m_char
    jmp     m_text
2:  ret
m_decimal:
    mov     ecx, 10
    xor     edx, edx
    div     ecx
    push    edx
    test    eax, eax
    jz      2f
    call    m_decimal
2:  pop     eax
    add     al, '0'
    jmp     m_char
m_hex:
    mov     ebp, eax
    mov     ecx, 8
2:  rol     ebp, 4
    mov     eax, ebp
    and     eax, 15
    mov     al, [m_digits + eax]
    call    m_char
    loop    2b
    ret

    .balign 16
m_stubs:
    .set    vector, 0
    .rept   32
    .balign 16
    .if     vector == 8 || (vector >= 10 && vector <= 14) || vector == 17 || vector == 21
    .else
    push    0
    .endif
    push    vector
    jmp     m_exception
    .set    vector, vector + 1
    .endr
m_exception:
    pushad
    mov     ecx, [esp + 40]
    cmp     dword ptr [esp + 32], 1
    je      m_debug
    cmp     ecx, offset m_rdmsr
    je      2f
    cmp     ecx, offset m_wrmsr
    je      2f
    cmp     ecx, offset m_absent
    je      2f
    cmp     ecx, offset m_quiet
    je      2f
    # A routine that expects an exception says where it goes on.
    mov     eax, [monitor_resume]
    test    eax, eax
    jnz     3f
    # Unexpected: the vector and where.
    mov     eax, [esp + 32]
    mov     [m_r], ecx
    mov     [m_r + 4], eax
    mov     edx, -1
    mov     edi, -1
    mov     esp, offset boot_stack_end
    jmp     m_failed
2:  mov     eax, [esp + 32]
    or      eax, 0x100
    mov     [m_fault], eax
    # RDMSR and WRMSR are two bytes.
    add     dword ptr [esp + 40], 2
    jmp     4f
3:  mov     [esp + 40], eax
    mov     dword ptr [monitor_resume], 0
4:  popad
    add     esp, 8
    iretd
m_debug:
    mov     eax, [m_hits]
    cmp     eax, 16
    jae     5f
    shl     eax, 4
    mov     [m_log + eax], ecx
    mov     edx, dr6
    mov     [m_log + eax + 4], edx
    mov     edx, [esp + 48]
    mov     [m_log + eax + 8], edx
    xor     edx, edx
    str     dx
    mov     [m_log + eax + 12], edx
5:  inc     dword ptr [m_hits]
    mov     eax, 0xffff0ff0
    mov     dr6, eax
    # An instruction breakpoint is left behind, and nothing is stepped on from here.
    or      dword ptr [esp + 48], 0x10000
    and     dword ptr [esp + 48], ~0x100
    jmp     4b

    .section .rodata
m_version: .asciz "TAP version 14\n1.."
m_ok:      .asciz "ok "
m_not_ok:  .asciz "not ok "
m_dash:    .asciz " - "
m_skip:    .asciz " # SKIP "
m_where:   .asciz "\n  ---\n  operation: "
m_seen:    .asciz "\n  seen: "
m_wanted:  .asciz "\n  wanted: "
m_end:     .asciz "\n  ...\n"
m_digits:  .ascii "0123456789ABCDEF"
    .balign 4
m_ops:
    .long   m_op_rdmsr, m_op_wrmsr, m_op_fault, m_op_expect, m_op_swap, m_op_load, m_op_store, m_op_call, m_op_cpuid
    .long   m_op_needs, m_op_set_dr, m_op_dr, m_op_watch, m_op_hits, m_op_hit
    .data
    .balign 8
    .globl  m_gdt, m_idt, m_task, m_other, monitor_resume
m_gdt:
    .quad   0, 0x00cf9b000000ffff, 0x00cf93000000ffff, 0, 0
m_gdt_pointer:
    .word   39
    .long   m_gdt
    .balign 8
m_idt_pointer:
    .word   2047
    .long   m_idt
    .balign 8
m_r:        .quad 0
m_test:     .long 0
m_number:   .long 0
m_op:       .long 0
m_op_end:   .long 0
m_fault:    .long 0
m_reason:   .long 0
m_failures: .long 0
m_hits:     .long 0
monitor_resume:
    .long   0
m_cpuid:    .skip 16
m_log:      .skip 256
    .balign 128
m_task:     .skip 128
m_other:    .skip 128
m_idt:      .skip 2048
    .text
    .code64
"#
);
