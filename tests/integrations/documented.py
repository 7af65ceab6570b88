"""The examples of docs/integrations.md, each run as printed by the test of its library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"


def example(heading: str) -> str:
    """The Python code under a heading; several blocks are one program."""
    section = DOCUMENT.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL))


def run(heading: str, **given: Any) -> dict[str, Any]:
    """Run the example and return its variables; ``given`` are there before."""
    names = {"__name__": heading, **given}
    exec(compile(example(heading), f"docs/integrations.md: {heading}", "exec"), names)
    return names
