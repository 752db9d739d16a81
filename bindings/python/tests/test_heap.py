"""Memory of the allocator over a device heap, through the functions that torch would call: without
torch and without a GPU.
"""

import checks_heap
from fake_driver import environment

import sidelane

__all__ = ["environment"]

SHAPES = [(2, 1)]


def test_heap(checked, hold):
    hold(checked)


def test_memory_outlives_its_world():
    said = sidelane.launch(checks_heap.memory_outlives_its_world, 2, env=environment())
    assert said == [(True, "Closed")] * 2
