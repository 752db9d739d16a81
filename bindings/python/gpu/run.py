"""Checks of CUDA tensors against the host's bits, in processes that share a GPU, and a table of how
they went, with a row for each check as it ends.

The checks are those that run on fake devices in the tests, and those of torch's memory pools, which
need its allocator: ``tests/checks_*cuda.py``. Exit codes: 0 all is well, 1 something is not, 2
something is missing here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

MISSING = 2
SAME = "same bits"
MODULES = {
    "checks_cuda": "torch",
    "checks_serving_cuda": "torch",
    "checks_layer_cuda": "torch",
    "checks_mem_pool_cuda": "torch",
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


class Table:
    """Lines that are printed, and written to a file, as they come: a run that is cut off has shown
    what it had made.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.file = path.open("w", encoding="utf-8") if path else None
        self.lines: list[str] = []
        self.code = 0

    def add(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)
        if self.file:
            print(line, file=self.file, flush=True)

    def add_row(self, row: Row) -> None:
        self.add(str(row))
        if row.result != SAME:
            self.code = 1


class Follower:
    """Adds the row of each check of a module once all of its ranks have made it."""

    def __init__(self, table: Table, processes: int) -> None:
        self.table, self.processes = table, processes
        self.said: dict[str, dict[int, str | None]] = {}
        self.last = time.monotonic()

    def follow(self, inbox: socket.socket) -> None:
        """Reads outcomes until an empty one."""
        while message := inbox.recv(1 << 18):
            rank, check, trace = json.loads(message)
            if trace is not None:
                about = f"{check}, {self.processes} processes, rank {rank}"
                print(f"{about}:\n{trace}", file=sys.stderr, flush=True)
            of = self.said.setdefault(check, {})
            of[rank] = trace
            if len(of) == self.processes:
                wrong = any(trace is not None for trace in of.values())
                self.add(check, "**differs**" if wrong else SAME)

    def add(self, check: str, result: str) -> None:
        start, self.last = self.last, time.monotonic()
        name = check.removeprefix("check_")
        self.table.add_row(Row(name, self.processes, result, self.last - start))


def make(table: Table, module: str, processes: int, env: dict[str, str] | None = None) -> None:
    """Makes all checks of a module, between so many processes."""
    from checking import checks_of, make_checks

    import sidelane

    follower, ended = Follower(table, processes), None
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end,
    ):
        address = f"{folder}/outcomes"
        inbox.bind(address)
        thread = threading.Thread(target=follower.follow, args=(inbox,), daemon=True)
        thread.start()
        try:
            sidelane.launch(make_checks, processes, module, address, env=env)
        except Exception as error:
            ended = error
        end.sendto(b"", address)
        thread.join()
    if ended is not None:
        follower.add(module, f"**the processes ended**: {ended}")
        return
    for check in checks_of(module):
        if len(follower.said.get(check, {})) < processes:
            follower.add(check, "**not made**")


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


def run(
    table: Table, processes: list[int], modules: list[str], env: dict[str, str] | None = None
) -> None:
    """Makes the checks of modules."""
    for line in heading():
        table.add(line)
    for module in modules:
        needed = MODULES[module]
        if not has(needed):
            table.add(f"| {module} | | skipped: {needed} is not installed | |")
            continue
        for count in processes:
            make(table, module, count, env)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, help="also writes the table to this file, row by row")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--checks", nargs="+", default=list(MODULES), choices=list(MODULES))
    given = parser.parse_args()
    lacks = missing()
    if lacks:
        print("This needs:", *lacks, sep="\n  - ", file=sys.stderr)
        return MISSING
    table = Table(given.table)
    run(table, given.processes, given.checks)
    return table.code


if __name__ == "__main__":
    sys.exit(main())
