"""Repeated launches of Triton kernels without Triton's look-up.

An ordinary launch binds, inspects and hashes all arguments to find the compiled kernel. That takes tens of
microseconds, several times as long as the launch itself. A kernel that is launched again with the same
arguments is launched directly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Launch:
    """A kernel with its arguments, to be launched many times. The addresses are those of the first launch."""

    def __init__(self, kernel: Any, programs: int, args: tuple[Any, ...], **options: Any) -> None:
        self._ordinary: Callable[[], Any] = lambda: kernel[(programs,)](*args, **options)
        self._programs = programs
        self._args = args
        self._direct: Callable[[], None] | None = None
        self._may_be_direct = True

    def __call__(self) -> None:
        if self._direct is None:
            compiled = self._ordinary()
            # false under Triton's interpreter, which compiles nothing
            if self._may_be_direct and hasattr(compiled, "packed_metadata"):
                self._direct = _bind(compiled, self._programs, self._args)
            return
        try:
            self._direct()
        except TypeError:  # this version of Triton passes arguments differently
            self._direct, self._may_be_direct = None, False
            self._ordinary()


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The kernel launches of one step. ``Triton.reduce`` returns it and ``Triton.apply`` takes it."""

    reduce: Launch
    collect: Launch | None  #: None if ``reduce`` also computes the coefficients
    coefficients: Launch | None  #: None if ``reduce`` also computes the coefficients
    apply: Launch | None  #: None if all tensors are empty
    sums: Tensor  #: ``collect`` writes it
    finite: Tensor  #: per tensor, whether its gradient can be used; ``collect`` writes it
    squared: Tensor  #: per tensor, its share of ``squared_norm``; ``collect`` writes it
    norm: Tensor  #: the squared norm over all batches, which ``coefficients`` reads
    squared_norm: Tensor | None  #: ``norm``; None if no run clips or an exchange computes the norm

    def nonfinite(self) -> list[int]:
        return [i for i, ok in enumerate(self.finite.tolist()) if not ok]


def _bind(compiled: Any, programs: int, args: tuple[Any, ...]) -> Callable[[], None]:
    # addresses instead of tensors: for each tensor the launcher would query the driver
    plain = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
    device = next(arg.device.index for arg in args if isinstance(arg, Tensor))
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

    def direct() -> None:
        run(programs, 1, 1, current_stream(device), function, metadata, None, None, None, *plain)

    return direct
