// kernel.h: the whole kernel, compiled once for each instruction set and precision.
#ifndef TILES
#define TILES 0  // whether the products are on AMX tiles
#endif
#include "simd.h"
#include "numbers.h"
#include "sizes.h"
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
#include "few.h"
#include "forward.h"
#include "unseen.h"
#include "backward.h"

#if TILES
// What does not suit tiles is done without them. Signs do not depend on values: `measure` and `attention` give the same bits
// also where it is the values that do not suit.
extern const Kernel attemper_avx512_f32;
static int forward_anyhow(const Call *call) {
    int failed = forward(call);
    if (failed != UNFIT) return failed;
    Call signs = *call, output = *call;
    signs.output = NULL;
    output.signs = 0, output.measured = (Rows){0};
    failed = call->output ? forward(&signs) : UNFIT;
    if (failed && failed != UNFIT) return failed;
    return attemper_avx512_f32.forward(failed == UNFIT ? call : &output);
}
static int backward_anyhow(const Call *call) {
    int failed = backward(call);
    return failed == UNFIT ? attemper_avx512_f32.backward(call) : failed;
}
const Kernel KERNEL = {forward_anyhow, backward_anyhow};
#else
const Kernel KERNEL = {forward, backward};
#endif
