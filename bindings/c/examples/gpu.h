// What the example and the tests with devices do when a call of CUDA's driver fails, and how they get memory of a device.
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

// Memory of the device, with what the host has.
static inline CUdeviceptr on_device(const void *from, size_t bytes) {
    CUdeviceptr at;
    CUDA(cuMemAlloc(&at, bytes));
    CUDA(cuMemcpyHtoD(at, from, bytes));
    return at;
}

#endif
