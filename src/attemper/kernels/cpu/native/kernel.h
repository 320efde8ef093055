// kernel.h: the whole kernel, compiled once for each instruction set and precision.
#include "simd.h"
#include "numbers.h"
#include "product.h"
#include "pack.h"
#include "rows.h"
#include "workers.h"
#include "forward.h"

static int backward(const Call *call) { (void)call; return 1; }

const Kernel KERNEL = {forward, backward};
