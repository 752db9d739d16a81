// Hold: takes multiprocessors until the host says otherwise. Anything that completes meanwhile did
// not need one.
//
//     grid as many blocks as have all threads of all multiprocessors
//
// Every block says that it runs, in a word of its own. The last block looks at the host's word and
// tells the others by a word of the device: a thousand blocks that look over the bus delay the very
// transfers that are watched, by milliseconds. A GPU runs all blocks at once. On the CPU, where
// they run one after the other, the last one waits for all.
#include "shim.h"

struct Hold {
    u64 arrived; // u64 of each block: 1 once it runs
    u64 go;      // u64 of the host: other than 0 once all may end
    u64 ended;   // u64 of the device: the same, for the blocks that do not look at the host
};

KERNEL(hold, struct Hold, p) {
    if (threadIdx.x == 0) {
        AT(volatile u64, p.arrived)[blockIdx.x] = 1;
        if (blockIdx.x + 1 == gridDim.x) {
            while (*AT(const volatile u64, p.go) == 0) rest();
            *AT(volatile u64, p.ended) = 1;
        } else if (BLOCKS_RUN_AT_ONCE) {
            while (*AT(const volatile u64, p.ended) == 0) rest();
        }
    }
    // The block's threads end together, and so keep all that the block was given.
    __syncthreads();
}

// Touch: the smallest kernel there is. It runs where anything at all is left.
struct Touch {
    u64 word; // u64
};

KERNEL(touch, struct Touch, p) {
    if (threadIdx.x == 0) *AT(volatile u64, p.word) = 1;
}
