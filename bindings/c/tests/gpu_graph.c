// A layer in a CUDA graph, once with a budget and once in fixed slots: captured by CUDA's own
// calls, and launched with other tokens each time.

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
    return (sidelane_tensor_t){.data = (void *)at, .rows = TOKENS, .columns = HIDDEN, .dtype = SIDELANE_DTYPE_F32,
                               .place = SIDELANE_PLACE_DEVICE};
}

// Launches the graph with other tokens and other choices: each returns as often as `times` says for
// its choices.
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

static const char *const in_budget[] = {"pack", "tally", "check", "admit", "expand", "regroup"};
static const char *const in_slots[] = {"pack", "check", "", "", "", ""};

// A layer in this mode, its dispatch and its combine in a graph; the dispatch has these kernels.
static void in_a_graph(sidelane_ep_options_t options, float (*times)(const int32_t *), const char *const *kernels) {
    sidelane_ep_t *ep;
    options.size = sizeof options, options.stream = stream;
    options.experts = EXPERTS, options.top_k = TOP_K, options.hidden = HIDDEN;
    options.dtype = SIDELANE_DTYPE_F32, options.max_tokens = TOKENS;
    CHECK(sidelane_ep_build(group, &options, NULL, &ep));
    sidelane_pending_dispatch_t *dispatching;
    sidelane_rows_t *rows;
    sidelane_handle_t *handle;
    sidelane_output_t *output;
    CUDA(cuStreamBeginCapture(cuda, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    CHECK(sidelane_ep_dispatch_start(ep, &tx, &routing, &dispatching));
    CHECK(sidelane_dispatch_unfinished(dispatching, &rows, &handle));
    sidelane_rows_info_t in = {.size = sizeof in};
    sidelane_output_info_t to = {.size = sizeof to};
    CHECK(sidelane_rows_info(rows, &in));
    CHECK(sidelane_handle_output(handle, &output));
    CHECK(sidelane_output_info(output, &to));
    // Slots lie behind their headers; a budget has no slots.
    uint64_t parts = in.slot_bytes ? 2 : 1, bytes = in.rows * in.row_bytes / parts;
    REQUIRE(in.rows == (in.slot_bytes ? 2 * TOKENS : BUDGET) && to.rows == in.rows);
    for (uint64_t part = 0; part < parts; part++) {
        CUdeviceptr from = (CUdeviceptr)in.data + part * in.slot_bytes + in.slot_rows_at;
        CUDA(cuMemcpyDtoDAsync((CUdeviceptr)to.data + part * bytes, from, bytes, cuda));
    }
    CHECK(sidelane_ep_combine(ep, output, NULL, handle, &out));
    CUgraphExec graph = captured();
    replayed(graph, times);
    uint32_t status;
    CHECK(sidelane_handle_status(handle, &status));
    REQUIRE(status == SIDELANE_CALL_OK);
    sidelane_handle_info_t info = {.size = sizeof info};
    CHECK(sidelane_handle_info(handle, &info));
    REQUIRE(info.dropped_mask != NULL && info.dropped_count == 0);
    uint8_t dropped[TOKENS * TOP_K], none[TOKENS * TOP_K] = {0};
    CUDA(cuMemcpyDtoH(dropped, (CUdeviceptr)info.dropped_mask, sizeof dropped));
    REQUIRE(memcmp(dropped, none, sizeof none) == 0);
    sidelane_report_t report = {.size = sizeof report};
    CHECK(sidelane_handle_report(handle, &report));
    REQUIRE(sizeof report.kernels / sizeof *report.kernels == sizeof in_budget / sizeof *in_budget);
    for (unsigned i = 0; i < sizeof in_budget / sizeof *in_budget; i++)
        REQUIRE(strcmp(report.kernels[i].name, kernels[i]) == 0);
    CHECK(sidelane_ep_synchronize(ep));
    CUDA(cuGraphExecDestroy(graph));
    CHECK(sidelane_rows_close(rows));
    CHECK(sidelane_handle_close(handle));
    CHECK(sidelane_ep_close(ep));
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
                                   .weights = (float *)on_device(weights, sizeof weights), .tokens = TOKENS, .top_k = TOP_K,
                                   .place = SIDELANE_PLACE_DEVICE};
    sidelane_ep_options_t budget = {.mode = SIDELANE_MODE_BUDGET, .mode_rows = BUDGET, .graphs = SIDELANE_GRAPHS_SLOTS,
                                    .sum_order = SIDELANE_ORDER_RANK};
    sidelane_ep_options_t slots = {.mode = SIDELANE_MODE_SLOTS, .mode_rows = TOKENS, .sum_order = SIDELANE_ORDER_RANK,
                                   .layout = SIDELANE_LAYOUT_RANK_MAJOR};
    in_a_graph(budget, chosen, in_budget);
    in_a_graph(slots, ranks_of, in_slots);
    printf("rank %u: graphs replayed\n", rank);
    CHECK(sidelane_stream_close(stream));
    CHECK(sidelane_group_close(group));
    CHECK(sidelane_world_close(world));
    return 0;
}
