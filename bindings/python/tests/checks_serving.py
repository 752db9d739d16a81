"""Callers in the shapes of vLLM's modular kernel, SGLang's dispatchers and FlashInfer's moe_ep."""

from abc import ABC, abstractmethod
from types import SimpleNamespace

import pytest
import torch
from routing import case, same

import sidelane
from sidelane.serving import CombineInput, Communication, CommunicationConfig, Dispatcher, PrepareFinalize


class Modular(ABC):
    """Names that vLLM's class leaves to whoever derives from it."""

    @property
    @abstractmethod
    def activation_format(self): ...
    @abstractmethod
    def topk_indices_dtype(self): ...
    @abstractmethod
    def max_num_tokens_per_rank(self): ...
    @abstractmethod
    def num_dispatchers(self): ...
    @abstractmethod
    def output_is_reduced(self): ...
    @abstractmethod
    def prepare(self, *arguments): ...
    @abstractmethod
    def finalize(self, *arguments): ...


class Ours(PrepareFinalize, Modular):
    pass


class TopKWeightAndReduceDelegate:
    """Whoever finalizes applies weights."""


class TopKWeightAndReduceNoOP:
    """The experts have done it."""

    def apply(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input):
        assert output is None and topk_weights.shape == topk_ids.shape
        return fused_expert_output


def built(world, of):
    return sidelane.ExpertParallel(world, experts=of.experts, top_k=of.top_k, hidden=of.hidden, dtype=of.x[0].dtype)


def factor(expert):
    return 2.0 ** (expert % 3 - 1)


def layer(rows, ids):
    """Experts that multiply by a power of two of their own; each row has one."""
    assert ids.shape == (len(rows), 1)
    return rows * torch.tensor([factor(int(expert)) for expert in ids], dtype=rows.dtype).reshape(-1, 1)


def sums(of, rank, weighted=True):
    row_of = {}
    for holder in range(of.ranks):
        for expert, source, token, k in of.rows(holder):
            weight = of.weights[source][token, k] if weighted else 1
            row_of[expert, source, token] = of.x[source][token] * factor(expert) * weight
    return of.summed(rank, row_of)


def prepared(kernel, of, me):
    return kernel.prepare_async(of.x[me], of.weights[me], of.ids[me].long(), of.experts, None, False, None, False)


def check_vllm_s_halves_give_the_layer_s_sums(world):
    of, me = case(world.size), world.rank
    kernel = Ours(built(world, of), activation_format="standard")
    assert kernel.supports_async() and kernel.output_is_reduced()
    assert (kernel.num_dispatchers(), kernel.max_num_tokens_per_rank()) == (world.size, None)
    for impl in (TopKWeightAndReduceDelegate(), TopKWeightAndReduceNoOP()):
        rows, scales, meta, ids, weights = prepared(kernel, of, me)()
        same(rows, of.rows_of(me, of.x))
        assert scales is None
        assert ids.flatten().tolist() == [expert for expert, *_ in of.rows(me)]
        assert meta.expert_num_tokens.tolist() == [sum(row[0] == expert for row in of.rows(me)) for expert in of.held(me)]
        made = layer(rows, ids)
        if isinstance(impl, TopKWeightAndReduceNoOP):
            made = made * weights
        out = torch.full_like(of.x[me], torch.nan)
        receive = kernel.finalize_async(out, made, weights, ids, False, impl)
        receive()
        same(out, sums(of, me))


def check_microbatches_have_handles_of_their_own(world):
    batches, me = [case(world.size), case(world.size, tokens=4)], world.rank
    now = [0]
    kernel = Ours(*[built(world, of) for of in batches], microbatch=lambda: now[0])
    under_way = []
    for now[0], of in enumerate(batches):
        under_way.append(prepared(kernel, of, me))
    received = [receive() for receive in under_way]
    outs = [torch.full_like(of.x[me], torch.nan) for of in batches]
    for now[0] in (1, 0):
        rows, _, _, ids, weights = received[now[0]]
        kernel.finalize(outs[now[0]], layer(rows, ids), weights, ids, False, TopKWeightAndReduceDelegate())
    for of, out in zip(batches, outs):
        same(out, sums(of, me))


def check_weights_on_the_input_are_not_applied_again(world):
    of, me = case(world.size, top_k=1), world.rank
    kernel = Ours(built(world, of))
    rows, _, _, ids, weights = kernel.prepare(of.x[me], of.weights[me], of.ids[me].long(), of.experts, None, True, None, False)
    out = torch.full_like(of.x[me], torch.nan)
    kernel.finalize(out, layer(rows, ids), weights, ids, True, TopKWeightAndReduceDelegate())
    same(out, sums(of, me))


def check_what_vllm_may_ask_and_is_not_there_is_refused(world):
    of, me = case(world.size), world.rank
    kernel = Ours(built(world, of))
    ids, weights = of.ids[me].long(), of.weights[me]
    with pytest.raises(ValueError, match="not of 3"):
        kernel.prepare(of.x[me], weights, ids, of.experts, None, True, None, False)
    with pytest.raises(ValueError, match="11 experts where 10 are held"):
        kernel.prepare(of.x[me], weights, ids, 11, None, False, None, False)
    with pytest.raises(ValueError, match="quantized by the experts"):
        kernel.prepare(of.x[me], weights, ids, of.experts, None, False, SimpleNamespace(quant_dtype=torch.int8), False)


def check_vllm_s_fault_contract_is_answered(world):
    of, me = case(world.size), world.rank
    eps = [built(world, of), built(world, of)]
    kernel = Ours(*eps)
    assert kernel.support_fault_tolerance is False, "a loss ends the world"
    same(kernel.query_active_mask(), torch.tensor([True] * world.size))
    active = [rank != 1 for rank in range(world.size)]
    eps[0].mask(active)
    same(kernel.query_active_mask(), torch.tensor(active))
    same(kernel.query_fault(), torch.tensor([False]))
    rows, _, _, ids, weights = prepared(kernel, of, me)()
    out = torch.full_like(of.x[me], torch.nan)
    kernel.finalize(out, layer(rows, ids), weights, ids, False, TopKWeightAndReduceDelegate())
    same(out, sums(of.masked(active), me))


def check_sglang_s_stages_give_the_layer_s_sums(world):
    of, me = case(world.size), world.rank
    first, second = Dispatcher(built(world, of)), Dispatcher(built(world, of))
    chosen = SimpleNamespace(topk_ids=of.ids[me].long(), topk_weights=of.weights[me])
    # Two batches whose stages take turns.
    first.dispatch_a(of.x[me], chosen)
    second.dispatch_a(of.x[me], chosen)
    one = first.dispatch_b()
    made = layer(one.hidden_states, one.topk_ids) * one.topk_weights
    two = second.dispatch_b()
    first.combine_a(CombineInput(made, one.topk_ids, one.topk_weights))
    out = first.combine_b()
    same(out, sums(of, me))
    same(second.combine(CombineInput(layer(two.hidden_states, two.topk_ids))), sums(of, me, weighted=False))
    assert one.num_recv_tokens_per_expert == [sum(row[0] == expert for row in of.rows(me)) for expert in of.held(me)]


def check_sglang_s_stages_come_in_order(world):
    of, me = case(world.size), world.rank
    dispatcher = Dispatcher(built(world, of))
    with pytest.raises(RuntimeError, match="after 'dispatching'"):
        dispatcher.dispatch_b()
    with pytest.raises(RuntimeError, match="after 'dispatched'"):
        dispatcher.combine(CombineInput(of.x[me]))
    # What is refused leaves it as it was.
    with pytest.raises(sidelane.InputError):
        dispatcher.dispatch_a(of.x[me].double(), SimpleNamespace(topk_ids=of.ids[me], topk_weights=of.weights[me]))
    out = dispatcher.dispatch(of.x[me], SimpleNamespace(topk_ids=of.ids[me], topk_weights=of.weights[me]))
    same(dispatcher.combine(CombineInput(layer(out.hidden_states, out.topk_ids))), sums(of, me, weighted=False))


def check_rows_with_pads_have_their_experts(world):
    of, me = case(world.size), world.rank
    settings = {"experts": of.experts, "top_k": of.top_k, "hidden": of.hidden, "dtype": of.x[0].dtype}
    kernel = Ours(sidelane.ExpertParallel(world, align=4, **settings))
    rows, _, meta, ids, weights = prepared(kernel, of, me)()
    assert len(ids) == len(rows) == len(weights) and len(rows) % 4 == 0
    out = torch.full_like(of.x[me], torch.nan)
    kernel.finalize(out, layer(rows, ids), weights, ids, False)
    same(out, sums(of, me))
    with pytest.raises(ValueError, match="weighs rows itself"):
        Ours(sidelane.ExpertParallel(world, weighted=True, **settings))


class MoEEp(ABC):
    """Names that FlashInfer's class leaves to whoever derives from it."""

    @classmethod
    @abstractmethod
    def is_platform_supported(cls): ...
    @abstractmethod
    def dispatch(self, *arguments): ...
    @abstractmethod
    def combine(self, *arguments): ...


BACKENDS = {}


def register_communication(name):
    def registered(backend):
        backend.backend_name, BACKENDS[name] = name, backend
        return backend

    return registered


def create_communication(bootstrap, params, config):
    return BACKENDS[config.backend_name](bootstrap, params, config=config)


@register_communication("sidelane")
class OurCommunication(Communication, MoEEp):
    pass


def communication(world, of, **named):
    """As FlashInfer makes one, for 12 tokens of a rank."""
    dtype = of.x[0].dtype
    params = {"num_experts": of.experts, "top_k": of.top_k, "max_tokens_per_rank": 12, "hidden_size": of.hidden}
    params |= {"token_dtype": dtype, "dispatch_format": None, "invalid_expert_id": -1} | named
    bootstrap = SimpleNamespace(rank=world.rank, world_size=world.size)
    return create_communication(bootstrap, SimpleNamespace(**params), CommunicationConfig(world, device=None))


def of_rank(chosen, held):
    """Which of a token's choices a rank has."""
    return [k for k, expert in enumerate(chosen) if expert in held]


def partial(of, source, token, holder):
    """What a rank's experts make of a token: weighted, and added up as they were chosen."""
    row = torch.zeros(of.hidden)
    for k in of_rank(of.ids[source][token].tolist(), of.held(holder)):
        row += of.x[source][token] * factor(int(of.ids[source][token, k])) * of.weights[source][token, k]
    return row


def of_ranks(of, me):
    """What returns to a rank: sums over ranks."""
    out = torch.zeros_like(of.x[me])
    for token, chosen in enumerate(of.ids[me].tolist()):
        for holder in range(of.ranks):
            if of_rank(chosen, of.held(holder)):
                out[token] += partial(of, me, token, holder)
    return out


def local_experts(of, me, got):
    """FlashInfer's: a row for each row, by the ids that are of this rank."""
    made = torch.zeros_like(got.hidden_states)
    for row, (ids, weights) in enumerate(zip(got.topk_ids.tolist(), got.topk_weights)):
        for k in of_rank(ids, of.held(me)):
            made[row] += got.hidden_states[row] * factor(ids[k]) * weights[k]
    return made


def check_flashinfer_s_rows_are_the_tokens_of_each_rank(world):
    of, me = case(world.size, experts=12), world.rank
    comm = communication(world, of, invalid_expert_id=99)
    assert comm.is_platform_supported() and not comm.supports_cuda_graph
    assert (comm.ep_rank, comm.ep_size, comm.num_local_experts) == (me, world.size, 12 // world.size)
    got = comm.dispatch(of.x[me], of.ids[me].long(), of.weights[me])
    assert got.tokens_per_rank == 12 and got.hidden_states_scale is got.eplb_gathered_stats is None
    assert got.hidden_states.shape == (12 * world.size, of.hidden)
    assert got.topk_ids.shape == got.topk_weights.shape == (12 * world.size, of.top_k)
    for source in range(world.size):
        here = [t for t, chosen in enumerate(of.ids[source].tolist()) if of_rank(chosen, of.held(me))]
        rows = slice(12 * source, 12 * source + len(here))
        same(got.hidden_states[rows], of.x[source][here])
        ids = [[expert if expert in of.held(me) else 99 for expert in of.ids[source][t].tolist()] for t in here]
        assert got.topk_ids[rows].tolist() == ids
        assert (got.topk_ids[rows.stop : 12 * source + 12] == 99).all(), "no token, no expert"
        mine = got.topk_ids[rows] != 99
        same(got.topk_weights[rows][mine], of.weights[source][here][mine])
    comm.combine(got.hidden_states)


def check_flashinfer_s_calls_give_the_layer_s_sums(world):
    of, me = case(world.size, experts=12), world.rank
    comm = communication(world, of)
    for place in ("new", "output", "buffer"):
        got = comm.dispatch(of.x[me], of.ids[me].long(), of.weights[me], max_tokens_per_rank=11)
        made, output = local_experts(of, me, got), None
        if place == "output":
            made, output = made.view(world.size, 12, -1), torch.full_like(of.x[me], torch.nan)
        if place == "buffer":
            assert comm.get_combine_input_buffer(torch.float64) is None
            made = comm.get_combine_input_buffer(made.dtype).copy_(made)
        out = comm.combine(made, output=output)
        assert output is None or out is output
        same(out, of_ranks(of, me))
    # A masked rank sends nothing and receives nothing, and shapes stay.
    active = [rank != 1 for rank in range(world.size)]
    del got, made
    comm.ep.mask(active)
    got = comm.dispatch(of.x[me], of.ids[me].long(), of.weights[me])
    same(comm.combine(local_experts(of, me, got)), of_ranks(of.masked(active), me))


def check_flashinfer_s_calls_come_in_turn_and_what_is_not_there_is_refused(world):
    of, me = case(world.size, experts=12), world.rank
    for named, words in ({"num_experts": 11}, "11 experts"), ({"dispatch_format": "MXFP8"}, "dispatch format"):
        with pytest.raises(ValueError, match=words):
            communication(world, of, **named)
    with pytest.raises(ValueError, match="rank 9 of 10"):
        OurCommunication(SimpleNamespace(rank=9, world_size=10), None, CommunicationConfig(world))
    comm = communication(world, of)
    assert comm.is_workload_feasible(12) and not comm.is_workload_feasible(13)
    given = of.x[me], of.ids[me].long()
    with pytest.raises(RuntimeError, match="after a dispatch"):
        comm.combine(of.x[me])
    with pytest.raises(NotImplementedError, match="neither scales"):
        comm.dispatch(*given, hidden_states_scale=of.weights[me])
    with pytest.raises(ValueError, match="1 to 12"):
        comm.dispatch(*given, max_tokens_per_rank=13)
    got = comm.dispatch(*given)
    assert got.topk_weights is None
    with pytest.raises(RuntimeError, match="the one before"):
        comm.dispatch(*given)
    # A combine that one rank cannot make gives up the dispatch on all.
    kind = "Shape" if me == 0 else "PeerRefused"
    with pytest.raises(sidelane.Error) as error:
        comm.combine(got.hidden_states[:, 1:] if me == 0 else got.hidden_states)
    assert error.value.kind == kind
    del got
    got = comm.dispatch(*given)
    comm.combine(got.hidden_states)
    comm.destroy()
    comm.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        comm.dispatch(*given)
