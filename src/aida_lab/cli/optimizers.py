"""The optimizers: their update rules, defaults and papers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aida_lab.cli.printing import console, table

if TYPE_CHECKING:
    from aida.catalog import Entry
    from aida_lab.external import Rival


def list_optimizers(
    names: Annotated[
        list[str] | None, typer.Argument(help="Optimizers to describe in full, for example: aida adabelief-star.")
    ] = None,
) -> None:
    """List the optimizers, with their update rules and papers.

    Any of them can be built from Python: aida.catalog.find("adabelief").build(model.parameters(), lr=1e-3)
    """
    from aida.catalog import catalog, find
    from aida_lab.external import RIVALS

    if names:
        for entry in [find(name) for name in names]:
            _describe(entry)
        return
    rows = (
        (entry.name, entry.title, entry.rule, f"{entry.paper.authors.split(',')[0]} {entry.paper.year}")
        for entry in catalog().values()
    )
    console().print(table("", ("name", "method", "update in one line", "paper"), rows))
    outside = ((rival.name, _with_note(rival), rival.rule, rival.paper) for rival in RIVALS)
    drawn = table("", ("from other packages", "method", "update in one line", "paper"), outside)
    drawn.columns[0].no_wrap = True  # a name is copied
    console().print(drawn)
    console().print(
        "pip install '.[rivals]' installs these packages. --optimizer takes any of these names, any torch optimizer as "
        "module:Class, and first+rest: the first for hidden matrices, the rest for all other parameters.",
        style="dim",
    )
    console().print(
        "aida list NAME shows one of the first table in full: defaults, fixed and searched values, the place of eps.",
        style="dim",
    )


def _with_note(rival: Rival) -> str:
    installed = find_spec(rival.name.partition(":")[0].partition(".")[0])
    return rival.title if installed else f"{rival.title} (not installed)"


def _describe(entry: Entry) -> None:
    import torch

    drawn = table(f"{entry.title} ({entry.name})", ("", ""))
    group = entry.build([torch.nn.Parameter(torch.zeros(1, 1))]).param_groups[0]
    bound = entry.reading.bound(group)
    rows = {
        "update": entry.rule,
        "paper": str(entry.paper),
        "defaults": _in_words(entry.defaults),
        **(experiments := _by_experiment(entry.name)),
        "stepsize": entry.reading.about + ("" if bound is None else f"; at most {bound:.4g} with the defaults"),
        "eps": entry.reading.eps,
        "notes": entry.notes,
    }
    for name, text in rows.items():
        drawn.add_row(name, text, end_section=name == "defaults" or name in experiments)
    console().print(drawn)


def _by_experiment(optimizer: str) -> dict[str, str]:
    """The fixed and the searched values per experiment; experiments with the same values share a row."""
    from aida_lab.experiments import experiments
    from aida_lab.progress.labels import value_in_words

    names: dict[str, list[str]] = {}
    for experiment in experiments().values():
        for method, tuning in experiment.tuning.items():
            if method == optimizer or method.startswith(f"{optimizer}-k"):  # aida-k1 has values of its own
                lines = [_in_words(tuning.fixed)] if tuning.fixed else []
                for name, values in tuning.searched.items():
                    lines.append(f"searched: {name} {', '.join(map(value_in_words, values))}")
                label = experiment.name if method == optimizer else f"{experiment.name} ({method})"
                names.setdefault("\n".join(lines), []).append(label)
    return {"\n".join(together): values for values, together in names.items()}


def _in_words(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )
