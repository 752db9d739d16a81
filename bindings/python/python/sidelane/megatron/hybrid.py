"""DeepEP's ``HybridEPBuffer``, as far as Megatron uses it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .choices import chosen_ids
from .fp8 import pack, unpack
from .layers import layer, limits
from .placed import Placed


class HybridEPBuffer:
    """Expert-major rows, not permuted: Megatron gives them to its experts as they come.

    ``num_permuted_tokens`` is a budget: as many rows come at every rank, those behind the last are
    zero, and what does not fit is dropped; the handle's last part, a tensor of one bool, is true at
    all ranks if that happened anywhere. Each budget is a layer of its own, so ranks give the same
    one. Without it, sizes are exact.

    Choices come as a map, [tokens, experts], of which any number in a row may be true, or as many
    as :attr:`Limits.choices <sidelane.megatron.Limits>` says: a layer on a GPU takes memory for all
    that there may be.
    """

    def __init__(
        self, group: ProcessGroup, hidden_dim: int, max_num_of_tokens_per_rank: int, num_local_experts: int, **_: Any
    ) -> None:
        self.group, self.max_tokens = group, max_num_of_tokens_per_rank

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        pad_multiple: int | None = None,
        num_permuted_tokens: int | None = None,
        handle: Placed | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Placed]:
        """Rows, their weights, their scales, rows per expert, a handle; along a handle, rows and
        scales alone.
        """
        if handle is not None:
            if scaling_factor is None:
                return handle.spread(hidden), None, None, None, handle
            rows = handle.send_again(pack(handle.ep, hidden, scaling_factor))
            values, blocks = unpack(handle.ep, rows, hidden.dtype)
            return values, None, blocks, None, handle
        if routing_map is None:
            raise ValueError("dispatch_with_permute without a handle needs a routing_map")
        experts = routing_map.shape[1]
        choices = min(limits.choices or experts, experts)
        fp8 = scaling_factor is not None
        ep = layer(
            self.group,
            hidden,
            experts=experts,
            top_k=choices,
            max_tokens=self.max_tokens,
            hidden=hidden.shape[1],
            dtype=torch.bfloat16 if fp8 else hidden.dtype,
            align=pad_multiple or 1,
            budget=num_permuted_tokens,
            overflow="error" if num_permuted_tokens is None else "drop",
            fp8=fp8,
        )
        ids = chosen_ids(routing_map, choices)
        if probs is None:
            weights = torch.zeros(ids.shape, device=ids.device)
        else:
            weights = probs.detach().float().gather(1, ids.clamp(0, experts - 1)).masked_fill(ids < 0, 0.0)
        sent = pack(ep, hidden, scaling_factor) if scaling_factor is not None else hidden.detach().contiguous()
        rows, row_weights, placed = Placed.send(ep, sent, ids, weights, experts=experts, budget=num_permuted_tokens)
        counts = torch.tensor(placed.handle.padded_tokens_per_expert, dtype=torch.int64)
        scales: Tensor | None = None
        if fp8:
            rows, scales = unpack(ep, rows, hidden.dtype)
        return rows, None if probs is None else row_weights, scales, counts, placed

    def combine_with_unpermute(
        self, *, hidden: Tensor, handle: Placed, probs: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Sums the rows of each token, by ascending expert; gradients of weights return:
        [tokens, experts].
        """
        if probs is None:
            return handle.ep.combine(handle.landed(hidden), handle.handle), None
        tokens, weights = handle.ep.dispatch_backward(handle.landed(hidden), handle.handle, handle.landed(probs))
        return tokens, handle.of_experts(weights)
