"""Ranks as processes of this machine, for notebooks, tests and small jobs. Larger ones: ``sidelane launch``, torchrun."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import secrets
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeVar

from ._native import close_all
from .errors import Error, RankError, WorldError

T = TypeVar("T")


def launch(
    function: Callable[..., T],
    ranks: int,
    *args: Any,
    nodes: int = 1,
    env: dict[str, str] | None = None,
    start: Literal["spawn", "forkserver"] = "spawn",
) -> list[T]:
    """Calls ``function(*args)`` in ``ranks`` new processes, as ranks of one job, and returns what each says, by rank.

    ``sidelane.init()`` in them finds that job. With ``nodes``, equal parts of the ranks act as nodes of their own, joined by
    the loop lane. ``env`` are further variables. Processes are spawned, so the function and its arguments must be importable;
    ``start="forkserver"`` forks them from multiprocessing's server, which never joins a world: sooner where
    ``multiprocessing.set_forkserver_preload`` names what takes seconds to import. If ranks fail, the first that failed by
    itself is raised, its traceback as a note; that of a process that ended without a word is a :class:`RankError`, which has
    what the others returned as ``results``.
    """
    if ranks % nodes:
        raise ValueError(f"{ranks} ranks cannot be divided into {nodes} equal nodes")
    port, job, secret = 20000 + secrets.randbelow(20000), f"py-{secrets.token_hex(8)}", secrets.token_hex(32)
    context = multiprocessing.get_context(start)
    seats = []
    for rank in range(ranks):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "SIDELANE_JOB": job,
            "SIDELANE_SECRET": secret,
            "SIDELANE_NODE": f"node {rank * nodes // ranks}" if nodes > 1 else "",
        }
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(theirs, variables | (env or {}), function, args), name=f"rank {rank}"
        )
        process.start()
        theirs.close()
        seats.append((ours, process))
    try:
        said = _collect([ours for ours, _ in seats])
    except BaseException:
        for _, process in seats:
            process.terminate()
        raise
    for _, process in seats:
        process.join()
    results, errors = [], []
    for rank, (_, process) in enumerate(seats):
        match said.get(rank):
            case None:
                message = f"rank {rank} ended without a result: exit code {process.exitcode}"
                errors.append(RankError(message, "Ended", {"rank": rank, "exitcode": process.exitcode, "results": results}))
            case (None, result):
                results.append(result)
            case (error, _):
                errors.append(error)
    if errors:
        # That a world died is mostly the consequence of what happened elsewhere.
        raise min(errors, key=lambda error: isinstance(error, WorldError))
    return results


def _collect(connections: list[Connection]) -> dict[int, tuple[BaseException | None, Any]]:
    """What each says; those that say nothing are missing."""
    said = {}
    open_ = {connection: rank for rank, connection in enumerate(connections)}
    while open_:
        for connection in wait(list(open_)):
            rank = open_.pop(connection)
            try:
                said[rank] = connection.recv()
            except EOFError:
                pass
            connection.close()
    return said


def _rank(connection: Connection, variables: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The life of one rank."""
    os.environ.update(variables)
    rank = int(variables["RANK"])
    try:
        answer: tuple[BaseException | None, Any] = (None, function(*args))
    except BaseException as error:
        error.__dict__.setdefault("__notes__", []).append(f"rank {rank}:\n{traceback.format_exc()}")
        answer = (error, None)
    try:
        connection.send(answer)
    except (pickle.PicklingError, AttributeError, TypeError) as unsaid:
        why = f"rank {rank}: what it returned or raised cannot be sent: {unsaid}\n{answer[0] or ''}"
        connection.send((Error(why, "Unsaid", {"rank": rank}), None))
    connection.close()
    # A forked process ends without what was to be done at its exit.
    close_all()
