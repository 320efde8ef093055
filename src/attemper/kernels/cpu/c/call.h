// call.h: one attention call as the kernel takes it.
#ifndef ATTEMPER_CALL_H
#define ATTEMPER_CALL_H
#include <stddef.h>
#include <stdint.h>

// tiles need Linux, and a compiler that knows them
#if defined(__x86_64__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

typedef struct {
    const char *at;
    int64_t step[4];  // in elements; 0 repeats
} Strided;

enum { F32, F64, BF16, F16, BOOL, NONE };  // of inputs and masks
static const int SIZE[] = {4, 8, 2, 2, 1, 0};

// the bits of sign_bits, as in contract.py
enum { VISIBLE = 1, MEAN = 2, VARIANCE = 4, PEAK = 8, LSE = 16, ENTROPY = 32, P2 = 64, ARGMAX = 128, OUTPUT_LOW = 256 };

enum {
    GRAD_QUERY = 1,
    GRAD_KEY = 2,
    GRAD_VALUE = 4,
    GRAD_MASK = 8,
    GRAD_GAIN = 16,
    GRAD_MASK_WIDE = 32,         // an entry is a long sum: add it up in double
    GRAD_MASK_BY_BATCHES = 64,   // the batch shares the mask
    GRAD_MASK_BY_GROUPS = 128,   // all key/value heads share it
};

typedef struct {  // one number per row, (B, H, Lq), contiguous; NULL where not asked for
    int64_t *argmax;
    void *lse_low;
    int32_t *visible;
    void *mean, *variance, *peak, *lse, *entropy, *sum_p2;
} Rows;

// why a call failed: no memory was left; torch's parallel loop returned an error; tiles cannot hold its numbers
enum { NO_MEMORY = 1, NO_THREADS, UNFIT };

enum { BACK_KEYS = 384 };  // keys of one tile of a backward; a part of the keys is at least this large

extern const int64_t attemper_unbound;  // `left` or `right` without a bound: beyond any length, but no sum of it overflows

typedef void (*Work)(int64_t begin, int64_t end, void *context);
typedef int (*Parallel)(int64_t begin, int64_t end, int64_t grain, Work work, void *context);

typedef struct {
    Strided query, key, value, mask, gain;  // (B, H, L, E), mask (B, H, Lq, Lk), gain (B, H, Lq)
    int64_t batch, heads, groups, rows, keys, dim, value_dim;
    int64_t dtype, mask_dtype;
    int64_t device, number;  // of the tensors, as DLPack counts them
    int64_t left, right;  // key j is in the band of query i when i - left <= j <= i + right
    int64_t sign_bits, seed;
    char *output;         // (B, H, Lq, Ev), contiguous
    int16_t *output_low;  // as `output`: its rounding error; NULL if not asked for
    Rows measured;
    // backward
    Strided g_output;
    Rows upstream;  // argmax, lse_low and visible are not used
    int64_t needs_grad;
    char *d_query, *d_key, *d_value;  // contiguous, in the dtype of the inputs
    void *d_gain;                     // (B, H, Lq)
    void *d_mask;                     // (parts, then as the mask is); the steps of a dimension that is shared are 0
    int64_t d_mask_step[4], d_mask_part;
    int64_t parts;  // of the keys, each with its own share of d_query
    // how to run
    Parallel parallel;
    int64_t threads, poison;
    double scale, softcap, dropout;  // softcap 0 is none
    // added by native.c, which leaves only the keys that some row sees in the fields above: their first is key `origin` of all
    int64_t origin, all_keys;
} Call;

// The keys in the band of row i: from the first to one past the last
static inline int64_t first_key(const Call *call, int64_t i) { return i - call->left > 0 ? i - call->left : 0; }
static inline int64_t last_key(const Call *call, int64_t i) {
    int64_t last = i + call->right + 1;
    return last < 0 ? 0 : last < call->keys ? last : call->keys;
}

typedef struct {  // one build of the kernel: an instruction set and a precision
    int (*forward)(const Call *);
    int (*backward)(const Call *);
} Kernel;

// One pass of a call, all but its last two fields filled in: 0, NO_MEMORY or NO_THREADS.
int attemper_forward(const Call *given, int variant);
int attemper_backward(const Call *given, int variant);

// The variants of this architecture, in the order native.c counts them, with NULL after the last
extern const char *const attemper_variants[];
// The best of them that this processor runs
int attemper_best(void);

// Memory for one call, 64-byte aligned; NULL when there is none. What is given back is kept for the next call, if it is small.
void *attemper_take(size_t bytes, int poison);
void attemper_give(void *memory);

#endif
