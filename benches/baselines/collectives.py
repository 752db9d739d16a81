"""All-reduce, broadcast, all-to-all, all-gather and reduce-scatter over torch.distributed's gloo.

A baseline of `sidelane collectives --baselines`, which starts a process for each rank and tells it
over a socket which to do next; README.md has the protocol. Gloo's reduce-scatter is asked for
first; where it has none, it is an all-reduce of which each rank takes its share.
"""

import os
import socket
import struct
import sys
import time

import torch
import torch.distributed as dist

WRITE = 0x80


class Calls:
    """One rank's tensors and calls."""

    def __init__(self, rank: int, ranks: int, most: int):
        self.rank, self.ranks = rank, ranks
        at = torch.arange(most // 4, dtype=torch.int64)
        self.input = ((rank * 7 + at * 3) % 17 - 8).to(torch.float32)
        self.output = torch.zeros_like(self.input)
        self.scatters = hasattr(dist, "reduce_scatter_tensor")

    def reset(self, kind: int, elements: int) -> int:
        if kind < 2:
            self.output[:elements].copy_(self.input[:elements])
        return elements // self.ranks if kind == 4 else elements

    def call(self, kind: int, elements: int) -> None:
        share = elements // self.ranks
        output = self.output[:elements]
        if kind == 0:
            dist.all_reduce(output)
        elif kind == 1:
            dist.broadcast(output, 0)
        elif kind == 2:
            dist.all_to_all_single(output, self.input[:elements])
        elif kind == 3:
            dist.all_gather(list(output.split(share)), self.input[:share])
        else:
            self.reduce_scatter(self.input[:elements], share)

    def reduce_scatter(self, given: torch.Tensor, share: int) -> None:
        if self.scatters:
            try:
                dist.reduce_scatter_tensor(self.output[:share], given)
                return
            except RuntimeError:
                self.scatters = False
        total = given.clone()
        dist.all_reduce(total)
        self.output[:share].copy_(total[self.rank * share :][:share])


os.chdir(sys.argv[1])
rank = int(sys.argv[2])
torch.set_num_threads(1)
with open("shape", "rb") as file:
    words = [word for (word,) in struct.iter_unpack("=I", file.read())]
ranks, runs = words[0], list(zip(words[2::2], words[3::2]))
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=ranks)
calls = Calls(rank, ranks, max(size for _, size in runs))
with socket.socket(socket.AF_UNIX) as line:
    line.connect("socket")
    version = f"torch {torch.__version__}, gloo".encode()
    line.sendall(struct.pack("=2I", rank, len(version)) + version)
    while command := line.recv(1):
        kind, size = runs[command[0] & ~WRITE]
        came = calls.reset(kind, size // 4)
        dist.barrier()
        begin = time.monotonic_ns()
        calls.call(kind, size // 4)
        end = time.monotonic_ns()
        if command[0] & WRITE:
            calls.output[:came].numpy().tofile(f"out.{rank}")
        line.sendall(struct.pack("=2Q", begin, end))
dist.destroy_process_group()
