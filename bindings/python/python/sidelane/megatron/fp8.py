"""Tokens in fp8 that come as a pair, values [tokens, hidden] and scales [tokens, hidden / 128], and
cross as one record.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._native import ExpertParallel


def pack(ep: ExpertParallel, values: Tensor, scales: Tensor) -> Tensor:
    """Records, [tokens, bytes]."""
    hidden, offset, blocks, width = _shape(ep)
    records = torch.zeros(values.shape[0], width, dtype=torch.uint8, device=values.device)
    records[:, :hidden] = values.detach().contiguous().view(torch.uint8)
    records[:, offset : offset + 4 * blocks] = scales.detach().float().contiguous().view(torch.uint8)
    return records


def unpack(ep: ExpertParallel, records: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values of this type and scales, in memory of torch."""
    hidden, offset, blocks, _ = _shape(ep)
    values = records[:, :hidden].clone(memory_format=torch.contiguous_format).view(dtype)
    scales = records[:, offset : offset + 4 * blocks].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return values, scales


def _shape(ep: ExpertParallel) -> tuple[int, int, int, int]:
    if ep.record is None:
        raise ValueError("this layer does not send fp8")
    return ep.record
