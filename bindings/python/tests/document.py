"""Runs the code of a page of docs/."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def run(page: str) -> int:
    """At this rank, one block after another, as one program: how many there were."""
    code = blocks(page)
    exec(compile("\n".join(code), str(DOCS / page), "exec"), {})
    return len(code)
