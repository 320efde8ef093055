// differ.c: a backward straight from torch's tensors as Python holds them; `op_backward` gets them from the dispatcher.
#include <string.h>

#include "block.h"
#include "problem.h"

enum { UPSTREAM_COUNT = 7 };
// where the gradients of signs go, as Upstream of contract.py lists them after that of the output
static const size_t ARRIVING[] = {offsetof(Call, upstream.mean), offsetof(Call, upstream.variance), offsetof(Call, upstream.peak),
                                  offsetof(Call, upstream.lse), offsetof(Call, upstream.entropy), offsetof(Call, upstream.sum_p2)};
enum { CHANGED = -1, UNREADY, READY };

PyObject *set_changed(void) {
    PyErr_SetObject(bound.InputError, bound.changed);
    return NULL;
}

// Put the address of a result into a call. `i` counts Results: the output, then FIELDS.
static int read_saved(PyObject *tensor, int i, Call *call) {
    const int64_t shape[] = {call->batch, call->heads, call->rows, call->value_dim};
    const Entry *entry = i ? &FIELDS[i - 1] : NULL;
    int64_t dtype = !entry ? call->dtype : entry->dtype == NONE ? measuring_dtype(call) : entry->dtype;
    View view;
    if (!tensor) return CHANGED;
    if (tensor == Py_None) return entry || !call->batch || !call->heads || !call->rows || !call->value_dim ? READY : CHANGED;
    if (!tensor_read(tensor, &view) || !has_shape(&view, dtype, entry ? entry->dims : 4, shape)) return CHANGED;
    memcpy((char *)call + (entry ? entry->offset : offsetof(Call, output)), &view.at, sizeof view.at);
    return is_contiguous(&view) ? READY : UNREADY;
}

static int read_upstream(PyObject *upstream, Call *call) {
    const int64_t shape[] = {call->batch, call->heads, call->rows, call->value_dim};
    View view;
    for (int i = 0; i < UPSTREAM_COUNT; i++) {
        PyObject *tensor = PyTuple_GetItem(upstream, i);
        if (!tensor) return 0;
        if (tensor == Py_None) continue;
        if (!tensor_read(tensor, &view)) return 0;
        if (i == 0) {
            if (!has_shape(&view, call->dtype, 4, shape)) return 0;
            call->g_output = (Strided){view.at, {view.step[0], view.step[1], view.step[2], view.step[3]}};
        } else {
            if (!has_shape(&view, measuring_dtype(call), 3, shape) || !is_contiguous(&view)) return 0;
            memcpy((char *)call + ARRIVING[i - 1], &view.at, sizeof view.at);
        }
    }
    return 1;
}

// Whether everything was saved that a backward reads. No sign depends on the values, so without another gradient none is read.
static int has_saved(Call *call) {
    const Rows *saved = &call->measured, *arrived = &call->upstream;
    if (!call->batch || !call->heads || !call->rows) return 1;
    if (!(call->needs_grad & ~(int64_t)GRAD_VALUE)) call->upstream = (Rows){0};
    return saved->lse && saved->lse_low && (call->output || !call->g_output.at) && (saved->argmax || !arrived->peak) &&
           (saved->entropy || !arrived->entropy) && (saved->sum_p2 || !arrived->sum_p2) &&
           (saved->visible || !(arrived->mean || arrived->variance)) && (saved->mean || !arrived->variance);
}

// How many parts the keys are cut into, so that every thread has work if `heads` heads run at once
static int64_t parts_of(int64_t keys, int64_t heads, int64_t threads) {
    if (heads < 1) heads = 1;
    if (heads % threads == 0 || heads >= 4 * threads) return 1;
    int64_t tiles = (keys + BACK_KEYS - 1) / BACK_KEYS, wanted = (2 * threads + heads - 1) / heads;
    return tiles < 1 ? 1 : tiles < wanted ? tiles : wanted;
}

// The memory of a mask's gradient: (parts, then as the mask is)
static int read_mask_gradient(PyObject *given, Call *call) {
    View view;
    if (!tensor_read(given, &view) || view.dims != 5) return 0;
    call->d_mask = view.at;
    for (int i = 0; i < 4; i++) call->d_mask_step[i] = view.shape[i + 1] == 1 ? 0 : view.step[i + 1];
    call->d_mask_part = view.shape[0] > 1 ? view.step[0] : 0;
    return 1;
}

// Memory for the gradient of a tensor, given or new; NULL with an error set.
static PyObject *gradient_of(PyObject *tensor, PyObject *given, char **at) {
    PyObject *found = given && given != Py_None ? Py_NewRef(given) : empty_like(tensor);
    View view;
    if (!found) return NULL;
    if (tensor_read(found, &view)) {
        *at = view.at;
        return found;
    }
    Py_DECREF(found);
    return PyErr_Format(PyExc_TypeError, "backward(): memory for a gradient is no tensor");
}

static int run(Call *call) {
    int failed;
    Py_BEGIN_ALLOW_THREADS;
    failed = attemper_backward(call, how.variant);
    Py_END_ALLOW_THREADS;
    if (failed) set_failure("backward", failed);
    return !failed;
}

PyObject *differentiate(Call *call, PyObject *const *tensors, PyObject *upstream, PyObject *given) {
    char **const to[5] = {&call->d_query, &call->d_key, &call->d_value, NULL, (char **)&call->d_gain};
    const int bits[5] = {GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_MASK, GRAD_GAIN};
    View gain;
    for (int i = 0; i < 5; i++)
        if (tensors[i] == Py_None) call->needs_grad &= ~(int64_t)bits[i];
    if (!read_upstream(upstream, call)) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    if (call->needs_grad & GRAD_GAIN && (!tensor_read(tensors[4], &gain) || gain.dims != 3))
        Py_RETURN_NONE;  // its gradient is one number per row
    if (!has_saved(call)) return set_changed();
    if (!set_threads(call)) return NULL;
    if (!call->parts) call->parts = parts_of(call->keys, call->batch * call->groups, call->threads);
    PyObject *found = PyTuple_New(5);
    for (int i = 0; i < 5 && found; i++) {
        PyObject *memory = given ? PyTuple_GetItem(given, i) : NULL, *gradient = Py_NewRef(Py_None);
        if (to[i] && call->needs_grad & bits[i]) {
            Py_DECREF(gradient);
            gradient = gradient_of(tensors[i], memory, to[i]);
        }
        if (!gradient || PyTuple_SetItem(found, i, gradient)) Py_CLEAR(found);
    }
    if (found && !run(call)) Py_CLEAR(found);
    return found;
}

// backward(query, key, value, mask, gain, seed, left, right, scale, softcap, dropout, saved, upstream, needs, given, parts)
METHOD(py_backward) {
    (void)self;
    Call call = {.device = ON_CPU};
    int state = READY;
    if (!takes("backward", 16, count)) return NULL;
    if (!read_vectors(args[0], args[1], args[2], &call) || !read_mask(args[3], &call) || !read_gain(args[4], &call))
        return set_changed();
    call.needs_grad = PyLong_AsLongLong(args[13]), call.parts = PyLong_AsLongLong(args[15]);
    if (!read_numbers(args + 5, &call)) return NULL;
    for (int i = args[2] == Py_None; i < FIELD_COUNT + 1 && state != CHANGED; i++) {
        int one = read_saved(PyTuple_GetItem(args[11], i), i, &call);
        state = one < state ? one : state;
    }
    if (PyErr_Occurred()) return NULL;
    if (state == CHANGED) return set_changed();
    if (state == UNREADY) Py_RETURN_NONE;
    PyObject *mask = PyTuple_GetItem(args[14], 3);
    if (mask && mask != Py_None && !read_mask_gradient(mask, &call)) mask = NULL;
    if (!mask) return PyErr_Format(PyExc_TypeError, "backward(): memory for the mask's gradient has no 5 dimensions");
    return differentiate(&call, args, args[12], args[14]);
}

// parts(keys, heads): how many parts a backward cuts the keys into
METHOD(py_parts) {
    (void)self;
    Call call;
    if (!takes("parts", 2, count) || !set_threads(&call)) return NULL;
    int64_t keys = PyLong_AsLongLong(args[0]), heads = PyLong_AsLongLong(args[1]);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(parts_of(keys, heads, call.threads));
}

// As _backward of ../../../operation/ops.py: a tensor without numbers stands for what was not saved, or is not needed.
PyObject *op_backward(PyObject *otherwise, PyObject *const *args, Py_ssize_t count) {
    enum { SCALE = 9, SAVED = 15, UPSTREAM = SAVED + FIELD_COUNT + 1, NEEDS = UPSTREAM + UPSTREAM_COUNT, KERNEL, COUNT, TENSORS = 5,
           RETURNED = 7 };
    PyObject *read[TENSORS + NEEDS - SAVED], *upstream = NULL, *made = NULL, *found = NULL;
    Call call = {0};
    View view;
    int state = READY;
    if (!takes("backward", COUNT, count)) return NULL;
    PyObject *const numbers[] = {Py_None, args[SCALE + 1], args[SCALE + 2], args[SCALE], args[SCALE + 3], args[SCALE + 4]};
    for (int i = 0; i < TENSORS; i++) read[i] = args[i];
    for (int i = SAVED; i < NEEDS; i++)
        read[TENSORS + i - SAVED] = i < UPSTREAM && tensor_read(args[i], &view) && !view.at ? Py_None : args[i];
    for (int i = 0; i < TENSORS; i++)
        if (PyList_GetItem(args[NEEDS], i) == Py_True) call.needs_grad |= 1 << i;
    if (call.needs_grad & GRAD_MASK || !is_plain_op(args, args[KERNEL], read, sizeof read / sizeof *read) ||
        !read_vectors(args[0], args[1], args[2], &call) || !read_mask(args[3], &call) || !read_gain(args[4], &call) ||
        !read_numbers(numbers, &call))
        state = UNREADY;
    for (int i = args[2] == Py_None; i < FIELD_COUNT + 1 && state == READY; i++) state = read_saved(read[TENSORS + i], i, &call);
    if (state == READY) upstream = PyTuple_New(UPSTREAM_COUNT);
    for (int i = 0; upstream && i < UPSTREAM_COUNT; i++)
        if (PyTuple_SetItem(upstream, i, Py_NewRef(args[UPSTREAM + i]))) Py_CLEAR(upstream);
    if (upstream) made = differentiate(&call, args, upstream, NULL);
    Py_XDECREF(upstream);
    if (made && made != Py_None) found = PyTuple_New(RETURNED);
    for (int i = 0; found && i < RETURNED; i++) {
        PyObject *gradient = i < TENSORS ? PyTuple_GetItem(made, i) : Py_None;
        gradient = gradient == Py_None ? PyObject_CallFunction(bound.new_empty, "Oi", args[0], 0) : Py_NewRef(gradient);
        if (!gradient || PyTuple_SetItem(found, i, gradient)) Py_CLEAR(found);
    }
    Py_XDECREF(made);
    return found ? found : hand_on(otherwise, args, count);
}
