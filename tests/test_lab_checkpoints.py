"""Checkpoints of a run: whatever kills a process, fills a disk or damages a file, one whole state is there."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import namedtuple
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from aida_lab.runs.checkpoints import checkpoint_files
from aida_lab.runs.files import StoreError
from aida_lab.runs.store import RunFolder
from store_cases import (
    SPEC,
    advance,
    checkpoints,
    files_in,
    limited_files,
    process,
    refusing_writes,
    reopened,
    silently_loaded,
    small_disk,
    weights_at,
    work,
)


@pytest.fixture
def folder(tmp_path):
    with RunFolder.open(tmp_path, SPEC) as folder:
        yield folder


def test_the_last_two_checkpoints_are_kept_and_torch_reads_them_without_running_code(folder):
    for step in (1, 2, 3, 100_000_000):
        advance(folder, step)
    names = [path.name.split("-")[0] for path in checkpoints(folder)]
    assert names == ["100000000", "00000003"]
    content = torch.load(checkpoints(folder)[0], weights_only=True)
    assert torch.equal(content["state"]["weights"], weights_at(100_000_000))


def test_a_checkpoint_gives_back_what_it_was_given(folder):
    state = {
        "modules": {"model": torch.nn.Linear(3, 2).state_dict()},
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "rng": torch.get_rng_state(),
        "half": torch.randn(3).bfloat16(),
        "plain": [1, 2.5, None, True, "text", b"bytes", (1, 2)],
        "of torch": [torch.float32, torch.device("cpu"), torch.Size([2, 3])],
    }
    folder.save(state, 1)
    torch.testing.assert_close(folder.load()["modules"], dict(state["modules"]), rtol=0, atol=0)
    back = folder.load()
    assert back["plain"] == state["plain"]
    assert back["of torch"] == state["of torch"]
    for name in ("parameter", "rng", "half"):
        assert torch.equal(back[name], state[name])


@pytest.mark.parametrize(
    "value", [np.float64(1), namedtuple("P", "x")(1), {1, 2}, object()], ids=lambda v: type(v).__name__
)
def test_what_could_not_be_read_back_is_refused_when_it_is_saved(folder, value):
    with pytest.raises(TypeError, match=r"checkpoint\['state'\]\['optimizer'\]\[0\] is a .*runs no code"):
        folder.save({"optimizer": [value]}, 1)
    assert checkpoints(folder) == []


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "flipped": flip_a_bit,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(folder, damage):
    advance(folder, 1)
    advance(folder, 2)
    newest = checkpoints(folder)[0]
    damage(newest)
    with reopened(folder) as again:
        with pytest.warns(UserWarning, match=f"{newest} is damaged"):
            state = again.load()
        assert state["step"] == 1
        assert torch.equal(state["weights"], weights_at(1))
        assert again.rows() == [{"epoch": 1, "loss": 1.0}]
        assert silently_loaded(again)["step"] == 1


def test_a_run_begins_again_where_all_checkpoints_are_damaged_and_keeps_its_new_ones(folder):
    for step in (10, 20):
        advance(folder, step)
    for path in checkpoints(folder):
        flip_a_bit(path)
    with pytest.warns(UserWarning, match="is damaged") as said:
        assert folder.load() is None
    assert len(said) == 2
    assert folder.rows() == []
    advance(folder, 1)  # must not count as older than the damaged ones
    assert silently_loaded(folder)["step"] == 1


def test_a_whole_checkpoint_that_torch_cannot_read_is_an_error_and_stays(folder, monkeypatch):
    advance(folder, 1)
    monkeypatch.setattr(torch, "load", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("newer format")))
    with pytest.raises(StoreError, match=r"is whole, but torch .* cannot read it: newer format"):
        folder.load()
    assert len(checkpoints(folder)) == 1


def test_the_later_of_two_checkpoints_of_one_step_is_used(folder):
    for value in range(6):
        folder.save({"value": value}, 7)
        assert folder.load() == {"value": value}
        time.sleep(0.01)  # file systems tell times apart in steps of up to 4 ms


# --- kills


def everything_said(said: Connection) -> list[int]:
    heard = []
    with suppress(EOFError):
        while said.poll():
            heard.append(said.recv())
    return heard


def test_twenty_kills_while_saving_lose_nothing(tmp_path):
    chance = random.Random(0)
    reached = kills = cut_off = 0
    while kills < 20 or (cut_off < 3 and kills < 60):  # some must fall into the writing of a checkpoint itself
        kills += 1
        with process(work, tmp_path / "killed", 10_000) as (child, said):
            assert said.poll(60)
            time.sleep(chance.uniform(0, 0.03))
            child.kill()
            child.join()
            assert child.exitcode == -signal.SIGKILL
            reached = max(everything_said(said), default=reached)
        cut_off += any(name.endswith(".tmp") for name in files_in(tmp_path / "killed"))
        with RunFolder.open(tmp_path / "killed", SPEC) as folder:
            assert all(file.is_whole() for file in checkpoint_files(folder.path / "checkpoints"))
            state = silently_loaded(folder)
            assert state["step"] >= reached
            assert torch.equal(state["weights"], weights_at(state["step"], 500_000))
            assert [row["epoch"] for row in folder.rows()] == list(range(1, state["step"] + 1))
            reached = state["step"]
    assert cut_off, "no kill fell into the writing of a checkpoint: this test has shown nothing"
    for name in ("killed", "unbroken"):
        with process(work, tmp_path / name, reached + 2) as (child, said):
            child.join(60)
            assert child.exitcode == 0
    ends = [tmp_path / name / SPEC.key for name in ("killed", "unbroken")]
    for name in ("curve.jsonl", "stepsizes.jsonl", "result.json", "spec.json"):
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes()


# --- a full disk


def assert_a_checkpoint_too_large_leaves_the_earlier_ones(folder: RunFolder, full, message: str) -> None:
    advance(folder, 1)
    advance(folder, 2)
    before = files_in(folder.path)
    with full, pytest.raises(StoreError, match=message):
        folder.save({"weights": torch.randn(2_000_000)}, 3)
    assert files_in(folder.path) == before
    assert silently_loaded(folder)["step"] == 2
    advance(folder, 3)
    assert silently_loaded(folder)["step"] == 3


NO_ROOM = (
    r"cannot write .*00000003: No space left on device; it takes 8,\d{3},\d{3} bytes and [\d,]+ are free\. .*make room"
)


def test_a_checkpoint_beyond_the_limit_of_a_file_leaves_the_earlier_ones(folder):
    message = r"cannot write .*00000003: File too large; it takes 8,\d{3},\d{3} bytes\. What was saved .*ulimit -f"
    assert_a_checkpoint_too_large_leaves_the_earlier_ones(folder, limited_files(1_000_000), message)


def test_a_checkpoint_on_a_disk_that_fills_up_leaves_the_earlier_ones(folder):
    assert_a_checkpoint_too_large_leaves_the_earlier_ones(folder, refusing_writes(after=1_000_000), NO_ROOM)


def test_a_checkpoint_on_a_full_file_system_leaves_the_earlier_ones(tmp_path):
    disk = tmp_path / "disk"
    room = NO_ROOM.replace("[\\d,]+", "3,[\\d,]+")  # what the partial file took is free again
    with small_disk(disk, megabytes=3), RunFolder.open(disk, SPEC) as folder:
        assert_a_checkpoint_too_large_leaves_the_earlier_ones(folder, nullcontext(), room)


def test_an_interrupt_while_saving_stays_an_interrupt(folder, monkeypatch):
    advance(folder, 1)
    before = files_in(folder.path)

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        folder.save({"weights": torch.randn(1000)}, 2)
    assert files_in(folder.path) == before
