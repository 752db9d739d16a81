"""Gradients through torch: bits of the library's sums, whatever runs in between."""

import torch
from checks_exchange import built
from routing import case, same

import sidelane
from sidelane.autograd import combine, dispatch


def factors(of, rank, dtype):
    return torch.tensor([2.0 ** (expert % 3 - 1) for expert, *_ in of.rows(rank)], dtype=dtype).reshape(-1, 1)


def leaves(of, rank):
    return of.x[rank].clone().requires_grad_(), of.weights[rank].clone().requires_grad_()


def layer(ep, of, rank, x, weights):
    """Experts that scale by a power of two, and by the routing weight, as Megatron's do."""
    routed = dispatch(ep, x, of.ids[rank], weights)
    y = routed.rows * factors(of, rank, routed.rows.dtype) * routed.weights.reshape(-1, 1).to(routed.rows.dtype)
    return combine(ep, y, routed)


def by_hand(of, rank, g):
    """Forward and gradients of that layer by the formulas, in the order of sums that is promised.
    """
    dtype = of.x[rank].dtype
    forward, back, returned = {}, {}, torch.zeros(len(of.x[rank]), of.top_k)
    for holder in range(of.ranks):
        rows = of.rows(holder)
        x, grad = of.rows_of(holder, of.x), of.rows_of(holder, g)
        w = torch.tensor([of.weights[s][t, k] for _, s, t, k in rows]).reshape(-1, 1)
        factor = factors(of, holder, dtype)
        wx = leaf = w.clone().requires_grad_()
        row = x.clone().requires_grad_()
        y = row * factor * wx.to(dtype)
        if rows:
            y.backward(grad)
        for nth, (expert, source, token, k) in enumerate(rows):
            forward[expert, source, token], back[expert, source, token] = y.detach()[nth], row.grad[nth]
            if source == rank:
                returned[token, k] = leaf.grad[nth]
    return of.summed(rank, forward), of.summed(rank, back), returned


def check_gradients_may_require_gradients(world):
    of, me = case(world.size), world.rank
    x, weights = leaves(of, me)
    incoming = torch.cos(of.x[me]).requires_grad_()
    layer(built(world, of), of, me, x, weights).backward(incoming)
    _, dx, dw = by_hand(of, me, [torch.cos(x) for x in of.x])
    same(x.grad, dx)
    same(weights.grad, dw)


def check_tokens_and_gradients_are_exact(world):
    me = world.rank
    for dtype in (torch.float32, torch.bfloat16):
        of = case(world.size, dtype=dtype)
        ep = built(world, of)
        g = [torch.cos(x + rank) for rank, x in enumerate(of.x)]
        x, weights = leaves(of, me)
        out = layer(ep, of, me, x, weights)
        expected, dx, dw = by_hand(of, me, g)
        same(out.detach(), expected)
        out.backward(g[me])
        same(x.grad, dx)
        same(weights.grad, dw)


def check_several_microbatches_are_in_flight(world):
    of, me = case(world.size), world.rank
    ep = built(world, of)
    g = [torch.cos(x) for x in of.x]
    expected, dx, dw = by_hand(of, me, g)
    batches = [leaves(of, me) for _ in range(3)]
    routed = [dispatch(ep, x, of.ids[me], weights) for x, weights in batches]
    outs = []
    for each in reversed(routed):
        y = each.rows * factors(of, me, each.rows.dtype) * each.weights.reshape(-1, 1)
        outs.insert(0, combine(ep, y, each))
    # Backward passes in another order than the forward ones; the same on all ranks.
    for nth in (1, 2, 0):
        same(outs[nth].detach(), expected)
        outs[nth].backward(g[me])
    for x, weights in batches:
        same(x.grad, dx)
        same(weights.grad, dw)


def check_an_output_buffer_is_written_by_a_product_and_never_copied(world):
    of, me = case(world.size), world.rank
    ep = built(world, of)
    matrix = torch.eye(of.hidden) * 2
    w = matrix.clone().requires_grad_()
    x, weights = leaves(of, me)
    routed = dispatch(ep, x, of.ids[me], weights)
    out = routed.output()
    address = out.data_ptr()
    out.addmm_(routed.rows, w, beta=0)
    assert out.data_ptr() == address
    tokens = combine(ep, out, routed)
    assert routed.handle.copied_bytes == 0
    chosen = (of.ids[me] >= 0).sum(dim=1, keepdim=True)
    assert torch.allclose(tokens, of.x[me] * 2 * chosen)
    tokens.sum().backward()
    same(x.grad, torch.full_like(x, 2.0) * chosen)
    assert torch.allclose(w.grad, routed.rows.T @ torch.ones(len(routed.rows), of.hidden), rtol=1e-5, atol=1e-5)
    assert (weights.grad == 0).all()


def check_a_buffer_that_backward_would_read_again_is_refused(world):
    of, me = case(world.size), world.rank
    ep = built(world, of)
    x, weights = leaves(of, me)
    routed = dispatch(ep, x, of.ids[me], weights)
    out = routed.output()
    out.copy_(routed.rows)
    out.exp_()                                           # keeps its result for the backward pass
    tokens = combine(ep, out, routed)
    if routed.handle.rows:
        try:
            torch.autograd.grad((out * 1.0).sum(), routed.rows, retain_graph=True)
            raise AssertionError("that memory is others' now")
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), error
    del tokens, out


def check_a_weighted_combine_brings_the_weights_gradients(world):
    of, me = case(world.size), world.rank
    ep = built(world, of, weighted=True)
    x, weights = leaves(of, me)
    routed = dispatch(ep, x, of.ids[me], weights)
    tokens = combine(ep, routed.rows * 2, routed)
    tokens.sum().backward()
    expected = torch.where(of.ids[me] < 0, 0.0, 2 * of.x[me].sum(dim=1, keepdim=True))
    assert torch.allclose(weights.grad, expected, atol=1e-4)
    total = torch.where(of.ids[me] < 0, 0.0, of.weights[me]).sum(dim=1, keepdim=True)
    assert torch.allclose(x.grad, (2 * total).expand_as(x), atol=1e-5)


def check_a_rank_that_computes_nothing_takes_part(world):
    """Experts of a rank without rows are skipped, and so is whatever would have joined its two
    calls.
    """
    of, me = case(world.size), world.rank
    ids = torch.zeros(4, 1, dtype=torch.int64)
    ep = sidelane.ExpertParallel(world, experts=world.size, top_k=1, hidden=of.hidden, dtype="float32")
    x = torch.ones(2, 2, of.hidden, requires_grad=True)
    weights = torch.ones(4, 1, dtype=torch.float64, requires_grad=True)
    routed = dispatch(ep, x, ids, weights)
    y = routed.rows * 3 if routed.handle.rows else routed.output()
    assert y.requires_grad == (me == 0)
    tokens = combine(ep, y, routed)
    assert tokens.shape == x.shape
    tokens.sum().backward()
    same(x.grad, torch.full_like(x, 3.0))
    assert weights.grad.dtype == torch.float64


def check_records_have_no_gradient(world):
    of = case(world.size, hidden=128)
    ep = built(world, of, fp8=True)
    try:
        dispatch(ep, of.x[0], of.ids[0], of.weights[0])
        raise AssertionError("fp8")
    except ValueError as error:
        assert "fp8" in str(error)
