// Makes flushes of a process fail, and its disk slow: preloaded into real daemons by tests/process/test_disk_faults.py, which
// decides before the start which flush fails, and by tests/chaos, which changes its mind while the daemon runs.
//
// FAULTIO_PATH   only files whose path contains this
// FAULTIO_AFTER  how many flushes of such files succeed first; the next one fails with EIO, all later ones succeed,
//                as they do on Linux when pages that could not be written are marked clean
// FAULTIO_PAGE   a file with what is wrong at this moment (struct page); whoever maps it can change that at any time
// FAULTIO_LOG    a file that gets one byte for each flush after the failed one: there should be none
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct page {
    atomic_int flush_delay_ms;
    atomic_int write_delay_ms;
    atomic_int short_percent; // so many writes of a hundred take half of what they are given
    atomic_int flush_fails;   // so many of the next flushes fail with EIO
    atomic_int flush_lies;    // flushes succeed and do nothing
};

static atomic_long flushes;
static atomic_uint writes;
static struct page *page;

__attribute__((constructor)) static void map_page(void)
{
    const char *path = getenv("FAULTIO_PAGE");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *mapped = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        abort();
    page = mapped;
    close(fd);
}

static int leads_to(int fd, const char *part)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0)
        return 0;
    path[size] = 0;
    return strstr(path, part) != NULL;
}

static int concerns(int fd)
{
    const char *part = getenv("FAULTIO_PATH");
    return part && leads_to(fd, part);
}

static void wait_ms(int ms)
{
    struct timespec rest = {ms / 1000, ms % 1000 * 1000000L};
    while (ms > 0 && nanosleep(&rest, &rest) < 0 && errno == EINTR)
        ;
}

static int lies(int fd)
{
    return page && page->flush_lies && concerns(fd);
}

static int fails_by_page(int fd)
{
    wait_ms(page->flush_delay_ms);
    if (leads_to(fd, "/audit")) // a storage goes on without its audit log
        return 0;
    int left = page->flush_fails;
    while (left > 0)
        if (atomic_compare_exchange_weak(&page->flush_fails, &left, left - 1))
            return 1;
    return 0;
}

static int fails(int fd)
{
    const char *after = getenv("FAULTIO_AFTER"), *log = getenv("FAULTIO_LOG");
    if ((!after && !page) || !concerns(fd))
        return 0;
    if (page && fails_by_page(fd))
        return 1;
    if (!after)
        return 0;
    long number = atomic_fetch_add(&flushes, 1), limit = atol(after);
    if (number > limit && log) {
        int out = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
        if (out >= 0) {
            if (write(out, "x", 1) != 1)
                abort();
            close(out);
        }
    }
    return number == limit;
}

int fdatasync(int fd)
{
    static int (*real)(int);
    if (!real)
        real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    if (fails(fd)) {
        errno = EIO;
        return -1;
    }
    return lies(fd) ? 0 : real(fd);
}

int fsync(int fd)
{
    static int (*real)(int);
    if (!real)
        real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    if (fails(fd)) {
        errno = EIO;
        return -1;
    }
    return lies(fd) ? 0 : real(fd);
}

ssize_t pwritev64v2(int fd, const struct iovec *pieces, int count, off64_t offset, int flags)
{
    static ssize_t (*real)(int, const struct iovec *, int, off64_t, int);
    if (!real)
        real = (ssize_t (*)(int, const struct iovec *, int, off64_t, int))dlsym(RTLD_NEXT, "pwritev64v2");
    if (!page || count < 1 || (!page->write_delay_ms && !page->short_percent) || !concerns(fd))
        return real(fd, pieces, count, offset, flags);
    wait_ms(page->write_delay_ms);
    unsigned number = atomic_fetch_add(&writes, 1);
    if (number * 37 % 100 >= (unsigned)page->short_percent)
        return real(fd, pieces, count, offset, flags);
    struct iovec half = {pieces[0].iov_base, (pieces[0].iov_len + 1) / 2};
    return real(fd, &half, 1, offset, flags);
}
