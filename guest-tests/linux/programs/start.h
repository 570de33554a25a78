/* The first instructions of a program without a C library, and what it needs of the kernel. */

__asm__(".globl _start\n"
        ".type _start, @function\n"
        "_start:\n"
        "    xorl %ebp, %ebp\n"
        "    movq (%rsp), %rdi\n"
        "    leaq 8(%rsp), %rsi\n"
        "    andq $-16, %rsp\n"
        "    call main\n"
        "    movl %eax, %edi\n"
        "    movl $231, %eax\n" /* exit_group */
        "    syscall\n"
        ".size _start, . - _start\n");

int main(int argc, char **argv);

#define NOINLINE __attribute__((noinline))

/* A decimal number, or 0 where there is no such argument. */
static inline unsigned long argument(int argc, char **argv, int at) {
    unsigned long value = 0;
    if (at < argc)
        for (const char *digit = argv[at]; *digit >= '0' && *digit <= '9'; digit++)
            value = value * 10 + (unsigned long)(*digit - '0');
    return value;
}
