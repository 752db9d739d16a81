// A layer in a CUDA graph, once planned with a budget and once in slots: captured by CUDA's own calls, and launched with other
// tokens each time.

#include <string.h>

#include "gpu.h"

enum { EXPERTS = 4, TOP_K = 2, HIDDEN = 8, TOKENS = 6, BUDGET = 2 * TOKENS * TOP_K, BYTES = TOKENS * HIDDEN * sizeof(float) };

static uint32_t rank;
static CUstream cuda;
static sidelane_stream_t *stream;
static sidelane_group_t *group;
static float x[TOKENS * HIDDEN], y[TOKENS * HIDDEN];
static int32_t ids[TOKENS * TOP_K];
static sidelane_tensor_t tx, out;
static sidelane_routing_t routing;

static sidelane_tensor_t tensor(CUdeviceptr at) {
    return (sidelane_tensor_t){.data = (void *)at, .rows = TOKENS, .columns = HIDDEN, .dtype = SIDELANE_DTYPE_F32};
}

// Launches the graph with other tokens and other choices: each comes home as often as `times` says of its choices.
static void replayed(CUgraphExec graph, float (*times)(const int32_t *)) {
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < TOKENS * HIDDEN; i++) x[i] = (float)(1000 * round + 100 * rank + i);
        for (int t = 0; t < TOKENS; t++) {
            ids[t * TOP_K] = (int32_t)((t + round + rank) % EXPERTS);
            ids[t * TOP_K + 1] = round == 2 ? -1 : (int32_t)((t * 3 + round + rank + 1 + t % 2) % EXPERTS);
            if (ids[t * TOP_K + 1] == ids[t * TOP_K]) ids[t * TOP_K + 1] = -1;
        }
        CUDA(cuMemcpyHtoD((CUdeviceptr)tx.data, x, sizeof x));
        CUDA(cuMemcpyHtoD((CUdeviceptr)routing.experts, ids, sizeof ids));
        CUDA(cuGraphLaunch(graph, cuda));
        CUDA(cuStreamSynchronize(cuda));
        CUDA(cuMemcpyDtoH(y, (CUdeviceptr)out.data, sizeof y));
        for (int i = 0; i < TOKENS * HIDDEN; i++) REQUIRE(y[i] == x[i] * times(ids + i / HIDDEN * TOP_K));
    }
}

static float chosen(const int32_t *of) { return (float)((of[0] >= 0) + (of[1] >= 0)); }

static float ranks_of(const int32_t *of) {
    int32_t first = of[0] / (EXPERTS / 2), second = of[1] < 0 ? first : of[1] / (EXPERTS / 2);
    return first == second ? 1 : 2;
}

static CUgraphExec captured(void) {
    CUgraph graph;
    CUgraphExec made;
    CUDA(cuStreamEndCapture(cuda, &graph));
    CUDA(cuGraphInstantiateWithFlags(&made, graph, 0));
    CUDA(cuGraphDestroy(graph));
    return made;
}

static void planned(void) {
    sidelane_planned_t *planned;
    sidelane_ep_options_t options = {.size = sizeof options, .experts = EXPERTS, .top_k = TOP_K, .hidden = HIDDEN,
                                     .dtype = SIDELANE_DTYPE_F32, .max_tokens = TOKENS, .mode = SIDELANE_MODE_BUDGET,
                                     .mode_rows = BUDGET};
    CHECK(sidelane_planned_build(group, &options, NULL, NULL, stream, &planned));
    sidelane_planned_dispatch_t *dispatch;
    sidelane_planned_rows_t *rows;
    sidelane_planned_handle_t *handle;
    sidelane_planned_output_t *output;
    CUDA(cuStreamBeginCapture(cuda, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    CHECK(sidelane_planned_dispatch_start(planned, &tx, &routing, &dispatch));
    CHECK(sidelane_planned_dispatch_unfinished(dispatch, &rows, &handle));
    sidelane_planned_rows_info_t in = {.size = sizeof in};
    sidelane_output_info_t to = {.size = sizeof to};
    CHECK(sidelane_planned_rows_info(rows, &in));
    CHECK(sidelane_planned_handle_output(handle, &output));
    CHECK(sidelane_planned_output_info(output, &to));
    REQUIRE(in.rows == BUDGET && to.rows == BUDGET);
    CUDA(cuMemcpyDtoDAsync((CUdeviceptr)to.data, (CUdeviceptr)in.data, in.rows * in.row_bytes, cuda));
    CHECK(sidelane_planned_combine(planned, output, handle, &out, NULL));
    CUgraphExec graph = captured();
    replayed(graph, chosen);
    uint32_t status;
    CHECK(sidelane_planned_handle_status(handle, &status));
    REQUIRE(status == SIDELANE_PLANNED_WELL);
    CUDA(cuGraphExecDestroy(graph));
    CHECK(sidelane_planned_rows_close(rows));
    CHECK(sidelane_planned_handle_close(handle));
    CHECK(sidelane_planned_close(planned));
}

static void slots(void) {
    sidelane_slots_t *slots;
    sidelane_slots_options_t options = {.size = sizeof options, .experts = EXPERTS, .top_k = TOP_K, .hidden = HIDDEN,
                                        .dtype = SIDELANE_DTYPE_F32, .max_tokens = TOKENS};
    CHECK(sidelane_slots_build(group, &options, NULL, stream, &slots));
    sidelane_slots_info_t info = {.size = sizeof info};
    CHECK(sidelane_slots_info(slots, &info));
    CUDA(cuStreamBeginCapture(cuda, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    CHECK(sidelane_slots_dispatch_start(slots, stream, &tx, &routing));
    CHECK(sidelane_slots_dispatch_finish(slots, stream));
    for (uint64_t r = 0; r < info.ranks; r++) {
        CUdeviceptr from = (CUdeviceptr)info.received + r * info.slot_bytes + info.rows_at;
        CUDA(cuMemcpyDtoDAsync((CUdeviceptr)info.partials + r * info.partial_bytes, from, info.partial_bytes, cuda));
    }
    CHECK(sidelane_slots_combine_start(slots, stream));
    CHECK(sidelane_slots_combine_finish(slots, stream, &out));
    CUgraphExec graph = captured();
    replayed(graph, ranks_of);
    CHECK(sidelane_slots_synchronize(slots, stream));
    CHECK(sidelane_slots_status(slots));
    CUDA(cuGraphExecDestroy(graph));
    CHECK(sidelane_slots_close(slots));
}

int main(void) {
    sidelane_world_t *world;
    CHECK(sidelane_world_from_env(NULL, &world));
    CHECK(sidelane_world_group(world, NULL, 0, &group));
    sidelane_group_info_t me = {.size = sizeof me};
    CHECK(sidelane_group_info(group, &me));
    rank = me.rank;
    REQUIRE(me.ranks == 2);
    CUcontext context;
    CUDA(cuInit(0));
    CUDA(cuDevicePrimaryCtxRetain(&context, (int)rank));
    CUDA(cuCtxSetCurrent(context));
    CUDA(cuStreamCreate(&cuda, CU_STREAM_NON_BLOCKING));
    CHECK(sidelane_stream_borrow(rank, cuda, &stream));
    float weights[TOKENS * TOP_K];
    for (int i = 0; i < TOKENS * TOP_K; i++) weights[i] = 1;
    tx = tensor(on_device(x, BYTES)), out = tensor(on_device(y, BYTES));
    routing = (sidelane_routing_t){.experts = (int32_t *)on_device(ids, sizeof ids),
                                   .weights = (float *)on_device(weights, sizeof weights), .tokens = TOKENS, .top_k = TOP_K};
    planned();
    slots();
    printf("rank %u: graphs replayed\n", rank);
    CHECK(sidelane_stream_close(stream));
    CHECK(sidelane_group_close(group));
    CHECK(sidelane_world_close(world));
    return 0;
}
