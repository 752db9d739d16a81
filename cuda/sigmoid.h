// The sigmoid of the host, operation for operation.
#pragma once
#include "numbers.h"

// e^x as the `libm` crate has it, where the sigmoid of the host takes it from: operation for
// operation.
DEVICE float exponential(float x) {
    u32 bits = bits_of(x), magnitude = bits & 0x7fffffffu, negative = bits >> 31;
    if (magnitude > INFINITE) return x;
    if (magnitude >= 0x42b17218u && !negative) return x * float_of(power(127));
    if (magnitude >= 0x42cff1b5u && negative) return 0.0f;
    int k = 0;
    float high = x, low = 0.0f;
    if (magnitude > 0x3eb17218u) {
        if (magnitude > 0x3f851592u) k = (int)(1.4426950216e+00f * x + (negative ? -0.5f : 0.5f));
        else k = negative ? -1 : 1;
        high = x - (float)k * 6.9314575195e-01f;
        low = (float)k * 1.4286067653e-06f;
        x = high - low;
    } else if (magnitude <= 0x39000000u) {
        return 1.0f + x;
    }
    float square = x * x;
    float c = x - square * (1.6666625440e-1f + square * -2.7667332906e-3f);
    float y = 1.0f + (x * c / (2.0f - c) - low + high);
    // The last factor alone rounds.
    if (k > 127) {
        y *= float_of(power(127));
        k -= 127;
    } else if (k < -126) {
        y *= float_of(power(-102));
        k += 102;
    }
    return k == 0 ? y : y * float_of(power(k));
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
