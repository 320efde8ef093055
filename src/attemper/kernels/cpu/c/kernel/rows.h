// rows.h: what band, mask and softcap make of a row of scores, and the running sums of a row.
//
// With a reference M and e = exp(z - M):  l = Σ e,  a = Σ e (z - M),  s = Σ e².  M is the largest logit of the row's first tile. It
// is raised only when a logit exceeds it by more than SLACK, so no sum can overflow and most tiles rescale nothing. Each sum is
// followed by its rounding error, collected while tiles are added: equal terms would otherwise all round the same way.
// The mean and the summed squares of z come tile by tile, from Σ d and Σ d² with d = z - (a mean of a few logits of the tile), so
// that no shift of the logits, and no drift of them, cancels the variance; tiles are joined by Chan's formula.

#define SLACK 8
#define HIDDEN_BIAS (REAL)(-1e4)

// LOW + i: the rounding error of sum i. The first tile of a row writes the sums, the second one begins the errors.
enum { SUM, TILTED, SQUARES, SUMS, LOW = SUMS, HELD = 2 * SUMS };

enum { OPEN, CLOSED, BIASED };  // every key counts; -inf marks those that do not; a bias marks some as well

typedef struct {
    REAL reference, peak;
    double mean, spread;    // spread: Σ (z - mean)²
    int64_t count, met;     // keys seen, and those of them whose logit is not -inf: mean and spread are of these
    int64_t argmax, tiles;  // tiles: how many were added to its sums
} Row;

typedef struct {  // which sums a call needs
    int weights, moments, counting, argmax;
} Needs;

INLINE Needs needs_of(const Call *call) {
    int64_t s = call->sign_bits;
    Needs needs = {(s & (ENTROPY | P2)) != 0, (s & (MEAN | VARIANCE)) != 0, 0, (s & ARGMAX) != 0};
    needs.counting = call->mask_dtype != NONE && (needs.moments || s & VISIBLE);
    return needs;
}

INLINE REAL row_factor(const Call *call, int64_t b, int64_t h, int64_t i) {
    REAL scale = (REAL)call->scale;
    if (!call->gain.at) return scale;
    return scale * *(const REAL *)place(&call->gain, REAL_IS_FLOAT ? F32 : F64, b, h, i);
}

INLINE void begin_row(Row *row) { *row = (Row){.reference = -INFINITY, .peak = -INFINITY, .argmax = -1}; }

// z becomes cap · tanh(z / cap). Where that equals z up to rounding, z stays: z / cap might underflow.
static void cap_row(REAL *z, int64_t n, REAL cap) {
    for (int64_t j = 0; j < n; j += LANES) {
        Vec x = load(z + j) / cap, size = larger(x, -x);
#if REAL_IS_FLOAT
        // tanh(x) = (1 - u) / (1 + u) with u = exp(-2|x|); near 0, where that cancels, its series
        Vec square = x * x, u = exp_above(bounded(size * (REAL)-2));
        Vec y = (1 - u) / (1 + u);
        y = choose(x < 0, -y, y);
        Vec p = square * (REAL)(-1382.0 / 155925) + (REAL)(62.0 / 2835);
        p = p * square + (REAL)(-17.0 / 315);
        p = p * square + (REAL)(2.0 / 15);
        p = p * square + (REAL)(-1.0 / 3);
        y = choose(size < (REAL)0.3, x + x * square * p, y);
#else
        Vec y = x;
        for (int i = 0; i < LANES; i++) y[i] = TANH(x[i]);
#endif
        store(z + j, choose(size < (REAL)(REAL_IS_FLOAT ? 2e-4 : 1e-9), load(z + j), y * cap));
    }
}

// The derivative of the cap at z, 1 - tanh², in a form that does not cancel: 4u / (1 + u)² with u = exp(-2|z / cap|)
static void cap_slopes(REAL *slope, const REAL *z, int64_t n, REAL cap) {
    for (int64_t j = 0; j < n; j += LANES) {
        Vec x = load(z + j) / cap, u = exp_above(bounded(larger(x, -x) * (REAL)-2));
        store(slope + j, 4 * u / ((1 + u) * (1 + u)));
    }
}

// A row of the mask as something to add, 0 or -inf for a boolean one; -inf to a whole panel.
INLINE const REAL *bias_of(const Call *call, int64_t b, int64_t h, int64_t i, int64_t key, int64_t n, REAL *scratch) {
    const Strided *mask = &call->mask;
    int dtype = (int)call->mask_dtype;
    const char *at = place(mask, dtype, b, h, i) + key * mask->step[3] * SIZE[dtype];
    fetch(scratch, at, dtype, n, mask->step[3]);
    for (int64_t j = n; j < up_to(n, PANEL); j++) scratch[j] = -INFINITY;
    return scratch;
}

INLINE void add_bias(REAL *z, const REAL *bias, int64_t n, int boolean) {
    for (int64_t j = 0; j < n; j += LANES) {
        Vec x = load(bias + j), y = load(z + j);
        store(z + j, boolean ? choose(x < 0, x, y) : y + x);
    }
}

// -inf outside of [from, to)
INLINE void close_outside(REAL *z, int64_t from, int64_t to, int64_t n) {
    IntVec lane;
    UNROLL for (int i = 0; i < LANES; i++) lane[i] = i;
    if (from > n) from = n;
    if (to < 0) to = 0;
    Vec closed = splat(-INFINITY);
    for (int64_t j = 0; j < from; j += LANES) store(z + j, choose(lane < (Int)(from - j), closed, load(z + j)));
    for (int64_t j = to / LANES * LANES; j < n; j += LANES) store(z + j, choose(lane >= (Int)(to - j), closed, load(z + j)));
}

// Rows [first, last) of the queries; their products, times `factors`, are logits.
static void pack_queries(Packed *to, const Call *call, int64_t b, int64_t h, int64_t first, int64_t last, REAL *factors,
                         REAL *scratch) {
    for (int64_t i = first; i < last; i++) factors[i - first] = row_factor(call, b, h, i);
    pack_left(to, &call->query, (int)call->dtype, b, h, first, last, call->dim, factors, scratch);
}

INLINE REAL row_peak(const REAL *z, int64_t n) {
    Vec one = splat(-INFINITY), two = one;
    int64_t j = 0;
    for (; j + PANEL <= n; j += PANEL) {
        one = larger(load(z + j), one);
        two = larger(load(z + j + LANES), two);
    }
    if (j < n) one = larger(load(z + j), one);
    return largest(larger(one, two));
}

// The mean of a few visible logits, spread over the tile
INLINE REAL few_logits(const REAL *z, const REAL *bias, int64_t from, int64_t to) {
    enum { FEW = 8 };
    REAL total = 0;
    int count = 0;
    if (!bias && to - from >= FEW) {
        const REAL *x = z + from;
        int64_t step = (to - from - 1) / (FEW - 1);
        total = ((x[0] + x[step]) + (x[2 * step] + x[3 * step])) + ((x[4 * step] + x[5 * step]) + (x[6 * step] + x[7 * step]));
        count = FEW;
    } else {
        for (int64_t j = from; j < to && count < FEW; j++)
            if (z[j] != -INFINITY && (!bias || bias[j] > HIDDEN_BIAS)) total += z[j], count++;
        int enough = 2 * count;
        for (int64_t j = to - 1; j >= from && count < enough; j--)
            if (z[j] != -INFINITY && (!bias || bias[j] > HIDDEN_BIAS)) total += z[j], count++;
    }
    REAL mean = count ? total / (REAL)count : 0;
    return mean - mean == 0 ? mean : 0;  // not inf, not NaN
}

// Chan: the moments of `met` more logits join those of a row
INLINE void join_moments(Row *row, int64_t met, double mean, double spread) {
    if (!met) return;
    if (!row->met) {
        row->mean = mean, row->spread = spread, row->met = met;
        return;
    }
    int64_t total = row->met + met;
    double share = (double)met / (double)total, step = mean - row->mean;
    row->spread += spread + step * step * (double)row->met * share;
    row->mean += step - step == 0 ? step * share : mean;  // inf stays inf
    row->met = total;
}

// The rounding error of a + b (Knuth's two-sum)
INLINE Vec lost(Vec a, Vec b) {
    Vec total = a + b, part = total - a;
    return (a - (total - part)) + (b - part);
}

// `more` is added to a sum of so many tiles
INLINE void add_to(Vec *sums, int i, Vec more, int64_t tiles) {
    if (!tiles) {
        sums[i] = more;
        return;
    }
    Vec low = lost(sums[i], more);
    sums[LOW + i] = tiles > 1 ? sums[LOW + i] + low : low;
    sums[i] += more;
}

// A sum of so many tiles with its rounding error, lane by lane. The error of an infinite sum is NaN, and is left out.
INLINE Vec whole(const Vec *sums, int i, int64_t tiles) {
    return tiles > 1 ? sums[i] + keep_where(sums[i] - sums[i] == 0, sums[LOW + i]) : sums[i];
}

static void raise_reference(Row *row, Vec *sums, REAL peak, REAL *out, int64_t out_dim) {
    if (row->reference != -INFINITY) {
        REAL d = row->reference - peak, c = EXP(d);
        for (int low = 0; low <= (row->tiles > 1 ? LOW : 0); low += LOW) {
            sums[low + TILTED] = (sums[low + TILTED] + sums[low + SUM] * d) * c;
            sums[low + SUM] *= c;
            sums[low + SQUARES] *= c * c;
        }
        for (int64_t e = 0; e < out_dim; e += LANES) store(out + e, load(out + e) * c);
    }
    row->reference = peak;
}

typedef struct {  // what a chunk of a row adds: Σ e, Σ e t, Σ e², Σ d, Σ d²
    Vec l, a, s, first, second;
} Chunk;

// z[start .. stop) become e
INLINE Chunk weigh_chunk(REAL *z, int64_t start, int64_t stop, const REAL *bias, REAL reference, REAL shift, const int kind,
                         const int weights, const int moments) {
    Chunk c = {splat(0), splat(0), splat(0), splat(0), splat(0)};
    for (int64_t j = start; j < stop; j += LANES) {
        Vec x = load(z + j), t = bounded(x - reference), e = exp_above(t);
        store(z + j, e);
        c.l += e;
        if (weights) {
            c.a += e * t;
            c.s += e * e;
        }
        if (moments) {
            Vec d = x - shift;
            if (kind != OPEN) {
                IntVec seen = x != (REAL)-INFINITY;
                if (kind == BIASED) seen &= load(bias + j) > HIDDEN_BIAS;
                d = keep_where(seen, d);
            }
            c.first += d;
            c.second += d * d;
        }
    }
    return c;
}

// One row of a tile: z becomes e, and the sums grow. Of a CLOSED row, every key before `open` has a logit that is not -inf.
INLINE void weigh_row(REAL *z, int64_t n, int64_t open, const REAL *bias, REAL reference, double *moment, Vec *sums,
                      int64_t tiles, const int kind, const int weights, const int moments) {
    // sums of sums: a chunk at a time, so that no sum has more than a few dozen terms
    enum { CHUNK = 16 * LANES };
    REAL shift = (REAL)moment[0];
    Vec l = splat(0), a = l, s = l, firsts = l, seconds = l;
    for (int64_t start = 0; start < n; start += CHUNK) {
        int64_t stop = start + CHUNK < n ? start + CHUNK : n;
        Chunk c;
        if (kind == CLOSED && stop <= open)
            c = weigh_chunk(z, start, stop, bias, reference, shift, OPEN, weights, moments);
        else
            c = weigh_chunk(z, start, stop, bias, reference, shift, kind, weights, moments);
        l += c.l;
        if (weights) a += c.a, s += c.s;
        if (moments) firsts += c.first, seconds += c.second;
    }
    add_to(sums, SUM, l, tiles), add_to(sums, TILTED, a, tiles), add_to(sums, SQUARES, s, tiles);
    if (moments) moment[0] = sum_wide(firsts), moment[1] = sum(seconds);
}

// `moment` holds the shift, and then Σ d and Σ d²
static void weigh_row_by_kind(REAL *z, int64_t n, int64_t open, const REAL *bias, REAL reference, double moment[2],
                              Vec *sums, int64_t tiles, int kind, Needs needs) {
#define CASE(KIND, WEIGHTS, MOMENTS)                                                             \
    case KIND * 4 + WEIGHTS * 2 + MOMENTS:                                                       \
        weigh_row(z, n, open, bias, reference, moment, sums, tiles, KIND, WEIGHTS, MOMENTS);     \
        break;
    switch (kind * 4 + needs.weights * 2 + needs.moments) {
        CASE(OPEN, 0, 0) CASE(OPEN, 0, 1) CASE(OPEN, 1, 0) CASE(OPEN, 1, 1)
        CASE(CLOSED, 0, 0) CASE(CLOSED, 0, 1) CASE(CLOSED, 1, 0) CASE(CLOSED, 1, 1)
        CASE(BIASED, 0, 0) CASE(BIASED, 0, 1) CASE(BIASED, 1, 0) CASE(BIASED, 1, 1)
    }
#undef CASE
}

INLINE int64_t count_seen(const REAL *bias, int64_t from, int64_t to) {
    int64_t count = 0;
    for (int64_t j = from; j < to; j++) count += bias[j] > HIDDEN_BIAS;
    return count;
}

// How many logits of [from, to) are visible and not -inf. Without a bias nearly always all are, which one comparison shows.
INLINE int64_t count_met(const REAL *z, const REAL *bias, int64_t from, int64_t to) {
    int64_t count = 0, j = from;
    if (!bias) {
        Vec low = splat(INFINITY);
        REAL least = INFINITY;
        for (; j + LANES <= to; j += LANES) low = smaller(load(z + j), low);
        for (; j < to; j++) least = z[j] < least ? z[j] : least;
        if (least != -INFINITY && -largest(-low) != -INFINITY) return to > from ? to - from : 0;
    }
    for (j = from; j < to; j++) count += z[j] != -INFINITY && (!bias || bias[j] > HIDDEN_BIAS);
    return count;
}

typedef struct {  // a row of a tile: n scores of keys key, key + 1, ...; those outside of [from, to) are not the row's
    REAL *z;
    int64_t n, key, from, to;
    const REAL *bias;  // NULL where there is no mask
    const Vec *top;    // the largest scores, where all of them are seen as they are; else NULL
} Sight;

// Scores become logits; the row's peak and reference are updated.
INLINE void look(const Call *call, Needs needs, Row *row, Vec *sums, Sight s, REAL *out, int64_t out_dim) {
    if (call->softcap) cap_row(s.z, s.n, (REAL)call->softcap);
    if (s.bias) add_bias(s.z, s.bias, s.n, call->mask_dtype == BOOL);
    close_outside(s.z, s.from, s.to, s.n);
    REAL peak = s.top ? largest(*s.top) : row_peak(s.z, s.n);
    if (needs.argmax && peak > row->peak) {
        int64_t j = 0;
        while (s.z[j] != peak) j++;
        row->argmax = s.key + j;
    }
    row->peak = peak > row->peak ? peak : row->peak;
    if (peak > row->reference + SLACK) raise_reference(row, sums, peak, out, out_dim);
}

// Logits become weights; the row's sums are updated.
INLINE void count_in(Needs needs, Row *row, Vec *sums, Sight s) {
    int kind = s.bias ? BIASED : s.from > 0 || s.to < s.n ? CLOSED : OPEN;
    int64_t from = s.from > 0 ? s.from : 0;
    int64_t count = !s.bias ? (s.to > from ? s.to - from : 0) : needs.counting ? count_seen(s.bias, from, s.to) : 0;
    REAL reference = row->reference == -INFINITY ? 0 : row->reference, shift = 0;
    double moment[2] = {0};
    int64_t met = count, open = from ? 0 : s.to;
    if (needs.moments) {
        met = count_met(s.z, s.bias, from, s.to);
        if (met < count && !s.bias) kind = CLOSED, open = 0;
        moment[0] = shift = few_logits(s.z, s.bias, from, s.to);
    }
    weigh_row_by_kind(s.z, s.n, open, s.bias, reference, moment, sums, row->tiles++, kind, needs);
    row->count += count;
    if (needs.moments && met) {
        double mean = moment[0] / (double)met;
        join_moments(row, met, shift + mean, moment[1] - moment[0] * mean);
    }
}
