"""Names and remarks out of run folders in LaTeX, CSV, Markdown and figures: shown, and nothing else."""

from __future__ import annotations

import csv
import io
import re
import warnings
from pathlib import Path

import pytest

from aida.stepsizes.drawing import literal, new_figure, save
from aida_lab.report import formats
from aida_lab.report.build import read, write
from aida_lab.report.collect import read_runs
from aida_lab.report.formats import Field, Grid, Head
from aida_lab.report.naming import file_name
from aida_lab.runs.files import printable
from odd_folders import NAMES
from report_fixture import EXPERIMENTS, spec, write_run

# --- LaTeX

#: What is left of a text when every command and group that the escapes make is taken for what it prints.
_PRINTS = {
    r"\textbackslash{}": "\\", r"\textasciitilde{}": "~", r"\textasciicircum{}": "^", r"\textbar{}": "|",
    "$<$": "<", "$>$": ">", **{rf"\{letter}": letter for letter in "&%$#_{}"},
}  # fmt: skip


def printed(text: str) -> str:
    """As LaTeX prints it; AssertionError if anything in it would be a command of its own."""
    pattern = "|".join(re.escape(each) for each in sorted(_PRINTS, key=len, reverse=True))
    plain = re.sub(pattern, "", text)
    assert not re.search(r"[\\{}$&#^_~%]", plain), f"LaTeX would act on {plain!r}"
    return re.sub(pattern, lambda match: _PRINTS[match[0]], text)


@pytest.mark.parametrize(
    "text", [*NAMES, r"\write18{rm -rf}", r"a\\b", "^^5cinput", "\\label{x}%", "a & b", "50 % $x_1^2$", "~#"]
)
def test_latex_prints_every_text_as_it_is(text):
    assert printed(formats.escape_latex(text)) == " ".join(text.split())


def test_a_text_of_several_lines_ends_no_paragraph_and_hides_no_character():
    assert formats.escape_latex("a\n\nb\x1b\0") == r"a b\textbackslash{}x1b\textbackslash{}x00"


def test_a_label_cannot_end_early():
    table = Grid(r"x}\input{/etc/passwd}", "t", (Head("a"),), ((Field("[1cm]"),), (Field("*"),)))
    text = formats.latex(table)
    (label,) = re.findall(r"\\label\{(.*)\}\n", text)
    assert re.fullmatch(r"tab:[A-Za-z0-9.-]+", label)
    assert r"\input" not in text
    assert "\n{}[1cm] " in text  # a row that begins with a bracket would be the length of the row before it
    assert "\n{}* " in text


# --- CSV


@pytest.mark.parametrize(
    "text",
    [
        "=1+1",
        "+1",
        "-1",
        "@x",
        "\t=1",
        "\r=1",
        " =1",
        "'quoted",
        "'=1",
        "\uff1d1",
        "plain",
        "a=b",
        "",
        "-x",
        "+1e5",
        "- 1",
    ],
)
def test_a_field_is_no_formula_and_is_got_back(text):
    out = formats._csv([{"a": text, "b": -0.5, "c": 3, "d": None}])
    (row,) = csv.DictReader(io.StringIO(out, newline=""))
    found = row["a"]
    try:
        float(found)
    except ValueError:
        assert found.lstrip()[:1] not in tuple("=+-@\uff1d\uff0b\uff0d\uff20")
        assert found.removeprefix("'") == printable(text)
    else:
        assert found == text, "a plain number stays one"
    assert (row["b"], row["c"], row["d"]) == ("-0.5", "3", "")


def test_formulas_in_specs_reach_no_spreadsheet(tmp_path):
    write_run(
        tmp_path / "runs", spec("=cmd()", 0, {"note": "@SUM(A1)", "lr": -0.5}, experiment="+x"), [1.0, 2.0, 3.0, 4.0]
    )
    write(read([tmp_path / "runs"], declared=EXPERIMENTS), tmp_path / "report")
    tables = list((tmp_path / "report" / "tables").glob("*.csv"))
    assert len(tables) == 3
    for path in tables:
        with path.open(newline="") as file:
            for field in (field for row in csv.reader(file) for field in row):
                assert field[:1] not in tuple("=+@")
                assert not field.startswith("-") or float(field) < 0
    with (tmp_path / "report" / "tables" / "runs.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["method"], row["experiment"], row["hyper.note"], row["hyper.lr"]) == (
        "'=cmd()",
        "'+x",
        "'@SUM(A1)",
        "-0.5",
    )


# --- the rest


@pytest.mark.parametrize("name", NAMES)
def test_a_file_name_is_one_on_any_system(name):
    found = file_name(name)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,120}", found)
    assert not found.endswith(".")


def test_file_names_of_different_texts_differ():
    assert file_name("vgg11-cifar10-fp32") == "vgg11-cifar10-fp32"
    texts = [*NAMES, "a b", "a-b", "a/b", "A/b", "x" * 199, "", "-", "--"]
    assert len({file_name(text) for text in texts}) == len(set(texts))


@pytest.mark.parametrize("text", [*NAMES, "$x", "$x$", r"\$x$", "$$"])
def test_a_figure_shows_a_text_letter_by_letter(tmp_path: Path, text):
    figure = new_figure(3, 2)
    drawn = figure.text(0.5, 0.5, literal(text))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a font without a glyph
        save(figure, tmp_path / "figure")
    assert drawn._preprocess_math(drawn.get_text()) == (text, False)


def test_markdown_makes_no_link_and_no_tag_of_a_name():
    text = formats.markdown(
        Grid("x", "![a](http://b)", (Head("<b>"),), ((Field("[a](javascript:x)"),),)), subtitle="<i>"
    )
    assert "\\[a](http://b)" in text
    assert "\\[a](javascript:x)" in text
    assert not re.search(r"(?<!\\)[<\[]", text.replace("---:", ""))


def test_a_hyper_parameter_that_is_not_finite_breaks_nothing(tmp_path):
    for seed, value in enumerate((float("inf"), float("nan"), 1e-3)):
        write_run(tmp_path / "runs", spec("torch.optim:NAdam", seed, {"lr": value}), [1.0, 2.0, 3.0, 4.0 + seed])
    made = write(read([tmp_path / "runs"], declared=EXPERIMENTS), tmp_path / "report")
    text = made.page.read_text()
    for said in ('"lr":"inf"', '"lr":"nan"', '"lr":0.001'):
        assert said in text
    assert all(run.counts for run in read_runs([tmp_path / "runs"], EXPERIMENTS).runs)
