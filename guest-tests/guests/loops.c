/* Four loops by which engines are compared: rounds of a hash on registers, sorting through a function pointer, marking
   bytes of an array, and chains of a hash table. Integer code only; the same object file runs as a guest and natively. */
#include "loops.h"

static inline u32 rotate(u32 x, int by) { return x >> by | x << (32 - by); }

/* Sixty-four rounds in the manner of SHA-256 over an expanded message of one block; the constants are arbitrary. */
static u64 digest(u64 reps, u8 *heap)
{
    u32 constants[64], seed = 0x6b617469;
    for (int i = 0; i < 64; i++)
        constants[i] = seed = seed * 1664525 + 1013904223;
    u32 state[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    const u32 *block = (const u32 *)heap;
    for (int i = 0; i < 64; i++)
        heap[i] = 11;
    while (reps--) {
        u32 w[64];
        for (int i = 0; i < 16; i++)
            w[i] = __builtin_bswap32(block[i]);
        for (int i = 16; i < 64; i++) {
            u32 early = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
            u32 late = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
            w[i] = w[i - 16] + early + w[i - 7] + late;
        }
        u32 s[8];
        for (int i = 0; i < 8; i++)
            s[i] = state[i];
        for (int i = 0; i < 64; i++) {
            u32 choose = (s[4] & s[5]) ^ (~s[4] & s[6]);
            u32 most = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
            u32 up = s[7] + (rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25)) + choose + constants[i] + w[i];
            u32 down = (rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22)) + most;
            s[7] = s[6], s[6] = s[5], s[5] = s[4], s[4] = s[3] + up;
            s[3] = s[2], s[2] = s[1], s[1] = s[0], s[0] = up + down;
        }
        for (int i = 0; i < 8; i++)
            state[i] += s[i];
    }
    return (u64)state[0] << 32 | state[7];
}

static __attribute__((noinline)) int ascending(u32 a, u32 b) { return (a > b) - (a < b); }

static __attribute__((noinline)) void sort(u32 *items, s64 low, s64 high, int (*order)(u32, u32))
{
    while (low < high) {
        u32 pivot = items[low + (high - low) / 2];
        s64 left = low, right = high;
        do {
            while (order(items[left], pivot) < 0)
                left++;
            while (order(items[right], pivot) > 0)
                right--;
            if (left <= right) {
                u32 item = items[left];
                items[left++] = items[right];
                items[right--] = item;
            }
        } while (left <= right);
        /* The shorter part by recursion, so that the stack stays small. */
        if (right - low < high - left) {
            sort(items, low, right, order);
            low = left;
        } else {
            sort(items, left, high, order);
            high = right;
        }
    }
}

static u64 sorting(u64 count, u8 *heap)
{
    u32 *items = (u32 *)heap, seed = 1;
    for (u64 i = 0; i < count; i++)
        items[i] = seed = seed * 1664525 + 1013904223;
    sort(items, 0, (s64)count - 1, ascending);
    return items[count / 2];
}

static u64 sieve(u64 reps, u8 *heap)
{
    enum { LIMIT = 1000000 };
    u64 primes = 0;
    while (reps--) {
        for (u64 *word = (u64 *)heap; word < (u64 *)(heap + LIMIT); word++)
            *word = 0;
        primes = 0;
        for (u64 i = 2; i < LIMIT; i++) {
            if (heap[i])
                continue;
            primes++;
            for (u64 multiple = i * i; multiple < LIMIT; multiple += i)
                heap[multiple] = 1;
        }
    }
    return primes;
}

struct entry {
    struct entry *next;
    u64 key, value;
};

static __attribute__((noinline)) struct entry **chain(struct entry **table, u64 key)
{
    return &table[key * 0x9e3779b97f4a7c15 >> 54];
}

static __attribute__((noinline)) struct entry *lookup(struct entry **table, u64 key)
{
    struct entry *entry = *chain(table, key);
    while (entry && entry->key != key)
        entry = entry->next;
    return entry;
}

static u64 hashing(u64 reps, u8 *heap)
{
    struct entry **table = (struct entry **)heap, *fresh = (struct entry *)(heap + 65536);
    for (int i = 0; i < 1024; i++)
        table[i] = 0;
    u64 random = 0x9d2c5680cafef00d, sum = 0;
    for (u64 i = 0; i < reps; i++) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        u64 key = random & 8191;
        struct entry *entry = lookup(table, key);
        if (!entry) {
            struct entry **head = chain(table, key);
            entry = fresh++;
            entry->key = key;
            entry->value = 0;
            entry->next = *head;
            *head = entry;
        }
        entry->value += i;
        sum += entry->value;
    }
    return sum;
}

/* "NAME REPS" at the end of a command line: `d`igest, `q`sort, `s`ieve or `h`ash, by the first letter. */
u64 loops(const char *line, u8 *heap, void (*say)(const char *))
{
    const char *words[2] = {line, line};
    for (const char *at = line; *at; at++)
        if (*at == ' ') {
            words[0] = words[1];
            words[1] = at + 1;
        }
    u64 reps = 0;
    for (const char *at = words[1]; *at >= '0' && *at <= '9'; at++)
        reps = reps * 10 + (u64)(*at - '0');
    say("start\n");
    u64 result = 0;
    switch (*words[0]) {
    case 'd': result = digest(reps, heap); break;
    case 'q': result = sorting(reps, heap); break;
    case 's': result = sieve(reps, heap); break;
    case 'h': result = hashing(reps, heap); break;
    }
    char text[] = "end 0000000000000000\n";
    for (int i = 0; i < 16; i++)
        text[4 + i] = "0123456789abcdef"[result >> (60 - 4 * i) & 15];
    say(text);
    return result;
}
