"""Dispatch and combine on devices from Python, against the same on the host: to the bit."""

import sys
import threading

import torch
from devices import LENT, Device, OnDevice
from routing import case, same

import sidelane

HEAP = 1 << 20


def exchanges(world, of, device, **settings):
    """An instance on the device, on a stream of its own, and the same on the host."""
    settings = {"experts": of.experts, "top_k": of.top_k, "hidden": of.hidden, "dtype": of.x[0].dtype, "max_tokens": 16} | settings
    stream = device.new_stream()
    graphs = settings.pop("graphs", "off")
    room = {"device_heap": HEAP, "max_in_flight": 2} if graphs == "off" else {"graphs": graphs}
    on = {"device": device.number, "stream": stream, "max_blocks": settings.pop("max_blocks", None)} | room
    planned, host = sidelane.ExpertParallel(world, **settings, **on), sidelane.ExpertParallel(world, **settings)
    assert (planned.device, planned.stream) == (device.number, stream)
    executor = "enqueuer" if graphs == "off" else "constant-program"
    assert (planned.place, planned.executor) == (f"cuda:{device.number}", executor)
    assert (host.place, host.executor, host.device, host.stream) == ("host", "host-stepper", None, None)
    return planned, host


def sent(of, rank, device):
    """This rank's tensors on the device, on their way on its stream."""
    return [device.tensor(values) for values in (of.x[rank], of.ids[rank], of.weights[rank])]


def experts(rows):
    """What experts do here, the same on the host: a factor of each row's own."""
    factors = torch.tensor([2.0 ** (row % 5 - 2) for row in range(len(rows))], dtype=rows.dtype)
    return rows * factors.reshape(-1, 1)


def check_rows_and_sums_are_those_of_the_host(world):
    for dtype, blocks in ((torch.float32, None), (torch.bfloat16, 1), (torch.float16, 7)):
        of, me, device = case(world.size, dtype=dtype), world.rank, Device(world.rank)
        planned, host = exchanges(world, of, device, max_blocks=blocks)
        for _ in range(3):
            there, expected = host.dispatch(of.x[me], of.ids[me], of.weights[me])
            rows, handle = planned.dispatch(*sent(of, me, device))
            assert (handle.rows, handle.tokens) == (expected.rows, expected.tokens)
            assert handle.tokens_per_expert == expected.tokens_per_expert
            assert handle.required_rows == expected.required_rows
            same(device.read(rows), there)
            same(device.read(handle.row_weights), expected.row_weights)
            counts = [expected.tokens_per_expert, expected.padded_tokens_per_expert]
            assert device.read(handle.counts).tolist() == counts
            assert handle.index is None and handle.arrived is None and handle.used is None
            assert torch.from_dlpack(handle.dropped).shape == of.ids[me].shape
            # Experts write where peers read, on a stream that the exchange knows by DLPack alone.
            y = device.borrowed(handle.output())
            y.write(experts(there))
            out = device.tensor(torch.full_like(of.x[me], float("nan")))
            assert planned.combine(y, handle, out) is out
            same(device.read_sums(planned, out), host.combine(experts(there), expected))
            assert (handle.status, handle.copied_bytes) == (0, 0)
            assert handle.report()["handle_bytes"] > 0 == expected.report()["handle_bytes"]
            assert handle.report()["max_blocks"] == handle.return_report()["max_blocks"] == blocks


def check_steps_of_training_are_those_of_the_host(world):
    for weighted, route in ((False, "direct"), (True, "direct"), (True, "pxn")):
        of, me, device = case(world.size, dtype=torch.bfloat16), world.rank, Device(world.rank)
        planned, host = exchanges(world, of, device, weighted=weighted, route=route)
        room = lambda like: device.tensor(torch.full_like(like, float("nan")))  # noqa: E731
        there, expected = host.dispatch(of.x[me], of.ids[me], of.weights[me])
        sums = host.combine(experts(there), expected)
        x, ids, weights = sent(of, me, device)
        rows, handle = planned.dispatch(x, ids, weights)
        same(device.read_sums(planned, planned.combine(device.tensor(experts(there)), handle, room(sums))), sums)
        # Other tokens along the same layout, and along one that was made before its tokens.
        again = of.x[me] * 3
        layout = planned.prepare(ids, weights)
        for along in (handle, layout):
            came = planned.dispatch_cached(device.tensor(again), along)
            same(device.read(came), host.dispatch_cached(again, expected))
            same(device.read(along.row_weights), expected.row_weights)
        del came, layout
        gradients, of_choices = host.combine_backward(again, expected)
        sums_back = room(of.weights[me]) if weighted else None
        back, given = planned.combine_backward(device.tensor(again), handle, sums_back)
        same(device.read(back), gradients)
        assert given is sums_back
        if weighted:
            same(device.read_sums(planned, sums_back), of_choices)
        of_rows, of_weights = experts(gradients), torch.arange(expected.rows) / 3.0
        tokens, choices = host.dispatch_backward(of_rows, expected, of_weights)
        y, out, sums_back = device.borrowed(handle.output()), room(tokens), room(choices)
        y.write(of_rows)
        assert planned.dispatch_backward(y, handle, device.tensor(of_weights), out, sums_back) == (out, sums_back)
        same(device.read_sums(planned, out), tokens)
        same(device.read_sums(planned, sums_back), choices)
        out = room(tokens)
        assert planned.dispatch_backward(device.tensor(of_rows), handle, out=out) == (out, None)
        same(device.read_sums(planned, out), tokens)


def check_records_rows_by_rank_and_other_maps_are_those_of_the_host(world):
    of, me, device = case(world.size, hidden=136, dtype=torch.bfloat16), world.rank, Device(world.rank)
    for settings in ({"fp8": True}, {"layout": "rank-major"}, {"layout": "rank-major", "fp8": True, "route": "pxn"}):
        planned, host = exchanges(world, of, device, **settings)
        x, ids, weights = sent(of, me, device)
        tokens = host.quantize(of.x[me]) if "fp8" in settings else of.x[me]
        forms = [x]
        if "fp8" in settings:
            room = device.tensor(torch.zeros_like(tokens))
            assert planned.quantize(x, out=room) is room
            same(device.read_sums(planned, room), tokens)
            forms.append(room)
        for turned in (False, True):
            if turned:
                held = [list(reversed(of.held(rank))) for rank in range(world.size)]
                for ep in (planned, host):
                    ep.set_expert_map(held)
                    assert ep.expert_map == held
            there, expected = host.dispatch(tokens, of.ids[me], of.weights[me])
            made = experts(torch.ones(expected.rows, of.hidden, dtype=torch.bfloat16))
            sums = host.combine(made, expected)
            for form in forms:
                rows, handle = planned.dispatch(form, ids, weights)
                for came in (rows, planned.dispatch_cached(form, handle)):
                    same(device.read(came), there)
                    same(device.read(handle.row_weights), expected.row_weights)
                    counts = device.read(handle.counts)
                    if "layout" in settings:
                        same(device.read(handle.row_experts), expected.row_experts)
                        assert counts.tolist() == expected.tokens_per_expert
                    else:
                        assert counts.tolist() == [expected.tokens_per_expert, expected.padded_tokens_per_expert]
                out = device.tensor(torch.full_like(sums, float("nan")))
                same(device.read_sums(planned, planned.combine(device.tensor(made), handle, out)), sums)
                del rows, came, handle
            del there, expected


def check_gradients_need_room_on_a_device(world):
    of, me, device = case(world.size), world.rank, Device(world.rank)
    planned, _ = exchanges(world, of, device, weighted=True)
    rows, handle = planned.dispatch(*sent(of, me, device))
    planned.combine(rows, handle, device.tensor(torch.zeros_like(of.x[me])))
    assert raised(lambda: planned.dispatch_backward(rows, handle)).setting == "out"
    x = device.tensor(of.x[me])
    assert raised(lambda: planned.combine_backward(x, handle)).setting == "weights_out"
    short = device.tensor(torch.zeros(3))
    expected = ("PlanError", "WrongShape") if me == 0 else ("CallError", "PeerRefused")
    given = short if me == 0 else device.tensor(torch.zeros(handle.rows))
    out, sums_back = device.tensor(torch.zeros_like(of.x[me])), device.tensor(torch.zeros_like(of.weights[me]))
    assert refused(lambda: planned.dispatch_backward(rows, handle, given, out, sums_back)) == expected
    planned.synchronize()


def check_reports_say_what_was_enqueued(world):
    of, me, device = case(world.size), world.rank, Device(world.rank)
    planned, _ = exchanges(world, of, device)
    rows, handle = planned.dispatch(*sent(of, me, device))
    report = handle.report()
    # Once for other ranks, and once for rows that stay here.
    gathered = ["regroup"] * min(world.size, 2) if len(of.x[me]) else []
    placed = ["place_choices"] if handle.report()["enqueued"]["own_bytes"] else []
    assert report["kernels"] == ["plan_choices", *placed, *gathered] and report["host_staged"] is None
    assert report["executor"] == "enqueuer"
    assert {used["lane"]: used["ranks"] for used in report["lanes"]} == {"own": 1, "copy engine": world.size - 1}
    assert handle.return_report()["kernels"] == [], "nothing returned before"
    out = device.tensor(torch.zeros_like(of.x[me]))
    combine = planned.start_combine(rows, handle)
    assert raised(lambda: handle.status).kind == "Busy"
    # A call that has no place for its sums is still pending.
    assert raised(combine.finish).setting == "out"
    assert combine.finish(out) is out
    report = handle.return_report()
    assert report["kernels"] == ["sum_choices_f32"]
    # Sums read rows that stay on the device where they lie.
    assert report["enqueued"]["copies_by_sms"] == 0
    assert handle.copied_bytes == handle.rows * of.hidden * 4, "the rows are no output buffer: copied once"
    assert refused(lambda: combine.finish(out)) == ("ClosedError", "UsedUp"), "a call is finished once"


def check_rows_within_a_budget_are_those_of_the_host(world):
    of, me, device = case(world.size), world.rank, Device(world.rank)
    most = max(len(of.rows(rank)) for rank in range(world.size))
    for budget in (most, most - 2):
        planned, host = exchanges(world, of, device, budget=budget, overflow="drop")
        there, expected = host.dispatch(of.x[me], of.ids[me], of.weights[me])
        rows, handle = planned.dispatch(*sent(of, me, device))
        assert (handle.rows, handle.required_rows) == (expected.rows, expected.required_rows)
        same(torch.from_dlpack(handle.dropped), torch.from_dlpack(expected.dropped))
        assert handle.dropped_mask is None, "the host knows"
        same(device.read(rows), there)
        out = device.tensor(torch.zeros_like(of.x[me]))
        planned.combine(rows, handle, out)
        same(device.read_sums(planned, out), host.combine(there, expected))


def check_a_budget_needs_no_sizes(world):
    of, me, device = case(world.size), world.rank, Device(world.rank)
    most = max(len(of.rows(rank)) for rank in range(world.size))
    planned, host = exchanges(world, of, device, budget=most + 3, graphs="slots", sum_order="rank")
    there, expected = host.dispatch(of.x[me], of.ids[me], of.weights[me])
    rows, handle = planned.start_dispatch(*sent(of, me, device)).finish_async()
    assert torch.from_dlpack(handle.dropped).shape == (0, of.top_k)
    assert handle.tokens_per_expert == [] and rows.shape == (most + 3, of.hidden)
    assert not device.read(handle.dropped_mask).any() and handle.dropped_mask.shape == of.ids[me].shape
    out = device.tensor(torch.zeros_like(of.x[me]))
    planned.combine(rows, handle, out)
    counts = device.read(handle.counts)[0].tolist()
    assert counts == expected.tokens_per_expert
    same(device.read(rows)[: sum(counts)], there)
    same(device.read_sums(planned, out), host.combine(there, expected))


def check_masks_are_those_of_the_host(world):
    of, me, device = case(world.size), world.rank, Device(world.rank)
    for settings in ({}, {"budget": 100, "graphs": "slots", "sum_order": "rank"}):
        planned, host = exchanges(world, of, device, **settings)
        for masked in [*range(world.size), None]:
            active = [rank != masked for rank in range(world.size)]
            for ep in (planned, host):
                ep.mask(active)
                assert ep.active == active
            there, expected = host.dispatch(of.x[me], of.ids[me], of.weights[me])
            pending = planned.start_dispatch(*sent(of, me, device))
            rows, handle = pending.finish_async() if settings else pending.finish()
            same(device.read(rows)[: expected.rows], there)
            dropped = device.read(handle.dropped_mask) if settings else torch.from_dlpack(handle.dropped)
            same(dropped.bool(), torch.from_dlpack(expected.dropped))
            known = 0 if settings else expected.report()["dropped_weight"]
            assert handle.report()["dropped_weight"] == known
            out = device.tensor(torch.zeros_like(of.x[me]))
            planned.combine(rows, handle, out)
            same(device.read_sums(planned, out), host.combine(there, expected))
            del there, expected, rows, handle


def check_a_graph_is_replayed_with_other_tokens(world):
    of, me, device = case(world.size), world.rank, Device(world.rank)
    most = max(len(of.rows(rank)) for rank in range(world.size))
    settings = {"experts": of.experts, "top_k": of.top_k, "hidden": of.hidden, "dtype": torch.float32, "max_tokens": 16}
    settings["sum_order"] = "rank"
    on = {"graphs": "slots", "device": device.number, "stream": device.stream}
    planned = sidelane.ExpertParallel(world, **settings, budget=most, **on)
    host = sidelane.ExpertParallel(world, **settings)
    x, ids, weights = sent(of, me, device)
    out = device.tensor(torch.zeros_like(of.x[me]))
    device.synchronize()
    kept = []

    def layer():
        rows, handle = planned.start_dispatch(x, ids, weights).finish_async()
        planned.combine(rows, handle, out)
        kept.append((rows, handle))

    launch = device.captured(layer)
    for factor in (1, 2, -3):
        there, expected = host.dispatch(of.x[me] * factor, of.ids[me], of.weights[me])
        x.write(of.x[me] * factor)
        launch()
        same(device.read_sums(planned, out), host.combine(there, expected))
    assert kept[0][1].status == 0


def check_what_was_lent_is_given_back_once_the_stream_has_come_past(world):
    of, me, device = case(world.size), world.rank, Device(world.rank)
    planned, _ = exchanges(world, of, device)
    before = len(LENT)
    for _ in range(20):
        rows, handle = planned.dispatch(*sent(of, me, device))
        planned.combine(handle.output(), handle, device.tensor(torch.zeros_like(of.x[me])))
        device.synchronize(planned.stream)
    assert before < len(LENT) <= before + 8, len(LENT) - before
    address = rows.__dlpack_device__()
    del rows
    try:
        handle.row_weights
        raise AssertionError(f"what came with rows goes with them: {address}")
    except sidelane.ClosedError as error:
        assert error.kind == "RowsGone"


def refused(call):
    try:
        call()
    except sidelane.Error as error:
        return type(error).__name__, error.kind
    return None


def check_tensors_elsewhere_are_refused_on_all_ranks_and_the_next_call_works(world):
    of, me, device = case(world.size), world.rank, Device(world.rank)
    planned, host = exchanges(world, of, device)
    x, ids, weights = sent(of, me, device)
    elsewhere = Device(world.size + me).tensor(of.x[me])
    wide = Device(me).tensor(torch.zeros(3, of.hidden + 1))
    doubles = Device(me).tensor(of.ids[me].long())
    wrong = [
        ((of.x[me], ids, weights), ("PlanError", "WrongPlace")),
        ((x, of.ids[me], weights), ("PlanError", "WrongPlace")),
        ((elsewhere, ids, weights), ("InputError", "Device")),
        ((wide, ids, weights), ("InputError", "Shape")),
        ((x, doubles, weights), ("InputError", "Dtype")),
        ((x, ids, "no tensor"), ("InputError", "NotATensor")),
    ]
    for arguments, expected in wrong:
        if me == 1:
            assert refused(lambda: planned.dispatch(*arguments)) == expected
        else:
            assert refused(lambda: planned.dispatch(x, ids, weights)) == ("CallError", "PeerRefused")
    out = device.tensor(torch.zeros_like(of.x[me]))
    rows, handle = planned.dispatch(x, ids, weights)
    if me == 1:
        assert refused(lambda: planned.combine(rows, handle, torch.zeros_like(of.x[me]))) == ("PlanError", "WrongPlace")
    else:
        assert refused(lambda: planned.combine(rows, handle, out)) == ("CallError", "PeerRefused")
        assert refused(handle.return_report) == ("CallError", "PeerRefused")
        assert not device.read_sums(planned, out).any() and handle.status == 2
    # On the host it is tensors and handles of devices that are elsewhere.
    assert refused(lambda: host.dispatch(x, ids, weights)) == ("PlanError", "WrongPlace")
    there, expected = host.dispatch(of.x[me], of.ids[me], of.weights[me])
    for call in (lambda: host.combine(there, handle), lambda: planned.combine(rows, expected, out)):
        assert refused(call) == ("PlanError", "WrongPlace")
    assert refused(lambda: expected.status_address) == ("PlanError", "WrongPlace") and expected.status == 0
    host.combine(there, expected)
    del rows, handle
    there, expected = host.dispatch(of.x[me], of.ids[me], of.weights[me])
    rows, handle = planned.dispatch(x, ids, weights)
    planned.combine(rows, handle, out)
    same(device.read_sums(planned, out), host.combine(there, expected))


def check_an_output_buffer_survives_a_combine_whose_sums_have_no_place(world):
    of, me, device = case(world.size), world.rank, Device(world.rank)
    planned, host = exchanges(world, of, device)
    there, expected = host.dispatch(of.x[me], of.ids[me], of.weights[me])
    rows, handle = planned.dispatch(*sent(of, me, device))
    y, out = device.borrowed(handle.output()), device.tensor(torch.zeros_like(of.x[me]))
    y.write(experts(there))
    if me == 1:
        assert refused(lambda: planned.combine(y, handle, torch.zeros_like(of.x[me]))) == ("PlanError", "WrongPlace")
    else:
        assert raised(lambda: planned.combine(y, handle, out)).kind == "PeerRefused"
        assert raised(handle.return_report).kind == "PeerRefused"
        y = device.borrowed(handle.output())
        y.write(experts(there))
    planned.combine(y, handle, out)
    same(device.read_sums(planned, out), host.combine(experts(there), expected))
    assert handle.copied_bytes == 0


def raised(call):
    try:
        call()
    except sidelane.Error as error:
        return error
    raise AssertionError("refused")


def check_a_combine_without_room_for_its_rows_is_told_to_all(world):
    of, me, device = case(world.size), world.rank, Device(world.rank)
    planned, host = exchanges(world, of, device)
    there, expected = host.dispatch(of.x[me], of.ids[me], of.weights[me])
    rows, handle = planned.dispatch(*sent(of, me, device))
    out = device.tensor(torch.ones_like(of.x[me]))
    all_there_is = []
    while me == 0:
        try:
            all_there_is.append(handle.output())
        except sidelane.HeapError:
            break
    error = raised(lambda: (planned.combine(rows, handle, out), handle.return_report()))
    assert (type(error).__name__, error.kind) == (("HeapError", "OutOfSpace") if me == 0 else ("CallError", "PeerRefused"))
    # What is given back is free for calls that come later.
    all_there_is.clear()
    rows, handle = planned.dispatch(*sent(of, me, device))
    planned.combine(rows, handle, out)
    same(device.read_sums(planned, out), host.combine(there, expected))


def check_a_token_buffer_waits_while_another_thread_feeds_the_stream(world):
    of, me, device = case(world.size), world.rank, Device(world.rank)
    planned, host = exchanges(world, of, device)
    most, asked, fed = HEAP * 3 // 4 // (of.hidden * 4), threading.Event(), []
    there, expected = host.dispatch(of.x[me], of.ids[me], of.weights[me])
    rows, handle = planned.dispatch(*sent(of, me, device))
    y, out = device.borrowed(handle.output()), device.tensor(torch.zeros_like(of.x[me]))
    y.write(experts(there))
    go_on = device.stalled(planned.stream)

    def feed():
        asked.wait()
        fed.append(True)
        go_on()

    feeder, interval = threading.Thread(target=feed), sys.getswitchinterval()
    feeder.start()
    # The heap has room for one, and the stream has yet to come past the first.
    planned.token_buffer(most)
    planned.combine(y, handle, out)
    # The other thread runs once this one lets it.
    sys.setswitchinterval(1000)
    try:
        asked.set()
        second = planned.token_buffer(most)
        assert fed, "the memory was free at once"
    finally:
        sys.setswitchinterval(interval)
        feeder.join()
    assert len(second) == most
    same(device.read_sums(planned, out), host.combine(experts(there), expected))


def check_a_stream_that_is_none_is_a_buffer_error(world):
    of, me, device = case(world.size), world.rank, Device(world.rank)
    planned, _ = exchanges(world, of, device)
    rows, handle = planned.dispatch(*sent(of, me, device))
    for stream in (0, -2, 2, 12345):
        try:
            rows.__dlpack__(stream=stream)
            raise AssertionError(f"{stream} is no stream")
        except BufferError as error:
            assert str(stream) in str(error)
    planned.combine(rows, handle, device.tensor(torch.zeros_like(of.x[me])))


def check_what_a_place_does_not_have_is_refused_by_name(world):
    of, me, device = case(world.size), world.rank, Device(world.rank)
    planned, host = exchanges(world, of, device)
    within, _ = exchanges(world, of, device, budget=100, graphs="slots", sum_order="rank")
    sent_here = sent(of, me, device)
    rows, handle = planned.dispatch(*sent_here)
    host_rows, layout = host.dispatch(of.x[me], of.ids[me], of.weights[me])
    some, placed = within.dispatch(*sent_here)
    out = device.tensor(torch.zeros_like(of.x[me]))
    for call in (
        lambda: within.prepare(*sent_here[1:]),
        lambda: within.token_buffer(1),
        lambda: within.dispatch_cached(sent_here[0], placed),
        lambda: within.dispatch_backward(some, placed, out=out),
        lambda: within.combine_backward(sent_here[0], placed),
        lambda: planned.release(handle),
        lambda: host.release(layout),
        lambda: host.start_dispatch(of.x[me], of.ids[me], of.weights[me]).finish_async(),
    ):
        assert refused(call) == ("PlanError", "NotAvailable")
    host.synchronize()
    planned.synchronize()
    # As many dispatches as there is memory for are alive: this rank's error alone.
    more = planned.dispatch(*sent_here)
    assert refused(lambda: planned.dispatch(*sent_here)) == ("CallError", "TooManyInFlight")
    del more
    planned.dispatch(*sent_here)
    on = {"device": me, "stream": device.stream}
    not_of_the_host = ({"max_in_flight": 1}, {"device_heap": 1 << 20}, {"max_blocks": 1})
    for settings in (*not_of_the_host, on | {"strategy": "all-gather"}, on | {"max_blocks": 0}):
        error = raised(lambda: sidelane.ExpertParallel(world, experts=4, hidden=128, **settings))
        assert error.kind == ("BadParameter" if settings.get("max_blocks") == 0 else "NotAvailable"), error


def check_torch_makes_the_tensor_of_sums(world):
    from types import SimpleNamespace
    from unittest import mock

    class OfTorch(OnDevice):
        requires_grad = False

    on_host = torch.empty

    def empty(shape, **named):
        if "device" not in named:
            return on_host(shape, **named)
        assert named["device"] == f"cuda:{here.number}"
        made = here.tensor(torch.full(tuple(shape), float("nan"), dtype=named["dtype"]))
        made.__class__ = OfTorch
        return made

    of, me, here = case(world.size), world.rank, Device(world.rank)
    planned, host = exchanges(world, of, here)
    there, expected = host.dispatch(of.x[me], of.ids[me], of.weights[me])
    rows, handle = planned.dispatch(*sent(of, me, here))
    y = here.borrowed(rows)
    y.__class__ = OfTorch
    sums = host.combine(there, expected)
    current = SimpleNamespace(cuda_stream=here.stream)
    cuda = {"is_available": lambda: True, "current_device": lambda: me, "current_stream": lambda number: current}
    with mock.patch.multiple(torch.cuda, **cuda), mock.patch.object(torch, "empty", empty):
        for combine in (planned.combine, lambda *arguments: planned.start_combine(*arguments).finish()):
            # It is there for torch's current stream.
            same(combine(y, handle).read(), sums)


def check_the_current_stream_of_torch_is_the_default(world):
    from types import SimpleNamespace
    from unittest import mock

    device = Device(world.rank)
    settings = {"experts": 4, "hidden": 8, "device_heap": 1 << 20, "max_tokens": 4}
    refused = raised(lambda: sidelane.ExpertParallel(world, **settings, device="cuda"))
    remedy = "import a torch with CUDA, or pass device= (a number) and stream= (a handle)"
    assert refused.setting == "stream" and str(refused) == f"stream: torch sees no GPU: {remedy}"
    assert raised(lambda: sidelane.ExpertParallel(world, **settings, device="cpu")).setting == "device"
    with mock.patch.multiple(
        torch.cuda,
        is_available=lambda: True,
        current_device=lambda: device.number,
        current_stream=lambda number: SimpleNamespace(cuda_stream=device.stream if number == device.number else 0),
    ):
        for named in ("cuda", device.number, torch.device("cuda", device.number)):
            planned = sidelane.ExpertParallel(world, **settings, device=named)
            assert (planned.device, planned.stream) == (device.number, device.stream)
    if world.rank == 0:
        error = raised(lambda: sidelane.ExpertParallel(world, **settings, device=99, stream=0))
        assert (type(error).__name__, error.kind, error.device) == ("DeviceError", "NoSuchDevice", 99)
    else:
        error = raised(lambda: sidelane.ExpertParallel(world, **settings, device=1, stream=0))
        assert error.kind == "ConfigsDiffer"


def relayed_rows():
    """Between nodes, whose relays are copy engines: rows as they arrived, and which is which."""
    with sidelane.init() as world:
        of, me, device = case(world.size), world.rank, Device(world.rank)
        planned, host = exchanges(world, of, device, route="pxn")
        there, expected = host.dispatch(of.x[me], of.ids[me], of.weights[me])
        rows, handle = planned.dispatch(*sent(of, me, device))
        arrived, index = device.read(handle.arrived), device.read(handle.index)
        same(device.read(rows), there)
        same(arrived[index.long()], there)
        out = device.tensor(torch.zeros_like(of.x[me]))
        planned.combine(rows, handle, out)
        same(device.read_sums(planned, out), host.combine(there, expected))
        planned.synchronize()
        return sorted(used["lane"] for used in handle.report()["lanes"])


def check_slots_are_what_all_ranks_sent(world):
    of, me, device = case(world.size, dtype=torch.bfloat16), world.rank, Device(world.rank)
    slots = sidelane.ExpertParallel(
        world,
        experts=of.experts,
        top_k=of.top_k,
        hidden=of.hidden,
        layout="rank-major",
        sum_order="rank",
        slots=12,
        max_tokens=12,
        device=device.number,
        stream=device.new_stream(),
    )
    assert slots.executor == "constant-program"
    for _ in range(3):
        received, handle = slots.dispatch(*sent(of, me, device))
        held = of.held(me)
        assert received.shape == (world.size, 12, of.hidden) and handle.tokens == len(of.x[me])
        rows, ids, weights = (device.read(lent) for lent in (received, handle.row_experts, handle.row_weights))
        used = device.read(handle.used).tolist()
        for source in range(world.size):
            reaching = [t for t, chosen in enumerate(of.ids[source].tolist()) if any(i in held for i in chosen)]
            assert used[source] == len(reaching)
            same(rows[source, : len(reaching)], of.x[source][reaching])
            assert not rows[source, len(reaching) :].any()
            for place, token in enumerate(reaching):
                local = [held.index(i) if i in held else -1 for i in of.ids[source][token].tolist()]
                assert ids[source, place].tolist() == local
                assert weights[source, place].tolist() == [
                    w if i >= 0 else 0 for i, w in zip(local, of.weights[source][token].tolist())
                ]
        # Experts that double: each token returns as often as it has ranks, doubled.
        y = device.borrowed(handle.output())
        assert y.shape == received.shape
        y.write(rows * 2)
        out = device.tensor(torch.zeros_like(of.x[me]))
        assert slots.combine(y, handle, out) is out
        ranks = torch.tensor([[float(sum(any(i in of.held(r) for i in c) for r in range(world.size)))] for c in of.ids[me].tolist()])
        sums = (of.x[me].float() * 2 * ranks).bfloat16()
        same(device.read_sums(slots, out), sums)
        assert handle.copied_bytes == 0 and handle.status == 0
        assert handle.report()["kernels"] == ["pack", "check"] and handle.return_report()["kernels"] == ["sum"]
        assert (handle.counts, handle.index, handle.arrived, handle.rows) == (None, None, None, 0)
    # Rows elsewhere are copied once; those in the place of outputs, which is the same in every
    # call, are not.
    for y, copied in ((device.tensor(rows * 2), y.read().nbytes), (y, 0)):
        _, handle = slots.dispatch(*sent(of, me, device))
        y.write(rows * 2)
        pending = slots.start_combine(y, handle)
        same(device.read_sums(slots, pending.finish(out)), sums)
        assert handle.copied_bytes == copied
    # What came with rows is there as long as the handle.
    _, handle = slots.start_dispatch(*sent(of, me, device)).finish_async()
    assert device.read(handle.used).tolist() == used
    # A call out of turn is not entered, whatever it brings.
    assert refused(lambda: slots.dispatch(of.x[me], of.ids[me], of.weights[me])) == ("PlanError", "WrongPlace")
    assert refused(lambda: slots.dispatch(*sent(of, me, device))) == ("CallError", "OutOfTurn")
    slots.release(handle)
    assert refused(lambda: slots.start_combine(handle.output(), handle)) == ("CallError", "OutOfTurn")
    slots.synchronize()
    slots.check()
