// finish.h: the signs of rows that have seen all their keys, many rows at a time.

INLINE void write_some(void *to, int64_t at, Vec values, int64_t n) {
    REAL all[LANES];
    store(all, values);
    if (to) memcpy((REAL *)to + at, all, n * sizeof(REAL));
}

// Write the signs of n rows, the first of them row `at` of all; `share` gets what their output is to be multiplied by.
static void finish_rows(const Call *call, Needs needs, const Row *rows, const Vec *sums, int64_t at, int64_t n, REAL *share) {
    const Rows *to = &call->measured;
    for (; n > 0; n -= LANES, rows += LANES, sums += LANES * HELD, at += LANES, share += LANES) {
        int64_t some = n < LANES ? n : LANES;
        REAL all[SUMS][LANES] = {{0}}, reference[LANES] = {0}, peak[LANES] = {0}, mean[LANES] = {0}, variance[LANES] = {0};
        for (int64_t r = 0; r < some; r++) {
            for (int i = 0; i < (needs.weights ? SUMS : 1) && rows[r].tiles; i++)
                all[i][r] = sum(whole(sums + r * HELD, i, rows[r].tiles));
            reference[r] = rows[r].reference == -INFINITY ? 0 : rows[r].reference;
            peak[r] = rows[r].peak;
            if (!needs.moments) continue;
            // a visible key with a logit of -inf is counted, and adds nothing to the sums
            double count = rows[r].count ? (double)rows[r].count : 1, met = (double)rows[r].met;
            double level = rows[r].mean * (met / count), off = rows[r].mean - level;
            double spread = (rows[r].spread + (met < count ? met * off * off : 0)) / count;
            mean[r] = (REAL)level;
            variance[r] = spread < 0 ? 0 : (REAL)spread;
        }
        Vec l = load(all[SUM]), m = load(reference), top = load(peak);
        IntVec empty = (top == (REAL)-INFINITY) & (l == 0);
        l = choose(empty, splat(1), l);
        Vec log_l = log_of(l), part = 1 / l;
        IntVec infinite = top == (REAL)INFINITY;  // inf / inf makes the weights NaN, but peak and lse are +inf
        write_some(to->lse, at, choose(empty | infinite, top, m + log_l), some);
        write_some(to->lse_low, at, keep_where(m - m == 0, lost(m, log_l)), some);
        write_some(to->peak, at, choose((l != l) & ~infinite, l, top), some);
        write_some(to->entropy, at, keep_where(~empty, log_l - load(all[TILTED]) * part), some);
        write_some(to->sum_p2, at, keep_where(~empty, load(all[SQUARES]) * part * part), some);
        if (needs.moments) {
            write_some(to->mean, at, load(mean), some);
            write_some(to->variance, at, load(variance), some);
        }
        part = keep_where(~empty, part);
        for (int64_t r = 0; r < some; r++) {
            share[r] = part[r];
            if (to->argmax) to->argmax[at + r] = empty[r] ? -1 : call->origin + rows[r].argmax;
            if (to->visible) to->visible[at + r] = (int32_t)rows[r].count;
        }
    }
}
