"""Bad input of one rank."""

import torch_needed  # noqa: F401

SHAPES = [(2, 1), (4, 2)]


def test_refusals(checked, hold):
    hold(checked)
