// Tokens in memory of the allocator over a layer's device heap, on two ranks: they need no plan by
// the device, and the memory outlives layer and world.

#include <string.h>

#include "gpu.h"

enum { EXPERTS = 4, TOP_K = 2, HIDDEN = 8, TOKENS = 6, BYTES = TOKENS * HIDDEN * sizeof(float) };

static float x[TOKENS * HIDDEN], y[TOKENS * HIDDEN];
static int32_t ids[TOKENS * TOP_K];
static float weights[TOKENS * TOP_K];

static sidelane_tensor_t tensor(void *at, uint64_t rows) {
    return (sidelane_tensor_t){.data = at, .rows = rows, .columns = HIDDEN, .dtype = SIDELANE_DTYPE_F32,
                               .place = SIDELANE_PLACE_DEVICE};
}

// Every token goes out from `at` and returns as the sum of its two rows. The name of the first
// kernel of the dispatch.
static sidelane_kernel_name_t round_trip(sidelane_ep_t *ep, void *at, const sidelane_routing_t *routing, CUdeviceptr out) {
    sidelane_rows_t *rows = NULL;
    sidelane_handle_t *handle = NULL;
    sidelane_tensor_t tokens = tensor(at, TOKENS), sums = tensor((void *)out, TOKENS);
    CHECK(sidelane_ep_dispatch(ep, &tokens, routing, &rows, &handle));
    sidelane_rows_info_t in = {.size = sizeof in};
    CHECK(sidelane_rows_info(rows, &in));
    sidelane_tensor_t same = tensor(in.data, in.rows);
    CHECK(sidelane_ep_combine(ep, NULL, &same, handle, &sums));
    CHECK(sidelane_ep_synchronize(ep));
    CUDA(cuMemcpyDtoH(y, out, BYTES));
    for (int i = 0; i < TOKENS * HIDDEN; i++) REQUIRE(y[i] == TOP_K * x[i]);
    sidelane_report_t report = {.size = sizeof report};
    CHECK(sidelane_handle_report(handle, &report));
    // Outputs elsewhere than in an output buffer are copied once, wherever they lie.
    REQUIRE(report.copied_bytes == in.rows * HIDDEN * sizeof(float));
    REQUIRE(report.handle_bytes > 0);
    CHECK(sidelane_rows_close(rows));
    CHECK(sidelane_handle_close(handle));
    return report.kernels[0];
}

// Memory without room for one dispatch: refused by itself, and enough where it may grow.
static void grows(sidelane_group_t *group, sidelane_ep_options_t options, const sidelane_routing_t *routing,
                  CUdeviceptr dx, CUdeviceptr out) {
    sidelane_ep_t *ep = NULL;
    sidelane_rows_t *rows = NULL;
    sidelane_handle_t *handle = NULL;
    sidelane_tensor_t tokens = tensor((void *)dx, TOKENS);
    options.device_heap = 256;
    CHECK(sidelane_ep_build(group, &options, NULL, &ep));
    REQUIRE(sidelane_ep_dispatch(ep, &tokens, routing, &rows, &handle) == SIDELANE_ERROR_MEMORY);
    CHECK(sidelane_ep_close(ep));
    options.device_heap_limit = 4 << 20;
    CHECK(sidelane_ep_build(group, &options, NULL, &ep));
    round_trip(ep, (void *)dx, routing, out);
    CHECK(sidelane_ep_close(ep));
}

int main(void) {
    sidelane_world_t *world = NULL;
    sidelane_group_t *group = NULL;
    CHECK(sidelane_world_from_env(NULL, &world));
    CHECK(sidelane_world_group(world, NULL, 0, &group));
    sidelane_group_info_t me = {.size = sizeof me};
    CHECK(sidelane_group_info(group, &me));
    int device = (int)me.rank;
    CUcontext context;
    CUstream cuda;
    CUDA(cuInit(0));
    CUDA(cuDevicePrimaryCtxRetain(&context, device));
    CUDA(cuCtxSetCurrent(context));
    CUDA(cuStreamCreate(&cuda, CU_STREAM_NON_BLOCKING));
    sidelane_stream_t *stream = NULL;
    CHECK(sidelane_stream_borrow(me.rank, cuda, &stream));
    for (int i = 0; i < TOKENS * HIDDEN; i++) x[i] = (float)(100 * me.rank + i);
    for (int i = 0; i < TOKENS * TOP_K; i++) ids[i] = (i + (int)me.rank) % EXPERTS, weights[i] = 1;
    CUdeviceptr dx = on_device(x, sizeof x), dids = on_device(ids, sizeof ids);
    CUdeviceptr dweights = on_device(weights, sizeof weights), dout = on_device(y, sizeof y);
    sidelane_routing_t routing = {.experts = (int32_t *)dids, .weights = (float *)dweights, .tokens = TOKENS,
                                  .top_k = TOP_K, .place = SIDELANE_PLACE_DEVICE};

    REQUIRE(sidelane_heap_alloc(64, device, cuda) == NULL);
    REQUIRE(strstr(sidelane_last_message(), "no heap allocator serves") != NULL);
    sidelane_ep_t *ep = NULL;
    sidelane_ep_options_t options = {.size = sizeof options, .experts = EXPERTS, .top_k = TOP_K, .hidden = HIDDEN,
                                     .dtype = SIDELANE_DTYPE_F32, .max_tokens = 16, .stream = stream,
                                     .device_heap = 1 << 20};
    grows(group, options, &routing, dx, dout);
    CHECK(sidelane_ep_build(group, &options, NULL, &ep));
    sidelane_heap_allocator_t *allocator = NULL, *second = NULL;
    CHECK(sidelane_ep_heap_allocator(ep, &allocator));
    REQUIRE(sidelane_ep_heap_allocator(ep, &second) == SIDELANE_ERROR_MEMORY && second == NULL);
    REQUIRE(sidelane_heap_alloc(2 << 20, device, cuda) == NULL);
    REQUIRE(strstr(sidelane_last_message(), "raise device_heap") != NULL);
    REQUIRE(sidelane_heap_alloc(64, -1, cuda) == NULL && sidelane_heap_alloc(-1, device, cuda) == NULL);

    char *here = sidelane_heap_alloc(4096 + BYTES, device, cuda);
    REQUIRE(here != NULL && (uintptr_t)here % 512 == 0);
    CUDA(cuMemcpyHtoD((CUdeviceptr)(here + 4096), x, BYTES));
    REQUIRE(strcmp(round_trip(ep, here + 4096, &routing, dout).name, "sort_choices") == 0);
    REQUIRE(strcmp(round_trip(ep, (void *)dx, &routing, dout).name, "plan_choices") == 0);

    // Freed by its address, when all is gone that it came from.
    CHECK(sidelane_heap_allocator_close(allocator));
    REQUIRE(sidelane_heap_alloc(64, device, cuda) == NULL);
    CHECK(sidelane_ep_close(ep));
    CHECK(sidelane_group_close(group));
    CHECK(sidelane_world_close(world));
    memset(y, 0, sizeof y);
    CUDA(cuMemcpyDtoH(y, (CUdeviceptr)(here + 4096), BYTES));
    REQUIRE(memcmp(x, y, BYTES) == 0);
    sidelane_heap_free(here, 4096 + BYTES, device, cuda);
    sidelane_heap_free(here, 4096 + BYTES, device, cuda);
    REQUIRE(strstr(sidelane_last_message(), "freed before") != NULL);
    sidelane_heap_free(NULL, 0, device, cuda);

    CHECK(sidelane_stream_close(stream));
    CUDA(cuStreamDestroy(cuda));
    CUDA(cuMemFree(dx));
    CUDA(cuMemFree(dids));
    CUDA(cuMemFree(dweights));
    CUDA(cuMemFree(dout));
    printf("rank %u: tokens of the heap right\n", me.rank);
    return 0;
}
