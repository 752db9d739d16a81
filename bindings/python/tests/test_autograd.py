"""Dispatch and combine in torch's graphs."""

import torch_needed  # noqa: F401

SHAPES = [(2, 1), (4, 1)]


def test_autograd(checked, hold):
    hold(checked)
