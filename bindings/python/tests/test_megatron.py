"""Megatron-core 0.16.1 on four CPU processes: forward and all gradients, bit for bit in float32."""

import importlib.metadata
import os

import pytest
from test_joins import free_port

import sidelane

try:
    importlib.metadata.version("megatron-core")
except importlib.metadata.PackageNotFoundError:
    # Whoever counts on this judge says so.
    assert "SIDELANE_NEED_MEGATRON" not in os.environ
    pytest.skip("megatron-core is not installed", allow_module_level=True)


def test_rows_sums_and_gradients_are_megatron_s_own():
    import megatron_ranks

    cases = [f"{who} {k} {capacity}" for k in (1, 2, 8) for capacity in (None, 1.0) for who in ("all-to-all", "flex")]
    assert sidelane.launch(megatron_ranks.judged, 4, free_port(), 1) == [cases] * 4


def test_tensor_parallel_ranks_share_their_experts_rows():
    import megatron_ranks

    cases = [f"tensor parallel 2 {capacity}" for capacity in (None, 1.0)]
    assert sidelane.launch(megatron_ranks.judged, 4, free_port(), 2) == [cases] * 4


def test_install_is_refused_where_it_would_come_too_late():
    import megatron_ranks

    [said] = sidelane.launch(megatron_ranks.refused, 1)
    assert [kind for kind, _ in said] == ["Loaded", "TooLate", "ValueError"]
    assert "before it is imported" in said[0][1] and "before importing megatron.core" in said[1][1]
