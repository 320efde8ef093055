// pack_tiles.h: what pack.h does, for tiles. Every number of an input passes here, and is looked at: see `unfit`.

INLINE int64_t pack_scratch(int64_t dim) { return (GROUP + 1) * up_to(dim, PANEL) + SLOT; }  // numbers

INLINE void look_at_row(IntVec *most, const REAL *row, int64_t padded) {
    for (int64_t e = 0; e < padded; e += LANES) look_at(most, load(row + e));
}

// A row with zeros up to a whole panel: in place where it lies so, else in `scratch`
INLINE const REAL *padded_row(const Strided *t, int dtype, int64_t b, int64_t h, int64_t i, int64_t dim, REAL *scratch) {
    if (dim % PANEL == 0) return row_of(t, dtype, b, h, i, dim, scratch);
    fetch(scratch, place(t, dtype, b, h, i), dtype, dim, t->step[3]);
    for (int64_t e = dim; e < up_to(dim, PANEL); e++) scratch[e] = 0;
    return scratch;
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
    const REAL *row[16];
    memset(scratch + 16 * padded, 0, padded * sizeof(REAL));
    for (int64_t i = first; i < first + up_to(last - first, PANEL); i += 16, to += groups * SLOT) {
        for (int r = 0; r < 16; r++) {
            row[r] = i + r < last ? padded_row(t, dtype, b, h, i + r, dim, scratch + r * padded) : scratch + 16 * padded;
            look_at_row(&most, row[r], padded);
        }
        for (int64_t g = 0; g < groups; g++) {
            for (int r = 0; r < 16; r++) split_row(turning, r, row[r] + g * GROUP, 1);
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
    const REAL *row[GROUP];
    memset(scratch + GROUP * padded, 0, padded * sizeof(REAL));
    for (int64_t i = first; i < last; i += GROUP, to += padded / 16 * SLOT) {
        for (int r = 0; r < GROUP; r++) {
            row[r] = i + r < last ? padded_row(t, dtype, b, h, i + r, dim, scratch + r * padded) : scratch + GROUP * padded;
            look_at_row(&most, row[r], padded);
        }
        for (int64_t e = 0; e < padded; e += 16)
            for (int r = 0; r < 16; r++)
                split(to + e / 16 * SLOT + r * 32, load(row[r] + e), load(row[r + 16] + e));
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
        for (int64_t r = 0; r < GROUP; r++) {
            REAL *row = scratch + r * padded;
            memset(row, 0, padded * sizeof(REAL));
            if (g * GROUP + r >= rows) continue;
            fetch(row, place(t, dtype, b, h, first + g * GROUP + r), dtype, dim, t->step[3]);
        }
        for (int64_t e = 0; e < padded; e += 16) {
            for (int64_t r = 0; r < 16; r++)
                split(turning + r * 32, load(scratch + r * padded + e), load(scratch + (r + 16) * padded + e));
            turn_slot(to + (e / 16 * (BLOCK_ROWS / GROUP) + g) * SLOT, turning);
        }
    }
}

INLINE int lies_in_panels(const Strided *t, int dtype, int64_t dim) { return (void)t, (void)dtype, (void)dim, 0; }
