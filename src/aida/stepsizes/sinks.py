"""Sinks that write records to files. A sink is any callable that takes a record, such as ``some_list.append``."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

from aida.stepsizes.records import AcrossLayers, LayerStepsizes, Record

#: What null stands for: JSON has no numbers that are not finite.
_NULLS = {"spread": math.inf, "mean": math.nan, "std": math.nan, "min": math.nan, "max": math.nan}


class _RecordFile(AbstractContextManager["_RecordFile"]):
    """Appends records to a text file, and flushes it after each measurement.

    If a crash cut the last line short, writing continues on a new line.
    """

    _mode: ClassVar[str] = "a"
    _newline: ClassVar[str | None] = None

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = _ends_within_a_line(self.path)
        self._file: IO[str] = self.path.open(self._mode, encoding="utf-8", newline=self._newline)
        if unfinished:
            self._file.write("\n")

    def __call__(self, record: Record) -> None:
        self._write(record)
        if isinstance(record, AcrossLayers):
            self._file.flush()

    @abstractmethod
    def _write(self, record: Record) -> None:
        """Write one record."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


class JsonLines(_RecordFile):
    """Sink that appends one JSON line per record to a file, and flushes it after each measurement.

    If a crash cut the last line short, writing continues on a new line, so that at most one line is lost.

    Args:
        path (str or PathLike): the file; missing folders are created.
    """

    def _write(self, record: Record) -> None:
        self._file.write(json.dumps(_jsonable(dataclasses.asdict(record)), allow_nan=False) + "\n")


class CsvFile(_RecordFile):
    """Sink that appends one row per record to a CSV file, and flushes it after each measurement.

    The first row names the columns. In the rows across all layers ``layer`` is empty; only they have a ``spread``.

    Args:
        path (str or PathLike): the file; missing folders are created.
    """

    _mode, _newline = "a+", ""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._file.seek(0)
        self._columns = next(csv.reader(self._file), None)

    def _write(self, record: Record) -> None:
        row = {key: value for key, value in dataclasses.asdict(record).items() if key not in ("hyper", "quantiles")}
        if isinstance(record, LayerStepsizes):
            row |= {f"quantile_{level:g}": value for level, value in record.quantiles} | {"lr": record.hyper.get("lr")}
            row["shape"] = "x".join(map(str, record.shape))
        if self._columns is None:
            self._columns = [*row, *(["spread"] if "spread" not in row else [])]
            csv.writer(self._file).writerow(self._columns)
        if missing := row.keys() - {*self._columns, "layers"}:
            raise ValueError(
                f"{self.path} has no column for {', '.join(sorted(missing))}: it was written with other quantiles or "
                "by something else; choose another file"
            )
        csv.writer(self._file).writerow([row.get(column) for column in self._columns])


@dataclass(frozen=True)
class StepsizeLog:
    """The content of a file of :class:`JsonLines`."""

    path: Path
    layers: tuple[LayerStepsizes, ...]
    across: tuple[AcrossLayers, ...]
    damaged: tuple[int, ...]  #: numbers of the unreadable lines, from 1

    @property
    def method(self) -> str:
        return self.layers[-1].method


def read_jsonl(path: str | os.PathLike[str], content: bytes | None = None) -> StepsizeLog:
    """Read a file of :class:`JsonLines`. Unreadable lines are skipped with a warning.

    Args:
        path (str or PathLike): the file.
        content (bytes, optional, default: None): the content of the file, if it has been read already.
    """
    path = Path(path)
    content = path.read_bytes() if content is None else content
    layers: list[LayerStepsizes] = []
    across: list[AcrossLayers] = []
    damaged: list[int] = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = read_record(line)
        except ValueError:
            damaged.append(number)
            continue
        if isinstance(record, LayerStepsizes):
            layers.append(record)
        else:
            across.append(record)
    if not layers:
        raise ValueError(
            f"{path} holds no stepsize record{f' and {len(damaged)} unreadable lines' if damaged else ''}; "
            "write it with aida.StepsizeProbe(..., sink=aida.JsonLines(path))"
        )
    if damaged:
        first = ", ".join(map(str, damaged[:10])) + (f" and {len(damaged) - 10} more" if len(damaged) > 10 else "")
        warnings.warn(f"{path}: skipped unreadable lines: {first}", stacklevel=2)
    return StepsizeLog(path, tuple(layers), tuple(across), tuple(damaged))


def _ends_within_a_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _jsonable(value: Any) -> Any:
    """Replace numbers that are not finite by None: JSON has no NaN, and most readers refuse it."""
    if isinstance(value, Mapping):
        return {key: _jsonable(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [_jsonable(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_record(line: bytes) -> Record:
    """The record in a line of :class:`JsonLines`; ValueError if there is none."""
    try:
        return _record(json.loads(line))
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"no stepsize record: {error}") from None


def _record(fields: dict[str, Any]) -> Record:
    fields.update({name: value for name, value in _NULLS.items() if name in fields and fields[name] is None})
    record: Record
    if "layer" not in fields:
        record = AcrossLayers(**fields)
        numbers = [record.layers, record.elements, record.spread]
    else:
        fields.update({name: _tupled(fields[name]) for name in ("shape", "quantiles", "hyper")})
        record = LayerStepsizes(**fields)
        maybe = (record.bound, record.weight_norm, record.update_norm, record.lost)
        numbers = [record.elements, record.mean, record.std, record.min, record.max, *(each or 0.0 for each in maybe)]
        if not _is_name(record.layer) or not isinstance(record.shape, tuple) or not isinstance(record.hyper, dict):
            raise ValueError("the layer has no name, no shape or no hyper-parameters")
    if not all(map(_is_number, [*numbers, record.at_bound or 0.0])) or not _is_name(record.method):
        raise ValueError("a field is not a number, or not a name")
    if not all(type(n) is int and 0 <= n < 2**53 for n in (record.step, record.elements - 1)):
        raise ValueError("the step, or the number of elements, is not a count")
    return record


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and (value != value or value == math.inf or abs(value) <= 1e300)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= 500


def _tupled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tupled(part) for key, part in value.items()}
    return tuple(map(_tupled, value)) if isinstance(value, list) else value
