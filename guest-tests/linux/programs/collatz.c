/* Halves a number that is even, triples and increments one that is odd, until it is 1. The step is called through a table, so
   that there are indirect branches to trace, too. Without an argument: 6 3 10 5 16 8 4 2 1. */

#include "start.h"

NOINLINE static long even(long n) {
    return n / 2;
}

NOINLINE static long odd(long n) {
    return 3 * n + 1;
}

static long (*const step[2])(long) = {even, odd};

NOINLINE static int steps(long n) {
    int count = 0;
    while (n != 1) {
        n = step[n & 1](n);
        count++;
    }
    return count;
}

/* How many steps it took, for a debugger to look at: as the exit status it would be a failure. */
static volatile int taken;

int main(int argc, char **argv) {
    long n = (long)argument(argc, argv, 1);
    taken = steps(n > 0 ? n : 6);
    return 0;
}
