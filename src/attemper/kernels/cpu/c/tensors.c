// tensors.c: torch's tensors, read and made through DLPack's table of functions, so that nothing of torch is linked.
#include "module.h"

#include <stdlib.h>

typedef struct {  // DLTensor of DLPack 1.x
    char *data;
    struct { int32_t kind, number; } device;
    int32_t dims;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *stride;
    uint64_t offset;  // in bytes
} Tensor;

typedef struct Managed Managed;
struct Managed {  // DLManagedTensorVersioned of DLPack 1.x, and room for its sizes and strides
    uint32_t major, minor;
    void *owner;
    void (*end)(Managed *);
    uint64_t flags;
    Tensor tensor;
    int64_t shape[4], stride[4];
    void (*release)(void *);
};

typedef struct {  // DLPackExchangeAPI from 1.3 on; its beginning does not change before 2.0
    uint32_t major, minor;
    void *older, *allocate, *from_python;
    int (*make)(Managed *, void **to);
    int (*read)(void *tensor, Tensor *to);
} Table;

enum { INT_CODE = 0, FLOAT_CODE = 2, BFLOAT_CODE = 4, COMPLEX_CODE = 5, BOOL_CODE = 6 };  // of DLPack
static const Table *table;

int tensors_bind(PyObject *capsule) {
    const Table *found = capsule == Py_None ? NULL : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    PyErr_Clear();  // a capsule with another name is another version of the table
    table = found && found->major == 1 && found->minor >= 3 && found->read && found->make ? found : NULL;
    return table != NULL;
}

int tensors_bound(void) { return table != NULL; }

static int64_t dtype_of(const Tensor *t) {
    int bits = t->dtype.bits;
    if (t->dtype.lanes != 1) return NONE;
    if (t->dtype.code == INT_CODE) return -bits;
    if (t->dtype.code == BFLOAT_CODE) return bits == 16 ? BF16 : NONE;
    if (t->dtype.code == BOOL_CODE) return bits == 8 ? BOOL : NONE;
    if (t->dtype.code == COMPLEX_CODE) return COMPLEX;
    if (t->dtype.code != FLOAT_CODE) return NONE;
    return bits == 32 ? F32 : bits == 64 ? F64 : bits == 16 ? F16 : NONE;
}

// A tensor as (address, dtype, sizes …, strides …), which is on the CPU
static int read_tuple(PyObject *given, View *to) {
    int64_t numbers[12], count = PyTuple_Size(given);
    if (count < 2 || count > 12 || count % 2) return 0;
    for (int i = 0; i < count; i++) numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(given, i));
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    *to = (View){.at = (char *)(intptr_t)numbers[0], .device = ON_CPU, .dtype = numbers[1], .dims = (int)(count - 2) / 2};
    for (int i = 0; i < to->dims; i++) to->shape[i] = numbers[2 + i], to->step[i] = numbers[2 + to->dims + i];
    return 1;
}

int tensor_read(PyObject *tensor, View *to) {
    Tensor read;
    if (!table) return PyTuple_CheckExact(tensor) && read_tuple(tensor, to);
    if (!PyObject_TypeCheck(tensor, (PyTypeObject *)bound.Tensor)) return 0;
    if (table->read(tensor, &read)) {
        PyErr_Clear();
        return 0;
    }
    *to = (View){.at = read.data ? read.data + read.offset : NULL, .device = read.device.kind, .number = read.device.number,
                 .dtype = dtype_of(&read), .dims = read.dims};
    for (int i = 0; i < read.dims && i < 5; i++) to->shape[i] = read.shape[i], to->step[i] = read.stride[i];
    for (int i = 0; i < read.dims; i++)
        if (!read.shape[i]) to->at = NULL;
    return 1;
}

int has_shape(const View *view, int64_t dtype, int dims, const int64_t *shape) {
    if (view->device != ON_CPU || view->dtype != dtype || view->dims != dims) return 0;
    for (int i = 0; i < dims; i++)
        if (view->shape[i] != shape[i]) return 0;
    return 1;
}

int is_contiguous(const View *view) {
    int64_t step = 1;
    for (int i = view->dims; i-- > 0; step *= view->shape[i])
        if (view->at && view->shape[i] > 1 && view->step[i] != step) return 0;
    return 1;
}

static void end(Managed *managed) {
    managed->release(managed->owner);
    free(managed);
}

PyObject *tensor_make(void *data, int dims, const int64_t *shape, int64_t dtype, void *owner, void (*release)(void *)) {
    void *made = NULL;
    Managed *managed = malloc(sizeof *managed);
    if (!managed) {
        release(owner);
        return PyErr_NoMemory();
    }
    *managed = (Managed){.major = 1, .minor = 3, .owner = owner, .end = end, .release = release};
    managed->tensor = (Tensor){.data = data, .device = {ON_CPU, 0}, .dims = dims, .dtype = {FLOAT_CODE, 0, 1}};
    managed->tensor.dtype.code = dtype < 0 ? INT_CODE : FLOAT_CODE;
    managed->tensor.dtype.bits = (uint8_t)(dtype < 0 ? -dtype : 8 * SIZE[dtype]);
    managed->tensor.shape = managed->shape, managed->tensor.stride = managed->stride;
    int64_t step = 1;
    for (int i = dims; i-- > 0; step *= shape[i]) managed->shape[i] = shape[i], managed->stride[i] = step;
    return table->make(managed, &made) ? NULL : made;
}
