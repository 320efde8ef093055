// avx512, float
#include "target.h"
#if defined(__x86_64__)
BEGIN_TARGET("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#define REAL_IS_FLOAT 1
#define VECTOR_BYTES 64
#define MAX_ROWS 12
#define KERNEL attemper_avx512_f32
#include "../kernel/kernel.h"
END_TARGET
#endif
