"""Megatron-core 0.16.1, its dispatchers unchanged, on tensors that stand for CUDA's: forward and
all gradients.
"""

import importlib.metadata
import os

import pytest

import torch_needed  # noqa: F401

from devices import environment

try:
    importlib.metadata.version("megatron-core")
except importlib.metadata.PackageNotFoundError:
    # Whoever counts on this judge says so.
    assert "SIDELANE_NEED_MEGATRON" not in os.environ
    pytest.skip("megatron-core is not installed", allow_module_level=True)

__all__ = ["environment"]

SHAPES = [(4, 1)]


def test_megatron_cuda(checked, hold):
    hold(checked)
