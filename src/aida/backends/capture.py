"""Copying to the device beside a CUDA graph capture, instead of inside the graph.

A graph that copies a table from the host would repeat the copy at every replay. The table of a
captured step never changes, so it is sent once, while the capture is under way, on a stream of its
own. Waiting for that stream, and taking memory for it, is what a capture forbids by default; CUDA
lets a thread say that it knows what it does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

_RELAXED = 2  # cudaStreamCaptureModeRelaxed


@cache
def _exchange_mode() -> Any:
    """cudaThreadExchangeStreamCaptureMode of the CUDA runtime torch has loaded; None where it is not to be found."""
    try:
        return ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode
    except (AttributeError, OSError):
        return None


@contextmanager
def beside_capture(streams: Sequence[torch.cuda.Stream]) -> Iterator[torch.cuda.Stream | None]:
    """Work that happens now, not in the graph: on one of ``streams``; None where that cannot be."""
    exchange = _exchange_mode()
    # torch hands streams out of a small pool, so one of them may be the very stream that is captured
    stream = next((stream for stream in streams if not _is_capturing(stream)), None)
    if exchange is None or stream is None:
        yield None
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # mode now holds what it was
    try:
        with torch.cuda.stream(stream):
            yield stream
    finally:
        exchange(ctypes.byref(mode))


def send_during_capture(host: Tensor, device: Tensor, streams: Sequence[torch.cuda.Stream]) -> None:
    """Copy pinned ``host`` to ``device`` now, or, where that cannot be, at every replay of the graph."""
    with beside_capture(streams) as stream:
        device.copy_(host, non_blocking=True)
        if stream is not None:
            stream.synchronize()


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
