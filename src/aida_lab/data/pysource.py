"""Python source code as one long sequence of tokens: of well-known packages, or of Python's standard library.

``pysource.txt`` pins the packages by version and hash. Their files are joined to one text per split, and each file is
followed by :data:`END`. A byte-pair encoding is trained on the training text once; the tokens are cached beside it.
The standard library needs no download and no encoding: its tokens are bytes. It differs between Python versions.
"""

from __future__ import annotations

import hashlib
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aida_lab.data import local, sets
from aida_lab.data.cache import cached
from aida_lab.data.local import DataError, Root

END = b"\0"  #: after every file; no source file holds it
VOCABULARY = 8192
#: Files of other sizes are left out: empty ones, and tables of generated data.
LEAST, MOST = 200, 300_000
#: One file in VALID_SHARE is used for validation. A hash of its content decides which.
VALID_SHARE = 100

#: Bytes of the standard library's validation text.
LIBRARY_VALID = 1 << 17

CACHE = "tokens.pt"
_FORMAT = 1


@dataclass(frozen=True)
class TokenSplits:
    """Token ids (int32) per split."""

    train: Tensor
    valid: Tensor
    vocabulary: int
    valid_bytes: int  #: of the validation text


# -- the packages ------------------------------------------------------------------------------------------


def unpack(packages: Iterable[Path], to: Path) -> None:
    """Write ``train.txt`` and ``valid.txt`` from the wheels of the packages."""
    with (to / "train.txt").open("wb") as train, (to / "valid.txt").open("wb") as valid:
        for content in distinct(wheel_files(sorted(packages, key=lambda path: path.name))):
            chosen = int(hashlib.sha256(content).hexdigest(), 16) % VALID_SHARE == 0
            (valid if chosen else train).write(content + END)


def wheel_files(wheels: Iterable[Path]) -> Iterator[bytes]:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for entry in sorted(archive.infolist(), key=lambda entry: entry.filename):
                if entry.filename.endswith(".py") and LEAST <= entry.file_size <= MOST:
                    yield archive.read(entry)


def distinct(contents: Iterable[bytes]) -> Iterator[bytes]:
    """Source files as UTF-8 with Unix line ends, without those that are equal to an earlier one."""
    seen = set()
    for content in contents:
        content = content.replace(b"\r\n", b"\n")
        digest = hashlib.sha256(content).digest()
        if digest in seen or END in content or not LEAST <= len(content) <= MOST:
            continue
        with suppress(UnicodeDecodeError):  # a file that is not UTF-8 is left out
            content.decode("utf-8")
            seen.add(digest)
            yield content


def pysource(root: Root = None) -> TokenSplits:
    """The packages as tokens of a byte-pair encoding. Uses the cache if it is valid."""
    texts = [bytes(local.read(sets.PYSOURCE, f"{split}.txt", root)) for split in ("train", "valid")]

    def tokenised() -> dict[str, Any]:
        tokenizer = _trained(texts[0])
        train, valid = (_encoded(tokenizer, text) for text in texts)
        return {"train": train, "valid": valid, "tokenizer": tokenizer.to_str()}

    origin = hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()
    path = local.require(sets.PYSOURCE, root) / CACHE
    stored = cached(path, _FORMAT, origin, "the tokens", tokenised)
    return TokenSplits(stored["train"].int(), stored["valid"].int(), VOCABULARY, len(texts[1]))


def _documents(text: bytes) -> list[str]:
    return text.decode("utf-8").removesuffix(END.decode()).split(END.decode())


def _trained(text: bytes) -> Any:
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError:
        raise DataError(f"tokenising {sets.PYSOURCE.title} needs tokenizers: pip install tokenizers") from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_documents(text), trainer)
    return tokenizer


def _encoded(tokenizer: Any, text: bytes) -> Tensor:
    """The tokens of all files, each followed by ``<end>``, in 16 bits."""
    end = torch.tensor([tokenizer.token_to_id("<end>")], dtype=torch.uint16)
    parts = []
    documents = _documents(text)
    for start in range(0, len(documents), 1000):  # the objects of all files at once would take many gigabytes
        for found in tokenizer.encode_batch_fast(documents[start : start + 1000]):
            parts += [torch.tensor(found.ids, dtype=torch.uint16), end]
    return torch.cat(parts)


# -- the standard library ----------------------------------------------------------------------------------


def standard_library() -> TokenSplits:
    """The top-level modules of Python's standard library as bytes."""
    train, valid = (torch.frombuffer(bytearray(text), dtype=torch.uint8).int() for text in _library())
    return TokenSplits(train, valid, 256, len(valid))


def library_sum() -> str:
    return hashlib.md5(b"".join(_library()), usedforsecurity=False).hexdigest()


@cache
def _library() -> tuple[bytes, bytes]:
    """Training and validation text. Every tenth file is for validation, up to :data:`LIBRARY_VALID` bytes."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name)
    contents = list(distinct(path.read_bytes() for path in paths))
    train = [content for i, content in enumerate(contents) if i % 10]
    return END.join([*train, b""]), END.join([*contents[::10], b""])[:LIBRARY_VALID]
