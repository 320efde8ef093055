// few.h: the scores of up to four keys. A panel with one key would compute 32 numbers and use one. So keys and queries swap their roles
// of decode.h: the keys are the few rows, and the queries are read in place.

#if TILES  // too short for them
enum { FEW_KEYS = 0 };
INLINE int has_few_keys(const Call *call) { return (void)call, 0; }
#define pack_few(...)
#define few_scores(...)
#define turn_few(...)
#else
enum { FEW_KEYS = ABREAST };

INLINE int has_few_keys(const Call *call) { return call->keys && call->keys <= FEW_KEYS; }

// The keys of a head, row by row, and zeros where there are fewer
static void pack_few(REAL *to, const Call *call, int64_t b, int64_t g) {
    memset(to, 0, FEW_KEYS * call->dim * sizeof(REAL));
    fetch_rows(to, call->dim, &call->key, (int)call->dtype, b, g, 0, call->keys, call->dim);
}

// z[keys][rows] = keys · rows [first, last) of the queries; their products, times `factors`, are logits
static void few_scores(const Call *call, int64_t b, int64_t h, int64_t first, int64_t last, const REAL *keys, REAL *factors,
                       REAL *z, REAL *scratch) {
    for (int64_t i = first; i < last; i++) factors[i - first] = row_factor(call, b, h, i);
    Lying rows = {place(&call->query, (int)call->dtype, b, h, first), (int)call->dtype, call->query.step[2], 0};
    if (call->query.step[3] != 1) {
        fetch_rows(scratch, call->dim, &call->query, (int)call->dtype, b, h, first, last - first, call->dim);
        rows = (Lying){(const char *)scratch, REAL_IS_FLOAT ? F32 : F64, call->dim, 0};
    }
    dots_of(call->keys, keys, rows, last - first, call->dim, z);
}

// A strip of them, row by row: z[rows][keys]
INLINE void turn_few(const Call *call, const REAL *from, const REAL *factors, int64_t rows, REAL *z) {
    for (int64_t r = 0; r < rows; r++, z += TILE_STEP) {
        REAL row[PANEL] = {0};
        for (int64_t j = 0; j < call->keys; j++) row[j] = from[j * TILE_STEP + r] * factors[r];
        for (int64_t j = 0; j < FEW_KEYS; j += LANES) store(z + j, load(row + j));
    }
}
#endif
