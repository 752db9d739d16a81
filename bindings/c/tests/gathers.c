// All-gather and reduce-scatter between four ranks, and a window of memory that the program made
// itself.

#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "refused.h"

enum { COLUMNS = 8, MOST = 4 };

uint32_t rank;

static uint32_t ranks;
static sidelane_group_t *group;
static sidelane_row_collective_t *rows;

static sidelane_tensor_t tensor(const void *data, uint64_t count) {
    return (sidelane_tensor_t){.data = (void *)data, .rows = count, .columns = COLUMNS, .dtype = SIDELANE_DTYPE_F32};
}

// Rank r has r rows, so rank 0 none: what rank r has is 10 r + row, in every column.
static float value(uint32_t of, uint32_t row) { return (float)(10 * of + row); }

static void gathered(sidelane_rows_t *all) {
    sidelane_rows_info_t info = {.size = sizeof info};
    CHECK(sidelane_rows_info(all, &info));
    REQUIRE(info.rows == ranks * (ranks - 1) / 2);
    const float *at = info.data;
    for (uint32_t of = 0; of < ranks; of++)
        for (uint32_t row = 0; row < of; row++)
            for (int c = 0; c < COLUMNS; c++) REQUIRE(*at++ == value(of, row));
    CHECK(sidelane_rows_close(all));
}

// All ranks sum the gathered rows of all: each row returns as many times as there are ranks.
static void summed(sidelane_row_partition_t *shares, sidelane_output_t *output, const sidelane_tensor_t *all) {
    float sums[MOST * COLUMNS] = {0};
    sidelane_tensor_t returned = tensor(sums, rank);
    CHECK(sidelane_reduce_scatter(rows, output, all, shares, &returned));
    for (uint32_t row = 0; row < rank; row++)
        for (int c = 0; c < COLUMNS; c++) REQUIRE(sums[row * COLUMNS + c] == (float)ranks * value(rank, row));
}

static void rows_of_all(void) {
    float mine[MOST * COLUMNS];
    for (uint32_t row = 0; row < rank; row++)
        for (int c = 0; c < COLUMNS; c++) mine[row * COLUMNS + c] = value(rank, row);
    sidelane_tensor_t given = tensor(mine, rank), wrong = given;
    wrong.dtype = SIDELANE_DTYPE_BF16;
    sidelane_rows_t *all;
    sidelane_row_partition_t *shares, *known;
    REFUSED_ON_BOTH(sidelane_all_gather(rows, rank == 1 ? &wrong : &given, &all, &shares), SIDELANE_ERROR_PLAN, "bf16",
                    SIDELANE_ERROR_CALL, "input of rank 1 was refused");
    CHECK(sidelane_all_gather(rows, &given, &all, &shares));
    gathered(all);

    sidelane_row_partition_info_t info = {.size = sizeof info};
    CHECK(sidelane_row_partition_info(shares, &info));
    REQUIRE(info.ranks == ranks && info.rows == ranks * (ranks - 1) / 2);
    for (uint32_t of = 0; of < ranks; of++) REQUIRE(info.counts[of] == of);
    sidelane_report_t report = {.size = sizeof report};
    CHECK(sidelane_row_partition_report(shares, &report));
    REQUIRE(report.logical.own == rank && report.row_bytes == COLUMNS * sizeof(float));

    // In the buffer that peers read, and from anywhere.
    sidelane_output_t *output;
    sidelane_output_info_t out = {.size = sizeof out};
    CHECK(sidelane_row_partition_output(shares, &output));
    CHECK(sidelane_output_info(output, &out));
    float copy[MOST * MOST * COLUMNS], *at = copy;
    for (uint32_t of = 0; of < ranks; of++)
        for (uint32_t row = 0; row < of; row++)
            for (int c = 0; c < COLUMNS; c++) *at++ = value(of, row);
    memcpy(out.data, copy, out.rows * out.row_bytes);
    summed(shares, output, NULL);
    sidelane_tensor_t elsewhere = tensor(copy, info.rows), returned = tensor(mine, rank);
    summed(shares, NULL, &elsewhere);
    REFUSED_ON_BOTH(sidelane_reduce_scatter(rows, NULL, &elsewhere, shares, rank == 1 ? NULL : &returned), SIDELANE_ERROR_ARGUMENT,
                    "sums is NULL", SIDELANE_ERROR_CALL, "input of rank 1 was refused");

    // Shares that all ranks know are not exchanged.
    CHECK(sidelane_row_collective_shares(rows, info.counts, ranks, &known));
    REFUSED(sidelane_row_collective_shares(rows, info.counts, ranks - 1, &known), SIDELANE_ERROR_PLAN, "counts");
    CHECK(sidelane_all_gather_cached(rows, &given, known, &all));
    gathered(all);
    REFUSED_ON_BOTH(sidelane_all_gather_cached(rows, rank == 1 ? NULL : &given, known, &all), SIDELANE_ERROR_ARGUMENT,
                    "mine is NULL", SIDELANE_ERROR_CALL, "input of rank 1 was refused");
    REFUSED_ON_BOTH(sidelane_reduce_scatter(rows, NULL, &elsewhere, rank == 1 ? NULL : shares, &returned), SIDELANE_ERROR_HANDLE,
                    "sidelane_row_partition_t is NULL", SIDELANE_ERROR_CALL, "rank");
    summed(known, NULL, &elsewhere);
    CHECK(sidelane_row_partition_close(known));
    CHECK(sidelane_row_partition_close(shares));
}

static void memory_of_the_program_s_own(void) {
    enum { BYTES = 4096 };
    sidelane_window_t *window;
    int memory = memfd_create("ours", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    REQUIRE(memory >= 0 && ftruncate(memory, BYTES) == 0);
    REFUSED(sidelane_group_register(group, memory, &window), SIDELANE_ERROR_MEMORY, "seal");
    REQUIRE(fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    REFUSED_ON_BOTH(sidelane_group_register(group, rank == 1 ? -1 : memory, &window), SIDELANE_ERROR_ARGUMENT, "memory = -1",
                    SIDELANE_ERROR_MEMORY, "rank 1");
    uint32_t *ours = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    REQUIRE(ours != MAP_FAILED);
    CHECK(sidelane_group_register(group, memory, &window));
    REQUIRE(close(memory) == 0); // It was duplicated.
    uint32_t next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
    CHECK(sidelane_window_put_signal(window, next, 4 * rank, &rank, sizeof rank, 1));
    CHECK(sidelane_window_wait(window, before, 1));
    REQUIRE(ours[before] == before);
    // On from there: what the rank before this one has got from its own before.
    CHECK(sidelane_window_put_nbi(window, next, 4 * before, 4 * before, sizeof rank));
    CHECK(sidelane_window_quiet(window));
    CHECK(sidelane_window_barrier(window));
    uint32_t second = (before + ranks - 1) % ranks;
    REQUIRE(ours[second] == second);
    REFUSED(sidelane_window_put_nbi(window, next, 0, BYTES, 1), SIDELANE_ERROR_MEMORY, "outside the window");
    CHECK(sidelane_window_barrier(window));
    CHECK(sidelane_window_close(window));
    REQUIRE(ours[before] == before && munmap(ours, BYTES) == 0);
}

int main(void) {
    sidelane_world_t *world;
    CHECK(sidelane_world_from_env(NULL, &world));
    CHECK(sidelane_world_group(world, NULL, 0, &group));
    sidelane_world_info_t me = {.size = sizeof me};
    CHECK(sidelane_world_info(world, &me));
    rank = me.rank, ranks = me.ranks;
    REQUIRE(ranks <= MOST);

    sidelane_row_collective_options_t options = {.size = sizeof options, .columns = COLUMNS, .dtype = SIDELANE_DTYPE_F32,
                                             .max_rows = 16, .route = SIDELANE_ROUTE_PXN};
    sidelane_row_collective_options_t wrong = options;
    wrong.node_sums = rank == 1 ? 9 : 0;
    REFUSED_ON_BOTH(sidelane_row_collective_build(group, &wrong, &rows), SIDELANE_ERROR_ARGUMENT, "node_sums = 9",
                    SIDELANE_ERROR_CALL, "cannot be used");
    CHECK(sidelane_row_collective_build(group, &options, &rows));
    rows_of_all();
    memory_of_the_program_s_own();
    CHECK(sidelane_row_collective_close(rows));
    CHECK(sidelane_group_close(group));
    CHECK(sidelane_world_close(world));
    printf("rank %u: gathered and summed\n", rank);
    return 0;
}
