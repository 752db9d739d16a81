// Sort choices: which token's row lies where, if rows are packed by bin and then token: a stable
// counting sort of the choices. Where a token is one row however many of its choices are in a bin,
// the first of them is the one that counts.
//
//     grid at most (bins): a block finds the rows of one bin, and then of others. For each it looks
//     at all choices twice: how many belong to lower bins, and which are its own. Behind the rows
//     of the last bin it writes -1.
//
// A thread looks at one choice, or, where a token is one row in a bin, at all choices of a token.
//
// `plan_choices` also writes all else that a dispatch needs of its choices (`SortedRouting` in
// crates/core/src/plan/sorted_routing.rs): rows of each bin, the row of each choice, metadata of
// each row. Bins share out the choices among them to look for what is wrong.
#include "numbers.h"

struct SortChoices {
    u64 experts; // i32 [choices]; -1: dropped
    u64 bin_of;  // i32 [n_experts]
    u64 order;   // i32 [choices]: the token of each row
    u32 choices, top_k, n_experts, n_bins;
    u32 once; // a token has one row in a bin
    u32 unused;
};

struct PlanChoices {
    struct SortChoices sort;
    u64 weights;  // f32 [choices]
    u64 local_of; // i32 [n_experts]: the number of an expert at its rank
    u64 place_of; // i32 [n_bins]: the place of a bin in the order of a sum
    u64 rows;     // i32 [choices]: the row of each, or -1
    u64 places;   // i32 [choices]: the place of its bin, or -1; of choices with one row the first has it
    u64 metadata; // u32 [choices], weights of rows; if `once`, [choices, 2, top_k]: experts + 1, weights
    u64 kept;     // f32 [choices]: the weights again, or 0
    u64 counts;   // u32 [n_bins]: rows of each bin
    u64 faults;   // ChoiceFault [n_bins]: the first of the choices that a bin looks at
};

// A choice that is wrong, and its expert; `what` is 0 if none is.
struct ChoiceFault {
    u32 what, choice;
    i32 expert;
};

enum { NO_EXPERT = 1, NAN_WEIGHT = 2, EXPERT_TWICE = 3 };

// Choices that a thread looks at between two barriers.
enum { SORT_PASSES = 4 };

struct SortBlock {
    u32 counts[SORT_PASSES * WARPS]; // per pass and warp: choices of this bin
    u32 below;                        // choices of lower bins
    u32 fault;                        // the first choice that is wrong
};

// The bin of a choice; none for -1 and other numbers that name no expert.
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

// What is wrong with a choice, or 0.
DEVICE u32 fault_of(const struct PlanChoices *p, u32 choice) {
    const i32 *experts = AT(const i32, p->sort.experts);
    i32 expert = experts[choice];
    if (expert == -1) return 0;
    if ((u32)expert >= p->sort.n_experts) return NO_EXPERT;
    if ((AT(const u32, p->weights)[choice] & 0x7fffffffu) > INFINITE) return NAN_WEIGHT;
    for (u32 other = choice - choice % p->sort.top_k; other < choice; other++)
        if (experts[other] == expert) return EXPERT_TWICE;
    return 0;
}

// Looks at a share of the choices: finds the first that is wrong, keeps weights, and gives those
// without a bin no row.
DEVICE void look_for_faults(const struct PlanChoices *p, struct SortBlock *s, u32 share) {
    u32 each = (p->sort.choices + p->sort.n_bins - 1) / p->sort.n_bins;
    if (threadIdx.x == 0) s->fault = ~0u;
    __syncthreads();
    for (u32 i = threadIdx.x; i < each; i += THREADS) {
        u64 at = (u64)share * each + i;
        if (at >= p->sort.choices) break;
        u32 choice = (u32)at;
        if (fault_of(p, choice)) atomicMin(&s->fault, choice);
        if (p->kept) AT(u32, p->kept)[choice] = AT(const u32, p->weights)[choice];
        if (bin_of_choice(&p->sort, choice) < 0) AT(i32, p->rows)[choice] = AT(i32, p->places)[choice] = -1;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        struct ChoiceFault *fault = AT(struct ChoiceFault, p->faults) + share;
        int wrong = s->fault != ~0u;
        fault->what = wrong ? fault_of(p, s->fault) : 0;
        fault->choice = s->fault;
        fault->expert = wrong ? AT(const i32, p->sort.experts)[s->fault] : -1;
    }
}

// Writes what goes with the row of an item in a bin.
DEVICE void describe_row(const struct PlanChoices *p, u32 item, i32 bin, u32 row) {
    const u32 *weights = AT(const u32, p->weights);
    i32 *rows = AT(i32, p->rows), *places = AT(i32, p->places), place = AT(const i32, p->place_of)[bin];
    u32 top_k = p->sort.top_k;
    if (!p->sort.once) {
        rows[item] = (i32)row;
        places[item] = place;
        AT(u32, p->metadata)[row] = weights[item];
        return;
    }
    u32 *metadata = AT(u32, p->metadata) + (u64)row * top_k * 2;
    for (u32 k = 0; k < top_k; k++) {
        u32 choice = item * top_k + k;
        int here = bin_of_choice(&p->sort, choice) == bin;
        metadata[k] = here ? (u32)AT(const i32, p->local_of)[AT(const i32, p->sort.experts)[choice]] + 1 : 0;
        metadata[top_k + k] = here ? weights[choice] : 0;
        if (!here) continue;
        rows[choice] = (i32)row;
        places[choice] = place;
        place = -1;
    }
}

// `plan` is 0 where only the order is wanted: a constant wherever this is used.
DEVICE void sort_bin(const struct SortChoices *p, const struct PlanChoices *plan, struct SortBlock *s, i32 bin) {
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
            if (chosen[pass] >> lane & 1) {
                u32 own = first + __popc(chosen[pass] & ((1u << lane) - 1));
                order[own] = (i32)(i / of_token);
                if (plan) describe_row(plan, i, bin, own);
            }
        }
        __syncthreads();
    }
    if (plan && threadIdx.x == 0) AT(u32, plan->counts)[bin] = row - s->below;
    if ((u32)bin + 1 == p->n_bins)
        for (u32 i = row + threadIdx.x; i < p->choices; i += THREADS) order[i] = -1;
}

KERNEL(sort_choices, struct SortChoices, p) {
    SHARED(struct SortBlock, s);
    for (u32 bin = blockIdx.x; bin < p.n_bins; bin += gridDim.x) {
        sort_bin(&p, 0, s, (i32)bin);
        __syncthreads();
    }
}

KERNEL(plan_choices, struct PlanChoices, p) {
    SHARED(struct SortBlock, s);
    for (u32 bin = blockIdx.x; bin < p.sort.n_bins; bin += gridDim.x) {
        look_for_faults(&p, s, bin);
        sort_bin(&p.sort, &p, s, (i32)bin);
        __syncthreads();
    }
}
