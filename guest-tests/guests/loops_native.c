/* The loops as a program of the host. */
#include "loops.h"
#include <stdio.h>

static u8 heap[HEAP_BYTES] __attribute__((aligned(4096)));

static void say(const char *s)
{
    fputs(s, stdout);
    fflush(stdout);
}

int main(int count, char **words)
{
    static char line[200];
    if (count != 3)
        return 2;
    snprintf(line, sizeof line, "loops %s %s", words[1], words[2]);
    loops(line, heap, say);
    return 0;
}
