"""torch's own memory pools over device heaps: on a GPU alone, as they need torch's allocator."""

import torch
from gpu import gpu
from routing import case, same

import sidelane

KEPT = []
"""Tensors that are there when the process ends, behind the world."""


def check_tensors_of_a_mem_pool_are_sent_and_outlive_the_world(world):
    of, me = case(world.size), world.rank
    settings = {"experts": of.experts, "top_k": of.top_k, "hidden": of.hidden, "dtype": of.x[0].dtype, "max_tokens": 16}
    with gpu(me):
        # torch asks for 2 MiB at a time, and for 20 MiB where a tensor has more than one.
        there = sidelane.ExpertParallel(world, **settings, device="cuda", device_heap=64 << 20)
        host = sidelane.ExpertParallel(world, **settings)
        expected, layout = host.dispatch(of.x[me], of.ids[me], of.weights[me])
        sums = host.combine(expected * 2, layout)
        ids, weights, elsewhere = (tensor.to("cuda") for tensor in (of.ids[me], of.weights[me], of.x[me]))
        for _ in range(2):
            pool = there.mem_pool()
            with torch.cuda.use_mem_pool(pool):
                x = of.x[me].to("cuda")
            for tokens, plans in ((x, False), (elsewhere, True)):
                rows, handle = there.dispatch(tokens, ids, weights)
                same(rows.cpu(), expected)
                assert ("plan_choices" in handle.report()["kernels"]) == plans
                with torch.cuda.use_mem_pool(pool):
                    y = rows * 2
                same(there.combine(y, handle).cpu(), sums)
                assert handle.copied_bytes == y.numel() * y.element_size()
                del rows, handle, y
            with torch.cuda.use_mem_pool(pool):
                try:
                    torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
                    raise AssertionError("more than the heap has")
                except torch.OutOfMemoryError:
                    assert "raise device_heap" in pool.heap.refused
            torch.cuda.synchronize()
            if not KEPT:
                KEPT.append((pool, x))
                pool.heap = None
            del pool, x, tokens
        # The first pool serves no more, and has its segment still.
        same(KEPT[0][1].cpu(), of.x[me])
