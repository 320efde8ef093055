// tensors.h: torch's tensors, read and made through the table of functions that DLPack defines and torch.Tensor offers.
#ifndef ATTEMPER_TENSORS_H
#define ATTEMPER_TENSORS_H
#include "module.h"

typedef struct {  // a tensor as it is read
    char *at;  // NULL if it is empty
    int64_t device, number;  // ON_CPU …, and which of them
    int64_t dtype;           // F32 … BOOL of call.h, minus the bits of a signed integer, COMPLEX or NONE
    int dims;
    int64_t shape[5], step[5];  // of the first dimensions
} View;
enum { ON_CPU = 1, ON_CUDA = 2 };  // of DLPack
enum { COMPLEX = NONE + 1 };

// Take torch's table; 0 if it is of a version that is not known here.
int tensors_bind(PyObject *capsule);
// Whether there is a table.
int tensors_bound(void);
// Read an instance of torch.Tensor; where there is no table, a tuple of its address, dtype, sizes and strides. 0, without an error, for
// anything else, and for a tensor that has no address, sizes and strides.
int tensor_read(PyObject *tensor, View *to);
// Whether a tensor is on the CPU, of this dtype and shape
int has_shape(const View *view, int64_t dtype, int dims, const int64_t *shape);
int is_contiguous(const View *view);
// A new torch tensor, contiguous, on memory that it gives back by release(owner) at its end, in any thread. NULL with an error set.
PyObject *tensor_make(void *data, int dims, const int64_t *shape, int64_t dtype, void *owner, void (*release)(void *));
#endif
