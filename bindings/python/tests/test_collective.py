"""All-gather and reduce-scatter: see ``checks_collective``."""

SHAPES = [(3, 1), (4, 2)]


def test_collective(checked, hold):
    hold(checked)
