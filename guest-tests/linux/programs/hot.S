/* Four fifths of the instructions are in `hot`, one fifth in `cold`: 100 rounds of 8,000 and 2,000, and 4 around them. Each
   function's two are a decrement and a jump, taken but for the last. */
    .text
    .globl _start
    .type _start, @function
_start:
    movl $100, %ebx
1:  call hot
    call cold
    decl %ebx
    jnz 1b
    movl $60, %eax          /* exit */
    xorl %edi, %edi
    syscall
    .size _start, . - _start

    .type hot, @function
hot:
    movl $3999, %ecx
2:  decl %ecx
    jnz 2b
    ret
    .size hot, . - hot

    .type cold, @function
cold:
    movl $999, %ecx
3:  decl %ecx
    jnz 3b
    ret
    .size cold, . - cold
