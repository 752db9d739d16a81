"""A layer whose results are whole numbers, and what torch makes of all tokens at once.

Tokens have a 1 in their last place, and w1 has 128 there and zeros elsewhere. So the gate of SwiGLU
is 128 for all of them, where silu(g) is g to the bit, and its slope is 1. One expert for each token
has a routing weight of 1, the softmax of one, whose gradient is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from routing import case

import sidelane

EXPERTS, HIDDEN, FFN = 6, 8, 4
SHARED = EXPERTS


@dataclass(frozen=True)
class Whole:
    """Weights of all experts, the shared one behind them, and tensors of all ranks."""

    router: torch.Tensor
    experts: torch.Tensor
    x: list[torch.Tensor]
    residual: list[torch.Tensor]
    of_out: list[torch.Tensor]

    def held(self, rank: int) -> list[int]:
        return list(case(len(self.x), experts=EXPERTS).held(rank))


def whole(ranks: int) -> Whole:
    """The last rank has no token, if there are more than two."""
    draw = torch.Generator().manual_seed(70 + ranks)
    experts = torch.randint(-2, 3, (EXPERTS + 1, 3, HIDDEN * FFN), generator=draw).float()
    experts[:, 0] = 0
    experts[:, 0, -FFN:] = 128
    x, residual, of_out = [], [], []
    for rank in range(ranks):
        count = 0 if rank == ranks - 1 and ranks > 2 else 7 + rank
        given = [torch.randint(-3, 4, (count, HIDDEN), generator=draw).float() for _ in range(3)]
        given[0][:, -1] = 1
        for tensors, tensor in zip((x, residual, of_out), given):
            tensors.append(tensor)
    router = torch.randn(HIDDEN, EXPERTS, generator=draw)
    return Whole(router, experts.reshape(EXPERTS + 1, -1), x, residual, of_out)


def built(world: sidelane.World, of: Whole, **settings) -> sidelane.MoeLayer:
    me = world.rank
    weights = {"router": of.router, "experts": of.experts[of.held(me)], "shared": of.experts[SHARED:]}
    settings = weights | {"dtype": "float32", "max_tokens": 16} | settings
    return sidelane.MoeLayer(world, sidelane.preset("mixtral", EXPERTS, 1), hidden=HIDDEN, **settings)


def swiglu(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    w1, w3, w2 = weights.view(3, -1)
    gate, up = x @ w1.view(HIDDEN, FFN), x @ w3.view(HIDDEN, FFN)
    return (torch.nn.functional.silu(gate) * up) @ w2.view(FFN, HIDDEN)


def by_torch(of: Whole, me: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output of a rank, and its gradients."""
    experts = of.experts[:SHARED].double().requires_grad_()
    shared = [of.experts[SHARED].double().requires_grad_() for _ in of.x]
    tokens = [x.double().requires_grad_() for x in of.x]
    outs = []
    for x, residual, of_out, beside in zip(tokens, of.residual, of.of_out, shared):
        chosen = (x.detach() @ of.router.double()).argmax(1).tolist()
        rows = [swiglu(x[t : t + 1], experts[expert]) for t, expert in enumerate(chosen)]
        out = residual.double() + torch.cat(rows or [x[:0]]) + swiglu(x, beside)
        (out * of_out.double()).sum().backward()
        outs.append(out.detach())
    gradients = {"x": tokens[me].grad, "experts": experts.grad[of.held(me)], "shared": shared[me].grad.unsqueeze(0)}
    gradients["router"] = torch.zeros(HIDDEN, EXPERTS).double()
    return outs[me].float(), {name: gradient.float() for name, gradient in gradients.items()}
