"""The losses as plain formulas in float64, and their gradients to the logits, worked out by hand.

A load-balancing loss is `factor * sum over e of (sum over t of s[t, e]) * count[e]`: the counts are
constants, so its gradient to the scores is `factor * count[e]`, and what is left is how scores
follow logits.
"""

import numpy as np

import draw
import exact


def to_logits(kind, s, raw, gradient):
    """From the gradient to scores to that to logits; `raw`: scores before they were divided by
    their sum.
    """
    if kind == "softmax":
        return s * (gradient - (gradient * s).sum(axis=1, keepdims=True))
    total = raw.sum(axis=1, keepdims=True)
    to_raw = (gradient - (gradient * s).sum(axis=1, keepdims=True)) / total
    return to_raw * raw * (1 - raw) if kind == "sigmoid" else to_raw


def shares(kind, x):
    """Scores of all experts that add up to 1, and what they were before."""
    raw = exact.score(kind, x)
    return (raw, raw) if kind == "softmax" else (raw / (raw.sum(axis=1, keepdims=True) + 1e-20), raw)


def counts(s, k):
    """How often each expert is among the best k, and whether a rounding could change that."""
    ids, gap = exact.best(s, exact.ulp(s), k)
    return np.bincount(ids.ravel(), minlength=s.shape[1]), bool((gap <= exact.NEAR).any())


def megatron(case, kind):
    """Switch's loss in Megatron's three variants; None where a rounding could change a count."""
    loss, k, tokens, experts = case["loss"], case["top_k"], case["tokens"], case["experts"]
    x = draw.logits(case).astype(np.float64)
    s, raw = shares(kind, x)
    if loss["kind"] == "seq_aux":
        # Token t belongs to sequence t mod n: tokens lie [position, sequence].
        n = loss["sequences"]
        parts = [np.arange(i, tokens, n) for i in range(n)]
    else:
        n, parts = 1, [np.arange(tokens)]
    value, gradient = 0.0, np.zeros_like(s)
    for part in parts:
        count, near = counts(s[part], k)
        if loss["kind"] == "global_aux":
            earlier, also_near = counts(shares(kind, draw.logits(case, draw.EARLIER).astype(np.float64))[0], k)
            count, near = (count + earlier) / 2, near or also_near
        if near:
            return None
        factor = experts * loss["coefficient"] / (k * len(part) ** 2) / n
        value += factor * (s[part].sum(axis=0) * count).sum()
        gradient[part] = factor * count
    return value, to_logits(kind, s, raw, gradient)


def z(case):
    x = draw.logits(case).astype(np.float64)
    top = x.max(axis=1)
    lse = top + np.log(np.exp(x - top[:, None]).sum(axis=1))
    coefficient = case["loss"]["coefficient"]
    return coefficient * (lse**2).mean(), coefficient * (2 * lse / len(x))[:, None] * exact.softmax(x)


def balance(case, answer):
    """DeepSpeed's, GShard's, Switch's and Tutel's: mean of the local groups of E * sum of (mean
    score * share chosen).
    """
    tokens, experts, k = case["tokens"], case["experts"], case["top_k"]
    every = case["preset"] == "deepspeed_topk"
    parts = case["capacity"].get("local_groups", 1)
    x = draw.logits(case).astype(np.float64)
    s = exact.softmax(x)
    ids = answer["ids"] if every else answer["ids"][:, :1]
    value, gradient, size = 0.0, np.zeros_like(s), tokens // parts
    for part in range(parts):
        rows = slice(part * size, (part + 1) * size)
        chosen = ids[rows]
        count = np.bincount(chosen[chosen >= 0], minlength=experts)
        factor = experts / (k if every else 1) / size**2 / parts
        value += factor * (s[rows].sum(axis=0) * count).sum()
        gradient[rows] = factor * count
    return value, to_logits("softmax", s, s, gradient)
