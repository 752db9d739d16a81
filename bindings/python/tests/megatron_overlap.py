"""A layer in the parts that Megatron starts apart where it overlaps microbatches, in Megatron's own
nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.pipeline_parallel.utils import ScheduleNode, stream_acquire_context
from megatron_cases import Case, Inputs, factors_of
from torch import Tensor


class Microbatch:
    """One pass forward and one back, part by part."""

    def __init__(self, ours: Any, who: str, case: Case, of: Inputs, streams: tuple[Any, Any] | None = None) -> None:
        self.ours, self.case, self.of = ours, case, of
        self.x, self.probs = of.x.clone().requires_grad_(), of.probs.clone().requires_grad_()
        # Megatron's nodes that communicate have a stream of their own. What one leaves the other
        # waits for by an event.
        compute, communication = streams or (torch.cuda.current_stream(),) * 2
        event = torch.cuda.Event()
        event.record(compute)
        self.compute, self.event = compute, event
        # Freed as should_free_input has it: what the experts read not with hybridep, what is
        # combined always.
        self.dispatch_node = ScheduleNode(self._dispatch, communication, event, self._dispatch_backward, name="moe_dispatch")
        self.mlp_node = ScheduleNode(self._mlp, compute, event, free_input=who == "deepep", name="mlp")
        self.combine_node = ScheduleNode(self._combine, communication, event, free_input=True, name="moe_combine")

    def _dispatch(self, tokens: Tensor, probs: Tensor) -> Tensor:
        self.ours._comm_manager.token_probs = probs
        rows, self.weights = self.ours.token_dispatch(tokens, probs)
        self.apart = self.weights.detach().requires_grad_()
        return rows

    def _dispatch_backward(self, outputs: tuple[Tensor], gradients: tuple[Tensor]) -> Any:
        torch.autograd.backward((*outputs, self.weights), (*gradients, self.apart.grad))
        return gradients

    def _mlp(self, rows: Tensor) -> Tensor:
        self.ours._comm_manager.dispatched_probs = self.apart
        rows, counts, weights = self.ours.dispatch_postprocess(rows, self.apart)
        factors = factors_of(self.case, counts, rows.shape[0]).to(rows.device)
        return self.ours.combine_preprocess(self.case.expert(rows, factors, weights))

    def _combine(self, y: Tensor) -> Tensor:
        return self.ours.combine_postprocess(self.ours.token_combine(y))

    def dispatch(self) -> None:
        with stream_acquire_context(self.compute, self.event):
            self.tokens = self.ours.dispatch_preprocess(self.x, self.of.chosen, self.probs)
        self.rows = self.dispatch_node.forward(tuple(self.tokens))

    def mlp(self) -> None:
        self.y = self.mlp_node.forward(self.rows)

    def combine(self) -> None:
        self.out = self.combine_node.forward(self.y)
        del self.rows, self.y

    def combine_backward(self) -> None:
        self.gradient = self.combine_node.backward(self.of.gradient)
        assert all(sent.grad is None for sent in self.dispatch_node.inputs), "the backward pass went on to the dispatch"

    def mlp_backward(self) -> None:
        self.gradient = self.mlp_node.backward(self.gradient)

    def dispatch_backward(self) -> None:
        gradients = self.dispatch_node.backward(self.gradient)
        with stream_acquire_context(self.compute, self.event):
            torch.autograd.backward(self.tokens, gradients)
