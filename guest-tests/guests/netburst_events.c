/* The first process of a 32-bit Linux guest on a Pentium 4: has Linux's own driver of its counters count a loop and sample one, keeps the
   CPU busy until the lockup watchdog has interrupted it, and prints what came of it, a fact a line. The machine goes off then. */

typedef unsigned int u32;
typedef unsigned long long u64;

enum {
    READ = 3,
    WRITE = 4,
    OPEN = 5,
    MOUNT = 21,
    MKDIR = 39,
    CLOSE = 6,
    IOCTL = 54,
    GETRUSAGE = 77,
    REBOOT = 88,
    MMAP2 = 192,
    PERF_EVENT_OPEN = 336,
};

#define ENABLE 0x2400
#define DISABLE 0x2401
#define ROUNDS 1000000

static int call(int number, int a, int b, int c, int d, int e) {
    __asm__ volatile("int $0x80" : "+a"(number) : "b"(a), "c"(b), "d"(c), "S"(d), "D"(e) : "memory");
    return number;
}

static int call6(int number, int a, int b, int c, int d, int e, int f) {
    /* Pushed first: the operand may be counted from ESP. */
    __asm__ volatile("pushl %[f]\n\tpushl %%ebp\n\tmovl 4(%%esp), %%ebp\n\tint $0x80\n\tpopl %%ebp\n\taddl $4, %%esp"
                     : "+a"(number)
                     : "b"(a), "c"(b), "d"(c), "S"(d), "D"(e), [f] "m"(f)
                     : "memory");
    return number;
}

static void say(const char *text) {
    int len = 0;
    while (text[len])
        len++;
    call(WRITE, 1, (int)text, len, 0, 0);
}

/* A number of 16 hexadecimal digits under a name. */
static void fact(const char *name, u64 value) {
    char line[] = " 0123456789abcdef\n";
    for (int digit = 0; digit < 16; digit++)
        line[1 + digit] = "0123456789abcdef"[(u32)(value >> (60 - 4 * digit)) & 15];
    say(name);
    say(line);
}

/* struct perf_event_attr up to its 64 bytes of the first version. */
struct attr {
    u32 type, size;
    u64 config, period, sample_type, read_format, flags;
    u32 wakeup, bp_type;
    u64 bp_addr;
};

static int event(u32 type, u64 config, u64 period) {
    struct attr attr = {
        .type = type,
        .size = sizeof attr,
        .config = config,
        .period = period,
        /* PERF_SAMPLE_IP */
        .sample_type = period ? 1 : 0,
        /* disabled, exclude_kernel, exclude_hv */
        .flags = 1 | 1 << 5 | 1 << 6,
    };
    /* This process, any CPU, no group. */
    return call(PERF_EVENT_OPEN, (int)&attr, 0, -1, -1, 0);
}

/* How often this process has been switched from: the last two words of struct rusage. */
static u32 switches(void) {
    u32 usage[18];
    call(GETRUSAGE, 0, (int)usage, 0, 0, 0);
    return usage[16] + usage[17];
}

/* Whenever kernels since 6.1 start a counter, as they do after each switch to the process, they set it to what they meant to the last time. So
   the second of two times without a switch is what is told. */
static u64 counted(u32 type, u64 config);
static u64 counted_again(u32 type, u64 config) {
    u64 value = 0;
    for (int tries = 0, calm = 0; tries < 20 && calm < 2; tries++) {
        u32 before = switches();
        value = counted(type, config);
        calm = switches() == before ? calm + 1 : 0;
    }
    return value;
}

/* Counts around MOV, so many DECs and JNZs, MOV, MOV, XOR, MOV, INT: what the counter has, or the error. */
static u64 counted(u32 type, u64 config) {
    int file = event(type, config, 0);
    if (file < 0)
        return (u64)(long long)file;
    u32 rounds = ROUNDS;
    int number = IOCTL;
    __asm__ volatile("int $0x80\n\t"
                     "movl %[rounds], %%ecx\n"
                     "1:\tdecl %%ecx\n\t"
                     "jnz 1b\n\t"
                     "movl %[file], %%ebx\n\t"
                     "movl %[disable], %%ecx\n\t"
                     "xorl %%edx, %%edx\n\t"
                     "movl %[ioctl], %%eax\n\t"
                     "int $0x80"
                     : "+a"(number)
                     : "b"(file), "c"(ENABLE), "d"(0), [rounds] "m"(rounds), [file] "m"(file), [disable] "i"(DISABLE),
                       [ioctl] "i"(IOCTL)
                     : "memory", "cc");
    u64 value = -1;
    call(READ, file, (int)&value, 8, 0, 0);
    return value;
}

/* A loop of DEC and JNZ at addresses that the samples have to be at. */
static __attribute__((noinline)) void spin(u32 rounds) {
    __asm__ volatile(".globl netburst_loop, netburst_loop_end\n"
                     "netburst_loop:\n"
                     "1:\tdecl %0\n\t"
                     "jnz 1b\n"
                     "netburst_loop_end:"
                     : "+r"(rounds)
                     :
                     : "cc");
}

extern char netburst_loop[], netburst_loop_end[];

struct header {
    u32 type;
    unsigned short misc, size;
};

/* Samples instructions with a period while a loop runs; how many samples there are, and how many of them in the loop. */
static void sampled(u64 period, int told) {
    int file = event(0, 1, period);
    /* One page that tells where the records are, and one of records. */
    int map = call6(MMAP2, 0, 8192, 3, 1, file, 0);
    volatile char *page = (volatile char *)map;
    call(IOCTL, file, ENABLE, 0, 0, 0);
    spin(ROUNDS);
    call(IOCTL, file, DISABLE, 0, 0, 0);
    u64 head = *(volatile u64 *)(page + 1024);
    u32 samples = 0, inside = 0, others = 0;
    for (u32 at = 0; at < (u32)head;) {
        const struct header *header = (const struct header *)(map + 4096 + at);
        u64 ip = *(const u64 *)(header + 1);
        if (header->type != 9)
            others++;
        else {
            samples++;
            inside += ip >= (u32)netburst_loop && ip <= (u32)netburst_loop_end;
        }
        if (header->size == 0)
            break;
        at += header->size;
    }
    call(CLOSE, file, 0, 0, 0, 0);
    if (!told)
        return;
    fact("samples", samples);
    fact("samples in the loop", inside);
    fact("other records", others);
}

/* The number behind NMI: in /proc/interrupts, of one CPU. */
static u32 nmis(void) {
    static char text[16384];
    int file = call(OPEN, (int)"/proc/interrupts", 0, 0, 0, 0), len = 0, got;
    while ((got = call(READ, file, (int)text + len, sizeof text - 1 - len, 0, 0)) > 0)
        len += got;
    call(CLOSE, file, 0, 0, 0, 0);
    for (int at = 0; at + 4 < len; at++)
        if (text[at] == 'N' && text[at + 1] == 'M' && text[at + 2] == 'I' && text[at + 3] == ':') {
            u32 value = 0;
            for (at += 4; text[at] == ' '; at++)
                ;
            for (; text[at] >= '0' && text[at] <= '9'; at++)
                value = value * 10 + (u32)(text[at] - '0');
            return value;
        }
    return 0;
}

static void copy(const char *from) {
    static char text[256];
    int file = call(OPEN, (int)from, 0, 0, 0, 0);
    int got = call(READ, file, (int)text, sizeof text, 0, 0);
    say(from);
    say(" ");
    if (got > 0)
        call(WRITE, 1, (int)text, got, 0, 0);
    else
        say("?\n");
}

void start(void) {
    call(MKDIR, (int)"/proc", 0755, 0, 0, 0);
    call(MOUNT, (int)"none", (int)"/proc", (int)"proc", 0, 0);
    copy("/proc/sys/kernel/nmi_watchdog");
    /* PERF_TYPE_HARDWARE: cycles, instructions, branches, branch misses. */
    fact("cycles", counted_again(0, 0));
    fact("instructions", counted_again(0, 1));
    fact("branches", counted_again(0, 4));
    fact("branch-misses", counted_again(0, 5));
    /* PERF_TYPE_HW_CACHE: misses of loads in L1D, which the driver counts by tagging replays. */
    fact("load-misses", counted_again(3, 0x10000));
    /* PERF_TYPE_RAW, with the driver's own numbers: branch_retired (41), MMTP and MMTM; instr_completed (45), which later parts have. */
    fact("taken", counted_again(4, (u64)(41 << 25 | 0xc << 9) << 32));
    fact("completed", counted_again(4, (u64)(45 << 25 | 1 << 9) << 32));
    /* The first time for the counter that samples, too. */
    sampled(100000, 0);
    sampled(100000, 1);
    u32 before = nmis();
    /* Six hundred million instructions. */
    for (int times = 0; times < 300; times++)
        spin(ROUNDS);
    fact("watchdog interrupts", nmis() - before);
    say("all said\n");
    call(REBOOT, (int)0xfee1dead, 672274793, 0x4321fedc, 0, 0);
    for (;;)
        ;
}

__asm__(".globl _start\n_start:\n\tcall start\n");
