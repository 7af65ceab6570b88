"""How often a sharded step communicates, what GradScaler finds on one rank, and Triton's kernels on shards."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from aida import Aida
from layouts import LAYOUTS, Layout
from processes import together
from stepping import SHAPES, Case, gradient, one_process, values_of, wrong_cases

PLACED = {layout.name: layout for layout in LAYOUTS}
ONE_RANK = Layout("one rank of 4x1", (4, 1), PLACED["rows over 4"].placements, ("b",))
FLOAT = torch.float32


def collectives() -> int:
    """The collectives of this rank so far, over all process groups."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def per_step(case: Case, layouts: list[Layout]) -> list[int]:
    """The collectives of each of three steps."""
    pairs = [(shape, layouts[i % len(layouts)]) for i, shape in enumerate(SHAPES)]
    pairs = [(shape, layout) for shape, layout in pairs if layout.fits(shape)]
    start = values_of([shape for shape, _ in pairs], FLOAT)
    params = [nn.Parameter(layout.lay(t)) for t, (_, layout) in zip(start, pairs, strict=True)]
    optimizer = case.optimizer(params)
    counts = []
    for step in range(3):
        for i, (p, (shape, layout)) in enumerate(zip(params, pairs, strict=True)):
            p.grad = layout.lay(gradient(shape, FLOAT, step, i))
        before = collectives()
        optimizer.step()
        counts.append(collectives() - before)
    return counts


def control() -> int:
    before = collectives()
    dist.all_reduce(torch.zeros(1))
    return collectives() - before


def scaled(case: Case, layout: Layout, found_on: int | None) -> bool:
    """Whether a step with GradScaler's values gives what is due: nothing changes if one rank found inf."""
    shapes = tuple(shape for shape in SHAPES if layout.fits(shape))
    params = [nn.Parameter(layout.lay(t)) for t in values_of(shapes, FLOAT)]
    optimizer: Any = case.optimizer(params)
    optimizer.grad_scale = torch.tensor(8.0)
    optimizer.found_inf = torch.tensor(float(dist.get_rank() == found_on))
    for step in range(3):
        for i, (p, shape) in enumerate(zip(params, shapes, strict=True)):
            p.grad = layout.lay(8 * gradient(shape, FLOAT, step, i))
        optimizer.step()
    whole = one_process(case, shapes)
    due = values_of(shapes, FLOAT) if found_on is not None else [p.data for p in whole.params]
    steps = 0 if found_on is not None else 3
    return all(
        torch.equal(p.to_local(), layout.lay(t).to_local()) and float(optimizer.state[p]["step"]) == steps
        for p, t in zip(params, due, strict=True)
    )


def found_on_the_last_rank() -> float:
    """The steps that a rank counts if the last rank found inf, with a parameter on each dimension of a 2x2 mesh."""
    layouts = PLACED["first dimension of 2x2"], PLACED["last dimension of 2x2"]
    params = [nn.Parameter(layout.lay(torch.ones(4, 3))) for layout in layouts]
    optimizer: Any = Aida(params, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(float(dist.get_rank() == 3))
    for p, layout in zip(params, layouts, strict=True):
        p.grad = layout.lay(torch.ones(4, 3))
    optimizer.step()
    return sum(float(optimizer.state[p]["step"]) for p in params)


COUNTED = {
    "rows": (["rows over 4"], 1),
    "HSDP": (["HSDP 2x2"], 1),
    "FSDP2 on TP": (["FSDP2 on TP rows 2x2"], 1),
    "two groups": (["rows over 4", "first dimension of 2x2"], 2),
    "three groups": (["first dimension of 2x2", "last dimension of 2x2", "rows x columns 2x2"], 3),
}
CASES = {
    f"{path}{' clip' * clip}": Case(path, clip=clip, l2=True) for path in ("fused", "foreach") for clip in (False, True)
}
SCALED = [(layout, found) for layout in ("rows over 4", "HSDP 2x2") for found in (None, 0, 3)]


@pytest.fixture(scope="module")
def outcomes() -> dict[Any, tuple[Any, ...]]:
    works: dict[Any, Any] = {"control": control, "last rank": found_on_the_last_rank}
    for name, case in CASES.items():
        for kind, (layouts, _) in COUNTED.items():
            works[kind, name] = partial(per_step, case, [PLACED[layout] for layout in layouts])
        works["one rank", name] = partial(per_step, case, [ONE_RANK])
        for layout, found in SCALED:
            works[layout, found, name] = partial(scaled, case, PLACED[layout], found)
    return dict(zip(works, together(*works.values(), ranks=4, limit=120), strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", COUNTED)
def test_a_step_communicates_once_per_process_group(outcomes: dict[Any, tuple[Any, ...]], kind: str, case: str) -> None:
    assert outcomes["control"] == (1,) * 4
    # the first step of a set of ranks that no mesh dimension has may create its process group
    assert [counts[1:] for counts in outcomes[kind, case]] == [[COUNTED[kind][1]] * 2] * 4


@pytest.mark.parametrize("case", CASES)
def test_a_mesh_of_one_rank_communicates_never(outcomes: dict[Any, tuple[Any, ...]], case: str) -> None:
    assert outcomes["one rank", case] == ([0, 0, 0],) * 4


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("layout", "found"), SCALED)
def test_what_gradscaler_finds_on_one_rank_stops_the_step_of_all(
    outcomes: dict[Any, tuple[Any, ...]], layout: str, found: int | None, case: str
) -> None:
    assert outcomes[layout, found, case] == (True,) * 4


def test_what_gradscaler_finds_reaches_ranks_that_share_no_parameter(outcomes: dict[Any, tuple[Any, ...]]) -> None:
    assert outcomes["last rank"] == (0.0,) * 4


INTERPRETED = tuple(
    Case("interpreted", clip=clip, l2=clip, bad=bad) for clip in (False, True) for bad in ("", "replica")
)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 before Python starts")
@pytest.mark.parametrize("layout", ["rows over 4", "HSDP 2x2", "FSDP2 on TP rows 2x2"])
def test_interpreted_triton_kernels_on_shards_give_the_step_of_one_process(layout: str) -> None:
    found = together(partial(wrong_cases, INTERPRETED, [PLACED[layout]]), ranks=4, limit=200)
    assert found == [({},) * 4]
