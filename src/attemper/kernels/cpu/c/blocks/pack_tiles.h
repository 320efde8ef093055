// pack_tiles.h: what pack.h does, for tiles. Every number of an input passes here, and is looked at: see `unfit`.

INLINE int64_t pack_scratch(int64_t dim) { return GROUP * up_to(dim, PANEL) + SLOT; }  // numbers

INLINE void look_at_row(IntVec *most, const REAL *row, int64_t n) {
    for (int64_t e = 0; e < n; e += LANES) look_at(most, load(row + e));
}

// Rows [first, last), at most n of them, as REAL; zeros up to n rows and to a whole panel
INLINE void padded_rows(REAL *to, int64_t n, const Strided *t, int dtype, int64_t b, int64_t h, int64_t first, int64_t last,
                        int64_t dim) {
    int64_t padded = up_to(dim, PANEL), there = last - first < n ? last - first : n;
    if (there < n || dim < padded) memset(to, 0, n * padded * sizeof(REAL));
    if (there > 0) fetch_rows(to, padded, t, dtype, b, h, first, there, dim);
}

// Rows [first, last), and zeros to a whole strip. Their factors, which would take more parts, wait for the scores.
static void pack_left(Packed *to, const Strided *t, int dtype, int64_t b, int64_t h, int64_t first, int64_t last, int64_t dim,
                      const REAL *factors, REAL *scratch) {
    (void)factors;
    int64_t rows = last - first, all = up_to(rows, MAX_ROWS), padded = up_to(dim, PANEL), groups = groups_of(dim);
    IntVec most = {0};
    for (int64_t r = 0; r < all; r++) {
        memset(scratch, 0, padded * sizeof(REAL));
        if (r < rows) fetch(scratch, place(t, dtype, b, h, first + r), dtype, dim, t->step[3]);
        look_at_row(&most, scratch, padded);
        split_row(to + r / 16 * groups * SLOT, r % 16, scratch, groups);
    }
    judge(most);
}

// Rows [first, last) as columns.
static void pack_across(Packed *to, const Strided *t, int dtype, int64_t b, int64_t h, int64_t first, int64_t last, int64_t dim,
                        REAL *scratch) {
    int64_t groups = groups_of(dim), padded = up_to(dim, PANEL);
    Packed *turning = (Packed *)scratch;
    IntVec most = {0};
    scratch += SLOT;
    for (int64_t i = first; i < first + up_to(last - first, PANEL); i += 16, to += groups * SLOT) {
        padded_rows(scratch, 16, t, dtype, b, h, i, last, dim);
        look_at_row(&most, scratch, 16 * padded);
        for (int64_t g = 0; g < groups; g++) {
            for (int r = 0; r < 16; r++) split_row(turning, r, scratch + r * padded + g * GROUP, 1);
            turn_slot(to + g * SLOT, turning);
        }
    }
    judge(most);
}

// Rows [first, last) that are added up, and zeros to a whole group.
static void pack_along(Packed *to, const Strided *t, int dtype, int64_t b, int64_t h, int64_t first, int64_t last, int64_t dim,
                       REAL *scratch) {
    int64_t padded = up_to(dim, PANEL);
    IntVec most = {0};
    for (int64_t i = first; i < last; i += GROUP, to += padded / 16 * SLOT) {
        padded_rows(scratch, GROUP, t, dtype, b, h, i, last, dim);
        look_at_row(&most, scratch, GROUP * padded);
        for (int64_t e = 0; e < padded; e += 16)
            for (int r = 0; r < 16; r++)
                split(to + e / 16 * SLOT + r * 32, load(scratch + r * padded + e), load(scratch + (r + 16) * padded + e));
    }
    judge(most);
}

// Rows [first, last) of a block as columns whose rows are added up. What they hold was looked at before.
static void pack_turned(Packed *to, const Strided *t, int dtype, int64_t b, int64_t h, int64_t first, int64_t last, int64_t dim,
                        REAL *scratch) {
    int64_t padded = up_to(dim, PANEL), rows = last - first;
    Packed *turning = (Packed *)scratch;
    scratch += SLOT;
    for (int64_t g = 0; g * GROUP < rows; g++) {
        padded_rows(scratch, GROUP, t, dtype, b, h, first + g * GROUP, last, dim);
        for (int64_t e = 0; e < padded; e += 16) {
            for (int64_t r = 0; r < 16; r++)
                split(turning + r * 32, load(scratch + r * padded + e), load(scratch + (r + 16) * padded + e));
            turn_slot(to + (e / 16 * (BLOCK_ROWS / GROUP) + g) * SLOT, turning);
        }
    }
}

INLINE int lies_in_panels(const Strided *t, int dtype, int64_t dim) { return (void)t, (void)dtype, (void)dim, 0; }
