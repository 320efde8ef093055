// amx: bfloat16 and float16 on tiles; what does not suit them is done by avx512
#include "../call.h"
#include "target.h"
#if HAS_AMX
BEGIN_TARGET("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,amx-tile,amx-bf16")
#define REAL_IS_FLOAT 1
#define VECTOR_BYTES 64
#define MAX_ROWS 32
#define TILES 1
#define KERNEL attemper_amx_f32
#include "../kernel/kernel.h"
END_TARGET
#endif
