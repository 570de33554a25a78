/* Calls of two threads that take turns, of a forked child, and of a signal's handler: who called what is known beforehand. */

#include "start.h"

#define TURNS 50
#define SIGUSR1 10
#define SA_RESTORER 0x04000000
/* CLONE_VM, FS, FILES, SIGHAND, THREAD, SYSVSEM */
#define THREAD 0x50f00UL

struct action {
    void (*handler)(int);
    unsigned long flags;
    void (*restorer)(void);
    unsigned long mask;
};

static inline long call(long number, long a, long b, long c, long d) {
    register long r10 __asm__("r10") = d;
    __asm__ volatile("syscall" : "+a"(number) : "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return number;
}

/* A thread that runs a function on a stack of its own, and ends. */
long spawn(unsigned long flags, void *stack, void (*run)(void));
__asm__(".globl spawn\n"
        ".type spawn, @function\n"
        "spawn:\n"
        "    movq %rdx, %r12\n"
        "    movl $56, %eax\n" /* clone */
        "    xorl %edx, %edx\n"
        "    xorl %r10d, %r10d\n"
        "    syscall\n"
        "    testq %rax, %rax\n"
        "    jnz 1f\n"
        "    xorl %ebp, %ebp\n"
        "    call *%r12\n"
        "    xorl %edi, %edi\n"
        "    movl $60, %eax\n" /* exit */
        "    syscall\n"
        "1:  ret\n"
        ".size spawn, . - spawn\n");

void restorer(void);
__asm__(".globl restorer\n"
        ".type restorer, @function\n"
        "restorer:\n"
        "    movl $15, %eax\n" /* rt_sigreturn */
        "    syscall\n"
        ".size restorer, . - restorer\n");

static volatile unsigned long sink;
static volatile int turn, done, caught;

static void spin(int turns) {
    for (int i = 0; i < turns; i++)
        sink += (unsigned long)i;
}

NOINLINE static void leaf_of_main(void) {
    spin(200);
}

NOINLINE static void leaf_of_thread(void) {
    spin(200);
}

NOINLINE static void leaf_of_child(void) {
    spin(200);
}

NOINLINE static void leaf_of_handler(void) {
    spin(200);
}

NOINLINE static void yield(void) {
    call(24, 0, 0, 0, 0); /* sched_yield */
}

NOINLINE static void thread(void) {
    for (int i = 0; i < TURNS; i++) {
        while (turn != 1)
            yield();
        leaf_of_thread();
        turn = 0;
    }
    done = 1;
}

NOINLINE static void main_turns(void) {
    for (int i = 0; i < TURNS; i++) {
        while (turn != 0)
            yield();
        leaf_of_main();
        turn = 1;
    }
    while (!done)
        yield();
}

NOINLINE static void handler(int signal) {
    (void)signal;
    leaf_of_handler();
    caught++;
}

NOINLINE static void raise_signal(void) {
    call(62, call(39, 0, 0, 0, 0), SIGUSR1, 0, 0); /* kill(getpid(), SIGUSR1) */
    leaf_of_main();
}

NOINLINE static long child_runs(void) {
    long pid = call(57, 0, 0, 0, 0); /* fork */
    if (pid == 0) {
        leaf_of_child();
        call(231, 0, 0, 0, 0); /* exit_group */
    }
    return call(61, pid, 0, 0, 0); /* wait4 */
}

static unsigned char stack[1 << 16] __attribute__((aligned(16)));

int main(int argc, char **argv) {
    (void)argc;
    (void)argv;
    struct action action = {handler, SA_RESTORER, restorer, 0};
    call(13, SIGUSR1, (long)&action, 0, 8); /* rt_sigaction */
    raise_signal();
    if (child_runs() <= 0)
        return 1;
    if (spawn(THREAD, stack + sizeof stack, thread) <= 0)
        return 2;
    main_turns();
    return caught == 1 ? 0 : 3;
}
