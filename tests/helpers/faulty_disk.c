/* Faults at the calls that change a folder: loaded by LD_PRELOAD, so that those of Python, torch, Arrow and safetensors
   are counted alike.

   FAULT_IN is the folder, FAULT_AT the number of the call at which the fault FAULT_KIND begins, and FAULT_LOG a file
   with a line for each call. The kinds are

   full  this call and all later ones fail with ENOSPC (the default),
   fail  this call and all later ones fail with EIO,
   once  this call alone fails with EIO,
   kill  the process is killed before this call,
   stop  the process is stopped before this call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static long events;

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

/* Return 1 if a call that writes to a path is to fail. */
static int fails_at(const char *call, const char *path)
{
    const char *folder = getenv("FAULT_IN");
    const char *at = getenv("FAULT_AT");
    const char *kind = getenv("FAULT_KIND");
    const char *log = getenv("FAULT_LOG");
    char absolute[2 * PATH_MAX];
    if (!folder || !path) return 0;
    if (path[0] != '/') {
        char here[PATH_MAX];
        if (!getcwd(here, sizeof here)) return 0;
        snprintf(absolute, sizeof absolute, "%s/%s", here, path);
        path = absolute;
    }
    if (strncmp(path, folder, strlen(folder))) return 0;
    long number = __atomic_add_fetch(&events, 1, __ATOMIC_SEQ_CST);
    if (log) {
        char line[3 * PATH_MAX];
        int length = snprintf(line, sizeof line, "%ld %s %s\n", number, call, path);
        int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0600);
        if (file >= 0) {
            syscall(SYS_write, file, line, length);
            syscall(SYS_close, file);
        }
    }
    if (!at || !atol(at) || number < atol(at)) return 0;
    if (!kind || !strcmp(kind, "full")) {
        errno = ENOSPC;
        return strcmp(call, "remove") != 0; /* which makes room */
    }
    errno = EIO;
    if (!strcmp(kind, "fail")) return 1;
    if (number > atol(at)) return 0;
    if (!strcmp(kind, "kill")) raise(SIGKILL);
    if (!strcmp(kind, "stop")) raise(SIGSTOP);
    return !strcmp(kind, "once");
}

static int fails(const char *call, int file)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails_at(call, path);
}

ssize_t write(int file, const void *data, size_t size)
{
    REAL(ssize_t, "write", int, const void *, size_t);
    return fails("write", file) ? -1 : real(file, data, size);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t offset)
{
    REAL(ssize_t, "pwrite", int, const void *, size_t, off_t);
    return fails("write", file) ? -1 : real(file, data, size, offset);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset)
{
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
    return fails("write", file) ? -1 : real(file, data, size, offset);
}

ssize_t writev(int file, const struct iovec *parts, int count)
{
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    return fails("write", file) ? -1 : real(file, parts, count);
}

ssize_t sendfile(int target, int source, off_t *offset, size_t size)
{
    REAL(ssize_t, "sendfile", int, int, off_t *, size_t);
    return fails("write", target) ? -1 : real(target, source, offset, size);
}

ssize_t sendfile64(int target, int source, off64_t *offset, size_t size)
{
    REAL(ssize_t, "sendfile64", int, int, off64_t *, size_t);
    return fails("write", target) ? -1 : real(target, source, offset, size);
}

ssize_t copy_file_range(int source, off64_t *from, int target, off64_t *to, size_t size, unsigned flags)
{
    REAL(ssize_t, "copy_file_range", int, off64_t *, int, off64_t *, size_t, unsigned);
    return fails("write", target) ? -1 : real(source, from, target, to, size, flags);
}

int fsync(int file)
{
    REAL(int, "fsync", int);
    return fails("fsync", file) ? -1 : real(file);
}

int fdatasync(int file)
{
    REAL(int, "fdatasync", int);
    return fails("fsync", file) ? -1 : real(file);
}

int rename(const char *from, const char *to)
{
    REAL(int, "rename", const char *, const char *);
    return fails_at("rename", to) ? -1 : real(from, to);
}

int renameat(int folder, const char *from, int other, const char *to)
{
    REAL(int, "renameat", int, const char *, int, const char *);
    return fails_at("rename", to) ? -1 : real(folder, from, other, to);
}

int unlink(const char *path)
{
    REAL(int, "unlink", const char *);
    return fails_at("remove", path) ? -1 : real(path);
}

int rmdir(const char *path)
{
    REAL(int, "rmdir", const char *);
    return fails_at("remove", path) ? -1 : real(path);
}

/* A path is relative to an open folder where the content of a folder is removed. */
int unlinkat(int folder, const char *path, int flags)
{
    REAL(int, "unlinkat", int, const char *, int);
    if (folder == AT_FDCWD || path[0] == '/') return fails_at("remove", path) ? -1 : real(folder, path, flags);
    char link[64], whole[2 * PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, whole, PATH_MAX - 1);
    if (length < 0) return real(folder, path, flags);
    snprintf(whole + length, sizeof whole - length, "/%s", path);
    return fails_at("remove", whole) ? -1 : real(folder, path, flags);
}

int mkdir(const char *path, mode_t mode)
{
    REAL(int, "mkdir", const char *, mode_t);
    struct stat state;
    return stat(path, &state) && fails_at("mkdir", path) ? -1 : real(path, mode);
}

/* Return 1 if a call that may create a file is to fail. One that exists takes no room. */
static int fails_to_open(const char *path, int flags)
{
    struct stat state;
    return (flags & O_CREAT) && stat(path, &state) && fails_at("create", path);
}

#define MODE \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list arguments; \
        va_start(arguments, flags); \
        mode = va_arg(arguments, mode_t); \
        va_end(arguments); \
    }

int open(const char *path, int flags, ...)
{
    MODE
    REAL(int, "open", const char *, int, ...);
    return fails_to_open(path, flags) ? -1 : real(path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    MODE
    REAL(int, "open64", const char *, int, ...);
    return fails_to_open(path, flags) ? -1 : real(path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...)
{
    MODE
    REAL(int, "openat", int, const char *, int, ...);
    return fails_to_open(path, flags) ? -1 : real(folder, path, flags, mode);
}

int openat64(int folder, const char *path, int flags, ...)
{
    MODE
    REAL(int, "openat64", int, const char *, int, ...);
    return fails_to_open(path, flags) ? -1 : real(folder, path, flags, mode);
}

FILE *fopen(const char *path, const char *mode)
{
    REAL(FILE *, "fopen", const char *, const char *);
    return strpbrk(mode, "wa") && fails_to_open(path, O_CREAT) ? NULL : real(path, mode);
}

FILE *fopen64(const char *path, const char *mode)
{
    REAL(FILE *, "fopen64", const char *, const char *);
    return strpbrk(mode, "wa") && fails_to_open(path, O_CREAT) ? NULL : real(path, mode);
}
