// The codes of e4m3: `encode_e4m3` in src/rows/fp8.rs, to the bit.
#pragma once
#include "numbers.h"

#define E4M3_MAX 448.0f

// The nearest code, ties to even; 0x7f, without a sign, for NaN, infinities and what lies beyond
// 464.
DEVICE u32 to_e4m3(float x) {
    u32 bits = bits_of(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
    // Half a step above the largest value; larger numbers, and NaN, have larger bits.
    if (magnitude > bits_of(464.0f)) return 0x7f;
    // Steps are 2^-9 here, as they are for binary32 from 2^14 on: the addition rounds.
    if (magnitude < power(-6)) return sign | (bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f));
    return sign | (((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3));
}
