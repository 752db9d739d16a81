"""A rank of Megatron's: patched for a CPU, what was installed under it, and every dispatcher that
its layers can have.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sidelane
import sidelane.megatron

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import megatron_on_cpu

# Where there is a GPU, Megatron asks torch.
if not torch.cuda.is_available():
    megatron_on_cpu.patch()
sidelane.megatron.install()
sidelane.megatron.install()
if not torch.cuda.is_available():
    megatron_on_cpu.patch_megatron()

import ncclep_caller

sidelane.megatron.nccl.install(ncclep_caller.names)

from megatron.core.transformer.moe import token_dispatcher
from megatron_cases import EXPERTS, Apart, Case, Results, apart, cases, groups, held, inputs, layer
from routing import same

LAST_PLACES = 4.0


@cache
def join(world: sidelane.World) -> None:
    """The process group of all ranks; rank 0 keeps its store."""
    first = world.rank == 0
    store = dist.TCPStore("127.0.0.1", 0, world.size, True, wait_for_workers=False) if first else None
    port = int(world.all().gather(str(store.port if store else 0).encode())[0])
    store = store or dist.TCPStore("127.0.0.1", port, world.size, False)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)


def dispatcher(who: str, case: Case, **of_manager: Any) -> Any:
    """One of Megatron's, over what Sidelane puts under it, or ours."""
    tp = case.tensor_parallel
    mine, members = held(tp, dist.get_rank()), groups(tp)
    config = case.config("deepep" if who == "deepep" else "hybridep")
    if who == "all-to-all":
        return token_dispatcher.MoEAlltoAllTokenDispatcher(len(mine), mine, config, members)
    if who == "sidelane":
        return sidelane.megatron.TokenDispatcher(len(mine), mine, config, members)
    flex = token_dispatcher.MoEFlexTokenDispatcher(len(mine), mine, config, members)
    if who == "ncclep":
        flex._comm_manager = ncclep_caller.Manager(
            members.tp_ep, len(mine), tp * case.top_k, tp * EXPERTS, **of_manager
        )
    return flex


DISPATCHERS = ("sidelane", "hybridep", "ncclep", "deepep")


def has(who: str, case: Case) -> bool:
    """Whether it can be asked for this: two of Megatron's backends do not pad capacities."""
    return case.capacity != "pad" or who in ("sidelane", "hybridep")


def limit(who: str, case: Case) -> float:
    """How many last places results may lie apart: some where sums are made by rank, or by
    tensor-parallel rank, none elsewhere.
    """
    by_rank = who == "deepep" and case.top_k > 2
    return LAST_PLACES if not case.exact and (case.tensor_parallel > 1 or by_rank) else 0.0


@cache
def theirs(case: Case) -> Results:
    return layer(dispatcher("all-to-all", case), case, inputs(case, dist.get_rank()))


def against_theirs(world: sidelane.World, who: str) -> dict[Case, list[Apart]]:
    """The differences of all cases at this rank."""
    join(world)
    found = {}
    for case in cases():
        if has(who, case):
            of = inputs(case, world.rank)
            ours = layer(dispatcher(who, case), case, of)
            found[case] = apart(case, of, ours, theirs(case))
            if case.tensor_parallel == 1:
                for one, other in zip(ours[:3], theirs(case)[:3], strict=True):
                    same(one, other)
    return found
