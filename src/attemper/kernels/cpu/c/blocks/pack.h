// pack.h: keys and rows laid out the way the products read them, padded with zeros.

INLINE int64_t pack_scratch(int64_t dim) { return 5 * dim; }  // numbers

typedef REAL Four __attribute__((vector_size(4 * sizeof(REAL))));
typedef REAL LooseFour __attribute__((vector_size(4 * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));

// Four rows become columns of a panel: to[e * PANEL + 0..3] = row[0..3][e]
INLINE void turn_four(REAL *to, const REAL *const row[4], int64_t dim) {
    int64_t e = 0;
    for (; e + 4 <= dim; e += 4) {
        Four a = *(const LooseFour *)(row[0] + e), b = *(const LooseFour *)(row[1] + e);
        Four c = *(const LooseFour *)(row[2] + e), d = *(const LooseFour *)(row[3] + e);
        Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
        Four cd = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
        *(LooseFour *)(to + (e + 0) * PANEL) = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
        *(LooseFour *)(to + (e + 1) * PANEL) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
        *(LooseFour *)(to + (e + 2) * PANEL) = __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5);
        *(LooseFour *)(to + (e + 3) * PANEL) = __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7);
    }
    for (; e < dim; e++)
        for (int r = 0; r < 4; r++) to[e * PANEL + r] = row[r][e];
}

#if VECTOR_BYTES == 64 && REAL_IS_FLOAT
// 16 rows, `step` apart, become columns of a panel, 16 dims at a time
static void turn_sixteen(REAL *to, const REAL *from, int64_t step, int64_t dim) {
    for (int64_t e = 0; e < dim; e += 16) turn_square((char *)(to + e * PANEL), PANEL * 4, (const char *)(from + e), step * 4);
}
#endif

// Rows [first, last) that are side by side already
static void copy_across(REAL *to, const Strided *t, int dtype, int64_t b, int64_t h, int64_t first, int64_t last, int64_t dim) {
    for (int64_t j = first; j < last; j += PANEL) {
        int64_t n = last - j < PANEL ? last - j : PANEL;
        const char *at = place(t, dtype, b, h, j);
        for (int64_t e = 0; e < dim; e++, to += PANEL) {
            fetch(to, at + e * t->step[3] * SIZE[dtype], dtype, n, 1);
            for (int64_t r = n; r < PANEL; r++) to[r] = 0;
        }
    }
}

// Rows [first, last) of one head, PANEL side by side, [rows / PANEL][dim][PANEL]. `scratch` holds 5 rows.
static void pack_across(REAL *to, const Strided *t, int dtype, int64_t b, int64_t h, int64_t first, int64_t last,
                        int64_t dim, REAL *scratch) {
    if (lies_turned(t)) {
        copy_across(to, t, dtype, b, h, first, last, dim);
        return;
    }
    memset(scratch + 4 * dim, 0, dim * sizeof(REAL));
    for (int64_t j = first; j < last; j += PANEL, to += dim * PANEL)
        for (int64_t r = 0; r < PANEL && j + r < first + up_to(last - first, ALIGNED); r += 4) {
#if VECTOR_BYTES == 64 && REAL_IS_FLOAT
            if (r % 16 == 0 && j + r + 16 <= last && is_real(dtype) && t->step[3] == 1 && dim % 16 == 0) {
                turn_sixteen(to + r, (const REAL *)place(t, dtype, b, h, j + r), t->step[2], dim);
                r += 12;
                continue;
            }
#endif
            const REAL *row[4];
            for (int s = 0; s < 4; s++)
                row[s] = j + r + s < last ? row_of(t, dtype, b, h, j + r + s, dim, scratch + s * dim) : scratch + 4 * dim;
            turn_four(to + r, row, dim);
        }
}

// Rows [first, last) one under another, zeros up to a whole panel.
static void pack_along(REAL *to, const Strided *t, int dtype, int64_t b, int64_t h, int64_t first, int64_t last, int64_t dim,
                       REAL *scratch) {
    (void)scratch;
    int64_t padded = up_to(dim, PANEL);
    fetch_rows(to, padded, t, dtype, b, h, first, last - first, dim);
    for (; first < last; first++, to += padded)
        for (int64_t e = dim; e < padded; e++) to[e] = 0;
}

// Rows [first, last), each times its factor, and zeros for the rows that a product works on besides.
static void pack_left(REAL *to, const Strided *t, int dtype, int64_t b, int64_t h, int64_t first, int64_t last, int64_t dim,
                      const REAL *factors, REAL *scratch) {
    (void)scratch;
    int64_t padded = up_to(dim, PANEL), step = row_step(dim), rows = last - first;
    int in_place = is_real(dtype) && t->step[3] == 1;
    if (!in_place) fetch_rows(to, step, t, dtype, b, h, first, rows, dim);
    for (int64_t r = 0; r < rows; r++) {
        REAL *row = to + r * step;
        const REAL *from = in_place ? (const REAL *)place(t, dtype, b, h, first + r) : row;
        for (int64_t e = 0; e < dim; e++) row[e] = from[e] * factors[r];
        for (int64_t e = dim; e < padded; e++) row[e] = 0;
    }
    int64_t whole = rows / MAX_ROWS * MAX_ROWS, all = rows > whole ? whole + tile_rows(rows - whole) : rows;
    for (int64_t r = rows; r < all; r++) memset(to + r * step, 0, padded * sizeof(REAL));
}

INLINE void pack_turned(REAL *to, const Strided *t, int dtype, int64_t b, int64_t h, int64_t first, int64_t last, int64_t dim,
                        REAL *scratch) {  // `gather` reads rows as they are
    (void)to, (void)t, (void)dtype, (void)b, (void)h, (void)first, (void)last, (void)dim, (void)scratch;
}

// Whether the rows of a matrix can be read as panels in place.
INLINE int lies_in_panels(const Strided *t, int dtype, int64_t dim) {
    return is_real(dtype) && t->step[3] == 1 && dim % PANEL == 0 && (uintptr_t)t->at % VECTOR_BYTES == 0 &&
           t->step[0] % LANES == 0 && t->step[1] % LANES == 0 && t->step[2] % LANES == 0;
}
