"""Megatron's dispatchers on CPU processes: its own all-to-all as the judge, Sidelane under its flex dispatcher, and ours.

Megatron expects a GPU. What it asks of ``torch.cuda`` here (streams, events, the current device) means nothing on a CPU, and
is answered so; gloo has no all-gather of uneven parts, which nothing here needs.
"""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
from routing import same

HIDDEN = 8
EXPERTS = 16


class Stream:
    """Does what it is told at once."""

    def wait_stream(self, _stream: object) -> None: ...
    def wait_event(self, _event: object) -> None: ...
    def record_event(self, event: object = None) -> object:
        return event or Event()
    def synchronize(self) -> None: ...


class Event:
    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...


def without_a_gpu() -> None:
    one = Stream()
    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    torch.cuda.current_stream = lambda *_: one
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None


class Splits(list):
    """Sizes on the host, as a list that answers like an array."""

    def tolist(self) -> list[int]:
        return list(self)


def on_the_host(tensor: object, as_numpy: bool = False, **_: object) -> object:
    """What Megatron copies from the GPU is here already; collectives take sizes as numbers."""
    return Splits(tensor.tolist()) if as_numpy and torch.is_tensor(tensor) else tensor


def settings(top_k: int, **changes: object) -> SimpleNamespace:
    of = {
        "add_bias_linear": False,
        "batch_invariant_mode": False,
        "cuda_graph_impl": "none",
        "cuda_graph_scope": [],
        "fp4": None,
        "fp8": None,
        "moe_deepep_num_sms": 20,
        "moe_expert_capacity_factor": None,
        "moe_flex_dispatcher_backend": "deepep",
        "moe_pad_expert_input_to_capacity": False,
        "moe_permute_fusion": False,
        "moe_router_dtype": "fp32",
        "moe_router_padding_for_quantization": False,
        "moe_router_topk": top_k,
        "moe_shared_expert_overlap": False,
        "num_moe_experts": EXPERTS,
    }
    return SimpleNamespace(**(of | changes))


def routed(rank: int, top_k: int, capacity: float | None):
    """What Megatron's own router makes of random logits."""
    from megatron.core.transformer.moe import moe_utils

    draw = torch.Generator().manual_seed(100 * top_k + rank)
    tokens = 2 * (5 + rank)
    x = torch.randn(tokens // 2, 2, HIDDEN, generator=draw)
    logits = torch.randn(tokens, EXPERTS, generator=draw)
    probs, chosen = moe_utils.topk_routing_with_score_function(logits, top_k)
    if capacity is not None:
        probs, chosen = moe_utils.apply_router_token_dropping(probs, chosen, top_k, capacity, "probs", False)
    gradient = torch.randn(x.shape, generator=draw)
    return x, chosen, probs.detach(), gradient


def layer(dispatcher, of, scale: torch.Tensor):
    """A layer around a dispatcher: experts differ, are not linear, and weigh their rows."""
    x, chosen, probs, gradient = of
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    rows, weights = dispatcher.dispatch_preprocess(x, chosen, probs)
    rows, weights = dispatcher.token_dispatch(rows, weights)
    rows, counts, weights = dispatcher.dispatch_postprocess(rows, weights)
    seen = rows.detach().clone(), counts.clone(), weights.detach().clone()
    factors = scale.repeat_interleave(counts).unsqueeze(1)
    y = torch.tanh(rows * factors) * weights.unsqueeze(1)
    out = dispatcher.combine_preprocess(y)
    out = dispatcher.combine_postprocess(dispatcher.token_combine(out))
    out.backward(gradient)
    return seen, out.detach(), x.grad, probs.grad


def by_rank(of, scales: torch.Tensor, ranks: int):
    """The layer by the formula, with sums as the flex dispatcher makes them: experts of a rank, then ranks."""
    x, chosen, probs, gradient = of
    tokens, g = x.reshape(-1, HIDDEN), gradient.reshape(-1, HIDDEN)
    out, dx, dp = torch.zeros_like(tokens), torch.zeros_like(tokens), torch.zeros_like(probs)
    each = EXPERTS // ranks
    for first in range(0, EXPERTS, each):
        partial, back = torch.zeros_like(tokens), torch.zeros_like(tokens)
        for expert in range(first, first + each):
            hit = chosen[:, expert].nonzero().flatten()
            rows = tokens[hit].clone().requires_grad_()
            weights = probs[hit, expert].clone().requires_grad_()
            y = torch.tanh(rows * scales[expert]) * weights.unsqueeze(1)
            y.backward(g[hit])
            partial[hit] += y.detach()
            back[hit] += rows.grad
            dp[hit, expert] = weights.grad
        out, dx = out + partial, dx + back
    return out.view(x.shape), dx.view(x.shape), dp


def judged(port: int, tensor_parallel: int) -> list[str]:
    """What was compared at this rank."""
    import sidelane.megatron

    without_a_gpu()
    sidelane.megatron.install()
    sidelane.megatron.install()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    assert fused_a2a.HAVE_DEEP_EP and fused_a2a.Buffer is sidelane.megatron.Buffer
    token_dispatcher.maybe_move_tensor_to_cpu = on_the_host
    tp, ep = tensor_parallel, size // tensor_parallel
    tps = [dist.new_group([e * tp + t for t in range(tp)]) for e in range(ep)]
    eps = [dist.new_group([e * tp + t for e in range(ep)]) for t in range(tp)]
    groups = SimpleNamespace(ep=eps[rank % tp], expt_tp=tps[rank // tp], tp_ep=dist.group.WORLD)
    n = EXPERTS // ep
    mine = list(range(rank // tp * n, (rank // tp + 1) * n))
    scales = torch.linspace(0.5, 2.0, EXPERTS)
    done = []
    for top_k in (1, 2, 8) if tp == 1 else (2,):
        for capacity in (None, 1.0):
            config = settings(top_k, moe_expert_capacity_factor=capacity)
            of = routed(rank, top_k, capacity)
            ours = layer(sidelane.megatron.TokenDispatcher(n, mine, config, groups), of, scales[mine])
            flex = layer(token_dispatcher.MoEFlexTokenDispatcher(n, mine, config, groups), of, scales[mine])
            for one, other in zip(ours[0], flex[0]):
                same(one, other)
            if tp == 1:
                theirs = layer(token_dispatcher.MoEAlltoAllTokenDispatcher(n, mine, config, groups), of, scales[mine])
                for one, other in zip((*ours[0], *ours[1:]), (*theirs[0], *theirs[1:])):
                    same(one, other)
                done.append(f"all-to-all {top_k} {capacity}")
                for one, other in zip(flex[1:], by_rank(of, scales, size)):
                    same(one, other)
                done.append(f"flex {top_k} {capacity}")
            else:
                # Partial sums of ranks are added in another order here: by virtual expert, and by rank.
                for one, other in zip(ours[1:], flex[1:]):
                    assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)
                done.append(f"tensor parallel {top_k} {capacity}")
    assert dist.get_backend() == "gloo"
    dist.barrier()
    dist.destroy_process_group()
    return done


def refused() -> list[tuple[str, str]]:
    """Where install comes too late, and what the dispatcher does not do."""
    import sys

    import sidelane.megatron

    said = []
    for name, kind in (("deep_ep", "Loaded"), ("megatron.core.transformer.moe.fused_a2a", "TooLate")):
        sys.modules[name] = SimpleNamespace()
        try:
            sidelane.megatron.install()
        except sidelane.Error as error:
            assert error.kind == kind
            said.append((kind, str(error)))
        del sys.modules[name]
    try:
        config = settings(2, moe_pad_expert_input_to_capacity=True)
        sidelane.megatron.TokenDispatcher(4, [0, 1, 2, 3], config, None)
    except ValueError as error:
        said.append(("ValueError", str(error)))
    return said
