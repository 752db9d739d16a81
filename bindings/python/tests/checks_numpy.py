"""Dispatch, combine and gates on numpy arrays alone."""

import numpy as np

import sidelane

HIDDEN = 8


def check_tokens_return_from_the_experts_that_they_chose(world):
    me, experts = world.rank, 2 * world.size
    ep = sidelane.ExpertParallel(world, experts=experts, top_k=2, hidden=HIDDEN, dtype="float32")
    # Token t of rank r chooses experts t and t + size, both at known ranks.
    tokens = world.size
    x = np.arange(tokens * HIDDEN, dtype=np.float32).reshape(tokens, HIDDEN) + 1000 * me
    first = np.arange(tokens, dtype=np.int32)
    ids = np.stack([first, first + world.size], axis=1)
    rows, handle = ep.dispatch(x, ids, np.ones((tokens, 2), np.float32))
    assert isinstance(rows, np.ndarray) and rows.shape == (handle.rows, HIDDEN)
    held = np.repeat(np.arange(2 * me, 2 * me + 2), handle.tokens_per_expert)
    assert handle.tokens_per_expert == [world.size, world.size]
    out = ep.combine(rows * (1.0 + held.astype(np.float32))[:, None], handle)
    expected = x * (2.0 + ids.sum(axis=1, dtype=np.float32))[:, None]
    assert np.array_equal(np.asarray(out), expected)


def check_first_call_without_a_dtype_says_which_to_give(world):
    ep = sidelane.ExpertParallel(world, experts=world.size, hidden=HIDDEN)
    x, weights = np.ones((1, HIDDEN), np.float32), np.ones((1, 1), np.float32)
    ids = np.zeros((1, 1), np.int32)
    gate, expert = sidelane.preset("mixtral", world.size, 1), np.ones((1, 3 * HIDDEN * 4), np.float32)
    layer = sidelane.MoeLayer(world, gate, hidden=HIDDEN, experts=expert)
    gathers = sidelane.RowCollective(world, columns=HIDDEN)
    shares = gathers.shares([1] * world.size)
    handle = ep.prepare(ids, weights)
    for name, call in (
        ("x", lambda: ep.dispatch(x, ids, weights)),
        ("x", lambda: ep.dispatch_cached(x, handle)),
        ("x", lambda: layer.forward(x)),
        ("rows", lambda: gathers.all_gather(x)),
        ("rows", lambda: gathers.reduce_scatter(np.ones((world.size, HIDDEN), np.float32), shares)),
    ):
        try:
            call()
            raise AssertionError("rows are bfloat16")
        except sidelane.InputError as error:
            said = f'{name}: its elements are float32, but rows are bfloat16 where no dtype is given: make it with dtype="float32"'
            assert error.kind == "Dtype" and str(error) == said, error
    try:
        ep.prepare(ids.astype(np.int16), weights)
        raise AssertionError("ids are int16")
    except sidelane.InputError as error:
        assert error.kind == "Dtype" and "int16 cannot be used" in str(error), error


def check_advice_names_the_library_of_the_tensor(world):
    ep = sidelane.ExpertParallel(world, experts=world.size, hidden=HIDDEN, dtype="float32")
    x = np.ones((1, 2 * HIDDEN), np.float32)[:, ::2]
    try:
        ep.dispatch(x, np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32))
        raise AssertionError("not contiguous")
    except sidelane.InputError as error:
        assert error.kind == "NotContiguous" and "numpy.ascontiguousarray(x)" in str(error), error


def check_window_larger_than_the_machine_is_refused(world):
    # Ten terabytes, and a petabyte.
    for elements in (10**13 // 4, 10**15):
        try:
            world.all().window((elements,), "float32")
            raise AssertionError("no machine has as much")
        except sidelane.HeapError as error:
            assert error.kind == "System" and "Cannot allocate memory" in str(error), error
    world.all().window((4,), "float32").barrier()


def check_element_types_that_differ_are_named(world):
    try:
        dtype = "bfloat16" if world.rank == 0 else "float32"
        sidelane.ExpertParallel(world, experts=world.size, hidden=HIDDEN, dtype=dtype)
        raise AssertionError("types differ")
    except sidelane.CallError as error:
        assert error.kind == "ConfigsDiffer" and "bf16" in str(error) and "f32" in str(error), error


def check_a_gate_decides_on_numpy_logits(world):
    logits = np.array([[0.0, 2.0, 1.0, 2.0], [3.0, 0.0, 0.0, 1.0]], np.float32)
    decision = sidelane.Gate(sidelane.preset("mixtral", 4, 2)).route(logits)
    assert np.asarray(decision.experts).tolist() == [[1, 3], [0, 3]]
    assert np.asarray(decision.weights)[0].tolist() == [0.5, 0.5]
