//! From multiboot to Rust, and from a start-up IPI to Rust. SDM Vol. 3A 10.8.5 "Initializing IA-32e Mode", 9.4.4 "MP
//! Initialization Example".

use core::arch::global_asm;

/// Where the other CPUs start: a page below 1 MiB that the start-up IPI names.
pub const TRAMPOLINE: u64 = 0x8000;

// An image of tests for `monitor32` stays without 64-bit mode; all others have nothing to run on a part without it.
global_asm!(
    r#"
    .section .multiboot, "a"
    .long   0x1badb002, 2, -(0x1badb002 + 2)
    .text
    .code32
    .globl  _start
_start: cli
    cld
    mov     esp, offset boot_stack_end
    mov     ebp, [ebx + 16]
    mov     [command_line], ebp
    mov     eax, offset guest_tests32
    test    eax, eax
    jnz     monitor32
    mov     eax, 0x80000000
    cpuid
    cmp     eax, 0x80000001
    jb      no_long_mode
    mov     eax, 0x80000001
    cpuid
    bt      edx, 29
    jnc     no_long_mode
    # Four tables of 512 pages of 2 MiB: present, writable, and for ring 3, too.
    mov     dword ptr [boot_pml4], offset boot_pdpt + 7
    mov     edi, offset boot_pdpt
    mov     eax, offset boot_pd + 7
    mov     ecx, 4
2:  mov     [edi], eax
    add     eax, 4096
    add     edi, 8
    loop    2b
    mov     eax, 0x87
    mov     edi, offset boot_pd
    mov     ecx, 2048
3:  mov     [edi], eax
    add     eax, 0x200000
    add     edi, 8
    loop    3b
    # The local APIC and everything from 3.5 GiB on is not cached.
    mov     edi, offset boot_pd + 1792 * 8
    mov     ecx, 256
4:  or      byte ptr [edi], 0x18
    add     edi, 8
    loop    4b
    call    enter_long_mode
    lgdt    [boot_gdt_pointer]
    .byte   0xea
    .long   5f
    .word   8
    .code64
5:  mov     eax, 16
    mov     ds, eax
    mov     es, eax
    mov     ss, eax
    xor     eax, eax
    mov     fs, eax
    mov     gs, eax
    lea     rsp, [boot_stack_end]
    xor     ebp, ebp
    call    boot_cpu
    ud2

    .code32
enter_long_mode:
    mov     eax, offset boot_pml4
    mov     cr3, eax
    mov     eax, 0x620                      # PAE, OSFXSR, OSXMMEXCPT
    mov     cr4, eax
    mov     ecx, 0xc0000080                 # IA32_EFER.LME
    rdmsr
    or      eax, 0x100
    wrmsr
    mov     eax, 0x80010033                 # PG, WP, NE, ET, MP, PE
    mov     cr0, eax
    ret

    # Copied to the page of the start-up IPI and entered there in real mode.
    .code16
    .globl  trampoline, trampoline_end
trampoline:
    cli
    mov     ax, cs
    mov     ds, ax
    .byte   0x0f, 0x01, 0x16                # LGDT, 16-bit displacement
    .word   trampoline_gdt - trampoline
    mov     eax, cr0
    or      al, 1
    mov     cr0, eax
    .byte   0x66, 0xea
    .long   6f
    .word   0x18
    .balign 8
trampoline_gdt:
    .word   31
    .long   boot_gdt
trampoline_end:
    .code32
6:  mov     eax, 16
    mov     ds, eax
    mov     es, eax
    mov     ss, eax
    mov     esp, [ap_stack]
    call    enter_long_mode
    .byte   0xea
    .long   7f
    .word   8
    .code64
7:  xor     eax, eax
    mov     fs, eax
    mov     gs, eax
    mov     rsp, [ap_stack]
    xor     ebp, ebp
    call    other_cpu
    ud2

    # Without 64-bit mode: no test of the table can run.
    .code32
no_long_mode:
    mov     esi, offset no_long_mode_text
8:  mov     edx, 0x3fd
9:  in      al, dx
    test    al, 0x20
    jz      9b
    lodsb
    test    al, al
    jz      10f
    mov     edx, 0x3f8
    out     dx, al
    jmp     8b
10: xor     eax, eax
    out     0xf4, al
11: hlt
    jmp     11b

    .section .rodata
no_long_mode_text:
    .asciz  "TAP version 14\n1..0 # SKIP no 64-bit mode (CPUID.80000001H:EDX[29] is 0)\n"
    .globl  boot_stack_end
    .data
    .balign 8
boot_gdt:
    .quad   0, 0x00af9b000000ffff, 0x00cf93000000ffff, 0x00cf9b000000ffff
boot_gdt_pointer:
    .word   31
    .long   boot_gdt
    .balign 8
    .globl  command_line, ap_stack
command_line:
    .quad   0
ap_stack:
    .quad   0
    .bss
    .balign 4096
    .globl  boot_pml4
boot_pml4:
    .skip   4096
boot_pdpt:
    .skip   4096
boot_pd:
    .skip   16384
    .skip   65536
boot_stack_end:
    .text
    .code64
"#
);

/// The linear address of the boot CPU's PML4, one to one.
pub fn pml4() -> u64 {
    crate::label!(boot_pml4)
}

/// The command line's bytes, as the boot loader left them.
pub fn command_line() -> &'static str {
    unsafe extern "C" {
        static command_line: u64;
    }
    // SAFETY: the boot code stored the loader's pointer; the string ends with a zero and nobody writes it.
    unsafe {
        let start = command_line as *const u8;
        if start.is_null() {
            return "";
        }
        let mut len = 0;
        while *start.add(len) != 0 {
            len += 1;
        }
        core::str::from_utf8(core::slice::from_raw_parts(start, len)).unwrap_or("")
    }
}

/// Copies the trampoline to its page and says which stack the next CPU takes.
pub fn prepare_start(stack: u64) {
    let (from, to) = (crate::label!(trampoline), crate::label!(trampoline_end));
    unsafe extern "C" {
        static mut ap_stack: u64;
    }
    // SAFETY: the page below 1 MiB is free memory, and one CPU starts at a time.
    unsafe {
        core::ptr::copy_nonoverlapping(from as *const u8, TRAMPOLINE as *mut u8, (to - from) as usize);
        core::ptr::addr_of_mut!(ap_stack).write_volatile(stack);
    }
}
