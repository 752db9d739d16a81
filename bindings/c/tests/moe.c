// Whole layers on two ranks, on the host and on a device: outputs and gradients by hand, and input
// of one rank that is refused on both.
//
// Numbers are whole. Tokens have a 1 in their last place, and w1 has 128 there and zeros elsewhere.
// So the gate of SwiGLU is 128 for all tokens, where silu(g) is g to the bit, and its slope is 1.
// One expert for each token has a routing weight of 1, the softmax of one, whose gradient is 0.

#include <string.h>

#include "gpu.h"
#include "refused.h"

enum { RANKS = 2, HIDDEN = 8, FFN = 4, EXPERTS = 4, LOCAL = EXPERTS / RANKS, TOKENS = 5, WEIGHTS = 3 * HIDDEN * FFN };

uint32_t rank;

static sidelane_world_t *world;
static sidelane_group_t *group;
static sidelane_stream_t *stream;
static CUstream cuda;

static float router[HIDDEN][EXPERTS], experts[EXPERTS + 1][WEIGHTS];
static float x[RANKS][TOKENS][HIDDEN], residual[RANKS][TOKENS][HIDDEN], of_out[RANKS][TOKENS][HIDDEN];

// Expected results of this rank.
static struct {
    float out[TOKENS][HIDDEN], x[TOKENS][HIDDEN], router[HIDDEN][EXPERTS], experts[LOCAL][WEIGHTS], shared[WEIGHTS];
} right, seen;

static void fill(float *values, int count, int seed) {
    for (int i = 0; i < count; i++) values[i] = (float)((i * 7 + i * i % 11 + seed) % 5 - 2);
}

static int chosen(const float *token) {
    int best = 0;
    float most = -1e9f;
    for (int e = 0; e < EXPERTS; e++) {
        float logit = 0;
        for (int h = 0; h < HIDDEN; h++) logit += token[h] * router[h][e];
        if (logit > most) most = logit, best = e;
    }
    return best;
}

// One expert for one token: its output and, from the gradient of that, those of token and weights.
static void expert(const float *w, const float *token, const float *g, float *y, float *of_x, float *of_w) {
    const float *w1 = w, *w3 = w + HIDDEN * FFN, *w2 = w3 + HIDDEN * FFN;
    for (int j = 0; j < FFN; j++) {
        float up = 0, of_act = 0;
        for (int h = 0; h < HIDDEN; h++) up += token[h] * w3[h * FFN + j], of_act += g[h] * w2[j * HIDDEN + h];
        float act = 128 * up, of_up = 128 * of_act, of_gate = of_act * up;
        for (int h = 0; h < HIDDEN; h++) {
            if (y) y[h] += act * w2[j * HIDDEN + h];
            if (of_x) of_x[h] += of_gate * w1[h * FFN + j] + of_up * w3[h * FFN + j];
            if (of_w) {
                of_w[h * FFN + j] += token[h] * of_gate;
                of_w[HIDDEN * FFN + h * FFN + j] += token[h] * of_up;
                of_w[2 * HIDDEN * FFN + j * HIDDEN + h] += act * g[h];
            }
        }
    }
}

static void by_hand(void) {
    for (int h = 0; h < HIDDEN; h++) {
        fill(router[h], EXPERTS, h);
        for (int e = 0; e < EXPERTS; e++) router[HIDDEN - 1][e] = 0.125f * (float)e;
    }
    for (int e = 0; e <= EXPERTS; e++) {
        fill(experts[e], WEIGHTS, 3 * e);
        for (int i = 0; i < HIDDEN * FFN; i++) experts[e][i] = i < (HIDDEN - 1) * FFN ? 0 : 128;
    }
    for (int r = 0; r < RANKS; r++) {
        fill(x[r][0], TOKENS * HIDDEN, r), fill(residual[r][0], TOKENS * HIDDEN, r + 2), fill(of_out[r][0], TOKENS * HIDDEN, r + 4);
        for (int t = 0; t < TOKENS; t++) x[r][t][HIDDEN - 1] = 1;
    }
    memcpy(right.out, residual[rank], sizeof right.out);
    for (uint32_t r = 0; r < RANKS; r++) {
        for (int t = 0; t < TOKENS; t++) {
            const float *token = x[r][t], *g = of_out[r][t];
            int e = chosen(token), local = e - (int)rank * LOCAL, mine = r == rank, here = local >= 0 && local < LOCAL;
            float *y = mine ? right.out[t] : NULL, *of_x = mine ? right.x[t] : NULL;
            expert(experts[e], token, g, y, of_x, here ? right.experts[local] : NULL);
            expert(experts[EXPERTS], token, g, y, of_x, mine ? right.shared : NULL);
        }
    }
}

// A layer's tensors, on the host or on the device.
typedef struct {
    uint32_t place;
    float *x, *residual, *of_out, *out, *of_x, *of_router, *of_experts, *of_shared;
} memory_t;

static float *put(uint32_t place, float *values, size_t bytes) {
    return place == SIDELANE_PLACE_HOST ? values : (float *)on_device(values, bytes);
}

static void *get(uint32_t place, float *to, const float *from, size_t bytes) {
    if (place == SIDELANE_PLACE_DEVICE) CUDA(cuMemcpyDtoH(to, (CUdeviceptr)from, bytes));
    return to;
}

static memory_t memory(uint32_t place) {
    return (memory_t){
        .place = place,
        .x = put(place, x[rank][0], sizeof *x), .residual = put(place, residual[rank][0], sizeof *x),
        .of_out = put(place, of_out[rank][0], sizeof *x), .out = put(place, seen.out[0], sizeof *x),
        .of_x = put(place, seen.x[0], sizeof *x), .of_router = put(place, seen.router[0], sizeof seen.router),
        .of_experts = put(place, seen.experts[0], sizeof seen.experts), .of_shared = put(place, seen.shared, sizeof seen.shared),
    };
}

static sidelane_tensor_t tensor(const memory_t *at, float *data) {
    return (sidelane_tensor_t){.data = data, .rows = TOKENS, .columns = HIDDEN, .dtype = SIDELANE_DTYPE_F32, .place = at->place};
}

static sidelane_gate_config_t gate = {.size = sizeof gate};

static sidelane_moe_options_t good(uint32_t place) {
    return (sidelane_moe_options_t){.size = sizeof(sidelane_moe_options_t), .gate = &gate, .router = router[0],
        .experts = experts[rank * LOCAL], .shared = experts[EXPERTS], .hidden = HIDDEN, .ffn = FFN, .shared_ffn = FFN,
        .dtype = SIDELANE_DTYPE_F32, .max_tokens = 16, .chunks = 2, .stream = place ? stream : NULL,
        .device_heap = place ? 1 << 20 : 0};
}

static sidelane_tape_t *forward(sidelane_moe_t *moe, const memory_t *at) {
    sidelane_tensor_t tx = tensor(at, at->x), tr = tensor(at, at->residual), out = tensor(at, at->out);
    sidelane_moe_input_t input = {.size = sizeof input, .x = &tx, .residual = &tr};
    sidelane_tape_t *tape;
    CHECK(sidelane_moe_forward(moe, &input, &out, &tape));
    return tape;
}

static void a_step_works(sidelane_moe_t *moe, const memory_t *at) {
    sidelane_tensor_t of_out = tensor(at, at->of_out), of_x = tensor(at, at->of_x);
    sidelane_moe_gradients_t into = {.size = sizeof into, .x = &of_x, .router = at->of_router, .experts = at->of_experts,
        .shared = at->of_shared};
    sidelane_tape_t *tape = forward(moe, at);
    sidelane_tape_info_t info = {.size = sizeof info};
    CHECK(sidelane_tape_info(tape, &info));
    REQUIRE(info.routing.tokens == TOKENS && info.routing.top_k == 1 && info.balance_loss == 0 && info.z_loss == 0);
    for (int t = 0; t < TOKENS; t++) REQUIRE(info.routing.experts[t] == chosen(x[rank][t]) && info.routing.weights[t] == 1);
    CHECK(sidelane_moe_backward(moe, tape, &of_out, &into));
    REFUSED(sidelane_tape_info(tape, &info), SIDELANE_ERROR_HANDLE, "consumed by");
    if (at->place == SIDELANE_PLACE_DEVICE) CUDA(cuStreamSynchronize(cuda));
    get(at->place, seen.out[0], at->out, sizeof seen.out), get(at->place, seen.x[0], at->of_x, sizeof seen.x);
    get(at->place, seen.router[0], at->of_router, sizeof seen.router);
    get(at->place, seen.experts[0], at->of_experts, sizeof seen.experts);
    get(at->place, seen.shared, at->of_shared, sizeof seen.shared);
    const float *all = (float *)&seen, *expected = (float *)&right;
    for (size_t i = 0; i < sizeof right / sizeof *all; i++) REQUIRE(all[i] == expected[i]);
}

static void settings(uint32_t place) {
    sidelane_moe_t *moe;
    struct { size_t field; uint32_t value; const char *words; } wrong[] = {
        {offsetof(sidelane_moe_options_t, route), 77, "route = 77"},
        {offsetof(sidelane_moe_options_t, products), 7, place ? "products = 7" : "products = 7: 0 without a stream"},
        {offsetof(sidelane_moe_options_t, sequential), 2, "sequential = 2"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        sidelane_moe_options_t options = good(place);
        if (rank == 1) memcpy((char *)&options + wrong[i].field, &wrong[i].value, sizeof wrong[i].value);
        REFUSED_ON_BOTH(sidelane_moe_build(group, &options, NULL, &moe), SIDELANE_ERROR_ARGUMENT, wrong[i].words,
                        SIDELANE_ERROR_CALL, "cannot be used");
    }
    sidelane_moe_options_t options = good(place);
    if (rank == 1) options.experts = NULL;
    REFUSED_ON_BOTH(sidelane_moe_build(group, &options, NULL, &moe), SIDELANE_ERROR_ARGUMENT, "experts is NULL",
                    SIDELANE_ERROR_CALL, "cannot be used");
    options = good(place);
    if (rank == 1) options.shared_ffn = 0;
    REFUSED_ON_BOTH(sidelane_moe_build(group, &options, NULL, &moe), SIDELANE_ERROR_ARGUMENT, "shared_ffn = 0",
                    SIDELANE_ERROR_CALL, "cannot be used");
    options = good(place);
    options.chunks = rank == 1 ? 1 : 2;
    REFUSED(sidelane_moe_build(group, &options, NULL, &moe), SIDELANE_ERROR_CALL, "chunks");
}

// Memory of rank 1 that a pass would write to while it reads it, or would write to twice.
static void overlaps(sidelane_moe_t *moe, const memory_t *at) {
    sidelane_tensor_t tx = tensor(at, at->x), out = tensor(at, at->out);
    sidelane_tape_t *tape;
    if (at->place == SIDELANE_PLACE_HOST) {
        memset(seen.out, 0, sizeof seen.out);
        sidelane_moe_input_t biased = {.size = sizeof biased, .x = &tx, .bias = rank == 1 ? at->out : NULL};
        REFUSED_ON_BOTH(sidelane_moe_forward(moe, &biased, &out, &tape), SIDELANE_ERROR_ARGUMENT, "bias and out overlap",
                        SIDELANE_ERROR_CALL, "input of rank 1 was refused");
        sidelane_moe_input_t masked = {.size = sizeof masked, .x = &tx, .token_mask = rank == 1 ? (uint8_t *)at->out : NULL};
        REFUSED_ON_BOTH(sidelane_moe_forward(moe, &masked, &out, &tape), SIDELANE_ERROR_ARGUMENT, "token_mask and out overlap",
                        SIDELANE_ERROR_CALL, "input of rank 1 was refused");
    }
    float *all[] = {at->of_out, at->of_x, at->of_router, at->of_experts, at->of_shared};
    size_t bytes[] = {sizeof *x, sizeof *x, sizeof seen.router, sizeof seen.experts, sizeof seen.shared};
    const char *names[] = {"of_out", "gradients of x", "gradients of the router", "gradients of experts",
                           "gradients of the shared expert"};
    for (int one = 0; one < 5; one++) {
        for (int other = one + 1; other < 5; other++) {
            float *given[5];
            memcpy(given, all, sizeof given);
            // In the larger of both there is room for either.
            if (rank == 1) given[one] = given[other] = all[bytes[one] > bytes[other] ? one : other];
            sidelane_tensor_t of_out = tensor(at, given[0]), of_x = tensor(at, given[1]);
            sidelane_moe_gradients_t into = {.size = sizeof into, .x = &of_x, .router = given[2], .experts = given[3],
                .shared = given[4]};
            char words[96];
            snprintf(words, sizeof words, "%s and %s overlap", names[one], names[other]);
            tape = forward(moe, at);
            REFUSED_ON_BOTH(sidelane_moe_backward(moe, tape, &of_out, &into), SIDELANE_ERROR_ARGUMENT, words,
                            SIDELANE_ERROR_CALL, "input of rank 1 was refused");
        }
    }
}

// Input of rank 1 that it cannot bring.
static void passes(sidelane_moe_t *moe, sidelane_moe_t *other, const memory_t *at) {
    sidelane_tensor_t tx = tensor(at, at->x), out = tensor(at, at->out), wide = tx, halves = tx, elsewhere = tx;
    wide.columns = HIDDEN + 1, halves.dtype = SIDELANE_DTYPE_BF16, elsewhere.place = !at->place;
    struct { const sidelane_tensor_t *x; sidelane_status_t status; const char *words; } wrong[] = {
        {NULL, SIDELANE_ERROR_ARGUMENT, "is NULL"},
        {&wide, SIDELANE_ERROR_ARGUMENT, "expected [5, 8]"},
        {&halves, SIDELANE_ERROR_PLAN, "bf16"},
        {&elsewhere, SIDELANE_ERROR_PLAN, "expected of"},
    };
    sidelane_tape_t *tape;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        sidelane_moe_input_t input = {.size = sizeof input, .x = rank == 1 ? wrong[i].x : &tx};
        REFUSED_ON_BOTH(sidelane_moe_forward(moe, &input, &out, &tape), wrong[i].status, wrong[i].words,
                        SIDELANE_ERROR_CALL, "input of rank 1 was refused");
        sidelane_tensor_t of_out = tensor(at, at->of_out), of_x = tensor(at, at->of_x);
        sidelane_moe_gradients_t into = {.size = sizeof into, .x = &of_x, .router = at->of_router,
            .experts = at->of_experts, .shared = at->of_shared};
        tape = forward(moe, at);
        REFUSED_ON_BOTH(sidelane_moe_backward(moe, tape, rank == 1 ? wrong[i].x : &of_out, &into), wrong[i].status,
                        wrong[i].words, SIDELANE_ERROR_CALL, "input of rank 1 was refused");
        if (rank == 1) into.experts = NULL;
        tape = forward(moe, at);
        REFUSED_ON_BOTH(sidelane_moe_backward(moe, tape, &of_out, &into), SIDELANE_ERROR_ARGUMENT,
                        "gradients of experts is NULL", SIDELANE_ERROR_CALL, "input of rank 1 was refused");
        into.experts = at->of_experts;
        tape = forward(other, at);
        REFUSED(sidelane_moe_backward(moe, tape, &of_out, &into), SIDELANE_ERROR_LAYER, "belongs to another layer");
    }
    sidelane_moe_input_t input = {.size = sizeof input, .x = &tx};
    REFUSED_ON_BOTH(sidelane_moe_forward(moe, &input, rank == 1 ? &tx : &out, &tape), SIDELANE_ERROR_ARGUMENT, "overlap",
                    SIDELANE_ERROR_CALL, "input of rank 1 was refused");
    overlaps(moe, at);
    a_step_works(moe, at);
}

static void weights(sidelane_moe_t *moe, const memory_t *at) {
    static float zeros[EXPERTS][WEIGHTS];
    float *none = put(at->place, zeros[0], sizeof zeros);
    float *r = put(at->place, router[0], sizeof router), *e = put(at->place, experts[rank * LOCAL], sizeof seen.experts),
          *s = put(at->place, experts[EXPERTS], sizeof *experts);
    CHECK(sidelane_moe_set_weights(moe, none, none, none));
    // A refused call changes no weight, not even one that it could use.
    float *odd = (float *)((char *)none + 1);
    REFUSED(sidelane_moe_set_weights(moe, r, e, odd), SIDELANE_ERROR_ARGUMENT, "shared");
    CHECK(sidelane_tape_close(forward(moe, at)));
    if (at->place == SIDELANE_PLACE_DEVICE) CUDA(cuStreamSynchronize(cuda));
    get(at->place, seen.out[0], at->out, sizeof seen.out);
    REQUIRE(memcmp(seen.out, residual[rank], sizeof seen.out) == 0);
    CHECK(sidelane_moe_set_weights(moe, r, e, NULL));
    CHECK(sidelane_moe_set_weights(moe, NULL, NULL, s));
    a_step_works(moe, at);
}

static void on(uint32_t place) {
    memory_t at = memory(place);
    settings(place);
    sidelane_moe_options_t options = good(place), plain = good(place);
    plain.chunks = 0, plain.sequential = 1;
    sidelane_moe_t *moe, *other, *alone;
    CHECK(sidelane_moe_build(group, &options, NULL, &moe));
    CHECK(sidelane_moe_build(group, &plain, NULL, &other));
    a_step_works(moe, &at);
    a_step_works(other, &at);
    passes(moe, other, &at);
    weights(moe, &at);
    plain.shared = NULL;
    CHECK(sidelane_moe_build(group, &plain, NULL, &alone));
    REFUSED(sidelane_moe_set_weights(alone, NULL, NULL, at.of_shared), SIDELANE_ERROR_ARGUMENT, "the layer has none");
    CHECK(sidelane_moe_close(alone));
    CHECK(sidelane_moe_close(moe));
    CHECK(sidelane_moe_close(other));
    REFUSED(sidelane_moe_close(moe), SIDELANE_ERROR_HANDLE, "sidelane_moe_t was closed");
    CHECK(sidelane_moe_close(NULL));
}

int main(void) {
    CHECK(sidelane_world_from_env(NULL, &world));
    CHECK(sidelane_world_group(world, NULL, 0, &group));
    sidelane_world_info_t me = {.size = sizeof me};
    CHECK(sidelane_world_info(world, &me));
    rank = me.rank;
    CUcontext context;
    CUDA(cuInit(0));
    CUDA(cuDevicePrimaryCtxRetain(&context, (int)rank));
    CUDA(cuCtxSetCurrent(context));
    CUDA(cuStreamCreate(&cuda, CU_STREAM_NON_BLOCKING));
    CHECK(sidelane_stream_borrow(rank, cuda, &stream));
    CHECK(sidelane_gate_preset("mixtral", EXPERTS, 1, &gate));
    by_hand();
    on(SIDELANE_PLACE_HOST);
    on(SIDELANE_PLACE_DEVICE);
    printf("rank %u: layers right on both places\n", rank);
    CHECK(sidelane_stream_close(stream));
    CHECK(sidelane_group_close(group));
    CHECK(sidelane_world_close(world));
    return 0;
}
