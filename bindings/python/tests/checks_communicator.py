"""Collectives and messages on numpy arrays, by what each rank can tell by itself."""

import numpy as np

import sidelane

SIZES = [0, 1, 7, 5000]


def of(rank, count, dtype=np.float32):
    """Small integers, whose sums are exact in any order."""
    return ((np.arange(count) % 50) + rank).astype(dtype)


def check_sums_are_on_all_ranks_or_a_part_on_each(world):
    me, n = world.rank, world.size
    for sums in ("direct", "ring"):
        group = sidelane.Communicator(world, chunk=8192, sums=sums)
        assert (group.rank, group.size) == (me, n)
        for count in SIZES:
            total = sum(of(rank, count) for rank in range(n))
            mine = of(me, count)
            assert group.all_reduce(mine) is mine
            assert np.array_equal(mine, total)
            rows = sum(of(rank, 2 * n * count).reshape(n * count, 2) for rank in range(n))
            send = of(me, 2 * n * count).reshape(n * count, 2)
            mine = group.reduce_scatter(send)
            assert isinstance(mine, np.ndarray) and np.array_equal(mine, rows[me * count : (me + 1) * count])
            into = np.empty_like(mine)
            assert group.reduce_scatter(send, into) is into and np.array_equal(into, mine)


def check_elements_of_any_type_are_moved(world):
    me, n = world.rank, world.size
    group = sidelane.Communicator(world)
    for dtype in (np.float32, np.float16, np.uint8, np.int32, np.int64, np.float64, np.bool_):
        for count in SIZES:
            root = n - 1
            data = of(me, count, dtype)
            assert group.broadcast(data, root) is data
            assert np.array_equal(data, of(root, count, dtype))
            gathered = group.all_gather(of(me, count, dtype))
            assert gathered.dtype == dtype
            assert np.array_equal(gathered, np.concatenate([of(rank, count, dtype) for rank in range(n)]))
            send = np.concatenate([of(10 * me + peer, count, dtype) for peer in range(n)])
            expected = np.concatenate([of(10 * rank + me, count, dtype) for rank in range(n)])
            assert np.array_equal(group.all_to_all(send), expected)
            out = np.empty_like(send)
            assert group.all_to_all(send, out) is out and np.array_equal(out, expected)
    assert group.all_gather(np.array(me, np.float32)).tolist() == list(range(n))


def check_messages_of_a_pair_keep_their_order(world):
    me, n = world.rank, world.size
    group = sidelane.Communicator(world, chunk=8192)
    after, before = (me + 1) % n, (me - 1) % n
    # Two may lie unread.
    for round_ in range(2):
        group.send(after, of(me, 10 + round_, np.int64))
    for round_ in range(2):
        received = group.receive(before, np.empty(10 + round_, np.int64))
        assert np.array_equal(received, of(before, 10 + round_, np.int64))
    group.flush(after)
    # Longer than what may lie unread: each sends while it receives.
    peer = me ^ 1
    if peer < n:
        received = np.empty(100_000, np.float32)
        assert group.exchange(peer, of(me, 100_000), received) is received
        assert np.array_equal(received, of(peer, 100_000))


def check_tensors_that_cannot_be_used_are_refused_on_all_ranks(world):
    me, n = world.rank, world.size
    group = sidelane.Communicator(world)
    good = of(me, 4 * n)
    readonly = good.copy()
    readonly.flags.writeable = False
    small = np.empty(2, np.float32)
    calls = [
        (group.all_reduce, good, good.astype(np.int32), "Dtype", "can be summed"),
        (group.all_reduce, good, readonly, "ReadOnly", "tensor"),
        (group.all_reduce, good, good.tolist(), "NotATensor", "list"),
        (group.broadcast, good, good[::2], "NotContiguous", "numpy.ascontiguousarray(tensor)"),
        (group.reduce_scatter, good, good[1:].copy(), "Shape", f"{n} equal parts"),
        (group.reduce_scatter, good, good.astype(np.float64), "Dtype", "float64"),
        (group.all_to_all, good, np.array(1, np.float32), "Shape", "send"),
        (lambda out: group.all_to_all(good, out), good.copy(), small, "Shape", "out"),
        (lambda out: group.all_to_all(good, out), good.copy(), good, "Overlap", "out"),
        (lambda out: group.all_gather(good[:4], out), np.empty(4 * n, np.float32), np.empty(4 * n), "Dtype", "out"),
    ]
    for call, right, wrong, kind, words in calls:
        before = good.copy()
        try:
            call(wrong if me == 0 else right)
            raise AssertionError("not refused")
        except sidelane.InputError as error:
            assert me == 0 and error.kind == kind and words in str(error), error
        except sidelane.CallError as error:
            assert me != 0 and (error.kind, error.peer) == ("PeerRefused", 0), error
        assert np.array_equal(good, before), "no tensor changes"
    for call, kind in [
        (lambda: group.broadcast(good, n), "BadParameter"),
        (lambda: group.send(me, good), "BadParameter"),
        (lambda: group.exchange((me + 1) % n, good, good), "Overlap"),
    ]:
        try:
            call()
            raise AssertionError("not refused")
        except (sidelane.PlanError, sidelane.InputError) as error:
            assert error.kind == kind, error
    try:
        group.all_reduce(of(me, 4 + (me == 0)))
        raise AssertionError("lengths differ")
    except sidelane.CallError as error:
        assert (error.kind, error.what) == ("Disagree", "bytes"), error
    assert np.array_equal(group.all_reduce(np.ones(3, np.float32)), np.full(3, n, np.float32))


def check_settings_that_cannot_be_used_are_refused_on_all_ranks(world):
    for settings in ({"sums": "tree"}, {"chunk": 0}):
        try:
            sidelane.Communicator(world, **(settings if world.rank == 0 else {}))
            raise AssertionError("not refused")
        except (sidelane.InputError, sidelane.PlanError):
            assert world.rank == 0
        except sidelane.CallError as error:
            assert world.rank != 0 and error.kind == "ConfigsDiffer", error
