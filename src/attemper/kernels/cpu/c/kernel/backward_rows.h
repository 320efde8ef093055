// backward_rows.h: dz, the gradient of a row's logits. With p = exp(z - lse), g the arriving gradients, δ = g_out · out and
// r = exp(-lse_low), where lse_low is the rounding error of lse (r is a factor of every coefficient of p):
//
//   dz = p [dP - δ + g_lse - g_H (ln p + H) + 2 g_sum_p2 (p - sum_p2)] + [g_mean + 2 g_var (z - mean)] / visible + g_peak at the arg-max
//
// then the softcap's slope.

typedef struct {  // a row's coefficients
    REAL lse, constant, entropy, sum_p2, level, slope, peak, rest;
} Slopes;

typedef struct {
    int rows;  // whether dQ is wanted, for the queries or the gain
    int64_t tiles, query_strip, value_strip, dq_step, dv_step, dq_head;  // packed numbers of MAX_ROWS rows; one head's dQ
    int alone;             // whether one tile holds all keys: δ is then computed as Σ p dP, which is more exact
    int weights, moments;  // whether gradients of entropy or Σp², of mean or variance arrive
    Slopes *slopes;  // (B, H, Lq)
    REAL *dq;        // (parts, B, H, dq_head), where there are several parts; else NULL
} Course;

typedef struct {
    Packed *keys, *values, *key_rows, *query, *g_out;
    Packed *weights, *query_rows, *g_out_rows, *p_rows, *dz_rows;  // for tiles
    REAL *dk, *dv, *dq, *p, *dz, *bias, *keep, *cap, *factors, *rests, *scratch, *turning;
} Differ;

static Differ take_differ(Space *space, const Call *call, const Course *c) {
    int64_t rows = BLOCK_ROWS + MAX_ROWS, keys = BACK_KEYS + MAX_ROWS, repeat = call->heads / call->groups;
    int64_t most = call->dim > call->value_dim ? call->dim : call->value_dim;
    return (Differ){
        .keys = TAKE(space, Packed, across_size(BACK_KEYS, call->dim)),
        .values = TAKE(space, Packed, across_size(BACK_KEYS, call->value_dim)),
        .key_rows = TAKE(space, Packed, along_size(BACK_KEYS, call->dim)),
        .query = TAKE(space, Packed, left_size(BLOCK_ROWS, call->dim)),
        .g_out = TAKE(space, Packed, left_size(BLOCK_ROWS, call->value_dim)),
#if TILES
        .weights = TAKE(space, Packed, left_size(MAX_ROWS, BACK_KEYS)),
        .query_rows = TAKE(space, Packed, along_size(BLOCK_ROWS, call->dim)),
        .g_out_rows = TAKE(space, Packed, along_size(BLOCK_ROWS, call->value_dim)),
        .p_rows = TAKE(space, Packed, along_size(BLOCK_ROWS, BACK_KEYS)),
        .dz_rows = TAKE(space, Packed, along_size(BLOCK_ROWS, BACK_KEYS)),
        .turning = TAKE(space, REAL, BACK_KEYS * up_to(most, PANEL)),
#endif
        .dk = TAKE(space, REAL, keys * c->dq_step),
        .dv = TAKE(space, REAL, keys * c->dv_step),
        .dq = c->dq ? NULL : TAKE(space, REAL, repeat * c->dq_head),
        .p = TAKE(space, REAL, rows * TILE_STEP),
        .dz = TAKE(space, REAL, rows * TILE_STEP),
        .bias = TAKE(space, REAL, TILE_STEP),
        .keep = TAKE(space, REAL, TILE_STEP),
        .cap = TAKE(space, REAL, TILE_STEP),
        .factors = TAKE(space, REAL, BLOCK_ROWS),
        .rests = TAKE(space, REAL, BLOCK_ROWS),
        .scratch = TAKE(space, REAL, pack_scratch(most)),
    };
}

static void find_slopes(const Job *job, void *memory, int64_t item) {
    const Call *call = job->call;
    const Course *course = job->shared;
    const Rows *saved = &call->measured, *g = &call->upstream;
    int64_t b = item / call->heads, h = item % call->heads, n = call->value_dim;
    REAL *out = memory, *arriving = out + n;
#define AT(FIELD) (((const REAL *)FIELD)[at])
    for (int64_t i = 0; i < call->rows; i++) {
        int64_t at = item * call->rows + i;
        REAL low = AT(saved->lse_low), rest = EXP(-low), constant = 0;
        Slopes s = {.lse = AT(saved->lse), .rest = rest};
        if (s.lse == -INFINITY) s.lse = INFINITY;  // a row without keys: exp(z - inf) = 0
        if (call->g_output.at && !course->alone) {
            fetch(out, call->output + at * n * SIZE[call->dtype], (int)call->dtype, n, 1);
            if (call->output_low) restore(out, (int)call->dtype, call->output_low + at * n, n);  // δ of a rounded output does not cancel
            fetch(arriving, place(&call->g_output, (int)call->dtype, b, h, i), (int)call->dtype, n, call->g_output.step[3]);
            constant -= dot(out, arriving, n);
        }
        if (g->lse) constant += AT(g->lse);
        if (g->entropy) {
            constant -= AT(g->entropy) * (AT(saved->entropy) - low);
            s.entropy = AT(g->entropy) * rest;
        }
        if (g->sum_p2) {
            constant -= 2 * AT(g->sum_p2) * AT(saved->sum_p2);
            s.sum_p2 = 2 * AT(g->sum_p2) * rest * rest;
        }
        s.constant = constant * rest;
        REAL visible = g->mean || g->variance ? (REAL)saved->visible[at] : 1;
        if (visible < 1) visible = 1;
        if (g->mean) s.level = AT(g->mean) / visible;
        if (g->variance) {
            s.slope = 2 * AT(g->variance) / visible;
            s.level -= s.slope * AT(saved->mean);
        }
        if (g->peak) s.peak = AT(g->peak);
#if TILES
        REAL all = s.constant + s.entropy + s.sum_p2 + s.level + s.slope + s.peak;
        if (all - all != 0) unfit = 1;  // inf or NaN: they arrive, or a row has them
#endif
        course->slopes[at] = s;
    }
#undef AT
}

// Σ p dP of a row, with r as `constant` has it
static REAL row_delta(const REAL *z, const REAL *dp, int64_t n, Slopes s) {
    Vec all = splat(0);
    for (int64_t j = 0; j < n; j += LANES) {
        Vec p = exp_above(bounded(load(z + j) - s.lse));
        all += keep_where(p != 0, p * load(dp + j));
    }
    return sum(all) * s.rest * (TILES ? s.rest : 1);
}

// z and dP of one row become p and dz
INLINE void slope_row(REAL *z, REAL *dp, int64_t n, const REAL *bias, Slopes s, const int biased, const int weights,
                      const int moments) {
    for (int64_t j = 0; j < n; j += LANES) {
        Vec x = load(z + j), t = bounded(x - s.lse), p = exp_above(t);
        Vec d = (TILES ? load(dp + j) * s.rest : load(dp + j)) + s.constant;  // vectors have r in dO, where it costs nothing
        if (weights) d += p * s.sum_p2 - t * s.entropy;
        d *= p;
        if (moments) {
            IntVec seen = x != (REAL)-INFINITY;
            if (biased) seen &= load(bias + j) > HIDDEN_BIAS;
            d += keep_where(seen, x * s.slope + s.level);
        }
        store(z + j, p);
        store(dp + j, d);
    }
}

static void slope_row_by_need(REAL *z, REAL *dp, int64_t n, const REAL *bias, Slopes s, int weights, int moments) {
#define CASE(BIAS, WEIGHTS, MOMENTS) \
    case BIAS * 4 + WEIGHTS * 2 + MOMENTS: slope_row(z, dp, n, bias, s, BIAS, WEIGHTS, MOMENTS); break;
    switch ((bias != NULL) * 4 + weights * 2 + moments) {
        CASE(0, 0, 0) CASE(0, 0, 1) CASE(0, 1, 0) CASE(0, 1, 1) CASE(1, 0, 0) CASE(1, 0, 1) CASE(1, 1, 0) CASE(1, 1, 1)
    }
#undef CASE
}

static void add_mask_gradient(const Call *call, Meeting m, int64_t i, int64_t part, const REAL *dz) {
    const int64_t *step = call->d_mask_step;
    int64_t at = part * call->d_mask_part + m.b * step[0] + m.h * step[1] + i * step[2] + m.key * step[3];
    if (call->needs_grad & GRAD_MASK_WIDE) {
        double *to = (double *)call->d_mask + at, total = 0;
        for (int64_t j = 0; j < m.width; j++)
            if (step[3])
                to[j * step[3]] += dz[j];
            else
                total += dz[j];  // by themselves first: a sum of sums rounds less
        if (!step[3]) *to += total;
    } else {
        REAL *to = (REAL *)call->d_mask + at;
        for (int64_t j = 0; j < m.width; j++) to[j * step[3]] += dz[j];
    }
}

// The weights and dz of row i of a meeting, from its scores and dP.
static void differ_row(const Call *call, const Course *course, Differ *own, Meeting m, int64_t r, int64_t part, REAL *z,
                       REAL *dz, int64_t n) {
    int64_t i = m.row + r, index = (m.b * call->heads + m.h) * call->rows + i;
    Slopes s = course->slopes[index];
    const REAL *bias = NULL;
    if (call->softcap) {
        cap_slopes(own->cap, z, n, (REAL)call->softcap);
        cap_row(z, n, (REAL)call->softcap);
    }
    if (call->mask_dtype != NONE) {
        bias = r && !call->mask.step[2] ? own->bias : bias_of(call, m.b, m.h, i, m.key, m.width, own->bias);
        add_bias(z, bias, n, call->mask_dtype == BOOL);
    }
    int64_t from = first_key(call, i) - m.key, to = last_key(call, i) - m.key;
    if (to > m.width) to = m.width;
    close_outside(z, from, to, n);
    int dropping = call->dropout > 0 && call->g_output.at;
    if (dropping) {
        coins(own->keep, call, index, m.key, m.width);
        for (int64_t j = 0; j < m.width; j++) dz[j] *= own->keep[j];
    }
    if (course->alone) s.constant -= row_delta(z, dz, n, s);
    slope_row_by_need(z, dz, n, bias, s, course->weights, course->moments);
    if (dropping)
        for (int64_t j = 0; j < m.width; j++) z[j] *= own->keep[j];
    if (call->upstream.peak) {
        int64_t place = call->measured.argmax[index] - call->origin - m.key;
        if (place >= 0 && place < m.width) dz[place] += s.peak;
    }
    if (call->d_mask) add_mask_gradient(call, m, i, part, dz);
    if (call->softcap)
        for (int64_t j = 0; j < m.width; j++) dz[j] *= own->cap[j];
}
