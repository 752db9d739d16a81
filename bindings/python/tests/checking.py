"""What a rank does for a test: it makes all checks of a module, ``check_*(world)``, one after
another.
"""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path

import sidelane


def checks_of(module: str) -> list[str]:
    """The names of a module's checks, in order, without importing it here."""
    path = Path(__file__).parent / f"{module}.py"
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line[4 : line.index("(")] for line in lines if line.startswith("def check_")]


def make_checks(module: str) -> dict[str, str | None]:
    """What each check says at this rank: nothing, or what went wrong."""
    said: dict[str, str | None] = {}
    checks = importlib.import_module(module)
    with sidelane.init() as world:
        for name in checks_of(module):
            try:
                getattr(checks, name)(world)
                said[name] = None
            except Exception:
                said[name] = traceback.format_exc()
                world.cancel()
                break
    return said
