"""What ranks do in the tests of ``test_stops``."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import threading
from types import FrameType
from typing import Any

import numpy as np

import sidelane


def outcome(call) -> tuple[str, str, dict]:
    """The class, kind and fields of what a call raises."""
    try:
        call()
    except sidelane.Error as error:
        return type(error).__name__, error.kind, error.fields
    except BaseException as error:
        return type(error).__name__, "", {}
    return "", "", {}


def layer(world):
    return sidelane.ExpertParallel(world, experts=world.size, top_k=1, hidden=4, dtype="float32")


def tokens(world):
    """A token for each rank."""
    n = world.size
    return np.ones((n, 4), np.float32), np.arange(n, dtype=np.int32).reshape(n, 1), np.ones((n, 1), np.float32)


def interrupt_when_in(name: str) -> None:
    """A thread that presses Ctrl-C while the main thread is in a function; that it runs shows that
    the GIL is free.

    It presses until the function ends: Python drops an interrupt that is raised in a callback, such
    as one that takes a tensor back. An interrupt that comes behind the function's end is ignored.
    """
    main = threading.main_thread().ident
    handled = threading.Event()
    # The call that is to end, and no later one of the function.
    called: FrameType | None = None

    def find(frame: FrameType | None) -> FrameType | None:
        while frame is not None and frame.f_code.co_name != name:
            frame = frame.f_back
        return frame

    def interrupt(_: int, frame: FrameType | None) -> None:
        handled.set()
        if called is not None and find(frame) is called:
            raise KeyboardInterrupt

    def press() -> None:
        nonlocal called
        while called is None:
            os.sched_yield()
            called = find(sys._current_frames()[main])
        while find(sys._current_frames()[main]) is called:
            handled.clear()
            os.kill(os.getpid(), signal.SIGINT)
            handled.wait()
        called = None

    def report(lost: Any) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(lost)

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = report
    threading.Thread(target=press, daemon=True).start()


def interrupted_dispatch():
    world = sidelane.init()
    ep = layer(world)

    def waits_alone():
        ep.dispatch(*tokens(world))

    if world.rank == 0:
        interrupt_when_in("waits_alone")
        first = outcome(waits_alone)
    else:
        # Comes to its dispatch only when the world is dead: nobody else's doing ends rank 0's.
        while not outcome(world.check)[0]:
            os.sched_yield()
        first = outcome(waits_alone)
    return first, outcome(waits_alone), outcome(world.check)


def interrupted_start():
    world = sidelane.init()
    ep = sidelane.ExpertParallel(world, experts=2, top_k=1, hidden=1024, dtype="float32")
    # All tokens go to rank 0: their rows fill more than half of its pool.
    ids, ones = np.zeros((256, 1), np.int32), np.ones((256, 1), np.float32)
    rows, handle = ep.dispatch(np.ones((256, 1024), np.float32), ids, ones)
    outputs = np.array(rows)
    del rows
    if world.rank == 1:
        # Reads none of rank 0's rows, which must keep them.
        pending = ep.start_combine(outputs, handle)
        while not outcome(world.check)[0]:
            os.sched_yield()
        del pending
        return outcome(world.check)
    ep.combine(outputs, handle)

    def waits_for_memory():
        ep.start_combine(outputs, handle)

    interrupt_when_in("waits_for_memory")
    first = outcome(waits_for_memory)
    again = outcome(waits_for_memory)
    return first, again, outcome(lambda: ep.combine(outputs, handle)), handle.tokens_per_expert


def interrupted_sizes():
    world = sidelane.init()
    exchange, sent = planned(world)

    def waits_for_sizes():
        exchange.dispatch(*sent)

    if world.rank == 0:
        interrupt_when_in("waits_for_sizes")
    else:
        while not outcome(world.check)[0]:
            os.sched_yield()
    return outcome(waits_for_sizes), outcome(world.check)


def planned(world, **settings):
    """An instance on a device, and what a rank sends."""
    import torch
    from devices import Device

    device = Device(world.rank)
    settings = {"device_heap": 1 << 20, "device": device.number, "stream": device.stream} | settings
    exchange = sidelane.ExpertParallel(world, experts=2, hidden=4, dtype="float32", max_tokens=2, **settings)
    ids, ones = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    return exchange, [device.tensor(values) for values in (torch.ones(1, 4), ids, ones)]


def forked_with_devices():
    world = sidelane.init()
    exchange, sent = planned(world)
    rows, handle = exchange.dispatch(*sent)
    dispatch = exchange.start_dispatch(*sent)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)

    def child(pipe):
        calls = [
            lambda: exchange.dispatch(*sent),
            lambda: dispatch.finish(),
            lambda: dispatch.finish_async(),
            lambda: exchange.combine(rows, handle, sent[0]),
            lambda: handle.tokens_per_expert,
            lambda: handle.row_weights,
            lambda: handle.output(),
            lambda: handle.report(),
        ]
        pipe.send([outcome(call) for call in calls])

    process = fork.Process(target=child, args=(theirs,))
    process.start()
    said = ours.recv()
    process.join()
    # What the child held and dropped is here as it was.
    more, _ = dispatch.finish()
    return said, process.exitcode, (rows.shape, more.shape), os.getpid()


def interrupted_wait():
    world = sidelane.init()
    window = world.all().window((1,))

    def waits():
        window.wait(1, 1)

    if world.rank == 0:
        interrupt_when_in("waits")
        said = outcome(waits)
        window.signal(1, 1)
        waits()
    else:
        said = ("", "", {})
        window.wait(0, 1)
        window.signal(0, 1)
    rows, handle = layer(world).dispatch(*tokens(world))
    return said, len(rows)


def interrupted_meeting():
    world = sidelane.init()

    def builds():
        layer(world)

    if world.rank == 0:
        interrupt_when_in("builds")
        return outcome(builds), outcome(world.check)
    while not outcome(world.check)[0]:
        os.sched_yield()
    return outcome(builds), outcome(world.check)


def interrupted_init():
    def joins():
        sidelane.init()

    interrupt_when_in("joins")
    return outcome(joins)


def closed():
    world = sidelane.init()
    group, window, ep = world.all(), world.all().window((4,)), layer(world)
    rows, handle = ep.dispatch(*tokens(world))
    pending = ep.start_dispatch(*tokens(world))
    busy = outcome(lambda: ep.dispatch(*tokens(world)))
    pending.finish()
    ep.combine(rows, handle)
    window.barrier()
    world.close()
    world.close()
    x, ids, weights = np.ones((1, 4), np.float32), np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    calls = [
        lambda: world.rank,
        lambda: world.all(),
        lambda: group.window((4,)),
        lambda: window.signal(0, 1),
        lambda: window.wait(0, 1),
        lambda: ep.dispatch(x, ids, weights),
        lambda: ep.combine(rows, handle),
        lambda: sidelane.ExpertParallel(world, experts=2, top_k=1, hidden=4),
    ]

    return busy[:2], [outcome(call)[:2] for call in calls], rows.tolist(), np.from_dlpack(window.local).tolist()


def forked():
    world = sidelane.init()
    window, ep = world.all().window((4,)), layer(world)
    x, ids, weights = tokens(world)
    rows, handle = ep.dispatch(x, ids, weights)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)

    def child(pipe):
        calls = [
            lambda: world.rank,
            lambda: window.signal(1, 1),
            lambda: ep.dispatch(x, ids, weights),
            lambda: ep.combine(rows, handle),
            lambda: handle.tokens_per_expert,
            lambda: world.close(),
        ]
        pipe.send([outcome(call) for call in calls])

    process = fork.Process(target=child, args=(theirs,))
    process.start()
    said = ours.recv()
    process.join()
    # The child has gone, and all that it held with it: this world lives on.
    sums = ep.combine(rows, handle)
    window.barrier()
    return said, process.exitcode, sums.tolist(), os.getpid()


def dropped_pending():
    world = sidelane.init()
    ep = layer(world)
    if world.rank == 0:
        pending = ep.start_dispatch(*tokens(world))
        del pending
    return outcome(lambda: ep.dispatch(*tokens(world)))


def dropped_pending_on_a_device():
    world = sidelane.init()
    exchange, sent = planned(world)
    said = []
    if world.rank == 0:
        pending = exchange.start_dispatch(*sent)
        # One call is pending at a time, and its handle comes with its second half.
        said = [outcome(lambda: exchange.start_dispatch(*sent)), outcome(exchange.check)]
        del pending
    return [kind for _, kind, _ in said], outcome(lambda: exchange.dispatch(*sent)), outcome(exchange.synchronize)


def ended():
    world = sidelane.init()
    ep = layer(world)
    if world.rank == 1:
        os._exit(7)
    said = outcome(lambda: ep.dispatch(*tokens(world)))
    next_ = world.rebuild(at_least=2)
    rows, _ = layer(next_).dispatch(*tokens(next_))
    return said, (next_.size, next_.epoch, next_.previous_ranks), rows.tolist()


def grown():
    """Two ranks take the third process in, after growths that fail: of a spare, and of a rank."""
    place = int(os.environ["RANK"])
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}

    def without_heaps(call):
        # With a limit of a byte no file can grow, and a heap is one.
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, most))
        try:
            return outcome(call)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    if place == 2:
        # The number of any rank of the job.
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
        said = [
            outcome(lambda: sidelane.spare(120, heap="32M")),
            without_heaps(lambda: sidelane.spare(120)),
            # The growth that fails because of rank 1.
            outcome(lambda: sidelane.spare(120)),
        ]
        world = sidelane.spare(120)
    else:
        old = sidelane.init()
        said = [outcome(lambda: old.grow(120))]
        said += [without_heaps(lambda: old.grow(120)) if place == 1 else outcome(lambda: old.grow(120))]
        old.check()
        world = old.grow(120)
        said += [outcome(old.check)]
    lonely = outcome(lambda: world.grow(0.001))
    rows, _ = layer(world).dispatch(*tokens(world))
    return said, lonely, (world.rank, world.size, world.previous_ranks), rows.tolist()


def raised():
    with sidelane.init() as world:
        ep = layer(world)
        if world.rank == 1:
            raise LookupError("rank 1 has had enough")
        ep.dispatch(*tokens(world))
