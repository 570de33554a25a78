/* while (1) i++; */
    .text
    .globl _start
    .type _start, @function
_start:
    incq %rax
    .globl jump
jump:
    jmp _start
    .size _start, . - _start
