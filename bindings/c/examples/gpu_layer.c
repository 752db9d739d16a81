// One MoE layer on a GPU, in f32 and in whole numbers, so that every result is known exactly: first
// with exact sizes, which the caller's thread lays out; then in fixed slots, which the stream runs
// alone.
//
//   x [T, H] --dispatch--> rows of my experts --times (e + 1)--> output --combine--> [T, H]   exact sizes
//   x [T, H] --dispatch--> slots of all ranks ------copy-------> output --combine--> [T, H]   fixed slots
//
// Rows lie in memory of the device. Experts would be kernels on the stream; here they are copies,
// of which the first go by the host, as the example has no compiler for kernels.
//
//   sidelane launch --ranks-per-node 2 -- ./gpu_layer

#include <string.h>

#include "gpu.h"

enum { EXPERTS = 8, TOP_K = 2, HIDDEN = 8, MOST = 32, ROW = HIDDEN * sizeof(float) };

static float x[MOST * HIDDEN], y[MOST * HIDDEN], work[4 * MOST * TOP_K * HIDDEN];
static int32_t ids[MOST * TOP_K];
static float weights[MOST * TOP_K];

static sidelane_tensor_t tensor(CUdeviceptr at, uint64_t rows) {
    return (sidelane_tensor_t){.data = (void *)at, .rows = rows, .columns = HIDDEN, .dtype = SIDELANE_DTYPE_F32,
                               .place = SIDELANE_PLACE_DEVICE};
}

// Rows of a dispatch, and where its experts write.
static void received(sidelane_rows_t *rows, sidelane_handle_t *handle, sidelane_rows_info_t *in,
                     sidelane_output_t **output, sidelane_output_info_t *to) {
    CHECK(sidelane_handle_output(handle, output));
    in->size = sizeof *in, to->size = sizeof *to;
    CHECK(sidelane_rows_info(rows, in));
    CHECK(sidelane_output_info(*output, to));
}

// Every token returns as itself, times a factor.
static void verify(CUdeviceptr out, uint64_t tokens, float (*factor)(const int32_t *chosen)) {
    CUDA(cuMemcpyDtoH(y, out, tokens * ROW));
    for (uint64_t t = 0; t < tokens; t++) {
        for (int h = 0; h < HIDDEN; h++) REQUIRE(y[t * HIDDEN + h] == x[t * HIDDEN + h] * factor(ids + t * TOP_K));
    }
}

// Of its experts' factors, the sum.
static float by_expert(const int32_t *chosen) { return (float)(chosen[0] + 1 + chosen[1] + 1); }

// The ranks that hold one of its experts.
static uint32_t experts_of_a_rank;
static float by_rank(const int32_t *chosen) {
    return chosen[0] / (int32_t)experts_of_a_rank == chosen[1] / (int32_t)experts_of_a_rank ? 1 : 2;
}

static void exact(sidelane_group_t *group, sidelane_stream_t *stream, CUstream cuda, const sidelane_tensor_t *tx,
                  const sidelane_routing_t *routing, const sidelane_tensor_t *out) {
    sidelane_ep_t *ep = NULL;
    sidelane_ep_options_t options = {.size = sizeof options, .experts = EXPERTS, .top_k = TOP_K, .hidden = HIDDEN,
                                     .dtype = SIDELANE_DTYPE_F32, .max_tokens = MOST, .stream = stream,
                                     .device_heap = 1 << 20, .max_blocks = 2};
    CHECK(sidelane_ep_build(group, &options, NULL, &ep));
    sidelane_ep_info_t info = {.size = sizeof info};
    CHECK(sidelane_ep_info(ep, &info));
    REQUIRE(info.cuda_stream == cuda && info.place == SIDELANE_PLACE_DEVICE && info.device == info.rank);
    REQUIRE(strcmp(info.executor, "enqueuer") == 0);
    experts_of_a_rank = info.local_experts;

    for (int round = 0; round < 3; round++) {
        // Enqueued. The query of the sizes, which come from all ranks, follows while rows are in
        // flight.
        sidelane_pending_dispatch_t *dispatching = NULL;
        sidelane_rows_t *rows = NULL;
        sidelane_handle_t *handle = NULL;
        sidelane_output_t *output = NULL;
        CHECK(sidelane_ep_dispatch_start(ep, tx, routing, &dispatching));
        CHECK(sidelane_dispatch_finish(dispatching, &rows, &handle));
        sidelane_handle_info_t layout = {.size = sizeof layout};
        CHECK(sidelane_handle_info(handle, &layout));
        REQUIRE(layout.tokens == tx->rows && layout.local_experts == info.local_experts);
        sidelane_rows_info_t in;
        sidelane_output_info_t to;
        received(rows, handle, &in, &output, &to);
        REQUIRE(in.rows == layout.rows && to.rows == layout.rows && in.row_bytes == ROW && in.arrived == NULL);

        // Experts: kernels on the stream, from in.data to to.data, would not wait for it.
        REQUIRE(layout.rows * ROW <= sizeof work);
        CUDA(cuStreamSynchronize(cuda));
        CUDA(cuMemcpyDtoH(work, (CUdeviceptr)in.data, layout.rows * ROW));
        uint64_t row = 0;
        for (uint64_t e = 0; e < layout.local_experts; e++) {
            float factor = (float)(info.rank * info.local_experts + e + 1);
            for (int64_t n = 0; n < layout.tokens_per_expert[e]; n++, row++) {
                for (int h = 0; h < HIDDEN; h++) work[row * HIDDEN + h] *= factor;
            }
        }
        REQUIRE(row == layout.rows);
        CUDA(cuMemcpyHtoD((CUdeviceptr)to.data, work, layout.rows * ROW));
        CHECK(sidelane_rows_close(rows));

        // Whole, in halves, and of rows that lie elsewhere on the device.
        sidelane_tensor_t same = tensor((CUdeviceptr)to.data, layout.rows);
        if (round == 1) {
            sidelane_pending_combine_t *combining = NULL;
            CHECK(sidelane_ep_combine_start(ep, output, NULL, handle, &combining));
            CHECK(sidelane_combine_finish(combining, out));
        } else {
            CHECK(sidelane_ep_combine(ep, round == 0 ? output : NULL, round == 0 ? NULL : &same, handle, out));
        }
        CHECK(sidelane_ep_synchronize(ep));
        uint32_t status;
        CHECK(sidelane_handle_status(handle, &status));
        REQUIRE(status == SIDELANE_CALL_OK);
        verify((CUdeviceptr)out->data, tx->rows, by_expert);

        sidelane_report_t report = {.size = sizeof report};
        CHECK(sidelane_handle_report(handle, &report));
        REQUIRE(strcmp(report.kernels[0].name, "plan_choices") == 0 && report.max_blocks == 2);
        REQUIRE(report.copied_bytes == (round == 2 ? layout.rows * ROW : 0));
        // Before CUDA 13.1 multiprocessors copy the rows that stay on the device.
        REQUIRE(report.enqueued.copies_by_sms <= report.enqueued.copies);
        CHECK(sidelane_handle_return_report(handle, &report));
        REQUIRE(strcmp(report.lanes[0].name, "own") == 0 && report.enqueued.copies > 0);
        if (round == 2) CHECK(sidelane_output_close(output));
        CHECK(sidelane_handle_close(handle));
    }
    CHECK(sidelane_ep_close(ep));
}

static void slots(sidelane_group_t *group, sidelane_stream_t *stream, CUstream cuda, const sidelane_tensor_t *tx,
                  const sidelane_routing_t *routing, const sidelane_tensor_t *out) {
    sidelane_ep_t *ep = NULL;
    sidelane_ep_options_t options = {.size = sizeof options, .experts = EXPERTS, .top_k = TOP_K, .hidden = HIDDEN,
                                     .dtype = SIDELANE_DTYPE_F32, .max_tokens = MOST, .stream = stream,
                                     .mode = SIDELANE_MODE_SLOTS, .mode_rows = MOST, .sum_order = SIDELANE_ORDER_RANK,
                                     .layout = SIDELANE_LAYOUT_RANK_MAJOR};
    CHECK(sidelane_ep_build(group, &options, NULL, &ep));
    sidelane_ep_info_t info = {.size = sizeof info};
    CHECK(sidelane_ep_info(ep, &info));
    REQUIRE(strcmp(info.executor, "constant-program") == 0);

    // No call here waits for the device, so a graph could hold them.
    sidelane_report_t out_way = {.size = sizeof out_way}, back = {.size = sizeof back};
    for (int round = 0; round < 3; round++) {
        sidelane_rows_t *rows = NULL;
        sidelane_handle_t *handle = NULL;
        sidelane_output_t *output = NULL;
        sidelane_rows_info_t in;
        sidelane_output_info_t to;
        CHECK(sidelane_ep_dispatch(ep, tx, routing, &rows, &handle));
        received(rows, handle, &in, &output, &to);
        uint64_t bytes = MOST * in.row_bytes; // of a rank
        REQUIRE(in.rows == info.ranks * MOST && to.rows == in.rows && in.row_bytes == ROW);
        for (uint64_t r = 0; r < info.ranks; r++) {
            CUdeviceptr from = (CUdeviceptr)in.data + r * in.slot_bytes + in.slot_rows_at;
            CUDA(cuMemcpyDtoDAsync((CUdeviceptr)to.data + r * bytes, from, bytes, cuda));
        }
        CHECK(sidelane_ep_combine(ep, output, NULL, handle, out));
        CHECK(sidelane_handle_report(handle, &out_way));
        CHECK(sidelane_handle_return_report(handle, &back));
        CHECK(sidelane_rows_close(rows));
        CHECK(sidelane_handle_close(handle));
    }
    CHECK(sidelane_ep_synchronize(ep));
    verify((CUdeviceptr)out->data, tx->rows, by_rank);
    REQUIRE(out_way.enqueued.copies == info.ranks - 1 && strcmp(out_way.kernels[0].name, "pack") == 0);
    REQUIRE(back.enqueued.copies > 0 && strcmp(back.kernels[0].name, "sum") == 0);

    // A dispatch that nothing follows.
    sidelane_rows_t *rows = NULL;
    sidelane_handle_t *handle = NULL;
    CHECK(sidelane_ep_dispatch(ep, tx, routing, &rows, &handle));
    CHECK(sidelane_ep_release(ep, handle));
    CHECK(sidelane_ep_synchronize(ep));
    CHECK(sidelane_ep_check(ep));
    CHECK(sidelane_rows_close(rows));
    CHECK(sidelane_handle_close(handle));
    CHECK(sidelane_ep_close(ep));
}

int main(void) {
    sidelane_world_t *world = NULL;
    sidelane_group_t *group = NULL;
    CHECK(sidelane_world_from_env(NULL, &world));
    CHECK(sidelane_world_group(world, NULL, 0, &group));
    sidelane_group_info_t me = {.size = sizeof me};
    CHECK(sidelane_group_info(group, &me));

    // The stream is the program's own; here each rank has a device of its own, too.
    CUcontext context;
    CUstream cuda;
    CUDA(cuInit(0));
    CUDA(cuDevicePrimaryCtxRetain(&context, (int)me.rank));
    CUDA(cuCtxSetCurrent(context));
    CUDA(cuStreamCreate(&cuda, CU_STREAM_NON_BLOCKING));
    sidelane_stream_t *stream = NULL;
    CHECK(sidelane_stream_borrow(me.rank, cuda, &stream));

    // Ranks may have different numbers of tokens.
    uint64_t tokens = 5 + 3 * me.rank;
    for (uint64_t i = 0; i < tokens * HIDDEN; i++) x[i] = (float)(1000 * me.rank + i);
    for (uint64_t t = 0; t < tokens; t++) {
        for (int k = 0; k < TOP_K; k++) {
            ids[t * TOP_K + k] = (int32_t)((t * 5 + k * 3 + me.rank) % EXPERTS);
            weights[t * TOP_K + k] = 1;
        }
    }
    CUdeviceptr dx = on_device(x, sizeof x), dids = on_device(ids, sizeof ids);
    CUdeviceptr dweights = on_device(weights, sizeof weights), dout = on_device(y, sizeof y);
    sidelane_tensor_t tx = tensor(dx, tokens), out = tensor(dout, tokens);
    sidelane_routing_t routing = {.experts = (int32_t *)dids, .weights = (float *)dweights, .tokens = tokens,
                                  .top_k = TOP_K, .place = SIDELANE_PLACE_DEVICE};

    exact(group, stream, cuda, &tx, &routing, &out);
    slots(group, stream, cuda, &tx, &routing, &out);
    printf("rank %u of %u: exact sizes and fixed slots, all sums right\n", me.rank, me.ranks);

    CHECK(sidelane_stream_close(stream));
    CUDA(cuStreamDestroy(cuda));
    CUDA(cuMemFree(dx));
    CUDA(cuMemFree(dids));
    CUDA(cuMemFree(dweights));
    CUDA(cuMemFree(dout));
    CHECK(sidelane_group_close(group));
    CHECK(sidelane_world_close(world));
    return 0;
}
