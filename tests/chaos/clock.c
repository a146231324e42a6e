// Shifts the wall clock of one process while it runs, and no other clock: preloaded into daemons by tests/chaos.
//
// CLOCK_PAGE   a file with one number, the shift in nanoseconds; whoever maps it can change that at any time
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000L

static _Atomic long *shift;
static int (*real_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void map_page(void)
{
    const char *path = getenv("CLOCK_PAGE");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *mapped = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        abort();
    shift = mapped;
    close(fd);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    if (!real_clock)
        real_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real_clock(clock, now);
    if (failed || !shift || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE))
        return failed;
    long at = now->tv_sec * SECOND + now->tv_nsec + *shift;
    now->tv_sec = at / SECOND;
    now->tv_nsec = at % SECOND;
    return 0;
}

int gettimeofday(struct timeval *now, void *zone)
{
    (void)zone;
    struct timespec found;
    if (clock_gettime(CLOCK_REALTIME, &found))
        return -1;
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out)
{
    struct timespec found;
    time_t now = clock_gettime(CLOCK_REALTIME, &found) ? (time_t)-1 : found.tv_sec;
    if (out)
        *out = now;
    return now;
}
