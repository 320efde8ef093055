// module.c: what Python sees of the extension. Its functions take their arguments by place; native.py binds and configures it.
#include "block.h"
#include "launch.h"

#include <dlfcn.h>

Bound bound;
struct How how;

static const struct { const char *name; PyObject **to; } NAMES[] = {
#define DO(NAME) {#NAME, &bound.NAME},
    BOUND(DO)
#undef DO
};

int takes(const char *name, Py_ssize_t wanted, Py_ssize_t count) {
    if (count == wanted) return 1;
    PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments; got %zd", name, wanted, count);
    return 0;
}

PyObject *hand_on(PyObject *to, PyObject *const *args, Py_ssize_t count) {
    PyErr_Clear();
    PyObject *given = PyTuple_New(count), *found = NULL;
    for (Py_ssize_t i = 0; given && i < count; i++)
        if (PyTuple_SetItem(given, i, Py_NewRef(args[i]))) Py_CLEAR(given);
    if (given) found = PyObject_CallObject(to, given);
    Py_XDECREF(given);
    return found;
}

int set_threads(Call *call) {
    PyObject *threads = PyObject_CallNoArgs(bound.threads);
    call->threads = threads ? PyLong_AsLongLong(threads) : -1;
    Py_XDECREF(threads);
    call->parallel = how.parallel, call->poison = how.poison;
    return !PyErr_Occurred();
}

void set_failure(const char *pass, int failed) {
    if (failed == NO_MEMORY)
        PyErr_Format(PyExc_MemoryError, "attention(): kernel='cpu' found no memory for its %s pass", pass);
    else
        PyErr_Format(PyExc_RuntimeError,
                     "attention(): kernel='cpu' could not run its %s pass on torch's threads: torch_parallel_for failed. "
                     "Call torch.set_num_threads(1), or choose kernel='blockwise'.", pass);
}

// bind(names): keep what torch hands over, a dictionary; whether this torch has a table that is known here.
static PyObject *bind(PyObject *self, PyObject *names) {
    (void)self;
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++) {
        PyObject *found = PyMapping_GetItemString(names, NAMES[i].name);
        if (!found) return NULL;
        Py_XDECREF(*NAMES[i].to);
        *NAMES[i].to = found;
    }
    return PyBool_FromLong(tensors_bind(bound.exchange_api));
}

// configure(variant, poison, parallel): the build of the kernel, whether workspaces are filled with NaN, the address of a loop
static METHOD(configure) {
    (void)self;
    if (!takes("configure", 3, count)) return NULL;
    long variant = PyLong_AsLong(args[0]), poison = PyLong_AsLong(args[1]);
    void *parallel = PyLong_AsVoidPtr(args[2]);
    if (PyErr_Occurred()) return NULL;
    if (variant < 0 || variant > attemper_best()) return PyErr_Format(PyExc_ValueError, "no variant %ld here", variant);
    how = (struct How){(int)variant, poison, (Parallel)parallel};
    Py_RETURN_NONE;
}

// find(library, name): the address of a function of a library, which stays loaded; 0 if there is none.
static METHOD(find) {
    (void)self;
    if (!takes("find", 2, count)) return NULL;
    const char *path = PyUnicode_AsUTF8AndSize(args[0], NULL), *name = PyUnicode_AsUTF8AndSize(args[1], NULL);
    if (!path || !name) return NULL;
    void *library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    return PyLong_FromVoidPtr(library ? dlsym(library, name) : NULL);
}

// best(): the best variant that this processor runs
static PyObject *best(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyLong_FromLong(attemper_best());
}

// variants(): the names of the variants of this architecture, in the order of their numbers
static PyObject *variants(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    Py_ssize_t count = 0;
    while (attemper_variants[count]) count++;
    PyObject *names = PyTuple_New(count);
    for (Py_ssize_t i = 0; names && i < count; i++)
        if (PyTuple_SetItem(names, i, PyUnicode_FromString(attemper_variants[i]))) Py_CLEAR(names);
    return names;
}

#define OP(NAME) {#NAME, (PyCFunction)(void (*)(void))op_##NAME, METH_FASTCALL, NULL}
static PyMethodDef ops[] = {OP(forward_packed), OP(tally_packed), OP(backward)};

// op(name, bound): what computes the plain calls of an op. A call that is not plain goes to `bound`, or to its first item.
static METHOD(op) {
    (void)self;
    if (!takes("op", 2, count)) return NULL;
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        if (PyUnicode_CompareWithASCIIString(args[0], ops[i].ml_name) == 0) return PyCFunction_NewEx(&ops[i], args[1], NULL);
    return PyErr_Format(PyExc_ValueError, "op(): no op is named %R", args[0]);
}

#define BY_PLACE(FUNCTION) (PyCFunction)(void (*)(void))FUNCTION, METH_FASTCALL
#define PROBLEM "query, key, value, mask, gain, "
#define NUMBERS "seed, left, right, scale, softcap, dropout, "
#define END ", /)\n--\n\n"
// native.py compares the parameters that are named here with those by which it calls them
static PyMethodDef methods[] = {
    {"guard", BY_PLACE(py_guard), "guard($module, /, *tensors)\n--\n\n"},
    {"forward", BY_PLACE(py_forward),
     "forward($module, " PROBLEM "causal, window, scale, softcap, sign_bits, grouped, saved" END},
    {"write", BY_PLACE(py_write), "write($module, " PROBLEM NUMBERS "sign_bits, results" END},
    {"backward", BY_PLACE(py_backward), "backward($module, " PROBLEM NUMBERS "saved, upstream, needs, given, parts" END},
    {"parts", BY_PLACE(py_parts), "parts($module, keys, heads" END},
    {"fold", BY_PLACE(py_fold), "fold($module, signs, keep, found, first, saturable_keys, saturated_weight" END},
    {"op", BY_PLACE(op), "op($module, name, bound, /)\n--\n\n"},
    {"plan", BY_PLACE(py_plan), "plan($module, " PROBLEM NUMBERS
     "sign_bits, launcher, programs, values, addresses, followed, memory, typed, output, low, layout" END},
    {"replay_checked", BY_PLACE(py_replay_checked), "replay_checked($module, " PROBLEM NUMBERS "sign_bits" END},
    {"replay", BY_PLACE(py_replay), "replay($module, " PROBLEM "causal, window, scale, softcap, sign_bits, grouped" END},
    {"forget", BY_PLACE(py_forget), "forget($module, /)\n--\n\n"},
    {"bind", bind, METH_O, "bind($module, names, /)\n--\n\n"},
    {"configure", BY_PLACE(configure), "configure($module, variant, poison, parallel, /)\n--\n\n"},
    {"find", BY_PLACE(find), "find($module, library, name, /)\n--\n\n"},
    {"best", best, METH_NOARGS, "best($module, /)\n--\n\n"},
    {"variants", variants, METH_NOARGS, "variants($module, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

// The names by which native.py hands over what is bound, and those of the fields of a Block
static int add_names(PyObject *module) {
    enum { BOUND_COUNT = sizeof NAMES / sizeof *NAMES };
    PyObject *names = PyTuple_New(BOUND_COUNT), *signs = PyTuple_New(FIELD_COUNT);
    for (int i = 0; names && i < BOUND_COUNT; i++)
        if (PyTuple_SetItem(names, i, PyUnicode_FromString(NAMES[i].name))) Py_CLEAR(names);
    for (int i = 0; signs && i < FIELD_COUNT; i++)
        if (PyTuple_SetItem(signs, i, PyUnicode_FromString(FIELDS[i].name))) Py_CLEAR(signs);
    int failed = !names || !signs || PyModule_AddObjectRef(module, "BOUND", names) || PyModule_AddObjectRef(module, "SIGNS", signs);
    Py_XDECREF(names);
    Py_XDECREF(signs);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, block_bind}, {Py_mod_exec, launch_bind}, {Py_mod_exec, add_names}, {0, NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
