"""Launching a Triton kernel again without Triton's look-up.

Every ordinary launch binds, inspects and hashes all arguments to find the compiled kernel: tens of
microseconds, several times what the launch itself costs, and a step makes only a few. A kernel that
is launched again with the very same arguments is launched directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Launch:
    """One kernel with its arguments, to be launched many times; pointers are the addresses at the first."""

    def __init__(self, kernel: Any, programs: int, args: tuple[Any, ...], **options: Any) -> None:
        self._ordinary: Callable[[], Any] = lambda: kernel[(programs,)](*args, **options)
        self._programs = programs
        self._args = args
        self._direct: Callable[[], None] | None = None
        self._may_be_direct = True

    def __call__(self) -> None:
        if self._direct is None:
            compiled = self._ordinary()
            # Triton's interpreter compiles nothing
            if self._may_be_direct and hasattr(compiled, "packed_metadata"):
                self._direct = _bind(compiled, self._programs, self._args)
            return
        try:
            self._direct()
        except TypeError:  # a Triton that wants its arguments in another form
            self._direct, self._may_be_direct = None, False
            self._ordinary()


def _bind(compiled: Any, programs: int, args: tuple[Any, ...]) -> Callable[[], None]:
    # addresses instead of tensors: the launcher then does not ask the driver about each of them
    plain = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
    device = next(arg.device.index for arg in args if isinstance(arg, Tensor))
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

    def direct() -> None:
        run(programs, 1, 1, current_stream(device), function, metadata, None, None, None, *plain)

    return direct
