// plain.c: a forward straight from torch's tensors as Python holds them. torch gives a tensor's address, sizes and strides through the table
// of functions that DLPack defines and torch.Tensor offers (`__dlpack_c_exchange_api__`), so nothing of Python or torch is linked.
#include "call.h"

// DLTensor of DLPack 1.x
typedef struct {
    char *data;
    struct { int32_t kind, number; } device;
    int32_t dims;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *stride;
    uint64_t offset;  // in bytes
} Tensor;

typedef int (*Read)(void *tensor, Tensor *to);

// DLPackExchangeAPI from 1.3 on; its beginning does not change before 2.0
typedef struct {
    uint32_t major, minor;
    void *older, *allocate, *from_python, *to_python;
    Read read;
} Table;

enum { ON_CPU = 1, FLOAT_CODE = 2, BFLOAT_CODE = 4 };  // of DLPack
enum { TOP_LEFT = 1, LOWER_RIGHT };

static struct {  // what Python hands over once
    Read read;
    void *(*release)(void);  // the interpreter's lock
    void (*take)(void *);
} bound;

// Whether attemper_plain_forward can be called from now on.
int attemper_bind(const Table *table, void *(*release)(void), void (*take)(void *)) {
    if (table->major != 1 || table->minor < 3 || !table->read) return 0;
    bound.read = table->read, bound.release = release, bound.take = take;
    return 1;
}

static int64_t dtype_of(const Tensor *t) {
    if (t->dtype.lanes != 1) return NONE;
    if (t->dtype.code == BFLOAT_CODE) return t->dtype.bits == 16 ? BF16 : NONE;
    if (t->dtype.code != FLOAT_CODE) return NONE;
    return t->dtype.bits == 32 ? F32 : t->dtype.bits == 64 ? F64 : t->dtype.bits == 16 ? F16 : NONE;
}

// The address and strides of a tensor of 4 dimensions on the CPU; 0 for another, or an empty one.
static int locate(const Tensor *t, Strided *to) {
    if (t->dims != 4 || t->device.kind != ON_CPU || !t->data) return 0;
    *to = (Strided){t->data + t->offset, {t->stride[0], t->stride[1], t->stride[2], t->stride[3]}};
    return t->shape[0] && t->shape[1] && t->shape[2] && t->shape[3];
}

static void find_band(Call *call, int causal, int64_t window) {  // as band() in ../../../operation/plain.py does
    int64_t offset = causal == LOWER_RIGHT ? call->keys - call->rows : 0;
    call->left = attemper_unbound;
    call->right = causal ? offset : attemper_unbound;
    if (!window) return;
    if (window > call->rows + call->keys) window = call->rows + call->keys;
    call->left = window - 1 - offset;
    if (!causal) call->right = window - 1;
}

// Run a forward whose output has the query's shape. Returns NOT_PLAIN, and does nothing, if the three tensors are not a valid 4-d
// problem that this entry takes. Called with the interpreter's lock held. `grouped` allows fewer key heads than query heads.
int attemper_plain_forward(void *query, void *key, void *value, char *output, const Rows *measured, int64_t sign_bits, int grouped,
                           int causal, int64_t window, double scale, double softcap, Parallel parallel, int64_t threads,
                           int64_t poison, int variant) {
    Tensor q, k, v;
    Call call = {.mask_dtype = NONE, .sign_bits = sign_bits, .output = output, .parts = 1, .parallel = parallel,
                 .threads = threads, .poison = poison, .scale = scale, .softcap = softcap};
    if (bound.read(query, &q) || bound.read(key, &k) || bound.read(value, &v)) return NOT_PLAIN;
    if (!locate(&q, &call.query) || !locate(&k, &call.key) || !locate(&v, &call.value)) return NOT_PLAIN;
    call.dtype = dtype_of(&q);
    if (call.dtype == NONE || dtype_of(&k) != call.dtype || dtype_of(&v) != call.dtype) return NOT_PLAIN;
    call.batch = q.shape[0], call.heads = q.shape[1], call.rows = q.shape[2], call.dim = q.shape[3];
    call.groups = k.shape[1], call.keys = k.shape[2], call.value_dim = v.shape[3];
    if (k.shape[0] != call.batch || v.shape[0] != call.batch || v.shape[1] != call.groups || v.shape[2] != call.keys ||
        k.shape[3] != call.dim || call.value_dim != call.dim)
        return NOT_PLAIN;
    if (call.heads != call.groups && (!grouped || call.heads % call.groups)) return NOT_PLAIN;
    if (measured) call.measured = *measured;
    find_band(&call, causal, window);
    void *state = bound.release();
    int failed = attemper_forward(&call, variant);
    bound.take(state);
    return failed;
}
