"""``aida watch``: what it reads of files that grow, break off, start again or lie, and what it shows of them."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from select import select

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from aida import Aida
from aida.stepsizes import JsonLines, LayerStepsizes, StepsizeProbe, summarise
from aida_lab.cli import app
from aida_lab.cli.watch import watch
from aida_lab.progress.frame import frame, trend
from aida_lab.progress.watched import Watched, Watcher

DOCUMENT = Path(__file__).parents[1] / "docs" / "stepsizes.md"


def record(step: int, layer: str = "a", **values) -> LayerStepsizes:
    known = {
        "step": step, "layer": layer, "method": "Aida", "group": 0, "shape": (4, 3), "elements": 12,
        "mean": float(step), "std": 0.0, "min": 1.0, "max": 1.0, "quantiles": (), "bound": 316.2, "at_bound": 0.25,
        "cosine": None, "scale_m": None, "scale_g": None, "hyper": {"lr": 0.001, "eps": 1e-8},
        "weight_norm": 2.0, "update_norm": 0.01,
    }  # fmt: skip
    return LayerStepsizes(**{**known, **values})


def write(path: Path, *measurements: list[LayerStepsizes]) -> Path:
    with JsonLines(path) as sink:
        for layers in measurements:
            for each in layers:
                sink(each)
            sink(summarise(layers))
    return path


def steps(watched: Watched) -> dict[str, list[int]]:
    return {records[0].layer: [each.step for each in records] for records in watched.layers}


def shown(path: Path, width: int = 80) -> str:
    return "\n".join(line.plain for line in frame(Watcher([path]).look(), width))


# -- reading -----------------------------------------------------------------------------------------


def test_a_file_is_followed_from_before_it_exists(tmp_path):
    path = tmp_path / "run" / "stepsizes.jsonl"
    watcher = Watcher([tmp_path / "run"])
    (nothing,) = watcher.look()
    assert nothing.changed is None
    assert not nothing.layers
    write(path, [record(1, "a"), record(1, "b")])
    assert steps(watcher.look()[0]) == {"a": [1], "b": [1]}
    write(path, [record(2, "a"), record(2, "b")])
    assert steps(watcher.look()[0]) == {"a": [2, 1], "b": [2, 1]}


def test_a_measurement_counts_once_its_last_line_is_whole(tmp_path):
    path = write(tmp_path / "a.jsonl", [record(1, "a"), record(1, "b")])
    whole = write(tmp_path / "b.jsonl", [record(2, "a"), record(2, "b")]).read_bytes()
    before = path.read_bytes()
    for cut in (1, len(whole) // 2, whole.index(b"\n") + 1, len(whole) - 1):
        path.write_bytes(before + whole[:cut])
        assert steps(Watcher([path]).look()[0]) == {"a": [1], "b": [1]}
    path.write_bytes(before + whole)
    assert steps(Watcher([path]).look()[0]) == {"a": [2, 1], "b": [2, 1]}


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path):
    path = write(tmp_path / "a.jsonl", *([record(step)] for step in (10, 20, 30)))
    write(path, *([record(step, mean=7.0)] for step in (20, 30, 40)))
    (watched,) = Watcher([path]).look()
    assert steps(watched) == {"a": [40, 30, 20, 10]}
    assert [each.mean for each in watched.layers[0]] == [7.0, 7.0, 7.0, 10.0]


def test_a_run_that_starts_again_starts_a_new_trend(tmp_path):
    path = write(tmp_path / "a.jsonl", *([record(step)] for step in (10, 20, 30)))
    watcher = Watcher([path])
    watcher.look()
    write(path, [record(10)])
    assert steps(watcher.look()[0]) == {"a": [10]}
    path.unlink()
    write(path, [record(5, "other")])
    assert steps(watcher.look()[0]) == {"other": [5]}


def test_a_layer_that_is_gone_is_no_longer_shown(tmp_path):
    path = write(tmp_path / "a.jsonl", [record(1, "a"), record(1, "b")], [record(2, "b")])
    assert steps(Watcher([path]).look()[0]) == {"a": [1], "b": [2, 1]}
    write(path, *([record(step, "b")] for step in range(3, 9)))
    assert list(steps(Watcher([path]).look()[0])) == ["b"]


def test_two_optimizers_with_one_file_are_shown_together(tmp_path):
    path = tmp_path / "a.jsonl"
    for step in range(1, 4):
        write(path, [record(5 * step, "discriminator")], [record(step, "generator", method="Adam")])
    (watched,) = Watcher([path]).look()
    assert steps(watched) == {"discriminator": [15, 10, 5], "generator": [3, 2, 1]}
    assert "Aida, Adam" in shown(path)


def test_of_a_long_file_the_end_is_read(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", *([record(step)] for step in range(200)))
    assert steps(Watcher([path]).look()[0]) == {"a": list(range(199, 139, -1))}
    monkeypatch.setattr("aida_lab.progress.watched._TAIL", 5000)
    assert steps(Watcher([path]).look()[0])["a"][:3] == [199, 198, 197]


def test_an_unchanged_file_is_not_read_again(tmp_path):
    watcher = Watcher([write(tmp_path / "a.jsonl", [record(1)])])
    (first,), (second,) = watcher.look(), watcher.look()
    assert first is second


def test_a_folder_of_files_and_a_folder_of_runs_show_each(tmp_path):
    write(tmp_path / "one.jsonl", [record(1)])
    write(tmp_path / "two" / "stepsizes.jsonl", [record(2)])
    (tmp_path / "notes.txt").write_text("no run")
    assert [each.name for each in Watcher([tmp_path]).look()] == [str(tmp_path / "one.jsonl"), str(tmp_path / "two")]


def test_of_many_runs_those_that_changed_last_are_shown(tmp_path):
    for number in range(30):
        path = write(tmp_path / f"{number:02}.jsonl", [record(1)])
        os.utime(path, (1e9 + number, 1e9 + number))
    watcher = Watcher([tmp_path])
    assert [Path(each.name).stem for each in watcher.look()] == [f"{number:02}" for number in range(10, 30)]
    assert watcher.found == 30


def test_curves_are_all_columns_with_numbers(tmp_path):
    write(tmp_path / "stepsizes.jsonl", [record(1)])
    rows = [{"epoch": n, "loss": 1 / n, "accuracy": 90 + n, "lr": 0.1, "note": "x"} for n in (1, 2, 3)]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, {"epoch": 4, "loss": math.nan, "accuracy": 94}])
    (tmp_path / "curve.jsonl").write_text(text + '{"epoch": 5, "lo')
    (watched,) = Watcher([tmp_path]).look()
    assert watched.curves == {"loss": [1.0, 0.5, 1 / 3, None], "accuracy": [91.0, 92.0, 93.0, 94.0]}
    assert watched.epoch == 4
    assert "epoch 4" in shown(tmp_path)
    assert "loss not finite █▃▁x accuracy 94.00 ▁▃▆█" in shown(tmp_path)


# -- one frame ---------------------------------------------------------------------------------------


def test_a_frame_shows_each_layer_with_its_numbers_and_trends(tmp_path):
    first = [record(10, "first", at_bound=1.0), record(10, "second", bound=None, at_bound=None, update_norm=None)]
    second = [replace(first[0], step=20, mean=250.0, update_norm=0.02), replace(first[1], step=20)]
    text = shown(write(tmp_path / "a.jsonl", first, second))
    assert "step 20" in text
    assert "Aida, lr 0.001, eps 1e-08, 100 % at bound 316, update/weight 0.01, spread 25" in text
    one, other = (line for line in text.splitlines() if re.match("first|second", line))
    assert one.split() == ["first", "250", "▁█", "██████", "100", "%", "0.01", "▁█"]
    assert other.split() == ["second", "10", "▄▄", "xx"]


@pytest.mark.parametrize("width", [60, 80, 100, 160, 300])
@pytest.mark.parametrize("lost", [None, 0.5])
def test_lines_fit_the_terminal_and_columns_stand_below_their_heads(width, lost, tmp_path):
    names = ["a", "transformer.h.11.attention.output_projection.weight", "層" * 40]
    path = write(tmp_path / "a.jsonl", *([record(step, name, lost=lost) for name in names] for step in range(1, 50)))
    lines = shown(path, width).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert len({cell_len(line) for line in lines[-3:]}) == 1
    assert lines[-2].split()[0].endswith("tion.weight"[-min(width // 10, 11) :])
    if width >= 80:
        assert "at the bound" in lines[-4]
        assert lines[-3].index("0.005") + len("0.005") == lines[-4].index("update/weight") + len("update/weight")
        assert ("lost" in lines[-4]) == ("50 %" in lines[-3]) == (lost is not None)


def test_hundreds_of_layers_give_a_line_each(tmp_path):
    layers = [record(1, f"layer {number}") for number in range(700)]
    assert len(shown(write(tmp_path / "a.jsonl", layers)).splitlines()) == 700 + 4


def test_numbers_that_are_not_finite_are_shown_as_such(tmp_path):
    layers = [record(1, "odd", mean=math.nan, at_bound=math.nan, update_norm=math.inf), record(1, "even")]
    text = shown(write(tmp_path / "a.jsonl", layers))
    assert "nan x" in text
    assert re.search(r"even +1 ", text)


def test_a_trend_scales_to_its_width_and_keeps_the_last_value():
    assert trend([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert trend([0] * 1000 + [1], 10) == "▁▁▁▁▁▁▁▁▁█"
    assert trend([1, 10, 100, 1000], 4, log=True) == "▁▃▆█"
    assert trend([5, 5], 4) == "▄▄"
    assert trend([1, None, math.inf, 2], 4) == "▁xx█"
    assert trend([], 4) == ""
    assert trend([1, 2], 4, ascii_only=True).isascii()


def test_terminals_without_unicode_get_ascii(tmp_path):
    runs = Watcher([write(tmp_path / "a.jsonl", [record(1)], [record(2)])]).look()
    assert "".join(line.plain for line in frame(runs, 80, ascii_only=True)).isascii()


# -- the command -------------------------------------------------------------------------------------


def call(*words: object):
    return CliRunner(env={"COLUMNS": "120", "TERM": "dumb"}).invoke(app, ["watch", *map(str, words)])


def test_the_documented_lines_make_any_loop_watchable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    (code,) = [block for block in blocks if "curve.jsonl" in block]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    names = {"model": model, "optimizer": optimizer, "batches": [torch.randn(8, 4) for _ in range(20)], "epochs": 2}
    exec(compile(code, "stepsizes.md", "exec"), names)
    (command,) = re.findall(r"^    aida watch (\S+)$", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = call(command, "--once")
    assert found.exit_code == 0, found.output
    assert "epoch 2  step 40" in found.output
    assert re.search(r"loss [\d.]+ █▁", found.output)
    for name, _ in model.named_parameters():
        (line,) = [line for line in found.output.splitlines() if line.startswith(f"{name} ")]
        assert re.search(r"\d %", line), "the share at the bound"
        assert re.search(r" 0\.0\d+ ", line), "the update-to-weight ratio"


def test_runs_of_the_lab_show_state_epoch_and_metric(tmp_path):
    words = ["train", "digits", "--optimizer", "aida", "--optimizer", "sgd", "--epochs", "2", "--limit", "4"]
    trained = CliRunner().invoke(app, [*words, "--device", "cpu", "--probe", "2", "--out", str(tmp_path / "runs")])
    assert trained.exit_code == 0, trained.output
    found = call(tmp_path / "runs", "--once")
    assert re.search(r"^digits aida-k2 seed 0  finished  epoch 2/2  step 8 ", found.output, flags=re.MULTILINE)
    assert re.search(r"^digits sgd seed 0  finished  epoch 2/2 ", found.output, flags=re.MULTILINE)
    assert len(re.findall(r"accuracy [\d.]+ ", found.output)) == 2
    assert re.search(r"^features.0.weight .*[▁-█]{4}.* %.*[▁-█]{4}", found.output, flags=re.MULTILINE)


def test_nothing_to_see_is_said_and_fails(tmp_path):
    found = call(tmp_path / "typo", "--once")
    assert (found.exit_code, found.output) == (1, f"{tmp_path / 'typo'}  nothing there yet\n")


def test_without_a_terminal_the_state_is_printed_once(tmp_path):
    path = write(tmp_path / "a.jsonl", [record(1)])
    assert call(path).output.replace(" s ago", "") == call(path, "--once").output.replace(" s ago", "")


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("end", [b"q", signal.SIGINT, signal.SIGTERM], ids=str)
def test_on_a_terminal_it_follows_the_file_until_a_key_or_a_signal_ends_it(end, tmp_path, monkeypatch):
    import pty
    import termios

    path = write(tmp_path / "a.jsonl", [record(1, f"layer{number}") for number in range(100)])
    main, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)

    def user() -> None:
        try:
            said = until(main, b"of 104")
            assert b"layer1" in said
            assert b"layer99" not in said
            os.write(main, b" " * 3 + b"\x1b[B" * 99)  # pages and arrows down to the end
            until(main, b"layer99")
            write(path, [record(7, f"layer{number}") for number in range(100)])
            os.write(main, b"\x1b[5~" * 9)
            until(main, b"step 7")
            os.write(main, end) if isinstance(end, bytes) else os.kill(os.getpid(), end)
            until(main, b"\x1b[?1049l")  # leaves the alternate screen
        except BaseException:
            os.kill(os.getpid(), signal.SIGINT)
            raise

    handler = signal.getsignal(signal.SIGTERM)
    with os.fdopen(os.dup(terminal), "w") as out, open(terminal) as keys, ThreadPoolExecutor(1) as thread:
        screen = Console(file=out, force_terminal=True, width=80, height=24)
        monkeypatch.setitem(watch.__globals__, "console", lambda: screen)
        monkeypatch.setattr("sys.stdin", keys)
        acting = thread.submit(user)
        try:
            with pytest.raises(SystemExit, match="143") if end == signal.SIGTERM else nullcontext():
                watch([path])
        finally:
            signal.signal(signal.SIGTERM, handler)
        acting.result()
        assert termios.tcgetattr(terminal) == before
    os.close(main)


def until(terminal: int, wanted: bytes, seconds: float = 60) -> bytes:
    """What appears on a terminal up to these bytes."""
    said, end = b"", time.monotonic() + seconds
    while wanted not in said:
        assert time.monotonic() < end, said
        if select([terminal], [], [], 1.0)[0]:
            said += os.read(terminal, 65536)
    return said


def test_a_probe_of_aida_gives_all_columns(tmp_path):
    p = nn.Parameter(torch.full((4, 3), 2.0))
    optimizer = Aida([p])
    with JsonLines(tmp_path / "stepsizes.jsonl") as sink:
        StepsizeProbe(optimizer, [("weight", p)], every=1, sink=sink)
        for _ in range(3):
            p.grad = torch.full((4, 3), 1e-8)
            optimizer.step()
    text = shown(tmp_path)
    ratio = float(re.search(r"update/weight ([\d.e-]+)", text)[1])
    assert ratio == pytest.approx(1e-3 * math.sqrt(1e-3 / 1e-8) * 1e-8 / 2, rel=0.04)  # SGD at the bound
    assert "100 % at bound 316" in text
