"""The optimizers: their update rules, defaults and papers."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from aida_lab.cli.printing import console, fail, table, values_in_words


def list_optimizers(
    names: Annotated[
        list[str] | None, typer.Argument(help="Optimizers to describe in full, such as: aida adabelief-star.")
    ] = None,
) -> None:
    """List the optimizers, with their update rules and papers.

    Any of them can be built from Python: aida.catalog.find("adabelief").build(model.parameters(), lr=1e-3)
    """
    from aida.catalog import catalog

    if names:
        for entry in [_found(name) for name in names]:
            _describe(entry)
        return
    drawn = table("", "name", "method", "update in one line", "paper")
    for entry in catalog().values():
        drawn.add_row(entry.name, entry.title, entry.rule, f"{entry.paper.authors.split(',')[0]} {entry.paper.year}")
    console().print(drawn)
    console().print(
        "aida list NAME shows one in full: defaults, what each experiment fixes and searches, where eps sits.",
        style="dim",
    )


def _found(name: str) -> Any:
    from aida.catalog import find

    try:
        return find(name)
    except LookupError as error:
        fail(str(error.args[0]))


def _describe(entry: Any) -> None:
    from torch import nn

    drawn = table(f"{entry.title} ({entry.name})", "", "")
    group = entry.build([nn.Parameter(nn.init.zeros_(nn.Linear(1, 1).weight))]).param_groups[0]
    bound = entry.reading.bound(group)
    rows = {
        "update": entry.rule,
        "paper": str(entry.paper),
        "defaults": values_in_words(entry.defaults),
        **(experiments := _by_experiment(entry)),
        "stepsize": entry.reading.about + ("" if bound is None else f"; at most {bound:.4g} with the defaults"),
        "eps": entry.reading.eps,
        "notes": entry.notes,
    }
    for name, text in rows.items():
        drawn.add_row(name, text, end_section=name == "defaults" or name in experiments)
    console().print(drawn)


def _by_experiment(entry: Any) -> dict[str, str]:
    """What is fixed and what is searched, by experiment; experiments with the same values together."""
    from aida_lab.progress.labels import value_in_words

    names: dict[str, list[str]] = {}
    for experiment in dict.fromkeys([*entry.tuned, *entry.searched]):
        said = [values_in_words(entry.tuned.get(experiment, {}))]
        for setting, values in entry.searched.get(experiment, {}).items():
            said.append(f"searched: {setting} {', '.join(map(value_in_words, values))}")
        names.setdefault("\n".join(filter(None, said)), []).append(experiment)
    return {"\n".join(experiments): values for values, experiments in names.items() if values}
