"""Sending small tables to a CUDA device without waiting for it."""

from __future__ import annotations

import ctypes
from array import array
from collections import deque

import torch
from torch import Tensor


class StagingBuffers:
    """Pinned buffers in turn: one is written again only after the device has read what it held."""

    def __init__(self) -> None:
        self._sent: dict[int, deque[tuple[Tensor, torch.cuda.Event]]] = {}  # by length, the oldest first

    def send(self, words: array[int], target: Tensor) -> None:
        """Copy ``words`` into the device tensor ``target``, in the order of its current stream."""
        sent = self._sent.setdefault(len(words), deque())
        if sent and sent[0][1].query():
            pinned, event = sent.popleft()
        else:
            pinned, event = _pinned(len(words)), torch.cuda.Event()
        ctypes.memmove(pinned.data_ptr(), words.buffer_info()[0], len(words) * words.itemsize)
        target.copy_(pinned, non_blocking=True)
        event.record()
        sent.append((pinned, event))


def _pinned(words: int) -> Tensor:
    return torch.empty(words, dtype=torch.int64, device="cpu", pin_memory=True)
