"""What is asked of the judges: cases drawn from a seed, and what is known of each system.

A case is JSON. It names its preset and what differs from it in the words of the system that is
judged by; which formula the system follows stands in `recipe`, for the judges alone: the library
has its own presets, and those are judged too.
"""

import random

MEGATRON = ("megatron", "deepseek_v3", "mixtral", "qwen3", "olmoe")
DEEPSPEED = ("deepspeed_top1", "deepspeed_top2", "deepspeed_topk")
PRESETS = MEGATRON[:1] + DEEPSPEED + ("gshard", "switch", "tutel") + MEGATRON[1:]

FACTORS = (0.25, 0.5, 0.75, 1.0, 1.1, 1.2, 1.25, 1.5, 2.0)
MEGATRON_KINDS = ("plain", "plain", "groups", "capacity", "capacity", "capacity", "sinkhorn", "replay", "sqrtsoftplus")


def recipe(case):
    """The formula of a case: score, normalization, rule of capacity, whether the order of choices
    matters.
    """
    preset, k = case["preset"], case["top_k"]
    every = {"score": "softmax", "normalize": "never", "rule": "ceil_f64", "ordered": False}
    if preset in ("megatron", "deepseek_v3"):
        score = case.get("score", "sigmoid")
        divided = score in ("sigmoid", "sqrtsoftplus") and k > 1 and not case.get("sinkhorn")
        return every | {"score": score, "normalize": "sum" if divided else "never"}
    if preset in ("mixtral", "qwen3"):
        # A softmax of all, divided by the sum of the chosen, is the softmax of the chosen.
        chosen = {"score": "softmax_of_chosen"} if preset == "mixtral" else {"normalize": "sum"}
        return every | chosen
    if preset == "deepspeed_top1":
        return every | {"rule": "ceil_f32"}
    if preset in ("deepspeed_top2", "deepspeed_topk"):
        return every | {"rule": "ceil_f32", "normalize": "sum_at_least_after_drop", "ordered": preset == "deepspeed_top2"}
    if preset == "gshard":
        return every | {"rule": "trunc", "normalize": "sum", "divisor": 1e-9, "ordered": True}
    if preset == "switch":
        return every | {"rule": "trunc"}
    if preset == "tutel":
        return every | {"rule": "tutel", "normalize": "sum_at_least" if k > 1 else "never", "ordered": True}
    return every


def draw_case(preset, number, seed):
    """Case `number` of a preset: the same on every machine."""
    dice = random.Random(f"{seed}/{preset}/{number}")
    case = {"preset": preset, "number": number, "seed": dice.getrandbits(64)}
    tokens = 0 if number % 32 == 31 else dice.choice((dice.randint(1, 16), dice.randint(1, 300), dice.randint(150, 300)))
    experts = dice.choice((dice.randint(1, 8), dice.choice((8, 16, 32, 64, 128, 256)), dice.randint(1, 256)))
    top_k = dice.randint(1, 8)
    case["spread"] = dice.choice((0.5, 1.0, 2.0, 4.0))
    case["tilt"] = dice.choice((0.25, 1.0))
    case["training"] = True

    if preset == "megatron":
        tokens, experts, top_k = megatron(dice, case, tokens, experts, top_k)
    elif preset == "deepseek_v3":
        # Megatron sums as many of a group as there are choices per kept group: two, as DeepSeek
        # does.
        experts, kept = 8 * dice.choice((2, 4, 8, 16, 32)), dice.choice((1, 2, 3, 4, 4, 4))
        top_k, case["groups"] = 2 * kept, [8, kept, 2]
        case["bias"] = dice.choice((0.0625, 0.25))
        case["scaling"] = dice.choice((1.0, 2.5))
    elif preset in DEEPSPEED:
        top_k = {"deepspeed_top1": 1, "deepspeed_top2": 2}.get(preset, top_k)
        tokens, experts, top_k = deepspeed(dice, case, tokens, experts, top_k)
    elif preset in ("gshard", "switch", "tutel"):
        top_k = {"gshard": 2, "switch": 1}.get(preset, top_k)
        local = dice.choice((1, 1, 2, 3))
        tokens -= tokens % local
        keep = {"switch": "position"}.get(preset, "first_choices")
        room = {"factor": dice.choice(FACTORS[1:]), "keep": keep, "local_groups": local}
        room["align"] = 4 if preset == "gshard" else 1
        case["training"] = False
        if preset == "tutel":
            # With one expert all tokens come first.
            room["keep"] = dice.choice((keep, "priority")) if experts > 1 else keep
            room["factor"] = dice.choice(FACTORS + (0.0, -0.5, -1.0))
            room["align"] = dice.choice((1, 8))
        case["capacity"] = room
    if "groups" in case:
        # Without tokens Megatron's groups end in an error.
        tokens = max(tokens, 1)
    case["loss"] = loss(dice, case, tokens)
    top_k = min(top_k, experts) if preset not in ("gshard", "deepspeed_top2") else 2
    case |= {"tokens": tokens, "experts": max(experts, top_k), "top_k": top_k}
    return case


def loss(dice, case, tokens):
    """Which loss is asked for besides."""
    if case["preset"] not in MEGATRON:
        return {"kind": "balance"}
    kind = "seq_aux" if case["preset"] == "deepseek_v3" else dice.choice(("aux", "seq_aux", "global_aux", "z"))
    found = {"kind": kind, "coefficient": dice.choice((0.001, 0.01, 1.0))}
    if kind == "seq_aux":
        found["sequences"] = dice.choice([n for n in (1, 2, 3, 4) if tokens % n == 0])
    return found


def megatron(dice, case, tokens, experts, top_k):
    kind = dice.choice(MEGATRON_KINDS)
    top_k = min(top_k, experts)
    case["score"] = dice.choice(("softmax", "softmax_of_chosen", "sigmoid"))
    if dice.random() < 0.25:
        case["scaling"] = dice.choice((0.5, 2.5))
    if kind == "sqrtsoftplus":
        case["score"] = "sqrtsoftplus"
    if kind == "groups" or (kind in ("capacity", "sqrtsoftplus") and dice.random() < 0.25):
        size, groups = dice.randint(1, 32), dice.randint(1, 8)
        kept = dice.randint(1, groups)
        per_group = dice.randint(1, min(size, max(8 // kept, 1)))
        kept = min(kept, 8)
        experts, top_k = size * groups, min(kept * per_group + dice.randrange(kept), kept * size, 8)
        case["groups"] = [groups, kept, top_k // kept]
    if kind == "sinkhorn":
        case |= {"sinkhorn": True, "training": dice.random() < 0.8}
        case.pop("scaling", None)
        case["spread"] = min(case["spread"], 2.0)
        case["score"] = "sigmoid" if top_k == 1 else "softmax"
        tokens = max(tokens, 1)
    if kind == "replay":
        case["replay"] = True
    if top_k == 1 and case["score"] == "softmax_of_chosen":
        # Megatron refuses it: such a weight is always 1.
        case["score"] = "softmax"
    if case["score"] in ("sigmoid", "sqrtsoftplus") and kind not in ("sinkhorn", "replay"):
        case["spread"] = min(case["spread"], 2.0)
        if dice.random() < 0.5:
            case["bias"] = dice.choice((0.0625, 0.25))
    if kind == "capacity" or (kind == "sqrtsoftplus" and dice.random() < 0.5):
        keep = dice.choice(("score", "score", "score", "position"))
        case["capacity"] = {"factor": dice.choice(FACTORS), "keep": keep, "pad": dice.random() < 0.25}
    return tokens, experts, top_k


def deepspeed(dice, case, tokens, experts, top_k):
    local = dice.choice((1, 1, 1, 2, 4))
    tokens -= tokens % local
    room = {"factor": dice.choice(FACTORS), "minimum": dice.choice((0, 1, 4, 8)), "local_groups": local}
    room["keep"] = {"deepspeed_top1": "random", "deepspeed_top2": "first_choices"}.get(case["preset"], "score")
    if dice.random() < 0.2:
        room |= {"needed": True, "minimum": 0, "local_groups": 1}
    if case["preset"] == "deepspeed_top1":
        # They refuse fewer tokens than the minimum.
        room["minimum"] = min(room["minimum"], tokens // local)
        if dice.random() < 0.25:
            case["noise"] = "first"
        if dice.random() < 0.25:
            case["used"] = True
    if case["preset"] == "deepspeed_top2" and dice.random() < 0.4:
        case["noise"] = "after_first"
    if case["preset"] == "deepspeed_topk" and dice.random() < 0.3:
        room["keep"] = "position"
    case["capacity"] = room
    return tokens, max(experts, top_k), top_k
