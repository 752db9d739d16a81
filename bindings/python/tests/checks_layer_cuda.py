"""A whole layer on CUDA tensors, or on what stands for them, against the same on the host: to the
bit.
"""

import torch
from gpu import gpu
from routing import case, same

import sidelane

HIDDEN, FFN = 16, 12


def weights(of, me):
    """Router, the experts of a rank, and the shared one, of another width."""
    draw = torch.Generator().manual_seed(5)
    experts = torch.randn(of.experts, 3 * HIDDEN * FFN, generator=draw) / 4
    router = torch.randn(HIDDEN, of.experts, generator=draw)
    return {"router": router, "experts": experts[list(of.held(me))], "shared": torch.randn(1, 3 * HIDDEN * 8, generator=draw) / 4}


def built(world, of, given, **settings):
    gate = sidelane.preset("qwen3", of.experts, 2)
    settings = {"dtype": of.x[0].dtype, "max_tokens": 16} | given | settings
    return sidelane.MoeLayer(world, gate, hidden=HIDDEN, **settings)


def on_gpu(world, of, given, **settings):
    return built(world, of, given, device="cuda", device_heap=1 << 20, **settings)


def step(layer, x, residual, of_out):
    out, tape = layer.forward(x, residual)
    losses = tape.balance_loss, tape.z_loss
    return out, layer.backward(tape, of_out), losses


def equal(seen, expected):
    same(seen[0].cpu(), expected[0])
    assert seen[1].keys() == expected[1].keys() and seen[2] == expected[2]
    for name, gradient in expected[1].items():
        assert seen[1][name].is_cuda
        same(seen[1][name].cpu(), gradient)


def tensors(of, me):
    return of.x[me], torch.sin(of.x[me]), torch.cos(of.x[me])


def check_steps_have_the_host_s_bits(world):
    me = world.rank
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        of = case(world.size, dtype=dtype)
        given, losses = weights(of, me), {"balance": sidelane.balance("qwen3"), "z_loss": 0.5}
        for settings in ({}, {"chunks": 3, "max_blocks": 2}, losses):
            both = {name: value for name, value in settings.items() if name != "max_blocks"}
            expected = step(built(world, of, given, **both), *tensors(of, me))
            with gpu(me):
                layer = on_gpu(world, of, given, **settings)
                assert layer.place.startswith("cuda:") and layer.gate_place == ("host" if "z_loss" in settings else layer.place)
                sent = [one.to("cuda") for one in tensors(of, me)]
                for _ in range(2):
                    equal(step(layer, *sent), expected)


def check_calls_are_ordered_with_torch_s_current_stream(world):
    of, me = case(world.size), world.rank
    given = weights(of, me)
    expected = step(built(world, of, given), *tensors(of, me))
    with gpu(me):
        layer, first, side = on_gpu(world, of, given), torch.cuda.current_stream(), torch.cuda.Stream()
        assert layer.stream == first.cuda_stream
        sent = [one.to("cuda") for one in tensors(of, me)]
        for stream in (side, first, side):
            stream.wait_stream(side if stream == first else first)
            with torch.cuda.stream(stream):
                equal(step(layer, *[one + 0 for one in sent]), expected)
        # What is enqueued behind set_weights comes after its copies, on any stream.
        layer = on_gpu(world, of, {name: torch.zeros_like(one) for name, one in given.items()})
        with torch.cuda.stream(side):
            brought = {name: one.to("cuda") for name, one in given.items()}
            layer.set_weights(**brought)
            for one in brought.values():
                one.zero_()
            side.synchronize()
        equal(step(layer, *sent), expected)


def check_weights_of_the_device_are_set_between_steps(world):
    of, me = case(world.size), world.rank
    given = weights(of, me)
    expected = step(built(world, of, given), *tensors(of, me))
    with gpu(me):
        layer = on_gpu(world, of, {name: torch.zeros_like(one) for name, one in given.items()})
        sent = [one.to("cuda") for one in tensors(of, me)]
        layer.forward(sent[0])
        layer.set_weights(**{name: one.to("cuda") for name, one in given.items()})
        equal(step(layer, *sent), expected)


def refused(call):
    try:
        call()
    except sidelane.Error as error:
        return type(error).__name__, error.kind
    return None


def check_input_of_one_rank_is_refused_by_all_and_the_next_step_works(world):
    of, me = case(world.size), world.rank
    given, peer = weights(of, me), ("CallError", "PeerRefused")
    expected = step(built(world, of, given), *tensors(of, me))
    with gpu(me):
        layer = on_gpu(world, of, given, tapes=2)
        sent = [one.to("cuda") for one in tensors(of, me)]
        x, of_out = sent[0], sent[2]
        for wrong, said in (
            (of.x[me], ("PlanError", "WrongPlace")),
            (x[:, 1:].contiguous(), ("InputError", "Shape")),
            (x.to(torch.bfloat16), ("PlanError", "WrongDtype")),
        ):
            assert refused(lambda: layer.forward(wrong if me == 0 else x)) == (said if me == 0 else peer)
            _, tape = layer.forward(x)
            assert refused(lambda: layer.backward(tape, wrong if me == 0 else of_out)) == (said if me == 0 else peer)
        equal(step(layer, *sent), expected)


def near(seen, expected):
    apart = (seen.cpu().float() - expected.float()).abs()
    assert seen.dtype == expected.dtype and apart.numel() > 0
    assert apart.max() <= 2.0**-4 * expected.float().abs().max()


def check_products_in_bf16_are_near_those_of_the_host(world):
    of, me = case(world.size, dtype=torch.bfloat16), world.rank
    given = weights(of, me)
    expected = step(built(world, of, given), *tensors(of, me))
    with gpu(me):
        layer = on_gpu(world, of, {name: torch.zeros_like(one) for name, one in given.items()}, products="cublas-bf16", chunks=2)
        sent = [one.to("cuda") for one in tensors(of, me)]
        layer.forward(sent[0])
        # The copy in bf16 follows the weights.
        layer.set_weights(**{name: one.to("cuda") for name, one in given.items()})
        out, gradients, _ = step(layer, *sent)
        near(out, expected[0])
        for name, gradient in expected[1].items():
            near(gradients[name], gradient)
        # Rows of another type are no factors.
        f32 = weights(of, me) | {"dtype": torch.float32}
        assert refused(lambda: on_gpu(world, of, f32, products="cublas-bf16")) == ("LayerError", "NotOnDevice")
