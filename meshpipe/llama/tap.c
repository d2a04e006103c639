/* Called by ggml for every node of a graph: takes one named tensor's rows and stops the graph there.
 * The functions come in through the struct, so that this file needs no header and no library. */
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

struct tap {
    const char *name;
    const char *(*name_of)(const void *tensor);
    size_t (*bytes_of)(const void *tensor);
    void (*copy)(const void *tensor, void *to, size_t offset, size_t bytes);
    char *rows;
    size_t capacity;
    size_t used; /* grows past capacity when rows do not fit, which the caller checks */
};

bool meshpipe_tap(const void *tensor, bool ask, void *data) {
    struct tap *tap = data;
    if (ask)
        return strcmp(tap->name_of(tensor), tap->name) == 0;
    size_t bytes = tap->bytes_of(tensor);
    if (tap->used + bytes <= tap->capacity)
        tap->copy(tensor, tap->rows + tap->used, 0, bytes);
    tap->used += bytes;
    return false;
}

struct watch {
    volatile int abort;
    volatile long long steps; /* nodes computed so far: whoever watches sees that the decode is alive */
};

bool meshpipe_abort(void *data) {
    struct watch *watch = data;
    watch->steps++;
    return watch->abort != 0;
}
