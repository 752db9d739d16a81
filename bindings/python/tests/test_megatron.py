"""Megatron-core 0.16.1 in CPU processes: forward and all gradients against its own all-to-all."""

import importlib.metadata
import multiprocessing
import os
import sys
from types import SimpleNamespace

import pytest

import sidelane

try:
    importlib.metadata.version("megatron-core")
except importlib.metadata.PackageNotFoundError:
    # Whoever counts on this judge says so.
    assert "SIDELANE_NEED_MEGATRON" not in os.environ
    pytest.skip("megatron-core is not installed", allow_module_level=True)

SHAPES = [(4, 1), (8, 1)]
# Megatron takes each process as long to import as all checks take.
START = "forkserver"
multiprocessing.set_forkserver_preload(["checks_megatron"])


def test_megatron(checked, hold):
    hold(checked)


@pytest.mark.parametrize(
    "module, kind, message",
    [
        ("deep_ep", "Loaded", "before it is imported"),
        ("megatron.core.transformer.moe.fused_a2a", "TooLate", "before importing megatron.core"),
    ],
)
def test_install_is_refused_where_it_would_come_too_late(monkeypatch, module, kind, message):
    import sidelane.megatron

    monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    with pytest.raises(sidelane.Error, match=message) as refused:
        sidelane.megatron.install()
    assert refused.value.kind == kind


def test_a_dispatcher_refuses_rows_that_are_padded_for_quantization():
    import sidelane.megatron

    config = SimpleNamespace(moe_router_padding_for_quantization=True)
    with pytest.raises(ValueError, match="moe_router_padding_for_quantization"):
        sidelane.megatron.TokenDispatcher(4, [0, 1, 2, 3], config, None)
