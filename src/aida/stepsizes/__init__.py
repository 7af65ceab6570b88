"""The adaptive stepsizes of a training run, layer by layer, read from the optimizer's state::

    probe = StepsizeProbe(optimizer, model.named_parameters(), every=100, sink=sink("stepsizes.jsonl"))

The adaptive stepsize of an element is the factor of ``lr`` and the bias-corrected momentum, as in the paper's
footnote. Optimizers contain no diagnostic code; ``aida.readings`` computes their stepsizes from their state.
"""

from aida.stepsizes.explanation import explain
from aida.stepsizes.probe import StepsizeProbe
from aida.stepsizes.records import AcrossLayers, LayerStepsizes, Measurement, Record, summarise
from aida.stepsizes.sinks import CsvFile, JsonLines, StepsizeLog, read_jsonl
from aida.stepsizes.trackers import MLflow, TensorBoard, Wandb, scalars, sink

__all__ = [
    "AcrossLayers", "CsvFile", "JsonLines", "LayerStepsizes", "MLflow", "Measurement", "Record", "StepsizeLog",
    "StepsizeProbe", "TensorBoard", "Wandb", "explain", "read_jsonl", "scalars", "sink", "summarise",
]  # fmt: skip
