"""Records of finished runs, brought together."""

from __future__ import annotations

import io
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aida_lab.cli import app
from aida_lab.runs import archives
from aida_lab.runs.archives import pack, unpack
from aida_lab.runs.collecting import collect
from aida_lab.runs.files import StoreError, file_exists, read_archive, read_regular
from aida_lab.runs.records import read_curve, read_run, read_sessions, scan
from report_fixture import spec, write_run, write_stepsizes


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed in range(2):
        write_run(tmp_path / "runs", spec("aida-k2", seed), [80.0, 85.0, 90.0, 89.0])
    finished = scan(tmp_path / "runs")[0].path
    (finished / "checkpoints").mkdir()
    (finished / "checkpoints" / "00000001-0000000000000000.pt").write_bytes(b"weights")
    unfinished = scan(tmp_path / "runs")[1].path
    (unfinished / "result.json").unlink()
    return tmp_path / "runs"


def finished(runs: Path) -> Path:
    (path,) = (record.path for record in scan(runs) if record.state == "finished")
    return path


def test_finished_runs_are_collected_without_their_weights(runs: Path, tmp_path: Path) -> None:
    found = collect([runs], tmp_path / "results")
    (record,) = scan(tmp_path / "results")
    assert (record.state, record.path) == ("finished", found.added[0])
    assert record.path == tmp_path / "results" / f"{record.spec.experiment}.tar.xz" / finished(runs).name
    assert [reason for _, reason in found.left] == ["stopped"]
    packed = read_archive(record.path.parent)
    assert {name.split("/")[1] for name in packed} == {"spec.json", "env.json", "curve.jsonl", "result.json"}
    assert found.size == sum(map(len, packed.values()))


def test_an_archived_run_reads_as_its_folder_does(runs: Path, tmp_path: Path) -> None:
    folder = finished(runs)
    write_stepsizes(folder, "aida")
    (archived,) = collect([runs], tmp_path / "results").added
    before, after = read_run(folder), read_run(archived)
    assert (after.state, after.spec, after.result) == (before.state, before.spec, before.result)
    assert read_curve(archived) == read_curve(folder)
    assert read_sessions(archived) == read_sessions(folder)
    for name in ("spec.json", "env.json", "curve.jsonl", "stepsizes.jsonl", "result.json"):
        assert read_regular(archived / name) == (folder / name).read_bytes()
        assert file_exists(archived / name)
    assert not file_exists(archived / "failed.json")


def test_an_archive_named_itself_is_read_like_the_folder_it_lies_in(runs: Path, tmp_path: Path) -> None:
    (archived,) = collect([runs], tmp_path / "results").added
    assert scan(archived.parent) == scan(tmp_path / "results")
    write_stepsizes(finished(runs), "aida")
    (archived,) = collect([runs], tmp_path / "more").added
    for words in (["runs", archived.parent], ["stepsizes", archived, "--out", tmp_path / "drawn"]):
        done = CliRunner(env={"COLUMNS": "300"}).invoke(app, list(map(str, words)))
        assert done.exit_code == 0, done.output
        assert archived.name in done.output


def test_collected_runs_can_be_collected_on(runs: Path, tmp_path: Path) -> None:
    (first,) = collect([runs], tmp_path / "results").added
    (second,) = collect([tmp_path / "results"], tmp_path / "other").added
    assert second.parent.read_bytes() == first.parent.read_bytes()


def test_the_same_records_give_the_same_archive(runs: Path, tmp_path: Path) -> None:
    (archived,) = collect([runs], tmp_path / "results").added
    files = read_archive(archived.parent)
    assert pack(dict(reversed(files.items()))) == archived.parent.read_bytes()
    assert unpack(pack(files)) == files


def test_tar_unpacks_an_archive_into_run_folders(runs: Path, tmp_path: Path) -> None:
    (archived,) = collect([runs], tmp_path / "results").added
    with tarfile.open(archived.parent) as tar:
        tar.extractall(tmp_path / "again", filter="data")
    (record,) = scan(tmp_path / "again")
    assert record.result == read_run(archived).result
    with tarfile.open(tmp_path / "by-hand.tar.xz", "w:xz", format=tarfile.GNU_FORMAT) as tar:  # as GNU tar does
        tar.add(record.path, record.path.name)
    assert [each.state for each in scan(tmp_path / "by-hand.tar.xz")] == ["finished"]


def test_collecting_again_adds_nothing(runs: Path, tmp_path: Path) -> None:
    (archived,) = collect([runs], tmp_path / "results").added
    before = archived.parent.stat()
    again = collect([runs], tmp_path / "results")
    assert (again.added, again.known) == ((), 1)
    assert archived.parent.stat() == before


def test_runs_are_added_to_those_that_were_there(runs: Path, tmp_path: Path) -> None:
    collect([runs], tmp_path / "results")
    write_run(tmp_path / "runs", spec("adam", 0), [80.0, 85.0, 90.0, 89.0])
    found = collect([runs, runs], tmp_path / "results")
    assert (len(found.added), found.known) == (1, 3)
    assert {record.spec.optimizer for record in scan(tmp_path / "results")} == {"aida", "adam"}
    assert len(list((tmp_path / "results").iterdir())) == 1


def test_two_results_of_one_spec_are_not_mixed(runs: Path, tmp_path: Path) -> None:
    (kept,) = collect([runs], tmp_path / "results").added
    other = tmp_path / "other" / kept.name
    other.mkdir(parents=True)
    for name in ("spec.json", "env.json", "curve.jsonl", "result.json"):
        (other / name).write_bytes((finished(runs) / name).read_bytes())
    (other / "curve.jsonl").write_text((other / "curve.jsonl").read_text().replace("90.0", "91.0"))
    (other / "result.json").write_text((other / "result.json").read_text().replace("90.0", "91.0"))
    write_run(tmp_path / "other", spec("adam", 0), [80.0, 85.0, 90.0, 89.0])
    found = collect([tmp_path / "other"], tmp_path / "results")
    assert [record.spec.optimizer for record in map(read_run, found.added)] == ["adam"]
    ((folder, reason),) = found.left
    assert folder == other
    assert reason.startswith(f"the same spec as {kept} with another result")
    assert read_run(kept).result["best"] == 90.0


def test_the_command_says_what_it_did(runs: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["collect", str(runs), "--out", str(tmp_path / "results")])
    assert done.exit_code == 0
    assert "added 1 runs" in done.output
    assert "is stopped" in done.output


def test_nothing_that_a_link_leads_to_is_collected(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a key")
    run = finished(runs)
    (run / "stepsizes.jsonl").symlink_to(tmp_path / "secret")
    found = collect([runs], tmp_path / "results")
    assert [path.name for path in found.added] == [run.name]
    assert not file_exists(found.added[0] / "stepsizes.jsonl")
    said = dict(found.left)[run / "stepsizes.jsonl"]
    assert said == "not copied: cannot be read: it is a symbolic link, and links are not followed"


def test_no_link_in_the_results_is_written_through(runs: Path, tmp_path: Path) -> None:
    run = finished(runs)
    (tmp_path / "outside").write_bytes(pack({}))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "vgg11-cifar10.tar.xz").symlink_to(tmp_path / "outside")
    found = collect([runs], tmp_path / "results")
    assert found.added == ()
    assert "is a symbolic link" in dict(found.left)[run]
    assert (tmp_path / "outside").read_bytes() == pack({})


def test_a_damaged_archive_is_not_replaced(runs: Path, tmp_path: Path) -> None:
    (kept,) = collect([runs], tmp_path / "results").added
    kept.parent.write_bytes(kept.parent.read_bytes()[:-50])
    before = kept.parent.read_bytes()
    found = collect([runs], tmp_path / "results")
    assert found.added == ()
    assert "is damaged: it is cut off" in dict(found.left)[finished(runs)]
    assert kept.parent.read_bytes() == before


def test_what_a_killed_collection_left_goes_and_nothing_else(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / ".vgg11-cifar10.tar.xz.12345.tmp").write_text("half")
    (tmp_path / "results" / ".mine.tmp").write_text("somebody's")
    collect([runs], tmp_path / "results")
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == [".mine.tmp", "vgg11-cifar10.tar.xz"]
    assert [record.state for record in scan(tmp_path / "results")] == ["finished"]


def test_an_experiment_that_is_named_like_a_path_stays_in_the_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", spec("sgd", 0, experiment="../../out", epochs=3), [90.0, 92.0, 93.0])
    (archived,) = collect([tmp_path / "runs"], tmp_path / "a" / "results").added
    assert archived.parent == tmp_path / "a" / "results" / "______out.tar.xz"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "runs"]


# --- archives that somebody else made ---

KEY = "0123456789abcdef"


def tar_of(*entries: tuple[str, bytes, dict[str, object]]) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for name, content, fields in entries:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            for field, value in fields.items():
                setattr(entry, field, value)
            tar.addfile(entry, io.BytesIO(content))
    return plain.getvalue()


def negative_size() -> bytes:
    """A header that sends a reader which adds sizes back to where it was."""
    header = bytearray(tar_of((f"{KEY}/spec.json", b"", {}))[:512])
    header[124:136] = b"\xff" * 10 + (-512 & 0xFFFF).to_bytes(2, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


CRAFTED: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "cut off"),
    "no xz": (lambda: b"PK\3\4" * 99, "cannot be decompressed"),
    "cut off": (lambda: pack({f"{KEY}/spec.json": b"{}" * 999})[:-30], "cut off"),
    "no tar": (lambda: lzma.compress(b"{}" * 999), "no tar archive"),
    "a path outside": (lambda: lzma.compress(tar_of(("../spec.json", b"{}", {}))), "no file of a run"),
    "an absolute path": (lambda: lzma.compress(tar_of((f"/{KEY}/spec.json", b"{}", {}))), "no file of a run"),
    "weights": (lambda: lzma.compress(tar_of((f"{KEY}/x.pt", b"{}", {}))), "no file of a run"),
    "a link": (
        lambda: lzma.compress(tar_of((f"{KEY}/spec.json", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}))),
        "no file of a run",
    ),
    "a device": (lambda: lzma.compress(tar_of((f"{KEY}/spec.json", b"", {"type": tarfile.CHRTYPE}))), "no file of"),
    "a sparse file": (
        lambda: lzma.compress(tar_of((f"{KEY}/spec.json", b"", {"type": tarfile.GNUTYPE_SPARSE}))),
        "no file of a run",
    ),
    "a file twice": (lambda: lzma.compress(tar_of(*[(f"{KEY}/spec.json", b"{}", {})] * 2)), "there twice"),
    "a long name": (lambda: lzma.compress(tar_of(("x" * 5000, b"{}", {}))), "no file of a run"),
    "a name in no ASCII": (lambda: lzma.compress(tar_of(("ü/spec.json", b"{}", {}))), "damaged"),
    "a file cut off": (lambda: lzma.compress(tar_of((f"{KEY}/spec.json", b"{}" * 999, {}))[:1000]), "cut off"),
    "a negative size": (lambda: lzma.compress(negative_size()), "cut off"),
    "a bomb": (lambda: lzma.compress(bytes(1 << 20)), "holds more than"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_archive_is_one_damaged_line_and_hides_no_other(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, said = CRAFTED[name]
    monkeypatch.setattr(archives, "UNPACKED_LIMIT", 1 << 19)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "bad.tar.xz").write_bytes(make())
    good = write_run(tmp_path / "results", spec("sgd", 0), [80.0, 85.0, 90.0, 89.0])
    records = {record.path.name: record for record in scan(tmp_path / "results")}
    assert records.keys() == {"bad.tar.xz", good.name}
    assert records[good.name].state == "finished"
    assert records["bad.tar.xz"].state == "damaged"
    assert said in records["bad.tar.xz"].problem
    assert "\n" not in records["bad.tar.xz"].problem


def test_a_file_in_an_archive_has_the_limit_of_a_file_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "large.tar.xz").write_bytes(pack({f"{KEY}/spec.json": bytes(2000)}))
    with pytest.raises(StoreError, match="has 2,000 bytes; at most 1,000 are read"):
        read_regular(tmp_path / "large.tar.xz" / KEY / "spec.json", 1000)


def test_more_than_an_archive_holds_is_refused_before_it_is_written(runs: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(archives, "UNPACKED_LIMIT", 11_000)
    with pytest.raises(StoreError, match="an archive holds at most 11,000; collect some of the runs to another --out"):
        collect([runs], tmp_path / "results")
    assert list((tmp_path / "results").iterdir()) == []
