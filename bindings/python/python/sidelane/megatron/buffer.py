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
    """A point in torch's current stream; there is none on the host."""

    def __init__(self) -> None:
        self.event = torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None

    def current_stream_wait(self) -> None:
        """Torch's current stream goes on behind that point."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """What a call ends with: on the host it is over, on a GPU the stream that it went on is at this
    point.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None) -> None:
        self.event = event
        # Lives as long as this: what the stream still uses is not another's.
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Torch's current stream goes on behind the call."""
        if self.event is not None:
            self.event.current_stream_wait()


def _over() -> EventOverlap:
    return EventOverlap(EventHandle())


def _counted(experts: Tensor, held: int) -> list[int]:
    """Rows of each local expert, which only the rows of a GPU say where they lie by rank: the host
    waits for them.
    """
    named = torch.where(experts < 0, held, experts).flatten()
    counts = torch.zeros(held + 1, dtype=torch.int64, device=experts.device)
    counted: list[int] = counts.scatter_add_(0, named, torch.ones_like(named)).cpu().tolist()
    return counted[:held]


def _behind(previous_event: EventOverlap | None) -> None:
    if previous_event is not None:
        previous_event.current_stream_wait()


class Config:
    """Sizes of DeepEP's buffers. Ours are in the world's heap, as large as rows are
    (``SIDELANE_HEAP``).
    """

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
        """Takes a number of multiprocessors, none of which is used."""
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
        # One place more, which the dropped choices fall into: the host waits for no number of
        # theirs.
        named = torch.where(chosen, topk_idx, num_experts).flatten()
        per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=topk_idx.device)
        per_expert.scatter_add_(0, named, torch.ones_like(named, dtype=torch.int32))
        reached = torch.zeros(topk_idx.shape[0], ranks + 1, dtype=torch.bool, device=topk_idx.device)
        reached.scatter_(1, torch.where(chosen, topk_idx * ranks // num_experts, ranks), True)
        reached = reached[:, :ranks].contiguous()
        return reached.sum(dim=0).int(), None, per_expert[:num_experts], reached, _over()

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: _Placed | None = None,
        *,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        previous_event: EventOverlap | None = None,
        **_: Any,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, _Placed | None, EventOverlap]:
        """Sends tokens, or a pair of e4m3 values and scales; along a handle, by the layout of its
        dispatch.

        Rows lie in memory of torch, not in the pool: Megatron frees their storage itself when it
        overlaps microbatches.
        """
        _behind(previous_event)
        values, scales = x if isinstance(x, tuple) else (x, None)
        if handle is not None:
            return handle.rows_again(values, scales), None, None, None, None, _over()
        if topk_idx is None or topk_weights is None or num_tokens_per_expert is None:
            raise ValueError("dispatch without a handle needs topk_idx, topk_weights and num_tokens_per_expert")
        ep = layer(
            self.group,
            values,
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
        counts = placed.tokens_per_expert or _counted(experts, len(ep.expert_map[ep.rank]))
        return received, experts, weights, counts, _Placed(ep, placed), _over()

    def combine(
        self,
        x: Tensor,
        handle: _Placed,
        topk_weights: Tensor | None = None,
        previous_event: EventOverlap | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums the rows of each token, by ascending rank; gradients of weights return, too."""
        _behind(previous_event)
        x = x.detach().contiguous()
        if topk_weights is None:
            return handle.ep.combine(x, handle.handle), None, _over()
        weights = topk_weights.detach().contiguous().view(-1)
        tokens, returned = handle.ep.dispatch_backward(x, handle.handle, weights)
        return tokens, returned, _over()
