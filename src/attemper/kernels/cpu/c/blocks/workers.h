// workers.h: memory and threads. One block of memory per call, a share for each worker; torch's threads take items one by one,
// so that a slow core takes fewer.

typedef struct {
    char *at;  // NULL only counts
    size_t used;
} Space;

static void *take(Space *space, size_t bytes) {
    bytes = (size_t)up_to((int64_t)bytes, 64);
    void *found = space->at ? space->at + space->used : NULL;
    space->used += bytes;
    return found;
}
#define TAKE(SPACE, TYPE, COUNT) ((TYPE *)take(SPACE, (size_t)(COUNT) * sizeof(TYPE)))

typedef struct Job Job;
struct Job {
    const Call *call;
    void *shared;                                    // what all workers read
    void (*item)(const Job *, void *own, int64_t i); // do item i with a worker's own memory
    char *memory;
    size_t each;  // bytes per worker
    int64_t items, next, workers;
    int unfit;  // set where an input does not suit tiles
};

static void worker(int64_t begin, int64_t end, void *context) {
    (void)begin, (void)end;
    Job *job = context;
    int64_t self = __atomic_fetch_add(&job->workers, 1, __ATOMIC_RELAXED);
#if defined(__x86_64__)
    unsigned state = _mm_getcsr();
    // denormal results become 0, because some processors take a hundred cycles for each. Denormal inputs stay, whatever
    // torch.set_flush_denormal says: the conversion from half precision goes through them.
    _mm_setcsr((state | 0x8000) & ~0x40u);
#elif defined(__aarch64__)
    uint64_t state;  // denormals stay, results too: they cost nothing here
    __asm__ volatile("mrs %0, fpcr" : "=r"(state));
    __asm__ volatile("msr fpcr, %0" : : "r"(state & ~((uint64_t)1 << 24)));
#endif
#if TILES
    unfit = 0;
    begin_tiles();
#endif
    for (int64_t i; (i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->items;) {
        job->item(job, job->memory + self * job->each, i);
#if TILES
        if (!unfit) continue;
        __atomic_store_n(&job->next, job->items, __ATOMIC_RELAXED);  // no more
        __atomic_store_n(&job->unfit, 1, __ATOMIC_RELAXED);
#endif
    }
#if TILES
    _tile_release();
#endif
#if defined(__x86_64__)
    _mm_setcsr(state);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(state));
#endif
}

// Run the items of a job; 0, NO_MEMORY, NO_THREADS or UNFIT.
static int run(Job *job) {
    const Call *call = job->call;
    int64_t workers = call->threads < job->items ? call->threads : job->items;
    if (workers < 1) return 0;
    job->each = (size_t)up_to((int64_t)job->each, 64);
    job->memory = attemper_take(job->each * workers, (int)call->poison);
    if (!job->memory) return NO_MEMORY;
    job->next = job->workers = 0;
    int failed = 0;
    if (workers == 1)
        worker(0, 1, job);
    else
        failed = call->parallel(0, workers, 1, worker, job) ? NO_THREADS : 0;
    attemper_give(job->memory);
    return failed ? failed : job->unfit ? UNFIT : 0;
}
