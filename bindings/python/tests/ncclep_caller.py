"""A fake of the manager of Megatron's ``ncclep`` backend, which 0.16.1 does not have: the same
calls in the same order.

A group is named at the first dispatch, for as many tokens as there are, rounded up to 64; each
dispatch has a buffer of its own, which lives until its combine, and longer in the graph.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# As in Megatron where TransformerEngine has no such backend.
names = ModuleType("token_dispatcher")
for name in (
    "ensure_nccl_ep_bootstrapped",
    "is_nccl_ep_bootstrapped",
    "new_nccl_ep_buffer",
    "nccl_ep_dispatch",
    "nccl_ep_combine",
):
    setattr(names, name, None)


class Manager:
    """What the flex dispatcher asks of a manager."""

    def __init__(
        self, group: Any, num_local_experts: int, router_topk: int, num_experts: int, capacity: int | None = None
    ) -> None:
        self.group, self.num_local_experts = group, num_local_experts
        self.router_topk, self.num_experts, self.capacity = router_topk, num_experts, capacity
        self.over_budget = torch.zeros(1, dtype=torch.bool)

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        tokens = routing_map.shape[0]
        self.tokens, chosen = tokens, routing_map.reshape(tokens, self.num_experts)
        self.token_probs, ids = torch.topk(probs.reshape(tokens, self.num_experts), self.router_topk, dim=-1)
        self.token_indices = ids.masked_fill(~chosen.gather(1, ids), -1)

    def dispatch(self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False) -> Tensor:
        most, hidden = -(-self.tokens // 64) * 64, hidden_states.shape[1]
        if not names.is_nccl_ep_bootstrapped():
            names.ensure_nccl_ep_bootstrapped(
                self.group,
                num_experts=self.num_experts,
                max_tokens_per_rank=most,
                recv_capacity_per_rank=self.capacity,
                hidden_dim=hidden,
                num_topk=self.router_topk,
                drop_on_overflow=True,
            )
        self.buffer = names.new_nccl_ep_buffer(
            top_k=self.router_topk,
            max_tokens_per_rank=most,
            recv_capacity_per_rank=self.capacity,
            hidden_dim=hidden,
            num_local_experts=self.num_local_experts,
        )
        rows, self.tokens_per_expert, self.dispatched_probs = names.nccl_ep_dispatch(
            self.buffer, hidden_states, self.token_indices, self.token_probs
        )
        if self.capacity is not None:
            self.over_budget |= self.buffer.total_recv_tokens > self.capacity
        return rows

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, self.dispatched_probs

    def get_number_of_tokens_per_expert(self) -> Tensor:
        return self.tokens_per_expert

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def combine(self, hidden_states: Tensor, async_finish: bool = False, allocate_on_comm_stream: bool = False) -> Tensor:
        tokens = names.nccl_ep_combine(self.buffer, hidden_states, num_local_tokens=self.tokens)
        del self.buffer, self.token_indices
        return tokens
