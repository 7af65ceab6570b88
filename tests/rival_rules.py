"""The rivals' update rules in float64 NumPy, one whole run a function: the judge of ``aida.baselines``.

Written from the rules as published and kept free of the package and of torch. Every function takes the
weights and the gradients of all steps and yields the weights after each step; no gradient means that
the step passes the tensor by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Run = Iterator[Vector]
Rule = Callable[..., Run]


def decayed(theta: Vector, g: Vector, lr: float, weight_decay: float, decoupled: bool) -> tuple[Vector, Vector]:
    """Weights and gradient after weight decay: the weights shrunk, or the gradient of an L2 penalty added."""
    return (theta - lr * weight_decay * theta, g) if decoupled else (theta, g + weight_decay * theta)


def adabelief(
    theta: Vector, grads: Iterable[Vector | None], *, lr: float, betas: tuple[float, float], eps: float,
    weight_decay: float = 0.0, decoupled_weight_decay: bool = False, eps_in_variance: bool = True,
) -> Run:  # fmt: skip
    m = s = np.zeros_like(theta)
    t = 0
    for grad in grads:
        if grad is not None:
            t += 1
            theta, g = decayed(theta, grad, lr, weight_decay, decoupled_weight_decay)
            m = betas[0] * m + (1 - betas[0]) * g
            s = betas[1] * s + (1 - betas[1]) * (g - m) ** 2 + (eps if eps_in_variance else 0.0)
            m_hat, s_hat = m / (1 - betas[0] ** t), s / (1 - betas[1] ** t)
            theta = theta - lr * m_hat / (np.sqrt(s_hat) + eps)
        yield theta


def adabelief_star(theta: Vector, grads: Iterable[Vector | None], **values: float) -> Run:
    return adabelief(theta, grads, eps_in_variance=False, **values)  # type: ignore[arg-type]


def adam_plus(
    theta: Vector, grads: Iterable[Vector | None], *, lr: float, betas: tuple[float, float], eps: float,
    weight_decay: float = 0.0, decoupled_weight_decay: bool = False,
) -> Run:  # fmt: skip
    m = q = np.zeros_like(theta)
    t = 0
    for grad in grads:
        if grad is not None:
            t += 1
            theta, g = decayed(theta, grad, lr, weight_decay, decoupled_weight_decay)
            m = betas[0] * m + (1 - betas[0]) * g
            q = betas[1] * q + (1 - betas[1]) * g**2 + eps
            theta = theta - lr / (np.sqrt(q / (1 - betas[1] ** t)) + eps) * m / (1 - betas[0] ** t)
        yield theta


def radam(
    theta: Vector, grads: Iterable[Vector | None], *, lr: float, betas: tuple[float, float], eps: float,
    weight_decay: float = 0.0, decoupled_weight_decay: bool = True,
) -> Run:  # fmt: skip
    m = v = np.zeros_like(theta)
    n_inf = 2 / (1 - betas[1]) - 1
    t = 0
    for grad in grads:
        if grad is not None:
            t += 1
            theta, g = decayed(theta, grad, lr, weight_decay, decoupled_weight_decay)
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g**2
            bc1, bc2 = 1 - betas[0] ** t, 1 - betas[1] ** t
            n = n_inf - 2 * t * betas[1] ** t / bc2
            if n >= 5:
                r = np.sqrt(bc2 * (n - 4) * (n - 2) * n_inf / ((n_inf - 4) * (n_inf - 2) * n))
                theta = theta - lr * r / bc1 * m / (np.sqrt(v) + eps)
            else:
                theta = theta - lr / bc1 * m
        yield theta


def yogi(
    theta: Vector, grads: Iterable[Vector | None], *, lr: float, betas: tuple[float, float], eps: float,
    weight_decay: float = 0.0, decoupled_weight_decay: bool = False, initial_accumulator: float = 1e-6,
) -> Run:  # fmt: skip
    m = v = np.full_like(theta, initial_accumulator)
    t = 0
    for grad in grads:
        if grad is not None:
            t += 1
            theta, g = decayed(theta, grad, lr, weight_decay, decoupled_weight_decay)
            m = betas[0] * m + (1 - betas[0]) * g
            v = v - (1 - betas[1]) * np.sign(v - g**2) * g**2
            theta = theta - lr / (1 - betas[0] ** t) * m / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
        yield theta


def adabound(
    theta: Vector, grads: Iterable[Vector | None], *, lr: float, betas: tuple[float, float], eps: float,
    weight_decay: float = 0.0, decoupled_weight_decay: bool = False, final_lr: float = 0.1, gamma: float = 1e-3,
    base_lr: float | None = None,
) -> Run:  # fmt: skip
    m = v = np.zeros_like(theta)
    f = final_lr * lr / (base_lr or lr)
    t = 0
    for grad in grads:
        if grad is not None:
            t += 1
            theta, g = decayed(theta, grad, lr, weight_decay, decoupled_weight_decay)
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g**2
            a = lr * np.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t) / (np.sqrt(v) + eps)
            theta = theta - np.clip(a, f * (1 - 1 / (gamma * t + 1)), f * (1 + 1 / (gamma * t))) * m
        yield theta


def msvag(
    theta: Vector, grads: Iterable[Vector | None], *, lr: float, betas: tuple[float, float],
    weight_decay: float = 0.0, decoupled_weight_decay: bool = False, mixed_bias_correction: bool = False,
) -> Run:  # fmt: skip
    beta = betas[0]
    m = v = np.zeros_like(theta)
    t = 0
    for grad in grads:
        if grad is not None:
            t += 1
            theta, g = decayed(theta, grad, lr, weight_decay, decoupled_weight_decay)
            m = beta * m + (1 - beta) * g
            v = beta * v + (1 - beta) * g**2
            m_hat = m / (1 - beta**t)
            v_hat = v / (1 - (betas[1] if mixed_bias_correction else beta) ** t)
            if t == 1:
                factor = np.zeros_like(m) if mixed_bias_correction else np.where(m_hat == 0, 0.0, 1.0)
            else:
                rho = (1 - beta) * (1 + beta**t) / ((1 + beta) * (1 - beta**t))
                s = (v_hat - m_hat**2) / (1 - rho)
                with np.errstate(invalid="ignore"):
                    factor = np.nan_to_num(m_hat**2 / (m_hat**2 + rho * s), nan=0.0)
            theta = theta - lr * factor * m_hat
        yield theta


def fromage(theta: Vector, grads: Iterable[Vector | None], *, lr: float) -> Run:
    for grad in grads:
        if grad is not None:
            p_norm, g_norm = np.sqrt(np.sum(theta**2)), np.sqrt(np.sum(grad**2))
            scale = p_norm / g_norm if p_norm > 0 and g_norm > 0 else 1.0
            theta = (theta - lr * scale * grad) / np.sqrt(1 + lr**2)
        yield theta


#: Rules by the catalog's names. SGD, Adam and AdamW are torch's own and are compared with torch.
RULES: dict[str, Rule] = {
    "adabelief": adabelief,
    "adabelief-star": adabelief_star,
    "adam-plus": adam_plus,
    "radam": radam,
    "yogi": yogi,
    "adabound": adabound,
    "msvag": msvag,
    "fromage": fromage,
}
