"""One world for each process group, one layer for each group and settings."""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup

from .._native import ExpertParallel, World
from ..join import init

_MAX_TOKENS = 1 << 16
_worlds: dict[ProcessGroup, World] = {}
_layers: dict[tuple[Any, ...], ExpertParallel] = {}


def layer(group: ProcessGroup, **settings: Any) -> ExpertParallel:
    """The layer of a group with these settings. Collective the first time."""
    key = (group, *sorted(settings.items()))
    if key not in _layers:
        if group not in _worlds:
            _worlds[group] = init(group)
        _layers[key] = ExpertParallel(_worlds[group], max_tokens=_MAX_TOKENS, **settings)
    return _layers[key]
