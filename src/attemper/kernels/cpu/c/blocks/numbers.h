// numbers.h: rows of any dtype and stride become rows of REAL, and back; dropout's coins.
#include "../call.h"

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
INLINE float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
INLINE float from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    float size = from_bits((uint32_t)(half & 0x7fff) << 13) * 0x1p112f;
    return from_bits(bits_of(size) | sign | (size >= 65536.0f ? 0x7f800000u : 0));  // inf and NaN
}
INLINE uint16_t to_half(float x) {
    uint32_t bits = bits_of(x), sign = bits & 0x80000000u, size = bits ^ sign, found;
    if (size >= 0x47800000u)
        found = size > 0x7f800000u ? 0x7e00 : 0x7c00;
    else if (size < 0x38800000u)
        found = bits_of(from_bits(size) + 0.5f) - 0x3f000000u;  // subnormal: the addition rounds
    else
        found = (size + 0xc8000fffu + ((size >> 13) & 1)) >> 13;
    return (uint16_t)(found | sign >> 16);
}
INLINE uint16_t to_bfloat(float x) {
    uint32_t bits = bits_of(x);
    return x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE const char *place(const Strided *t, int dtype, int64_t a, int64_t b, int64_t c) {
    return t->at + (a * t->step[0] + b * t->step[1] + c * t->step[2]) * SIZE[dtype];
}

// n numbers, `step` apart, as REAL
static void fetch(REAL *to, const char *from, int dtype, int64_t n, int64_t step) {
#define EACH(PLACE, TYPE, VALUE)                               \
    for (int64_t i = 0; i < n; i++) {                          \
        TYPE x = ((const TYPE *)from)[PLACE];                  \
        to[i] = (VALUE);                                       \
    }
#define FETCH(TYPE, VALUE)                                     \
    if (step == 1)                                             \
        EACH(i, TYPE, VALUE)                                   \
    else                                                       \
        EACH(i * step, TYPE, VALUE)                            \
    break
    switch (dtype) {
        case F32: FETCH(float, (REAL)x);
        case F64: FETCH(double, (REAL)x);
        case BF16: FETCH(uint16_t, (REAL)from_bits((uint32_t)x << 16));
        case F16: FETCH(uint16_t, (REAL)from_half(x));
        case BOOL: FETCH(uint8_t, x ? (REAL)0 : (REAL)-INFINITY);
    }
#undef FETCH
#undef EACH
}

// A vector, and one number, read as `dtype`: a float dtype that REAL holds
#if REAL_IS_FLOAT
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
INLINE Vec load_as(const int dtype, const char *p) {
    if (dtype == F32) return load((const REAL *)p);
#if VECTOR_BYTES == 64
    __m256i halves = _mm256_loadu_si256((const __m256i *)p);
    if (dtype == F16) return (Vec)_mm512_cvtph_ps(halves);
    IntVec bits = (IntVec)_mm512_cvtepu16_epi32(halves);
#else
#if NEON
    if (dtype == F16) return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p)));
#endif
    IntVec bits = __builtin_convertvector(*(const HalfVec *)p, IntVec);
#endif
    if (dtype == BF16) return (Vec)(bits << 16);
    Vec size = (Vec)((bits & 0x7fff) << 13) * 0x1p112f;  // as from_half does
    return (Vec)((IntVec)size | (bits & 0x8000) << 16 | ((size >= 65536.0f) & 0x7f800000));
}
INLINE REAL number_as(const int dtype, const char *p) {
    if (dtype == F32) return *(const float *)p;
    uint16_t half = *(const uint16_t *)p;
    return dtype == BF16 ? from_bits((uint32_t)half << 16) : from_half(half);
}
#else
INLINE Vec load_as(const int dtype, const char *p) { return (void)dtype, load((const REAL *)p); }
INLINE REAL number_as(const int dtype, const char *p) { return (void)dtype, *(const REAL *)p; }
#endif

// n numbers times `factor`, in the dtype of the inputs
static void put(char *to, int dtype, int64_t offset, const REAL *from, int64_t n, REAL factor) {
    to += offset * SIZE[dtype];
    switch (dtype) {
        case F32:
            for (int64_t i = 0; i < n; i++) ((float *)to)[i] = (float)(from[i] * factor);
            break;
        case F64:
            for (int64_t i = 0; i < n; i++) ((double *)to)[i] = (double)(from[i] * factor);
            break;
        case BF16:
            for (int64_t i = 0; i < n; i++) ((uint16_t *)to)[i] = to_bfloat((float)(from[i] * factor));
            break;
        case F16:
            for (int64_t i = 0; i < n; i++) ((uint16_t *)to)[i] = to_half((float)(from[i] * factor));
            break;
    }
}

// Whether a number is below the normal ones of float16
INLINE int is_small(int dtype, float x) { return dtype == F16 && x < 0x1p-14f && x > -0x1p-14f; }

// The rounding error of each number that `put` wrote, in units in the last place of float; both together are the float again.
// Below the normal range of float16 the unit is 2^-40. 0 where the number became inf or NaN. `rounded_off` in contract.py is the same.
static void put_low(int16_t *low, int dtype, int64_t offset, const REAL *from, int64_t n, REAL factor) {
    if (!low) return;
    for (int64_t i = 0; i < n; i++) {
        float x = (float)(from[i] * factor), y = dtype == BF16 ? from_bits((uint32_t)to_bfloat(x) << 16) : from_half(to_half(x));
        int32_t lost = is_small(dtype, y) ? (int32_t)lrintf((x - y) * 0x1p40f) : (int32_t)(bits_of(x) - bits_of(y));
        lost = lost > INT16_MAX ? INT16_MAX : lost < INT16_MIN ? INT16_MIN : lost;
        low[offset + i] = (int16_t)(y - y == 0 ? lost : 0);
    }
}

// A row of the output, and its rounding error if that is asked for
static void put_output(const Call *call, int64_t row, const REAL *from, REAL factor) {
    put(call->output, (int)call->dtype, row * call->value_dim, from, call->value_dim, factor);
    put_low(call->output_low, (int)call->dtype, row * call->value_dim, from, call->value_dim, factor);
}

// n numbers of the output before rounding, as REAL
static void restore(REAL *numbers, int dtype, const int16_t *low, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float y = (float)numbers[i];
        numbers[i] = (REAL)(is_small(dtype, y) ? y + (float)low[i] * 0x1p-40f : from_bits(bits_of(y) + (uint32_t)(int32_t)low[i]));
    }
}

INLINE int is_real(int dtype) { return dtype == (REAL_IS_FLOAT ? F32 : F64); }

// A row of a matrix as REAL: in place where it is contiguous REAL, else in `scratch`.
INLINE const REAL *row_of(const Strided *t, int dtype, int64_t b, int64_t h, int64_t i, int64_t n, REAL *scratch) {
    const char *at = place(t, dtype, b, h, i);
    if (is_real(dtype) && t->step[3] == 1) return (const REAL *)at;
    fetch(scratch, at, dtype, n, t->step[3]);
    return scratch;
}

// Whether a matrix is stored transposed, with rows side by side: keys of a cache that is stored (B, H, E, L)
INLINE int lies_turned(const Strided *t) { return t->step[3] != 1 && t->step[2] == 1; }

// Rows [first, first + n) as REAL, `step` apart; where they are side by side, a line is read once for all of them
static void fetch_rows(REAL *to, int64_t step, const Strided *t, int dtype, int64_t b, int64_t h, int64_t first, int64_t n,
                       int64_t dim) {
    enum { SIDE = 32 };
    if (!lies_turned(t)) {
        for (int64_t i = 0; i < n; i++) fetch(to + i * step, place(t, dtype, b, h, first + i), dtype, dim, t->step[3]);
        return;
    }
    for (int64_t i = 0; i < n; i += SIDE) {
        int64_t some = n - i < SIDE ? n - i : SIDE;
        const char *at = place(t, dtype, b, h, first + i);
        for (int64_t e = 0; e < dim; e++) {
            REAL column[SIDE];
            fetch(column, at + e * t->step[3] * SIZE[dtype], dtype, some, 1);
            for (int64_t r = 0; r < some; r++) to[(i + r) * step + e] = column[r];
        }
    }
}

// 0 or 1/(1-p) for `n` keys of one row, the same whenever it is drawn with the same seed.
static void coins(REAL *keep, const Call *call, int64_t row, int64_t key, int64_t n) {
    uint64_t s = (uint64_t)call->seed + 0x9e3779b97f4a7c15u * (uint64_t)(row + 1);
    s = (s ^ s >> 30) * 0xbf58476d1ce4e5b9u;
    s = (s ^ s >> 27) * 0x94d049bb133111ebu;
    s ^= s >> 31;
    uint32_t low = (uint32_t)s, high = (uint32_t)(s >> 32);
    uint32_t below = (uint32_t)(call->dropout * 16777216.0);
    REAL kept = call->dropout < 1 ? (REAL)(1 / (1 - call->dropout)) : 0;
    for (int64_t j = 0; j < n; j++) {
        uint32_t x = (uint32_t)(call->origin + key + j) ^ low;
        x = (x ^ x >> 16) * 0x7feb352du;
        x = (x ^ x >> 15) * 0x846ca68bu;
        x = (x ^ x >> 16) + high;
        x = (x ^ x >> 16) * 0x7feb352du;
        x = (x ^ x >> 15) * 0x846ca68bu;
        x ^= x >> 16;
        keep[j] = (x >> 8) < below ? 0 : kept;
    }
}
