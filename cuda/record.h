// The blocks of a record: `quantize` in src/rows/fp8.rs, to the bit.
#pragma once
#include "e4m3.h"
#include "rows.h"

// Values that share a scale, and vectors that a thread has on their way at a time.
enum { SCALED = 128, AT_ONCE = 4 };

// The four or eight values of a vector to codes; gives the scale of their block, whose vectors the
// `SCALED / values` threads from a multiple of that number on have. All lanes of a warp take part.
DEVICE float quantize(uint4 vector, int type, u32 *codes) {
    u32 count = 16 / width(type), amax = 0;
    float values[8];
    unpack(values, vector, type);
    for (u32 i = 0; i < count; i++) {
        u32 magnitude = bits_of(values[i]) & 0x7fffffffu;
        if (magnitude < INFINITE && magnitude > amax) amax = magnitude;
    }
    for (u32 mask = SCALED / count / 2; mask; mask /= 2) {
        u32 other = __shfl_xor_sync(ALL_LANES, amax, mask);
        if (other > amax) amax = other;
    }
    float scale = float_of(amax) / E4M3_MAX;
    if (scale < float_of(power(-126))) scale = float_of(power(-126));
    float inverse = 1.0f / scale;
    codes[0] = codes[1] = 0;
    for (u32 i = 0; i < count; i++) codes[i / 4] |= to_e4m3(values[i] * inverse) << i % 4 * 8;
    return scale;
}
