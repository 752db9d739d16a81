// Pack: the rows of this rank's tokens, with their choices, into one slot for each rank (src/plan/slot.rs has the picture).
//
//     grid (parts, ranks): block (part, rank) writes `rows / parts` rows of the slot for `rank`, and what its header says of
//     them. Which tokens these are it finds out by itself, from all choices: for decode that is less than a launch costs.
//
// One launch. Everything in a slot is written, whether it is used or not.
#include "slot.h"

struct Pack {
    u64 x;          // [tokens, row_bytes]
    u64 experts;    // i32 [tokens, top_k]; -1: dropped
    u64 weights;    // f32 [tokens, top_k]
    u64 rank_of;    // i32 [n_experts]
    u64 local_of;   // i32 [n_experts]
    u64 slots;      // u64 [ranks]: addresses
    u64 places;     // i32 [tokens, ranks]: the token's row in the slot, or -1
    u64 counter;    // u64: calls so far
    u64 status;     // u32
    u64 digest;
    u64 row_bytes;
    u64 weights_at; // in a slot; the experts are right behind its head
    u64 rows_at;
    u32 tokens, max_tokens, top_k, n_experts, ranks, unused;
};

// Rows of a slot that one block writes, at most, and tokens that a thread looks at between two barriers.
enum { PART_ROWS = 512, PASSES = 4 };

struct PackBlock {
    u32 counts[PASSES * WARPS]; // per pass and warp: tokens that are chosen
    u32 tokens[PART_ROWS];      // of this block's rows
    u32 fault;                  // of the first token that has one: twice its number, odd for a fault of the map
    u64 call;
};

// The rank of an expert; none for -1 and whatever is no expert.
DEVICE i32 rank_of(const struct Pack *p, i32 expert) {
    return (u32)expert < p->n_experts ? AT(const i32, p->rank_of)[expert] : -1;
}

DEVICE int has_row(const struct Pack *p, u32 token, i32 rank) {
    const i32 *experts = AT(const i32, p->experts) + (u64)token * p->top_k;
    int has = 0;
    for (u32 k = 0; k < p->top_k; k++) has |= rank_of(p, experts[k]) == rank;
    return has;
}

// Finds the tokens of this block's rows, `first` to `last`, and gives how many rows of the slot are used.
DEVICE u32 place(const struct Pack *p, struct PackBlock *s, u32 first, u32 last) {
    u32 rank = blockIdx.y, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, used = 0;
    for (u32 begin = 0; begin < p->tokens; begin += PASSES * THREADS) {
        u32 chosen[PASSES], before[PASSES];
        for (u32 pass = 0; pass < PASSES; pass++) {
            u32 token = begin + pass * THREADS + threadIdx.x;
            chosen[pass] = __ballot_sync(ALL_LANES, token < p->tokens && has_row(p, token, (i32)rank));
            if (lane == 0) s->counts[pass * WARPS + warp] = __popc(chosen[pass]);
        }
        __syncthreads();
        for (u32 pass = 0; pass < PASSES; pass++) {
            for (u32 other = 0; other < WARPS; other++) {
                if (other == warp) before[pass] = used;
                used += s->counts[pass * WARPS + other];
            }
        }
        for (u32 pass = 0; pass < PASSES; pass++) {
            u32 token = begin + pass * THREADS + threadIdx.x;
            u32 row = before[pass] + __popc(chosen[pass] & ((1u << lane) - 1));
            int has = chosen[pass] >> lane & 1;
            if (has && row >= first && row < last) s->tokens[row - first] = token;
            if (token < p->tokens && token % gridDim.x == blockIdx.x)
                AT(i32, p->places)[(u64)token * p->ranks + rank] = has ? (i32)row : -1;
        }
        __syncthreads();
    }
    return used;
}

// The first block looks for what is wrong, and counts the call.
DEVICE void begin_call(const struct Pack *p, struct PackBlock *s) {
    const i32 *experts = AT(const i32, p->experts);
    if (threadIdx.x == 0) {
        s->fault = ~0u;
        s->call = ++*AT(u64, p->counter);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < p->tokens * p->top_k; i += THREADS) {
        i32 expert = experts[i], rank = rank_of(p, expert);
        if (expert < -1 || expert >= (i32)p->n_experts) atomicMin(&s->fault, i / p->top_k * 2);
        else if (expert >= 0 && (rank < 0 || rank >= (i32)p->ranks)) atomicMin(&s->fault, i / p->top_k * 2 + 1);
    }
    __syncthreads();
    if (threadIdx.x == 0 && s->fault != ~0u)
        report(p->status, s->fault & 1 ? RANK_OUT_OF_RANGE : EXPERT_OUT_OF_RANGE, s->fault >> 1);
    for (u32 rank = threadIdx.x; rank < p->ranks; rank += THREADS)
        AT(struct Head, AT(const u64, p->slots)[rank])->call = s->call;
}

// What the header says of the slot as a whole, and of this block's rows; zeros between the arrays, shared out among parts.
DEVICE void write_header(const struct Pack *p, const struct PackBlock *s, u64 slot, u32 used, u32 first, u32 last) {
    i32 rank = (i32)blockIdx.y;
    u64 at = sizeof(struct Head), array = (u64)p->max_tokens * p->top_k * 4;
    i32 *experts = AT(i32, slot + at);
    u32 *weights = AT(u32, slot + p->weights_at);
    for (u32 i = threadIdx.x; i < (last - first) * p->top_k; i += THREADS) {
        u32 row = first + i / p->top_k, k = i % p->top_k;
        u64 to = (u64)first * p->top_k + i;
        i32 expert = -1, local = -1;
        u32 weight = 0;
        if (row < used) {
            u64 from = (u64)s->tokens[row - first] * p->top_k + k;
            expert = AT(const i32, p->experts)[from];
            if (rank_of(p, expert) == rank) {
                local = AT(const i32, p->local_of)[expert];
                weight = AT(const u32, p->weights)[from];
            }
        }
        experts[to] = local;
        weights[to] = weight;
    }
    u64 self = (u64)blockIdx.x * THREADS + threadIdx.x, all = (u64)gridDim.x * THREADS;
    for (u64 byte = at + array + self * 4; byte < p->weights_at; byte += all * 4) *AT(u32, slot + byte) = 0;
    for (u64 byte = p->weights_at + array + self * 4; byte < p->rows_at; byte += all * 4) *AT(u32, slot + byte) = 0;
    if (self == 0) {
        struct Head *head = AT(struct Head, slot);
        head->rows = used;
        head->tokens = p->tokens;
        head->digest = p->digest;
        for (u32 i = 0; i < 5; i++) head->reserved[i] = 0;
    }
}

// Copies this block's rows, and writes zeros behind the last one that is used. Four vectors are on their way at a time.
DEVICE void move_rows(const struct Pack *p, const struct PackBlock *s, u64 slot, u32 used, u32 first, u32 last) {
    u32 vectors = (u32)(p->row_bytes / 16), rows = last - first;
    u32 step_rows = THREADS / vectors, step = THREADS % vectors;
    u32 row = threadIdx.x / vectors, vector = threadIdx.x % vectors;
    while (row < rows) {
        uint4 moved[4];
        u64 to[4];
        for (u32 i = 0; i < 4; i++) {
            to[i] = row < rows ? slot + p->rows_at + (first + row) * p->row_bytes + vector * 16ull : 0;
            moved[i].x = moved[i].y = moved[i].z = moved[i].w = 0;
            if (row < rows && first + row < used)
                moved[i] = *AT(const uint4, p->x + s->tokens[row] * p->row_bytes + vector * 16ull);
            row += step_rows;
            vector += step;
            if (vector >= vectors) {
                vector -= vectors;
                row++;
            }
        }
        for (u32 i = 0; i < 4; i++)
            if (to[i]) *AT(uint4, to[i]) = moved[i];
    }
}

KERNEL(pack, struct Pack, p) {
    SHARED(struct PackBlock, s);
    u32 each = (p.max_tokens + gridDim.x - 1) / gridDim.x;
    u32 first = blockIdx.x * each < p.max_tokens ? blockIdx.x * each : p.max_tokens;
    u32 last = first + each < p.max_tokens ? first + each : p.max_tokens;
    u64 slot = AT(const u64, p.slots)[blockIdx.y];
    if (blockIdx.x == 0 && blockIdx.y == 0) begin_call(&p, s);
    u32 used = place(&p, s, first, last);
    write_header(&p, s, slot, used, first, last);
    move_rows(&p, s, slot, used, first, last);
}
