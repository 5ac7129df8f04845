/* File descriptors that stand for memory: each keeps it alive, so every one of them is in one table, by handle.
 *
 * A memfd is its own handle. The CUDA driver refuses to export a handle that was imported, so the descriptor of an import
 * stays as long as the handle: memory that came from another process can go on to a third. A forked child, where savers
 * are inert, closes all of them, or it would hold the memory that its parent gives back. (A handle of the driver is an
 * address and a memfd a small number: they do not meet in the table.)
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

typedef struct {
    uint64_t handle;
    int fd;
} descriptor;

static descriptor *table;
static size_t n_descriptors, capacity;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void before_fork(void) { pthread_mutex_lock(&lock); }

static void in_parent(void) { pthread_mutex_unlock(&lock); }

static void in_child(void) {
    while (n_descriptors) close(table[--n_descriptors].fd);
    pthread_mutex_unlock(&lock);
}

static void close_in_children(void) { pthread_atfork(before_fork, in_parent, in_child); }

int ms_fd_keep(uint64_t handle, int fd) {
    pthread_once(&once, close_in_children);
    pthread_mutex_lock(&lock);
    int ok = ms_reserve_array((void **)&table, &capacity, n_descriptors + 1, sizeof *table);
    if (ok) table[n_descriptors++] = (descriptor){handle, fd};
    pthread_mutex_unlock(&lock);
    return ok ? 0 : ENOMEM;
}

static descriptor *find(uint64_t handle) {
    for (size_t i = n_descriptors; i-- > 0;)
        if (table[i].handle == handle) return &table[i];
    return NULL;
}

void ms_fd_drop(uint64_t handle) {
    pthread_mutex_lock(&lock);
    descriptor *found = find(handle);
    if (found) {
        close(found->fd);
        *found = table[--n_descriptors];
    }
    pthread_mutex_unlock(&lock);
}

static int system_error(const ms_phys *phys, int error) { return phys->kind == MS_CUDA ? MS_CUDA_E_SYSTEM : error; }

/* A new descriptor of the one that is kept for this handle; -1 if none is. */
static int duplicate(uint64_t handle, int *error) {
    int fd = -1;
    pthread_mutex_lock(&lock);
    const descriptor *found = find(handle);
    if (found) {
        fd = fcntl(found->fd, F_DUPFD_CLOEXEC, 0);
        *error = fd < 0 ? errno : 0;
    }
    pthread_mutex_unlock(&lock);
    return fd;
}

int ms_export(ms_phys *phys, uint64_t handle, int *fd) {
    uint64_t started = ms_clock_ns();
    int error = ms_fault(phys);
    if (!error) {
        *fd = duplicate(handle, &error);
        if (error)
            error = system_error(phys, error);
        else if (*fd < 0)
            error = phys->kind == MS_CUDA ? phys->driver.export_fd(fd, handle, MS_CUDA_FD, 0) : EBADF;
    }
    return ms_recorded(phys, MS_EXPORT, 0, started, error);
}

int ms_import(ms_phys *phys, int fd, uint64_t *handle) {
    uint64_t started = ms_clock_ns();
    int error = ms_fault(phys);
    *handle = (uint64_t)fd;
    if (!error && phys->kind == MS_CUDA) error = phys->driver.import_fd(handle, (void *)(uintptr_t)fd, MS_CUDA_FD);
    if (!error && (error = ms_fd_keep(*handle, fd))) {
        if (phys->kind == MS_CUDA) phys->driver.release(*handle);
        error = system_error(phys, error);
    }
    if (error) close(fd);
    return ms_recorded(phys, MS_IMPORT, 0, started, error);
}
