// All modules, for the CPU: the stand-in driver takes one library.
#include "audit.cu"
#include "exchange.cu"
#include "layer.cu"
