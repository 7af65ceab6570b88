"""What the user sees: how far runs are, told from their events."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from aida_lab.events import Event
from aida_lab.experiments import find_experiment
from aida_lab.progress.display import Lines, shown
from aida_lab.progress.status import Board, in_words, time_left
from aida_lab.request import RunRequest

DIGITS = find_experiment("digits")
METRIC = DIGITS.metrics[DIGITS.variants[0]].key


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def specs():
    return RunRequest(DIGITS, optimizers=("aida", "adam"), epochs=10).specs()


@pytest.fixture
def board(clock, specs):
    found = Board(clock)
    found.expect(specs)
    return found


def row(accuracy, **more):
    return {METRIC: accuracy, "loss": 0.5, **more}


def epoch(spec, number, accuracy):
    return Event("epoch", spec.key, epoch=number, epochs=10, row=row(accuracy))


def test_best_is_kept_and_last_follows(board, specs):
    run = board.runs[specs[0].key]
    for number, accuracy in ((1, 90.0), (2, 95.0), (3, 93.0)):
        board.take(epoch(specs[0], number, accuracy))
    assert (run.best, run.best_epoch, run.last) == (95.0, 2, 93.0)
    assert "best 95.00 (2)" in run.metric_in_words()
    assert run.epoch_in_words() == "epoch 3/10"


def test_the_time_left_counts_from_where_this_process_began(board, specs, clock):
    board.take(Event("started", specs[0].key, epoch=6, epochs=10))
    assert board.runs[specs[0].key].seconds_left(clock()) is None
    clock.now += 20
    board.take(Event("step", specs[0].key, epoch=6, epochs=10, share=0.5))
    assert board.runs[specs[0].key].seconds_left(clock()) == pytest.approx(20 / 0.5 * 3.5)
    # and of both runs: half an epoch in 20 s, 3.5 + 10 to do
    assert board.seconds_left() == pytest.approx(20 / 0.5 * 13.5)


def test_a_run_without_a_measure_yet_shows_its_loss(board, specs):
    run = board.take(Event("epoch", specs[0].key, epoch=1, epochs=10, row={"loss": 0.1234567}))
    assert run.metric_in_words() == "loss 0.1235"


def test_plain_lines_are_an_epoch_each_and_not_too_many(board, specs, clock):
    out = io.StringIO()
    lines = Lines(Console(file=out, width=40), board)
    lines(Event("started", specs[0].key, epochs=10))
    for number in range(1, 11):
        clock.now += 3
        lines(Event("step", specs[0].key, epoch=number - 1, epochs=10, share=0.5))
        lines(epoch(specs[0], number, 90.0 + number))
    lines(Event("finished", specs[0].key, epoch=10, epochs=10, row={"best": 99.0, "best_epoch": 9, "last": 98.0}))
    said = out.getvalue().splitlines()
    assert [line.split(",")[0] for line in said] == [
        "aida-k2 seed 0: started",
        "aida-k2 seed 0: epoch 4/10",
        "aida-k2 seed 0: epoch 8/10",
        "[1/2] aida-k2 seed 0: finished",
    ]
    assert "0:18 left" in said[1]
    assert "best 99.00 (9)" in said[-1]


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (Event("failed", "", text="RuntimeError: no"), "failed: RuntimeError: no"),
        (Event("diverged", "", epoch=3, epochs=10, text="the loss is nan"), "diverged at epoch 3/10: the loss is nan"),
        (Event("skipped", "", row={"best": 1.0, "best_epoch": 2, "last": 1.0}), "already finished"),
        (Event("interrupted", "", epoch=3, epochs=10), "interrupted after epoch 3/10, saved; the same command"),
        (Event("note", "", text="a checkpoint is damaged"), ": a checkpoint is damaged"),
    ],
    ids=lambda value: value.kind if isinstance(value, Event) else "",
)
@pytest.mark.parametrize("terminal", [False, True])
def test_every_end_has_its_line(board, specs, event, line, terminal):
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=terminal, force_interactive=terminal, color_system=None)
    with shown(console, board) as listen:
        listen(Event("started", specs[0].key, epochs=10))
        listen(Event(**{**vars(event), "run": specs[0].key}))
    assert line in out.getvalue()


def test_a_note_of_no_run_is_a_line(board):
    out = io.StringIO()
    Lines(Console(file=out), board)(Event("note", "", text="CUDA MPS: started"))
    assert out.getvalue() == "CUDA MPS: started\n"


def test_bars_show_the_running_and_how_many_are_done(board, specs):
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=True, color_system=None)
    with shown(console, board) as listen:
        listen(Event("started", specs[0].key, epochs=10))
        listen(epoch(specs[0], 4, 91.25))
        listen(Event("started", specs[1].key, epochs=10))
        listen(Event("finished", specs[1].key, epoch=10, epochs=10))
    last = out.getvalue().splitlines()[-3:-1]
    assert "1/2 runs" in last[0]
    assert "aida-k2 seed 0" in last[1]
    assert "epoch 4/10" in last[1]
    assert "91.25" in last[1]


def test_numbers_in_words():
    assert [in_words(value) for value in (93.4149, 0.21834, 1.0, None)] == ["93.41", "0.2183", "1", ""]
    times = [time_left(value) for value in (None, 5, 125, 3725.4)]
    assert times == ["", "0:05 left", "2:05 left", "1:02:05 left"]
