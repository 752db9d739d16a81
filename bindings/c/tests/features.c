// Asks each executor for the features of the library's table, by settings and by calls. Each rank
// prints a line for each: rank, column, feature, and the refusal. tests/features.rs compares them
// with the table.

#include "gpu.h"

enum { EXPERTS = 4, TOP_K = 2, HIDDEN = 16, TOKENS = 3, MOST = 8, ROWS = 2 * MOST };

static uint32_t rank;
static sidelane_group_t *group;
static sidelane_stream_t *stream;
static const char *column;

static void said(const char *feature, sidelane_status_t status) {
    printf("%u|%s|%s|%s\n", rank, column, feature, status == SIDELANE_OK ? "served" : sidelane_last_message());
}

static void built(const char *feature, sidelane_ep_options_t options) {
    sidelane_ep_t *ep = NULL;
    said(feature, sidelane_ep_build(group, &options, NULL, &ep));
    CHECK(sidelane_ep_close(ep));
}

// Settings that ask for a feature, besides those of an executor.
#define ASK(feature, ...)                                                                          \
    do {                                                                                           \
        sidelane_ep_options_t o = plain;                                                           \
        __VA_ARGS__;                                                                               \
        built(feature, o);                                                                         \
    } while (0)

static void ask_settings(sidelane_ep_options_t plain) {
    ASK("expert-major rows", o.layout = SIDELANE_LAYOUT_EXPERT_MAJOR);
    ASK("rank-major rows", o.layout = SIDELANE_LAYOUT_RANK_MAJOR);
    ASK("fewer or more slots than tokens", o.mode = SIDELANE_MODE_SLOTS, o.mode_rows = MOST - 1);
    ASK("sums by expert", o.sum_order = SIDELANE_ORDER_EXPERT);
    ASK("sums by node", o.sum_order = SIDELANE_ORDER_NODE);
    ASK("partial sums in bf16", o.sum_order = SIDELANE_ORDER_RANK, o.partial_dtype = SIDELANE_PARTIAL_BF16);
    ASK("aligned segments", o.align = 4);
    ASK("relays (route pxn)", o.route = SIDELANE_ROUTE_PXN);
    ASK("relays that copy spans", o.layout = SIDELANE_LAYOUT_RANK_MAJOR, o.route = SIDELANE_ROUTE_PXN,
        o.coalesce_relays = 1);
    ASK("dispatch by all-gather", o.strategy = SIDELANE_STRATEGY_ALL_GATHER);
    ASK("dispatch in fp8", o.fp8 = 1);
    ASK("rows of bytes", o.dtype = SIDELANE_DTYPE_BYTES);
    ASK("weighted combine", o.weighted = 1);
    ASK("a limit of dispatches (max_in_flight)", o.max_in_flight = 2);
    ASK("a device heap (device_heap)", o.device_heap = o.device_heap_limit = 1 << 20);
    ASK("a limit of blocks (max_blocks)", o.max_blocks = 4);
    ASK("sizes on the device, and capture", o.graphs = SIDELANE_GRAPHS_SLOTS);
}

// Calls that ask for a feature, behind a dispatch. Executors that serve one are not asked for it.
static void ask_calls(sidelane_ep_options_t plain, const sidelane_tensor_t *x, const sidelane_routing_t *routing) {
    int on_host = plain.stream == NULL, constant = plain.mode != SIDELANE_MODE_EXACT;
    sidelane_ep_t *ep = NULL;
    sidelane_rows_t *rows = NULL, *none = NULL;
    sidelane_handle_t *handle = NULL, *other = NULL;
    CHECK(sidelane_ep_build(group, &plain, NULL, &ep));
    CHECK(sidelane_ep_dispatch(ep, x, routing, &rows, &handle));
    if (constant) {
        sidelane_output_t *output = NULL;
        uint32_t held[] = {2, 2}, experts[] = {0, 1, 2, 3};
        sidelane_expert_map_t map = {.held = held, .experts_held = experts, .ranks = 2, .experts = EXPERTS};
        sidelane_tokens_t *tokens = NULL;
        CHECK(sidelane_handle_output(handle, &output));
        said("cached dispatch", sidelane_ep_prepare(ep, routing, &other));
        said("cached dispatch", sidelane_ep_dispatch_cached(ep, x, handle, &none));
        // It takes the output, whatever comes of it.
        said("gradients", sidelane_ep_dispatch_backward(ep, output, NULL, NULL, handle, x, NULL));
        said("gradients", sidelane_ep_combine_backward(ep, x, handle, &none, NULL));
        said("another expert map", sidelane_ep_set_expert_map(ep, &map));
        said("token buffers", sidelane_ep_tokens(ep, 1, &tokens));
    }
    if (on_host) said("calls on several streams", sidelane_ep_set_stream(ep, stream));
    if (constant || on_host) {
        sidelane_heap_allocator_t *allocator = NULL;
        said("a device heap (device_heap)", sidelane_ep_heap_allocator(ep, &allocator));
    }
    if (constant) {
        CHECK(sidelane_ep_release(ep, handle));
        CHECK(sidelane_ep_synchronize(ep));
    } else {
        said("release without combine", sidelane_ep_release(ep, handle));
        sidelane_pending_dispatch_t *pending = NULL;
        CHECK(sidelane_ep_dispatch_start(ep, x, routing, &pending));
        said("sizes on the device, and capture", sidelane_dispatch_unfinished(pending, &none, &other));
    }
    CHECK(sidelane_rows_close(rows));
    CHECK(sidelane_handle_close(handle));
    CHECK(sidelane_ep_close(ep));
}

int main(void) {
    sidelane_world_t *world = NULL;
    CHECK(sidelane_world_from_env(NULL, &world));
    CHECK(sidelane_world_group(world, NULL, 0, &group));
    sidelane_group_info_t me = {.size = sizeof me};
    CHECK(sidelane_group_info(group, &me));
    rank = me.rank;
    CUcontext context;
    CUstream cuda;
    CUDA(cuInit(0));
    CUDA(cuDevicePrimaryCtxRetain(&context, (int)rank));
    CUDA(cuCtxSetCurrent(context));
    CUDA(cuStreamCreate(&cuda, CU_STREAM_NON_BLOCKING));
    CHECK(sidelane_stream_borrow(rank, cuda, &stream));

    static uint16_t x[TOKENS * HIDDEN]; // bf16
    static const int32_t ids[TOKENS * TOP_K] = {0, 3, 1, 2, 3, 0};
    static const float weights[TOKENS * TOP_K] = {1, 1, 1, 1, 1, 1};
    sidelane_tensor_t on_host = {.data = x, .rows = TOKENS, .columns = HIDDEN, .dtype = SIDELANE_DTYPE_BF16};
    sidelane_routing_t by_host = {.experts = ids, .weights = weights, .tokens = TOKENS, .top_k = TOP_K};
    sidelane_tensor_t there = on_host;
    sidelane_routing_t by_device = by_host;
    there.data = (void *)on_device(x, sizeof x), there.place = SIDELANE_PLACE_DEVICE;
    by_device.experts = (int32_t *)on_device(ids, sizeof ids), by_device.place = SIDELANE_PLACE_DEVICE;
    by_device.weights = (float *)on_device(weights, sizeof weights);

    sidelane_ep_options_t plain = {.size = sizeof plain, .experts = EXPERTS, .top_k = TOP_K, .hidden = HIDDEN,
                                   .max_tokens = MOST};
    column = "host-stepper";
    ask_settings(plain);
    ask_calls(plain, &on_host, &by_host);
    plain.stream = stream;
    column = "enqueuer";
    ask_settings(plain);
    ask_calls(plain, &there, &by_device);
    column = "constant-program, slots";
    sidelane_ep_options_t slots = plain;
    slots.layout = SIDELANE_LAYOUT_RANK_MAJOR, slots.mode = SIDELANE_MODE_SLOTS, slots.mode_rows = MOST;
    ask_settings(slots);
    ask_calls(slots, &there, &by_device);
    column = "constant-program, budget";
    sidelane_ep_options_t budget = plain;
    budget.mode = SIDELANE_MODE_BUDGET, budget.mode_rows = 4 * ROWS, budget.graphs = SIDELANE_GRAPHS_SLOTS;
    budget.sum_order = SIDELANE_ORDER_RANK;
    ask_settings(budget);
    ask_calls(budget, &there, &by_device);

    CHECK(sidelane_stream_close(stream));
    CHECK(sidelane_group_close(group));
    CHECK(sidelane_world_close(world));
    return 0;
}
