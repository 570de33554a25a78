/* Three values into the trace. */
    .text
    .globl _start
    .type _start, @function
_start:
    movl $1, %eax
    ptwritel %eax
    movl $42, %ecx
    ptwriteq %rcx
    movabsq $0x0123456789abcdef, %rdx
    ptwriteq %rdx
    movl $60, %eax          /* exit */
    xorl %edi, %edi
    syscall
    .size _start, . - _start
