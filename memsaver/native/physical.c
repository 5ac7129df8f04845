/* Physical memory: the limit, extents, mappings, the page pool, file descriptors, and the log of driver calls. */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

int ms_forked(const ms_phys *phys) { return getpid() != phys->owner; }

int ms_reserve_array(void **array, size_t *capacity, size_t count, size_t item) {
    if (count <= *capacity) return 1;
    size_t grown = *capacity ? *capacity * 2 : 16;
    while (grown < count) grown *= 2;
    void *p = realloc(*array, grown * item);
    if (!p) return 0;
    *array = p;
    *capacity = grown;
    return 1;
}

/* File descriptors of memory, in one table by handle. An open descriptor keeps its memory alive.
 *
 * A memfd is its own handle. The CUDA driver refuses to export an imported handle, so the descriptor of an import stays
 * open as long as the handle: the memory can be exported to a third process. A forked child, where savers are inert,
 * closes all descriptors; otherwise it would hold memory that its parent releases. (A driver handle is an address and a
 * memfd a small number, so the two do not collide in the table.)
 */
typedef struct {
    uint64_t handle;
    int fd;
} descriptor;

static descriptor *descriptors;
static size_t n_descriptors, cap_descriptors;
static pthread_mutex_t descriptors_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t descriptors_once = PTHREAD_ONCE_INIT;

static void before_fork(void) { pthread_mutex_lock(&descriptors_lock); }

static void in_parent(void) { pthread_mutex_unlock(&descriptors_lock); }

static void in_child(void) {
    while (n_descriptors) close(descriptors[--n_descriptors].fd);
    pthread_mutex_unlock(&descriptors_lock);
}

static void close_in_children(void) { pthread_atfork(before_fork, in_parent, in_child); }

/* Keep the descriptor of a handle's memory until fd_drop. Returns 0, or errno with nothing changed. */
static int fd_keep(uint64_t handle, int fd) {
    pthread_once(&descriptors_once, close_in_children);
    pthread_mutex_lock(&descriptors_lock);
    int ok = ms_reserve_array((void **)&descriptors, &cap_descriptors, n_descriptors + 1, sizeof *descriptors);
    if (ok) descriptors[n_descriptors++] = (descriptor){handle, fd};
    pthread_mutex_unlock(&descriptors_lock);
    return ok ? 0 : ENOMEM;
}

static descriptor *find(uint64_t handle) {
    for (size_t i = n_descriptors; i-- > 0;)
        if (descriptors[i].handle == handle) return &descriptors[i];
    return NULL;
}

static void fd_drop(uint64_t handle) {
    pthread_mutex_lock(&descriptors_lock);
    descriptor *entry = find(handle);
    if (entry) {
        close(entry->fd);
        *entry = descriptors[--n_descriptors];
    }
    pthread_mutex_unlock(&descriptors_lock);
}

static int system_error(const ms_phys *phys, int error) { return phys->kind == MS_CUDA ? MS_CUDA_E_SYSTEM : error; }

/* Duplicate the descriptor that is kept for a handle; -1 if there is none. */
static int duplicate(uint64_t handle, int *error) {
    int fd = -1;
    pthread_mutex_lock(&descriptors_lock);
    const descriptor *entry = find(handle);
    if (entry) {
        fd = fcntl(entry->fd, F_DUPFD_CLOEXEC, 0);
        *error = fd < 0 ? errno : 0;
    }
    pthread_mutex_unlock(&descriptors_lock);
    return fd;
}

ms_phys *ms_phys_new(int kind, size_t granularity, size_t limit, const ms_driver *driver) {
    ms_phys *phys = calloc(1, sizeof *phys);
    if (!phys) return NULL;
    phys->kind = kind;
    phys->granularity = granularity;
    phys->limit = limit;
    phys->owner = getpid();
    if (driver) phys->driver = *driver;
    pthread_mutex_init(&phys->lock, NULL);
    return phys;
}

void ms_phys_free(ms_phys *phys) {
    pthread_mutex_destroy(&phys->lock);
    free(phys->kept);
    free(phys);
}

/* ------------------------------------------------------------------ bytes and their limit */

size_t ms_phys_limit(ms_phys *phys) { return phys->limit; }

void ms_phys_set_limit(ms_phys *phys, size_t limit) {
    pthread_mutex_lock(&phys->lock);
    phys->limit = limit;
    pthread_mutex_unlock(&phys->lock);
}

size_t ms_phys_committed(ms_phys *phys) {
    pthread_mutex_lock(&phys->lock);
    size_t n = phys->committed;
    pthread_mutex_unlock(&phys->lock);
    return n;
}

int ms_charge(ms_phys *phys, size_t nbytes, ms_cause *cause) {
    memset(cause, 0, sizeof *cause);
    cause->requested = nbytes;
    pthread_mutex_lock(&phys->lock);
    if (phys->committed + nbytes <= phys->limit)
        phys->committed += nbytes;
    else {
        cause->code = MS_E_LIMIT;
        cause->missing = phys->committed + nbytes - phys->limit;
    }
    pthread_mutex_unlock(&phys->lock);
    return cause->code;
}

void ms_discharge(ms_phys *phys, size_t nbytes) {
    pthread_mutex_lock(&phys->lock);
    phys->committed -= nbytes;
    pthread_mutex_unlock(&phys->lock);
}

/* ------------------------------------------------------------------ log of driver calls */

uint64_t ms_clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void ms_record(ms_phys *phys, int operation, size_t nbytes, uint64_t ns, int error) {
    if (ms_forked(phys)) return; /* the lock may have been held at the fork */
    pthread_mutex_lock(&phys->lock);
    ms_calls *sum = &phys->calls[operation];
    sum->calls++;
    sum->failed += error != 0;
    sum->nbytes += error ? 0 : nbytes;
    sum->ns += ns;
    phys->recent[phys->n_recorded++ % MS_RECENT] = (ms_call){ns, nbytes, operation, error};
    pthread_mutex_unlock(&phys->lock);
}

int ms_recorded(ms_phys *phys, int operation, size_t nbytes, uint64_t started, int error) {
    ms_record(phys, operation, nbytes, ms_clock_ns() - started, error);
    return error;
}

void ms_get_calls(ms_phys *phys, ms_calls *out) {
    pthread_mutex_lock(&phys->lock);
    memcpy(out, phys->calls, sizeof phys->calls);
    pthread_mutex_unlock(&phys->lock);
}

size_t ms_get_recent(ms_phys *phys, uint64_t *seen, ms_call *out) {
    size_t n = 0;
    pthread_mutex_lock(&phys->lock);
    uint64_t first = phys->n_recorded > MS_RECENT ? phys->n_recorded - MS_RECENT : 0;
    for (uint64_t i = *seen > first ? *seen : first; i < phys->n_recorded; i++) out[n++] = phys->recent[i % MS_RECENT];
    *seen = phys->n_recorded;
    pthread_mutex_unlock(&phys->lock);
    return n;
}

long ms_inject(ms_phys *phys, long after, int error) {
    pthread_mutex_lock(&phys->lock);
    long counted = phys->counted;
    phys->counted = 0;
    phys->countdown = after;
    phys->fault = error;
    pthread_mutex_unlock(&phys->lock);
    return counted;
}

int ms_fault(ms_phys *phys) {
    if (ms_forked(phys)) return 0;
    pthread_mutex_lock(&phys->lock);
    int fault = ++phys->counted == phys->countdown ? phys->fault : 0;
    pthread_mutex_unlock(&phys->lock);
    return fault;
}

/* ------------------------------------------------------------------ extents */

static int new_memfd(size_t nbytes, uint64_t *handle) {
    int fd = memfd_create("memsaver", MFD_CLOEXEC);
    if (fd < 0) return errno;
    int error = ftruncate(fd, (off_t)nbytes) ? errno : fd_keep((uint64_t)fd, fd);
    if (error) close(fd);
    *handle = (uint64_t)fd;
    return error;
}

static int driver_create(ms_phys *phys, size_t nbytes, uint64_t *handle) {
    uint64_t started = ms_clock_ns();
    int error = ms_fault(phys);
    if (!error && phys->kind == MS_CUDA)
        error = phys->driver.create(handle, nbytes, phys->driver.prop, 0);
    else if (!error)
        error = new_memfd(nbytes, handle);
    return ms_recorded(phys, MS_CREATE, nbytes, started, error);
}

static uint64_t next_id;
static pthread_mutex_t id_lock = PTHREAD_MUTEX_INITIALIZER;

void ms_new_ids_in_child(void) {
    next_id = 0;
    pthread_mutex_init(&id_lock, NULL);
}

/* Return an id that is unique among the machine's processes: a random half for each process, and a count. */
static uint64_t new_id(void) {
    pthread_mutex_lock(&id_lock);
    if (!next_id) {
        uint32_t random = 0;
        if (getrandom(&random, sizeof random, 0) != sizeof random) random = (uint32_t)getpid();
        next_id = (uint64_t)random << 32;
    }
    uint64_t id = ++next_id;
    pthread_mutex_unlock(&id_lock);
    return id;
}

static int try_create(ms_phys *phys, size_t nbytes, ms_extent *out, ms_cause *cause) {
    if (ms_charge(phys, nbytes, cause)) return cause->code;
    uint64_t handle = 0;
    int error = driver_create(phys, nbytes, &handle);
    if (!error) {
        *out = (ms_extent){handle, new_id(), 0, nbytes, 0};
        return MS_OK;
    }
    ms_discharge(phys, nbytes);
    cause->driver = error;
    return cause->code = MS_E_DRIVER;
}

int ms_create(ms_phys *phys, size_t nbytes, ms_extent *out, ms_cause *cause) {
    if (ms_forked(phys)) {
        memset(cause, 0, sizeof *cause);
        return cause->code = MS_E_FORKED;
    }
    int error = try_create(phys, nbytes, out, cause);
    if (error && ms_pool_drop(phys, cause->missing ? cause->missing : nbytes))
        error = try_create(phys, nbytes, out, cause);
    return error;
}

int ms_release(ms_phys *phys, uint64_t handle, size_t nbytes) {
    if (ms_forked(phys)) return 0;
    uint64_t started = ms_clock_ns();
    int error = ms_fault(phys);
    if (!error && phys->kind == MS_CUDA) error = phys->driver.release(handle);
    if (!error) {
        fd_drop(handle);
        ms_discharge(phys, nbytes);
    }
    return ms_recorded(phys, MS_RELEASE, nbytes, started, error);
}

/* ------------------------------------------------------------------ mappings */

static int map_memfd(size_t address, size_t nbytes, uint64_t handle, size_t offset, int writable) {
    int prot = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void *p = mmap((void *)address, nbytes, prot, MAP_SHARED | MAP_FIXED, (int)handle, (off_t)offset);
    return p == MAP_FAILED || madvise(p, nbytes, MADV_DONTFORK) ? errno : 0;
}

int ms_map(ms_phys *phys, size_t address, size_t nbytes, uint64_t handle, size_t offset, int writable) {
    uint64_t started = ms_clock_ns();
    int error = ms_fault(phys);
    if (!error && phys->kind == MS_CUDA)
        error = phys->driver.map(address, nbytes, offset, handle, 0);
    else if (!error)
        error = map_memfd(address, nbytes, handle, offset, writable);
    return ms_recorded(phys, MS_MAP, nbytes, started, error);
}

int ms_set_access(ms_phys *phys, size_t address, size_t nbytes) {
    uint64_t started = ms_clock_ns();
    int error = ms_fault(phys);
    if (!error && phys->kind == MS_CUDA)
        error = phys->driver.set_access(address, nbytes, phys->driver.access, 1);
    return ms_recorded(phys, MS_SET_ACCESS, nbytes, started, error);
}

int ms_unmap(ms_phys *phys, size_t address, size_t nbytes) {
    const int nothing = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (ms_forked(phys)) return 0; /* the child did not inherit the mapping, and may have mapped something else there */
    uint64_t started = ms_clock_ns();
    int error = ms_fault(phys);
    if (!error && phys->kind == MS_CUDA)
        error = phys->driver.unmap(address, nbytes);
    else if (!error && mmap((void *)address, nbytes, PROT_NONE, nothing, -1, 0) == MAP_FAILED)
        error = errno;
    return ms_recorded(phys, MS_UNMAP, nbytes, started, error);
}

int ms_resize_memfd(ms_phys *phys, uint64_t handle, size_t nbytes) {
    uint64_t started = ms_clock_ns();
    int error = ms_fault(phys);
    if (!error && ftruncate((int)handle, (off_t)nbytes)) error = errno;
    return ms_recorded(phys, MS_RESIZE, nbytes, started, error);
}

/* ------------------------------------------------------------------ content */

int ms_copy(ms_phys *phys, const ms_transfer *transfers, size_t count, void *stream) {
    uint64_t started = ms_clock_ns();
    size_t total = 0;
    int error = ms_fault(phys);
    for (size_t i = 0; i < count && !error; i++) {
        const ms_transfer *t = &transfers[i];
        total += t->nbytes;
        if (phys->kind == MS_CUDA)
            error = phys->driver.copy(t->to, t->from, t->nbytes, stream);
        else
            memcpy((void *)t->to, (const void *)t->from, t->nbytes);
    }
    return ms_recorded(phys, MS_COPY, total, started, error);
}

/* ------------------------------------------------------------------ the page pool: largest extents first */

int ms_pool_put(ms_phys *phys, const ms_extent *extents, size_t count) {
    pthread_mutex_lock(&phys->lock);
    int ok = ms_reserve_array((void **)&phys->kept, &phys->cap_kept, phys->n_kept + count, sizeof *extents);
    for (size_t i = 0; ok && i < count; i++) {
        size_t at = phys->n_kept++;
        for (; at > 0 && phys->kept[at - 1].nbytes < extents[i].nbytes; at--) phys->kept[at] = phys->kept[at - 1];
        phys->kept[at] = extents[i];
        phys->kept[at].offset = 0;
    }
    pthread_mutex_unlock(&phys->lock);
    return ok ? MS_OK : MS_E_TABLE;
}

static ms_extent pool_remove(ms_phys *phys, size_t at) {
    ms_extent taken = phys->kept[at];
    phys->n_kept--;
    memmove(&phys->kept[at], &phys->kept[at + 1], (phys->n_kept - at) * sizeof taken);
    return taken;
}

size_t ms_pool_take(ms_phys *phys, size_t nbytes, ms_extent *out, size_t capacity) {
    size_t n = 0;
    pthread_mutex_lock(&phys->lock);
    for (size_t i = 0; i < phys->n_kept && n < capacity;) {
        if (phys->kept[i].nbytes <= nbytes) {
            nbytes -= phys->kept[i].nbytes;
            out[n++] = pool_remove(phys, i);
        } else
            i++;
    }
    pthread_mutex_unlock(&phys->lock);
    return n;
}

int ms_pool_fit(ms_phys *phys, size_t need, size_t most, ms_extent *out) {
    int removed = 0;
    pthread_mutex_lock(&phys->lock);
    for (size_t i = phys->n_kept; i-- > 0 && !removed;)
        if (phys->kept[i].nbytes >= need) {
            if (phys->kept[i].nbytes > most) break;
            *out = pool_remove(phys, i);
            removed = 1;
        }
    pthread_mutex_unlock(&phys->lock);
    return removed;
}

size_t ms_pool_get(ms_phys *phys, ms_extent *out, size_t capacity) {
    pthread_mutex_lock(&phys->lock);
    size_t n = phys->n_kept;
    for (size_t i = 0; i < n && i < capacity; i++) out[i] = phys->kept[i];
    pthread_mutex_unlock(&phys->lock);
    return n;
}

size_t ms_pool_drop(ms_phys *phys, size_t nbytes) {
    size_t dropped = 0;
    for (;;) {
        ms_extent last;
        int removed = 0;
        pthread_mutex_lock(&phys->lock);
        for (size_t i = phys->n_kept; i-- > 0 && dropped < nbytes && !removed;)
            if ((removed = !phys->kept[i].shared)) last = pool_remove(phys, i);
        pthread_mutex_unlock(&phys->lock);
        if (!removed) return dropped;
        if (ms_release(phys, last.handle, last.nbytes)) {
            ms_pool_put(phys, &last, 1); /* the removal left room for it in the array */
            return dropped;
        }
        dropped += last.nbytes;
    }
}

/* ------------------------------------------------------------------ export and import */

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
    if (!error && (error = fd_keep(*handle, fd))) {
        if (phys->kind == MS_CUDA) phys->driver.release(*handle);
        error = system_error(phys, error);
    }
    if (error) close(fd);
    return ms_recorded(phys, MS_IMPORT, 0, started, error);
}
