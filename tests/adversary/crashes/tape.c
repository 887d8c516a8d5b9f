/* What a process does to the files below one directory: counted, written down, broken on demand, or held at a gate.

   Preloaded (LD_PRELOAD) and driven through ctypes (tape.py). Every call that is watched

       waits at the gate        if this process is an actor: the scheduler grants one call at a time
       is counted               and fails, or does half of its work, where it was asked to
       is done and written down under one lock, so that the records of all processes have one order

   All of it is in memory that forked processes share. Calls go to the kernel directly, so nothing here recurses. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define LONGEST 1024
#define ACTORS 8

enum { CREATE, TRUNCATE, WRITE, SYNC, RENAME, LINK, UNLINK, MKDIR, RMDIR, MARK, STRANGE };        /* written down */
enum { OPEN_READ = 100, OPEN_WRITE, READ, CLOSE, LOOK };                                   /* only counted and gated */
enum { NEVER, ONCE, HALF_ONCE, HALF_ALWAYS, FULL, DEAD };                                            /* how to break */
enum { FREE, RUNNING, WAITING, DONE };

struct record {
    int32_t op, first, second, whole; /* first, second: bytes of two texts that follow; whole: of all, with padding */
    int64_t inode, offset;
};
struct actor {
    sem_t go;
    int state, op;
    char path[LONGEST];
};
struct control {
    pthread_mutex_t lock;
    int on, kind, error, gated;
    long calls, at, broken, used, room;
    char prefix[LONGEST];
    sem_t arrived;
    struct actor actors[ACTORS];
    char log[];
};

static struct control *c;
static int me = -1; /* which actor this process is */

/* -- which files -------------------------------------------------------------------------------------------------- */

static int below(const char *path) {
    size_t length = strlen(c->prefix);
    return !strncmp(path, c->prefix, length) && (path[length] == '/' || !path[length]);
}

static int of_descriptor(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, LONGEST - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return 1;
}

static int watched_fd(int fd, char *path) {
    int kept = errno, found = c && c->on && of_descriptor(fd, path) && below(path);
    errno = kept;
    return found;
}

static int watched(int at, const char *path, char *full) {
    if (!c || !c->on || !path) return 0;
    int kept = errno;
    char base[LONGEST] = "";
    if (*path != '/' && (at == AT_FDCWD ? syscall(SYS_getcwd, base, LONGEST) < 0 : !of_descriptor(at, base))) return 0;
    snprintf(full, LONGEST, *path == '/' ? "%s%s" : "%s/%s", base, path);
    errno = kept;
    for (size_t length = strlen(full); length > 1 && full[length - 1] == '/'; length--) full[length - 1] = 0;
    return below(full);
}

/* -- gate, count, break ------------------------------------------------------------------------------------------- */

static int takes_room(int op) { return op == CREATE || op == OPEN_WRITE || op == WRITE || op == MKDIR || op == LINK; }

/* Holds the lock when it returns. 0: go on; -1: do half; else the error to fail with, and the lock is free. */
static int enter(int op, const char *path) {
    if (c->gated && me >= 0) {
        struct actor *own = &c->actors[me];
        own->op = op;
        snprintf(own->path, LONGEST, "%s", path);
        own->state = WAITING;
        sem_post(&c->arrived);
        while (sem_wait(&own->go)) {}
        own->state = RUNNING;
    }
    pthread_mutex_lock(&c->lock);
    long call = c->calls++;
    int moves = op == READ || op == WRITE, fails = 0;
    if (c->kind == ONCE) fails = call == c->at;
    if (c->kind == FULL) fails = call >= c->at && takes_room(op);
    if (c->kind == DEAD) fails = call >= c->at && op != CLOSE;
    if ((c->kind == HALF_ONCE && call == c->at && moves) || (c->kind == HALF_ALWAYS && moves)) {
        c->broken++;
        return -1;
    }
    if (!fails) return 0;
    c->broken++;
    pthread_mutex_unlock(&c->lock);
    errno = c->error;
    return c->error;
}

static void leave(void) { pthread_mutex_unlock(&c->lock); }

static void put(int op, int64_t inode, int64_t offset, const void *first, size_t n, const void *second, size_t m) {
    size_t whole = (sizeof(struct record) + n + m + 7) & ~(size_t)7;
    if (c->used + (long)whole > c->room) abort(); /* the log is full: give it more room */
    struct record record = {op, (int32_t)n, (int32_t)m, (int32_t)whole, inode, offset};
    memcpy(c->log + c->used, &record, sizeof record);
    if (n) memcpy(c->log + c->used + sizeof record, first, n);
    if (m) memcpy(c->log + c->used + sizeof record + n, second, m);
    c->used += whole;
}

static void put_path(int op, int64_t inode, int64_t offset, const char *path) {
    put(op, inode, offset, path, strlen(path), NULL, 0);
}

static int64_t inode_of(int fd, int64_t *size) {
    struct stat found;
    int kept = errno;
    syscall(SYS_fstat, fd, &found);
    errno = kept;
    if (size) *size = found.st_size;
    return found.st_ino;
}

/* -- calls -------------------------------------------------------------------------------------------------------- */

static int opened(int at, const char *path, int flags, mode_t mode) {
    char full[LONGEST];
    if (!watched(at, path, full)) return syscall(SYS_openat, at, path, flags, mode);
    struct stat before;
    int how = enter(flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR) ? OPEN_WRITE : OPEN_READ, full);
    if (how > 0) return -1;
    int there = !syscall(SYS_newfstatat, AT_FDCWD, full, &before, 0);
    int fd = syscall(SYS_openat, at, path, flags, mode);
    if (fd >= 0 && (flags & O_CREAT) && !there) put_path(CREATE, inode_of(fd, NULL), 0, full);
    else if (fd >= 0 && (flags & O_TRUNC) && before.st_size) put_path(TRUNCATE, before.st_ino, 0, full);
    leave();
    return fd;
}

#define OPEN(name, at, ...)                                                                                            \
    int name(__VA_ARGS__, int flags, ...) {                                                                            \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                                                      \
        va_end(rest);                                                                                                  \
        return opened(at, path, flags, mode);                                                                          \
    }
OPEN(open, AT_FDCWD, const char *path)
OPEN(open64, AT_FDCWD, const char *path)
OPEN(openat, at, int at, const char *path)
OPEN(openat64, at, int at, const char *path)
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

static ssize_t written(int fd, const void *data, size_t count, off_t at) {
    char path[LONGEST];
    if (!watched_fd(fd, path))
        return at < 0 ? syscall(SYS_write, fd, data, count) : syscall(SYS_pwrite64, fd, data, count, at);
    int how = enter(WRITE, path);
    if (how > 0) return -1;
    if (how < 0 && count > 1) count /= 2;
    int64_t size, inode = inode_of(fd, &size);
    off_t from = at >= 0 ? at : fcntl(fd, F_GETFL) & O_APPEND ? size : syscall(SYS_lseek, fd, 0, SEEK_CUR);
    ssize_t done = at < 0 ? syscall(SYS_write, fd, data, count) : syscall(SYS_pwrite64, fd, data, count, at);
    if (done > 0) put(WRITE, inode, from, data, done, NULL, 0);
    leave();
    return done;
}
ssize_t write(int fd, const void *data, size_t count) { return written(fd, data, count, -1); }
ssize_t pwrite(int fd, const void *data, size_t count, off_t at) { return written(fd, data, count, at); }
ssize_t pwrite64(int fd, const void *data, size_t count, off_t at) { return written(fd, data, count, at); }
ssize_t writev(int fd, const struct iovec *parts, int count) {
    char path[LONGEST];
    if (!watched_fd(fd, path)) return syscall(SYS_writev, fd, parts, count);
    for (int i = 0; i < count; i++)
        if (parts[i].iov_len) return written(fd, parts[i].iov_base, parts[i].iov_len, -1); /* a short write */
    return 0;
}

static ssize_t got(int fd, void *data, size_t count, off_t at) {
    char path[LONGEST];
    if (watched_fd(fd, path)) {
        int how = enter(READ, path);
        if (how > 0) return -1;
        leave();
        if (how < 0 && count > 1) count /= 2;
    }
    return at < 0 ? syscall(SYS_read, fd, data, count) : syscall(SYS_pread64, fd, data, count, at);
}
ssize_t read(int fd, void *data, size_t count) { return got(fd, data, count, -1); }
ssize_t pread(int fd, void *data, size_t count, off_t at) { return got(fd, data, count, at); }
ssize_t pread64(int fd, void *data, size_t count, off_t at) { return got(fd, data, count, at); }

static int synced(int fd, long number) {
    char path[LONGEST];
    if (!watched_fd(fd, path)) return syscall(number, fd);
    if (enter(SYNC, path) > 0) return -1;
    int done = syscall(number, fd);
    if (!done) put_path(SYNC, inode_of(fd, NULL), 0, path);
    leave();
    return done;
}
int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

static int cut(int fd, off_t size) {
    char path[LONGEST];
    if (!watched_fd(fd, path)) return syscall(SYS_ftruncate, fd, size);
    if (enter(WRITE, path) > 0) return -1;
    int done = syscall(SYS_ftruncate, fd, size);
    if (!done) put_path(TRUNCATE, inode_of(fd, NULL), size, path);
    leave();
    return done;
}
int ftruncate(int fd, off_t size) { return cut(fd, size); }
int ftruncate64(int fd, off_t size) { return cut(fd, size); }

int close(int fd) {
    char path[LONGEST];
    if (!watched_fd(fd, path)) return syscall(SYS_close, fd);
    int how = enter(CLOSE, path);
    int done = syscall(SYS_close, fd);
    if (how <= 0) leave();
    else errno = how;
    return how > 0 ? -1 : done;
}

static int two(int op, long number, int at, const char *path, int other, const char *second, int flags) {
    char full[LONGEST], to[LONGEST];
    if (!watched(at, path, full) | !watched(other, second, to))
        return syscall(number, at, path, other, second, flags);
    if (enter(op, full) > 0) return -1;
    int done = syscall(number, at, path, other, second, flags);
    if (!done) put(op, 0, 0, full, strlen(full), to, strlen(to));
    leave();
    return done;
}
int rename(const char *a, const char *b) { return two(RENAME, SYS_renameat2, AT_FDCWD, a, AT_FDCWD, b, 0); }
int renameat(int i, const char *a, int j, const char *b) { return two(RENAME, SYS_renameat2, i, a, j, b, 0); }
int renameat2(int i, const char *a, int j, const char *b, unsigned flags) {
    return two(RENAME, SYS_renameat2, i, a, j, b, flags);
}
int link(const char *a, const char *b) { return two(LINK, SYS_linkat, AT_FDCWD, a, AT_FDCWD, b, 0); }
int linkat(int i, const char *a, int j, const char *b, int flags) { return two(LINK, SYS_linkat, i, a, j, b, flags); }

static int one(int op, long number, int at, const char *path, int argument) {
    char full[LONGEST];
    if (!watched(at, path, full)) return syscall(number, at, path, argument);
    if (enter(op, full) > 0) return -1;
    int done = syscall(number, at, path, argument);
    if (!done) put_path(op, 0, 0, full);
    leave();
    return done;
}
int unlink(const char *path) { return one(UNLINK, SYS_unlinkat, AT_FDCWD, path, 0); }
int rmdir(const char *path) { return one(RMDIR, SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR); }
int unlinkat(int at, const char *path, int flags) {
    return one(flags & AT_REMOVEDIR ? RMDIR : UNLINK, SYS_unlinkat, at, path, flags);
}
int remove(const char *path) { return unlink(path) && errno == EISDIR ? rmdir(path) : 0; }
int mkdir(const char *path, mode_t mode) { return one(MKDIR, SYS_mkdirat, AT_FDCWD, path, mode); }
int mkdirat(int at, const char *path, mode_t mode) { return one(MKDIR, SYS_mkdirat, at, path, mode); }

static int looked(int at, const char *path, struct stat *found, int flags) {
    char full[LONGEST];
    if (watched(at, path, full)) {
        if (enter(LOOK, full) > 0) return -1;
        leave();
    }
    return syscall(SYS_newfstatat, at, path, found, flags);
}
int stat(const char *path, struct stat *found) { return looked(AT_FDCWD, path, found, 0); }
int lstat(const char *path, struct stat *found) { return looked(AT_FDCWD, path, found, AT_SYMLINK_NOFOLLOW); }
int fstatat(int at, const char *path, struct stat *found, int flags) { return looked(at, path, found, flags); }
int stat64(const char *path, struct stat64 *found) { return looked(AT_FDCWD, path, (struct stat *)found, 0); }
int lstat64(const char *path, struct stat64 *found) {
    return looked(AT_FDCWD, path, (struct stat *)found, AT_SYMLINK_NOFOLLOW);
}
int fstatat64(int at, const char *path, struct stat64 *found, int flags) {
    return looked(at, path, (struct stat *)found, flags);
}
DIR *opendir(const char *path) {
    char full[LONGEST];
    if (watched(AT_FDCWD, path, full)) {
        if (enter(LOOK, full) > 0) return NULL;
        leave();
    }
    return ((DIR * (*)(const char *)) dlsym(RTLD_NEXT, "opendir"))(path);
}

/* Names are drawn from here: the same in every run of a scenario, and never twice in one. */
static uint64_t salt, drawn;
static uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
ssize_t getrandom(void *data, size_t count, unsigned flags) {
    if (!c || !c->on) return syscall(SYS_getrandom, data, count, flags);
    for (size_t i = 0; i < count; i += 8) {
        uint64_t value = mixed(salt ^ mixed(((uint64_t)(me + 1) << 48 | (uint64_t)c->calls << 16) + drawn++ % 65536));
        memcpy((char *)data + i, &value, count - i < 8 ? count - i : 8);
    }
    return count;
}

/* What is not modelled: refused where callers have another way, else written down, so that the model refuses it. */
static void strange(int fd, const char *what) {
    char path[LONGEST];
    if (!watched_fd(fd, path)) return;
    pthread_mutex_lock(&c->lock);
    put_path(STRANGE, 0, 0, what);
    leave();
}
#define REFUSED(declared, fd, otherwise)                                                                               \
    declared {                                                                                                         \
        char path[LONGEST];                                                                                            \
        if (!watched_fd(fd, path)) return otherwise;                                                                   \
        errno = EINVAL;                                                                                                \
        return -1;                                                                                                     \
    }
REFUSED(ssize_t sendfile(int to, int from, off_t *at, size_t n), to, syscall(SYS_sendfile, to, from, at, n))
REFUSED(ssize_t sendfile64(int to, int from, off_t *at, size_t n), to, syscall(SYS_sendfile, to, from, at, n))
REFUSED(ssize_t copy_file_range(int from, off_t *i, int to, off_t *j, size_t n, unsigned f), to,
        syscall(SYS_copy_file_range, from, i, to, j, n, f))
static void *mapped(void *start, size_t n, int may, int flags, int fd, off_t at) {
    if ((may & PROT_WRITE) && (flags & MAP_SHARED) && fd >= 0) strange(fd, "mmap for writing");
    return (void *)syscall(SYS_mmap, start, n, may, flags, fd, at);
}
void *mmap(void *start, size_t n, int may, int flags, int fd, off_t at) { return mapped(start, n, may, flags, fd, at); }
void *mmap64(void *start, size_t n, int may, int flags, int fd, off_t at) {
    return mapped(start, n, may, flags, fd, at);
}
int fallocate(int fd, int mode, off_t at, off_t n) {
    strange(fd, "fallocate");
    return syscall(SYS_fallocate, fd, mode, at, n);
}

/* -- what tape.py calls ------------------------------------------------------------------------------------------- */

void *tape_begin(const char *prefix, long room) {
    if (!c) {
        struct control *made =
            mmap(NULL, sizeof *c + room, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (made == MAP_FAILED) return NULL;
        pthread_mutexattr_t shared;
        pthread_mutexattr_init(&shared);
        pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
        pthread_mutex_init(&made->lock, &shared);
        made->room = room;
        c = made;
    }
    c->on = c->gated = c->kind = 0;
    c->used = c->calls = c->broken = 0;
    salt = mixed(salt);
    snprintf(c->prefix, LONGEST, "%s", prefix);
    sem_init(&c->arrived, 1, 0);
    for (int i = 0; i < ACTORS; i++) {
        sem_init(&c->actors[i].go, 1, 0);
        c->actors[i].state = FREE;
    }
    c->on = 1;
    return c->log;
}
void tape_seed(long seed) {
    salt = seed;
    drawn = 0;
}
void tape_end(void) { c->on = c->gated = 0; }
long tape_used(void) { return c->used; }
long tape_calls(void) { return c->calls; }
long tape_broken(void) { return c->broken; }
void tape_break(int kind, long at, int error) {
    c->at = c->calls + at;
    c->error = error;
    if (kind != NEVER) c->broken = 0; /* else what has been broken stays to be read */
    c->kind = kind;
}
void tape_mark(const char *text) {
    pthread_mutex_lock(&c->lock);
    put_path(MARK, 0, 0, text);
    leave();
}
void tape_gate(int on) { c->gated = on; }
void tape_actor(int number) { me = number; }
void tape_done(void) {
    c->actors[me].state = DONE;
    me = -1;
    sem_post(&c->arrived);
}
int tape_state(int number) { return c->actors[number].state; }
int tape_op(int number) { return c->actors[number].op; }
const char *tape_path(int number) { return c->actors[number].path; }
void tape_go(int number) { sem_post(&c->actors[number].go); }
int tape_wait(int seconds) { /* until some actor waits or is done; 0, or -1 after that time */
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += seconds;
    int failed;
    while ((failed = sem_timedwait(&c->arrived, &until)) && errno == EINTR) {}
    return failed;
}
