"""The script for a machine with a GPU, without one: what it says is missing, and its table of
checks on fake devices.
"""

import torch_needed  # noqa: F401

import subprocess
import sys
from pathlib import Path

import torch
from devices import environment

SCRIPT = Path(__file__).parents[1] / "gpu" / "run.py"


def test_script_without_a_gpu_says_what_is_missing():
    assert not torch.cuda.is_available()
    made = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert (made.returncode, made.stdout) == (2, "")
    assert "  - a GPU: torch sees none" in made.stderr or "  - a torch with CUDA" in made.stderr


def test_gpu_script_has_line_per_check_of_processes_on_one_device(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import run

    table = run.Table()
    run.run(table, [2], ["checks_serving_cuda"], environment() | {"SIDELANE_TEST_GPUS": "1"})
    checks = [line.split(" | ") for line in table.lines[4:]]
    assert len(checks) == 4 and all(check[1:3] == ["2", "same bits"] for check in checks), table.lines
    assert table.code == 0 and "the fake driver" in table.lines[0]


def test_script_fails_where_a_check_does(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import run

    # Its ranks have no devices.
    table = run.Table()
    run.run(table, [2], ["checks_serving_cuda"], {"SIDELANE_CUDA_LIBRARY": "none"})
    assert table.code == 1 and "**differs**" in table.lines[4], table.lines
    assert all("**not made**" in line for line in table.lines[5:]), table.lines
