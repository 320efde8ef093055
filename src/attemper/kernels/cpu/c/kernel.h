// kernel.h: the whole kernel, compiled once for each instruction set and precision.
#ifndef TILES
#define TILES 0  // whether the products are on AMX tiles
#endif
#include "simd.h"
#include "numbers.h"
#if TILES
#include "tiles.h"
#include "pack_tiles.h"
#else
#include "product.h"
#include "pack.h"
#endif
#include "rows.h"
#include "finish.h"
#include "workers.h"
#if !TILES
#include "decode.h"
#endif
#include "forward.h"
#include "backward.h"

#if TILES
// What does not suit tiles is done without them, from the start.
extern const Kernel attemper_avx512_f32;
static int forward_anyhow(const Call *call) {
    int failed = forward(call);
    return failed == UNFIT ? attemper_avx512_f32.forward(call) : failed;
}
static int backward_anyhow(const Call *call) {
    int failed = backward(call);
    return failed == UNFIT ? attemper_avx512_f32.backward(call) : failed;
}
const Kernel KERNEL = {forward_anyhow, backward_anyhow};
#else
const Kernel KERNEL = {forward, backward};
#endif
