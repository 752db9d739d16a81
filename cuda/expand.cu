// Expand: rows that came in slots (slot.cu has their head) to expert-major rows within a budget,
// where no host knows how many there are.
//
//     first half    tally     how many rows this rank has for every bin, into the header of every slot
//     second half   admit     from the counts of all ranks: where rows of each begin, and how many there is room for
//                   expand    the row of each choice, and the choice of each row; `regroup` then gathers the rows
//
// Every rank reads the same counts. So all know which rows find room at each rank, as on the host:
// within a bin by source, then token, and those whose place is at or beyond the budget are dropped.
#include "slot.h"

// Choices that a thread looks at between two barriers.
enum { EXPAND_PASSES = 4 };

struct Tally {
    u64 experts;   // i32 [choices]; -1: dropped
    u64 bin_of;    // i32 [n_experts]
    u64 slots;     // u64 [ranks]: addresses of the slots
    u64 bins;      // i32 [choices]: the bin of each choice, or -1
    u64 before;    // u32 [choices]: choices of its bin before it
    u64 counts_at; // in a slot
    u32 choices, n_experts, ranks, n_bins;
};

struct MatchBlock {
    u32 counts[EXPAND_PASSES * WARPS]; // per pass and warp: choices that match
};

// The choices of one of the passes that a block makes over a list.
struct Matches {
    u32 chosen[EXPAND_PASSES]; // a bit for each lane of the warp
    u32 first[EXPAND_PASSES];  // choices that match before those of the warp
};

// Counts, for each pass, the choices before those of a warp. All threads take part. Gives the count
// behind all passes.
DEVICE u32 number(struct MatchBlock *s, struct Matches *m, u32 count) {
    u32 warp = threadIdx.x / WARP;
    if (threadIdx.x % WARP == 0)
        for (u32 pass = 0; pass < EXPAND_PASSES; pass++) s->counts[pass * WARPS + warp] = __popc(m->chosen[pass]);
    __syncthreads();
    for (u32 pass = 0; pass < EXPAND_PASSES; pass++) {
        for (u32 other = 0; other < WARPS; other++) {
            if (other == warp) m->first[pass] = count;
            count += s->counts[pass * WARPS + other];
        }
    }
    __syncthreads();
    return count;
}

// Choices that match before that of a lane.
DEVICE u32 nth(const struct Matches *m, u32 pass) {
    return m->first[pass] + __popc(m->chosen[pass] & ((1u << threadIdx.x % WARP) - 1));
}

// Finds the choices of one bin.
DEVICE void tally_bin(const struct Tally *p, struct MatchBlock *s, i32 own) {
    i32 *bins = AT(i32, p->bins);
    u32 lane = threadIdx.x % WARP, count = 0;
    for (u32 begin = 0; begin < p->choices; begin += EXPAND_PASSES * THREADS) {
        struct Matches m;
        for (u32 pass = 0; pass < EXPAND_PASSES; pass++) {
            u32 i = begin + pass * THREADS + threadIdx.x;
            i32 expert = i < p->choices ? AT(const i32, p->experts)[i] : -1;
            i32 bin = (u32)expert < p->n_experts ? AT(const i32, p->bin_of)[expert] : -1;
            if (i < p->choices && bin < 0 && own == 0) bins[i] = -1;
            m.chosen[pass] = __ballot_sync(ALL_LANES, bin == own);
        }
        count = number(s, &m, count);
        for (u32 pass = 0; pass < EXPAND_PASSES; pass++) {
            u32 i = begin + pass * THREADS + threadIdx.x;
            if (!(m.chosen[pass] >> lane & 1)) continue;
            bins[i] = own;
            AT(u32, p->before)[i] = nth(&m, pass);
        }
    }
    for (u32 rank = threadIdx.x; rank < p->ranks; rank += THREADS)
        AT(u32, AT(const u64, p->slots)[rank] + p->counts_at)[own] = count;
}

// grid at most (bins).
KERNEL(tally, struct Tally, p) {
    SHARED(struct MatchBlock, s);
    for (u32 bin = blockIdx.x; bin < p.n_bins; bin += gridDim.x) tally_bin(&p, s, (i32)bin);
}

struct Admit {
    u64 received;   // a slot of each rank
    u64 slot_bytes; // from one to the next
    u64 counts_at;  // in a slot
    u64 starts;     // u32 [ranks + 1]: the first bin of each rank
    u64 begin;      // u32 [bins]: the first row of each bin at its rank
    u64 room;       // u32 [bins]: rows of this rank for which the bin has room
    u64 first;      // u32 [ranks, own bins]: the first row of each source at each bin of this rank
    u64 counts;     // i64 [2, own bins]: rows of each bin, then the same with pads
    u64 index;      // i32 [budget]: -1 is written
    u64 weights;    // f32 [budget]: 0 is written
    u64 status;     // u32: what kernels found before
    u64 verdict;    // u64: as check wrote it, or which rank is over its budget
    u64 refusal;    // u32: the rank that refuses or is over its budget, as all ranks find it; 0: none
    u32 ranks, me, bins, budget, align;
    u32 strict; // more rows than the budget refuse the call at every rank
};

struct AdmitBlock {
    u32 over; // the first rank that is over its budget
    u32 refusing;
    u32 refusal;
};

DEVICE u32 saturated(u64 number) { return number < ~0u ? (u32)number : ~0u; }

// What is left of a budget behind `from` rows, if no more than `rows` are asked for.
DEVICE u32 within(u32 budget, u64 from, u64 rows) {
    u64 left = from < budget ? budget - from : 0;
    return saturated(rows < left ? rows : left);
}

// grid (blocks): the first one counts; all clear what `expand` writes in part.
KERNEL(admit, struct Admit, p) {
    SHARED(struct AdmitBlock, s);
    for (u32 row = blockIdx.x * THREADS + threadIdx.x; row < p.budget; row += gridDim.x * THREADS) {
        AT(i32, p.index)[row] = -1;
        AT(u32, p.weights)[row] = 0;
    }
    if (blockIdx.x != 0) return;
    const u32 *starts = AT(const u32, p.starts);
    u32 *begin = AT(u32, p.begin), *room = AT(u32, p.room), *first = AT(u32, p.first);
    u32 own = starts[p.me], n_own = starts[p.me + 1] - own;
    u64 *counts = AT(u64, p.counts);
    // How many rows are below those of each source, and in all: where beginnings will be.
    for (u32 bin = threadIdx.x; bin < p.bins; bin += THREADS) {
        u64 total = 0;
        for (u32 rank = 0; rank < p.ranks; rank++) {
            if (rank == p.me) room[bin] = saturated(total);
            if (bin - own < n_own) first[rank * n_own + bin - own] = saturated(total);
            total += AT(const u32, p.received + rank * p.slot_bytes + p.counts_at)[bin];
        }
        begin[bin] = saturated(total);
    }
    if (threadIdx.x == 0) s->over = ~0u;
    __syncthreads();
    for (u32 rank = threadIdx.x; rank < p.ranks; rank += THREADS) {
        u64 row = 0;
        for (u32 bin = starts[rank]; bin < starts[rank + 1]; bin++) {
            u64 total = begin[bin], padded = (total + p.align - 1) / p.align * p.align;
            if (rank == p.me) {
                counts[bin - own] = within(p.budget, row, total);
                counts[n_own + bin - own] = within(p.budget, row, padded);
            }
            begin[bin] = saturated(row);
            row += padded;
        }
        if (p.strict && row > p.budget) atomicMin(&s->over, rank);
    }
    u32 refusing_rank = refusing(p.received, p.slot_bytes, p.ranks, &s->refusing);
    if (threadIdx.x == 0) {
        s->refusal = s->over == ~0u ? 0 : OVER_BUDGET | s->over << 8;
        // What this rank found of its own is in the verdict. Faults of the status word are its own
        // affair: the rows of the others are right all the same.
        if (refusing_rank != ~0u) s->refusal = REFUSED | refusing_rank << 8;
        else judge(p.status, p.verdict, AT(const struct Head, p.received + p.me * p.slot_bytes)->call, s->refusal);
        *AT(u32, p.refusal) = s->refusal;
    }
    __syncthreads();
    for (u32 bin = threadIdx.x; bin < p.bins; bin += THREADS) {
        room[bin] = s->refusal ? ~0u : within(p.budget, (u64)begin[bin] + room[bin], ~0u);
        if (bin - own >= n_own) continue;
        for (u32 rank = 0; rank < p.ranks; rank++)
            first[rank * n_own + bin - own] = saturated((u64)first[rank * n_own + bin - own] + begin[bin]);
        if (s->refusal) counts[bin - own] = counts[n_own + bin - own] = 0;
    }
}

struct Expand {
    u64 received;   // a slot of each rank
    u64 slot_bytes; // from one to the next
    u64 weights_at; // in a slot; the experts are right behind its head
    u64 first;      // as admit wrote it
    u64 place;      // i32 [own bins]: the place of each bin in the order of sums
    u64 rows;       // i32 [ranks, max_tokens, top_k]: the row of each choice, or -1
    u64 sums;       // i32, likewise: the place of its bin, or -1
    u64 index;      // i32 [budget]: the row of the slots that each row is
    u64 weights;    // f32 [budget]: its routing weight
    u64 bins, before; // as tally wrote them
    u64 room;       // as admit wrote it
    u64 dropped;    // u8 [choices]: choices of this rank that pack dropped; those without room are added
    u64 refusal;    // u32, as admit wrote it
    u32 ranks, own, budget, max_tokens, top_k, slot_rows, header_rows, choices;
};

struct ExpandBlock {
    struct MatchBlock match;
    u32 refusal; // the same for all threads
};

// This rank's own choices.
DEVICE void mark(const struct Expand *p) {
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < p->choices; i += gridDim.x * THREADS) {
        i32 bin = AT(const i32, p->bins)[i];
        if (bin >= 0) AT(unsigned char, p->dropped)[i] = AT(const u32, p->before)[i] >= AT(const u32, p->room)[bin];
    }
}

// Finds the rows of a source for one bin.
DEVICE void expand_bin(const struct Expand *p, struct ExpandBlock *s, u32 source, i32 own) {
    u32 lane = threadIdx.x % WARP, choices = p->max_tokens * p->top_k, count = 0;
    u64 slot = p->received + source * p->slot_bytes, at = (u64)source * choices;
    const i32 *experts = AT(const i32, slot + sizeof(struct Head));
    u32 row = (u32)own < p->own ? AT(const u32, p->first)[source * p->own + own] : 0;
    int refused = s->refusal != 0;
    for (u32 begin = 0; begin < choices; begin += EXPAND_PASSES * THREADS) {
        struct Matches m;
        for (u32 pass = 0; pass < EXPAND_PASSES; pass++) {
            u32 i = begin + pass * THREADS + threadIdx.x;
            i32 expert = i < choices ? experts[i] : -1;
            if (i < choices && own == 0 && (u32)expert >= p->own)
                AT(i32, p->rows)[at + i] = AT(i32, p->sums)[at + i] = -1;
            m.chosen[pass] = __ballot_sync(ALL_LANES, expert == own && (u32)own < p->own);
        }
        count = number(&s->match, &m, count);
        for (u32 pass = 0; pass < EXPAND_PASSES; pass++) {
            u32 i = begin + pass * THREADS + threadIdx.x, to = row + nth(&m, pass);
            if (!(m.chosen[pass] >> lane & 1)) continue;
            int lands = !refused && to < p->budget;
            AT(i32, p->rows)[at + i] = lands ? (i32)to : -1;
            AT(i32, p->sums)[at + i] = AT(const i32, p->place)[own];
            if (!lands) continue;
            AT(i32, p->index)[to] = (i32)(source * p->slot_rows + p->header_rows + i / p->top_k);
            AT(u32, p->weights)[to] = AT(const u32, slot + p->weights_at)[i];
        }
    }
}

// grid at most (own bins, or one, ranks + 1): beside a row of bins for each source there is one for
// this rank's choices.
KERNEL(expand, struct Expand, p) {
    SHARED(struct ExpandBlock, s);
    if (threadIdx.x == 0) s->refusal = *AT(const u32, p.refusal);
    __syncthreads();
    for (u32 source = blockIdx.y; source <= p.ranks; source += gridDim.y) {
        if (source == p.ranks) {
            mark(&p);
            break;
        }
        u32 own = p.own ? p.own : 1;
        for (u32 bin = blockIdx.x; bin < own; bin += gridDim.x) expand_bin(&p, s, source, (i32)bin);
    }
}
