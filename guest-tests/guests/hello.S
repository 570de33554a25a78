# The smallest guest: multiboot 1, prints a line on the serial port and ends through the debug-exit port.
# Source: Multiboot Specification 0.6.96, 3.1 "OS image format".
        .section .multiboot, "a"
        .long   0x1badb002, 0, -0x1badb002
        .text
        .globl  _start
_start: mov     $message, %esi
        mov     $0x3f8, %dx
next:   lodsb
        out     %al, %dx
        cmp     $'\n', %al
        jne     next
        mov     $0x15, %al              # status (0x15 << 1) | 1 = 43
        out     %al, $0xf4
        hlt
        .data
message:
        .ascii  "Hello from a multiboot guest.\n"
