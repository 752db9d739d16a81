// A rank is lost: the other ranks' waits end and name it, every later call repeats the error, and
// the survivors continue.

#include <string.h>
#include <unistd.h>

#include "check.h"

static void lost(sidelane_status_t status) {
    REQUIRE(status == SIDELANE_ERROR_WORLD);
    REQUIRE(strstr(sidelane_last_message(), "rank 1 is lost"));
}

int main(void) {
    sidelane_world_t *world, *rebuilt;
    sidelane_group_t *group;
    sidelane_window_t *window;
    CHECK(sidelane_world_from_env(NULL, &world));
    CHECK(sidelane_world_group(world, NULL, 0, &group));
    CHECK(sidelane_group_window(group, 64, &window));
    sidelane_world_info_t info = {.size = sizeof info};
    CHECK(sidelane_world_info(world, &info));
    if (info.rank == 1) {
        // The others have come so far.
        CHECK(sidelane_window_wait(window, 0, 1));
        CHECK(sidelane_window_wait(window, 2, 1));
        _exit(0); // without a word
    }

    CHECK(sidelane_window_signal(window, 1, 1));
    lost(sidelane_window_wait(window, 1, 1));
    lost(sidelane_world_check(world));
    lost(sidelane_window_put(window, 1, 0, &info, sizeof info));
    CHECK(sidelane_window_close(window));
    CHECK(sidelane_group_close(group));

    CHECK(sidelane_world_rebuild(world, 60000, 2, &rebuilt));
    CHECK(sidelane_world_info(rebuilt, &info));
    REQUIRE(info.ranks == 2 && info.epoch == 1);
    uint32_t previous[3] = {9, 9, 9};
    REQUIRE(sidelane_world_previous_ranks(rebuilt, previous, 3) == SIDELANE_ERROR_ARGUMENT);
    CHECK(sidelane_world_previous_ranks(rebuilt, previous, 2));
    REQUIRE(previous[0] == 0 && previous[1] == 2);
    lost(sidelane_world_check(world));
    CHECK(sidelane_world_close(world));
    CHECK(sidelane_world_group(rebuilt, NULL, 0, &group));
    CHECK(sidelane_group_window(group, 64, &window));
    CHECK(sidelane_window_barrier(window));
    printf("rank %u of %u goes on\n", info.rank, info.ranks);
    CHECK(sidelane_window_close(window));
    CHECK(sidelane_group_close(group));
    CHECK(sidelane_world_close(rebuilt));
    return 0;
}
