"""DeepEP's newer names, ``EPBuffer`` and ``EPHandle``, as far as dispatchers use them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from .._native import ExpertParallel, Handle
from .buffer import EventHandle, EventOverlap
from .layers import layer


class EPHandle(NamedTuple):
    """The placement of a dispatch. Many may be alive."""

    ep: ExpertParallel
    handle: Handle

    @property
    def num_recv_tokens_per_expert_list(self) -> list[int]:
        """Rows of each local expert, pads counted."""
        return list(self.handle.padded_tokens_per_expert)


class Deferred(EventOverlap):
    """What a call with ``defer_epilogue`` ends with: it has the tensors."""

    def __init__(self, tensors: tuple[Tensor | None, ...]) -> None:
        super().__init__(EventHandle())
        self.tensors = tensors

    def wait(self) -> tuple[Tensor | None, ...]:
        """The tensors, for what torch's current stream is given next."""
        self.current_stream_wait()
        return self.tensors


class EPBuffer:
    """DeepEP's ``EPBuffer``: rows expert-major with ``do_expand``, else one for each token and
    rank.

    Calls go on torch's current stream behind ``previous_event``, so an event that they return is
    one of that stream. Numbers of multiprocessors and queues have no effect.
    """

    def __init__(
        self,
        group: ProcessGroup,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        **_: Any,
    ) -> None:
        self.group, self.max_tokens = group, num_max_tokens_per_rank

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int = 0,
        expert_alignment: int | None = None,
        do_expand: bool = False,
        handle: EPHandle | None = None,
        previous_event: EventOverlap | None = None,
        defer_epilogue: bool = False,
        **_: Any,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Rows, their local experts (none if they are expanded), their weights, a handle, an event.

        Along a handle, rows alone, which are gradients of a combine. With ``defer_epilogue`` the
        event's ``wait`` has the tensors.
        """
        if previous_event is not None:
            previous_event.current_stream_wait()
        if handle is not None:
            again: Tensor = handle.ep.combine_backward(x.detach().contiguous(), handle.handle)[0]
            return _ended((again, None, None), handle, defer_epilogue)
        if topk_idx is None or topk_weights is None or num_experts is None:
            raise ValueError("dispatch without a handle needs topk_idx, topk_weights and num_experts")
        ep = layer(
            self.group,
            x,
            experts=num_experts,
            top_k=topk_idx.shape[1],
            max_tokens=max(self.max_tokens, num_max_tokens_per_rank),
            hidden=x.shape[1],
            dtype=x.dtype,
            layout="expert-major" if do_expand else "rank-major",
            align=(expert_alignment or 1) if do_expand else 1,
        )
        weights = topk_weights.detach().float().contiguous()
        rows, placed = ep.dispatch(x.detach().contiguous(), topk_idx.contiguous(), weights)
        experts = None if do_expand else placed.row_experts.long()
        return _ended((rows, experts, placed.row_weights), EPHandle(ep, placed), defer_epilogue)

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        *,
        previous_event: EventOverlap | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums the rows of each token; gradients of weights return: [tokens, top_k]."""
        if previous_event is not None:
            previous_event.current_stream_wait()
        x = x.detach().contiguous()
        if topk_weights is None:
            return handle.ep.combine(x, handle.handle), None, EventOverlap(EventHandle())
        weights = topk_weights.detach().float().contiguous().view(-1)
        tokens, returned = handle.ep.dispatch_backward(x, handle.handle, weights)
        return tokens, returned, EventOverlap(EventHandle())


def _ended(
    tensors: tuple[Tensor, Tensor | None, Tensor | None], handle: EPHandle, deferred: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
    if deferred:
        return None, None, None, handle, Deferred(tensors)
    return *tensors, handle, EventOverlap(EventHandle())
