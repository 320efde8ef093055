// unseen.h: the gradients of keys that no row sees, which native.c left out of the call.

// The keys that no row sees have no gradient; each part clears its share of them.
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
