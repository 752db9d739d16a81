"""Megatron's dispatchers on CUDA tensors, or on what stands for them, against the same on the host:
to the bit.
"""

from __future__ import annotations

# First, as Megatron looks for what is installed when it is imported.
from megatron_ranks import dispatcher, join

import torch
from checks_cuda import weighed
from gpu import gpu, no_waiting
from megatron_cases import (
    HIDDEN,
    Case,
    Results,
    chunked_pass,
    ep_buffer_pass,
    factors_of,
    inputs,
    layer,
    on_cuda,
)
from megatron_overlap import Microbatch
from routing import same

import sidelane
import sidelane.megatron

DISPATCHERS = ("sidelane", "hybridep", "ncclep")


class Linear(Case):
    """Experts whose bits are the same wherever torch computes them."""

    def expert(self, rows: torch.Tensor, factors: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return weighed(rows * factors.unsqueeze(1), weights)


CASES = [Linear(1, 2, "none", False), Linear(2, 8, "none", False), Linear(1, 2, "drop", False)]


def on_the_host(results: Results) -> list[torch.Tensor]:
    return [result.cpu() for result in results]


def both(world: sidelane.World, who: str, case: Case) -> None:
    """The same bits twice: rows, counts and weights as experts got them; tokens, and gradients of
    tokens and weights.
    """
    join(world)
    of = inputs(case, world.rank)
    expected = layer(dispatcher(who, case), case, of)
    with gpu(world.rank):
        ours = layer(dispatcher(who, case), case, on_cuda(of))
        assert ours.out.is_cuda and ours.rows.is_cuda
        for one, other in zip(on_the_host(ours), expected, strict=True):
            same(one, other)


def check_our_dispatcher_gives_the_host_s_bits(world: sidelane.World) -> None:
    for case in [*CASES, Linear(1, 2, "pad", False)]:
        both(world, "sidelane", case)


def check_hybridep_unchanged_gives_the_host_s_bits(world: sidelane.World) -> None:
    for case in CASES:
        both(world, "hybridep", case)


def check_ncclep_gives_the_host_s_bits(world: sidelane.World) -> None:
    for case in CASES:
        both(world, "ncclep", case)


def check_deepep_unchanged_gives_the_host_s_bits(world: sidelane.World) -> None:
    for case in CASES[:1]:
        both(world, "deepep", case)


def check_ep_buffer_gives_the_host_s_bits(world: sidelane.World) -> None:
    join(world)
    for case in CASES[:1]:
        of = inputs(case, world.rank)
        expected = ep_buffer_pass(case, of)
        with gpu(world.rank):
            ours = ep_buffer_pass(case, on_cuda(of))
            assert ours.out.is_cuda
            for one, other in zip(on_the_host(ours), expected, strict=True):
                same(one, other)


def check_chunks_of_a_layer_move_on_the_communication_stream(world: sidelane.World) -> None:
    join(world)
    case = CASES[0]
    of = inputs(case, world.rank)
    expected = chunked_pass(case, of, 3)
    with gpu(world.rank):
        ours = chunked_pass(case, on_cuda(of), 3, torch.cuda.current_stream(), torch.cuda.Stream())
        for one, other in zip(ours, expected, strict=True):
            assert one.is_cuda
            same(one.cpu(), other)


def check_no_call_waits_for_the_device_but_for_its_sizes(world: sidelane.World) -> None:
    join(world)
    case = CASES[0]
    of = inputs(case, world.rank)
    for who in DISPATCHERS:
        expected = layer(dispatcher(who, case), case, of)
        with gpu(world.rank):
            there, ours = on_cuda(of), dispatcher(who, case)
            x, probs = there.x.requires_grad_(), there.probs.requires_grad_()
            with no_waiting():
                rows, weights = ours.token_dispatch(*ours.dispatch_preprocess(x, there.chosen, probs))
                rows, counts, weights = ours.dispatch_postprocess(rows, weights)
            factors = factors_of(case, counts, rows.shape[0]).to("cuda")
            with no_waiting():
                y = case.expert(rows, factors, weights)
                out = ours.combine_postprocess(ours.token_combine(ours.combine_preprocess(y)))
                out.backward(there.gradient)
            for one, other in zip((out.detach(), x.grad, probs.grad), expected[3:], strict=True):
                same(one.cpu(), other)


def check_microbatches_overlap_on_megatron_s_communication_stream(world: sidelane.World) -> None:
    join(world)
    case, alive = Linear(1, 2, "none", False), 2
    for who in ("sidelane", "hybridep"):
        expected = []
        for batch in range(2 * alive):
            expected.append(layer(dispatcher(who, case), case, inputs(case, world.rank, batch)))
        with gpu(world.rank):
            compute, communication = torch.cuda.current_stream(), torch.cuda.Stream()
            ours, waiting, done = dispatcher(who, case), [], []
            for batch in range(2 * alive):
                f = Microbatch(ours, who, case, on_cuda(inputs(case, world.rank, batch)), (compute, communication))
                if batch < alive:
                    f.dispatch(), f.mlp(), f.combine()
                else:
                    b = waiting.pop(0)
                    b.combine_backward()
                    b.mlp_backward()
                    f.dispatch()
                    b.dispatch_backward()
                    f.mlp()
                    f.combine()
                    done.append(b)
                waiting.append(f)
            for b in waiting:
                b.combine_backward(), b.mlp_backward(), b.dispatch_backward()
            compute.wait_stream(communication)
            for of, results in zip([*done, *waiting], expected, strict=True):
                for one, other in zip((of.out.detach(), of.x.grad, of.probs.grad), results[3:], strict=True):
                    same(one.cpu(), other)


def check_tokens_beyond_a_layer_s_most_are_refused_by_name_until_it_is_raised(world: sidelane.World) -> None:
    join(world)
    case = Case(1, 1, "none", True)
    with gpu(world.rank):
        for tokens, refused in ((3, False), (65, True), (5, False)):
            ours, count = dispatcher("sidelane", case), tokens if world.rank == 0 else 2
            x = torch.ones(count, 1, HIDDEN, device="cuda")
            chosen = torch.zeros(count, 16, dtype=torch.bool, device="cuda")
            chosen[:, 3] = True
            try:
                rows, _ = ours.token_dispatch(*ours.dispatch_preprocess(x, chosen, chosen.float()))
                assert not refused
            except sidelane.Error as error:
                assert refused and error.kind in ("TooManyTokens", "PeerRefused"), error.kind
