"""Sinks that log to TensorBoard, Weights & Biases and MLflow, and ``sink``, which chooses one."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from aida.stepsizes.records import AcrossLayers, Record
from aida.stepsizes.sinks import CsvFile, JsonLines

VALUES = ("mean", "std", "min", "max", "at_bound", "cosine", "scale_m", "scale_g", "update_ratio", "lost")
ALL = (*VALUES, "quantiles")


def sink(to: Any) -> Callable[[Record], object]:
    """The sink of a probe, for whichever tracker you use.

    Args:
        to (str, PathLike or object): a file that ends in ``.jsonl`` or ``.csv``; ``"tensorboard"``, ``"wandb"`` or
            ``"mlflow"`` for the tracker's own default (a new folder in ``runs``, or the run that is active); a
            ``SummaryWriter``; a run of Weights & Biases or MLflow. Any other callable is returned as it is.
    """
    if isinstance(to, (str, os.PathLike)):
        by_name: dict[str, type[Any]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}
        by_ending: dict[str, type[Any]] = {".jsonl": JsonLines, ".csv": CsvFile}
        name = os.fspath(to)
        if name in by_name:
            return by_name[name]()  # type: ignore[no-any-return]
        if (ending := os.path.splitext(name)[1]) in by_ending:
            return by_ending[ending](to)  # type: ignore[no-any-return]
        raise ValueError(
            f"no sink is called {name!r}; known are {', '.join(by_name)}, and files ending in {' or '.join(by_ending)}"
        )
    if hasattr(to, "add_scalar"):
        return TensorBoard(to)
    if hasattr(to, "define_metric"):
        return Wandb(to)
    if hasattr(getattr(to, "info", None), "run_id"):
        return MLflow(to)
    if callable(to):
        return to  # type: ignore[no-any-return]
    raise TypeError(
        f"no sink for a {type(to).__name__}; pass a file name, 'tensorboard', 'wandb', 'mlflow', a SummaryWriter, "
        "a run of Weights & Biases or MLflow, or any callable that takes a record"
    )


def scalars(record: Record, values: Sequence[str] = ALL) -> dict[str, float]:
    """The numbers of a record by the names that trackers show, such as ``stepsizes/mean/<layer>``.

    Args:
        record (Record): of one layer, or across all layers.
        values (sequence of str, default: all): the fields of a layer's record to include.
    """
    if isinstance(record, AcrossLayers):
        # not "at_bound": MLflow's file store cannot have a metric beside others whose names begin with it and a slash
        found: dict[str, float | None] = {"spread": record.spread, "overall_at_bound": record.at_bound}
    else:
        found = {f"{name}/{record.layer}": getattr(record, name) for name in values if name != "quantiles"}
        if "quantiles" in values:
            found |= {f"quantile_{level:g}/{record.layer}": value for level, value in record.quantiles}
    return {f"stepsizes/{name}": value for name, value in found.items() if value is not None}


class Tracker(AbstractContextManager["Tracker"]):
    """Collects the numbers of a measurement, and logs them at once; ``fields`` as in :func:`scalars`."""

    def __init__(self, fields: Sequence[str] = ALL) -> None:
        self._fields = fields
        self._values: dict[str, float] = {}

    def __call__(self, record: Record) -> None:
        self._values |= scalars(record, self._fields)
        if isinstance(record, AcrossLayers):  # the last record of a measurement
            values, self._values = self._values, {}
            self._log(values, record.step)

    @abstractmethod
    def _log(self, values: dict[str, float], step: int) -> None:
        """Log the numbers of one measurement, by name."""

    def close(self) -> None:
        """Close what the sink opened. A writer or run that it was given stays open."""

    def __exit__(self, *exception: object) -> None:
        self.close()


class TensorBoard(Tracker):
    """Sink that writes all numbers of a record as TensorBoard scalars: ``stepsizes/mean/<layer>`` and so on.

    Args:
        to (str, PathLike or SummaryWriter, optional, default: None): the folder of the event files, or a writer
            that exists. None means a new folder in ``runs``, as for a ``SummaryWriter`` without arguments.
    """

    def __init__(self, to: Any = None) -> None:
        super().__init__()
        self._opened = not hasattr(to, "add_scalar")
        if self._opened:
            try:
                writer = import_module("torch.utils.tensorboard").SummaryWriter
            except ImportError:
                raise ImportError("this sink needs TensorBoard: pip install '.[tensorboard]' in a clone") from None
            to = writer(None if to is None else os.fspath(to))
        self._writer = to

    def _log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._opened:
            self._writer.close()


class Wandb(Tracker):
    """Sink that logs to a run of Weights & Biases. The horizontal axis is ``stepsizes/step``, not the run's own step.

    Args:
        run (wandb.Run, optional, default: None): what ``wandb.init()`` returned. None means the active run.
    """

    def __init__(self, run: Any = None) -> None:
        super().__init__()
        run = import_module("wandb").run if run is None else run
        if run is None:
            raise RuntimeError("Weights & Biases has no active run: call wandb.init() before you build this sink")
        # an own axis, as the Hugging Face Trainer and Lightning have: the run's step belongs to the caller
        run.define_metric("stepsizes/step")
        run.define_metric("stepsizes/*", step_metric="stepsizes/step")
        self._run = run

    def _log(self, values: dict[str, float], step: int) -> None:
        self._run.log({**values, "stepsizes/step": step})


class MLflow(Tracker):
    """Sink that logs metrics to a run of MLflow. Brackets in the names of layers become dots, as MLflow requires.

    Args:
        run (mlflow.entities.Run, optional, default: None): what ``mlflow.start_run()`` returned. None means the
            active run; MLflow starts one if there is none.
    """

    def __init__(self, run: Any = None) -> None:
        super().__init__()
        self._log_metrics = import_module("mlflow").log_metrics
        self._run_id: str | None = None if run is None else run.info.run_id

    def _log(self, values: dict[str, float], step: int) -> None:
        allowed = {name.replace("[", ".").replace("]", ""): value for name, value in values.items()}
        self._log_metrics(allowed, step=step, run_id=self._run_id)
