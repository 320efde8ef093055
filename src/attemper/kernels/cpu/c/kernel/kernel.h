// kernel.h: the whole kernel, compiled once for each instruction set and precision: first the blocks it is built of, then its passes,
// in the order in which one uses another.
#ifndef TILES
#define TILES 0  // whether the products are on AMX tiles
#endif
#include "../blocks/simd.h"
#include "../blocks/numbers.h"

enum {  // how much is worked on at a time, with vectors and on tiles alike
    TILE_KEYS = 512,             // keys of a tile
    TILE_STEP = TILE_KEYS + 16,  // from row to row of a tile; not a power of two, which would crowd one set of the cache
    BLOCK_ROWS = 96,             // rows that are differentiated together, with BACK_KEYS keys
};
INLINE int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

#if TILES
#include "../blocks/tiles.h"
#include "../blocks/pack_tiles.h"
#else
#include "../blocks/product.h"
#include "../blocks/pack.h"
#endif
#include "../blocks/workers.h"

#include "rows.h"
#include "finish.h"
#if !TILES
#include "decode.h"
#endif
#include "few.h"
#include "forward.h"
#include "backward_rows.h"
#include "backward.h"

#if TILES
// A call whose numbers tiles cannot hold runs without them. If only its values do not fit, the signs still come from tiles, so that
// `measure` and `attention` give the same bits.
extern const Kernel attemper_avx512_f32;
static int forward_anyhow(const Call *call) {
    int failed = forward(call);
    if (failed != UNFIT) return failed;
    Call signs = *call, output = *call;
    signs.output = NULL;
    output.sign_bits = 0, output.measured = (Rows){0};
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
