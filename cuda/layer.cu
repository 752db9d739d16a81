// What an MoE layer computes around its dispatch and combine: a module of its own, which layers on
// a device load.
#include "gate.cu"
#include "matmul.cu"
#include "swiglu.cu"
#include "swiglu_bf16.cu"
#include "tokens.cu"
