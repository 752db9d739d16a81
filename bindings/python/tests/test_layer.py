"""A whole layer on the host, between processes."""

import torch_needed  # noqa: F401

SHAPES = [(2, 1), (4, 2)]


def test_layer(checked, hold):
    hold(checked)
