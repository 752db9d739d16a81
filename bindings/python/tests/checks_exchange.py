"""Dispatch and combine from Python, against what each rank can tell from everybody's inputs."""

import numpy as np
import torch
from routing import case, same

import sidelane


def built(world, of, **settings):
    settings = {"dtype": of.x[0].dtype} | settings
    return sidelane.ExpertParallel(world, experts=of.experts, top_k=of.top_k, hidden=of.hidden, **settings)


def experts(rows, of, rank):
    """What experts do here: each multiplies by a power of two of its own."""
    factors = [2.0 ** (expert % 3 - 1) for expert, *_ in of.rows(rank)]
    return rows * torch.tensor(factors, dtype=rows.dtype).reshape(-1, 1)


def expected_sums(of, rank, tensors):
    """What combine gives for rows of `tensors` that went through these experts."""
    row_of = {}
    for holder in range(of.ranks):
        for (expert, source, token, _), row in zip(of.rows(holder), experts(of.rows_of(holder, tensors), of, holder)):
            row_of[expert, source, token] = row
    return of.summed(rank, row_of)


def check_rows_and_sums_are_exact_in_every_type(world):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for route in ("direct", "pxn"):
            of = case(world.size, dtype=dtype)
            ep = built(world, of, route=route)
            me = world.rank
            rows, handle = ep.dispatch(of.x[me], of.ids[me], of.weights[me])
            same(rows, of.rows_of(me, of.x))
            counts = [sum(expert == row[0] for row in of.rows(me)) for expert in of.held(me)]
            assert handle.tokens_per_expert == counts
            assert (handle.tokens, handle.rows) == (len(of.x[me]), sum(counts))
            same(handle.row_weights, torch.tensor([of.weights[s][t, k] for _, s, t, k in of.rows(me)]))
            y = handle.output()
            y.copy_(experts(rows, of, me))
            tokens = ep.combine(y, handle)
            assert handle.copied_bytes == 0
            same(tokens, expected_sums(of, me, of.x))


def check_numpy_goes_in_and_out(world):
    of, me = case(world.size), world.rank
    ep = built(world, of)
    arrays = (of.x[me].numpy(), of.ids[me].numpy().astype(np.int64), of.weights[me].numpy())
    rows, handle = ep.dispatch(*arrays)
    assert isinstance(rows, np.ndarray) and rows.flags.writeable
    same(torch.from_numpy(rows.copy()), of.rows_of(me, of.x))
    # Rows that lie elsewhere are copied once, and that is counted.
    y = experts(torch.from_numpy(rows.copy()), of, me).numpy()
    out = np.full_like(arrays[0], np.nan)
    assert ep.combine(y, handle, out) is out
    assert handle.copied_bytes == y.nbytes
    same(torch.from_numpy(out), expected_sums(of, me, of.x))


def check_rows_and_outputs_are_the_library_s_memory(world):
    of, me = case(world.size), world.rank
    ep = built(world, of)
    before = world.pool_report()["live"]
    rows, handle = ep.dispatch(of.x[me], of.ids[me], of.weights[me])
    assert world.pool_report()["live"] == before + 1
    view = rows[:1]
    del rows
    assert world.pool_report()["live"] == before + 1, "a view keeps the rows"
    del view
    assert world.pool_report()["live"] == before
    ep.combine(handle.output().zero_(), handle)


def check_gradients_are_the_transposes(world):
    of, me = case(world.size), world.rank
    for weighted in (False, True):
        ep = built(world, of, weighted=weighted)
        rows, handle = ep.dispatch(of.x[me], of.ids[me], of.weights[me])
        again = ep.dispatch_cached(of.x[me], handle)
        same(again, rows)
        g = [torch.sin(x + 1) for x in of.x]
        gradients = experts(rows, of, me)
        row_weights = torch.arange(handle.rows, dtype=torch.float32)
        tokens, weights = ep.dispatch_backward(gradients, handle, row_weights)
        same(tokens, expected_sums(of, me, of.x))
        returned = torch.zeros(len(of.x[me]), of.top_k)
        for holder in range(world.size):
            for nth, (_, source, token, k) in enumerate(of.rows(holder)):
                if source == me:
                    returned[token, k] = nth
        same(weights, returned)
        ep.combine(rows, handle)
        back, weights = ep.combine_backward(g[me], handle)
        expected = of.rows_of(me, g)
        if not weighted:
            assert weights is None
            same(back, expected)
        else:
            same(back, expected * handle.row_weights.reshape(-1, 1))
            assert weights.shape == of.weights[me].shape
            assert (weights[of.ids[me] < 0] == 0).all()


def check_a_layout_is_there_before_its_rows(world):
    of, me = case(world.size), world.rank
    for route in ("direct", "pxn"):
        ep = built(world, of, route=route)
        handle = ep.prepare(of.ids[me], of.weights[me])
        assert handle.report()["moved"]["rows"] == 0
        assert handle.tokens_per_expert == [sum(expert == row[0] for row in of.rows(me)) for expert in of.held(me)]
        same(handle.row_weights, torch.tensor([of.weights[s][t, k] for _, s, t, k in of.rows(me)]))
        for factor in (1, 2):
            x = [x * factor for x in of.x]
            rows = ep.dispatch_cached(x[me], handle)
            same(rows, of.rows_of(me, x))
            same(ep.combine(experts(rows, of, me), handle), expected_sums(of, me, x))


def check_halves_of_two_microbatches_overlap(world):
    of, me = case(world.size), world.rank
    first, second = built(world, of, route="pxn"), built(world, of, route="pxn")
    one = first.start_dispatch(of.x[me], of.ids[me], of.weights[me])
    two = second.start_dispatch(of.x[me] * 2, of.ids[me], of.weights[me])
    (rows, handle), (doubled, other) = one.finish(), two.finish()
    same(doubled, rows * 2)
    y = other.output()
    y.copy_(experts(doubled, of, me))
    pending = second.start_combine(y, other)
    same(first.combine(experts(rows, of, me), handle), expected_sums(of, me, of.x))
    same(pending.finish(), expected_sums(of, me, [x * 2 for x in of.x]))
    assert other.copied_bytes == 0
    try:
        pending.finish()
        raise AssertionError("a call is finished once")
    except sidelane.ClosedError as error:
        assert error.kind == "UsedUp"


def check_rank_major_rows_say_whose_they_are(world):
    of, me = case(world.size), world.rank
    ep = built(world, of, layout="rank-major", sum_order="rank")
    rows, handle = ep.dispatch(of.x[me], of.ids[me], of.weights[me])
    held = of.held(me)
    expected = [
        (source, token)
        for source in range(world.size)
        for token, ids in enumerate(of.ids[source].tolist())
        if any(i in held for i in ids)
    ]
    same(rows, torch.stack([of.x[s][t] for s, t in expected]) if expected else rows.new_empty(0, of.hidden))
    local = [[held.index(i) if i in held else -1 for i in of.ids[s][t].tolist()] for s, t in expected]
    assert handle.row_experts.tolist() == local
    assert handle.row_weights.shape == (len(expected), of.top_k)
    ep.combine(rows.clone(), handle)


def check_a_budget_drops_alike_and_says_what_it_needed(world):
    of, me = case(world.size), world.rank
    need = [len(of.rows(rank)) for rank in range(world.size)]
    ep = built(world, of, budget=max(need) - 1, overflow="drop")
    rows, handle = ep.dispatch(of.x[me], of.ids[me], of.weights[me])
    assert handle.required_rows == need
    assert handle.rows == min(need[me], max(need) - 1)
    lost = sum(int(row) for row in handle.dropped.sum(dim=1))
    assert isinstance(lost, int)
    ep.combine(rows.clone(), handle)
    ep = built(world, of, budget=max(need) - 1)
    try:
        ep.dispatch(of.x[me], of.ids[me], of.weights[me])
        raise AssertionError("over budget")
    except sidelane.CallError as error:
        assert (error.kind, error.required, error.budget) == ("OverBudget", max(need), max(need) - 1)


def check_records_in_fp8_are_bytes_with_values_and_scales(world):
    of, me = case(world.size, hidden=128), world.rank
    ep = built(world, of, fp8=True)
    hidden, scales_at, scales, size = ep.record
    assert (hidden, scales) == (128, 1)
    sent = ep.quantize(of.x[me])
    assert sent.shape == (len(of.x[me]), size) and sent.dtype == torch.uint8
    rows, handle = ep.dispatch(sent, of.ids[me], of.weights[me])
    values = rows[:, :hidden].view(torch.float8_e4m3fn).float()
    factors = rows[:, scales_at : scales_at + 4 * scales].contiguous().view(torch.float32)
    close = of.rows_of(me, of.x)
    assert ((values * factors - close).abs() <= close.abs().amax(dim=1, keepdim=True) / 16 if len(rows) else torch.ones(0)).all()
    same(rows[:, : scales_at + 4], of.rows_of(me, [ep.quantize(x) for x in of.x])[:, : scales_at + 4])
    ep.combine(handle.output().zero_(), handle)


def check_experts_move_between_steps(world):
    of, me = case(world.size), world.rank
    ep = built(world, of)
    assert ep.expert_map == [list(of.held(rank)) for rank in range(world.size)]
    ep.set_expert_map([list(reversed(of.held(rank))) for rank in range(world.size)])
    rows, handle = ep.dispatch(of.x[me], of.ids[me], of.weights[me])
    counts = [sum(expert == row[0] for row in of.rows(me)) for expert in reversed(of.held(me))]
    assert handle.tokens_per_expert == counts
    try:
        ep.set_expert_map([list(of.held(rank)) for rank in range(world.size)])
        raise AssertionError("a handle is alive")
    except sidelane.CallError as error:
        assert error.kind == "HandlesAlive"
    ep.combine(rows.clone(), handle)


def check_masked_ranks_send_and_receive_nothing(world):
    of, me, slots = case(world.size), world.rank, 16
    for settings in ({}, {"slots": slots}):
        ep = built(world, of, **settings)
        assert ep.active == [True] * world.size
        for masked in [*range(world.size), None]:
            active = [rank != masked for rank in range(world.size)]
            ep.mask(active)
            assert ep.active == active
            left = of.masked(active)
            rows, handle = ep.dispatch(of.x[me], of.ids[me], of.weights[me])
            if not settings:
                same(rows, left.rows_of(me, of.x))
            elif masked is not None:
                assert not rows.view(-1, world.size, slots, of.hidden)[:, masked].any()
            factors = torch.tensor([2.0 ** (expert % 3 - 1) for expert in of.held(me)])
            y = rows * factors.repeat_interleave(torch.tensor(handle.padded_tokens_per_expert)).reshape(-1, 1)
            same(ep.combine(y, handle), expected_sums(left, me, of.x))
            dropped = left.ids[me] != of.ids[me]
            assert torch.equal(handle.dropped, dropped)
            assert handle.report()["dropped_weight"] == sum(of.weights[me][dropped].tolist())
            del handle
    for bad in ([True] * (world.size + 1), [False] * world.size):
        try:
            ep.mask(bad)
            raise AssertionError("no such mask")
        except sidelane.PlanError as error:
            assert error.kind == "BadParameter"
    # What is no mask at one rank is refused by all, and the next one holds.
    try:
        ep.mask([1] * world.size if me == 0 else [True] * world.size)
        raise AssertionError("no such mask")
    except TypeError:
        assert me == 0
    except sidelane.CallError as error:
        assert me != 0 and error.kind == "PeerRefused"
    ep.mask(torch.tensor([True] * world.size))


def check_the_report_is_what_moved(world):
    of, me = case(world.size), world.rank
    ep = built(world, of)
    rows, handle = ep.dispatch(of.x[me], of.ids[me], of.weights[me])
    report = handle.report()
    wanted = report["traffic"]["logical"]
    assert sum(wanted.values()) == int((of.ids[me] >= 0).sum())
    put = report["traffic"]["sent"]
    assert report["moved"]["intra_node_bytes"] == (put["own"] + put["local"]) * of.hidden * 4
    assert sum(ranks for _, ranks in ep.lanes) == world.size
    ep.combine(rows.clone(), handle)


def check_what_is_dropped_in_any_order_comes_back(world):
    """Python's collector is of one process: rows, handles, buffers and layers go in another order
    on each rank.
    """
    import gc
    import random

    of, me = case(world.size), world.rank
    order = random.Random(me)
    alive = world.pool_report()["live"]
    for _ in range(3):
        layers = [built(world, of) for _ in range(2)]
        kept = []
        for step in range(8):
            ep = layers[step % 2]
            rows, handle = ep.dispatch(of.x[me], of.ids[me], of.weights[me])
            y = handle.output()
            y.copy_(experts(rows, of, me))
            same(ep.combine(y, handle), expected_sums(of, me, of.x))
            kept += [rows, handle, y, handle.output()]
        window = world.all().window((4,))
        kept += [*layers, window]
        del layers, ep, rows, handle, y, window
        while kept:
            kept.pop(order.randrange(len(kept)))
        gc.collect()
    assert world.pool_report()["live"] == alive
