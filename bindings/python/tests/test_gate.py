"""Gates: presets, what they decide, what they refuse."""

import torch_needed  # noqa: F401

import numpy as np
import pytest
import torch

import sidelane


def test_every_preset_is_a_dictionary_that_makes_its_gate():
    assert "deepseek_v3" in sidelane.presets() and len(sidelane.presets()) == 11
    for name in sidelane.presets():
        top_k = {"deepspeed_top1": 1, "switch": 1, "deepspeed_top2": 2, "gshard": 2}.get(name, 4)
        config = sidelane.preset(name, 16, top_k)
        assert (config["experts"], config["top_k"]) == (16, top_k)
        assert sidelane.Gate(config).config == config


def test_choices_and_weights_are_those_of_the_formula():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 0.0, 0.0, 1.0]])
    decision = sidelane.Gate(sidelane.preset("mixtral", 4, 2)).route(logits)
    assert decision.experts.tolist() == [[1, 3], [0, 3]] and decision.experts.dtype == torch.int32
    assert decision.weights[0].tolist() == [0.5, 0.5]
    assert decision.counts_after == [1, 1, 0, 2] == decision.counts_before
    assert decision.slots.tolist() == [[0, 0], [0, 1]]
    same = sidelane.Gate(sidelane.preset("mixtral", 4, 2)).route(logits.numpy())
    assert isinstance(same.weights, np.ndarray) and (same.weights == decision.weights.numpy()).all()


def test_a_capacity_that_is_set_drops():
    config = sidelane.preset("switch", 2, 1)
    config["capacity"]["rule"] = {"rows": {"rows": 1}}
    decision = sidelane.Gate(config).route(torch.tensor([[1.0, 0.0]] * 3))
    assert decision.experts.tolist() == [[0], [-1], [-1]] and decision.choices.tolist() == [[0]] * 3
    assert (decision.capacity, decision.required) == (1, 3)


def test_a_bias_moves_choices_not_weights():
    gate = sidelane.Gate(sidelane.preset("olmoe", 4, 1))
    logits = torch.zeros(1, 4)
    assert gate.route(logits, bias=torch.tensor([0.0, 0.0, 1.0, 0.0])).experts.tolist() == [[2]]


def test_unusable_gate_input_is_named_in_error():
    with pytest.raises(sidelane.InputError, match="preset.*`mixtrall` is no preset") as unknown:
        sidelane.preset("mixtrall", 4, 2)
    assert unknown.value.setting == "preset"
    with pytest.raises(sidelane.GateError) as number:
        sidelane.preset("switch", 4, 2)
    assert (number.value.kind, number.value.parameter) == ("BadNumber", "top_k")
    with pytest.raises(sidelane.InputError, match="gate.*missing field"):
        sidelane.Gate({"experts": 4})
    gate = sidelane.Gate(sidelane.preset("mixtral", 4, 2))
    with pytest.raises(sidelane.InputError, match="logits: its shape is .2, 3., but its last axis must have 4"):
        gate.route(torch.zeros(2, 3))
    with pytest.raises(sidelane.GateError) as infinite:
        gate.route(torch.tensor([[0.0, torch.inf, 0.0, 0.0]]))
    assert (infinite.value.token, infinite.value.expert) == (0, 1)
    assert gate.route(torch.zeros(1, 4)).experts.tolist() == [[0, 1]], "the next call works"
