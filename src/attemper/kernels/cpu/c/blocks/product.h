// product.h: the matrix products, from one register tile: `rows` × PANEL sums of a[row] · b[PANEL], added up over `depth`. Where
// no more than LANES keys are left, half of a panel is not computed.
//
//   scores   Z = Q Kᵀ       a: queries, row by row      b: keys, packed so that PANEL keys are side by side
//   weigh    O += P V       a: weights, row by row      b: values, row by row
//   gather   dV += Pᵀ dO    a: weights, key by key      b: rows

enum {
    SMALL_DIM = 256,  // head dims up to this have rows SMALL_STEP apart, known to the compiler
    SMALL_STEP = SMALL_DIM + 16,
};

INLINE int64_t row_step(int64_t dim) { return dim <= SMALL_DIM ? SMALL_STEP : up_to(dim, PANEL) + 16; }

typedef REAL Packed;  // numbers as the products read them

enum { ALIGNED = LANES };  // scores come in multiples of this

INLINE int64_t left_size(int64_t rows, int64_t dim) { return up_to(rows, MAX_ROWS) * row_step(dim); }
INLINE int64_t across_size(int64_t rows, int64_t dim) { return up_to(rows, PANEL) * dim; }
INLINE int64_t along_size(int64_t rows, int64_t dim) { return rows * up_to(dim, PANEL); }
INLINE const REAL *across_from(const REAL *keys, int64_t key, int64_t dim) { return keys + key * dim; }

// A matrix cut into column panels: panel c begins at `at + c * PANEL`, its rows are `step` apart.
typedef struct {
    const REAL *at;
    int64_t step;
} Panels;

INLINE Panels packed_panels(const REAL *at, int64_t dim) { return (Panels){at, up_to(dim, PANEL)}; }
INLINE Panels panels_from(Panels all, int64_t row) { return (Panels){all.at + row * all.step, all.step}; }

INLINE void product(const int rows, const int wide, int64_t depth, const REAL *a, const int64_t a_row, const int64_t a_step,
                    const REAL *b, const int64_t b_step, Vec sums[MAX_ROWS][WIDE]) {
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < wide; v++) sums[r][v] = splat(0);
    for (int64_t k = 0; k < depth; k++) {
        Vec x[WIDE];
        UNROLL for (int v = 0; v < wide; v++) x[v] = load(b + v * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            Vec y = splat(a[r * a_row]);
            UNROLL for (int v = 0; v < wide; v++) sums[r][v] += y * x[v];
        }
        a += a_step;
        b += b_step;
    }
}

INLINE void score_panel(const int rows, const int wide, const REAL *query, const int64_t query_step, int64_t dim,
                        const REAL *keys, REAL *z, Vec *tops) {
    Vec sums[MAX_ROWS][WIDE];
    product(rows, wide, dim, query, query_step, 1, keys, PANEL, sums);
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < wide; v++) store(z + r * TILE_STEP + v * LANES, sums[r][v]);
    if (tops) UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < wide; v++) tops[r] = larger(sums[r][v], tops[r]);
}

INLINE void scores_of(const int rows, const REAL *query, const int64_t query_step, int64_t dim, const REAL *keys, int64_t n,
                      REAL *z, Vec *tops) {
    int64_t j = 0;
    for (; j + PANEL <= n; j += PANEL) score_panel(rows, WIDE, query, query_step, dim, keys + j * dim, z + j, tops);
    if (j < n) score_panel(rows, 1, query, query_step, dim, keys + j * dim, z + j, tops);
}

INLINE void add_sums(const int rows, Vec sums[MAX_ROWS][WIDE], REAL *out, int64_t out_step) {
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < WIDE; v++) {
        REAL *at = out + r * out_step + v * LANES;
        store(at, load(at) + sums[r][v]);
    }
}

INLINE void weigh_of(const int rows, const REAL *weights, int64_t keys, Panels value, int64_t panels, REAL *out,
                     int64_t out_step) {
    for (int64_t c = 0; c < panels; c++) {
        Vec sums[MAX_ROWS][WIDE];
        product(rows, WIDE, keys, weights, TILE_STEP, 1, value.at + c * PANEL, value.step, sums);
        add_sums(rows, sums, out + c * PANEL, out_step);
    }
}

// The sizes of register tiles that exist; fewer rows than a size are padded.
#if MAX_ROWS > 8
#define EACH_SIZE(DO) DO(1) DO(2) DO(4) DO(8) DO(MAX_ROWS)
#else
#define EACH_SIZE(DO) DO(1) DO(2) DO(4) DO(MAX_ROWS)
#endif
INLINE int tile_rows(int64_t rows) {
#define FITS(N) \
    if (rows <= N) return N;
    EACH_SIZE(FITS)
#undef FITS
    return MAX_ROWS;
}

#define NAMED_(NAME, N) NAME##_##N
#define NAMED(NAME, N) NAMED_(NAME, N)
#define INSTANCE(N)                                                                                                   \
    static void NAMED(scores, N)(const REAL *query, int64_t step, int64_t dim, const REAL *keys, int64_t n, REAL *z,  \
                                 Vec *tops) {                                                                         \
        if (step == SMALL_STEP)                                                                                       \
            scores_of(N, query, SMALL_STEP, dim, keys, n, z, tops);                                                   \
        else                                                                                                          \
            scores_of(N, query, step, dim, keys, n, z, tops);                                                         \
    }                                                                                                                 \
    static void NAMED(weigh, N)(const REAL *weights, int64_t keys, Panels value, int64_t panels, REAL *out,           \
                                int64_t out_step) {                                                                   \
        weigh_of(N, weights, keys, value, panels, out, out_step);                                                     \
    }
EACH_SIZE(INSTANCE)
#undef INSTANCE

// The scores of n keys, a multiple of ALIGNED. `tops`, if not NULL, holds the largest score of each row so far, lane by lane.
static void scores(const Call *call, int rows, const REAL *query, const REAL *factors, int64_t dim, const REAL *keys,
                   int64_t n, REAL *z, Vec *tops) {
    (void)call, (void)factors;  // the factors are in the queries
    int64_t step = row_step(dim);
    switch (tile_rows(rows)) {
#define CASE(N) \
    case N: NAMED(scores, N)(query, step, dim, keys, n, z, tops); break;
        EACH_SIZE(CASE)
#undef CASE
    }
}

static void weigh(const Call *call, int parts, int rows, const REAL *weights, int64_t keys, Panels value, int64_t panels, REAL *out,
                  int64_t out_step, Packed *scratch) {
    (void)call, (void)parts, (void)scratch;  // of tiles
    switch (tile_rows(rows)) {
#define CASE(N) \
    case N: NAMED(weigh, N)(weights, keys, value, panels, out, out_step); break;
        EACH_SIZE(CASE)
#undef CASE
    }
}

// out[keys][dim] += weightsᵀ · rows, for MAX_ROWS of the `keys`, from `key` on, and rows [from, to) of a block
enum { GATHERED = MAX_ROWS };
static void gather(const Call *call, const REAL *weights, int64_t keys, int64_t key, int64_t from, int64_t to, const REAL *rows,
                   int64_t dim, REAL *out) {
    (void)call, (void)keys;
    int64_t step = row_step(dim), out_step = up_to(dim, PANEL);
    for (int64_t c = 0; c < out_step; c += PANEL) {
        Vec sums[MAX_ROWS][WIDE];
        product(MAX_ROWS, WIDE, to - from, weights + from * TILE_STEP + key, 1, TILE_STEP, rows + from * step + c, step, sums);
        add_sums(MAX_ROWS, sums, out + key * out_step + c, out_step);
    }
}
