// All modules, for the CPU: the stand-in driver takes one library.
#include "audit.cu"
#include "kernels.cu"
#include "layer.cu"
