// Collectives and messages between ranks, and their refusals.

#include "refused.h"

enum { N = 5000 }; // elements of a part: more than a small all-reduce has

uint32_t rank;

static uint32_t ranks;
static sidelane_communicator_t *group;

static sidelane_tensor_t tensor(const void *data, uint64_t elements, uint32_t dtype) {
    return (sidelane_tensor_t){.data = (void *)data, .rows = 1, .columns = elements, .dtype = dtype};
}

static sidelane_tensor_t floats(const float *data, uint64_t elements) {
    return tensor(data, elements, SIDELANE_DTYPE_F32);
}

static float *room(uint64_t elements) {
    float *at = malloc(elements * sizeof(float));
    REQUIRE(at);
    for (uint64_t i = 0; i < elements; i++) at[i] = -1;
    return at;
}

// Small integers, whose sums are exact in any order.
static float value(uint32_t of, uint64_t at) { return (float)(10 * of + at % 50); }

static float sum(uint64_t at) {
    float all = 0;
    for (uint32_t of = 0; of < ranks; of++) all += value(of, at);
    return all;
}

static void sums_and_copies(void) {
    float *data = room(ranks * N), *part = room(N);
    for (uint64_t i = 0; i < ranks * N; i++) data[i] = value(rank, i);
    sidelane_tensor_t all = floats(data, ranks * N), mine = floats(part, N);

    CHECK(sidelane_communicator_reduce_scatter(group, &all, &mine));
    for (uint64_t i = 0; i < N; i++) REQUIRE(part[i] == sum(rank * N + i));

    float *parts = room(ranks * N);
    sidelane_tensor_t gathered = floats(parts, ranks * N);
    CHECK(sidelane_communicator_all_gather(group, &mine, &gathered));
    CHECK(sidelane_communicator_all_reduce(group, &all));
    for (uint64_t i = 0; i < ranks * N; i++) REQUIRE(data[i] == sum(i) && parts[i] == data[i]);

    // Part r goes to rank r; each element of a part names its source and destination.
    for (uint64_t i = 0; i < ranks * N; i++) data[i] = (float)(100 * rank + i / N);
    CHECK(sidelane_communicator_all_to_all(group, &all, &gathered));
    for (uint64_t i = 0; i < ranks * N; i++) REQUIRE(parts[i] == (float)(100 * (i / N) + rank));

    CHECK(sidelane_communicator_broadcast(group, ranks - 1, &all));
    for (uint64_t i = 0; i < ranks * N; i++) REQUIRE(data[i] == (float)(100 * (ranks - 1) + i / N));
    free(data), free(part), free(parts);
}

static void messages(void) {
    uint32_t next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
    uint64_t number = 7 + rank, came = 0;
    sidelane_tensor_t out = tensor(&number, sizeof number, SIDELANE_DTYPE_BYTES);
    sidelane_tensor_t in = tensor(&came, sizeof came, SIDELANE_DTYPE_BYTES);
    CHECK(sidelane_communicator_send(group, next, &out));
    CHECK(sidelane_communicator_receive(group, before, &in));
    CHECK(sidelane_communicator_flush(group, next));
    REQUIRE(came == 7 + before);
    // Both send before they receive, and more than may lie unread.
    enum { LONG = 1 << 20 };
    float *sent = room(LONG), *received = room(LONG);
    if ((rank ^ 1) < ranks) {
        for (uint64_t i = 0; i < LONG; i++) sent[i] = value(rank, i);
        sidelane_tensor_t there = floats(sent, LONG), here = floats(received, LONG);
        CHECK(sidelane_communicator_exchange(group, rank ^ 1, &there, &here));
        for (uint64_t i = 0; i < LONG; i++) REQUIRE(received[i] == value(rank ^ 1, i));
    }
    free(sent), free(received);
    REFUSED(sidelane_communicator_send(group, rank, &out), SIDELANE_ERROR_PLAN, "another rank");
    REFUSED(sidelane_communicator_send(group, next, NULL), SIDELANE_ERROR_ARGUMENT, "data is NULL");
}

// One rank makes the mistake, all ranks get an error, and no tensor changes.
static void mistakes(void) {
    float data[8] = {1, 1, 1, 1, 1, 1, 1, 1}, into[8] = {2, 2, 2, 2, 2, 2, 2, 2};
    sidelane_tensor_t good = floats(data, 8), other = floats(into, 8), wrong;
    sidelane_status_t peers = SIDELANE_ERROR_CALL;
    const char *told = "input of rank 1 was refused";

    REFUSED_ON_BOTH(sidelane_communicator_all_reduce(group, rank == 1 ? NULL : &good), SIDELANE_ERROR_ARGUMENT,
                    "data is NULL", peers, told);
    wrong = good, wrong.dtype = SIDELANE_DTYPE_BYTES;
    REFUSED_ON_BOTH(sidelane_communicator_all_reduce(group, rank == 1 ? &wrong : &good), SIDELANE_ERROR_PLAN,
                    "not summed", peers, told);
    wrong = good, wrong.place = SIDELANE_PLACE_DEVICE;
    REFUSED_ON_BOTH(sidelane_communicator_broadcast(group, 0, rank == 1 ? &wrong : &good), SIDELANE_ERROR_PLAN,
                    "a device", peers, told);
    REFUSED_ON_BOTH(sidelane_communicator_broadcast(group, rank == 1 ? ranks : 0, &good), SIDELANE_ERROR_PLAN, "root",
                    peers, told);
    uint64_t shared = 8 - 8 % ranks;
    sidelane_tensor_t out = floats(data, shared), in = floats(into, shared), half = floats(into, shared / ranks);
    wrong = in, wrong.data = data + 1, wrong.columns = shared;
    REFUSED_ON_BOTH(sidelane_communicator_all_to_all(group, &out, rank == 1 ? &out : &in), SIDELANE_ERROR_ARGUMENT,
                    "send and receive overlap", peers, told);
    REFUSED_ON_BOTH(sidelane_communicator_all_gather(group, &half, rank == 1 ? &half : &out),
                    SIDELANE_ERROR_ARGUMENT, "overlap", peers, told);
    REFUSED_ON_BOTH(sidelane_communicator_reduce_scatter(group, rank == 1 ? &half : &out, &other), SIDELANE_ERROR_ARGUMENT,
                    "overlap", SIDELANE_ERROR_PLAN, "elements to sum");
    for (int i = 0; i < 8; i++) REQUIRE(data[i] == 1 && into[i] == 2);
    REFUSED(sidelane_communicator_flush(NULL, 0), SIDELANE_ERROR_HANDLE, "sidelane_communicator_t is NULL");
}

int main(void) {
    sidelane_world_t *world;
    sidelane_group_t *all;
    CHECK(sidelane_world_from_env(NULL, &world));
    CHECK(sidelane_world_group(world, NULL, 0, &all));
    sidelane_group_info_t me = {.size = sizeof me};
    CHECK(sidelane_group_info(all, &me));
    rank = me.rank, ranks = me.ranks;

    sidelane_communicator_options_t options = {.size = sizeof options, .chunk = 64 << 10, .one_shot_bytes = 1 << 10};
    sidelane_communicator_options_t wrong = options;
    wrong.algorithm = rank == 1 ? 3 : 0;
    REFUSED_ON_BOTH(sidelane_communicator_build(all, &wrong, &group), SIDELANE_ERROR_ARGUMENT, "algorithm = 3",
                    SIDELANE_ERROR_CALL, "cannot be used");
    for (uint32_t algorithm = SIDELANE_ALGORITHM_DIRECT; algorithm <= SIDELANE_ALGORITHM_RING_F32; algorithm++) {
        options.algorithm = algorithm;
        CHECK(sidelane_communicator_build(all, &options, &group));
        sums_and_copies();
        messages();
        mistakes();
        CHECK(sidelane_communicator_close(group));
    }
    CHECK(sidelane_communicator_build(all, NULL, &group));
    sums_and_copies();
    CHECK(sidelane_communicator_close(group));
    CHECK(sidelane_group_close(all));
    CHECK(sidelane_world_close(world));
    printf("rank %u: summed, copied and sent\n", rank);
    return 0;
}
