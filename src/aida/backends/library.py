"""The C library, loaded by ctypes.

It does not use Python's C API, so one build serves every Python version. An installation works without it:
the CPU then takes the foreach path, and tensors are described in Python.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from aida.backends.columns import VALUE_COLUMNS


class Job(ctypes.Structure):
    """A batch as the library reads it: ``struct job`` of ``_cpu_job.h``, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tensors", "elements", "runs", "threads")),
        *((name, ctypes.c_int64) for name in ("storage", "state", "rounding", "level")),
        *((name, ctypes.c_void_p) for name in ("addresses", "sizes", "first_chunk", "first_tensor", "streams")),
        *((name, ctypes.c_void_p) for name in ("values", "partial", "sums", "finite", "owner", "stage")),
        *((name, ctypes.c_double) for name in ("grad_scale", "squared_norm")),
    ]


Phase = Callable[[Job], None]

#: Takes the ids of tensors; writes their addresses and a hash of each tensor's device, dtype, shape and strides.
Describe = Callable[["array[int]", "array[int]", "array[int]"], bool]

#: The DLPack version that _cpu_tensors.h declares.
DLPACK_MAJOR = 1


class Library(NamedTuple):
    reduce: Phase
    apply: Phase
    step: Phase  #: both phases, tensor by tensor
    chunk: int  #: elements per partial sum
    levels: int  #: number of instruction sets that this processor supports; the last is the widest
    path: str


@cache
def library() -> Library | None:
    """The shared object beside this file, or None if it was not built or does not load.

    It links no OpenMP runtime and uses torch's: two runtimes would each start a thread per core. If torch
    has none, loading fails here.
    """
    spec = find_spec("aida.backends._cpu")
    if spec is None or spec.origin is None:
        return None
    try:
        loaded = ctypes.CDLL(spec.origin)
        for number in (loaded.aida_chunk, loaded.aida_levels, loaded.aida_job_bytes, loaded.aida_value_columns):
            number.argtypes, number.restype = (), ctypes.c_int64
        for phase in (loaded.aida_reduce, loaded.aida_apply, loaded.aida_step):
            phase.argtypes, phase.restype = (ctypes.POINTER(Job),), None
    except (OSError, AttributeError):
        return None
    if loaded.aida_job_bytes() != ctypes.sizeof(Job) or loaded.aida_value_columns() != len(VALUE_COLUMNS):
        return None  # built from another version of the sources
    return Library(
        loaded.aida_reduce, loaded.aida_apply, loaded.aida_step, loaded.aida_chunk(), loaded.aida_levels(), spec.origin
    )


@cache
def describer() -> Describe | None:
    """The C function that describes tensors; None if it was not built or torch is older than 2.10."""
    found = library()
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if found is None or capsule is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
    try:
        api = pointer(capsule, b"dlpack_exchange_api")
    except (ValueError, TypeError, ctypes.ArgumentError):
        return None
    if ctypes.cast(api, ctypes.POINTER(ctypes.c_uint32))[0] != DLPACK_MAJOR:
        return None
    read: Any = ctypes.PyDLL(found.path).aida_describe  # PyDLL holds the GIL, which reading Python objects needs
    read.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    read.restype = ctypes.c_int64

    def describe(objects: array[int], addresses: array[int], forms: array[int]) -> bool:
        count = len(objects)
        return bool(read(api, address_of(objects), count, address_of(addresses), address_of(forms)) == count)

    return describe


def address_of(table: array[Any]) -> int:
    return table.buffer_info()[0]
