"""Tensors on devices of the fake driver, which lend and borrow by DLPack as torch's do: each on
a stream of its own.

Copies of the fake driver come as late as CUDA's rules allow. So a test that uses a tensor without
waiting for its stream reads poison.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from fake_driver import CUDA, LENT, NAME, Description, Managed, call, driver, environment, give_back

__all__ = ["LENT", "Device", "OnDevice", "environment"]

CODES = {torch.float32: (2, 32), torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.int32: (0, 32), torch.int64: (0, 64), torch.uint8: (1, 8), torch.bool: (6, 8)}
TYPES = {code: dtype for dtype, code in CODES.items()}


class Device:
    """One device, current in this thread, and a stream on it."""

    def __init__(self, number: int) -> None:
        context = ctypes.c_void_p()
        self.number, self.driver = number, driver()
        call(self.driver.cuDevicePrimaryCtxRetain, ctypes.byref(context), number)
        self.context = context
        self.stream = self.new_stream()

    def new_stream(self) -> int:
        stream = ctypes.c_void_p()
        call(self.driver.cuCtxSetCurrent, self.context)
        call(self.driver.cuStreamCreate, ctypes.byref(stream), 1)
        return stream.value

    def synchronize(self, stream: int | None = None) -> None:
        call(self.driver.cuStreamSynchronize, ctypes.c_void_p(stream or self.stream))

    def stalled(self, stream: int) -> Callable[[], None]:
        """Has a stream wait; gives what lets it go on, in any thread."""
        word = self.tensor(torch.zeros(1, dtype=torch.int32))
        self.synchronize()
        at_least = 0
        call(self.driver.cuStreamWaitValue32_v2, ctypes.c_void_p(stream), ctypes.c_uint64(word.at), ctypes.c_uint32(1), at_least)

        def go_on() -> None:
            call(self.driver.cuCtxSetCurrent, self.context)
            word.write(torch.ones(1, dtype=torch.int32))
            self.synchronize()

        return go_on

    def tensor(self, values: torch.Tensor) -> OnDevice:
        """These values on the device, written by this stream, and not waited for."""
        at = ctypes.c_uint64()
        call(self.driver.cuCtxSetCurrent, self.context)
        call(self.driver.cuMemAlloc_v2, ctypes.byref(at), ctypes.c_size_t(max(values.nbytes, 16)))
        made = OnDevice(self, at.value, tuple(values.shape), values.dtype)
        made.write(values)
        return made

    def captured(self, calls: Callable[[], None]) -> Callable[[], None]:
        """What puts these calls, which go on this stream, on it once more: a graph."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        stream, thread_local = ctypes.c_void_p(self.stream), 1
        call(self.driver.cuStreamBeginCapture_v2, stream, thread_local)
        calls()
        call(self.driver.cuStreamEndCapture, stream, ctypes.byref(graph))
        call(self.driver.cuGraphInstantiateWithFlags, ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        return lambda: call(self.driver.cuGraphLaunch, executable, stream)

    def borrowed(self, lent: Any) -> OnDevice:
        """A tensor of the library's, used on this stream from now on."""
        assert lent.__dlpack_device__() == (CUDA, self.number)
        capsule = lent.__dlpack__(stream=self.stream)
        managed = Managed.from_address(ctypes.pythonapi.PyCapsule_GetPointer(capsule, NAME))
        seen = managed.tensor
        assert (seen.device_type, seen.device_id, seen.lanes) == (CUDA, self.number, 1)
        shape, strides = tuple(seen.shape[: seen.ndim]), tuple(seen.strides[: seen.ndim])
        at = (seen.data or 0) + seen.byte_offset
        return OnDevice(self, at, shape, TYPES[seen.code, seen.bits], strides, capsule)

    def read_sums(self, exchange: Any, out: OnDevice) -> torch.Tensor:
        """What an exchange wrote to a tensor of ours, once its stream has come past."""
        self.synchronize(exchange.stream)
        return out.read()

    def read(self, lent: Any) -> torch.Tensor:
        """What a tensor of the library's holds."""
        return self.borrowed(lent).read()


class OnDevice:
    """A tensor on a device, as a library would have it whose current stream is the device's."""

    def __init__(self, device: Device, at: int, shape: tuple[int, ...], dtype: torch.dtype, strides=None, keep=None) -> None:
        self.device, self.at, self.shape, self.dtype, self.keep = device, at, shape, dtype, keep
        self.strides = strides or torch.empty(shape).stride()

    def write(self, values: torch.Tensor) -> None:
        """Enqueues it."""
        bytes_ = values.contiguous().view(torch.uint8).numpy().tobytes() if values.numel() else b""
        stream = ctypes.c_void_p(self.device.stream)
        if bytes_:
            call(self.device.driver.cuMemcpyHtoDAsync_v2, ctypes.c_uint64(self.at), bytes_, ctypes.c_size_t(len(bytes_)), stream)

    def read(self) -> torch.Tensor:
        """Waits for the stream."""
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        size = torch.empty(0, dtype=self.dtype).element_size()
        extent = 1 + sum((length - 1) * stride for length, stride in zip(self.shape, self.strides))
        into = ctypes.create_string_buffer(extent * size)
        stream = ctypes.c_void_p(self.device.stream)
        call(self.device.driver.cuMemcpyDtoHAsync_v2, into, ctypes.c_uint64(self.at), ctypes.c_size_t(extent * size), stream)
        self.device.synchronize()
        return torch.frombuffer(into, dtype=self.dtype).as_strided(self.shape, self.strides).clone()

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device.number

    def __dlpack__(self, *, stream: int) -> Any:
        """Without versions, as older libraries lend."""
        assert stream not in (0, None), "DLPack's number of the default stream is 1"
        if stream != self.device.stream:
            event = ctypes.c_void_p()
            api = self.device.driver
            call(api.cuCtxSetCurrent, self.device.context)
            call(api.cuEventCreate, ctypes.byref(event), 2)
            call(api.cuEventRecord, event, ctypes.c_void_p(self.device.stream))
            call(api.cuStreamWaitEvent, ctypes.c_void_p(stream), event, 0)
            call(api.cuEventDestroy_v2, event)
        axes = len(self.shape)
        shape, strides = (ctypes.c_int64 * axes)(*self.shape), (ctypes.c_int64 * axes)(*self.strides)
        code, bits = CODES[self.dtype]
        description = Description(self.at, CUDA, self.device.number, axes, code, bits, 1, shape, strides, 0)
        managed = Managed(description, None, ctypes.cast(give_back, ctypes.c_void_p))
        at = ctypes.addressof(managed)
        LENT[at] = (managed, shape, strides, self)
        return ctypes.pythonapi.PyCapsule_New(at, NAME, None)
