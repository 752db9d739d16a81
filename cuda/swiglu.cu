// SwiGLU, to the bit that of src/layer/swiglu.rs: act = silu(gate) * up, and its gradient. All f32.
#include "sigmoid.h"

struct Swiglu {
    u64 gate, up; // f32 [count]
    u64 act;      // f32 [count], written
    u64 count;
};

KERNEL(swiglu, struct Swiglu, p) {
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < p.count; i += (u64)gridDim.x * THREADS) {
        float g = AT(const float, p.gate)[i];
        AT(float, p.act)[i] = g * sigmoid(g) * AT(const float, p.up)[i];
    }
}

struct SwigluBackward {
    u64 gate, up; // f32 [count]; afterwards their gradients
    u64 act;      // f32 [count]: gradients of what swiglu made; afterwards what it made
    u64 count;
};

KERNEL(swiglu_backward, struct SwigluBackward, p) {
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < p.count; i += (u64)gridDim.x * THREADS) {
        float g = AT(const float, p.gate)[i], u = AT(const float, p.up)[i], of_act = AT(const float, p.act)[i];
        float s = sigmoid(g), silu = g * s;
        AT(float, p.gate)[i] = of_act * u * (s + silu * (1.0f - s));
        AT(float, p.up)[i] = of_act * silu;
        AT(float, p.act)[i] = silu * u;
    }
}
