"""One world for each process group, one layer for each group, place and settings.

A layer lies where its first tensor does. On a GPU its memory grows with the most tokens that a rank
may have, so that number is that of the first call, unless :data:`limits` names one. A world lives
as long as its process group: it is closed when the group object is gone, when another group needs a
world after this one was destroyed, or by :func:`release`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .._native import ExpertParallel, World
from ..join import init

MAX_TOKENS = 1 << 16
"""The most tokens of a rank on the host, unless a caller has more. Ranks may have different
numbers, and a layer needs one.
"""


@dataclass
class Limits:
    """What layers are made for, the same at all ranks."""

    max_tokens: int | None = None
    """The most tokens of a rank. On the host 65,536 at least; on a GPU those of the first call,
    unless it is said.
    """

    choices: int | None = None
    """The most experts of a token where Megatron sends a map of any number (``hybridep``): all,
    unless it is said.
    """

    device_heap: int | None = None
    """Bytes of a GPU for the rows of a layer."""


limits = Limits()


_BLOCK = 64


@dataclass
class _Joined:
    """What was made for a process group."""

    world: World
    layers: dict[tuple[Any, ...], ExpertParallel] = field(default_factory=dict)


_joined: weakref.WeakKeyDictionary[ProcessGroup, _Joined] = weakref.WeakKeyDictionary()


def layer(group: ProcessGroup, x: Tensor, *, max_tokens: int = 0, **settings: Any) -> ExpertParallel:
    """The layer of a group with these settings, where these tokens lie. Collective the first time.
    """
    if group not in _joined:
        _release_destroyed()
        world = init(group)
        _joined[group] = _Joined(world)
        weakref.finalize(group, world.close)
    joined = _joined[group]
    max_tokens = max(max_tokens, limits.max_tokens or 0)
    if not x.is_cuda:
        max_tokens = max(max_tokens, MAX_TOKENS)
    key = (x.device, max_tokens, *sorted(settings.items()))
    if key not in joined.layers:
        if x.is_cuda:
            max_tokens = max(max_tokens, _most(joined.world, x.shape[0]))
            settings |= {"device": x.device.index, "device_heap": limits.device_heap}
        joined.layers[key] = ExpertParallel(joined.world, max_tokens=max_tokens, **settings)
    return joined.layers[key]


def _most(world: World, tokens: int) -> int:
    """The most tokens that a rank has now, in whole blocks: a rank does not know those of the
    others. Collective.
    """
    most = max(int.from_bytes(said, "little") for said in world.all().gather(tokens.to_bytes(8, "little")))
    return max(-(-most // _BLOCK) * _BLOCK, _BLOCK)


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
    """Closes the worlds of groups that torch has destroyed, though somebody still holds the
    objects.
    """
    for group in list(_joined):
        try:
            dist.get_global_rank(group, 0)
        except ValueError:
            release(group)
