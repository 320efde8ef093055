// sizes.h: how much is worked on at a time, with vectors and on tiles alike.

enum {
    TILE_KEYS = 512,             // keys of a tile
    TILE_STEP = TILE_KEYS + 16,  // from row to row of a tile; not a power of two, which would crowd one set of the cache
    BLOCK_ROWS = 96,             // rows that are differentiated together, with BACK_KEYS keys
};

INLINE int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
