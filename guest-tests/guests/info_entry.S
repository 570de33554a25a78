# Entry of info.c: keeps what the boot loader left in the registers.
        .section .multiboot, "a"
        .long   0x1badb002, 2, -(0x1badb002 + 2)        # wants memory information
        .text
        .globl  _start
_start: mov     $stack, %esp
        cld
        pushf
        mov     %cr0, %edx
        push    %edx
        push    %ebx
        push    %eax
        call    report
        .bss
        .balign 16
        .skip   16384
stack:
