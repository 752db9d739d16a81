"""The shapes of vLLM, SGLang and FlashInfer: callers that do what these do, against what each rank
can tell.
"""

import torch_needed  # noqa: F401

SHAPES = [(2, 1), (4, 2)]


def test_serving(checked, hold):
    hold(checked)
