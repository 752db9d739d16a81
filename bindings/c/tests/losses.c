// Losses of a router and their gradients, compared with numbers that can be derived by hand. No
// world is needed.

#include <math.h>
#include <string.h>

#include "refused.h"

uint32_t rank;

static int near(double seen, double expected) { return fabs(seen - expected) < 1e-6; }

// Two tokens, two experts, even logits: for every choice, the shares are halves.
static void balance(void) {
    static const float even[4] = {0, 0, 0, 0};
    static const int32_t first[2] = {0, 0};
    sidelane_balance_t switched = {.size = sizeof switched};
    CHECK(sidelane_balance_preset("switch", &switched));
    REQUIRE(switched.coefficient == 1 && switched.map == SIDELANE_MAP_FIRST_CHOICES && switched.parts == 1);
    sidelane_balance_input_t input = {.size = sizeof input, .logits = even, .tokens = 2, .choices = first, .experts = 2, .top_k = 1};
    float loss, gradient[4] = {1, 1, 1, 1};
    // 2 experts x (2/2 x 1/2 + 0 x 1/2).
    CHECK(sidelane_balance_loss(&switched, &input, &loss, gradient));
    REQUIRE(near(loss, 1));
    // Expert 0 has all the load: each of its shares costs, by 2 x 1/2 x 1/4. It is added.
    for (int i = 0; i < 4; i++) REQUIRE(near(gradient[i], 1 + (i % 2 ? -0.25 : 0.25)));
    CHECK(sidelane_balance_loss(&switched, &input, &loss, NULL));

    double counts[2] = {1, 1};
    CHECK(sidelane_balance_counts(&switched, &input, counts));
    REQUIRE(counts[0] == 3 && counts[1] == 1);
    // With another rank's counts the loss is this rank's part of the whole.
    input.total_counts = counts, input.total_tokens = 4;
    CHECK(sidelane_balance_loss(&switched, &input, &loss, NULL));
    REQUIRE(near(loss, 0.5));
    static const uint8_t mask[2] = {1, 0}, neither[2] = {1, 2};
    input.total_counts = NULL, input.token_mask = mask;
    CHECK(sidelane_balance_loss(&switched, &input, &loss, NULL));
    REQUIRE(near(loss, 0.25));
    input.token_mask = neither;
    REFUSED(sidelane_balance_loss(&switched, &input, &loss, NULL), SIDELANE_ERROR_ARGUMENT, "0 or 1");
    input.token_mask = NULL, input.choices = NULL;
    REFUSED(sidelane_balance_loss(&switched, &input, &loss, NULL), SIDELANE_ERROR_GATE, "choices");
    switched.map = 9;
    REFUSED(sidelane_balance_loss(&switched, &input, &loss, NULL), SIDELANE_ERROR_ARGUMENT, "map = 9");
    switched.size = 3;
    REFUSED(sidelane_balance_loss(&switched, &input, &loss, NULL), SIDELANE_ERROR_ARGUMENT, "no version");
    REFUSED(sidelane_balance_preset("no such", &(sidelane_balance_t){.size = sizeof switched}), SIDELANE_ERROR_ARGUMENT,
            "deepseek_v3");
}

static void small_logits(void) {
    static const float logits[2] = {1, 1};
    float loss, gradient[2] = {0, 0};
    double z = 1 + log(2);
    CHECK(sidelane_z_loss(0.5f, logits, 1, 2, NULL, &loss, gradient));
    REQUIRE(near(loss, 0.5 * z * z) && near(gradient[0], 0.5 * z) && near(gradient[1], 0.5 * z));
    REFUSED(sidelane_z_loss(0.5f, NULL, 1, 2, NULL, &loss, NULL), SIDELANE_ERROR_ARGUMENT, "logits is NULL");
    REFUSED(sidelane_z_loss(0.5f, logits, 1, 2, NULL, NULL, NULL), SIDELANE_ERROR_ARGUMENT, "loss is NULL");
    REFUSED(sidelane_z_loss(0.5f, logits, (uint64_t)1 << 62, 8, NULL, &loss, NULL), SIDELANE_ERROR_ARGUMENT, "too many");
}

// Expert 0 is wanted twice, and as much as expert 1 is not: as in the library's own documentation.
static void importance(void) {
    static const float logits[4] = {0, -200, 0, -200};
    static const int32_t choices[2] = {0, 0};
    sidelane_importance_input_t input = {.size = sizeof input, .logits = logits, .choices = choices, .tokens = 2, .experts = 2,
                                         .top_k = 1, .noise = 2, .coefficient = 1};
    float loss;
    CHECK(sidelane_importance_loss(&input, &loss, NULL));
    REQUIRE(near(loss, 1.0647598));
    input.noise = 0;
    REFUSED(sidelane_importance_loss(&input, &loss, NULL), SIDELANE_ERROR_GATE, "noise");
}

// A weight that is a softmax of two even logits: 1/2, of which the slope is +- 1/4.
static void weights(void) {
    static const float logits[2] = {0, 0}, d_weights[1] = {8};
    sidelane_gate_config_t config = {.size = sizeof config};
    sidelane_gate_t *gate;
    CHECK(sidelane_gate_preset("olmoe", 2, 1, &config));
    CHECK(sidelane_gate_build(&config, &gate));
    sidelane_gate_call_t call = {.size = sizeof call, .logits = logits, .tokens = 1};
    sidelane_decision_t made = {.size = sizeof made};
    CHECK(sidelane_gate_route(gate, &call, &made));
    REQUIRE(made.routing.weights[0] == 0.5f);
    sidelane_weights_input_t input = {.size = sizeof input, .logits = logits, .choices = made.choices,
                                      .experts = made.routing.experts, .d_weights = d_weights, .tokens = 1};
    float gradient[2] = {0, 0};
    CHECK(sidelane_gate_weights_backward(gate, &input, gradient));
    int chosen = made.choices[0];
    REQUIRE(near(gradient[chosen], 2) && near(gradient[1 - chosen], -2));
    REFUSED(sidelane_gate_weights_backward(gate, &input, NULL), SIDELANE_ERROR_ARGUMENT, "d_logits is NULL");

    // Without noise the logits that choose are the logits.
    float noisy[2] = {9, 9};
    CHECK(sidelane_gate_noisy_logits(gate, &call, noisy));
    REQUIRE(memcmp(noisy, logits, sizeof noisy) == 0);
    CHECK(sidelane_gate_close(gate));
}

int main(void) {
    balance();
    small_logits();
    importance();
    weights();
    printf("losses and gradients right\n");
    return 0;
}
