"""Dispatch and combine as operators, which a compiled graph has as they are."""

import torch_needed  # noqa: F401

SHAPES = [(2, 1)]


def environment() -> dict[str, str]:
    """Ranks that compile, as others' do not."""
    return {"TORCHDYNAMO_DISABLE": "0"}


def test_operators(checked, hold):
    hold(checked)
