/* A program with sources for a debugger: functions that call functions, a loop of one line, and a store that goes astray. */
typedef unsigned long word;

volatile word sum, left;
word table[8];

static word leaf(word x)
{
    sum += x;
    return x * 3;
}

word work(word n)
{
    word total = 0;
    for (word i = 0; i < n; i++)
        total += leaf(i);
    return total;
}

static void spoil(word at)
{
    word *entry = table;
    entry[at] = 77;
}

void guest(void)
{
    left = 50000;
    while (left) left--;
    word first = work(3);
    word second = work(100000);
    spoil(first % 8);
    table[0] = second;
    __asm__ volatile("outb %%al, $0xf4" : : "a"(2));
}
