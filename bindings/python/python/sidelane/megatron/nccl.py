"""The names of Megatron's ``ncclep`` backend, which newer ones than 0.16 have.

Their dispatcher takes these from its own module, where :func:`install` puts ours::

    from megatron.core.transformer.moe import token_dispatcher
    sidelane.megatron.nccl.install(token_dispatcher)

A receive capacity is a budget: as many rows come at every rank, those behind the last are zero.
``None``: sizes are exact. Payloads lie in host memory, so there is no zero-copy mode and no
multiprocessor to set aside.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from .. import autograd
from .._native import ExpertParallel
from ..errors import Error
from .layers import layer

__all__ = [
    "EpBuffer",
    "ensure_nccl_ep_bootstrapped",
    "install",
    "is_nccl_ep_bootstrapped",
    "nccl_ep_combine",
    "nccl_ep_dispatch",
    "nccl_ep_finalize",
    "new_nccl_ep_buffer",
]

_group: ProcessGroup | None = None
_drops = False


def install(token_dispatcher: ModuleType) -> None:
    """Puts our names in place of those of a module, which must have them."""
    ours = (
        ensure_nccl_ep_bootstrapped,
        is_nccl_ep_bootstrapped,
        new_nccl_ep_buffer,
        nccl_ep_dispatch,
        nccl_ep_combine,
    )
    missing = [function.__name__ for function in ours if not hasattr(token_dispatcher, function.__name__)]
    if missing:
        raise Error(f"{token_dispatcher.__name__} has no backend ncclep: no {', '.join(missing)}", "NoBackend")
    for function in ours:
        setattr(token_dispatcher, function.__name__, function)


def ensure_nccl_ep_bootstrapped(
    ep_group: ProcessGroup,
    num_experts: int,
    max_tokens_per_rank: int,
    recv_capacity_per_rank: int | None,
    hidden_dim: int,
    num_topk: int | None = None,
    num_sms: int = 0,
    zero_copy: bool = False,
    drop_on_overflow: bool = False,
) -> None:
    """Names the group of the buffers that follow, and what becomes of rows beyond their capacity:
    an error, if not dropped.
    """
    global _group, _drops
    if zero_copy:
        raise ValueError("zero_copy needs memory of a GPU, which is not open to Megatron yet")
    _group, _drops = ep_group, drop_on_overflow


def is_nccl_ep_bootstrapped() -> bool:
    """Whether a group has been named."""
    return _group is not None


def nccl_ep_finalize() -> None:
    """Forgets the group; its layers are kept."""
    global _group
    _group = None


class EpBuffer:
    """What one dispatch leaves to the combine and the gradients that follow it. Many may be alive.
    """

    tokens_per_expert: Tensor
    """Rows of each local expert, pads counted, that have come: int64 [experts]."""

    total_recv_tokens: Tensor
    """Rows that were sent here, pads counted, also if they were dropped: int64 [1]."""

    ep: ExpertParallel
    routed: autograd.Routed

    def __init__(
        self,
        top_k: int,
        max_tokens_per_rank: int,
        recv_capacity_per_rank: int | None,
        hidden_dim: int,
        num_local_experts: int,
        alignment: int = 0,
    ) -> None:
        if _group is None:
            raise Error("ensure_nccl_ep_bootstrapped comes before new_nccl_ep_buffer", "NoGroup")
        self.group, self.capacity = _group, recv_capacity_per_rank
        self.settings: dict[str, Any] = {
            "experts": num_local_experts * _group.size(),
            "top_k": top_k,
            "hidden": hidden_dim,
            "max_tokens": max_tokens_per_rank,
            "align": max(alignment, 1),
        }
        if recv_capacity_per_rank is not None:
            self.settings |= {"budget": recv_capacity_per_rank, "overflow": "drop" if _drops else "error"}

    def fill(self, rows: Tensor) -> Tensor:
        """Rows, and zeros up to the capacity."""
        missing = 0 if self.capacity is None else self.capacity - rows.shape[0]
        return pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


def new_nccl_ep_buffer(*sizes: Any, **named_sizes: Any) -> EpBuffer:
    """A buffer for one dispatch and its combine. See :class:`EpBuffer`."""
    return EpBuffer(*sizes, **named_sizes)


def nccl_ep_dispatch(
    buffer: EpBuffer,
    tokens: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    recv_tokens: None = None,
    recv_topk_weights: None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sends tokens: rows by local expert, rows per expert, a weight for each row. Differentiable.
    """
    if recv_tokens is not None or recv_topk_weights is not None:
        raise ValueError("buffers of the caller's belong to zero_copy, which is not open to Megatron yet")
    buffer.ep = layer(buffer.group, tokens, dtype=tokens.dtype, **buffer.settings)
    routed = autograd.dispatch(buffer.ep, tokens, topk_idx, topk_weights)
    handle = routed.handle
    buffer.routed = routed.detach()
    buffer.tokens_per_expert = torch.tensor(handle.padded_tokens_per_expert, dtype=torch.int64)
    buffer.total_recv_tokens = torch.tensor([handle.required_rows[buffer.ep.rank]], dtype=torch.int64)
    return buffer.fill(routed.rows), buffer.tokens_per_expert, buffer.fill(routed.weights)


def nccl_ep_combine(
    buffer: EpBuffer, expert_out: Tensor, num_local_tokens: int | None = None, grad_out: None = None
) -> Tensor:
    """Sums the rows of each token, by ascending expert: [tokens, hidden]. Differentiable."""
    if grad_out is not None:
        raise ValueError("buffers of the caller's belong to zero_copy, which is not open to Megatron yet")
    handle = buffer.routed.handle
    if num_local_tokens not in (None, handle.tokens):
        raise ValueError(f"{handle.tokens} tokens were dispatched, not {num_local_tokens}")
    return autograd.combine(buffer.ep, expert_out[: handle.rows], buffer.routed)
