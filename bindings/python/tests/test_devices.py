"""Dispatch and combine of tensors on devices, without a GPU: the driver is a fake that does
everything late.
"""

import torch_needed  # noqa: F401

import checks_devices
import stops

import sidelane
from devices import environment

__all__ = ["environment"]

SHAPES = [(2, 1)]
CANCELLED = ("WorldError", "Cancelled", {"by": 0})


def test_devices(checked, hold):
    hold(checked)


def test_relayed_rows_say_where_they_arrived():
    said = sidelane.launch(checks_devices.relayed_rows, 4, nodes=2, env=environment())
    assert all("relay" in lanes for lanes in said), said


def test_ctrl_c_ends_the_wait_for_sizes():
    said = sidelane.launch(stops.interrupted_sizes, 2, env=environment())
    assert said[0] == (("KeyboardInterrupt", "", {}), CANCELLED)
    assert said[1] == (CANCELLED, CANCELLED)


def test_a_pending_call_that_is_dropped_cancels_the_world():
    said = sidelane.launch(stops.dropped_pending_on_a_device, 2, env=environment())
    assert said == [(["Busy"] * 2, CANCELLED, CANCELLED), ([], CANCELLED, CANCELLED)]


def test_a_forked_process_is_told_and_harms_nobody():
    for calls, exitcode, shapes, maker in sidelane.launch(stops.forked_with_devices, 2, env=environment()):
        assert calls == [("ForkedError", "Forked", {"maker": maker})] * 8
        assert exitcode == 0
        assert shapes[0] == shapes[1]
