/*
 * What rr records: threads that take turns at a lock, a signal handler that a timer calls, a child, and a look at the time-stamp
 * counter. Two runs of it differ; a replay does not differ from what was recorded.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 4, ROUNDS = 16, SPIN = 20000 };

/* Written by each thread, and last by `finish`: a reverse watchpoint finds the write before. */
volatile unsigned long watched;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static volatile sig_atomic_t alarms;
static unsigned long order[THREADS * ROUNDS];
static unsigned taken;

static void on_alarm(int number)
{
	(void)number;
	alarms++;
}

static unsigned long rdtsc(void)
{
	unsigned int low, high;

	__asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
	return (unsigned long)high << 32 | low;
}

static void *work(void *argument)
{
	unsigned long number = (unsigned long)argument;

	for (int round = 0; round < ROUNDS; round++) {
		for (volatile int spin = 0; spin < SPIN; spin++)
			;
		pthread_mutex_lock(&lock);
		order[taken++] = number;
		watched = number + 1;
		pthread_mutex_unlock(&lock);
	}
	return NULL;
}

__attribute__((noinline)) void finish(void)
{
	watched = 0x600d;
}

int main(void)
{
	struct itimerval timer = { { 0, 2000 }, { 0, 2000 } };
	pthread_t threads[THREADS];
	int status = 0;
	pid_t child;

	signal(SIGALRM, on_alarm);
	setitimer(ITIMER_REAL, &timer, NULL);
	for (unsigned long number = 0; number < THREADS; number++)
		pthread_create(&threads[number], NULL, work, (void *)number);
	for (int number = 0; number < THREADS; number++)
		pthread_join(threads[number], NULL);
	memset(&timer, 0, sizeof timer);
	setitimer(ITIMER_REAL, &timer, NULL);
	raise(SIGALRM);
	child = fork();
	if (child == 0) {
		printf("child %d tsc %lx\n", getpid(), rdtsc());
		fflush(stdout);
		_exit(7);
	}
	waitpid(child, &status, 0);
	printf("order ");
	for (unsigned turn = 0; turn < taken; turn++)
		printf("%lu", order[turn]);
	printf("\nalarms %d\nchild %d status %d\ntsc %lx\n", (int)alarms, child, WEXITSTATUS(status), rdtsc());
	fflush(stdout);
	finish();
	return 0;
}
