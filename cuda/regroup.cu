// Regroup: rows by an index, such as those of a relay's order into expert-major order. An index of
// -1 gives a row of zeros.
#include "rows.h"

struct Regroup {
    u64 out;    // [rows, row_bytes]
    u64 from;   // [sources, row_bytes]
    u64 index;  // i32 [rows]
    u64 status; // u32
    u64 row_bytes;
    u32 rows, sources;
};

KERNEL(regroup, struct Regroup, p) {
    const i32 *index = AT(const i32, p.index);
    u32 self = blockIdx.x * THREADS + threadIdx.x;
    struct Cursor at = cursor(self, gridDim.x * THREADS, (u32)(p.row_bytes / 16));
    while (at.row < p.rows) {
        uint4 moved[IN_FLIGHT];
        u64 into[IN_FLIGHT];
        for (u32 i = 0; i < IN_FLIGHT; i++, advance(&at)) {
            u64 inside = at.vector * 16ull;
            into[i] = at.row < p.rows ? p.out + at.row * p.row_bytes + inside : 0;
            moved[i] = zeros();
            if (into[i]) {
                i32 row = index[at.row];
                if (row >= 0 && row < (i32)p.sources)
                    moved[i] = *AT(const uint4, p.from + (u64)row * p.row_bytes + inside);
                else if (row != -1)
                    report(p.status, INDEX_OUT_OF_RANGE, at.row);
            }
        }
        for (u32 i = 0; i < IN_FLIGHT; i++)
            if (into[i]) *AT(uint4, into[i]) = moved[i];
    }
}
