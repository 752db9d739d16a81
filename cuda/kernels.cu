// All kernels: one module.
#include "check.cu"
#include "counts.cu"
#include "gradients.cu"
#include "order.cu"
#include "pack.cu"
#include "regroup.cu"
#include "sum.cu"
#include "sum_choices.cu"
