"""``aida theory``: the paper's theory checked on convex problems."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aida_lab.cli.choices import require_writable
from aida_lab.cli.printing import console, say_written


def theory(
    out: Annotated[
        Path | None, typer.Option(help="Folder for theory.png, theory.svg and theory.md; created if missing.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each convex run.")] = 1500,
) -> None:
    """Check the paper's theory on real convex problems, in under a minute.

    Evaluates Theorem 1 term by term next to the measured regret of Aida and AdaBelief in logistic
    regression, counts how often its assumption on the variances holds, and shows a run that breaks it.
    docs/theory.md explains the tables.
    """
    from rich.markdown import Markdown

    from aida_lab.theory import study

    if out is not None:
        require_writable(out)
    with console().status("minimizing logistic losses and running both methods ..."):
        found = study.run(steps)
    text = study.as_markdown(found)
    console().print(Markdown(text))
    if out is not None:
        from aida_lab.theory.figure import draw_to

        out.mkdir(parents=True, exist_ok=True)
        (out / "theory.md").write_text(text + "\n", encoding="utf-8")
        say_written([out / "theory.md", *draw_to(found, out)])
