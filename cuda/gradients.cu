// Gradients of a weighted combine, at the rank of the experts and at that of the tokens.
//
//     products[row]    = <y[row], g[row]>           16 lanes, products rounded first, folded by halves: as src/rows/sum.rs
//     g[row]           = round(weights[row] * g[row])
//     out[choice]      = from[index[choice]][choice % words], or 0 where a choice has no row
#include "rows.h"

struct DotScale {
    u64 y;         // [rows, columns]
    u64 gradients; // [rows, columns]
    u64 weights;   // f32 [rows]
    u64 products;  // f32 [rows]
    u32 rows, columns;
};

enum { LANES = 16 };

// The threads of a row each have as many lanes as a vector has elements, and go through every
// other, or every fourth, vector.
DEVICE void dot_scale(const struct DotScale *p, int type) {
    u32 elements = 16 / width(type), threads = LANES / elements, row_bytes = p->columns * width(type);
    u32 warp = (blockIdx.x * THREADS + threadIdx.x) / WARP, lane = threadIdx.x % WARP, of_warp = WARP / threads;
    for (u64 first = (u64)warp * of_warp; first < p->rows; first += (u64)gridDim.x * WARPS * of_warp) {
        u64 row = first + lane / threads;
        u64 y = p->y + row * row_bytes, g = p->gradients + row * row_bytes;
        float lanes[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
        u32 columns = row < p->rows ? p->columns : 0;
        float weight = columns ? AT(const float, p->weights)[row] : 0.0f;
        for (u32 column = lane % threads * elements; column < columns; column += IN_FLIGHT * LANES) {
            uint4 left[IN_FLIGHT], right[IN_FLIGHT];
            UNROLL
            for (u32 i = 0; i < IN_FLIGHT; i++) {
                u64 at = (u64)(column + i * LANES) * width(type);
                int inside = column + i * LANES < columns;
                left[i] = inside ? *AT(const uint4, y + at) : zeros();
                right[i] = inside ? *AT(const uint4, g + at) : zeros();
            }
            UNROLL
            for (u32 i = 0; i < IN_FLIGHT; i++) {
                if (column + i * LANES >= columns) continue;
                float a[8], b[8];
                unpack(a, left[i], type);
                unpack(b, right[i], type);
                for (u32 c = 0; c < elements; c++) {
                    lanes[c] += a[c] * b[c];
                    b[c] *= weight;
                }
                *AT(uint4, g + (u64)(column + i * LANES) * width(type)) = rounded(b, type);
            }
        }
        for (u32 half = threads / 2; half > 0; half /= 2)
            for (u32 c = 0; c < elements; c++)
                lanes[c] += float_of(__shfl_xor_sync(ALL_LANES, bits_of(lanes[c]), half));
        for (u32 half = elements / 2; half > 0; half /= 2)
            for (u32 c = 0; c < half; c++) lanes[c] += lanes[c + half];
        if (columns && lane % threads == 0) AT(u32, p->products)[row] = to_f32(lanes[0]);
    }
}

KERNEL(dot_scale_f32, struct DotScale, p) { dot_scale(&p, F32); }
KERNEL(dot_scale_bf16, struct DotScale, p) { dot_scale(&p, BF16); }
KERNEL(dot_scale_f16, struct DotScale, p) { dot_scale(&p, F16); }

struct FetchWeights {
    u64 out;    // f32 [choices]
    u64 from;   // f32 [n_rows, words]
    u64 own;    // f32 [own_rows, words]: rows that are counted on behind those
    u64 index;  // i32 [choices]: the row of a choice, or -1
    u64 status; // u32; where it is set, zeros are written
    u32 choices, n_rows;
    u32 words; // of a row: one, or one for each choice of a token
    u32 own_rows;
};

struct FetchWeightsBlock {
    u32 refused;
};

KERNEL(fetch_weights, struct FetchWeights, p) {
    SHARED(struct FetchWeightsBlock, s);
    if (threadIdx.x == 0) s->refused = *AT(const u32, p.status) != 0;
    __syncthreads();
    for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < p.choices; i += gridDim.x * THREADS) {
        i32 row = AT(const i32, p.index)[i];
        u32 near = row >= (i32)p.n_rows, nth = near ? (u32)row - p.n_rows : (u32)row;
        int there = row >= 0 && row < (i32)(p.n_rows + p.own_rows);
        float weight = 0;
        if (there && !s->refused) weight = AT(const float, near ? p.own : p.from)[(u64)nth * p.words + i % p.words];
        if (!there && row != -1 && !s->refused) report(p.status, INDEX_OUT_OF_RANGE, i);
        AT(float, p.out)[i] = weight;
    }
}
