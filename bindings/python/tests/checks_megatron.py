"""Megatron's own all-to-all as the judge of everything else that its layers can send by."""

from __future__ import annotations

import gc
import os
from collections import deque
from contextlib import contextmanager, nullcontext
from typing import Any, Iterator
from unittest import mock

# First, as Megatron looks for what is installed when it is imported.
from megatron_ranks import DISPATCHERS, against_theirs, dispatcher, join, limit, theirs

import document
import megatron_on_cpu
import ncclep_caller
import torch
import torch.distributed as dist
import train_megatron
from megatron.core.transformer.moe import fused_a2a, moe_layer, token_dispatcher
from megatron_cases import EXPERTS, HIDDEN, Case, chunked_pass, ep_buffer_pass, held, inputs, layer
from megatron_overlap import Microbatch
from routing import same
from torch import Tensor

import sidelane
import sidelane.megatron
from sidelane.megatron import nccl, transport


def judge(world: sidelane.World, who: str) -> None:
    found = against_theirs(world, who)
    assert len(found) == (24 if who in ("ncclep", "deepep") else 30)
    for case, results in found.items():
        for result in results:
            assert result.places <= limit(who, case), (case, results)


def check_megatron_uses_what_was_installed(world: sidelane.World) -> None:
    assert fused_a2a.HAVE_DEEP_EP and fused_a2a.Buffer is sidelane.megatron.Buffer
    assert fused_a2a.HAVE_HYBRIDEP and fused_a2a.HybridEPBuffer is sidelane.megatron.HybridEPBuffer
    try:
        nccl.install(token_dispatcher)
    except sidelane.Error as error:
        assert error.kind == "NoBackend"
    else:
        raise AssertionError("megatron-core 0.16.1 has no ncclep")
    try:
        transport.install(token_dispatcher)
    except sidelane.Error as error:
        assert error.kind == "NoBackend" and "make_ep_transport" in str(error)
    else:
        raise AssertionError("megatron-core 0.16.1 has no transports of chunks")
    assert not ncclep_caller.names.is_nccl_ep_bootstrapped()


def check_our_dispatcher_gives_what_all_to_all_gives(world: sidelane.World) -> None:
    judge(world, "sidelane")


def check_hybridep_unchanged_gives_what_all_to_all_gives(world: sidelane.World) -> None:
    judge(world, "hybridep")


def check_ncclep_gives_what_all_to_all_gives(world: sidelane.World) -> None:
    judge(world, "ncclep")
    assert ncclep_caller.names.is_nccl_ep_bootstrapped()


def check_deepep_unchanged_gives_what_all_to_all_gives(world: sidelane.World) -> None:
    judge(world, "deepep")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever would wait for a device raises."""

    def waits(*_: object, **__: object) -> None:
        raise AssertionError("the host waits for the device")

    of_tensors = [mock.patch.object(Tensor, name, waits) for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__")]
    of_cuda = [
        mock.patch.object(torch.cuda, "synchronize", waits),
        mock.patch.object(megatron_on_cpu.Stream, "synchronize", waits),
        mock.patch.object(megatron_on_cpu.Event, "synchronize", waits),
    ]
    for patch in of_tensors + of_cuda:
        patch.start()
    try:
        yield
    finally:
        mock.patch.stopall()


BUDGETED = Case(1, 2, "none", True)


def rows_sent(ranks: int) -> list[list[tuple[int, int, int]]]:
    """(expert, source, token) of the rows of each rank, in order, had they no budget."""
    of_source = [inputs(BUDGETED, rank).chosen for rank in range(ranks)]
    return [
        [(e, s, t) for e in held(1, rank) for s in range(ranks) for t in of_source[s][:, e].nonzero().flatten().tolist()]
        for rank in range(ranks)
    ]


def budgeted(who: str, budget: int) -> tuple[Any, Any]:
    """A dispatcher whose rows are as many, and its manager."""
    of = dispatcher(who, BUDGETED, capacity=budget) if who == "ncclep" else dispatcher(who, BUDGETED)
    manager = of._comm_manager
    if who == "hybridep":
        # 0.16.1 sets it with drop-and-pad only, newer ones by a capacity factor of the rank.
        manager.num_permuted_tokens = budget
    return of, manager


def check_a_budget_that_suffices_changes_nothing_and_nobody_waits(world: sidelane.World) -> None:
    join(world)
    of = inputs(BUDGETED, world.rank)
    sent = rows_sent(world.size)
    budget = max(map(len, sent)) + 3
    mine = held(1, world.rank)
    counts = torch.tensor([sum(row[0] == e for row in sent[world.rank]) for e in mine])
    factors = torch.cat([BUDGETED.scales()[0, mine].repeat_interleave(counts), torch.ones(budget - counts.sum())])
    gradient = of.gradient
    for who in ("hybridep", "ncclep"):
        # The layer of this budget is made by the first call.
        for guard in (nullcontext(), no_waiting()):
            x, probs = of.x.clone().requires_grad_(), of.probs.clone().requires_grad_()
            ours, manager = budgeted(who, budget)
            with guard:
                rows, weights = ours.dispatch_preprocess(x, of.chosen, probs)
                rows, weights = ours.token_dispatch(rows, weights)
                handle = manager.handle if who == "hybridep" else None
                rows, per_expert, weights = ours.dispatch_postprocess(rows, weights)
                y = BUDGETED.expert(rows, factors, weights)
                out = ours.combine_postprocess(ours.token_combine(ours.combine_preprocess(y)))
                out.backward(gradient)
        over = manager.over_budget if handle is None else handle[-1]
        assert over.dtype == torch.bool and over.tolist() == [False]
        assert rows.shape[0] == weights.shape[0] == budget
        assert per_expert.tolist() == counts.tolist() and per_expert.dtype == torch.int64
        landed = len(sent[world.rank])
        assert not rows[landed:].any() and not weights[landed:].any()
        same(rows[:landed].detach(), theirs(BUDGETED).rows)
        for one, other in zip((out.detach(), x.grad, probs.grad), theirs(BUDGETED)[3:], strict=True):
            same(one, other)


def check_rows_beyond_a_budget_are_dropped_and_all_ranks_know(world: sidelane.World) -> None:
    join(world)
    of = inputs(BUDGETED, world.rank)
    sent = rows_sent(world.size)
    budget = max(map(len, sent)) - 2
    kept = {row for rows in sent for row in rows[:budget]}
    assert len(kept) < sum(map(len, sent))
    survives = torch.zeros_like(of.chosen)
    for expert, source, token in kept:
        if source == world.rank:
            survives[token, expert] = True
    # As if the router had dropped them.
    judge_of_drops = dispatcher("all-to-all", Case(1, 2, "drop", True))
    expected = layer(judge_of_drops, BUDGETED, of._replace(chosen=survives, probs=of.probs * survives))
    for who in ("hybridep", "ncclep"):
        ours, manager = budgeted(who, budget)
        x, probs = of.x.clone().requires_grad_(), of.probs.clone().requires_grad_()
        rows, weights = ours.token_dispatch(*ours.dispatch_preprocess(x, of.chosen, probs))
        over = manager.handle[-1] if who == "hybridep" else manager.over_budget
        rows, counts, weights = ours.dispatch_postprocess(rows, weights)
        assert rows.shape[0] == budget and counts.sum() == min(budget, len(sent[world.rank]))
        if who == "hybridep":
            assert over.tolist() == [True]
        else:
            assert over.tolist() == [len(sent[world.rank]) > budget]
        factors = torch.ones(budget)
        factors[: counts.sum()] = BUDGETED.scales()[0, held(1, world.rank)].repeat_interleave(counts)
        out = ours.token_combine(ours.combine_preprocess(BUDGETED.expert(rows, factors, weights)))
        out = ours.combine_postprocess(out)
        out.backward(of.gradient)
        for one, other in zip((out.detach(), x.grad, probs.grad), expected[3:], strict=True):
            same(one, other)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values, and a scale for 128 of them."""
    blocks = x.view(x.shape[0], -1, 128)
    scales = blocks.abs().amax(dim=2) / 448
    return (blocks / scales.unsqueeze(2)).view_as(x).to(torch.float8_e4m3fn), scales


def restored(values: Tensor, scales: Tensor) -> Tensor:
    blocks = values.float().view(values.shape[0], -1, 128) * scales.unsqueeze(2)
    return blocks.view(values.shape)


def check_tokens_in_fp8_come_as_quantized_and_their_sums_in_bf16(world: sidelane.World) -> None:
    join(world)
    case, hidden = Case(1, 8, "none", False), 256
    of = [inputs(case, rank, hidden=hidden) for rank in range(world.size)]
    pairs = [quantized(source.x.view(-1, hidden)) for source in of]
    tokens = [restored(*pair) for pair in pairs]
    mine, my = held(1, world.rank), of[world.rank]
    hits = [source.chosen[:, mine] for source in of]

    def summed(times: Tensor) -> Tensor:
        """Each token as often as it comes back, from +0, rounded once."""
        one, total = tokens[world.rank].bfloat16().float(), torch.zeros(tokens[world.rank].shape)
        for turn in range(int(times.max())):
            total += one * (times > turn).unsqueeze(1)
        return total.bfloat16()

    ids = torch.topk(my.probs, case.top_k, dim=1)
    buffer = sidelane.megatron.Buffer(dist.group.WORLD)
    layout = buffer.get_dispatch_layout(ids.indices, EXPERTS)
    received, experts, _, counts, handle, _ = buffer.dispatch(
        pairs[world.rank], topk_idx=ids.indices, topk_weights=ids.values, num_tokens_per_expert=layout[2]
    )
    assert received[0].dtype == torch.float8_e4m3fn and received[1].dtype == torch.float32
    same(restored(*received), torch.cat([t[hit.any(dim=1)] for t, hit in zip(tokens, hits)]))
    assert counts == [int(sum(hit[:, e].sum() for hit in hits)) for e in range(len(mine))]
    returned, _, _ = buffer.combine(restored(*received).bfloat16(), handle)
    same(returned, summed(layout[3].sum(dim=1)))
    again = buffer.dispatch(pairs[world.rank], handle)[0]
    same(restored(*again), restored(*received))

    hybrid = sidelane.megatron.HybridEPBuffer(dist.group.WORLD, hidden, 64, len(mine), use_fp8=True)
    values, scales = pairs[world.rank]
    rows, weights, row_scales, counts, placed = hybrid.dispatch_with_permute(
        hidden=values.view(torch.uint8), scaling_factor=scales, routing_map=my.chosen, probs=my.probs
    )
    expected = [
        (t[hit[:, e]], source.probs[hit[:, e], mine[e]])
        for e in range(len(mine))
        for t, hit, source in zip(tokens, hits, of)
    ]
    assert rows.dtype == torch.uint8
    same(restored(rows.view(torch.float8_e4m3fn), row_scales), torch.cat([t for t, _ in expected]))
    same(weights, torch.cat([w for _, w in expected]))
    y = restored(rows.view(torch.float8_e4m3fn), row_scales).bfloat16()
    returned, _ = hybrid.combine_with_unpermute(hidden=y, handle=placed)
    same(returned, summed(my.chosen.sum(dim=1)))
    gradients = my.gradient.view(-1, hidden).bfloat16()
    back, _, _, _, _ = hybrid.dispatch_with_permute(hidden=gradients, handle=placed)
    all_gradients = [source.gradient.view(-1, hidden).bfloat16() for source in of]
    same(back, torch.cat([g[hit[:, e]] for e in range(len(mine)) for g, hit in zip(all_gradients, hits)]))


def check_ep_buffer_gives_what_all_to_all_gives(world: sidelane.World) -> None:
    join(world)
    for case in (Case(1, 2, "none", True), Case(1, 2, "none", False)):
        of, expected = inputs(case, world.rank), theirs(case)
        one = ep_buffer_pass(case, of)
        for seen, other in zip(one, expected, strict=True):
            same(seen, other)


def check_chunks_of_a_layer_give_what_all_to_all_gives(world: sidelane.World) -> None:
    join(world)
    for case in (Case(1, 2, "none", True), Case(1, 8, "none", True)):
        for chunks in (1, 3):
            ours = chunked_pass(case, inputs(case, world.rank), chunks)
            for seen, other in zip(ours, theirs(case)[3:], strict=True):
                same(seen, other)


def check_overlapped_microbatches_give_what_they_give_one_by_one(world: sidelane.World) -> None:
    join(world)
    case, alive, rounds = Case(1, 2, "none", True), 3, 4
    for who in DISPATCHERS:
        ours = dispatcher(who, case)
        waiting: deque[Microbatch] = deque()
        done = []
        for batch in range(alive + rounds):
            f = Microbatch(ours, who, case, inputs(case, world.rank, batch))
            if batch < alive:
                f.dispatch(), f.mlp(), f.combine()
            else:
                b = waiting.popleft()
                b.combine_backward()
                b.mlp_backward()
                f.dispatch()
                b.dispatch_backward()
                f.mlp()
                f.combine()
                done.append(b)
            waiting.append(f)
            assert len(waiting) == min(batch + 1, alive)
        for b in waiting:
            b.combine_backward(), b.mlp_backward(), b.dispatch_backward()
        for batch, of in enumerate([*done, *waiting]):
            expected = layer(dispatcher("all-to-all", case), case, inputs(case, world.rank, batch))
            for one, other in zip((of.out.detach(), of.x.grad, of.probs.grad), expected[3:], strict=True):
                same(one, other)


@contextmanager
def as_it_was() -> Iterator[None]:
    """Puts back what enable() changes."""
    names = ("MoEAlltoAllTokenDispatcher", "MoEFlexTokenDispatcher")
    most = mock.patch.object(sidelane.megatron.limits, "max_tokens", None)
    with mock.patch.multiple(moe_layer, **{name: getattr(moe_layer, name) for name in names}), most:
        yield


def check_shared_experts_are_computed_between_the_calls(world: sidelane.World) -> None:
    join(world)
    case = Case(1, 2, "none", True)
    of = inputs(case, world.rank)
    results = []
    for who in ("all-to-all", "sidelane"):
        ours = dispatcher(who, case)
        ours.config.moe_shared_expert_overlap = True
        shared = SharedInParts()
        ours.set_shared_experts(shared)
        results.append((layer(ours, case, of), shared.factor.grad, shared.called))
    (theirs, their_grad, their_calls), (mine, my_grad, my_calls) = results
    for one, other in zip(mine, theirs, strict=True):
        same(one, other)
    same(my_grad, their_grad)
    assert my_calls == their_calls


class SharedInParts:
    """Shared experts in the parts of Megatron's, which calls them in this order: a factor."""

    use_shared_expert_gate = False

    def __init__(self) -> None:
        self.factor, self.called = torch.tensor([3.0], requires_grad=True), []

    def pre_forward_comm(self, tokens: Tensor) -> None:
        self.called.append("pre_forward_comm")
        self.tokens = tokens

    def linear_fc1_forward_and_act(self, _rows: Tensor) -> None:
        self.called.append("linear_fc1_forward_and_act")
        self.tokens = self.tokens * self.factor

    def linear_fc2_forward(self, _tokens: Tensor) -> None:
        self.called.append("linear_fc2_forward")

    def post_forward_comm(self) -> None:
        self.called.append("post_forward_comm")

    def get_output(self) -> Tensor:
        self.called.append("get_output")
        return self.tokens


def check_rank_with_another_hidden_size_is_named_on_all_ranks(world: sidelane.World) -> None:
    join(world)
    case = Case(1, 2, "none", True)
    layer(dispatcher("sidelane", case), case, inputs(case, world.rank))
    for attempt in range(2):
        ours, of = dispatcher("sidelane", case), inputs(case, world.rank, hidden=HIDDEN + (world.rank == 1))
        try:
            ours.token_dispatch(*ours.dispatch_preprocess(of.x, of.chosen, of.probs))
            raise AssertionError("sizes differ")
        except sidelane.InputError as error:
            assert world.rank == 1 and (error.kind, error.tensor) == ("Shape", "x"), error
        except sidelane.CallError as error:
            assert world.rank != 1 and (error.kind, error.peer) == ("PeerRefused", 1), error
    layer(dispatcher("sidelane", case), case, inputs(case, world.rank))


def check_more_tokens_than_usual_are_promised_by_name(world: sidelane.World) -> None:
    join(world)
    with as_it_was():
        sidelane.megatron.enable(max_tokens=sidelane.megatron.layers.MAX_TOKENS + 1)
        case = Case(1, 1, "none", True)
        tokens = sidelane.megatron.layers.MAX_TOKENS + 1
        ours = dispatcher("sidelane", case)
        x = torch.ones(tokens if world.rank == 0 else 1, 1, HIDDEN)
        chosen = torch.zeros(x.shape[0], EXPERTS, dtype=torch.bool)
        chosen[:, 0] = True
        rows, _ = ours.token_dispatch(*ours.dispatch_preprocess(x, chosen, chosen.float()))
        assert rows.shape[0] == (tokens + world.size - 1 if world.rank == 0 else 0)


def use(group: Any) -> None:
    """A small call over a process group."""
    x, ranks = torch.ones(1, HIDDEN), group.size()
    ep = sidelane.megatron.layers.layer(group, x, experts=ranks, top_k=1, hidden=HIDDEN, dtype=torch.float32)
    rows, handle = ep.dispatch(x, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
    ep.combine(rows, handle)


def held_here() -> int:
    """Descriptors: connections, and memory of this rank and its peers."""
    return len(os.listdir("/proc/self/fd"))


def check_worlds_go_with_their_process_groups(world: sidelane.World) -> None:
    join(world)
    # Groups of earlier checks have these members.
    sidelane.megatron.release()
    members = list(range(world.size))
    group = dist.new_group(members)
    before = held_here()
    use(group)
    during = held_here()
    assert during > before
    sidelane.megatron.release(group)
    assert held_here() == before
    # It is joined anew, and goes with the last reference to its group.
    use(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert held_here() < during
    # Destroyed, though somebody holds it: gone when the next group needs a world.
    kept, other = dist.new_group(members), dist.new_group(members)
    use(kept)
    dist.destroy_process_group(kept)
    with_one = held_here()
    use(other)
    assert held_here() <= with_one
    sidelane.megatron.release(other)


def check_groups_of_the_same_members_use_one_world(world: sidelane.World) -> None:
    join(world)
    sidelane.megatron.release()
    members = list(range(world.size))
    first, second, third = (dist.new_group(members) for _ in range(3))
    without = held_here()
    use(first)
    with_first = held_here()
    assert with_first > without
    # As when Megatron makes its groups anew and keeps the old ones.
    use(second)
    assert held_here() == with_first
    sidelane.megatron.release(first)
    use(second)
    assert held_here() == with_first
    # Rank 0 alone has lost the world: all join a new one.
    if world.rank == 0:
        sidelane.megatron.release(second)
    use(third)
    for group in (second, third):
        sidelane.megatron.release(group)
    assert held_here() == without


def check_the_page_s_code_runs(world: sidelane.World) -> None:
    join(world)
    with as_it_was():
        assert document.run("from-megatron.md") >= 2


def check_a_transformer_learns_the_same_with_both(world: sidelane.World) -> None:
    join(world)
    with as_it_was():
        losses = train_megatron.compare(steps=3)
    assert len(losses.theirs) == 3 and losses.ours == losses.theirs
    assert losses.ours[-1] < losses.ours[0]
