"""Dispatch and combine for compiled graphs, as operators of torch's: a graph has them as they are,
and nothing of them is traced.

::

    @torch.compile(fullgraph=True)
    def layer(x, experts, weights):
        routed = dispatch(ep, x, experts, weights)
        return combine(ep, routed.rows * routed.weights.unsqueeze(1), routed)

A graph knows an ``ExpertParallel`` by a number, and a dispatch by its *ticket*: a number on the
host, whose memory keeps the handle. How many rows come is a size that it does not know. Bits and
gradients are those of :mod:`sidelane.autograd`, which torch's compiler leaves alone: it breaks
graphs there.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import custom_op, get_ctx

from ._native import ExpertParallel, Handle

__all__ = ["Routed", "combine", "dispatch"]


class Routed(NamedTuple):
    """What came of a dispatch."""

    rows: Tensor
    """Rows of this rank's experts, [rows, hidden]."""

    weights: Tensor
    """Routing weight of each row: [rows], rank-major [rows, top_k]. Gradients of it return to
    those of dispatch.
    """

    tokens_per_expert: Tensor
    """Rows of each expert of this rank, int64, on the host."""

    ticket: Tensor
    link: Tensor
    routing_weights: Tensor


def dispatch(ep: ExpertParallel, x: Tensor, experts: Tensor, weights: Tensor) -> Routed:
    """Sends every token, [tokens, hidden], to the ranks of its experts. Collective. See
    :meth:`ExpertParallel.dispatch`.
    """
    weights = weights.float()
    rows, row_weights, counts, ticket, link = _dispatch(_number(ep), x, experts, weights)
    return Routed(rows, row_weights, counts, ticket, link, weights)


def combine(ep: ExpertParallel, y: Tensor, routed: Routed) -> Tensor:
    """Brings expert outputs [rows, hidden] back to their tokens and sums them. Collective."""
    tokens: Tensor = _combine(_number(ep), y, routed.ticket, routed.link, routed.routing_weights)
    return tokens


_layers: WeakValueDictionary[int, ExpertParallel] = WeakValueDictionary()


def _number(ep: ExpertParallel) -> int:
    """By which a graph knows a layer: it is compiled for this one, and anew for another."""
    _note(ep)
    return id(ep)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _note(ep: ExpertParallel) -> None:
    """What a compiler calls while it looks, and no graph has."""
    if ep.record is not None:
        raise ValueError("dispatch in fp8 has no gradient: use ExpertParallel.dispatch")
    _layers[id(ep)] = ep


class _Ticket(bytearray):
    """Memory of a number that keeps what has it."""

    handle: Handle


_tickets: WeakValueDictionary[int, _Ticket] = WeakValueDictionary()
_numbers = itertools.count(1)


def _issue(handle: Handle) -> Tensor:
    number = next(_numbers)
    ticket = _Ticket(number.to_bytes(8, sys.byteorder))
    ticket.handle = handle
    _tickets[number] = ticket
    return torch.frombuffer(ticket, dtype=torch.int64)


def _handle(ticket: Tensor) -> Handle:
    return _tickets[int(ticket)].handle


@custom_op("sidelane::dispatch", mutates_args=())
def _dispatch(layer: int, x: Tensor, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, handle = _layers[layer].dispatch(x.detach().contiguous(), experts.detach().contiguous(), weights.detach().contiguous())
    counts = torch.tensor(handle.tokens_per_expert, dtype=torch.int64)
    return rows, handle.row_weights, counts, _issue(handle), weights.new_empty(0)


@_dispatch.register_fake
def _(layer: int, x: Tensor, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    ep, rows = _layers[layer], get_ctx().new_dynamic_size()
    columns = weights.shape[1:] if ep.layout == "rank-major" else ()
    return (
        x.new_empty(rows, x.shape[1]),
        weights.new_empty(rows, *columns),
        torch.empty(len(ep.expert_map[ep.rank]), dtype=torch.int64),
        torch.empty(1, dtype=torch.int64),
        weights.new_empty(0),
    )


@custom_op("sidelane::dispatch_backward", mutates_args=())
def _dispatch_backward(
    layer: int, rows: Tensor, row_weights: Tensor, ticket: Tensor, tokens: int, choices: int
) -> tuple[Tensor, Tensor]:
    ep, handle = _layers[layer], _handle(ticket)
    # Combine that weighs returns the weights' gradients by itself.
    given = None if ep.weighted else row_weights.detach().contiguous()
    of_tokens, of_weights = ep.dispatch_backward(rows.detach().contiguous(), handle, given)
    return of_tokens, rows.new_zeros(tokens, choices, dtype=torch.float32) if of_weights is None else of_weights


@_dispatch_backward.register_fake
def _(layer: int, rows: Tensor, row_weights: Tensor, ticket: Tensor, tokens: int, choices: int) -> tuple[Tensor, Tensor]:
    return rows.new_empty(tokens, rows.shape[1]), row_weights.new_empty(tokens, choices)


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.layer, _, _, weights = inputs
    ctx.tokens, ctx.choices = weights.shape
    ctx.save_for_backward(output[3])


def _back_from_dispatch(ctx: Any, rows: Tensor, row_weights: Tensor, *_: Any) -> Any:
    tokens, weights = _dispatch_backward(ctx.layer, rows, row_weights, *ctx.saved_tensors, ctx.tokens, ctx.choices)
    return None, tokens, None, weights


_dispatch.register_autograd(_back_from_dispatch, setup_context=_keep_dispatch)


@custom_op("sidelane::combine", mutates_args=())
def _combine(layer: int, y: Tensor, ticket: Tensor, link: Tensor, weights: Tensor) -> Tensor:
    return _layers[layer].combine(y.detach().contiguous(), _handle(ticket))


@_combine.register_fake
def _(layer: int, y: Tensor, ticket: Tensor, link: Tensor, weights: Tensor) -> Tensor:
    return y.new_empty(weights.shape[0], y.shape[1])


@custom_op("sidelane::combine_backward", mutates_args=())
def _combine_backward(layer: int, tokens: Tensor, ticket: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    rows, of_weights = _layers[layer].combine_backward(tokens.detach().contiguous(), _handle(ticket))
    return rows, torch.zeros_like(weights) if of_weights is None else of_weights


@_combine_backward.register_fake
def _(layer: int, tokens: Tensor, ticket: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return tokens.new_empty(get_ctx().new_dynamic_size(), tokens.shape[1]), torch.empty_like(weights)


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.layer, _, ticket, _, weights = inputs
    ctx.save_for_backward(ticket, weights)


def _back_from_combine(ctx: Any, tokens: Tensor) -> Any:
    rows, weights = _combine_backward(ctx.layer, tokens, *ctx.saved_tensors)
    return None, rows, None, rows.new_empty(0, dtype=torch.float32), weights


_combine.register_autograd(_back_from_combine, setup_context=_keep_combine)
