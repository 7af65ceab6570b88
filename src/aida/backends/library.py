"""The shared object beside this file, built from the C sources, behind ctypes.

It needs nothing of Python but a place in the package, so one build serves every Python version. An
installation without it works: the CPU takes the foreach path, and tensors are described in Python.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

#: Columns of the value table, one row per run of the batch.
VALUE_COLUMNS = (
    "lr", "beta1", "beta2", "eps", "l2", "decay", "xi", "projections", "clip_norm", "sign", "skip",
)  # fmt: skip


class Job(ctypes.Structure):
    """One batch as the library reads it: its ``struct job``, field by field."""

    _fields_ = [
        ("tensors", ctypes.c_int64),
        ("elements", ctypes.c_int64),
        ("runs", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("storage", ctypes.c_int64),
        ("level", ctypes.c_int64),
        ("addresses", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("first_chunk", ctypes.c_void_p),
        ("first_tensor", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("finite", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
        ("stage", ctypes.c_void_p),
        ("grad_scale", ctypes.c_double),
        ("squared_norm", ctypes.c_double),
    ]


Phase = Callable[[Job], None]

#: Reads tensors, given by their ids, into arrays of addresses and of hashes of what they are.
Describe = Callable[["array[int]", "array[int]", "array[int]"], bool]

#: The version of DLPack whose declarations _cpu_tensors.h has.
DLPACK_MAJOR = 1


class Library(NamedTuple):
    reduce: Phase
    apply: Phase
    step: Phase  #: both, tensor by tensor
    chunk: int  #: elements whose products are summed up at a time
    levels: int  #: how many instruction sets this processor can choose from; the last is the widest
    path: str


@cache
def library() -> Library | None:
    """The shared object beside this file; None where it was not built or does not load.

    It carries no OpenMP runtime and finds that of torch among the symbols loaded already: two runtimes
    would each start a thread for every core. Where torch brings none, loading fails here and now.
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
        return None  # built from other sources than these
    return Library(
        loaded.aida_reduce, loaded.aida_apply, loaded.aida_step, loaded.aida_chunk(), loaded.aida_levels(), spec.origin
    )


@cache
def describer() -> Describe | None:
    """The function that reads a list of tensors in C; None if it was not built, or torch is older than 2.10."""
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
    read: Any = ctypes.PyDLL(found.path).aida_describe  # with the GIL, which reading a Python object needs
    read.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    read.restype = ctypes.c_int64

    def describe(objects: array[int], addresses: array[int], forms: array[int]) -> bool:
        count = len(objects)
        return bool(read(api, address_of(objects), count, address_of(addresses), address_of(forms)) == count)

    return describe


def address_of(table: array[Any]) -> int:
    return table.buffer_info()[0]
