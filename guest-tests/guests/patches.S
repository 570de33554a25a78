# A guest that patches itself as a kernel does at its boot: one-byte NOPs become a long one and back, so that other addresses are
# executed. Between patches of one page there are direct jumps and calls only, of which a trace says nothing.
# 90 90 and 66 90 are both two bytes, and so are 90 90 90 and 0F 1F 00 both three.
        .section .multiboot, "a"
        .long   0x1badb002, 0, -0x1badb002
        .text
        .globl  _start
_start: mov     $stack, %esp
        mov     $100, %ecx
        jmp     round

        .balign 4096
round:  test    $1, %cl                 # one branch waits for its packet, or two
        jz      even
        cmp     %cl, %cl
        jnz     round
even:   jmp     first                   # runs as it was
first:  nop
        nop
        jmp     other
other:  xorb    $0xf6, first            # is changed, and noticed when the second one is
        xorb    $0xf6, second
        jmp     second
second: nop
        nop
        xorb    $0xf6, third            # ahead in the same straight line
third:  nop
        nop
        jmp     more
more:   xorb    $0xf6, third
        xorb    $0xf6, fourth
        call    fourth                  # both at the same place
        call    fourth
        call    own
        xorw    $0x8f9f, edge           # in two pages at once
        xorb    $0x90, edge + 2
        jmp     edge

        .org    round + 4096 - 2
edge:   nop
        nop
        nop
        dec     %ecx
        jnz     again
        mov     $0x15, %al
        out     %al, $0xf4
        hlt
again:  jmp     round

fourth: nop
        nop
        ret

# Copies other bytes over its own beginning, which ran as it was.
own:    .byte   0x0f, 0x1f, 0x44, 0x00, 0x00    # NOP
        mov     $long, %esi
        mov     $short, %eax
        cmp     $50, %ecx
        cmovbe  %eax, %esi
        mov     $own, %edi
        mov     %ecx, %ebx
        mov     $5, %ecx
        rep movsb
        mov     %ebx, %ecx
        ret
long:   .byte   0x0f, 0x1f, 0x44, 0x00, 0x00
short:  .byte   0xeb, 0x03, 0x0f, 0x1f, 0x00

        .bss
        .skip   4096
stack:
