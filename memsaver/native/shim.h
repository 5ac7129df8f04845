/* The table of physical memory: limits, extents and blocks of every arena.
 *
 * Plain C, so that torch's allocators can call it under their own locks without Python. Python creates the objects and
 * drives pause and resume; torch's callbacks only allocate (and grow) and free. Lock order: arena, then phys.
 * shim.py parses the prototypes, so each must be on one line.
 */
#ifndef MEMSAVER_SHIM_H
#define MEMSAVER_SHIM_H
#include <stddef.h>
#include <stdint.h>

#define MS_SLOTS 256

enum { MS_HOST = 0, MS_CUDA = 1 };
enum { MS_ACTIVE = 0, MS_PAUSED = 1 };
enum {
    MS_OK = 0,
    MS_E_LIMIT = 1,       /* limit_bytes would be exceeded */
    MS_E_DRIVER = 2,      /* the driver or the kernel refused: see ms_cause.driver */
    MS_E_RESERVATION = 3, /* the tag has outgrown its address range */
    MS_E_PAUSED = 4,      /* allocation on a paused tag */
    MS_E_TABLE = 5,       /* no host memory for the tables, or no free slot */
    MS_E_FORKED = 6       /* called in a forked child */
};

typedef struct {
    int code;
    int driver;       /* errno or CUresult */
    size_t requested; /* bytes the failed call asked for */
    size_t missing;   /* bytes short of the limit or of the reservation, 0 when unknown */
} ms_cause;

typedef struct {
    uint64_t handle; /* memfd or CUmemGenericAllocationHandle */
    uint64_t id;     /* the same in every process, for the memory's life */
    size_t offset;   /* in the arena; 0 in the page pool */
    size_t nbytes;
    int shared; /* imported by another process: only Python, which can revoke the import, may release it */
} ms_extent;

typedef struct {
    size_t offset;
    size_t nbytes;    /* rounded to the arena's unit */
    size_t requested; /* 0: free */
} ms_block;

enum { /* driver calls; Python makes the last three */
    MS_CREATE, MS_RELEASE, MS_MAP, MS_SET_ACCESS, MS_UNMAP, MS_RESIZE, MS_COPY, MS_EXPORT, MS_IMPORT,
    MS_RESERVE, MS_UNRESERVE, MS_SYNCHRONIZE, MS_OPERATIONS
};
#define MS_RECENT 1024

typedef struct { /* one driver call */
    uint64_t ns;
    size_t nbytes;
    int operation, error;
} ms_call;

typedef struct { /* all calls of one operation */
    uint64_t calls, failed, nbytes, ns; /* nbytes: successful calls only */
} ms_calls;

typedef struct {
    size_t base, reserved, committed, top, live;
    size_t extents, blocks, frees; /* frees: since the arena was created */
    int state;
} ms_stats;

typedef struct { /* CUDA driver entry points and arguments, passed in by Python */
    int (*create)(uint64_t *handle, size_t nbytes, const void *prop, unsigned long long flags);
    int (*release)(uint64_t handle);
    int (*map)(uint64_t address, size_t nbytes, size_t offset, uint64_t handle, unsigned long long flags);
    int (*unmap)(uint64_t address, size_t nbytes);
    int (*set_access)(uint64_t address, size_t nbytes, const void *desc, size_t count);
    int (*export_fd)(void *fd, uint64_t handle, int type, unsigned long long flags);
    int (*import_fd)(uint64_t *handle, void *fd, int type);
    int (*copy)(uint64_t to, uint64_t from, size_t nbytes, void *stream);
    int (*push)(void *context);
    int (*pop)(void **context);
    int (*capture_mode)(int *mode); /* exchanges the thread's mode */
    int (*capturing)(void *stream, int *status); /* status 0: not capturing */
    int (*synchronize)(void *stream);
    void *context; /* the device's primary context */
    const void *prop;
    const void *access;
} ms_driver;
#define MS_CUDA_RELAXED 2    /* CU_STREAM_CAPTURE_MODE_RELAXED */
#define MS_CUDA_FD 1         /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */
#define MS_CUDA_E_SYSTEM 304 /* CUDA_ERROR_OPERATING_SYSTEM */

typedef struct { /* device or host addresses */
    uint64_t to, from;
    size_t nbytes;
} ms_transfer;

typedef struct ms_phys ms_phys;

ms_phys *ms_phys_new(int kind, size_t granularity, size_t limit, const ms_driver *driver);
void ms_phys_free(ms_phys *phys);
int ms_forked(const ms_phys *phys); /* whether this is a forked child of its process */
size_t ms_phys_committed(ms_phys *phys);
size_t ms_phys_limit(ms_phys *phys);
void ms_phys_set_limit(ms_phys *phys, size_t limit);

/* Extents and mappings. nbytes of ms_release is what ms_create counted (0 for an imported handle).
 * ms_create releases retained extents if the limit or the driver refuses. */
int ms_create(ms_phys *phys, size_t nbytes, ms_extent *out, ms_cause *cause);
int ms_release(ms_phys *phys, uint64_t handle, size_t nbytes);
int ms_charge(ms_phys *phys, size_t nbytes, ms_cause *cause); /* for extents received from another saver */
void ms_discharge(ms_phys *phys, size_t nbytes);              /* for extents handed to one */
int ms_export(ms_phys *phys, uint64_t handle, int *fd); /* the caller owns *fd; the driver's error or errno */
int ms_import(ms_phys *phys, int fd, uint64_t *handle); /* takes ownership of `fd`, also on failure */
int ms_map(ms_phys *phys, size_t address, size_t nbytes, uint64_t handle, size_t offset, int writable);
int ms_set_access(ms_phys *phys, size_t address, size_t nbytes);
int ms_unmap(ms_phys *phys, size_t address, size_t nbytes);

/* Copies in order, up to the first error: on a GPU queued on `stream`, on the host done when it returns. */
int ms_copy(ms_phys *phys, const ms_transfer *transfers, size_t count, void *stream);

/* The page pool: retained extents, which no arena maps; they count as committed. */
int ms_pool_put(ms_phys *phys, const ms_extent *extents, size_t count); /* all or none */
size_t ms_pool_take(ms_phys *phys, size_t nbytes, ms_extent *out, size_t capacity); /* at most nbytes in total */
size_t ms_pool_get(ms_phys *phys, ms_extent *out, size_t capacity);
size_t ms_pool_drop(ms_phys *phys, size_t nbytes); /* releases at least nbytes, if any; returns bytes */

/* All driver calls are counted and timed, and the latest are kept; Python reports its own with ms_record. */
void ms_record(ms_phys *phys, int operation, size_t nbytes, uint64_t ns, int error);
void ms_get_calls(ms_phys *phys, ms_calls *out);                        /* [MS_OPERATIONS] */
size_t ms_get_recent(ms_phys *phys, uint64_t *seen, ms_call *out);      /* [MS_RECENT]: calls after number `*seen` */

/* Fault injection, for tests: driver call number `after` from now (1: the next one) fails with `error`, once.
 * Python checks its own calls with ms_fault. Returns the number of calls since the last ms_inject. */
long ms_inject(ms_phys *phys, long after, int error);
int ms_fault(ms_phys *phys); /* 0, or the error that this call must fail with */

/* Arenas. A slot is an arena's index, and in hex the XX of ms_cuda_alloc_XX and ms_cuda_free_XX. */
int ms_arena_new(ms_phys *phys, size_t base, size_t reserved, size_t unit);
int ms_arena_free(int slot); /* MS_E_PAUSED if blocks are alive: the slot then stays in use */
void *ms_alloc(int slot, size_t nbytes);
int ms_free(int slot, void *address);
void ms_wait_for_stream(int slot, void *stream); /* before memory that it used goes to another stream */
int ms_free_any(void *address); /* 1 if an arena owned it */
int ms_find(const void *address); /* slot or -1 */
void ms_get_stats(int slot, ms_stats *out);
void ms_get_cause(int slot, ms_cause *out, int clear);
size_t ms_get_extents(int slot, ms_extent *out, size_t capacity);
size_t ms_get_blocks(int slot, ms_block *out, size_t capacity); /* live blocks only */
int ms_set_extents(int slot, const ms_extent *extents, size_t count);
void ms_set_state(int slot, int state);
void ms_mark_shared(ms_phys *phys, const uint64_t *ids, size_t count, int shared); /* in arenas and in the page pool */
size_t ms_trim(int slot);                /* releases the unused tail; returns bytes */
size_t ms_shrink(int slot, size_t keep); /* releases memory after the first `keep` bytes, blocks or not */
int ms_extend(int slot, const ms_extent *extents, size_t count); /* appends extents that are mapped at the end */
#endif
