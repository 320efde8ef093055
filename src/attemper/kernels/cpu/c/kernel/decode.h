// decode.h: few rows, many keys (a KV cache). Keys and values are read once, in place; the keys are split over the
// threads, and the parts of a row are joined exactly, in order.

enum { DECODE_ROWS = 8, ABREAST = 4, SPLIT_KEYS = 2 * TILE_KEYS };  // rows in all, rows at a time, fewest keys of a part

INLINE int is_decode(const Call *call) { return call->rows * (call->heads / call->groups) <= DECODE_ROWS; }

typedef struct {  // the sums of all rows of one part of one key/value head
    Row *rows;
    Vec *sums;
    REAL *out;
} Part;

typedef struct {
    Needs needs;
    int64_t parts, rows, padded, out_step;  // padded: the rows that are worked on
    char *memory;                           // of all parts, where there are several of a head; else a worker has its own
    size_t each;
} Split;

typedef struct {
    Part part;
    REAL *query, *z, *keys, *bias, *keep;
} Decode;

static Part take_part(Space *space, const Split *split) {
    return (Part){
        .rows = TAKE(space, Row, split->padded),
        .sums = TAKE(space, Vec, split->padded * HELD),
        .out = TAKE(space, REAL, split->padded * split->out_step),
    };
}

static Part shared_part(const Split *split, int64_t item) {
    Space space = {.at = split->memory + item * split->each};
    return take_part(&space, split);
}

static Decode take_decode(Space *space, const Call *call, const Split *split) {
    int64_t most = call->dim > call->value_dim ? call->dim : call->value_dim;
    return (Decode){
        .part = split->parts > 1 ? (Part){0} : take_part(space, split),
        .query = TAKE(space, REAL, split->padded * call->dim),
        .z = TAKE(space, REAL, split->padded * TILE_STEP),
        .keys = TAKE(space, REAL, TILE_KEYS * most),
        .bias = TAKE(space, REAL, TILE_STEP),
        .keep = TAKE(space, REAL, TILE_STEP),
    };
}

typedef struct {  // rows of one dtype, in place; step: from row to row, in numbers; of `turned` ones, from number to number of a row
    const char *at;
    int dtype;
    int64_t step;
    int turned;
} Lying;

INLINE const char *lying(Lying m, const int dtype, int64_t row, int64_t column) {
    return m.at + (row * m.step + column) * SIZE[dtype];
}

// z[rows][keys] = rows · keys, or += where it is `adding`, along the head dim; four keys at a time
INLINE void dots(const int rows, const int dtype, const int adding, const REAL *query, int64_t query_step, Lying keys, int64_t n,
                 int64_t dim, REAL *z, int64_t z_step) {
    for (int64_t j = 0; j < n; j += 4) {
        Vec sums[4][ABREAST];
        const char *key[4];
        UNROLL for (int s = 0; s < 4; s++) key[s] = lying(keys, dtype, j + s < n ? j + s : n - 1, 0);
        UNROLL for (int s = 0; s < 4; s++) UNROLL for (int r = 0; r < rows; r++) sums[s][r] = splat(0);
        int64_t e = 0;
        for (; e + LANES <= dim; e += LANES) {
            Vec k[4];
            UNROLL for (int s = 0; s < 4; s++) k[s] = load_as(dtype, key[s] + e * SIZE[dtype]);
            UNROLL for (int r = 0; r < rows; r++) {
                Vec q = load(query + r * query_step + e);
                UNROLL for (int s = 0; s < 4; s++) sums[s][r] += q * k[s];
            }
        }
        UNROLL for (int r = 0; r < rows; r++) {
            REAL *to = z + r * z_step + j, found[4];
            sum_four(found, sums[0][r], sums[1][r], sums[2][r], sums[3][r]);
            for (int64_t f = e; f < dim; f++)
                for (int s = 0; s < 4; s++) found[s] += query[r * query_step + f] * number_as(dtype, key[s] + f * SIZE[dtype]);
            for (int s = 0; s < 4; s++) to[s] = adding ? to[s] + found[s] : found[s];
        }
    }
}

// z[rows][keys] (+)= `deep` dims from e on of rows · keys that are turned: as many lines are read side by side
INLINE void add_lines(const int rows, const int deep, const int dtype, const REAL *query, Lying keys, int64_t n, int64_t dim,
                      int64_t e, REAL *z) {
    for (int64_t j = 0; j + LANES <= n; j += LANES) {
        Vec sums[ABREAST];
        UNROLL for (int r = 0; r < rows; r++) sums[r] = e ? load(z + r * TILE_STEP + j) : splat(0);
        UNROLL for (int s = 0; s < deep; s++) {
            Vec k = load_as(dtype, lying(keys, dtype, e + s, j));
            UNROLL for (int r = 0; r < rows; r++) sums[r] += splat(query[r * dim + e + s]) * k;
        }
        UNROLL for (int r = 0; r < rows; r++) store(z + r * TILE_STEP + j, sums[r]);
    }
}

// The same sums as `dots`, of keys that are turned. A score is added up dim by dim, in order, wherever its key is met.
INLINE void dots_of_turned(const int rows, const int dtype, const REAL *query, Lying keys, int64_t n, int64_t dim, REAL *z) {
    const int deep = rows > 1 ? 4 : 8;
    int64_t e = 0, from = n > LANES ? n - LANES : 0;  // of the last vector, which begins among keys that are done
    for (; e + deep <= dim; e += deep) add_lines(rows, deep, dtype, query, keys, n, dim, e, z);
    for (; e < dim; e++) add_lines(rows, 1, dtype, query, keys, n, dim, e, z);
    if (n % LANES == 0) return;
    Vec sums[ABREAST];
    UNROLL for (int r = 0; r < rows; r++) sums[r] = splat(0);
    for (e = 0; e < dim; e++) {
        REAL few[LANES] = {0};
        for (int64_t j = 0; n < LANES && j < n; j++) few[j] = number_as(dtype, lying(keys, dtype, e, j));
        Vec k = n < LANES ? load(few) : load_as(dtype, lying(keys, dtype, e, from));
        UNROLL for (int r = 0; r < rows; r++) sums[r] += splat(query[r * dim + e]) * k;
    }
    UNROLL for (int r = 0; r < rows; r++) store(z + r * TILE_STEP + from, sums[r]);
}

// out[rows][some columns] += weights[rows][keys] · values, `wide` vectors of columns from e on
INLINE void mix_columns(const int rows, const int wide, const int dtype, const REAL *weights, Lying values, int64_t n, int64_t e,
                        REAL *out, int64_t out_step) {
    Vec sums[ABREAST][8];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < wide; v++) sums[r][v] = splat(0);
    for (int64_t j = 0; j < n; j++) {
        const char *value = lying(values, dtype, j, e);
        Vec x[8];
        UNROLL for (int v = 0; v < wide; v++) x[v] = load_as(dtype, value + v * LANES * SIZE[dtype]);
        UNROLL for (int r = 0; r < rows; r++) {
            Vec p = splat(weights[r * TILE_STEP + j]);
            UNROLL for (int v = 0; v < wide; v++) sums[r][v] += p * x[v];
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < wide; v++) {
        REAL *at = out + r * out_step + e + v * LANES;
        store(at, load(at) + sums[r][v]);
    }
}

// out[rows][dim] += weights[rows][keys] · values, as many columns at a time as registers hold
INLINE void mix(const int rows, const int dtype, const REAL *weights, Lying values, int64_t n, int64_t dim, REAL *out,
                int64_t out_step) {
    const int wide = (rows < 4 ? 8 : 4) / (MAX_ROWS > 6 ? 1 : 2);
    int64_t e = 0;
    for (; e + wide * LANES <= dim; e += wide * LANES)
        mix_columns(rows, wide, dtype, weights, values, n, e, out, out_step);
    if (wide > 4 && e + 4 * LANES <= dim) mix_columns(rows, 4, dtype, weights, values, n, e, out, out_step), e += 4 * LANES;
    if (wide > 2 && e + 2 * LANES <= dim) mix_columns(rows, 2, dtype, weights, values, n, e, out, out_step), e += 2 * LANES;
    if (e + LANES <= dim) mix_columns(rows, 1, dtype, weights, values, n, e, out, out_step), e += LANES;
    for (int r = 0; r < rows; r++)
        for (int64_t f = e; f < dim; f++) {
            REAL total = 0;
            for (int64_t j = 0; j < n; j++) total += weights[r * TILE_STEP + j] * number_as(dtype, lying(values, dtype, j, f));
            out[r * out_step + f] += total;
        }
}

#if REAL_IS_FLOAT
#define EACH_DTYPE(DO, ROWS) \
    DO(ROWS, F32) DO(ROWS, BF16) DO(ROWS, F16)
#else
#define EACH_DTYPE(DO, ROWS) DO(ROWS, F64)
#endif

static void dots_of(int64_t rows, const REAL *query, Lying keys, int64_t n, int64_t dim, REAL *z) {
#define CASE(ROWS, DTYPE)                                                                        \
    case ROWS * 8 + DTYPE:                                                                       \
        if (keys.turned)                                                                         \
            dots_of_turned(ROWS, DTYPE, query, keys, n, dim, z);                                 \
        else                                                                                     \
            dots(ROWS, DTYPE, 0, query, dim, keys, n, dim, z, TILE_STEP);                        \
        break;
    switch ((rows > 2 ? 4 : rows) * 8 + keys.dtype) { EACH_DTYPE(CASE, 1) EACH_DTYPE(CASE, 2) EACH_DTYPE(CASE, 4) }
#undef CASE
}

// What is turned is added up along the keys: the columns of the values are rows that meet the weights
static void mix_of(int64_t rows, const REAL *weights, Lying values, int64_t n, int64_t dim, REAL *out, int64_t out_step) {
#define CASE(ROWS, DTYPE)                                                                        \
    case ROWS * 8 + DTYPE:                                                                       \
        if (values.turned)                                                                       \
            dots(ROWS, DTYPE, 1, weights, TILE_STEP, values, dim, n, out, out_step);             \
        else                                                                                     \
            mix(ROWS, DTYPE, weights, values, n, dim, out, out_step);                            \
        break;
    switch ((rows > 2 ? 4 : rows) * 8 + values.dtype) { EACH_DTYPE(CASE, 1) EACH_DTYPE(CASE, 2) EACH_DTYPE(CASE, 4) }
#undef CASE
}

// A tile of a matrix: in place or, if both its rows and its columns have gaps, as REAL in `scratch`
static Lying tile_of(const Strided *t, int dtype, int64_t b, int64_t g, int64_t key, int64_t n, int64_t dim, REAL *scratch) {
    if (t->step[3] == 1) return (Lying){place(t, dtype, b, g, key), dtype, t->step[2], 0};
    if (lies_turned(t)) return (Lying){place(t, dtype, b, g, key), dtype, t->step[3], 1};
    fetch_rows(scratch, dim, t, dtype, b, g, key, n, dim);
    return (Lying){(const char *)scratch, REAL_IS_FLOAT ? F32 : F64, dim, 0};
}

static void decode_tile(const Call *call, const Split *split, Decode *own, Part *part, int64_t b, int64_t g, int64_t key,
                        int64_t width) {
    int64_t n = up_to(width, ALIGNED), repeat = call->heads / call->groups;
    Lying keys = tile_of(&call->key, (int)call->dtype, b, g, key, width, call->dim, own->keys);
    for (int64_t r = 0; r < split->rows; r += ABREAST)
        dots_of(split->rows - r, own->query + r * call->dim, keys, width, call->dim, own->z + r * TILE_STEP);
    for (int64_t r = 0; r < split->rows; r++) {
        int64_t h = g * repeat + r / call->rows, i = r % call->rows, last = last_key(call, i) - key;
        REAL *z = own->z + r * TILE_STEP, factor = row_factor(call, b, h, i);
        for (int64_t j = 0; j < width; j++) z[j] *= factor;
        for (int64_t j = width; j < n; j++) z[j] = 0;
        const REAL *bias = NULL;
        if (call->mask_dtype != NONE) bias = bias_of(call, b, h, i, key, width, own->bias);
        Sight sight = {z, n, key, first_key(call, i) - key, last < width ? last : width, bias, NULL};
        look(call, split->needs, part->rows + r, part->sums + r * HELD, sight, part->out + r * split->out_step,
             call->output ? split->out_step : 0);
        count_in(split->needs, part->rows + r, part->sums + r * HELD, sight);
        if (call->dropout > 0 && call->output) {
            coins(own->keep, call, (b * call->heads + h) * call->rows + i, key, width);
            for (int64_t j = 0; j < width; j++) z[j] *= own->keep[j];
        }
    }
    if (!call->output) return;
    Lying values = tile_of(&call->value, (int)call->dtype, b, g, key, width, call->value_dim, own->keys);
    for (int64_t r = 0; r < split->rows; r += ABREAST)
        mix_of(split->rows - r, own->z + r * TILE_STEP, values, width, call->value_dim, part->out + r * split->out_step,
               split->out_step);
}

// Rows over other keys, `more`, join `row`; exact, as merge() in vitals.py is.
static void join_rows(Row *row, Vec *sums, REAL *out, Row *more, Vec *more_sums, REAL *more_out, int64_t out_dim) {
    REAL reference = more->reference > row->reference ? more->reference : row->reference;
    if (row->reference != reference) raise_reference(row, sums, reference, out, out_dim);
    if (more->reference != reference) raise_reference(more, more_sums, reference, more_out, out_dim);
    if (more->peak > row->peak) {  // the lowest key on ties
        row->peak = more->peak;
        row->argmax = more->argmax;
    }
    row->count += more->count;
    join_moments(row, more->met, more->mean, more->spread);
    for (int i = 0; i < SUMS; i++) add_to(sums, i, whole(more_sums, i, more->tiles), row->tiles);
    row->tiles += more->tiles;
    for (int64_t e = 0; e < out_dim; e++) out[e] += more_out[e];
}

// The parts of a head after the first join it, and its rows are written.
static void decode_finish(const Call *call, const Split *split, int64_t pair, Part part) {
    int64_t b = pair / call->groups, g = pair % call->groups, out_dim = call->output ? split->out_step : 0;
    for (int64_t p = 1; p < split->parts; p++) {
        Part more = shared_part(split, pair * split->parts + p);
        for (int64_t r = 0; r < split->rows; r++)
            join_rows(part.rows + r, part.sums + r * HELD, part.out + r * split->out_step, more.rows + r, more.sums + r * HELD,
                      more.out + r * split->out_step, out_dim);
    }
    int64_t at = (b * call->heads + g * (call->heads / call->groups)) * call->rows;  // the rows of a group's heads are contiguous
    REAL share[DECODE_ROWS];
    finish_rows(call, split->needs, part.rows, part.sums, at, split->rows, share);
    for (int64_t r = 0; call->output && r < split->rows; r++)
        put_output(call, at + r, part.out + r * split->out_step, share[r]);
}

static void decode_item(const Job *job, void *memory, int64_t item) {
    const Call *call = job->call;
    const Split *split = job->shared;
    Space space = {.at = memory};
    Decode own = take_decode(&space, call, split);
    Part part = split->parts > 1 ? shared_part(split, item) : own.part;
    int64_t pair = item / split->parts, p = item % split->parts, b = pair / call->groups, g = pair % call->groups;
    int64_t repeat = call->heads / call->groups, tiles = (call->keys + TILE_KEYS - 1) / TILE_KEYS;
    for (int64_t r = 0; r < split->padded; r++) {
        begin_row(part.rows + r);
        REAL *query = own.query + r * call->dim;
        if (r < split->rows)
            fetch(query, place(&call->query, (int)call->dtype, b, g * repeat + r / call->rows, r % call->rows),
                  (int)call->dtype, call->dim, call->query.step[3]);
        else
            memset(query, 0, call->dim * sizeof(REAL));
    }
    memset(part.out, 0, split->padded * split->out_step * sizeof(REAL));
    int64_t last = tiles * (p + 1) / split->parts;
    for (int64_t tile = tiles * p / split->parts; tile < last; tile++) {
        int64_t key = tile * TILE_KEYS, width = call->keys - key < TILE_KEYS ? call->keys - key : TILE_KEYS;
        decode_tile(call, split, &own, &part, b, g, key, width);
    }
    if (split->parts == 1) decode_finish(call, split, pair, part);
}

static int decode(const Call *call) {
    int64_t pairs = call->batch * call->groups, most = call->keys / SPLIT_KEYS;
    Split split = {
        .needs = needs_of(call),
        .parts = pairs % call->threads == 0 ? 1 : (4 * call->threads + pairs - 1) / pairs,
        .rows = call->rows * (call->heads / call->groups),
        .out_step = up_to(call->value_dim, PANEL),
    };
    split.padded = split.rows > 2 ? up_to(split.rows, ABREAST) : split.rows;  // as `dots_of` takes them
    if (split.parts > most) split.parts = most ? most : 1;
    Space one = {0}, space = {0};
    take_part(&one, &split);
    split.each = one.used;
    if (split.parts > 1) {
        split.memory = attemper_take((size_t)(pairs * split.parts) * split.each, (int)call->poison);
        if (!split.memory) return NO_MEMORY;
    }
    take_decode(&space, call, &split);
    Job job = {.call = call, .shared = &split, .item = decode_item, .each = space.used, .items = pairs * split.parts};
    int failed = run(&job);
    for (int64_t pair = 0; split.parts > 1 && !failed && pair < pairs; pair++)
        decode_finish(call, &split, pair, shared_part(&split, pair * split.parts));
    attemper_give(split.memory);
    return failed;
}
