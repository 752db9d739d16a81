// All kernels: one module.
#include "pack.cu"
#include "sum.cu"
