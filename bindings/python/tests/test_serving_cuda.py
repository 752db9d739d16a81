"""The shapes of vLLM, SGLang and FlashInfer on tensors that stand for CUDA's."""

import torch_needed  # noqa: F401

from devices import environment

__all__ = ["environment"]

SHAPES = [(2, 1)]


def test_serving_cuda(checked, hold):
    hold(checked)
