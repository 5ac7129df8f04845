#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

struct ms_phys {
    int kind;
    size_t granularity, limit, committed;
    ms_driver driver;
    pid_t owner;
    ms_extent *kept; /* the page pool */
    size_t n_kept, cap_kept;
    long calls, fault_at;
    int fault_error;
    pthread_mutex_t lock;
};

typedef struct {
    ms_phys *phys; /* NULL: free slot */
    size_t base, reserved, unit;
    size_t committed; /* mapped prefix [0, committed) */
    size_t top;       /* end of the last block */
    size_t live;      /* requested bytes of live blocks */
    int state;
    ms_extent *extents;
    size_t n_extents, cap_extents;
    ms_block *blocks; /* sorted by offset, covers [0, top) without gaps, free neighbours merged */
    size_t n_blocks, cap_blocks;
    ms_cause cause;
    pthread_mutex_t lock;
} ms_arena;

static ms_arena arenas[MS_SLOTS];
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;

static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
static int forked(const ms_phys *phys) { return getpid() != phys->owner; }

static int reserve_array(void **array, size_t *capacity, size_t count, size_t item) {
    if (count <= *capacity) return 1;
    size_t grown = *capacity ? *capacity * 2 : 16;
    while (grown < count) grown *= 2;
    void *p = realloc(*array, grown * item);
    if (!p) return 0;
    *array = p;
    *capacity = grown;
    return 1;
}

/* ------------------------------------------------------------------ physical memory */

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

long ms_inject(ms_phys *phys, long after, int error) {
    long calls = __atomic_exchange_n(&phys->calls, 0, __ATOMIC_RELAXED);
    phys->fault_at = after;
    phys->fault_error = error;
    return calls;
}

int ms_fault(ms_phys *phys) {
    long call = __atomic_add_fetch(&phys->calls, 1, __ATOMIC_RELAXED);
    return call == phys->fault_at ? phys->fault_error : 0;
}

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

static int charge(ms_phys *phys, size_t nbytes, ms_cause *cause) {
    int ok;
    pthread_mutex_lock(&phys->lock);
    ok = phys->committed + nbytes <= phys->limit;
    if (ok)
        phys->committed += nbytes;
    else {
        cause->code = MS_E_LIMIT;
        cause->missing = phys->committed + nbytes - phys->limit;
    }
    pthread_mutex_unlock(&phys->lock);
    cause->requested = nbytes;
    return ok ? MS_OK : MS_E_LIMIT;
}

static void discharge(ms_phys *phys, size_t nbytes) {
    pthread_mutex_lock(&phys->lock);
    phys->committed -= nbytes;
    pthread_mutex_unlock(&phys->lock);
}

int ms_charge(ms_phys *phys, size_t nbytes, ms_cause *cause) {
    memset(cause, 0, sizeof *cause);
    return charge(phys, nbytes, cause);
}

void ms_discharge(ms_phys *phys, size_t nbytes) { discharge(phys, nbytes); }

static int driver_create(ms_phys *phys, size_t nbytes, uint64_t *handle) {
    int fault = ms_fault(phys);
    if (fault) return fault;
    if (phys->kind == MS_CUDA) return phys->driver.create(handle, nbytes, phys->driver.prop, 0);
    int fd = memfd_create("memsaver", MFD_CLOEXEC);
    if (fd < 0) return errno;
    if (ftruncate(fd, (off_t)nbytes)) {
        int error = errno;
        close(fd);
        return error;
    }
    *handle = (uint64_t)fd;
    return 0;
}

/* Unique among all processes of a machine: a random half chosen by each process, and a count. */
static uint64_t new_id(void) {
    static uint64_t next;
    static pid_t owner;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    if (owner != getpid()) {
        uint32_t random = 0;
        if (getrandom(&random, sizeof random, 0) != sizeof random) random = (uint32_t)getpid();
        next = (uint64_t)random << 32;
        owner = getpid();
    }
    uint64_t id = ++next;
    pthread_mutex_unlock(&lock);
    return id;
}

static int try_create(ms_phys *phys, size_t nbytes, ms_extent *out, ms_cause *cause) {
    memset(cause, 0, sizeof *cause);
    if (charge(phys, nbytes, cause)) return cause->code;
    int error = driver_create(phys, nbytes, &out->handle);
    if (!error) {
        *out = (ms_extent){out->handle, new_id(), 0, nbytes, 0};
        return MS_OK;
    }
    discharge(phys, nbytes);
    cause->driver = error;
    return cause->code = MS_E_DRIVER;
}

int ms_create(ms_phys *phys, size_t nbytes, ms_extent *out, ms_cause *cause) {
    if (forked(phys)) {
        memset(cause, 0, sizeof *cause);
        return cause->code = MS_E_FORKED;
    }
    int error = try_create(phys, nbytes, out, cause);
    if (error && ms_pool_drop(phys, cause->missing ? cause->missing : nbytes))
        error = try_create(phys, nbytes, out, cause);
    return error;
}

int ms_release(ms_phys *phys, uint64_t handle, size_t nbytes) {
    if (forked(phys)) return 0;
    int error = ms_fault(phys);
    if (error) return error;
    error = phys->kind == MS_CUDA ? phys->driver.release(handle) : (close((int)handle) ? errno : 0);
    if (!error) discharge(phys, nbytes);
    return error;
}

int ms_map(ms_phys *phys, size_t address, size_t nbytes, uint64_t handle, size_t offset, int writable) {
    int fault = ms_fault(phys);
    if (fault) return fault;
    if (phys->kind == MS_CUDA) return phys->driver.map(address, nbytes, offset, handle, 0);
    int prot = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void *p = mmap((void *)address, nbytes, prot, MAP_SHARED | MAP_FIXED, (int)handle, (off_t)offset);
    if (p == MAP_FAILED) return errno;
    return madvise(p, nbytes, MADV_DONTFORK) ? errno : 0;
}

int ms_set_access(ms_phys *phys, size_t address, size_t nbytes) {
    int fault = ms_fault(phys);
    if (fault || phys->kind != MS_CUDA) return fault;
    return phys->driver.set_access(address, nbytes, phys->driver.access, 1);
}

int ms_unmap(ms_phys *phys, size_t address, size_t nbytes) {
    int fault = ms_fault(phys);
    if (fault) return fault;
    if (phys->kind == MS_CUDA) return phys->driver.unmap(address, nbytes);
    void *p = mmap((void *)address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return p == MAP_FAILED ? errno : 0;
}

static int resize_memfd(ms_phys *phys, uint64_t handle, size_t nbytes) {
    int fault = ms_fault(phys);
    if (fault) return fault;
    return ftruncate((int)handle, (off_t)nbytes) ? errno : 0;
}

/* ------------------------------------------------------------------ the page pool, largest first */

int ms_pool_put(ms_phys *phys, const ms_extent *extents, size_t count) {
    pthread_mutex_lock(&phys->lock);
    int ok = reserve_array((void **)&phys->kept, &phys->cap_kept, phys->n_kept + count, sizeof *extents);
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

/* The smallest kept extent of at least `need` and at most `most` bytes. */
static int pool_fit(ms_phys *phys, size_t need, size_t most, ms_extent *out) {
    int found = 0;
    pthread_mutex_lock(&phys->lock);
    for (size_t i = phys->n_kept; i-- > 0 && !found;)
        if (phys->kept[i].nbytes >= need) {
            if (phys->kept[i].nbytes > most) break;
            *out = pool_remove(phys, i);
            found = 1;
        }
    pthread_mutex_unlock(&phys->lock);
    return found;
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
        int found = 0;
        pthread_mutex_lock(&phys->lock);
        for (size_t i = phys->n_kept; i-- > 0 && dropped < nbytes && !found;)
            if ((found = !phys->kept[i].shared)) last = pool_remove(phys, i);
        pthread_mutex_unlock(&phys->lock);
        if (!found) return dropped;
        if (ms_release(phys, last.handle, last.nbytes)) {
            ms_pool_put(phys, &last, 1); /* its room is still there */
            return dropped;
        }
        dropped += last.nbytes;
    }
}

/* ------------------------------------------------------------------ arenas */

int ms_arena_new(ms_phys *phys, size_t base, size_t reserved, size_t unit) {
    int slot = -1;
    pthread_mutex_lock(&table_lock);
    for (int i = 0; i < MS_SLOTS && slot < 0; i++)
        if (!arenas[i].phys) slot = i;
    if (slot >= 0) {
        ms_arena *a = &arenas[slot];
        memset(a, 0, sizeof *a);
        a->base = base;
        a->reserved = reserved;
        a->unit = unit;
        pthread_mutex_init(&a->lock, NULL);
        __atomic_store_n(&a->phys, phys, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&table_lock);
    return slot;
}

int ms_arena_free(int slot) {
    ms_arena *a = &arenas[slot];
    pthread_mutex_lock(&table_lock);
    int busy = a->top != 0;
    if (!busy) {
        free(a->extents);
        free(a->blocks);
        pthread_mutex_destroy(&a->lock);
        __atomic_store_n(&a->phys, NULL, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&table_lock);
    return busy ? MS_E_PAUSED : MS_OK;
}

static int fail(ms_arena *a, int code, int driver, size_t requested, size_t missing) {
    a->cause = (ms_cause){code, driver, requested, missing};
    return code;
}

/* A memfd can grow in place: one extent serves a whole host arena, committed to the page. */
static int grow_last(ms_arena *a, size_t more) {
    ms_extent *last = &a->extents[a->n_extents - 1];
    ms_cause cause = {0};
    if (charge(a->phys, more, &cause)) {
        ms_pool_drop(a->phys, cause.missing);
        if (charge(a->phys, more, &cause)) return fail(a, cause.code, 0, more, cause.missing);
    }
    int error = resize_memfd(a->phys, last->handle, last->nbytes + more);
    if (!error) {
        error = ms_map(a->phys, a->base + a->committed, more, last->handle, last->nbytes, 1);
        if (error) resize_memfd(a->phys, last->handle, last->nbytes);
    }
    if (error) {
        discharge(a->phys, more);
        return fail(a, MS_E_DRIVER, error, more, 0);
    }
    last->nbytes += more;
    a->committed += more;
    return MS_OK;
}

/* Put `nbytes` more behind the arena, or a kept extent of at least `need` bytes. */
static int add_extent(ms_arena *a, size_t need, size_t nbytes) {
    if (!reserve_array((void **)&a->extents, &a->cap_extents, a->n_extents + 1, sizeof *a->extents))
        return fail(a, MS_E_TABLE, 0, nbytes, 0);
    ms_extent extent;
    ms_cause cause;
    int kept = pool_fit(a->phys, need, nbytes, &extent);
    if (!kept && ms_create(a->phys, nbytes, &extent, &cause)) {
        a->cause = cause;
        return cause.code;
    }
    size_t address = a->base + a->committed;
    int error = ms_map(a->phys, address, extent.nbytes, extent.handle, 0, 1);
    if (!error && (error = ms_set_access(a->phys, address, extent.nbytes)))
        ms_unmap(a->phys, address, extent.nbytes);
    if (error) {
        if (!kept || ms_pool_put(a->phys, &extent, 1)) ms_release(a->phys, extent.handle, extent.nbytes);
        return fail(a, MS_E_DRIVER, error, extent.nbytes, 0);
    }
    extent.offset = a->committed;
    a->extents[a->n_extents++] = extent;
    a->committed += extent.nbytes;
    return MS_OK;
}

/* CUDA extents cannot grow: take 1/64 of what is there, so that extents stay few and slack under 2 %. */
static size_t growth_step(const ms_arena *a, size_t need) {
    size_t step = round_up(a->committed / 64, a->phys->granularity);
    size_t room = a->reserved - a->committed;
    if (step < need) step = need;
    return step > room ? need : step;
}

static int commit_to(ms_arena *a, size_t end) {
    if (end <= a->committed) return MS_OK;
    size_t need = round_up(end - a->committed, a->phys->granularity);
    if (a->committed + need > a->reserved)
        return fail(a, MS_E_RESERVATION, 0, need, a->committed + need - a->reserved);
    if (a->phys->kind == MS_HOST) return a->n_extents ? grow_last(a, need) : add_extent(a, need, need);
    size_t step = growth_step(a, need);
    int error = add_extent(a, need, step);
    if (error && step > need) error = add_extent(a, need, need);
    return error;
}

static void insert_block(ms_arena *a, size_t i, ms_block block) {
    memmove(&a->blocks[i + 1], &a->blocks[i], (a->n_blocks - i) * sizeof block);
    a->blocks[i] = block;
    a->n_blocks++;
}

static void remove_block(ms_arena *a, size_t i) {
    a->n_blocks--;
    memmove(&a->blocks[i], &a->blocks[i + 1], (a->n_blocks - i) * sizeof *a->blocks);
}

static size_t best_fit(const ms_arena *a, size_t need) {
    size_t best = a->n_blocks;
    for (size_t i = 0; i < a->n_blocks; i++) {
        const ms_block *b = &a->blocks[i];
        if (b->requested || b->nbytes < need) continue;
        if (best == a->n_blocks || b->nbytes < a->blocks[best].nbytes) best = i;
    }
    return best;
}

static int take(ms_arena *a, size_t requested, size_t *offset) {
    size_t need = round_up(requested, a->unit);
    if (!reserve_array((void **)&a->blocks, &a->cap_blocks, a->n_blocks + 1, sizeof *a->blocks))
        return fail(a, MS_E_TABLE, 0, requested, 0);
    size_t i = best_fit(a, need);
    if (i < a->n_blocks) { /* a free block may lie where a resize took the memory away */
        int error = commit_to(a, a->blocks[i].offset + need);
        if (error) return error;
    }
    if (i == a->n_blocks) { /* nothing free is large enough: append at the top */
        int error = commit_to(a, a->top + need);
        if (error) return error;
        a->blocks[a->n_blocks++] = (ms_block){a->top, need, requested};
        a->top += need;
    } else if (a->blocks[i].nbytes > need) {
        ms_block *b = &a->blocks[i];
        ms_block rest = {b->offset + need, b->nbytes - need, 0};
        b->nbytes = need;
        b->requested = requested;
        insert_block(a, i + 1, rest);
    } else
        a->blocks[i].requested = requested;
    *offset = a->blocks[i].offset;
    a->live += requested;
    return MS_OK;
}

void *ms_alloc(int slot, size_t nbytes) {
    ms_arena *a = &arenas[slot];
    size_t offset = 0;
    int error;
    if (!nbytes || forked(a->phys)) return NULL;
    pthread_mutex_lock(&a->lock);
    error = a->state == MS_PAUSED ? fail(a, MS_E_PAUSED, 0, nbytes, 0) : take(a, nbytes, &offset);
    pthread_mutex_unlock(&a->lock);
    return error ? NULL : (void *)(a->base + offset);
}

static size_t block_at(const ms_arena *a, size_t offset) {
    size_t low = 0, high = a->n_blocks;
    while (low < high) {
        size_t mid = (low + high) / 2;
        if (a->blocks[mid].offset < offset)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static void merge_free(ms_arena *a, size_t i) {
    if (i + 1 < a->n_blocks && !a->blocks[i + 1].requested) {
        a->blocks[i].nbytes += a->blocks[i + 1].nbytes;
        remove_block(a, i + 1);
    }
    if (i > 0 && !a->blocks[i - 1].requested) {
        a->blocks[i - 1].nbytes += a->blocks[i].nbytes;
        remove_block(a, i--);
    }
    if (i + 1 == a->n_blocks) { /* free at the top */
        a->top = a->blocks[i].offset;
        a->n_blocks--;
    }
}

int ms_free(int slot, void *address) {
    ms_arena *a = &arenas[slot];
    if (!a->phys) return MS_E_TABLE;
    if (forked(a->phys)) return MS_OK;
    pthread_mutex_lock(&a->lock);
    size_t offset = (size_t)address - a->base;
    size_t i = block_at(a, offset);
    int ok = i < a->n_blocks && a->blocks[i].offset == offset && a->blocks[i].requested;
    if (ok) {
        a->live -= a->blocks[i].requested;
        a->blocks[i].requested = 0;
        merge_free(a, i);
    }
    pthread_mutex_unlock(&a->lock);
    return ok ? MS_OK : MS_E_TABLE;
}

int ms_find(const void *address) {
    for (int i = 0; i < MS_SLOTS; i++) {
        ms_arena *a = &arenas[i];
        if (!__atomic_load_n(&a->phys, __ATOMIC_ACQUIRE)) continue;
        if ((size_t)address - a->base < a->reserved) return i;
    }
    return -1;
}

int ms_free_any(void *address) {
    int slot = ms_find(address);
    if (slot < 0) return 0;
    ms_free(slot, address);
    return 1;
}

void ms_get_stats(int slot, ms_stats *out) {
    ms_arena *a = &arenas[slot];
    pthread_mutex_lock(&a->lock);
    size_t alive = 0;
    for (size_t i = 0; i < a->n_blocks; i++) alive += a->blocks[i].requested != 0;
    *out = (ms_stats){a->base, a->reserved, a->committed, a->top, a->live, a->n_extents, alive, a->state};
    pthread_mutex_unlock(&a->lock);
}

void ms_get_cause(int slot, ms_cause *out, int clear) {
    ms_arena *a = &arenas[slot];
    pthread_mutex_lock(&a->lock);
    *out = a->cause;
    if (clear) memset(&a->cause, 0, sizeof a->cause);
    pthread_mutex_unlock(&a->lock);
}

size_t ms_get_extents(int slot, ms_extent *out, size_t capacity) {
    ms_arena *a = &arenas[slot];
    pthread_mutex_lock(&a->lock);
    size_t n = a->n_extents;
    for (size_t i = 0; i < n && i < capacity; i++) out[i] = a->extents[i];
    pthread_mutex_unlock(&a->lock);
    return n;
}

size_t ms_get_blocks(int slot, ms_block *out, size_t capacity) {
    ms_arena *a = &arenas[slot];
    size_t n = 0;
    pthread_mutex_lock(&a->lock);
    for (size_t i = 0; i < a->n_blocks; i++) {
        if (!a->blocks[i].requested) continue;
        if (n < capacity) out[n] = a->blocks[i];
        n++;
    }
    pthread_mutex_unlock(&a->lock);
    return n;
}

int ms_set_extents(int slot, const ms_extent *extents, size_t count) {
    ms_arena *a = &arenas[slot];
    int error = MS_OK;
    pthread_mutex_lock(&a->lock);
    if (reserve_array((void **)&a->extents, &a->cap_extents, count, sizeof *extents)) {
        a->committed = 0;
        for (size_t i = 0; i < count; i++) a->committed += (a->extents[i] = extents[i]).nbytes;
        a->n_extents = count;
    } else
        error = MS_E_TABLE;
    pthread_mutex_unlock(&a->lock);
    return error;
}

void ms_set_state(int slot, int state) {
    ms_arena *a = &arenas[slot];
    pthread_mutex_lock(&a->lock);
    a->state = state;
    pthread_mutex_unlock(&a->lock);
}

static void mark(ms_extent *extents, size_t n, const uint64_t *ids, size_t count, int shared) {
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < count; k++)
            if (extents[i].id == ids[k]) extents[i].shared = shared;
}

void ms_mark_shared(ms_phys *phys, const uint64_t *ids, size_t count, int shared) {
    for (int slot = 0; slot < MS_SLOTS; slot++) {
        ms_arena *a = &arenas[slot];
        if (__atomic_load_n(&a->phys, __ATOMIC_ACQUIRE) != phys) continue;
        pthread_mutex_lock(&a->lock);
        mark(a->extents, a->n_extents, ids, count, shared);
        pthread_mutex_unlock(&a->lock);
    }
    pthread_mutex_lock(&phys->lock);
    mark(phys->kept, phys->n_kept, ids, count, shared);
    pthread_mutex_unlock(&phys->lock);
}

static size_t trim_last(ms_arena *a, size_t keep) {
    ms_extent *last = &a->extents[a->n_extents - 1];
    size_t from = last->offset > keep ? last->offset : keep;
    size_t give = a->committed - from;
    if (last->shared) return 0;
    if (from != last->offset && a->phys->kind == MS_CUDA) return 0; /* a CUDA extent cannot be split */
    if (from == last->offset) {
        if (ms_unmap(a->phys, a->base + from, give)) return 0;
        if (ms_release(a->phys, last->handle, last->nbytes)) ms_pool_put(a->phys, last, 1);
        a->n_extents--;
    } else {
        if (resize_memfd(a->phys, last->handle, last->nbytes - give)) return 0;
        ms_unmap(a->phys, a->base + from, give); /* what stays mapped has no memory, and the next growth maps over it */
        last->nbytes -= give;
        discharge(a->phys, give);
    }
    a->committed = from;
    return give;
}

static size_t shrink_to(int slot, size_t keep, int below_top) {
    ms_arena *a = &arenas[slot];
    size_t total = 0, given = 1;
    if (forked(a->phys)) return 0;
    pthread_mutex_lock(&a->lock);
    keep = round_up(below_top || keep > a->top ? keep : a->top, a->phys->granularity);
    while (a->state == MS_ACTIVE && a->committed > keep && given) total += given = trim_last(a, keep);
    pthread_mutex_unlock(&a->lock);
    return total;
}

size_t ms_trim(int slot) { return shrink_to(slot, 0, 0); }
size_t ms_shrink(int slot, size_t keep) { return shrink_to(slot, keep, 1); }

int ms_extend(int slot, const ms_extent *extents, size_t count) {
    ms_arena *a = &arenas[slot];
    int error = MS_OK;
    pthread_mutex_lock(&a->lock);
    if (reserve_array((void **)&a->extents, &a->cap_extents, a->n_extents + count, sizeof *extents))
        for (size_t i = 0; i < count; i++) a->committed += (a->extents[a->n_extents++] = extents[i]).nbytes;
    else
        error = MS_E_TABLE;
    pthread_mutex_unlock(&a->lock);
    return error;
}

/* ------------------------------------------------------------------ torch.cuda callbacks: they carry no tag, so one
 * pair of symbols per slot, named by the slot's two hex digits. */
#define PAIR(h)                                                                       \
    void *ms_cuda_alloc_##h(ptrdiff_t nbytes, int device, void *stream) {             \
        (void)device, (void)stream;                                                   \
        return ms_alloc(0x##h, (size_t)nbytes);                                       \
    }                                                                                 \
    void ms_cuda_free_##h(void *p, ptrdiff_t nbytes, int device, void *stream) {      \
        (void)nbytes, (void)device, (void)stream;                                     \
        ms_free(0x##h, p);                                                            \
    }
#define ROW(h)                                                                         \
    PAIR(h##0) PAIR(h##1) PAIR(h##2) PAIR(h##3) PAIR(h##4) PAIR(h##5) PAIR(h##6)       \
    PAIR(h##7) PAIR(h##8) PAIR(h##9) PAIR(h##a) PAIR(h##b) PAIR(h##c) PAIR(h##d)       \
    PAIR(h##e) PAIR(h##f)
ROW(0) ROW(1) ROW(2) ROW(3) ROW(4) ROW(5) ROW(6) ROW(7)
ROW(8) ROW(9) ROW(a) ROW(b) ROW(c) ROW(d) ROW(e) ROW(f)
