// block.c: all signs of a call in one block of memory. Each is an attribute; its first reading makes a torch tensor on the block, without
// a copy, with a version counter and a storage of its own. Later ones give the same tensor: Dynamo takes two on one memory for a mistake.
// A tensor keeps the memory of the whole block. What autograd saves of a call is one tensor over all of it, and a block without memory.
#include <stdlib.h>
#include <string.h>

#include "block.h"
#include "problem.h"

enum { BYTES = -8 };  // a dtype
#define MOST ((size_t)PTRDIFF_MAX / 64)  // of the bytes of a sign: the sum of all does not overflow

typedef struct {
    PyObject_HEAD
    Memory *memory;  // NULL of a block that was saved
    size_t bytes, start[FIELD_COUNT];
    int64_t shape[4];
    int64_t left, right;
    double scale, softcap;
    int64_t bits;
    int wide, kept, inference;      // the last: whether the call was made in inference mode
    PyObject *made[FIELD_COUNT];  // the tensors of the fields that were read
} Block;

#define ROW(NAME, BIT, DTYPE) {#NAME, BIT, 3, DTYPE, offsetof(Call, measured.NAME)}
const Entry FIELDS[FIELD_COUNT] = {
    {"output_low", OUTPUT_LOW, 4, -16, offsetof(Call, output_low)},
    ROW(argmax, ARGMAX, -64), ROW(lse_low, LSE, NONE), ROW(visible, VISIBLE, -32), ROW(mean, MEAN, NONE),
    ROW(variance, VARIANCE, NONE), ROW(peak, PEAK, NONE), ROW(lse, ~0, NONE), ROW(entropy, ENTROPY, NONE), ROW(sum_p2, P2, NONE),
};
enum { SIGNS = 3 };  // the place of `visible`, the first of the signs, after that of `lse_low`
enum { ABSENT = 1 };  // as the start of a field that the call does not write
static PyTypeObject *block_type;

// The addresses of the fields in memory, put into a call
static void place(const Block *block, char *memory, Call *call) {
    for (int i = 0; i < FIELD_COUNT; i++) {
        void *at = block->start[i] == ABSENT ? NULL : memory + block->start[i];
        memcpy((char *)call + FIELDS[i].offset, &at, sizeof at);
    }
}

Memory *memory_new(size_t bytes) {
    Memory *memory = bytes > PTRDIFF_MAX / 2 ? NULL : aligned_alloc(ALIGNED, ALIGNED + (bytes + ALIGNED - 1) / ALIGNED * ALIGNED);
    if (memory)
        *memory = (Memory){1};
    else
        PyErr_Format(PyExc_MemoryError, "attention(): kernel='cpu' found no memory for the signs of its rows. Ask for fewer signs=.");
    return memory;
}

void memory_release(void *memory) {
    if (__atomic_sub_fetch(&((Memory *)memory)->users, 1, __ATOMIC_ACQ_REL) == 0) free(memory);
}

// More than there can be where it overflows: of an expanded query without memory for each row
static size_t bytes_of(const Block *block, const Entry *entry) {
    size_t found = entry->dtype < 0 ? (size_t)(-entry->dtype / 8) : block->wide ? 8 : 4;
    for (int i = 0; i < entry->dims; i++)
        if (__builtin_mul_overflow(found, (size_t)block->shape[i], &found) || found > MOST) return MOST;
    return found;
}

// Whether a call that is asked for `bits` writes this field: `lse` always, and a backward reads `lse_low`.
static int is_there(const Entry *entry, const Call *call, int kept) {
    int64_t bits = call->sign_bits;
    if (entry->bit == OUTPUT_LOW) return bits & OUTPUT_LOW && call->output && (call->dtype == BF16 || call->dtype == F16);
    return bits & entry->bit || (kept && (entry->dtype == NONE && entry->bit == LSE)) || entry->bit == ~0;
}

PyObject *block_new(Call *call, int kept) {
    int inference = returns(bound.inference_mode, Py_True);
    Block *block = inference < 0 ? NULL : PyObject_GC_New(Block, block_type);
    if (!block) return NULL;
    *block = (Block){.ob_base = block->ob_base, .left = call->left, .right = call->right, .scale = call->scale,
                     .softcap = call->softcap, .bits = call->sign_bits, .wide = call->dtype == F64, .kept = kept,
                     .inference = inference};
    memcpy(block->shape, (int64_t[]){call->batch, call->heads, call->rows, call->value_dim}, sizeof block->shape);
    for (int i = 0; i < FIELD_COUNT; i++) {
        int there = is_there(&FIELDS[i], call, kept);
        block->start[i] = there ? block->bytes : ABSENT;
        if (there) block->bytes += (bytes_of(block, &FIELDS[i]) + ALIGNED - 1) / ALIGNED * ALIGNED;
    }
    block->memory = memory_new(block->bytes);
    if (!block->memory) {
        Py_DECREF(block);
        return NULL;
    }
    place(block, (char *)block->memory + ALIGNED, call);
    return (PyObject *)block;
}

static int block_clear(Block *block) {
    for (int i = 0; i < FIELD_COUNT; i++) Py_CLEAR(block->made[i]);
    return 0;
}

static int block_traverse(Block *block, visitproc visit, void *arg) {
    for (int i = 0; i < FIELD_COUNT; i++) Py_VISIT(block->made[i]);
    Py_VISIT(Py_TYPE((PyObject *)block));
    return 0;
}

static void block_end(Block *block) {
    PyTypeObject *type = Py_TYPE((PyObject *)block);
    PyObject_GC_UnTrack(block);
    block_clear(block);
    if (block->memory) memory_release(block->memory);
    PyObject_GC_Del(block);
    Py_DECREF(type);  // an instance of a type on the heap owns it
}

// The tensor of a field; None if the call did not measure it.
static PyObject *block_get(Block *block, void *number) {
    int i = (int)(intptr_t)number;
    const Entry *entry = &FIELDS[i];
    if (block->start[i] == ABSENT || !block->memory) Py_RETURN_NONE;
    if (block->made[i]) return Py_NewRef(block->made[i]);
    int inference = returns(bound.inference_mode, Py_True);
    if (inference < 0) return NULL;
    if (inference != block->inference)  // it is a tensor of the mode of its call, whenever it is read
        return PyObject_CallFunction(bound.read_in, "OOs", block->inference ? Py_True : Py_False, block, entry->name);
    Memory *memory = block->memory;
    void *data = (char *)memory + ALIGNED + block->start[i];
    if (block->kept) {  // a copy, so that whoever writes into the sign does not change what the backward reads
        memory = memory_new(bytes_of(block, entry));
        if (!memory) return NULL;
        data = memcpy((char *)memory + ALIGNED, data, bytes_of(block, entry));
    } else
        __atomic_add_fetch(&memory->users, 1, __ATOMIC_RELAXED);
    int64_t dtype = entry->dtype == NONE ? (block->wide ? F64 : F32) : entry->dtype;
    PyObject *found = tensor_make(data, entry->dims, block->shape, dtype, memory, memory_release);
    block->made[i] = Py_XNewRef(found);
    if (!PyObject_GC_IsTracked((PyObject *)block)) PyObject_GC_Track(block);  // a tensor may have attributes, and they a cycle
    return found;
}

int block_read(PyObject *found, const void *at[8], int64_t shape[3]) {
    const Block *block = (Block *)found;
    if (Py_TYPE(found) != block_type || block->wide) return 0;
    if (!block->memory) return 0;
    for (int i = 0; i < 8; i++) {
        int field = i < 7 ? SIGNS + i : SIGNS - 1;
        int there = block->start[field] != ABSENT;
        if (!there && i < 7) return 0;
        at[i] = there ? (char *)block->memory + ALIGNED + block->start[field] : NULL;
    }
    memcpy(shape, block->shape, 3 * sizeof *shape);
    return 1;
}

// Whether a field is a sign that was asked for and has a gradient: mean … sum_p2
static int has_gradient(const Block *block, const Entry *entry) {
    return entry->dtype == NONE && entry->offset != offsetof(Call, measured.lse_low) && block->bits & (entry->bit == ~0 ? LSE : entry->bit);
}

// A copy of all signs with a gradient in one tensor, one after another; None if there are none. A Function that returns one tensor more
// takes a fifth of the time of one that returns six.
static PyObject *block_packed(Block *block, void *none) {
    (void)none;
    int64_t shape[4] = {0, block->shape[0], block->shape[1], block->shape[2]};
    for (int i = 0; i < FIELD_COUNT; i++) shape[0] += has_gradient(block, &FIELDS[i]);
    if (!shape[0] || !block->memory) Py_RETURN_NONE;
    size_t each = bytes_of(block, &FIELDS[FIELD_COUNT - 1]);
    Memory *memory = memory_new(each * (size_t)shape[0]);
    if (!memory) return NULL;
    char *at = (char *)memory + ALIGNED, *to = at;
    for (int i = 0; i < FIELD_COUNT; i++) {
        if (!has_gradient(block, &FIELDS[i])) continue;
        memcpy(to, (char *)block->memory + ALIGNED + block->start[i], each);
        to += each;
    }
    return tensor_make(at, 4, shape, block->wide ? F64 : F32, memory, memory_release);
}

// saved(): what autograd keeps of a call: a block without memory, and one tensor over the memory, which saved-tensor hooks may replace.
static PyObject *block_saved(Block *block, PyObject *none) {
    (void)none;
    if (!block->memory) return PyErr_Format(PyExc_RuntimeError, "saved(): the memory of this block was saved before");
    Block *bare = PyObject_GC_New(Block, block_type);
    if (!bare) return NULL;
    *bare = (Block){.ob_base = bare->ob_base, .bytes = block->bytes, .left = block->left, .right = block->right,
                    .scale = block->scale, .softcap = block->softcap, .bits = block->bits, .wide = block->wide, .kept = block->kept};
    memcpy(bare->shape, block->shape, sizeof bare->shape);
    memcpy(bare->start, block->start, sizeof bare->start);
    __atomic_add_fetch(&block->memory->users, 1, __ATOMIC_RELAXED);
    int64_t bytes = (int64_t)block->bytes;
    PyObject *memory = tensor_make((char *)block->memory + ALIGNED, 1, &bytes, BYTES, block->memory, memory_release);
    PyObject *found = memory ? PyTuple_Pack(2, (PyObject *)bare, memory) : NULL;
    Py_DECREF(bare);
    Py_XDECREF(memory);
    return found;
}

// Where each field lies in that tensor, as a slice; None for those that are not there.
static PyObject *block_places(Block *block, void *none) {
    (void)none;
    PyObject *found = PyTuple_New(FIELD_COUNT);
    for (int i = 0; found && i < FIELD_COUNT; i++) {
        PyObject *one = Py_NewRef(Py_None);
        if (block->start[i] != ABSENT) {
            PyObject *first = PyLong_FromSize_t(block->start[i]);
            PyObject *last = PyLong_FromSize_t(block->start[i] + bytes_of(block, &FIELDS[i]));
            Py_DECREF(one);
            one = first && last ? PySlice_New(first, last, NULL) : NULL;
            Py_XDECREF(first);
            Py_XDECREF(last);
        }
        if (!one || PyTuple_SetItem(found, i, one)) Py_CLEAR(found);
    }
    return found;
}

// backward(query, key, value, mask, gain, output, memory, upstream, needs): the gradients of the five that are needed, None for the others.
// None if Python has to do it: something must be copied or cast first, or the mask needs a gradient.
static PyObject *block_backward(Block *block, PyObject *args) {
    PyObject *tensors[5], *output, *memory, *upstream;
    Call call = {.device = ON_CPU, .left = block->left, .right = block->right, .scale = block->scale, .softcap = block->softcap};
    View view = {0}, bytes;
    const int64_t size = (int64_t)block->bytes;
    long long needs;
    if (!PyArg_ParseTuple(args, "OOOOOOOO!L:backward", tensors, tensors + 1, tensors + 2, tensors + 3, tensors + 4, &output,
                          &memory, &PyTuple_Type, &upstream, &needs))
        return NULL;
    if (!block->kept || needs & GRAD_MASK) Py_RETURN_NONE;
    call.needs_grad = needs;
    if (!read_vectors(tensors[0], tensors[1], tensors[2], &call) || !read_mask(tensors[3], &call) || !read_gain(tensors[4], &call))
        return set_changed();
    const int64_t shape[4] = {call.batch, call.heads, call.rows, call.value_dim};
    if (memcmp(shape, block->shape, sizeof shape) || block->wide != (call.dtype == F64)) return set_changed();
    if (tensors[2] != Py_None && !(tensor_read(output, &view) && has_shape(&view, call.dtype, 4, shape))) return set_changed();
    if (!tensor_read(memory, &bytes) || !has_shape(&bytes, BYTES, 1, &size)) return set_changed();
    if (!is_contiguous(&view) || !is_contiguous(&bytes) || (uintptr_t)bytes.at % ALIGNED) Py_RETURN_NONE;
    call.output = view.at;
    place(block, bytes.at, &call);
    return differentiate(&call, tensors, upstream, NULL);
}

// (B, H, Lq) if fold() takes the block: it has all signs, in float32. None otherwise.
static PyObject *block_foldable(PyObject *block, void *none) {
    (void)none;
    const void *at[8];
    int64_t shape[3];
    if (!block_read(block, at, shape)) Py_RETURN_NONE;
    return Py_BuildValue("(LLL)", (long long)shape[0], (long long)shape[1], (long long)shape[2]);
}

static PyGetSetDef getters[FIELD_COUNT + 4];
static PyMethodDef methods[] = {
    {"backward", (PyCFunction)block_backward, METH_VARARGS,
     "backward($self, query, key, value, mask, gain, output, memory, upstream, needs, /)\n--\n\n"},
    {"saved", (PyCFunction)block_saved, METH_NOARGS, "saved($self, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_dealloc, block_end},
    {Py_tp_traverse, block_traverse},
    {Py_tp_clear, block_clear},
    {Py_tp_getset, getters},
    {Py_tp_methods, methods},
    {Py_tp_doc, "All signs of a call in one block of memory: a tensor by each name, made when it is first read; None if not measured."},
    {0, NULL},
};
static PyType_Spec spec = {"attemper.kernels.cpu._native.Block", sizeof(Block), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

int block_bind(PyObject *module) {
    for (int i = 0; i < FIELD_COUNT; i++)
        getters[i] = (PyGetSetDef){FIELDS[i].name, (getter)block_get, NULL, NULL, (void *)(intptr_t)i};
    getters[FIELD_COUNT] = (PyGetSetDef){"packed", (getter)block_packed, NULL, NULL, NULL};
    getters[FIELD_COUNT + 1] = (PyGetSetDef){"foldable", block_foldable, NULL, NULL, NULL};
    getters[FIELD_COUNT + 2] = (PyGetSetDef){"places", (getter)block_places, NULL, NULL, NULL};
    block_type = (PyTypeObject *)PyType_FromSpec(&spec);
    return block_type ? PyModule_AddObjectRef(module, "Block", (PyObject *)block_type) : -1;
}
