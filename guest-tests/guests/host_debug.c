/*
 * Runs programs on the host's CPU under its debug registers, by ptrace, and says what debug exceptions come.
 *
 * A case is a line of words in hexadecimal: 1 to single-step, DR0 to DR3, DR7, the program's bytes. Answers are lines: `at RIP
 * DR6` for a debug exception, `end` with the registers and a hash of memory at the program's INT3, `signal N` for anything
 * else. Where the system refuses breakpoints there is one line, `refused` and why.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#define CODE 0x100000UL
#define DATA 0x200000UL
#define CODE_LEN 0x1000UL
#define DATA_LEN 0x4000UL
#define EVENTS 1000

static void refused(const char *what)
{
    printf("refused %s: %s\n", what, strerror(errno));
    fflush(stdout);
    exit(0);
}

static int set(pid_t child, int number, unsigned long value)
{
    return ptrace(PTRACE_POKEUSER, child, offsetof(struct user, u_debugreg) + 8 * number, value) == 0;
}

static unsigned long get(pid_t child, int number)
{
    return ptrace(PTRACE_PEEKUSER, child, offsetof(struct user, u_debugreg) + 8 * number, 0);
}

static void run(int step, const unsigned long *dr, unsigned long dr7, unsigned char *data)
{
    int status;
    struct user_regs_struct r;
    pid_t child = fork();
    if (child < 0)
        refused("fork");
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, 0, 0) != 0)
            _exit(1);
        raise(SIGSTOP);
        _exit(0);
    }
    if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status))
        refused("PTRACE_TRACEME");
    if (ptrace(PTRACE_GETREGS, child, 0, &r) != 0)
        refused("PTRACE_GETREGS");
    r.rax = 0x1111111111111111; r.rcx = 3; r.rdx = 0x123456789abcdef0; r.rbx = 0x80;
    r.rsi = DATA + 0x20; r.rdi = DATA + 0x40; r.rbp = 0x7fff; r.rsp = DATA + 0x2000;
    r.r8 = DATA; r.r9 = 9; r.r10 = ~0UL; r.r11 = 1; r.r12 = 0; r.r13 = 13; r.r14 = 14; r.r15 = 15;
    r.rip = CODE; r.eflags = 0x202; r.orig_rax = -1;
    if (ptrace(PTRACE_SETREGS, child, 0, &r) != 0)
        refused("PTRACE_SETREGS");
    for (int i = 0; i < 4; i++)
        if (!set(child, i, dr[i]))
            refused("a debug register");
    if (!set(child, 7, dr7))
        refused("DR7");
    for (int i = 0; i < EVENTS; i++) {
        set(child, 6, 0);
        if (ptrace(step ? PTRACE_SINGLESTEP : PTRACE_CONT, child, 0, 0) != 0 || waitpid(child, &status, 0) != child)
            refused("PTRACE_CONT");
        if (!WIFSTOPPED(status)) {
            printf("gone %x\n", status);
            return;
        }
        if (WSTOPSIG(status) != SIGTRAP) {
            printf("signal %d\n", WSTOPSIG(status));
            break;
        }
        ptrace(PTRACE_GETREGS, child, 0, &r);
        unsigned char before = r.rip > CODE && r.rip <= CODE + CODE_LEN ? ((unsigned char *)CODE)[r.rip - 1 - CODE] : 0;
        unsigned long dr6 = get(child, 6) & 0x400f;
        if (dr6 == 0 && before == 0xcc) {
            uint64_t hash = 0xcbf29ce484222325;
            for (unsigned long at = 0; at < DATA_LEN; at++)
                hash = (hash ^ data[at]) * 0x100000001b3;
            printf("end %llx %llx %llx %llx %llx %llx %llx %llx %lx\n", r.rax, r.rcx, r.rdx, r.rbx, r.rsp, r.rbp, r.rsi,
                   r.rdi, (unsigned long)hash);
            break;
        }
        printf("at %llx %lx\n", r.rip, dr6);
    }
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
}

int main(void)
{
    unsigned char *code = mmap((void *)CODE, CODE_LEN, PROT_READ | PROT_WRITE | PROT_EXEC,
                               MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    unsigned char *data =
        mmap((void *)DATA, DATA_LEN, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (code != (void *)CODE || data != (void *)DATA)
        refused("memory at low addresses");
    int step;
    unsigned long dr[4], dr7;
    static char bytes[2 * CODE_LEN + 1];
    while (scanf("%d %lx %lx %lx %lx %lx %8192s", &step, &dr[0], &dr[1], &dr[2], &dr[3], &dr7, bytes) == 7) {
        memset(code, 0xcc, CODE_LEN);
        memset(data, 0, DATA_LEN);
        for (size_t i = 0; bytes[2 * i]; i++) {
            unsigned value;
            sscanf(bytes + 2 * i, "%2x", &value);
            code[i] = value;
        }
        run(step, dr, dr7, data);
        fflush(stdout);
    }
    return 0;
}
