"""The GPT on Python source code: its text, its batches, its loss, its weight decay."""

from __future__ import annotations

import hashlib
import math
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from aida_lab.data import fetch, packages, pysource, sets
from aida_lab.data.local import DataError
from aida_lab.data.pysource import END, LEAST, MOST, TokenSplits
from aida_lab.data.sets import DataFile, DataSet
from aida_lab.experiments import find_experiment
from aida_lab.models.gpt import GPT
from aida_lab.request import RunRequest
from aida_lab.runs.records import read_curve
from aida_lab.schedules import Cosine
from aida_lab.spec import RunSpec
from aida_lab.tasks.next_token import CLIP, NextTokenTask
from aida_lab.training.optimizers import build
from aida_lab.training.options import Options
from aida_lab.training.run import run
from processes import together
from text_runs import assert_resumes_within_an_epoch, context

CONTEXT, VOCABULARY = 8, 11


def source(train: int = 100, valid: int = 60) -> TokenSplits:
    generator = torch.Generator().manual_seed(0)
    draw = lambda count: torch.randint(VOCABULARY, (count,), generator=generator, dtype=torch.int32)  # noqa: E731
    return TokenSplits(draw(train), draw(valid), VOCABULARY, valid_bytes=2 * valid)


def model(**options: bool) -> GPT:
    torch.manual_seed(0)
    return GPT(VOCABULARY, context=CONTEXT, width=16, layers=2, heads=2, **options)


def task(steps: int = 5, batch: int = 3, **values: int) -> NextTokenTask:
    return NextTokenTask(context(batch=batch), model(), source(**values), steps)


# -- the model -----------------------------------------------------------------------------------------


def test_the_model_has_the_parameters_that_its_experiment_declares() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT().parameters()) == find_experiment("gpt-pysource").parameters


def test_no_token_sees_a_later_one() -> None:
    gpt, tokens = model(), source().train[:CONTEXT].long()[None]
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % VOCABULARY
    one, other = gpt(tokens), gpt(changed)
    assert torch.equal(one[:, :5], other[:, :5])
    assert not torch.allclose(one[:, 5:], other[:, 5:])


def test_split_matrices_start_as_the_one_matrix_and_compute_the_same() -> None:
    one, three = model(), model(split=True)
    for whole, parts in zip(one.blocks, three.blocks, strict=True):
        assert torch.equal(whole.qkv.weight, torch.cat([part.weight for part in parts.qkv]))  # type: ignore[union-attr]
    tokens = source().train[: 2 * CONTEXT].long().view(2, CONTEXT)
    torch.testing.assert_close(three(tokens), one(tokens))


# -- batches and loss ----------------------------------------------------------------------------------


def windows_of(task: NextTokenTask, epochs: int) -> Tensor:
    return torch.cat([task.batch(i)[0] for epoch in range(epochs) for i in range(task.begin_epoch(epoch))])


def test_every_token_but_the_first_is_predicted_once_before_any_is_predicted_again() -> None:
    count = (100 - 1) // CONTEXT
    seen = windows_of(task(steps=4, batch=3), epochs=3)  # 36 windows of 12
    assert len(seen) == 3 * count
    text = source().train
    due = sorted(text[i * CONTEXT : (i + 1) * CONTEXT + 1].tolist() for i in range(count))
    for pass_ in seen.split(count):
        assert sorted(pass_.tolist()) == due
    assert seen[:count].tolist() != seen[count : 2 * count].tolist()


def test_an_epoch_may_be_longer_than_the_text() -> None:
    assert len(windows_of(task(steps=11, batch=3), epochs=1)) == 33


def test_the_step_clips_the_mean_loss_of_the_batch() -> None:
    each = task()
    each.begin_epoch(0)
    (windows,) = each.batch(0)
    other = model()
    logits = other(windows[:, :-1].long()).double()
    due = -logits.log_softmax(-1).gather(-1, windows[:, 1:, None].long()).mean()
    optimizer = torch.optim.SGD(each.model.parameters(), lr=0.0)
    loss = each.step("step", (windows,), {"model": optimizer})
    assert loss.item() == pytest.approx(due.item(), rel=1e-5)
    (100 * due).backward()
    norm = torch.stack([p.grad.norm() for p in other.parameters() if p.grad is not None]).norm()
    assert norm > CLIP
    clipped = torch.stack([p.grad.norm() for p in each.model.parameters() if p.grad is not None]).norm()
    assert float(clipped) <= CLIP * (1 + 1e-5)


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_the_validation_loss_is_the_mean_over_all_tokens_whatever_the_batch(batch: int) -> None:
    each = task(batch=batch)
    found = each.evaluate(final=True)
    text = source().valid.long()
    losses = []
    for start in range(0, len(text) - CONTEXT, CONTEXT):
        window = text[start : start + CONTEXT + 1]
        losses.append(functional.cross_entropy(each.model(window[None, :-1])[0], window[1:]).item())
    assert found["valid_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(found["valid_loss"] / math.log(2) / 2)  # two bytes per token


def test_a_text_shorter_than_the_context_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="a text of 8 tokens is shorter than a context of 8"):
        task(valid=CONTEXT)


def test_the_schedule_warms_up_and_ends_at_a_tenth() -> None:
    schedule = Cosine(warmup=100, per_epoch=100)
    assert [schedule.factor(0, step, 15) for step in (0, 49, 99, 100)] == pytest.approx([0.01, 0.5, 1, 1])
    assert schedule.factor(8, 800, 15) == pytest.approx(0.1 + 0.9 / 2)
    assert schedule.factor(14, 1499, 15) == pytest.approx(0.1, abs=1e-4)
    assert schedule.factor(0, 99, 1) == 1  # a run that is all warm-up


def test_a_run_resumes_in_the_middle_of_an_epoch_with_the_same_bits() -> None:
    assert_resumes_within_an_epoch(partial(task, steps=6))


# -- weight decay --------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["aida", "adamw", "adabelief", "torch.optim:RAdam"])
def test_only_matrices_decay(optimizer: str) -> None:
    given = {"weight_decay": 0.1} if ":" in optimizer else {}
    (spec,) = RunRequest(find_experiment("gpt-pysource"), (optimizer,), given, variant="tiny").specs()
    built = build(spec, model(), torch.device("cpu"))
    decays = {p.ndim: group["weight_decay"] for group in built.param_groups for p in group["params"]}
    assert decays == {1: 0.0, 2: 0.1}


@pytest.mark.parametrize("optimizer", ["aida", "adamw", "adabelief"])
def test_its_decay_is_decoupled(optimizer: str) -> None:
    (spec,) = RunRequest(find_experiment("gpt-pysource"), (optimizer,), variant="tiny").specs()
    built = build(spec, model(), torch.device("cpu"))
    assert all(group.get("decoupled_weight_decay", True) for group in built.param_groups)


def test_other_experiments_decay_all_parameters_alike() -> None:
    (spec,) = RunRequest(find_experiment("digits"), ("adamw",)).specs()
    assert len(build(spec, model(), torch.device("cpu")).param_groups) == 1


# -- the text ------------------------------------------------------------------------------------------


def code(name: str, size: int = 2 * LEAST) -> bytes:
    return f"# {name}\n".encode().ljust(size, b"x")


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for each, content in files.items():
            archive.writestr(each, content)
        meta = f"{name}-1.0.dist-info"
        archive.writestr(f"{meta}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{meta}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{meta}/RECORD", "")
    return path


def wheels(folder: Path) -> list[Path]:
    many = {f"one/{i:03}.py": code(f"file {i}") for i in range(300)}
    odd = {
        "two/same.py": code("file 7"),
        "two/windows.py": code("windows\r\n"),
        "two/empty.py": b"",
        "two/huge.py": code("huge", MOST + 1),
        "two/latin.py": code("latin") + b"\xe4",
        "two/nul.py": code("nul") + END,
        "two/data.txt": code("no source"),
    }
    return [wheel(folder, "two", odd), wheel(folder, "one", many)]


def texts(packages: list[Path], to: Path) -> dict[str, bytes]:
    to.mkdir()
    pysource.unpack(packages, to)
    return {split: (to / f"{split}.txt").read_bytes() for split in ("train", "valid")}


def test_the_text_holds_each_source_file_once_with_unix_line_ends(tmp_path: Path) -> None:
    found = texts(wheels(tmp_path), tmp_path / "out")
    files = [content for text in found.values() for content in text.split(END)[:-1]]
    assert sorted(files) == sorted([*(code(f"file {i}") for i in range(300)), code("windows\r\n").replace(b"\r", b"")])
    assert 0 < found["valid"].count(END) < 20


def test_the_text_does_not_depend_on_the_order_of_the_packages(tmp_path: Path) -> None:
    packages = wheels(tmp_path)
    assert texts(packages, tmp_path / "a") == texts(packages[::-1], tmp_path / "b")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSet:
    """A data set of two wheels in a folder, which pip takes instead of an index."""
    (tmp_path / "index").mkdir()
    built = wheels(tmp_path / "index")
    hashes = {path.name.split("-")[0]: hashlib.sha256(path.read_bytes()).hexdigest() for path in built}
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"{name}==1.0 --hash=sha256:{sha}\n" for name, sha in hashes.items()))
    monkeypatch.setattr(packages, "requirements", lambda data: listed)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    found = texts(built, tmp_path / "due")
    sizes = {f"{split}.txt": (len(text), hashlib.md5(text).hexdigest()) for split, text in found.items()}
    return replace(sets.PYSOURCE, files=tuple(DataFile(name, *each) for name, each in sizes.items()))


@pytest.mark.slow
def test_pip_downloads_the_packages_and_the_text_is_verified(index: DataSet, tmp_path: Path) -> None:
    status = fetch.get(index, tmp_path / "data")
    assert status.state == "verified"
    assert (tmp_path / "data/pysource/train.txt").read_bytes() == (tmp_path / "due/train.txt").read_bytes()
    assert not list((tmp_path / "data/.downloads").glob("pysource/*"))


@pytest.mark.slow
def test_a_package_with_another_hash_is_refused_in_one_line(index: DataSet, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "index/one-1.0-py3-none-any.whl", "a") as archive:
        archive.writestr("one/evil.py", code("evil"))
    with pytest.raises(DataError, match="pip could not download the packages") as error:
        fetch.get(index, tmp_path / "data")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "data/pysource").exists()


def test_tokens_decode_to_the_text_and_are_cached(
    index: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setattr(sets, "PYSOURCE", index)
    there = tmp_path / "data" / "pysource"
    there.mkdir(parents=True)
    for split in ("train", "valid"):
        (there / f"{split}.txt").write_bytes((tmp_path / f"due/{split}.txt").read_bytes())
    found = pysource.pysource(tmp_path / "data")
    stored = torch.load(there / pysource.CACHE, weights_only=True)
    tokenizer = tokenizers.Tokenizer.from_str(stored["tokenizer"])
    decoded = tokenizer.decode(found.valid.tolist(), skip_special_tokens=False).encode()
    assert decoded.replace(b"<end>", END) == (there / "valid.txt").read_bytes()
    assert found.valid_bytes == len(decoded.replace(b"<end>", END))
    monkeypatch.setattr(pysource, "_trained", lambda text: pytest.fail("it was in the cache"))
    assert torch.equal(pysource.pysource(tmp_path / "data").train, found.train)


# -- the tiny variant ----------------------------------------------------------------------------------


def sharded(spec: dict[str, Any], out: Path) -> Any:
    return run(RunSpec.from_json(spec), out, Options(device="cpu", threads=1, shard="fsdp"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.sharding)])
def test_several_processes_train_it_as_one_does(ranks: int, tmp_path: Path) -> None:
    given = {"eps": 1e-6, "lr": 0.1}
    request = RunRequest(find_experiment("gpt-pysource"), ("aida",), given, variant="tiny", epochs=1, limit=4)
    (spec,) = request.specs()
    one = sharded(spec.to_json(), tmp_path / "one")
    (several,) = together(partial(sharded, spec.to_json(), tmp_path / "several"), ranks=ranks)
    assert isinstance(several[0], dict), several
    mine, theirs = (read_curve(tmp_path / name / spec.key)[0] for name in ("several", "one"))
    for key in ("loss", "valid_loss", "bits_per_byte"):
        assert mine[key] == pytest.approx(theirs[key], rel=1e-5), key
    assert one["last"] < 5.4  # it learned something


@pytest.mark.slow
def test_the_tiny_variant_learns_the_standard_library_without_a_download(tmp_path: Path) -> None:
    request = RunRequest(find_experiment("gpt-pysource"), ("aida",), {"lr": 3e-3}, variant="tiny", epochs=1)
    (spec,) = request.specs()
    result = run(spec, tmp_path, Options(device="cpu"))
    assert result["state"] == "finished"
    assert result["last"] < 3.2  # the loss of the bytes' frequencies alone is 3.3; guessing has log 256, which is 5.5
