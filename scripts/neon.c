// neon.c: runs calls of the kernel that arrive on stdin, and writes their results to stdout; scripts/neon.py sends them. It needs no
// Python, so that a machine whose Python is not here can be emulated.
//
//   first   the names of the variants that run here, in one line
//   call    {size of Call, pass, variant, number of arrays}, a Call, then of each array {place of its address in Call, bytes, offset from
//           an aligned address, kind} and its bytes, unless it is only written
//   reply   0 or why the call failed, then the bytes of each array that is written
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/attemper/kernels/cpu/c/call.h"

enum { MOST_ARRAYS = 40, MOST_THREADS = 64, READ = 0, WRITTEN = 1, BOTH = 2 };

static void get(void *to, size_t bytes) {
    if (fread(to, 1, bytes, stdin) != bytes) exit(feof(stdin) ? 0 : 1);
}

typedef struct {
    Work work;
    void *context;
} Share;
static void *run_share(void *given) {
    Share *share = given;
    share->work(0, 1, share->context);
    return NULL;
}
static int parallel(int64_t begin, int64_t end, int64_t grain, Work work, void *context) {
    (void)grain;
    pthread_t threads[MOST_THREADS];
    Share share = {work, context};
    if (end - begin > MOST_THREADS) return 1;
    for (int64_t i = begin; i < end; i++)
        if (pthread_create(&threads[i - begin], NULL, run_share, &share)) exit(1);
    for (int64_t i = begin; i < end; i++) pthread_join(threads[i - begin], NULL);
    return 0;
}

int main(void) {
    for (int i = 0; i <= attemper_best(); i++) printf("%s%s", i ? " " : "", attemper_variants[i]);
    printf("\n");
    for (;;) {
        int64_t head[4], array[MOST_ARRAYS][4];
        char *memory[MOST_ARRAYS];
        Call call;
        fflush(stdout);
        get(head, sizeof head);
        if (head[0] != sizeof call || head[3] > MOST_ARRAYS) return 1;
        get(&call, sizeof call);
        call.parallel = parallel;
        for (int64_t i = 0; i < head[3]; i++) {
            get(array[i], sizeof array[i]);
            size_t bytes = (size_t)array[i][1];
            memory[i] = aligned_alloc(64, (bytes + (size_t)array[i][2]) / 64 * 64 + 64);
            if (!memory[i]) return 1;
            char *at = memory[i] + array[i][2];
            if (array[i][3] == WRITTEN)
                memset(at, 0xff, bytes);  // NaN
            else
                get(at, bytes);
            memcpy((char *)&call + array[i][0], &at, sizeof at);
        }
        int64_t failed = (head[1] ? attemper_backward : attemper_forward)(&call, (int)head[2]);
        fwrite(&failed, sizeof failed, 1, stdout);
        for (int64_t i = 0; i < head[3]; i++) {
            if (array[i][3] != READ) fwrite(memory[i] + array[i][2], 1, (size_t)array[i][1], stdout);
            free(memory[i]);
        }
    }
}
