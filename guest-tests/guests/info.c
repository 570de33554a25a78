/* Prints what the boot loader handed over, one fact a line. Multiboot Specification 0.6.96, 3.2 "Machine state" and
   3.3 "Boot information format". */
#include <stdint.h>

struct info {
    uint32_t flags, mem_lower, mem_upper, boot_device, cmdline, mods_count, mods_addr, syms[4], mmap_length, mmap_addr;
};
struct module {
    uint32_t start, end, string, reserved;
};
struct range {
    uint32_t size;
    uint64_t base, length;
    uint32_t type;
} __attribute__((packed));

static inline void out8(uint16_t port, uint8_t value) { __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port)); }

static void text(const char *s)
{
    while (*s)
        out8(0x3f8, *s++);
}

static void hex(uint64_t value)
{
    for (int shift = 60; shift >= 0; shift -= 4)
        out8(0x3f8, "0123456789abcdef"[value >> shift & 15]);
}

static void fact(const char *name, uint64_t value)
{
    text(name);
    text(" ");
    hex(value);
    text("\n");
}

/* bss must be zero although nothing in the file says so. */
static volatile uint8_t bss[70000];
extern const uint8_t image_start[], image_end[];

void report(uint32_t magic, const struct info *info, uint32_t cr0, uint32_t flags)
{
    uint32_t dirt = 0;
    for (unsigned i = 0; i < sizeof bss; i++)
        dirt |= bss[i];
    fact("magic", magic);
    fact("bss", dirt);
    fact("cr0.pe", cr0 & 1);
    fact("cr0.pg", cr0 >> 31);
    fact("if", flags >> 9 & 1);
    fact("vm", flags >> 17 & 1);
    if (info->flags & 1) {
        fact("mem_lower", info->mem_lower);
        fact("mem_upper", info->mem_upper);
    }
    if (info->flags & 4) {
        text("cmdline ");
        text((const char *)info->cmdline);
        text("\n");
    }
    uint32_t info_at = (uint32_t)info;
    uint32_t first = (uint32_t)image_start, last = (uint32_t)image_end;
    fact("info.clear", info_at >= 0x1000 && (info_at + sizeof *info <= first || info_at >= last));
    if (info->flags & 8) {
        fact("modules", info->mods_count);
        const struct module *m = (const struct module *)info->mods_addr;
        for (uint32_t i = 0; i < info->mods_count; i++, m++) {
            fact("module.clear", m->start >= 0x1000 && (m->end <= first || m->start >= last));
            fact("module.aligned", (m->start & 0xfff) == 0);
            fact("module.size", m->end - m->start);
            text("module.contents ");
            for (uint32_t at = m->start; at < m->end && at < m->start + 40; at++)
                out8(0x3f8, *(const uint8_t *)at);
            text("\n");
        }
    }
    if (info->flags & 64) {
        uint64_t ram = 0;
        for (uint32_t at = info->mmap_addr; at < info->mmap_addr + info->mmap_length;) {
            const struct range *r = (const struct range *)at;
            if (r->type == 1 && r->base < 0x100000000ull)
                ram += r->length;
            at += r->size + 4;
        }
        fact("mmap.ram.mib", (ram + 0x80000) >> 20);
    }
    out8(0xf4, 0);
    for (;;)
        __asm__ volatile("cli; hlt");
}
