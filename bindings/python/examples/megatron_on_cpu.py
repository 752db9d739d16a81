"""Megatron-core in CPU processes: what it asks of a GPU, and of a backend with uneven collectives,
answered without either.

| asked | answer |
|---|---|
| ``torch.cuda.Stream``, ``Event``, ``stream``, ``current_stream``, ``synchronize``, ``nvtx`` | what is done is done at once |
| ``torch.cuda.current_device`` | the CPU |
| ``Tensor.record_stream`` | nothing |
| ``torch.distributed.all_gather`` of uneven parts | a broadcast from each member |
| ``torch.distributed.reduce_scatter`` of uneven parts | an all-reduce of each part |
| ``token_dispatcher.maybe_move_tensor_to_cpu`` | sizes become numbers, which collectives take |
| ``moe_utils.te_general_gemm`` | there is none: 0.16.1 forgets to say so where TransformerEngine is missing |

Call :func:`patch` before Megatron is imported, :func:`patch_megatron` after.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Stream:
    """Does what it is told at once."""

    def wait_stream(self, _stream: object) -> None: ...
    def wait_event(self, _event: object) -> None: ...
    def record_event(self, event: object = None) -> object:
        return event or Event()
    def synchronize(self) -> None: ...


class Event:
    """Has always happened."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...


def all_gather(parts: list[Tensor], part: Tensor, group: ProcessGroup | None = None, async_op: bool = False) -> None:
    """As torch's, of parts of any sizes."""
    parts[dist.get_rank(group)].copy_(part)
    for member, received in enumerate(parts):
        if received.numel():
            dist.broadcast(received, group_src=member, group=group)


def reduce_scatter(
    mine: Tensor,
    parts: list[Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> None:
    """As torch's, of parts of any sizes."""
    for member, part in enumerate(parts):
        total = part.clone(memory_format=torch.contiguous_format)
        if total.numel():
            dist.all_reduce(total, op, group=group)
        if member == dist.get_rank(group):
            mine.copy_(total)


class Sizes(list):
    """Numbers that answer like an array."""

    def tolist(self) -> list[int]:
        return list(self)


def on_the_host(tensor: Any, as_numpy: bool = False, **_: object) -> Any:
    """What Megatron copies from the GPU is here already."""
    return Sizes(tensor.tolist()) if as_numpy and torch.is_tensor(tensor) else tensor


def patch() -> None:
    """Answers for torch."""
    one = Stream()
    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    torch.cuda.current_stream = lambda *_: one
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.nvtx = SimpleNamespace(range_push=lambda _: None, range_pop=lambda: None)
    torch.Tensor.record_stream = lambda *_: None
    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def patch_megatron() -> None:
    """Answers for Megatron's layers."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = on_the_host
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
