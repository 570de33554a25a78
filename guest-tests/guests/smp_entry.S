# Entry of smp.c on the boot CPU, and what the others execute first. SDM Vol. 3A 9.4 "Multiple-Processor (MP) Initialization".
        .section .multiboot, "a"
        .long   0x1badb002, 2, -(0x1badb002 + 2)
        .text
        .globl  _start, trampoline, trampoline_end, starts
_start: cli
        mov     $stacks + 4096, %esp
        lgdt    descriptor
        ljmp    $8, $1f
1:      mov     $16, %eax
        mov     %eax, %ds
        mov     %eax, %es
        mov     %eax, %ss
        push    16(%ebx)                        # the command line
        call    boot_cpu

# Copied to the page that the start-up IPI names, and entered there in real mode.
        .code16
trampoline:
        cli
        mov     %cs, %ax
        mov     %ax, %ds
        lgdtl   low_descriptor - trampoline
        mov     %cr0, %eax
        or      $1, %al
        mov     %eax, %cr0
        ljmpl   $8, $2f
        .balign 8
low_descriptor:
        .word   23
        .long   gdt
trampoline_end:
        .code32
2:      mov     $16, %eax
        mov     %eax, %ds
        mov     %eax, %es
        mov     %eax, %ss
        mov     $1, %eax
        lock xadd %eax, starts
        inc     %eax
        shl     $12, %eax                       # a stack of its own for each start
        lea     stacks + 4096(%eax), %esp
        call    other_cpu

        .data
        .balign 8
gdt:    .quad   0, 0x00cf9b000000ffff, 0x00cf93000000ffff
descriptor:
        .word   23
        .long   gdt
starts: .long   0
        .bss
        .balign 4096
stacks: .skip   4096 * 300
