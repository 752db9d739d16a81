// Check: compares the heads of the slots that were received with what this rank expects. Rows of
// another call, or of ranks that were set up otherwise, must not be believed.
//
//     grid 1: a thread looks at every 256th rank
//
// The first rank that is wrong is named in the status word, unless something is wrong already.
#include "slot.h"

struct Check {
    u64 received;   // a slot of each rank
    u64 slot_bytes; // from one to the next
    u64 counter;    // u64: the call that they must be of
    u64 status;     // u32
    u64 digest;
    u32 ranks, unused;
};

struct CheckBlock {
    u32 fault; // of the first rank that has one: twice its number, odd for another digest
};

KERNEL(check, struct Check, p) {
    SHARED(struct CheckBlock, s);
    if (threadIdx.x == 0) s->fault = ~0u;
    __syncthreads();
    u64 call = *AT(const u64, p.counter);
    for (u32 rank = threadIdx.x; rank < p.ranks; rank += THREADS) {
        const struct Head *head = AT(const struct Head, p.received + rank * p.slot_bytes);
        if (head->digest != p.digest) atomicMin(&s->fault, rank * 2 + 1);
        else if (head->call != call) atomicMin(&s->fault, rank * 2);
    }
    __syncthreads();
    if (threadIdx.x == 0 && s->fault != ~0u)
        report(p.status, s->fault & 1 ? OTHER_DIGEST : OTHER_CALL, s->fault >> 1);
}
