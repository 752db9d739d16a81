"""Megatron-core on Sidelane, in two ways.

*Unchanged*: :func:`install` puts a module in place of ``deep_ep`` before Megatron imports it, so that its flex dispatcher with
the ``deepep`` backend sends by Sidelane::

    import sidelane.megatron
    sidelane.megatron.install()
    import megatron.core                 # --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep

*Our own*: :class:`TokenDispatcher` has the six calls of Megatron's dispatchers. Rows come expert-major, as experts take them,
so nothing is permuted before or after; sums are those of Megatron's all-to-all to the bit in float32::

    layer.token_dispatcher = TokenDispatcher(n, local_expert_indices, config, pg_collection)

Worlds and layers are made at the first call that needs them, all ranks of the group together, and kept.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import autograd
from ._native import ExpertParallel, Handle, World
from .errors import Error
from .join import init

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "TokenDispatcher", "install"]

_MAX_TOKENS = 1 << 16
_worlds: dict[ProcessGroup, World] = {}
_layers: dict[tuple[Any, ...], ExpertParallel] = {}


def _layer(group: ProcessGroup, **settings: Any) -> ExpertParallel:
    """The layer of a group with these settings. Collective the first time."""
    key = (group, *settings.items())
    if key not in _layers:
        if group not in _worlds:
            _worlds[group] = init(group)
        _layers[key] = ExpertParallel(_worlds[group], max_tokens=_MAX_TOKENS, **settings)
    return _layers[key]


def install() -> None:
    """Puts :class:`Buffer` where Megatron looks for DeepEP's.

    Refused once a real ``deep_ep`` is loaded, or Megatron has looked for one and found none.
    """
    loaded = sys.modules.get("deep_ep")
    if loaded is not None:
        if getattr(loaded, "Buffer", None) is Buffer:
            return
        raise Error("a deep_ep is loaded already: call sidelane.megatron.install() before it is imported", "Loaded")
    if "megatron.core.transformer.moe.fused_a2a" in sys.modules:
        message = "Megatron has looked for deep_ep already: call sidelane.megatron.install() before importing megatron.core"
        raise Error(message, "TooLate")
    package, utils = ModuleType("deep_ep", __doc__), ModuleType("deep_ep.utils", __doc__)
    for name, thing in {"Buffer": Buffer, "Config": Config, "EventOverlap": EventOverlap}.items():
        setattr(package, name, thing)
    for name, thing in {"EventHandle": EventHandle, "EventOverlap": EventOverlap}.items():
        setattr(utils, name, thing)
    package.utils = utils
    package.__path__ = []
    sys.modules |= {"deep_ep": package, "deep_ep.utils": utils}


class EventHandle:
    """A point in a stream; there is none on the host."""


class EventOverlap:
    """What a call ends with: it is over when it returns."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        """There is nothing to wait for."""


class Config:
    """Sizes of DeepEP's buffers. Ours are in the world's heap, as large as rows are (``SIDELANE_HEAP``)."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0


@dataclass(frozen=True)
class _Placed:
    ep: ExpertParallel
    handle: Handle


class Buffer:
    """DeepEP's ``Buffer``, as far as Megatron uses it: rank-major rows, one per token and rank."""

    num_sms = 0

    def __init__(self, group: ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **_: Any) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(num_sms: int) -> None:
        """Takes note of a number of multiprocessors, none of which is used."""
        Buffer.num_sms = num_sms

    @staticmethod
    def get_dispatch_config(_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(_ranks: int) -> Config:
        return Config()

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, **_: Any
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """Tokens for each rank, rows for each expert, and which rank gets which token."""
        ranks = self.group.size()
        chosen = topk_idx >= 0
        per_expert = torch.bincount(topk_idx[chosen], minlength=num_experts).int()
        # One column more, which the dropped choices fall into.
        reached = torch.zeros(topk_idx.shape[0], ranks + 1, dtype=torch.bool)
        reached.scatter_(1, torch.where(chosen, topk_idx * ranks // num_experts, ranks), True)
        reached = reached[:, :ranks].contiguous()
        return reached.sum(dim=0).int(), None, per_expert, reached, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: _Placed | None = None,
        *,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[int] | None, _Placed | None, EventOverlap]:
        """Sends tokens; along a handle, by the layout of its dispatch."""
        x = x.detach().contiguous()
        if handle is not None:
            return handle.ep.dispatch_cached(x, handle.handle), None, None, None, None, EventOverlap()
        if topk_idx is None or topk_weights is None or num_tokens_per_expert is None:
            raise ValueError("dispatch without a handle needs topk_idx, topk_weights and num_tokens_per_expert")
        ep = _layer(
            self.group,
            experts=num_tokens_per_expert.numel(),
            top_k=topk_idx.shape[1],
            hidden=x.shape[1],
            dtype=x.dtype,
            layout="rank-major",
        )
        rows, placed = ep.dispatch(x, topk_idx.contiguous(), topk_weights.detach().contiguous())
        experts, weights = placed.row_experts.long(), placed.row_weights
        return rows, experts, weights, placed.tokens_per_expert, _Placed(ep, placed), EventOverlap()

    def combine(
        self, x: Tensor, handle: _Placed, topk_weights: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums the rows of each token, by ascending rank; weights, as gradients, go home."""
        x = x.detach().contiguous()
        if topk_weights is None:
            return handle.ep.combine(x, handle.handle), None, EventOverlap()
        weights = topk_weights.detach().contiguous().view(-1)
        tokens, home = handle.ep.dispatch_backward(x, handle.handle, weights)
        return tokens, home, EventOverlap()


class TokenDispatcher:
    """A dispatcher of Megatron's, expert-major: `MoETokenDispatcher`'s calls, and nothing permuted.

    Tensor-parallel ranks are treated as the flex dispatcher does: each gets all tokens of its experts and returns a partial
    sum, which combine adds up.
    """

    def __init__(self, num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any) -> None:
        if config.moe_pad_expert_input_to_capacity:
            raise ValueError("drop-and-pad is not open to Megatron yet: set moe_pad_expert_input_to_capacity=False")
        self.config, self.shared_experts = config, None
        self.ep_group, self.tp_group, self.tp_ep_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.tp_ep
        self.ep_size, self.tp_size, self.tp_rank = self.ep_group.size(), self.tp_group.size(), self.tp_group.rank()
        self.num_local_experts, self.local_expert_indices = num_local_experts, local_expert_indices
        self.cudagraph_attrs: list[str] = []
        self.valid_cudagraph_attrs = None
        self.ids: Tensor | None = None
        self.routed: autograd.Routed | None = None

    def set_shared_experts(self, _shared_experts: Any) -> None:
        raise NotImplementedError("the overlap of shared experts is not open to this dispatcher")

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """From the map [tokens, experts] to choices [tokens, top_k] by ascending expert."""
        self.hidden_shape, self.probs_dtype = hidden_states.shape, probs.dtype
        top_k, experts = self.config.moe_router_topk, routing_map.shape[1]
        if (routing_map.sum(dim=1) > top_k).any():
            raise ValueError(f"a token has more than moe_router_topk={top_k} experts: is the routing map padded?")
        numbers = torch.arange(experts).expand_as(routing_map)
        ids = torch.where(routing_map, numbers, experts).sort(dim=1).values[:, :top_k]
        dropped = ids == experts
        weights = probs.gather(1, ids.masked_fill(dropped, 0)).masked_fill(dropped, 0.0)
        if self.tp_size > 1:
            # Expert e of expert-parallel rank r is one expert at each of its tensor-parallel ranks.
            n = self.num_local_experts
            ids = torch.cat([(ids // n * self.tp_size + tp) * n + ids % n for tp in range(self.tp_size)], dim=1)
            dropped, weights = dropped.repeat(1, self.tp_size), weights.repeat(1, self.tp_size)
        self.ids = ids.masked_fill(dropped, -1)
        return hidden_states.reshape(-1, self.hidden_shape[-1]), weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sends tokens and weights."""
        if self.ids is None:
            raise RuntimeError("token_dispatch comes after dispatch_preprocess")
        ep = _layer(
            self.tp_ep_group,
            experts=self.num_local_experts * self.tp_size * self.ep_size,
            top_k=self.ids.shape[1],
            hidden=hidden_states.shape[1],
            dtype=hidden_states.dtype,
        )
        self.ep, self.routed = ep, autograd.dispatch(ep, hidden_states, self.ids, probs)
        return self.routed.rows, self.routed.weights

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows are as experts take them."""
        if self.routed is None:
            raise RuntimeError("dispatch_postprocess comes after token_dispatch")
        counts = torch.tensor(self.routed.tokens_per_expert, dtype=torch.int64)
        return hidden_states, counts, probs.to(self.probs_dtype)

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Nothing is put back: combine reads rows where they lie."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Sums the rows of each token, by ascending expert."""
        if self.routed is None:
            raise RuntimeError("token_combine comes after token_dispatch")
        tokens = autograd.combine(self.ep, hidden_states, self.routed)
        self.ids = self.routed = None
        return tokens

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """In the shape that came."""
        return hidden_states.view(self.hidden_shape)
