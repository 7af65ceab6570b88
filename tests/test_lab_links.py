"""A run's folder that somebody hands over: nothing is written through its links, and nothing waits on its pipes."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from aida_lab.runs.files import StoreError, append_line, open_regular, read_regular, sync, write_whole
from aida_lab.runs.lock import Lock, is_held
from aida_lab.runs.records import scan
from aida_lab.runs.store import RunFolder
from report_fixture import spec, write_run
from store_cases import RESULT, SPEC, advance

NAMES = (
    "lock", "spec.json", "env.json", "curve.jsonl", "stepsizes.jsonl", "failed.json", "result.json", "checkpoints",
    "checkpoints/00000001-0123456789abcdef.pt", ".result.json.1.tmp",
)  # fmt: skip
KINDS = {
    "a link to a file": lambda path, theirs: path.symlink_to(theirs / "file"),
    "a link to a folder": lambda path, theirs: path.symlink_to(theirs),
    "a link to nothing": lambda path, theirs: path.symlink_to(theirs / "new"),
    "a link to /dev/zero": lambda path, theirs: path.symlink_to("/dev/zero"),
    "a named pipe": lambda path, theirs: os.mkfifo(path),
}


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "file").write_text("precious\n")
    return folder


def untouched(theirs: Path) -> bool:
    return [path.name for path in theirs.iterdir()] == ["file"] and (theirs / "file").read_text() == "precious\n"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_training_refuses_a_folder_with_links(tmp_path, theirs, name, kind):
    with RunFolder.open(tmp_path / "runs", SPEC) as folder:
        advance(folder, 1)
    place = folder.path / name
    if place.is_dir():
        place.rename(tmp_path / "away")
    place.unlink(missing_ok=True)
    KINDS[kind](place, theirs)
    with pytest.raises(StoreError, match=r"is a (symbolic link.*|named pipe); remove it, or use another --out"):
        RunFolder.open(tmp_path / "runs", SPEC)
    assert untouched(theirs)


def test_training_refuses_a_run_that_is_itself_a_link(tmp_path, theirs):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / SPEC.key).symlink_to(theirs)
    with pytest.raises(StoreError, match="is a symbolic link, and links are not followed; remove it"):
        RunFolder.open(tmp_path / "runs", SPEC)
    assert untouched(theirs)


def test_a_folder_of_runs_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    with RunFolder.open(tmp_path / "runs", SPEC) as folder:
        advance(folder, 1)
        advance(folder, 2)
        folder.finish(RESULT)
    assert (tmp_path / "disk" / SPEC.key / "result.json").exists()


WRITERS = {
    "append_line": lambda path: append_line(path, "x"),
    "sync": sync,
    "Lock": Lock,
    "open_regular": lambda path: open_regular(path, os.O_WRONLY | os.O_TRUNC),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_writer_follows_a_link(tmp_path, theirs, kind, write):
    KINDS[kind](tmp_path / "place", theirs)
    with pytest.raises((StoreError, OSError)):
        write(tmp_path / "place")
    assert untouched(theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_takes_the_place_of_a_link(tmp_path, theirs, kind):
    KINDS[kind](tmp_path / "place", theirs)
    (tmp_path / f".place.{os.getpid()}.tmp").symlink_to(theirs / "file")
    write_whole(tmp_path / "place", b"ours")
    assert not (tmp_path / "place").is_symlink()
    assert (tmp_path / "place").read_bytes() == b"ours"
    assert untouched(theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_reading_waits_for_nothing(tmp_path, theirs, kind):
    KINDS[kind](tmp_path / "place", theirs)
    assert not is_held(tmp_path / "place")
    with pytest.raises(StoreError, match=r"place cannot be read: it is a (symbolic link|named pipe)"):
        read_regular(tmp_path / "place")


def test_a_file_is_read_up_to_its_limit(tmp_path):
    (tmp_path / "file").write_bytes(bytes(100))
    assert read_regular(tmp_path / "file", 100) == bytes(100)
    with pytest.raises(StoreError, match="file has 100 bytes; at most 99 are read"):
        read_regular(tmp_path / "file", 99)
    assert read_regular(tmp_path / "nothing") is None


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only the superuser can become another user"
)
def test_what_may_not_be_read_is_named_and_the_rest_is_listed():
    with TemporaryDirectory() as place:
        root = Path(place) / "runs"
        os.chmod(place, 0o755)
        runs = [write_run(root, spec("adam", seed), [1.0, 2.0, 3.0, 4.0]) for seed in range(5)]
        for path in (runs[0] / "spec.json", runs[1] / "curve.jsonl", runs[2] / "env.json", runs[3]):
            path.chmod(0)
        os.seteuid(65534)
        try:
            found = {record.path: record for record in scan(root)}
        finally:
            os.seteuid(0)
        said = [found[run].problem or found[run].state for run in runs]
    assert said == [
        "spec.json cannot be read: Permission denied", "curve.jsonl cannot be read: Permission denied", "finished",
        "spec.json cannot be read: Permission denied", "finished",
    ]  # fmt: skip
