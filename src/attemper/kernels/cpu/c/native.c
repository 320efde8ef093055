// native.c: runs a call on the build of the kernel that is asked for, and says which the processor has; keeps memory for the next call.
#include "call.h"

#include <stdlib.h>
#include <string.h>
#if HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern const Kernel attemper_portable_f32, attemper_portable_f64;
#if defined(__x86_64__)
extern const Kernel attemper_avx2_f32, attemper_avx2_f64, attemper_avx512_f32, attemper_avx512_f64, attemper_amx_f32;
enum { PORTABLE, AVX2, AVX512, AMX };
const char *const attemper_variants[] = {"portable", "avx2", "avx512", "amx", NULL};
#elif defined(__aarch64__)
extern const Kernel attemper_neon_f32, attemper_neon_f64;
enum { PORTABLE, NEON };
const char *const attemper_variants[] = {"portable", "neon", NULL};
#else
enum { PORTABLE };
const char *const attemper_variants[] = {"portable", NULL};
#endif

#if HAS_AMX
// Whether the processor has tiles of bfloat16, the system keeps them (XCR0), and lets this process use them: Linux wants to be asked.
static int has_tiles(void) {
    enum { LEAF = 7, BF16_BIT = 1 << 22, TILE_BIT = 1 << 24, STATES = 3 << 17, TILE_DATA = 18, ASK = 0x1023 };
    unsigned a, b, c, d, states, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    if (!__get_cpuid_count(LEAF, 0, &a, &b, &c, &d) || !(d & BF16_BIT) || !(d & TILE_BIT)) return 0;
    __asm__("xgetbv" : "=a"(states), "=d"(high) : "c"(0));
    return (states & STATES) == STATES && syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
}
#endif

// The best variant that this processor runs.
int attemper_best(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
#if HAS_AMX
        if (has_tiles()) return AMX;
#endif
        return AVX512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
    return PORTABLE;
#elif defined(__aarch64__)
    return NEON;  // every 64-bit ARM processor has it
#else
    return PORTABLE;
#endif
}

static const Kernel *kernel_for(const Call *call, int variant) {
    int wide = call->dtype == F64;
#if defined(__x86_64__)
#if HAS_AMX
    if (variant == AMX && !wide) return &attemper_amx_f32;
#endif
    if (variant >= AVX512) return wide ? &attemper_avx512_f64 : &attemper_avx512_f32;
    if (variant == AVX2) return wide ? &attemper_avx2_f64 : &attemper_avx2_f32;
#elif defined(__aarch64__)
    if (variant == NEON) return wide ? &attemper_neon_f64 : &attemper_neon_f32;
#endif
    (void)variant;
    return wide ? &attemper_portable_f64 : &attemper_portable_f32;
}

// The same call on only those keys that the band shows to some row: the cost depends on the window, not on the length of the cache.
static Call on_seen_keys(const Call *given) {
    Call call = *given;
    call.all_keys = call.keys;
    int64_t first = first_key(&call, 0), last = call.rows ? last_key(&call, call.rows - 1) : 0;
    if (first >= last) first = last = 0;  // no row sees a key
    call.origin = first;
    call.keys = last - first;
    call.left += first;
    call.right -= first;
    if (call.key.at) call.key.at += first * call.key.step[2] * SIZE[call.dtype];
    if (call.value.at) call.value.at += first * call.value.step[2] * SIZE[call.dtype];
    if (call.mask.at) call.mask.at += first * call.mask.step[3] * SIZE[call.mask_dtype];
    int wide = call.needs_grad & GRAD_MASK_WIDE || call.dtype == F64;
    if (call.d_mask) call.d_mask = (char *)call.d_mask + first * call.d_mask_step[3] * (wide ? 8 : 4);
    int64_t tiles = (call.keys + BACK_KEYS - 1) / BACK_KEYS;
    if (call.parts > tiles) call.parts = tiles ? tiles : 1;
    return call;
}

int attemper_forward(const Call *given, int variant) {
    Call call = on_seen_keys(given);
    return kernel_for(&call, variant)->forward(&call);
}
int attemper_backward(const Call *given, int variant) {
    Call call = on_seen_keys(given);
    return kernel_for(&call, variant)->backward(&call);
}
const int64_t attemper_unbound = (int64_t)1 << 40;

// Fresh pages cost more than the arithmetic of a small call, so a few blocks are kept. A call that finds none allocates one.
enum { HEADER = 64, SLOTS = 4, KEPT = 16 << 20 };
static char *kept[SLOTS];

static char *swap(int slot, char *block) { return __atomic_exchange_n(&kept[slot], block, __ATOMIC_ACQ_REL); }

void *attemper_take(size_t bytes, int poison) {
    char *block = NULL;
    for (int slot = 0; slot < SLOTS && !block; slot++) {
        block = swap(slot, NULL);
        if (block && *(size_t *)block < bytes) {  // too small: back, unless another thread was quicker
            free(swap(slot, block));
            block = NULL;
        }
    }
    if (!block) {
        bytes = (bytes + 63) / 64 * 64;
        block = aligned_alloc(64, bytes + HEADER);
        if (!block) return NULL;
        *(size_t *)block = bytes;
    }
    if (poison) memset(block + HEADER, 0xff, *(size_t *)block);  // NaN everywhere
    return block + HEADER;
}

void attemper_give(void *memory) {
    if (!memory) return;
    char *block = (char *)memory - HEADER;
    if (*(size_t *)block > KEPT) {
        free(block);
        return;
    }
    for (int slot = 0; slot < SLOTS && block; slot++) block = swap(slot, block);  // the oldest falls off the end
    free(block);
}
