"""Joining a world: from a launcher's variables, or from a process group of torch.

A process group brings what a launcher would have said: who everybody is, where they meet, and a
secret. It is asked for that once; afterwards the two know nothing of each other.
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import TYPE_CHECKING

from ._native import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def init(group: ProcessGroup | None = None, *, heap: int | str | None = None, symmetric: int | str | None = None) -> World:
    """Joins the world of this job. Collective.

    Without ``group``, of the job that the environment describes: ``sidelane launch``, torchrun,
    srun, mpirun. With one, of its members; their ranks in it are those of the world. ``heap`` and
    ``symmetric`` are the sizes of this rank's memory and of the part of it for windows' signals and
    control, in bytes or as ``"512M"``; all ranks choose alike. Everything else is set by the
    ``SIDELANE_*`` variables.
    """
    variables = {} if group is None else _ask(group)
    return World.join(variables | _sizes(heap, symmetric))


def spare(deadline: float = 60.0, *, heap: int | str | None = None, symmetric: int | str | None = None) -> World:
    """Waits as a spare until a world of this job takes this process in (:meth:`World.grow`), for at
    most ``deadline`` seconds.

    Its environment names any rank of the job, as for :func:`init`. Sizes and all other settings
    must be those of the ranks, or this raises :class:`BootstrapError` (``SettingsDiffer``). After
    an error of a growth that failed, call it again.
    """
    return World.spare(_sizes(heap, symmetric), deadline)


def _sizes(heap: int | str | None, symmetric: int | str | None) -> dict[str, str]:
    said = {"SIDELANE_HEAP": heap, "SIDELANE_SYMMETRIC": symmetric}
    return {name: str(size) for name, size in said.items() if size is not None}


def _machine() -> str:
    """The same on all ranks of a machine, on no two machines."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        return f"{socket.gethostname()} {boot.read().strip()}"


def _ask(group: ProcessGroup) -> dict[str, str]:
    import torch.distributed as dist

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    machines: list[str] = [""] * size
    dist.all_gather_object(machines, _machine(), group=group)
    first = dist.get_global_rank(group, 0)
    # What torch's own rank 0 is reached by; others are known by their name only.
    address = os.environ.get("MASTER_ADDR") if first == 0 else None
    plan = [
        {
            "MASTER_ADDR": "127.0.0.1" if len(set(machines)) == 1 else address or socket.getfqdn(),
            "SIDELANE_JOB": f"group-{secrets.token_hex(8)}",
            "SIDELANE_SECRET": secrets.token_hex(32),
            "MASTER_PORT": str(20000 + secrets.randbelow(20000)),
        }
    ]
    dist.broadcast_object_list(plan, src=first, group=group)
    here = [r for r in range(size) if machines[r] == machines[rank]]
    return plan[0] | {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(here.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(here)),
    }
