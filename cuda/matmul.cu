// Matrix products in f32, to the bit those of src/rows/product.rs: fused multiply-adds by rising
// depth, in slices that are added up. A slice of one or two goes on with the sum before it, each
// product rounded. No tensor cores: what is fast is a library's.
//
//     out[group] = a[group] * b[group]          groups lie one after another along the rows of a and
//                                               out, or along the depth: rows of both a' and b
//
// A block makes a tile of the result, a thread 4 x 4 of its elements. Blocks go through the tiles
// of all groups in turn, so any number of blocks will do.
#include "numbers.h"

enum { TILE_SIDE = 64, TILE_DEPTH = 16, OF_THREAD = 4, TILE_VALUES = TILE_SIDE * TILE_DEPTH / THREADS, SLICE = 512 };

enum { SHORT_SLICE = 2 };

struct Matmul {
    u64 out, a, b;          // f32
    u64 segments;           // i64 [2, groups]: size of each group, then with pads; or 0: one group
    u64 b_group, out_group; // elements from a group's matrix to the next one's; 0 where segments lie along it
    u32 groups;
    u32 rows, depth, columns; // of a group; what segments lie along, of all of them
    u32 a_row, a_depth;       // elements from one to the next
    u32 b_depth, b_column;
    u32 along_depth; // whether segments lie along the depth, and not along the rows
    u32 add;         // whether to add to the old values
};

struct MatmulTiles {
    float a[TILE_DEPTH][TILE_SIDE + 4], b[TILE_DEPTH][TILE_SIDE + 4];
};

// Matrices of one group.
struct Matrices {
    u64 out, a, b; // addresses
    u32 rows, depth;
};

// Rounded once.
#ifdef __CUDACC__
DEVICE float fused(float a, float b, float sum) { return __fmaf_rn(a, b, sum); }
#else
DEVICE float fused(float a, float b, float sum) { return __builtin_fmaf(a, b, sum); }
#endif

DEVICE void matmul_tile(const struct Matmul *p, struct MatmulTiles *s, struct Matrices of, u32 row, u32 column) {
    u32 down = threadIdx.x / (TILE_SIDE / OF_THREAD) * OF_THREAD, across = threadIdx.x % (TILE_SIDE / OF_THREAD) * OF_THREAD;
    float total[OF_THREAD][OF_THREAD], sum[OF_THREAD][OF_THREAD];
    UNROLL for (u32 i = 0; i < OF_THREAD; i++)
        UNROLL for (u32 j = 0; j < OF_THREAD; j++) {
            u32 r = row + down + i, c = column + across + j;
            int there = p->add && r < of.rows && c < p->columns;
            total[i][j] = there ? AT(const float, of.out)[(u64)r * p->columns + c] : 0.0f;
            sum[i][j] = 0.0f;
        }
    for (u32 first = 0; first < of.depth; first += TILE_DEPTH) {
        int is_short = of.depth - first / SLICE * SLICE <= SHORT_SLICE;
        if (first % SLICE == 0)
            UNROLL for (u32 i = 0; i < OF_THREAD; i++)
                UNROLL for (u32 j = 0; j < OF_THREAD; j++) sum[i][j] = is_short ? total[i][j] : 0.0f;
        UNROLL for (u32 n = 0; n < TILE_VALUES; n++) {
            // Neighbors in memory are fetched by neighbors: along the depth, or across it.
            u32 at = threadIdx.x + n * THREADS;
            u32 a_d = p->a_depth == 1 ? at % TILE_DEPTH : at / TILE_SIDE, a_r = p->a_depth == 1 ? at / TILE_DEPTH : at % TILE_SIDE;
            u32 b_d = p->b_depth == 1 ? at % TILE_DEPTH : at / TILE_SIDE, b_c = p->b_depth == 1 ? at / TILE_DEPTH : at % TILE_SIDE;
            int of_a = row + a_r < of.rows && first + a_d < of.depth, of_b = column + b_c < p->columns && first + b_d < of.depth;
            s->a[a_d][a_r] = of_a ? AT(const float, of.a)[(u64)(row + a_r) * p->a_row + (u64)(first + a_d) * p->a_depth] : 0.0f;
            s->b[b_d][b_c] = of_b ? AT(const float, of.b)[(u64)(first + b_d) * p->b_depth + (u64)(column + b_c) * p->b_column] : 0.0f;
        }
        __syncthreads();
        // Zeros beyond the depth would change the sign of a zero, or make a NaN.
        u32 deep = of.depth - first < TILE_DEPTH ? of.depth - first : TILE_DEPTH;
        for (u32 d = 0; d < deep; d++)
            UNROLL for (u32 i = 0; i < OF_THREAD; i++)
                UNROLL for (u32 j = 0; j < OF_THREAD; j++)
                    sum[i][j] = is_short ? s->a[d][down + i] * s->b[d][across + j] + sum[i][j]
                                         : fused(s->a[d][down + i], s->b[d][across + j], sum[i][j]);
        __syncthreads();
        if ((first + TILE_DEPTH) % SLICE == 0 || first + TILE_DEPTH >= of.depth)
            UNROLL for (u32 i = 0; i < OF_THREAD; i++)
                UNROLL for (u32 j = 0; j < OF_THREAD; j++) total[i][j] = is_short ? sum[i][j] : total[i][j] + sum[i][j];
    }
    UNROLL for (u32 i = 0; i < OF_THREAD; i++)
        UNROLL for (u32 j = 0; j < OF_THREAD; j++) {
            u32 r = row + down + i, c = column + across + j;
            if (r < of.rows && c < p->columns) AT(float, of.out)[(u64)r * p->columns + c] = total[i][j];
        }
}

KERNEL(matmul, struct Matmul, p) {
    SHARED(struct MatmulTiles, s);
    u64 next = blockIdx.x, begin = 0, first = 0;
    u32 wide = (p.columns + TILE_SIDE - 1) / TILE_SIDE;
    for (u32 group = 0; group < p.groups; group++) {
        u64 all = p.along_depth ? p.depth : p.rows, size = all, padded = all;
        if (p.segments) {
            // No segment goes beyond the rows that there are.
            size = AT(const u64, p.segments)[group];
            padded = AT(const u64, p.segments)[p.groups + group];
            if (padded > all - first) padded = all - first;
            if (size > padded) size = padded;
        }
        struct Matrices of = { p.out, p.a, p.b, p.rows, p.depth };
        if (p.along_depth) {
            of.depth = (u32)size;
            of.a += first * p.a_depth * 4;
            of.b += first * p.b_depth * 4;
        } else {
            of.rows = (u32)size;
            of.a += first * p.a_row * 4;
            of.out += first * p.columns * 4;
        }
        of.b += group * p.b_group * 4;
        of.out += group * p.out_group * 4;
        u64 tiles = (u64)((of.rows + TILE_SIDE - 1) / TILE_SIDE) * wide;
        for (; next < begin + tiles; next += gridDim.x) {
            u32 tile = (u32)(next - begin);
            matmul_tile(&p, s, of, tile / wide * TILE_SIDE, tile % wide * TILE_SIDE);
        }
        begin += tiles;
        first += padded;
    }
}
