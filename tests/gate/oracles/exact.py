"""The plain formulas, in float64: what every router would say if it did not round.

Integer parts (capacity, places) are whole numbers here and need no second opinion.
"""

import math

import numpy as np

import draw

NEAR = 32
EPS = float(np.finfo(np.float32).eps)


def ulp(*values):
    """Distance of neighboring float32 at the largest of some magnitudes."""
    return np.spacing(np.max([np.abs(v).astype(np.float32) for v in values], axis=0)).astype(np.float64)


def softmax(x):
    top = x.max(axis=1, keepdims=True, initial=-np.inf)
    e = np.exp(x - top)
    return e / e.sum(axis=1, keepdims=True)


def score(kind, x):
    if kind == "softmax":
        return softmax(x)
    if kind == "sigmoid":
        return 1 / (1 + np.exp(-x))
    if kind == "sqrtsoftplus":
        return np.sqrt(np.logaddexp(0, x))
    raise ValueError(kind)


def sinkhorn(x, tolerance=1e-4):
    cost, eps = np.exp(x), 1e-8
    d1, error = np.ones(x.shape[1]), 1e9
    while error > tolerance:
        d0 = (1 / x.shape[0]) / ((d1 * cost).sum(1) + eps)
        new = (1 / x.shape[1]) / ((d0[:, None] * cost).sum(0) + eps)
        error, d1 = np.abs(d1 - new).mean(), new
    return d1 * cost * d0[:, None]


def best(values, unit, k):
    """Columns of the k largest by falling value, the first of equal ones, and how far they are from
    the next, in ulps.
    """
    order = np.argsort(-values, axis=1, kind="stable")
    columns = order[:, :k]
    if k == values.shape[1] or not len(values):
        return columns, np.full(len(values), np.inf)
    rows = np.arange(len(values))
    last, following = order[:, k - 1], order[:, k]
    distance = values[rows, last] - values[rows, following]
    return columns, distance / unit[rows, last]


def choose(case, x, recipe):
    """Choices [T,K] by falling score, the scores [T,E] they are weighted by, and the gap of each
    row in ulps.
    """
    tokens, experts, k = case["tokens"], case["experts"], case["top_k"]
    by_logits = recipe["score"] == "softmax_of_chosen"
    scores = x if by_logits else score(recipe["score"], x)
    by, unit = scores, ulp(scores)
    if "bias" in case:
        bias = draw.bias(case).astype(np.float64)
        by = scores + bias
        unit = ulp(scores, np.broadcast_to(bias, scores.shape), by)
    if case.get("sinkhorn") and case["training"]:
        by = sinkhorn(x)
        unit = ulp(by)
    gap = np.full(tokens, np.inf)
    if "groups" in case:
        groups, kept, count = case["groups"]
        parts = by.reshape(tokens, groups, experts // groups)
        parts_unit = unit.reshape(parts.shape)
        largest = -np.sort(-parts, axis=2)[:, :, :count]
        worth = largest.sum(axis=2)
        worth_unit = np.maximum(ulp(worth), np.maximum(ulp(largest).max(axis=2), parts_unit.max(axis=2)))
        chosen, gap = best(worth, worth_unit, kept)
        open_ = np.zeros((tokens, groups), bool)
        np.put_along_axis(open_, chosen, True, axis=1)
        by = np.where(np.repeat(open_, experts // groups, axis=1), by, -np.inf)
    noise = case.get("noise")
    if noise:
        # The same one rounding as theirs: noisy logits are float32.
        noisy = (draw.logits(case) + draw.noise(case)).astype(np.float64)
    if noise == "first":
        by, unit = noisy, np.minimum(ulp(noisy), 2.0**-23)
    if noise == "after_first":
        first, gap = best(scores, unit, 1)
        by = noisy.copy()
        np.put_along_axis(by, first, np.inf, axis=1)
        unit = np.minimum(ulp(noisy), 2.0**-23)
        np.put_along_axis(unit, first, 1.0, axis=1)
    ids, row_gap = best(by, unit, k)
    gap = np.minimum(gap, row_gap)
    if recipe["ordered"]:
        # Second choices are placed after first ones: their order counts too.
        for i in range(1, k):
            gap = np.minimum(gap, best(by, unit, i)[1])
    return ids, scores, gap


def weigh(chosen, recipe):
    """Weights of chosen scores [T,K] before anything is dropped."""
    if recipe["score"] == "softmax_of_chosen":
        return softmax(chosen)
    total = chosen.sum(axis=1, keepdims=True)
    normalize = recipe["normalize"]
    if normalize == "sum":
        return chosen / (total + recipe.get("divisor", 1e-20))
    if normalize == "sum_at_least":
        return chosen / np.maximum(total, EPS)
    return chosen


def capacity(recipe, room, tokens, experts, k, need):
    factor = room.get("factor")
    rule = recipe["rule"]
    if room.get("needed"):
        rows = need
    elif rule == "ceil_f64":
        rows = math.ceil(tokens * k / experts * factor)
    elif rule == "ceil_f32":
        rows = math.ceil(np.float32(tokens / experts) * np.float32(factor * k))
    elif rule == "trunc":
        rows = int(tokens * factor / experts)
    else:
        limit = k * int(abs(factor) * math.ceil(tokens / experts))
        rows = need if factor == 0 else limit if factor > 0 else min(need, limit)
    align = room.get("align", 1)
    return max(math.ceil(rows / align) * align, room.get("minimum", 0))


def place(ids, keep, rows, by):
    """Slots [T,K], -1 for what is dropped; `by` [T,K] decides for some ways to keep."""
    tokens, k = ids.shape
    slots = np.full(ids.shape, -1)
    taken = {}
    if keep in ("first_choices", "priority"):
        order = range(tokens)
        if keep == "priority":
            order = sorted(order, key=lambda t: (-by[t].max(initial=-np.inf), t))
        sequence = [(t, c) for c in range(k) for t in order]
    else:
        sequence = [(t, c) for t in range(tokens) for c in range(k)]
    open_ = None
    if keep == "score":
        open_ = set()
        of_expert = {}
        for t, c in sequence:
            of_expert.setdefault(ids[t, c], []).append((-by[t, c], t, c))
        for each in of_expert.values():
            open_.update((t, c) for _, t, c in sorted(each)[:rows])
    for t, c in sequence:
        expert = ids[t, c]
        if expert < 0 or (open_ is not None and (t, c) not in open_):
            continue
        if taken.get(expert, 0) < rows:
            slots[t, c] = taken.get(expert, 0)
            taken[expert] = slots[t, c] + 1
    return slots


def near_a_drop(ids, keep, rows, by):
    """Tokens whose fate a rounding could change: [T] of bool."""
    near = np.zeros(len(ids), bool)
    if keep == "priority" and len(ids):
        most = by.max(axis=1)
        order = np.argsort(-most, kind="stable")
        close = -np.diff(most[order]) <= NEAR * ulp(most[order][:-1])
        near[order[:-1][close]] = near[order[1:][close]] = True
    if keep == "score":
        for expert in np.unique(ids):
            t, c = np.nonzero(ids == expert)
            if len(t) <= rows or expert < 0:
                continue
            values = by[t, c]
            order = np.argsort(-values, kind="stable")
            if rows:
                last, following = values[order[rows - 1]], values[order[rows]]
                limit = NEAR * ulp(np.array([last]))[0]
                near[t[order[:rows]][values[order[:rows]] - following <= limit]] = True
                near[t[order[rows:]][last - values[order[rows:]] <= limit]] = True
    return near


def needed(ids, experts):
    """The largest count of an expert."""
    return int(np.bincount(ids[ids >= 0], minlength=experts).max(initial=0))


def lots(case, ids):
    """The random numbers of random token selection, at the choices."""
    return np.take_along_axis(draw.lots(case), np.maximum(ids, 0), axis=1)


def route(case, recipe):
    """Everything a router decides."""
    x = draw.logits(case).astype(np.float64)
    tokens, experts, k = case["tokens"], case["experts"], case["top_k"]
    ids, scores, gap = choose(case, x, recipe)
    if case.get("replay"):
        ids, gap = replayed(case), np.full(tokens, np.inf)
    chosen = np.take_along_axis(scores, ids, axis=1)
    weights = weigh(chosen, recipe) * case.get("scaling", 1.0)
    decide = weights if recipe["rule"] == "ceil_f64" else chosen
    near = gap <= NEAR
    used = draw.used(case)
    if used is not None:
        ids = np.where(used[:, None], ids, -1)
        near &= used
    answer = {"ids": ids, "gap": gap}
    room = case.get("capacity")
    if room is None:
        slots, rows = place(ids, "position", tokens * k, None), None
    else:
        parts = room.get("local_groups", 1)
        part_ids = ids.reshape(parts, -1, k)
        need = max(needed(part, experts) for part in part_ids)
        rows = capacity(recipe, room, tokens // parts, experts, k, need)
        keep = room["keep"]
        if keep == "random":
            keep, decide = "score", lots(case, ids).astype(np.float64)
        rounded = decide.astype(np.float32).reshape(part_ids.shape)
        slots = np.concatenate([place(i, keep, rows, by) for i, by in zip(part_ids, rounded)]).reshape(ids.shape)
        if room["keep"] != "random":
            split = decide.reshape(part_ids.shape)
            near |= np.concatenate([near_a_drop(i, keep, rows, by) for i, by in zip(part_ids, split)])
    weights = np.where(slots >= 0, weights, 0.0)
    if recipe["normalize"] == "sum_at_least_after_drop":
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), EPS)
    return answer | {
        "slots": slots,
        "weights": weights,
        "decide": decide,
        "capacity": rows,
        "near": np.nonzero(near)[0].tolist(),
    }


def replayed(case):
    """Choices of another call: the best of other logits."""
    other = draw.logits(case, draw.REPLAY)
    return np.argsort(-other, axis=1, kind="stable")[:, : case["top_k"]]
