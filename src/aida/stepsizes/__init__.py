"""The adaptive stepsizes of a training run, layer by layer: read from the optimizer's state, left unchanged.

    probe = StepsizeProbe(optimizer, model.named_parameters(), every=100, sink=JsonLines("stepsizes.jsonl"))

Optimizers contain no diagnostic code; ``aida.readings`` says where their stepsizes lie. The paper's
footnote defines them: what multiplies ``lr`` and the bias-corrected momentum, element by element.
"""

from aida.stepsizes.explanation import explain
from aida.stepsizes.probe import StepsizeProbe
from aida.stepsizes.records import AcrossLayers, LayerStepsizes, Measurement, Record, summarise
from aida.stepsizes.sinks import JsonLines, StepsizeLog, TensorBoard, read_jsonl

__all__ = [
    "AcrossLayers",
    "JsonLines",
    "LayerStepsizes",
    "Measurement",
    "Record",
    "StepsizeLog",
    "StepsizeProbe",
    "TensorBoard",
    "explain",
    "read_jsonl",
    "summarise",
]
