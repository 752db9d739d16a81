// Rows as vectors of 16 bytes.
#pragma once
#include "numbers.h"

// Vectors that a thread has on their way at a time, where it only moves them.
enum { IN_FLIGHT = 4 };

DEVICE uint4 zeros(void) {
    uint4 vector;
    vector.x = vector.y = vector.z = vector.w = 0;
    return vector;
}

// One vector of one row. A thread goes through all rows as if they lay one behind the other,
// without dividing at each step.
struct Cursor {
    u32 vectors; // of a row
    u32 row, vector;
    u32 step_rows, step;
};

DEVICE struct Cursor cursor(u32 start, u32 stride, u32 vectors) {
    struct Cursor at = { vectors, start / vectors, start % vectors, stride / vectors, stride % vectors };
    return at;
}

DEVICE void advance(struct Cursor *at) {
    at->row += at->step_rows;
    at->vector += at->step;
    if (at->vector >= at->vectors) {
        at->vector -= at->vectors;
        at->row++;
    }
}

// Rows of a list that lie side by side at their sources and where they go: `count` rows, then zeros
// up to the next run.
struct RowRun {
    u32 begin; // the first row, as the list counts
    u32 first; // its source, as an index counts
    u32 to;    // where it goes
    u32 count;
};

// The runs of a list. Without any, each row is its own source and goes to its own number.
struct RowRuns {
    u64 runs;    // RowRun [count], or 0
    u32 count;
    u32 entries; // of the index
    u32 places;  // rows where they go
    u32 rows;    // of the list
};

// A run, and the first row behind it.
struct Ahead {
    struct RowRun run;
    u32 end;
};

DEVICE struct Ahead begin_runs(const struct RowRuns *p) {
    struct Ahead all = { { 0, 0, 0, p->rows }, p->runs ? 0 : p->rows };
    return all;
}

// Goes on to the run of a row, which is below `rows`.
DEVICE void find_run(const struct RowRuns *p, u32 row, struct Ahead *at) {
    if (row >= at->run.begin && row < at->end) return;
    const struct RowRun *runs = AT(const struct RowRun, p->runs);
    u32 low = 0, high = p->count;
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        if (runs[middle].begin <= row) low = middle;
        else high = middle;
    }
    at->run = runs[low];
    at->end = high < p->count ? runs[high].begin : p->rows;
}

// The source of a row of the run: an entry of the index, -1 for zeros, or -2 if there is none.
DEVICE i32 source_of(const struct RowRuns *p, const struct RowRun *run, const i32 *index, u32 row) {
    u32 nth = row - run->begin, entry = run->first + nth;
    if (nth >= run->count) return -1;
    if (entry >= p->entries) return -2;
    return index ? index[entry] : (i32)entry;
}

// Where a row of the run goes; not below `places` if there is no such place.
DEVICE u32 place_of(const struct RowRun *run, u32 row) { return run->to + (row - run->begin); }

// The types are constants wherever these are used, so that their branches go away.

// Bytes of an element.
DEVICE u32 width(int type) { return type == F32 ? 4 : 2; }

// The four or eight elements of a vector.
DEVICE void unpack(float *values, uint4 vector, int type) {
    u32 words[4] = { vector.x, vector.y, vector.z, vector.w };
    for (u32 i = 0; i < 4; i++) {
        if (type == F32) {
            values[i] = float_of(words[i]);
        } else {
            u32 low = words[i] & 0xffffu, high = words[i] >> 16;
            values[2 * i] = type == BF16 ? from_bf16(low) : from_f16(low);
            values[2 * i + 1] = type == BF16 ? from_bf16(high) : from_f16(high);
        }
    }
}

// The vector of four or eight values, each rounded once.
DEVICE uint4 rounded(const float *values, int type) {
    u32 words[4];
    for (u32 i = 0; i < 4; i++) {
        if (type == F32) words[i] = to_f32(values[i]);
        else if (type == BF16) words[i] = to_bf16(values[2 * i]) | to_bf16(values[2 * i + 1]) << 16;
        else words[i] = to_f16(values[2 * i]) | to_f16(values[2 * i + 1]) << 16;
    }
    uint4 vector;
    vector.x = words[0];
    vector.y = words[1];
    vector.z = words[2];
    vector.w = words[3];
    return vector;
}
