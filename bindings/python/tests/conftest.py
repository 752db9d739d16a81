"""One world per number of ranks: its processes make all checks of a module, one after another, and
each is a test.

A module ``test_x`` has its checks in ``checks_x``: functions ``check_*(world)`` that every rank
calls, named as the test is; ``test_x.environment()``, if there is one, is what its ranks find in
theirs.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import Literal

import pytest

import sidelane

sys.path.insert(0, str(Path(__file__).parent))
from checking import checks_of, make_checks

# A rank that waits in vain shall say so within the patience of whoever runs this.
os.environ.setdefault("SIDELANE_DEADLINE_MS", "120000")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Megatron compiles small functions when they are first called, for longer than all checks take.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


@cache
def world_of(module: str, ranks: int, nodes: int, start: Literal["spawn", "forkserver"]) -> list[dict[str, str | None]]:
    tests = importlib.import_module(module.replace("checks_", "test_"))
    env = tests.environment() if hasattr(tests, "environment") else None
    return sidelane.launch(make_checks, ranks, module, nodes=nodes, env=env, start=start)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "checked" in metafunc.fixturenames:
        module = metafunc.module.__name__.replace("test_", "checks_")
        shapes, start = getattr(metafunc.module, "SHAPES"), getattr(metafunc.module, "START", "spawn")
        cases = [(module, check, ranks, nodes, start) for ranks, nodes in shapes for check in checks_of(module)]
        ids = [f"{check[6:]}-{ranks}x{nodes}" for _, check, ranks, nodes, _ in cases]
        metafunc.parametrize("checked", cases, ids=ids)


@pytest.fixture
def hold() -> object:
    """Holds the outcome of one check at all ranks against what it should be."""

    def judge(checked: tuple[str, str, int, int, Literal["spawn", "forkserver"]]) -> None:
        module, check, ranks, nodes, start = checked
        said = world_of(module, ranks, nodes, start)
        assert len(said) == ranks
        wrong = [f"rank {rank}: {of.get(check, 'not made')}" for rank, of in enumerate(said) if of.get(check, "") is not None]
        assert not wrong, "\n".join(wrong)

    return judge
