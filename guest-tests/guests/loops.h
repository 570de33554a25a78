typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long u64;
typedef long s64;

/* What the loops may write: enough for the largest of them. */
enum { HEAP_BYTES = 16 << 20 };

u64 loops(const char *line, u8 *heap, void (*say)(const char *));
