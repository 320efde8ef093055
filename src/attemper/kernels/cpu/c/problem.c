// problem.c: the tensors and numbers of a call, read and checked against one another.
#include "problem.h"

static Strided strided(const View *view) {
    return (Strided){view->at, {view->step[0], view->step[1], view->step[2], view->step[3]}};
}

static int is_on(const View *view, Call *call) {
    if (!call->device) call->device = view->device, call->number = view->number;
    return view->device == call->device && view->number == call->number;
}

static int read_dense(PyObject *tensor, Call *call, View *to) { return tensor_read(tensor, to) && is_on(to, call) && to->dims == 4; }

int read_vectors(PyObject *query, PyObject *key, PyObject *value, Call *call) {
    View q, k, v;
    if (!read_dense(query, call, &q) || !read_dense(key, call, &k)) return 0;
    call->query = strided(&q), call->key = strided(&k);
    call->dtype = q.dtype;
    call->batch = q.shape[0], call->heads = q.shape[1], call->rows = q.shape[2], call->dim = q.shape[3];
    call->groups = k.shape[1], call->keys = k.shape[2];
    if (q.dtype < F32 || q.dtype > F16 || k.dtype != q.dtype || k.shape[0] != call->batch || k.shape[3] != call->dim) return 0;
    if (call->groups ? call->heads % call->groups : call->heads) return 0;
    if (value == Py_None) return 1;
    if (!read_dense(value, call, &v) || v.dtype != q.dtype) return 0;
    call->value = strided(&v);
    call->value_dim = v.shape[3];
    return v.shape[0] == call->batch && v.shape[1] == call->groups && v.shape[2] == call->keys;
}

// Read a tensor that is broadcast over these sizes, so that a dimension of size 1 repeats.
static int read_broadcast(const View *view, const int64_t sizes[4], Strided *to) {
    *to = strided(view);
    for (int i = 0; i < 4; i++) {
        if (view->shape[i] == 1)
            to->step[i] = 0;
        else if (view->shape[i] != sizes[i])
            return 0;
    }
    return 1;
}

int read_mask(PyObject *mask, Call *call) {
    View view;
    call->mask_dtype = NONE;
    if (mask == Py_None) return 1;
    if (!read_dense(mask, call, &view) || view.dtype < F32 || view.dtype > BOOL) return 0;
    call->mask_dtype = view.dtype;
    return read_broadcast(&view, (int64_t[]){call->batch, call->heads, call->rows, call->keys}, &call->mask);
}

int read_gain(PyObject *gain, Call *call) {
    View view;
    if (gain == Py_None) return 1;
    if (!tensor_read(gain, &view) || !is_on(&view, call) || view.dtype != measuring_dtype(call)) return 0;
    if (view.dims == 3) view.shape[3] = 1, view.dims = 4;
    if (view.dims == 4) return read_broadcast(&view, (int64_t[]){call->batch, call->heads, call->rows, 1}, &call->gain);
    call->gain = (Strided){view.at, {0}};
    if (view.dims == 0 || (view.dims == 1 && view.shape[0] == 1)) return 1;
    call->gain.step[1] = view.step[0];
    return view.dims == 1 && view.shape[0] == call->heads;
}

static int64_t integer(PyObject *given, int64_t none) { return given == Py_None ? none : PyLong_AsLongLong(given); }
static double real(PyObject *given) { return given == Py_None ? 0 : PyFloat_AsDouble(given); }

int read_numbers(PyObject *const *numbers, Call *call) {
    call->seed = integer(numbers[0], 0);
    call->left = integer(numbers[1], attemper_unbound), call->right = integer(numbers[2], attemper_unbound);
    call->scale = real(numbers[3]), call->softcap = real(numbers[4]), call->dropout = real(numbers[5]);
    return !PyErr_Occurred();
}

PyObject *empty_like(PyObject *tensor) {
    View view;
    // torch takes longer if it is told the layout
    if (tensor_read(tensor, &view) && is_contiguous(&view)) return PyObject_CallFunctionObjArgs(bound.empty_like, tensor, NULL);
    PyObject *args = PyTuple_Pack(1, tensor), *found = args ? PyObject_Call(bound.empty_like, args, bound.by_head) : NULL;
    Py_XDECREF(args);
    return found;
}
