"""ResNet18 on ImageNet (Table V)."""

from __future__ import annotations

from types import MappingProxyType

from aida_lab.schedules import StepDecay
from aida_lab.spec import Experiment, Metric, PaperResult
from aida_lab.task import Task, TaskContext

#: The variant "sample" walks the same way on ten classes of 120 images: for trials, not for tables.
_ACCURACY = Metric("accuracy", "validation accuracy, %", "higher")


def _task(context: TaskContext) -> Task:
    from aida_lab.data.sets import IMAGENET, IMAGENET_SAMPLE
    from aida_lab.models.resnet import resnet18_imagenet
    from aida_lab.tasks.image_folder import ImageFolders

    data = IMAGENET_SAMPLE if context.spec.variant == "sample" else IMAGENET
    # a thousand outputs on the ten classes too: the same network, the same cost
    return ImageFolders(context, resnet18_imagenet(), data)


EXPERIMENTS = [
    Experiment(
        name="resnet18-imagenet",
        title="ResNet18 on ImageNet",
        table="V",
        data=("imagenet",),
        variant_data=MappingProxyType({"sample": ("imagenet-sample",)}),
        task=_task,
        parameters=11_689_512,
        epochs=90,
        batch=256,
        schedule=StepDecay(at=(70, 80), of=90),
        metrics=MappingProxyType({"default": _ACCURACY, "sample": _ACCURACY}),
        paper=MappingProxyType({"adabelief": PaperResult(69.65, 0.06), "aida-k2": PaperResult(69.70, 0.08)}),
        distributed=True,
        probe_every=5005,
        notes=(
            "Weight decay 1e-2 is decoupled: as L2 it would be implausible. Under torchrun every process takes its "
            "part of each batch of 256, and batch norms see that part. The variant 'sample' reads the ten classes of "
            "imagenet-sample, with the same network, to try the whole way; its accuracy says nothing."
        ),
    )
]
