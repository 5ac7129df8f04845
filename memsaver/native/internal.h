/* Declarations that the shim's C files share. Lock order: arena, then phys. */
#ifndef MEMSAVER_INTERNAL_H
#define MEMSAVER_INTERNAL_H
#include "shim.h"

#include <pthread.h>
#include <string.h>
#include <sys/types.h>

struct ms_phys {
    int kind;
    size_t granularity, limit, committed;
    ms_driver driver;
    pid_t owner;
    ms_extent *kept; /* the page pool, largest first */
    size_t n_kept, cap_kept;
    ms_calls calls[MS_OPERATIONS];
    ms_call recent[MS_RECENT];
    uint64_t n_recorded;
    long countdown, counted; /* fault injection */
    int fault;
    pthread_mutex_t lock;
};

static inline size_t ms_round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

uint64_t ms_clock_ns(void);
/* Record a driver call that began at `started`; returns `error`. */
int ms_recorded(ms_phys *phys, int operation, size_t nbytes, uint64_t started, int error);
/* Grow an array's capacity to `count` items; returns 0, with nothing changed, if host memory is short. */
int ms_reserve_array(void **array, size_t *capacity, size_t count, size_t item);
void ms_new_ids_in_child(void);
int ms_resize_memfd(ms_phys *phys, uint64_t handle, size_t nbytes);
/* Remove the smallest retained extent of `need` to `most` bytes; returns 0 if there is none. */
int ms_pool_fit(ms_phys *phys, size_t need, size_t most, ms_extent *out);
#endif
