"""One world for each process group, one layer for each group and settings.

A world lives as long as its process group: it is closed when the group object is gone, when another
group needs a world after this one was destroyed, or by :func:`release`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .._native import ExpertParallel, World
from ..join import init

MAX_TOKENS = 1 << 16
"""The most tokens of a rank, unless a caller has more. Ranks may have different numbers, and a layer needs one."""


@dataclass
class _Joined:
    """What was made for a process group."""

    world: World
    layers: dict[tuple[Any, ...], ExpertParallel] = field(default_factory=dict)


_joined: weakref.WeakKeyDictionary[ProcessGroup, _Joined] = weakref.WeakKeyDictionary()


def layer(group: ProcessGroup, *, max_tokens: int = MAX_TOKENS, **settings: Any) -> ExpertParallel:
    """The layer of a group with these settings. Collective the first time."""
    max_tokens = max(max_tokens, MAX_TOKENS)
    if group not in _joined:
        _release_destroyed()
        world = init(group)
        _joined[group] = _Joined(world)
        weakref.finalize(group, world.close)
    joined = _joined[group]
    key = (max_tokens, *sorted(settings.items()))
    if key not in joined.layers:
        joined.layers[key] = ExpertParallel(joined.world, max_tokens=max_tokens, **settings)
    return joined.layers[key]


def release(group: ProcessGroup | None = None) -> None:
    """Closes the world of a process group, or all worlds that were joined for groups. Local.

    Memory, threads and descriptors of the world go. The next call that needs it joins it anew.
    Worlds of destroyed groups are released without this.
    """
    for member in list(_joined) if group is None else [group]:
        joined = _joined.pop(member, None)
        if joined is not None:
            joined.world.close()


def _release_destroyed() -> None:
    """Closes the worlds of groups that torch has destroyed, though somebody still holds the objects."""
    for group in list(_joined):
        try:
            dist.get_global_rank(group, 0)
        except ValueError:
            release(group)
