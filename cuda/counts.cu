// Counts: how many rows each expert gets of this rank's tokens, and how many each rank does, where
// a token is one row however many of its experts are there.
//
//     groups: | experts 0..32 | experts 32..64 | ... | ranks 0..32 | ...
//
// A block counts for a group of 32 bins, and then for others, and reads all choices each time. So
// nothing needs to be zero before the launch.
#include "shim.h"

struct Counts {
    u64 experts;    // i32 [tokens, top_k]; -1: dropped
    u64 rank_of;    // i32 [n_experts]
    u64 per_expert; // u32 [n_experts]
    u64 per_rank;   // u32 [ranks]
    u64 status;     // u32
    u32 tokens, top_k, n_experts, ranks;
};

struct CountsBlock {
    u32 counts[WARP];
};

// Counts for the bins from `first` on, of experts or of ranks.
DEVICE void count_group(const struct Counts *p, struct CountsBlock *s, int of_ranks, u32 first) {
    if (threadIdx.x < WARP) s->counts[threadIdx.x] = 0;
    __syncthreads();
    for (u32 token = threadIdx.x; token < p->tokens; token += THREADS) {
        const i32 *experts = AT(const i32, p->experts) + (u64)token * p->top_k;
        u32 ranks = 0;
        for (u32 k = 0; k < p->top_k; k++) {
            i32 expert = experts[k];
            if (expert < 0 || expert >= (i32)p->n_experts) {
                if (expert != -1) report(p->status, EXPERT_OUT_OF_RANGE, token);
                continue;
            }
            // Bins of other groups have larger numbers once `first` is taken off.
            u32 bin = (of_ranks ? (u32)AT(const i32, p->rank_of)[expert] : (u32)expert) - first;
            if (of_ranks && bin + first >= p->ranks) report(p->status, RANK_OUT_OF_RANGE, token);
            if (bin >= WARP) continue;
            if (of_ranks) ranks |= 1u << bin;
            else atomicAdd(&s->counts[bin], 1u);
        }
        for (; ranks; ranks &= ranks - 1) atomicAdd(&s->counts[__ffs(ranks) - 1], 1u);
    }
    __syncthreads();
    u32 bin = first + threadIdx.x;
    if (threadIdx.x < WARP && bin < (of_ranks ? p->ranks : p->n_experts))
        AT(u32, of_ranks ? p->per_rank : p->per_expert)[bin] = s->counts[threadIdx.x];
    __syncthreads();
}

KERNEL(counts, struct Counts, p) {
    SHARED(struct CountsBlock, s);
    u32 of_experts = (p.n_experts + WARP - 1) / WARP, groups = of_experts + (p.ranks + WARP - 1) / WARP;
    for (u32 group = blockIdx.x; group < groups; group += gridDim.x) {
        int of_ranks = group >= of_experts;
        count_group(&p, s, of_ranks, (of_ranks ? group - of_experts : group) * WARP);
    }
}
