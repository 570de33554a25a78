/* floats sse2|avx2|avx512 ROUNDS: products of matrices of doubles and square roots of sums, with vectors of 16, 32 or 64 bytes. */

#include "start.h"

#define N 64

typedef double two __attribute__((vector_size(16)));
typedef double four __attribute__((vector_size(32)));
typedef double eight __attribute__((vector_size(64)));

static double a[N][N] __attribute__((aligned(64))), b[N][N] __attribute__((aligned(64))), c[N][N] __attribute__((aligned(64)));

#define MULTIPLY(name, vector, lanes)                                                                                                      \
    static NOINLINE void name(void) {                                                                                                      \
        for (int row = 0; row < N; row++)                                                                                                  \
            for (int column = 0; column < N; column += lanes) {                                                                            \
                vector sum = {0};                                                                                                          \
                for (int k = 0; k < N; k++)                                                                                                \
                    sum += a[row][k] * *(vector *)&b[k][column];                                                                           \
                *(vector *)&c[row][column] = sum;                                                                                          \
            }                                                                                                                              \
    }

MULTIPLY(by_two, two, 2)

__attribute__((target("avx2,fma"))) MULTIPLY(by_four, four, 4)

__attribute__((target("avx512f"))) MULTIPLY(by_eight, eight, 8)

static NOINLINE double root(double x) {
    __asm__("sqrtsd %0, %0" : "+x"(x));
    return x;
}

int main(int argc, char **argv) {
    unsigned long rounds = argument(argc, argv, 2);
    void (*multiply)(void) = by_two;
    if (argc > 1 && argv[1][0] == 'a')
        multiply = argv[1][3] == '2' ? by_four : by_eight;
    for (int row = 0; row < N; row++)
        for (int column = 0; column < N; column++) {
            a[row][column] = (row * 7 + column) % 13 + 0.5;
            b[row][column] = (row + column * 5) % 11 - 4.25;
        }
    for (unsigned long round = 0; round < rounds; round++) {
        multiply();
        /* What comes next depends on what was computed, and stays small. */
        for (int at = 0; at < N; at++)
            a[at][at] = root(1 + c[at][at] * c[at][at]) / 1024;
    }
    double sum = 0;
    for (int at = 0; at < N; at++)
        sum += a[at][at];
    /* Neither a NaN nor out of the range that the roots have. */
    return sum > 0 && sum < 1e6 ? 0 : 1;
}
