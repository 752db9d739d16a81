"""Cases for Megatron's dispatchers: routed tokens, experts that differ, and how far results may lie
apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

HIDDEN = 8
EXPERTS = 16


@dataclass(frozen=True, order=True)
class Case:
    """One configuration."""

    tensor_parallel: int
    top_k: int
    capacity: str
    """``none``, ``drop``, or ``pad``: a factor of 1, rows beyond it dropped; missing ones filled
    up, too.
    """
    exact: bool
    """Small integers and linear experts, whose sums are exact in any order; else random numbers and
    tanh.
    """

    def config(self, backend: str = "hybridep") -> SimpleNamespace:
        """What Megatron's dispatchers read of a configuration."""
        return SimpleNamespace(
            add_bias_linear=False,
            batch_invariant_mode=False,
            cuda_graph_impl="none",
            cuda_graph_scope=[],
            fp4=None,
            fp8=None,
            hidden_size=HIDDEN,
            moe_deepep_num_sms=20,
            moe_hybridep_num_sms=16,
            moe_expert_capacity_factor=None if self.capacity == "none" else 1.0,
            moe_flex_dispatcher_backend=backend,
            moe_pad_expert_input_to_capacity=self.capacity == "pad",
            moe_permute_fusion=False,
            moe_router_dtype="fp32",
            moe_router_padding_for_quantization=False,
            moe_router_topk=self.top_k,
            moe_shared_expert_overlap=False,
            moe_token_dispatcher_type="flex",
            num_moe_experts=EXPERTS,
        )

    def scales(self) -> Tensor:
        """The factor of each expert at each of its tensor-parallel ranks, [ranks, experts]."""
        if self.exact:
            return torch.stack([(torch.arange(EXPERTS) % 3 + 1.0) * (1 - 2 * (tp % 2)) for tp in range(self.tensor_parallel)])
        return torch.stack([torch.linspace(0.5, 2.0, EXPERTS) + 0.125 * tp for tp in range(self.tensor_parallel)])

    def expert(self, rows: Tensor, factors: Tensor, weights: Tensor) -> Tensor:
        """What an expert makes of its rows."""
        y = rows * factors.unsqueeze(1)
        return (y if self.exact else torch.tanh(y)) * weights.unsqueeze(1)


def cases() -> list[Case]:
    """All; a capacity that is padded for one tensor-parallel rank only, as Megatron's hybridep
    counts it wrongly for more.
    """
    return [
        Case(tp, top_k, capacity, exact)
        for tp in (1, 2)
        for top_k in (1, 2, 8)
        for capacity in (("none", "drop", "pad") if tp == 1 else ("none", "drop"))
        for exact in (True, False)
    ]


class Inputs(NamedTuple):
    """A rank's part."""

    x: Tensor
    chosen: Tensor
    probs: Tensor
    gradient: Tensor


def inputs(case: Case, rank: int, batch: int = 0, hidden: int = HIDDEN) -> Inputs:
    """What Megatron's own router makes of random logits; as many tokens at all ranks only where
    they must.
    """
    from megatron.core.transformer.moe import moe_utils

    draw = torch.Generator().manual_seed(10000 * batch + 100 * case.top_k + rank)
    tokens = 12 if case.capacity == "pad" else 2 * (5 + rank)
    logits = torch.randn(tokens, EXPERTS, generator=draw)
    probs, chosen = moe_utils.topk_routing_with_score_function(logits, case.top_k)
    if case.capacity != "none":
        pad = case.capacity == "pad"
        probs, chosen = moe_utils.apply_router_token_dropping(probs, chosen, case.top_k, 1.0, "probs", pad)
    shape = (tokens // 2, 2, hidden)
    if not case.exact:
        x, gradient = torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)
        return Inputs(x, chosen, probs.detach(), gradient)
    x, gradient = (torch.randint(-4, 5, shape, generator=draw).float() for _ in range(2))
    return Inputs(x, chosen, (probs > 0) * torch.randint(1, 4, probs.shape, generator=draw).float(), gradient)


@cache
def groups(tensor_parallel: int) -> SimpleNamespace:
    """This rank's process groups; tensor-parallel ranks are neighbors."""
    rank, tp = dist.get_rank(), tensor_parallel
    ep = dist.get_world_size() // tp
    tps = [dist.new_group([e * tp + t for t in range(tp)]) for e in range(ep)]
    eps = [dist.new_group([e * tp + t for e in range(ep)]) for t in range(tp)]
    return SimpleNamespace(ep=eps[rank % tp], expt_tp=tps[rank // tp], tp_ep=dist.group.WORLD)


def held(tensor_parallel: int, rank: int) -> list[int]:
    """The experts of a rank."""
    n = EXPERTS * tensor_parallel // dist.get_world_size()
    return list(range(rank // tensor_parallel * n, (rank // tensor_parallel + 1) * n))


def factors_of(case: Case, counts: Tensor, rows: int) -> Tensor:
    """The factor of each of this rank's rows; 1 for those that fill a budget."""
    rank = dist.get_rank()
    mine = case.scales()[rank % case.tensor_parallel, held(case.tensor_parallel, rank)]
    factors = mine.repeat_interleave(counts)
    return torch.cat([factors, factors.new_ones(rows - factors.numel())])


def on_cuda(of: Inputs) -> Inputs:
    """The same on a GPU."""
    return Inputs(*(tensor.to("cuda") for tensor in of))


class Results(NamedTuple):
    """What a layer did: rows, counts and weights as experts got them; tokens, and gradients of
    tokens and weights.
    """

    rows: Tensor
    counts: Tensor
    weights: Tensor
    out: Tensor
    tokens_gradient: Tensor
    probs_gradient: Tensor


def layer(dispatcher: Any, case: Case, of: Inputs) -> Results:
    """A layer around a dispatcher."""
    x, probs = of.x.clone().requires_grad_(), of.probs.clone().requires_grad_()
    rows, weights = dispatcher.dispatch_preprocess(x, of.chosen, probs)
    rows, weights = dispatcher.token_dispatch(rows, weights)
    rows, counts, weights = dispatcher.dispatch_postprocess(rows, weights)
    seen = rows.detach().clone(), counts.clone(), weights.detach().clone()
    y = case.expert(rows, factors_of(case, counts, rows.shape[0]).to(rows.device), weights)
    out = dispatcher.combine_preprocess(y)
    out = dispatcher.combine_postprocess(dispatcher.token_combine(out))
    out.backward(of.gradient)
    return Results(*seen, out.detach(), x.grad, probs.grad)


def ep_buffer_pass(case: Case, of: Inputs) -> Results:
    """The same layer around an ``EPBuffer``, whose calls are made by hand; gradients come deferred.
    """
    from sidelane.megatron import EPBuffer

    buffer, hidden = EPBuffer(dist.group.WORLD), of.x.shape[-1]
    probs, ids = torch.topk(of.probs, case.top_k, dim=1)
    rows, experts, weights, handle, event = buffer.dispatch(
        of.x.reshape(-1, hidden), ids, probs, num_experts=EXPERTS, do_expand=True
    )
    assert experts is None
    event.current_stream_wait()
    counts = torch.tensor(handle.num_recv_tokens_per_expert_list)
    rows, weights = rows.detach().requires_grad_(), weights.detach().requires_grad_()
    y = case.expert(rows, factors_of(case, counts, len(rows)).to(rows.device), weights)
    out, _, event = buffer.combine(y, handle, previous_event=event)
    none, _, _, _, later = buffer.dispatch(
        of.gradient.reshape(-1, hidden), handle=handle, previous_event=event, defer_epilogue=True
    )
    assert none is None
    y.backward(later.wait()[0])
    tokens, returned, _ = buffer.combine(rows.grad, handle, weights.grad)
    of_probs = torch.zeros_like(of.probs).scatter_(1, ids, returned)
    shaped = (out.view(of.x.shape), tokens.view(of.x.shape), of_probs)
    return Results(rows.detach(), counts, weights.detach(), *shaped)


@dataclass(frozen=True)
class Chunks:
    """The sizes that Megatron's ``moe_ep_chunk_overlap`` makes of a configuration, as far as
    transports read them.
    """

    largest_token_chunk_size: int
    router_topk: int
    world_size: int
    hidden_size: int = HIDDEN
    num_experts: int = EXPERTS

    @property
    def max_num_expanded_tokens_per_chunk(self) -> int:
        experts = self.num_experts // self.world_size
        rows = self.world_size * self.largest_token_chunk_size * min(self.router_topk, experts) + 255 * experts
        return -(-rows // 256) * 256


@dataclass(frozen=True)
class Chunk:
    """Megatron's ``DispatchedChunk``."""

    recv_x: Tensor
    received_topk_weights: Tensor | None
    dispatch_handle: Any


def chunked_pass(
    case: Case, of: Inputs, chunks: int, compute: Any = None, communication: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same layer in chunks, in the order of Megatron's ``moe_ep_chunk_overlap``: one is
    computed on a stream while the next one moves on the other. Tokens, and gradients of tokens and
    weights.
    """
    import sidelane.megatron

    x, gradient = (tensor.reshape(-1, HIDDEN).chunk(chunks) for tensor in (of.x, of.gradient))
    probs, ids = (tensor.chunk(chunks) for tensor in torch.topk(of.probs, case.top_k, dim=1))
    overlap = ModuleType("ep_chunk_overlap")
    overlap.__dict__.update(DispatchedChunk=Chunk, make_ep_transport=None)
    sidelane.megatron.transport.install(overlap)
    # Ranks of a test have different numbers of tokens; Megatron's have the same.
    config = Chunks(len(of.x) * of.x.shape[1] + 2 * dist.get_world_size(), case.top_k, dist.get_world_size())
    transport = overlap.make_ep_transport(config, dist.group.WORLD, transport_type="any")

    def after(first: Any, second: Any) -> None:
        if first is not None:
            second.wait_stream(first)

    def dispatch(c: int) -> Any:
        return transport.dispatch_forward(x[c], ids[c], probs[c], communication)

    def spread(c: int) -> Any:
        return transport.dispatch_backward(gradient[c], moved[c].dispatch_handle, communication)

    after(compute, communication)
    moved, saved, out = [dispatch(0)], [], []
    for c in range(chunks):
        if c + 1 < chunks:
            moved.append(dispatch(c + 1))
        after(communication, compute)
        rows, weights = moved[c].recv_x, moved[c].received_topk_weights
        assert len(rows) == len(weights) == config.max_num_expanded_tokens_per_chunk
        handle = moved[c].dispatch_handle
        ends = handle.psum_num_recv_tokens_per_expert.cpu().tolist()
        assert not rows[ends[-1] :].any() and not weights[ends[-1] :].any()
        factors = factors_of(case, torch.tensor([0, *ends]).diff(), len(rows)).to(rows.device)
        rows, weights = rows.detach().requires_grad_(), weights.detach().requires_grad_()
        saved.append((rows, weights, case.expert(rows, factors, weights)))
        after(compute, communication)
        out.append(transport.combine_forward(saved[c][2], handle, communication))
    returned, later = {}, spread(chunks - 1)
    for c in reversed(range(chunks)):
        spread_now, later = later, spread(c - 1) if c else None
        after(communication, compute)
        rows, weights, y = saved[c]
        y.backward(spread_now.recv_x)
        after(compute, communication)
        returned[c] = transport.combine_backward(rows.grad, weights.grad, moved[c].dispatch_handle, communication)
    after(communication, compute)
    tokens, of_ids = (torch.cat(parts) for parts in zip(*(returned[c] for c in range(chunks)), strict=True))
    of_probs = torch.zeros_like(of.probs).scatter_(1, torch.cat(ids), of_ids)
    return torch.cat(out).view(of.x.shape).detach(), tokens.view(of.x.shape), of_probs


def absolute_terms(case: Case, of: Inputs) -> list[Tensor]:
    """Sums of the absolute values of what is summed in each result."""
    tokens, g = of.x.reshape(-1, HIDDEN), of.gradient.reshape(-1, HIDDEN)
    out, dx, dp = torch.zeros_like(tokens), torch.zeros_like(tokens), torch.zeros_like(of.probs)
    for scales in case.scales():
        for expert in range(EXPERTS):
            hit = of.chosen[:, expert].nonzero().flatten()
            rows, weights = tokens[hit].clone().requires_grad_(), of.probs[hit, expert].clone().requires_grad_()
            y = case.expert(rows, scales[expert].expand(hit.numel()), weights)
            y.backward(g[hit])
            out[hit] += y.detach().abs()
            dx[hit] += rows.grad.abs()
            dp[hit, expert] += weights.grad.abs()
    return [out.view(of.x.shape), dx.view(of.x.shape), dp]


class Apart(NamedTuple):
    """The largest difference of a result, as it is and in last places of the sum of absolute terms.
    """

    difference: float
    places: float


def apart(case: Case, of: Inputs, one: Results, other: Results) -> list[Apart]:
    """Of tokens, their gradients, and those of weights."""
    found = []
    for a, b, terms in zip(one[3:], other[3:], absolute_terms(case, of), strict=True):
        difference = (a - b).abs()
        assert not difference[terms == 0].any()
        last = torch.ldexp(torch.ones_like(terms), torch.frexp(terms).exponent - 24)
        places = torch.where(difference > 0, difference / last, 0.0)
        found.append(Apart(difference.max().item(), places.max().item()))
    return found
