"""The systems themselves: Megatron-core's `TopKRouter` and DeepSpeed's gates, as installed, on a
CPU.
"""

import os
import warnings

os.environ |= {"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
warnings.filterwarnings("ignore")

# The imports read the environment.
import deepspeed  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed  # noqa: E402
from deepspeed.moe import sharded_moe  # noqa: E402
from megatron import core as megatron_core  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import draw  # noqa: E402
import exact  # noqa: E402

MEGATRON = f"megatron-core {megatron_core.__version__}"
DEEPSPEED = f"deepspeed {deepspeed.__version__.split('+')[0]}"

# As many rows as are needed: nothing is dropped.
FREE = -1
BIAS_RATE = 2.0**-10


def begin():
    """A world of one rank. Megatron asks torch.cuda where to put buffers: on the CPU."""
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    parallel_state.initialize_model_parallel()


def answer(ids, slots, weights, capacity, decide=None):
    return {"ids": ids, "slots": slots, "weights": weights, "capacity": capacity, "decide": decide}


def router(case, **more):
    """A TopKRouter for the case."""
    room, score = case.get("capacity"), case.get("score", "softmax")
    if case["preset"] in ("deepseek_v3", "mixtral", "qwen3"):
        score = "sigmoid" if case["preset"] == "deepseek_v3" else "softmax_of_chosen"
    options = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 1,
        "num_moe_experts": case["experts"],
        "moe_router_topk": case["top_k"],
        "moe_router_score_function": "sigmoid" if score == "sigmoid" else "softmax",
        "moe_router_pre_softmax": score == "softmax",
        "moe_router_load_balancing_type": "sinkhorn" if case.get("sinkhorn") else "none",
        "moe_router_enable_expert_bias": "bias" in case,
        "moe_router_topk_scaling_factor": case.get("scaling"),
        "moe_enable_routing_replay": bool(case.get("replay")),
        "moe_router_dtype": "fp32",
        "add_bias_linear": False,
        "use_cpu_initialization": True,
    }
    if "groups" in case:
        options |= {"moe_router_num_groups": case["groups"][0], "moe_router_group_topk": case["groups"][1]}
    if case.get("sinkhorn"):
        options["moe_router_score_function"] = "softmax"
    if room:
        policy = {"score": "probs", "position": "position"}[room["keep"]]
        options |= {
            "moe_expert_capacity_factor": room["factor"],
            "moe_token_drop_policy": policy,
            "moe_pad_expert_input_to_capacity": room["pad"],
        }
    RouterReplay.clear_global_router_replay_instances()
    made = TopKRouter(TransformerConfig(**options | more), pg_collection=moe_utils.get_default_pg_collection())
    made.set_layer_number(0)
    made.train(case["training"])
    if "bias" in case:
        made.expert_bias.copy_(torch.from_numpy(draw.bias(case)))
    if case.get("replay"):
        made.router_replay.set_target_indices(torch.from_numpy(exact.replayed(case)))
        made.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    return made


def megatron(case):
    """What TopKRouter decides, and the state it decided in."""
    x = torch.from_numpy(draw.logits(case)).view(case["tokens"], 1, case["experts"])
    free = {"moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False}
    with torch.no_grad():
        scores, chosen = router(case, **free).routing(x)
        probs, kept = router(case).routing(x)
    kept = kept & chosen
    tokens, k = case["tokens"], case["top_k"]
    assert (chosen.sum(1) == k).all()
    ids = torch.nonzero(chosen)[:, 1].view(tokens, k)
    # Where rows lie: as `permute` lays them.
    _, _, source = moe_utils.permute(torch.zeros(tokens, 1), kept, num_out_tokens=int(kept.sum()))
    slots = torch.full((tokens, case["experts"]), -1)
    begin = 0
    for expert, rows in enumerate(kept.sum(0).tolist()):
        slots[source[begin : begin + rows], expert] = torch.arange(rows)
        begin += rows
    capacity = None
    if case.get("capacity"):
        capacity = moe_utils.get_capacity(tokens * k, case["experts"], case["capacity"]["factor"])
    slots, weights, decide = (each.gather(1, ids).numpy() for each in (slots, probs * kept, scores))
    ids = ids.numpy()
    if case.get("capacity", {}).get("keep") == "position":
        # On a CPU their top-k does not keep the first of equals, unlike on a GPU: only the counts
        # are compared.
        placed = exact.place(ids, "position", capacity, None)
        assert (np.bincount(ids[slots >= 0], minlength=1) == np.bincount(ids[placed >= 0], minlength=1)).all()
        slots, weights = placed, np.where(placed >= 0, decide, 0)
    said = answer(ids, slots, weights, capacity, decide)
    if "bias" in case:
        counts = torch.from_numpy(np.bincount(ids[slots >= 0], minlength=case["experts"])).float()
        said["bias"] = moe_utils.get_updated_expert_bias(counts, torch.from_numpy(draw.bias(case)), BIAS_RATE).numpy()
    return said


def deepspeed_call(case, part, logits, rows=None):
    """One call of a gate: on a local group, as on a rank. `rows`: a capacity by another system's
    formula, or by the need.
    """
    room, k = case["capacity"], case["top_k"]
    own = slice(part * len(logits), (part + 1) * len(logits))
    cpu = torch.device("cpu")
    # Samplers that they keep per device: these give the numbers of the case.
    sharded_moe.gumbel_map[cpu] = lambda shape: torch.from_numpy(draw.noise(case)[own])
    sharded_moe.exp_selection_uniform_map[cpu] = lambda shape: torch.from_numpy(draw.lots(case)[own])
    drop = rows != FREE
    limits = (0.0, rows) if drop and rows is not None else (room["factor"], room.get("minimum", 0))
    noise = case.get("noise")
    if case["preset"] in ("switch", "tutel") and k == 1 and drop:
        # Their top-1 gate has no order of tokens; their top-k gate has.
        return sharded_moe.topkgating(logits, 1, *limits, drop, None, "position", sparse_routes=True)
    if k == 1 and case["preset"] != "deepspeed_topk":
        used = draw.used(case)
        mask = None if used is None else torch.from_numpy(used[own]).long()
        policy = "RSample" if noise else None
        return sharded_moe.top1gating(logits, *limits, mask, policy, drop, True, sparse_routes=True)
    if case["preset"] != "deepspeed_topk":
        # It adds its noise to the logits in place.
        return sharded_moe.top2gating(logits.clone(), *limits, drop, None, bool(noise), sparse_routes=True)
    policy = {"score": "probs", "position": "position"}[room["keep"]]
    return sharded_moe.topkgating(logits, k, *limits, drop, None, policy, sparse_routes=True)


def deepspeed_gate(case, recipe):
    """What DeepSpeed's gates decide; for other systems of the same algorithm, with the capacity of
    their formula.
    """
    room, experts, k = case["capacity"], case["experts"], case["top_k"]
    parts = room.get("local_groups", 1)
    logits = torch.from_numpy(draw.logits(case)).view(parts, case["tokens"] // parts, experts)
    free = [deepspeed_call(case, part, x, FREE) for part, x in enumerate(logits)]
    own = recipe["rule"] == "ceil_f32"
    rows = FREE if room.get("needed") else None
    if not own:
        need = max(exact.needed(each[3].numpy(), experts) for each in free)
        rows = exact.capacity(recipe, room, case["tokens"] // parts, experts, k, need)
    made = [deepspeed_call(case, part, x, rows) for part, x in enumerate(logits)]
    ids, whole = (torch.cat([each[i].T for each in free]).numpy() for i in (3, 5))
    counts = torch.stack([each[6] for each in made]).sum(0).numpy()
    assert (counts == np.bincount(ids[ids >= 0], minlength=experts)).all()
    kept, slots, weights = (torch.cat([each[i].T for each in made]).numpy() for i in (3, 4, 5))
    assert ((kept == ids) | (kept == -1)).all()
    (capacity,) = {int(each[1]) for each in made}
    if not own:
        # Theirs are normalized after dropping, those of the others before.
        weights = whole
    gates = torch.softmax(logits.reshape(-1, experts), dim=1).numpy()
    decide = exact.lots(case, ids) if room["keep"] == "random" else np.take_along_axis(gates, np.maximum(ids, 0), axis=1)
    return answer(ids, np.where(kept >= 0, slots, -1), np.where(kept >= 0, weights, 0), capacity, decide)


def megatron_loss(case):
    """A loss as TopKRouter logs it, times its coefficient, and the gradient that it attaches."""
    loss, tokens, experts = case["loss"], case["tokens"], case["experts"]
    kind, coefficient = loss["kind"], loss["coefficient"]
    more = {"moe_z_loss_coeff": coefficient}
    if kind != "z":
        more = {"moe_router_load_balancing_type": [f"{kind}_loss"], "moe_aux_loss_coeff": [coefficient]}
    more |= {"moe_enable_routing_replay": False}
    made = router(case | {"training": True, "replay": False}, **more)
    rows = (tokens // loss.get("sequences", 1), loss.get("sequences", 1), experts)
    if kind == "global_aux":
        # An earlier micro-batch: its counts are part of the average.
        made.routing(torch.from_numpy(draw.logits(case, draw.EARLIER)).view(rows))
    moe_utils.get_moe_layer_wise_logging_tracker().clear()
    x = torch.from_numpy(draw.logits(case)).view(rows).requires_grad_()
    probs, _ = made.routing(x)
    (probs * 0).sum().backward()
    name = "z_loss" if kind == "z" else {"aux": "", "seq_aux": "seq_", "global_aux": "global_"}[kind] + "load_balancing_loss"
    value = moe_utils.get_moe_layer_wise_logging_tracker()[name]["values"].sum() * coefficient
    return float(value), x.grad.view(tokens, experts).numpy()


def deepspeed_loss(case):
    """The mean over the local groups: what ranks average."""
    x = torch.from_numpy(draw.logits(case)).requires_grad_()
    parts = case["capacity"].get("local_groups", 1)
    each = [deepspeed_call(case, part, y, FREE)[0] for part, y in enumerate(x.view(parts, case["tokens"] // parts, case["experts"]))]
    value = torch.stack(each).mean()
    value.backward()
    return float(value.detach()), x.grad.numpy()
