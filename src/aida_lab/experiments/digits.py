"""A small convolutional net on scikit-learn's digits: trains in seconds on one core, without a download. Our own."""

from __future__ import annotations

from aida_lab.schedules import StepDecay
from aida_lab.spec import Experiment, Metric, Tuning
from aida_lab.task import Task, TaskContext

#: Our values; nothing is searched.
_ADAPTIVE = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
_TUNING = {
    "aida": Tuning({**_ADAPTIVE, "eps": 1e-8, "decoupled_weight_decay": False}),
    "adabelief": Tuning({**_ADAPTIVE, "eps": 1e-8}),
    "adabelief-star": Tuning({**_ADAPTIVE, "eps": 1e-8}),
    "adam-plus": Tuning({**_ADAPTIVE, "eps": 1e-8}),
    "adam": Tuning(_ADAPTIVE),
    "adamw": Tuning({**_ADAPTIVE, "weight_decay": 1e-2}),
    "radam": Tuning(_ADAPTIVE),
    "adabound": Tuning(_ADAPTIVE),
    "yogi": Tuning({**_ADAPTIVE, "eps": 1e-3}),
    "sgd": Tuning({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}),
    "msvag": Tuning({"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.0}),
    "fromage": Tuning({"lr": 1e-2}),
}


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
        # as in the paper's CIFAR runs, at half and at four fifths of the epochs
        schedule=StepDecay(at=(100, 160), of=200),
        metrics={"default": Metric("accuracy", "test accuracy, %", "higher")},
        tuning=_TUNING,
        probe_every=24,
        notes="Our own task, which trains in seconds. It has 297 test images: one image is 0.34 %.",
    ),
]
