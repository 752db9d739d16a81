"""Routers that torch differentiates.

::

    logits = x @ w                                   # [tokens, experts]
    routed = route(gate, logits, training=True)      # choices have no gradient, weights have
    aux = balance_loss(balance, logits, routed.choices) + z_loss(1e-3, logits)

What the library computes with a loss is its gradient, too: a backward pass multiplies it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _native
from ._native import Decision, Gate
from .autograd import applied

__all__ = ["Routing", "balance_loss", "importance_loss", "route", "z_loss"]


class Routing(NamedTuple):
    """What a gate decided, with weights that have a gradient."""

    experts: Tensor
    """What is left of the choices, [tokens, top_k], -1 where one was dropped."""

    weights: Tensor
    """Their weights."""

    choices: Tensor
    """What was chosen before any was dropped: of this balance losses are taken."""

    decision: Decision


def route(gate: Gate, logits: Tensor, **call: Any) -> Routing:
    """:meth:`Gate.route`, whose weights lead back to ``logits``, [tokens, experts] in float32."""
    weights, decision = applied(_Route, gate, logits, call)
    return Routing(decision.experts, weights, decision.choices, decision)


def balance_loss(
    balance: dict[str, Any],
    logits: Tensor,
    choices: Tensor,
    *,
    token_mask: list[bool] | None = None,
    totals: tuple[Tensor, float] | None = None,
) -> Tensor:
    """:func:`sidelane.balance_loss`, a scalar."""

    def loss() -> tuple[float, Tensor]:
        return _native.balance_loss(
            balance,
            logits.detach().contiguous(),
            top_k=choices.shape[-1],
            choices=choices,
            token_mask=token_mask,
            totals=totals,
        )

    return _taken(logits, loss)


def z_loss(coefficient: float, logits: Tensor, *, token_mask: list[bool] | None = None) -> Tensor:
    """:func:`sidelane.z_loss`, a scalar."""
    return _taken(logits, lambda: _native.z_loss(coefficient, logits.detach().contiguous(), token_mask=token_mask))


def importance_loss(
    coefficient: float, logits: Tensor, choices: Tensor, *, noise: float, noisy: Tensor | None = None
) -> Tensor:
    """:func:`sidelane.importance_loss`, a scalar; its gradient goes to the clean ``logits``."""

    def loss() -> tuple[float, Tensor]:
        return _native.importance_loss(coefficient, logits.detach().contiguous(), choices, noise=noise, noisy=noisy)

    return _taken(logits, loss)


def _taken(logits: Tensor, loss: Any) -> Tensor:
    taken: Tensor = applied(_Loss, logits, loss)
    return taken


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Any) -> Tensor:
        value, ctx.gradient = loss()
        return logits.new_tensor(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Any:
        return ctx.gradient * outer, None


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Gate, logits: Tensor, call: dict[str, Any]) -> Any:
        logits = logits.detach().contiguous()
        decision = gate.route(logits, **call)
        ctx.gate, ctx.decision, ctx.weighed, ctx.factors = gate, decision, logits, None
        noise = gate.config["noise"]
        # Where noise weighs, too, the way back leads through the noisy logits, and through what
        # they were multiplied with.
        if isinstance(noise, dict):
            drawn = {name: call[name] for name in ("noise_std", "training", "seed", "step", "rank") if name in call}
            ctx.weighed = gate.noisy_logits(logits, **drawn)
            if "jitter" in noise:
                ctx.factors = gate.noisy_logits(torch.ones_like(logits), **drawn)
        return decision.weights, decision

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor, _decision: Any) -> Any:
        made = ctx.decision
        gradient = ctx.gate.weights_backward(ctx.weighed, made.choices, made.experts, weights.contiguous())
        return None, gradient if ctx.factors is None else gradient * ctx.factors, None
