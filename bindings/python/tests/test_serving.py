"""The shapes of vLLM and SGLang: callers that do what these servers do, against what each rank can tell."""

import torch_needed  # noqa: F401

SHAPES = [(2, 1), (4, 2)]


def test_serving(checked, hold):
    hold(checked)
