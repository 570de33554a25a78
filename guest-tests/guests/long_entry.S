# From the multiboot state to 64-bit mode with the first GiB mapped one to one, then guest(command line).
# SDM Vol. 3A 10.8.5 "Initializing IA-32e Mode".
        .section .multiboot, "a"
        .long   0x1badb002, 2, -(0x1badb002 + 2)
        .text
        .code32
        .globl  _start
_start: mov     $stack, %esp
        cld
        mov     16(%ebx), %ebp                  # the command line
        movl    $pdpt + 3, pml4
        movl    $pd + 3, pdpt
        mov     $0x83, %eax                     # present, writable, 2 MiB
        mov     $pd, %edi
1:      mov     %eax, (%edi)
        add     $0x200000, %eax
        add     $8, %edi
        cmp     $pd + 4096, %edi
        jne     1b
        mov     $pml4, %eax
        mov     %eax, %cr3
        mov     $0x20, %eax                     # CR4.PAE
        mov     %eax, %cr4
        mov     $0xc0000080, %ecx               # IA32_EFER.LME
        rdmsr
        or      $0x100, %eax
        wrmsr
        mov     %cr0, %eax
        or      $0x80000001, %eax
        mov     %eax, %cr0
        lgdt    descriptor
        ljmp    $8, $2f
        .code64
2:      mov     $16, %eax
        mov     %eax, %ds
        mov     %eax, %es
        mov     %eax, %ss
        mov     %ebp, %edi
        call    guest
        .balign 8
gdt:    .quad   0, 0x00af9b000000ffff, 0x00cf93000000ffff
descriptor:
        .word   23
        .long   gdt
        .bss
        .balign 4096
pml4:   .skip   4096
pdpt:   .skip   4096
pd:     .skip   4096
        .skip   65536
stack:
