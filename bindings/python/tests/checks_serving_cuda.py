"""Servers' callers on CUDA tensors, or on what stands for them, against the same on the host: to
the bit.
"""

from types import SimpleNamespace

import torch
from gpu import gpu, no_waiting
from routing import case, same

import sidelane
from sidelane.serving import (
    BatchedPrepareFinalize,
    CombineInput,
    Communication,
    CommunicationConfig,
    Dispatcher,
    PrepareFinalize,
)


def built(world, of, *, device=None, **settings):
    on = {} if device is None else {"device": device, "device_heap": 1 << 20, "max_tokens": 16}
    return sidelane.ExpertParallel(world, experts=of.experts, top_k=of.top_k, hidden=of.hidden, dtype=of.x[0].dtype, **on, **settings)


def factors(of):
    """One for each expert: a power of two."""
    return 2.0 ** (torch.arange(of.experts) % 3 - 1)


def vllm(kernel, x, weights, ids, experts, of_expert):
    receive = kernel.prepare_async(x, weights, ids, experts, None, False)
    rows, scales, meta, row_ids, row_weights = receive()
    assert scales is None
    made = rows * of_expert[row_ids.flatten()].reshape(-1, 1)
    out = torch.full_like(x, float("nan"))
    kernel.finalize_async(out, made, row_weights, row_ids, False)()
    return out, meta.expert_num_tokens, row_ids, row_weights


def batched(kernel, x, weights, ids, experts, of_expert):
    rows, _, meta, none, neither = kernel.prepare(x, weights, ids, experts, None, False)
    assert none is None and neither is None
    out = torch.full_like(x, float("nan"))
    kernel.finalize(out, rows * of_expert.reshape(-1, 1, 1), weights, ids, False)
    return out, rows, meta.expert_num_tokens


def sglang(dispatcher, x, weights, ids, experts, of_expert):
    dispatcher.dispatch_a(x, SimpleNamespace(topk_ids=ids, topk_weights=weights))
    got = dispatcher.dispatch_b()
    made = got.hidden_states * of_expert[got.topk_ids.flatten()].reshape(-1, 1) * got.topk_weights
    dispatcher.combine_a(CombineInput(made))
    return dispatcher.combine_b(), got.topk_ids, got.topk_weights


def both(world, caller, adapter, *, local=False, **settings):
    """The same on the host and on a device; what is known only when a layer is built comes in a
    first step.
    """
    of, me = case(world.size), world.rank
    given = of.x[me], of.weights[me], of.ids[me].long()
    of_expert = factors(of)[list(of.held(me))] if local else factors(of)
    expected = caller(adapter(built(world, of, **settings)), *given, of.experts, of_expert)
    with gpu(me):
        ours = adapter(built(world, of, device="cuda", **settings))
        sent, of_expert = [one.to("cuda") for one in given], of_expert.to("cuda")
        caller(ours, *sent, of.experts, of_expert)
        with no_waiting():
            seen = caller(ours, *sent, of.experts, of_expert)
        for one, other in zip(seen, expected, strict=True):
            assert one.is_cuda
            same(one.cpu(), other)
    return expected


def check_vllm_s_halves_give_the_host_s_bits(world):
    both(world, vllm, PrepareFinalize)
    both(world, vllm, PrepareFinalize, align=4)


def check_vllm_s_batched_experts_give_the_host_s_bits(world):
    of, me = case(world.size), world.rank
    most = max(len(x) for x in of.x)
    adapter = lambda ep: BatchedPrepareFinalize(ep, max_num_tokens=most)  # noqa: E731
    out, rows, counts = both(world, batched, adapter, local=True, weighted=True)
    # What it should be, by the routing alone.
    assert rows.shape == (len(of.held(me)), most * world.size, of.hidden)
    for place, expert in enumerate(of.held(me)):
        mine = [(source, token) for e, source, token, _ in of.rows(me) if e == expert]
        assert counts[place] == len(mine)
        same(rows[place, : len(mine)], torch.stack([of.x[s][t] for s, t in mine]) if mine else of.x[0][:0])
        assert not rows[place, len(mine) :].any()
    row_of, factor = {}, factors(of)
    for holder in range(of.ranks):
        for expert, source, token, k in of.rows(holder):
            row_of[expert, source, token] = of.x[source][token] * factor[expert] * of.weights[source][token, k]
    same(out, of.summed(me, row_of))


def check_sglang_s_stages_give_the_host_s_bits(world):
    both(world, sglang, Dispatcher)


def flashinfer(comm, x, weights, ids, of_expert):
    got = comm.dispatch(x, ids, weights)
    mine = (got.topk_ids >= 0).float() * got.topk_weights
    # Sums of two products at most, so that their order makes no difference to a bit.
    made = got.hidden_states * (mine * of_expert[got.topk_ids.long().clamp(min=0)]).sum(1, keepdim=True)
    buffer = comm.get_combine_input_buffer(x.dtype)
    buffer.copy_(made)
    out = torch.full_like(x, float("nan"))
    assert comm.combine(buffer, output=out) is out
    return out, got.hidden_states, got.topk_ids, got.topk_weights


def check_flashinfer_s_slots_give_the_host_s_bits(world):
    of, me = case(world.size, experts=12, top_k=2, dtype=torch.bfloat16), world.rank
    given = of.x[me], of.weights[me], of.ids[me].long()
    params = {"num_experts": of.experts, "top_k": of.top_k, "max_tokens_per_rank": 12, "hidden_size": of.hidden}
    params = SimpleNamespace(**params, token_dtype=torch.bfloat16, invalid_expert_id=-1)
    bootstrap = SimpleNamespace(rank=me, world_size=world.size)
    expected = flashinfer(Communication(bootstrap, params, CommunicationConfig(world, None)), *given, factors(of))
    with gpu(me):
        ours = Communication(bootstrap, params, CommunicationConfig(world))
        assert ours.ep.executor == "constant-program"
        sent, of_expert = [one.to("cuda") for one in given], factors(of).to("cuda")
        with no_waiting():
            seen = flashinfer(ours, *sent, of_expert)
        for one, other in zip(seen, expected, strict=True):
            assert one.is_cuda
            same(one.cpu(), other)
        again = flashinfer(ours, *sent, of_expert)
        same(again[0].cpu(), expected[0])
