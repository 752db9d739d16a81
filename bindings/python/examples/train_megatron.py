"""A small MoE transformer with megatron-core's MoE layer, trained on CPU processes: by Megatron's
all-to-all, then by Sidelane.

    torchrun --nproc-per-node 4 train_megatron.py --steps 200 --losses losses.json --plot losses.svg

It learns to continue the bytes of this project's documentation. Attention and norms are torch's and
alike on all ranks, each of which has its own batches; the experts, their router and their
dispatcher are Megatron's, or ours. Everything is float32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import megatron_on_cpu
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

megatron_on_cpu.patch()

from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

import sidelane.megatron

megatron_on_cpu.patch_megatron()

HIDDEN, HEADS, LAYERS, SEQUENCE, BATCH = 64, 4, 2, 64, 4
TEXT = Path(__file__).parents[3] / "docs" / "design.md"


class Losses(NamedTuple):
    """The mean loss of all ranks, step by step."""

    theirs: list[float]
    ours: list[float]


def config() -> TransformerConfig:
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=2 * HIDDEN,
        moe_ffn_hidden_size=2 * HIDDEN,
        num_moe_experts=16,
        moe_router_topk=2,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=dist.get_world_size(),
        add_bias_linear=False,
        use_cpu_initialization=True,
    )


class Block(nn.Module):
    """Attention, then experts. Activations are [sequence, batch, hidden], as in Megatron."""

    def __init__(self, number: int) -> None:
        super().__init__()
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        experts = MoESubmodules(experts=ModuleSpec(SequentialMLP, submodules=linears))
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN) for _ in range(2)])
        self.qkv, self.back = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoELayer(config(), experts, layer_number=number)

    def forward(self, x: Tensor) -> Tensor:
        length, batch, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(length, batch, 3, HEADS, -1).permute(2, 1, 3, 0, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.back(seen.permute(2, 0, 1, 3).reshape(x.shape))
        return x + self.moe(self.norms[1](x))[0]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.blocks = nn.Sequential(*[Block(1 + number) for number in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places(torch.arange(SEQUENCE)).unsqueeze(1)
        return self.head(self.norm(self.blocks(x)))


def train(steps: int) -> list[float]:
    """The losses of a new model, the same one each time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = Transformer()
    alike = [weights for weights in model.parameters() if getattr(weights, "allreduce", True)]
    for weights in alike:
        dist.broadcast(weights.data, src=0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    losses = []
    for step in range(steps):
        draw = torch.Generator().manual_seed(step * ranks + rank)
        starts = torch.randint(len(text) - SEQUENCE, (BATCH,), generator=draw)
        batch = text[starts + torch.arange(SEQUENCE + 1).unsqueeze(1)]
        loss = F.cross_entropy(model(batch[:-1]).view(-1, 256), batch[1:].reshape(-1)) / ranks
        optimiser.zero_grad()
        loss.backward()
        # Experts have the gradients of all ranks' tokens already.
        gradients = torch.cat([weights.grad.view(-1) for weights in alike])
        dist.all_reduce(gradients)
        for weights, summed in zip(alike, gradients.split([weights.numel() for weights in alike]), strict=True):
            weights.grad.copy_(summed.view_as(weights))
        optimiser.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def compare(steps: int) -> Losses:
    """The same model trained twice: the second time, Megatron's layers send by Sidelane."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    try:
        theirs = train(steps)
        sidelane.megatron.enable()
        return Losses(theirs, train(steps))
    finally:
        parallel_state.destroy_model_parallel()


def main() -> None:
    from loss_plot import plot

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--losses", type=Path, help="where to write them, as JSON")
    options.add_argument("--plot", type=Path, help="where to draw them, as SVG")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses = compare(chosen.steps)
    if dist.get_rank() == 0:
        most = max(abs(one - other) for one, other in zip(*losses, strict=True))
        run = f"{chosen.steps} steps on {dist.get_world_size()} ranks"
        print(f"{run}: loss {losses.ours[0]:.4f} to {losses.ours[-1]:.4f}, largest difference to Megatron's all-to-all {most:g}")
        if chosen.losses:
            chosen.losses.write_text(json.dumps(losses._asdict()), encoding="utf-8")
        if chosen.plot:
            chosen.plot.write_text(plot(f"{run}: largest difference of the losses {most:g}", *losses), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
