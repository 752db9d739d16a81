// Product: out = a * transposed b, all [size, size] in bf16, sums in f32 by tensor cores. Something
// for multiprocessors to do while rows move; for products that matter there are libraries.
//
//     grid [size / TILE, size / TILE]: a block makes a tile of the result
//
//        b: TILE rows                  warps: 2 down, 4 across, each 64 x 32 of the tile: 4 x 4 products of 16 x 8
//     a  +--------------+
//        | tile of out  |  while the products of one step are made, the next step is fetched
//        +--------------+
//
// Sums are in the order of the tensor cores: not to the bit those of another kernel.
#include "numbers.h"

enum { TILE = 128, STEP = 32, VECTORS = TILE * STEP / 8 / THREADS, PITCH = STEP / 2 + 4 };

struct Product {
    u64 a, b, out;
    u32 size, unused;
};

// Pairs of bf16. The pitch spreads the rows over the banks.
struct Tiles {
    u32 a[2][TILE][PITCH], b[2][TILE][PITCH];
};

// c += a * b for 16 x 16 times 16 x 8, spread over the lanes of a warp as PTX says for m16n8k16:
// with group = lane / 4 and part = lane % 4, a lane has rows group and group + 8 of a and c, column
// group of b, and columns 2 * part of each.
#ifdef __CUDACC__
DEVICE void multiply(float *c, const u32 *a, const u32 *b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#else
static void multiply(float *c, const u32 *a, const u32 *b) {
    u32 group = threadIdx.x % WARP / 4, part = threadIdx.x % 4;
    for (u32 of = 0; of < 4; of++) {
        // Columns 2 * of and 8 + 2 * of of a's two rows; the same rows of b's two columns.
        u64 low = __shfl_sync(ALL_LANES, (u64)a[1] << 32 | a[0], group * 4 + of);
        u64 high = __shfl_sync(ALL_LANES, (u64)a[3] << 32 | a[2], group * 4 + of);
        for (u32 column = 0; column < 2; column++) {
            u64 other = __shfl_sync(ALL_LANES, (u64)b[1] << 32 | b[0], (2 * part + column) * 4 + of);
            for (u32 row = 0; row < 2; row++)
                for (u32 bit = 0; bit < 32; bit += 16) {
                    u32 at = row * 32 + bit;
                    c[row * 2 + column] += from_bf16(low >> at & 0xffff) * from_bf16(other >> bit & 0xffff);
                    c[row * 2 + column] += from_bf16(high >> at & 0xffff) * from_bf16(other >> (32 + bit) & 0xffff);
                }
        }
    }
}
#endif

// This thread's vectors of a tile: rows of `from`, columns from `first` on.
DEVICE void fetch(uint4 *to, u64 from, u32 size, u32 first) {
    UNROLL for (u32 i = 0; i < VECTORS; i++) {
        u32 vector = threadIdx.x + i * THREADS, row = vector / (STEP / 8), at = vector % (STEP / 8);
        to[i] = AT(const uint4, from)[((u64)row * size + first) / 8 + at];
    }
}

DEVICE void keep(u32 (*tile)[PITCH], const uint4 *from) {
    UNROLL for (u32 i = 0; i < VECTORS; i++) {
        u32 vector = threadIdx.x + i * THREADS, row = vector / (STEP / 8), at = vector % (STEP / 8);
        *(uint4 *)&tile[row][at * 4] = from[i];
    }
}

KERNEL(product, struct Product, p) {
    SHARED(struct Tiles, s);
    u32 warp = threadIdx.x / WARP, group = threadIdx.x % WARP / 4, part = threadIdx.x % 4;
    u32 down = warp / 4 * 64, across = warp % 4 * 32;
    u64 tile = (u64)TILE * p.size * 2;
    u64 from_a = p.a + blockIdx.y * tile, from_b = p.b + blockIdx.x * tile;
    float sums[4][4][4];
    UNROLL for (u32 i = 0; i < 4; i++)
        UNROLL for (u32 j = 0; j < 4; j++)
            UNROLL for (u32 k = 0; k < 4; k++) sums[i][j][k] = 0;
    uint4 next_a[VECTORS], next_b[VECTORS];
    fetch(next_a, from_a, p.size, 0);
    fetch(next_b, from_b, p.size, 0);
    u32 now = 0;
    for (u32 first = 0; first < p.size; first += STEP, now ^= 1) {
        // The other half was read before the last barrier.
        keep(s->a[now], next_a);
        keep(s->b[now], next_b);
        __syncthreads();
        if (first + STEP < p.size) {
            fetch(next_a, from_a, p.size, first + STEP);
            fetch(next_b, from_b, p.size, first + STEP);
        }
        UNROLL for (u32 at = part; at < STEP / 2; at += 8) {
            u32 a[4][4], b[4][2];
            UNROLL for (u32 i = 0; i < 4; i++) {
                u32 row = down + i * 16 + group, other = across + i * 8 + group;
                a[i][0] = s->a[now][row][at], a[i][1] = s->a[now][row + 8][at];
                a[i][2] = s->a[now][row][at + 4], a[i][3] = s->a[now][row + 8][at + 4];
                b[i][0] = s->b[now][other][at], b[i][1] = s->b[now][other][at + 4];
            }
            UNROLL for (u32 i = 0; i < 4; i++)
                UNROLL for (u32 j = 0; j < 4; j++) multiply(sums[i][j], a[i], b[j]);
        }
    }
    UNROLL for (u32 i = 0; i < 4; i++)
        UNROLL for (u32 j = 0; j < 4; j++)
            UNROLL for (u32 half = 0; half < 2; half++) {
                u64 row = (u64)blockIdx.y * TILE + down + i * 16 + half * 8 + group;
                u64 column = (u64)blockIdx.x * TILE + across + j * 8 + part * 2;
                u32 pair = to_bf16(sums[i][j][half * 2]) | to_bf16(sums[i][j][half * 2 + 1]) << 16;
                AT(u32, p.out)[(row * p.size + column) / 2] = pair;
            }
}
