"""A small stand-in for Schedule-Free: it trains one set of weights and is evaluated with their running average."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer


class Averaging(Optimizer):
    """SGD with an average of its weights, which :meth:`eval` puts into the model and :meth:`train` takes out again."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "mode": "new"})

    @property
    def mode(self) -> str:
        return str(self.param_groups[0]["mode"])

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        assert self.mode == "train", "a step needs the weights that train"
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                p.sub_(p.grad, alpha=group["lr"])
                state["count"] = state.get("count", 0) + 1
                state.setdefault("other", torch.zeros_like(p)).lerp_(p, 1 / state["count"])

    def train(self) -> None:
        self._change("train")

    def eval(self) -> None:
        self._change("eval")

    @torch.no_grad()
    def _change(self, mode: str) -> None:
        for group in self.param_groups:
            before, group["mode"] = group["mode"], mode
            for p in group["params"] if {before, mode} == {"train", "eval"} else ():
                if self.state[p]:
                    kept = p.clone()
                    p.copy_(self.state[p]["other"])
                    self.state[p]["other"] = kept
