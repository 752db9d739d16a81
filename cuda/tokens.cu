// Rows of a layer between their element type and the f32 of its arithmetic, as src/layer does it on
// the host: sums from the left, one rounding.
//
//     widen         out = rows, as f32
//     weigh         out[row] = round(weights[row] * rows[row]), or without weights round(rows[row])
//     accumulate    out = round(rows + residual + first + second), those that there are
//     gather        out = runs of rows, one after another, from several matrices
#include "rows.h"

struct Widen {
    u64 out;  // f32 [count]
    u64 rows; // [count]
    u64 count;
};

DEVICE void widen(const struct Widen *p, int type) {
    u32 elements = 16 / width(type);
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < p->count / elements; i += (u64)gridDim.x * THREADS) {
        float values[8];
        unpack(values, AT(const uint4, p->rows)[i], type);
        for (u32 j = 0; j < elements; j += 4) AT(uint4, p->out)[(i * elements + j) / 4] = rounded(values + j, F32);
    }
}

KERNEL(widen_bf16, struct Widen, p) { widen(&p, BF16); }
KERNEL(widen_f16, struct Widen, p) { widen(&p, F16); }

struct Weigh {
    u64 out;     // [rows, columns]
    u64 rows;    // f32 [rows, columns]
    u64 weights; // f32 [rows], or 0
    u32 n_rows, columns;
};

DEVICE void weigh(const struct Weigh *p, int type) {
    u32 elements = 16 / width(type), vectors = p->columns / elements;
    u64 all = (u64)p->n_rows * vectors;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < all; i += (u64)gridDim.x * THREADS) {
        float values[8];
        for (u32 j = 0; j < elements; j += 4) unpack(values + j, AT(const uint4, p->rows)[(i * elements + j) / 4], F32);
        if (p->weights) {
            float weight = AT(const float, p->weights)[i / vectors];
            for (u32 j = 0; j < elements; j++) values[j] = weight * values[j];
        }
        AT(uint4, p->out)[i] = rounded(values, type);
    }
}

KERNEL(weigh_f32, struct Weigh, p) { weigh(&p, F32); }
KERNEL(weigh_bf16, struct Weigh, p) { weigh(&p, BF16); }
KERNEL(weigh_f16, struct Weigh, p) { weigh(&p, F16); }

struct Accumulate {
    u64 out;           // [count]; may be rows
    u64 rows;          // [count]
    u64 residual;      // [count], or 0
    u64 first, second; // f32 [count], or 0
    u64 count;
};

DEVICE void accumulate(const struct Accumulate *p, int type) {
    u32 elements = 16 / width(type);
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < p->count / elements; i += (u64)gridDim.x * THREADS) {
        float sums[8], values[8];
        unpack(sums, AT(const uint4, p->rows)[i], type);
        if (p->residual) {
            unpack(values, AT(const uint4, p->residual)[i], type);
            for (u32 j = 0; j < elements; j++) sums[j] += values[j];
        }
        for (u32 of = 0; of < 2; of++) {
            u64 more = of == 0 ? p->first : p->second;
            if (!more) continue;
            for (u32 j = 0; j < elements; j += 4) unpack(values + j, AT(const uint4, more)[(i * elements + j) / 4], F32);
            for (u32 j = 0; j < elements; j++) sums[j] += values[j];
        }
        AT(uint4, p->out)[i] = rounded(sums, type);
    }
}

KERNEL(accumulate_f32, struct Accumulate, p) { accumulate(&p, F32); }
KERNEL(accumulate_bf16, struct Accumulate, p) { accumulate(&p, BF16); }
KERNEL(accumulate_f16, struct Accumulate, p) { accumulate(&p, F16); }

// Consecutive rows of one of the matrices, and where they go.
struct Run {
    u32 matrix, first, rows, to;
};

struct Gather {
    u64 out;      // [rows, row_bytes]
    u64 matrices; // u64 [matrices]: addresses, [rows, row_bytes] each
    u64 runs;     // struct Run [n_runs]
    u64 row_bytes;
    u32 n_runs, unused;
};

// Several vectors of a thread are on their way at a time.
DEVICE void move_vectors(u64 to, u64 from, u64 vectors) {
    for (u64 first = threadIdx.x; first < vectors; first += IN_FLIGHT * THREADS) {
        uint4 moved[IN_FLIGHT];
        for (u32 i = 0; i < IN_FLIGHT; i++) {
            u64 at = first + i * THREADS;
            moved[i] = at < vectors ? AT(const uint4, from)[at] : zeros();
        }
        for (u32 i = 0; i < IN_FLIGHT; i++) {
            u64 at = first + i * THREADS;
            if (at < vectors) AT(uint4, to)[at] = moved[i];
        }
    }
}

// What vectors leave over is moved by words or, where rows of two-byte elements are of odd length,
// by elements.
KERNEL(gather, struct Gather, p) {
    for (u32 i = blockIdx.x; i < p.n_runs; i += gridDim.x) {
        struct Run run = AT(const struct Run, p.runs)[i];
        u64 from = AT(const u64, p.matrices)[run.matrix] + run.first * p.row_bytes;
        u64 to = p.out + run.to * p.row_bytes, bytes = run.rows * p.row_bytes, vectors = 0;
        if ((from | to) % 16 == 0) move_vectors(to, from, vectors = bytes / 16);
        u64 at = 16 * vectors;
        if ((from | to | bytes) % 4 == 0) {
            for (u64 word = at / 4 + threadIdx.x; word < bytes / 4; word += THREADS)
                AT(u32, to)[word] = AT(const u32, from)[word];
        } else {
            for (u64 half = at / 2 + threadIdx.x; half < bytes / 2; half += THREADS)
                AT(u16, to)[half] = AT(const u16, from)[half];
        }
    }
}
