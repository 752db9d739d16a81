"""Pools of torch's over the device heap of an instance."""

from __future__ import annotations

from functools import cache
from typing import Any

from . import _native


@cache
def _functions() -> Any:
    """This library as an allocator of torch's, for good: pools free by it to their end."""
    import torch

    library = _native.__file__
    return torch.cuda.memory.CUDAPluggableAllocator(library, "sidelane_heap_alloc", "sidelane_heap_free")


def mem_pool(ep: _native.ExpertParallel) -> Any:
    """A ``torch.cuda.MemPool`` over the device heap of ``ep``. Its ``heap`` serves the device as
    long as the pool is there.
    """
    import torch

    heap = ep.heap_allocator()
    with torch.cuda.device(heap.device):
        pool = torch.cuda.MemPool(_functions().allocator())
    pool.heap = heap
    return pool
