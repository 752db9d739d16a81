"""Choices as a map, [tokens, experts], that says of each expert whether a token has chosen it."""

from __future__ import annotations

import torch
from torch import Tensor


def chosen_ids(routing_map: Tensor, most: int) -> Tensor:
    """The experts of each token, [tokens, most], by ascending number, then -1; the host waits for
    no value.

    A token of more experts gets a number that no expert has, which a dispatch refuses on all ranks.
    """
    experts = routing_map.shape[1]
    numbers = torch.arange(experts, device=routing_map.device).expand_as(routing_map)
    ids = torch.where(routing_map, numbers, experts).sort(dim=1).values[:, :most]
    too_many = routing_map.sum(dim=1, keepdim=True) > most
    return torch.where(too_many, experts, torch.where(ids == experts, -1, ids))
