// avx2, float
#include "target.h"
#if defined(__x86_64__)
BEGIN_TARGET("avx2,fma")
#define REAL_IS_FLOAT 1
#define VECTOR_BYTES 32
#define MAX_ROWS 6
#define KERNEL attemper_avx2_f32
#include "../kernel/kernel.h"
END_TARGET
#endif
