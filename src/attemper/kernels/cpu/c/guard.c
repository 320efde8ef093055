// guard.c: whether a call is plain, so that a kernel may read its tensors by address and no op is needed around it; ../../guard.py is the same.
#include "module.h"

int returns(PyObject *function, PyObject *wanted) {
    PyObject *found = PyObject_CallNoArgs(function);
    if (!found) return -1;
    Py_DECREF(found);  // the objects that are compared live for ever
    return found == wanted;
}

static int64_t number_of(PyObject *found) {
    int64_t number = found ? PyLong_AsLongLong(found) : -1;
    Py_XDECREF(found);
    return number;
}

// Whether an op would go straight to its kernel, as `at_rest` of _torch_private.py: no mode, transform, trace, profiler, forward mode.
// 0 too for an error, which is set.
static int at_rest(int recording) {
    return number_of(PyObject_CallNoArgs(bound.dispatch_modes)) == 0 && returns(bound.function_modes, Py_False) == 1 &&
           returns(bound.functorch, Py_None) == 1 && returns(bound.tracing, Py_None) == 1 &&
           returns(bound.profiling, Py_False) == 1 &&
           number_of(PyObject_GetAttr(bound.forward_ad, bound.current_level)) == -1 &&
           !(recording && returns(bound.inference_mode, Py_False) != 1);
}

// Whether autocast leaves the dtype of a query. 0 too for an error, which is set.
static int keeps_dtype(PyObject *query, const View *read) {
    int any = returns(bound.any_autocast, Py_True);
    if (any != 1) return any == 0;
    const char *device = read->device == ON_CPU ? "cpu" : "cuda";
    PyObject *on = PyObject_CallFunction(bound.autocast, "s", device);
    if (!on || on == Py_False) {
        Py_XDECREF(on);
        return on == Py_False;
    }
    Py_DECREF(on);
    PyObject *low = PyObject_CallFunction(bound.autocast_dtype, "s", device), *own = PyObject_GetAttrString(query, "dtype");
    Py_XDECREF(low);
    Py_XDECREF(own);
    return low && low == own;  // dtypes live for ever
}

// Whether a tensor is nothing but memory: dense, of torch's own type. Reading refuses what has no address or strides (sparse, mkldnn,
// nested and meta tensors, wrappers). A lazy negation does not show in what is read, nor does a lazy conjugation of complex numbers.
static int is_memory(PyObject *tensor, View *to) {
    if ((PyObject *)Py_TYPE(tensor) != bound.Tensor && (PyObject *)Py_TYPE(tensor) != bound.Parameter) return 0;
    if (!tensor_read(tensor, to) || !to->at || to->dtype == COMPLEX || (to->device != ON_CPU && to->device != ON_CUDA)) return 0;
    PyObject *negated = PyObject_CallFunctionObjArgs(bound.is_neg, tensor, NULL);
    Py_XDECREF(negated);
    return negated == Py_False;
}

static int has(PyObject *tensor, PyObject *method) {
    PyObject *found = PyObject_CallFunctionObjArgs(method, tensor, NULL);
    Py_XDECREF(found);
    return found != Py_False;
}

static int wants_gradient(PyObject *tensor) {
    PyObject *found = PyObject_GetAttr(tensor, bound.requires_grad);
    Py_XDECREF(found);
    return found != Py_False;
}

int judge(PyObject *const *tensors, Py_ssize_t count) {
    View first, other;
    if (!tensors_bound() || !count) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i && tensors[i] == Py_None) continue;
        if (!is_memory(tensors[i], i ? &other : &first)) return 0;
        if (i && (other.device != first.device || other.number != first.number)) return 0;
    }
    int recording = returns(bound.grad_mode, Py_True), wanted = 0;
    if (recording < 0 || !at_rest(recording) || !keeps_dtype(tensors[0], &first)) return 0;
    for (Py_ssize_t i = 0; i < count && recording; i++) wanted |= tensors[i] != Py_None && wants_gradient(tensors[i]);
    if (!wanted) return PLAIN;
    for (Py_ssize_t i = 0; i < count; i++)
        if (tensors[i] != Py_None && has(tensors[i], bound.is_inference)) return 0;  // a backward must not save it
    return PLAIN | RECORDED;
}

int is_plain_op(PyObject *const *problem, PyObject *kernel, PyObject *const *tensors, Py_ssize_t count) {
    enum { WEIGHT = 5, DROPOUT = 13 };
    for (int i = WEIGHT; i < WEIGHT + 4; i++)
        if (problem[i] != Py_None) return 0;
    if (PyFloat_AsDouble(problem[DROPOUT]) != 0 || PyUnicode_CompareWithASCIIString(kernel, "cpu")) return 0;
    int found = judge(tensors, count) == PLAIN;
    PyErr_Clear();
    return found;
}

METHOD(py_guard) {
    (void)self;
    int found = judge(args, count);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(found);
}
