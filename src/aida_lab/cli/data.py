"""``aida data``: download, import and list the data sets of the experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from aida_lab.cli.options import DataRoot
from aida_lab.cli.printing import console, say, table

_SetName = Annotated[str, typer.Argument(metavar="NAME", help="The data set; aida data list shows them.")]


def get_data(
    name: _SetName,
    data: DataRoot = None,
    again: Annotated[bool, typer.Option("--again", help="Download again even if the data set is complete.")] = False,
) -> None:
    """Download a data set from its official address, check it and unpack it.

    An interrupted download resumes.
    """
    from aida_lab.data.download import shown
    from aida_lab.data.fetch import get
    from aida_lab.data.sets import find

    wanted = find(name)
    with shown(console()) as progress:
        found = get(wanted, data, again=again, progress=progress)
    _say_standing(found, data)


def import_data(
    name: _SetName,
    path: Annotated[Path, typer.Argument(help="Folder with the files of the data set, or its official archive.")],
    data: DataRoot = None,
) -> None:
    """Import a data set from a local copy. ImageNet is linked, the others are copied."""
    from aida_lab.data.fetch import import_from
    from aida_lab.data.sets import find

    _say_standing(import_from(find(name), path, data), data)


def list_data(data: DataRoot = None) -> None:
    """List the data sets: whether each is there, where, and whether its checksums are right."""
    from aida_lab.data.local import status_of
    from aida_lab.data.sets import SETS

    found = (status_of(known, data) for known in SETS)
    rows = ((each.data.name, each.data.title, each.state, each.where, each.remark) for each in found)
    console().print(table("", ("name", "what", "state", "where", "remark"), rows))


def _say_standing(found: Any, root: Path | None) -> None:
    """Say where a data set is. Texts are tokenised at once if the tokeniser is installed."""
    from importlib.util import find_spec

    say(f"{found.data.name}: {found.state}, {found.where}{'; ' if found.remark else ''}{found.remark}")
    if found.data.name == "multi30k" and find_spec("spacy"):
        from aida_lab.data.translation import multi30k

        say(f"multi30k: tokenised, {len(multi30k(root).words):,} words")
    if found.data.name == "pysource" and find_spec("tokenizers"):
        from aida_lab.data.pysource import pysource

        say("pysource: training the tokeniser; this takes a minute or two and is needed once")
        say(f"pysource: tokenised, {len(pysource(root).train):,} tokens")
