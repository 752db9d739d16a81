"""A dispatcher with the calls of Megatron's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import autograd
from .choices import chosen_ids
from .layers import layer, limits


def enable(*, max_tokens: int | None = None, device_heap: int | None = None) -> None:
    """Makes :class:`TokenDispatcher` that of all MoE layers that are built from now on, of types
    ``alltoall`` and ``flex``.

    ``max_tokens`` is the most tokens of a rank, ``device_heap`` the bytes of a GPU for the rows of
    a layer: see :class:`sidelane.megatron.Limits`.
    """
    from megatron.core.transformer.moe import moe_layer

    limits.max_tokens, limits.device_heap = max_tokens, device_heap
    moe_layer.MoEAlltoAllTokenDispatcher = TokenDispatcher
    moe_layer.MoEFlexTokenDispatcher = TokenDispatcher


class TokenDispatcher:
    """A dispatcher of Megatron's, expert-major: `MoETokenDispatcher`'s calls, and nothing permuted.

    Tensor-parallel ranks are treated as the flex dispatcher does: each gets all tokens of its
    experts and returns a partial sum, which combine adds up. What combine does hangs on what
    experts return, not on the dispatch: Megatron starts backward passes of the two apart when it
    overlaps microbatches.
    """

    def __init__(self, num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any) -> None:
        if config.moe_router_padding_for_quantization:
            raise ValueError("rows are not padded for quantization yet: set moe_router_padding_for_quantization=False")
        self.config = config
        self.shared_experts: Any = None
        self.ep_group, self.tp_group, self.tp_ep_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.tp_ep
        self.ep_size, self.tp_size, self.tp_rank = self.ep_group.size(), self.tp_group.size(), self.tp_group.rank()
        self.num_local_experts, self.local_expert_indices = num_local_experts, local_expert_indices
        experts = num_local_experts * self.ep_size
        # Experts in a latent space get rows of its size.
        self.hidden = getattr(config, "moe_latent_size", None) or config.hidden_size
        # A capacity that is padded gives experts tokens that have not chosen them.
        self.choices = experts if config.moe_pad_expert_input_to_capacity else config.moe_router_topk
        self.cudagraph_attrs: list[str] = []
        self.valid_cudagraph_attrs = None
        # Where the schedule that overlaps microbatches leaves the weights that it detached, which
        # token_dispatch gets as well.
        self._comm_manager = SimpleNamespace()
        self.ids: Tensor | None = None
        self.routed: autograd.Routed | None = None

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Computes shared experts between the calls of this dispatcher
        (``--moe-shared-expert-overlap``).

        Their parts are called where Megatron's all-to-all calls them, on Megatron's stream for
        them. On the host, calls return when rows have moved, so nothing overlaps.
        """
        self.shared_experts = shared_experts
        if shared_experts.use_shared_expert_gate:
            self.cudagraph_attrs.append("shared_experts.gate_score")
        self.cudagraph_attrs.append("shared_experts.cached_fc1_input")

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """From the map [tokens, experts] to choices [tokens, top_k] by ascending expert."""
        self.hidden_shape, self.probs_dtype = hidden_states.shape, probs.dtype
        ids = chosen_ids(routing_map, self.choices)
        # An id that is none is refused by the dispatch, on all ranks.
        named = ids.clamp(0, routing_map.shape[1] - 1)
        weights = probs.gather(1, named).masked_fill(ids < 0, 0.0)
        if self.tp_size > 1:
            # Expert e of expert-parallel rank r is one expert at each of its tensor-parallel ranks.
            n = self.num_local_experts
            of_ranks = [torch.where(ids < 0, ids, (ids // n * self.tp_size + tp) * n + ids % n) for tp in range(self.tp_size)]
            ids, weights = torch.cat(of_ranks, dim=1), weights.repeat(1, self.tp_size)
        self.ids = ids
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        return hidden_states.reshape(-1, self.hidden_shape[-1]), weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """Sends tokens and weights."""
        if self.ids is None:
            raise RuntimeError("token_dispatch comes after dispatch_preprocess")
        ep = layer(
            self.tp_ep_group,
            hidden_states,
            experts=self.num_local_experts * self.tp_size * self.ep_size,
            top_k=self.ids.shape[1],
            # Not that of the tensor: a rank whose tensor has another size is refused on all ranks,
            # by the layer they share.
            hidden=self.hidden,
            dtype=hidden_states.dtype,
        )
        self.ep, self.routed = ep, autograd.dispatch(ep, hidden_states, self.ids, probs)
        return self.routed.rows, self.routed.weights

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows are as experts take them."""
        if self.routed is None:
            raise RuntimeError("dispatch_postprocess comes after token_dispatch")
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(hidden_states)
        counts = torch.tensor(self.routed.tokens_per_expert, dtype=torch.int64)
        return hidden_states, counts, probs.to(self.probs_dtype)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Nothing is put back: combine reads rows where they lie."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Sums the rows of each token, by ascending expert."""
        if self.routed is None:
            raise RuntimeError("token_combine comes after token_dispatch")
        tokens = autograd.combine(self.ep, hidden_states, self.routed.detach())
        self.ids = self.routed = None
        return tokens

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """In the shape that came, with what shared experts add."""
        tokens = hidden_states.view(self.hidden_shape)
        if self.shared_experts is None:
            return tokens
        self.shared_experts.linear_fc2_forward(hidden_states)
        self.shared_experts.post_forward_comm()
        output: Tensor = self.shared_experts.get_output()
        return tokens + output
