"""The shapes in which inference servers ask for dispatch and combine. Neither server is imported.

::

    vLLM      prepare_async(..) -> receiver   |  receiver() -> rows    experts    finalize_async(output, ..) -> receiver  |  receiver()
    SGLang    dispatch_a(..)                  |  dispatch_b()          experts    combine_a(..)                           |  combine_b()

Rows are expert-major, [rows, hidden], one for each token and expert: each has one expert id and one weight. A first half has said
and put all that is this rank's to say and put; the second waits for the others. Calls are collective, and come in one order on
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._native import ExpertParallel, Handle

__all__ = ["CombineInput", "DispatchOutput", "Dispatcher", "ExpertTokens", "PrepareFinalize"]


@dataclass(frozen=True)
class ExpertTokens:
    """Rows of each local expert, int32."""

    expert_num_tokens: Tensor
    expert_num_tokens_cpu: Tensor
    psum_recv_per_rank: None = None


def _sent(ep: ExpertParallel, x: Tensor, ids: Tensor, weights: Tensor) -> Any:
    return ep.start_dispatch(x.contiguous(), ids.contiguous(), weights.float().contiguous())


def _usable(ep: ExpertParallel) -> None:
    if ep.device is not None:
        raise ValueError(f"the adapters serve an ExpertParallel on the host, not on {ep.place}")
    if ep.weighted:
        raise ValueError("an ExpertParallel that weighs rows itself: servers or their experts do")


def _tags(ep: ExpertParallel, handle: Handle) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row its expert, of all, and its weight, [rows, 1]; and the rows of each local expert."""
    counts = torch.tensor(handle.tokens_per_expert, dtype=torch.int32)
    held = torch.tensor(ep.expert_map[ep.rank], dtype=torch.int64)
    # Pads count as rows of their expert, with a weight of 0.
    ids = torch.repeat_interleave(held, torch.tensor(handle.padded_tokens_per_expert)).reshape(-1, 1)
    return ids, torch.from_dlpack(handle.row_weights).reshape(-1, 1), counts


class PrepareFinalize:
    """vLLM's ``FusedMoEPrepareAndFinalizeModular``, in the ``Standard`` format, with async halves.

    In a server, put it before vLLM's class, whose abstract methods it has::

        class Ours(PrepareFinalize, modular_kernel.FusedMoEPrepareAndFinalizeModular): ...

    Where microbatches overlap, each has an ``ExpertParallel`` of its own, and ``microbatch`` says which of them is running.
    """

    def __init__(self, *eps: ExpertParallel, activation_format: Any = "standard", microbatch: Callable[[], int] = lambda: 0) -> None:
        for ep in eps:
            _usable(ep)
        self._eps, self._format, self._microbatch = eps, activation_format, microbatch
        self._handles: dict[int, Handle] = {}

    @property
    def activation_format(self) -> Any:
        return self._format

    def post_init_setup(self, fused_experts: Any) -> None:
        """Nothing depends on the experts."""

    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int64

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def num_dispatchers(self) -> int:
        return self._eps[0].size

    def output_is_reduced(self) -> bool:
        return True

    def supports_async(self) -> bool:
        return True

    def supports_deferred_moe_finalize(self) -> bool:
        return False

    def prepare_async(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any = None,
        defer_input_quant: bool = False,
    ) -> Callable[[], tuple[Tensor, None, ExpertTokens, Tensor, Tensor]]:
        """Sends the tokens. What it returns waits for those of the others, and gives rows, no scales, and what goes with them."""
        del expert_map, defer_input_quant  # Ids are of all experts; rows go as they are.
        if getattr(quant_config, "quant_dtype", None) is not None:
            raise ValueError("tokens are quantised by the experts: an ExpertParallel of fp8 records has no vLLM scales")
        batch = self._microbatch()
        ep = self._eps[batch]
        held = len({expert for of in ep.expert_map for expert in of})
        if held < num_experts:
            raise ValueError(f"{num_experts} experts where {held} are held")
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise ValueError(f"weights go on the input of one expert, not of {topk_ids.shape[1]}")
            a1 = a1 * topk_weights.to(a1.dtype)
        pending = _sent(ep, a1, topk_ids, topk_weights)

        def receive() -> tuple[Tensor, None, ExpertTokens, Tensor, Tensor]:
            rows, handle = pending.finish()
            self._handles[batch] = handle
            ids, weights, counts = _tags(ep, handle)
            return rows, None, ExpertTokens(counts, counts), ids, weights

        return receive

    def prepare(self, *arguments: Any, **named: Any) -> tuple[Tensor, None, ExpertTokens, Tensor, Tensor]:
        """Both halves of :meth:`prepare_async`."""
        return self.prepare_async(*arguments, **named)()

    def finalize_async(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any = None,
    ) -> Callable[[], None]:
        """Sends rows home. What it returns waits for them, and writes their sums to ``output``, [tokens, hidden].

        Weights are applied here unless the experts have (``TopKWeightAndReduceNoOP``) or the input has them.
        """
        batch = self._microbatch()
        handle = self._handles.pop(batch)
        rows = fused_expert_output
        if weight_and_reduce_impl is not None and not type(weight_and_reduce_impl).__name__.endswith("Delegate"):
            rows = weight_and_reduce_impl.apply(None, rows, topk_weights, topk_ids, apply_router_weight_on_input)
        elif not apply_router_weight_on_input:
            rows = rows.reshape(-1, rows.shape[-1]) * topk_weights.reshape(-1, 1).to(rows.dtype)
        pending = self._eps[batch].start_combine(rows.reshape(-1, output.shape[-1]).contiguous(), handle)

        def receive() -> None:
            output.copy_(pending.finish())

        return receive

    def finalize(self, *arguments: Any, **named: Any) -> None:
        """Both halves of :meth:`finalize_async`."""
        self.finalize_async(*arguments, **named)()


class DispatchOutput(NamedTuple):
    """What SGLang's experts get: of each row its expert, of all, and its weight."""

    hidden_states: Tensor
    hidden_states_scale: None
    topk_ids: Tensor
    topk_weights: Tensor
    num_recv_tokens_per_expert: list[int]


class CombineInput(NamedTuple):
    """What SGLang's experts give: rows with their weights applied."""

    hidden_states: Tensor
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None


class Dispatcher:
    """SGLang's ``BaseDispatcher``, with halves for the overlap of two batches: each has a dispatcher on an ``ExpertParallel`` of its own."""

    def __init__(self, ep: ExpertParallel) -> None:
        _usable(ep)
        self._ep = ep
        self._stage: str = "idle"
        self._pending: Any = None

    def _at(self, stage: str) -> Any:
        """What the last step left, if it was the one before this. A step that fails leaves the dispatcher idle."""
        if self._stage != stage:
            raise RuntimeError(f"this step comes after {stage!r}, and the dispatcher is at {self._stage!r}")
        left, self._pending, self._stage = self._pending, None, "idle"
        return left

    def _go(self, stage: str, left: Any) -> None:
        self._stage, self._pending = stage, left

    def dispatch_a(self, hidden_states: Tensor, topk_output: Any) -> None:
        """Sends the tokens; ``topk_output`` has ``topk_ids`` and ``topk_weights``."""
        self._at("idle")
        self._go("dispatching", _sent(self._ep, hidden_states, topk_output.topk_ids, topk_output.topk_weights))

    def dispatch_b(self) -> DispatchOutput:
        """Waits for those of the others."""
        rows, handle = self._at("dispatching").finish()
        ids, weights, _ = _tags(self._ep, handle)
        self._go("dispatched", handle)
        return DispatchOutput(rows, None, ids, weights, list(handle.tokens_per_expert))

    def combine_a(self, combine_input: Any) -> None:
        """Sends rows home."""
        handle = self._at("dispatched")
        self._go("combining", self._ep.start_combine(combine_input.hidden_states.contiguous(), handle))

    def combine_b(self) -> Tensor:
        """Waits for them; their sums, [tokens, hidden]."""
        return self._at("combining").finish()

    def dispatch(self, hidden_states: Tensor, topk_output: Any) -> DispatchOutput:
        """Both halves."""
        self.dispatch_a(hidden_states, topk_output)
        return self.dispatch_b()

    def combine(self, combine_input: Any) -> Tensor:
        """Both halves."""
        self.combine_a(combine_input)
        return self.combine_b()
