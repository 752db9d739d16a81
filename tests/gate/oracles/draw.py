"""Numbers that both sides draw, bit for bit, so that no file has to hold them.

Everything comes from splitmix64, whose arithmetic is on whole numbers; what is made of it is exact
in float32.
"""

import numpy as np

LOGITS, BIAS, NOISE, KEEP, USED, EARLIER, TILT, REPLAY = range(8)


def splitmix(seed, stream, count):
    """The first `count` numbers of a stream of a case."""
    state = np.uint64((seed + stream * 0xD1B54A32D192ED03) % 2**64)
    with np.errstate(over="ignore"):
        z = state + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def near_normal(seed, stream, count, spread):
    """Sums of three uniform numbers, from -3 * spread to 3 * spread; `spread` is a power of two."""
    z = splitmix(seed, stream, count)
    low = np.uint64(2**21 - 1)
    thirds = (z >> np.uint64(43)) + ((z >> np.uint64(22)) & low) + ((z >> np.uint64(1)) & low)
    return (thirds.astype(np.int64) - 3 * 2**20).astype(np.float32) * np.float32(spread / 2**20)


def unit(seed, stream, count):
    """Above 0, up to and with 1, on a grid of 2^-24."""
    return ((splitmix(seed, stream, count) >> np.uint64(40)) + np.uint64(1)).astype(np.float32) * np.float32(2**-24)


def logits(case, stream=LOGITS):
    """Near-normal numbers, and a tilt of each expert towards or away from being chosen: one
    addition in float32.
    """
    seed, tokens, experts = case["seed"], case["tokens"], case["experts"]
    own = near_normal(seed, stream, tokens * experts, case["spread"]).reshape(tokens, experts)
    return own + near_normal(seed, TILT, experts, case["tilt"])


def noise(case):
    """What samplers add to logits. Both sides are given it, so it need not be Gumbel's."""
    return near_normal(case["seed"], NOISE, case["tokens"] * case["experts"], 1.0).reshape(case["tokens"], case["experts"])


def lots(case):
    """What random token selection decides by."""
    return unit(case["seed"], KEEP, case["tokens"] * case["experts"]).reshape(case["tokens"], case["experts"])


def bias(case):
    """Added to scores for the choice alone."""
    return near_normal(case["seed"], BIAS, case["experts"], case["bias"]) if "bias" in case else None


def used(case):
    """Tokens that count."""
    return unit(case["seed"], USED, case["tokens"]) > np.float32(0.25) if case.get("used") else None
