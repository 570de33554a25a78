/* storm ROUNDS: maps memory, touches every page of it, changes its protection and unmaps it, ROUNDS times over. */

#include "start.h"

#define PAGE 4096UL
#define PAGES 16UL

static long call(long number, long a, long b, long c, long d) {
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = -1;
    register long r9 __asm__("r9") = 0;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    return result;
}

int main(int argc, char **argv) {
    unsigned long rounds = argument(argc, argv, 1);
    for (unsigned long round = 0; round < rounds; round++) {
        /* mmap: readable and writable, private and anonymous. */
        long at = call(9, 0, PAGES * PAGE, 3, 0x22);
        if (at < 0)
            return 1;
        volatile unsigned char *pages = (unsigned char *)at;
        for (unsigned long page = 0; page < PAGES; page++)
            pages[page * PAGE] = (unsigned char)(page + round);
        /* mprotect: readable; munmap. */
        if (call(10, at, PAGES * PAGE, 1, 0) != 0)
            return 1;
        for (unsigned long page = 0; page < PAGES; page++)
            if (pages[page * PAGE] != (unsigned char)(page + round))
                return 1;
        if (call(11, at, PAGES * PAGE, 0, 0) != 0)
            return 1;
    }
    return 0;
}
