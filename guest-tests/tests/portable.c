/* Loops over vectors of integers, singles, doubles and half-precision numbers, NaNs and denormals among them, and the intrinsics of
   AES, SHA, PCLMULQDQ and the string compares. What they come to is printed as sums of their bits. */
#include <fenv.h>
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { N = 256 };
static float f[N], g[N], h[N];
static double x[N], y[N], z[N];
static int32_t a[N], b[N], c[N];
static uint16_t half[N];
static uint8_t bytes[N * 4];

static uint64_t state = 1;

static uint64_t next(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state ^ state >> 29;
}

static void fill(void)
{
    for (int i = 0; i < N; i++) {
        uint32_t single = (uint32_t)next();
        uint64_t wide = next();
        /* One in eight is anything, the others are near one or below the least normal number. */
        if (i & 7) {
            single = (single & 0x807fffffu) | (i & 1 ? 0x3f000000u : 0);
            wide = (wide & 0x800fffffffffffffu) | (i & 1 ? 0x3fe0000000000000u : 0);
        }
        memcpy(&f[i], &single, 4);
        memcpy(&x[i], &wide, 8);
        g[i] = f[(i * 7) & 255];
        y[i] = x[(i * 5) & 255];
        a[i] = (int32_t)next();
        b[i] = (int32_t)next() >> (i & 31);
    }
    for (int i = 0; i < 4 * N; i++)
        bytes[i] = (uint8_t)(next() >> 40);
}

static uint64_t sum(const void *at, size_t bytes)
{
    const uint8_t *p = at;
    uint64_t s = 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes; i++)
        s = (s ^ p[i]) * 0x100000001b3u;
    return s;
}

static void arithmetic(unsigned round)
{
    for (int i = 0; i < N; i++) {
        h[i] = f[i] * g[i] + f[(i + 1) & 255];
        h[i] = h[i] / (g[i] - 0.75f) + sqrtf(fabsf(f[i]));
        z[i] = x[i] * y[i] - x[(i + 3) & 255] / (y[i] + 0.3);
        z[i] += sqrt(fabs(x[i])) + (double)f[i];
        c[i] = a[i] * b[i] + (a[i] > b[i] ? a[i] >> 3 : b[i] << 2);
    }
    printf("%u: %016lx %016lx %016lx\n", round, sum(h, sizeof h), sum(z, sizeof z), sum(c, sizeof c));
    for (int i = 0; i < N; i += 8) {
        __m256 v = _mm256_loadu_ps(f + i), w = _mm256_loadu_ps(g + i);
        _mm_storeu_si128((__m128i *)(half + i), _mm256_cvtps_ph(v, _MM_FROUND_CUR_DIRECTION));
        __m256 r = _mm256_dp_ps(_mm256_hadd_ps(v, w), _mm256_addsub_ps(w, v), 0xf5);
        r = _mm256_max_ps(r, _mm256_cvtph_ps(_mm_loadu_si128((__m128i *)(half + i))));
        r = _mm256_blendv_ps(r, _mm256_round_ps(v, _MM_FROUND_CUR_DIRECTION), _mm256_cmp_ps(v, w, _CMP_NGE_UQ));
        _mm256_storeu_ps(h + i, _mm256_fmaddsub_ps(r, v, w));
        _mm256_storeu_si256((__m256i *)(c + i), _mm256_cvtps_epi32(r));
    }
    printf("%u: %016lx %016lx %016lx mxcsr %04x\n", round, sum(h, sizeof h), sum(half, sizeof half), sum(c, sizeof c), _mm_getcsr());
}

static void blocks(void)
{
    __m128i s = _mm_setzero_si128(), t = s;
    for (int i = 0; i < 4 * N; i += 16) {
        __m128i v = _mm_loadu_si128((__m128i *)(bytes + i));
        s = _mm_aesenc_si128(_mm_xor_si128(s, v), _mm_clmulepi64_si128(v, s, 0x10));
        s = _mm_aesdec_si128(s, _mm_aeskeygenassist_si128(v, 0x1b));
        t = _mm_sha256rnds2_epu32(_mm_sha256msg1_epu32(t, v), v, s);
        t = _mm_xor_si128(t, _mm_sha1rnds4_epu32(s, v, 2));
        int at = _mm_cmpistri(v, s, _SIDD_CMP_RANGES);
        t = _mm_add_epi32(t, _mm_cmpestrm(v, 9 + at % 5, s, 13, _SIDD_CMP_EQUAL_ANY | _SIDD_UNIT_MASK));
        t = _mm_shuffle_epi8(t, _mm_mpsadbw_epu8(v, s, 5));
    }
    printf("blocks: %016lx %016lx\n", sum(&s, 16), sum(&t, 16));
}

int main(void)
{
    static const int directions[] = {FE_TONEAREST, FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};
    for (unsigned round = 0; round < 12; round++) {
        fill();
        fesetround(directions[round % 4]);
        /* DAZ and FTZ. */
        if (round >= 8)
            _mm_setcsr(_mm_getcsr() | 0x8040);
        arithmetic(round);
    }
    blocks();
    return 0;
}
