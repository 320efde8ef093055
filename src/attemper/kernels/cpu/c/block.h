// block.h: all signs of a call in one block of memory.
#ifndef ATTEMPER_BLOCK_H
#define ATTEMPER_BLOCK_H
#include "module.h"

typedef struct {  // a result of one number per row, or of one per number of the output
    const char *name;
    int64_t bit;  // of sign_bits
    int dims;
    int64_t dtype;  // as in View; NONE: the dtype of measuring
    size_t offset;  // of its address in Call
} Entry;
enum { FIELD_COUNT = 10 };
extern const Entry FIELDS[FIELD_COUNT];  // as Results of contract.py lists them, without the output

typedef struct {  // what tensors share; it ends with the last of them, in whatever thread that is
    int64_t users;
} Memory;
enum { ALIGNED = 64 };  // the numbers begin so far behind; each sign begins at a multiple of it, and so do torch's tensors
Memory *memory_new(size_t bytes);  // NULL with an error set
void memory_release(void *memory);

int block_bind(PyObject *module);  // makes the type; -1 with an error set
// Memory for what `call->sign_bits` asks for, the addresses of the call pointing into it; NULL with an error set. `kept` says that a
// backward will read it.
PyObject *block_new(Call *call, int kept);
// The addresses of all signs of a block in float32, visible … sum_p2 and lse_low, and their shape; 0, without an error, for anything else.
int block_read(PyObject *found, const void *at[8], int64_t shape[3]);

// The gradients of a call, of which the problem, the numbers, `needs_grad` and what was saved are read already. `tensors` are its query,
// key, value, mask and gain, `upstream` the gradients that arrive, `given` memory for gradients, or NULL. None if something has to be
// copied or cast first.
PyObject *differentiate(Call *call, PyObject *const *tensors, PyObject *upstream, PyObject *given);
// Set the error of a saved tensor that was changed.
PyObject *set_changed(void);
#endif
