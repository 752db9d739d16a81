"""Steps of torch's parallel strategies over gloo: DDP, FSDP2, tensor parallel blocks, 1F1B.

A baseline of `cargo bench --bench parallel`, which starts a process for each rank and writes the
name of a case to its standard input for each step; README.md has the protocol.
"""

import math
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

LEARNING_RATE = 1e-4
MICROBATCHES = 8


def values(seed: int, rows: int, columns: int, size: float) -> torch.Tensor:
    """As `values` of the Rust side: the same bits."""
    mixed = torch.arange(rows * columns, dtype=torch.int64) + (seed << 24)
    for factor, shift in ((2654435761, 15), (2246822519, 13)):
        mixed = (mixed * factor) & 0xFFFFFFFF
        mixed ^= mixed >> shift
    return (((mixed.double() / (1 << 31)) - 1.0) * size).float().view(rows, columns)


class Block(nn.Module):
    def __init__(self, nth: int, hidden: int, ffn: int):
        super().__init__()
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(values(2 * nth, ffn, hidden, math.sqrt(6.0 / hidden)))
            self.down.weight.copy_(values(2 * nth + 1, hidden, ffn, math.sqrt(3.0 / ffn)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def loss_of(y: torch.Tensor, scale: int) -> torch.Tensor:
    return y.square().sum() * (0.5 / scale)


class Cases:
    """The models of a rank, each built before its first step."""

    def __init__(self, rank: int, ranks: int, hidden: int, ffn: int, blocks: int, tokens: int):
        self.rank, self.ranks, self.tokens = rank, ranks, tokens
        self.mesh = init_device_mesh("cpu", (ranks,))
        self.blocks = lambda: [Block(nth, hidden, ffn) for nth in range(blocks)]
        self.own = values(1000 + rank, tokens, hidden, 1.0)
        self.common = values(1000, tokens, hidden, 1.0)
        self.built = {}

    def step(self, case: str) -> float:
        if case not in self.built:
            self.built[case] = getattr(self, case.replace("-", "_"))()
        return self.built[case]()

    def trained(self, model: nn.Module):
        adam = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)

        def step() -> float:
            loss = loss_of(model(self.own), self.tokens)
            loss.backward()
            adam.step()
            adam.zero_grad()
            return loss.item()

        return step

    def alone(self):
        return self.trained(nn.Sequential(*self.blocks()))

    def data(self):
        return self.trained(DistributedDataParallel(nn.Sequential(*self.blocks()), bucket_cap_mb=2))

    def fully_sharded(self):
        model = nn.Sequential(*self.blocks())
        for block in model:
            fully_shard(block, mesh=self.mesh)
        return self.trained(fully_shard(model, mesh=self.mesh))

    def tensor(self):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = nn.Sequential(*(parallelize_module(block, self.mesh, plan) for block in self.blocks()))

        def step() -> float:
            loss = loss_of(model(self.common), self.tokens)
            loss.backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.to_local().sub_(weight.grad.to_local(), alpha=LEARNING_RATE)
                    weight.grad = None
            return loss.item()

        return step

    def pipeline(self):
        blocks = self.blocks()
        each = len(blocks) // self.ranks
        model = nn.Sequential(*blocks[self.rank * each : (self.rank + 1) * each])
        stage = PipelineStage(model, self.rank, self.ranks, torch.device("cpu"))
        of_microbatch = lambda y, _target: loss_of(y, self.tokens)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=of_microbatch, scale_grads=False)
        is_last = self.rank == self.ranks - 1

        def step() -> float:
            losses = []
            inputs = [self.common] if self.rank == 0 else []
            schedule.step(*inputs, target=self.common if is_last else None, losses=losses)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.sub_(weight.grad, alpha=LEARNING_RATE)
                    weight.grad = None
            return sum(loss.item() for loss in losses)

        return step


def written_bytes() -> int:
    """Bytes that this process has written, to sockets above all."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("wchar"))


rank, ranks, hidden, ffn, blocks, tokens = (int(word) for word in sys.argv[1:7])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[7]}", rank=rank, world_size=ranks)
cases = Cases(rank, ranks, hidden, ffn, blocks, tokens)
print(f"torch {torch.__version__}, gloo", flush=True)
for line in sys.stdin:
    before = written_bytes()
    loss = cases.step(line.strip())
    print(written_bytes() - before, loss, flush=True)
dist.destroy_process_group()
