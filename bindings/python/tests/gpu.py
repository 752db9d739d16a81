"""Where checks of CUDA tensors run: a GPU, if torch sees one, else devices of the fake driver.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

STANDS = "SIDELANE_FAKE_CUDA_KERNELS" in os.environ


def gpu(rank: int) -> AbstractContextManager[Any]:
    """Within it this rank's tensors of ``device="cuda"`` are on a device: its own, or one that it
    shares.
    """
    if not STANDS:
        return torch.cuda.device(rank % torch.cuda.device_count())
    from cuda_tensors import standing
    from devices import Device

    return standing(Device(rank % int(os.environ.get("SIDELANE_TEST_GPUS", "64"))))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever of torch's would have the host wait for the device raises."""
    if STANDS:
        from cuda_tensors import no_waiting as on_stands

        with on_stands():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def copy_late(into: torch.Tensor, tensor: torch.Tensor) -> None:
    """A copy on the current stream. That of a fake comes when somebody asks for it, as one on a
    GPU may.
    """
    if STANDS:
        from cuda_tensors import copy_on_the_stream

        copy_on_the_stream(into, tensor)
    else:
        into.copy_(tensor)
