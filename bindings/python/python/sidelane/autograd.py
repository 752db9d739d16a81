"""Dispatch and combine that torch differentiates.

::

    routed = dispatch(ep, x, experts, weights)      # x [.., hidden], experts and weights [tokens, top_k]
    out = routed.output()                           # peers read it in place
    out.addmm_(routed.rows, w, beta=0)              # experts write into it
    tokens = combine(ep, out, routed)               # [.., hidden]

Gradients of tokens and weights are those of the library: sums in its order, so the same bits
everywhere. A backward pass is made of collective calls, in the reverse order of the forward pass;
as graphs are alike on all ranks, so are the orders. A rank whose experts got no row takes part like
any other: its combine hangs on its dispatch by a *ticket*, an empty tensor that goes from one to
the other, so that no gradient is left out because nothing was computed in between.

Tensors lie where the instance has its rows: on the host, or on a GPU with exact sizes, where all
calls of both passes are enqueued, and torch's streams wait for them as they do for each other's
tensors. ``torch.compile`` breaks graphs at these functions; :mod:`sidelane.operators` has the same
for a graph that is whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ._native import ExpertParallel, Handle

__all__ = ["Routed", "combine", "dispatch"]


@dataclass(frozen=True)
class Routed:
    """What came of a dispatch."""

    rows: Tensor
    """Rows of this rank's experts, [rows, hidden]."""

    weights: Tensor
    """Routing weight of each row: [rows], rank-major [rows, top_k]. Gradients of it return to
    those of dispatch.
    """

    handle: Handle
    """The placement; several may be alive."""

    ticket: Tensor
    routing_weights: Tensor
    shape: torch.Size

    @property
    def tokens_per_expert(self) -> list[int]:
        """Rows of each expert of this rank."""
        return self.handle.tokens_per_expert

    def output(self) -> Tensor:
        """A buffer [rows, hidden] that combine takes without a copy; its contents are undefined.

        Write into it by operations in place that do not read it (``addmm_`` with ``beta=0``,
        ``copy_``), and do nothing with it after combine: the memory is others' then, and a backward
        pass that had saved it raises.
        """
        output: Tensor = self.handle.output()
        return output

    def detach(self) -> Routed:
        """The same for a combine whose backward pass is started apart from that of the dispatch,
        and does not go on to it.
        """
        return replace(self, ticket=self.ticket.detach(), routing_weights=self.routing_weights.detach())


def dispatch(ep: ExpertParallel, x: Tensor, experts: Tensor, weights: Tensor) -> Routed:
    """Sends every token to the ranks of its experts. Collective. See
    :meth:`ExpertParallel.dispatch`.
    """
    if ep.record is not None:
        raise ValueError("dispatch in fp8 has no gradient: use ExpertParallel.dispatch")
    weights = weights.float()
    rows, row_weights, ticket, handle = applied(_Dispatch, ep, x.reshape(-1, x.shape[-1]), experts, weights)
    return Routed(rows, row_weights, handle, ticket, weights, x.shape)


def combine(ep: ExpertParallel, y: Tensor, routed: Routed) -> Tensor:
    """Brings expert outputs [rows, hidden] back to their tokens and sums them. Collective."""
    tokens: Tensor = applied(_Combine, ep, routed.handle, y, routed.ticket, routed.routing_weights)
    return tokens.view(*routed.shape[:-1], tokens.shape[-1])


def applied(function: type[Function], *given: Any) -> Any:
    """A function of torch's autograd, on these: torch says nothing of what that takes and gives."""
    return function.apply(*given)  # type: ignore[no-untyped-call]


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, ep: ExpertParallel, x: Tensor, experts: Tensor, weights: Tensor) -> Any:
        rows, handle = ep.dispatch(x.detach().contiguous(), experts.contiguous(), weights.detach().contiguous())
        ctx.ep, ctx.handle = ep, handle
        return rows, handle.row_weights, weights.new_empty(0), handle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, row_weights: Tensor, _ticket: Any, _handle: Any) -> Any:
        # Combine that weighs returns the weights' gradients by itself.
        wanted = ctx.needs_input_grad[3] and not ctx.ep.weighted
        tokens, weights = ctx.ep.dispatch_backward(
            rows.detach().contiguous(), ctx.handle, row_weights.detach().contiguous() if wanted else None
        )
        return None, tokens, None, weights


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, ep: ExpertParallel, handle: Handle, y: Tensor, _ticket: Tensor, _weights: Tensor) -> Tensor:
        copied = handle.copied_bytes
        tokens = ep.combine(y.detach().contiguous(), handle)
        # Without rows nothing is copied, whatever memory `y` is in.
        if y.shape[0] and handle.copied_bytes == copied:
            torch.autograd.graph.increment_version(y)
        ctx.ep, ctx.handle = ep, handle
        return tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, tokens: Tensor) -> Any:
        rows, weights = ctx.ep.combine_backward(tokens.detach().contiguous(), ctx.handle)
        return None, None, rows, rows.new_empty(0, dtype=torch.float32), weights
