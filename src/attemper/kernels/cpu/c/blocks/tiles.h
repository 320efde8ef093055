// tiles.h: the products of product.h on AMX tiles, for bfloat16 and float16: 16 × 16 sums at a time, added up in float.
//
// AMX multiplies bfloat16 numbers. A bfloat16 input is one, a float16 input (11 bits) the sum of two, exactly: scores, and so all
// signs, are as good as from FMA. Weights of bfloat16 values are rounded to one part, as their output will be; other weights, and
// all gradients, to two, 17 bits. (Floats would need three parts and six products: measured, no faster than FMA.) A
// tile instruction adds up its 32 products apart before they join a sum.
//
// A tile is 16 rows of 16 pairs. The pairs of a matrix are numbers 16 apart, k and k + 16 of a group of 32 that are summed over:
// two vectors become a vector of pairs without a shuffle. Both sides of a product pair alike, so the order does not matter.
//
//   left    a's tiles, [block of 16 rows][group][part]: a row's pairs are side by side
//   across  b's tiles of keys that are multiplied along their dims, [block of 16 keys][group][part]: left, turned
//   along   b's tiles of rows that are added up, [group][block of 16 columns][part]: pairs of rows, column by column
//   turned  a's tiles of columns whose rows are added up, [block of 16 columns][group][part]: along, turned

typedef uint16_t Packed;

enum { ALIGNED = PANEL, PARTS = 2, TILE = 512, SLOT = PARTS * TILE, GROUP = 32 };  // numbers of a tile, and of a tile in parts; depth of a tile

INLINE int64_t groups_of(int64_t depth) { return (depth + GROUP - 1) / GROUP; }

INLINE int64_t left_size(int64_t rows, int64_t depth) { return up_to(rows, MAX_ROWS) / 16 * groups_of(depth) * SLOT; }
INLINE int64_t across_size(int64_t rows, int64_t dim) { return up_to(rows, PANEL) / 16 * groups_of(dim) * SLOT; }
INLINE int64_t along_size(int64_t rows, int64_t dim) { return groups_of(rows) * up_to(dim, PANEL) / 16 * SLOT; }

// Parts cannot hold inf or NaN, and products of very small numbers underflow. Packing reports such a number, and the call runs again
// without tiles.
static _Thread_local int unfit;

INLINE void look_at(IntVec *most, Vec x) {
    *most = (IntVec)_mm512_max_epu32((__m512i)*most, (__m512i)((IntVec)x & 0x7fffffff));
}
INLINE void judge(IntVec most) {
    uint32_t top = _mm512_reduce_max_epu32((__m512i)most);
    // a product of two that pass is at least 2^-80, and what is lost below 2^-126 is nothing compared with it
    if (top > bits_of(0x1p60f) || (top && top < bits_of(0x1p-40f))) unfit = 1;
}

INLINE IntVec upper(IntVec x) { return x & (Int)0xffff0000; }
INLINE IntVec rounded(Vec x) { return (IntVec)x + 0x8000; }  // its upper half
INLINE void put_pair(Packed *to, IntVec first, IntVec second) {
    _mm512_storeu_si512(to, _mm512_or_si512(_mm512_srli_epi32((__m512i)first, 16), (__m512i)upper(second)));
}

// Two vectors in parts, pair by pair. The first part is rounded, not cut off: the rest then has a sign, which is one more bit.
INLINE void split(Packed *to, Vec x, Vec y) {
    IntVec a = rounded(x), b = rounded(y);
    put_pair(to, a, b);
    put_pair(to + TILE, rounded(x - (Vec)upper(a)), rounded(y - (Vec)upper(b)));
}

// Row r of a block of the left: `groups` groups from x; and the same in one part, rounded
INLINE void split_row(Packed *block, int64_t r, const REAL *x, int64_t groups) {
    for (int64_t g = 0; g < groups; g++) split(block + g * SLOT + r * 32, load(x + g * GROUP), load(x + g * GROUP + 16));
}

INLINE void round_row(Packed *block, int64_t r, const REAL *x, int64_t groups) {
    for (int64_t g = 0; g < groups; g++)
        put_pair(block + g * SLOT + r * 32, rounded(load(x + g * GROUP)), rounded(load(x + g * GROUP + 16)));
}

INLINE void turn_slot(Packed *to, const Packed *from) {
    for (int part = 0; part < PARTS; part++) turn_square((char *)(to + part * TILE), 64, (const char *)(from + part * TILE), 64);
}

static const struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} SHAPE __attribute__((aligned(64))) = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

static void begin_tiles(void) { _tile_loadconfig(&SHAPE); }

// GCC does not know that tiles read memory: this makes it store what they will read
INLINE void stored(void) { __asm__ volatile("" ::: "memory"); }

// Tiles 0 to 3 += a · b, 32 × 32 sums (16 × 32 of them where there is one block of rows), the smallest products first. The
// product of two second parts counts only where all numbers are inputs. `a_next` is from a block of rows to the next, b_next
// from a block of columns to the next, the other steps from group to group.
INLINE void multiply_parts(const int blocks, const int a_parts, const int b_parts, const int inputs, int64_t groups,
                           const Packed *a, int64_t a_next, int64_t a_step, const Packed *b, int64_t b_next, int64_t b_step) {
#define LEFT(PART)                               \
    _tile_loadd(4, a + PART * TILE, 64);         \
    if (blocks > 1) _tile_loadd(5, a + a_next + PART * TILE, 64);
#define RIGHT(PART)                              \
    _tile_loadd(6, b + PART * TILE, 64);         \
    _tile_loadd(7, b + b_next + PART * TILE, 64);
#define ADD                                      \
    _tile_dpbf16ps(0, 4, 6);                     \
    _tile_dpbf16ps(1, 4, 7);                     \
    if (blocks > 1) {                            \
        _tile_dpbf16ps(2, 5, 6);                 \
        _tile_dpbf16ps(3, 5, 7);                 \
    }
    for (int64_t g = 0; g < groups; g++, a += a_step, b += b_step) {
        if (a_parts > 1) {
            LEFT(1)
            if (inputs) {
                RIGHT(1) ADD
            }
            RIGHT(0) ADD
        }
        LEFT(0)
        if (b_parts > 1) {
            RIGHT(1) ADD
        }
        if (a_parts < 2 || b_parts > 1) {
            RIGHT(0)
        }
        ADD
    }
#undef LEFT
#undef RIGHT
#undef ADD
}

INLINE void clear_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}
INLINE void keep_sums(int blocks, REAL *to, int64_t step) {
    _tile_stored(0, to, step * 4);
    _tile_stored(1, to + 16, step * 4);
    if (blocks > 1) {
        _tile_stored(2, to + 16 * step, step * 4);
        _tile_stored(3, to + 16 * step + 16, step * 4);
    }
}

typedef struct {  // one side of a product
    const Packed *at;
    int parts;
    int64_t next, step;  // to the next block of 16 rows or columns, to the next group
} Side;

// to = a · b, 32 × 32 sums or, of one block of rows, 16 × 32; `inputs` where both sides are
static void multiply(Side a, Side b, int inputs, int blocks, int64_t groups, REAL *to, int64_t to_step) {
    stored();
    clear_sums();
#define CASE(BLOCKS, A, B, INPUTS)                                                                              \
    case BLOCKS * 8 + A * 4 + B * 2 + INPUTS:                                                                   \
        multiply_parts(BLOCKS, A, B, INPUTS, groups, a.at, a.next, a.step, b.at, b.next, b.step);               \
        break;
#define CASES(BLOCKS) \
    CASE(BLOCKS, 1, 1, 0) CASE(BLOCKS, 1, 2, 0) CASE(BLOCKS, 2, 1, 0) CASE(BLOCKS, 2, 2, 0) CASE(BLOCKS, 2, 2, 1)
    switch (blocks * 8 + a.parts * 4 + b.parts * 2 + (inputs && a.parts == 2)) { CASES(1) CASES(2) }
#undef CASES
#undef CASE
    keep_sums(blocks, to, to_step);
    stored();
}

INLINE const Packed *across_from(const Packed *keys, int64_t key, int64_t dim) { return keys + key / 16 * groups_of(dim) * SLOT; }

INLINE int parts_of(const Call *call) { return call->dtype == BF16 ? 1 : 2; }

// Whether vectors are quicker, as measured: tiles of so few keys or rows (twice as many, where there are two parts) hold too little
INLINE int too_short(const Call *call, int64_t rows) { return call->rows < rows * parts_of(call) || call->keys < PANEL; }

// z = rows · keys, each row times its factor; `tops` as in product.h
static void scores(const Call *call, int rows, const Packed *query, const REAL *factors, int64_t dim, const Packed *keys,
                   int64_t n, REAL *z, Vec *tops) {
    int parts = parts_of(call);
    int64_t groups = groups_of(dim), next = groups * SLOT;
    for (int64_t j = 0; j < n; j += PANEL)
        multiply((Side){query, parts, next, SLOT}, (Side){keys + j / 16 * next, parts, next, SLOT}, 1, rows > 16 ? 2 : 1, groups,
                 z + j, TILE_STEP);
    for (int r = 0; factors && r < rows; r++) {
        Vec top = splat(-INFINITY), two = top;
        for (REAL *x = z + r * TILE_STEP; x < z + r * TILE_STEP + n; x += PANEL) {
            Vec y = load(x) * factors[r], more = load(x + LANES) * factors[r];
            store(x, y);
            store(x + LANES, more);
            top = larger(y, top), two = larger(more, two);
        }
        if (tops) tops[r] = larger(top, two);
    }
}

INLINE void add_panel(int rows, REAL *out, int64_t out_step, const REAL *sums) {
    for (int r = 0; r < rows; r++, out += out_step, sums += PANEL) {
        store(out, load(out) + load(sums));
        store(out + LANES, load(out + LANES) + load(sums + LANES));
    }
}

typedef struct {  // rows that are added up
    const Packed *at;
    int64_t step;  // from group to group
} Panels;

INLINE Panels packed_panels(const Packed *at, int64_t dim) { return (Panels){at, up_to(dim, PANEL) / 16 * SLOT}; }
INLINE Panels panels_from(Panels all, int64_t row) { return (Panels){all.at + row / GROUP * all.step, all.step}; }

// out += weights · rows, the weights in `parts`; `scratch` is for MAX_ROWS rows of a tile
static void weigh(const Call *call, int parts, int rows, const REAL *weights, int64_t depth, Panels right, int64_t panels,
                  REAL *out, int64_t out_step, Packed *scratch) {
    int64_t groups = groups_of(depth), next = groups * SLOT;
    REAL sums[MAX_ROWS * PANEL] __attribute__((aligned(64)));
    for (int r = 0; r < rows; r++) {
        Packed *block = scratch + r / 16 * next;
        if (parts > 1)
            split_row(block, r % 16, weights + r * TILE_STEP, groups);
        else
            round_row(block, r % 16, weights + r * TILE_STEP, groups);
    }
    for (int64_t c = 0; c < panels; c++) {
        multiply((Side){scratch, parts, next, SLOT}, (Side){right.at + c * 2 * SLOT, parts_of(call), SLOT, right.step}, 0,
                 rows > 16 ? 2 : 1, groups, sums, PANEL);
        add_panel(rows, out + c * PANEL, out_step, sums);
    }
}

INLINE int is_decode(const Call *call) { return (void)call, 0; }
INLINE int tile_rows(int64_t rows) { return (int)rows; }

// A block of rows of a tile, each times its factor, as rows that are added up; those it lacks are zeros.
static void stack_rows(Packed *to, const REAL *rows, int64_t n, int64_t width, const REAL *factors, REAL *zeros) {
    memset(zeros, 0, 16 * sizeof(REAL));
    for (int64_t g = 0; g < n; g += GROUP, to += BACK_KEYS / 16 * SLOT)
        for (int64_t r = 0; r < 16; r++) {
            const REAL *x = rows + (g + r) * TILE_STEP, *y = x + 16 * TILE_STEP;
            int two = g + r + 16 < n, one = g + r < n;
            REAL first = one ? factors[g + r] : 0, second = two ? factors[g + r + 16] : 0;
            for (int64_t e = 0; e < width; e += 16)
                split(to + e / 16 * SLOT + r * 32, load(one ? x + e : zeros) * first, load(two ? y + e : zeros) * second);
        }
}

// out[dim][keys] += rowsᵀ · weights, for GATHERED of the `keys`, from `key` on, and rows [from, to) of a block
enum { GATHERED = 32 };
static void gather(const Call *call, const Packed *weights, int64_t keys, int64_t key, int64_t from, int64_t to,
                   const Packed *rows, int64_t dim, REAL *out) {
    enum { GROUPS = BLOCK_ROWS / GROUP, ROW = BACK_KEYS / 16 * SLOT };
    REAL sums[32 * PANEL] __attribute__((aligned(64)));
    int64_t first = from / GROUP, groups = groups_of(to) - first;
    for (int64_t e = 0; e < up_to(dim, PANEL); e += 32) {
        multiply((Side){rows + (e / 16 * GROUPS + first) * SLOT, parts_of(call), GROUPS * SLOT, SLOT},
                 (Side){weights + first * ROW + key / 16 * SLOT, PARTS, SLOT, ROW}, 0, 2, groups, sums, PANEL);
        add_panel(32, out + e * keys + key, keys, sums);
    }
}

// sums[dim][keys] become [keys][dim]
static void turn_sums(REAL *sums, int64_t dim, int64_t keys, REAL *scratch) {
    int64_t padded = up_to(dim, PANEL);
    memcpy(scratch, sums, padded * keys * sizeof(REAL));
    for (int64_t e = 0; e < padded; e += 16)
        for (int64_t j = 0; j < keys; j += 16)
            turn_square((char *)(sums + j * padded + e), padded * 4, (const char *)(scratch + e * keys + j), keys * 4);
}
