"""Ranks as processes of this machine, for notebooks, tests and small jobs. Larger ones: ``sidelane
launch``, torchrun.
"""

from __future__ import annotations

import multiprocessing
import operator
import os
import pickle
import secrets
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeVar

import cloudpickle

from ._native import close_all
from .errors import BootstrapError, Error, RankError, WorldError

T = TypeVar("T")


def launch(
    function: Callable[..., T],
    ranks: int,
    *args: Any,
    nodes: int = 1,
    env: dict[str, str] | None = None,
    start: Literal["spawn", "forkserver"] = "spawn",
) -> list[T]:
    """Calls ``function(*args)`` in ``ranks`` new processes, as ranks of one job; returns the
    results by rank.

    ``sidelane.init()`` in them finds that job. With ``nodes``, equal parts of the ranks act as
    nodes of their own, joined by the loopback lane. ``env`` has further variables. The function may
    be one of a notebook: what cannot be imported travels by value. Processes are spawned;
    ``start="forkserver"`` forks them from multiprocessing's server, which never joins a world. That
    is faster where ``multiprocessing.set_forkserver_preload`` names modules that take seconds to
    import.

    If ranks fail, the first that failed by itself is raised, with its traceback as a note. A
    process that ended without a result gives a :class:`RankError`, which has the results of the
    others as ``results``.
    """
    ranks, nodes = _count("ranks", ranks), _count("nodes", nodes)
    if ranks % nodes:
        raise ValueError(f"{ranks} ranks cannot be divided into {nodes} equal nodes")
    port, job, secret = 20000 + secrets.randbelow(20000), f"py-{secrets.token_hex(8)}", secrets.token_hex(32)
    # Two calls, as each kind of context has a type of its own.
    context = multiprocessing.get_context("spawn") if start == "spawn" else multiprocessing.get_context("forkserver")
    task = cloudpickle.dumps((function, args))
    children = []
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
            target=_rank, args=(theirs, variables | (env or {}), task), name=f"rank {rank}"
        )
        with _without_missing_file():
            process.start()
        theirs.close()
        children.append((ours, process))
    try:
        said = _collect([ours for ours, _ in children])
    except BaseException:
        for _, process in children:
            process.terminate()
        raise
    for _, process in children:
        process.join()
    results: list[Any] = []
    errors: list[BaseException] = []
    for rank, (_, process) in enumerate(children):
        match said.get(rank):
            case None:
                message = f"rank {rank} ended without a result: exit code {process.exitcode}"
                errors.append(RankError(message, "Ended", {"rank": rank, "exitcode": process.exitcode, "results": results}))
            case (None, result):
                results.append(result)
            case (error, _):
                errors.append(error)
    if errors:
        # A world that failed, or that was never complete, is mostly a consequence of another rank's
        # error.
        raise min(errors, key=lambda error: isinstance(error, (WorldError, BootstrapError)))
    return results


@contextmanager
def _without_missing_file() -> Iterator[None]:
    """Hides the file of ``__main__`` from multiprocessing where it is none, as of a program on
    standard input.
    """
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or os.path.exists(path):
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path


def _count(name: str, count: Any) -> int:
    """A number of processes: an integer, at least 1."""
    try:
        number = operator.index(count)
    except TypeError:
        raise TypeError(f"{name} is {count!r}: expected an integer") from None
    if number < 1:
        raise ValueError(f"{name} is {number}: expected at least 1")
    return number


def _collect(connections: list[Connection[Any, Any]]) -> dict[int, tuple[BaseException | None, Any]]:
    """What each says; those that say nothing are missing."""
    said: dict[int, tuple[BaseException | None, Any]] = {}
    open_ = dict(enumerate(connections))
    while open_:
        ready = wait(list(open_.values()))
        for rank, connection in [(rank, of) for rank, of in open_.items() if of in ready]:
            del open_[rank]
            try:
                said[rank] = pickle.loads(connection.recv_bytes())
            except EOFError:
                pass
            connection.close()
    return said


def _rank(connection: Connection[Any, Any], variables: dict[str, str], task: bytes) -> None:
    """The life of one rank."""
    os.environ.update(variables)
    rank = int(variables["RANK"])
    try:
        function, args = pickle.loads(task)
        answer: tuple[BaseException | None, Any] = (None, function(*args))
    except BaseException as error:
        error.__dict__.setdefault("__notes__", []).append(f"rank {rank}:\n{traceback.format_exc()}")
        answer = (error, None)
    try:
        packed = cloudpickle.dumps(answer)
    except (pickle.PicklingError, AttributeError, TypeError) as unsaid:
        why = f"rank {rank}: its result or error cannot be sent: {unsaid}\n{answer[0] or ''}"
        packed = cloudpickle.dumps((Error(why, "Unsaid", {"rank": rank}), None))
    connection.send_bytes(packed)
    connection.close()
    # A forked process ends without what was to be done at its exit.
    close_all()
