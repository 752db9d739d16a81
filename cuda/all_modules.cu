// All modules, for the CPU: the fake driver takes one library.
#include "audit.cu"
#include "exchange.cu"
#include "layer.cu"
