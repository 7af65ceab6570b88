"""Reading the data sets: tiny files in the official formats, and the real ones where they are."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from aida_lab.data import DataError, images, local, sets, text, translation
from aida_lab.data.fetch import import_from
from aida_lab.data.sets import DataFile
from real_data import needs


def cifar_file(path, records: int, labels: int, classes: int, seed: int):
    """Records of random pixels behind ``labels`` label bytes, the last of which counts up."""
    content = torch.randint(256, (records, labels + 3072), dtype=torch.uint8, generator=torch.manual_seed(seed))
    content[:, labels - 1] = torch.arange(records) % classes
    path.write_bytes(content.numpy().tobytes())
    return content


# images


def test_cifar10_is_read_in_the_order_of_its_files(tmp_path, monkeypatch):
    small = replace(sets.CIFAR10, files=tuple(DataFile(file.name, 4 * 3073) for file in sets.CIFAR10.files))
    monkeypatch.setattr(sets, "CIFAR10", small)
    folder = tmp_path / small.folder
    folder.mkdir()
    written = [cifar_file(folder / file.name, 4, 1, 10, seed) for seed, file in enumerate(small.files)]
    found = images.cifar10(tmp_path)
    assert found.train.pixels.shape == (20, 3, 32, 32)
    assert found.train.pixels.dtype == torch.uint8
    assert found.train.labels.tolist() == [0, 1, 2, 3] * 5
    assert torch.equal(found.train.pixels.flatten(1), torch.cat(written[:5])[:, 1:])
    # red, then green, then blue, each row by row
    assert found.test.pixels[2, 1, 5, 7] == written[5][2, 1 + 1024 + 5 * 32 + 7]


def test_cifar100_takes_the_fine_label(tmp_path, monkeypatch):
    small = replace(sets.CIFAR100, files=(DataFile("train.bin", 7 * 3074), DataFile("test.bin", 3 * 3074)))
    monkeypatch.setattr(sets, "CIFAR100", small)
    (tmp_path / small.folder).mkdir()
    written = cifar_file(tmp_path / small.folder / "train.bin", 7, 2, 100, 0)
    cifar_file(tmp_path / small.folder / "test.bin", 3, 2, 100, 1)
    found = images.cifar100(tmp_path)
    assert found.train.labels.tolist() == list(range(7))
    assert torch.equal(found.train.pixels.flatten(1), written[:, 2:])
    (tmp_path / small.folder / "test.bin").write_bytes(b"\xff" * 3 * 3074)
    with pytest.raises(DataError, match=r"test\.bin has the label 255, but there are 100 classes; fix it with: aida"):
        images.cifar100(tmp_path)


def test_a_file_of_the_right_size_with_other_bytes_is_damaged(tmp_path, monkeypatch):
    content = bytes(3073)
    wanted = hashlib.md5(content, usedforsecurity=False).hexdigest()
    small = replace(sets.CIFAR10, files=tuple(DataFile(file.name, 3073, wanted) for file in sets.CIFAR10.files))
    monkeypatch.setattr(sets, "CIFAR10", small)
    (tmp_path / small.folder).mkdir()
    for file in small.files:
        (tmp_path / small.folder / file.name).write_bytes(content)
    assert images.cifar10(tmp_path).train.pixels.sum() == 0
    (tmp_path / small.folder / "data_batch_3.bin").write_bytes(content[:-1] + b"\1")
    with pytest.raises(DataError, match=rf"data_batch_3\.bin is damaged, its MD5 is not {wanted}"):
        images.cifar10(tmp_path)


def test_digits_need_no_download():
    found = images.digits()
    assert found.train.pixels.shape == (1500, 1, 8, 8)
    assert found.test.pixels.shape == (297, 1, 8, 8)
    assert found.train.pixels.max() == 16
    assert found.train.labels.unique().tolist() == list(range(10))


# Penn Treebank


def test_words_are_numbered_in_order_of_appearance_and_lines_end_in_eos():
    found = text.number_words([" the cat ", " the dog "], [" a cat "], [" bird "])
    assert found.words == ("the", "cat", "<eos>", "dog", "a", "bird")
    assert found.train.tolist() == [0, 1, 2, 0, 3, 2]
    assert found.valid.tolist() == [4, 1, 2]
    assert found.test.tolist() == [5, 2]


def test_batchify_makes_columns_of_consecutive_text():
    columns = text.batchify(torch.arange(11), 2)
    assert columns.tolist() == [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]
    with pytest.raises(ValueError, match="batch=12 must be between 1 and the number of tokens, 11"):
        text.batchify(torch.arange(11), 12)


# Multi30k

LINES = {
    "train.de": ["Ein Hund .", "Ein Hund !", "Ein Hund .", "lang " * 101],
    "train.en": ["A dog .", "A dog .", "A hund .", "long"],
    "valid.de": ["Ein Vogel ."],
    "valid.en": ["a dog ."],
    "test.de": ["hund"],
    "test.en": ["dog"],
}


def test_one_vocabulary_for_both_languages():
    found = translation.number_pairs(LINES, str.split, str.split)
    # "." comes twice in German and three times in English: known in both, as an English word
    assert found.words == ("<unk>", "<blank>", "<s>", "</s>", "ein", "hund", ".", "a")
    assert len(found.train) == 3, "a pair with more than 100 tokens is left out"
    assert found.train.source[0].tolist() == [2, 4, 5, 6, 3]
    assert found.train.target[2].tolist() == [2, 7, 5, 6, 3]
    assert found.valid.source[0].tolist() == [2, 4, translation.UNKNOWN, 6, 3]


def test_padded_rows_hold_the_sentences():
    found = translation.number_pairs(
        {**LINES, "test.de": ["hund", "ein hund"], "test.en": ["a", "a"]}, str.split, str.split
    )
    assert found.test.source.padded().tolist() == [[2, 5, 3, 1], [2, 4, 5, 3]]
    assert found.test.source.lengths.tolist() == [3, 4]


@pytest.fixture
def small_multi30k(tmp_path, monkeypatch):
    folder = tmp_path / "multi30k"
    folder.mkdir()
    files = []
    for split, name in translation.SPLITS.items():
        for language in ("de", "en"):
            content = "".join(f"{line}\n" for line in LINES[f"{split}.{language}"]).encode()
            (folder / f"{name}.{language}").write_bytes(content)
            files.append(DataFile(f"{name}.{language}", len(content)))
    monkeypatch.setattr(sets, "MULTI30K", replace(sets.MULTI30K, files=tuple(files)))
    calls = []

    def spacy(language):
        calls.append(language)
        return str.split

    monkeypatch.setattr(translation, "_spacy", spacy)
    return tmp_path, calls


def test_sentences_are_tokenised_once_and_an_import_copies_the_cache(small_multi30k, tmp_path_factory):
    root, calls = small_multi30k
    first = translation.multi30k(root)
    again = translation.multi30k(root)
    assert calls == ["de", "en"]
    other = tmp_path_factory.mktemp("other")
    import_from(sets.MULTI30K, root / "multi30k", other)
    moved = translation.multi30k(other)
    assert calls == ["de", "en"]
    for found in (again, moved):
        assert found.words == first.words
        assert torch.equal(found.train.target.numbers, first.train.target.numbers)
        assert torch.equal(found.valid.source.starts, first.valid.source.starts)


def test_a_cache_of_other_sentences_or_a_damaged_cache_is_computed_again(small_multi30k):
    root, calls = small_multi30k
    translation.multi30k(root)
    path = root / "multi30k" / "val.en"
    path.write_bytes(path.read_bytes().replace(b"dog", b"cow"))
    translation.multi30k(root)
    assert len(calls) == 4
    (root / "multi30k" / translation.CACHE).write_bytes(b"nothing")
    with pytest.warns(UserWarning, match="cannot be read"):
        translation.multi30k(root)
    assert len(calls) == 6


def test_without_spacy_and_cache_one_line_says_what_to_do():
    code = (
        "import sys; sys.modules['spacy'] = None\n"
        "from aida_lab.data import DataError; from aida_lab.data.translation import _spacy\n"
        "try: _spacy('de')\n"
        "except DataError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.count("\n") == 1
    assert "pip install '.[data]' in a clone" in said
    assert "tokens.pt" in said


# the real ones


@needs(sets.CIFAR10)
def test_real_cifar10():
    found = images.cifar10()
    assert found.train.pixels.shape == (50_000, 3, 32, 32)
    assert found.test.pixels.shape == (10_000, 3, 32, 32)
    assert found.train.labels.bincount().tolist() == [5000] * 10
    assert found.test.labels.bincount().tolist() == [1000] * 10
    means = [float(found.train.pixels[:, channel].double().mean() / 255) for channel in range(3)]
    assert means == pytest.approx(images.CIFAR_MEAN, abs=1e-4)


@needs(sets.CIFAR100)
def test_real_cifar100():
    found = images.cifar100()
    assert found.train.pixels.shape == (50_000, 3, 32, 32)
    assert found.train.labels.bincount().tolist() == [500] * 100
    assert found.test.labels.bincount().tolist() == [100] * 100


@needs(sets.PTB)
def test_real_penn_treebank():
    found = text.ptb()
    assert [len(row) for row in (found.train, found.valid, found.test)] == [929_589, 73_760, 82_430]
    assert len(found.words) == 10_000


@needs(sets.MULTI30K, tokenised=True)
def test_real_multi30k():
    found = translation.multi30k()
    assert [len(pairs) for pairs in (found.train, found.valid, found.test)] == [29_000, 1_014, 1_000]
    assert len(found.words) == 9521
    assert found.words[:4] == translation.SPECIAL
    assert int((found.valid.target.lengths - 1).sum()) == 14_440, "every token but <s> is predicted"


@needs(sets.MULTI30K)
def test_real_multi30k_vocabularies_before_merging():
    pytest.importorskip("spacy")
    for language, words in (("de", 5374), ("en", 4556)):
        tokenizer = translation._spacy(language)
        lines = local.read(sets.MULTI30K, f"train.{language}").decode("utf-8").split("\n")[:-1]
        assert len(translation.vocabulary([word.lower() for word in tokenizer(line)] for line in lines)) == words


@needs(sets.IMAGENET_SAMPLE)
def test_real_imagenet_sample():
    folder = local.require(sets.IMAGENET_SAMPLE)
    assert sets.IMAGENET_SAMPLE.tree is not None
    for split, count in sets.IMAGENET_SAMPLE.tree.images.items():
        assert local.images_below(folder / split) == count
