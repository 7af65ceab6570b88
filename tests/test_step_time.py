"""The benchmark of the step: it measures what it says, and hides no failure."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
from torch.optim import Optimizer

from contest import Lane, Round
from results import Entry, Workload
from rivals import BASELINE, RIVALS, Groups, Rival
from step_time import jobs, parse
from tables import markdown

SMALL = Workload("small", [(8, 4), (8,)])


def refuse(groups: Groups, capturable: bool) -> Optimizer:
    raise RuntimeError("no such thing here")


def absent(groups: Groups, capturable: bool) -> Optimizer:
    raise ModuleNotFoundError("No module named 'rival'", name="rival")


def run(rivals: Sequence[Rival], workloads: Sequence[Workload] = (SMALL,), seconds: float = 60.0) -> list[Entry]:
    deadline = time.monotonic() + seconds
    lap = Round("eager", torch.device("cpu"), repeats=3, steps=2, deadline=deadline, progress=lambda line: None)
    return lap.run(list(rivals), list(workloads))


def test_every_optimizer_has_samples_or_a_reason() -> None:
    entries = run(RIVALS)
    assert [entry.optimizer for entry in entries] == [rival.name for rival in RIVALS]
    assert all(len(entry.samples_ms) == 3 or entry.error for entry in entries)


def test_a_rival_that_fails_or_is_absent_is_in_the_table_with_its_reason() -> None:
    entries = run([RIVALS[0], Rival("broken", refuse, 28), Rival("missing", absent, 28)])
    text = markdown(entries, {}, 1e9)
    assert "RuntimeError: no such thing here" in text
    assert "rival is not installed" in text
    assert "| eager | broken | none [1] |" in text


def test_a_row_that_took_another_path_is_refused() -> None:
    foreach = next(rival for rival in RIVALS if rival.name == "Aida foreach")
    (entry,) = run([Rival("misnamed", foreach.build, 36, path="fused")])
    assert entry.error == "RuntimeError: took the path foreach, not fused"


def test_what_the_budget_leaves_out_is_named() -> None:
    (entry,) = run([RIVALS[0]], seconds=-1.0)
    assert entry.error == "not measured: the budget was spent"


def test_groups_have_values_of_their_own_and_share_all_tensors() -> None:
    entries = run([RIVALS[0]], [SMALL, Workload("small", SMALL.shapes, groups=2)])
    assert [entry.groups for entry in entries] == [1, 2]
    assert "2 groups / 1 group" in markdown(entries, {}, 1e9)


def test_a_clip_of_one_optimizer_leaves_the_gradients_of_the_others_alone() -> None:
    clipping = next(rival for rival in RIVALS if rival.clip_gradients)
    seen: list[float] = []

    class Watch(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            seen.append(float(self.param_groups[0]["params"][0].grad.norm()))

    big = Workload("long gradient", [(400, 400)])
    run([clipping, Rival("watch", lambda groups, _: Watch(groups), 8)], [big])
    assert min(seen) > 3.9  # 0.01 * sqrt(160,000) is 4, and the clip is to 1


def test_statistics_of_an_entry() -> None:
    entry = Entry(
        "w", "eager", BASELINE, params=1000, groups=1, bytes_per_param=28, samples_ms=[1.0, 2.0, 3.0, 4.0, 5.0]
    )
    assert entry.ms == 3.0
    assert entry.spread == pytest.approx(1 / 3)
    assert entry.bytes_per_second == pytest.approx(28 * 1000 / 3e-3)
    assert entry.as_json(1e9)["share_of_copy"] == pytest.approx(28 * 1000 / 3e-3 / 1e9)


def test_an_optimizer_that_breaks_later_keeps_what_it_had() -> None:
    lane = Lane(RIVALS[0], SMALL, take=lambda: 1.0)
    lane.sample()

    def explode() -> float:
        raise RuntimeError("later")

    lane.take = explode
    lane.sample()
    assert lane.entry("eager").samples_ms == [1.0]
    assert lane.error == "RuntimeError: later"


def test_the_largest_model_runs_on_a_cpu_only_when_asked_for() -> None:
    chosen = {load.name for job in jobs(parse(["--device", "cpu"])) for load in job.workloads}
    assert chosen == {"resnet34", "vgg11", "small layers"}
    asked = {load.name for job in jobs(parse(["--device", "cpu", "--models", "gpt-1.3b"])) for load in job.workloads}
    assert asked == {"gpt-1.3b"}


def test_a_pattern_without_a_match_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--device", "cpu", "--only", "adagrad"])
    assert BASELINE in capsys.readouterr().err
