/* Loaded before the C library: the n-th write to a file below a folder is short, or fails. See test_write_faults.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[4096];
static int countdown, fault;

/* Which write, from 1, and its error; 0 is a short write. An empty folder is no fault. */
void set_fault(const char *below, int at, int number) {
    strncpy(folder, below, sizeof folder - 1);
    countdown = at, fault = number;
}

int has_struck(void) { return countdown == 0; }

static int is_struck(int descriptor) {
    char link[64], path[4096];
    if (!folder[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0 || strncmp(path, folder, strlen(folder)) != 0) return 0;
    return countdown > 0 && --countdown == 0;
}

#define STRIKE(size) \
    if (is_struck(descriptor)) { \
        if (fault) { errno = fault; return -1; } \
        if (size > 1) size /= 2; \
    }

ssize_t write(int descriptor, const void *bytes, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "write");
    STRIKE(size)
    return real(descriptor, bytes, size);
}

ssize_t pwrite(int descriptor, const void *bytes, size_t size, off_t at) {
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "pwrite");
    STRIKE(size)
    return real(descriptor, bytes, size, at);
}

ssize_t pwrite64(int descriptor, const void *bytes, size_t size, off_t at) { return pwrite(descriptor, bytes, size, at); }

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    static ssize_t (*real)(int, const struct iovec *, int);
    if (!real) real = dlsym(RTLD_NEXT, "writev");
    size_t size = count; /* a short one leaves parts out */
    STRIKE(size)
    return real(descriptor, parts, (int)size);
}
