"""The documentation site, for Sphinx: ``make docs``. The pages are the Markdown files as they are on GitHub."""

from __future__ import annotations

import json
import pkgutil
import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.util import inspect

import aida

ROOT = Path(__file__).resolve().parents[1]
#: The parts of the contents. A page that does not exist is left out; a page that is in no part is a warning.
CONTENTS = {
    "Use": "README docs/notebooks/first_steps docs/choosing docs/scaling docs/memory docs/integrations "
    "docs/performance",
    "Look inside": "docs/stepsizes docs/notebooks/stepsizes",
    "Compare": "docs/lab docs/comparing docs/reproduce",
    "Understand": "docs/algorithm docs/numerics docs/theory",
    "Develop": "docs/api docs/architecture CONTRIBUTING docs/releasing CHANGELOG docs/log SECURITY CODE_OF_CONDUCT",
}
INTEGRATIONS = [module.name for module in pkgutil.iter_modules([str(ROOT / "src/aida/integrations")])]

project, release, author = "Aida", aida.__version__, "The Aida developers"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
include_patterns = ["*.md", "docs/**"]
exclude_patterns = [".*", "build", "docs/report"]
myst_heading_anchors = 4  # the anchors that GitHub gives headings
highlight_language = "none"  # of code blocks that name no language
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # as in the source: 1e-3, not 0.001
maximum_signature_line_length = 100  # a longer signature has one line per argument
autodoc_mock_imports = [*INTEGRATIONS, "jax"]  # a module of aida.integrations has the name of its library
add_module_names = False
smartquotes_action = "D"  # dashes only

html_theme = "furo"
pygments_dark_style = "github-dark"  # Furo's own underlines imports, which look like links
html_title = f"Aida {release}"
html_static_path, html_css_files = ["site.css"], ["site.css"]
html_copy_source = html_show_sourcelink = html_show_copyright = False


class NotebookParser(MystParser):
    """A notebook as Markdown: its cells and their stored outputs. Nothing is executed."""

    supported = ("ipynb",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        cells = json.loads(inputstring)["cells"]
        super().parse("\n\n".join(part for cell in cells for part in _markdown(cell)), document)


def _markdown(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    text, pictures = "", []
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            pictures.append(f"![output](data:image/png;base64,{''.join(data['image/png']).strip()})")
        else:
            text += "".join(output.get("text") or data["text/plain"])
    return [f"```python\n{source}\n```", *([f"```\n{text.rstrip()}\n```"] if text else []), *pictures]


def _read_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Google's style, as Sphinx's own reader, which would take the colons in "(float, default: 1e-3)" as separators."""
    text = re.sub(r"(?<=, default): ", " ", "\n".join(lines))
    lines[:] = GoogleDocstring(text, Config(), what="function").lines()


def _read_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """A class whose base is mocked has its own signature, not the mock's."""
    if what == "class" and signature == "(*args: Any, **kwargs: Any)":
        own = vars(obj).get("__init__")
        signature = ""
        if own is not None:
            read = inspect.signature(own, bound_method=True)
            signature = inspect.stringify_signature(read, show_return_annotation=False, unqualified_typehints=True)
    return signature, returns


def _add_directives(app: Sphinx, docname: str, source: list[str]) -> None:
    """The contents for the first page, and the modules of aida.integrations for the API reference."""
    source[0] = source[0].replace(" ± ", "\u202f±\u202f")  # a mean and its deviation stay on one line
    if docname == root_doc:
        for caption, pages in CONTENTS.items():
            found = [page for page in pages.split() if page in app.env.found_docs]
            found = ["Install, and the swap <self>" if page == root_doc else page for page in found]
            source[0] += "\n".join(["", "```{toctree}", f":caption: {caption}", ":hidden:", *found, "```", ""])
    if docname == "docs/api":
        for library in INTEGRATIONS:
            name = f"aida.integrations.{library}"
            source[0] += f"\n## {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n```\n"


def _link_files(app: Sphinx, doctree: nodes.document) -> None:
    """Copy linked files to where the link leads; for a folder that is its index.html, if it has one.

    The page of the reproduction shows the report below the link to it.
    """
    page = Path(app.env.docname).parent
    for node in [*doctree.findall(download_reference), *doctree.findall(pending_xref)]:
        target = ROOT / page / node["reftarget"]
        if node.get("refdomain") is not None or not target.exists():
            continue
        file = target / "index.html" if target.is_dir() else target
        if not file.is_file():
            node.replace_self(node.children)
            continue
        copy = Path(app.outdir, file.resolve().relative_to(ROOT))
        copy.parent.mkdir(parents=True, exist_ok=True)
        if file.name == "index.html":
            shutil.copytree(file.parent, copy.parent, dirs_exist_ok=True)
        else:
            shutil.copy(file, copy)
        address = node["reftarget"] + ("/index.html" if target.is_dir() else "")
        if app.env.docname == "docs/reproduce" and target.name == "report":
            frame = f'<iframe src="{address}" title="The interactive report" loading="lazy"></iframe>'
            paragraph = node.parent
            paragraph.parent.insert(paragraph.parent.index(paragraph) + 1, nodes.raw("", frame, format="html"))
        node.replace_self(nodes.reference("", "", *node.children, refuri=address))


def _finish(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None:
        return
    shutil.copy(app.outdir / "README.html", app.outdir / "index.html")
    for page in app.outdir.rglob("*.html"):
        loaded = r'<(?:img|script|link|iframe)\b[^>]*(?:src|href)="((?:https?:)?//[^"]*)'
        if match := re.search(loaded, page.read_text(encoding="utf-8")):
            raise ExtensionError(f"{page} loads {match[1]}; the site must work without a network")


def setup(app: Sphinx) -> None:
    app.add_source_suffix(".ipynb", "ipynb")
    app.add_source_parser(NotebookParser)
    app.connect("autodoc-process-docstring", _read_docstring)
    app.connect("autodoc-process-signature", _read_signature)
    app.connect("source-read", _add_directives)
    app.connect("doctree-read", _link_files, priority=100)  # before Sphinx copies downloads to folders of its own
    app.connect("build-finished", _finish)
