"""Ranks of torch that join a world."""

from __future__ import annotations

import os


def by_group(port: int) -> tuple[int, int, list[float]]:
    """Through a process group of two of three ranks, in an order of its own."""
    import torch
    import torch.distributed as dist

    import sidelane

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    group = dist.new_group([1, 2])
    if rank == 0:
        dist.barrier()
        return -1, -1, []
    # What a launcher says of the whole job does not count.
    with sidelane.init(group, heap="64M", symmetric="8M") as world:
        window = world.all().window((2,))
        window.put_signal(1 - world.rank, world.rank, torch.tensor([rank + 0.5]), 1)
        window.wait(1 - world.rank, 1)
        seen = torch.from_dlpack(window.local).tolist()
        said = world.rank, world.size, seen
        total = world.pool_report()["total"]
        assert total == 56 << 20, total
    dist.barrier()
    dist.destroy_process_group()
    return said


def by_torchrun() -> None:
    """As torchrun starts it, beside torch's own group."""
    import numpy as np
    import torch.distributed as dist

    import sidelane

    dist.init_process_group("gloo")
    with sidelane.init() as world:
        assert (world.rank, world.size) == (dist.get_rank(), dist.get_world_size())
        ep = sidelane.ExpertParallel(world, experts=2, top_k=2, hidden=4, dtype="float32")
        x = np.full((1, 4), world.rank + 1, np.float32)
        rows, handle = ep.dispatch(x, np.array([[0, 1]], np.int32), np.ones((1, 2), np.float32))
        assert rows.tolist() == [[1] * 4, [2] * 4], rows
        assert ep.combine(rows, handle).tolist() == [[2.0 * (world.rank + 1)] * 4]
    dist.destroy_process_group()
    print(f"rank {os.environ['RANK']} of torchrun is done", flush=True)




if __name__ == "__main__":
    by_torchrun()
