"""What a rank does for a test: it makes all checks of a module, ``check_*(world)``, one after
another.
"""

from __future__ import annotations

import importlib
import json
import socket
import traceback
from pathlib import Path

import sidelane


def checks_of(module: str) -> list[str]:
    """The names of a module's checks, in order, without importing it here."""
    path = Path(__file__).parent / f"{module}.py"
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line[4 : line.index("(")] for line in lines if line.startswith("def check_")]


class Outcomes:
    """Where ranks send the outcome of each check as soon as they have it, if anybody listens there.

    Datagrams of a Unix socket: the one who listens gets them in the order in which they were sent,
    also from processes that have ended since.
    """

    def __init__(self, address: str | None) -> None:
        self.address = address

    def send(self, rank: int, check: str, said: str | None) -> None:
        if self.address is None:
            return
        # A datagram has a limit, and the end of a trace says most.
        message = json.dumps([rank, check, said and said[-20_000:]]).encode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outbox:
            outbox.sendto(message, self.address)


def make_checks(module: str, address: str | None = None) -> dict[str, str | None]:
    """What each check says at this rank: nothing, or what went wrong."""
    said: dict[str, str | None] = {}
    outcomes = Outcomes(address)
    checks = importlib.import_module(module)
    with sidelane.init() as world:
        for name in checks_of(module):
            try:
                getattr(checks, name)(world)
                said[name] = None
            except Exception:
                said[name] = traceback.format_exc()
                world.cancel()
            outcomes.send(world.rank, name, said[name])
            if said[name] is not None:
                break
    return said
