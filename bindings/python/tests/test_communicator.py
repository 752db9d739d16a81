"""Collectives and messages: see ``checks_communicator``."""

SHAPES = [(3, 1), (4, 2)]


def test_communicator(checked, hold):
    hold(checked)
