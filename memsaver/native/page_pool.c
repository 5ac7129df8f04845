/* The page pool: extents that nothing maps, the largest first. */
#include "internal.h"

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
