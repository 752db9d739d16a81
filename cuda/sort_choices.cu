// Sort choices: which token's row lies where, if rows are packed by bin and then token: a stable
// counting sort of the choices. Where a token is one row however many of its choices are in a bin,
// the first of them is the one that counts.
//
//     grid at most (bins): a block finds the rows of one bin, and then of others. For each it looks
//     at all choices twice: how many belong to lower bins, and which are its own. Behind the rows
//     of the last bin it writes -1.
//
// A thread looks at one choice, or, where a token is one row in a bin, at all choices of a token.
#include "shim.h"

struct SortChoices {
    u64 experts; // i32 [choices]; -1: dropped
    u64 bin_of;  // i32 [n_experts]
    u64 order;   // i32 [choices]: the token of each row
    u32 choices, top_k, n_experts, n_bins;
    u32 once; // a token has one row in a bin
    u32 unused;
};

// Choices that a thread looks at between two barriers.
enum { SORT_PASSES = 4 };

struct SortBlock {
    u32 counts[SORT_PASSES * WARPS]; // per pass and warp: choices of this bin
    u32 below;                        // choices of lower bins
};

// The bin of a choice; none for -1 and whatever is no expert.
DEVICE i32 bin_of_choice(const struct SortChoices *p, u32 choice) {
    i32 expert = AT(const i32, p->experts)[choice];
    return (u32)expert < p->n_experts ? AT(const i32, p->bin_of)[expert] : -1;
}

// Whether a token has a row in the bin, and how many it has in lower ones.
DEVICE int has_bin(const struct SortChoices *p, u32 token, i32 bin, u32 *below) {
    u64 lower = 0;
    int has = 0;
    for (u32 k = 0; k < p->top_k; k++) {
        i32 other = bin_of_choice(p, token * p->top_k + k);
        has |= other == bin;
        if (other < 0 || other >= bin) continue;
        if (p->n_bins <= 64) {
            lower |= 1ull << other;
        } else {
            int first = 1;
            for (u32 i = 0; i < k; i++) first &= bin_of_choice(p, token * p->top_k + i) != other;
            *below += first;
        }
    }
    *below += __popcll(lower);
    return has;
}

// Whether an item has a row in the bin, and how many it has in lower ones. An item is a token where
// that is one row in a bin, or else a choice.
DEVICE int looked_at(const struct SortChoices *p, u32 item, i32 bin, u32 *below) {
    if (p->once) return has_bin(p, item, bin, below);
    i32 other = bin_of_choice(p, item);
    *below += other >= 0 && other < bin;
    return other == bin;
}

DEVICE void sort_bin(const struct SortChoices *p, struct SortBlock *s, i32 bin) {
    i32 *order = AT(i32, p->order);
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, below = 0, unused = 0;
    u32 items = p->once ? p->choices / p->top_k : p->choices, of_token = p->once ? 1 : p->top_k;
    if (threadIdx.x == 0) s->below = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < items; i += THREADS) looked_at(p, i, bin, &below);
    atomicAdd(&s->below, below);
    __syncthreads();
    u32 row = s->below;
    for (u32 begin = 0; begin < items; begin += SORT_PASSES * THREADS) {
        u32 chosen[SORT_PASSES];
        for (u32 pass = 0; pass < SORT_PASSES; pass++) {
            u32 i = begin + pass * THREADS + threadIdx.x;
            chosen[pass] = __ballot_sync(ALL_LANES, i < items && looked_at(p, i, bin, &unused));
            if (lane == 0) s->counts[pass * WARPS + warp] = __popc(chosen[pass]);
        }
        __syncthreads();
        for (u32 pass = 0; pass < SORT_PASSES; pass++) {
            u32 i = begin + pass * THREADS + threadIdx.x, first = 0;
            for (u32 other = 0; other < WARPS; other++) {
                if (other == warp) first = row;
                row += s->counts[pass * WARPS + other];
            }
            if (chosen[pass] >> lane & 1) order[first + __popc(chosen[pass] & ((1u << lane) - 1))] = (i32)(i / of_token);
        }
        __syncthreads();
    }
    if ((u32)bin + 1 == p->n_bins)
        for (u32 i = row + threadIdx.x; i < p->choices; i += THREADS) order[i] = -1;
}

KERNEL(sort_choices, struct SortChoices, p) {
    SHARED(struct SortBlock, s);
    for (u32 bin = blockIdx.x; bin < p.n_bins; bin += gridDim.x) {
        sort_bin(&p, s, (i32)bin);
        __syncthreads();
    }
}
