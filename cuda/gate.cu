// Gate: the choice of experts for each token, to the bit that of crates/core/src/gate: scores in
// f64, choices by exact keys, weights rounded once.
//
//     logits [E] -> scores [E] (+ bias) -> the best groups -> the best experts [K] -> weights [K]
//
//     grid at most (tokens): a block decides for one token, and then for others
//
// A thread ranks an expert by counting those that are better, of equal ones those before it. What
// needs an order of sums is added up by few threads, in the order of the host.
#include "numbers.h"

// The most experts and choices that a block has room for.
enum { GATE_EXPERTS = 1024, GATE_CHOICES = 64, GATE_LANES = 8 };

enum { SOFTMAX, SOFTMAX_OF_CHOSEN, SIGMOID };
enum { NEVER_DIVIDED, SUM_PLUS, SUM_AT_LEAST };

struct Gate {
    u64 logits;  // f32 [tokens, experts]
    u64 bias;    // f32 [experts], for the choice alone, or 0
    u64 used;    // u8 [tokens]: which tokens choose, or 0 for all
    u64 ids;     // i32 [tokens, top_k]: choices, best first; -1 where a token has none
    u64 weights; // f32 [tokens, top_k]
    u64 status;  // u32: 1 where a logit is not finite
    u32 tokens, experts, top_k;
    u32 score;
    u32 by_scores;    // whether keys are scores, and not logits
    u32 groups, kept; // 1 and 1 where all experts stand together
    u32 best_of;      // experts whose keys are the score of a group
    u32 divisor;
    float divisor_value, scaling;
    u32 unused;
};

struct GateBlock {
    float logits[GATE_EXPERTS];
    float keys[GATE_EXPERTS];
    double parts[GATE_EXPERTS]; // scores but for their last step
    float worth[GATE_EXPERTS];  // of groups
    u32 is_kept[GATE_EXPERTS];  // groups
    i32 ids[GATE_CHOICES];
    double chosen[GATE_CHOICES];
    double lanes[GATE_LANES];
    double factor;
    float top;
    u32 bad;
};

// e^x for finite x: `exp` of crates/core/src/gate/math.rs, step by step.
DEVICE double exponential_f64(double x) {
    const double rounds = 6755399441055744.0 + 1023.0;
    if (x < -708.0) x = -708.0;
    if (x > 708.0) x = 708.0;
    double shifted = x * 1.44269504088896340735992468100189214 + rounds;
    double r = x - (shifted - rounds) * 0.693147180559945309417232121458176568;
    double power = double_of(bits_of_double(shifted) << 52);
    float n = (float)r, square = n * n;
    float low = n * 0.16666667f + 0.5f, middle = n * 0.008333311f + 0.041666465f, high = n * 0.0001989099f + 0.001393365f;
    float rest = square * (square * (square * high + middle) + low);
    return ((r + (double)rest) + 1.0) * power;
}

// The largest of so many values, by one thread.
DEVICE float largest(const float *values, u32 count) {
    float most = float_of(0xff800000u);
    for (u32 i = 0; i < count; i++)
        if (values[i] > most) most = values[i];
    return most;
}

// The sum of so many values in lanes that stride through them, and then across.
DEVICE double lane_sum(const double *values, u32 count, u32 lane) {
    double sum = 0.0;
    for (u32 i = lane; i < count; i += GATE_LANES) sum += values[i];
    return sum;
}

DEVICE double across(const double *lanes) {
    double sum = 0.0;
    for (u32 lane = 0; lane < GATE_LANES; lane++) sum += lanes[lane];
    return sum;
}

// Whether a key goes before another: -0 and +0 are equal.
DEVICE int before(float key, u32 at, float other, u32 other_at) { return key > other || (key == other && at < other_at); }

// Score of a group: the sum of its best keys, best first.
DEVICE float worth_of(const float *keys, u32 size, u32 best_of) {
    float sum = 0.0f, last = 0.0f;
    u32 last_at = 0;
    for (u32 nth = 0; nth < best_of; nth++) {
        u32 best = size;
        for (u32 i = 0; i < size; i++) {
            if (nth > 0 && !before(last, last_at, keys[i], i)) continue;
            if (best == size || before(keys[i], i, keys[best], best)) best = i;
        }
        last = keys[best];
        last_at = best;
        sum = nth == 0 ? last : sum + last;
    }
    return sum;
}

// Makes scores of all experts but for their last step, and gives that: a factor.
DEVICE void begin_scores(const struct Gate *p, struct GateBlock *s) {
    if (p->score == SOFTMAX) {
        if (threadIdx.x == 0) s->top = largest(s->logits, p->experts);
        __syncthreads();
    }
    for (u32 i = threadIdx.x; i < p->experts; i += THREADS) {
        double x = (double)s->logits[i];
        s->parts[i] = exponential_f64(p->score == SOFTMAX ? x - (double)s->top : -x);
    }
    __syncthreads();
    if (p->score != SOFTMAX) return;
    if (threadIdx.x < GATE_LANES) s->lanes[threadIdx.x] = lane_sum(s->parts, p->experts, threadIdx.x);
    __syncthreads();
    if (threadIdx.x == 0) s->factor = 1.0 / across(s->lanes);
    __syncthreads();
}

DEVICE double score_of(const struct Gate *p, const struct GateBlock *s, u32 expert) {
    return p->score == SOFTMAX ? s->parts[expert] * s->factor : 1.0 / (1.0 + s->parts[expert]);
}

// Keys by which experts are compared: logits, or scores and a bias.
DEVICE void make_keys(const struct Gate *p, struct GateBlock *s) {
    for (u32 i = threadIdx.x; i < p->experts; i += THREADS) {
        float key = p->by_scores ? (float)score_of(p, s, i) : s->logits[i];
        s->keys[i] = p->bias ? key + AT(const float, p->bias)[i] : key;
    }
    __syncthreads();
}

// Chooses: ids, best first.
DEVICE void choose(const struct Gate *p, struct GateBlock *s) {
    u32 size = p->experts / p->groups;
    for (u32 group = threadIdx.x; group < p->groups; group += THREADS)
        s->worth[group] = p->groups > 1 ? worth_of(s->keys + group * size, size, p->best_of) : 0.0f;
    __syncthreads();
    for (u32 group = threadIdx.x; group < p->groups; group += THREADS) {
        u32 better = 0;
        for (u32 i = 0; i < p->groups; i++) better += before(s->worth[i], i, s->worth[group], group);
        s->is_kept[group] = better < p->kept;
    }
    __syncthreads();
    for (u32 expert = threadIdx.x; expert < p->experts; expert += THREADS) {
        if (!s->is_kept[expert / size]) continue;
        u32 better = 0;
        for (u32 i = 0; i < p->experts; i++)
            better += s->is_kept[i / size] && before(s->keys[i], i, s->keys[expert], expert);
        if (better < p->top_k) s->ids[better] = (i32)expert;
    }
    __syncthreads();
}

// Scores of the chosen.
DEVICE void score_chosen(const struct Gate *p, struct GateBlock *s) {
    if (p->score != SOFTMAX_OF_CHOSEN) {
        for (u32 k = threadIdx.x; k < p->top_k; k += THREADS) s->chosen[k] = score_of(p, s, (u32)s->ids[k]);
        __syncthreads();
        return;
    }
    if (threadIdx.x == 0) {
        s->top = s->logits[s->ids[0]];
        for (u32 k = 1; k < p->top_k; k++)
            if (s->logits[s->ids[k]] > s->top) s->top = s->logits[s->ids[k]];
    }
    __syncthreads();
    for (u32 k = threadIdx.x; k < p->top_k; k += THREADS)
        s->parts[k] = exponential_f64((double)s->logits[s->ids[k]] - (double)s->top);
    __syncthreads();
    if (threadIdx.x < GATE_LANES) s->lanes[threadIdx.x] = lane_sum(s->parts, p->top_k, threadIdx.x);
    __syncthreads();
    if (threadIdx.x == 0) s->factor = 1.0 / across(s->lanes);
    __syncthreads();
    for (u32 k = threadIdx.x; k < p->top_k; k += THREADS) s->chosen[k] = s->parts[k] * s->factor;
    __syncthreads();
}

DEVICE double divisor_of(const struct Gate *p, const struct GateBlock *s) {
    if (p->divisor == NEVER_DIVIDED || (p->divisor == SUM_PLUS && p->top_k == 1)) return 1.0;
    double sum = 0.0, value = (double)p->divisor_value;
    for (u32 k = 0; k < p->top_k; k++) sum += s->chosen[k];
    if (p->divisor == SUM_PLUS) return sum + value;
    return sum > value ? sum : value;
}

DEVICE void decide(const struct Gate *p, struct GateBlock *s, u32 token) {
    const float *logits = AT(const float, p->logits) + (u64)token * p->experts;
    int chooses = !p->used || AT(const unsigned char, p->used)[token];
    i32 *ids = AT(i32, p->ids) + (u64)token * p->top_k;
    float *weights = AT(float, p->weights) + (u64)token * p->top_k;
    if (threadIdx.x == 0) s->bad = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < p->experts; i += THREADS) {
        s->logits[i] = logits[i];
        if ((bits_of(logits[i]) & INFINITE) == INFINITE) s->bad = 1;
    }
    __syncthreads();
    if (s->bad && threadIdx.x == 0) *AT(u32, p->status) = 1;
    if (s->bad || !chooses) {
        for (u32 k = threadIdx.x; k < p->top_k; k += THREADS) {
            ids[k] = -1;
            weights[k] = 0.0f;
        }
        return;
    }
    if (p->score != SOFTMAX_OF_CHOSEN) begin_scores(p, s);
    make_keys(p, s);
    choose(p, s);
    score_chosen(p, s);
    if (threadIdx.x == 0) s->factor = divisor_of(p, s);
    __syncthreads();
    for (u32 k = threadIdx.x; k < p->top_k; k += THREADS) {
        ids[k] = s->ids[k];
        weights[k] = (float)(s->chosen[k] / s->factor * (double)p->scaling);
    }
}

KERNEL(gate, struct Gate, p) {
    SHARED(struct GateBlock, s);
    for (u32 token = blockIdx.x; token < p.tokens; token += gridDim.x) {
        decide(&p, s, token);
        __syncthreads();
    }
}
