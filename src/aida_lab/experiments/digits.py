"""A small convolutional net on scikit-learn's digits: seconds on one core, and no download. Not of the paper."""

from __future__ import annotations

from types import MappingProxyType

from aida_lab.schedules import StepDecay
from aida_lab.spec import Experiment, Metric
from aida_lab.task import Task, TaskContext


def _task(context: TaskContext) -> Task:
    from aida_lab.data import images
    from aida_lab.models.digits import DigitsNet
    from aida_lab.tasks.classification import Classification

    # the pixels are 0 to 16, their mean 4.9 and their standard deviation 6.0
    return Classification(context, DigitsNet(), images.digits(), (0.3053,), (0.3760,), augment=False, white=16.0)


EXPERIMENTS = [
    Experiment(
        name="digits",
        title="a small net on scikit-learn's digits",
        table="",
        data=("digits",),
        task=_task,
        parameters=38_282,
        epochs=40,
        batch=64,
        # where the CIFAR runs of the paper decay: at half and at four fifths
        schedule=StepDecay(at=(100, 160), of=200),
        metrics=MappingProxyType({"default": Metric("accuracy", "test accuracy, %", "higher")}),
        probe_every=24,
        notes="Ours: a task that trains in seconds, to see everything work. 297 test images: one is 0.34 %.",
    ),
]
