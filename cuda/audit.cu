// What `sidelane gpu-check` runs beside the library's own kernels: a module of its own, which
// no other code loads.
#include "copy.cu"
#include "hold.cu"
#include "tensor_core_product.cu"
