"""A step on sharded parameters gives every rank the part of what one process computes.

Bit for bit on the fused and foreach paths; to 1e-12 in float64. On the reference path to 1e-6 after three steps, and in
bf16 to one bit: on shards it uses the closed form of the projections, on whole tensors the literal loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from layouts import LAYOUTS, Layout
from processes import together
from stepping import Case, all_cases, quick_cases, wrong_cases

BY_NAME: dict[str, Layout | None] = {layout.name: layout for layout in LAYOUTS} | {"plain": None}
WORLDS = (2, 4, 8)

#: Several meshes and plain tensors in one optimizer.
MIXED = {
    2: ("rows over 2", "plain", "2 replicas"),
    4: ("first dimension of 2x2", "plain", "HSDP 2x2", "last dimension of 2x2", "rows over 4"),
    8: ("HSDP x TP rows 2x2x2", "two dimensions of 2x2x2", "plain", "rows over 8"),
}


def arrangements(ranks: int) -> dict[str, tuple[str, ...]]:
    """The layouts of the parameters of each optimizer that a world of this size runs."""
    alone = {layout.name: (layout.name,) for layout in LAYOUTS if layout.ranks == ranks}
    return {**alone, f"mixed over {ranks}": MIXED[ranks]}


def wrong(names: Sequence[str], cases: Sequence[Case]) -> dict[str, float]:
    return wrong_cases(cases, [BY_NAME[name] for name in names])


def run(ranks: int, cases: Sequence[Case], limit: float) -> dict[str, tuple[Any, ...]]:
    works = {name: partial(wrong, names, cases) for name, names in arrangements(ranks).items()}
    return dict(zip(works, together(*works.values(), ranks=ranks, limit=limit), strict=True))


ALL = [pytest.param(ranks, name, id=name) for ranks in WORLDS for name in arrangements(ranks)]


@pytest.fixture(scope="module")
def quick() -> dict[str, tuple[Any, ...]]:
    return {name: found for ranks in WORLDS for name, found in run(ranks, quick_cases(), 120).items()}


@pytest.mark.parametrize(("ranks", "name"), ALL)
def test_a_sharded_step_is_the_step_of_one_process(quick: dict[str, tuple[Any, ...]], ranks: int, name: str) -> None:
    assert quick[name] == ({},) * ranks


@pytest.mark.sharding
@pytest.mark.parametrize("ranks", WORLDS)
def test_a_sharded_step_is_the_step_of_one_process_for_all_combinations(ranks: int) -> None:
    assert run(ranks, all_cases(), 1800) == {name: ({},) * ranks for name in arrangements(ranks)}
