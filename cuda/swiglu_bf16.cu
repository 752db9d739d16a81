// SwiGLU between products of bf16. Gate and up of a row lie side by side, as do their weights, so
// that one product makes both. Each result is computed in f32 and rounded once.
//
//     narrow_weights          w1, w3 [hidden, ffn] of each expert --> rows of w1, w3; w2 as it is
//     swiglu_bf16             act = weight * silu(gate) * up
//     swiglu_backward_bf16    of_weight = <of_act, silu(gate) * up>, in f32: each lane by rising
//                             column, lanes folded by halves
//                             d = weight * of_act, up = d * silu(gate), act as above
//                             gate = d * up * (s + silu(gate) * (1 - s))
//
// The routing weight is a factor of act, not of the output: the down projection then makes weighted
// rows, where peers read them, and no pass over them is left.
#include "rows.h"
#include "sigmoid.h"

// Elements that a thread has at a time.
enum { HALVES = 8 };

// Halves from an address on, of which `count` are there: one vector, where that is a multiple
// of 16 bytes.
DEVICE void fetch_halves(float *values, u64 from, u32 count) {
    if (count == HALVES && from % 16 == 0) {
        unpack(values, *AT(const uint4, from), BF16);
        return;
    }
    UNROLL for (u32 i = 0; i < HALVES; i++) values[i] = i < count ? from_bf16(AT(const u16, from)[i]) : 0.0f;
}

DEVICE void keep_halves(u64 to, const float *values, u32 count) {
    if (count == HALVES && to % 16 == 0) {
        *AT(uint4, to) = rounded(values, BF16);
        return;
    }
    UNROLL for (u32 i = 0; i < HALVES; i++)
        if (i < count) AT(u16, to)[i] = (u16)to_bf16(values[i]);
}

// How many of `all` elements there are from one on, HALVES at most.
DEVICE u32 halves_left(u32 all, u32 first) { return all - first < HALVES ? all - first : HALVES; }

struct NarrowWeights {
    u64 out;     // bf16, as many
    u64 weights; // f32 [experts, 3 * hidden * ffn]
    u32 experts, hidden, ffn, unused;
};

// A block makes a row of the result: both matrices side by side, or w2.
KERNEL(narrow_weights, struct NarrowWeights, p) {
    u64 matrix = (u64)p.hidden * p.ffn;
    u32 each = p.hidden + p.ffn;
    for (u32 row = blockIdx.x; row < p.experts * each; row += gridDim.x) {
        u32 nth = row % each, joined = nth < p.hidden;
        u64 expert = row / each * 3 * matrix;
        u32 columns = joined ? 2 * p.ffn : p.hidden;
        u64 to = expert + (joined ? (u64)nth * columns : 2 * matrix + (u64)(nth - p.hidden) * columns);
        for (u32 first = threadIdx.x * HALVES; first < columns; first += THREADS * HALVES) {
            u32 count = halves_left(columns, first);
            float values[HALVES];
            // Columns of w1 are followed by those of w3, which lie a matrix behind.
            u64 of_up = joined ? matrix - p.ffn : 0, from = joined ? expert + (u64)nth * p.ffn : to;
            u64 begin = from + first + (joined && first >= p.ffn ? of_up : 0), address = p.weights + 4 * begin;
            int split = joined && first < p.ffn && first + count > p.ffn;
            if (count == HALVES && !split && address % 16 == 0) {
                unpack(values, AT(const uint4, address)[0], F32);
                unpack(values + 4, AT(const uint4, address)[1], F32);
            } else {
                UNROLL for (u32 i = 0; i < HALVES; i++) {
                    u64 source = from + first + i + (joined && first + i >= p.ffn ? of_up : 0);
                    values[i] = i < count ? AT(const float, p.weights)[source] : 0.0f;
                }
            }
            keep_halves(p.out + 2 * (to + first), values, count);
        }
    }
}

struct SwigluBf16 {
    u64 inner;      // bf16 [rows, gate | up]; by swiglu_backward_bf16 afterwards their gradients
    u64 act;        // bf16 [rows, ffn], written; for swiglu_backward_bf16 gradients at first: of act, by weight 1
    u64 weights;    // f32 [rows], or 0: all are 1
    u64 of_weights; // f32 [rows], written by swiglu_backward_bf16; or 0
    u32 rows, ffn;
};

KERNEL(swiglu_bf16, struct SwigluBf16, p) {
    u32 vectors = (p.ffn + HALVES - 1) / HALVES;
    struct Cursor at = cursor(blockIdx.x * THREADS + threadIdx.x, gridDim.x * THREADS, vectors);
    for (; at.row < p.rows; advance(&at)) {
        u32 first = at.vector * HALVES, count = halves_left(p.ffn, first);
        u64 row = p.inner + 4ull * at.row * p.ffn;
        float weight = p.weights ? AT(const float, p.weights)[at.row] : 1.0f, gate[HALVES], up[HALVES];
        fetch_halves(gate, row + 2ull * first, count);
        fetch_halves(up, row + 2ull * (p.ffn + first), count);
        UNROLL for (u32 i = 0; i < HALVES; i++) gate[i] = weight * (gate[i] * sigmoid(gate[i]) * up[i]);
        keep_halves(p.act + 2ull * ((u64)at.row * p.ffn + first), gate, count);
    }
}

// A warp makes a row.
KERNEL(swiglu_backward_bf16, struct SwigluBf16, p) {
    u32 lane = threadIdx.x % WARP;
    for (u32 row = blockIdx.x * WARPS + threadIdx.x / WARP; row < p.rows; row += gridDim.x * WARPS) {
        u64 inner = p.inner + 4ull * row * p.ffn, act = p.act + 2ull * row * p.ffn;
        float weight = p.weights ? AT(const float, p.weights)[row] : 1.0f, of_weight = 0.0f;
        for (u32 first = lane * HALVES; first < p.ffn; first += WARP * HALVES) {
            u32 count = halves_left(p.ffn, first);
            float gate[HALVES], up[HALVES], of_act[HALVES];
            fetch_halves(gate, inner + 2ull * first, count);
            fetch_halves(up, inner + 2ull * (p.ffn + first), count);
            fetch_halves(of_act, act + 2ull * first, count);
            UNROLL for (u32 i = 0; i < HALVES; i++) {
                float s = sigmoid(gate[i]), silu = gate[i] * s, made = silu * up[i], d = weight * of_act[i];
                if (i < count) of_weight += of_act[i] * made;
                gate[i] = d * up[i] * (s + silu * (1.0f - s));
                up[i] = d * silu;
                of_act[i] = weight * made;
            }
            keep_halves(inner + 2ull * first, gate, count);
            keep_halves(inner + 2ull * (p.ffn + first), up, count);
            keep_halves(act + 2ull * first, of_act, count);
        }
        for (u32 half = WARP / 2; half > 0; half /= 2)
            of_weight += float_of(__shfl_xor_sync(ALL_LANES, bits_of(of_weight), half));
        if (p.of_weights && lane == 0) AT(u32, p.of_weights)[row] = to_f32(of_weight);
    }
}
