"""What can go wrong, as exceptions.

Each carries what the library knows: ``kind``, the name of the fault, and its fields as attributes
of the same names (``rank``, ``peer``, ``waited`` ...)::

    try:
        rows, handle = ep.dispatch(x, experts, weights)
    except sidelane.WorldError as lost:
        if lost.kind == "Lost":
            world = world.rebuild()
"""

from __future__ import annotations

from typing import Any


class Error(Exception):
    """Any error of the library."""

    kind: str
    """The name of the fault, such as ``"Deadline"``."""

    fields: dict[str, Any]
    """What is known of it, by name; each is an attribute, too."""

    def __init__(self, message: str, kind: str = "", fields: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.fields = dict(fields or {})

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__} {self.__dict__.get('kind', '')!r} has no field {name!r}")


class BootstrapError(Error):
    """The ranks did not meet, or the environment does not say who this one is."""


class WorldError(Error):
    """The world is dead until it is rebuilt: ``Lost``, ``Stalled``, ``Cancelled`` ..."""


class HeapError(Error):
    """Memory could not be had, or an access lies outside of a window."""


class LaneError(Error):
    """Bytes or signals could not be moved, or did not come in time."""


class DeviceError(Error):
    """A GPU could not be used."""


class SimdError(Error):
    """An instruction set was forced that this machine does not have."""


class GateError(Error, ValueError):
    """The input of a router is wrong."""


class PlanError(Error, ValueError):
    """The input of a call is wrong. Nothing moved on any rank; the next call works."""


class CallError(Error):
    """Ranks disagree about a call, or another rank's input was refused. Nothing moved; the next
    call works.
    """


class LayerError(Error):
    """Experts of a layer failed or took too long, or a layer on a GPU does not have what was asked
    for.
    """


class InputError(Error, ValueError):
    """A tensor or a setting cannot be used: ``tensor`` or ``setting`` says which, the message what
    to do.
    """


class ClosedError(Error):
    """The world was closed, or the object used up."""


class ForkedError(Error):
    """The process was forked after it had joined a world."""


class BusyError(Error):
    """Another thread is in a call of the same object."""


class RankError(Error):
    """A process of :func:`sidelane.launch` ended without a result; ``rank`` is its rank,
    ``exitcode`` how it ended.
    """
