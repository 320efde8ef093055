// forward.h: output and signs. A head's keys and values are packed once; strips of MAX_ROWS rows meet tiles of TILE_KEYS keys.

enum { MOST_STRIPS = 16, CACHE = 1 << 20 };  // strips of a block; bytes of keys and values that stay in the second cache

typedef struct {  // the packed keys and values of one key/value head
    Packed *keys, *values;
    REAL *scratch;
} Head;

typedef struct {  // what one worker writes to
    Head head;
    Packed *query, *weights;
    REAL *out, *z, *few, *bias, *keep, *share, *scratch;
    Vec *sums;
    Row *rows;
} Attend;

typedef struct {
    Needs needs;
    int64_t block, blocks;    // rows of a block, blocks of a head
    int64_t strip, out_step;  // strip: packed numbers of MAX_ROWS queries
    int values_in_place;
    Head *heads;              // all of them, where workers share heads; else NULL
} Plan;

static Head take_head(Space *space, const Call *call, int values_in_place) {
    return (Head){
        .keys = TAKE(space, Packed, across_size(call->keys, call->dim)),
        .values = values_in_place ? NULL : TAKE(space, Packed, along_size(call->keys, call->value_dim)),
        .scratch = TAKE(space, REAL, pack_scratch(call->dim > call->value_dim ? call->dim : call->value_dim)),
    };
}

static Attend take_attend(Space *space, const Call *call, const Plan *plan) {
    return (Attend){
        .head = plan->heads ? (Head){0} : take_head(space, call, plan->values_in_place),
        .query = TAKE(space, Packed, left_size(plan->block, call->dim)),
        .weights = TILES ? TAKE(space, Packed, left_size(MAX_ROWS, TILE_KEYS)) : NULL,
        .out = TAKE(space, REAL, (plan->block + MAX_ROWS) * plan->out_step),
        .z = TAKE(space, REAL, MAX_ROWS * TILE_STEP),
        .few = has_few_keys(call) ? TAKE(space, REAL, FEW_KEYS * TILE_STEP) : NULL,
        .bias = call->mask_dtype == NONE ? NULL : TAKE(space, REAL, MAX_ROWS * TILE_STEP),
        .keep = TAKE(space, REAL, TILE_STEP),
        .share = TAKE(space, REAL, plan->block + LANES),
        .scratch = TAKE(space, REAL, pack_scratch(call->dim)),
        .sums = TAKE(space, Vec, plan->block * HELD),
        .rows = TAKE(space, Row, plan->block),
    };
}

static void pack_head(const Call *call, const Head *head, int64_t b, int64_t g) {
    if (has_few_keys(call))
        pack_few(head->keys, call, b, g);
    else
        pack_across(head->keys, &call->key, (int)call->dtype, b, g, 0, call->keys, call->dim, head->scratch);
    if (head->values)
        pack_along(head->values, &call->value, (int)call->dtype, b, g, 0, call->keys, call->value_dim, head->scratch);
}

typedef struct {  // a strip of rows meets a tile of keys
    int64_t b, h, row, rows;  // row: its first; at: where the strip begins in the block
    int64_t at, key, width;
} Meeting;

static void meet(const Call *call, const Plan *plan, Attend *own, const Head *head, Panels value, Meeting m) {
    int64_t n = up_to(m.width, ALIGNED);
    REAL *out = own->out + m.at * plan->out_step;
    Row *rows = own->rows + m.at;
    Vec *sums = own->sums + m.at * HELD;
    Sight sight[MAX_ROWS];
    Vec tops[MAX_ROWS];
    int few = has_few_keys(call), plain = call->mask_dtype == NONE && !call->softcap && !few;
    for (int r = 0; r < MAX_ROWS; r++) tops[r] = splat(-INFINITY);
    if (few)
        turn_few(call, own->few + m.at, own->share + m.at, m.rows, own->z);
    else
        scores(call, (int)m.rows, own->query + m.at / MAX_ROWS * plan->strip, own->share + m.at, call->dim,
               across_from(head->keys, m.key, call->dim), n, own->z, plain ? tops : NULL);
    // two rounds: the largest of one row is found while that of another is still on its way through the processor
    for (int64_t r = 0; r < m.rows; r++) {
        int64_t i = m.row + r, last = last_key(call, i) - m.key;
        sight[r] = (Sight){own->z + r * TILE_STEP, n, m.key, first_key(call, i) - m.key,
                           last < m.width ? last : m.width, NULL, NULL};
        if (plain && sight[r].from <= 0 && sight[r].to == sight[r].n) sight[r].top = tops + r;
        if (call->mask_dtype != NONE)
            sight[r].bias = r && !call->mask.step[2] ? own->bias : bias_of(call, m.b, m.h, i, m.key, m.width,
                                                                         own->bias + r * TILE_STEP);
        look(call, plan->needs, rows + r, sums + r * HELD, sight[r], out + r * plan->out_step,
             call->output ? plan->out_step : 0);
    }
    for (int64_t r = 0; r < m.rows; r++) count_in(plan->needs, rows + r, sums + r * HELD, sight[r]);
    if (call->dropout > 0 && call->output)
        for (int64_t r = 0; r < m.rows; r++) {
            REAL *z = sight[r].z;
            coins(own->keep, call, (m.b * call->heads + m.h) * call->rows + m.row + r, m.key, m.width);
            for (int64_t j = 0; j < m.width; j++) z[j] *= own->keep[j];
        }
    if (call->output)
        weigh(call, call->dtype == BF16 && !call->output_low ? 1 : 2, (int)m.rows, own->z, m.width, panels_from(value, m.key),
              plan->out_step / PANEL, out, plan->out_step, own->weights);
}

static void attend_block(const Call *call, const Plan *plan, Attend *own, const Head *head, int64_t b, int64_t h,
                         int64_t first, int64_t last) {
    int64_t rows = last - first;
    Panels value = packed_panels(head->values, call->value_dim);
#if !TILES
    int64_t g = h / (call->heads / call->groups);
    if (plan->values_in_place) value = (Panels){(const REAL *)place(&call->value, (int)call->dtype, b, g, 0), call->value.step[2]};
#endif
    if (has_few_keys(call))
        few_scores(call, b, h, first, last, head->keys, own->share, own->few, own->query);
    else
        pack_queries(own->query, call, b, h, first, last, own->share, own->scratch);
    if (call->output) memset(own->out, 0, up_to(rows, MAX_ROWS) * plan->out_step * sizeof(REAL));
    for (int64_t r = 0; r < rows; r++) begin_row(own->rows + r);

    int64_t begin = first_key(call, first) / PANEL * PANEL, end = last_key(call, last - 1);
    for (int64_t key = begin; key < end; key += TILE_KEYS)
        for (int64_t at = 0; at < rows; at += MAX_ROWS) {
            Meeting m = {b, h, first + at, rows - at < MAX_ROWS ? rows - at : MAX_ROWS, at, key, 0};
            int64_t from = first_key(call, m.row) / PANEL * PANEL, to = last_key(call, m.row + m.rows - 1);
            if (from > m.key) m.key = from;
            if (to > key + TILE_KEYS) to = key + TILE_KEYS;
            m.width = to - m.key;
            if (m.width > 0) meet(call, plan, own, head, value, m);
        }
    int64_t at = (b * call->heads + h) * call->rows + first;
    finish_rows(call, plan->needs, own->rows, own->sums, at, rows, own->share);
    for (int64_t r = 0; call->output && r < rows; r++)
        put_output(call, at + r, own->out + r * plan->out_step, own->share[r]);
}

static void attend_rows(const Job *job, void *own, int64_t b, int64_t h, int64_t block, const Head *head) {
    const Plan *plan = job->shared;
    int64_t first = block * plan->block, last = first + plan->block;
    attend_block(job->call, plan, own, head, b, h, first, last < job->call->rows ? last : job->call->rows);
}

static Attend own_attend(const Job *job, void *memory) {
    Space space = {.at = memory};
    return take_attend(&space, job->call, job->shared);
}

static void attend_head(const Job *job, void *memory, int64_t item) {
    const Call *call = job->call;
    const Plan *plan = job->shared;
    Attend own = own_attend(job, memory);
    int64_t b = item / call->groups, g = item % call->groups, repeat = call->heads / call->groups;
    pack_head(call, &own.head, b, g);
    for (int64_t h = g * repeat; h < (g + 1) * repeat; h++)
        for (int64_t block = 0; block < plan->blocks; block++) attend_rows(job, &own, b, h, block, &own.head);
}

static void pack_item(const Job *job, void *memory, int64_t item) {
    (void)memory;
    const Plan *plan = job->shared;
    pack_head(job->call, plan->heads + item, item / job->call->groups, item % job->call->groups);
}

static void attend_item(const Job *job, void *memory, int64_t item) {
    const Call *call = job->call;
    const Plan *plan = job->shared;
    Attend own = own_attend(job, memory);
    int64_t pairs = call->batch * call->heads, pair = item % pairs;
    int64_t b = pair / call->heads, h = pair % call->heads, g = h / (call->heads / call->groups);
    // the longest first: under a causal band the last rows see the most keys
    attend_rows(job, &own, b, h, plan->blocks - 1 - item / pairs, plan->heads + b * call->groups + g);
}

static int forward(const Call *call) {
    int64_t heads = call->batch * call->groups;
    if (!heads || !call->rows) return 0;
#if TILES
    if (call->dtype == F32 || too_short(call, MAX_ROWS / 2)) return UNFIT;
#else
    if (is_decode(call)) return decode(call);
#endif
    int small = call->keys * (call->dim + call->value_dim) * (int64_t)sizeof(REAL) <= CACHE;
    Plan plan = {
        .needs = needs_of(call),
        .block = (small ? 4 : MOST_STRIPS) * MAX_ROWS,
        .strip = left_size(MAX_ROWS, call->dim),
        .out_step = up_to(call->value_dim, PANEL),
        .values_in_place = !call->output || lies_in_panels(&call->value, (int)call->dtype, call->value_dim),
    };
    plan.blocks = (call->rows + plan.block - 1) / plan.block;
    Job job = {.call = call, .shared = &plan, .item = attend_head, .items = heads};
    Space count = {0};
    if (heads % call->threads == 0 || heads >= 8 * call->threads) {
        take_attend(&count, call, &plan);
        job.each = count.used;
        return run(&job);
    }
    // few heads: all are packed first, then workers take blocks of rows
    take_head(&count, call, plan.values_in_place);
    char *packed = attemper_take(count.used * heads, (int)call->poison);
    plan.heads = malloc(heads * sizeof(Head));
    int failed = packed && plan.heads ? 0 : NO_MEMORY;
    for (int64_t i = 0; !failed && i < heads; i++) {
        Space space = {.at = packed + i * count.used};
        plan.heads[i] = take_head(&space, call, plan.values_in_place);
    }
    if (!failed) {
        job.item = pack_item;
        failed = run(&job);
    }
    if (!failed) {
        Space each = {0};
        take_attend(&each, call, &plan);
        job.each = each.used;
        job.item = attend_item;
        job.items = call->batch * call->heads * plan.blocks;
        failed = run(&job);
    }
    attemper_give(packed);
    free(plan.heads);
    return failed;
}
