/* What torch.cuda's pluggable allocator calls. The calls carry no tag, so one pair of symbols per slot, named by the
 * slot's two hex digits. */
#include "shim.h"

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
