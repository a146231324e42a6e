// Makes one flush of a process fail: preloaded into a real daemon by tests/process/test_disk_faults.py.
//
// FAULTIO_PATH   only files whose path contains this
// FAULTIO_AFTER  how many flushes of such files succeed first; the next one fails with EIO, all later ones succeed,
//                as they do on Linux when pages that could not be written are marked clean
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
#include <unistd.h>

static atomic_long flushes;

static int fails(int fd)
{
    const char *part = getenv("FAULTIO_PATH"), *after = getenv("FAULTIO_AFTER"), *log = getenv("FAULTIO_LOG");
    char link[64], path[PATH_MAX];
    if (!part || !after)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0)
        return 0;
    path[size] = 0;
    if (!strstr(path, part))
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
    return real(fd);
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
    return real(fd);
}
