"""WGAN-GP on CIFAR-10 (Table IV)."""

from __future__ import annotations

from aida_lab.schedules import Constant
from aida_lab.spec import Experiment, Metric, PaperResult, Tuning
from aida_lab.task import Task, TaskContext


def _task(context: TaskContext) -> Task:
    from aida_lab.tasks.gan import WganGp

    return WganGp(context)


#: The values of the appendix that all adaptive methods share.
_ADAPTIVE = {"lr": 2e-4, "betas": (0.5, 0.999), "weight_decay": 0.0}
_EPS = (1e-4, 1e-6, 1e-8, 1e-10, 1e-12, 1e-14)
_LR = (0.1, 0.02, 0.002, 0.0002)

_TUNING = {
    "aida": Tuning({**_ADAPTIVE, "eps": 1e-12, "decoupled_weight_decay": False}),
    "adabelief": Tuning({**_ADAPTIVE, "eps": 1e-12}),
    "adam": Tuning(_ADAPTIVE, {"eps": _EPS}),
    "adamw": Tuning({**_ADAPTIVE, "weight_decay": 5e-4}, {"eps": _EPS}),
    "radam": Tuning(_ADAPTIVE, {"eps": _EPS}),
    "adabound": Tuning({**_ADAPTIVE, "gamma": 1e-3}, {"eps": (1e-2, 1e-4, 1e-6, 1e-8, 1e-10), "final_lr": (0.1, 0.01)}),
    "yogi": Tuning(_ADAPTIVE, {"eps": (1e-2, 1e-3, 1e-4, 1e-5)}),
    "sgd": Tuning({"weight_decay": 0.0}, {"lr": _LR, "momentum": (0.3, 0.5, 0.9)}),
    "msvag": Tuning({"betas": (0.5, 0.999), "weight_decay": 0.0, "mixed_bias_correction": True}, {"lr": _LR}),
    "fromage": Tuning(searched={"lr": (0.1, 0.01, 0.001)}),
}

#: Table IV.
_PAPER = {
    "aida-k2": 55.7,
    "aida-k1": 55.65,
    "adabelief": 56.73,
    "adam": 66.71,
    "radam": 69.14,
    "adabound": 61.65,
    "adamw": 63.76,
    "msvag": 69.47,
    "sgd": 90.61,
    "yogi": 68.34,
    "fromage": 78.47,
}

EXPERIMENTS = [
    Experiment(
        name="wgan-gp-cifar10",
        title="WGAN-GP on CIFAR-10",
        table="IV",
        data=("cifar10",),
        task=_task,
        parameters=3_576_704 + 2_765_569,
        epochs=100,
        batch=64,
        schedule=Constant(),
        metrics={
            "default": Metric("frechet_efficientnet_lite0", "Fréchet distance on EfficientNet-Lite0 features", "lower"),
            "inception": Metric("fid", "FID", "lower"),
        },
        tuning=_TUNING,
        paper={method: PaperResult(fid, best=True) for method, fid in _PAPER.items()},
        paper_variant="inception",
        probe_every=782,
        notes=(
            "The paper reports FID, which only the variant 'inception' measures. Each result is the best of all "
            "configurations and repetitions, not a mean. The distance is measured once, after the last epoch, between "
            "64,000 generated images and the 50,000 training images. As in the public code, each image is stretched to "
            "the full range of values."
        ),
    )
]
