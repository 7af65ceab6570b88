"""VGG11 and ResNet34 on CIFAR-10 and CIFAR-100: Table III and the stepsize figures."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from aida_lab.schedules import StepDecay
from aida_lab.spec import Experiment, Metric, PaperResult, Tuning
from aida_lab.task import Task, TaskContext

_NOTES = (
    "What the paper calls validation is the test set. It does not say whether the best or the last epoch counts; both "
    "are recorded. Weight decay applies to every parameter; Fromage has none."
)


#: The values of the appendix that all adaptive methods share.
_ADAPTIVE = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 5e-4}
_EPS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)

_TUNING = {
    # the paper's weight decay is L2; Aida decouples it by default
    "aida": Tuning({**_ADAPTIVE, "eps": 1e-9, "decoupled_weight_decay": False}),
    # its tables use eps 1e-8 with one projection; its figures use 1e-8 with one and with two
    "aida-k1": Tuning({**_ADAPTIVE, "eps": 1e-8, "decoupled_weight_decay": False}),
    "adabelief": Tuning(_ADAPTIVE, {"eps": (1e-8, 1e-9)}),
    "adam": Tuning(_ADAPTIVE, {"eps": _EPS}),
    "adamw": Tuning({**_ADAPTIVE, "weight_decay": 1e-2}, {"eps": _EPS}),
    "radam": Tuning(_ADAPTIVE, {"eps": _EPS}),
    "adabound": Tuning({**_ADAPTIVE, "gamma": 1e-3}, {"eps": _EPS, "final_lr": (0.1, 0.01)}),
    "yogi": Tuning(_ADAPTIVE, {"eps": (1e-1, 1e-2, 1e-3)}),
    "sgd": Tuning({"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}),
    # the appendix searches eps too, but the code behind the paper's results never reads it
    "msvag": Tuning({"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 5e-4, "mixed_bias_correction": True}),
    "fromage": Tuning(searched={"lr": (0.1, 0.01, 0.001)}),
}

#: Methods that only the paper's stepsize figures have. It states no weight decay for them: we take the table's.
_IN_FIGURES = {
    "adabelief-star": Tuning(_ADAPTIVE, {"eps": _EPS}),
    "adam-plus": Tuning({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 5e-4}),
}


def _task(model: str, data: str, context: TaskContext) -> Task:
    from aida_lab.data import images
    from aida_lab.models.resnet import resnet34_cifar
    from aida_lab.models.vgg import VGG11
    from aida_lab.tasks.classification import Classification

    splits = (images.cifar10 if data == "cifar10" else images.cifar100)(context.data_root)
    network = (VGG11 if model == "vgg11" else resnet34_cifar)(splits.classes)
    return Classification(context, network, splits, images.CIFAR_MEAN, images.CIFAR_STD, augment=True)


def _experiment(model: str, data: str, parameters: int, paper: Mapping[str, PaperResult]) -> Experiment:
    titles = {"vgg11": "VGG11", "resnet34": "ResNet34", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
    return Experiment(
        name=f"{model}-{data}",
        title=f"{titles[model]} on {titles[data]}",
        table="III",
        data=(data,),
        task=partial(_task, model, data),
        parameters=parameters,
        epochs=200,
        batch=128,
        schedule=StepDecay(at=(100, 160), of=200),
        metrics={"default": Metric("accuracy", "test accuracy, %", "higher")},
        tuning=_TUNING | _IN_FIGURES if (model, data) == ("vgg11", "cifar10") else _TUNING,
        paper=paper,
        compiled=True,
        notes=_NOTES,
    )


#: Table III: accuracy, its standard deviation and seconds per epoch, in these columns.
_COLUMNS = (("vgg11", "cifar10"), ("resnet34", "cifar10"), ("vgg11", "cifar100"), ("resnet34", "cifar100"))
_TABLE = {
    "sgd": ((91.36, 0.07, 5.83), (95.48, 0.11, 30.45), (67.02, 0.25, 5.85), (78.10, 0.18, 30.92)),
    "yogi": ((90.74, 0.16, 6.49), (94.98, 0.26, 31.74), (65.57, 0.17, 6.42), (77.17, 0.12, 32.20)),
    "radam": ((89.58, 0.10, 6.28), (94.64, 0.18, 31.21), (63.62, 0.20, 6.29), (74.87, 0.13, 31.58)),
    "msvag": ((90.04, 0.22, 7.08), (94.65, 0.08, 33.78), (62.67, 0.33, 7.19), (75.57, 0.14, 33.80)),
    "fromage": ((89.72, 0.25, 6.66), (94.64, 0.07, 35.19), (62.93, 0.53, 6.56), (74.84, 0.27, 35.50)),
    "adam": ((91.20, 0.21, 6.15), (95.09, 0.18, 31.28), (67.88, 0.13, 6.20), (77.31, 0.14, 31.47)),
    "adamw": ((89.46, 0.08, 6.25), (94.48, 0.18, 31.71), (62.50, 0.23, 6.31), (74.29, 0.20, 31.80)),
    "adabound": ((90.48, 0.12, 6.71), (94.73, 0.16, 33.75), (64.80, 0.42, 6.73), (76.15, 0.10, 33.78)),
    "adabelief": ((91.55, 0.13, 6.47), (95.15, 0.11, 31.66), (68.05, 0.31, 6.49), (77.32, 0.37, 31.74)),
    "aida-k1": ((91.52, 0.05, 7.27), (95.31, 0.05, 35.25), (68.89, 0.09, 7.32), (77.50, 0.12, 35.46)),
    "aida-k2": ((91.68, 0.16, 7.95), (95.57, 0.13, 39.53), (69.02, 0.11, 8.01), (78.86, 0.12, 39.64)),
}
_PARAMETERS = (9_750_922, 21_282_122, 9_797_092, 21_328_292)

EXPERIMENTS = [
    _experiment(model, data, _PARAMETERS[column], {name: PaperResult(*row[column]) for name, row in _TABLE.items()})
    for column, (model, data) in enumerate(_COLUMNS)
]
