"""Checks of CUDA tensors against the host's bits, in processes that share a GPU, and a table of how
they went.

The checks are those that run on stand-ins in the tests: ``tests/checks_*cuda.py``. Exit codes: 0
all is well, 1 something is not, 2 something is missing here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

MISSING = 2
MODULES = {
    "checks_cuda": "torch",
    "checks_serving_cuda": "torch",
    "checks_layer_cuda": "torch",
    "checks_megatron_cuda": "megatron-core",
}
"""Which checks there are, and the package that they need."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    check: str
    processes: int
    result: str
    seconds: float

    def __str__(self) -> str:
        return f"| {self.check} | {self.processes} | {self.result} | {self.seconds:.1f} |"


def missing() -> list[str]:
    """What these checks need and do not find."""
    found = []
    if importlib.util.find_spec("sidelane") is None:
        found.append("the package sidelane: pip install ./bindings/python")
    if importlib.util.find_spec("torch") is None:
        return [*found, "torch with CUDA: pip install torch"]
    import torch

    if torch.version.cuda is None:
        found.append(f"a torch with CUDA: {torch.__version__} has none")
    elif not torch.cuda.is_available():
        found.append("a GPU: torch sees none (nvidia-smi says whether the driver does)")
    return found


def has(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def make(module: str, processes: int, env: dict[str, str] | None = None) -> list[Row]:
    """All checks of a module, between so many processes."""
    from checking import checks_of, make_checks

    import sidelane

    start = time.monotonic()
    try:
        said = sidelane.launch(make_checks, processes, module, env=env)
    except Exception as error:
        return [Row(module, processes, f"**the processes ended**: {error}", time.monotonic() - start)]
    names, seconds = checks_of(module), time.monotonic() - start
    rows = []
    for name in names:
        wrong = {rank: of.get(name, "not made") for rank, of in enumerate(said) if of.get(name, "") is not None}
        for rank, trace in wrong.items():
            print(f"{name}, {processes} processes, rank {rank}:\n{trace}", file=sys.stderr)
        rows.append(Row(name.removeprefix("check_"), processes, "**differs**" if wrong else "same bits", seconds / len(names)))
    return rows


def heading() -> list[str]:
    """What this ran on."""
    import torch

    on = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if torch.cuda.is_available() else "the fake driver"
    megatron = importlib.metadata.version("megatron-core") if has("megatron-core") else "none"
    return [
        f"{time.strftime('%Y-%m-%d')}: {on}, torch {torch.__version__}, Megatron-core {megatron}.",
        "",
        "| check | processes on one device | against the host | seconds |",
        "|---|---|---|---|",
    ]


def run(processes: list[int], modules: list[str], env: dict[str, str] | None = None) -> tuple[list[str], int]:
    """The table, and the exit code."""
    lines, code = heading(), 0
    for module in modules:
        needed = MODULES[module]
        if not has(needed):
            lines.append(f"| {module} | | skipped: {needed} is not installed | |")
            continue
        for count in processes:
            rows = make(module, count, env)
            code = max(code, *(0 if row.result == "same bits" else 1 for row in rows))
            lines += map(str, rows)
    return lines, code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, help="also writes the table to this file")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--checks", nargs="+", default=list(MODULES), choices=list(MODULES))
    given = parser.parse_args()
    lacks = missing()
    if lacks:
        print("This needs:", *lacks, sep="\n  - ", file=sys.stderr)
        return MISSING
    lines, code = run(given.processes, given.checks)
    print(*lines, sep="\n")
    if given.table:
        given.table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
