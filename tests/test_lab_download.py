"""Download one file from a server that disconnects, sends wrong bytes, is slow or refuses."""

from __future__ import annotations

import hashlib
import io
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from aida_lab.data import DataError
from aida_lab.data.download import RetryPolicy, download, shown
from aida_lab.data.sets import Download
from loopback import Answer, serving

CONTENT = random.Random(0).randbytes(300_000)
SOON = RetryPolicy(attempts=3, timeout=5.0, pause=0.0)


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_arrives_whole(tmp_path):
    with serving({"f": CONTENT}) as world:
        download(Download(world.address("f"), md5(CONTENT)), tmp_path / "f", retry=SOON)
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert left_in(tmp_path) == ["f"]


def test_an_interrupted_download_resumes_where_it_stopped(tmp_path):
    cuts = [Answer(stops_after=100_000), Answer(stops_after=50_000)]
    with serving({"f": CONTENT}, *cuts) as world:
        download(Download(world.address("f"), md5(CONTENT)), tmp_path / "f", retry=SOON)
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert [wanted for _, wanted in world.asked] == [None, "bytes=100000-", "bytes=150000-"]


def test_a_later_command_resumes_the_bytes_of_an_earlier_one(tmp_path):
    cut, refused = Answer(stops_after=120_000), Answer(status=503)
    with serving({"f": CONTENT}, cut, refused, refused, refused) as world:
        source = Download(world.address("f"), md5(CONTENT))
        with pytest.raises(DataError, match=r"503.*3 times in a row; 120,000 bytes are kept in .*f\.part"):
            download(source, tmp_path / "f", retry=SOON)
        assert left_in(tmp_path) == ["f.part"]
        download(source, tmp_path / "f", retry=SOON)
    assert world.asked[-1][1] == "bytes=120000-"
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_attempts_that_receive_new_bytes_do_not_count_as_failures(tmp_path):
    with serving({"f": CONTENT}, *[Answer(stops_after=10_000)] * 12) as world:
        download(Download(world.address("f"), md5(CONTENT)), tmp_path / "f", retry=SOON)
    assert len(world.asked) == 13
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_server_without_range_support_is_read_from_the_start(tmp_path):
    with serving({"f": CONTENT}, Answer(stops_after=90_000), Answer(knows_range=False)) as world:
        download(Download(world.address("f"), md5(CONTENT)), tmp_path / "f", retry=SOON)
    assert [wanted for _, wanted in world.asked] == [None, "bytes=90000-"], "the second answer is enough"
    assert (tmp_path / "f").read_bytes() == CONTENT


@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_wrong_bytes_are_refused_and_nothing_is_left(tmp_path, size):
    wrong = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    with serving({"f": wrong}) as world, pytest.raises(DataError, match=f"MD5 {md5(wrong)} instead of {md5(CONTENT)}"):
        download(Download(world.address("f"), md5(CONTENT), size), tmp_path / "f", retry=SOON)
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("there", [b"", CONTENT[:1000]], ids=["from the start", "resumed"])
def test_an_endless_file_is_read_up_to_the_known_size(tmp_path, there):
    if there:
        (tmp_path / "f.part").write_bytes(there)
    seen = []
    with serving({"f": CONTENT * 100}) as world:
        source = Download(world.address("f"), md5(CONTENT), len(CONTENT))
        with pytest.raises(DataError, match="more instead of 300,000 bytes"):
            download(source, tmp_path / "f", progress=lambda name, here, total: seen.append(here), retry=SOON)
    assert max(seen) < 2 * len(CONTENT)
    assert left_in(tmp_path) == []


def test_stale_bytes_of_an_earlier_attempt_do_not_corrupt_the_file(tmp_path):
    (tmp_path / "f.part").write_bytes(b"0" * 1000)
    with serving({"f": CONTENT}) as world:
        download(Download(world.address("f"), md5(CONTENT)), tmp_path / "f", retry=SOON)
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert [wanted for _, wanted in world.asked] == ["bytes=1000-", None]


@pytest.mark.parametrize("known", [md5(CONTENT), None], ids=["checksum", "no checksum"])
@pytest.mark.parametrize("there", [CONTENT, CONTENT + b"more"], ids=["whole", "too long"])
def test_a_partial_file_that_needs_nothing_more(tmp_path, there, known):
    (tmp_path / "f.part").write_bytes(there)
    with serving({"f": CONTENT}) as world:
        download(Download(world.address("f"), known), tmp_path / "f", retry=SOON)
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_missing_page_is_not_requested_twice(tmp_path):
    with serving({}) as world, pytest.raises(DataError, match="answered 404 Not Found"):
        download(Download(world.address("f")), tmp_path / "f", retry=SOON)
    assert len(world.asked) == 1


def test_a_server_error_is_retried_and_then_fails(tmp_path):
    with serving({"f": CONTENT}, Answer(status=500)) as world:
        download(Download(world.address("f"), md5(CONTENT)), tmp_path / "f", retry=SOON)
    with (
        serving({"f": CONTENT}, *[Answer(status=500)] * 9) as world,
        pytest.raises(DataError, match="500 Internal Server Error, 3 times"),
    ):
        download(Download(world.address("f")), tmp_path / "g", retry=SOON)
    assert len(world.asked) == 3


def test_a_refused_connection_is_a_one_line_error(tmp_path):
    with serving({}) as world:
        pass
    with pytest.raises(DataError, match=r"no connection \(.*refused") as caught:
        download(Download(world.address("f")), tmp_path / "f", retry=SOON)
    assert "\n" not in str(caught.value)


def test_a_silent_server_times_out(tmp_path):
    with serving({"f": CONTENT}, Answer(pause=0.6, piece=1000, stops_after=1000)) as world:
        source = Download(world.address("f"), md5(CONTENT))
        download(source, tmp_path / "f", retry=replace(SOON, timeout=0.2))
    assert len(world.asked) == 2


def test_progress_follows_a_slow_server(tmp_path):
    seen = []
    with serving({"f": CONTENT}, Answer(pause=0.02, piece=30_000)) as world:
        source = Download(world.address("f"))
        download(source, tmp_path / "f", progress=lambda *call: seen.append(call), retry=SOON)
    assert seen[0] == ("f", 0, len(CONTENT))
    assert seen[-1] == ("f", len(CONTENT), len(CONTENT))
    counts = [here for _, here, _ in seen]
    assert counts == sorted(counts)
    assert len(counts) >= 8


def test_a_terminal_shows_a_progress_bar():
    out = io.StringIO()
    with shown(Console(file=out, force_terminal=True, width=120)) as progress:
        progress("f", 0, 2_000_000)
        progress("f", 1_000_000, 2_000_000)
    assert "1.0/2.0 MB" in out.getvalue()


def test_a_killed_download_resumes(tmp_path):
    code = (
        "import sys; from aida_lab.data.download import download; from aida_lab.data.sets import Download;"
        "from pathlib import Path; import os, signal;"
        "stop = lambda name, here, total: here >= 100_000 and os.kill(os.getpid(), signal.SIGKILL);"
        "download(Download(sys.argv[1]), Path(sys.argv[2]), progress=stop)"
    )
    with serving({"f": CONTENT}, Answer(piece=10_000, pause=0.002)) as world:
        words = [sys.executable, "-c", code, world.address("f"), str(tmp_path / "f")]
        killed = subprocess.run(words, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        assert killed.returncode < 0
        assert not (tmp_path / "f").exists()
        download(Download(world.address("f"), md5(CONTENT)), tmp_path / "f", retry=SOON)
    assert (world.asked[-1][1] or "").startswith("bytes=")
    assert (tmp_path / "f").read_bytes() == CONTENT
