"""What all ranks do in a check, so that each can tell what it must see: everything is drawn from
the rank's number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Case:
    """Tokens of all ranks, and where they go."""

    ranks: int
    experts: int
    top_k: int
    hidden: int
    x: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]

    def held(self, rank: int) -> range:
        """The experts of a rank: contiguous blocks, the first ranks one more."""
        each, more = divmod(self.experts, self.ranks)
        first = rank * each + min(rank, more)
        return range(first, first + each + (rank < more))

    def rows(self, rank: int) -> list[tuple[int, int, int, int]]:
        """(expert, source, token, choice) of each row of a rank, in visible order."""
        found = []
        for expert in self.held(rank):
            for source in range(self.ranks):
                hits = (self.ids[source] == expert).nonzero().tolist()
                found += [(expert, source, token, k) for token, k in hits]
        return found

    def masked(self, active: list[bool]) -> Case:
        """The case without the choices of masked ranks, and without those of their experts."""
        gone = torch.tensor([expert for rank in range(self.ranks) if not active[rank] for expert in self.held(rank)])
        ids = [torch.where(torch.isin(ids, gone) | (not active[rank]), -1, ids) for rank, ids in enumerate(self.ids)]
        return replace(self, ids=ids)

    def rows_of(self, rank: int, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The rows of a rank, taken from a tensor [tokens, ..] of each source."""
        rows = [tensors[source][token] for _, source, token, _ in self.rows(rank)]
        return torch.stack(rows) if rows else tensors[0].new_empty(0, *tensors[0].shape[1:])

    def summed(self, rank: int, row_of: dict[tuple[int, int, int], torch.Tensor]) -> torch.Tensor:
        """Sums of the rows of each token of a rank: in float32 from +0, by ascending expert,
        rounded once.
        """
        out = torch.zeros(self.x[rank].shape[0], self.hidden)
        for token, ids in enumerate(self.ids[rank].tolist()):
            for expert in sorted(e for e in ids if e >= 0):
                out[token] += row_of[expert, rank, token].float()
        return out.to(self.x[rank].dtype)


def case(
    ranks: int, *, tokens: int = 7, experts: int = 10, top_k: int = 3, hidden: int = 16, dtype: torch.dtype = torch.float32
) -> Case:
    """A case with dropped choices, of which the last rank has no token."""
    x, ids, weights = [], [], []
    for rank in range(ranks):
        draw = torch.Generator().manual_seed(rank + 1000 * ranks)
        count = 0 if rank == ranks - 1 and ranks > 2 else tokens + rank
        x.append(torch.randn(count, hidden, generator=draw).to(dtype))
        chosen = torch.stack([torch.randperm(experts, generator=draw)[:top_k] for _ in range(count)] or [torch.empty(0, top_k)])
        chosen = chosen.reshape(count, top_k).to(torch.int32)
        chosen[torch.rand(count, top_k, generator=draw) < 0.1] = -1
        ids.append(chosen)
        weights.append(torch.rand(count, top_k, generator=draw))
    return Case(ranks, experts, top_k, hidden, x, ids, weights)


def same(seen: torch.Tensor, expected: torch.Tensor) -> None:
    """Bits, not tolerances."""
    assert seen.dtype == expected.dtype, (seen.dtype, expected.dtype)
    assert seen.shape == expected.shape, (seen.shape, expected.shape)
    if not seen.numel():
        return
    assert torch.equal(seen.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), (seen, expected)
