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
