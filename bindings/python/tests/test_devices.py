"""Dispatch and combine of tensors on devices, without a GPU: the driver is a stand-in that does everything late."""

import stops

import sidelane
from devices import environment

__all__ = ["environment"]

SHAPES = [(2, 1)]
CANCELLED = ("WorldError", "Cancelled", {"by": 0})


def test_devices(checked, hold):
    hold(checked)


def test_ctrl_c_ends_the_wait_for_sizes():
    said = sidelane.launch(stops.interrupted_sizes, 2, env=environment())
    assert said[0] == (("KeyboardInterrupt", "", {}), CANCELLED)
    assert said[1] == (CANCELLED, CANCELLED)
