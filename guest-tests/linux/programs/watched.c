/* For a debugger: a variable that is written three times and read in between, and a function that is called three times. */

#include "start.h"

volatile long watched = 7;
volatile char bytes[8];
volatile long copy;

NOINLINE static void write_it(long value) {
    watched = value;
}

NOINLINE static void read_it(void) {
    copy = watched;
}

int main(int argc, char **argv) {
    (void)argc, (void)argv;
    for (long i = 1; i <= 3; i++) {
        write_it(i * 100);
        read_it();
        bytes[i] = (char)i;
    }
    return 0;
}
