#!/usr/bin/env python3
"""Trains a small mixture-of-experts language model and records its router: the default routing of `sidelane bench`.

    pip install numpy
    python train_router.py "$(rustc --print sysroot)/share/doc/rust/html/book/print.html" routing.jsonl

The text is "The Rust Programming Language" by Steve Klabnik, Carol Nichols and Chris Krycho, with contributions from
the Rust community, licensed MIT or Apache-2.0. Every Rust toolchain brings it as one page
(`rustup component add rust-docs`); the source is https://github.com/rust-lang/book.

    text --> tokens --+-- all but the middle --> training
                      +-- 4096 of the middle --> decisions of the last layer's router --> JSON lines, figures

The model is the usual one: blocks of causal attention and of experts, each behind a norm and beside a residual path.
Each layer below is a function that returns its output and a function `back`, which takes the gradient of the output,
adds to the gradients of the weights and returns the gradient of the input. Rows are [n, WIDTH], n = batch x window.
"""

import argparse
import html
import json
import math
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np

EXPERTS, TOP_K = 64, 8
LAYERS, WIDTH, HEADS, EXPERT_WIDTH = 2, 128, 4, 64
WINDOW, BATCH, VOCABULARY = 128, 16, 1024
RECORDED = 4096
# Weight of the loss that keeps experts in use: enough that none is forgotten, too little to make them even.
BALANCE = 0.001
# What the figures assume: contiguous blocks of experts on ranks, of ranks on nodes.
RANKS, NODES = 8, 2


# Text and tokens


def read_page(path):
    """The text of the page's body: no markup, no scripts."""
    body = re.search(r"<main>(.*)</main>", path.read_text(encoding="utf-8"), re.DOTALL).group(1)
    body = re.sub(r"<!--.*?-->|<(script|style|svg)\b.*?</\1>", "", body, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", "", body))


def tokenize(text):
    """Byte pair encoding, on characters: the commonest pair of neighbours within a word becomes a token, and again."""
    words = re.findall(r" ?\w+|\s+|[^\w\s]+", text)
    counts = Counter(words)
    common = {letter for letter, _ in Counter(text).most_common(VOCABULARY // 8)}
    pieces = {word: [letter if letter in common else "?" for letter in word] for word in counts}
    vocabulary = sorted(common | {"?"})
    while len(vocabulary) < VOCABULARY:
        pairs = Counter()
        for word, count in counts.items():
            for pair in zip(pieces[word], pieces[word][1:]):
                pairs[pair] += count
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        vocabulary.append(left + right)
        for word in counts:
            if left in pieces[word]:
                pieces[word] = merge(pieces[word], left, right)
    number = {token: i for i, token in enumerate(vocabulary)}
    return np.array([number[piece] for word in words for piece in pieces[word]])


def merge(pieces, left, right):
    merged = []
    for piece in pieces:
        if merged and merged[-1] == left and piece == right:
            merged[-1] = left + right
        else:
            merged.append(piece)
    return merged


# Layers


class Weights:
    """All weights in one vector, all gradients in another: an optimizer step is a step of vectors."""

    def __init__(self, shapes, random):
        total = sum(math.prod(shape) for shape in shapes.values())
        self.values, self.gradients = np.zeros(total, np.float32), np.zeros(total, np.float32)
        self.views, begin = {}, 0
        for name, shape in shapes.items():
            end = begin + math.prod(shape)
            value, gradient = (flat[begin:end].reshape(shape) for flat in (self.values, self.gradients))
            value[...] = random.standard_normal(shape) / math.sqrt(shape[-2])
            self.views[name], begin = (value, gradient), end

    def __getitem__(self, name):
        return self.views[name]


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def softmax_back(y, dy):
    return y * (dy - (y * dy).sum(axis=-1, keepdims=True))


def linear(x, weight):
    w, dw = weight

    def back(dy):
        dw[...] += x.T @ dy
        return dy @ w.T

    return x @ w, back


def norm(x):
    """To length sqrt(WIDTH); no weights of its own."""
    scale = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
    y = x * scale
    return y, lambda dy: scale * (dy - y * (dy * y).mean(axis=-1, keepdims=True))


def embed(ids, token, place):
    (w_token, dw_token), (w_place, dw_place) = token, place

    def back(dy):
        np.add.at(dw_token, ids.ravel(), dy)
        dw_place[...] += dy.reshape(-1, WINDOW, WIDTH).sum(axis=0)

    return (w_token[ids] + w_place).reshape(-1, WIDTH), back


def attention(x, qkv, out):
    """Each position looks at those before it and at itself."""
    depth = WIDTH // HEADS
    mixed, mixed_back = linear(x, qkv)
    # [q k v, window of the batch, head, position, depth]
    q, k, v = mixed.reshape(-1, WINDOW, 3, HEADS, depth).transpose(2, 0, 3, 1, 4)
    future = np.triu(np.full((WINDOW, WINDOW), -np.inf, x.dtype), 1)
    look = softmax(q @ k.swapaxes(2, 3) / math.sqrt(depth) + future)
    y, out_back = linear((look @ v).transpose(0, 2, 1, 3).reshape(-1, WIDTH), out)

    def back(dy):
        dy = out_back(dy).reshape(-1, WINDOW, HEADS, depth).transpose(0, 2, 1, 3)
        dlook = softmax_back(look, dy @ v.swapaxes(2, 3)) / math.sqrt(depth)
        parts = np.stack([dlook @ k, dlook.swapaxes(2, 3) @ q, look.swapaxes(2, 3) @ dy])
        return mixed_back(parts.transpose(1, 3, 0, 2, 4).reshape(-1, 3 * WIDTH))

    return y, back


def grouped(rows, weight, ends):
    """Rows sorted by expert, those of an expert times its own matrix."""
    w, dw = weight
    groups = list(zip(range(EXPERTS), [0, *ends], ends))
    y = np.empty((len(rows), w.shape[2]), rows.dtype)
    for expert, begin, end in groups:
        y[begin:end] = rows[begin:end] @ w[expert]

    def back(dy):
        drows = np.empty_like(rows)
        for expert, begin, end in groups:
            dw[expert] += rows[begin:end].T @ dy[begin:end]
            drows[begin:end] = dy[begin:end] @ w[expert].T
        return drows

    return y, back


def experts(x, router, gate, up, down):
    """Every row goes to the TOP_K experts that the router scores highest; their outputs are added by weight."""
    scores, router_back = linear(x, router)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, :TOP_K]
    weights = softmax(np.take_along_axis(scores, chosen, axis=1))

    # Dispatch, by hand: one row per choice, sorted by expert; `order` leads from there back to (token, choice).
    order = np.argsort(chosen, axis=None, kind="stable")
    counts = np.bincount(chosen.ravel(), minlength=EXPERTS)
    ends = np.cumsum(counts).tolist()
    rows = x[order // TOP_K]
    a, gate_back = grouped(rows, gate, ends)
    b, up_back = grouped(rows, up, ends)
    sigmoid = 1 / (1 + np.exp(-a))
    y, down_back = grouped(a * sigmoid * b, down, ends)
    home = np.empty_like(y)
    home[order] = y
    home = home.reshape(-1, TOP_K, WIDTH)

    # Balance loss: BALANCE x EXPERTS x the sum over experts of (share of the choices) x (mean probability), least when
    # all are alike. Only its gradient is needed.
    probability = softmax(scores)
    share = (counts / counts.sum()).astype(x.dtype)

    def back(dy):
        dhome = (weights[:, :, None] * dy[:, None, :]).reshape(-1, WIDTH)
        dhidden = down_back(dhome[order])
        da = dhidden * b * sigmoid * (1 + a * (1 - sigmoid))
        drows = gate_back(da) + up_back(dhidden * a * sigmoid)
        dchoices = np.empty_like(drows)
        dchoices[order] = drows
        dweights = np.einsum("nkd,nd->nk", home, dy)
        dscores = softmax_back(probability, BALANCE * EXPERTS * share / len(x))
        picked = np.take_along_axis(dscores, chosen, axis=1) + softmax_back(weights, dweights)
        np.put_along_axis(dscores, chosen, picked, axis=1)
        return dchoices.reshape(-1, TOP_K, WIDTH).sum(axis=1) + router_back(dscores)

    return np.einsum("nk,nkd->nd", weights, home), back, (chosen, weights)


# The model


def shapes():
    of = {"token": (VOCABULARY, WIDTH), "place": (WINDOW, WIDTH), "head": (WIDTH, VOCABULARY)}
    for i in range(LAYERS):
        of |= {f"qkv{i}": (WIDTH, 3 * WIDTH), f"out{i}": (WIDTH, WIDTH), f"router{i}": (WIDTH, EXPERTS)}
        of |= {f"{name}{i}": (EXPERTS, WIDTH, EXPERT_WIDTH) for name in ("gate", "up")}
        of |= {f"down{i}": (EXPERTS, EXPERT_WIDTH, WIDTH)}
    return of


def run(w, ids, following):
    """Cross-entropy per token (nats), the last router's decisions, and `back`, which adds to all gradients."""
    x, embed_back = embed(ids, w["token"], w["place"])
    backs = []
    for i in range(LAYERS):
        normed, norm_back = norm(x)
        y, attention_back = attention(normed, w[f"qkv{i}"], w[f"out{i}"])
        x, backs = x + y, backs + [(attention_back, norm_back)]
        normed, norm_back = norm(x)
        y, experts_back, routing = experts(normed, *(w[f"{name}{i}"] for name in ("router", "gate", "up", "down")))
        x, backs = x + y, backs + [(experts_back, norm_back)]
    normed, norm_back = norm(x)
    scores, head_back = linear(normed, w["head"])
    likelihood = softmax(scores)
    at = np.arange(len(scores)), following.ravel()
    loss = -float(np.log(likelihood[at]).mean())

    def back():
        dscores = likelihood / len(scores)
        dscores[at] -= 1 / len(scores)
        dx = norm_back(head_back(dscores))
        for layer_back, norm_before in reversed(backs):
            dx = dx + norm_before(layer_back(dx))
        embed_back(dx)

    return loss, routing, back


def train(w, tokens, held, steps, random):
    """AdamW with warm-up and a cosine to zero."""
    first, second = np.zeros_like(w.values), np.zeros_like(w.values)
    began = time.monotonic()
    for step in range(steps + 1):
        if step % max(1, steps // 6) == 0 or step == steps:
            loss, _, _ = run(w, *held)
            print(f"| {step} | {loss:.2f} | {time.monotonic() - began:.0f} |", flush=True)
        if step == steps:
            break
        begins = random.integers(len(tokens) - WINDOW, size=(BATCH, 1))
        windows = tokens[begins + np.arange(WINDOW + 1)]
        w.gradients[...] = 0
        _, _, back = run(w, windows[:, :-1], windows[:, 1:])
        back()
        rate = 2e-3 * min(1, (step + 1) / 100) * (1 + math.cos(math.pi * step / steps)) / 2
        first += 0.1 * (w.gradients - first)
        second += 0.05 * (w.gradients**2 - second)
        mean, square = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.95 ** (step + 1))
        w.values -= rate * (mean / (np.sqrt(square) + 1e-8) + 0.1 * w.values)


# The recording


def write(path, about, chosen, weights):
    """JSON lines as `sidelane::gate::Recorded` reads them."""
    lines = [{"type": "meta", "num_experts": EXPERTS, "top_k": TOP_K, **about}]
    for ids, shares in zip(chosen.tolist(), weights.tolist()):
        lines.append({"topk_ids": ids, "topk_weights": [round(share, 4) for share in shares]})
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def figures(chosen):
    """How uneven the decisions are and what a token reaches, beside a router that draws evenly."""
    load = np.bincount(chosen.ravel(), minlength=EXPERTS) / (chosen.size / EXPERTS)
    share = load[load > 0] / EXPERTS
    ranks = load.reshape(RANKS, -1).mean(axis=1)

    def reached(parts):
        return np.mean([len(set(row)) for row in (chosen // (EXPERTS // parts)).tolist()])

    def reached_evenly(parts):
        """Each part is missed by those of all choices of TOP_K experts that lie outside it."""
        return parts * (1 - math.comb(EXPERTS - EXPERTS // parts, TOP_K) / math.comb(EXPERTS, TOP_K))

    kept = np.mean([len(set(a) & set(b)) for a, b in zip(chosen[:-1].tolist(), chosen[1:].tolist())])
    yield "busiest expert, of the mean", load.max(), 1
    yield "quietest expert, of the mean", load.min(), 1
    yield "entropy of the experts' shares, of log 64", -(share * np.log(share)).sum() / math.log(EXPERTS), 1
    yield "busiest of 8 ranks, of the mean", ranks.max(), 1
    yield "quietest of 8 ranks, of the mean", ranks.min(), 1
    yield "ranks of 8 that a token reaches", reached(RANKS), reached_evenly(RANKS)
    yield "nodes of 2 that a token reaches", reached(NODES), reached_evenly(NODES)
    yield "experts of 8 that a token shares with the one before", kept, TOP_K * TOP_K / EXPERTS


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="print.html of the Rust book")
    parser.add_argument("out", type=Path, help="where to write the recording")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()

    tokens = tokenize(read_page(args.text))
    middle = len(tokens) // 2
    held = tokens[middle : middle + RECORDED + 1]
    held = held[:-1].reshape(-1, WINDOW), held[1:].reshape(-1, WINDOW)
    rest = np.concatenate([tokens[:middle], tokens[middle + RECORDED :]])
    random = np.random.default_rng(args.seed)
    w = Weights(shapes(), random)
    print(f"{len(rest)} tokens to train on, {w.values.size} weights\n")
    print("| steps | loss on the held-out tokens, nats per token | seconds |\n|---|---|---|")
    train(w, rest, held, args.steps, random)

    _, (chosen, weights), _ = run(w, *held)
    about = {"layer": LAYERS - 1, "seed": args.seed, "steps": args.steps}
    write(args.out, about, chosen, weights)
    print("\n| | recorded | drawn evenly |\n|---|---|---|")
    for what, recorded, even in figures(chosen):
        print(f"| {what} | {recorded:.2f} | {even:.2f} |")


if __name__ == "__main__":
    main()
