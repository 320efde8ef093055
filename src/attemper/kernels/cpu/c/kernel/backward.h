// backward.h: gradients from recomputed tiles. A worker takes a key/value head and a part of its keys, so dK and dV have one
// writer; each part has its own dQ, and the parts are added in a fixed order at the end: the result does not depend on timing.

// The scores of few rows or keys, to the bit as the forward pass computed them: at logits of 1e4 another order of adding changes them
// by 1e-3, and they would no longer be those that lse and mean were computed from.
static void decode_scores(const Call *call, Differ *own, int64_t step, Meeting m, int64_t offset, REAL *z) {
#if TILES
    (void)call, (void)own, (void)step, (void)m, (void)offset, (void)z;  // few rows never come here
#else
    Lying keys = {(const char *)(own->key_rows + offset * step), REAL_IS_FLOAT ? F32 : F64, step, 0};
    if (is_decode(call) && lies_turned(&call->key))
        keys = tile_of(&call->key, (int)call->dtype, m.b, m.h / (call->heads / call->groups), m.key, m.width, call->dim, NULL);
    for (int64_t r = 0; r < m.rows; r++, z += TILE_STEP) {
        const REAL *query = row_of(&call->query, (int)call->dtype, m.b, m.h, m.row + r, call->dim, own->scratch);
        dots_of(1, query, keys, m.width, call->dim, z);
        for (int64_t j = 0; j < m.width; j++) z[j] *= own->factors[m.at + r];
        for (int64_t j = m.width; j < up_to(m.width, ALIGNED); j++) z[j] = 0;
    }
#endif
}

// A strip of rows against a tile of `keys` that begins at `key`: p, dz and their share of dQ.
static void differ_strip(const Call *call, const Course *course, Differ *own, Meeting m, int64_t part, int64_t key,
                         int64_t keys, REAL *dq) {
    REAL *p = own->p + m.at * TILE_STEP, *dz = own->dz + m.at * TILE_STEP;
    int64_t offset = m.key - key, n = up_to(m.width, ALIGNED), rows = tile_rows(m.rows);
    if (is_decode(call) || has_few_keys(call))
        decode_scores(call, own, course->dq_step, m, offset, p + offset);
    else
        scores(call, (int)m.rows, own->query + m.at / MAX_ROWS * course->query_strip, own->factors + m.at, call->dim,
               across_from(own->keys, offset, call->dim), n, p + offset, NULL);
    if (call->g_output.at)
        scores(call, (int)m.rows, own->g_out + m.at / MAX_ROWS * course->value_strip, NULL, call->value_dim,
               across_from(own->values, offset, call->value_dim), n, dz + offset, NULL);
    for (int64_t r = 0; r < m.rows; r++) {
        REAL *z = p + r * TILE_STEP + offset, *d = dz + r * TILE_STEP + offset;
        if (!call->g_output.at) memset(d, 0, n * sizeof(REAL));
        differ_row(call, course, own, m, r, part, z, d, n);
        for (int side = 0; side < 2; side++) {  // the rest of the tile's keys, for `gather`
            REAL *row = side ? z - offset : d - offset;
            if (offset) memset(row, 0, offset * sizeof(REAL));
            if (keys > offset + n) memset(row + offset + n, 0, (keys - offset - n) * sizeof(REAL));
        }
    }
    memset(dz + m.rows * TILE_STEP, 0, (rows - m.rows) * TILE_STEP * sizeof(REAL));
    if (course->rows)
        weigh(call, 2, (int)m.rows, dz + offset, m.width, panels_from(packed_panels(own->key_rows, call->dim), offset),
              course->dq_step / PANEL, dq + m.at * course->dq_step, course->dq_step, own->weights);
}

static void fetch_block(const Call *call, const Course *course, Differ *own, int64_t b, int64_t h, int64_t first,
                        int64_t last) {
    const Slopes *slopes = course->slopes + (b * call->heads + h) * call->rows;
    pack_queries(own->query, call, b, h, first, last, own->factors, own->scratch);
    if (TILES && call->needs_grad & GRAD_KEY)
        pack_turned(own->query_rows, &call->query, (int)call->dtype, b, h, first, last, call->dim, own->scratch);
    if (!call->g_output.at) return;
    for (int64_t i = first; i < last; i++) own->rests[i - first] = slopes[i].rest;
    pack_left(own->g_out, &call->g_output, (int)call->dtype, b, h, first, last, call->value_dim, own->rests, own->scratch);
    if (TILES && call->needs_grad & GRAD_VALUE)
        pack_turned(own->g_out_rows, &call->g_output, (int)call->dtype, b, h, first, last, call->value_dim, own->scratch);
}

// A block of rows against a tile of keys: dQ, and the block's share of dK and dV.
static void differ_block(const Call *call, const Course *course, Differ *own, int64_t b, int64_t h, int64_t first,
                         int64_t last, int64_t part, int64_t key, int64_t width, REAL *dq) {
    int64_t rows = last - first, all = up_to(width, ALIGNED);
    fetch_block(call, course, own, b, h, first, last);
    for (int64_t at = 0; at < rows; at += MAX_ROWS) {
        Meeting m = {b, h, first + at, rows - at < MAX_ROWS ? rows - at : MAX_ROWS, at, key, 0};
        int64_t from = first_key(call, m.row) / PANEL * PANEL, to = last_key(call, m.row + m.rows - 1);
        if (from > key) m.key = from;
        if (to > key + width) to = key + width;
        m.width = to - m.key;
        if (m.width > 0)
            differ_strip(call, course, own, m, part, key, all, dq);
        else {
            memset(own->p + at * TILE_STEP, 0, m.rows * TILE_STEP * sizeof(REAL));
            memset(own->dz + at * TILE_STEP, 0, m.rows * TILE_STEP * sizeof(REAL));
        }
    }
    int keys = (call->needs_grad & GRAD_KEY) != 0, values = call->needs_grad & GRAD_VALUE && call->g_output.at;
#if TILES
    if (keys) stack_rows(own->dz_rows, own->dz, rows, width, own->factors, own->scratch);
    if (values) stack_rows(own->p_rows, own->p, rows, width, own->rests, own->scratch);
    const Packed *query = own->query_rows, *g_out = own->g_out_rows, *p = own->p_rows, *dz = own->dz_rows;
#else
    const Packed *query = own->query, *g_out = own->g_out, *p = own->p, *dz = own->dz;
#endif
    for (int64_t j = 0; j < width; j += GATHERED) {
        int64_t from = key + j - call->right - first, to = key + j + GATHERED + call->left - first;
        if (from < 0) from = 0;
        if (to > rows) to = rows;
        if (from >= to) continue;
        if (values) gather(call, p, all, j, from, to, g_out, call->value_dim, own->dv);
        if (keys) gather(call, dz, all, j, from, to, query, call->dim, own->dk);
    }
}

// raw = dz K of one head: d(query) = scale · gain · raw and d(gain) = scale · query · raw
static void write_rows(const Call *call, const Course *course, int64_t b, int64_t h, REAL *raw, REAL *query) {
    for (int64_t i = 0; i < call->rows; i++, raw += course->dq_step) {
        int64_t at = (b * call->heads + h) * call->rows + i;
        if (call->needs_grad & GRAD_GAIN) {
            const REAL *q = row_of(&call->query, (int)call->dtype, b, h, i, call->dim, query);
            ((REAL *)call->d_gain)[at] = dot(q, raw, call->dim) * (REAL)call->scale;
        }
        if (!(call->needs_grad & GRAD_QUERY)) continue;
        put(call->d_query, (int)call->dtype, at * call->dim, raw, call->dim, row_factor(call, b, h, i));
    }
}

static void write_keys(const Call *call, const Course *course, Differ *own, int64_t b, int64_t g, int64_t key,
                       int64_t width) {
    for (int64_t j = 0; j < width; j++) {
        int64_t at = (b * call->groups + g) * call->all_keys + call->origin + key + j;
        if (call->needs_grad & GRAD_KEY)
            put(call->d_key, (int)call->dtype, at * call->dim, own->dk + j * course->dq_step, call->dim, 1);
        if (call->needs_grad & GRAD_VALUE)
            put(call->d_value, (int)call->dtype, at * call->value_dim, own->dv + j * course->dv_step, call->value_dim, 1);
    }
}

// Keys that no row sees (native.c left them out of the call) have zero gradients; each part clears its share of them.
static void clear_unseen(const Call *call, int64_t b, int64_t g, int64_t part) {
    int64_t head = (b * call->groups + g) * call->all_keys, size = SIZE[call->dtype];
    int64_t ends[2][2] = {{0, call->origin}, {call->origin + call->keys, call->all_keys}};
    for (int side = 0; side < 2; side++) {
        int64_t from = ends[side][0], n = ends[side][1] - from;
        int64_t first = head + from + n * part / call->parts, last = head + from + n * (part + 1) / call->parts;
        if (call->d_key) memset(call->d_key + first * call->dim * size, 0, (last - first) * call->dim * size);
        if (call->d_value) memset(call->d_value + first * call->value_dim * size, 0, (last - first) * call->value_dim * size);
    }
}

static void differ_head(const Call *call, const Course *course, Differ *own, int64_t b, int64_t g, int64_t part) {
    int64_t repeat = call->heads / call->groups, size = course->dq_head;
    REAL *dq = own->dq;
    if (course->dq) dq = course->dq + ((part * call->batch + b) * call->heads + g * repeat) * size;
    if (course->rows) memset(dq, 0, (size_t)(repeat * size) * sizeof(REAL));
    clear_unseen(call, b, g, part);
    for (int64_t tile = part; tile < course->tiles; tile += call->parts) {
        int64_t key = tile * BACK_KEYS, width = call->keys - key < BACK_KEYS ? call->keys - key : BACK_KEYS;
        pack_across(own->keys, &call->key, (int)call->dtype, b, g, key, key + width, call->dim, own->scratch);
        pack_along(own->key_rows, &call->key, (int)call->dtype, b, g, key, key + width, call->dim, own->scratch);
        if (call->g_output.at)
            pack_across(own->values, &call->value, (int)call->dtype, b, g, key, key + width, call->value_dim, own->scratch);
        int64_t sums = TILES ? up_to(width, PANEL) : width + MAX_ROWS;
        memset(own->dk, 0, sums * course->dq_step * sizeof(REAL));
        memset(own->dv, 0, sums * course->dv_step * sizeof(REAL));
        for (int64_t r = 0; r < repeat; r++)
            for (int64_t first = 0; first < call->rows; first += BLOCK_ROWS) {
                int64_t last = first + BLOCK_ROWS < call->rows ? first + BLOCK_ROWS : call->rows;
                if (last_key(call, last - 1) <= key || first_key(call, first) >= key + width) continue;
                differ_block(call, course, own, b, g * repeat + r, first, last, part, key, width,
                             dq + r * size + first * course->dq_step);
            }
#if TILES
        if (call->needs_grad & GRAD_KEY) turn_sums(own->dk, call->dim, sums, own->turning);
        if (call->needs_grad & GRAD_VALUE) turn_sums(own->dv, call->value_dim, sums, own->turning);
#endif
        write_keys(call, course, own, b, g, key, width);
    }
    if (course->rows && !course->dq)
        for (int64_t r = 0; r < repeat; r++) write_rows(call, course, b, g * repeat + r, dq + r * size, own->scratch);
}

// Heads that share an entry of the mask's gradient have one writer: one worker takes them all, one after another.
INLINE int64_t batches_apart(const Call *call) { return call->needs_grad & GRAD_MASK_BY_BATCHES ? 1 : call->batch; }
INLINE int64_t groups_apart(const Call *call) { return call->needs_grad & GRAD_MASK_BY_GROUPS ? 1 : call->groups; }

static void differ_item(const Job *job, void *memory, int64_t item) {
    const Call *call = job->call;
    Space space = {.at = memory};
    Differ own = take_differ(&space, call, job->shared);
    int64_t groups = groups_apart(call), part = item % call->parts, pair = item / call->parts;
    for (int64_t b = pair / groups; b < call->batch; b += batches_apart(call))
        for (int64_t g = pair % groups; g < call->groups; g += groups) differ_head(call, job->shared, &own, b, g, part);
}

static void join_item(const Job *job, void *memory, int64_t item) {
    const Call *call = job->call;
    const Course *course = job->shared;
    int64_t size = course->dq_head, all = size * call->batch * call->heads;
    REAL *dq = course->dq + item * size;
    for (int64_t part = 1; part < call->parts; part++)
        for (int64_t e = 0; e < size; e++) dq[e] += dq[part * all + e];
    write_rows(call, course, item / call->heads, item % call->heads, dq, memory);
}

static int backward(const Call *call) {
    int64_t heads = call->batch * call->groups, pairs = call->batch * call->heads;
    if (!heads) return 0;
#if TILES
    // a gain's gradient is in float, and wants more than two parts; a mask's adds up in place, and could not be done again
    if (call->dtype == F32 || too_short(call, MAX_ROWS) || call->needs_grad & GRAD_GAIN || call->d_mask) return UNFIT;
#endif
    const Rows *g = &call->upstream;
    Course course = {
        .rows = (call->needs_grad & (GRAD_QUERY | GRAD_GAIN)) != 0,
        .tiles = (call->keys + BACK_KEYS - 1) / BACK_KEYS,
        .query_strip = left_size(MAX_ROWS, call->dim),
        .value_strip = left_size(MAX_ROWS, call->value_dim),
        .dq_step = up_to(call->dim, PANEL),
        .dv_step = up_to(call->value_dim, PANEL),
        // to a whole strip: the last one also adds to the rows that pad it, and those must be nobody else's
        .dq_head = up_to(call->rows, MAX_ROWS) * up_to(call->dim, PANEL),
        .alone = call->keys <= BACK_KEYS && call->g_output.at,
        .weights = g->entropy || g->sum_p2,
        .moments = g->mean || g->variance,
        .slopes = attemper_take((size_t)(pairs * call->rows) * sizeof(Slopes), (int)call->poison),
    };
    int joins = course.rows && call->parts > 1;
    if (joins)
        course.dq = attemper_take((size_t)(call->parts * pairs * course.dq_head) * sizeof(REAL), (int)call->poison);
    int failed = course.slopes && (!joins || course.dq) ? 0 : NO_MEMORY;
    Job job = {.call = call, .shared = &course, .item = find_slopes, .items = pairs};
    job.each = (size_t)(2 * call->value_dim + 16) * sizeof(REAL);
    if (!failed) failed = run(&job);
    if (!failed) {
        Space count = {0};
        take_differ(&count, call, &course);
        job.each = count.used;
        job.item = differ_item;
        job.items = call->parts * batches_apart(call) * groups_apart(call);
        failed = run(&job);
    }
    if (!failed && joins) {
        job.each = (size_t)(call->dim + 16) * sizeof(REAL);
        job.item = join_item;
        job.items = pairs;
        failed = run(&job);
    }
    attemper_give(course.slopes);
    attemper_give(course.dq);
    return failed;
}
