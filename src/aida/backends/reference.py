"""Algorithm 1 as the paper writes it, one tensor at a time. The other paths are tested against this one.

If several ranks share a layer, no rank has the vectors that the projections need. The residual then comes from the
inner products over all ranks, as on the other paths.

It is also the differentiable path: all operations are out of place and the results are written back at
the end, so that autograd can follow a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from aida._step.hyper import Hyper
from aida.backends import Batch, scalar_dtype
from aida.rule import (
    Gram,
    clip_coefficient,
    is_usable,
    mutual_projections,
    rescaled_products,
    residual_coefficients,
)


class _Reduced(NamedTuple):
    squared_norm: Tensor | None
    sums: Tensor  #: empty without an exchange
    finite: Tensor

    def nonfinite(self) -> list[int]:
        return [i for i, ok in enumerate(self.finite.tolist()) if not ok]


class Reference:
    def reduce(self, batch: Batch) -> _Reduced:
        usable: list[Tensor] = []
        sums: list[Tensor] = []
        total: Tensor | None = None
        for hyper, where in batch.slices():
            clips = hyper.clip_norm is not None
            for grad, exp_avg, param in zip(
                batch.grads[where], batch.exp_avgs[where], batch.params[where], strict=True
            ):
                precise = scalar_dtype(grad.device)
                g = true_gradient(grad.to(precise), batch)
                if not clips:
                    g = _with_l2(-g if hyper.maximize else g, param.to(precise), hyper)
                squared = g.square().sum()
                finite = is_usable(squared, exp_avg.dtype, clips)
                usable.append(finite)
                if batch.exchange is not None:
                    sums.append(_gram(exp_avg.to(precise), grad.to(precise) if clips else g, param.to(precise)))
                elif clips:
                    if hyper.nonfinite == "skip":
                        squared = torch.where(finite, squared, torch.zeros_like(squared))
                    total = squared if total is None else total + squared
        return _Reduced(total, torch.stack(sums) if sums else torch.empty(0), torch.stack(usable))

    def apply(self, batch: Batch, reduced: _Reduced, squared_norm: Tensor | None) -> None:
        for hyper, where in batch.slices():
            for i in range(where.start, where.stop):
                _apply_one(batch, i, hyper, reduced, squared_norm)


def _gram(m: Tensor, g: Tensor, p: Tensor) -> Tensor:
    """The fields of :class:`Gram`."""
    return torch.stack([(x * y).sum() for x, y in ((m, m), (m, g), (g, g), (m, p), (g, p), (p, p))])


def _apply_one(batch: Batch, i: int, hyper: Hyper, reduced: _Reduced, squared_norm: Tensor | None) -> None:
    finite = reduced.finite[i]
    param, exp_avg, exp_avg_var = batch.params[i], batch.exp_avgs[i], batch.exp_avg_vars[i]
    step = batch.steps[i] + 1
    # the state of low-precision parameters is float32: compute in float32, round once at the end
    theta = _before(param).to(exp_avg.dtype)

    g = true_gradient(batch.grads[i].to(exp_avg.dtype), batch)
    clip = None
    if hyper.clip_norm is not None and squared_norm is not None:
        clip = clip_coefficient(squared_norm, hyper.clip_norm)
        g = g * clip.to(g.dtype)
    if hyper.maximize:
        g = -g
    g = _with_l2(g, theta, hyper)

    # moments
    m = hyper.beta1 * _before(exp_avg) + (1 - hyper.beta1) * g

    # projections
    precise = scalar_dtype(m.device)
    if batch.exchange is None:
        projected_m, projected_g = mutual_projections(m.to(precise), g.to(precise), hyper.projections, hyper.xi)
        residual = (projected_m - projected_g).to(m.dtype)
    else:
        a, b = _shared_coefficients(Gram(*reduced.sums[i]), batch, hyper, clip)
        residual = (a * m.to(precise) + b * g.to(precise)).to(m.dtype)

    # variance; eps is added to the stored variance at every step: docs/numerics.md
    v = hyper.beta2 * _before(exp_avg_var) + (1 - hyper.beta2) * residual**2 + hyper.eps

    # parameters
    t = step.to(scalar_dtype(step.device))
    m_hat = m / (1 - hyper.beta1**t).to(m.dtype)
    v_hat = v / (1 - hyper.beta2**t).to(v.dtype)
    if hyper.decay != 0:
        theta = theta * (1 - hyper.rate * hyper.decay)
    theta = theta - hyper.rate * m_hat / v_hat.sqrt()

    update = batch.may_change(finite, hyper)
    _write(param, theta, update)
    _write(exp_avg, m, update)
    _write(exp_avg_var, v, update)
    _write(batch.steps[i], step, update)
    if hyper.nonfinite == "skip":
        batch.skipped[i].add_(batch.counts_as_skipped(finite))


def _shared_coefficients(gram: Gram, batch: Batch, hyper: Hyper, clip: Tensor | None) -> tuple[Tensor, Tensor]:
    """Coefficients of the residual from inner products over all ranks: of the raw gradient if the group clips."""
    scale, l2 = torch.ones_like(gram.gg), 0.0
    if clip is not None:
        scale, l2 = true_gradient(hyper.sign * clip.to(gram.gg), batch), hyper.l2
    products = rescaled_products(gram, scale, hyper.beta1, l2)
    return residual_coefficients(products.dot, products.mm, products.gg, hyper.projections, hyper.xi)


def true_gradient(grad: Tensor, batch: Batch) -> Tensor:
    """The gradient without the loss scale of mixed-precision training."""
    return grad if batch.grad_scale is None else grad / batch.grad_scale


def _with_l2(grad: Tensor, theta: Tensor, hyper: Hyper) -> Tensor:
    return grad if hyper.l2 == 0 else grad + hyper.l2 * theta


def _before(tensor: Tensor) -> Tensor:
    """A copy if autograd is recording, so that writing the result back does not change a saved value."""
    return tensor.clone() if torch.is_grad_enabled() else tensor


def _write(target: Tensor, value: Tensor, allowed: Tensor | None) -> None:
    # selected on the device: a branch on the host would synchronize at every tensor
    target.copy_(value if allowed is None else torch.where(allowed, value.to(target.dtype), target))
