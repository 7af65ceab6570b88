"""The documents: links lead somewhere, commands exist, code runs as printed, shown output is real output."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from torch import nn

from aida import Aida
from aida.stepsizes import explain

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.ipynb"))
README = ROOT / "README.md"


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    """The contents of all fenced blocks of one language; "" means no language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [code for name, code in fenced if name == language]


def prose(text: str) -> str:
    """The document without its code, which may contain brackets that are no links."""
    without_blocks = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^    .*$", "", without_blocks, flags=re.MULTILINE))


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} +(.+?) *$", text, flags=re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found[slug] = found.get(slug, 0) + 1
    return {f"{slug}-{n}" if n else slug for slug, count in found.items() for n in range(count)}


def broken(document: Path, text: str) -> Iterator[str]:
    """What in the links of a document leads nowhere; addresses on the network are not visited."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = unquote(target).partition("#")
        path = (document.parent / place).resolve() if place else document
        if not path.exists():
            yield f"{target}: no such file"
        elif anchor and (path.suffix != ".md" or anchor not in anchors(path)):
            yield f"{target}: no such heading"


def documented_commands() -> Iterator[tuple[str, list[str]]]:
    """Every ``aida ...`` line in a code block of a document, in words."""
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        code = "\n".join([*blocks(text, ""), *re.findall(r"^    .*$", text, flags=re.MULTILINE)])
        for line in code.replace("\\\n", " ").splitlines():
            if match := re.match(r" *(?:python -m aida_lab|aida) (.*)", line):
                yield named(document), shlex.split(match[1].rstrip("; "), comments=True)


# -- links -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", [*DOCUMENTS, *NOTEBOOKS], ids=named)
def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    if document in NOTEBOOKS:
        text = "\n".join(line for cell in json.loads(text)["cells"] for line in cell["source"])
    assert not list(broken(document, text))


def test_a_link_to_nothing_is_found() -> None:
    text = "[a](docs/nowhere.md) [b](docs/theory.md#nowhere) [c](#cite) [d](README.md#cite) `[e](code)` [f](LICENSE#x)"
    assert [line.partition(":")[0] for line in broken(README, text)] == [
        "docs/nowhere.md",
        "docs/theory.md#nowhere",
        "LICENSE#x",
    ]


# -- commands ----------------------------------------------------------------------------------------


def refusal(words: list[str]) -> str:
    """What the command line has against a command, parsed but not run; "" if it would run it."""
    typer = pytest.importorskip("typer", reason="the command line needs it")
    from aida_lab.cli import app

    command: Any = typer.main.get_command(app)
    try:
        context = command.make_context("aida", list(words))
        while hasattr(command, "get_command"):
            name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            context = command.make_context(name, rest, parent=context)
    except Exception as error:
        # the folders that a document names need not be here
        return "" if "does not exist" in str(error) else str(error) or type(error).__name__
    return ""


def test_every_command_in_the_documents_exists_with_these_options() -> None:
    commands = list(documented_commands())
    assert len(commands) > 40
    refused = {f"{document}: {words}": refusal(words) for document, words in commands}
    assert not {command: why for command, why in refused.items() if why}


@pytest.mark.parametrize("line", ["lst", "train digits --optimiser aida", "bench", "data get", "report runs --out"])
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    assert refusal(line.split())


# -- README ------------------------------------------------------------------------------------------


def test_the_readme_has_at_most_150_lines() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_the_code_of_the_readme_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = blocks(README.read_text(encoding="utf-8"), "python")
    assert len(code) == 4
    names: dict[str, Any] = {}
    for block in code:
        exec(compile(block, "README.md", "exec"), names)
    names["probe"].close()


def recipe(what: str, model: nn.Module, **values: str) -> tuple[Aida, torch.optim.lr_scheduler.LRScheduler]:
    """Optimizer and schedule of the recipe that holds ``what``, for ``model``; ``values`` replace printed numbers."""
    (source,) = [block for block in blocks(README.read_text(encoding="utf-8"), "python") if what in block]
    source, models = re.subn(r"^model = .*# your model$", "model = given", source, flags=re.MULTILINE)
    assert models == 1
    for old, new in values.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    names: dict[str, Any] = {"given": model}
    exec(compile(source, "README.md", "exec"), names)
    return names["optimizer"], names["schedule"]


def test_the_recipe_for_vision_learns_digits() -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="digits are scikit-learn's")
    torch.manual_seed(0)
    pixels, digits = datasets.load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(digits)
    test = torch.arange(len(labels)) % 5 == 0
    train = torch.nonzero(~test).flatten()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer, schedule = recipe("MultiStepLR", model, **{"epochs = 200": "epochs = 15"})
    for _ in range(15):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-5)  # both decays happened
    assert (model(images[test]).argmax(1) == labels[test]).float().mean() > 0.93


def loss_after(steps: int, **values: str) -> float:
    """The training loss of the example's language model on a made-up language under the recipe for language."""
    names: dict[str, Any] = {"__name__": "language_model"}
    exec(compile((ROOT / "examples/language_model.py").read_text(encoding="utf-8"), "language_model.py", "exec"), names)
    torch.manual_seed(0)
    model = names["LanguageModel"](40)
    optimizer, schedule = recipe("warmup", model, **values)
    for _ in range(steps):
        words = (torch.randint(40, (8, 1)) + 3 * torch.arange(33)) % 40
        optimizer.zero_grad()
        loss = names["loss_of"](model, words)
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss.item()


def test_the_recipe_for_language_learns_and_needs_its_small_eps() -> None:
    as_printed, with_large_eps = loss_after(60), loss_after(60, **{"eps=1e-16": "eps=1e-8"})
    assert 2 * as_printed < with_large_eps


# -- CONTRIBUTING ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("src/aida/rule.py", "mutual_projections"),
        ("src/aida/backends/triton.py", "reduce"),
        ("src/aida/backends/triton.py", "apply"),
        ("src/aida_lab/experiments/cifar.py", "_TUNING"),
        ("src/aida/baselines/adam_plus.py", "ENTRIES"),
        ("src/aida_lab/experiments/digits.py", "EXPERIMENTS"),
        ("src/aida_lab/task.py", "Task"),
    ],
)
def test_the_answers_for_contributors_name_what_is_there(path: str, name: str) -> None:
    answers = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"]({path})" in answers
    assert re.search(rf"`{name}\b", answers)
    source = (ROOT / path).read_text(encoding="utf-8")
    assert re.search(rf"^(?:    )?(?:def |class )?{name}\b", source, flags=re.MULTILINE)


# -- explain -----------------------------------------------------------------------------------------


def test_the_output_of_explain_in_the_documents_is_its_output() -> None:
    text = (ROOT / "docs/choosing.md").read_text(encoding="utf-8")
    new, stepped = (block for block in blocks(text, "python") if "print(explain(" in block)
    names: dict[str, Any] = {}
    printed = []
    for code in (new, stepped):
        exec(compile(code.replace("print(explain(optimizer))", ""), "choosing.md", "exec"), names)
        printed.append(explain(names["optimizer"]))
    shown, findings = (block for block in blocks(text, "") if "of the bound" in block or "its bound" in block)
    # the path depends on the machine: without a C compiler there is no fused kernel
    assert printed[0].splitlines()[:-1] == shown.splitlines()[:-1]
    # digits of bf16 training depend on the machine too
    assert re.sub(r"[\d.]+ ", "# ", findings) in re.sub(r"[\d.]+ ", "# ", printed[1])
