// Sums of rows: out[token] = round(+0 + row + row + ...), in f32, ranks ascending; one rounding,
// one quiet NaN.
//
//     grid (tokens, parts of a row). A warp finds the rows of its token together, then each lane
//     sums 16 bytes of columns.
//
// Where the status word is set, zeros are written. Likewise where a rank has refused to combine:
// its mark is then the number of this call. The rank itself sums no tokens, and finds its own mark.
#include "rows.h"
#include "slot.h"

struct Sum {
    u64 out;        // [tokens, columns]
    u64 partials;      // u64 [ranks]: addresses of partial rows, [max_tokens, columns]
    u64 places;     // i32 [tokens, ranks], as pack wrote them
    u64 status;     // u32
    u64 marks;      // u64 [ranks, 2], the first of each: the last call that the rank refused; or none
    u64 counter;    // u64: this call
    u64 verdict;    // u64: that a rank has refused, with the call; the status is its lower half
    u64 lasting;    // u32: what stays wrong, and is stronger
    u32 tokens, max_tokens, ranks, columns;
    u32 me, unused;
};

struct SumBlock {
    u32 status;   // as it was when the block began: the same for all of its threads
    u32 refusing; // this rank if it refused this call, or the lowest one that did
};

// Vectors that a thread has on their way at a time.
enum { SUMMED = 8 };

// Whether something forbids to believe the rows.
DEVICE int refused(const struct Sum *p, struct SumBlock *s) {
    if (threadIdx.x == 0) {
        s->status = *AT(const u32, p->status);
        s->refusing = ~0u;
    }
    __syncthreads();
    if (p->marks) {
        u64 call = *AT(const u64, p->counter);
        int own = AT(const u64, p->marks)[2 * p->me] == call;
        for (u32 rank = threadIdx.x; rank < p->ranks; rank += THREADS)
            if (AT(const u64, p->marks)[2 * rank] == call) atomicMin(&s->refusing, own ? p->me : rank);
        __syncthreads();
        // What is wrong with the dispatch already stays.
        if (s->refusing != ~0u && s->status == 0 && threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0)
            judge(p->lasting, p->verdict, call, REFUSED | s->refusing << 8);
    }
    return s->status != 0 || s->refusing != ~0u;
}

// Adds up the rows of a token: 16 bytes of results, from `column` on. All lanes of a warp take
// part, also those that are beyond the last column.
DEVICE void sum_token(const struct Sum *p, u32 token, u32 column, float *sums, int in, int out) {
    // Columns of a lane, and the vectors that they are in a row.
    u32 columns = 16 / width(out), vectors = columns * width(in) / 16, rows = SUMMED / vectors;
    u32 lane = threadIdx.x % WARP;
    for (u32 first = 0; first < p->ranks; first += WARP) {
        u32 rank = first + lane;
        i32 place = rank < p->ranks ? AT(const i32, p->places)[(u64)token * p->ranks + rank] : -1;
        if (__ballot_sync(ALL_LANES, place < -1 || place >= (i32)p->max_tokens)) {
            if (lane == 0) report(p->status, PLACE_OUT_OF_RANGE, token);
            for (u32 i = 0; i < columns; i++) sums[i] = 0;
            return;
        }
        u64 row = 0;
        if (place >= 0) row = AT(const u64, p->partials)[rank] + (u64)place * p->columns * width(in);
        u32 left = __ballot_sync(ALL_LANES, place >= 0);
        while (left) {
            uint4 moved[SUMMED];
            u32 taken = 0;
            for (u32 i = 0; i < rows; i++) {
                u64 from = __shfl_sync(ALL_LANES, row, left ? __ffs(left) - 1 : 0) + (u64)column * width(in);
                int has = left != 0 && column < p->columns;
                for (u32 j = 0; j < vectors; j++)
                    if (has) moved[i * vectors + j] = AT(const uint4, from)[j];
                taken += has;
                left &= left - 1;
            }
            for (u32 i = 0; i < rows; i++) {
                for (u32 j = 0; j < vectors && i < taken; j++) {
                    float values[8];
                    unpack(values, moved[i * vectors + j], in);
                    for (u32 k = 0; k < 16 / width(in); k++) sums[j * (16 / width(in)) + k] += values[k];
                }
            }
        }
    }
}

DEVICE void sum(const struct Sum *p, int in, int out) {
    SHARED(struct SumBlock, s);
    int none = refused(p, s);
    u32 columns = 16 / width(out);
    for (u32 token = blockIdx.x; token < p->tokens; token += gridDim.x) {
        for (u32 begin = blockIdx.y * THREADS * columns; begin < p->columns; begin += gridDim.y * THREADS * columns) {
            u32 column = begin + threadIdx.x * columns;
            float sums[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
            if (!none) sum_token(p, token, column, sums, in, out);
            if (column < p->columns)
                *AT(uint4, p->out + ((u64)token * p->columns + column) * width(out)) = rounded(sums, out);
        }
    }
}

KERNEL(sum_f32, struct Sum, p) { sum(&p, F32, F32); }
KERNEL(sum_bf16, struct Sum, p) { sum(&p, BF16, BF16); }
KERNEL(sum_f16, struct Sum, p) { sum(&p, F16, F16); }
KERNEL(sum_f32_to_bf16, struct Sum, p) { sum(&p, F32, BF16); }
KERNEL(sum_f32_to_f16, struct Sum, p) { sum(&p, F32, F16); }
