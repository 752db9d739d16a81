"""Bad input: a sentence that helps, at every rank an error, and the next call works."""

import numpy as np
import torch
from checks_exchange import built, expected_sums, experts
from routing import case, same

import sidelane


class OnCuda:
    """What a tensor in a GPU's memory says of itself; there is none here."""

    requires_grad = False

    def __dlpack_device__(self):
        return (2, 1)

    def __dlpack__(self, **_):
        raise AssertionError("nobody asks for memory that cannot be used")


def refused(world, call, kind, words):
    """A call whose input is wrong at rank 0 alone."""
    try:
        call()
        raise AssertionError("not refused")
    except sidelane.InputError as error:
        assert world.rank == 0, error
        assert error.kind == kind, error
        assert isinstance(error, ValueError)
        for word in words:
            assert word in str(error), error
    except (sidelane.CallError, sidelane.PlanError) as error:
        if world.rank == 0:
            assert error.kind == kind, error
            for word in words:
                assert word in str(error), error
        else:
            assert error.kind == "PeerRefused" and error.peer == 0, error


def works(world, ep, of):
    me = world.rank
    rows, handle = ep.dispatch(of.x[me], of.ids[me], of.weights[me])
    same(ep.combine(experts(rows, of, me), handle), expected_sums(of, me, of.x))


def check_tokens_that_cannot_be_sent(world):
    of = case(world.size, tokens=8)
    ep, me = built(world, of), world.rank
    x, ids, weights = of.x[me], of.ids[me], of.weights[me]
    readonly = x.numpy().copy()
    readonly.flags.writeable = False
    cases = [
        (OnCuda(), ids, weights, "WrongPlace", ["x", "a device", "the host"]),
        ([[1.0]], ids, weights, "NotATensor", ["list", "DLPack"]),
        (x.double(), ids, weights, "Dtype", ["x", "float32"]),
        (x.bfloat16(), ids, weights, "WrongDtype", ["bf16", "f32"]),
        (x.repeat(1, 2)[:, ::2], ids, weights, "NotContiguous", ["x.contiguous()", "strides"]),
        (x[:, :-1].contiguous(), ids, weights, "Shape", ["x", "16"]),
        (x[:-1], ids, weights, "WrongShape", ["tokens"]),
        (x.clone().requires_grad_(), ids, weights, "NotLent", ["detach"]),
        (x, ids.float(), weights, "Dtype", ["experts", "int32 or int64"]),
        (x, ids[:, :-1].contiguous(), weights, "Shape", ["experts"]),
        (x, ids + 2**20, weights, "ExpertOutOfRange", ["out of range"]),
        (x, ids.long() + 2**40, weights, "ExpertOutOfRange", ["out of range"]),
        (x, ids, weights.double(), "Dtype", ["weights", "float32"]),
        (x, ids, weights[:-1], "WrongShape", ["weights"]),
        (x, ids, torch.full_like(weights, torch.nan), "NanWeight", ["not a number"]),
    ]
    for wrong_x, wrong_ids, wrong_weights, kind, words in cases:
        bad = (wrong_x, wrong_ids, wrong_weights) if me == 0 else (x, ids, weights)
        refused(world, lambda bad=bad: ep.dispatch(*bad), kind, words)
        if wrong_x is x:
            refused(world, lambda bad=bad: ep.prepare(*bad[1:]), kind, words)
    for wrong_x in (OnCuda(), x.double()):
        bad = wrong_x if me == 0 else x
        try:
            ep.start_dispatch(bad, ids, weights).finish()
            raise AssertionError("not refused")
        except (sidelane.InputError, sidelane.PlanError, sidelane.CallError) as error:
            assert (error.kind == "PeerRefused") == (me != 0)
    rows, handle = ep.dispatch(readonly, ids.numpy(), weights.numpy())
    assert isinstance(rows, np.ndarray), "tokens are only read"
    ep.combine(rows, handle)
    works(world, ep, of)


def check_rows_and_gradients_that_cannot_be_used(world):
    of, me = case(world.size, tokens=8), world.rank
    ep = built(world, of)
    rows, handle = ep.dispatch(of.x[me], of.ids[me], of.weights[me])
    y = rows.clone()
    g = torch.ones_like(of.x[me])
    readonly = g.numpy().copy()
    readonly.flags.writeable = False
    calls = [
        (lambda y: ep.combine(y, handle), y, y.double(), "Dtype", ["y"]),
        (lambda y: ep.combine(y, handle), y, y.bfloat16(), "WrongDtype", ["bf16"]),
        (lambda y: ep.combine(y, handle), y, y[:-1], "WrongShape", ["expert outputs"]),
        (lambda y: ep.combine(y, handle), y, OnCuda(), "WrongPlace", ["y", "a device"]),
        (lambda y: ep.start_combine(y, handle).finish(), y, y.int(), "Dtype", ["y"]),
        (lambda out: ep.combine(y, handle, out), g.clone(), readonly, "ReadOnly", ["out"]),
        (lambda out: ep.combine(y, handle, out), g.clone(), g[1:].clone(), "WrongShape", ["combined tokens"]),
        (lambda y: ep.dispatch_backward(y, handle), y, y.T, "NotContiguous", ["row_gradients"]),
        (lambda w: ep.dispatch_backward(y, handle, w), torch.ones(handle.rows), torch.ones(handle.rows + 1), "WrongShape", ["row weight"]),
        (lambda w: ep.dispatch_backward(y, handle, w), torch.ones(handle.rows), torch.ones(handle.rows).int(), "Dtype", ["row_weight_gradients"]),
        (lambda g: ep.combine_backward(g, handle), g, g.half(), "WrongDtype", ["f16"]),
        (lambda g: ep.combine_backward(g, handle), g, OnCuda(), "WrongPlace", ["gradients", "a device"]),
        (lambda x: ep.dispatch_cached(x, handle), of.x[me], of.x[me].tolist(), "NotATensor", ["list"]),
        (lambda x: ep.dispatch_cached(x, handle), of.x[me], of.x[me][1:], "WrongShape", ["tokens"]),
    ]
    for call, right, wrong, kind, words in calls:
        refused(world, lambda call=call, bad=wrong if me == 0 else right: call(bad), kind, words)
    works(world, ep, of)


def check_an_output_buffer_survives_a_refused_combine_and_no_other(world):
    of, me = case(world.size), world.rank
    ep = built(world, of)
    rows, handle = ep.dispatch(of.x[me], of.ids[me], of.weights[me])
    y = handle.output()
    y.copy_(experts(rows, of, me))
    wrong = torch.ones(handle.rows, of.hidden, dtype=torch.float64)
    refused(world, lambda: ep.combine(wrong if me == 0 else y, handle), "Dtype", ["y"])
    same(ep.combine(y, handle), expected_sums(of, me, of.x))
    assert handle.copied_bytes == 0
    try:
        # A rank without rows has no buffer to use up.
        ep.combine(y if handle.rows else wrong, handle)
        raise AssertionError("it was used up")
    except sidelane.ClosedError as error:
        assert error.kind == "UsedUp" and "handle.output()" in str(error)
    except sidelane.InputError:
        assert not handle.rows
    works(world, ep, of)


def check_an_output_buffer_survives_a_call_that_is_never_made(world):
    of, me = case(world.size), world.rank
    ep = built(world, of)
    rows, handle = ep.dispatch(of.x[me], of.ids[me], of.weights[me])
    y = handle.output()
    y.copy_(experts(rows, of, me))
    pending = ep.start_dispatch(of.x[me], of.ids[me], of.weights[me])
    for call in (ep.combine, ep.start_combine, ep.dispatch_backward):
        try:
            call(y, handle)
            raise AssertionError("another call is under way")
        except sidelane.BusyError as error:
            assert error.kind == "Busy"
    # What came of it meanwhile lies elsewhere.
    came, _ = pending.finish()
    came.fill_(float("nan"))
    same(ep.combine(y, handle), expected_sums(of, me, of.x))
    assert handle.copied_bytes == 0
    works(world, ep, of)


def check_shapes_and_settings_that_differ_between_ranks(world):
    of, me = case(world.size), world.rank
    for change, what in [({"top_k": 2}, "top_k"), ({"align": 4}, "align"), ({"sum_order": "rank"}, "sum_order")]:
        settings = {"experts": of.experts, "top_k": 3, "hidden": of.hidden, "dtype": "float32"}
        try:
            sidelane.ExpertParallel(world, **(settings | change if me == 0 else settings))
            raise AssertionError("ranks differ")
        except sidelane.CallError as error:
            assert (error.kind, error.rank) == ("ConfigsDiffer", me) and what in str(error), error
    for change in [{"sum_order": "alphabetical"}, {"dtype": "float8"}, {"experts": None}, {"budget": 1, "slots": 1}]:
        settings = {"experts": of.experts, "top_k": 3, "hidden": of.hidden, "dtype": "float32"}
        try:
            sidelane.ExpertParallel(world, **(settings | change if me == 0 else settings))
            raise AssertionError("a word that nobody knows")
        except sidelane.InputError as error:
            assert me == 0 and error.kind == "Setting" and error.setting in str(error), error
        except sidelane.CallError as error:
            assert me != 0 and error.kind == "ConfigsDiffer", error
    try:
        world.all().window((4 + me,))
        raise AssertionError("sizes differ")
    except sidelane.HeapError as error:
        assert error.kind == "SizesDiffer" and error.me == me, error
    try:
        world.all().window((0,) if me == 0 else (4,))
        raise AssertionError("one is empty")
    except sidelane.InputError as error:
        assert me == 0 and "empty" in str(error)
    except sidelane.HeapError as error:
        assert me != 0 and (error.kind, error.rank) == ("NotUsable", 0), error
    works(world, built(world, of), of)


def check_handles_and_buffers_of_others_are_named(world):
    of, me = case(world.size), world.rank
    one, other = built(world, of), built(world, of)
    rows, handle = one.dispatch(of.x[me], of.ids[me], of.weights[me])
    try:
        other.combine(rows.clone(), handle)
        raise AssertionError("a handle of another layer")
    except sidelane.CallError as error:
        assert error.kind == "ForeignHandle", error
    works(world, one, of)
    works(world, other, of)


def check_another_call_than_the_others_is_named(world):
    of, me = case(world.size), world.rank
    ep = built(world, of)
    rows, handle = ep.dispatch(of.x[me], of.ids[me], of.weights[me])
    try:
        if me == 0:
            ep.dispatch_cached(of.x[me], handle)
        else:
            ep.dispatch(of.x[me], of.ids[me], of.weights[me])
        raise AssertionError("calls differ")
    except sidelane.CallError as error:
        assert error.kind == "KindsDiffer" and error.rank == me, error
        assert {error.mine, error.theirs} == {"CachedDispatch", "Dispatch"}
    works(world, ep, of)
