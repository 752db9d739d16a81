// Helpers of the example and the tests with devices: reaction to a failed call of CUDA's driver,
// and memory of a device.
#ifndef GPU_H
#define GPU_H

#include <cuda.h>

#include "check.h"

#define CUDA(call)                                                                                 \
    do {                                                                                           \
        CUresult code_ = (call);                                                                   \
        if (code_ != CUDA_SUCCESS) {                                                               \
            fprintf(stderr, "%s:%d: %s: CUDA's error %d\n", __FILE__, __LINE__, #call, code_);     \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

// Device memory with a copy of the host's bytes.
static inline CUdeviceptr on_device(const void *from, size_t bytes) {
    CUdeviceptr at;
    CUDA(cuMemAlloc(&at, bytes));
    CUDA(cuMemcpyHtoD(at, from, bytes));
    return at;
}

#endif
