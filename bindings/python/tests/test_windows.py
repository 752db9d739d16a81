"""The one-sided face."""

SHAPES = [(2, 1), (4, 2)]


def test_windows(checked, hold):
    hold(checked)
