"""The fake driver as tests of Python call it, and tensors of DLPack by hand: without torch."""

from __future__ import annotations

import ctypes
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
CUDA = 2


@cache
def environment() -> dict[str, str]:
    """What ranks need to have devices; built by cargo."""
    command = ["cargo", "run", "--quiet", "--profile", "test", "--package", "fake-cuda", "--", "cuda/all_modules.cu"]
    try:
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        assert "SIDELANE_NEED_DEVICES" not in os.environ, (error, getattr(error, "stderr", ""))
        pytest.skip(f"no fake driver: {error}")
    found = dict(line.split("=", 1) for line in said.stdout.splitlines())
    # A rank that runs already takes no folder for its loader, and would find the cuBLAS of torch.
    return found | {"SIDELANE_CUBLAS_LIBRARY": f"{found['LD_LIBRARY_PATH']}/libcublas.so.12"}


class Description(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Description), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


NAME = ctypes.c_char_p(b"dltensor")
ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
ctypes.pythonapi.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
ctypes.pythonapi.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]

LENT: dict[int, Any] = {}
"""What is lent and not given back, by the address of its description."""


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def give_back(at: int) -> None:
    LENT.pop(at)


@cache
def driver() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ["SIDELANE_CUDA_LIBRARY"])
    call(library.cuInit, 0)
    return library


def call(function: Any, *args: Any) -> None:
    code = function(*args)
    assert code == 0, (function.__name__, code)
