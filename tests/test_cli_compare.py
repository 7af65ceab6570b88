"""``aida compare``, the means that ``aida train`` and ``aida runs`` show, and what an interrupted command counts."""

from __future__ import annotations

import io
import os
import re
import shlex
import statistics
from pathlib import Path

import pytest
from rich.console import Console
from scipy.stats import ttest_ind
from typer.testing import CliRunner

from aida_lab.cli import app
from aida_lab.events import Event
from aida_lab.experiments import find_experiment
from aida_lab.progress.display import shown
from aida_lab.progress.status import Board
from aida_lab.runs.records import scan
from fake_runs import spec as fake_spec
from report_fixture import begin_run, spec, write_diverged_run, write_run

#: Accuracy of three seeds per method on digits; perplexity on lstm1-ptb.
ACCURACY = {"aida-k2": [97.0, 97.2, 97.1], "adam": [96.0, 96.3, 96.1], "sgd": [97.0, 97.4, 97.3]}
PERPLEXITY = {"aida-k2": [82.0, 82.1, 82.3], "adam": [84.0, 84.5, 84.1]}


def call(*words: object):
    return CliRunner(env={"COLUMNS": "220", "TERM": "dumb"}).invoke(app, [str(word) for word in words])


def write(root: Path, name: str, values: dict[str, list[float]]) -> None:
    """Runs that end with these values, one per seed, of an experiment as it is declared."""
    declared = find_experiment(name)
    variant = declared.variants[0]
    metric = declared.metrics[variant]
    fields = {"experiment": name, "variant": variant, "epochs": declared.epochs, "batch": declared.batch}
    for method, finals in values.items():
        for seed, final in enumerate(finals):
            wanted = spec(method, seed, **fields)
            worse = final - 1 if metric.better == "higher" else final + 1
            write_run(root, wanted, [worse] * (declared.epochs - 1) + [final], metric=metric)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs", "digits", ACCURACY)
    write(tmp_path / "runs", "lstm1-ptb", PERPLEXITY)
    return tmp_path / "runs"


@pytest.mark.parametrize(("margin", "said"), [(0.8, "equivalent within 0.8"), (0.2, "not shown to be equivalent")])
def test_equivalence_is_tested_by_two_one_sided_tests(runs, margin, said):
    result = call("compare", "aida-k2", "sgd", "runs", "--within", margin)
    a, b = ACCURACY["aida-k2"], ACCURACY["sgd"]
    p = max(
        ttest_ind(a, [x - margin for x in b], alternative="greater").pvalue,
        ttest_ind(a, [x + margin for x in b], alternative="less").pvalue,
    )
    assert said in result.output
    assert (p < 0.05) == ("not shown" not in said)
    assert f"within {margin} (p = {p:.2g})" in result.output
    assert "equivalent" not in call("compare", "aida-k2", "sgd", "runs").output


def test_compare_names_a_better_configuration_with_fewer_seeds(runs):
    declared = find_experiment("lstm1-ptb")
    variant = declared.variants[0]
    fields = {"experiment": "lstm1-ptb", "variant": variant, "epochs": declared.epochs, "batch": declared.batch}
    write_run(runs, spec("adam", 0, {"lr": 3e-3}, **fields), [81.0] * declared.epochs, metric=declared.metrics[variant])
    found = call("compare", "aida-k2", "adam").output.splitlines()
    assert [line for line in found if "but " in line] == [
        "  but adam has a better configuration: 81.00 (n = 1; lr=0.003)"
    ]
    assert any("aida-k2 is better than adam (p " in line for line in found), "with the configurations of the table"


def test_compare_names_the_better_method_of_each_experiment_with_the_p_value_of_a_t_test(runs):
    for words in (("aida-k2", "adam"), ("adam", "aida-k2", runs), ("aida", "adam", "runs")):
        found = call("compare", *words)
        assert found.exit_code == 0, found.output
        verdicts = re.findall(r"^(.*): aida-k2 is better than adam \(p (?:= )?(.*)\)$", found.output, re.MULTILINE)
        assert [title for title, _ in verdicts] == [
            find_experiment(name).title for name in sorted(("digits", "lstm1-ptb"), reverse=True)
        ]
        for (_, p), values in zip(verdicts, (PERPLEXITY, ACCURACY), strict=True):
            exact = ttest_ind(values["aida-k2"], values["adam"]).pvalue
            assert p == ("< 0.001" if exact < 0.001 else f"{exact:.3f}")


def test_compare_gives_the_means_the_difference_and_its_interval(runs):
    found = " ".join(call("compare", "aida-k2", "sgd").output.split())
    p = ttest_ind(ACCURACY["aida-k2"], ACCURACY["sgd"])
    low, high = p.confidence_interval()
    assert f"no significant difference between aida-k2 and sgd (p = {p.pvalue:.3f})" in found
    assert "aida-k2 97.10 ± 0.1 (n = 3; eps=1e-09), sgd 97.23 ± 0.21 (n = 3)" in found
    assert f"difference -0.133, 95 % interval {low:+.3g} to {high:+.3g}" in found
    assert "not compared, no finished run of sgd" in found  # on the other experiment


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("aida-k2", "adm"), "no runs of 'adm' in runs; there are runs of adam, aida-k2, sgd"),
        (("aida", "aida-k2"), "aida and aida-k2 are the same method, aida-k2; name two methods"),
        (("aida-k2", "sgd", "nowhere"), "no runs at nowhere: it is not a folder"),
    ],
)
def test_methods_that_cannot_be_compared_are_one_line(runs, words, line):
    found = call("compare", *words)
    assert (found.exit_code, found.output.count("\n")) == (2, 1)
    assert line in found.output


def test_an_optimizer_with_runs_as_two_methods_must_be_named_in_full(runs):
    write(runs, "digits", {"aida-k1": [97.0]})
    found = call("compare", "aida", "sgd")
    assert found.exit_code == 2
    assert "'aida' is ambiguous: there are runs of aida-k1 and aida-k2; name one of them" in found.output
    assert "not tested: n=1, no test" in call("compare", "aida-k1", "sgd").output


def test_seeds_that_diverged_are_not_compared(runs):
    declared = find_experiment("digits")
    write_diverged_run(runs, spec("sgd", 3, experiment="digits", epochs=declared.epochs, batch=declared.batch))
    assert "not tested: seeds diverged, no test" in call("compare", "aida-k2", "sgd").output


def test_runs_are_sorted_by_experiment_and_score_and_followed_by_their_means(runs):
    declared = find_experiment("digits")
    begin_run(runs, spec("sgd", 7, experiment="digits", epochs=declared.epochs, batch=declared.batch), [50.0])
    found = call("runs", runs)
    assert found.exit_code == 0, found.output
    listed, means = (part.splitlines() for part in found.output.split("mean over seeds"))
    order = re.compile(r"(digits|lstm1-ptb)\s+(aida-k2|adam|sgd)\b")
    methods = [("digits", "sgd"), ("digits", "aida-k2"), ("digits", "adam"), ("lstm1-ptb", "aida-k2")]
    methods.append(("lstm1-ptb", "adam"))
    assert list(dict.fromkeys(match.groups() for line in listed if (match := order.search(line)))) == methods
    rows = {match.groups(): line for line in means if (match := order.search(line))}
    assert list(rows) == methods
    for (name, method), line in rows.items():
        values = (ACCURACY if name == "digits" else PERPLEXITY)[method]
        assert f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2g}" in line
        assert re.search(r"\s3\s", line)
        assert ("1 stopped" in line) == (method == "sgd")


def test_train_ends_with_the_mean_per_method_and_a_next_command_that_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = ("--epochs", "2", "--limit", "2", "--device", "cpu")
    found = call(
        "train", "digits", "--optimizer", "adam", "--optimizer", "sgd", "--seeds", "0-2", "--out", "a b", *quick
    )
    assert found.exit_code == 0, found.output
    means = found.output.split("mean over seeds")[1]
    scores = {}
    for method in ("adam", "sgd"):
        best = [each.result["best"] for each in scan("a b") if each.spec.method == method]
        scores[method] = statistics.mean(best)
        line = next(line for line in means.splitlines() if line.split()[:1] == [method])
        assert f"{scores[method]:.2f} ± {statistics.stdev(best):.2g}" in line
        assert re.search(r"\s3\s", line)
    first, second = sorted(scores, key=lambda method: -scores[method])
    last = found.output.splitlines()[-1]
    assert last == f"Next: aida compare {first} {second} 'a b', or aida report 'a b'"
    for command in last.removeprefix("Next: ").split(", or "):
        done = call(*shlex.split(command)[1:])
        assert done.exit_code == 0, done.output


def test_seconds_per_epoch_are_shown_only_for_runs_that_did_not_share_the_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ("train", "digits", "--seeds", "0,1", "--epochs", "1", "--limit", "1", "--device", "cpu")
    assert "s per epoch" in call(*words, "--out", "alone").output
    assert "s per epoch" not in call(*words, "--out", "shared", "--jobs", "2").output


@pytest.mark.parametrize("terminal", [True, False])
def test_an_interrupted_command_does_not_count_its_runs_as_done(terminal):
    out = io.StringIO()
    specs = [fake_spec(seed) for seed in range(4)]
    board = Board()
    board.expect(specs)
    with shown(Console(file=out, force_terminal=terminal, width=200, color_system=None), board) as listen:
        for each in specs:
            listen(Event("started", each.key, 0, 2))
        listen(Event("finished", specs[0].key, 2, 2, row={"best": 1.0, "last": 1.0}))
        for each in specs[1:]:
            listen(Event("interrupted", each.key, 1, 2))
    said = out.getvalue()
    assert "1/4" in said
    assert "4/4" not in said
    assert board.done() == 2 + 3


def test_the_bar_of_all_runs_is_there_before_the_first_run_starts():
    out = io.StringIO()
    board = Board()
    board.expect(fake_spec(seed) for seed in range(4))
    with shown(Console(file=out, force_terminal=True, width=200, color_system=None), board):
        pass
    assert "0/4 runs" in out.getvalue()


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_the_demo_shows_a_bar_while_torch_loads(tmp_path):
    import pty
    import subprocess
    import sys

    main, terminal = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "aida_lab", "demo", "--out", str(tmp_path), "--epochs", "1", "--jobs", "1"]
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal, env=env)
    os.close(terminal)
    said = b""
    while b"0/18 runs" not in said:
        said += os.read(main, 4096)
    process.kill()
    process.wait()
    os.close(main)
    assert said.index(b"Training digits") < said.index(b"loading torch") < said.index(b"all runs")
