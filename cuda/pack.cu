// Pack: the rows of this rank's tokens, with their choices, into one slot for each rank
// (crates/core/src/plan/buffers.rs has the picture).
//
//     grid at most (parts, ranks): block (part, rank) writes `rows / parts` rows of the slot for
//     `rank`, and what its header says of them, then those of its next parts. Which tokens these
//     are it finds out by itself, from all choices: for decode they are a few kilobytes.
//
// One launch. Everything in a slot is written, whether it is used or not. `pack` moves rows as they
// are, `pack_fp8` makes records of bf16 rows (crates/core/src/dtype.rs has their picture).
#include "record.h"
#include "slot.h"

struct Pack {
    u64 x;          // [tokens, row_bytes], or bf16 [tokens, hidden]
    u64 experts;    // i32 [tokens, top_k]; -1: dropped
    u64 weights;    // f32 [tokens, top_k]
    u64 rank_of;    // i32 [n_experts], or MASKED
    u64 local_of;   // i32 [n_experts]
    u64 slots;      // u64 [ranks]: addresses
    u64 places;     // i32 [tokens, ranks]: the token's row in the slot, or -1
    u64 dropped;    // u8 [tokens, top_k]: whether the choice's expert is masked
    u64 counter;    // u64: calls so far
    u64 digest;
    u64 row_bytes;  // of a slot
    u64 weights_at; // in a slot; the experts are right behind its head
    u64 rows_at;
    u32 tokens, max_tokens, top_k, n_experts, ranks, hidden;
    u32 parts;   // of a slot
    u32 refused; // why the host refuses the call, as in a status word; 0: it does not
};

// Rows of a part, at most, and tokens that a thread looks at between two
// barriers.
enum { PART_ROWS = 512, PASSES = 4 };

struct PackBlock {
    u32 counts[PASSES * WARPS]; // per pass and warp: tokens that are chosen
    u32 tokens[PART_ROWS];      // of the part's rows
    u32 fault;                  // of the first token that has one: twice its number, odd for a fault of the map
    u64 call;
};

// The rank of an expert; none for -1 and other numbers that name no expert.
DEVICE i32 rank_of(const struct Pack *p, i32 expert) {
    return (u32)expert < p->n_experts ? AT(const i32, p->rank_of)[expert] : -1;
}

DEVICE int has_row(const struct Pack *p, u32 token, i32 rank) {
    const i32 *experts = AT(const i32, p->experts) + (u64)token * p->top_k;
    int has = 0;
    for (u32 k = 0; k < p->top_k; k++) has |= rank_of(p, experts[k]) == rank;
    return has;
}

// What a block writes at a time.
struct Part {
    u32 rank, index;
    u64 slot;
    u32 used;        // rows of the slot
    u32 first, last; // rows of this part
};

// Finds the tokens of a part's rows, and gives how many rows of the slot are used.
DEVICE u32 place(const struct Pack *p, struct PackBlock *s, const struct Part *part) {
    u32 rank = part->rank, first = part->first, last = part->last, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, used = 0;
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
            if (token < p->tokens && token % p->parts == part->index)
                AT(i32, p->places)[(u64)token * p->ranks + rank] = has ? (i32)row : -1;
        }
        __syncthreads();
    }
    return used;
}

// The block of the first part looks for what is wrong, marks what is dropped, and counts the call.
// Each error goes into the heads alone: `check` makes the verdict of it.
DEVICE void begin_call(const struct Pack *p, struct PackBlock *s) {
    const i32 *experts = AT(const i32, p->experts);
    if (threadIdx.x == 0) {
        s->fault = ~0u;
        s->call = ++*AT(u64, p->counter);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < p->tokens * p->top_k; i += THREADS) {
        i32 expert = experts[i], rank = rank_of(p, expert);
        AT(unsigned char, p->dropped)[i] = rank == MASKED;
        if (expert < -1 || expert >= (i32)p->n_experts) atomicMin(&s->fault, i / p->top_k * 2);
        else if (expert >= 0 && rank != MASKED && (rank < 0 || rank >= (i32)p->ranks)) atomicMin(&s->fault, i / p->top_k * 2 + 1);
    }
    __syncthreads();
    u32 found = s->fault == ~0u ? 0 : (s->fault & 1 ? RANK_OUT_OF_RANGE : EXPERT_OUT_OF_RANGE) | s->fault >> 1 << 8;
    for (u32 rank = threadIdx.x; rank < p->ranks; rank += THREADS) {
        struct Head *head = AT(struct Head, AT(const u64, p->slots)[rank]);
        head->call = s->call;
        head->refused = p->refused ? p->refused : found;
    }
}

// What the header says of the slot as a whole, and of a part's rows; zeros between the arrays,
// shared out among parts.
DEVICE void write_header(const struct Pack *p, const struct PackBlock *s, const struct Part *part) {
    i32 rank = (i32)part->rank;
    u64 slot = part->slot, at = sizeof(struct Head), array = (u64)p->max_tokens * p->top_k * 4;
    i32 *experts = AT(i32, slot + at);
    u32 *weights = AT(u32, slot + p->weights_at);
    for (u32 i = threadIdx.x; i < (part->last - part->first) * p->top_k; i += THREADS) {
        u32 row = part->first + i / p->top_k;
        u64 to = (u64)part->first * p->top_k + i;
        i32 local = -1;
        u32 weight = 0;
        if (row < part->used) {
            u64 from = (u64)s->tokens[row - part->first] * p->top_k + i % p->top_k;
            i32 expert = AT(const i32, p->experts)[from];
            if (rank_of(p, expert) == rank) {
                local = AT(const i32, p->local_of)[expert];
                weight = AT(const u32, p->weights)[from];
            }
        }
        experts[to] = local;
        weights[to] = weight;
    }
    u64 self = (u64)part->index * THREADS + threadIdx.x, all = (u64)p->parts * THREADS;
    for (u64 byte = at + array + self * 4; byte < p->weights_at; byte += all * 4) *AT(u32, slot + byte) = 0;
    for (u64 byte = p->weights_at + array + self * 4; byte < p->rows_at; byte += all * 4) *AT(u32, slot + byte) = 0;
    if (self == 0) {
        struct Head *head = AT(struct Head, slot);
        head->rows = part->used;
        head->tokens = p->tokens;
        head->digest = p->digest;
        for (u32 i = 0; i < 9; i++) head->reserved[i] = 0;
    }
}

// All of a part but its rows.
DEVICE struct Part begin_part(const struct Pack *p, struct PackBlock *s, u32 rank, u32 index) {
    struct Part part = { rank, index, AT(const u64, p->slots)[rank], 0, 0, 0 };
    u32 each = (p->max_tokens + p->parts - 1) / p->parts;
    part.first = index * each < p->max_tokens ? index * each : p->max_tokens;
    part.last = part.first + each < p->max_tokens ? part.first + each : p->max_tokens;
    if (rank == 0 && index == 0) begin_call(p, s);
    part.used = place(p, s, &part);
    write_header(p, s, &part);
    return part;
}

// Copies a part's rows, and writes zeros behind the last one that is used.
DEVICE void copy_rows(const struct Pack *p, const struct PackBlock *s, const struct Part *part) {
    u64 to = part->slot + p->rows_at + part->first * p->row_bytes;
    struct Cursor at = cursor(threadIdx.x, THREADS, (u32)(p->row_bytes / 16));
    while (at.row < part->last - part->first) {
        uint4 moved[IN_FLIGHT];
        u64 into[IN_FLIGHT];
        for (u32 i = 0; i < IN_FLIGHT; i++, advance(&at)) {
            u64 inside = at.vector * 16ull;
            moved[i] = zeros();
            into[i] = at.row < part->last - part->first ? to + at.row * p->row_bytes + inside : 0;
            if (into[i] && part->first + at.row < part->used)
                moved[i] = *AT(const uint4, p->x + s->tokens[at.row] * p->row_bytes + inside);
        }
        for (u32 i = 0; i < IN_FLIGHT; i++)
            if (into[i]) *AT(uint4, into[i]) = moved[i];
    }
}

// Makes records of a part's rows, and writes zeros behind the last one that is used.
DEVICE void make_records(const struct Pack *p, const struct PackBlock *s, const struct Part *part) {
    u64 to = part->slot + p->rows_at + part->first * p->row_bytes;
    u32 rows = part->last - part->first, scales = (p->hidden + SCALED - 1) / SCALED;
    u32 sharing = SCALED / 8, lane = threadIdx.x % sharing;
    for (u32 begin = 0; begin < rows * scales; begin += AT_ONCE * THREADS / sharing) {
        uint4 values[AT_ONCE];
        for (u32 i = 0; i < AT_ONCE; i++) {
            u32 block = begin + (i * THREADS + threadIdx.x) / sharing, row = block / scales;
            u32 column = block % scales * SCALED + lane * 8;
            values[i] = zeros();
            if (row < rows && part->first + row < part->used && column < p->hidden)
                values[i] = *AT(const uint4, p->x + ((u64)s->tokens[row] * p->hidden + column) * 2);
        }
        for (u32 i = 0; i < AT_ONCE; i++) {
            u32 block = begin + (i * THREADS + threadIdx.x) / sharing, row = block / scales;
            u32 column = block % scales * SCALED + lane * 8, codes[2];
            float scale = quantize(values[i], BF16, codes);
            u64 record = to + row * p->row_bytes;
            int used = part->first + row < part->used;
            if (row < rows && column < p->hidden) {
                AT(u32, record + column)[0] = codes[0];
                AT(u32, record + column)[1] = codes[1];
            }
            if (row < rows && lane == 0) AT(u32, record + p->hidden)[block % scales] = used ? bits_of(scale) : 0;
        }
    }
    u32 words = (u32)(p->row_bytes - p->hidden) / 4 - scales;
    for (u32 i = threadIdx.x; i < rows * words; i += THREADS)
        AT(u32, to + i / words * p->row_bytes + p->hidden)[scales + i % words] = 0;
}

// `to_records` is a constant wherever this is used.
DEVICE void pack_parts(const struct Pack *p, int to_records) {
    SHARED(struct PackBlock, s);
    for (u32 rank = blockIdx.y; rank < p->ranks; rank += gridDim.y) {
        for (u32 index = blockIdx.x; index < p->parts; index += gridDim.x) {
            struct Part part = begin_part(p, s, rank, index);
            if (to_records) make_records(p, s, &part);
            else copy_rows(p, s, &part);
            // The next part lists its tokens where these are read.
            __syncthreads();
        }
    }
}

KERNEL(pack, struct Pack, p) { pack_parts(&p, 0); }
KERNEL(pack_fp8, struct Pack, p) { pack_parts(&p, 1); }
