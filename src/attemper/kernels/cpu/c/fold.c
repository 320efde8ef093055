// fold.c: sums the rows of a call by head, in one pass. ../../../heads.py names the sums and has the definition. torch would need
// about thirty small ops for it in every watched layer.
#define REAL_IS_FLOAT 1
#define VECTOR_BYTES 16  // every processor has these: this file is compiled once, not for each instruction set
#include "blocks/simd.h"
#include "call.h"

enum {  // as heads.COLUMNS lists them
    COLUMN_ROWS, COLUMN_VISIBLE, COLUMN_MEAN, COLUMN_VARIANCE, COLUMN_LSE, COLUMN_ENTROPY, COLUMN_P2, COLUMN_TOP_WEIGHT,
    COLUMN_EFFECTIVE_KEYS, COLUMN_EVENNESS_ROWS, COLUMN_EVENNESS, COLUMN_JACOBIAN_TRACE, COLUMN_SATURABLE_ROWS,
    COLUMN_SATURATED, COLUMN_COUNT,
};
const int64_t attemper_fold_columns = COLUMN_COUNT;

typedef struct {  // ../native.py has the same list
    const int32_t *visible;  // (B, H, L), contiguous, and so are the others
    const float *mean, *variance, *peak, *lse, *entropy, *p2;
    const float *lse_low;  // the rounding error of lse; NULL: not known
    const char *keep;      // which rows count, with its strides over batch, head and row; NULL: all rows
    int64_t keep_step[3];  // in bytes
    int64_t batch, heads, rows;
    double *sums, *peaks;  // (H, COLUMN_COUNT), (H)
    int64_t saturable_keys;
    double saturated_weight;
} Fold;

typedef double Double4 __attribute__((vector_size(32)));

typedef struct {
    Double4 sums[COLUMN_COUNT];
    Vec peak;
} Head;

INLINE void add(Head *head, int column, Vec values) { head->sums[column] += __builtin_convertvector(values, Double4); }
INLINE void count(Head *head, int column, IntVec rows) { add(head, column, keep_where(rows, splat(1))); }

// Four rows; `use` is -1 for those that count.
INLINE void add_rows(Head *head, const Fold *fold, IntVec use, IntVec visible, const Vec sign[7]) {
    Vec mean = sign[0], variance = sign[1], peak = sign[2], lse = sign[3], entropy = sign[4], p2 = sign[5], low = sign[6];
    use &= visible > 0;
    count(head, COLUMN_ROWS, use);
    head->sums[COLUMN_VISIBLE] += __builtin_convertvector(visible & use, Double4);
    add(head, COLUMN_MEAN, keep_where(use, mean));
    add(head, COLUMN_VARIANCE, keep_where(use, variance));
    add(head, COLUMN_LSE, keep_where(use, lse));
    add(head, COLUMN_ENTROPY, keep_where(use, entropy));
    add(head, COLUMN_P2, keep_where(use, p2));
    // a row whose logits are all -inf has no weights
    IntVec weighs = use & (lse != -INFINITY);
    Vec top = keep_where(weighs, exp_above(bounded(peak - lse - low)));
    add(head, COLUMN_TOP_WEIGHT, top);
    add(head, COLUMN_EFFECTIVE_KEYS, keep_where(weighs, exp_above(bounded(entropy))));
    add(head, COLUMN_JACOBIAN_TRACE, keep_where(use & (p2 != 0), 1 - p2));
    IntVec choosing = use & (visible > 1), saturable = use & (visible >= (Int)fold->saturable_keys);
    count(head, COLUMN_EVENNESS_ROWS, choosing);
    add(head, COLUMN_EVENNESS, keep_where(choosing, entropy / log_of(__builtin_convertvector(visible, Vec))));
    count(head, COLUMN_SATURABLE_ROWS, saturable);
    count(head, COLUMN_SATURATED, saturable & (top > (float)fold->saturated_weight));
    // NaN counts as the largest, and stays
    peak = choose(use, peak, splat(-INFINITY));
    head->peak = choose((head->peak != head->peak) | (head->peak >= peak), head->peak, peak);
}

// The rows of one head in one sequence, four at a time.
static void fold_head(Head *head, const Fold *fold, int64_t batch, int64_t number) {
    const float *const signs[] = {fold->mean, fold->variance, fold->peak, fold->lse, fold->entropy, fold->p2, fold->lse_low};
    const int count = fold->lse_low ? 7 : 6;
    const int64_t start = (batch * fold->heads + number) * fold->rows, step = fold->keep_step[2];
    const char *keep = fold->keep ? fold->keep + batch * fold->keep_step[0] + number * fold->keep_step[1] : NULL;
    for (int64_t row = 0; row < fold->rows; row += LANES) {
        IntVec use = {-1, -1, -1, -1}, visible = {0};
        Vec sign[7] = {{0}};
        int64_t some = fold->rows - row < LANES ? fold->rows - row : LANES, at = start + row;
        if (keep)
            for (int64_t i = 0; i < some; i++) use[i] = -(keep[(row + i) * step] != 0);
        if (some == LANES) {
            memcpy(&visible, fold->visible + at, sizeof visible);
            for (int i = 0; i < count; i++) sign[i] = load(signs[i] + at);
        } else {  // rows past the end see no key
            memcpy(&visible, fold->visible + at, some * sizeof(int32_t));
            for (int i = 0; i < count; i++) memcpy(&sign[i], signs[i] + at, some * sizeof(float));
        }
        add_rows(head, fold, use, visible, sign);
    }
}

#define STRUCTURE Fold
const Field attemper_fold_fields[] = {
    FIELD(visible), FIELD(mean), FIELD(variance), FIELD(peak), FIELD(lse), FIELD(entropy), FIELD(p2), FIELD(lse_low),
    FIELD(keep), FIELD(keep_step), FIELD(batch), FIELD(heads), FIELD(rows), FIELD(sums), FIELD(peaks), FIELD(saturable_keys),
    FIELD(saturated_weight), {NULL, sizeof(Fold)},
};

void attemper_fold(const Fold *fold) {
    for (int64_t number = 0; number < fold->heads; number++) {
        Head head = {.peak = splat(-INFINITY)};
        for (int64_t batch = 0; batch < fold->batch; batch++) fold_head(&head, fold, batch, number);
        for (int column = 0; column < COLUMN_COUNT; column++) {
            double total = 0;
            for (int i = 0; i < LANES; i++) total += head.sums[column][i];
            fold->sums[number * COLUMN_COUNT + column] = total;
        }
        float top = head.peak[0];
        for (int i = 1; i < LANES; i++) top = top != top || top >= head.peak[i] ? top : head.peak[i];
        fold->peaks[number] = top;
    }
}
