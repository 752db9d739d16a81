// What a C program with devices can do wrong, on two ranks: each time a status and a sentence, and the next call works.

#include <string.h>

#include "gpu.h"
#include "refused.h"

enum { HIDDEN = 8, TOP_K = 2, TOKENS = 3, EXPERTS = 4 };

uint32_t rank;

static sidelane_world_t *world;
static sidelane_group_t *group;
static sidelane_stream_t *stream;
static sidelane_planned_t *planned;
static sidelane_slots_t *slots;
static CUstream cuda;

static float x[TOKENS * HIDDEN], y[TOKENS * HIDDEN];
static const int32_t ids[TOKENS * TOP_K] = {0, 3, 1, 2, 3, 0};
static const float weights[TOKENS * TOP_K] = {1, 1, 1, 1, 1, 1};
static sidelane_tensor_t tx, out, other, host;
static sidelane_routing_t routing;

static sidelane_ep_options_t good(void) {
    return (sidelane_ep_options_t){.size = sizeof(sidelane_ep_options_t), .experts = EXPERTS, .top_k = TOP_K,
        .hidden = HIDDEN, .dtype = SIDELANE_DTYPE_F32, .max_tokens = 16};
}

static const sidelane_planned_options_t small = {.size = sizeof small, .pool = 1 << 20};

static sidelane_tensor_t tensor(void *at) {
    return (sidelane_tensor_t){.data = at, .rows = TOKENS, .columns = HIDDEN, .dtype = SIDELANE_DTYPE_F32};
}

// A dispatch that works, up to its output.
static void dispatched(sidelane_planned_handle_t **handle, sidelane_planned_output_t **output) {
    sidelane_planned_dispatch_t *dispatch;
    sidelane_planned_rows_t *rows;
    CHECK(sidelane_planned_dispatch_start(planned, &tx, &routing, &dispatch));
    CHECK(sidelane_planned_dispatch_finish(dispatch, &rows, handle));
    CHECK(sidelane_planned_handle_output(*handle, output));
    sidelane_planned_rows_info_t in = {.size = sizeof in};
    sidelane_output_info_t to = {.size = sizeof to};
    CHECK(sidelane_planned_rows_info(rows, &in));
    CHECK(sidelane_planned_output_info(*output, &to));
    CUDA(cuMemcpyDtoDAsync((CUdeviceptr)to.data, (CUdeviceptr)in.data, in.rows * in.row_bytes, cuda));
    CHECK(sidelane_planned_rows_close(rows));
}

// What it is all for: whatever was refused before, a dispatch and a combine work.
static void a_round_works(void) {
    sidelane_planned_handle_t *handle;
    sidelane_planned_output_t *output;
    dispatched(&handle, &output);
    CHECK(sidelane_planned_combine(planned, output, handle, &out, NULL));
    CUDA(cuStreamSynchronize(cuda));
    CUDA(cuMemcpyDtoH(y, (CUdeviceptr)out.data, sizeof y));
    for (int i = 0; i < TOKENS * HIDDEN; i++) REQUIRE(y[i] == 2 * x[i]);
    CHECK(sidelane_planned_handle_close(handle));
}

static void streams(void) {
    sidelane_stream_t *none;
    REFUSED(sidelane_stream_borrow(99, cuda, &none), SIDELANE_ERROR_DEVICE, "no device 99");
    REFUSED(sidelane_stream_borrow(1 - rank, cuda, &none), SIDELANE_ERROR_DEVICE, "a stream of device");
    REFUSED(sidelane_stream_borrow(rank, (void *)2, &none), SIDELANE_ERROR_DEVICE, "another one in each thread");
    REFUSED(sidelane_stream_borrow(rank, cuda, NULL), SIDELANE_ERROR_ARGUMENT, "stream is NULL");
    REFUSED(sidelane_stream_close((sidelane_stream_t *)world), SIDELANE_ERROR_HANDLE, "a sidelane_stream_t was expected");
}

// One rank has no stream to build with: both are told.
static void builds(void) {
    sidelane_ep_options_t options = good();
    REFUSED_ON_BOTH(sidelane_planned_build(group, &options, NULL, &small, rank == 1 ? NULL : stream, &planned),
                    SIDELANE_ERROR_HANDLE, "sidelane_stream_t is NULL", SIDELANE_ERROR_CALL, "whether their settings can be used");
    options.layout = SIDELANE_LAYOUT_RANK_MAJOR;
    REFUSED(sidelane_planned_build(group, &options, NULL, &small, stream, &planned), SIDELANE_ERROR_PLAN, "expert-major");
    options = good();
    CHECK(sidelane_planned_build(group, &options, NULL, &small, stream, &planned));
    sidelane_slots_options_t few = {.size = sizeof few, .experts = EXPERTS, .top_k = TOP_K, .hidden = HIDDEN,
                                    .dtype = SIDELANE_DTYPE_F32, .max_tokens = TOKENS};
    few.reserved = rank == 1;
    REFUSED_ON_BOTH(sidelane_slots_build(group, &few, NULL, stream, &slots), SIDELANE_ERROR_ARGUMENT, "reserved",
                    SIDELANE_ERROR_CALL, "whether their settings can be used");
    few.reserved = 0;
    CHECK(sidelane_slots_build(group, &few, NULL, stream, &slots));
}

// Tensors of one rank that the device cannot use: that rank is told at once, the other when it asks.
static void dispatches(void) {
    sidelane_tensor_t wide = tx, odd = tx, halves = tx;
    wide.columns = HIDDEN + 1;
    odd.data = (char *)odd.data + 4;
    halves.dtype = SIDELANE_DTYPE_BF16;
    sidelane_routing_t on_host = routing, choosy = routing;
    on_host.experts = ids;
    choosy.top_k = 1;
    struct { const sidelane_tensor_t *x; const sidelane_routing_t *routing; sidelane_status_t status; const char *words; } wrong[] = {
        {NULL, &routing, SIDELANE_ERROR_ARGUMENT, "x is NULL"},
        {&host, &routing, SIDELANE_ERROR_DEVICE, "not memory of device"},
        {&other, &routing, SIDELANE_ERROR_DEVICE, "x at "},
        {&wide, &routing, SIDELANE_ERROR_ARGUMENT, "expected [3, 8]"},
        {&halves, &routing, SIDELANE_ERROR_PLAN, "x"},
        {&tx, &on_host, SIDELANE_ERROR_DEVICE, "routing.experts at "},
        {&tx, &choosy, SIDELANE_ERROR_ARGUMENT, "routing is [3, 1]"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        sidelane_planned_dispatch_t *dispatch;
        if (rank == 1) {
            REFUSED(sidelane_planned_dispatch_start(planned, wrong[i].x, wrong[i].routing, &dispatch), wrong[i].status,
                    wrong[i].words);
        } else {
            sidelane_planned_rows_t *rows;
            sidelane_planned_handle_t *handle;
            CHECK(sidelane_planned_dispatch_start(planned, &tx, &routing, &dispatch));
            REFUSED(sidelane_planned_dispatch_finish(dispatch, &rows, &handle), SIDELANE_ERROR_CALL, "rank 1");
        }
    }
    // What the kernels' alignment asks for is the library's to say, when it is asked.
    sidelane_planned_dispatch_t *dispatch;
    sidelane_planned_rows_t *rows;
    sidelane_planned_handle_t *handle;
    CHECK(sidelane_planned_dispatch_start(planned, rank == 1 ? &odd : &tx, &routing, &dispatch));
    REFUSED_ON_BOTH(sidelane_planned_dispatch_finish(dispatch, &rows, &handle), SIDELANE_ERROR_DEVICE, "multiple of 16",
                    SIDELANE_ERROR_CALL, "rank 1");
    REFUSED(sidelane_planned_dispatch_finish(dispatch, &rows, &handle), SIDELANE_ERROR_HANDLE, "used up");
    a_round_works();
}

static void combines(void) {
    for (int wrong = 0; wrong < 2; wrong++) {
        sidelane_planned_handle_t *handle;
        sidelane_planned_output_t *output;
        sidelane_planned_combine_t *combine;
        dispatched(&handle, &output);
        // To refuse takes no memory: there is none.
        static sidelane_planned_output_t *all[1 << 13];
        size_t taken = 0, most = rank == 1 && wrong ? sizeof all / sizeof *all : 0;
        while (taken < most && sidelane_planned_handle_output(handle, all + taken) == SIDELANE_OK) taken++;
        REQUIRE(taken < most || !most);
        if (rank == 1) {
            REFUSED(sidelane_planned_combine(planned, wrong ? NULL : output, handle, wrong ? &out : &host, &combine),
                    wrong ? SIDELANE_ERROR_HANDLE : SIDELANE_ERROR_DEVICE, wrong ? "is NULL" : "out at ");
            CHECK(sidelane_planned_output_close(wrong ? output : NULL));
            while (taken > 0) CHECK(sidelane_planned_output_close(all[--taken]));
        } else {
            CHECK(sidelane_planned_combine(planned, output, handle, &out, &combine));
            REFUSED(sidelane_planned_combine_finish(combine, NULL), SIDELANE_ERROR_CALL, "rank 1");
        }
        // Sums are zeros then, and the status says why.
        CUDA(cuStreamSynchronize(cuda));
        uint32_t status;
        CHECK(sidelane_planned_handle_status(handle, &status));
        REQUIRE(status == (rank == 1 ? SIDELANE_PLANNED_REFUSED : SIDELANE_PLANNED_PEER_REFUSED));
        CHECK(sidelane_planned_handle_close(handle));
        a_round_works();
    }
}

// Nobody waits for a call that was refused: it is made again.
static void calls_in_slots(void) {
    sidelane_slots_info_t info = {.size = sizeof info};
    CHECK(sidelane_slots_info(slots, &info));
    REFUSED(sidelane_slots_dispatch_start(slots, stream, &host, &routing), SIDELANE_ERROR_DEVICE, "x at ");
    REFUSED(sidelane_slots_combine_start(slots, stream), SIDELANE_ERROR_CALL, "start_dispatch");
    REFUSED(sidelane_slots_dispatch_start(slots, NULL, &tx, &routing), SIDELANE_ERROR_HANDLE, "sidelane_stream_t is NULL");
    sidelane_tensor_t more = tx;
    sidelane_routing_t too_many = routing;
    too_many.tokens = more.rows = TOKENS + 1;
    REFUSED(sidelane_slots_dispatch_start(slots, stream, &more, &too_many), SIDELANE_ERROR_PLAN, "4");
    CHECK(sidelane_slots_dispatch_start(slots, stream, &tx, &routing));
    REFUSED(sidelane_slots_dispatch_start(slots, stream, &tx, &routing), SIDELANE_ERROR_CALL, "finish_dispatch");
    CHECK(sidelane_slots_dispatch_finish(slots, stream));
    for (uint64_t r = 0; r < info.ranks; r++) {
        CUdeviceptr from = (CUdeviceptr)info.received + r * info.slot_bytes + info.rows_at;
        CUDA(cuMemcpyDtoDAsync((CUdeviceptr)info.partials + r * info.partial_bytes, from, info.partial_bytes, cuda));
    }
    CHECK(sidelane_slots_combine_start(slots, stream));
    REFUSED(sidelane_slots_combine_finish(slots, stream, &other), SIDELANE_ERROR_DEVICE, "lies on device");
    CHECK(sidelane_slots_combine_finish(slots, stream, &out));
    CHECK(sidelane_slots_synchronize(slots, stream));
    CUDA(cuMemcpyDtoH(y, (CUdeviceptr)out.data, sizeof y));
    for (int i = 0; i < TOKENS * HIDDEN; i++) REQUIRE(y[i] == 2 * x[i]);
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
    out = tensor((void *)on_device(y, sizeof y));
    other = tensor((void *)there);
    host = tensor(x);
    CUdeviceptr dids, dweights;
    CUDA(cuMemAlloc(&dids, sizeof ids + 8));
    CUDA(cuMemAlloc(&dweights, sizeof weights + 8));
    CUDA(cuMemcpyHtoD(dids, ids, sizeof ids));
    CUDA(cuMemcpyHtoD(dweights, weights, sizeof weights));
    routing = (sidelane_routing_t){.experts = (int32_t *)dids, .weights = (float *)dweights, .tokens = TOKENS, .top_k = TOP_K};

    streams();
    builds();
    a_round_works();
    dispatches();
    combines();
    calls_in_slots();
    printf("rank %u: refused as it should be\n", rank);
    CHECK(sidelane_planned_close(planned));
    CHECK(sidelane_slots_close(slots));
    CHECK(sidelane_stream_close(stream));
    CHECK(sidelane_group_close(group));
    CHECK(sidelane_world_close(world));
    return 0;
}
