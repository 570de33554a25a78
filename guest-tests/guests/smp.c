/* Several CPUs talk through interrupts: every mode and destination that ICR has. Prints one fact a line: whom a message
   reached, as a bitmap of CPUs. SDM Vol. 3A 11.6 "Issuing Interprocessor Interrupts", 11.12 "Extended XAPIC (x2APIC)".

   The command line is the number of CPUs. The logical modes want at least 3 of them; more than 8 are only counted. */
#include <stdint.h>

enum { MOST = 256, VECTOR = 0x40, SWITCH = 0x41, LOGIC = 0x42, PAGE = 0x8000 };
enum { ID = 0x02, TPR = 0x08, EOI = 0x0b, LDR = 0x0d, DFR = 0x0e, SVR = 0x0f, ICR = 0x30, ICR_HIGH = 0x31, SELF = 0x3f };

struct frame;
extern const uint8_t trampoline[], trampoline_end[];
extern volatile uint32_t starts;

static volatile uint32_t fixed[MOST], nmis[MOST], ready[MOST], switched, x2apic, cpus;
static volatile uint32_t locked, turn, turns, steps_back;
static volatile uint64_t latest;
static uint64_t idt[256];

static inline void out8(uint16_t port, uint8_t value) { __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port)); }
static inline void relax(void) { __asm__ volatile("pause" : : : "memory"); }

static inline uint64_t rdmsr(uint32_t msr)
{
    uint64_t value;
    __asm__ volatile("rdmsr" : "=A"(value) : "c"(msr));
    return value;
}

static inline void wrmsr(uint32_t msr, uint64_t value) { __asm__ volatile("wrmsr" : : "A"(value), "c"(msr) : "memory"); }

static inline uint64_t rdtsc(void)
{
    uint64_t value;
    __asm__ volatile("rdtsc" : "=A"(value) : : "memory");
    return value;
}

static inline uint32_t cpuid(uint32_t leaf, uint32_t *ebx)
{
    uint32_t eax = leaf, ecx = 0, edx;
    __asm__ volatile("cpuid" : "+a"(eax), "=b"(*ebx), "+c"(ecx), "=d"(edx));
    return ecx;
}

static void text(const char *s)
{
    while (*s)
        out8(0x3f8, *s++);
}

static void fact(const char *name, uint32_t value)
{
    text(name);
    text(" ");
    for (int shift = 28; shift >= 0; shift -= 4)
        out8(0x3f8, "0123456789abcdef"[value >> shift & 15]);
    text("\n");
}

/* A register, as memory or as an MSR. */
static void apic_write(uint32_t reg, uint32_t value)
{
    if (x2apic)
        wrmsr(0x800 + reg, value);
    else
        *(volatile uint32_t *)(0xfee00000 + 16 * reg) = value;
}

/* x2apic is one for all: while a CPU changes over, its own mode is in IA32_APIC_BASE. */
static uint32_t self(void)
{
    if (rdmsr(0x1b) & 0x400)
        return (uint32_t)rdmsr(0x802);
    return *(volatile uint32_t *)0xfee00020 >> 24;
}

static void end_of_interrupt(void)
{
    if (rdmsr(0x1b) & 0x400)
        wrmsr(0x80b, 0);
    else
        *(volatile uint32_t *)0xfee000b0 = 0;
}

__attribute__((interrupt)) static void on_fixed(struct frame *frame)
{
    (void)frame;
    fixed[self()]++;
    end_of_interrupt();
}

__attribute__((interrupt)) static void on_nmi(struct frame *frame)
{
    (void)frame;
    nmis[self()]++;
}

__attribute__((interrupt)) static void on_switch(struct frame *frame)
{
    (void)frame;
    wrmsr(0x1b, rdmsr(0x1b) | 0x400);
    end_of_interrupt();
    __sync_fetch_and_add(&switched, 1);
}

static void gate(int vector, void (*handler)(struct frame *))
{
    uint32_t at = (uint32_t)handler;
    idt[vector] = (uint64_t)(at & 0xffff0000) << 32 | 0x8e00ull << 32 | 8u << 16 | (at & 0xffff);
}

static void wait(void)
{
    for (int i = 0; i < 2000; i++)
        relax();
}

/* Adds one to a number that all add to, and hands the turn on with a look at the clock. */
static void work(uint32_t cpu)
{
    for (int i = 0; i < 5000; i++)
        __sync_fetch_and_add(&locked, 1);
    for (int i = 0; i < 20; i++) {
        while (turn != cpu)
            relax();
        uint64_t now = rdtsc();
        steps_back += now <= latest;
        latest = now;
        turns++;
        turn = cpu + 1 == cpus ? 0 : cpu + 1;
    }
}

static void start_apic(void)
{
    struct { uint16_t limit; uint32_t base; } __attribute__((packed)) idtr = { sizeof idt - 1, (uint32_t)idt };
    __asm__ volatile("lidt %0" : : "m"(idtr));
    apic_write(SVR, 0x1ff);
}

void other_cpu(void)
{
    start_apic();
    uint32_t cpu = self();
    apic_write(TPR, cpu == 2 ? 0 : 0x20);
    uint32_t again = ready[cpu]++;
    if (!again)
        work(cpu);
    ready[cpu] |= 0x100;
    for (;;)
        __asm__ volatile("sti; hlt");
}

static void send(uint32_t destination, uint32_t low)
{
    if (x2apic) {
        wrmsr(0x830, (uint64_t)destination << 32 | low);
    } else {
        apic_write(ICR_HIGH, destination << 24);
        apic_write(ICR, low);
    }
}

/* Who has got something since the last time. */
static uint32_t whom(volatile uint32_t *counts)
{
    uint32_t map = 0;
    wait();
    for (uint32_t cpu = 0; cpu < 32 && cpu < cpus; cpu++) {
        map |= (counts[cpu] != 0) << cpu;
        counts[cpu] = 0;
    }
    return map;
}

static void reaches(const char *name, uint32_t destination, uint32_t low)
{
    send(destination, low);
    fact(name, whom((low & 0x700) == 0x400 ? nmis : fixed));
}

enum { LOWEST = 0x100, NMI = 0x400, INIT = 0x500, START = 0x600, LOGICAL = 0x800, ASSERT = 0x4000, TO_SELF = 0x40000, ALL = 0x80000, OTHERS = 0xc0000 };

static void xapic(void)
{
    reaches("xapic.physical", 1, ASSERT | VECTOR);
    reaches("xapic.physical.self", 0, ASSERT | VECTOR);
    reaches("xapic.physical.nobody", 0x77, ASSERT | VECTOR);
    reaches("xapic.physical.broadcast", 0xff, ASSERT | VECTOR);
    reaches("xapic.shorthand.self", 0, TO_SELF | ASSERT | VECTOR);
    reaches("xapic.shorthand.all", 0, ALL | ASSERT | VECTOR);
    reaches("xapic.shorthand.others", 0, OTHERS | ASSERT | VECTOR);
    reaches("xapic.nmi", 2, NMI | ASSERT);
    reaches("xapic.nmi.others", 0, OTHERS | NMI | ASSERT);
}

/* A CPU's LDR is its own to write, so each starts with the one for both models that is here: see set_logical. */
static void logical(void)
{
    reaches("xapic.flat.one", 1 << 1, LOGICAL | ASSERT | VECTOR);
    reaches("xapic.flat.two", 1 << 1 | 1 << 2, LOGICAL | ASSERT | VECTOR);
    reaches("xapic.flat.all", 0xff, LOGICAL | ASSERT | VECTOR);
    reaches("xapic.flat.nobody", 1 << 7, LOGICAL | ASSERT | VECTOR);
    reaches("xapic.flat.nmi", 1 << 2, LOGICAL | NMI | ASSERT);
    /* CPU 2's priority is 0, the others' is 2. */
    reaches("xapic.lowest", 0xff, LOGICAL | LOWEST | ASSERT | VECTOR);
    reaches("xapic.lowest.physical", 1, LOWEST | ASSERT | VECTOR);
}

static void cluster(void)
{
    reaches("xapic.cluster.first", 0x03, LOGICAL | ASSERT | VECTOR);
    reaches("xapic.cluster.member", 0x02, LOGICAL | ASSERT | VECTOR);
    reaches("xapic.cluster.second", 0x11, LOGICAL | ASSERT | VECTOR);
    reaches("xapic.cluster.all", 0xff, LOGICAL | ASSERT | VECTOR);
}

static volatile uint32_t model, answered;

__attribute__((interrupt)) static void on_logical(struct frame *frame)
{
    (void)frame;
    uint32_t cpu = self();
    apic_write(DFR, model == 1 ? 0x0fffffff : 0xffffffff);
    apic_write(LDR, (model == 1 ? (cpu >> 1) << 4 | 1 << (cpu & 1) : 1u << cpu) << 24);
    end_of_interrupt();
    __sync_fetch_and_add(&answered, 1);
}

static void set_logical(uint32_t to)
{
    model = to;
    answered = 0;
    send(0, ALL | ASSERT | LOGIC);
    while (answered != cpus)
        relax();
}

static void restart(void)
{
    send(1, INIT | ASSERT | 0x8000);
    wait();
    reaches("init.deaf", 1, ASSERT | VECTOR);
    send(1, START | ASSERT | PAGE >> 12);
    while (ready[1] != 0x102)
        relax();
    wait();
    reaches("init.started", 1, ASSERT | VECTOR);
    uint32_t before = starts;
    send(1, START | ASSERT | PAGE >> 12);
    wait();
    fact("start.running", starts - before);
}

static void x2(void)
{
    send(0, ALL | ASSERT | SWITCH);
    while (switched != cpus)
        relax();
    x2apic = 1;
    reaches("x2apic.physical", 1, ASSERT | VECTOR);
    reaches("x2apic.physical.broadcast", 0xffffffff, ASSERT | VECTOR);
    reaches("x2apic.physical.nobody", 0x10001, ASSERT | VECTOR);
    reaches("x2apic.logical.one", 1 << 1, LOGICAL | ASSERT | VECTOR);
    reaches("x2apic.logical.two", 1 << 1 | 1 << 2, LOGICAL | ASSERT | VECTOR);
    reaches("x2apic.logical.nobody", 1 << 16 | 1, LOGICAL | ASSERT | VECTOR);
    reaches("x2apic.shorthand.self", 0, TO_SELF | ASSERT | VECTOR);
    reaches("x2apic.shorthand.all", 0, ALL | ASSERT | VECTOR);
    reaches("x2apic.shorthand.others", 0, OTHERS | ASSERT | VECTOR);
    reaches("x2apic.nmi", 2, NMI | ASSERT);
    wrmsr(0x800 + SELF, VECTOR);
    fact("x2apic.self", whom(fixed));
}

void boot_cpu(const char *cmdline)
{
    /* QEMU puts the file's name first, as we do. */
    for (const char *s = cmdline; *s; s++)
        if (*s == ' ')
            cpus = 0;
        else
            cpus = *s >= '0' && *s <= '9' ? cpus * 10 + *s - '0' : 0;

    /* Nothing from the 8259s. */
    out8(0x21, 0xff);
    out8(0xa1, 0xff);
    gate(2, on_nmi);
    gate(VECTOR, on_fixed);
    gate(SWITCH, on_switch);
    gate(LOGIC, on_logical);
    start_apic();
    apic_write(TPR, 0x20);
    for (uint32_t i = 0; i < (uint32_t)(trampoline_end - trampoline); i++)
        ((volatile uint8_t *)PAGE)[i] = trampoline[i];

    uint32_t ebx, features = cpuid(1, &ebx);
    fact("boot", (uint32_t)rdmsr(0x1b) >> 8 & 1);
    fact("id", ebx >> 24);
    send(0, OTHERS | INIT | ASSERT);
    send(0, OTHERS | START | ASSERT | PAGE >> 12);
    for (uint32_t cpu = 1; cpu < cpus; cpu++)
        while (!ready[cpu])
            relax();
    work(0);
    for (uint32_t cpu = 1; cpu < cpus; cpu++)
        while (!(ready[cpu] & 0x100))
            relax();
    wait();
    fact("starts", starts);
    fact("locked", locked);
    fact("turns", turns);
    fact("tsc.back", steps_back);
    __asm__ volatile("sti");
    if (cpus <= 8) {
        xapic();
        set_logical(0);
        logical();
        set_logical(1);
        cluster();
        restart();
        if (features >> 21 & 1)
            x2();
    } else {
        send(0, OTHERS | ASSERT | VECTOR);
        wait();
        uint32_t count = 0;
        for (uint32_t cpu = 0; cpu < cpus; cpu++)
            count += fixed[cpu];
        fact("others", count);
    }
    out8(0xf4, 0);
    for (;;)
        __asm__ volatile("cli; hlt");
}
