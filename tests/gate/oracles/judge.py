#!/usr/bin/env python3
"""Asks Megatron-core and DeepSpeed, and plain float64 formulas, what a router decides. README.md
tells what is written.

    judge.py --cases 2200 --seed 1 --out cases.jsonl [--golden golden.jsonl]
"""

import argparse
import json

import numpy as np

import cases
import exact
import losses
import theirs

# At most so many per preset are golden, and none that is larger.
GOLDEN, GOLDEN_CHOICES, GOLDEN_SCORES = 24, 64, 256
# Gradients of larger cases are not written.
GRADIENTS = 4096


def hexed(array, kind):
    return np.ascontiguousarray(array, dtype=kind).tobytes().hex()


def written(answer):
    """An answer as JSON: ids and slots as i16, numbers as f32, little-endian, in hex."""
    found = {
        "ids": hexed(answer["ids"], "<i2"),
        "slots": hexed(answer["slots"], "<i2"),
        "weights": hexed(answer["weights"], "<f4"),
        "decide": hexed(answer["decide"], "<f4"),
    }
    if answer["capacity"] is not None:
        found["capacity"] = int(answer["capacity"])
    if "bias" in answer:
        found["bias"] = hexed(answer["bias"], "<f4")
    return found


def ask(case, recipe):
    """The judge of a case, and its answer; None where only the formula is left."""
    preset, k, keep = case["preset"], case["top_k"], case.get("capacity", {}).get("keep")
    refused = preset in ("mixtral", "qwen3") and k == 1
    if preset in cases.MEGATRON and recipe["score"] != "sqrtsoftplus" and not refused:
        return theirs.MEGATRON, theirs.megatron(case)
    if preset in cases.DEEPSPEED or preset in ("gshard", "switch") or (preset == "tutel" and k <= 2 and keep != "priority"):
        return theirs.DEEPSPEED, theirs.deepspeed_gate(case, recipe)
    return "formula", None


def ask_loss(case, recipe, judge, answer):
    """The loss: by formula, and by the judge; None where a rounding could change a count."""
    kind = case["loss"]["kind"]
    score = "softmax" if recipe["score"] == "softmax_of_chosen" else recipe["score"]
    if case["tokens"] == 0 or case.get("sinkhorn") or score == "sqrtsoftplus":
        return None
    if kind == "z":
        found = losses.z(case)
    elif kind == "balance":
        found = None if answer["near"] else losses.balance(case, answer)
    else:
        found = losses.megatron(case, score)
    if found is None:
        return None
    value, gradient = found
    loss = {"exact": float(value)}
    small = gradient.size <= GRADIENTS
    if small:
        loss["gradient"] = hexed(gradient, "<f4")
    if judge != "formula":
        value, gradient = theirs.deepspeed_loss(case) if kind == "balance" else theirs.megatron_loss(case)
        loss["theirs"] = value
        if small:
            loss["their_gradient"] = hexed(gradient, "<f4")
    return loss


def judged(case):
    recipe = cases.recipe(case)
    judge, said = ask(case, recipe)
    answer = exact.route(case, recipe)
    line = {k: v for k, v in case.items() if k != "loss"} | {"judge": judge}
    line["exact"] = written(answer) | {"near": answer["near"]}
    if said:
        line["theirs"] = written(said)
    loss = ask_loss(case, recipe, judge, answer)
    if loss:
        line["loss"] = case["loss"] | loss
    return line


def grid():
    """Capacities of both systems: 360 points, on some of which a ceiling in float32 and one in
    float64 differ.
    """
    import torch
    from deepspeed.moe import sharded_moe
    from megatron.core.transformer.moe import moe_utils

    points = []
    for tokens in (1, 7, 50, 100, 128, 300, 1000, 4096, 5000):
        for experts in (1, 3, 8, 10, 64):
            for factor in (0.7, 1.0, 1.1, 1.2, 1.25, 1.3, 1.7, 2.0):
                gates = torch.zeros(tokens, experts)
                theirs = sharded_moe._capacity(gates, torch.tensor(factor), torch.tensor(0))
                points.append([tokens, experts, factor, moe_utils.get_capacity(tokens, experts, factor), int(theirs)])
    return points


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", required=True)
    parser.add_argument("--golden")
    options = parser.parse_args()
    theirs.begin()
    counts = {preset: options.cases // (len(cases.PRESETS) + 2) for preset in cases.PRESETS}
    counts["megatron"] += options.cases - sum(counts.values())
    golden = open(options.golden, "w") if options.golden else None
    with open(options.out, "w") as out:
        head = {"seed": options.seed, "judges": [theirs.MEGATRON, theirs.DEEPSPEED], "capacities": grid()}
        for file in filter(None, (out, golden)):
            print(json.dumps(head), file=file)
        for preset, count in counts.items():
            small = 0
            for number in range(count):
                case = cases.draw_case(preset, number, options.seed)
                line = json.dumps(judged(case))
                print(line, file=out)
                choices, scores = case["tokens"] * case["top_k"], case["tokens"] * case["experts"]
                if golden and small < GOLDEN and choices <= GOLDEN_CHOICES and scores <= GOLDEN_SCORES:
                    print(line, file=golden)
                    small += 1
    print(f"{sum(counts.values())} cases: {options.out}")


if __name__ == "__main__":
    main()
