// simd.h: vectors of REAL in plain C (GCC's vector types), the few operations that need more, and exp.
// REAL_IS_FLOAT, VECTOR_BYTES and MAX_ROWS come from the file that is being compiled.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#ifndef NEON
#define NEON 0  // whether the variant may count on the instructions of every 64-bit ARM processor
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#if REAL_IS_FLOAT
#define REAL float
typedef int32_t Int;
#define MANTISSA 23
#define MAGIC 12583039.0f  // 1.5 · 2^23 + 127: adding it rounds to a whole number n; the low bits hold n + 127, the exponent of 2^n
// exp of this is exactly 0. Without scalef so is every result that is not a normal number, since 2^-127 has no bits of its own;
// AVX-512's scalef can write those, and reaches 0 later
#define NO_EXP (VECTOR_BYTES == 64 ? -150.0f : -88.0f)
#define LOG logf
#define EXP expf
#define SQRT sqrtf
#define TANH tanhf
#else
#define REAL double
typedef int64_t Int;
#define MANTISSA 52
#define MAGIC 6755399441056767.0  // 1.5 · 2^52 + 1023
#define NO_EXP (VECTOR_BYTES == 64 ? -1100.0 : -709.0)
#define LOG log
#define EXP exp
#define SQRT sqrt
#define TANH tanh
#endif

typedef REAL Vec __attribute__((vector_size(VECTOR_BYTES)));
typedef Int IntVec __attribute__((vector_size(VECTOR_BYTES)));
typedef REAL LooseVec __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));

enum { LANES = VECTOR_BYTES / sizeof(REAL), WIDE = 2, PANEL = WIDE * LANES };  // a panel is two vectors wide

INLINE Vec load(const REAL *p) { return *(const LooseVec *)p; }
INLINE void store(REAL *p, Vec v) { *(LooseVec *)p = v; }
INLINE Vec splat(REAL x) { return x - (Vec){0}; }
INLINE Vec keep_where(IntVec mask, Vec v) { return (Vec)(mask & (IntVec)v); }
INLINE Vec choose(IntVec mask, Vec yes, Vec no) { return (Vec)((mask & (IntVec)yes) | (~mask & (IntVec)no)); }

// the larger and the smaller; the second when either is NaN
#if VECTOR_BYTES == 64 && REAL_IS_FLOAT
INLINE Vec larger(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE Vec smaller(Vec a, Vec b) { return (Vec)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE REAL sum(Vec v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE REAL largest(Vec v) { return _mm512_reduce_max_ps((__m512)v); }
#elif VECTOR_BYTES == 64
INLINE Vec larger(Vec a, Vec b) { return (Vec)_mm512_max_pd((__m512d)a, (__m512d)b); }
INLINE Vec smaller(Vec a, Vec b) { return (Vec)_mm512_min_pd((__m512d)a, (__m512d)b); }
INLINE REAL sum(Vec v) { return _mm512_reduce_add_pd((__m512d)v); }
INLINE REAL largest(Vec v) { return _mm512_reduce_max_pd((__m512d)v); }
#else
#if VECTOR_BYTES == 32 && REAL_IS_FLOAT
INLINE Vec larger(Vec a, Vec b) { return (Vec)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE Vec smaller(Vec a, Vec b) { return (Vec)_mm256_min_ps((__m256)a, (__m256)b); }
#elif VECTOR_BYTES == 32
INLINE Vec larger(Vec a, Vec b) { return (Vec)_mm256_max_pd((__m256d)a, (__m256d)b); }
INLINE Vec smaller(Vec a, Vec b) { return (Vec)_mm256_min_pd((__m256d)a, (__m256d)b); }
#else
INLINE Vec larger(Vec a, Vec b) { return choose(a > b, a, b); }
INLINE Vec smaller(Vec a, Vec b) { return choose(a < b, a, b); }
#endif
#if NEON && REAL_IS_FLOAT
INLINE REAL sum(Vec v) { return vaddvq_f32((float32x4_t)v); }
INLINE REAL largest(Vec v) { return vmaxvq_f32((float32x4_t)v); }
#else
INLINE REAL sum(Vec v) {
    REAL total = 0;
    UNROLL for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}
INLINE REAL largest(Vec v) {
    REAL top = v[0];
    UNROLL for (int i = 1; i < LANES; i++) top = v[i] > top ? v[i] : top;
    return top;
}
#endif
#endif

// the sum in double, since a mean needs more digits than a float sum keeps
INLINE double sum_wide(Vec v) {
    typedef double Wide __attribute__((vector_size(LANES * sizeof(double))));
    Wide wide = __builtin_convertvector(v, Wide);
    double part[LANES];
    memcpy(part, &wide, sizeof part);
    UNROLL for (int n = LANES / 2; n; n /= 2) UNROLL for (int i = 0; i < n; i++) part[i] += part[i + n];
    return part[0];
}

// to[0..3] = the sums of four vectors, which costs little more than one
INLINE void sum_four(REAL *to, Vec a, Vec b, Vec c, Vec d) {
#if VECTOR_BYTES == 64 && REAL_IS_FLOAT
    __m512 ab = _mm512_unpacklo_ps((__m512)a, (__m512)b) + _mm512_unpackhi_ps((__m512)a, (__m512)b);
    __m512 cd = _mm512_unpacklo_ps((__m512)c, (__m512)d) + _mm512_unpackhi_ps((__m512)c, (__m512)d);
    __m512 all = _mm512_shuffle_ps(ab, cd, 0x44) + _mm512_shuffle_ps(ab, cd, 0xee);
    __m256 half = _mm512_castps512_ps256(all) + _mm512_extractf32x8_ps(all, 1);
    _mm_storeu_ps(to, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#elif NEON && REAL_IS_FLOAT
    float32x4_t ab = vpaddq_f32((float32x4_t)a, (float32x4_t)b), cd = vpaddq_f32((float32x4_t)c, (float32x4_t)d);
    vst1q_f32(to, vpaddq_f32(ab, cd));
#else
    to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
#endif
}

// p · 2^n, where n is also in the low bits of `shifted`
#if VECTOR_BYTES == 64 && REAL_IS_FLOAT
INLINE Vec times_two_to(Vec p, Vec n, Vec shifted) { return (void)shifted, (Vec)_mm512_scalef_ps((__m512)p, (__m512)n); }
#elif VECTOR_BYTES == 64
INLINE Vec times_two_to(Vec p, Vec n, Vec shifted) { return (void)shifted, (Vec)_mm512_scalef_pd((__m512d)p, (__m512d)n); }
#else
INLINE Vec times_two_to(Vec p, Vec n, Vec shifted) { return (void)n, p * (Vec)((IntVec)shifted << MANTISSA); }
#endif

// exp of what is at least NO_EXP: t = n ln 2 + r, a polynomial of r, times 2^n. NaN stays NaN. Measured in float against exp in
// double: 2.5 units in the last place above -20, 4.8 down to -87 (2.3 where ln 2 is in two parts).
INLINE Vec exp_above(Vec t) {
    Vec shifted = t * (REAL)1.44269504088896340736 + MAGIC;
    Vec n = shifted - MAGIC;
#if REAL_IS_FLOAT && VECTOR_BYTES == 16 && !NEON
    Vec r = (t - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts: there may be no fused multiply
#else
    Vec r = t - n * (REAL)0.69314718055994530942;
#endif
#if REAL_IS_FLOAT
    Vec p = splat(0.008290272f);
    p = p * r + 0.04189816f;
    p = p * r + 0.16667639f;
    p = p * r + 0.49999148f;
    p = p * r + 0.9999997f;
#else
    r = r - n * 2.3190468138462996e-17;  // the rest of ln 2, which no double holds: times 1000 it would show
    Vec p = splat(1.0 / 6227020800.0);
    static const double coefficient[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                         1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,     1.0 / 6,
                                         1.0 / 2};
    UNROLL for (int i = 0; i < 11; i++) p = p * r + coefficient[i];
    p = p * r + 1.0;
#endif
    p = p * r + (REAL)1;
    return times_two_to(p, n, shifted);
}

// t, or a number whose exp is 0 if t is smaller than that; NaN stays NaN
INLINE Vec bounded(Vec t) { return larger(splat(NO_EXP), t); }

// log of a normal number above 0 (NaN and inf stay), to 2 units in the last place: x = m 2^n with m near 1, a polynomial of m - 1
INLINE Vec log_of(Vec x) {
#if REAL_IS_FLOAT
    IntVec bits = (IntVec)x, n = (bits - 0x3f3504f3) >> MANTISSA;  // the bits of sqrt(1/2)
    Vec f = (Vec)(bits - (n << MANTISSA)) - 1, size = __builtin_convertvector(n, Vec);
    Vec p = splat(0.06747413f);
    static const float coefficient[] = {-0.11676971f, 0.1188854f,   -0.12405413f, 0.14219482f,
                                        -0.16668002f, 0.20002122f, -0.25000009f, 0.33333313f};
    UNROLL for (int i = 0; i < 8; i++) p = p * f + coefficient[i];
    Vec square = f * f;
    p = p * f * square + size * -2.1219444e-4f;  // ln 2 in two parts, the first short enough for an exact product
    Vec found = (f + (p - square * 0.5f)) + size * 0.69335938f;
    return choose(x < INFINITY, found, x);
#else
    UNROLL for (int i = 0; i < LANES; i++) x[i] = LOG(x[i]);
    return x;
#endif
}

#if VECTOR_BYTES == 64 && REAL_IS_FLOAT
// 16 rows of 16 numbers of 4 bytes become columns; steps in bytes
INLINE void turn_square(char *to, int64_t to_step, const char *from, int64_t from_step) {
    __m512i a[16], b[16];
    UNROLL for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * from_step);
    UNROLL for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        __m512i low = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), low2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        __m512i high = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd), high2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
        _mm512_storeu_si512(to + i * to_step, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_storeu_si512(to + (i + 4) * to_step, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_storeu_si512(to + (i + 8) * to_step, _mm512_shuffle_i32x4(low, low2, 0xdd));
        _mm512_storeu_si512(to + (i + 12) * to_step, _mm512_shuffle_i32x4(high, high2, 0xdd));
    }
}
#endif

INLINE REAL dot(const REAL *a, const REAL *b, int64_t n) {
    Vec all = splat(0);
    int64_t e = 0;
    for (; e + LANES <= n; e += LANES) all += load(a + e) * load(b + e);
    REAL total = sum(all);
    for (; e < n; e++) total += a[e] * b[e];
    return total;
}
