// kernel.h: the whole kernel, compiled once for each instruction set and precision.
#include "simd.h"
#include "numbers.h"
#include "product.h"
#include "pack.h"
#include "rows.h"
#include "finish.h"
#include "workers.h"
#include "decode.h"
#include "forward.h"
#include "backward.h"

const Kernel KERNEL = {forward, backward};
