"""Dispatch, combine and gates on numpy arrays, where torch is not installed."""

SHAPES = [(2, 1), (4, 2)]


def test_numpy(checked, hold):
    hold(checked)
