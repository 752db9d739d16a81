"""One world for the process groups of the same members, one layer for each world, place and
settings.

A layer lies where its first tensor does. On a GPU its memory grows with the most tokens that a rank
may have, so that number is that of the first call, unless :data:`limits` names one.

Megatron makes several groups of the same members, and keeps them when it makes its groups anew. So
a new group uses the world of an older one if its members are the same in the same order. A world
lives as long as one of its groups. A group's use ends when the group object is gone, when another
group needs a world after this one was destroyed, or by :func:`release`.
"""

from __future__ import annotations

import secrets
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .._native import ExpertParallel, World
from ..errors import Error
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
    """What was made for the process groups of these members."""

    members: list[int]
    world: World
    name: bytes
    """The same at all ranks of the world, and of no other world."""

    groups: int = 0
    """How many process groups use it."""

    layers: dict[tuple[Any, ...], ExpertParallel] = field(default_factory=dict)

    def leave(self) -> None:
        """A group needs the world no longer."""
        self.groups -= 1
        if self.groups == 0:
            self.world.close()


_joined: weakref.WeakKeyDictionary[ProcessGroup, _Joined] = weakref.WeakKeyDictionary()
_uses: weakref.WeakKeyDictionary[ProcessGroup, weakref.finalize[[], ProcessGroup]] = weakref.WeakKeyDictionary()
"""What ends a group's use of its world, once."""


def layer(group: ProcessGroup, x: Tensor, *, max_tokens: int = 0, **settings: Any) -> ExpertParallel:
    """The layer of a group with these settings, where these tokens lie. Collective the first time.
    """
    if group not in _joined:
        _release_destroyed()
        _join(group)
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


def _join(group: ProcessGroup) -> None:
    """Finds or makes the world of a group. Collective.

    Ranks lose their references to an older group at different times, so they first compare what
    they have.
    """
    members = dist.get_process_group_ranks(group)
    joined = next((one for one in _joined.values() if one.members == members and _lives(one.world)), None)
    names: list[bytes | None] = [None] * len(members)
    dist.all_gather_object(names, joined and joined.name, group=group)
    if joined is None or any(name != joined.name for name in names):
        world = init(group)
        joined = _Joined(members, world, world.all().gather(secrets.token_bytes(16))[0])
    joined.groups += 1
    _joined[group] = joined
    _uses[group] = weakref.finalize(group, joined.leave)


def _lives(world: World) -> bool:
    try:
        world.check()
    except Error:
        return False
    return True


def _most(world: World, tokens: int) -> int:
    """The most tokens that a rank has now, in whole blocks: a rank does not know those of the
    others. Collective.
    """
    most = max(int.from_bytes(said, "little") for said in world.all().gather(tokens.to_bytes(8, "little")))
    return max(-(-most // _BLOCK) * _BLOCK, _BLOCK)


def release(group: ProcessGroup | None = None) -> None:
    """Ends the use of a world by a process group, or by all groups. Local.

    When no group uses a world, its memory, threads and descriptors go. The next call that needs it
    joins it anew. Destroyed groups need no release.
    """
    for member in list(_joined) if group is None else [group]:
        if _joined.pop(member, None) is not None:
            _uses.pop(member)()


def _release_destroyed() -> None:
    """Closes the worlds of groups that torch has destroyed, though somebody still holds the
    objects.
    """
    for group in list(_joined):
        try:
            dist.get_global_rank(group, 0)
        except ValueError:
            release(group)
