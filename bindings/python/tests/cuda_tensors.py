"""Tensors that stand for torch's CUDA tensors, on devices of the fake driver: torch's own code
runs on them.

Each operation is computed on the host, from what its inputs hold once torch's current stream has
come past, and its results are written to the device on that stream, as late as the fake can. So
whoever uses a result without the stream's leave reads poison, and so does whoever uses a tensor
that is gone: its memory is overwritten on the stream that it was made on. Within :func:`standing`,
``torch.cuda`` and functions with ``device="cuda"`` answer as on a machine with a GPU::

    with standing(Device(0)):
        x = torch.ones(3, device="cuda") * 2
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import ctypes
import torch
from devices import CUDA, Device, OnDevice, call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

META = torch.device("meta")
HOST = torch.device("cpu")
POISON = b"\xfd"
HERE = threading.local()
"""The device, its current stream, and whether the host may wait for it."""

# Operations that take a tensor of the host beside those of a device.
MIXES = {"aten::copy_", "aten::_to_copy", "aten::index.Tensor"}
# Operations for whose result the host waits.
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}


class Stream:
    """A stream, as ``torch.cuda.Stream`` is."""

    def __init__(self, device: Any = None, priority: int = 0, *, of: Device | None = None, handle: int | None = None) -> None:
        self.of = of or HERE.device
        self.cuda_stream = handle or self.of.new_stream()

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.of.number)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        wait_on_the_host("Stream.synchronize")
        self.of.synchronize(self.cuda_stream)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


class Event:
    """An event, as ``torch.cuda.Event`` is."""

    def __init__(self, *_: object, **__: object) -> None:
        self.of, event = HERE.device, ctypes.c_void_p()
        enter(self.of)
        call(self.of.driver.cuEventCreate, ctypes.byref(event), 2)
        self.event = event

    def record(self, stream: Stream | None = None) -> None:
        enter(self.of)
        call(self.of.driver.cuEventRecord, self.event, ctypes.c_void_p((stream or HERE.stream).cuda_stream))

    def wait(self, stream: Stream | None = None) -> None:
        enter(self.of)
        call(self.of.driver.cuStreamWaitEvent, ctypes.c_void_p((stream or HERE.stream).cuda_stream), self.event, 0)

    def synchronize(self) -> None:
        wait_on_the_host("Event.synchronize")
        call(self.of.driver.cuEventSynchronize, self.event)


def enter(device: Device) -> None:
    call(device.driver.cuCtxSetCurrent, device.context)


def wait_on_the_host(what: str) -> None:
    if getattr(HERE, "may_not_wait", False):
        raise AssertionError(f"the host waits for the device: {what}")


class Memory:
    """Bytes of a device: made for the current stream, or lent by another library as long as `keep`
    lives.
    """

    free: dict[tuple[int, int, int], list[int]] = defaultdict(list)

    def __init__(self, device: Device, size: int, lent: tuple[int, Any] | None = None) -> None:
        self.device, self.size, self.stream = device, size, HERE.stream.cuda_stream
        self.keep = lent and lent[1]
        if lent is not None:
            self.at = lent[0]
            return
        found = Memory.free[self.key]
        if found:
            self.at = found.pop()
            return
        at = ctypes.c_uint64()
        enter(device)
        call(device.driver.cuMemAlloc_v2, ctypes.byref(at), ctypes.c_size_t(max(size, 16)))
        self.at = at.value

    @property
    def key(self) -> tuple[int, int, int]:
        return self.device.number, self.stream, self.size

    def __del__(self) -> None:
        # As torch's allocator: the next to use the stream may have it at once.
        if self.keep is None and getattr(self, "at", 0):
            self.write(POISON * self.size, 0, self.stream)
            Memory.free[self.key].append(self.at)

    def write(self, data: bytes, offset: int, stream: int) -> None:
        if data:
            at, size = ctypes.c_uint64(self.at + offset), ctypes.c_size_t(len(data))
            enter(self.device)
            call(self.device.driver.cuMemcpyHtoDAsync_v2, at, data, size, ctypes.c_void_p(stream))

    def read(self) -> torch.Tensor:
        """Its bytes once the current stream has come past."""
        data = torch.empty(self.size, dtype=torch.uint8)
        if self.size:
            at, into = ctypes.c_uint64(self.at), ctypes.c_void_p(data.data_ptr())
            stream = HERE.stream.cuda_stream
            enter(self.device)
            call(self.device.driver.cuMemcpyDtoHAsync_v2, into, at, ctypes.c_size_t(self.size), ctypes.c_void_p(stream))
            self.device.synchronize(stream)
        return data


class CudaTensor(torch.Tensor):
    """A tensor whose elements lie in memory of a device. To torch's C++ code it is one without
    memory.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    memory: Memory

    @staticmethod
    def __new__(cls, memory: Memory, like: torch.Tensor) -> CudaTensor:
        size, strides, offset = like.size(), like.stride(), like.storage_offset()
        made = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=strides, storage_offset=offset, dtype=like.dtype, device=META
        )
        made.memory = memory
        return made

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.memory.device.number)

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_meta(self) -> bool:
        return False

    def get_device(self) -> int:
        return self.memory.device.number

    def data_ptr(self) -> int:
        return self.memory.at + self.storage_offset() * self.element_size()

    def record_stream(self, stream: Stream) -> None:
        """Nothing: memory goes back to its own stream, whoever has said what."""

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.memory.device.number

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        lender = Device.__new__(Device)
        lender.__dict__ |= self.memory.device.__dict__ | {"stream": HERE.stream.cuda_stream}
        kept = OnDevice(lender, self.data_ptr(), tuple(self.shape), self.dtype, self.stride(), self.memory)
        return kept.__dlpack__(stream=stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        flat, spec = tree_flatten((args, kwargs))
        ours = [one for one in flat if isinstance(one, CudaTensor)]
        theirs = [one for one in flat if isinstance(one, torch.Tensor) and not isinstance(one, CudaTensor)]
        if any(one.dim() for one in theirs) and not {name, f"{name}.{func._overloadname}"} & MIXES:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got some of cuda and some of cpu")
        to_host = kwargs.get("device") == HOST or (name == "aten::copy_" and not isinstance(args[0], CudaTensor))
        by_mask = name == "aten::index" and any(one.dtype == torch.bool for one in ours[1:])
        if to_host or by_mask or name in WAITS:
            wait_on_the_host(name)
        if func.is_view:
            return views(func, flat, spec)
        held = {id(one.memory): (one.memory, one.memory.read()) for one in ours}

        def on_host(one: Any) -> Any:
            if isinstance(one, CudaTensor):
                storage = held[id(one.memory)][1].untyped_storage()
                empty = torch.empty(0, dtype=one.dtype)
                return empty.set_(storage, one.storage_offset(), one.size(), one.stride())
            return HOST if one == META else one

        brought = [on_host(one) for one in flat]
        args_there, kwargs_there = tree_unflatten(brought, spec)
        made = func(*args_there, **kwargs_there)
        for one in written(func, args, kwargs):
            if isinstance(one, CudaTensor):
                write_back(one, held[id(one.memory)][1])
        of_storage = {data.untyped_storage().data_ptr(): memory for memory, data in held.values() if memory.size}
        same = {id(there): here for there, here in zip(brought, flat) if isinstance(there, torch.Tensor)}

        def give(one: Any) -> Any:
            if not isinstance(one, torch.Tensor):
                return one
            if id(one) in same:
                return same[id(one)]
            memory = of_storage.get(one.untyped_storage().data_ptr())
            if memory is not None:
                return CudaTensor(memory, one)
            return one if to_host else upload(one)

        return tree_map(give, made)


def views(func: Any, flat: list[Any], spec: Any) -> Any:
    """A view moves nothing, and waits for nothing."""
    base = next(one for one in flat if isinstance(one, CudaTensor))

    def without_memory(one: Any) -> Any:
        if isinstance(one, CudaTensor):
            storage = torch.empty(one.memory.size, dtype=torch.uint8, device=META).untyped_storage()
            empty = torch.empty(0, dtype=one.dtype, device=META)
            return empty.set_(storage, one.storage_offset(), one.size(), one.stride())
        return one

    args, kwargs = tree_unflatten([without_memory(one) for one in flat], spec)
    made = func(*args, **kwargs)
    return tree_map(lambda one: CudaTensor(base.memory, one) if isinstance(one, torch.Tensor) else one, made)


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an operation writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from given if isinstance(given, (list, tuple)) else [given]


def write_back(tensor: CudaTensor, data: torch.Tensor) -> None:
    """Puts the bytes of a tensor that was written to on their way, and none beside them."""
    if not tensor.numel():
        return
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    last = first + size * (1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride())))
    tensor.memory.write(data[first:last].numpy().tobytes(), first, HERE.stream.cuda_stream)


def upload(tensor: torch.Tensor) -> CudaTensor:
    """A copy on the device, on its way on the current stream."""
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    storage = tensor.untyped_storage()
    memory = Memory(HERE.device, storage.nbytes())
    raw = torch.empty(0, dtype=torch.uint8).set_(storage)
    memory.write(raw.numpy().tobytes(), 0, HERE.stream.cuda_stream)
    return CudaTensor(memory, tensor)


def copy_on_the_stream(into: CudaTensor, tensor: CudaTensor) -> None:
    """A copy that the device makes, not this process on the way."""
    to, at, size = ctypes.c_uint64(into.data_ptr()), ctypes.c_uint64(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    enter(into.memory.device)
    call(into.memory.device.driver.cuMemcpyDtoDAsync_v2, to, at, size, ctypes.c_void_p(HERE.stream.cuda_stream))


def is_cuda(device: Any) -> bool:
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    return device is not None and torch.device(device).type == "cuda"


class OnCuda(TorchFunctionMode):
    """Functions that are asked for a tensor on a device of CUDA make one that stands for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.data.__set__ and isinstance(args[1], CudaTensor):
            args[0].memory = args[1].memory
        if func is torch.Tensor.cuda:
            return args[0] if isinstance(args[0], CudaTensor) else moved(args[0], {})
        if func is torch.Tensor.to:
            places = [one for one in args[1:] if isinstance(one, (str, torch.device))] + [kwargs.get("device")]
            if any(is_cuda(place) for place in places):
                rest = [one for one in args[1:] if not isinstance(one, (str, torch.device))]
                kwargs.pop("device", None)
                there = moved(args[0], kwargs)
                return torch.Tensor.to(there, *rest) if rest else there
        elif func in (torch.Tensor.__setitem__, torch.where):
            args = with_tensors(args, (2,) if func is torch.Tensor.__setitem__ else (1, 2))
        elif is_cuda(kwargs.get("device")):
            return upload_of(func, args, kwargs)
        return func(*args, **kwargs)


def with_tensors(args: tuple[Any, ...], places: tuple[int, ...]) -> tuple[Any, ...]:
    """Numbers among these as tensors. torch would make them where its C++ code sees their
    neighbors: without memory.
    """
    ours = [one for one in (args[0], *args[1:]) if isinstance(one, CudaTensor)]
    if not ours:
        return args
    dtype = next((one.dtype for one in reversed(ours) if one.dtype != torch.bool), ours[0].dtype)
    number = lambda place, one: place in places and isinstance(one, (bool, int, float))  # noqa: E731
    return tuple(upload(torch.tensor(one, dtype=dtype)) if number(at, one) else one for at, one in enumerate(args))


def moved(tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    kwargs.pop("non_blocking", None)
    there = tensor if isinstance(tensor, CudaTensor) else _Moved.apply(tensor)
    return torch.Tensor.to(there, **kwargs) if kwargs else there


class _Moved(torch.autograd.Function):
    """A copy on the device, whose gradient comes back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return upload(tensor.detach())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.cpu()


def upload_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    wanted = kwargs.pop("requires_grad", False)
    there = [one for one in args if isinstance(one, CudaTensor)]
    if there:
        del kwargs["device"]
        made = func(*args, **kwargs)
    else:
        made = upload(func(*args, **kwargs | {"device": "cpu"}))
    return made.requires_grad_() if wanted else made


def from_dlpack(lent: Any) -> torch.Tensor:
    """As torch's, for the current stream."""
    borrower = Device.__new__(Device)
    borrower.__dict__ |= HERE.device.__dict__ | {"stream": HERE.stream.cuda_stream}
    there = borrower.borrowed(lent)
    extent = 1 + sum((length - 1) * stride for length, stride in zip(there.shape, there.strides))
    like = torch.empty_strided(there.shape, there.strides, dtype=there.dtype, device=META)
    size = 0 if 0 in there.shape else extent * like.element_size()
    return CudaTensor(Memory(HERE.device, size, (there.at, there.keep)), like)


@contextmanager
def current(stream: Stream | None) -> Iterator[None]:
    """As ``torch.cuda.stream``."""
    before = HERE.stream
    HERE.stream = stream or before
    try:
        yield
    finally:
        HERE.stream = before


@contextmanager
def standing(device: Device) -> Iterator[None]:
    """Within it this thread has a GPU."""
    own, run, mode = torch.from_dlpack, torch.autograd._engine_run_backward, OnCuda()

    def backward(*arguments: Any, **named: Any) -> Any:
        """What backward passes call is seen by the mode, which is not there within a function that
        it has seen.
        """
        with mode:
            return run(*arguments, **named)

    def lent(tensor: Any, **named: Any) -> torch.Tensor:
        return from_dlpack(tensor) if tensor.__dlpack_device__()[0] == CUDA else own(tensor, **named)

    HERE.device, HERE.stream = device, Stream(of=device, handle=device.stream)
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "current_device": lambda: device.number,
        "current_stream": lambda _=None: HERE.stream,
        "stream": current,
        "Stream": Stream,
        "Event": Event,
        "synchronize": lambda _=None: HERE.stream.synchronize(),
    }
    with (
        mock.patch.multiple(torch.cuda, **answers),
        mock.patch.object(torch, "from_dlpack", lent),
        mock.patch.object(torch.autograd, "_engine_run_backward", backward),
        mode,
    ):
        yield


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever would have the host wait for a device raises, but for calls of the library."""
    HERE.may_not_wait = True
    try:
        yield
    finally:
        HERE.may_not_wait = False
