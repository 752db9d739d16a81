"""Writes the table of docs/from-megatron.md: how far results lie from those of Megatron's
all-to-all, on 4 and 8 ranks.

    python megatron_table.py
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import conftest  # noqa: F401
import document

import sidelane

PAGE = document.DOCS / "from-megatron.md"
NAMES = {"sidelane": "ours", "hybridep": "`hybridep`", "ncclep": "`ncclep` (fake caller)", "deepep": "`deepep`"}
RANKS = (4, 8)

if TYPE_CHECKING:
    from megatron_cases import Apart, Case

    Measured = dict[str, dict[Case, list[Apart]]]


def measure() -> Measured:
    """At this rank: the differences of all dispatchers in all cases."""
    import megatron_ranks

    with sidelane.init() as world:
        return {who: megatron_ranks.against_theirs(world, who) for who in megatron_ranks.DISPATCHERS}


def cell(found: list[Apart]) -> str:
    """The largest difference of ranks and cases, and the same in last places."""
    difference, places = (max(values) for values in zip(*found))
    return "0" if difference == 0 else f"{difference:.1e} ({places:.2g})"


def rows(of_ranks: list[Measured]) -> Iterator[str]:
    """The lines of the table."""
    for who, name in NAMES.items():
        cases = sorted(of_ranks[0][who])
        for tp, top_k in dict.fromkeys((case.tensor_parallel, case.top_k) for case in cases):
            here = [case for case in cases if (case.tensor_parallel, case.top_k) == (tp, top_k)]
            exact = [apart for said in of_ranks for case in here if case.exact for apart in said[who][case]]
            results = zip(*(said[who][case] for said in of_ranks for case in here if not case.exact))
            capacities = ", ".join(one for one in ("none", "drop", "pad") if one in {case.capacity for case in here})
            cells = [name, str(tp), str(top_k), capacities, cell(exact), *map(cell, results)]
            yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["megatron_ranks"])
    said = [rank for ranks in RANKS for rank in sidelane.launch(measure, ranks, start="forkserver")]
    head = r"(\| dispatcher .*\n\|[-| ]+\n)(?:\|.*\n)*"
    lines = "".join(f"{line}\n" for line in rows(said))
    text = re.sub(head, lambda found: found[1] + lines, PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(text, encoding="utf-8")
