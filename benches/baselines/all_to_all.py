"""Dispatch and combine as they are done with torch.distributed over gloo: permute,
all_to_all_single, sort by expert; back: unsort, all_to_all_single, add up.

A baseline of `sidelane bench --baselines`, which starts it once per rank and tells every process
over a socket what to do next; README.md has the protocol. Between rounds a process sleeps in
recv(2) and costs no core.
"""

import os
import socket
import struct
import sys
import time

import torch
import torch.distributed as dist


def own(name: str) -> str:
    return f"{name}.{rank}"


class Layer:
    """One rank's calls."""

    def __init__(self, ranks: int, hidden: int, top_k: int, experts: int):
        self.ranks, self.experts = ranks, experts
        read = lambda name, dtype: torch.from_file(own(name), size=os.path.getsize(own(name)) // dtype.itemsize, dtype=dtype)
        self.ids = read("ids", torch.int32).clone().to(torch.int64)
        self.x = read("x", torch.bfloat16).clone().view(-1, hidden)
        self.y = read("y", torch.bfloat16).clone().view(-1, hidden)
        self.token = torch.arange(len(self.x)).repeat_interleave(top_k)

    def move(self, rows: torch.Tensor, there: list[int], here: list[int]) -> torch.Tensor:
        # Gloo does not know every type; bytes it does.
        sent = rows.view(torch.uint8)
        came = torch.empty(sum(here), sent.shape[1], dtype=torch.uint8)
        dist.all_to_all_single(came, sent, here, there)
        return came.view(torch.bfloat16)

    def dispatch(self) -> None:
        self.order = torch.argsort(self.ids, stable=True)
        sent = self.x.index_select(0, self.token[self.order])
        counts = torch.bincount(self.ids, minlength=self.experts)
        came_of = torch.empty_like(counts)
        dist.all_to_all_single(came_of, counts)
        self.there = counts.view(self.ranks, -1).sum(1).tolist()
        self.here = came_of.view(self.ranks, -1).sum(1).tolist()
        came = self.move(sent, self.there, self.here)
        expert = torch.arange(self.experts // self.ranks).repeat(self.ranks).repeat_interleave(came_of)
        self.by_expert = torch.argsort(expert, stable=True)
        self.rows = came.index_select(0, self.by_expert)

    def combine(self) -> None:
        came = torch.empty_like(self.y)
        came.index_copy_(0, self.by_expert, self.y)
        returned = self.move(came, self.here, self.there)
        total = torch.zeros(self.x.shape, dtype=torch.float32)
        self.out = total.index_add_(0, self.token[self.order], returned.float()).to(torch.bfloat16)

    def write(self) -> None:
        for name, rows in (("rows", self.rows), ("out", self.out)):
            rows.contiguous().view(torch.uint8).numpy().tofile(own(name))


os.chdir(sys.argv[1])
rank = int(sys.argv[2])
torch.set_num_threads(1)
with open("shape", "rb") as file:
    ranks, _tokens, hidden, top_k, experts = struct.unpack("=5i", file.read())
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=ranks)
layer = Layer(ranks, hidden, top_k, experts)
calls = {b"d": layer.dispatch, b"c": layer.combine, b"w": layer.write}
with socket.socket(socket.AF_UNIX) as line:
    line.connect("socket")
    version = f"torch {torch.__version__}, gloo".encode()
    line.sendall(struct.pack("=2I", rank, len(version)) + version)
    while command := line.recv(1):
        dist.barrier()
        begin = time.monotonic_ns()
        calls[command]()
        line.sendall(struct.pack("=2Q", begin, time.monotonic_ns()))
dist.destroy_process_group()
