"""Torch's own code on tensors that stand for CUDA's: its autograd, its current stream, its
allocator.
"""

import torch_needed  # noqa: F401

from devices import environment

__all__ = ["environment"]

SHAPES = [(2, 1)]


def test_cuda(checked, hold):
    hold(checked)
