// portable, float
#define REAL_IS_FLOAT 1
#define VECTOR_BYTES 16
#define MAX_ROWS 6
#define KERNEL attemper_portable_f32
#include "../kernel/kernel.h"
