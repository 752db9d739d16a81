// One MoE layer on a GPU, in f32 and in whole numbers, so that every result is known exactly: planned beside a stream, with
// exact sizes; then in slots, which the stream carries out alone.
//
//   x [T, H] --dispatch--> rows of my experts --times (e + 1)--> output --combine--> [T, H]        planned
//   x [T, H] --dispatch--> slots of all ranks ------copy-------> partial rows --combine--> [T, H]   slots
//
// Rows lie in memory of the device. Experts would be kernels on the stream; here they are copies, of which the first go by
// the host, as the example has no compiler for kernels.
//
//   CUDA_MODULE_LOADING=EAGER sidelane launch --ranks-per-node 2 -- ./gpu_layer

#include <string.h>

#include "gpu.h"

enum { EXPERTS = 8, TOP_K = 2, HIDDEN = 8, MOST = 32, ROW = HIDDEN * sizeof(float) };

static float x[MOST * HIDDEN], y[MOST * HIDDEN], work[4 * MOST * TOP_K * HIDDEN];
static int32_t ids[MOST * TOP_K];
static float weights[MOST * TOP_K];

static sidelane_tensor_t tensor(CUdeviceptr at, uint64_t rows) {
    return (sidelane_tensor_t){.data = (void *)at, .rows = rows, .columns = HIDDEN, .dtype = SIDELANE_DTYPE_F32};
}

// Every token comes home as itself, times a factor.
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

static void planned(sidelane_group_t *group, sidelane_stream_t *stream, CUstream cuda, const sidelane_tensor_t *tx,
                    const sidelane_routing_t *routing, const sidelane_tensor_t *out) {
    sidelane_planned_t *planned = NULL;
    sidelane_ep_options_t options = {.size = sizeof options, .experts = EXPERTS, .top_k = TOP_K, .hidden = HIDDEN,
                                     .dtype = SIDELANE_DTYPE_F32, .max_tokens = MOST};
    sidelane_planned_options_t more = {.size = sizeof more, .pool = 1 << 20};
    CHECK(sidelane_planned_build(group, &options, NULL, &more, stream, &planned));
    sidelane_planned_info_t info = {.size = sizeof info};
    CHECK(sidelane_planned_info(planned, &info));
    REQUIRE(info.cuda_stream == cuda);
    experts_of_a_rank = info.local_experts;

    for (int round = 0; round < 3; round++) {
        // Enqueued; then sizes are asked for, which come from all ranks. Rows are on their way meanwhile.
        sidelane_planned_dispatch_t *dispatch = NULL;
        sidelane_planned_rows_t *rows = NULL;
        sidelane_planned_handle_t *handle = NULL;
        sidelane_planned_output_t *output = NULL;
        CHECK(sidelane_planned_dispatch_start(planned, tx, routing, &dispatch));
        CHECK(sidelane_planned_dispatch_finish(dispatch, &rows, &handle));
        sidelane_planned_handle_info_t layout = {.size = sizeof layout};
        CHECK(sidelane_planned_handle_info(handle, &layout));
        REQUIRE(layout.tokens == tx->rows && layout.local_experts == info.local_experts);
        CHECK(sidelane_planned_handle_output(handle, &output));
        sidelane_planned_rows_info_t in = {.size = sizeof in};
        sidelane_output_info_t to = {.size = sizeof to};
        CHECK(sidelane_planned_rows_info(rows, &in));
        CHECK(sidelane_planned_output_info(output, &to));
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
        CHECK(sidelane_planned_rows_close(rows));

        sidelane_planned_combine_t *combine = NULL;
        CHECK(sidelane_planned_combine(planned, output, handle, out, round == 2 ? &combine : NULL));
        CUDA(cuStreamSynchronize(cuda));
        uint32_t status;
        CHECK(sidelane_planned_handle_status(handle, &status));
        REQUIRE(status == SIDELANE_PLANNED_WELL);
        verify((CUdeviceptr)out->data, tx->rows, by_expert);

        sidelane_planned_report_t report = {.size = sizeof report};
        CHECK(sidelane_planned_handle_report(handle, &report));
        REQUIRE(strcmp(report.kernels[0].name, "order") == 0);
        // Before CUDA 13.1 multiprocessors copy the rows that stay on the device.
        REQUIRE(report.enqueued.copies_by_sms <= report.enqueued.copies);
        if (combine) {
            CHECK(sidelane_planned_combine_finish(combine, &report));
            REQUIRE(strcmp(report.lanes[0].name, "own") == 0 && report.enqueued.copies > 0);
        }
        CHECK(sidelane_planned_handle_close(handle));
    }
    CHECK(sidelane_planned_close(planned));
}

static void slots(sidelane_group_t *group, sidelane_stream_t *stream, CUstream cuda, const sidelane_tensor_t *tx,
                  const sidelane_routing_t *routing, const sidelane_tensor_t *out) {
    sidelane_slots_t *slots = NULL;
    sidelane_slots_options_t options = {.size = sizeof options, .experts = EXPERTS, .top_k = TOP_K, .hidden = HIDDEN,
                                        .dtype = SIDELANE_DTYPE_F32, .max_tokens = MOST};
    CHECK(sidelane_slots_build(group, &options, NULL, stream, &slots));
    sidelane_slots_info_t info = {.size = sizeof info};
    CHECK(sidelane_slots_info(slots, &info));

    // Nothing here waits for the device: what a graph could hold.
    for (int round = 0; round < 3; round++) {
        CHECK(sidelane_slots_dispatch_start(slots, stream, tx, routing));
        CHECK(sidelane_slots_dispatch_finish(slots, stream));
        for (uint64_t r = 0; r < info.ranks; r++) {
            CUdeviceptr from = (CUdeviceptr)info.received + r * info.slot_bytes + info.rows_at;
            CUdeviceptr to = (CUdeviceptr)info.partials + r * info.partial_bytes;
            CUDA(cuMemcpyDtoDAsync(to, from, info.partial_bytes, cuda));
        }
        CHECK(sidelane_slots_combine_start(slots, stream));
        CHECK(sidelane_slots_combine_finish(slots, stream, out));
    }
    CHECK(sidelane_slots_synchronize(slots, stream));
    CHECK(sidelane_slots_status(slots));
    verify((CUdeviceptr)out->data, tx->rows, by_rank);
    sidelane_slots_report_t report = {.size = sizeof report};
    CHECK(sidelane_slots_report(slots, &report));
    REQUIRE(report.dispatch.copies == info.ranks - 1 && strcmp(report.kernels[2].name, "sum") == 0);
    CHECK(sidelane_slots_close(slots));
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
    sidelane_routing_t routing = {.experts = (int32_t *)dids, .weights = (float *)dweights, .tokens = tokens, .top_k = TOP_K};

    planned(group, stream, cuda, &tx, &routing, &out);
    slots(group, stream, cuda, &tx, &routing, &out);
    printf("rank %u of %u: planned and in slots, all sums right\n", me.rank, me.ranks);

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
