// Records: rows by an index, each made to a record in fp8 on the way
// (crates/core/src/dtype.rs has its picture). An index of -1 gives a record of zeros.
//
// A thread goes through all vectors as if each row had whole blocks. So the threads that share a
// scale stay together.
#include "record.h"

struct Records {
    u64 out;    // [places, record_bytes]
    u64 from;   // [sources, hidden]
    u64 index;  // i32 [entries], or 0: each row is its own
    u64 status; // u32
    struct RowRuns list; // as `regroup` takes it
    u32 sources, hidden, record_bytes, unused;
};

DEVICE void records(const struct Records *p, int type) {
    u32 values = 16 / width(type), sharing = SCALED / values, scales = (p->hidden + SCALED - 1) / SCALED;
    u32 spare = (p->record_bytes - p->hidden) / 4 - scales, all = gridDim.x * THREADS;
    u64 end = (u64)p->list.rows * scales * sharing;
    const i32 *index = AT(const i32, p->index);
    struct Ahead ahead = begin_runs(&p->list);
    struct Cursor at = cursor(blockIdx.x * THREADS + threadIdx.x, all, scales * sharing);
    for (u64 first = blockIdx.x * THREADS; first < end; first += (u64)all * AT_ONCE) {
        uint4 moved[AT_ONCE];
        u64 into[AT_ONCE];
        u32 vectors[AT_ONCE], used[AT_ONCE];
        UNROLL
        for (u32 i = 0; i < AT_ONCE; i++, advance(&at)) {
            vectors[i] = at.vector;
            moved[i] = zeros();
            into[i] = used[i] = 0;
            if (at.row >= p->list.rows) continue;
            find_run(&p->list, at.row, &ahead);
            i32 row = source_of(&p->list, &ahead.run, index, at.row);
            u32 to = place_of(&ahead.run, at.row);
            if (to < p->list.places) into[i] = p->out + (u64)to * p->record_bytes;
            used[i] = row >= 0 && row < (i32)p->sources;
            if (!into[i] || (!used[i] && row != -1)) report(p->status, INDEX_OUT_OF_RANGE, at.row);
            if (used[i] && at.vector * values < p->hidden)
                moved[i] = *AT(const uint4, p->from + ((u64)row * p->hidden + at.vector * values) * width(type));
        }
        UNROLL
        for (u32 i = 0; i < AT_ONCE; i++) {
            u32 codes[2], block = vectors[i] / sharing, lane = vectors[i] % sharing;
            float scale = quantize(moved[i], type, codes);
            if (!into[i]) continue;
            for (u32 word = 0; word < values / 4 && vectors[i] * values < p->hidden; word++)
                AT(u32, into[i] + vectors[i] * values)[word] = codes[word];
            u32 *behind = AT(u32, into[i] + p->hidden);
            if (lane == 0) behind[block] = used[i] ? bits_of(scale) : 0;
            if (block + 1 == scales && lane < spare) behind[scales + lane] = 0;
        }
    }
}

KERNEL(records_f32, struct Records, p) { records(&p, F32); }
KERNEL(records_bf16, struct Records, p) { records(&p, BF16); }
KERNEL(records_f16, struct Records, p) { records(&p, F16); }
