// attend.c: a forward straight from torch's tensors as Python holds them: `forward` checks a plain call and makes its memory, as twin.py
// does in Python; `write` takes a checked problem and memory for its results; `op_forward_packed` takes one from the dispatcher.
#include <float.h>
#include <math.h>
#include <string.h>

#include "block.h"
#include "problem.h"

enum { ANYHOW, TOP_LEFT, LOWER_RIGHT };  // what `causal` says

typedef struct {  // the arguments of `forward`; `replay` has all but the last
    PyObject *query, *key, *value, *mask, *gain, *causal, *window, *scale, *softcap, *bits, *grouped, *kept;
} Asked;

// A finite float; `none` for None
static int read_real(PyObject *given, double none, double *to) {
    *to = given == Py_None ? none : PyFloat_CheckExact(given) ? PyFloat_AsDouble(given) : NAN;
    return fabs(*to) <= FLT_MAX;
}

static int read_causal(PyObject *causal) {
    if (causal == Py_False) return ANYHOW;
    if (causal == Py_True) return TOP_LEFT;
    return PyUnicode_CheckExact(causal) && PyUnicode_CompareWithASCIIString(causal, "lower_right") == 0 ? LOWER_RIGHT : -1;
}

// Causal and window as one band, as `band` of ../../../operation/call.py
static int read_band(const Asked *asked, Call *call) {
    int causal = read_causal(asked->causal);
    int64_t window = 0, offset = causal == LOWER_RIGHT ? call->keys - call->rows : 0;
    call->left = attemper_unbound;
    call->right = causal ? offset : attemper_unbound;
    if (causal < 0 || asked->window == Py_None) return causal >= 0;
    if (!PyLong_CheckExact(asked->window)) return 0;
    window = PyLong_AsLongLong(asked->window);
    if (window == -1 && PyErr_Occurred()) PyErr_Clear();  // beyond 64 bits
    if (window < 1) return 0;
    if (window > call->rows + call->keys) window = call->rows + call->keys;
    call->left = window - 1 - offset;
    if (!causal) call->right = window - 1;
    return 1;
}

static int is_empty(const Call *call, PyObject *value) {
    return !call->batch || !call->heads || !call->rows || !call->keys || !call->dim || (value != Py_None && !call->value_dim);
}

int read_asked(PyObject *const *args, Call *call) {
    Asked given = {0}, *const asked = &given;
    memcpy(asked, args, offsetof(Asked, kept));
    if (!read_vectors(asked->query, asked->key, asked->value, call) || is_empty(call, asked->value)) return 0;
    if (call->heads != call->groups && asked->grouped != Py_True) return 0;
    return read_mask(asked->mask, call) && read_gain(asked->gain, call) && read_band(asked, call) &&
           read_real(asked->scale, asked->gain == Py_None ? pow((double)call->dim, -0.5) : 1.0, &call->scale) &&
           read_real(asked->softcap, 0, &call->softcap) && (asked->softcap == Py_None || call->softcap > 0);
}

static PyObject *empty_output(const Call *call, PyObject *query) {
    if (call->value_dim == call->dim) return empty_like(query);
    const long long shape[] = {call->batch, call->heads, call->rows, call->value_dim};
    return PyObject_CallFunction(bound.new_empty, "O(LLLL)", query, shape[0], shape[1], shape[2], shape[3]);
}

static int run(Call *call) {
    int failed;
    if (!set_threads(call)) return 0;
    Py_BEGIN_ALLOW_THREADS;
    failed = attemper_forward(call, how.variant);
    Py_END_ALLOW_THREADS;
    if (failed) set_failure("forward", failed);
    return !failed;
}

METHOD(py_forward) {
    (void)self;
    Asked asked;
    View memory = {0};
    Call call = {.parts = 1, .device = ON_CPU};
    if (!takes("forward", sizeof asked / sizeof(PyObject *), count)) return NULL;
    memcpy(&asked, args, sizeof asked);
    call.sign_bits = PyLong_AsLongLong(asked.bits);
    if (PyErr_Occurred()) return NULL;
    if (!tensors_bound() || !read_asked(args, &call)) Py_RETURN_NONE;
    int kept = asked.kept == Py_True;
    PyObject *output = asked.value == Py_None ? Py_NewRef(Py_None) : empty_output(&call, asked.query), *found = NULL;
    if (!output) return NULL;
    if (output != Py_None && !tensor_read(output, &memory)) {
        Py_DECREF(output);
        return PyErr_Format(PyExc_RuntimeError, "attention(): torch.empty_like returned something else than memory");
    }
    call.output = memory.at;
    PyObject *block = call.sign_bits || kept ? block_new(&call, kept) : Py_NewRef(Py_None);
    if (block && run(&call)) found = PyTuple_Pack(2, output, block);
    Py_DECREF(output);
    Py_XDECREF(block);
    return found;
}

// As many numbers on this memory, from `at` on
static PyObject *part(Memory *memory, char *at, int dims, const int64_t *shape, int64_t dtype) {
    __atomic_add_fetch(&memory->users, 1, __ATOMIC_RELAXED);
    return tensor_make(at, dims, shape, dtype, memory, memory_release);
}

// The results of op_forward_packed: output, output_low, lse_low, lse and the signs of PACKED; the call points into them. NULL with an
// error set.
static PyObject *packed_results(Call *call, PyObject *query) {
    enum { WORD = 4, PACKED_COUNT = 6 };
    const int64_t shape[] = {call->batch, call->heads, call->rows, call->value_dim}, none = 0;
    const int64_t rows = shape[0] * shape[1] * shape[2], each = (rows + 3) / 4 * 4, all = PACKED_COUNT * each;
    const int half = (call->sign_bits & OUTPUT_LOW) != 0;
    Memory *saved = memory_new((size_t)(2 * (rows * WORD + ALIGNED))), *packed = memory_new((size_t)(all * WORD));
    Memory *low = memory_new(half ? (size_t)(rows * call->value_dim * 2) : 0);
    PyObject *found = saved && packed && low ? PyTuple_New(5) : NULL;
    if (found) {
        char *lse_low = (char *)saved + ALIGNED, *lse = lse_low + (rows * WORD + ALIGNED - 1) / ALIGNED * ALIGNED;
        char *signs = (char *)packed + ALIGNED, *lows = (char *)low + ALIGNED;
        PyObject *made[] = {empty_output(call, query), part(low, lows, half ? 4 : 1, half ? shape : &none, -16),
                            part(saved, lse_low, 3, shape, F32), part(saved, lse, 3, shape, F32),
                            part(packed, signs, 1, &all, F32)};
        View memory = {0};
        int failed = !made[0] || !tensor_read(made[0], &memory);
        for (int i = 0; i < 5; i++) failed |= !made[i] || PyTuple_SetItem(found, i, made[i]);
        float *row = (float *)signs;
        call->output = memory.at, call->output_low = half ? (int16_t *)lows : NULL;
        call->measured = (Rows){NULL, lse_low, (int32_t *)row, row + each, row + 2 * each, row + 3 * each, lse, row + 4 * each,
                                row + 5 * each};
        if (failed) Py_CLEAR(found);
    }
    Memory *const taken[] = {saved, packed, low};
    for (int i = 0; i < 3; i++)
        if (taken[i]) memory_release(taken[i]);
    return found;
}

// As packed_forward of ../../../operation/ops.py
PyObject *op_forward_packed(PyObject *otherwise, PyObject *const *args, Py_ssize_t count) {
    enum { SCALE = 9, BITS = 15, KERNEL, COUNT, SIGNS = ARGMAX - 1 };
    Call call = {.parts = 1};
    if (!takes("forward_packed", COUNT, count)) return NULL;
    PyObject *const numbers[] = {Py_None, args[SCALE + 1], args[SCALE + 2], args[SCALE], args[SCALE + 3], args[SCALE + 4]};
    if (args[2] == Py_None || !is_plain_op(args, args[KERNEL], args, 5) ||
        !read_vectors(args[0], args[1], args[2], &call) || is_empty(&call, args[2]) || call.dtype == F64 ||
        !read_mask(args[3], &call) || !read_gain(args[4], &call) || !read_numbers(numbers, &call))
        return hand_on(otherwise, args, count);
    call.sign_bits = SIGNS | (call.dtype == F32 ? 0 : PyLong_AsLongLong(args[BITS]) & OUTPUT_LOW);
    PyObject *found = packed_results(&call, args[0]);
    if (found && !run(&call)) Py_CLEAR(found);
    return found ? found : hand_on(otherwise, args, count);
}

static int read_results(PyObject *results, Call *call) {
    for (int i = 0; i < FIELD_COUNT + 1; i++) {
        PyObject *tensor = PyTuple_GetItem(results, i);
        View view = {0};
        if (!tensor) return 0;
        if (tensor != Py_None && !(tensor_read(tensor, &view) && view.device == ON_CPU)) {
            PyErr_Format(PyExc_TypeError, "write(): result %d is no tensor of the CPU", i);
            return 0;
        }
        memcpy((char *)call + (i ? FIELDS[i - 1].offset : offsetof(Call, output)), &view.at, sizeof view.at);
    }
    return 1;
}

METHOD(py_write) {
    (void)self;
    Call call = {.parts = 1, .device = ON_CPU};
    if (!takes("write", 13, count)) return NULL;
    if (!read_vectors(args[0], args[1], args[2], &call) || !read_mask(args[3], &call) || !read_gain(args[4], &call))
        return PyErr_Format(PyExc_TypeError, "write(): the tensors of this problem do not fit one another");
    call.sign_bits = PyLong_AsLongLong(args[11]);
    if (!read_numbers(args + 5, &call) || !read_results(args[12], &call) || !run(&call)) return NULL;
    Py_RETURN_NONE;
}
