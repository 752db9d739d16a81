"""Worlds beside torch's: by torchrun, and by a process group."""

import torch_needed  # noqa: F401

import os
import socket
import subprocess
import sys
from pathlib import Path

import joins

import sidelane


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_process_group_brings_its_members_together():
    said = sidelane.launch(joins.by_group, 3, free_port())
    assert said == [(-1, -1, []), (0, 2, [0.0, 2.5]), (1, 2, [1.5, 0.0])]


def test_torchrun_says_all_that_is_needed():
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    run = subprocess.run(
        [*command, str(Path(joins.__file__))], env=clean, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    assert sorted(line for line in run.stdout.splitlines() if "torchrun" in line) == [
        "rank 0 of torchrun is done",
        "rank 1 of torchrun is done",
    ]
