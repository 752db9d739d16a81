"""Sidelane: MoE expert-parallel dispatch and combine that run beside the compute.

Tensors (torch, numpy, anything that speaks DLPack) go in and out without a copy, in memory of the
host or of a GPU. See docs/from-python.md.
"""

import atexit as _atexit
from importlib.metadata import version as _version

from ._native import (
    RowCollective,
    Communicator,
    Decision,
    ExpertParallel,
    Gate,
    Group,
    Handle,
    HeapAllocator,
    MoeLayer,
    PendingCombine,
    PendingDispatch,
    RowPartition,
    Tape,
    Tensor,
    Window,
    World,
    balance,
    balance_counts,
    balance_loss,
    close_all as _close_all,
    importance_loss,
    preset,
    presets,
    z_loss,
)
from .errors import (
    BootstrapError,
    BusyError,
    CallError,
    ClosedError,
    DeviceError,
    Error,
    ForkedError,
    GateError,
    HeapError,
    InputError,
    LaneError,
    LayerError,
    PlanError,
    RankError,
    SimdError,
    WorldError,
)
from .join import init, spare
from .launch import launch

__version__ = _version("sidelane")

__all__ = [
    "__version__",
    "BootstrapError",
    "BusyError",
    "CallError",
    "ClosedError",
    "RowCollective",
    "Communicator",
    "Decision",
    "DeviceError",
    "Error",
    "ExpertParallel",
    "ForkedError",
    "Gate",
    "GateError",
    "Group",
    "Handle",
    "HeapAllocator",
    "HeapError",
    "InputError",
    "LaneError",
    "LayerError",
    "MoeLayer",
    "PendingCombine",
    "PendingDispatch",
    "PlanError",
    "RankError",
    "RowPartition",
    "SimdError",
    "Tape",
    "Tensor",
    "Window",
    "World",
    "WorldError",
    "balance",
    "balance_counts",
    "balance_loss",
    "importance_loss",
    "init",
    "launch",
    "preset",
    "presets",
    "spare",
    "z_loss",
]

# Those that are left hear a goodbye, not a loss.
_atexit.register(_close_all)
