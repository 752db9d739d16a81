"""Tensors that other ranks write to."""

import fcntl
import mmap
import os

import numpy as np
import torch
from routing import same

import sidelane


def check_every_rank_puts_to_every_other_and_signals(world):
    me, n = world.rank, world.size
    window = world.all().window((n, 4), "bfloat16")
    local = torch.from_dlpack(window.local)
    assert local.shape == (n, 4) and local.dtype == torch.bfloat16 and (local == 0).all()
    window.barrier()
    for peer in range(n):
        if peer != me:
            row = torch.full((4,), 10 * me + peer, dtype=torch.bfloat16)
            window.put_signal(peer, me * 4, row, 1)
    for peer in range(n):
        if peer != me:
            window.wait(peer, 1)
            same(local[peer], torch.full((4,), 10 * peer + me, dtype=torch.bfloat16))
    window.barrier()


def check_puts_are_seen_after_a_later_signal(world):
    me, n = world.rank, world.size
    window = world.all().window((8,))
    to, by = (me + 1) % n, (me - 1) % n
    window.put(to, 2, np.array([1.5, 2.5], dtype=np.float32))
    window.put(to, 4, torch.tensor([3.5]))
    window.quiet()
    window.signal(to, 7)
    window.wait(by, 7)
    assert np.from_dlpack(window.local).tolist() == [0, 0, 1.5, 2.5, 3.5, 0, 0, 0]
    window.put_nbi(to, 5, 2, 3)
    window.quiet()
    window.barrier()
    assert np.from_dlpack(window.local).tolist() == [0, 0, 1.5, 2.5, 3.5, 1.5, 2.5, 3.5]
    window.barrier()


def check_a_group_has_windows_of_its_own(world):
    me, n = world.rank, world.size
    group = world.group(list(reversed(range(n))))
    assert (group.rank, group.ranks[group.rank]) == (n - 1 - me, me)
    assert group.gather(bytes([me])) == [bytes([rank]) for rank in reversed(range(n))]
    window = group.window((n,), torch.float32)
    window.put_signal((group.rank + 1) % n, group.rank, torch.tensor([me + 0.5]), 1)
    window.wait((group.rank - 1) % n, 1)
    assert torch.from_dlpack(window.local)[(group.rank - 1) % n] == ((me + 1) % n) + 0.5
    window.barrier()


def shared(size, *seals):
    """Memory of this process's own, with a name for it."""
    memory = os.memfd_create("ours", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, size)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, sum(seals))
    return memory


def check_memory_of_the_caller_s_own_is_a_window(world):
    me, n = world.rank, world.size
    memory = shared(4 * n, fcntl.F_SEAL_SHRINK)
    ours = np.frombuffer(mmap.mmap(memory, 4 * n), np.int32)
    with os.fdopen(memory, "rb+") as file:
        window = world.all().register(file, (n,), torch.float32)
    to, by = (me + 1) % n, (me - 1) % n
    window.put_signal(to, me, torch.tensor([me + 0.5]), 1)
    window.wait(by, 1)
    assert ours.view(np.float32)[by] == by + 0.5 == torch.from_dlpack(window.local)[by]
    window.barrier()


def check_memory_that_is_no_window_is_refused_on_all_ranks(world):
    good = [shared(4 * 8, fcntl.F_SEAL_SHRINK) for _ in range(4)]
    wrong = [
        (shared(4 * 8), "NotSealed", sidelane.HeapError),
        (shared(4 * 9, fcntl.F_SEAL_SHRINK), "Setting", sidelane.InputError),
        (1 << 20, "Setting", sidelane.InputError),
        (-1, "Setting", sidelane.InputError),
    ]
    for (bad, kind, class_), memory in zip(wrong, good):
        try:
            world.all().register(bad if world.rank == 0 else memory, (8,))
            raise AssertionError("not refused")
        except sidelane.Error as error:
            expected = (class_, kind) if world.rank == 0 else (sidelane.HeapError, "NotUsable")
            assert (type(error), error.kind) == expected, error
    world.all().register(good[0], [2, 4]).barrier()


def check_what_cannot_be_put_is_refused_here_alone(world):
    window = world.all().window((8,))
    peer = (world.rank + 1) % world.size
    wrong = [
        (lambda: window.put(peer, 7, torch.ones(2)), sidelane.HeapError, "OutOfBounds"),
        (lambda: window.put(peer, 2**63, torch.ones(2)), sidelane.HeapError, "OutOfBounds"),
        (lambda: window.put(world.size, 0, torch.ones(2)), sidelane.LaneError, "NoLane"),
        (lambda: window.put(peer, 0, torch.ones(2).half()), sidelane.InputError, "Dtype"),
        (lambda: window.put(peer, 0, torch.ones(4)[::2]), sidelane.InputError, "NotContiguous"),
        (lambda: window.signal(peer, 0), sidelane.PlanError, "BadParameter"),
    ]
    for call, class_, kind in wrong:
        try:
            call()
            raise AssertionError(kind)
        except class_ as error:
            assert error.kind == kind, error
    bounds = None
    try:
        window.put(peer, 7, torch.ones(2))
    except sidelane.HeapError as error:
        bounds = error
    assert bounds is not None and (bounds.peer, bounds.offset, bounds.len, bounds.size) == (peer, 28, 8, 32)
    window.signal(peer, 1)
    window.wait((world.rank - 1) % world.size, 1)
    assert (torch.from_dlpack(window.local) == 0).all()
    window.barrier()


def check_a_window_s_memory_outlives_it(world):
    window = world.all().window((3,))
    local = torch.from_dlpack(window.local)
    window.barrier()
    del window
    local.fill_(2)
    assert local.sum() == 6
