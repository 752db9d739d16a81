// Regroup: rows by an index, such as those of a relay's order into expert-major order. An index of
// -1 gives a row of zeros. Runs say which entries of the index are wanted, and where their rows go.
// So a rank places its own rows among those that others send.
#include "rows.h"

struct Regroup {
    u64 out;    // [places, row_bytes]
    u64 from;   // [sources, row_bytes]
    u64 index;  // i32 [entries]
    u64 status; // u32
    u64 row_bytes;
    struct RowRuns list;
    u32 sources, unused;
};

KERNEL(regroup, struct Regroup, p) {
    const i32 *index = AT(const i32, p.index);
    u32 self = blockIdx.x * THREADS + threadIdx.x;
    struct Cursor at = cursor(self, gridDim.x * THREADS, (u32)(p.row_bytes / 16));
    struct Ahead ahead = begin_runs(&p.list);
    while (at.row < p.list.rows) {
        uint4 moved[IN_FLIGHT];
        u64 into[IN_FLIGHT];
        for (u32 i = 0; i < IN_FLIGHT; i++, advance(&at)) {
            u64 inside = at.vector * 16ull;
            into[i] = 0;
            moved[i] = zeros();
            if (at.row >= p.list.rows) continue;
            find_run(&p.list, at.row, &ahead);
            i32 row = source_of(&p.list, &ahead.run, index, at.row);
            u32 to = place_of(&ahead.run, at.row);
            if (to < p.list.places) into[i] = p.out + to * p.row_bytes + inside;
            if (row >= 0 && row < (i32)p.sources)
                moved[i] = *AT(const uint4, p.from + (u64)row * p.row_bytes + inside);
            if (!into[i] || row < -1 || row >= (i32)p.sources) report(p.status, INDEX_OUT_OF_RANGE, at.row);
        }
        for (u32 i = 0; i < IN_FLIGHT; i++)
            if (into[i]) *AT(uint4, into[i]) = moved[i];
    }
}
