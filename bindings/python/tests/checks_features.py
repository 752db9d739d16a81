"""Each cell of the library's table of features that says "no" is refused by name, on all ranks."""

from pathlib import Path

import torch
from devices import Device
from routing import case

import sidelane

PAGE = Path(__file__).parents[3] / "docs" / "from-rust.md"
"""A test of the library compares the table there with the code."""
HOST, ENQUEUER, SLOTS, BUDGET = "host-stepper", "enqueuer", "constant-program, slots", "constant-program, budget"

SETTINGS = {
    "expert-major rows": {"layout": "expert-major"},
    "rank-major rows": {"layout": "rank-major"},
    "fewer or more slots than tokens": {"slots": 7},
    "sums by expert": {"sum_order": "expert"},
    "sums by node": {"sum_order": "node"},
    "partial sums in bf16": {"sum_order": "rank", "partial_dtype": "bf16"},
    "aligned segments": {"align": 4},
    "relays (route pxn)": {"route": "pxn"},
    "relays that copy spans": {"layout": "rank-major", "route": "pxn", "coalesce_relays": True},
    "dispatch by all-gather": {"strategy": "all-gather"},
    "dispatch in fp8": {"fp8": True},
    "rows of bytes": {"dtype": "uint8"},
    "weighted combine": {"weighted": True},
    "a limit of dispatches (max_in_flight)": {"max_in_flight": 2},
    "a device heap (device_heap)": {"device_heap_limit": 1 << 20},
    "a limit of blocks (max_blocks)": {"max_blocks": 4},
    "sizes on the device, and capture": {"graphs": "slots"},
}
"""Settings that ask for a feature."""

CALLS = {
    "cached dispatch": lambda of: (lambda: of.ep.prepare(*of.chosen), lambda: of.ep.dispatch_cached(of.x, of.handle)),
    "gradients": lambda of: (
        lambda: of.ep.dispatch_backward(of.handle.output(), of.handle, out=of.out),
        lambda: of.ep.combine_backward(of.x, of.handle),
    ),
    "another expert map": lambda of: (lambda: of.ep.set_expert_map([[0, 1], [2, 3]]),),
    "token buffers": lambda of: (lambda: of.ep.token_buffer(1),),
    "a device heap (device_heap)": lambda of: (of.ep.heap_allocator,),
    "sizes on the device, and capture": lambda of: (lambda: of.ep.start_dispatch(of.x, *of.chosen).finish_async(),),
    "release without combine": lambda of: (lambda: of.ep.release(of.handle),),
    "calls on several streams": lambda of: (lambda: of.ep.set_stream(0),),
}
"""Calls that ask for a feature of an instance."""

# Of several features that settings ask for, the first that is missing is named.
NAMED = {("relays that copy spans", SLOTS): "relays (route pxn)", ("relays that copy spans", BUDGET): "rank-major rows"}

NOT_ASKED = {
    # Python has neither.
    *(("a priority of copies (priority)", column) for column in (HOST, SLOTS, BUDGET)),
    *(("the floor", column) for column in (ENQUEUER, SLOTS, BUDGET)),
    # Another mode serves the settings.
    ("fewer or more slots than tokens", ENQUEUER),
    ("fewer or more slots than tokens", BUDGET),
    ("a receive budget", SLOTS),
    # Rank-major rows have no such sums in any place.
    ("sums by expert", SLOTS),
    ("dispatch by all-gather", SLOTS),
    ("weighted combine", SLOTS),
}


def missing_cells():
    """Feature and column of each "no"."""

    def split(line):
        return [cell.strip() for cell in line.strip("|").split("|")]

    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("| feature |"))
    columns = split(lines[first])[1:]
    assert columns == [HOST, ENQUEUER, SLOTS, BUDGET]
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            return
        feature, *served = split(line)
        yield from ((feature, column) for column, cell in zip(columns, served, strict=True) if cell == "no")


class Layer:
    """An instance of a column, and a dispatch of it."""

    def __init__(self, world, settings, device):
        of = case(world.size, tokens=3, experts=4, top_k=2, dtype=torch.bfloat16)
        self.ep = sidelane.ExpertParallel(world, **settings)
        tensors = of.x[world.rank], of.ids[world.rank], of.weights[world.rank]
        self.out = torch.zeros_like(tensors[0])
        if device is not None:
            *tensors, self.out = [device.tensor(values) for values in (*tensors, self.out)]
        self.x, *self.chosen = tensors
        self.rows, self.handle = self.ep.dispatch(self.x, *self.chosen)


def refused_by_name(call, feature, column):
    executor, place = column.split(",")[0], "the host" if column == HOST else "a device"
    try:
        call()
    except sidelane.PlanError as error:
        assert error.kind == "NotAvailable", (feature, column, error)
        assert f"not available on {place} ({executor}): {feature}" in str(error), (feature, column, error)
        return
    raise AssertionError(f"{feature}: {column} serves it")


def check_each_missing_feature_is_refused_by_name(world):
    device = Device(world.rank)
    on = {"device": device.number, "stream": device.new_stream()}
    shared = {"experts": 4, "top_k": 2, "hidden": 16, "max_tokens": 8}
    plain = {
        HOST: shared,
        ENQUEUER: shared | on,
        SLOTS: shared | on | {"layout": "rank-major", "slots": 8},
        BUDGET: shared | on | {"budget": 64, "graphs": "slots", "sum_order": "rank"},
    }
    layers = {column: Layer(world, settings, None if column == HOST else device) for column, settings in plain.items()}
    not_asked = set()
    for feature, column in missing_cells():
        settings = None if (feature, column) in NOT_ASKED else SETTINGS.get(feature)
        calls = CALLS[feature](layers[column]) if feature in CALLS else ()
        named = NAMED.get((feature, column), feature)
        if settings is not None:
            refused_by_name(lambda: sidelane.ExpertParallel(world, **plain[column] | settings), named, column)
        for call in calls:
            refused_by_name(call, named, column)
        if settings is None and not calls:
            not_asked.add((feature, column))
    assert not_asked == NOT_ASKED, not_asked ^ NOT_ASKED
    for column in (SLOTS, BUDGET):
        layers[column].ep.release(layers[column].handle)
        layers[column].ep.synchronize()
