"""Theorem 1 term by term: as printed, with a corrected proof, and with the sums measured in a run.

Write x_t = theta_t - theta*, b_t = beta1 * lam**t, eta_t = eta / sqrt(t). One step and convexity give,
without any assumption, for the regret of the averaged iterate (:class:`Terms` called *sums*):

    f(mean theta) - f* <= 1/T * sum_t <g_t, x_{t-1}>
      <= 1/T * sum_t 1/(2 eta_t (1 - b_t)) * (|v_t^1/4 x_{t-1}|^2 - |v_t^1/4 x_t|^2)             distance
       + 1/T * sum_t eta_t/(2 (1 - b_t)) * (|v_t^-1/4 m_t|^2 + b_t |v_t^-1/4 m_{t-1}|^2)          gradients
       + 1/T * sum_t b_t/(2 eta_t (1 - b_t)) * |v_t^1/4 x_{t-1}|^2                                momentum

The paper bounds the first line by its first summand, which its assumptions do not allow: see
:func:`aida_lab.theory.study.refute`. docs/theory.md shows the inequality that points the wrong way, and derives the
corrected bounds of the first line: one without assumption (3) on v (*unconditional*), one with it (*corrected*). Both
are of order 1/sqrt(T). (As printed, (3) requires 0 < c <= v_0, but v_0 = 0, so no run satisfies it. Here (3) is
required from the first step on, c <= v_1.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aida_lab.theory.descent import Trajectory
from aida_lab.theory.problems import Array


@dataclass(frozen=True)
class Terms:
    """An upper bound on the regret, in the theorem's three terms."""

    distance: float  #: distance of the start from the minimiser: the paper's first term
    gradients: float  #: size of the gradients: the second term
    momentum: float  #: cost of the momentum: the third term

    @property
    def total(self) -> float:
        return self.distance + self.gradients + self.momentum


@dataclass(frozen=True)
class Constants:
    """The constants of the assumptions, measured over the first T steps of a run."""

    D: float  #: largest 2-norm of any iterate and of the minimiser: assumption (2)
    X: float  #: largest element of any theta_t - theta*, at most 2 D
    G: float  #: twice the largest element of any gradient
    H: float  #: root of the largest variance; the paper uses G here, which ignores the eps in v
    c: float  #: smallest variance from the first step on; (3) as printed includes v_0 = 0


@dataclass(frozen=True)
class Evaluation:
    """The regret after ``steps`` steps, and its upper bounds."""

    steps: int
    regret: float  #: f(mean of theta_0 ... theta_{T-1}) - f*
    linearised: float  #: mean of <g_t, theta_{t-1} - theta*>, the quantity that the proof bounds
    constants: Constants
    sums: Terms  #: the three sums of the proof, measured; valid for every run
    unconditional: Terms  #: closed form without assumption (3)
    corrected: Terms  #: closed form under assumption (3)
    printed: Terms  #: Theorem 1


def evaluate(run: Trajectory, horizons: Sequence[int]) -> list[Evaluation]:
    """Regret and bounds after each number of steps in ``horizons``."""
    s, best = run.hyper, run.problem.minimiser
    t = np.arange(1, len(run) + 1, dtype=np.float64)
    eta, b = s.eta_at(t), s.beta1_at(t)
    x = run.thetas - best
    root = np.sqrt(run.variances)
    before, after = (root * x[:-1] ** 2).sum(axis=1), (root * x[1:] ** 2).sum(axis=1)
    previous = np.vstack([np.zeros_like(run.momenta[:1]), run.momenta[:-1]])
    energy = (run.momenta**2 / root).sum(axis=1) + b * (previous**2 / root).sum(axis=1)
    # cumulative, so that every horizon is a lookup
    linearised = np.cumsum((run.gradients * x[:-1]).sum(axis=1))
    distance = np.cumsum((before - after) / (2 * eta * (1 - b)))
    gradients = np.cumsum(eta / (2 * (1 - b)) * energy)
    momentum = np.cumsum(b / (2 * eta * (1 - b)) * before)
    # sqrt(t v_t) can fall if (3) fails; only its increases count
    scaled = np.sqrt(t)[:, None] * root
    rises = np.maximum(np.diff(scaled, axis=0), 0)
    variation = np.vstack([scaled[:1], scaled[:1] + np.cumsum(rises, axis=0)]).sum(axis=1)
    lowest = run.problem.value(best)
    found = []
    for T in horizons:
        i, k = T - 1, _constants(run, T)
        shared = _gradient_term(run, T, k), _momentum_term(run, T, k)
        found.append(
            Evaluation(
                steps=T,
                regret=run.problem.value(run.thetas[:T].mean(axis=0)) - lowest,
                linearised=float(linearised[i]) / T,
                constants=k,
                sums=Terms(float(distance[i]) / T, float(gradients[i]) / T, float(momentum[i]) / T),
                unconditional=Terms(k.X**2 * float(variation[i]) / (2 * s.eta * T), *shared),
                corrected=Terms(k.X**2 * float(root[i].sum()) / (2 * s.eta * np.sqrt(T)), *shared),
                printed=_printed_bound(run, T, k),
            )
        )
    return found


def monotone_share(run: Trajectory) -> Array:
    """For t = 2 ... T, the share of elements with v_t >= v_{t-1}. Assumption (3) requires 1 throughout."""
    return np.asarray((run.variances[1:] >= run.variances[:-1]).mean(axis=1))


def _constants(run: Trajectory, T: int) -> Constants:
    best = run.problem.minimiser
    # theta_T is in no term, because the last subtracted distance is dropped
    iterates = run.thetas[:T]
    return Constants(
        D=float(max(np.linalg.norm(iterates, axis=1).max(), np.linalg.norm(best))),
        X=float(np.abs(iterates - best).max()),
        G=2 * float(np.abs(run.gradients[:T]).max()),
        H=float(np.sqrt(run.variances[:T].max())),
        c=float(run.variances[:T].min()),
    )


def _printed_bound(run: Trajectory, T: int, k: Constants) -> Terms:
    """Theorem 1 as printed in the paper (Eq. 15)."""
    s, d = run.hyper, run.thetas.shape[1]
    first = k.D**2 / (s.eta * (1 - s.beta1) * T) * float(np.sqrt(run.variances[0]).sum())
    third = k.D**2 * s.beta1 * k.G * d / ((1 - s.beta1) * (1 - s.lam) ** 2 * s.eta * T) if s.beta1 else 0.0
    return Terms(first, _gradient_term(run, T, k) / (1 - s.beta1), third)


def _gradient_term(run: Trajectory, T: int, k: Constants) -> float:
    """The second term, with one power of 1 - beta1 less than printed; it does not need (3).

    m_t is an average of gradients whose weights are at most beta1**(t-j) and sum to at most 1, so
    m_t^2 <= sum_j beta1**(t-j) g_j^2 by Jensen. The sum over t gives one factor 1/(1 - beta1). The paper's
    lemma (from AdaBelief's appendix) has its square, which is valid but looser.
    """
    s = run.hyper
    norms = float(np.sqrt((run.gradients[:T] ** 4).sum(axis=0)).sum())
    return float((1 + s.beta1) * s.eta * np.sqrt(1 + np.log(T)) / (2 * np.sqrt(k.c) * (1 - s.beta1) ** 2 * T) * norms)


def _momentum_term(run: Trajectory, T: int, k: Constants) -> float:
    """The third term: sum_t lam**t * sqrt(t) <= 1/(1 - lam)^2, and sqrt(v) <= H."""
    s = run.hyper
    if s.beta1 == 0:
        return 0.0
    if s.lam == 1:
        return float("inf")  # the theorem needs lam < 1; it does not cover a constant beta1
    d = int(run.thetas.shape[1])
    return k.X**2 * s.beta1 * k.H * d / ((1 - s.beta1) * (1 - s.lam) ** 2 * s.eta * T)
