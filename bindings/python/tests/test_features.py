"""The table of features from Python, without a GPU: the driver is a fake."""

import torch_needed  # noqa: F401

from devices import environment

__all__ = ["environment"]

SHAPES = [(2, 1)]


def test_features(checked, hold):
    hold(checked)
