"""Megatron-core's own tests of dispatchers, in eight CPU processes, each of which runs pytest.

    python megatron_own.py theirs|enabled|installed CHECKOUT

CHECKOUT is Megatron-LM's repository at the release that docs/from-megatron.md names: its package on
PyPI comes without tests. Prints, as JSON, what each rank says of each test: its outcome, and the
last line of an error.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from pathlib import Path
from typing import Any

RANKS = 8
OWN = Path("tests/unit_tests/transformer/moe")
ALL_TO_ALL = ("test_a2a_token_dispatcher.py", "test_shared_experts.py")
# What is under the layers, and the tests that ask for it.
MODES = {"theirs": ALL_TO_ALL, "enabled": ALL_TO_ALL, "installed": ("test_token_dispatcher.py::TestFlexDispatcher",)}


PREPARED = "SIDELANE_TEST_MEGATRON"
"""Set where ranks are forked: what they import first."""


class Outcomes:
    """A plugin of pytest that keeps what became of each test."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message.splitlines()[0] if crash else ""
            self.of[report.nodeid.rsplit("/", 1)[-1]] = (report.outcome, message)


def prepare(mode: str, checkout: str) -> None:
    """Imports Megatron from its checkout, as on a machine whose GPU is the host."""
    sys.path[:0] = [checkout, str(Path(__file__).parents[1] / "examples")]
    import megatron_on_cpu
    import torch
    import torch.distributed as dist

    import sidelane.megatron

    megatron_on_cpu.patch()
    join = dist.init_process_group
    dist.init_process_group = lambda backend=None, **how: join("gloo", **how)
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: RANKS
    torch.cuda.set_device = lambda _: None
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda here, *_, **__: here
    if mode == "installed":
        sidelane.megatron.install()

    import megatron.core.utils
    from megatron.core.tensor_parallel import random

    megatron_on_cpu.patch_megatron()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    # Without TransformerEngine 0.16.1 compares a version that is None.
    megatron.core.utils.is_te_min_version = lambda *_, **__: False
    if mode == "enabled":
        sidelane.megatron.enable()
    import tests.unit_tests.transformer.moe.test_token_dispatcher  # noqa: F401


def run(mode: str, checkout: str, port: int) -> dict[str, tuple[str, str]]:
    """What became of each test at this rank."""
    import pytest

    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK=rank, WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # Their class reads the variables when it is imported, which was before ranks were ranks.
    from tests.unit_tests.test_utilities import Utils

    Utils.rank, Utils.world_size = int(rank), RANKS
    outcomes = Outcomes()
    # Their settings ask for plugins, and their conftest for data from the network.
    how = ["-q", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", "-p", "no:warnings", "--rootdir", checkout]
    sys.stdout = open(os.devnull, "w", encoding="utf-8")
    pytest.main(how + [str(Path(checkout) / OWN / test) for test in MODES[mode]], plugins=[outcomes])
    return outcomes.of


def launch(mode: str, checkout: str) -> list[dict[str, tuple[str, str]]]:
    """The same of all ranks, which are forked from one process that has imported Megatron."""
    import megatron_own

    import sidelane

    os.environ |= {PREPARED: json.dumps([mode, checkout]), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    multiprocessing.set_forkserver_preload(["megatron_own"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return sidelane.launch(megatron_own.run, RANKS, mode, checkout, port, start="forkserver")


if __name__ == "__main__":
    print(json.dumps(launch(*sys.argv[1:])))
elif PREPARED in os.environ:
    prepare(*json.loads(os.environ[PREPARED]))
