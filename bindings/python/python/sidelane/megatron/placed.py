"""Rows of a dispatch in as many places as a caller has made for them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._native import ExpertParallel, Handle


class Placed(NamedTuple):
    """The placement of a dispatch, expert-major. With a budget there are as many rows, those behind
    the last are zero.
    """

    ep: ExpertParallel
    handle: Handle
    budget: int | None
    ids: Tensor
    """The choices that were sent, of so many experts."""

    experts: int
    overflow: Tensor
    """Whether any rank was sent more than its budget: a bool, [1], the same at all ranks. Megatron
    looks for it at the end.
    """

    @classmethod
    def send(
        cls, ep: ExpertParallel, x: Tensor, ids: Tensor, weights: Tensor, *, experts: int, budget: int | None
    ) -> tuple[Tensor, Tensor, Placed]:
        """Rows of these tokens, the routing weight of each, and where they lie. Collective."""
        rows, handle = ep.dispatch(x, ids, weights)
        overflow = budget is not None and max(handle.required_rows) > budget
        placed = cls(ep, handle, budget, ids, experts, torch.full((1,), overflow, device=x.device))
        # Weights go with the rows, which only their copy may outlive.
        row_weights = placed.fill(handle.row_weights)
        return placed.fill(rows), row_weights, placed

    def send_again(self, x: Tensor) -> Tensor:
        """Rows of other tokens along the same layout. Collective."""
        return self.fill(self.ep.dispatch_cached(x, self.handle))

    def spread(self, gradients: Tensor) -> Tensor:
        """The gradient of each row from those of tokens. Collective."""
        return self.fill(self.ep.combine_backward(gradients.detach().contiguous(), self.handle)[0])

    def of_experts(self, weights: Tensor | None) -> Tensor | None:
        """What belongs to choices, [tokens, choices], as a column of each expert."""
        if weights is None:
            return None
        columns = weights.new_zeros(weights.shape[0], self.experts + 1)
        return columns.scatter_(1, self.ids % (self.experts + 1), weights)[:, : self.experts]

    def fill(self, rows: Tensor) -> Tensor:
        """Rows, and zeros up to the budget."""
        if self.budget is None or rows.shape[0] == self.budget:
            return rows
        filled = rows.new_zeros(self.budget, *rows.shape[1:])
        filled[: rows.shape[0]] = rows
        return filled

    def landed(self, rows: Tensor) -> Tensor:
        """Rows without what fills the budget."""
        return rows.detach()[: self.handle.rows].contiguous()
