"""Bad input of one rank."""

SHAPES = [(2, 1), (4, 2)]


def test_refusals(checked, hold):
    hold(checked)
