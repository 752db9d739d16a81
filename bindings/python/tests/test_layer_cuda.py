"""A whole layer on tensors that stand for CUDA's."""

import torch_needed  # noqa: F401

from devices import environment

__all__ = ["environment"]

SHAPES = [(2, 1)]


def test_layer_cuda(checked, hold):
    hold(checked)
