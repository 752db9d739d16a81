"""Layers that torch compiles into one graph, against the same without: to the bit."""

import gc
import weakref

import torch
from checks_autograd import leaves
from checks_exchange import built
from routing import case, same

from sidelane import autograd, operators


def eager(ep, x, ids, weights):
    routed = autograd.dispatch(ep, x, ids, weights)
    y = torch.sin(routed.rows) if ep.weighted else torch.sin(routed.rows) * routed.weights.unsqueeze(1)
    return autograd.combine(ep, y, routed)


def in_graph(ep, x, ids, weights):
    routed = operators.dispatch(ep, x, ids, weights)
    y = torch.sin(routed.rows) if ep.weighted else torch.sin(routed.rows) * routed.weights.unsqueeze(1)
    return operators.combine(ep, y, routed)


def compiled(function, backend):
    """In one graph, or not at all."""
    return torch.compile(function, backend=backend, fullgraph=True)


def pass_of(layer, ep, of, rank):
    x, weights = leaves(of, rank)
    out = layer(ep, x, of.ids[rank], weights)
    out.backward(torch.cos(of.x[rank]))
    return out.detach(), x.grad, weights.grad


def check_a_whole_graph_gives_the_bits_of_no_graph(world):
    for weighted in (False, True):
        of = case(world.size)
        ep = built(world, of, weighted=weighted)
        expected = pass_of(eager, ep, of, world.rank)
        for layer in (in_graph, compiled(in_graph, "eager"), compiled(in_graph, "aot_eager")):
            for _ in range(2):
                for one, other in zip(pass_of(layer, ep, of, world.rank), expected, strict=True):
                    same(one, other)


def check_a_graph_is_of_one_layer_and_compiled_anew_for_another(world):
    layer = compiled(in_graph, "eager")
    for top_k in (3, 2):
        of = case(world.size, top_k=top_k)
        ep = built(world, of)
        for one, other in zip(pass_of(layer, ep, of, world.rank), pass_of(eager, ep, of, world.rank), strict=True):
            same(one, other)


def check_a_ticket_keeps_its_handle_and_no_longer(world):
    of, me = case(world.size), world.rank
    ep = built(world, of)
    x, weights = leaves(of, me)
    routed = operators.dispatch(ep, x, of.ids[me], weights)
    number = int(routed.ticket)
    counts = [sum(row[0] == expert for row in of.rows(me)) for expert in of.held(me)]
    assert routed.tokens_per_expert.tolist() == counts
    kept = weakref.ref(operators._tickets[number])
    out = operators.combine(ep, routed.rows * 2, routed)
    del routed
    gc.collect()
    assert kept() is not None, "the backward pass needs it"
    out.sum().backward()
    del out
    gc.collect()
    assert kept() is None and number not in operators._tickets


def check_what_is_not_compiled_is_left_alone(world):
    of = case(world.size)
    ep = built(world, of)
    layer = torch.compile(eager, backend="eager")
    for one, other in zip(pass_of(layer, ep, of, world.rank), pass_of(eager, ep, of, world.rank), strict=True):
        same(one, other)
