"""Dispatch and combine of processes, with tensors of torch and numpy."""

import torch_needed  # noqa: F401

SHAPES = [(2, 1), (4, 2)]


def test_exchange(checked, hold):
    hold(checked)
