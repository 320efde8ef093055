// driver.c: stands in for CUDA's driver (libcuda.so.1). It runs nothing; it keeps what it was asked to launch, so that a test can
// compare who asked. Triton's own launcher, which it compiles for each kernel, is linked with it like with the driver.
#include <string.h>

#include "cuda.h"

enum { MOST = 96, BYTES = 128 };
typedef struct {
    unsigned config[8];
    CUstream stream;
    CUfunction function;
    unsigned char parameters[MOST][BYTES];
} Launched;
// What was launched, in order; the test says of what sizes the parameters of a function are, which the driver knows from the kernel
Launched launched[MOST];
int launches, refuses, without_context;
struct { CUfunction function; int count, sizes[MOST]; } known[MOST];

CUresult cuLaunchKernelEx(const CUlaunchConfig *given, CUfunction function, void **at, void **extra) {
    if (extra) return CUDA_ERROR_INVALID_VALUE;
    if (refuses) return CUDA_ERROR_LAUNCH_FAILED;
    Launched *to = &launched[launches++ % MOST];
    *to = (Launched){.config = {given->gridDimX, given->gridDimY, given->gridDimZ, given->blockDimX, given->blockDimY,
                                given->blockDimZ, given->sharedMemBytes, given->numAttrs},
                     .stream = given->hStream, .function = function};
    for (int k = 0; k < MOST; k++)
        for (int i = 0; i < known[k].count && known[k].function == function; i++)
            memcpy(to->parameters[i], at[i], known[k].sizes[i]);
    return CUDA_SUCCESS;
}

// A descriptor that holds all that it was made of
CUresult cuTensorMapEncodeTiled(CUtensorMap *to, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *shape,
                                const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
    unsigned long long *word = (unsigned long long *)to;
    if ((size_t)to % 64 || (size_t)address % 16 || rank < 3 || rank > 4) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i + 1 < rank; i++)
        if (strides[i] % 16) return CUDA_ERROR_INVALID_VALUE;
    memset(to, 0, sizeof *to);
    *word++ = (size_t)address;
    *word++ = type | rank << 8 | interleave << 16 | swizzle << 20 | promotion << 24 | (unsigned)fill << 28;
    for (unsigned i = 0; i < rank; i++) *word++ = shape[i];
    for (unsigned i = 0; i + 1 < rank; i++) *word++ = strides[i];
    for (unsigned i = 0; i < rank; i++) *word++ = box[i] | (unsigned long long)steps[i] << 32;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *to) { return *to = without_context ? NULL : (CUcontext)1, CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *to, CUpointer_attribute what, CUdeviceptr of) {
    return what == CU_POINTER_ATTRIBUTE_DEVICE_POINTER ? (*(CUdeviceptr *)to = of, CUDA_SUCCESS) : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuDeviceGetAttribute(int *to, CUdevice_attribute what, CUdevice device) {
    (void)what, (void)device;
    return *to = 227 << 10, CUDA_SUCCESS;  // shared memory of a program on Hopper; nothing else is read
}
CUresult cuModuleLoadData(CUmodule *to, const void *image) { return *to = (CUmodule)image, CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *to, CUmodule module, const char *name) {
    static size_t loaded;
    (void)module, (void)name;
    return *to = (CUfunction)(1000 + ++loaded), CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *to, CUfunction_attribute what, CUfunction of) {
    (void)of;
    return *to = what == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **to) { return (void)error, *to = "the stand-in refused", CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction a, CUfunction_attribute b, int c) { return (void)a, (void)b, (void)c, CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction a, CUfunc_cache b) { return (void)a, (void)b, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *to, int number) { return *to = number, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *to, CUdevice device) { return (void)device, *to = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return (void)context, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *to, CUlimit what) { return (void)what, *to = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit what, size_t value) { return (void)what, (void)value, CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *a, CUfunction b, const CUlaunchConfig *c) { return (void)a, (void)b, (void)c, CUDA_SUCCESS; }
