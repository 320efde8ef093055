// amx: bfloat16 and float16 on tiles; what does not suit them is done by avx512
#include "../call.h"
#if HAS_AMX
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,amx-tile,amx-bf16")
#endif
#define REAL float
#define REAL_IS_FLOAT 1
#define VECTOR_BYTES 64
#define MAX_ROWS 32
#define TILES 1
#define KERNEL attemper_amx_f32
#include "../kernel/kernel.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
