"""The allocator over a device heap, called as torch calls it: by the addresses of two functions."""

import contextlib
import ctypes
import sys

import numpy as np
from fake_driver import CUDA, LENT, NAME, Description, Managed, call, driver, give_back

import sidelane
from sidelane import _native, mem_pool

EXPERTS, TOP_K, HIDDEN, TOKENS = 4, 2, 16, 12
HEAP = 1 << 20
LIBRARY = ctypes.CDLL(_native.__file__)
ALLOC, FREE = LIBRARY.sidelane_heap_alloc, LIBRARY.sidelane_heap_free
ALLOC.restype, ALLOC.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
FREE.restype, FREE.argtypes = None, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]


class Array:
    """An array at an address of a device, as a library lends it whose stream has written it."""

    def __init__(self, device, at, like):
        self.device, self.at, self.shape, self.dtype = device, at, like.shape, like.dtype

    def __dlpack_device__(self):
        return CUDA, self.device

    def __dlpack__(self, *, stream):
        axes = len(self.shape)
        shape = (ctypes.c_int64 * axes)(*self.shape)
        strides = (ctypes.c_int64 * axes)(*(size // self.dtype.itemsize for size in np.empty(self.shape, self.dtype).strides))
        code = 2 if self.dtype.kind == "f" else 0
        description = Description(self.at, CUDA, self.device, axes, code, 8 * self.dtype.itemsize, 1, shape, strides, 0)
        managed = Managed(description, None, ctypes.cast(give_back, ctypes.c_void_p))
        LENT[ctypes.addressof(managed)] = (managed, shape, strides, self)
        return ctypes.pythonapi.PyCapsule_New(ctypes.addressof(managed), NAME, None)


class Gpu:
    """This rank's device, and a stream of ours on it."""

    def __init__(self, number):
        self.number, self.api, context = number, driver(), ctypes.c_void_p()
        call(self.api.cuDevicePrimaryCtxRetain, ctypes.byref(context), number)
        call(self.api.cuCtxSetCurrent, context)
        stream = ctypes.c_void_p()
        call(self.api.cuStreamCreate, ctypes.byref(stream), 1)
        self.stream = stream.value

    def write(self, at, values):
        """An array at this address, which is written."""
        data = values.tobytes()
        call(self.api.cuMemcpyHtoDAsync_v2, ctypes.c_uint64(at), data, ctypes.c_size_t(len(data)), ctypes.c_void_p(self.stream))
        call(self.api.cuStreamSynchronize, ctypes.c_void_p(self.stream))
        return Array(self.number, at, values)

    def elsewhere(self, values):
        at = ctypes.c_uint64()
        call(self.api.cuMemAlloc_v2, ctypes.byref(at), ctypes.c_size_t(max(values.nbytes, 16)))
        return self.write(at.value, values)

    def read(self, at, like):
        """What the stream finds there."""
        into = ctypes.create_string_buffer(like.nbytes)
        call(self.api.cuMemcpyDtoHAsync_v2, into, ctypes.c_uint64(at), ctypes.c_size_t(like.nbytes), ctypes.c_void_p(self.stream))
        call(self.api.cuStreamSynchronize, ctypes.c_void_p(self.stream))
        return np.frombuffer(into, like.dtype)[: like.size].reshape(like.shape)

    def alloc(self, nbytes):
        return ALLOC(nbytes, self.number, self.stream)

    def free(self, at, nbytes):
        FREE(at, nbytes, self.number, self.stream)


def built(world, gpu):
    settings = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "dtype": "float32", "max_tokens": 16}
    return sidelane.ExpertParallel(world, **settings, device=gpu.number, stream=gpu.stream, device_heap=HEAP)


def inputs(rank):
    x = np.arange(TOKENS * HIDDEN, dtype=np.float32).reshape(TOKENS, HIDDEN) + 1000 * rank
    ids = (np.arange(TOKENS * TOP_K, dtype=np.int32).reshape(TOKENS, TOP_K) + rank) % EXPERTS
    return x, ids, np.ones((TOKENS, TOP_K), np.float32)


def sums_of(ep, gpu, tokens, chosen, x):
    """Sums of experts that change nothing, and the kernels of the dispatch."""
    rows, handle = ep.dispatch(tokens, *chosen)
    out = gpu.elsewhere(np.full_like(x, np.nan))
    ep.combine(rows, handle, out)
    ep.synchronize()
    assert handle.copied_bytes == handle.rows * HIDDEN * 4
    return gpu.read(out.at, x), handle.report()["kernels"]


def check_tokens_are_sent_and_planned_by_the_host(world):
    gpu = Gpu(world.rank)
    ep = built(world, gpu)
    heap = ep.heap_allocator()
    x, *chosen = inputs(world.rank)
    chosen = [gpu.elsewhere(values) for values in chosen]
    # A segment of which tokens are a part, as torch takes one.
    at = gpu.alloc(1 << 18)
    assert at % 512 == 0 and (heap.device, heap.refused) == (gpu.number, None)
    for offset in (0, 4096):
        seen, kernels = sums_of(ep, gpu, gpu.write(at + offset, x), chosen, x)
        assert np.array_equal(seen, TOP_K * x) and "plan_choices" not in kernels, kernels
    seen, kernels = sums_of(ep, gpu, gpu.elsewhere(x), chosen, x)
    assert np.array_equal(seen, TOP_K * x) and "plan_choices" in kernels, kernels
    gpu.free(at, 1 << 18)


def check_one_allocator_at_a_time_serves_a_device(world):
    gpu = Gpu(world.rank)
    ep = built(world, gpu)
    assert gpu.alloc(64) is None
    heap = ep.heap_allocator()
    try:
        ep.heap_allocator()
        raise AssertionError("two of them")
    except sidelane.HeapError as error:
        assert (error.kind, error.device) == ("AllocatorTaken", gpu.number)
    assert gpu.alloc(2 * HEAP) is None
    assert "raise device_heap" in heap.refused
    del heap
    assert gpu.alloc(64) is None
    ep.heap_allocator()


def check_freed_memory_comes_again(world):
    gpu = Gpu(world.rank)
    ep = built(world, gpu)
    heap = ep.heap_allocator()
    half = HEAP * 3 // 4
    for _ in range(3):
        at = gpu.alloc(half)
        assert at is not None, heap.refused
        gpu.free(at, half)


class FakeTorch:
    """The part of torch that makes pools: a pool has the two functions, by their names."""

    def __init__(self):
        self.cuda, self.memory, self.devices = self, self, []

    @contextlib.contextmanager
    def device(self, number):
        self.devices.append(number)
        yield

    class CUDAPluggableAllocator:
        def __init__(self, library, alloc, free):
            functions = ctypes.CDLL(library)
            self.functions = (getattr(functions, alloc), getattr(functions, free))

        def allocator(self):
            return self.functions

    class MemPool:
        def __init__(self, functions):
            self.functions = functions


def check_a_pool_of_torch_s_calls_the_functions_and_keeps_the_allocator(world):
    gpu, torch = Gpu(world.rank), FakeTorch()
    ep = built(world, gpu)
    before = sys.modules.get("torch")
    sys.modules["torch"] = torch
    try:
        pool = ep.mem_pool()
    finally:
        del sys.modules["torch"]
        if before is not None:
            sys.modules["torch"] = before
        mem_pool._functions.cache_clear()
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (*pool.functions, ALLOC, FREE)]
    assert addresses[:2] == addresses[2:] and torch.devices == [gpu.number]
    at = gpu.alloc(64)
    assert at is not None, pool.heap.refused
    del pool
    assert gpu.alloc(64) is None
    gpu.free(at, 64)


def memory_outlives_its_world():
    """What is read there behind the end of the world, and whether the allocator says that it is
    closed.
    """
    world = sidelane.init()
    gpu = Gpu(world.rank)
    heap = built(world, gpu).heap_allocator()
    at, (x, *_) = gpu.alloc(4096), inputs(world.rank)
    gpu.write(at, x)
    world.close()
    assert gpu.alloc(64) is None
    try:
        said = heap.refused
    except sidelane.ClosedError as error:
        said = error.kind
    right = np.array_equal(gpu.read(at, x), x)
    gpu.free(at, 4096)
    # Of no allocator's now: nothing happens.
    gpu.free(at, 4096)
    return right, said
