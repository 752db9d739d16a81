"""Megatron-core on Sidelane.

*Our own* dispatcher, recommended: one call before layers are built, and nothing is permuted before
or after::

    import sidelane.megatron
    sidelane.megatron.enable()           # --moe-token-dispatcher-type alltoall

*Unchanged*: a module in place of ``deep_ep``, put there before Megatron looks for it, so that its
flex dispatcher sends by Sidelane with the backends ``deepep`` and ``hybridep``::

    import sidelane.megatron
    sidelane.megatron.install()
    import megatron.core                 # --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep

Newer Megatrons have a backend ``ncclep``, and a layer that overlaps chunks of tokens:
:func:`sidelane.megatron.nccl.install` and :func:`sidelane.megatron.transport.install` put ours
under them.

| | rows | sums | sizes |
|---|---|---|---|
| :class:`TokenDispatcher` | expert-major | by expert: those of Megatron's all-to-all to the bit, in float32 | exact |
| :class:`HybridEPBuffer` | expert-major | the same | exact, or a budget |
| :mod:`.nccl` | expert-major | the same | exact, or a budget |
| :mod:`.transport` | expert-major | the same | exact, filled up with zeros |
| :class:`Buffer` | one per token and rank, permuted by Megatron | by rank | exact |
| :class:`EPBuffer` | expert-major if expanded, else one per token and rank | by expert, else by rank | exact |

Worlds and layers are made at the first call that needs them, all ranks of the group together. They
are kept until the process group is destroyed, or until :func:`release`.
"""

from . import nccl, transport
from .buffer import Buffer, Config, EventHandle, EventOverlap
from .deep_ep import install
from .dispatcher import TokenDispatcher, enable
from .ep_buffer import EPBuffer, EPHandle
from .hybrid import HybridEPBuffer
from .layers import Limits, limits, release

__all__ = [
    "Buffer",
    "Config",
    "EPBuffer",
    "EPHandle",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "Limits",
    "TokenDispatcher",
    "enable",
    "install",
    "limits",
    "nccl",
    "release",
    "transport",
]
