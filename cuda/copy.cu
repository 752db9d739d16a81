// Copy: what a copy engine does, done by multiprocessors. The baseline for what their time costs
// others.
//
//     grid any; a thread moves vectors of 16 bytes
#include "shim.h"

struct Copy {
    u64 to, from, vectors;
};

KERNEL(copy, struct Copy, p) {
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < p.vectors; i += (u64)gridDim.x * THREADS)
        AT(uint4, p.to)[i] = AT(const uint4, p.from)[i];
}
