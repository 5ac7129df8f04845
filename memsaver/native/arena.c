/* Arenas: a tag's address range, the extents behind it, the blocks allocated in it, and torch's callbacks. */
#include "internal.h"

#include <stdlib.h>

typedef struct {
    ms_phys *phys; /* NULL: free slot */
    size_t base, reserved, unit;
    size_t committed; /* mapped prefix [0, committed) */
    size_t top;       /* end of the last block */
    size_t live;      /* requested bytes of live blocks */
    size_t frees;     /* blocks freed so far */
    int state;
    ms_extent *extents;
    size_t n_extents, cap_extents;
    ms_block *blocks; /* sorted by offset, covers [0, top) without gaps, free neighbors merged */
    size_t n_blocks, cap_blocks;
    ms_cause cause;
    pthread_mutex_t lock;
} ms_arena;

static ms_arena arenas[MS_SLOTS];
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Threads that held a lock at the fork do not exist in the child, so nothing would release it. */
static void unlock_in_child(void) {
    pthread_mutex_init(&table_lock, NULL);
    for (int i = 0; i < MS_SLOTS; i++)
        if (arenas[i].phys) {
            pthread_mutex_init(&arenas[i].lock, NULL);
            pthread_mutex_init(&arenas[i].phys->lock, NULL);
        }
    ms_new_ids_in_child();
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, unlock_in_child); }

int ms_arena_new(ms_phys *phys, size_t base, size_t reserved, size_t unit) {
    int slot = -1;
    pthread_once(&once, watch_forks);
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

/* A memfd can grow in place, so a host arena grows its last extent, by whole pages, instead of adding one. */
static int grow_last(ms_arena *a, size_t more) {
    ms_extent *last = &a->extents[a->n_extents - 1];
    ms_cause cause = {0};
    if (ms_charge(a->phys, more, &cause)) {
        ms_pool_drop(a->phys, cause.missing);
        if (ms_charge(a->phys, more, &cause)) return fail(a, cause.code, 0, more, cause.missing);
    }
    int error = ms_resize_memfd(a->phys, last->handle, last->nbytes + more);
    if (!error) {
        error = ms_map(a->phys, a->base + a->committed, more, last->handle, last->nbytes, 1);
        if (error) ms_resize_memfd(a->phys, last->handle, last->nbytes);
    }
    if (error) {
        ms_discharge(a->phys, more);
        return fail(a, MS_E_DRIVER, error, more, 0);
    }
    last->nbytes += more;
    a->committed += more;
    return MS_OK;
}

/* Map an extent at the arena's end: a retained one of `need` to `nbytes` bytes, else a new one of `nbytes`. */
static int add_extent(ms_arena *a, size_t need, size_t nbytes) {
    if (!ms_reserve_array((void **)&a->extents, &a->cap_extents, a->n_extents + 1, sizeof *a->extents))
        return fail(a, MS_E_TABLE, 0, nbytes, 0);
    ms_extent extent;
    ms_cause cause;
    int kept = ms_pool_fit(a->phys, need, nbytes, &extent);
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

/* CUDA extents cannot grow. Adding 1/64 of the arena at a time keeps extents few and slack under 2 %. */
static size_t growth_step(const ms_arena *a, size_t need) {
    size_t step = ms_round_up(a->committed / 64, a->phys->granularity);
    size_t room = a->reserved - a->committed;
    if (step < need) step = need;
    return step > room ? need : step;
}

static int commit_to(ms_arena *a, size_t end) {
    if (end <= a->committed) return MS_OK;
    size_t need = ms_round_up(end - a->committed, a->phys->granularity);
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
    size_t need = ms_round_up(requested, a->unit);
    if (!ms_reserve_array((void **)&a->blocks, &a->cap_blocks, a->n_blocks + 1, sizeof *a->blocks))
        return fail(a, MS_E_TABLE, 0, requested, 0);
    size_t i = best_fit(a, need);
    if (i < a->n_blocks) { /* a resize may have released the memory behind a free block */
        int error = commit_to(a, a->blocks[i].offset + need);
        if (error) return error;
    }
    if (i == a->n_blocks) { /* no free block is large enough: append at the top */
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
    if (!nbytes || ms_forked(a->phys)) return NULL;
    pthread_mutex_lock(&a->lock);
    if (a->state == MS_PAUSED)
        error = fail(a, MS_E_PAUSED, 0, nbytes, 0);
    else if (nbytes > a->reserved) /* rounding up could overflow to 0 */
        error = fail(a, MS_E_RESERVATION, 0, nbytes, nbytes - a->reserved);
    else
        error = take(a, nbytes, &offset);
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
    if (ms_forked(a->phys)) return MS_OK;
    pthread_mutex_lock(&a->lock);
    size_t offset = (size_t)address - a->base;
    size_t i = block_at(a, offset);
    int ok = i < a->n_blocks && a->blocks[i].offset == offset && a->blocks[i].requested;
    if (ok) {
        a->frees++;
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

/* Waits also while another thread captures a graph, and in a thread without a current context, such as a finalizer's.
 * Does not wait for a stream that is capturing: that would break the capture, and nothing is running. */
void ms_wait_for_stream(int slot, void *stream) {
    ms_phys *phys = arenas[slot].phys;
    if (!phys || phys->kind != MS_CUDA || ms_forked(phys)) return;
    const ms_driver *driver = &phys->driver;
    int mode = MS_CUDA_RELAXED, status = 0;
    void *context;
    if (driver->push(driver->context)) return; /* the process is exiting */
    driver->capture_mode(&mode);
    if (!driver->capturing(stream, &status) && !status) driver->synchronize(stream);
    driver->capture_mode(&mode);
    driver->pop(&context);
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
    *out = (ms_stats){a->base, a->reserved, a->committed, a->top, a->live, a->n_extents, alive, a->frees, a->state};
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
    if (ms_reserve_array((void **)&a->extents, &a->cap_extents, count, sizeof *extents)) {
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
        if (ms_resize_memfd(a->phys, last->handle, last->nbytes - give)) return 0;
        ms_unmap(a->phys, a->base + from, give); /* if this fails, the next growth maps over it */
        last->nbytes -= give;
        ms_discharge(a->phys, give);
    }
    a->committed = from;
    return give;
}

static size_t shrink_to(int slot, size_t keep, int below_top) {
    ms_arena *a = &arenas[slot];
    size_t total = 0, given = 1;
    if (ms_forked(a->phys)) return 0;
    pthread_mutex_lock(&a->lock);
    keep = ms_round_up(below_top || keep > a->top ? keep : a->top, a->phys->granularity);
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
    if (ms_reserve_array((void **)&a->extents, &a->cap_extents, a->n_extents + count, sizeof *extents))
        for (size_t i = 0; i < count; i++) a->committed += (a->extents[a->n_extents++] = extents[i]).nbytes;
    else
        error = MS_E_TABLE;
    pthread_mutex_unlock(&a->lock);
    return error;
}

/* Callbacks for torch. */

/* From CPython, which has loaded this library. */
typedef struct PyObject PyObject;
int Py_IsInitialized(void);
int PyGILState_Ensure(void);
void PyGILState_Release(int state);
void Py_IncRef(PyObject *object);
void Py_DecRef(PyObject *object);
PyObject *PyErr_NoMemory(void);
PyObject *PyCapsule_New(void *pointer, const char *name, void (*destructor)(PyObject *));

typedef struct { /* DLManagedTensor of DLPack 0 (dmlc/dlpack, include/dlpack/dlpack.h) */
    struct {
        void *data;
        int32_t device_type, device_id, ndim;
        uint8_t code, bits;
        uint16_t lanes;
        int64_t *shape, *strides;
        uint64_t byte_offset;
    } tensor;
    PyObject *context; /* the object that the tensor keeps alive */
    void (*deleter)(void *);
    int64_t nbytes, stride; /* not part of DLPack: storage for shape and strides */
} ms_dlpack_tensor;

/* In C, because a deleter in Python fails if the tensor dies while an exception propagates. */
static void delete_dlpack(void *managed) {
    if (!Py_IsInitialized())
        return;
    int state = PyGILState_Ensure();
    Py_DecRef(((ms_dlpack_tensor *)managed)->context);
    PyGILState_Release(state);
    free(managed);
}

/* Return a DLPack capsule of a uint8 tensor [nbytes] that keeps `keeper` alive. The caller holds the GIL. */
PyObject *ms_dlpack(size_t address, size_t nbytes, int device_type, int device_id, PyObject *keeper) {
    ms_dlpack_tensor *managed = calloc(1, sizeof *managed);
    if (!managed)
        return PyErr_NoMemory();
    managed->nbytes = (int64_t)nbytes, managed->stride = 1;
    managed->tensor.data = (void *)address;
    managed->tensor.device_type = device_type, managed->tensor.device_id = device_id;
    managed->tensor.ndim = 1;
    managed->tensor.code = 1, managed->tensor.bits = 8, managed->tensor.lanes = 1; /* kDLUInt */
    managed->tensor.shape = &managed->nbytes, managed->tensor.strides = &managed->stride;
    managed->context = keeper;
    managed->deleter = delete_dlpack;
    Py_IncRef(keeper);
    return PyCapsule_New(managed, "dltensor", NULL);
}

/* The pluggable allocator's calls carry no tag, so each slot has its own pair of symbols, named by its hex digits. */

#define PAIR(h)                                                                       \
    void *ms_cuda_alloc_##h(ptrdiff_t nbytes, int device, void *stream) {             \
        (void)device, (void)stream;                                                   \
        return ms_alloc(0x##h, (size_t)nbytes);                                       \
    }                                                                                 \
    void ms_cuda_free_##h(void *p, ptrdiff_t nbytes, int device, void *stream) {      \
        (void)nbytes, (void)device;                                                   \
        ms_wait_for_stream(0x##h, stream);                                            \
        ms_free(0x##h, p);                                                            \
    }
#define ROW(h)                                                                         \
    PAIR(h##0) PAIR(h##1) PAIR(h##2) PAIR(h##3) PAIR(h##4) PAIR(h##5) PAIR(h##6)       \
    PAIR(h##7) PAIR(h##8) PAIR(h##9) PAIR(h##a) PAIR(h##b) PAIR(h##c) PAIR(h##d)       \
    PAIR(h##e) PAIR(h##f)
ROW(0) ROW(1) ROW(2) ROW(3) ROW(4) ROW(5) ROW(6) ROW(7)
ROW(8) ROW(9) ROW(a) ROW(b) ROW(c) ROW(d) ROW(e) ROW(f)
