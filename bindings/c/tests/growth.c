// A world grows: a spare with other options is refused, one that cannot build its part costs the
// world nothing, nor does a rank that cannot, and then the spare is in.

#include <signal.h>
#include <string.h>
#include <sys/resource.h>

#include "check.h"

// Two ranks begin. The third process of the job is a spare.
enum { RANKS = 2, SPARE = 2 };

static const uint64_t PATIENCE_MS = 120000;

// With a limit of a byte no file can grow, and a heap is one.
static void allow_heaps(int allowed) {
    struct rlimit limit;
    REQUIRE(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    limit.rlim_cur = allowed ? limit.rlim_max : 1;
    REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);
}

static void failed(sidelane_status_t status, sidelane_status_t expected, const char *said) {
    if (status != expected || !strstr(sidelane_last_message(), said)) {
        fprintf(stderr, "%s, not %s: %s\n", sidelane_status_name(status), sidelane_status_name(expected),
                sidelane_last_message());
        exit(1);
    }
}

static sidelane_world_t *wait_as_spare(void) {
    sidelane_world_t *world;
    sidelane_world_options_t other = {.size = sizeof other, .heap = 16 << 20};
    failed(sidelane_world_spare(&other, PATIENCE_MS, &world), SIDELANE_ERROR_SETTINGS_DIFFER, "SIDELANE_HEAP");
    failed(sidelane_world_spare(NULL, 0, &world), SIDELANE_ERROR_ARGUMENT, "deadline_ms");
    allow_heaps(0);
    failed(sidelane_world_spare(NULL, PATIENCE_MS, &world), SIDELANE_ERROR_MEMORY, "");
    allow_heaps(1);
    // The growth that fails because of rank 1.
    REQUIRE(sidelane_world_spare(NULL, PATIENCE_MS, &world) != SIDELANE_OK);
    CHECK(sidelane_world_spare(NULL, PATIENCE_MS, &world));
    return world;
}

static sidelane_world_t *take_in(uint32_t rank) {
    sidelane_world_t *world, *grown;
    CHECK(sidelane_world_from_env(NULL, &world));
    failed(sidelane_world_grow(world, PATIENCE_MS, &grown), SIDELANE_ERROR_SPARE_LOST, "rank 2");
    allow_heaps(rank != 1);
    sidelane_status_t status = sidelane_world_grow(world, PATIENCE_MS, &grown);
    allow_heaps(1);
    if (rank == 1) {
        failed(status, SIDELANE_ERROR_MEMORY, "");
    } else {
        failed(status, SIDELANE_ERROR_NOT_GROWN, "rank 1");
    }
    CHECK(sidelane_world_check(world));
    CHECK(sidelane_world_grow(world, PATIENCE_MS, &grown));
    failed(sidelane_world_check(world), SIDELANE_ERROR_WORLD, "");
    CHECK(sidelane_world_close(world));
    return grown;
}

int main(void) {
    uint32_t place = (uint32_t)atoi(getenv("RANK"));
    setenv("WORLD_SIZE", "2", 1);
    setenv("LOCAL_WORLD_SIZE", "2", 1);
    if (place == SPARE) {
        // The number of any rank of the job.
        setenv("RANK", "0", 1);
        setenv("LOCAL_RANK", "0", 1);
    }
    signal(SIGXFSZ, SIG_IGN);
    sidelane_world_t *world = place == SPARE ? wait_as_spare() : take_in(place), *more;

    sidelane_world_info_t info = {.size = sizeof info};
    CHECK(sidelane_world_info(world, &info));
    REQUIRE(info.rank == place && info.ranks == RANKS + 1 && info.epoch > 0);
    uint32_t previous[3] = {9, 9, 9};
    CHECK(sidelane_world_previous_ranks(world, previous, 3));
    REQUIRE(previous[0] == 0 && previous[1] == 1 && previous[2] == UINT32_MAX);
    failed(sidelane_world_grow(world, 1, &more), SIDELANE_ERROR_NO_SPARE, "no spare");
    sidelane_group_t *group;
    sidelane_window_t *window;
    CHECK(sidelane_world_group(world, NULL, 0, &group));
    CHECK(sidelane_group_window(group, 64, &window));
    CHECK(sidelane_window_barrier(window));
    printf("rank %u of %u is in\n", info.rank, info.ranks);
    CHECK(sidelane_window_close(window));
    CHECK(sidelane_group_close(group));
    CHECK(sidelane_world_close(world));
    return 0;
}
