// Choices: what goes with rank-major rows, apart: the local expert of each row and choice, its
// weight, and how many rows chose each local expert.
//
//     metadata   | row 0: expert + 1, or 0; of each choice | its weights | row 1: ...
//
// Each block counts for one expert, and then for others, and reads all metadata; so nothing needs
// to be zero before the launch.
#include "shim.h"

struct Choices {
    u64 metadata; // [rows, 2, top_k]
    u64 experts;  // i32 [rows, top_k]; -1: another rank has the choice, or the row is a pad
    u64 weights;  // f32 [rows, top_k]
    u64 counts;   // i64 [n_experts]
    u32 rows, top_k, n_experts, unused;
};

struct ChoicesBlock {
    u32 count;
};

KERNEL(choices, struct Choices, p) {
    SHARED(struct ChoicesBlock, s);
    const u32 *metadata = AT(const u32, p.metadata);
    u64 all = (u64)p.rows * p.top_k;
    for (u64 i = blockIdx.x * THREADS + threadIdx.x; i < all; i += (u64)gridDim.x * THREADS) {
        // Behind the experts of a row come its weights.
        u64 from = i + i / p.top_k * p.top_k;
        AT(i32, p.experts)[i] = (i32)metadata[from] - 1;
        AT(u32, p.weights)[i] = metadata[from + p.top_k];
    }
    for (u32 expert = blockIdx.x; expert < p.n_experts; expert += gridDim.x) {
        u32 own = 0;
        if (threadIdx.x == 0) s->count = 0;
        __syncthreads();
        for (u64 i = threadIdx.x; i < all; i += THREADS) own += metadata[i + i / p.top_k * p.top_k] == expert + 1;
        atomicAdd(&s->count, own);
        __syncthreads();
        if (threadIdx.x == 0) AT(u64, p.counts)[expert] = s->count;
        __syncthreads();
    }
}
