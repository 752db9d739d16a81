// The head of a slot: `SlotHead` in crates/core/src/plan/buffers.rs.
#pragma once
#include "shim.h"

struct Head {
    u32 rows, tokens;
    u64 digest, call;
    u32 refused; // why the source refuses the call, as in a status word; 0: it does not
    u32 reserved[9];
};

// The lowest rank that refuses the call, by the heads of the slots that came. All threads take
// part. `lowest` is shared.
DEVICE u32 refusing(u64 received, u64 slot_bytes, u32 ranks, u32 *lowest) {
    if (threadIdx.x == 0) *lowest = ~0u;
    __syncthreads();
    for (u32 rank = threadIdx.x; rank < ranks; rank += THREADS)
        if (AT(const struct Head, received + rank * slot_bytes)->refused) atomicMin(lowest, rank);
    __syncthreads();
    return *lowest;
}

// Says how a call ends here, in one store: above the word stands the call's number, modulo 2^32. A
// host that ends a failed world writes the status first, then the verdict: if its verdict was
// overwritten here, its status is seen here.
DEVICE void judge(u64 status, u64 verdict, u64 call, u32 word) {
    u32 found = *AT(const volatile u32, status);
    *AT(volatile u64, verdict) = call << 32 | (found ? found : word);
    __threadfence_system();
    found = *AT(const volatile u32, status);
    if (found) *AT(volatile u64, verdict) = call << 32 | found;
}

// In place of the rank of an expert: a mask leaves none, so choices of the expert are dropped.
enum { MASKED = -2 };
