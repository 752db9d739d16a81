"""Torch's own code on CUDA tensors, or on what stands for them, against the same on the host: to
the bit.
"""

from functools import partial

import torch
from gpu import copy_late, gpu, no_waiting
from routing import case, same
from torch.utils.checkpoint import checkpoint

import sidelane
from sidelane.autograd import combine, dispatch

HEAP = 1 << 20


def built(world, of, **settings):
    """An instance that follows torch's current stream, and the same on the host."""
    settings = {"experts": of.experts, "top_k": of.top_k, "hidden": of.hidden, "dtype": of.x[0].dtype, "max_tokens": 16} | settings
    there = sidelane.ExpertParallel(world, **settings, device="cuda", device_heap=HEAP)
    return there, sidelane.ExpertParallel(world, **settings)


def cuda(*tensors):
    return [tensor.to("cuda") for tensor in tensors]


def weighed(y, weights):
    """Rows whose first column has its weight: the gradient of that is a product, whose bits do not
    depend on how torch sums.
    """
    return torch.cat([y[:, :1] * weights.unsqueeze(1).to(y.dtype), y[:, 1:]], dim=1)


def forward_of(ep, x, ids, weights, factor):
    """A layer whose experts scale rows."""
    routed = dispatch(ep, x, ids, weights)
    y = routed.rows * factor[: routed.rows.shape[0]]
    if not ep.weighted:
        y = weighed(y, routed.weights)
    return combine(ep, y, routed)


def pass_of(ep, x, ids, weights, factor, gradient, forward=forward_of):
    """A layer forward and back: tokens, and gradients of tokens and weights."""
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    out = forward(ep, x, ids, weights, factor)
    out.backward(gradient)
    return out.detach(), x.grad, weights.grad


def factors(of):
    return torch.tensor([2.0 ** (row % 5 - 2) for row in range(200)], dtype=of.x[0].dtype).reshape(-1, 1)


def check_torch_differentiates_both_calls(world):
    me = world.rank
    for dtype, weighted in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        of = case(world.size, dtype=dtype)
        given = of.x[me], of.ids[me], of.weights[me], factors(of), torch.cos(of.x[me])
        with gpu(me):
            there, host = built(world, of, weighted=weighted)
            assert there.executor == "enqueuer"
            expected = pass_of(host, *given)
            for _ in range(2):
                for seen, other in zip(pass_of(there, *cuda(*given)), expected, strict=True):
                    assert seen.is_cuda
                    same(seen.cpu(), other)


def check_layers_that_are_recomputed_have_the_same_bits(world):
    of, me = case(world.size), world.rank
    given, forwards = (of.x[me], of.ids[me], of.weights[me], factors(of), torch.cos(of.x[me])), []

    def counted(*arguments):
        forwards.append(torch.is_grad_enabled())
        return forward_of(*arguments)

    with gpu(me):
        for weighted in (False, True):
            there, host = built(world, of, weighted=weighted)
            expected = pass_of(host, *given)
            for reentrant in (False, True):
                again = partial(checkpoint, counted, use_reentrant=reentrant, preserve_rng_state=False)
                seen = pass_of(there, *cuda(*given), forward=again)
                # Once for the tokens, and once more in the backward pass.
                assert forwards == [not reentrant, True], forwards
                forwards.clear()
                for one, other in zip(seen, expected, strict=True):
                    same(one.cpu(), other)


def check_no_call_of_torch_waits_for_the_device(world):
    of, me = case(world.size), world.rank
    given = of.x[me], of.ids[me].long(), of.weights[me], factors(of), torch.cos(of.x[me])
    with gpu(me):
        there, host = built(world, of)
        given_there = cuda(*given)
        with no_waiting():
            seen = pass_of(there, *given_there)
        for one, other in zip(seen, pass_of(host, *given), strict=True):
            same(one.cpu(), other)


def check_ids_may_have_64_bits_and_those_that_fit_nowhere_are_refused(world):
    of, me = case(world.size), world.rank
    with gpu(me):
        there, host = built(world, of)
        x, ids, weights = cuda(of.x[me], of.ids[me].long(), of.weights[me])
        rows, handle = there.dispatch(x, ids, weights)
        same(rows.cpu(), host.dispatch(of.x[me], of.ids[me], of.weights[me])[0])
        del rows, handle
        # In 32 bits it would be expert 1.
        wide = torch.full_like(ids, (1 << 32) + 1)
        try:
            there.dispatch(x, wide, weights)
            raise AssertionError("no such expert")
        except sidelane.Error as error:
            assert error.kind in ("ExpertOutOfRange", "PeerRefused"), error.kind
        rows, _ = there.dispatch(x, ids, weights)
        same(rows.cpu(), host.dispatch(of.x[me], of.ids[me], of.weights[me])[0])


def check_calls_go_on_torch_s_current_stream(world):
    of, me = case(world.size), world.rank
    given = of.x[me], of.ids[me], of.weights[me], factors(of), torch.cos(of.x[me])
    with gpu(me):
        there, host = built(world, of)
        expected = pass_of(host, *given)
        first, side = torch.cuda.current_stream(), torch.cuda.Stream()
        assert there.stream == first.cuda_stream
        sent = cuda(*given)
        for stream in (side, first, side):
            stream.wait_stream(side if stream == first else first)
            with torch.cuda.stream(stream):
                seen = pass_of(there, *sent)
                assert there.stream == stream.cuda_stream
                for one, other in zip(seen, expected, strict=True):
                    same(one.cpu(), other)
        # A stream that was named is left by nobody.
        there.set_stream(first.cuda_stream)
        with torch.cuda.stream(side):
            rows, handle = there.dispatch(*sent[:3])
            assert there.stream == first.cuda_stream
            same(rows.cpu(), host.dispatch(*given[:3])[0])


# Methods without a tensor of a device, or that read one by its own library.
WITHOUT_TENSORS = {
    "check",
    "heap_allocator",
    "mask",
    "mem_pool",
    "release",
    "set_expert_map",
    "set_stream",
    "synchronize",
    "token_buffer",
}


def check_each_call_with_tensors_follows_torch_s_stream(world):
    of, me = case(world.size, hidden=136, dtype=torch.bfloat16), world.rank
    with gpu(me):
        there, host = built(world, of, fp8=True, weighted=True)
        x, ids, weights = cuda(of.x[me], of.ids[me], of.weights[me])
        records = host.quantize(of.x[me])
        landed, layout = host.dispatch(records, of.ids[me], of.weights[me])
        y, of_weights = torch.cos(torch.ones(layout.rows, of.hidden)).to(torch.bfloat16), torch.arange(layout.rows) / 3
        sums = host.combine(y, layout)
        tokens, choices = host.dispatch_backward(y, layout, of_weights)
        rows, given = host.combine_backward(of.x[me], layout)
        y_there, of_weights_there = cuda(y, of_weights)
        room = lambda like: torch.full_like(like, 7, device="cuda")  # noqa: E731

        def prepared():
            layout = there.prepare(ids, weights)
            assert there.stream == torch.cuda.current_stream().cuda_stream
            return [there.dispatch_cached(x, layout)]

        out, records_out, weights_out = room(sums), room(records), room(given)
        # The gradient of a weighted combine needs the outputs of one.
        _, handle = there.dispatch(x, ids, weights)
        there.combine(y_there, handle)
        calls = {
            "quantize": (lambda: [there.quantize(x, records_out)], [records]),
            "dispatch": (lambda: [there.dispatch(x, ids, weights)[0]], [landed]),
            "start_dispatch": (lambda: [there.start_dispatch(x, ids, weights).finish()[0]], [landed]),
            "prepare": (prepared, [landed]),
            "dispatch_cached": (lambda: [there.dispatch_cached(x, handle)], [landed]),
            "combine": (lambda: [there.combine(y_there, handle, out)], [sums]),
            "start_combine": (lambda: [there.start_combine(y_there, handle).finish(out)], [sums]),
            "combine_backward": (lambda: there.combine_backward(x, handle, weights_out), [rows, given]),
            "dispatch_backward": (
                lambda: there.dispatch_backward(y_there, handle, of_weights_there, out, weights_out),
                [tokens, choices],
            ),
        }
        methods = {name for name in dir(there) if name[0] != "_" and callable(getattr(there, name))}
        assert methods == calls.keys() | WITHOUT_TENSORS, methods ^ (calls.keys() | WITHOUT_TENSORS)
        for call, expected in calls.values():
            first, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(first)
            with torch.cuda.stream(side):
                seen = call()
                assert there.stream == side.cuda_stream
                for one, other in zip(seen, expected, strict=True):
                    same(one.cpu(), other)
            first.wait_stream(side)


def check_tokens_of_a_token_buffer_go_as_they_lie(world):
    of, me, count = case(world.size, experts=world.size, top_k=world.size), world.rank, 5
    tokens = of.x[0][:count] + me
    # Each token goes to every rank, so rows are runs of tokens.
    ids, weights = torch.arange(of.experts, dtype=torch.int32).repeat(count, 1), torch.ones(count, of.top_k)
    with gpu(me):
        there, host = built(world, of)
        on_host = torch.from_dlpack(host.token_buffer(count))
        assert on_host.shape == tokens.shape and on_host.dtype == tokens.dtype
        on_host.copy_(tokens)
        expected, layout = host.dispatch(on_host, ids, weights)
        same(expected, host.dispatch(tokens, ids, weights)[0])
        sums = host.combine(expected, layout)
        elsewhere, *chosen = cuda(tokens, ids, weights)
        x = torch.from_dlpack(there.token_buffer(count))
        x.copy_(elsewhere)
        for sent, packed in ((x, 0), (elsewhere, 1)):
            rows, handle = there.dispatch(sent, *chosen)
            same(rows.cpu(), expected)
            y = handle.output()
            y.copy_(rows)
            same(there.combine(y, handle).cpu(), sums)
            # It counts rows of returns alone, and those lay in an output.
            assert handle.copied_bytes == 0
            # One places own rows, and another packs those for other ranks. As long as the buffer
            # lives, the host plans.
            kernels = handle.report()["kernels"]
            assert kernels.count("regroup") == 1 + packed, kernels
            assert "plan_choices" not in kernels, kernels
        del x, sent
        for _ in range(2):
            # The first call lets go of tokens that the stream has passed.
            there.synchronize()
            _, handle = there.dispatch(elsewhere, *chosen)
        assert "plan_choices" in handle.report()["kernels"]


def check_memory_that_another_stream_uses_is_not_written_to(world):
    of, me = case(world.size), world.rank
    with gpu(me):
        there, host = built(world, of)
        first, side = torch.cuda.current_stream(), torch.cuda.Stream()
        there.set_stream(first.cuda_stream)
        x, ids, weights = cuda(of.x[me], of.ids[me], of.weights[me])
        expected, _ = host.dispatch(of.x[me], of.ids[me], of.weights[me])
        others = cuda(*(of.x[me] * factor for factor in (2, 3, 5)))
        for lent_to_it in (True, False):
            side.wait_stream(first)
            with torch.cuda.stream(side if lent_to_it else first):
                rows, handle = there.dispatch(x, ids, weights)
                copy = torch.empty_like(rows)
            if not lent_to_it:
                side.wait_stream(first)
                handle.used_on(side.cuda_stream)
            with torch.cuda.stream(side):
                copy_late(copy, rows)
            del rows, handle
            for other in others:
                again, _ = there.dispatch(other, ids, weights)
                del again
            with torch.cuda.stream(side):
                same(copy.cpu(), expected)


def check_a_token_buffer_that_another_stream_uses_is_not_written_to(world):
    of, me = case(world.size), world.rank
    with gpu(me):
        there, _ = built(world, of)
        first, side = torch.cuda.current_stream(), torch.cuda.Stream()
        there.set_stream(first.cuda_stream)
        tokens, ids, weights = cuda(of.x[me], of.ids[me], of.weights[me])
        # The heap has room for one.
        most = HEAP * 3 // 4 // (of.hidden * of.x[me].element_size())
        mine, *others = cuda(*(torch.full((most, of.hidden), value, dtype=of.x[me].dtype) for value in (1, 2, 3, 5)))
        copy, buffer = torch.empty_like(mine), there.token_buffer(most)
        x = torch.from_dlpack(buffer)
        x.copy_(mine)
        side.wait_stream(first)
        buffer.used_on(side.cuda_stream)
        with torch.cuda.stream(side):
            copy_late(copy, x)
        del buffer, x
        for other in others:
            # It is free once the stream has come past a later call.
            there.dispatch(tokens, ids, weights)
            again = torch.from_dlpack(there.token_buffer(most))
            again.copy_(other)
            del again
        with torch.cuda.stream(side):
            same(copy.cpu(), mine.cpu())


def check_fixed_slots_go_on_torch_s_current_stream(world):
    of, me = case(world.size, dtype=torch.bfloat16), world.rank
    settings = {"experts": of.experts, "top_k": of.top_k, "hidden": of.hidden, "layout": "rank-major", "sum_order": "rank"}
    with gpu(me):
        slots = sidelane.ExpertParallel(world, **settings, slots=12, max_tokens=12, device="cuda")
        assert slots.executor == "constant-program"
        x, ids, weights = cuda(of.x[me], of.ids[me], of.weights[me])
        sums = []
        first, side = torch.cuda.current_stream(), torch.cuda.Stream()
        for stream in (first, side, first):
            stream.wait_stream(side if stream == first else first)
            with torch.cuda.stream(stream):
                rows, handle = slots.dispatch(x, ids, weights)
                y = handle.output()
                y.copy_(rows)
                sums.append(slots.combine(y, handle).cpu())
                assert slots.stream == stream.cuda_stream
        same(sums[1], sums[0])
        same(sums[2], sums[0])
