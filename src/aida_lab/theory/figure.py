"""The figure of docs/theory.md: regret and its bounds, assumption (3), the counterexample, and eps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from aida.stepsizes.drawing import COLOURS, GREY, new_figure, save, styled
from aida_lab.theory import epsilon
from aida_lab.theory.study import HYPERPARAMETERS, Regret, Study

METHOD_COLOURS = {"Aida": COLOURS[0], "AdaBelief": COLOURS[1]}


def draw_to(study: Study, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write ``theory.png`` and ``theory.svg`` into a folder."""
    with styled():
        figure = new_figure(12.5, 6.8)
        axes = figure.subplots(2, 3)
        for column, problem in enumerate(dict.fromkeys(regret.problem for regret in study.regrets)):
            regrets = [regret for regret in study.regrets if regret.problem == problem and not regret.enforced]
            _draw_regret(axes[0, column], problem, regrets)
            _draw_monotone(axes[1, column], problem, regrets)
        _draw_refutation(axes[0, 2], study)
        _draw_epsilon(axes[1, 2])
    return save(figure, Path(folder) / "theory")


def _draw_regret(axis: Any, problem: str, regrets: list[Regret]) -> None:
    for regret in regrets:
        colour = METHOD_COLOURS[regret.method]
        # the two methods nearly coincide under the theorem's schedule: draw one wide and one thin on top
        width = 4.0 if regret.method == "AdaBelief" else 1.4
        steps = [e.steps for e in regret.evaluations]
        axis.plot(steps, [e.regret for e in regret.evaluations], color=colour, lw=width, label=regret.method)
    aida = regrets[-1]
    steps = [e.steps for e in aida.evaluations]
    bounds = (
        ("Theorem 1 as printed", [e.printed.total for e in aida.evaluations], ":", "left"),
        ("corrected bound", [e.unconditional.total for e in aida.evaluations], "--", "right"),
        ("the proof's sums, measured", [e.sums.total for e in aida.evaluations], "-", "left"),
    )
    for label, values, style, side in bounds:
        axis.plot(steps, values, color=GREY, lw=1.3, ls=style)
        # the lines fall, so a label is free of its line above the left end or below the right end
        if side == "left":
            axis.text(steps[0], values[0] * 2.5, label, color=GREY, va="bottom", fontsize=8)
        else:
            axis.text(steps[-1], values[-1] / 2.5, label, color=GREY, ha="right", va="top", fontsize=8)
    axis.set(xscale="log", yscale="log", ylim=(1e-5, 2e12), xlabel="steps T", ylabel="f(mean θ) − f(θ*)")
    axis.set_title(f"Regret: {problem}")
    axis.legend(loc="lower left")


def _draw_monotone(axis: Any, problem: str, regrets: list[Regret]) -> None:
    for regret in regrets:
        steps = np.arange(2, len(regret.monotone) + 2)
        label = f"{regret.method} (all at once on {regret.share_of_steps:.1%} of steps)"
        axis.plot(steps, regret.monotone, color=METHOD_COLOURS[regret.method], lw=0.9, label=label)
    axis.axhline(1, color=GREY, ls="--", lw=1)
    axis.text(2, 1.015, "what assumption (3) asks for", color=GREY, va="bottom", fontsize=8)
    axis.set(xscale="log", ylim=(0, 1.12), xlabel="step t", title=f"Assumption (3): {problem}")
    axis.set_ylabel("share of elements with $v_t ≥ v_{t-1}$")
    axis.legend(loc="center right", bbox_to_anchor=(1.03, 0.7))


def _draw_refutation(axis: Any, study: Study) -> None:
    steps = [e.steps for e in study.refutation]
    regret = np.array([e.regret for e in study.refutation])
    printed = np.array([e.printed.total for e in study.refutation])
    axis.plot(steps, regret, color=COLOURS[0], lw=1.8, label="measured regret (Aida, K = 2, β1 = 0.9)")
    corrected = [e.corrected.total for e in study.refutation]
    axis.plot(steps, corrected, color=GREY, ls="--", lw=1.3, label="corrected bound")
    axis.plot(steps, printed, color=GREY, ls=":", lw=1.6, label="Theorem 1 as printed")
    broken = printed < regret
    axis.fill_between(steps, printed, regret, where=broken, interpolate=True, color=COLOURS[1], alpha=0.22, lw=0)
    axis.text(steps[-1], regret[-1] * 1.2, "broken", color="#8A3B00", ha="right", va="bottom")
    axis.set(xscale="log", yscale="log", xlabel="steps T", ylabel="f(mean θ) − f(θ*)")
    axis.set_title("A run that meets (1)–(3): Σ √(1+θ²) − 1")
    axis.set(xlim=(steps[-1] / 100, steps[-1] * 1.2), ylim=(40, 5e6))
    axis.legend(loc="upper right")


def _draw_epsilon(axis: Any) -> None:
    beta2, eps = HYPERPARAMETERS.beta2, HYPERPARAMETERS.eps
    belief = np.geomspace(1e-9, 1e-1, 300)
    axis.plot(
        belief, epsilon.outer_stepsize(belief, eps), color=COLOURS[3], lw=1.4, label="eps outside only (AdaBelief*)"
    )
    axis.plot(belief, epsilon.stepsize(belief, beta2, eps), color=COLOURS[0], lw=2, label="exact, Eq. 7")
    taylor = epsilon.taylor_stepsize(belief, beta2, eps)
    axis.plot(belief, taylor, color=COLOURS[2], lw=1.4, ls="-.", label="first-order expansion, Eq. 8")
    bound = epsilon.stepsize_bound(beta2, eps)
    axis.axhline(bound, color=GREY, ls="--", lw=1)
    axis.text(
        belief[-1], bound * 1.08, f"bound √((1−β2)/eps) = {bound:.0f}", color=GREY, ha="right", va="bottom", fontsize=8
    )
    axis.set(xscale="log", yscale="log", ylim=(1, 1e5), ylabel="adaptive stepsize")
    axis.set_xlabel("bias-corrected belief ŝ/(1−β2ᵗ)")
    axis.set_title(f"eps inside the variance (eps = {eps:.0e}, β2 = {beta2:g})")
    axis.legend(loc="upper right")
