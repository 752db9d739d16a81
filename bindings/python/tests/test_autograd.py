"""Dispatch and combine in torch's graphs."""

SHAPES = [(2, 1), (4, 1)]


def test_autograd(checked, hold):
    hold(checked)
