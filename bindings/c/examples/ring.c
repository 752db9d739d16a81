// A ring all-reduce with one-sided puts and signals alone.
//
//   step 0 .. n-2     my part goes right, what comes from the left is added to mine      (reduce-scatter)
//   step n-1 .. 2n-3  finished parts go round                                            (all-gather)
//
// Each step has an inbox of its own, so no rank overwrites bytes that its neighbor still reads.
//
//   sidelane launch --ranks-per-node 4 -- ./ring

#include "check.h"

enum { ELEMENTS = 10007 }; // no multiple of the number of ranks

int main(void) {
    sidelane_world_t *world = NULL;
    sidelane_group_t *group = NULL;
    sidelane_window_t *window = NULL;
    CHECK(sidelane_world_from_env(NULL, &world));
    CHECK(sidelane_world_group(world, NULL, 0, &group));
    sidelane_group_info_t info = {.size = sizeof info};
    CHECK(sidelane_group_info(group, &info));

    uint32_t rank = info.rank, ranks = info.ranks;
    uint32_t left = (rank + ranks - 1) % ranks, right = (rank + 1) % ranks;
    size_t most = (ELEMENTS + ranks - 1) / ranks; // elements of a part
    CHECK(sidelane_group_window(group, 2 * ranks * most * sizeof(float), &window));

    // Rank r holds r, 2r, 3r, ...: small integers, whose sums are exact in any order.
    static float data[ELEMENTS];
    float *incoming = malloc(most * sizeof(float));
    REQUIRE(incoming);
    for (int i = 0; i < ELEMENTS; i++) data[i] = (float)(rank * (i % 1000));

    CHECK(sidelane_window_barrier(window));
    for (uint32_t step = 0; step + 2 < 2 * ranks; step++) {
        size_t inbox = step * most * sizeof(float);
        // Counted backwards around the ring: what came in one step goes out in the next.
        size_t out = (rank + 2 * ranks - step) % ranks, in = (rank + 2 * ranks - step - 1) % ranks;
        size_t out_at = out * most < ELEMENTS ? out * most : ELEMENTS;
        size_t in_at = in * most < ELEMENTS ? in * most : ELEMENTS;
        size_t out_len = ELEMENTS - out_at < most ? ELEMENTS - out_at : most;
        size_t in_len = ELEMENTS - in_at < most ? ELEMENTS - in_at : most;
        CHECK(sidelane_window_put_signal(window, right, inbox, data + out_at, out_len * sizeof(float), step + 1));
        CHECK(sidelane_window_wait(window, left, step + 1));
        CHECK(sidelane_window_read(window, inbox, incoming, in_len * sizeof(float)));
        for (size_t i = 0; i < in_len; i++) {
            data[in_at + i] = step + 1 < ranks ? data[in_at + i] + incoming[i] : incoming[i];
        }
    }
    CHECK(sidelane_window_quiet(window));

    uint32_t of_all = ranks * (ranks - 1) / 2;
    for (int i = 0; i < ELEMENTS; i++) REQUIRE(data[i] == (float)(of_all * (i % 1000)));
    printf("rank %u of %u: the sum is right\n", rank, ranks);

    free(incoming);
    CHECK(sidelane_window_barrier(window));
    CHECK(sidelane_window_close(window));
    CHECK(sidelane_group_close(group));
    CHECK(sidelane_world_close(world));
    return 0;
}
