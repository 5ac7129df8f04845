/* What torch calls. */
#include "shim.h"

/* Of CPython, which has loaded this library. */
typedef struct PyObject PyObject;
int Py_IsInitialized(void);
int PyGILState_Ensure(void);
void PyGILState_Release(int state);
void Py_DecRef(PyObject *object);

typedef struct { /* DLManagedTensor of DLPack 0 */
    struct {
        void *data;
        int32_t device_type, device_id, ndim;
        uint8_t code, bits;
        uint16_t lanes;
        int64_t *shape, *strides;
        uint64_t byte_offset;
    } tensor;
    PyObject *context; /* what the tensor keeps alive, this structure with it */
    void (*deleter)(void *);
} ms_dlpack;

/* In C: a deleter written in Python fails where a tensor dies while an exception unwinds. */
void ms_dlpack_delete(ms_dlpack *managed) {
    if (!Py_IsInitialized())
        return;
    int state = PyGILState_Ensure();
    Py_DecRef(managed->context);
    PyGILState_Release(state);
}

/* The pluggable allocator's calls carry no tag, so one pair of symbols per slot, named by the slot's two hex digits. */

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
