/* The first process of a Linux guest: writes code, runs it, writes other code in its place and runs that, in the ways that just-in-time
   compilers have; then it has the kernel do so, with socket filters, which Linux compiles. Each piece of code has numbers of its own
   in it and checks its own sum. Ports say where the part to look at begins and ends; then the machine goes off. */

#include "../linux/programs/start.h"

enum {
    WRITE = 1,
    MMAP = 9,
    MPROTECT = 10,
    MUNMAP = 11,
    SENDTO = 44,
    RECVFROM = 45,
    SOCKETPAIR = 53,
    SETSOCKOPT = 54,
    FTRUNCATE = 77,
    REBOOT = 169,
    IOPL = 172,
    MEMFD_CREATE = 319,
};

#define READ_ 1
#define WRITE_ 2
#define EXEC_ 4
#define SHARED 0x01
#define PRIVATE_ANONYMOUS 0x22
#define FIXED 0x10
#define PAGE 4096UL
#define ROUNDS 40

/* Where each way has its code. */
#define TURNS 0x10000000UL
#define BOTH 0x20000000UL
#define VIEWS 0x30000000UL
#define ANEW 0x40000000UL
/* What a filter looks for, and its round. */
#define WANTED 0x5eed0000U

static long call(long number, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "+a"(number)
                     : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return number;
}

static void out(unsigned char value) {
    __asm__ volatile("outb %0, %1" : : "a"(value), "d"((unsigned short)0x5e0));
}

static void say(const char *text) {
    long len = 0;
    while (text[len])
        len++;
    call(WRITE, 1, (long)text, len, 0, 0, 0);
}

static void off(void) {
    call(REBOOT, 0xfee1dead, 672274793, 0x4321fedc, 0, 0, 0);
    for (;;)
        ;
}

static void must(int holds, const char *what) {
    if (!holds) {
        say("jit: FAILED: ");
        say(what);
        say("\n");
        off();
    }
}

static unsigned char *map(unsigned long at, int protection, int flags, long file) {
    long got = call(MMAP, (long)at, PAGE, protection, flags | FIXED, file, 0);
    must(got == (long)at, "mmap");
    return (unsigned char *)at;
}

static unsigned char *number(unsigned char *to, unsigned value) {
    for (int n = 0; n < 4; n++)
        *to++ = (unsigned char)(value >> 8 * n);
    return to;
}

/* Code that adds up some numbers, one to five by the round, and falls upon UD2 where they are not what they were. Gives the sum. */
static unsigned emit(unsigned char *to, unsigned round) {
    unsigned sum = 0;
    *to++ = 0x31; /* xor eax, eax */
    *to++ = 0xc0;
    for (unsigned n = 0; n <= round % 5; n++) {
        *to++ = 0x05; /* add eax, number */
        to = number(to, round * 1000 + n);
        sum += round * 1000 + n;
    }
    *to++ = 0x3d; /* cmp eax, sum */
    to = number(to, sum);
    *to++ = 0x75; /* jne to the UD2 */
    *to++ = 0x01;
    *to++ = 0xc3;
    *to++ = 0x0f;
    *to++ = 0x0b;
    return sum;
}

typedef unsigned (*function)(void);

static void run(const volatile unsigned char *code, unsigned sum) {
    must(((function)(unsigned long)code)() == sum, "the sum");
}

/* Writable, then executable, in turns. */
static void turns(void) {
    unsigned char *code = map(TURNS, READ_ | WRITE_, PRIVATE_ANONYMOUS, -1);
    for (unsigned round = 0; round < ROUNDS; round++) {
        unsigned sum = emit(code, round);
        must(call(MPROTECT, TURNS, PAGE, READ_ | EXEC_, 0, 0, 0) == 0, "mprotect");
        run(code, sum);
        run(code, sum);
        must(call(MPROTECT, TURNS, PAGE, READ_ | WRITE_, 0, 0, 0) == 0, "mprotect");
    }
}

/* Writable and executable at once: nothing but stores between one code and the next. */
static void both(void) {
    unsigned char *code = map(BOTH, READ_ | WRITE_ | EXEC_, PRIVATE_ANONYMOUS, -1);
    for (unsigned round = 0; round < ROUNDS; round++)
        run(code, emit(code, round));
}

/* Written through one address and executed at another. */
static void views(void) {
    long file = call(MEMFD_CREATE, (long)"code", 0, 0, 0, 0, 0);
    must(file >= 0 && call(FTRUNCATE, file, PAGE, 0, 0, 0, 0) == 0, "memfd_create");
    unsigned char *written = map(VIEWS + PAGE, READ_ | WRITE_, SHARED, file);
    unsigned char *executed = map(VIEWS, READ_ | EXEC_, SHARED, file);
    for (unsigned round = 0; round < ROUNDS; round++)
        run(executed, emit(written, round));
}

/* Another page at the same address. */
static void anew(void) {
    for (unsigned round = 0; round < ROUNDS; round++) {
        unsigned char *code = map(ANEW, READ_ | WRITE_ | EXEC_, PRIVATE_ANONYMOUS, -1);
        run(code, emit(code, round));
        must(call(MUNMAP, ANEW, PAGE, 0, 0, 0, 0) == 0, "munmap");
    }
}

struct instruction {
    unsigned short code;
    unsigned char yes, no;
    unsigned value;
};

/* A socket lets through what begins with one number, another in each round. */
static void filters(void) {
    int ends[2];
    must(call(SOCKETPAIR, 1, 2, 0, (long)ends, 0, 0) == 0, "socketpair");
    for (unsigned round = 0; round < ROUNDS; round++) {
        struct instruction code[] = {
            {0x20, 0, 0, 0},              /* ld [0] */
            {0x15, 0, 1, WANTED + round}, /* jeq */
            {0x06, 0, 0, 0xffff},         /* ret, all of it */
            {0x06, 0, 0, 0},              /* ret, nothing */
        };
        struct {
            unsigned short count;
            struct instruction *code;
        } program = {4, code};
        must(call(SETSOCKOPT, ends[1], 1, 26, (long)&program, sizeof program, 0) == 0, "SO_ATTACH_FILTER");
        for (unsigned wrong = 0; wrong < 2; wrong++) {
            unsigned char text[4], got[4];
            unsigned value = WANTED + round + wrong;
            for (int n = 0; n < 4; n++)
                text[n] = (unsigned char)(value >> 8 * (3 - n)); /* in the network's order */
            must(call(SENDTO, ends[0], (long)text, 4, 0, 0, 0) == 4, "sendto");
            long length = call(RECVFROM, ends[1], (long)got, 4, 0x40, 0, 0); /* MSG_DONTWAIT */
            must(length == (wrong ? -11 : 4), "what comes through");
        }
    }
}

int main(int argc, char **argv) {
    (void)argc, (void)argv;
    must(call(IOPL, 3, 0, 0, 0, 0, 0) == 0, "iopl");
    out(1);
    turns();
    both();
    views();
    anew();
    filters();
    out(2);
    say("jit: all holds\n");
    off();
    return 0;
}
