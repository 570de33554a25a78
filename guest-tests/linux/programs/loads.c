/* loads KIB ROUNDS [forever]: reads one byte of each line of KIB kibibytes, ROUNDS times over; with a third argument for ever.
   The bytes are written first, so that each page is one of its own. Up to 64 KiB are in the program's file, where debuggers
   and perf find a name for them. */

#include "start.h"

#define LIMIT (256UL << 20)
#define LINE 64

static unsigned char buffer[LIMIT];
static unsigned char table[64 << 10] = {1};

NOINLINE static unsigned long walk(volatile unsigned char *from, unsigned long size) {
    unsigned long sum = 0;
    for (unsigned long at = 0; at < size; at += LINE)
        sum += from[at];
    return sum;
}

int main(int argc, char **argv) {
    unsigned long size = argument(argc, argv, 1) << 10, rounds = argument(argc, argv, 2), sum = 0;
    if (size == 0 || size > LIMIT)
        return 2;
    unsigned char *from = size <= sizeof table ? table : buffer;
    for (unsigned long at = 0; at < size; at += LINE)
        from[at] = 1;
    do
        for (unsigned long round = 0; round < rounds; round++)
            sum += walk(from, size);
    while (argc > 3);
    return sum == size / LINE * rounds ? 0 : 1;
}
