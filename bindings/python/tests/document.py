"""Runs the code of docs/from-python.md."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "from-python.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def run() -> int:
    """At this rank, one block after another, as one program."""
    code = blocks()
    exec(compile("\n".join(code), str(PAGE), "exec"), {})
    return len(code)
