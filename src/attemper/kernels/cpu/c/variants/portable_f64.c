// portable, double
#define REAL_IS_FLOAT 0
#define VECTOR_BYTES 16
#define MAX_ROWS 6
#define KERNEL attemper_portable_f64
#include "../kernel/kernel.h"
