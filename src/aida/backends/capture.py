"""Copies to the device during a CUDA graph capture that are not part of the graph.

A graph that copies a table from the host repeats the copy at every replay. The table of a captured step
never changes, so it is sent once, during the capture, on another stream. By default a capture forbids
synchronizing with that stream and allocating memory for it; CUDA's relaxed capture mode allows both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

NO_EAGER_STEP = (
    "a CUDA graph of Aida's step can be captured only after an eager step with the same parameters and groups, which "
    "creates state and tables: take a step or two before capturing, on a side stream as in torch's notes on CUDA graphs"
)

_RELAXED = 2  # cudaStreamCaptureModeRelaxed


@cache
def _exchange_mode() -> Any:
    """cudaThreadExchangeStreamCaptureMode of the CUDA runtime that torch has loaded, or None if there is none."""
    try:
        return ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode
    except (AttributeError, OSError):
        return None


@contextmanager
def beside_capture(streams: Sequence[torch.cuda.Stream]) -> Iterator[torch.cuda.Stream | None]:
    """Run work now on one of ``streams``, without recording it. Yields the stream, or None if that is impossible."""
    exchange = _exchange_mode()
    # torch takes streams from a small pool, so one of them may be the stream that is captured
    stream = next((stream for stream in streams if not _is_capturing(stream)), None)
    if exchange is None or stream is None:
        yield None
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # mode now holds the previous mode
    try:
        with torch.cuda.stream(stream):
            yield stream
    finally:
        exchange(ctypes.byref(mode))


def send_during_capture(host: Tensor, device: Tensor, streams: Sequence[torch.cuda.Stream]) -> None:
    """Copy pinned ``host`` to ``device`` now or, if that is impossible, at every replay of the graph."""
    with beside_capture(streams) as stream:
        device.copy_(host, non_blocking=True)
        if stream is not None:
            stream.synchronize()


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
