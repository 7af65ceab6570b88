"""All measurements of this package, for ``aida theory`` and docs/theory.md."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from aida_lab.theory.bounds import Evaluation, evaluate, monotone_share
from aida_lab.theory.descent import ADABELIEF, AIDA, Hyperparameters, descend
from aida_lab.theory.problems import Array, LogisticRegression, SmoothAbsolute, breast_cancer, digits

#: The theorem requires lam < 1; its bound has a factor 1/(1 - lam)^2. Of eta = 0.003, 0.01, 0.03, 0.1 and 0.3, the
#: value 0.1 gives both methods the smallest regret after 1000 steps, on both problems.
HYPERPARAMETERS = Hyperparameters(eta=0.1, beta1=0.9, beta2=0.999, lam=0.99, eps=1e-8)

BATCH = 64
_NAMES = {ADABELIEF: "AdaBelief", AIDA: "Aida"}


@dataclass(frozen=True)
class Regret:
    """One method on one problem: regret, bounds, and how often assumption (3) holds."""

    problem: str
    method: str
    enforced: bool  #: whether variances were prevented from falling, so that (3) holds
    evaluations: tuple[Evaluation, ...]  #: at growing numbers of steps
    monotone: Array  #: for t = 2 ... T, the share of elements with v_t >= v_{t-1}

    @property
    def last(self) -> Evaluation:
        return self.evaluations[-1]

    @property
    def share_of_elements(self) -> float:
        """How often (3) holds, over elements and steps."""
        return float(self.monotone.mean())

    @property
    def share_of_steps(self) -> float:
        """How often (3) holds for all elements at once, as the theorem requires."""
        return float((self.monotone == 1).mean())


@dataclass(frozen=True)
class Study:
    steps: int
    regrets: tuple[Regret, ...]
    practice: tuple[Regret, ...]  #: assumption (3) under training conditions; without evaluations
    refutation: tuple[Evaluation, ...]


def run(steps: int = 1500, refutation_steps: int = 400_000) -> Study:
    """Run the whole study, in under a minute on two CPU cores."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn

    # a second thread makes matrices this small slower: 6 times on two busy cores
    with threadpool_limits(1):
        runs = [(problem, method) for problem in (breast_cancer(), digits()) for method in (ADABELIEF, AIDA)]
        return Study(
            steps=steps,
            regrets=tuple(
                measure(*each, HYPERPARAMETERS, steps, enforced=enforced) for each in runs for enforced in (False, True)
            ),
            practice=tuple(_practise(*each, steps) for each in runs),
            refutation=refute(refutation_steps),
        )


def measure(
    problem: LogisticRegression, method: int, hyper: Hyperparameters, steps: int, *, enforced: bool = False
) -> Regret:
    """Run a method under the theorem's schedule and evaluate it at growing numbers of steps."""
    trajectory = descend(problem, method, hyper, steps, monotone=enforced)
    evaluations = tuple(evaluate(trajectory, horizons(steps)))
    return Regret(problem.name, _NAMES[method], enforced, evaluations, monotone_share(trajectory))


#: Minimise the sum of sqrt(1 + theta[i]^2) - 1 from here, with these values: see refute().
FAR_START = SmoothAbsolute((100.0, 50.0, -80.0))
SHORT_STEPS = Hyperparameters(eta=0.15, beta1=0.9, beta2=0.999, lam=0.5, eps=1.0)


def refute(steps: int = 400_000) -> tuple[Evaluation, ...]:
    """A counterexample: it satisfies the assumptions of Theorem 1 (with c <= v_1 for c <= v_0), but exceeds its bound.

    Slopes are below 1, so (1) holds with G = 2. The iterates move slowly towards 0, so (2) holds with D the norm of the
    start. eps is larger than any residual, so v grows until it is constant, and (3) holds with c = v_1. The steps are
    short: after 400,000 of them the iterate has covered a tenth of its distance, while the printed first and third
    terms have fallen like 1/T. The regret is above the bound from 146,000 steps on.
    """
    return tuple(evaluate(descend(FAR_START, AIDA, SHORT_STEPS, steps), horizons(steps)))


def horizons(steps: int) -> list[int]:
    """Numbers of steps for the evaluation, evenly spaced on a log axis."""
    return sorted({int(T) for T in np.geomspace(1, steps, 40).round()})


def as_markdown(study: Study) -> str:
    """The tables of docs/theory.md."""
    return "\n\n".join((_terms_table(study), _constants_table(study), _monotone_table(study), _refutation_line(study)))


def _practise(problem: LogisticRegression, method: int, steps: int) -> Regret:
    """Assumption (3) under training conditions: minibatches, constant beta1, bias corrections."""
    hyper = replace(HYPERPARAMETERS, lam=1.0)
    trajectory = descend(problem, method, hyper, steps, bias_corrected=True, batch=BATCH)
    return Regret(problem.name, _NAMES[method], False, (), monotone_share(trajectory))


def _terms_table(study: Study) -> str:
    rows = []
    for regret in study.regrets:
        e = regret.last
        title = f"{regret.problem}, {regret.method}" + (", v kept from falling" if regret.enforced else "")
        rows.append([title, "measured regret", "", "", "", _number(e.regret)])
        rows.append(["", "mean of ⟨g, θ − θ*⟩", "", "", "", _number(e.linearised)])
        closed = e.corrected if regret.enforced else e.unconditional
        label = "corrected, under (3)" if regret.enforced else "corrected, without (3)"
        for name, terms in (("sums of the proof", e.sums), (label, closed), ("Theorem 1 as printed", e.printed)):
            rows.append(["", name, *map(_number, (terms.distance, terms.gradients, terms.momentum, terms.total))])
    return _table(
        ["run", f"after {study.steps} steps", "1st: distance", "2nd: gradients", "3rd: momentum", "sum"], rows
    )


def _constants_table(study: Study) -> str:
    rows = []
    for regret in study.regrets:
        if not regret.enforced:
            k = regret.last.constants
            rows.append([regret.problem, regret.method, *map(_number, (k.D, k.X, k.G, k.H, k.c))])
    return _table(["problem", "method", "D", "max abs(θ − θ*)", "G∞", "max √v", "c"], rows)


def _monotone_table(study: Study) -> str:
    runs = [(regret, "theorem's, full batch") for regret in study.regrets if not regret.enforced]
    runs += [(regret, f"as trained, batch {BATCH}") for regret in study.practice]
    return _table(
        ["problem", "method", "run", "v_t ≥ v_(t−1): elements × steps", "steps on which all elements do"],
        [[r.problem, r.method, name, f"{r.share_of_elements:.1%}", f"{r.share_of_steps:.1%}"] for r, name in runs],
    )


def _refutation_line(study: Study) -> str:
    e = study.refutation[-1]
    return (
        f"Counterexample after {e.steps:,} steps: regret {e.regret:.1f}, Theorem 1 {e.printed.total:.1f}, "
        f"corrected bound {e.corrected.total:.1f}."
    )


def _number(value: float) -> str:
    return f"{value:.3g}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
