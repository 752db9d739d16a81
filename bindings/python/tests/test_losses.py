"""Losses of routers, and gradients through their weights: against the same in torch's own
operations.
"""

import torch_needed  # noqa: F401

import numpy as np
import pytest
import torch
from torch.autograd import grad

import sidelane
from sidelane import router


def drawn(tokens=6, experts=5):
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens + experts)).requires_grad_()


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_weights_lead_back_to_the_logits():
    for preset, of_chosen in (("mixtral", True), ("switch", False)):
        logits = drawn()
        gate = sidelane.Gate(sidelane.preset(preset, 5, 2 if of_chosen else 1))
        made = router.route(gate, logits)
        chosen = made.choices.long()
        scores = logits.gather(1, chosen).softmax(1) if of_chosen else logits.softmax(1).gather(1, chosen)
        left = made.experts >= 0
        close(made.weights[left], scores[left])
        outer = torch.randn(made.weights.shape, generator=torch.Generator().manual_seed(1)) * left
        close(*(grad(weights, logits, outer)[0] for weights in (made.weights, scores)))


def test_noise_that_weighs_is_on_the_way_back():
    for noise in ({"jitter": {"eps": 0.3}}, {"normal": {"deviation": 0.5}}, "gumbel"):
        logits = drawn()
        config = sidelane.preset("olmoe", 5, 2)
        config["noise"] = noise
        gate = sidelane.Gate(config)
        call = {"training": True, "seed": 3, "step": 4, "rank": 1}
        made = router.route(gate, logits, **call)
        noisy = gate.noisy_logits(logits.detach(), **call)
        assert not torch.equal(noisy, logits.detach())
        if noise == "gumbel":
            weigh = logits
        elif "jitter" in noise:
            weigh = logits * (noisy / logits).detach()
        else:
            weigh = logits + (noisy - logits).detach()
        scores = weigh.softmax(1).gather(1, made.choices.long())
        close(made.weights, scores)
        outer = torch.arange(12.0).reshape(6, 2)
        close(*(grad(weights, logits, outer)[0] for weights in (made.weights, scores)))


def test_a_balance_loss_is_that_of_its_formula():
    logits = drawn()
    gate = sidelane.Gate(sidelane.preset("switch", 5, 1))
    choices = gate.route(logits.detach()).choices
    balance = sidelane.balance("switch") | {"coefficient": 0.5}
    counts = torch.bincount(choices[:, 0].long(), minlength=5)
    # Switch: experts times the sum of shares of choices times mean probabilities.
    expected = 0.5 * 5 * (counts / 6 * logits.softmax(1).mean(0)).sum()
    loss = router.balance_loss(balance, logits, choices)
    close(loss, expected)
    close(*(grad(3 * of, logits)[0] for of in (loss, expected)))

    counted = sidelane.balance_counts(balance, logits.detach(), top_k=1, choices=choices)
    assert counted.dtype == torch.float64 and counted.tolist() == [counts.tolist()]
    # Two ranks with the same tokens: each has half of what one would have alone.
    close(router.balance_loss(balance, logits, choices, totals=(2 * counted, 12.0)), expected / 2)
    used = [True, True, False, True, True, False]
    alone, _ = sidelane.balance_loss(
        balance | {"unused": "left_out"}, logits.detach()[used].contiguous(), top_k=1, choices=choices[used].contiguous()
    )
    left_out = router.balance_loss(balance | {"unused": "left_out"}, logits, choices, token_mask=used)
    close(left_out, torch.tensor(alone))


def test_more_parts_than_any_memory_holds_are_refused():
    logits = drawn().detach()
    choices, none = torch.zeros(6, 1, dtype=torch.int32), torch.zeros(0, 5)
    for parts in ({"consecutive": 2**32 - 1}, {"interleaved": 2**32 - 1}):
        balance = sidelane.balance("switch") | {"parts": parts}
        for call in (sidelane.balance_counts, sidelane.balance_loss):
            with pytest.raises(sidelane.GateError, match="parts"):
                call(balance, logits, top_k=1, choices=choices)
        with pytest.raises(MemoryError, match="parts"):
            sidelane.balance_counts(balance, none, top_k=1, choices=choices[:0])
        loss, gradient = sidelane.balance_loss(balance, none, top_k=1, choices=choices[:0])
        assert loss == 0 and gradient.shape == (0, 5)
    few = sidelane.balance("switch") | {"parts": {"consecutive": 3}}
    counts = sidelane.balance_counts(few, none, top_k=1, choices=choices[:0])
    assert counts.tolist() == [[0.0] * 5] * 3


def test_large_logits_cost():
    logits = drawn()
    loss, expected = router.z_loss(0.1, logits), 0.1 * logits.logsumexp(1).square().mean()
    close(loss, expected)
    close(*(grad(of, logits)[0] for of in (loss, expected)))
    value, gradient = sidelane.z_loss(0.1, logits.detach().numpy())
    assert isinstance(gradient, np.ndarray) and value == loss.item()


def test_importance_and_load_cost_where_they_are_uneven():
    logits = drawn()
    choices = logits.detach().topk(2).indices.int()
    loss = router.importance_loss(1.0, logits, choices, noise=1.0)
    shares = logits.softmax(1)
    line = logits.gather(1, choices[:, 1:].long())
    load = torch.distributions.Normal(0.0, 1 / 5).cdf(shares - line).sum(0)
    uneven = [x.var() / (x.mean() ** 2 + 1e-10) for x in (shares.sum(0), load)]
    expected = sum(uneven) / 2
    close(loss, expected)
    close(*(grad(of, logits)[0] for of in (loss, expected)))


def test_unusable_loss_input_is_named_in_error():
    logits = torch.zeros(2, 4)
    with pytest.raises(sidelane.InputError, match="balance"):
        sidelane.balance_loss({"coefficient": 1.0}, logits, top_k=1)
    with pytest.raises(sidelane.InputError, match="preset"):
        sidelane.balance("no such")
    with pytest.raises(sidelane.InputError, match="logits: its elements are float64, not float32"):
        sidelane.z_loss(1.0, logits.double())
    with pytest.raises(sidelane.GateError) as infinite:
        sidelane.z_loss(1.0, torch.full((2, 4), torch.inf))
    assert infinite.value.kind == "NotFinite"
    with pytest.raises(sidelane.GateError) as choice:
        sidelane.balance_loss(sidelane.balance("olmoe"), logits, top_k=1, choices=torch.full((2, 1), 4, dtype=torch.int32))
    assert (choice.value.kind, choice.value.expert) == ("BadChoice", 4)
    with pytest.raises(sidelane.GateError):
        sidelane.balance_loss(sidelane.balance("olmoe"), logits, top_k=1)
