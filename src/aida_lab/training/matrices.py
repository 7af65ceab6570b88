"""An optimizer for matrices only, such as torch's Muon, with AdamW for all other parameters.

This is how Muon is used: it updates matrices, and AdamW updates biases, norms and convolutions. Both have the same
learning rate: Muon's steps are scaled to the size of AdamW's unless ``adjust_lr_fn`` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer


def takes_matrices_alone(kind: type[Optimizer]) -> bool:
    return kind is getattr(torch.optim, "Muon", None)


class MatricesAndRest(Optimizer):
    """Two optimizers as one; its groups are theirs."""

    def __init__(self, kind: Callable[..., Optimizer], params: Iterable[Tensor], **hyper: Any) -> None:
        params = list(params)
        matrices, rest = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
        if not matrices:
            raise ValueError("this optimizer updates matrices only, and none of the parameters is one; choose another")
        super().__init__(params, {})
        first = kind(matrices, **{"adjust_lr_fn": "match_rms_adamw", **hyper})
        group = first.param_groups[0]
        self._parts = [first]
        if rest:
            self._parts.append(AdamW(rest, lr=group["lr"], weight_decay=group["weight_decay"]))
        self._join()

    def _join(self) -> None:
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._join()  # loading replaces the groups of each part
