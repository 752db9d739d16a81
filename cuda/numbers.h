// Types of elements, to binary32 and back: to nearest even, denormals kept, every NaN the one quiet
// NaN.
#pragma once
#include "shim.h"

enum { F32, BF16, F16 };

#define INFINITE 0x7f800000u
#define QUIET_NAN 0x7fc00000u

DEVICE int is_nan(float x) { return (bits_of(x) & 0x7fffffffu) > INFINITE; }

// The bits of 2^n.
DEVICE u32 power(int n) { return (u32)(127 + n) << 23; }

DEVICE u32 to_f32(float x) { return is_nan(x) ? QUIET_NAN : bits_of(x); }

DEVICE float from_bf16(u32 half) { return float_of(half << 16); }

DEVICE u32 to_bf16(float x) {
    u32 bits = bits_of(x);
    return is_nan(x) ? QUIET_NAN >> 16 : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

// The exponents' biases are 112 apart. A product, which is exact, also makes denormals normal.
DEVICE float from_f16(u32 half) {
    u32 bits = bits_of(float_of((half & 0x7fffu) << 13) * float_of(power(112)));
    if (bits >= power(16)) bits |= INFINITE;
    return float_of(bits | (half & 0x8000u) << 16);
}

DEVICE u32 to_f16(float x) {
    u32 bits = bits_of(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (is_nan(x)) return 0x7e00u;
    if (magnitude >= power(16)) return sign | 0x7c00u;
    // Steps are 2^-24 here, as they are for binary32 from 1/2 on: the addition rounds.
    if (magnitude < power(-14)) return sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f));
    return sign | (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
}
