/* A VMM whose guest executes CPUID for ever: what a VM exit and the VM entry after it cost. The command line says how many. The VMM is
   entered at each exit anew, so that it keeps its count in RBP, which neither exits nor entries change.

   With `work` for a number the same work is done at the first level, then by the VMM's guest, and both come to the same. */
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long u64;

static u8 vmxon_region[4096] __attribute__((aligned(4096)));
static u8 vmcs[4096] __attribute__((aligned(4096)));
static u64 guest_stack[512];
static u64 host_stack[512];

static inline void out8(unsigned short port, u8 value) { __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port)); }

void end(u8 status);
void end(u8 status)
{
    out8(0xf4, status);
    for (;;)
        __asm__ volatile("cli; hlt");
}

static u64 rdmsr(u32 msr)
{
    u32 low, high;
    __asm__ volatile("rdmsr" : "=a"(low), "=d"(high) : "c"(msr));
    return (u64)high << 32 | low;
}

static void put(u64 field, u64 value)
{
    u8 failed;
    __asm__ volatile("vmwrite %2, %1; setbe %0" : "=r"(failed) : "r"(field), "r"(value) : "cc");
    if (failed)
        end(1);
}

#define GET_CR(n) ({ u64 value; __asm__ volatile("mov %%cr" #n ", %0" : "=r"(value)); value; })

/* Controls that have to be 1, and `wanted` (SDM Vol. 3D Appendix A.2). */
static void control(u64 field, u32 msr, u32 wanted) { put(field, (u32)rdmsr(msr) | wanted); }

/* What is done on both levels: its code is in a section of its own. */
#define WORK __attribute__((section("work_text"), noinline))
extern const u8 __start_work_text[], __stop_work_text[];

u64 result, events;
static u64 numbers[64];
static struct {
    u64 low, high;
} idt[64] __attribute__((aligned(16)));

void on_int(void), on_ud(void), work_guest(void);
__asm__(".section work_text, \"ax\"\n"
        "on_int: incq events(%rip)\n"
        "        iretq\n"
        "on_ud:  addq $2, (%rsp)\n"
        "        iretq\n"
        ".text\n"
        "work_guest: call work\n"
        "        vmcall\n"
        "2:      jmp 2b\n");

WORK static u64 mix(u64 value) { return value * 6364136223846793005ul + 1442695040888963407ul; }
WORK static u64 turn(u64 value) { return value >> 31 | value << 33; }
WORK static u64 flip(u64 value) { return value & 1 ? ~value : value; }
static u64 (*const steps[])(u64) = {mix, turn, flip};
WORK static u64 depth(u64 n) { return n < 2 ? n : depth(n - 1) + depth(n - 2); }

WORK void work(void)
{
    u64 value = 1;
    events = 0;
    for (u32 n = 0; n < 64; n++)
        numbers[n] = value = steps[value % 3](mix(value));
    for (u32 i = 1; i < 64; i++)
        for (u32 j = i; j && numbers[j - 1] > numbers[j]; j--) {
            u64 other = numbers[j];
            numbers[j] = numbers[j - 1];
            numbers[j - 1] = other;
        }
    for (u32 n = 0; n < 5; n++)
        __asm__ volatile("int $0x30; ud2" : : : "memory");
    result = depth(12) + events;
    for (u32 n = 0; n < 64; n++)
        result = turn(result) ^ numbers[n];
}

static void gate(u32 vector, void (*handler)(void))
{
    u64 at = (u64)handler;
    idt[vector].low = (at & 0xffff) | 8 << 16 | 0x8e00ul << 32 | (at >> 16 & 0xffff) << 48;
    idt[vector].high = at >> 32;
}

static u64 first;

/* The work at the first level; then the VMCS's guest gets what it needs of tables. */
static void work_first(void)
{
    struct __attribute__((packed)) {
        unsigned short limit;
        u64 base;
    } table = {sizeof idt - 1, (u64)idt};
    gate(6, on_ud);
    gate(0x30, on_int);
    __asm__ volatile("lidt %0" : : "m"(table));
    if (&__start_work_text[0] == &__stop_work_text[0])
        end(1);
    work();
    first = result;
    result = 0;
}

void work_done(void);
void work_done(void) { end(events == 5 && result == first ? 0 : 2); }

void on_exit(void);
void guest_code(void);
__asm__(".text\n"
        "on_exit: test %rbp, %rbp\n"
        "        jz work_done\n"
        "        dec %rbp\n"
        "        jz 1f\n"
        "        mov $0x681e, %eax\n" /* Guest RIP: past CPUID. */
        "        vmread %rax, %rcx\n"
        "        add $2, %rcx\n"
        "        vmwrite %rcx, %rax\n"
        "        vmresume\n"
        "        mov $1, %edi\n"
        "        jmp end\n"
        "1:      xor %edi, %edi\n"
        "        jmp end\n"
        "guest_code: cpuid\n"
        "        jmp guest_code\n");

void guest(const char *line)
{
    u64 count = 0, base = (u64)vmxon_region, current = (u64)vmcs;
    u8 failed, works = 0;
    /* The last word: the loader puts the file's name before it. */
    for (; *line; line++) {
        count = *line >= '0' && *line <= '9' ? count * 10 + (u64)(*line - '0') : 0;
        works = line[0] == 'w' && line[1] == 'o' && line[2] == 'r' && line[3] == 'k' && !line[4] ? 1 : works;
    }
    if (!count && !works)
        end(1);
    if (works)
        work_first();
    *(u32 *)vmxon_region = *(u32 *)vmcs = (u32)rdmsr(0x480);
    __asm__ volatile("mov %0, %%cr4" : : "r"(GET_CR(4) | 1 << 13));
    __asm__ volatile("mov %0, %%cr0" : : "r"(GET_CR(0) | 1 << 5));
    __asm__ volatile("vmxon %1; setbe %0" : "=r"(failed) : "m"(base) : "cc");
    if (failed)
        end(1);
    __asm__ volatile("vmclear %1; setbe %0" : "=r"(failed) : "m"(current) : "cc");
    if (failed)
        end(1);
    __asm__ volatile("vmptrld %1; setbe %0" : "=r"(failed) : "m"(current) : "cc");
    if (failed)
        end(1);
    control(0x4000, 0x48d, 0);
    control(0x4002, 0x48e, 0);
    control(0x400c, 0x48f, 1 << 9);  /* Host address-space size. */
    control(0x4012, 0x490, 1 << 9);  /* IA-32e mode guest. */
    put(0x2800, ~0ul);               /* VMCS link pointer. */
    u64 cr0 = GET_CR(0), cr3 = GET_CR(3), cr4 = GET_CR(4);
    put(0x6c00, cr0), put(0x6c02, cr3), put(0x6c04, cr4);
    put(0x6800, cr0), put(0x6802, cr3), put(0x6804, cr4);
    put(0x0c02, 8), put(0x0c04, 16), put(0x0c0c, 24);
    put(0x6c14, (u64)(host_stack + 512)), put(0x6c16, (u64)on_exit);
    put(0x0802, 8), put(0x4816, 0xa09b), put(0x4802, ~0u);
    static const u8 data[] = {0, 4, 6, 8, 10};
    for (u32 n = 0; n < sizeof data; n++)
        put(0x800 + data[n], 16), put(0x4814 + data[n], 0xc093), put(0x4800 + data[n], ~0u);
    put(0x4820, 1 << 16);            /* LDTR is unusable. */
    put(0x4822, 0x8b), put(0x480e, 0x67);
    put(0x681a, 0x400), put(0x6820, 2);
    put(0x681c, (u64)(guest_stack + 512)), put(0x681e, (u64)(works ? work_guest : guest_code));
    if (works) {
        struct __attribute__((packed)) {
            unsigned short limit;
            u64 base;
        } table;
        __asm__ volatile("sgdt %0" : "=m"(table));
        put(0x6816, table.base), put(0x4810, table.limit);
        put(0x6818, (u64)idt), put(0x4812, sizeof idt - 1);
    }
    __asm__ volatile("mov %0, %%rbp; vmlaunch" : : "r"(count) : "memory");
    end(1);
}
