"""DeepEP's ``Buffer``, as far as Megatron uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .._native import ExpertParallel, Handle
from .fp8 import pack, unpack
from .layers import layer


class EventHandle:
    """A point in a stream; there is none on the host."""


class EventOverlap:
    """What a call ends with: it is over when it returns."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        """There is nothing to wait for."""


class Config:
    """Sizes of DeepEP's buffers. Ours are in the world's heap, as large as rows are (``SIDELANE_HEAP``)."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0


@dataclass(frozen=True)
class _Placed:
    ep: ExpertParallel
    handle: Handle

    def rows_again(self, values: Tensor, scales: Tensor | None) -> Any:
        """Other tokens along the same layout. Of a layer in fp8, plain ones are gradients."""
        if scales is not None:
            return unpack(self.ep, self.ep.dispatch_cached(pack(self.ep, values, scales), self.handle), values.dtype)
        return self.ep.combine_backward(values.detach().contiguous(), self.handle)[0]


class Buffer:
    """DeepEP's ``Buffer``, as far as Megatron uses it: rank-major rows, one per token and rank."""

    num_sms = 0

    def __init__(self, group: ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **_: Any) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(num_sms: int) -> None:
        """Takes note of a number of multiprocessors, none of which is used."""
        Buffer.num_sms = num_sms

    @staticmethod
    def get_dispatch_config(_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(_ranks: int) -> Config:
        return Config()

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, **_: Any
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """Tokens for each rank, rows for each expert, and which rank gets which token."""
        ranks = self.group.size()
        chosen = topk_idx >= 0
        per_expert = torch.bincount(topk_idx[chosen], minlength=num_experts).int()
        # One column more, which the dropped choices fall into.
        reached = torch.zeros(topk_idx.shape[0], ranks + 1, dtype=torch.bool)
        reached.scatter_(1, torch.where(chosen, topk_idx * ranks // num_experts, ranks), True)
        reached = reached[:, :ranks].contiguous()
        return reached.sum(dim=0).int(), None, per_expert, reached, EventOverlap()

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: _Placed | None = None,
        *,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        **_: Any,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, _Placed | None, EventOverlap]:
        """Sends tokens, or a pair of e4m3 values and scales; along a handle, by the layout of its dispatch.

        Rows lie in memory of torch, not in the pool: Megatron frees their storage itself when it overlaps microbatches.
        """
        values, scales = x if isinstance(x, tuple) else (x, None)
        if handle is not None:
            return handle.rows_again(values, scales), None, None, None, None, EventOverlap()
        if topk_idx is None or topk_weights is None or num_tokens_per_expert is None:
            raise ValueError("dispatch without a handle needs topk_idx, topk_weights and num_tokens_per_expert")
        ep = layer(
            self.group,
            experts=num_tokens_per_expert.numel(),
            top_k=topk_idx.shape[1],
            hidden=values.shape[1],
            dtype=values.dtype if scales is None else torch.bfloat16,
            layout="rank-major",
            fp8=scales is not None,
        )
        sent = values.detach().contiguous() if scales is None else pack(ep, values, scales)
        rows, placed = ep.dispatch(sent, topk_idx.contiguous(), topk_weights.detach().contiguous())
        received = rows.clone() if scales is None else unpack(ep, rows, values.dtype)
        experts, weights = placed.row_experts.long(), placed.row_weights
        return received, experts, weights, placed.tokens_per_expert, _Placed(ep, placed), EventOverlap()

    def combine(
        self, x: Tensor, handle: _Placed, topk_weights: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums the rows of each token, by ascending rank; weights, as gradients, go home."""
        x = x.detach().contiguous()
        if topk_weights is None:
            return handle.ep.combine(x, handle.handle), None, EventOverlap()
        weights = topk_weights.detach().contiguous().view(-1)
        tokens, home = handle.ep.dispatch_backward(x, handle.handle, weights)
        return tokens, home, EventOverlap()
