"""Rows of all ranks, and sums over all ranks, by what each can tell by itself."""

import numpy as np
import torch
from routing import same

import sidelane


def rows_of(rank, columns=8, dtype=torch.float32, parts=1):
    """Another number of them at each rank, none at rank 0."""
    count = rank * parts
    return (torch.arange(count * columns).reshape(count, columns) + 1000 * rank).to(dtype)


def check_rows_of_all_come_by_rank_and_sums_return(world):
    for dtype in (torch.float32, torch.float16):
        for route in ("direct", "pxn"):
            rows = sidelane.RowCollective(world, columns=8, dtype=dtype, route=route, max_rows=32)
            assert (rows.rank, rows.size) == (world.rank, world.size)
            mine = rows_of(world.rank, dtype=dtype)
            everything = torch.cat([rows_of(rank, dtype=dtype) for rank in range(world.size)])
            all_, shares = rows.all_gather(mine)
            same(all_, everything)
            assert (shares.counts, shares.rows) == (list(range(world.size)), len(everything))
            assert shares.report()["traffic"]["logical"]["own"] == len(mine)
            # In the buffer that peers read, and from anywhere.
            out = shares.output()
            out.copy_(everything)
            sums = (mine.float() * world.size).to(dtype)
            same(rows.reduce_scatter(out, shares), sums)
            assert shares.copied_bytes == 0
            same(rows.reduce_scatter(everything, shares), sums)
            assert shares.copied_bytes == everything.nbytes
            # What all know beforehand nobody tells.
            known = rows.shares(list(range(world.size)))
            same(rows.all_gather_cached(mine, known), everything)
            same(rows.reduce_scatter(everything, known), sums)


def check_parts_of_rows_lie_by_part_then_by_rank(world):
    rows = sidelane.RowCollective(world, columns=8, dtype="f32", segments=2)
    mine = [rows_of(rank, parts=2).numpy() for rank in range(world.size)]
    all_, _ = rows.all_gather(mine[world.rank])
    assert isinstance(all_, np.ndarray)
    expected = [of[part * rank : (part + 1) * rank] for part in range(2) for rank, of in enumerate(mine)]
    assert (all_ == np.concatenate(expected)).all()


def check_what_cannot_be_gathered_is_refused_on_all_ranks(world):
    rows, me = sidelane.RowCollective(world, columns=8, dtype="f32", max_rows=32), world.rank
    mine = rows_of(me)
    everything = torch.cat([rows_of(rank) for rank in range(world.size)])
    _, shares = rows.all_gather(mine)
    calls = [
        (lambda x: rows.all_gather(x), mine),
        (lambda x: rows.all_gather_cached(x, shares), mine),
        (lambda x: rows.reduce_scatter(x, shares), everything),
    ]
    for call, good in calls:
        for bad, kind in [
            (good.double(), "Dtype"),
            (good.half(), "WrongDtype"),
            (torch.zeros(2, 4), "Shape"),
            (torch.zeros(64, 8), "WrongShape" if good is everything else None),
        ]:
            try:
                call(bad if me == 0 else good)
                raise AssertionError("not refused")
            except (sidelane.InputError, sidelane.PlanError, sidelane.CallError) as error:
                if me == 0:
                    assert kind in (None, error.kind), error
                else:
                    assert (error.kind, error.peer) == ("PeerRefused", 0), error
        call(good)
    for counts, kind in [([1], "WrongShape"), ([64] * world.size, "BadParameter")]:
        try:
            rows.shares(counts)
            raise AssertionError("not refused")
        except sidelane.PlanError as error:
            assert error.kind == kind
    try:
        sidelane.RowCollective(world, columns=8, node_sums="f64" if me == 0 else None)
        raise AssertionError("not refused")
    except sidelane.Error as error:
        assert (type(error).__name__, error.kind) == (("InputError", "Setting") if me == 0 else ("CallError", "ConfigsDiffer"))
