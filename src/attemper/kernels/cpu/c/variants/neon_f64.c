// neon, double
#if defined(__aarch64__)
#define REAL_IS_FLOAT 0
#define VECTOR_BYTES 16
#define NEON 1
#define MAX_ROWS 8
#define KERNEL attemper_neon_f64
#include "../kernel/kernel.h"
#endif
