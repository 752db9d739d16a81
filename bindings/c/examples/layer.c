// One MoE layer, forward and backward, in f32 and in whole numbers, so that every result is known
// exactly.
//
//   x [T, H] --gate--> routing --dispatch--> rows of my experts --times (e + 1)--> combine --> [T,
//   H]
//   dx       <-------------- dispatch_backward <-- times (e + 1) <-- combine_backward <-- dy
//
// Twice: in whole calls with experts that write into the output buffer, and in halves with
// computation between them.
//
//   sidelane launch --nodes 2 --ranks-per-node 2 -- ./layer

#include <string.h>

#include "check.h"

enum { EXPERTS = 8, TOP_K = 2, HIDDEN = 8, MOST = 32 };

static float factor(uint32_t expert) { return (float)(expert + 1); }

// The experts' function: each row times its expert's factor. `first` is the first expert of this
// rank.
static void experts(const sidelane_handle_info_t *layout, uint32_t first, const float *rows, float *out) {
    for (uint64_t e = 0, row = 0; e < layout->local_experts; e++) {
        for (int64_t n = 0; n < layout->tokens_per_expert[e]; n++, row++) {
            for (int h = 0; h < HIDDEN; h++) {
                out[row * HIDDEN + h] = rows[row * HIDDEN + h] * factor(first + (uint32_t)e);
            }
        }
    }
}

// Every token comes back as itself, times the sum of its experts' factors.
static void verify(const sidelane_routing_t *routing, const float *x, const float *y) {
    for (uint64_t t = 0; t < routing->tokens; t++) {
        float sum = 0;
        for (int k = 0; k < TOP_K; k++) sum += factor((uint32_t)routing->experts[t * TOP_K + k]);
        for (int h = 0; h < HIDDEN; h++) REQUIRE(y[t * HIDDEN + h] == x[t * HIDDEN + h] * sum);
    }
}

static sidelane_tensor_t tensor(const float *data, uint64_t rows) {
    return (sidelane_tensor_t){.data = (void *)data, .rows = rows, .columns = HIDDEN, .dtype = SIDELANE_DTYPE_F32};
}

int main(void) {
    sidelane_world_t *world = NULL;
    sidelane_group_t *group = NULL;
    sidelane_ep_t *ep = NULL;
    CHECK(sidelane_world_from_env(NULL, &world));
    CHECK(sidelane_world_group(world, NULL, 0, &group));
    sidelane_ep_options_t options = {
        .size = sizeof options,
        .experts = EXPERTS,
        .top_k = TOP_K,
        .hidden = HIDDEN,
        .dtype = SIDELANE_DTYPE_F32,
        .route = SIDELANE_ROUTE_PXN,
        .max_tokens = MOST,
    };
    CHECK(sidelane_ep_build(group, &options, NULL, &ep));
    sidelane_ep_info_t info = {.size = sizeof info};
    CHECK(sidelane_ep_info(ep, &info));
    uint32_t first = info.rank * EXPERTS / info.ranks; // contiguous blocks, here of equal size

    // Ranks may have different numbers of tokens.
    uint64_t tokens = 5 + 3 * info.rank;
    static float x[MOST * HIDDEN], y[MOST * HIDDEN], dy[MOST * HIDDEN], dx[MOST * HIDDEN];
    static float logits[MOST * EXPERTS];
    for (uint64_t i = 0; i < tokens * HIDDEN; i++) {
        x[i] = (float)(1000 * info.rank + i);
        dy[i] = (float)(7 * i % 101);
    }
    for (uint64_t i = 0; i < tokens * EXPERTS; i++) logits[i] = (float)((i * 37 + 11 * info.rank) % 53);

    sidelane_gate_t *gate = NULL;
    sidelane_gate_config_t config = {.size = sizeof config};
    CHECK(sidelane_gate_preset("mixtral", EXPERTS, TOP_K, &config));
    CHECK(sidelane_gate_build(&config, &gate));
    sidelane_gate_call_t call = {.size = sizeof call, .logits = logits, .tokens = tokens};
    sidelane_decision_t decision = {.size = sizeof decision};
    CHECK(sidelane_gate_route(gate, &call, &decision));
    sidelane_tensor_t tx = tensor(x, tokens), ty = tensor(y, tokens), tdy = tensor(dy, tokens), tdx = tensor(dx, tokens);

    // Whole calls; experts write into the buffer that peers read in place.
    sidelane_rows_t *rows = NULL, *gradients = NULL;
    sidelane_handle_t *handle = NULL;
    sidelane_output_t *output = NULL;
    CHECK(sidelane_ep_dispatch(ep, &tx, &decision.routing, &rows, &handle));
    sidelane_handle_info_t layout = {.size = sizeof layout};
    CHECK(sidelane_handle_info(handle, &layout));
    CHECK(sidelane_handle_output(handle, &output));
    sidelane_rows_info_t in = {.size = sizeof in};
    sidelane_output_info_t out = {.size = sizeof out};
    CHECK(sidelane_rows_info(rows, &in));
    CHECK(sidelane_output_info(output, &out));
    REQUIRE(in.rows == layout.rows && in.row_bytes == HIDDEN * sizeof(float));
    experts(&layout, first, in.data, out.data);
    CHECK(sidelane_rows_close(rows));
    CHECK(sidelane_ep_combine(ep, output, NULL, handle, &ty));
    verify(&decision.routing, x, y);

    // Gradients, with those of the weights. Each row contributes its own weight, so every choice
    // gets its own.
    CHECK(sidelane_ep_combine_backward(ep, &tdy, handle, &gradients, NULL));
    CHECK(sidelane_rows_info(gradients, &in));
    CHECK(sidelane_handle_output(handle, &output));
    CHECK(sidelane_output_info(output, &out));
    experts(&layout, first, in.data, out.data);
    static float weights[MOST * TOP_K];
    CHECK(sidelane_ep_dispatch_backward(ep, output, NULL, layout.row_weights, handle, &tdx, weights));
    verify(&decision.routing, dy, dx);
    REQUIRE(memcmp(weights, decision.routing.weights, tokens * TOP_K * sizeof(float)) == 0);
    CHECK(sidelane_rows_close(gradients));

    // In halves, along the same routing; the rows of the experts lie anywhere and are copied once.
    sidelane_pending_dispatch_t *dispatching = NULL;
    sidelane_pending_combine_t *combining = NULL;
    sidelane_handle_t *again = NULL;
    CHECK(sidelane_ep_dispatch_start(ep, &tx, &decision.routing, &dispatching));
    CHECK(sidelane_dispatch_finish(dispatching, &rows, &again));
    CHECK(sidelane_handle_info(again, &layout));
    CHECK(sidelane_rows_info(rows, &in));
    float *made = malloc(layout.rows * HIDDEN * sizeof(float) + 1);
    REQUIRE(made);
    experts(&layout, first, in.data, made);
    sidelane_tensor_t tmade = tensor(made, layout.rows);
    memset(y, 0, sizeof y);
    CHECK(sidelane_ep_combine_start(ep, NULL, &tmade, again, &combining));
    free(made);
    CHECK(sidelane_combine_finish(combining, &ty));
    verify(&decision.routing, x, y);

    sidelane_report_t report = {.size = sizeof report};
    CHECK(sidelane_handle_report(again, &report));
    REQUIRE(report.copied_bytes == layout.rows * HIDDEN * sizeof(float));
    REQUIRE(report.moved.inter_node_bytes == report.sent.remote * report.row_bytes);

    // The first layout once more: no ids, no counts.
    CHECK(sidelane_rows_close(rows));
    CHECK(sidelane_ep_dispatch_cached(ep, &tx, handle, &rows));
    printf("rank %u of %u: %llu tokens out, %llu rows in, forward and backward right\n", info.rank, info.ranks,
           (unsigned long long)tokens, (unsigned long long)layout.rows);

    // In any order.
    CHECK(sidelane_world_close(world));
    CHECK(sidelane_group_close(group));
    CHECK(sidelane_ep_close(ep));
    CHECK(sidelane_handle_close(handle));
    CHECK(sidelane_handle_close(again));
    CHECK(sidelane_rows_close(rows));
    CHECK(sidelane_gate_close(gate));
    return 0;
}
