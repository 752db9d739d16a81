"""The transport of Megatron's ``moe_ep_chunk_overlap``, which newer ones than 0.16 have.

A layer of theirs cuts its tokens into chunks and computes one while others move. Its runtime takes
four collectives of a chunk from ``make_ep_transport``, where :func:`install` puts ours::

    from megatron.core.transformer.moe.moe_ep_chunk_overlap import ep_chunk_overlap
    sidelane.megatron.transport.install(ep_chunk_overlap)

A dispatch sends exactly the rows that the routing has. Zeros fill them up to the number that
Megatron compiles its products for, and are not sent back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import Error
from .layers import layer
from .placed import Placed

__all__ = ["ChunkHandle", "ChunkSizes", "Transport", "install"]

_ALIGNMENT = 256


class ChunkSizes(Protocol):
    """Sizes of a layer, as Megatron's runtime gives them."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def router_topk(self) -> int: ...
    @property
    def largest_token_chunk_size(self) -> int: ...
    @property
    def max_num_expanded_tokens_per_chunk(self) -> int: ...


def install(ep_chunk_overlap: ModuleType) -> None:
    """Puts :class:`Transport` in place of the transports of a module, which must have them."""
    missing = [name for name in ("make_ep_transport", "DispatchedChunk") if not hasattr(ep_chunk_overlap, name)]
    if missing:
        raise Error(f"{ep_chunk_overlap.__name__} has no transports of chunks: no {', '.join(missing)}", "NoBackend")
    chunk = ep_chunk_overlap.DispatchedChunk

    def make_ep_transport(config: ChunkSizes, group: ProcessGroup, *, transport_type: Any = None) -> Transport:
        del transport_type  # All layers take this one.
        return Transport(config, group, chunk)

    setattr(ep_chunk_overlap, "make_ep_transport", make_ep_transport)


@dataclass(frozen=True)
class ChunkHandle:
    """The placement of one chunk. Those of all chunks of all layers may be alive."""

    placed: Placed
    psum_num_recv_tokens_per_expert: Tensor
    """Rows of the local experts up to and with each, pads counted: int64 [experts]."""


class Transport:
    """The collectives of one layer. ``chunk`` makes what a dispatch returns: rows, their weights, a
    :class:`ChunkHandle`.

    Calls go on the stream that they are given, and nothing waits for it: a dispatch waits until all
    ranks have said how many rows they have. Ranks make their calls in one order, as Megatron's
    runtime does.
    """

    def __init__(self, config: ChunkSizes, group: ProcessGroup, chunk: Callable[..., Any]) -> None:
        self.config, self._group, self._chunk = config, group, chunk

    def dispatch_forward(
        self, hidden_states: Tensor, topk_indices: Tensor, topk_weights: Tensor, stream: torch.cuda.Stream | None
    ) -> Any:
        """Sends the tokens of a chunk to their experts: rows by local expert, as many at every
        rank.
        """
        config = self.config
        with torch.cuda.stream(stream):
            ep = layer(
                self._group,
                hidden_states,
                experts=config.num_experts,
                top_k=config.router_topk,
                hidden=config.hidden_size,
                max_tokens=config.largest_token_chunk_size,
                dtype=hidden_states.dtype,
                align=_ALIGNMENT,
            )
            rows, weights, placed = Placed.send(
                ep,
                hidden_states.detach().contiguous(),
                topk_indices.contiguous(),
                topk_weights.detach().float().contiguous(),
                experts=config.num_experts,
                budget=config.max_num_expanded_tokens_per_chunk,
            )
            ends = torch.tensor(placed.handle.padded_tokens_per_expert, dtype=torch.int64).cumsum(0)
            handle = ChunkHandle(placed, ends.to(rows.device, non_blocking=True))
            return self._chunk(recv_x=rows, received_topk_weights=weights, dispatch_handle=handle)

    def combine_forward(
        self, permuted_hidden_states: Tensor, handle: ChunkHandle, stream: torch.cuda.Stream | None
    ) -> Tensor:
        """Sums the rows of each token of a chunk, by ascending expert."""
        placed = handle.placed
        with torch.cuda.stream(stream):
            tokens: Tensor = placed.ep.combine(placed.landed(permuted_hidden_states), placed.handle)
            return tokens

    def dispatch_backward(
        self, grad_output: Tensor, saved_handle: ChunkHandle, stream: torch.cuda.Stream | None
    ) -> Any:
        """The gradient of each row from those of a chunk's tokens."""
        with torch.cuda.stream(stream):
            rows = saved_handle.placed.spread(grad_output)
            return self._chunk(recv_x=rows, received_topk_weights=None, dispatch_handle=saved_handle)

    def combine_backward(
        self,
        grad_permuted: Tensor,
        grad_probs_permuted: Tensor,
        handle: ChunkHandle,
        stream: torch.cuda.Stream | None,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of a chunk's tokens, and of its routing weights: [tokens, top_k]."""
        placed = handle.placed
        with torch.cuda.stream(stream):
            weights = placed.landed(grad_probs_permuted.float())
            tokens, returned = placed.ep.dispatch_backward(placed.landed(grad_permuted), placed.handle, weights)
            assert returned is not None, "weights went in"
            return tokens, returned

    @staticmethod
    def record_handle_stream(handle: ChunkHandle, stream: torch.cuda.Stream) -> None:
        """Keeps a handle's tensors until this stream is done with them. The library orders its own
        memory.
        """
        handle.psum_num_recv_tokens_per_expert.record_stream(stream)

    def destroy_buffers(self) -> None:
        """The memory of a layer goes with its process group: see :func:`release`."""
