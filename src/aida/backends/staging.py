"""Asynchronous copies of small tables to a CUDA device."""

from __future__ import annotations

import ctypes
from array import array
from collections import deque

import torch
from torch import Tensor


class StagingBuffers:
    """Pinned host buffers. Each one is reused only after the device has read it."""

    def __init__(self) -> None:
        self._sent: dict[int, deque[tuple[Tensor, torch.cuda.Event]]] = {}  # by length, oldest first

    def send(self, words: array[int], target: Tensor) -> None:
        """Copy ``words`` to the device tensor ``target`` on its current stream, without synchronizing."""
        sent = self._sent.setdefault(len(words), deque())
        if sent and sent[0][1].query():
            pinned, event = sent.popleft()
        else:
            pinned = torch.empty(len(words), dtype=torch.int64, device="cpu", pin_memory=True)
            event = torch.cuda.Event()
        ctypes.memmove(pinned.data_ptr(), words.buffer_info()[0], len(words) * words.itemsize)
        target.copy_(pinned, non_blocking=True)
        event.record()
        sent.append((pinned, event))
