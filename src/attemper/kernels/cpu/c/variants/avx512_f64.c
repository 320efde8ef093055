// avx512, double
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#endif
#define REAL double
#define REAL_IS_FLOAT 0
#define VECTOR_BYTES 64
#define MAX_ROWS 12
#define KERNEL attemper_avx512_f64
#include "../kernel/kernel.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
