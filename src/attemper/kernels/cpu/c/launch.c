// launch.c: kernels of a GPU. A Launcher starts one that Triton compiled; the driver's functions are pointers, so nothing of CUDA is
// linked, and a test puts a recorder there. A plan starts the forward of a call again that equals an earlier one but for its addresses.
#include "launch.h"

#include <stdlib.h>
#include <string.h>

#include "problem.h"

enum { MOST_PARAMETERS = 96, MOST_TILES = 2, RANK = 4 };

typedef struct {  // CUlaunchConfig
    unsigned grid[3], block[3], shared;
    void *stream, *attributes;
    unsigned attribute_count;
} Config;
typedef struct { _Alignas(64) uint64_t opaque[16]; } Map;  // CUtensorMap
typedef struct {  // the driver's functions: cuLaunchKernelEx, cuCtxGetCurrent, cuTensorMapEncodeTiled
    int (*launch)(const Config *, void *function, void **parameters, void **extra);
    int (*context)(void **);
    int (*encode)(Map *, int type, uint32_t rank, void *address, const uint64_t *shape, const uint64_t *strides, const uint32_t *box,
                  const uint32_t *steps, int interleave, int swizzle, int promotion, int fill);
} Driver;
typedef struct {  // tiles of a tensor that the hardware copies, the last dimension first
    int swizzle, type, padding;
    uint32_t box[RANK];
    uint64_t shape[RANK], strides[RANK];  // strides in bytes
    int64_t own_strides[RANK];            // in elements, as the kernel gets them
} Tile;
typedef union {
    uint64_t bits;
    int64_t whole;
    int32_t small;
    float real;
    double wide;
} Cell;
typedef struct {  // what the driver gets; addresses are put into it
    Cell cells[MOST_PARAMETERS];
    Map maps[MOST_TILES];
    void *at[MOST_PARAMETERS];
} Packed;
typedef struct {
    PyObject_HEAD
    Driver driver;
    void *function;
    unsigned threads, shared;
    // One for each argument: p address, i l f d numbers of 32 and 64 bits, t a descriptor of tiles, x nothing, known when compiled
    char kinds[MOST_PARAMETERS + 1];
    int tile_count;
    Tile tiles[MOST_TILES];
    PyObject *device_of, *stream_of;  // functions of Triton: the current device, and its stream
} Launcher;
static PyTypeObject *launcher_type;

static int read_numbers_of(PyObject *tuple, Py_ssize_t count, int64_t *to) {
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != count)
        return PyErr_Format(PyExc_TypeError, "launcher(): a tuple of %zd numbers is missing", count), 0;
    for (Py_ssize_t i = 0; i < count; i++) to[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    return !PyErr_Occurred();
}

// A descriptor: swizzle, size and type of an element, whether NaN fills what lies outside; then box, shape and strides
static int read_tile(PyObject *given, Tile *tile) {
    int64_t n[4 + 3 * RANK];
    if (!read_numbers_of(given, 4 + 3 * RANK, n)) return 0;
    *tile = (Tile){.swizzle = (int)n[0], .type = (int)n[2], .padding = (int)n[3]};
    for (int i = 0; i < RANK; i++) {
        int other = RANK - 1 - i;
        tile->box[other] = (uint32_t)n[4 + i], tile->shape[other] = (uint64_t)n[4 + RANK + i];
        tile->own_strides[i] = n[4 + 2 * RANK + i];
        if (other) tile->strides[other - 1] = (uint64_t)(n[1] * tile->own_strides[i]);
    }
    tile->strides[RANK - 1] = tile->shape[RANK - 1] * tile->strides[RANK - 2];
    return 1;
}

static int parameters_of(const char *kinds) {
    int found = 2;  // two scratch memories, which are not used
    for (; *kinds; kinds++) found += *kinds == 'x' ? 0 : *kinds == 't' ? 1 + 2 * RANK : 1;
    return found;
}

// launcher(driver, function, threads, shared, kinds, tiles, device_of, stream_of)
static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *none) {
    (void)type, (void)none;
    PyObject *driver, *tiles, *device_of, *stream_of;
    unsigned long long function;
    unsigned threads, shared;
    const char *kinds;
    int64_t driven[3];
    if (!PyArg_ParseTuple(args, "OKIIsO!OO", &driver, &function, &threads, &shared, &kinds, &PyTuple_Type, &tiles, &device_of,
                          &stream_of) || !read_numbers_of(driver, 3, driven))
        return NULL;
    if (strlen(kinds) > MOST_PARAMETERS || parameters_of(kinds) > MOST_PARAMETERS || PyTuple_Size(tiles) > MOST_TILES)
        return PyErr_Format(PyExc_ValueError, "launcher(): a kernel has too many arguments");
    Launcher *made = PyObject_New(Launcher, launcher_type);
    if (!made) return NULL;
    memset((char *)made + sizeof(PyObject), 0, sizeof *made - sizeof(PyObject));
    memcpy(&made->driver, driven, sizeof driven);
    made->function = (void *)(uintptr_t)function, made->threads = threads, made->shared = shared;
    memcpy(made->kinds, kinds, strlen(kinds));
    made->device_of = Py_NewRef(device_of), made->stream_of = Py_NewRef(stream_of);
    made->tile_count = (int)PyTuple_Size(tiles);
    for (int i = 0; i < made->tile_count; i++)
        if (!read_tile(PyTuple_GetItem(tiles, i), &made->tiles[i])) return Py_DECREF((PyObject *)made), NULL;
    return (PyObject *)made;
}

static void launcher_end(Launcher *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->device_of);
    Py_XDECREF(self->stream_of);
    PyObject_Free(self);
    Py_DECREF(type);
}

// Pack the arguments as the launcher that Triton compiles does, those after the last one as zeros. 0 with an error set.
static int pack(const Launcher *self, PyObject *values, Cell cells[MOST_PARAMETERS]) {
    int count = 0, place = 0, tile = 0;
    memset(cells, 0, MOST_PARAMETERS * sizeof *cells);
    for (const char *kind = self->kinds; *kind; kind++, place++) {
        if (*kind == 'x') continue;
        PyObject *given = PyTuple_GetItem(values, place);
        if (!given) return 0;
        Cell *cell = &cells[count++];
        if (*kind == 'f') cell->real = (float)PyFloat_AsDouble(given);
        if (*kind == 'd') cell->wide = PyFloat_AsDouble(given);
        if (*kind == 'i' || *kind == 'l') cell->whole = PyLong_AsLongLong(given);
        if (*kind == 'i' && cell->whole != cell->small)
            return PyErr_Format(PyExc_OverflowError, "start(): argument %d has more than 32 bits", place), 0;
        if (*kind == 'p' || *kind == 't') cell->bits = PyLong_AsUnsignedLongLong(given);
        if (*kind != 't') continue;
        if (tile == self->tile_count) return PyErr_Format(PyExc_ValueError, "start(): a descriptor of tiles is missing"), 0;
        const Tile *of = &self->tiles[tile++];
        for (int i = 0; i < RANK; i++) cells[count++].small = (int32_t)of->shape[RANK - 1 - i];
        for (int i = 0; i < RANK; i++) cells[count++].whole = of->own_strides[i];
    }
    return !PyErr_Occurred();
}

// Give a packed launch to the driver; 0, without an error, if it is Triton's to start: the driver refuses, or has no context here.
static int start(const Launcher *self, const unsigned grid[3], void *stream, Packed *packed) {
    static const uint32_t steps[RANK] = {1, 1, 1, 1};
    enum { NO_INTERLEAVE = 0, BY_128_BYTES = 2 };
    void *context = NULL;
    int count = 0, tile = 0, failed;
    if (!grid[0] || !grid[1] || !grid[2]) return 1;
    if (self->driver.context(&context) || !context) return 0;
    for (const char *kind = self->kinds; *kind; kind++) {
        if (*kind == 'x') continue;
        packed->at[count] = &packed->cells[count];
        if (*kind == 't') {
            const Tile *of = &self->tiles[tile];
            void *address = (void *)(uintptr_t)packed->cells[count].bits;
            if (self->driver.encode(&packed->maps[tile], of->type, RANK, address, of->shape, of->strides, of->box, steps,
                                    NO_INTERLEAVE, of->swizzle, BY_128_BYTES, of->padding))
                return 0;
            packed->at[count] = &packed->maps[tile++];
            for (int i = 0; i < 2 * RANK; i++) count++, packed->at[count] = &packed->cells[count];
        }
        count++;
    }
    packed->at[count] = &packed->cells[count], packed->at[count + 1] = &packed->cells[count + 1];
    Config config = {{grid[0], grid[1], grid[2]}, {self->threads, 1, 1}, self->shared, stream, NULL, 0};
    Py_BEGIN_ALLOW_THREADS;
    failed = self->driver.launch(&config, self->function, packed->at, NULL);
    Py_END_ALLOW_THREADS;
    return !failed;
}

static int64_t number_from(PyObject *found) {
    int64_t number = found ? PyLong_AsLongLong(found) : -1;
    Py_XDECREF(found);
    return number;
}

// The current device, and its current stream; -1 with an error set
static int64_t device_of(const Launcher *self, void **stream) {
    PyObject *device = PyObject_CallNoArgs(self->device_of);
    int64_t number = device ? PyLong_AsLongLong(device) : -1;
    if (number >= 0) *stream = (void *)(intptr_t)number_from(PyObject_CallFunctionObjArgs(self->stream_of, device, NULL));
    Py_XDECREF(device);
    return PyErr_Occurred() ? -1 : number;
}

static int read_grid(PyObject *programs, unsigned grid[3]) {
    int64_t numbers[3];
    if (!read_numbers_of(programs, 3, numbers)) return 0;
    for (int i = 0; i < 3; i++) grid[i] = (unsigned)numbers[i];
    return 1;
}

// start(programs, values): whether the kernel was started on the current stream; if not, Triton's own launcher has to.
static PyObject *launcher_start(Launcher *self, PyObject *args) {
    PyObject *programs, *values;
    unsigned grid[3];
    Packed packed;
    void *stream = NULL;
    if (!PyArg_ParseTuple(args, "OO!:start", &programs, &PyTuple_Type, &values)) return NULL;
    if (!read_grid(programs, grid) || !pack(self, values, packed.cells)) return NULL;
    int started = device_of(self, &stream) >= 0 && start(self, grid, stream, &packed);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(started);
}

// Plans of forwards

typedef struct {  // all that a forward depends on; of an address whether there is one, and its distance from a multiple of 16
    Call call;
    int64_t with_value;
} Key;
enum { ORIGINS = 9 };  // what an address is counted from: query, key, value, mask, gain, output, low, memory, 0; replay.py has the same
typedef struct {
    Key key;
    Launcher *launcher;
    unsigned grid[3];
    PyObject *followed, *memory, *typed, *output, *layout;
    int keeps_low, users;  // the table, and calls that it starts: torch lets other threads run while it allocates
    Cell cells[MOST_PARAMETERS];  // without addresses
    int count;
    struct { int cell, origin; int64_t bytes; } addresses[MOST_PARAMETERS];
} Plan;
enum { MOST_PLANS = 4096 };
static Plan *plans[MOST_PLANS];  // by the hash of their key: the later of two takes the place of the earlier

static void plan_end(Plan *plan) {
    if (!plan || --plan->users) return;
    Py_XDECREF((PyObject *)plan->launcher);
    Py_XDECREF(plan->followed);
    Py_XDECREF(plan->memory);
    Py_XDECREF(plan->typed);
    Py_XDECREF(plan->output);
    Py_XDECREF(plan->layout);
    free(plan);
}

static const char *fact(const char *at) { return at ? (const char *)1 + (uintptr_t)at % 16 : NULL; }

static void key_of(const Call *call, Key *key) {
    memset(key, 0, sizeof *key);
    key->call = *call;
    key->with_value = call->value.at != NULL;
    key->call.query.at = fact(call->query.at), key->call.key.at = fact(call->key.at), key->call.value.at = fact(call->value.at);
    key->call.mask.at = fact(call->mask.at), key->call.gain.at = fact(call->gain.at);
}

static Plan **place_of(const Key *key) {
    uint64_t words[sizeof *key / 8], hash = 0;
    memcpy(words, key, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) hash = (hash ^ words[i]) * 0x9E3779B97F4A7C15u, hash ^= hash >> 29;
    return &plans[hash % MOST_PLANS];
}

static PyObject *memory_like(PyObject *tensor) { return PyObject_CallFunctionObjArgs(bound.empty_like, tensor, NULL); }

// Memory on the device of the query, by sizes and strides; `typed` may name another dtype
static PyObject *memory_of(PyObject *query, PyObject *lies, PyObject *typed) {
    PyObject *args = PyTuple_Pack(3, query, PyTuple_GetItem(lies, 0), PyTuple_GetItem(lies, 1));
    PyObject *found = args ? PyObject_Call(bound.new_empty_strided, args, typed) : NULL;
    Py_XDECREF(args);
    return found;
}

// The memory of the output: as the query lies, or by the sizes and strides that the plan has
static PyObject *output_of(const Plan *plan, PyObject *query) {
    if (plan->output == Py_None) return Py_NewRef(Py_None);
    return plan->output == Py_True ? memory_like(query) : memory_of(query, plan->output, NULL);
}

static int start_plan(const Plan *plan, const Call *call, const View made[3]) {
    const char *const origins[ORIGINS] = {call->query.at, call->key.at, call->value.at, call->mask.at, call->gain.at,
                                          made[0].at, made[1].at, made[2].at, NULL};
    Packed packed;
    void *stream = NULL;
    memcpy(packed.cells, plan->cells, sizeof packed.cells);
    for (int i = 0; i < plan->count; i++)
        packed.cells[plan->addresses[i].cell].bits =
            (uint64_t)(uintptr_t)origins[plan->addresses[i].origin] + (uint64_t)plan->addresses[i].bytes;
    return device_of(plan->launcher, &stream) == call->number && start(plan->launcher, plan->grid, stream, &packed);
}

// Start a call like that of a plan: (output, its low part or None, memory of the signs, their layout). None where Python has to start
// it: a profiler follows launches, the device is not the current one, the driver refuses.
static PyObject *start_replay(const Plan *plan, const Call *call, PyObject *query) {
    View views[3] = {{0}};
    PyObject *followed = PyObject_CallNoArgs(plan->followed), *found = NULL, *made[3] = {NULL};
    Py_XDECREF(followed);  // True and False live for ever
    if (followed != Py_False) return followed ? Py_NewRef(Py_None) : NULL;
    made[0] = output_of(plan, query);
    made[1] = !made[0] ? NULL : plan->keeps_low ? memory_like(made[0]) : Py_NewRef(Py_None);
    made[2] = made[1] ? memory_of(query, plan->memory, plan->typed) : NULL;
    int ready = made[2] != NULL;
    for (int i = 0; i < 3 && ready; i++) ready = made[i] == Py_None || tensor_read(made[i], &views[i]);
    int started = ready && start_plan(plan, call, views);
    if (!PyErr_Occurred()) found = started ? PyTuple_Pack(4, made[0], made[1], made[2], plan->layout) : Py_NewRef(Py_None);
    for (int i = 0; i < 3; i++) Py_XDECREF(made[i]);
    return found;
}

// Run a call of which everything is read; None without a plan of an equal one.
static PyObject *run(Call *call, PyObject *query) {
    Key key;
    key_of(call, &key);
    Plan *plan = *place_of(&key);
    if (!plan || memcmp(&plan->key, &key, sizeof key)) Py_RETURN_NONE;
    plan->users++;
    PyObject *found = start_replay(plan, call, query);
    plan_end(plan);
    return found;
}

// Read a problem that is checked: five tensors, six numbers, the bits of signs. 0 without an error if there can be no plan of it.
static int read_checked(PyObject *const *args, Call *call) {
    if (!tensors_bound() || args[5] != Py_None || PyFloat_AsDouble(args[10]) != 0) return 0;
    if (!read_vectors(args[0], args[1], args[2], call) || !read_mask(args[3], call) || !read_gain(args[4], call)) return 0;
    call->sign_bits = PyLong_AsLongLong(args[11]);
    return read_numbers(args + 5, call);
}

// Which cells are addresses, and counted from what: for each argument that is one, a pair of a number of ORIGINS and bytes
static int read_addresses(Plan *plan, PyObject *pairs) {
    int cell = 0, place = 0;
    for (const char *kind = plan->launcher->kinds; *kind; kind++, place++) {
        if (*kind == 'x') continue;
        if (*kind == 'p' || *kind == 't') {
            int64_t pair[2];
            PyObject *given = PyTuple_GetItem(pairs, place);
            if (!given || !read_numbers_of(given, 2, pair)) return 0;
            if (pair[0] < 0 || pair[0] >= ORIGINS) return PyErr_Format(PyExc_ValueError, "plan(): no such origin"), 0;
            plan->addresses[plan->count].cell = cell, plan->addresses[plan->count].origin = (int)pair[0];
            plan->addresses[plan->count++].bytes = pair[1];
        }
        cell += *kind == 't' ? 1 + 2 * RANK : 1;
    }
    return 1;
}

static int is_lying(PyObject *given) { return PyTuple_Check(given) && PyTuple_Size(given) == 2; }

// plan(problem …, sign_bits, launcher, programs, values, addresses, followed, memory, typed, output, low, layout): start
// calls like this one so. `values` are its arguments, in which addresses do not matter; `followed` says whether a profiler follows
// launches; `memory` has the sizes and strides of that of the signs, `typed` its dtype; `output` is None, True (as the query lies), or
// sizes and strides; `low` says whether its rounding error has memory.
METHOD(py_plan) {
    (void)self;
    Call call = {0};
    if (!takes("plan", 22, count)) return NULL;
    if (!read_checked(args, &call)) return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
    if (Py_TYPE(args[12]) != launcher_type || !PyTuple_Check(args[14]) || !PyTuple_Check(args[15]) || !is_lying(args[17]) ||
        !PyDict_Check(args[18]) || !(args[19] == Py_None || args[19] == Py_True || is_lying(args[19])))
        return PyErr_Format(PyExc_TypeError, "plan(): takes a launcher, values, addresses, and sizes with strides");
    Plan *plan = calloc(1, sizeof *plan), **place;
    if (!plan) return PyErr_NoMemory();
    key_of(&call, &plan->key);
    plan->users = 1;
    plan->launcher = (Launcher *)Py_NewRef(args[12]);
    plan->followed = Py_NewRef(args[16]), plan->memory = Py_NewRef(args[17]), plan->typed = Py_NewRef(args[18]);
    plan->output = Py_NewRef(args[19]), plan->keeps_low = args[20] == Py_True, plan->layout = Py_NewRef(args[21]);
    if (!read_grid(args[13], plan->grid) || !pack(plan->launcher, args[14], plan->cells) || !read_addresses(plan, args[15])) {
        plan_end(plan);
        return NULL;
    }
    place = place_of(&plan->key);
    Plan *before = *place;
    *place = plan;
    plan_end(before);
    Py_RETURN_TRUE;
}

// replay_checked(problem …, sign_bits)
METHOD(py_replay_checked) {
    (void)self;
    Call call = {0};
    if (!takes("replay_checked", 12, count)) return NULL;
    if (!read_checked(args, &call)) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    return run(&call, args[0]);
}

// replay(query, key, value, mask, gain, causal, window, scale, softcap, sign_bits, grouped)
METHOD(py_replay) {
    (void)self;
    Call call = {0};
    if (!takes("replay", 11, count)) return NULL;
    call.sign_bits = PyLong_AsLongLong(args[9]);
    if (PyErr_Occurred()) return NULL;
    if (!tensors_bound() || !read_asked(args, &call)) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    return run(&call, args[0]);
}

// forget(): no call is like an earlier one any more
METHOD(py_forget) {
    (void)self, (void)args;
    if (!takes("forget", 0, count)) return NULL;
    for (int i = 0; i < MOST_PLANS; i++) {
        Plan *plan = plans[i];
        plans[i] = NULL;
        plan_end(plan);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"start", (PyCFunction)launcher_start, METH_VARARGS, "start($self, programs, values, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, launcher_new},
    {Py_tp_dealloc, launcher_end},
    {Py_tp_methods, methods},
    {Py_tp_doc, "A kernel of a GPU as Triton compiled it: (driver, function, threads, shared, kinds, tiles, device_of, stream_of)."},
    {0, NULL},
};
static PyType_Spec spec = {"attemper.kernels.cpu._native.Launcher", sizeof(Launcher), 0, Py_TPFLAGS_DEFAULT, slots};

int launch_bind(PyObject *module) {
    launcher_type = (PyTypeObject *)PyType_FromSpec(&spec);
    return launcher_type ? PyModule_AddObjectRef(module, "Launcher", (PyObject *)launcher_type) : -1;
}
