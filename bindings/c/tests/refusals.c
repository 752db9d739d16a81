// Mistakes of a C program, on two ranks: each gives a status and a message, on every rank, and the
// next call works.

#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "refused.h"

enum { HIDDEN = 8, TOP_K = 2, TOKENS = 3, ROW = HIDDEN * sizeof(float) };

uint32_t rank;

static sidelane_world_t *world;
static sidelane_group_t *group;
static sidelane_ep_t *ep;

static float x[TOKENS * HIDDEN], y[TOKENS * HIDDEN];
static const int32_t ids[TOKENS * TOP_K] = {0, 3, 1, 2, 3, 0};
static const float weights[TOKENS * TOP_K] = {1, 1, 1, 1, 1, 1};
static const sidelane_routing_t routing = {.experts = ids, .weights = weights, .tokens = TOKENS, .top_k = TOP_K};
static sidelane_tensor_t tx = {.data = x, .rows = TOKENS, .columns = HIDDEN, .dtype = SIDELANE_DTYPE_F32};
static sidelane_tensor_t ty = {.data = y, .rows = TOKENS, .columns = HIDDEN, .dtype = SIDELANE_DTYPE_F32};

static sidelane_ep_options_t good(void) {
    return (sidelane_ep_options_t){.size = sizeof(sidelane_ep_options_t), .experts = 4, .top_k = TOP_K,
        .hidden = HIDDEN, .dtype = SIDELANE_DTYPE_F32, .max_tokens = 16};
}

// A dispatch and a combine with experts that change nothing: so many times the tokens.
static void round_gives(float times) {
    sidelane_rows_t *rows;
    sidelane_handle_t *handle;
    CHECK(sidelane_ep_dispatch(ep, &tx, &routing, &rows, &handle));
    sidelane_rows_info_t info = {.size = sizeof info};
    CHECK(sidelane_rows_info(rows, &info));
    sidelane_tensor_t same = {.data = info.data, .rows = info.rows, .columns = HIDDEN, .dtype = SIDELANE_DTYPE_F32};
    memset(y, 0xff, sizeof y);
    CHECK(sidelane_ep_combine(ep, NULL, &same, handle, &ty));
    for (int i = 0; i < TOKENS * HIDDEN; i++) REQUIRE(y[i] == times * x[i]);
    CHECK(sidelane_rows_close(rows));
    CHECK(sidelane_handle_close(handle));
}

// The purpose: after all these refusals, a dispatch and a combine work.
static void a_round_works(void) {
    round_gives(2);
}

static void nothing_where_something_must_be(void) {
    sidelane_world_info_t info = {.size = sizeof info};
    REFUSED(sidelane_world_info(NULL, &info), SIDELANE_ERROR_HANDLE, "sidelane_world_t is NULL");
    REFUSED(sidelane_world_info(world, NULL), SIDELANE_ERROR_ARGUMENT, "sidelane_world_info_t is NULL");
    REFUSED(sidelane_world_from_env(NULL, NULL), SIDELANE_ERROR_ARGUMENT, "world is NULL");
    REFUSED(sidelane_world_group(world, NULL, 2, &group), SIDELANE_ERROR_ARGUMENT, "ranks is NULL");
    REFUSED(sidelane_gate_preset(NULL, 4, 2, NULL), SIDELANE_ERROR_ARGUMENT, "sidelane_gate_config_t is NULL");
    CHECK(sidelane_world_close(NULL));
    CHECK(sidelane_rows_close(NULL));
}

static void structs_of_a_wrong_size(void) {
    sidelane_world_info_t info = {.size = 0};
    REFUSED(sidelane_world_info(world, &info), SIDELANE_ERROR_ARGUMENT, "sizeof(sidelane_world_info_t)");
    info.size = sizeof info - 4;
    REFUSED(sidelane_world_info(world, &info), SIDELANE_ERROR_ARGUMENT, "no version");
    info.size = (size_t)-1;
    REFUSED(sidelane_world_info(world, &info), SIDELANE_ERROR_ARGUMENT, "no version");
    // A later version: zeros behind are no wish, anything else is.
    struct { sidelane_gate_config_t config; uint32_t more[2]; } later = {.config = {.size = sizeof later.config}};
    CHECK(sidelane_gate_preset("olmoe", 4, 2, &later.config));
    later.config.size = sizeof later;
    sidelane_gate_t *gate;
    CHECK(sidelane_gate_build(&later.config, &gate));
    CHECK(sidelane_gate_close(gate));
    later.more[1] = 1;
    REFUSED(sidelane_gate_build(&later.config, &gate), SIDELANE_ERROR_ARGUMENT, "older than the header");
}

static void handles_that_are_none(void) {
    sidelane_world_info_t info = {.size = sizeof info};
    sidelane_gate_t *gate;
    sidelane_gate_config_t config = {.size = sizeof config};
    REFUSED(sidelane_gate_preset("no such", 4, 2, &config), SIDELANE_ERROR_ARGUMENT, "deepseek_v3");
    REFUSED(sidelane_gate_preset("switch", 4, 2, &config), SIDELANE_ERROR_GATE, "top_k");
    CHECK(sidelane_gate_preset("olmoe", 4, 2, &config));
    CHECK(sidelane_gate_build(&config, &gate));
    REFUSED(sidelane_world_info((sidelane_world_t *)gate, &info), SIDELANE_ERROR_HANDLE,
            "handle of a sidelane_gate_t, a sidelane_world_t was expected");
    REFUSED(sidelane_world_info((sidelane_world_t *)&info, &info), SIDELANE_ERROR_HANDLE, "is not a handle");
    CHECK(sidelane_gate_close(gate));
    sidelane_gate_call_t call = {.size = sizeof call};
    sidelane_decision_t decision = {.size = sizeof decision};
    REFUSED(sidelane_gate_route(gate, &call, &decision), SIDELANE_ERROR_HANDLE, "was closed");
    REFUSED(sidelane_gate_close(gate), SIDELANE_ERROR_HANDLE, "was closed");
    // Its place is used again, and the old handle does not meet the new gate.
    sidelane_gate_t *next;
    CHECK(sidelane_gate_build(&config, &next));
    REFUSED(sidelane_gate_route(gate, &call, &decision), SIDELANE_ERROR_HANDLE, "was closed");
    CHECK(sidelane_gate_close(next));
}

static void windows(void) {
    sidelane_window_t *window;
    REFUSED_ON_BOTH(sidelane_group_window(group, rank == 1 ? 64 : 128, &window), SIDELANE_ERROR_MEMORY, "differs",
                    SIDELANE_ERROR_MEMORY, "differs");
    REFUSED_ON_BOTH(sidelane_group_window(group, 64, rank == 1 ? NULL : &window), SIDELANE_ERROR_ARGUMENT,
                    "window is NULL", SIDELANE_ERROR_MEMORY, "differs");
    CHECK(sidelane_group_window(group, 64, &window));
    REFUSED(sidelane_window_put(window, 1 - rank, 60, x, 8), SIDELANE_ERROR_MEMORY, "outside the window");
    REFUSED(sidelane_window_put(window, 1 - rank, 0, NULL, 8), SIDELANE_ERROR_ARGUMENT, "src is NULL");
    REFUSED(sidelane_window_put(window, 1 - rank, 0, x, (uint64_t)-1), SIDELANE_ERROR_ARGUMENT, "too many");
    REFUSED(sidelane_window_read(window, (uint64_t)-4, y, 8), SIDELANE_ERROR_MEMORY, "outside the window");
    sidelane_status_t status = sidelane_window_put(window, 7, 0, x, 8);
    REQUIRE(status != SIDELANE_OK && strlen(sidelane_last_message()) > 0);
    CHECK(sidelane_window_put_signal(window, 1 - rank, 0, &rank, sizeof rank, 1));
    REFUSED(sidelane_window_signal(window, 1 - rank, 1), SIDELANE_ERROR_PLAN, "larger than the last");
    CHECK(sidelane_window_wait(window, 1 - rank, 1));
    uint32_t seen;
    CHECK(sidelane_window_read(window, 0, &seen, sizeof seen));
    REQUIRE(seen == 1 - rank);
    CHECK(sidelane_window_barrier(window));
    CHECK(sidelane_window_close(window));
}

static void ranks_that_build_differently(void) {
    sidelane_ep_options_t options = good();
    options.hidden = rank == 1 ? 16 : HIDDEN;
    REFUSED(sidelane_ep_build(group, &options, NULL, &ep), SIDELANE_ERROR_CALL, "disagree about hidden");
    options = good();
    options.size -= rank == 1 ? 4 : 0;
    REFUSED_ON_BOTH(sidelane_ep_build(group, &options, NULL, &ep), SIDELANE_ERROR_ARGUMENT, "no version",
                    SIDELANE_ERROR_CALL, "cannot be used");
    options = good();
    options.route = rank == 1 ? 77 : 0;
    REFUSED_ON_BOTH(sidelane_ep_build(group, &options, NULL, &ep), SIDELANE_ERROR_ARGUMENT, "route = 77",
                    SIDELANE_ERROR_CALL, "cannot be used");
    options = good();
    uint32_t held[2] = {2, 2}, experts[4] = {0, 1, 2, rank == 1 ? 9 : 3};
    sidelane_expert_map_t map = {.held = held, .experts_held = experts, .ranks = 2, .experts = 4};
    REFUSED_ON_BOTH(sidelane_ep_build(group, &options, &map, &ep), SIDELANE_ERROR_PLAN, "out of range",
                    SIDELANE_ERROR_CALL, "cannot be used");
    // Older programs know neither devices, nor graphs, nor limits of their memory.
    const size_t sizes[] = {offsetof(sidelane_ep_options_t, stream), offsetof(sidelane_ep_options_t, graphs),
                            offsetof(sidelane_ep_options_t, device_heap_limit)};
    for (int i = 0; i < 3; i++) {
        options = good();
        // It is not theirs, so it is not read.
        memset((char *)&options + sizes[i], 0xff, sizeof options - sizes[i]);
        options.size = sizes[i];
        if (i > 0) CHECK(sidelane_ep_close(ep));
        CHECK(sidelane_ep_build(group, &options, NULL, &ep));
        a_round_works();
    }
}

// Features that the host lacks are refused by name at every rank.
static void calls_that_are_not_there(void) {
    sidelane_pending_dispatch_t *dispatching;
    sidelane_rows_t *rows;
    sidelane_handle_t *handle;
    sidelane_report_t report = {.size = sizeof report}, back = {.size = sizeof back};
    uint32_t status;
    CHECK(sidelane_ep_dispatch(ep, &tx, &routing, &rows, &handle));
    REFUSED(sidelane_ep_release(ep, handle), SIDELANE_ERROR_PLAN, "on the host (host-stepper): release without combine");
    CHECK(sidelane_handle_status(handle, &status));
    CHECK(sidelane_handle_report(handle, &report));
    CHECK(sidelane_handle_return_report(handle, &back));
    REQUIRE(status == SIDELANE_CALL_OK && strcmp(report.executor, "host-stepper") == 0);
    REQUIRE(back.moved.summed_bytes == 0 && report.enqueued.copies == 0 && report.kernels[0].name[0] == 0);
    REQUIRE(report.handle_bytes == 0);
    CHECK(sidelane_rows_close(rows));
    CHECK(sidelane_handle_close(handle));
    CHECK(sidelane_ep_dispatch_start(ep, &tx, &routing, &dispatching));
    REFUSED(sidelane_dispatch_unfinished(dispatching, &rows, &handle), SIDELANE_ERROR_PLAN, "sizes on the device");
    CHECK(sidelane_ep_synchronize(ep));
    CHECK(sidelane_ep_check(ep));
    a_round_works();
}

static void dispatches(void) {
    sidelane_rows_t *rows;
    sidelane_handle_t *handle;
    sidelane_tensor_t bad = tx;
    sidelane_routing_t wrong = routing;
#define BAD_DISPATCH(x_, routing_, status, words)                                                  \
    REFUSED_ON_BOTH(sidelane_ep_dispatch(ep, rank == 1 ? (x_) : &tx, rank == 1 ? (routing_) : &routing, &rows, &handle), \
                    status, words, SIDELANE_ERROR_CALL, "input of rank 1 was refused")
    BAD_DISPATCH(NULL, &routing, SIDELANE_ERROR_ARGUMENT, "x is NULL");
    BAD_DISPATCH(&tx, NULL, SIDELANE_ERROR_ARGUMENT, "routing is NULL");
    bad.dtype = SIDELANE_DTYPE_BF16;
    BAD_DISPATCH(&bad, &routing, SIDELANE_ERROR_PLAN, "elements are bf16, the group was built for f32");
    bad.dtype = 99;
    BAD_DISPATCH(&bad, &routing, SIDELANE_ERROR_ARGUMENT, "dtype = 99");
    bad = tx, bad.data = NULL;
    BAD_DISPATCH(&bad, &routing, SIDELANE_ERROR_ARGUMENT, "x is NULL");
    bad = tx, bad.data = (char *)x + 1;
    BAD_DISPATCH(&bad, &routing, SIDELANE_ERROR_ARGUMENT, "not a multiple of 4");
    bad = tx, bad.rows = TOKENS - 1;
    BAD_DISPATCH(&bad, &routing, SIDELANE_ERROR_ARGUMENT, "x is [2, 8], expected [3, 8]");
    bad = tx, bad.columns = (uint64_t)1 << 62;
    BAD_DISPATCH(&bad, &routing, SIDELANE_ERROR_ARGUMENT, "expected [3, 8]");
    bad = tx, bad.place = 2;
    BAD_DISPATCH(&bad, &routing, SIDELANE_ERROR_ARGUMENT, "place = 2");
    bad.place = SIDELANE_PLACE_DEVICE;
    BAD_DISPATCH(&bad, &routing, SIDELANE_ERROR_PLAN, "x: of a device, expected of the host");
    wrong.top_k = 1, wrong.tokens = TOKENS;
    BAD_DISPATCH(&tx, &wrong, SIDELANE_ERROR_ARGUMENT, "routing is [3, 1], expected [3, 2]");
    wrong = routing, wrong.tokens = (uint64_t)1 << 40;
    BAD_DISPATCH(&tx, &wrong, SIDELANE_ERROR_ARGUMENT, "routing: ");
    static const int32_t twice[TOKENS * TOP_K] = {0, 0, 1, 2, 3, 0}, unknown[TOKENS * TOP_K] = {0, 3, 1, 4, 3, 0};
    wrong = routing, wrong.experts = twice;
    BAD_DISPATCH(&tx, &wrong, SIDELANE_ERROR_PLAN, "names expert 0 twice");
    wrong = routing, wrong.experts = unknown;
    BAD_DISPATCH(&tx, &wrong, SIDELANE_ERROR_PLAN, "expert 4 is out of range");
    REFUSED_ON_BOTH(sidelane_ep_dispatch(ep, &tx, &routing, &rows, rank == 1 ? NULL : &handle),
                    SIDELANE_ERROR_ARGUMENT, "handle is NULL", SIDELANE_ERROR_CALL, "was refused");
    a_round_works();
}

// The layout first, rows later, twice.
static void prepares(void) {
    sidelane_handle_t *handle;
    static const int32_t unknown[TOKENS * TOP_K] = {0, 3, 1, 4, 3, 0};
    sidelane_routing_t wrong = routing;
    wrong.experts = unknown;
    REFUSED_ON_BOTH(sidelane_ep_prepare(ep, rank == 1 ? NULL : &routing, &handle), SIDELANE_ERROR_ARGUMENT, "routing is NULL",
                    SIDELANE_ERROR_CALL, "input of rank 1 was refused");
    REFUSED_ON_BOTH(sidelane_ep_prepare(ep, rank == 1 ? &wrong : &routing, &handle), SIDELANE_ERROR_PLAN, "out of range",
                    SIDELANE_ERROR_CALL, "input of rank 1 was refused");
    REFUSED_ON_BOTH(sidelane_ep_prepare(ep, &routing, rank == 1 ? NULL : &handle), SIDELANE_ERROR_ARGUMENT, "handle is NULL",
                    SIDELANE_ERROR_CALL, "input of rank 1 was refused");
    CHECK(sidelane_ep_prepare(ep, &routing, &handle));
    sidelane_handle_info_t layout = {.size = sizeof layout};
    CHECK(sidelane_handle_info(handle, &layout));
    REQUIRE(layout.rows == 6 && layout.tokens_per_expert[0] + layout.tokens_per_expert[1] == 6);
    sidelane_report_t report = {.size = sizeof report};
    CHECK(sidelane_handle_report(handle, &report));
    REQUIRE(report.moved.rows == 0);
    for (int again = 0; again < 2; again++) {
        sidelane_rows_t *rows;
        CHECK(sidelane_ep_dispatch_cached(ep, &tx, handle, &rows));
        sidelane_rows_info_t in = {.size = sizeof in};
        CHECK(sidelane_rows_info(rows, &in));
        sidelane_tensor_t same = {.data = in.data, .rows = in.rows, .columns = HIDDEN, .dtype = SIDELANE_DTYPE_F32};
        memset(y, 0, sizeof y);
        CHECK(sidelane_ep_combine(ep, NULL, &same, handle, &ty));
        for (int i = 0; i < TOKENS * HIDDEN; i++) REQUIRE(y[i] == 2 * x[i]);
        CHECK(sidelane_rows_close(rows));
    }
    CHECK(sidelane_handle_close(handle));
    a_round_works();
}

// Nothing is no mistake.
static void a_rank_without_tokens(void) {
    sidelane_rows_t *rows;
    sidelane_handle_t *handle;
    sidelane_output_t *output;
    sidelane_tensor_t none = {.columns = HIDDEN, .dtype = SIDELANE_DTYPE_F32};
    sidelane_routing_t no_tokens = {.top_k = TOP_K};
    CHECK(sidelane_ep_dispatch(ep, rank == 1 ? &none : &tx, rank == 1 ? &no_tokens : &routing, &rows, &handle));
    sidelane_rows_info_t in = {.size = sizeof in};
    CHECK(sidelane_rows_info(rows, &in));
    REQUIRE(in.rows == TOKENS);
    CHECK(sidelane_handle_output(handle, &output));
    sidelane_output_info_t out = {.size = sizeof out};
    CHECK(sidelane_output_info(output, &out));
    memcpy(out.data, in.data, in.rows * in.row_bytes);
    CHECK(sidelane_ep_combine(ep, output, NULL, handle, rank == 1 ? &none : &ty));
    CHECK(sidelane_rows_close(rows));
    CHECK(sidelane_handle_close(handle));
    a_round_works();
}

static void combines(void) {
    sidelane_rows_t *rows;
    sidelane_handle_t *handle, *other, *closed;
    sidelane_output_t *output;
    CHECK(sidelane_ep_dispatch(ep, &tx, &routing, &rows, &closed));
    CHECK(sidelane_rows_close(rows));
    CHECK(sidelane_handle_close(closed));
    CHECK(sidelane_ep_dispatch(ep, &tx, &routing, &rows, &handle));
    CHECK(sidelane_rows_close(rows));
    CHECK(sidelane_ep_dispatch(ep, &tx, &routing, &rows, &other));
    CHECK(sidelane_rows_close(rows));
    CHECK(sidelane_handle_output(handle, &output));
    sidelane_output_info_t info = {.size = sizeof info};
    CHECK(sidelane_output_info(output, &info));
    for (uint64_t i = 0; i < info.rows * HIDDEN; i++) ((float *)info.data)[i] = 3;

    REFUSED_ON_BOTH(sidelane_ep_combine(ep, output, NULL, rank == 1 ? closed : handle, &ty), SIDELANE_ERROR_HANDLE,
                    "was closed", SIDELANE_ERROR_CALL, "input of rank 1 was refused");
    // Rank 0's output was used up by that call; its buffer is to be had again. Rank 1's stays open.
    sidelane_output_t *before = output;
    if (rank == 0) {
        REFUSED(sidelane_output_info(output, &info), SIDELANE_ERROR_HANDLE, "consumed by");
        CHECK(sidelane_handle_output(handle, &output));
    }
    REQUIRE((before == output) == (rank == 1));
    CHECK(sidelane_output_info(output, &info));
    for (uint64_t i = 0; i < info.rows * HIDDEN; i++) REQUIRE(((float *)info.data)[i] == 3);

    sidelane_tensor_t small = ty;
    small.rows = 1;
    REFUSED_ON_BOTH(sidelane_ep_combine(ep, output, NULL, handle, rank == 1 ? &small : &ty), SIDELANE_ERROR_ARGUMENT,
                    "out is [1, 8], expected [3, 8]", SIDELANE_ERROR_CALL, "was refused");
    if (rank == 0) CHECK(sidelane_handle_output(handle, &output));
    REFUSED_ON_BOTH(sidelane_ep_combine(ep, rank == 1 ? NULL : output, NULL, handle, &ty), SIDELANE_ERROR_ARGUMENT,
                    "outputs and tensors given = 0", SIDELANE_ERROR_CALL, "was refused");
    if (rank == 0) CHECK(sidelane_handle_output(handle, &output));
    // An output of another handle is refused, and used up.
    sidelane_output_t *foreign;
    CHECK(sidelane_handle_output(other, &foreign));
    REFUSED_ON_BOTH(sidelane_ep_combine(ep, rank == 1 ? foreign : output, NULL, handle, &ty), SIDELANE_ERROR_CALL,
                    "belongs to the handle of call", SIDELANE_ERROR_CALL, "was refused");
    if (rank == 0) {
        CHECK(sidelane_handle_output(handle, &output));
        CHECK(sidelane_output_close(foreign));
    }
    // The summands must lie apart from the sums.
    sidelane_tensor_t inside = {.data = y, .rows = info.rows, .columns = HIDDEN, .dtype = SIDELANE_DTYPE_F32};
    if (rank == 1) {
        static float room[64 * HIDDEN];
        inside.data = room;
        small = ty, small.data = room;
    }
    REFUSED_ON_BOTH(rank == 1 ? sidelane_ep_combine(ep, NULL, &inside, handle, &small)
                              : sidelane_ep_combine(ep, output, NULL, handle, &ty),
                    SIDELANE_ERROR_ARGUMENT, "overlap", SIDELANE_ERROR_CALL, "was refused");
    if (rank == 0) CHECK(sidelane_handle_output(handle, &output));
    CHECK(sidelane_ep_combine(ep, output, NULL, handle, &ty));
    for (int i = 0; i < TOKENS * HIDDEN; i++) REQUIRE(y[i] == 6);
    CHECK(sidelane_handle_close(handle));
    CHECK(sidelane_handle_close(other));
    a_round_works();
}

static void gradients(void) {
    sidelane_rows_t *rows, *back;
    sidelane_handle_t *handle;
    CHECK(sidelane_ep_dispatch(ep, &tx, &routing, &rows, &handle));
    sidelane_rows_info_t info = {.size = sizeof info};
    CHECK(sidelane_rows_info(rows, &info));
    sidelane_tensor_t same = {.data = info.data, .rows = info.rows, .columns = HIDDEN, .dtype = SIDELANE_DTYPE_F32};
    sidelane_tensor_t wrong = same;
    wrong.rows += 1;
    REFUSED_ON_BOTH(sidelane_ep_dispatch_backward(ep, NULL, rank == 1 ? &wrong : &same, NULL, handle, &ty, NULL),
                    SIDELANE_ERROR_ARGUMENT, "rows is [", SIDELANE_ERROR_CALL, "was refused");
    REFUSED_ON_BOTH(sidelane_ep_dispatch_backward(ep, NULL, &same, rank == 1 ? weights : NULL, handle, &ty, NULL),
                    SIDELANE_ERROR_ARGUMENT, "weight gradients is NULL", SIDELANE_ERROR_CALL, "");
    REFUSED_ON_BOTH(sidelane_ep_combine_backward(ep, &tx, handle, &back, rank == 1 ? y : NULL),
                    SIDELANE_ERROR_ARGUMENT, "not weighted", SIDELANE_ERROR_CALL, "was refused");
    REFUSED_ON_BOTH(sidelane_ep_dispatch_cached(ep, rank == 1 ? NULL : &tx, handle, &back), SIDELANE_ERROR_ARGUMENT,
                    "x is NULL", SIDELANE_ERROR_CALL, "was refused");
    REFUSED_ON_BOTH(sidelane_ep_set_expert_map(ep, NULL), SIDELANE_ERROR_ARGUMENT, "expert_map is NULL",
                    SIDELANE_ERROR_ARGUMENT, "expert_map is NULL");
    CHECK(sidelane_ep_combine_backward(ep, &tx, handle, &back, NULL));
    CHECK(sidelane_rows_close(back));
    CHECK(sidelane_rows_close(rows));
    CHECK(sidelane_handle_close(handle));
    a_round_works();
}

// Rank 1 is masked and still makes all calls. Each token of rank 0 keeps the choice that stays.
static void masks(void) {
    static const uint8_t both[2] = {1, 1}, first[2] = {1, 0}, none[2] = {0, 0}, unknown[2] = {1, 2};
    uint8_t seen[2] = {2, 2};
    CHECK(sidelane_ep_active(ep, seen, 2));
    REQUIRE(memcmp(seen, both, 2) == 0);
    CHECK(sidelane_ep_mask(ep, first, 2));
    round_gives(rank == 0 ? 1 : 0);
#define BAD_MASK(mask, ranks, status, words)                                                       \
    REFUSED_ON_BOTH(sidelane_ep_mask(ep, rank == 1 ? (mask) : both, rank == 1 ? (ranks) : 2), status, words, \
                    SIDELANE_ERROR_CALL, "input of rank 1 was refused")
    BAD_MASK(NULL, 2, SIDELANE_ERROR_ARGUMENT, "active is NULL");
    BAD_MASK(unknown, 2, SIDELANE_ERROR_ARGUMENT, "active = 2: 0 or 1");
    BAD_MASK(both, 1, SIDELANE_ERROR_PLAN, "ranks of the mask");
    BAD_MASK(NULL, 0, SIDELANE_ERROR_PLAN, "ranks of the mask");
    BAD_MASK(none, 2, SIDELANE_ERROR_PLAN, "active ranks of the mask");
    REFUSED(sidelane_ep_mask(ep, rank == 1 ? first : both, 2), SIDELANE_ERROR_CALL, "disagree");
    // The old mask stays, and changes while no handle is open.
    sidelane_rows_t *rows;
    sidelane_handle_t *handle;
    CHECK(sidelane_ep_dispatch(ep, &tx, &routing, &rows, &handle));
    REFUSED(sidelane_ep_mask(ep, both, 2), SIDELANE_ERROR_CALL, "mask are alive");
    CHECK(sidelane_rows_close(rows));
    CHECK(sidelane_handle_close(handle));
    CHECK(sidelane_ep_active(ep, seen, 2));
    REQUIRE(memcmp(seen, first, 2) == 0);
    REFUSED(sidelane_ep_active(ep, seen, 3), SIDELANE_ERROR_ARGUMENT, "ranks = 3");
    REFUSED(sidelane_ep_active(ep, NULL, 2), SIDELANE_ERROR_ARGUMENT, "active is NULL");
    CHECK(sidelane_ep_mask(ep, both, 2));
    a_round_works();
}

static void halves(void) {
    sidelane_pending_dispatch_t *dispatching, *second;
    sidelane_pending_combine_t *combining;
    sidelane_rows_t *rows;
    sidelane_handle_t *handle;
    sidelane_output_t *output;
    CHECK(sidelane_ep_dispatch_start(ep, &tx, &routing, &dispatching));
    REFUSED(sidelane_ep_dispatch_start(ep, &tx, &routing, &second), SIDELANE_ERROR_BUSY, "finish that first");
    REFUSED(sidelane_ep_dispatch(ep, &tx, &routing, &rows, &handle), SIDELANE_ERROR_BUSY, "finish that first");
    CHECK(sidelane_dispatch_finish(dispatching, &rows, &handle));
    REFUSED(sidelane_dispatch_finish(dispatching, &rows, &handle), SIDELANE_ERROR_HANDLE, "consumed by");
    CHECK(sidelane_rows_close(rows));
    CHECK(sidelane_handle_output(handle, &output));
    sidelane_output_info_t info = {.size = sizeof info};
    CHECK(sidelane_output_info(output, &info));
    memset(info.data, 0, info.rows * info.row_bytes);
    CHECK(sidelane_ep_combine_start(ep, output, NULL, handle, &combining));
    sidelane_handle_info_t layout = {.size = sizeof layout};
    REFUSED(sidelane_handle_info(handle, &layout), SIDELANE_ERROR_BUSY, "finish that first");
    // Too late to refuse: the other rank gets its sums.
    sidelane_tensor_t wrong = ty;
    wrong.columns = rank == 1 ? 1 : HIDDEN;
    if (rank == 1) {
        REFUSED(sidelane_combine_finish(combining, &wrong), SIDELANE_ERROR_ARGUMENT, "out is [3, 1]");
    } else {
        CHECK(sidelane_combine_finish(combining, &wrong));
        for (int i = 0; i < TOKENS * HIDDEN; i++) REQUIRE(y[i] == 0);
    }
    CHECK(sidelane_handle_info(handle, &layout));
    CHECK(sidelane_handle_close(handle));
    a_round_works();
}

static void forked(void) {
    fflush(NULL);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        sidelane_world_info_t info = {.size = sizeof info};
        sidelane_rows_t *rows;
        sidelane_handle_t *handle;
        sidelane_world_t *another;
        REFUSED(sidelane_world_info(world, &info), SIDELANE_ERROR_FORKED, "was forked from process");
        REFUSED(sidelane_ep_dispatch(ep, &tx, &routing, &rows, &handle), SIDELANE_ERROR_FORKED, "was forked");
        REFUSED(sidelane_world_from_env(NULL, &another), SIDELANE_ERROR_FORKED, "not by fork");
        REFUSED(sidelane_world_close(world), SIDELANE_ERROR_FORKED, "was forked");
        _exit(0);
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    a_round_works();
}

static void *hammer(void *window) {
    for (int i = 0; i < 2000; i++) {
        sidelane_status_t status = sidelane_window_put(window, rank, 0, x, 64);
        REQUIRE(status == SIDELANE_OK || status == SIDELANE_ERROR_BUSY);
        sidelane_gate_t *gate;
        sidelane_gate_config_t config = {.size = sizeof config};
        CHECK(sidelane_gate_preset("olmoe", 4, 2, &config));
        CHECK(sidelane_gate_build(&config, &gate));
        CHECK(sidelane_gate_close(gate));
        REFUSED(sidelane_gate_close(gate), SIDELANE_ERROR_HANDLE, "sidelane_gate_t was closed");
    }
    return NULL;
}

static void from_several_threads(void) {
    sidelane_window_t *window;
    CHECK(sidelane_group_window(group, 64, &window));
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) REQUIRE(pthread_create(&threads[i], NULL, hammer, window) == 0);
    for (int i = 0; i < 4; i++) REQUIRE(pthread_join(threads[i], NULL) == 0);
    CHECK(sidelane_window_put(window, rank, 0, x, 64));
    CHECK(sidelane_window_close(window));
}

static void closed_in_any_order(void) {
    sidelane_rows_t *rows;
    sidelane_handle_t *handle;
    CHECK(sidelane_ep_dispatch(ep, &tx, &routing, &rows, &handle));
    sidelane_rows_info_t info = {.size = sizeof info};
    CHECK(sidelane_rows_info(rows, &info));
    CHECK(sidelane_world_close(world));
    CHECK(sidelane_group_close(group));
    CHECK(sidelane_ep_close(ep));
    REFUSED(sidelane_ep_dispatch(ep, &tx, &routing, &rows, &handle), SIDELANE_ERROR_HANDLE, "was closed");
    sidelane_handle_info_t layout = {.size = sizeof layout};
    CHECK(sidelane_handle_info(handle, &layout));
    REQUIRE(layout.rows == info.rows && info.row_bytes == ROW);
    float sum = 0;
    for (uint64_t i = 0; i < info.rows * HIDDEN; i++) sum += ((float *)info.data)[i];
    REQUIRE(sum > 0);
    CHECK(sidelane_handle_close(handle));
    CHECK(sidelane_rows_info(rows, &info));
    CHECK(sidelane_rows_close(rows));
}

int main(void) {
    for (int i = 0; i < TOKENS * HIDDEN; i++) x[i] = (float)(i + 1);
    REQUIRE(strcmp(sidelane_last_message(), "") == 0);
    CHECK(sidelane_world_from_env(NULL, &world));
    CHECK(sidelane_world_group(world, NULL, 0, &group));
    sidelane_world_info_t info = {.size = sizeof info};
    CHECK(sidelane_world_info(world, &info));
    REQUIRE(info.ranks == 2);
    rank = info.rank;
    REQUIRE(strcmp(sidelane_status_name(SIDELANE_ERROR_PLAN), "SIDELANE_ERROR_PLAN") == 0);
    REQUIRE(strcmp(sidelane_status_name(-7), "unknown status") == 0);

    nothing_where_something_must_be();
    structs_of_a_wrong_size();
    handles_that_are_none();
    windows();
    ranks_that_build_differently();
    calls_that_are_not_there();
    dispatches();
    prepares();
    a_rank_without_tokens();
    combines();
    gradients();
    masks();
    halves();
    forked();
    from_several_threads();
    closed_in_any_order();
    printf("rank %u: refused as it should be\n", rank);
    return 0;
}
