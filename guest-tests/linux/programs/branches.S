/* A walk whose every instruction can be counted by hand. Ten rounds: five numbers are even, five odd.

   `_start` 1 + 10 * 4 + 3, `work` for an even number 2 (it jumps to `even`, which returns for it), for an odd one 4,
   `even` 2, `odd` 3: 44 + 5 * 2 + 5 * 2 + 5 * 4 + 5 * 3 = 99 instructions.
   Branches: 10 calls of `work`, 5 of `odd`, 15 returns, 10 times JZ and JNZ each, one SYSCALL: 51. Taken: all but 5 JZ and 1 JNZ, 45. */
    .text
    .globl _start
    .type _start, @function
_start:
    movl $10, %ebx
1:  movl %ebx, %edi
    call work
    decl %ebx
    jnz 1b
    movl $60, %eax          /* exit */
    xorl %edi, %edi
    syscall
    .size _start, . - _start

    .type work, @function
work:
    testl $1, %edi
    jz even
    call odd
    ret
    .size work, . - work

    .type even, @function
even:
    nop
    ret
    .size even, . - even

    .type odd, @function
odd:
    nop
    nop
    ret
    .size odd, . - odd
