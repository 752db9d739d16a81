"""All-gather and reduce-scatter: see ``checks_collective``."""

import torch_needed  # noqa: F401

SHAPES = [(3, 1), (4, 2)]


def test_collective(checked, hold):
    hold(checked)
