"""The one-sided face."""

import torch_needed  # noqa: F401

SHAPES = [(2, 1), (4, 2)]


def test_windows(checked, hold):
    hold(checked)
