"""The shapes in which inference servers ask for dispatch and combine. None of them is imported.

::

    vLLM        prepare_async(..) -> receiver   |  receiver() -> rows    experts    finalize_async(output, ..) -> receiver  |  receiver()
    SGLang      dispatch_a(..)                  |  dispatch_b()          experts    combine_a(..)                           |  combine_b()
    FlashInfer  dispatch(..) -> rows                                     experts    combine(..) -> tokens

Rows are expert-major, [rows, hidden], one for each token and expert: each has one expert id and one
weight. Or they are *batched* (:class:`BatchedPrepareFinalize`), [experts, most, hidden]: as much
room for each local expert as may come. A first half has said and put all that is this rank's to say
and put; the second waits for the others: on a GPU for sizes, not for rows. FlashInfer's rows are
rank-major in fixed slots, one for each token and rank, and no call waits on a GPU. Calls are
collective, and come in one order on all ranks.

Tensors lie where the ``ExpertParallel`` has its rows. On a GPU calls go on torch's current stream,
and nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ._native import ExpertParallel, Group, Handle, PendingDispatch, World
from .errors import WorldError

__all__ = [
    "BatchedPrepareFinalize",
    "CombineInput",
    "Communication",
    "CommunicationConfig",
    "DispatchOutput",
    "DispatchResult",
    "Dispatcher",
    "ExpertTokens",
    "PrepareFinalize",
]


@dataclass(frozen=True)
class ExpertTokens:
    """Rows of each local expert, int32."""

    expert_num_tokens: Tensor
    expert_num_tokens_cpu: Tensor
    psum_recv_per_rank: None = None


class _Layer:
    """An ``ExpertParallel``, with the metadata that a server gets of its rows, on either place."""

    def __init__(self, ep: ExpertParallel, *, weighted: bool = False) -> None:
        if ep.weighted != weighted:
            does, who = ("does not weigh", "it does here") if weighted else ("weighs", "servers or their experts do")
            raise ValueError(f"an ExpertParallel that {does} rows itself: {who}")
        if ep.executor not in ("host-stepper", "enqueuer"):
            raise ValueError(f"the adapters need sizes that the host knows, which a {ep.executor} does not say")
        self.ep, self.device = ep, torch.device(ep.place if ep.device is not None else "cpu")
        self.held: list[int] = []

    def start(self, x: Tensor, ids: Tensor, weights: Tensor) -> PendingDispatch:
        return self.ep.start_dispatch(x.contiguous(), ids.contiguous(), weights.float().contiguous())

    def counts(self, handle: Handle) -> tuple[Tensor, Tensor]:
        """Rows of each local expert, without and with pads."""
        if self.ep.device is not None:
            counts: Any = handle.counts
            return counts[0], counts[1]
        return torch.tensor(handle.tokens_per_expert), torch.tensor(handle.padded_tokens_per_expert)

    def tokens(self, handle: Handle) -> ExpertTokens:
        on_the_host = torch.tensor(handle.tokens_per_expert, dtype=torch.int32)
        return ExpertTokens(on_the_host if self.ep.device is None else self.counts(handle)[0].int(), on_the_host)

    def tags(self, handle: Handle) -> tuple[Tensor, Tensor]:
        """Of each row its expert, of all, and its weight, [rows, 1]."""
        held = self.ep.expert_map[self.ep.rank]
        if held != self.held:
            # Another map comes between steps, and may wait.
            self.held, self.numbers = held, torch.tensor(held, dtype=torch.int64, device=self.device)
        # Pads count as rows of their expert, with a weight of 0.
        ids = torch.repeat_interleave(self.numbers, self.counts(handle)[1], output_size=handle.rows)
        return ids.reshape(-1, 1), handle.row_weights.reshape(-1, 1)

    def slots(self, handle: Handle, most: int) -> Tensor:
        """The place of each row where each local expert has room for so many."""
        _, padded = self.counts(handle)
        first = torch.arange(len(padded), device=self.device) * most - (padded.cumsum(0) - padded)
        ahead = torch.repeat_interleave(first, padded, output_size=handle.rows)
        return torch.arange(handle.rows, device=self.device) + ahead


class PrepareFinalize:
    """vLLM's ``FusedMoEPrepareAndFinalizeModular``, in the ``Standard`` format, with async halves.

    In a server, put it before vLLM's class, whose abstract methods it has::

        class Ours(PrepareFinalize, modular_kernel.FusedMoEPrepareAndFinalizeModular): ...

    Where microbatches overlap, each has an ``ExpertParallel`` of its own, and ``microbatch`` says
    which of them is running.
    """

    _weighs = False

    def __init__(self, *eps: ExpertParallel, activation_format: Any = "standard", microbatch: Callable[[], int] = lambda: 0) -> None:
        self._layers = [_Layer(ep, weighted=self._weighs) for ep in eps]
        self._format, self._microbatch = activation_format, microbatch
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
        return self._layers[0].ep.size

    def output_is_reduced(self) -> bool:
        return True

    def supports_async(self) -> bool:
        return True

    def supports_deferred_moe_finalize(self) -> bool:
        return False

    @property
    def support_fault_tolerance(self) -> bool:
        """False: the loss of a rank ends the world, and every call raises that. A mask is for ranks
        that live.
        """
        return False

    def query_active_mask(self) -> Tensor:
        """Ranks that are active in every ``ExpertParallel`` (``ep.mask``): bool, [ranks], true for
        an active one.
        """
        return torch.tensor([all(flags) for flags in zip(*(layer.ep.active for layer in self._layers))])

    def query_fault(self) -> Tensor:
        """Whether the world has failed, as far as is known without waiting: bool, [1]."""
        try:
            for layer in self._layers:
                layer.ep.check()
        except WorldError:
            return torch.tensor([True])
        return torch.tensor([False])

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
        """Sends the tokens. What it returns waits for those of the others, and gives rows, no
        scales, and what goes with them.
        """
        del expert_map, defer_input_quant  # Ids are of all experts; rows go as they are.
        batch = self._microbatch()
        layer = self._layers[batch]
        pending = self._started(layer, a1, topk_weights, topk_ids, num_experts, apply_router_weight_on_input, quant_config)

        def receive() -> tuple[Tensor, None, ExpertTokens, Tensor, Tensor]:
            rows, handle = pending.finish()
            self._handles[batch] = handle
            return rows, None, layer.tokens(handle), *layer.tags(handle)

        return receive

    @staticmethod
    def _started(
        layer: _Layer,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        weights_on_input: bool,
        quant_config: Any,
    ) -> PendingDispatch:
        """The first half of a dispatch, if it is one that can be."""
        if getattr(quant_config, "quant_dtype", None) is not None:
            raise ValueError("tokens are quantized by the experts: an ExpertParallel of fp8 records has no vLLM scales")
        held = len({expert for of in layer.ep.expert_map for expert in of})
        if held < num_experts:
            raise ValueError(f"{num_experts} experts where {held} are held")
        if weights_on_input:
            if topk_ids.shape[1] != 1:
                raise ValueError(f"weights go on the input of one expert, not of {topk_ids.shape[1]}")
            a1 = a1 * topk_weights.to(a1.dtype)
            if layer.ep.weighted:
                topk_weights = torch.ones_like(topk_weights)
        return layer.start(a1, topk_ids, topk_weights)

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
        """Sends rows back. What it returns waits for them, and writes their sums to ``output``,
        [tokens, hidden].

        Weights are applied here unless the experts have (``TopKWeightAndReduceNoOP``) or the input
        has them.
        """
        batch = self._microbatch()
        handle = self._handles.pop(batch)
        rows = fused_expert_output
        if weight_and_reduce_impl is not None and not type(weight_and_reduce_impl).__name__.endswith("Delegate"):
            rows = weight_and_reduce_impl.apply(None, rows, topk_weights, topk_ids, apply_router_weight_on_input)
        elif not apply_router_weight_on_input:
            rows = rows.reshape(-1, rows.shape[-1]) * topk_weights.reshape(-1, 1).to(rows.dtype)
        pending = self._layers[batch].ep.start_combine(rows.reshape(-1, output.shape[-1]).contiguous(), handle)

        def receive() -> None:
            output.copy_(pending.finish())

        return receive

    def finalize(self, *arguments: Any, **named: Any) -> None:
        """Both halves of :meth:`finalize_async`."""
        self.finalize_async(*arguments, **named)()


class BatchedPrepareFinalize(PrepareFinalize):
    """The same in the ``BatchedExperts`` format: rows are [local experts, most, hidden], of which
    each expert has the first.

    ``max_num_tokens`` is the most tokens of a rank, so that most is that times the ranks. Weights
    are applied by the combine, in float32: each ``ExpertParallel`` weighs rows itself.
    """

    _weighs = True

    def __init__(
        self,
        *eps: ExpertParallel,
        max_num_tokens: int,
        activation_format: Any = "batched_experts",
        microbatch: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__(*eps, activation_format=activation_format, microbatch=microbatch)
        self._max_num_tokens = max_num_tokens
        self._slots: dict[int, Tensor] = {}

    def max_num_tokens_per_rank(self) -> int | None:
        return self._max_num_tokens

    def prepare_async(  # type: ignore[override]
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any = None,
        defer_input_quant: bool = False,
    ) -> Callable[[], tuple[Tensor, None, ExpertTokens, None, None]]:
        """Sends the tokens. What it returns gives rows, no scales, how many each expert has, and
        neither ids nor weights.
        """
        del expert_map, defer_input_quant
        batch = self._microbatch()
        layer, most = self._layers[batch], self._max_num_tokens * self.num_dispatchers()
        pending = self._started(layer, a1, topk_weights, topk_ids, num_experts, apply_router_weight_on_input, quant_config)

        def receive() -> tuple[Tensor, None, ExpertTokens, None, None]:
            rows, handle = pending.finish()
            self._handles[batch], self._slots[batch] = handle, layer.slots(handle, most)
            experts = len(layer.ep.expert_map[layer.ep.rank])
            batched = rows.new_zeros(experts * most, rows.shape[1]).index_copy_(0, self._slots[batch], rows)
            return batched.view(experts, most, -1), None, layer.tokens(handle), None, None

        return receive

    def finalize_async(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any = None,
    ) -> Callable[[], None]:
        """Sends back the rows of [local experts, most, hidden]. What it returns writes their
        weighted sums to ``output``.
        """
        if weight_and_reduce_impl is not None and not type(weight_and_reduce_impl).__name__.endswith("Delegate"):
            raise ValueError("weights of the batched format are applied here, not by the experts")
        batch = self._microbatch()
        handle, slots = self._handles.pop(batch), self._slots.pop(batch)
        rows = handle.output()
        torch.index_select(fused_expert_output.reshape(-1, output.shape[-1]), 0, slots, out=rows)
        pending = self._layers[batch].ep.start_combine(rows, handle)

        def receive() -> None:
            output.copy_(pending.finish())

        return receive


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
    """SGLang's ``BaseDispatcher``, with halves for the overlap of two batches: each has a
    dispatcher on an ``ExpertParallel`` of its own.
    """

    def __init__(self, ep: ExpertParallel) -> None:
        self._layer = _Layer(ep)
        self._stage: str = "idle"
        self._pending: Any = None

    def _at(self, stage: str) -> Any:
        """What the last step left, if it was the one before this. A step that fails leaves the
        dispatcher idle.
        """
        if self._stage != stage:
            raise RuntimeError(f"this step comes after {stage!r}, and the dispatcher is at {self._stage!r}")
        left, self._pending, self._stage = self._pending, None, "idle"
        return left

    def _go(self, stage: str, left: Any) -> None:
        self._stage, self._pending = stage, left

    def dispatch_a(self, hidden_states: Tensor, topk_output: Any) -> None:
        """Sends the tokens; ``topk_output`` has ``topk_ids`` and ``topk_weights``."""
        self._at("idle")
        self._go("dispatching", self._layer.start(hidden_states, topk_output.topk_ids, topk_output.topk_weights))

    def dispatch_b(self) -> DispatchOutput:
        """Waits for those of the others."""
        rows, handle = self._at("dispatching").finish()
        ids, weights = self._layer.tags(handle)
        self._go("dispatched", handle)
        return DispatchOutput(rows, None, ids, weights, list(handle.tokens_per_expert))

    def combine_a(self, combine_input: Any) -> None:
        """Sends rows back."""
        handle = self._at("dispatched")
        self._go("combining", self._layer.ep.start_combine(combine_input.hidden_states.contiguous(), handle))

    def combine_b(self) -> Tensor:
        """Waits for them; their sums, [tokens, hidden]."""
        tokens: Tensor = self._at("combining").finish()
        return tokens

    def dispatch(self, hidden_states: Tensor, topk_output: Any) -> DispatchOutput:
        """Both halves."""
        self.dispatch_a(hidden_states, topk_output)
        return self.dispatch_b()

    def combine(self, combine_input: Any) -> Tensor:
        """Both halves."""
        self.combine_a(combine_input)
        return self.combine_b()


@dataclass(frozen=True)
class CommunicationConfig:
    """Names :class:`Communication` to FlashInfer, and the ranks that it is between."""

    backend_name: ClassVar[str] = "sidelane"

    group: World | Group
    device: Any = "cuda"
    """Where tensors lie; ``None`` for the host."""


class DispatchResult(NamedTuple):
    """What FlashInfer's experts get: [ranks * tokens_per_rank, ..], a row for each token that chose
    any expert of this rank. Ids are of all experts. Those of other ranks are the invalid one, as
    are all ids of rows without a token.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor | None
    tokens_per_rank: int
    hidden_states_scale: None = None
    eplb_gathered_stats: None = None


class Communication:
    """FlashInfer's ``MoEEpCommunication``, in fixed slots: a row for each token that any rank may
    have.

    In an engine, register it as a backend of ``flashinfer.moe_ep``, and name it by a
    :class:`CommunicationConfig`::

        @register_communication("sidelane")
        class Ours(Communication, MoEEpCommunication): ...

        create_communication(bootstrap, params, CommunicationConfig(world))

    Experts weigh their rows and add up those of a token on this rank; ``combine`` adds up ranks, in
    ascending order. No graph has captured these calls yet, so ``supports_cuda_graph`` is false.
    """

    supports_cuda_graph: ClassVar[bool] = False

    def __init__(self, bootstrap: Any, params: Any, config: CommunicationConfig) -> None:
        group = config.group
        if (bootstrap.rank, bootstrap.world_size) != (group.rank, group.size):
            seen = f"rank {bootstrap.rank} of {bootstrap.world_size}"
            raise ValueError(f"FlashInfer's {seen} is rank {group.rank} of {group.size} in the group")
        if params.num_experts % group.size:
            raise ValueError(f"{params.num_experts} experts do not divide among {group.size} ranks")
        if getattr(params, "dispatch_format", None) is not None:
            raise ValueError("rows go as they are: there is no dispatch format of FlashInfer's")
        self.bootstrap, self.params = bootstrap, params
        self.ep_rank, self.ep_size = group.rank, group.size
        self.num_local_experts = params.num_experts // group.size
        self._handle: Handle | None = None
        self._ep: ExpertParallel | None = ExpertParallel(
            group,
            experts=params.num_experts,
            top_k=params.top_k,
            hidden=params.hidden_size,
            dtype=params.token_dtype,
            layout="rank-major",
            sum_order="rank",
            slots=params.max_tokens_per_rank,
            max_tokens=params.max_tokens_per_rank,
            device=config.device,
        )

    @classmethod
    def is_platform_supported(cls) -> bool:
        """Wherever this package can be imported."""
        return True

    @property
    def ep(self) -> ExpertParallel:
        """Whose calls these are, to mask ranks, for example."""
        if self._ep is None:
            raise RuntimeError("this communication was destroyed")
        return self._ep

    def is_workload_feasible(self, max_tokens_per_rank: int) -> bool:
        """Whether a rank may have so many tokens."""
        return bool(max_tokens_per_rank <= self.params.max_tokens_per_rank)

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None = None,
        *,
        hidden_states_scale: Tensor | None = None,
        max_tokens_per_rank: int | None = None,
        eplb_local_stats: Tensor | None = None,
    ) -> DispatchResult:
        """Sends each token once to each rank that has any of its experts. Slots are for the most
        tokens that the params name, whatever ``max_tokens_per_rank`` of this call is.

        All ranks pass alike ``hidden_states_scale``, ``eplb_local_stats`` and
        ``max_tokens_per_rank``. This rank refuses them before the call, and the others do not hear
        of it.
        """
        if self._handle is not None:
            raise RuntimeError("a dispatch comes after the combine of the one before")
        if hidden_states_scale is not None or eplb_local_stats is not None:
            raise NotImplementedError("neither scales nor statistics travel with tokens")
        most = int(self.params.max_tokens_per_rank)
        if max_tokens_per_rank is not None and not 0 < max_tokens_per_rank <= most:
            raise ValueError(f"max_tokens_per_rank={max_tokens_per_rank}: 1 to {most} are built for")
        weights = torch.ones_like(topk_ids, dtype=torch.float32) if topk_weights is None else topk_weights.float()
        rows, handle = self.ep.dispatch(hidden_states.contiguous(), topk_ids.contiguous(), weights.contiguous())
        self._handle = handle
        local, of_rows = handle.row_experts.flatten(0, -2), handle.row_weights.flatten(0, -2)
        ids = torch.where(local < 0, self.params.invalid_expert_id, local + self.ep_rank * self.num_local_experts)
        return DispatchResult(rows.flatten(0, -2), ids, None if topk_weights is None else of_rows, most)

    def get_combine_input_buffer(self, dtype: torch.dtype) -> Tensor | None:
        """Where experts may write what :meth:`combine` takes, which saves a copy: rows in the
        element type of the params.
        """
        handle = self._dispatched()
        if dtype != self.params.token_dtype:
            return None
        buffer: Tensor = handle.output()
        return buffer.flatten(0, -2)

    def combine(self, expert_output: Tensor, *, output: Tensor | None = None) -> Tensor:
        """Sends the experts' row of each row back, [ranks * tokens_per_rank, hidden]. The sums are
        [tokens, hidden]. A combine that raises gives up its dispatch: the next call is a dispatch.
        """
        handle, self._handle = self._dispatched(), None
        rows = expert_output.reshape(-1, expert_output.shape[-1]).contiguous()
        tokens: Tensor = self.ep.combine(rows, handle) if output is None else self.ep.combine(rows, handle, output)
        return tokens

    def _dispatched(self) -> Handle:
        if self._handle is None:
            raise RuntimeError("a combine comes after a dispatch")
        return self._handle

    def destroy(self) -> None:
        """Gives up what was built."""
        self._ep = self._handle = None
