/* Threads of a Linux guest, one on each CPU, that change shared memory in transactions, and under a lock where those abort.
   Prints what came of it, a fact a line. The argument is how many times each thread does so. */
#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST = 16, WORDS = 64 };

static struct {
    volatile int lock __attribute__((aligned(64)));
    /* Always as many as the words' sum. */
    volatile uint64_t total __attribute__((aligned(64)));
    volatile uint64_t words[WORDS];
} shared;

static long rounds;

struct thread {
    int cpu;
    uint64_t commits, aborts, conflicts, explicits, torn;
};

static void change(struct thread *me, unsigned number)
{
    uint64_t sum = 0;
    for (unsigned i = 0; i < WORDS; i++)
        sum += shared.words[i];
    me->torn += sum != shared.total;
    shared.words[number % WORDS]++;
    shared.total++;
}

static void *run(void *argument)
{
    struct thread *me = argument;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(me->cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set))
        exit(2);
    unsigned number = me->cpu + 1;
    for (long round = 0; round < rounds; round++) {
        number = number * 1103515245 + 12345;
        unsigned status = 0;
        int tries = 0;
        for (; tries < 4; tries++) {
            status = _xbegin();
            if (status == _XBEGIN_STARTED) {
                if (shared.lock)
                    _xabort(0x77);
                change(me, number >> 16);
                /* Some give up, and have done nothing. */
                if (number >> 8 & 1 && tries == 0)
                    _xabort(0x11);
                _xend();
                me->commits++;
                break;
            }
            me->aborts++;
            me->conflicts += (status & _XABORT_CONFLICT) != 0;
            me->explicits += status & _XABORT_EXPLICIT && _XABORT_CODE(status) == 0x11;
        }
        if (tries < 4)
            continue;
        while (__atomic_exchange_n(&shared.lock, 1, __ATOMIC_ACQUIRE))
            _mm_pause();
        change(me, number >> 16);
        __atomic_store_n(&shared.lock, 0, __ATOMIC_RELEASE);
    }
    return NULL;
}

int main(int count, char **arguments)
{
    rounds = count > 1 ? atol(arguments[1]) : 1000;
    cpu_set_t set;
    sched_getaffinity(0, sizeof set, &set);
    int cpus = CPU_COUNT(&set);
    static struct thread threads[MOST];
    pthread_t handles[MOST];
    for (int i = 0; i < cpus && i < MOST; i++) {
        threads[i].cpu = i;
        if (pthread_create(&handles[i], NULL, run, &threads[i]))
            return 2;
    }
    struct thread all = { 0 };
    for (int i = 0; i < cpus && i < MOST; i++) {
        pthread_join(handles[i], NULL);
        all.commits += threads[i].commits;
        all.aborts += threads[i].aborts;
        all.conflicts += threads[i].conflicts;
        all.explicits += threads[i].explicits;
        all.torn += threads[i].torn;
    }
    uint64_t sum = 0;
    for (int i = 0; i < WORDS; i++)
        sum += shared.words[i];
    printf("rtm: cpus %d\nrtm: total %lu\nrtm: sum %lu\nrtm: torn %lu\n", cpus, shared.total, sum, all.torn);
    printf("rtm: commits %lu\nrtm: aborts %lu\nrtm: conflicts %lu\nrtm: explicits %lu\n", all.commits, all.aborts,
           all.conflicts, all.explicits);
    return 0;
}
