/* Loops that GCC makes vectors of, once for each CPU that it knows: which of them runs is decided by family and model.
   The results depend on none of it, as all is integers or exact in floating point. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>

#define CLONES                                                                                                                 \
    __attribute__((noinline, target_clones("arch=sapphirerapids", "arch=icelake-server", "arch=skylake-avx512", "default")))

enum { N = 1000 };
static int32_t a[N], b[N], c[N];
static uint8_t bytes[N], table[N];
static double x[N], y[N];
static float f[N];
static int64_t wide[N];

CLONES static void mix(void)
{
    for (int i = 0; i < N; i++)
        c[i] = a[i] > b[i] ? a[i] * b[i] : a[i] - (b[i] >> (i & 31));
}

CLONES static int64_t sum(void)
{
    int64_t s = 0;
    for (int i = 0; i < N; i++)
        s += (int64_t)a[i] * b[i];
    return s;
}

CLONES static void lookup(void)
{
    for (int i = 0; i < N; i++)
        c[i] += b[(uint32_t)a[i] % N];
}

CLONES static void scatter(void)
{
    for (int i = 0; i < N; i++)
        if (a[i] & 1)
            wide[(uint32_t)(i * 7) % N] = a[i];
}

CLONES static void convert(void)
{
    for (int i = 0; i < N; i++) {
        y[i] = sqrt((double)((int64_t)a[i] & 0xffff) * ((int64_t)a[i] & 0xffff));
        f[i] = (float)(bytes[i]);
        x[i] = y[i] * 0.5 + f[i];
    }
}

CLONES static unsigned bits(void)
{
    unsigned n = 0;
    for (int i = 0; i < N; i++)
        n += __builtin_popcount(a[i] ^ b[i]);
    return n;
}

CLONES static void saturate(void)
{
    for (int i = 0; i < N; i++) {
        int v = bytes[i] + table[i];
        bytes[i] = v > 255 ? 255 : v;
    }
}

static uint64_t hash(const void *from, size_t len)
{
    const uint8_t *p = from;
    uint64_t h = 0xcbf29ce484222325;
    for (size_t i = 0; i < len; i++)
        h = (h ^ p[i]) * 0x100000001b3;
    return h;
}

int main(void)
{
    uint32_t seed = 12345;
    for (int i = 0; i < N; i++) {
        seed = seed * 1664525 + 1013904223;
        a[i] = (int32_t)seed;
        seed = seed * 1664525 + 1013904223;
        b[i] = (int32_t)seed >> 3;
        bytes[i] = seed >> 24;
        table[i] = seed >> 8;
    }
    int64_t s = 0;
    unsigned n = 0;
    for (int round = 0; round < 300; round++) {
        mix();
        lookup();
        scatter();
        convert();
        saturate();
        s += sum();
        n += bits();
        for (int i = 0; i < N; i++)
            a[i] ^= c[i];
    }
    printf("%016llx %016llx %016llx %016llx %lld %u\n", (unsigned long long)hash(c, sizeof c),
           (unsigned long long)hash(wide, sizeof wide), (unsigned long long)hash(x, sizeof x),
           (unsigned long long)hash(bytes, sizeof bytes), (long long)s, n);
    __builtin_cpu_init();
    printf("part:%s%s%s\n", __builtin_cpu_is("skylake-avx512") ? " skylake-avx512" : "",
           __builtin_cpu_is("icelake-server") ? " icelake-server" : "",
           __builtin_cpu_is("sapphirerapids") ? " sapphirerapids" : "");
    return 0;
}
