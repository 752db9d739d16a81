// Mistakes of a C program with devices, on two ranks: each gives a status and a message, and the
// next call works.

#include <string.h>

#include "gpu.h"
#include "refused.h"

enum { HIDDEN = 8, TOP_K = 2, TOKENS = 3, EXPERTS = 4 };

uint32_t rank;

static sidelane_world_t *world;
static sidelane_group_t *group;
static sidelane_stream_t *stream;
static sidelane_ep_t *ep, *slots;
static CUstream cuda;

static float x[TOKENS * HIDDEN], y[TOKENS * HIDDEN];
static const int32_t ids[TOKENS * TOP_K] = {0, 3, 1, 2, 3, 0};
static const float weights[TOKENS * TOP_K] = {1, 1, 1, 1, 1, 1};
static sidelane_tensor_t tx, out, other, host;
static sidelane_routing_t routing;

static sidelane_ep_options_t good(void) {
    return (sidelane_ep_options_t){.size = sizeof(sidelane_ep_options_t), .experts = EXPERTS, .top_k = TOP_K,
        .hidden = HIDDEN, .dtype = SIDELANE_DTYPE_F32, .max_tokens = 16, .max_in_flight = 1, .stream = stream,
        .device_heap = 1 << 20};
}

static sidelane_tensor_t tensor(void *at) {
    return (sidelane_tensor_t){.data = at, .rows = TOKENS, .columns = HIDDEN, .dtype = SIDELANE_DTYPE_F32,
        .place = SIDELANE_PLACE_DEVICE};
}

// Experts that change nothing, in exact sizes or in slots.
static void experts(sidelane_rows_t *rows, sidelane_handle_t *handle, sidelane_output_t **output) {
    sidelane_rows_info_t in = {.size = sizeof in};
    sidelane_output_info_t to = {.size = sizeof to};
    CHECK(sidelane_handle_output(handle, output));
    CHECK(sidelane_rows_info(rows, &in));
    CHECK(sidelane_output_info(*output, &to));
    uint64_t parts = in.slot_bytes ? 2 : 1, bytes = in.rows * in.row_bytes / parts;
    for (uint64_t part = 0; part < parts; part++) {
        CUdeviceptr from = (CUdeviceptr)in.data + part * in.slot_bytes + in.slot_rows_at;
        CUDA(cuMemcpyDtoDAsync((CUdeviceptr)to.data + part * bytes, from, bytes, cuda));
    }
    CHECK(sidelane_rows_close(rows));
}

// A dispatch that works, up to its output.
static void dispatched_by(sidelane_ep_t *layer, sidelane_handle_t **handle, sidelane_output_t **output) {
    sidelane_rows_t *rows;
    CHECK(sidelane_ep_dispatch(layer, &tx, &routing, &rows, handle));
    experts(rows, *handle, output);
}

static void dispatched(sidelane_handle_t **handle, sidelane_output_t **output) {
    dispatched_by(ep, handle, output);
}

static void sums_are(float times) {
    CUDA(cuMemcpyDtoH(y, (CUdeviceptr)out.data, sizeof y));
    for (int i = 0; i < TOKENS * HIDDEN; i++) REQUIRE(y[i] == times * x[i]);
}

static void sums_are_right(void) {
    sums_are(2);
}

// A dispatch and a combine: so many times the tokens.
static void round_gives(sidelane_ep_t *layer, float times) {
    sidelane_handle_t *handle;
    sidelane_output_t *output;
    dispatched_by(layer, &handle, &output);
    CHECK(sidelane_ep_combine(layer, output, NULL, handle, &out));
    CHECK(sidelane_ep_synchronize(layer));
    sums_are(times);
    CHECK(sidelane_handle_close(handle));
}

// The purpose: after all these refusals, a dispatch and a combine work.
static void a_round_works(void) {
    round_gives(ep, 2);
}

static void streams(void) {
    sidelane_stream_t *none;
    REFUSED(sidelane_stream_borrow(99, cuda, &none), SIDELANE_ERROR_DEVICE, "no device 99");
    REFUSED(sidelane_stream_borrow(1 - rank, cuda, &none), SIDELANE_ERROR_DEVICE, "a stream of device");
    REFUSED(sidelane_stream_borrow(rank, (void *)2, &none), SIDELANE_ERROR_DEVICE, "another one in each thread");
    REFUSED(sidelane_stream_borrow(rank, cuda, NULL), SIDELANE_ERROR_ARGUMENT, "stream is NULL");
    REFUSED(sidelane_stream_close((sidelane_stream_t *)world), SIDELANE_ERROR_HANDLE, "a sidelane_stream_t was expected");
}

// One rank has no stream to build with, or settings that it cannot use: both get an error.
static void builds(void) {
    sidelane_ep_options_t options = good();
    if (rank == 1) options.stream = (sidelane_stream_t *)world;
    REFUSED_ON_BOTH(sidelane_ep_build(group, &options, NULL, &ep), SIDELANE_ERROR_HANDLE,
                    "a sidelane_stream_t was expected", SIDELANE_ERROR_CALL, "the settings of rank 1 cannot be used");
    options = good();
    if (rank == 1) options.stream = NULL, options.max_in_flight = 0, options.device_heap = 0;
    REFUSED(sidelane_ep_build(group, &options, NULL, &ep), SIDELANE_ERROR_CALL, "whether rows lie on a device");
    options = good();
    options.strategy = SIDELANE_STRATEGY_ALL_GATHER;
    REFUSED(sidelane_ep_build(group, &options, NULL, &ep), SIDELANE_ERROR_PLAN, "(enqueuer): dispatch by all-gather");
    options = good();
    options.stream = NULL;
    REFUSED(sidelane_ep_build(group, &options, NULL, &ep), SIDELANE_ERROR_PLAN, "max_in_flight");
    options.max_in_flight = 0;
    REFUSED(sidelane_ep_build(group, &options, NULL, &ep), SIDELANE_ERROR_PLAN, "device_heap");
    options.device_heap = 0, options.device_heap_limit = 1 << 20;
    REFUSED(sidelane_ep_build(group, &options, NULL, &ep), SIDELANE_ERROR_PLAN, "device_heap");
    options.device_heap_limit = 0, options.max_blocks = 4;
    REFUSED(sidelane_ep_build(group, &options, NULL, &ep), SIDELANE_ERROR_PLAN, "max_blocks");
    options = good();
    options.device_heap_limit = options.device_heap - 1;
    REFUSED(sidelane_ep_build(group, &options, NULL, &ep), SIDELANE_ERROR_PLAN, "device_heap_limit");
    options.device_heap_limit = 2 * options.device_heap;
    CHECK(sidelane_ep_build(group, &options, NULL, &ep));
    sidelane_ep_options_t few = good();
    few.max_in_flight = 0, few.device_heap = 0;
    few.mode = SIDELANE_MODE_SLOTS, few.layout = SIDELANE_LAYOUT_RANK_MAJOR, few.sum_order = SIDELANE_ORDER_RANK;
    few.max_tokens = TOKENS, few.mode_rows = rank == 1 ? TOKENS - 1 : TOKENS;
    REFUSED_ON_BOTH(sidelane_ep_build(group, &few, NULL, &slots), SIDELANE_ERROR_PLAN, "slots than tokens",
                    SIDELANE_ERROR_CALL, "the settings of rank 1 cannot be used");
    few.mode_rows = TOKENS;
    CHECK(sidelane_ep_build(group, &few, NULL, &slots));
}

// Tensors of one rank that the device cannot use: that rank gets the error at once, the other when
// it queries.
static void dispatches(void) {
    sidelane_pending_dispatch_t *dispatching;
    sidelane_rows_t *rows;
    sidelane_handle_t *handle;
    sidelane_tensor_t wide = tx, odd = tx, halves = tx, nowhere = tx;
    wide.columns = HIDDEN + 1;
    odd.data = (char *)odd.data + 4;
    halves.dtype = SIDELANE_DTYPE_BF16;
    nowhere.place = SIDELANE_PLACE_HOST;
    sidelane_routing_t on_host = routing, choosy = routing, unplaced = routing;
    on_host.experts = ids;
    choosy.top_k = 1;
    unplaced.place = SIDELANE_PLACE_HOST;
    struct { const sidelane_tensor_t *x; const sidelane_routing_t *routing; sidelane_status_t status; const char *words; } wrong[] = {
        {NULL, &routing, SIDELANE_ERROR_ARGUMENT, "x is NULL"},
        {&host, &routing, SIDELANE_ERROR_DEVICE, "not memory of device"},
        {&other, &routing, SIDELANE_ERROR_DEVICE, "x at "},
        {&wide, &routing, SIDELANE_ERROR_ARGUMENT, "expected [3, 8]"},
        {&nowhere, &routing, SIDELANE_ERROR_PLAN, "x: of the host, expected of a device"},
        {&tx, &on_host, SIDELANE_ERROR_DEVICE, "routing.experts at "},
        {&tx, &choosy, SIDELANE_ERROR_ARGUMENT, "routing is [3, 1], expected [3, 2]"},
        {&tx, &unplaced, SIDELANE_ERROR_PLAN, "routing: of the host"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        REFUSED_ON_BOTH(sidelane_ep_dispatch(ep, rank == 1 ? wrong[i].x : &tx, rank == 1 ? wrong[i].routing : &routing,
                                             &rows, &handle), wrong[i].status, wrong[i].words, SIDELANE_ERROR_CALL, "rank 1");
        if (rank == 1) {
            REFUSED(sidelane_ep_dispatch_start(ep, wrong[i].x, wrong[i].routing, &dispatching), wrong[i].status,
                    wrong[i].words);
        } else {
            CHECK(sidelane_ep_dispatch_start(ep, &tx, &routing, &dispatching));
            REFUSED(sidelane_dispatch_finish(dispatching, &rows, &handle), SIDELANE_ERROR_CALL, "rank 1");
        }
    }
    // Element type and the kernels' alignment are the library's to check, and said when the caller
    // asks.
    for (int misaligned = 0; misaligned < 2; misaligned++) {
        CHECK(sidelane_ep_dispatch_start(ep, rank == 0 ? &tx : misaligned ? &odd : &halves, &routing, &dispatching));
        REFUSED_ON_BOTH(sidelane_dispatch_finish(dispatching, &rows, &handle),
                        misaligned ? SIDELANE_ERROR_DEVICE : SIDELANE_ERROR_PLAN,
                        misaligned ? "multiple of 16" : "bf16", SIDELANE_ERROR_CALL, "rank 1");
        REFUSED(sidelane_dispatch_finish(dispatching, &rows, &handle), SIDELANE_ERROR_HANDLE, "consumed by");
    }
    a_round_works();
    // Exact sizes are not known without waiting.
    CHECK(sidelane_ep_dispatch_start(ep, &tx, &routing, &dispatching));
    REFUSED(sidelane_dispatch_unfinished(dispatching, &rows, &handle), SIDELANE_ERROR_PLAN, "(enqueuer): sizes on the device");
    a_round_works();
    // One call is pending at a time, and no more dispatches are in flight than was said.
    sidelane_pending_dispatch_t *second;
    CHECK(sidelane_ep_dispatch_start(ep, &tx, &routing, &dispatching));
    REFUSED(sidelane_ep_dispatch_start(ep, &tx, &routing, &second), SIDELANE_ERROR_BUSY, "finish that first");
    CHECK(sidelane_dispatch_finish(dispatching, &rows, &handle));
    sidelane_rows_t *more;
    sidelane_handle_t *further;
    CHECK(sidelane_ep_dispatch_start(ep, &tx, &routing, &second));
    REFUSED(sidelane_dispatch_finish(second, &more, &further), SIDELANE_ERROR_CALL, "1 dispatches are in flight");
    CHECK(sidelane_rows_close(rows));
    CHECK(sidelane_handle_close(handle));
    a_round_works();
}

// Exact sizes lack these calls: each is refused by name at every rank, before any other error.
static void calls_that_are_not_there(void) {
    sidelane_handle_t *handle;
    sidelane_output_t *output;
    dispatched(&handle, &output);
    REFUSED(sidelane_ep_release(ep, handle), SIDELANE_ERROR_PLAN, "release without combine");
    CHECK(sidelane_ep_combine(ep, output, NULL, handle, &out));
    CHECK(sidelane_handle_return_report(handle, NULL));
    CHECK(sidelane_handle_close(handle));
    a_round_works();
}

// Rows along a layout and both gradients, with invalid arguments of one rank.
static void gradients(void) {
    sidelane_handle_t *handle;
    sidelane_output_t *output;
    sidelane_rows_t *rows;
    REFUSED_ON_BOTH(sidelane_ep_prepare(ep, rank == 1 ? NULL : &routing, &handle), SIDELANE_ERROR_ARGUMENT,
                    "routing is NULL", SIDELANE_ERROR_CALL, "rank 1");
    CHECK(sidelane_ep_set_stream(ep, stream));
    CHECK(sidelane_ep_prepare(ep, &routing, &handle));
    CHECK(sidelane_ep_dispatch_cached(ep, &tx, handle, &rows));
    experts(rows, handle, &output);
    CHECK(sidelane_ep_combine(ep, output, NULL, handle, &out));
    CHECK(sidelane_ep_synchronize(ep));
    sums_are_right();
    REFUSED_ON_BOTH(sidelane_ep_combine_backward(ep, rank == 1 ? NULL : &tx, handle, &rows, NULL), SIDELANE_ERROR_ARGUMENT,
                    "gradients is NULL", SIDELANE_ERROR_CALL, "rank 1");
    CHECK(sidelane_ep_combine_backward(ep, &tx, handle, &rows, NULL));
    experts(rows, handle, &output);
    sidelane_handle_info_t layout = {.size = sizeof layout};
    CHECK(sidelane_handle_info(handle, &layout));
    float ones[64], returned[TOKENS * TOP_K];
    for (int i = 0; i < 64; i++) ones[i] = 1;
    CUdeviceptr of_rows, of_choices;
    CUDA(cuMemAlloc(&of_rows, sizeof ones));
    CUDA(cuMemAlloc(&of_choices, sizeof returned));
    CUDA(cuMemcpyHtoD(of_rows, ones, sizeof ones));
    REQUIRE(layout.rows <= 64);
    CHECK(sidelane_ep_dispatch_backward(ep, output, NULL, (float *)of_rows, handle, &out, (float *)of_choices));
    CHECK(sidelane_ep_synchronize(ep));
    sums_are_right();
    CUDA(cuMemcpyDtoH(returned, of_choices, sizeof returned));
    for (int i = 0; i < TOKENS * TOP_K; i++) REQUIRE(returned[i] == 1);
    CHECK(sidelane_handle_close(handle));
    CUDA(cuMemFree(of_rows));
    CUDA(cuMemFree(of_choices));
    a_round_works();
}

static void combines(void) {
    enum { NO_PLACE, NO_OUTPUT, OVERLAP, MISTAKES };
    for (int wrong = 0; wrong < MISTAKES; wrong++) {
        sidelane_handle_t *handle;
        sidelane_output_t *output;
        dispatched(&handle, &output);
        // To refuse takes no memory: there is none.
        static sidelane_output_t *all[1 << 13];
        size_t taken = 0, most = rank == 1 && wrong == NO_OUTPUT ? sizeof all / sizeof *all : 0;
        while (taken < most && sidelane_handle_output(handle, all + taken) == SIDELANE_OK) taken++;
        REQUIRE(taken < most || !most);
        sidelane_handle_info_t layout = {.size = sizeof layout};
        CHECK(sidelane_handle_info(handle, &layout));
        if (rank == 1 && wrong == NO_PLACE) {
            REFUSED(sidelane_ep_combine(ep, output, NULL, handle, &host), SIDELANE_ERROR_DEVICE, "out at ");
        } else if (rank == 1 && wrong == NO_OUTPUT) {
            REFUSED(sidelane_ep_combine(ep, NULL, NULL, handle, &out), SIDELANE_ERROR_ARGUMENT,
                    "outputs and tensors given = 0");
        } else if (rank == 1) {
            sidelane_tensor_t inside = out;
            inside.rows = layout.rows;
            REFUSED(sidelane_ep_combine(ep, NULL, &inside, handle, &out), SIDELANE_ERROR_ARGUMENT, "overlap");
        } else {
            REFUSED(sidelane_ep_combine(ep, output, NULL, handle, &out), SIDELANE_ERROR_CALL, "rank 1");
            REFUSED(sidelane_handle_return_report(handle, NULL), SIDELANE_ERROR_CALL, "rank 1");
        }
        // An output that comes with another wrong argument stays open.
        if (rank == 1) CHECK(sidelane_output_close(output));
        while (taken > 0) CHECK(sidelane_output_close(all[--taken]));
        // Sums are zeros then, and the status says why.
        CHECK(sidelane_ep_synchronize(ep));
        uint32_t status;
        CHECK(sidelane_handle_status(handle, &status));
        REQUIRE(status == (rank == 1 ? SIDELANE_CALL_REFUSED : SIDELANE_CALL_PEER_REFUSED));
        CUDA(cuMemcpyDtoH(y, (CUdeviceptr)out.data, sizeof y));
        for (int i = 0; i < TOKENS * HIDDEN && rank == 0; i++) REQUIRE(y[i] == 0);
        CHECK(sidelane_handle_close(handle));
        a_round_works();
    }
    // With a handle that is none, while the one dispatch that may be in flight is alive.
    sidelane_handle_t *handle;
    sidelane_output_t *output;
    dispatched(&handle, &output);
    if (rank == 1) {
        CHECK(sidelane_handle_close(handle));
        REFUSED(sidelane_ep_combine(ep, output, NULL, handle, &out), SIDELANE_ERROR_HANDLE, "was closed");
        CHECK(sidelane_output_close(output));
    } else {
        REFUSED(sidelane_ep_combine(ep, output, NULL, handle, &out), SIDELANE_ERROR_CALL, "rank 1");
        REFUSED(sidelane_handle_return_report(handle, NULL), SIDELANE_ERROR_CALL, "rank 1");
        CHECK(sidelane_handle_close(handle));
    }
    a_round_works();
    // Too late to refuse: the other rank gets its sums.
    sidelane_pending_combine_t *combining;
    dispatched(&handle, &output);
    CHECK(sidelane_ep_combine_start(ep, output, NULL, handle, &combining));
    if (rank == 1) {
        REFUSED(sidelane_combine_finish(combining, &other), SIDELANE_ERROR_DEVICE, "lies on device");
    } else {
        CHECK(sidelane_combine_finish(combining, &out));
        CHECK(sidelane_ep_synchronize(ep));
        sums_are_right();
    }
    CHECK(sidelane_handle_close(handle));
    a_round_works();
}

// No rank waits for a refused call: it is made again.
static void calls_in_slots(void) {
    sidelane_pending_dispatch_t *dispatching, *second;
    sidelane_pending_combine_t *combining;
    sidelane_rows_t *rows;
    sidelane_handle_t *handle;
    sidelane_output_t *output;
    REFUSED(sidelane_ep_dispatch_start(slots, &host, &routing, &dispatching), SIDELANE_ERROR_DEVICE, "x at ");
    REFUSED(sidelane_ep_set_stream(slots, NULL), SIDELANE_ERROR_HANDLE, "sidelane_stream_t is NULL");
    CHECK(sidelane_ep_set_stream(slots, stream));
    sidelane_tensor_t more = tx;
    sidelane_routing_t too_many = routing;
    too_many.tokens = more.rows = TOKENS + 1;
    REFUSED(sidelane_ep_dispatch(slots, &more, &too_many, &rows, &handle), SIDELANE_ERROR_PLAN, "4");
    CHECK(sidelane_ep_dispatch_start(slots, &tx, &routing, &dispatching));
    REFUSED(sidelane_ep_dispatch_start(slots, &tx, &routing, &second), SIDELANE_ERROR_BUSY, "finish that first");
    CHECK(sidelane_dispatch_finish(dispatching, &rows, &handle));
    REFUSED(sidelane_ep_dispatch_start(slots, &tx, &routing, &second), SIDELANE_ERROR_CALL, "start_combine or release");
    experts(rows, handle, &output);
    CHECK(sidelane_ep_combine_start(slots, output, NULL, handle, &combining));
    CHECK(sidelane_combine_finish(combining, &out));
    CHECK(sidelane_ep_synchronize(slots));
    sums_are_right();
    REFUSED(sidelane_ep_release(slots, handle), SIDELANE_ERROR_CALL, "start_dispatch");
    CHECK(sidelane_handle_close(handle));
}

// Rank 1 is masked and still makes all calls. Each token of rank 0 keeps the choice that stays.
// `refused` and `differ` are the other rank's errors. In slots ranks agree through the coordinator.
static void masks(sidelane_ep_t *layer, const char *refused, const char *differ) {
    static const uint8_t both[2] = {1, 1}, first[2] = {1, 0}, none[2] = {0, 0}, unknown[2] = {1, 2};
    struct { const uint8_t *active; uint32_t ranks; sidelane_status_t status; const char *words; } wrong[] = {
        {NULL, 2, SIDELANE_ERROR_ARGUMENT, "active is NULL"},
        {unknown, 2, SIDELANE_ERROR_ARGUMENT, "active = 2: 0 or 1"},
        {both, 1, SIDELANE_ERROR_PLAN, "ranks of the mask"},
        {none, 2, SIDELANE_ERROR_PLAN, "active ranks of the mask"},
    };
    uint8_t seen[2];
    CHECK(sidelane_ep_mask(layer, first, 2));
    round_gives(layer, rank == 0 ? 1 : 0);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        REFUSED_ON_BOTH(sidelane_ep_mask(layer, rank == 1 ? wrong[i].active : both, rank == 1 ? wrong[i].ranks : 2),
                        wrong[i].status, wrong[i].words, SIDELANE_ERROR_CALL, refused);
    }
    REFUSED(sidelane_ep_mask(layer, rank == 1 ? both : first, 2), SIDELANE_ERROR_CALL, differ);
    CHECK(sidelane_ep_active(layer, seen, 2));
    REQUIRE(memcmp(seen, first, 2) == 0);
    round_gives(layer, rank == 0 ? 1 : 0);
    CHECK(sidelane_ep_mask(layer, both, 2));
    round_gives(layer, 2);
}

// The other rank cannot go on without the second half: it started its own before this one is
// closed.
static void a_pending_call_that_is_closed(void) {
    sidelane_pending_dispatch_t *dispatching;
    sidelane_rows_t *rows;
    sidelane_handle_t *handle;
    sidelane_window_t *window;
    CHECK(sidelane_group_window(group, 64, &window));
    CHECK(sidelane_ep_dispatch_start(ep, &tx, &routing, &dispatching));
    if (rank == 1) {
        CHECK(sidelane_window_wait(window, 0, 1));
        CHECK(sidelane_pending_dispatch_close(dispatching));
    } else {
        CHECK(sidelane_window_signal(window, 1, 1));
        // Counts of rank 1 may be here already: then a later call says that the world has failed.
        sidelane_status_t status = sidelane_dispatch_finish(dispatching, &rows, &handle);
        REQUIRE(status == SIDELANE_OK || status == SIDELANE_ERROR_WORLD);
        if (status == SIDELANE_OK) {
            CHECK(sidelane_rows_close(rows));
            CHECK(sidelane_handle_close(handle));
        }
        while (sidelane_ep_check(ep) == SIDELANE_OK) continue;
    }
    REFUSED(sidelane_ep_dispatch(ep, &tx, &routing, &rows, &handle), SIDELANE_ERROR_WORLD, "rank 1");
    REFUSED(sidelane_ep_synchronize(ep), SIDELANE_ERROR_WORLD, "rank 1");
    CHECK(sidelane_window_close(window));
}

int main(void) {
    CHECK(sidelane_world_from_env(NULL, &world));
    CHECK(sidelane_world_group(world, NULL, 0, &group));
    sidelane_world_info_t me = {.size = sizeof me};
    CHECK(sidelane_world_info(world, &me));
    rank = me.rank;
    CUcontext contexts[2];
    CUDA(cuInit(0));
    for (int device = 0; device < 2; device++) CUDA(cuDevicePrimaryCtxRetain(contexts + device, device));
    CUDA(cuCtxSetCurrent(contexts[1 - rank]));
    CUdeviceptr there = on_device(x, sizeof x);
    CUDA(cuCtxSetCurrent(contexts[rank]));
    CUDA(cuStreamCreate(&cuda, CU_STREAM_NON_BLOCKING));
    CHECK(sidelane_stream_borrow(rank, cuda, &stream));
    for (int i = 0; i < TOKENS * HIDDEN; i++) x[i] = (float)(100 * rank + i);
    // One row more than is used, for a call that asks for it.
    CUdeviceptr dx;
    CUDA(cuMemAlloc(&dx, sizeof x + 32));
    CUDA(cuMemcpyHtoD(dx, x, sizeof x));
    tx = tensor((void *)dx);
    // And room for rows that overlap the sums.
    CUdeviceptr dout;
    CUDA(cuMemAlloc(&dout, 2 * sizeof y));
    out = tensor((void *)dout);
    other = tensor((void *)there);
    host = tensor(x);
    CUdeviceptr dids, dweights;
    CUDA(cuMemAlloc(&dids, sizeof ids + 8));
    CUDA(cuMemAlloc(&dweights, sizeof weights + 8));
    CUDA(cuMemcpyHtoD(dids, ids, sizeof ids));
    CUDA(cuMemcpyHtoD(dweights, weights, sizeof weights));
    routing = (sidelane_routing_t){.experts = (int32_t *)dids, .weights = (float *)dweights, .tokens = TOKENS, .top_k = TOP_K,
                                   .place = SIDELANE_PLACE_DEVICE};

    streams();
    builds();
    a_round_works();
    dispatches();
    calls_that_are_not_there();
    gradients();
    combines();
    calls_in_slots();
    masks(ep, "input of rank 1 was refused", "disagree");
    masks(slots, "the masks of rank 1 cannot be used", "the mask");
    a_pending_call_that_is_closed();
    printf("rank %u: refused as it should be\n", rank);
    CHECK(sidelane_ep_close(ep));
    CHECK(sidelane_ep_close(slots));
    CHECK(sidelane_stream_close(stream));
    CHECK(sidelane_group_close(group));
    CHECK(sidelane_world_close(world));
    return 0;
}
