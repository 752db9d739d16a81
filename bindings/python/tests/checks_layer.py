"""A whole layer on the host: whole numbers, so that torch's results are the same in any order."""

import pytest
import torch
from layers import EXPERTS, FFN, HIDDEN, built, by_torch, whole

import sidelane


SHAPE = ("InputError", "Shape")


def refused(call):
    try:
        call()
    except sidelane.Error as error:
        return type(error).__name__, error.kind
    return None


def step(layer, of, me):
    out, tape = layer.forward(of.x[me], of.residual[me])
    return out, layer.backward(tape, of.of_out[me])


def right(seen, of, me):
    out, gradients = by_torch(of, me)
    assert torch.equal(seen[0], out)
    assert seen[1].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(seen[1][name], gradient), name


def check_steps_have_the_numbers_of_torch(world):
    of, me = whole(world.size), world.rank
    for settings in ({}, {"chunks": 3}, {"chunks": 2, "overlap": False, "align": 4}, {"sum_order": "rank"}):
        layer = built(world, of, **settings)
        assert (layer.place, layer.gate_place, layer.dtype, layer.stream) == ("host", "host", "float32", None)
        for _ in range(2):
            right(step(layer, of, me), of, me)


def check_tensors_of_numpy_give_tensors_of_numpy(world):
    of, me = whole(world.size), world.rank
    layer = built(world, of, router=of.router.numpy())
    out, tape = layer.forward(of.x[me].numpy(), of.residual[me].numpy())
    gradients = layer.backward(tape, of.of_out[me].numpy())
    right((torch.from_numpy(out), {name: torch.from_numpy(one) for name, one in gradients.items()}), of, me)


def check_weights_are_set_between_steps(world):
    of, me = whole(world.size), world.rank
    mine = of.experts[of.held(me)]
    layer = built(world, of, router=None, experts=torch.zeros_like(mine), shared=torch.zeros_like(of.experts[EXPERTS:]))
    out, tape = layer.forward(of.x[me])
    assert not out.any()
    del tape
    layer.set_weights(router=of.router, experts=mine)
    layer.set_weights(shared=of.experts[EXPERTS:])
    right(step(layer, of, me), of, me)
    for wrong in ({"router": of.router[1:]}, {"router": of.router.t()}, {"experts": mine[:, 1:]}, {"shared": of.experts}):
        # Those that could be used are not copied either.
        given = {"router": torch.zeros_like(of.router), "experts": torch.zeros_like(mine)} | wrong
        assert refused(lambda: layer.set_weights(**{name: tensor.contiguous() for name, tensor in given.items()})) == SHAPE
    right(step(layer, of, me), of, me)
    without = built(world, of, shared=None)
    with pytest.raises(sidelane.InputError, match="shared: the layer has none"):
        without.set_weights(shared=of.experts[EXPERTS:])
    assert "shared" not in step(without, of, me)[1]


def check_tapes_hold_decision_and_losses_and_are_used_up(world):
    of, me = whole(world.size), world.rank
    balance = sidelane.balance("qwen3") | {"coefficient": 0.5}
    layer = built(world, of, balance=balance, z_loss=0.25)
    _, first = layer.forward(of.x[me])
    _, second = layer.forward(of.x[me], token_mask=[False] * len(of.x[me]))
    chosen = (of.x[me] @ of.router).argmax(1, keepdim=True).int()
    assert torch.equal(first.decision.experts, chosen) and first.decision.counts_after == chosen.flatten().bincount(minlength=EXPERTS).tolist()
    assert (second.decision.experts == -1).all() and not second.balance_loss
    if len(of.x[me]):
        logits = of.x[me] @ of.router
        loss, _ = sidelane.balance_loss(balance, logits, top_k=1, choices=chosen)
        assert abs(first.balance_loss - loss) < 1e-5 and abs(first.z_loss - sidelane.z_loss(0.25, logits)[0]) < 1e-4
    # In any order, the same at all ranks.
    layer.backward(second, of.of_out[me])
    layer.backward(first, of.of_out[me])
    for ask in (lambda: layer.backward(first, of.of_out[me]), lambda: first.decision):
        with pytest.raises(sidelane.ClosedError):
            ask()


def check_input_of_one_rank_is_refused_by_all_and_the_next_step_works(world):
    of, me = whole(world.size), world.rank
    layer, other = built(world, of, chunks=2), built(world, of)
    peer = ("CallError", "PeerRefused")
    x = of.x[me]
    for wrong, expected in (
        (x[:, 1:].contiguous(), SHAPE),
        (x.double(), ("InputError", "Dtype")),
        (x.bfloat16(), ("PlanError", "WrongDtype")),
        (torch.zeros(17, HIDDEN), ("PlanError", "TooManyTokens")),
    ):
        assert refused(lambda: layer.forward(wrong if me == 0 else x)) == (expected if me == 0 else peer)
        _, tape = layer.forward(x)
        wrong = wrong if len(wrong) == len(x) else torch.zeros(17, HIDDEN)
        expected = expected if expected[1] != "TooManyTokens" else ("PlanError", "WrongShape")
        assert refused(lambda: layer.backward(tape, wrong if me == 0 else of.of_out[me])) == (expected if me == 0 else peer)
    _, tape = other.forward(x)
    assert refused(lambda: layer.backward(tape, of.of_out[me]))[1] == "ForeignTape"
    mask = torch.ones(len(x) + 1, dtype=torch.bool)
    assert refused(lambda: layer.forward(x, token_mask=mask if me == 0 else None)) == (("InputError", "Setting") if me == 0 else peer)
    _, used_up = layer.forward(x)
    layer.backward(used_up, of.of_out[me])
    _, tape = layer.forward(x)
    expected = ("ClosedError", "Closed") if me == 0 else ("CallError", "KindsDiffer")
    assert refused(lambda: layer.backward(used_up if me == 0 else tape, of.of_out[me])) == expected
    right(step(layer, of, me), of, me)


def check_settings_of_one_rank_are_refused_by_all(world):
    of, me = whole(world.size), world.rank
    for wrong, expected in (
        ({"products": "mine"}, ("InputError", "Setting")),
        # torch's nn.Linear(hidden, experts).weight, and experts by matrix.
        ({"router": of.router.t().contiguous()}, SHAPE),
        ({"experts": of.experts[of.held(me)].reshape(-1, 3, HIDDEN * FFN)}, SHAPE),
        ({"experts": of.experts[:0]}, ("PlanError", "BadParameter")),
        ({"device_heap": 1 << 20}, ("InputError", "Setting")),
    ):
        told = ("CallError", "ConfigsDiffer")
        assert refused(lambda: built(world, of, **(wrong if me == 1 else {}))) == (expected if me == 1 else told)
    differs = {"chunks": 2} if me == 1 else {}
    assert refused(lambda: built(world, of, **differs)) == ("CallError", "ConfigsDiffer")
