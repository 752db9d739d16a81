"""Our module in place of ``deep_ep``."""

from __future__ import annotations

import sys
from types import ModuleType

from ..errors import Error
from .buffer import Buffer, Config, EventHandle, EventOverlap
from .ep_buffer import EPBuffer, EPHandle
from .hybrid import HybridEPBuffer

OF_PACKAGE = (Buffer, Config, EPBuffer, EPHandle, EventHandle, EventOverlap, HybridEPBuffer)
OF_UTILS = (EventHandle, EventOverlap)


def install() -> None:
    """Puts :class:`Buffer`, :class:`EPBuffer` and :class:`HybridEPBuffer` where Megatron looks for
    DeepEP's.

    Refused once a real ``deep_ep`` is loaded, or Megatron has looked for one and found none.
    """
    loaded = sys.modules.get("deep_ep")
    if loaded is not None:
        if getattr(loaded, "Buffer", None) is Buffer:
            return
        raise Error("a deep_ep is loaded already: call sidelane.megatron.install() before it is imported", "Loaded")
    if "megatron.core.transformer.moe.fused_a2a" in sys.modules:
        message = "Megatron has looked for deep_ep already: call sidelane.megatron.install() before importing megatron.core"
        raise Error(message, "TooLate")
    package, utils = ModuleType("deep_ep", __doc__), ModuleType("deep_ep.utils", __doc__)
    package.__dict__.update({thing.__name__: thing for thing in OF_PACKAGE})
    utils.__dict__.update({thing.__name__: thing for thing in OF_UTILS})
    package.__dict__.update(utils=utils, __path__=[])
    sys.modules |= {"deep_ep": package, "deep_ep.utils": utils}
