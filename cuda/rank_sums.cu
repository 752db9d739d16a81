// Sums by rank: a token's rows at one rank, added up there before they return.
//
//     out[sum] = round(+0 + weight * row + ...)     experts ascending; a product is rounded, then added
//
//     numbers   i32 [n_rows]: which sum each row is part of, ascending within each expert; -1 of pads
//     counts    i64 [2, n_experts]: rows of each local expert, without and with pads
//     order     u32 [n_experts]: local experts, by the id of their expert
//
//     grid (sums). Each thread of a block looks for the sum among the rows of one expert, the first
//     in the order for the first thread. Then all threads add up what was found. A sum without rows
//     is left as it is: nothing reads it.
#include "rows.h"

struct RankSums {
    u64 out;     // [sums, columns]
    u64 rows;    // [n_rows, columns]
    u64 numbers; // i32 [n_rows]
    u64 counts;  // i64 [2, n_experts]
    u64 order;   // u32 [n_experts]
    u64 weights; // f32 [n_rows], or 0 for none
    u32 sums, columns, n_rows, n_experts;
};

// Vectors that a thread has on their way at a time.
enum { RANK_SUMMED = 4 };

struct RankSumsBlock {
    u32 rows[THREADS];   // of the sum, experts ascending
    u32 found[WARPS];    // by each warp
};

// The rows of one expert.
struct ExpertRows {
    u32 begin, end;
};

DEVICE struct ExpertRows rows_of_expert(const struct RankSums *p, u32 nth) {
    const u64 *rows = AT(const u64, p->counts), *padded = rows + p->n_experts;
    u32 expert = nth < p->n_experts ? AT(const u32, p->order)[nth] : p->n_experts;
    u64 begin = 0, end = 0;
    if (expert < p->n_experts) {
        for (u32 i = 0; i < expert; i++) begin += padded[i];
        end = begin + rows[expert];
    }
    struct ExpertRows found = { begin < p->n_rows ? (u32)begin : p->n_rows, end < p->n_rows ? (u32)end : p->n_rows };
    return found;
}

// Lists the rows of a sum, of which each thread looks for one. Gives how many there are.
DEVICE u32 list_rows(const struct RankSums *p, struct RankSumsBlock *s, u32 sum, struct ExpertRows of) {
    const i32 *numbers = AT(const i32, p->numbers);
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, row = of.begin, high = of.end, before = 0, all = 0;
    while (row < high) {
        u32 middle = row + (high - row) / 2;
        if (numbers[middle] < (i32)sum) row = middle + 1;
        else high = middle;
    }
    int found = row < of.end && numbers[row] == (i32)sum;
    u32 ballot = __ballot_sync(ALL_LANES, found);
    // The list before has been read.
    __syncthreads();
    if (lane == 0) s->found[warp] = __popc(ballot);
    __syncthreads();
    for (u32 other = 0; other < WARPS; other++) {
        if (other == warp) before = all;
        all += s->found[other];
    }
    if (found) s->rows[before + __popc(ballot & ((1u << lane) - 1))] = row;
    __syncthreads();
    return all;
}

// Adds listed rows: 16 bytes of columns, from `column` on.
DEVICE void add_rows(const struct RankSums *p, const struct RankSumsBlock *s, u32 listed, u32 column, float *total, int type) {
    u32 columns = 16 / width(type);
    for (u32 i = 0; i < listed; i += RANK_SUMMED) {
        uint4 moved[RANK_SUMMED];
        for (u32 j = 0; j < RANK_SUMMED; j++) {
            moved[j] = zeros();
            if (i + j < listed && column < p->columns)
                moved[j] = *AT(const uint4, p->rows + ((u64)s->rows[i + j] * p->columns + column) * width(type));
        }
        for (u32 j = 0; j < RANK_SUMMED && i + j < listed; j++) {
            float values[8], weight = p->weights ? AT(const float, p->weights)[s->rows[i + j]] : 1.0f;
            unpack(values, moved[j], type);
            for (u32 c = 0; c < columns; c++) total[c] += values[c] * weight;
        }
    }
}

DEVICE void rank_sums(const struct RankSums *p, int type) {
    SHARED(struct RankSumsBlock, s);
    u32 columns = 16 / width(type), listed = 0;
    struct ExpertRows of = rows_of_expert(p, threadIdx.x);
    for (u32 sum = blockIdx.x; sum < p->sums; sum += gridDim.x) {
        for (u32 begin = 0; begin < p->columns; begin += THREADS * columns) {
            u32 column = begin + threadIdx.x * columns, any = 0;
            float total[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
            for (u32 first = 0; first < p->n_experts; first += THREADS) {
                // Experts that are no more than the threads are listed once for all columns.
                if (p->n_experts > THREADS) of = rows_of_expert(p, first + threadIdx.x);
                if (p->n_experts > THREADS || begin == 0) listed = list_rows(p, s, sum, of);
                add_rows(p, s, listed, column, total, type);
                any |= listed;
            }
            if (any && column < p->columns)
                *AT(uint4, p->out + ((u64)sum * p->columns + column) * width(type)) = rounded(total, type);
        }
    }
}

KERNEL(rank_sums_f32, struct RankSums, p) { rank_sums(&p, F32); }
KERNEL(rank_sums_bf16, struct RankSums, p) { rank_sums(&p, BF16); }
