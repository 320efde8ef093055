// avx2, float
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define REAL float
#define REAL_IS_FLOAT 1
#define VECTOR_BYTES 32
#define MAX_ROWS 6
#define KERNEL attemper_avx2_f32
#include "../kernel/kernel.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
