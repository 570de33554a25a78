/* A first process of Linux that dies, and the kernel with it: a loop runs over the end of an array, into a pointer. */
struct record {
    long values[4];
    long *last;
};

struct record record;

__attribute__((noinline)) static void fill(struct record *to, long count)
{
    long *at = to->values;
    for (long i = 0; i < count; i++)
        at[i] = 0x1000 + i;
}

__attribute__((noinline)) static void work(long count)
{
    fill(&record, count);
    *record.last = 1;
}

static void say(const char *text, long len)
{
    long result = 1;
    __asm__ volatile("syscall" : "+a"(result) : "D"(1), "S"(text), "d"(len) : "rcx", "r11", "memory");
}

void _start(void)
{
    record.last = &record.values[3];
    work(4);
    say("crash: all is well\n", 19);
    work(5);
    for (;;)
        ;
}
