"""What reaches a terminal: text as it is, whatever brackets it holds, and nothing that a terminal obeys."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from aida_lab.cli import app, printing
from aida_lab.events import Event
from aida_lab.progress.display import shown
from aida_lab.progress.status import Board
from aida_lab.runs.files import one_line, printable
from fake_runs import spec

ESCAPE = "\x1b]0;owned\x07\x1b[31m\x9b5n\u202e\ud800\r"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
ODD = ("x [/b]", "[bold]x", "[link=x]y", ":smile:", "\\[x]", "[/]", "[@click=x]")


def call(*words: object):
    return CliRunner(env={"COLUMNS": "220", "TERM": "dumb"}).invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("out", ODD)
def test_a_folder_with_brackets_serves_every_command(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    trained = call(
        "train", "digits", "--optimizer", "sgd", "--epochs", "1", "--limit", "1", "--device", "cpu", "--out", out
    )
    assert trained.exit_code == 0, trained.output
    assert f"{out}/" in trained.output
    for words in (("runs", out), ("collect", out, "--out", f"{out}/c"), ("report", out, "--out", f"{out}/r")):
        found = call(*words)
        assert found.exit_code == 0, found.output
        assert words[-1] in found.output
    for words in (("runs", f"{out}/no"), ("report", f"{out}/no"), ("collect", f"{out}/no"), ("stepsizes", f"{out}/no")):
        found = call(*words)
        assert (found.exit_code, found.output.count("\n")) == (2, 1)
        assert f"{out}/no" in found.output


@pytest.mark.parametrize("text", [*ODD, ESCAPE])
def test_tables_titles_and_lines_are_printed_as_they_are(text, capsys):
    drawn = printing.table(text, [text])
    drawn.add_row(text)
    printing.console().print(drawn)
    printing.console().print(text)
    printing.say(text)
    with pytest.raises(BaseException, match="2"):
        printing.fail(text)
    found = capsys.readouterr()
    assert found.out.count(printable(text)) == 5
    assert found.err == printable(text) + "\n"
    assert not OBEYED.search(found.out + found.err)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("text", [*ODD, ESCAPE])
def test_what_is_shown_of_runs_is_printed_as_it_is(text, terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, color_system=None)
    wanted = spec(0, note=text)
    board = Board()
    board.expect([wanted])
    with shown(console, board) as listen:
        listen(Event("started", wanted.key, 0, 2))
        listen(Event("note", wanted.key, text=text))
        listen(Event("epoch", wanted.key, 1, 2, row={"epoch": 1, "loss": 1.0, "accuracy": 90.0}))
        listen(Event("failed", wanted.key, 1, 2, text=text))
    said = out.getvalue()
    assert said.count(printable(text)) >= 3
    if not terminal:
        assert not OBEYED.search(said)
    assert "owned\x07" not in said
    assert "\x9b" not in said


def test_one_line_is_one_and_bounded():
    assert one_line("a\n b\t\x1b[0m\u2028c") == "a b \\x1b[0m c"
    assert one_line("x" * 1000, 10) == "x" * 9 + "…"
    assert printable("plain, ünï 漢字 — ok\nnext\u00a0line") == "plain, ünï 漢字 — ok\nnext\u00a0line"
