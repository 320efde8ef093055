// fold.c: sums the rows of a call by head, in one pass, for a watch and for a tally. ../../../heads.py names the sums and has the
// definition. torch would need about thirty small ops for it in every watched layer.
#define REAL_IS_FLOAT 1
#define VECTOR_BYTES 16  // every processor has these: this file is compiled once, not for each instruction set
#include "block.h"
#include "blocks/simd.h"

enum {  // as heads.COLUMNS lists them
    COLUMN_ROWS, COLUMN_VISIBLE, COLUMN_MEAN, COLUMN_VARIANCE, COLUMN_LSE, COLUMN_ENTROPY, COLUMN_P2, COLUMN_TOP_WEIGHT,
    COLUMN_EFFECTIVE_KEYS, COLUMN_EVENNESS_ROWS, COLUMN_EVENNESS, COLUMN_JACOBIAN_TRACE, COLUMN_SATURABLE_ROWS,
    COLUMN_SATURATED, COLUMN_COUNT,
};

typedef struct {
    const int32_t *visible;  // (B, H, L), contiguous, and so are the others
    const float *mean, *variance, *peak, *lse, *entropy, *sum_p2;
    const float *lse_low;  // the rounding error of lse; NULL: not known
    const char *keep;      // which rows count, with its strides over batch, head and row; NULL: all rows
    int64_t keep_step[3];  // in bytes
    int64_t batch, heads, rows;
    double *found;  // (H, COLUMN_COUNT + 1): the sums of a head, then its peak
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
    Vec mean = sign[0], variance = sign[1], peak = sign[2], lse = sign[3], entropy = sign[4], sum_p2 = sign[5], low = sign[6];
    use &= visible > 0;
    count(head, COLUMN_ROWS, use);
    head->sums[COLUMN_VISIBLE] += __builtin_convertvector(visible & use, Double4);
    add(head, COLUMN_MEAN, keep_where(use, mean));
    add(head, COLUMN_VARIANCE, keep_where(use, variance));
    add(head, COLUMN_LSE, keep_where(use, lse));
    add(head, COLUMN_ENTROPY, keep_where(use, entropy));
    add(head, COLUMN_P2, keep_where(use, sum_p2));
    // a row whose logits are all -inf has no weights
    IntVec weighs = use & (lse != -INFINITY);
    Vec top = keep_where(weighs, exp_above(bounded(peak - lse - low)));
    add(head, COLUMN_TOP_WEIGHT, top);
    add(head, COLUMN_EFFECTIVE_KEYS, keep_where(weighs, exp_above(bounded(entropy))));
    add(head, COLUMN_JACOBIAN_TRACE, keep_where(use & (sum_p2 != 0), 1 - sum_p2));
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
    const float *const signs[] = {fold->mean, fold->variance, fold->peak, fold->lse, fold->entropy, fold->sum_p2, fold->lse_low};
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

static void fold_all(const Fold *fold) {
    for (int64_t number = 0; number < fold->heads; number++) {
        Head head = {.peak = splat(-INFINITY)};
        for (int64_t batch = 0; batch < fold->batch; batch++) fold_head(&head, fold, batch, number);
        for (int column = 0; column < COLUMN_COUNT; column++) {
            double total = 0;
            for (int i = 0; i < LANES; i++) total += head.sums[column][i];
            fold->found[number * (COLUMN_COUNT + 1) + column] = total;
        }
        float top = head.peak[0];
        for (int i = 1; i < LANES; i++) top = top != top || top >= head.peak[i] ? top : head.peak[i];
        fold->found[number * (COLUMN_COUNT + 1) + COLUMN_COUNT] = top;
    }
}

// Read the signs of a call, visible … sum_p2 and lse_low, which may be None: a block of all of them, or a tuple of tensors, (B, H, Lq) and
// contiguous. 0 with an error set.
static int read_signs(PyObject *signs, Fold *fold, int64_t shape[3]) {
    const void *at[8] = {0};
    if (!block_read(signs, at, shape)) {
        for (int i = 0; i < 8; i++) {
            PyObject *sign = PyTuple_Check(signs) ? PyTuple_GetItem(signs, i) : Py_None;
            View view;
            if (!sign) return 0;
            if (i == 7 && sign == Py_None) continue;
            int found = tensor_read(sign, &view);
            if (found && i == 0) memcpy(shape, view.shape, 3 * sizeof *shape);
            if (!found || !has_shape(&view, i ? F32 : -32, 3, shape) || !is_contiguous(&view)) {
                PyErr_Format(PyExc_TypeError, "fold(): sign %d is not as a kernel writes it", i);
                return 0;
            }
            at[i] = view.at;
        }
    }
    fold->visible = at[0], fold->mean = at[1], fold->variance = at[2], fold->peak = at[3], fold->lse = at[4];
    fold->entropy = at[5], fold->sum_p2 = at[6], fold->lse_low = at[7];
    fold->batch = shape[0], fold->heads = shape[1], fold->rows = shape[2];
    return 1;
}

// fold(signs, keep, found, first, saturable_keys, saturated_weight): sum the rows of each head. `keep` is boolean, (B, H, Lq), or None.
// `found` is (rows, columns + 1): from the row `first` on, each gets the sums of a head, and its peak.
METHOD(py_fold) {
    (void)self;
    Fold fold = {0};
    View keep, found;
    int64_t shape[3];
    if (!takes("fold", 6, count) || !read_signs(args[0], &fold, shape)) return NULL;
    if (args[1] != Py_None) {
        if (!tensor_read(args[1], &keep) || !has_shape(&keep, BOOL, 3, shape))
            return PyErr_Format(PyExc_TypeError, "fold(): `keep` does not fit the signs");
        fold.keep = keep.at;
        memcpy(fold.keep_step, keep.step, sizeof fold.keep_step);
    }
    const int64_t first = PyLong_AsLongLong(args[3]);
    fold.saturable_keys = PyLong_AsLongLong(args[4]), fold.saturated_weight = PyFloat_AsDouble(args[5]);
    if (PyErr_Occurred()) return NULL;
    const int read = tensor_read(args[2], &found);
    const int64_t room[2] = {read && found.dims == 2 ? found.shape[0] : 0, COLUMN_COUNT + 1};
    if (!read || !has_shape(&found, F64, 2, room) || !is_contiguous(&found) || first < 0 || first + fold.heads > room[0])
        return PyErr_Format(PyExc_TypeError, "fold(): `found` has no room for the sums");
    fold.found = (double *)found.at + first * room[1];
    Py_BEGIN_ALLOW_THREADS;
    fold_all(&fold);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

enum {  // the arguments of op_tally_packed, and what is bound to it: see tally.py
    TALLY, LSE_ROWS, LSE_LOW, SIGNS_PACKED, KEEP, GRADE, ABOUT, ARG_COUNT = ABOUT + 16,
    OTHERWISE = 0, KNOWN, SATURABLE_KEYS, SATURATED_WEIGHT,
};
enum { KINDS = 2, GRADES = 3, PEAK_AT = COLUMN_COUNT, CALLS_AT, NUMBER_AT, WIDTH };  // of a tally

// The number of a call's description and its kind, if such a call was described before; borrowed. NULL, maybe with an error set.
static PyObject *number_of(PyObject *known, PyObject *const *args, const int64_t shape[3]) {
    PyObject *about = PyTuple_New(ARG_COUNT - ABOUT + 1), *found = NULL;
    for (int i = ABOUT; about && i < ARG_COUNT; i++)
        if (PyTuple_SetItem(about, i - ABOUT, Py_NewRef(args[i]))) Py_CLEAR(about);
    PyObject *sizes = Py_BuildValue("LLL", (long long)shape[0], (long long)shape[1], (long long)shape[2]);
    if (about && sizes && !PyTuple_SetItem(about, ARG_COUNT - ABOUT, sizes)) found = PyDict_GetItemWithError(known, about);
    Py_XDECREF(about);
    return found;
}

// Read the signs of a call from its packed tensor, and which rows count; 0 if they are not as a kernel of the CPU writes them.
static int read_packed(PyObject *const *args, Fold *fold) {
    View lse, low, packed, keep;
    int64_t shape[3];
    if (!tensor_read(args[LSE_ROWS], &lse) || lse.dims != 3) return 0;
    memcpy(shape, lse.shape, sizeof shape);
    const int64_t each = (shape[0] * shape[1] * shape[2] + 3) / 4 * 4, all = 6 * each, by_row[] = {shape[0], shape[2]};
    if (!has_shape(&lse, F32, 3, shape) || !tensor_read(args[LSE_LOW], &low) || !has_shape(&low, F32, 3, shape) ||
        !tensor_read(args[SIGNS_PACKED], &packed) || !has_shape(&packed, F32, 1, &all) || !is_contiguous(&lse) ||
        !is_contiguous(&low) || !is_contiguous(&packed))
        return 0;
    const float *sign = (const float *)packed.at;
    *fold = (Fold){.visible = (const int32_t *)sign, .mean = sign + each, .variance = sign + 2 * each, .peak = sign + 3 * each,
                   .lse = (const float *)lse.at, .entropy = sign + 4 * each, .sum_p2 = sign + 5 * each,
                   .lse_low = (const float *)low.at, .batch = shape[0], .heads = shape[1], .rows = shape[2]};
    if (args[KEEP] == Py_None) return 1;
    if (!tensor_read(args[KEEP], &keep) || !has_shape(&keep, BOOL, 2, by_row)) return 0;
    fold->keep = keep.at, fold->keep_step[0] = keep.step[0], fold->keep_step[2] = keep.step[1];
    return 1;
}

// Add the sums and the peak of each head to its row of a tally.
static void add_to(double *row, const Fold *fold, int64_t number) {
    for (int64_t head = 0; head < fold->heads; head++, row += WIDTH) {
        const double *sums = fold->found + head * (COLUMN_COUNT + 1), peak = sums[COLUMN_COUNT];
        for (int i = 0; i < COLUMN_COUNT; i++) row[i] += sums[i];
        if (!row[CALLS_AT] || peak > row[PEAK_AT] || peak != peak) row[PEAK_AT] = peak;
        row[CALLS_AT] += 1, row[NUMBER_AT] = (double)number;
    }
}

// As _tally_packed of ../../../operation/tally.py
PyObject *op_tally_packed(PyObject *given, PyObject *const *args, Py_ssize_t count) {
    Fold fold;
    View tally;
    PyObject *known = NULL;
    if (!takes("tally_packed", ARG_COUNT, count)) return NULL;
    PyObject *task = PyObject_CallNoArgs(bound.graph_task);
    long long running = task ? PyLong_AsLongLong(task) : -1, grade = PyLong_AsLongLong(args[GRADE]);
    Py_XDECREF(task);
    if (running != -1) Py_RETURN_NONE;  // computed again for a checkpoint: it was counted in the forward
    int fits = judge(args, 4) && read_packed(args, &fold) && tensor_read(args[TALLY], &tally) && is_contiguous(&tally) &&
               has_shape(&tally, F64, 4, (int64_t[]){KINDS, GRADES, tally.shape[2], WIDTH}) && fold.heads <= tally.shape[2] &&
               grade >= 0 && grade < GRADES;
    if (fits) known = number_of(PyTuple_GetItem(given, KNOWN), args, (int64_t[]){fold.batch, fold.heads, fold.rows});
    double *memory = known ? attemper_take((size_t)(fold.heads * (COLUMN_COUNT + 1)) * sizeof *memory, 0) : NULL;
    if (!memory || PyErr_Occurred()) {
        attemper_give(memory);
        return hand_on(PyTuple_GetItem(given, OTHERWISE), args, count);
    }
    const int64_t cross = PyUnicode_CompareWithASCIIString(PyTuple_GetItem(known, 1), "cross") == 0;
    const int64_t number = PyLong_AsLongLong(PyTuple_GetItem(known, 0));
    fold.found = memory;
    fold.saturable_keys = PyLong_AsLongLong(PyTuple_GetItem(given, SATURABLE_KEYS));
    fold.saturated_weight = PyFloat_AsDouble(PyTuple_GetItem(given, SATURATED_WEIGHT));
    Py_BEGIN_ALLOW_THREADS;
    fold_all(&fold);
    Py_END_ALLOW_THREADS;
    add_to((double *)tally.at + (cross * GRADES + grade) * tally.shape[2] * WIDTH, &fold, number);
    attemper_give(memory);
    Py_RETURN_NONE;
}
