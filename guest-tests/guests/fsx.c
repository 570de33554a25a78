// A file system exerciser: random operations on one file, each answer compared with a copy in memory that no file system has seen.
//
//     fsx FILE SEED OPERATIONS
//
// The operations follow from the seed alone, so that two file systems can be held to the same file. The last line says how large it is
// and what its contents hash to; the file stays.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST (256 * 1024)

static uint8_t good[MOST], got[MOST];
static size_t size;
static uint64_t state;
static const char *path;
static int fd = -1;
static long operation;

static uint32_t below(uint32_t n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % n;
}

static void fail(const char *what, size_t at)
{
    printf("FAILED: operation %ld: %s at %zu: %s\n", operation, what, at, strerror(errno));
    exit(1);
}

static void compare(const char *what, const uint8_t *bytes, size_t from, size_t length)
{
    for (size_t i = 0; i < length; i++)
        if (bytes[i] != good[from + i]) {
            errno = 0;
            fail(what, from + i);
        }
}

static void check_size(void)
{
    struct stat s;
    if (fstat(fd, &s) || (size_t)s.st_size != size)
        fail("size", size);
}

static void open_it(int flags)
{
    if (fd >= 0 && close(fd))
        fail("close", 0);
    fd = open(path, O_RDWR | flags, 0644);
    if (fd < 0)
        fail("open", 0);
}

static void read_some(size_t from, size_t length)
{
    if (from >= size)
        return;
    if (length > size - from)
        length = size - from;
    ssize_t read = pread(fd, got, length, from);
    if (read != (ssize_t)length)
        fail("read", from);
    compare("read differs", got, from, length);
}

static void fill(size_t from, size_t length)
{
    if (from > size)
        memset(good + size, 0, from - size);
    for (size_t i = 0; i < length; i++)
        good[from + i] = (uint8_t)(operation + i * 7 + (i >> 8));
    if (from + length > size)
        size = from + length;
}

static void write_some(size_t from, size_t length)
{
    fill(from, length);
    if (pwrite(fd, good + from, length, from) != (ssize_t)length)
        fail("write", from);
}

static void truncate_to(size_t to)
{
    if (to > size)
        memset(good + size, 0, to - size);
    size = to;
    if (below(2) ? ftruncate(fd, to) : truncate(path, to))
        fail("truncate", to);
}

static void punch(size_t from, size_t length)
{
    int answer = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from, length);
    if (answer && errno != EOPNOTSUPP && errno != ENOSYS)
        fail("punch", from);
    // A file system without holes is given zeroes.
    if (from < size) {
        size_t end = from + length < size ? from + length : size;
        memset(good + from, 0, end - from);
        if (answer && pwrite(fd, good + from, end - from, from) != (ssize_t)(end - from))
            fail("zeroes", from);
    }
}

static void map(int writes, size_t from, size_t length)
{
    size_t page = 4096, begin = from & ~(page - 1);
    if (from >= size)
        return;
    if (length > size - from)
        length = size - from;
    uint8_t *mapped = mmap(NULL, from - begin + length, writes ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, begin);
    if (mapped == MAP_FAILED)
        fail("mmap", from);
    if (writes) {
        fill(from, length);
        memcpy(mapped + (from - begin), good + from, length);
        if (below(2) && msync(mapped, from - begin + length, MS_SYNC))
            fail("msync", from);
    } else {
        compare("mapped differs", mapped + (from - begin), from, length);
    }
    if (munmap(mapped, from - begin + length))
        fail("munmap", from);
}

static void rename_it(void)
{
    char other[4096];
    snprintf(other, sizeof other, "%s.moved", path);
    if (rename(path, other) || rename(other, path))
        fail("rename", 0);
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    path = argv[1];
    state = strtoull(argv[2], NULL, 0);
    long operations = strtol(argv[3], NULL, 0);
    open_it(O_CREAT | O_TRUNC);
    for (operation = 1; operation <= operations; operation++) {
        size_t from = below(MOST), length = 1 + below(below(4) ? 5000 : 66000);
        if (length > MOST - from)
            length = MOST - from;
        switch (below(16)) {
        case 0: case 1: case 2: case 3: read_some(from, length); break;
        case 4: case 5: case 6: case 7: write_some(from, length); break;
        case 8: truncate_to(from); break;
        case 9: map(0, from, length); break;
        case 10: case 11: map(1, from, length); break;
        case 12: punch(from, length); break;
        case 13: if (fsync(fd)) fail("fsync", 0); break;
        case 14: open_it(below(2) ? O_APPEND : 0); open_it(0); break;
        default: rename_it(); break;
        }
        check_size();
    }
    open_it(0);
    check_size();
    read_some(0, size);
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ good[i]) * 0x100000001b3u;
    printf("fsx: %ld operations, %zu bytes, hash %016lx\n", operations, size, (unsigned long)hash);
    return close(fd) != 0;
}
