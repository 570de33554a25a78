/* Arithmetic, comparisons and conversions of _Float16: compiled for AVX512_FP16 they are that extension's instructions, compiled for
   plain x86-64 GCC's own functions, by way of single precision (which rounds sums, products, quotients and roots to the same halves).
   A line for each operation: a hash of the results' bits, all NaNs alike. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define COUNT 65536

static uint16_t bits_a[COUNT], bits_b[COUNT], bits_c[COUNT];
static _Float16 a[COUNT], b[COUNT], c[COUNT], out[COUNT];
static float single_in[COUNT], single_out[COUNT];
static double double_in[COUNT], double_out[COUNT];
static int16_t words[COUNT];
static int32_t doublewords[COUNT];
static int64_t quadwords[COUNT];
static uint64_t state = 88172645463325252u;

static uint64_t next(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 0x2545f4914f6cdd1du;
}

/* A half of any kind, or one whose exponent is near that of 1. */
static uint16_t half(void)
{
    uint64_t bits = next();
    return bits >> 60 < 6 ? bits : (bits & 0x83ff) | (10 + (bits >> 32) % 11) << 10;
}

static void hash(const char *name, const void *data, int size, int is_half)
{
    uint64_t sum = 14695981039346656037u;
    const unsigned char *bytes = data;
    for (int i = 0; i < COUNT; i++) {
        uint64_t value = 0;
        memcpy(&value, bytes + i * size, size);
        if (is_half && (value & 0x7fff) > 0x7c00)
            value = 0x7e00;
        sum = (sum ^ value) * 1099511628211u;
    }
    printf("%s %016lx\n", name, sum);
}

#define EACH(name, to, of, is_half) \
    do { \
        for (int i = 0; i < COUNT; i++) \
            to[i] = of; \
        __asm__ volatile("" : : : "memory"); \
        hash(name, to, sizeof to[0], is_half); \
    } while (0)

static int is_finite(uint16_t bits)
{
    return (bits & 0x7c00) != 0x7c00;
}

int main(void)
{
    for (int i = 0; i < COUNT; i++) {
        bits_a[i] = half();
        bits_b[i] = half();
        bits_c[i] = half();
        /* Near a half, in the middle of two, or anything. */
        uint64_t bits = next();
        single_in[i] = (1 + (float)(bits & 0x7ff) / 2048 + (bits >> 62 ? 0 : 0x1p-20f)) * (float)(1 << (bits >> 11 & 15)) / 1024;
        double_in[i] = (1 + (double)(bits >> 20 & 0x7ff) / 2048 + (bits >> 61 & 1 ? 0x1p-40 : 0)) * (double)(1 << (bits >> 40 & 31)) / 0x1p24;
        words[i] = bits;
        doublewords[i] = (int32_t)bits >> (bits >> 32 & 31);
        quadwords[i] = (int64_t)bits >> (bits >> 56 & 63);
    }
    memcpy(a, bits_a, sizeof a);
    memcpy(b, bits_b, sizeof b);
    memcpy(c, bits_c, sizeof c);
    EACH("add", out, a[i] + b[i], 1);
    EACH("subtract", out, a[i] - b[i], 1);
    EACH("multiply", out, a[i] * b[i], 1);
    EACH("divide", out, a[i] / b[i], 1);
    EACH("root", out, (_Float16)__builtin_sqrtf((float)a[i]), 1);
#ifdef __AVX512FP16__
    EACH("fma", out, __builtin_fmaf16(a[i], b[i], c[i]), 1);
#else
    /* Products are exact in double precision, and what their sums lose is too little for a half. */
    EACH("fma", out, (_Float16)__builtin_fma((double)a[i], (double)b[i], (double)c[i]), 1);
#endif
    EACH("less", words, a[i] < b[i], 0);
    EACH("equal", words, a[i] == b[i] || bits_a[i] == bits_b[i], 0);
    EACH("choose", out, a[i] < b[i] ? c[i] : a[i], 1);
    EACH("from words", out, (_Float16)(int16_t)bits_a[i], 1);
    EACH("from unsigned words", out, (_Float16)bits_a[i], 1);
    EACH("from doublewords", out, (_Float16)doublewords[i], 1);
    EACH("from unsigned doublewords", out, (_Float16)(uint32_t)doublewords[i], 1);
    EACH("from quadwords", out, (_Float16)quadwords[i], 1);
    EACH("from unsigned quadwords", out, (_Float16)(uint64_t)quadwords[i], 1);
    EACH("from singles", out, (_Float16)single_in[i], 1);
    EACH("from doubles", out, (_Float16)double_in[i], 1);
    EACH("to singles", single_out, is_finite(bits_a[i]) ? (float)a[i] : 0, 0);
    EACH("to doubles", double_out, is_finite(bits_a[i]) ? (double)a[i] : 0, 0);
    EACH("to doublewords", doublewords, is_finite(bits_a[i]) ? (int32_t)a[i] : 0, 0);
    EACH("to quadwords", quadwords, is_finite(bits_a[i]) ? (int64_t)a[i] : 0, 0);
    EACH("to words", words, a[i] > -32768 && a[i] < 32767 ? (int16_t)a[i] : 0, 0);
    puts("end");
    return 0;
}
