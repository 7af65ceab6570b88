"""The files of a report: a page that is whole, safe and asks for nothing; figures; the command that makes them."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from aida_lab.cli import app
from aida_lab.experiments import experiments
from aida_lab.report import charts, naming, plots, tables
from aida_lab.report.build import read, write
from aida_lab.report.charts import thinned
from aida_lab.report.page import payload
from aida_lab.report.profile import cost, profile
from aida_lab.spec import Metric
from report_fixture import (
    EXPERIMENTS,
    SHOWN,
    begin_run,
    experiment,
    learning_curve,
    spec,
    write_diverged_run,
    write_run,
    write_showcase,
    write_stepsizes,
)

VOID = {"meta", "link", "br", "img", "input"}


class Page(HTMLParser):
    """Tags that are balanced, with what tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts[self.open[-1] if self.open else ""] = self.texts.get(self.open[-1] if self.open else "", "") + data

    def every(self, name: str) -> list[str]:
        return [found[name] or "" for _, found in self.tags if name in found]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    write_showcase(root / "runs")
    for optimizer in ("adam", "adabelief", "aida"):
        method = "aida-k2" if optimizer == "aida" else optimizer
        write_stepsizes(root / "runs" / spec(method, 0, epochs=40).key, optimizer)
    (root / "runs" / spec("sgd", 0, epochs=40).key / "stepsizes.jsonl").write_text("nothing of the kind\n")
    report = write(read([root / "runs"], declared=SHOWN), root / "out")
    return root, report, (root / "out" / "index.html").read_text(encoding="utf-8")


def data_of(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def test_the_page_is_whole(made):
    page = Page(made[2])
    ids = page.every("id")
    assert len(ids) == len(set(ids))
    for link in page.every("href"):
        if link.startswith("#"):
            assert link[1:] in ids


def test_the_page_asks_for_nothing_from_anywhere(made):
    page = Page(made[2])
    assert not [tag for tag, found in page.tags if tag == "script" and "src" in found]
    assert all(source.startswith("data:") for source in page.every("src"))
    assert not [link for link in page.every("href") if re.match(r"[a-z]+:(?!,)|//", link) and link != "data:,"]
    outside = set(re.findall(r"https?://[^\s\"'<)]+", re.sub(r"base64,[^\"]+", "", made[2])))
    assert outside <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"url\((?!#)", made[2].replace("url(#${", "url(#"))
    assert "default-src 'none'" in made[2]


def test_links_lead_to_files_that_are_there(made):
    root, _, text = made
    links = [link for link in Page(text).every("href") if not link.startswith(("#", "data:"))]
    assert links
    assert [link for link in links if not (root / "out" / link).exists()] == []
    for run in data_of(text)["runs"]:
        assert (root / "out" / run["link"]).exists()


def test_tables_open_where_there_is_something_to_see(made):
    parts = re.findall(r"<details( open)?>\s*<summary><h3>([^<]+)</h3>", made[2])
    assert len(parts) > 4
    assert all(opened for opened, _ in parts)
    assert "No runs yet: resnet34 on cifar10 (<code>aida train resnet34-cifar10</code>)" in made[2]


def test_what_a_run_says_is_text_and_nothing_else(made):
    page = Page(made[2])
    assert "alert(1)" not in page.texts["script"].replace("\\u003cscript>alert(1)\\u003c/script>", "")
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in made[2]


def test_every_number_opens_its_runs_and_every_run_its_spec(made):
    root, _, text = made
    data = data_of(text)
    opened = Page(text).every("data-opens")
    assert len(opened) > 40
    assert set(opened) <= set(data["configurations"])
    shown = set()
    for found in data["configurations"].values():
        for run in (data["runs"][index] for index in found["runs"]):
            content = {**found["spec"], "seed": run["seed"], "probe_every": run["probe"]}
            assert content == json.loads((root / "runs" / run["key"] / "spec.json").read_text())
            shown.add(run["key"])
    assert shown == {folder.name for folder in (root / "runs").iterdir()} - {"0123456789abcdef"}


def test_every_number_of_ours_in_a_table_can_be_opened(made):
    for column in read([made[0] / "runs"], declared=SHOWN).columns:
        found = tables.comparison(column)
        cells = [cell for cell in column.cells if cell.configurations]
        for row, cell in zip(found.rows, cells, strict=True):
            for head, field in zip(found.heads[1:], row[1:], strict=True):
                if cell.chosen and field.order is not None and head.text not in ("paper", "tried"):
                    assert field.opens in {each.id for each in cell.configurations}, (cell.method, head.text)


def test_curves_on_the_page_are_those_of_the_runs(made):
    root, _, text = made
    data = data_of(text)
    for found in data["configurations"].values():
        column = data["columns"][found["column"]]
        for run in (data["runs"][index] for index in found["runs"]):
            rows = [json.loads(line) for line in (root / "runs" / run["key"] / "curve.jsonl").read_text().splitlines()]
            known = {row["epoch"]: row for row in rows}
            key = "valid_ppl" if "perplexity" in column["metric"] else "accuracy"
            epochs = [epoch for epoch in column["epochs"] if epoch in known]
            assert run["metric"] == pytest.approx([known[epoch][key] for epoch in epochs], rel=1e-4)


def test_a_seed_with_a_probe_beside_one_without_counts_once_and_shows_its_stepsizes(tmp_path):
    runs = tmp_path / "runs"
    for seed in range(3):
        write_run(runs, spec("aida-k2", seed), [90.0 + seed] * 4)
    again = write_run(runs, spec("aida-k2", 0, probe_every=10), [90.0] * 4)
    write_stepsizes(again, "aida")
    results = read([runs], declared=EXPERIMENTS)
    data = payload(results, tmp_path)
    (found,) = data["configurations"].values()
    assert (len(found["runs"]), found["facts"]["seeds"]) == (4, "3")
    assert found["facts"]["last epoch"] == "91.00 ± 1.00"
    names = [path.name for path in write(results, tmp_path / "out").files]
    assert "all.png" in names


def test_a_place_that_is_no_folder_is_one_line(made, tmp_path):
    (tmp_path / "taken").write_text("")
    done = CliRunner().invoke(app, ["report", str(made[0] / "runs"), "--out", str(tmp_path / "taken")])
    assert done.exit_code == 2
    assert "taken: Not a directory; choose another folder with --out" in done.output


def test_unfinished_and_damaged_runs_are_on_the_page(made):
    text = made[2]
    for word in ("0123456789abcdef", "stopped", "failed", "spec.json is damaged", "holds no stepsize record"):
        assert word in text


def test_the_same_runs_give_the_same_page(made):
    root, report, text = made
    again = write(read([root / "runs"], declared=SHOWN), root / "again")
    # links to run folders start one folder up in both
    assert again.page.read_text(encoding="utf-8") == text
    assert [path.relative_to(root / "again") for path in again.files] == [
        path.relative_to(root / "out") for path in report.files
    ]


def test_figures_are_there_as_png_and_svg(made):
    root, report, _ = made
    names = {path.relative_to(root / "out" / "figures").as_posix() for path in report.files if "figures" in path.parts}
    stepsizes = "stepsizes-vgg11-cifar10-fp32"
    for stem in (
        "curves-table-II", "curves-table-III", "curves-others", "curves-shortened", "time-table-III",
        "search-eps-table-III", "search-eps-shortened", "profile",
        f"{stepsizes}/figure-1", f"{stepsizes}/figure-2", f"{stepsizes}/all",
    ):  # fmt: skip
        assert {f"{stem}.png", f"{stem}.svg"} <= names
        assert (root / "out" / "figures" / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (root / "out" / "figures" / f"{stem}.svg").read_text()
    assert made[2].count("data:image/svg+xml;base64,") == 3  # stepsizes: two of the paper's and all


def test_a_page_without_runs_names_the_command_that_makes_them(tmp_path):
    write(read([tmp_path], declared=EXPERIMENTS), tmp_path / "out")
    text = (tmp_path / "out" / "index.html").read_text()
    Page(text)
    assert "aida train lstm1-ptb" in text
    assert "None: every run folder could be read" in text


def test_a_page_without_a_finished_run_is_whole(tmp_path):
    begin_run(tmp_path / "runs", spec("adam", 0), [50.0, 51.0])
    begin_run(tmp_path / "runs", spec("sgd", 0, experiment="unknown"), [])
    report = write(read([tmp_path / "runs"], declared=EXPERIMENTS), tmp_path / "out")
    text = report.page.read_text()
    page = Page(text)
    for link in page.every("href"):
        assert link.startswith(("#", "data:")) or (tmp_path / "out" / link).exists(), link
    assert "1 run not finished" in text
    assert not page.every("data-panel")


def test_curves_are_thinned_from_the_first_epoch_to_the_last():
    assert thinned(5, 200) == [1, 2, 3, 4, 5]
    for epochs, points in ((400, 200), (201, 200), (10_000, 20)):
        found = thinned(epochs, points)
        assert (len(set(found)), found[0], found[-1]) == (points, 1, epochs)
        assert max(b - a for a, b in pairwise(found)) <= epochs / (points - 1) + 1


def test_an_unfinished_run_is_thinned_as_its_finished_brothers(tmp_path):
    long = {"long": SHOWN["digits"].__class__(**{**vars(SHOWN["digits"]), "name": "long", "epochs": 500})}
    write_run(tmp_path, spec("adam", 0, experiment="long", epochs=500), learning_curve(90, 500, "a"))
    begin_run(tmp_path, spec("adam", 1, experiment="long", epochs=500), learning_curve(90, 100, "b"))
    done, begun = payload(read([tmp_path], declared=long), tmp_path)["runs"]
    assert (len(done["metric"]), begun["done"]) == (200, 100)
    assert len(begun["metric"]) == sum(epoch <= 100 for epoch in thinned(500, 200))


def test_what_is_measured_at_its_end_alone_is_shown_by_its_loss(tmp_path):
    for seed in range(2):
        folder = write_run(
            tmp_path, spec("adam", seed), [80.0, 80.0, 80.0, 90.0], losses=[-1.0, -2.0, -3.0, -4.0 + seed]
        )
        rows = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
        for row in rows[:-1]:
            del row["accuracy"]
        (folder / "curve.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = read([tmp_path], declared=EXPERIMENTS)
    (first, *_) = charts.views(results.columns[0], range(1, 5))
    (axis,) = plots.figure_of([first], naming.looks(results.methods)).axes
    assert axis.get_ylabel() == "training loss"
    assert list(axis.lines[0].get_ydata()) == [-1.0, -2.0, -3.0, -3.5]
    assert payload(results, tmp_path)["runs"][0]["metric"] == [None, None, None, 90.0]


def test_a_curve_is_the_mean_over_seeds_with_a_band_of_one_deviation(tmp_path):
    for seed in range(3):
        write_run(tmp_path, spec("adam", seed), [10.0, 20.0, 30.0 + seed, 40.0])
    begin_run(tmp_path, spec("adam", 9), [99.0])
    results = read([tmp_path], declared=EXPERIMENTS)
    shown = charts.curves(results.columns[0], "metric", range(1, 5))
    (axis,) = plots.figure_of([shown], naming.looks(results.methods)).axes
    assert list(axis.lines[0].get_ydata()) == [10.0, 20.0, 31.0, 40.0]
    (drawn,) = charts.in_json(shown, float)["series"]  # the page shows the same numbers
    assert (drawn["y"], drawn["low"][2], drawn["high"][2]) == ([10.0, 20.0, 31.0, 40.0], 30.0, 32.0)
    assert sorted({y for x, y in axis.collections[0].get_paths()[0].vertices if x == 3}) == pytest.approx([30.0, 32.0])


def test_a_band_on_a_log_axis_is_positive_and_symmetric_on_it(tmp_path):
    for seed, loss in enumerate((0.01, 0.5)):
        write_run(tmp_path, spec("adam", seed), [10.0] * 4, losses=[2.0, 1.0, 1.0, loss])
    shown = charts.curves(read([tmp_path], declared=EXPERIMENTS).columns[0], "loss", range(1, 5))
    point = shown.series[0].points[-1]
    assert shown.y.label == "training loss, log scale"
    assert 0 < point.low < point.y
    assert point.high / point.y == pytest.approx(point.y / point.low)


def test_the_profile_counts_a_better_configuration_that_the_paper_did_not_try(tmp_path):
    for name in ("vgg11-cifar10", "digits"):
        for seed in range(2):
            for method in ("aida-k2", "adam"):
                write_run(tmp_path, spec(method, seed, experiment=name), [90.0] * 4)
    write_run(tmp_path, spec("adam", 0, {"lr": 3e-3}), [95.0] * 4)
    found = profile(read([tmp_path], declared=EXPERIMENTS).comparable)
    assert found.gaps == {"aida-k2": (0.0, 1.0), "adam": (0.0, 0.0)}


def test_the_profile_by_hand(tmp_path):
    language = EXPERIMENTS["lstm1-ptb"].metrics["default"]
    for seed in range(2):
        for method, accuracy, ppl in (("aida-k2", 90.0, 80.0), ("adam", 88.0, 60.0)):
            write_run(tmp_path, spec(method, seed), [accuracy] * 4)
            write_run(tmp_path, spec(method, seed, experiment="lstm1-ptb"), [ppl] * 4, metric=language)
        for method in ("sgd", "yogi"):
            write_run(tmp_path, spec(method, seed), [80.0] * 4)
    write_diverged_run(tmp_path, spec("sgd", 0, experiment="lstm1-ptb"), language)
    found = profile(read([tmp_path], declared=EXPERIMENTS).comparable)
    # errors of 10, 12 and 20 %, perplexities of 80 and 60; Yogi was not run on both
    assert found.gaps == {
        "aida-k2": pytest.approx((0.0, 1 / 3)), "adam": pytest.approx((0.0, 0.2)), "sgd": pytest.approx((1.0,)),
    }  # fmt: skip
    assert [found.share("adam", gap) for gap in (0.0, 0.19, 0.21)] == [0.5, 0.5, 1.0]
    assert found.share("sgd", 100.0) == 0.5
    assert cost(75.0, EXPERIMENTS["digits"].metrics["default"]) == 25.0


def test_a_method_without_any_merit_is_within_no_gap(tmp_path):
    bleu = Metric("bleu", "BLEU", "higher")
    declared = {name: experiment(name, "", bleu) for name in ("one", "two")}
    for name in declared:
        for method, value in (("aida-k2", 20.0), ("adam", 0.0)):
            write_run(tmp_path, spec(method, 0, experiment=name), [value] * 4, metric=bleu)
    found = profile(read([tmp_path], declared=declared).comparable)
    assert found.gaps == {"aida-k2": (0.0, 0.0), "adam": ()}
    assert found.share("adam", 1e9) == 0.0


def test_one_task_makes_no_profile(tmp_path):
    for method in ("adam", "sgd"):
        write_run(tmp_path, spec(method, 0), [80.0] * 4)
    assert profile(read([tmp_path], declared=EXPERIMENTS).comparable) is None


def test_methods_are_told_apart_by_more_than_colour():
    methods = [*naming._KNOWN, "torch.optim:NAdam", "mine:Other"]
    found = naming.looks(methods)
    assert len(set(found.values())) == len(methods)
    assert naming.title("aida-k2") == "Aida (K=2)"
    assert naming.title("torch.optim:NAdam") == "NAdam (torch.optim)"
    assert naming.ordered(["sgd", "x:Y", "aida-k1", "aida-k2"]) == ["aida-k2", "aida-k1", "sgd", "x:Y"]
    variants = [f"aida-k2 eps {eps}" for eps in ("1e-16", "1e-12", "1e-8, projections 2")]
    assert naming.ordered(reversed(variants)) == variants


# --- the command ---


def call(*words: object):
    return CliRunner(env={"COLUMNS": "220", "TERM": "dumb"}).invoke(app, [str(word) for word in words])


@pytest.fixture
def digits(tmp_path):
    declared = experiments()["digits"]
    for method in ("aida-k2", "adam"):
        for seed in range(2):
            wanted = spec(method, seed, experiment="digits", epochs=declared.epochs, batch=declared.batch)
            write_run(tmp_path / "runs", wanted, learning_curve(97, declared.epochs, wanted.key))
    return tmp_path


def test_the_command_writes_a_report_and_says_where(digits):
    found = call("report", digits / "runs", "--out", digits / "out")
    assert found.exit_code == 0, found.output
    assert str(digits / "out" / "index.html") in found.output
    assert "4 runs: 4 finished" in found.output
    assert (digits / "out" / "tables" / "others.md").exists()


def test_the_command_takes_several_folders_and_a_reference(digits):
    shutil.copytree(digits / "runs", digits / "more")
    found = call("report", digits / "runs", digits / "more", "--out", digits / "out", "--reference", "adam")
    assert found.exit_code == 0, found.output
    assert "4 runs: 4 finished, 4 folders not read" in found.output


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere"], "no runs at nowhere: it is not a folder"),
        (["empty"], "no runs in empty; aida train EXPERIMENT writes runs"),
        (["runs", "--reference", "adamw"], "--reference 'adamw' has no runs; there are runs of aida-k2, adam"),
    ],
)
def test_what_cannot_be_reported_is_one_line(digits, monkeypatch, words, line):
    monkeypatch.chdir(digits)
    (digits / "empty").mkdir()
    found = call("report", *words)
    assert found.exit_code == 2
    assert line in found.output
    assert len(found.output.strip().splitlines()) == 1
