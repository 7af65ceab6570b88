"""Layers inside a tensor are updated as the same layers in separate tensors, however they are sharded."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from aida import Aida
from layouts import LAYOUTS, Layout
from processes import Refused, together
from stacks import STACKS, Stack, sharded_stacks, stacks_gap
from stepping import Case

WORLDS = (2, 4, 8)
CASES = (
    Case("fused"), Case("foreach", l2=True, projections=1), Case("fused", clip=True, l2=True),
    Case("foreach", clip=True),
    Case("fused", bad="shard"), Case("foreach", clip=True, bad="shard"), Case("fused", grads="partial"),
    Case("fused", bad="shard", nonfinite="raise"), Case("foreach", "complex64"), Case("fused", "bf16"),
    Case("reference", "float64", clip=True, l2=True), Case("fused", "float64"),
)  # fmt: skip


def wrong(layout: Layout | None, cases: tuple[Case, ...]) -> dict[str, float]:
    """The stacks and cases whose result on this rank is not that of separate parameters, with the gap."""
    found = {}
    for stack in STACKS:
        if layout is None or layout.fits(stack.shape):
            for case in cases:
                found[f"{stack.name}: {case}"] = stacks_gap(case, [stack], [layout])
    return {name: gap for name, gap in found.items() if gap}


def wrong_together(ranks: int) -> dict[str, float]:
    """As :func:`wrong`, with all stacks in one optimizer, each in another layout."""
    layouts: list[Layout | None] = [None, *(layout for layout in LAYOUTS if layout.ranks == ranks)]
    places = []
    for i, stack in enumerate(STACKS):
        fitting = [layout for layout in layouts if layout is None or layout.fits(stack.shape)]
        places.append(fitting[(i + 1) % len(fitting)])
    found = {str(case): stacks_gap(case, STACKS, places) for case in CASES}
    return {name: gap for name, gap in found.items() if gap}


def placed(name: str) -> Layout:
    return next(layout for layout in LAYOUTS if layout.name == name)


def some_ranks_without_layers() -> tuple[float, int]:
    """Ranks 2 and 3 have no expert, and the experts have another dtype than the other parameter.

    Returns the largest difference from one process, and how often the tensors were sorted into batches.
    """
    layout = placed("rows over 4")
    generator = torch.Generator().manual_seed(0)
    dense, stack = torch.randn(8, 3, generator=generator), torch.randn(2, 5, generator=generator).bfloat16()
    plain = [nn.Parameter(dense.clone()), *(nn.Parameter(row.clone()) for row in stack)]
    sharded = [nn.Parameter(layout.lay(dense)), nn.Parameter(layout.lay(stack))]
    one = Case().optimizer(plain)
    many = Case().optimizer([{"params": sharded[:1]}, {"params": sharded[1:], "layer_dims": 1}])
    sort, sorted_groups = many._init_group, []
    many._init_group = lambda group, *lists: (sorted_groups.append(group), sort(group, *lists))[1]  # type: ignore[method-assign]
    for _ in range(4):
        grads = torch.randn(8, 3, generator=generator), torch.randn(2, 5, generator=generator).bfloat16()
        for p, grad in zip(plain, (grads[0], *grads[1]), strict=True):
            p.grad = grad.clone()
        for p, grad in zip(sharded, grads, strict=True):
            p.grad = layout.lay(grad)
        one.step()
        many.step()
    found = sharded[0].full_tensor() - plain[0], sharded[1].full_tensor() - torch.stack(plain[1:])
    return max(float(difference.detach().abs().max()) for difference in found), len(sorted_groups)


def described(stack: Stack, layout: Layout) -> tuple[dict[str, int], tuple[int, ...], str]:
    """What ``skipped()`` says after a step in which the last layer was bad; shape and placements of the counters."""
    optimizer, (p,) = sharded_stacks(Case(bad="shard"), [stack], [layout])
    step = optimizer.state[p]["step"]
    return dict(optimizer.skipped()), tuple(step.shape), str(getattr(step, "placements", "plain"))


def many_layers(layout: Layout) -> tuple[float, int]:
    """The gap with 5000 layers, of which one is bad, and how many skipped."""
    stack = Stack("many", (5000, 2, 3), 1)
    case = Case(bad="shard", clip=True)
    optimizer, _ = sharded_stacks(case, [stack], [layout])
    return stacks_gap(case, [stack], [layout]), len(optimizer.skipped())


def refused(layout: Layout, shape: tuple[int, ...], keys: dict[str, Any]) -> None:
    p = nn.Parameter(layout.lay(torch.zeros(shape)))
    Aida([{"params": [p], **keys}])


REFUSALS = {
    "too many layer_dims": ((4, 3), {"layer_dims": 3}, "layer_dims=3"),
    "negative layer_dims": ((4, 3), {"layer_dims": -1}, "layer_dims=-1"),
    "sizes of another tensor": ((4, 3), {"split_sizes": (2, 3)}, "split_sizes=(2, 3)"),
    "sizes along a counted dimension": ((4, 3), {"layer_dims": 1, "split_sizes": (2, 2), "split_dim": 0}, "do not fit"),
    "a size of 0": ((4, 3), {"split_sizes": (4, 0)}, "positive integers"),
    "a dimension without sizes": ((4, 3), {"split_dim": 0}, "split_dim=0"),
}

SINGLE = {
    "rows over 2",
    "rows over 4",
    "rows x columns 2x2",
    "FSDP2 on TP rows 2x2",
    "HSDP 2x2",
    "HSDP x TP rows 2x2x2",
}
EXPERTS, HEADS, SPLITS = STACKS[0], STACKS[3], STACKS[8]


def quick_works(ranks: int) -> dict[str, Any]:
    works: dict[str, Any] = {f"mixed over {ranks}": partial(wrong_together, ranks)}
    for layout in LAYOUTS:
        if layout.ranks == ranks and layout.name in SINGLE:
            works[layout.name] = partial(wrong, layout, CASES[:1] + CASES[5:7])
    if ranks == 4:
        rows, cells = placed("rows over 4"), placed("rows x columns 2x2")
        works["without layers"] = some_ranks_without_layers
        works["5000 layers"] = partial(many_layers, rows)
        works["experts"], works["one expert"] = partial(described, EXPERTS, rows), partial(described, STACKS[2], rows)
        works["heads"], works["splits"] = partial(described, HEADS, cells), partial(described, SPLITS, cells)
        works["whole experts"] = partial(described, EXPERTS, placed("columns over 4"))
        works |= {name: partial(refused, rows, shape, keys) for name, (shape, keys, _) in REFUSALS.items()}
    return works


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[Any, ...]]:
    found = {}
    for ranks in WORLDS:
        works = quick_works(ranks)
        found |= dict(zip(works, together(*works.values(), ranks=ranks, limit=120), strict=True))
    return found


@pytest.mark.parametrize("name", sorted(SINGLE | {f"mixed over {ranks}" for ranks in WORLDS}))
def test_layers_inside_a_sharded_tensor_are_updated_as_separate_parameters(
    outcomes: dict[str, tuple[Any, ...]], name: str
) -> None:
    assert not any(outcomes[name]), outcomes[name]


def test_a_rank_without_any_of_the_layers_stays_in_step_and_keeps_its_batches(
    outcomes: dict[str, tuple[Any, ...]],
) -> None:
    assert outcomes["without layers"] == ((0.0, 2),) * 4  # two groups, sorted once


def test_thousands_of_layers_are_updated_as_separate_parameters(outcomes: dict[str, tuple[Any, ...]]) -> None:
    assert outcomes["5000 layers"] == ((0.0, 1),) * 4


@pytest.mark.parametrize(
    ("name", "skipped", "shape", "placements"),
    [
        ("experts", "0.0[5]", (6,), "(Shard(dim=0),)"),
        ("one expert", "0.0[0]", (1,), "(Shard(dim=0),)"),
        ("whole experts", "0.0[5]", (6,), "plain"),
        ("heads", "0.0[2, 3]", (3, 4), "(Shard(dim=0), Shard(dim=1))"),
        ("splits", "0.0[3, 2]", (4, 3), "(Shard(dim=0), Replicate())"),
    ],
)
def test_a_bad_layer_skips_alone_and_is_named_on_every_rank(
    outcomes: dict[str, tuple[Any, ...]], name: str, skipped: str, shape: tuple[int, ...], placements: str
) -> None:
    """The counters have one number per layer, and are placed as the layers are."""
    assert outcomes[name] == (({skipped: 1}, shape, placements),) * 4


@pytest.mark.parametrize("name", REFUSALS)
def test_layer_keys_that_do_not_fit_are_refused_in_words(outcomes: dict[str, tuple[Any, ...]], name: str) -> None:
    for outcome in outcomes[name]:
        assert isinstance(outcome, Refused), outcome
        assert REFUSALS[name][2] in outcome.words, outcome.words


@pytest.mark.sharding
@pytest.mark.parametrize("ranks", WORLDS)
def test_layers_inside_a_sharded_tensor_are_updated_as_separate_parameters_in_every_layout(ranks: int) -> None:
    works = {layout.name: partial(wrong, layout, CASES) for layout in LAYOUTS if layout.ranks == ranks}
    found = dict(zip(works, together(*works.values(), ranks=ranks, limit=900), strict=True))
    assert found == {name: ({},) * ranks for name in works}
