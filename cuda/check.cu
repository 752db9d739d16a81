// Check: compares the heads of the slots that were received with what this rank expects. Rows of
// another call, or of ranks that were set up otherwise, must not be believed.
//
//     grid 1: a thread looks at every 256th rank
//
// The first rank that is wrong is named in the status word, unless something is wrong already. A
// refusal is the verdict of this call alone: this rank's own reason, or the lowest rank that has
// one. The slots of all ranks are then left empty, so that no rows of such a call are used.
#include "slot.h"

struct Check {
    u64 received;   // a slot of each rank
    u64 slot_bytes; // from one to the next
    u64 counter;    // u64: the call that they must be of
    u64 status;     // u32
    u64 verdict;    // u64: the status or, of this call alone, a refusal; above it the call
    u64 digest;
    u32 ranks, me;
    u32 choices, unused; // of a slot; the experts are right behind its head
};

struct CheckBlock {
    u32 fault; // of the first rank that has one: twice its number, odd for another digest
    u32 refusing;
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
    u32 refusing_rank = refusing(p.received, p.slot_bytes, p.ranks, &s->refusing);
    if (threadIdx.x == 0) {
        if (s->fault != ~0u) report(p.status, s->fault & 1 ? OTHER_DIGEST : OTHER_CALL, s->fault >> 1);
        u32 own = AT(const struct Head, p.received + p.me * p.slot_bytes)->refused;
        u32 theirs = refusing_rank == ~0u ? 0 : REFUSED | refusing_rank << 8;
        judge(p.status, p.verdict, call, own ? own : theirs);
    }
    if (refusing_rank == ~0u) return;
    for (u32 rank = 0; rank < p.ranks; rank++) {
        u64 slot = p.received + rank * p.slot_bytes;
        if (threadIdx.x == 0) AT(struct Head, slot)->rows = 0;
        for (u32 i = threadIdx.x; i < p.choices; i += THREADS) AT(i32, slot + sizeof(struct Head))[i] = -1;
    }
}
