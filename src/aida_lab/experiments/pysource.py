"""A GPT of 34M parameters on Python source code. Our own task, for what the paper's tasks do not say."""

from __future__ import annotations

from aida_lab.schedules import Cosine
from aida_lab.spec import Experiment, Metric, Tuning
from aida_lab.task import Task, TaskContext

#: Steps between two evaluations, which the lab calls an epoch.
STEPS = 100

_NOTES = (
    "Our own task: 1,500 steps of 32 x 512 tokens, three quarters of a pass over the text. Linear warm-up over 100 "
    "steps, cosine to a tenth, gradients clipped to norm 1, decoupled weight decay of 0.1 on matrices and embeddings. "
    "An epoch is 100 steps. bits_per_byte compares models with other vocabularies. The variant 'tiny' is a model of "
    "135,000 parameters on the bytes of Python's standard library, for tests and first trials on a CPU: it needs no "
    "download, but its text, and so its numbers, differ between Python versions. The variant 'split' has a matrix each "
    "for queries, keys and values, which are three layers then, with the same initial values as the one matrix."
)

_ADAPTIVE = {"betas": (0.9, 0.95), "weight_decay": 0.1}

#: Starting points, not tuned.
_TUNING = {
    "aida": Tuning({**_ADAPTIVE, "lr": 3e-4, "eps": 1e-16, "decoupled_weight_decay": True}),
    "adabelief": Tuning({**_ADAPTIVE, "lr": 1e-3, "eps": 1e-16, "decoupled_weight_decay": True}),
    "adamw": Tuning({**_ADAPTIVE, "lr": 1e-3}),
    "adam": Tuning({"betas": (0.9, 0.95), "weight_decay": 0.0, "lr": 1e-3}),
    "sgd": Tuning({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}),
}


def _task(context: TaskContext) -> Task:
    from aida_lab.data import pysource
    from aida_lab.models.gpt import GPT
    from aida_lab.tasks.next_token import NextTokenTask

    if context.spec.variant == "tiny":
        source = pysource.standard_library()
        model = GPT(source.vocabulary, context=64, width=64, layers=2, heads=4)
    else:
        source = pysource.pysource(context.data_root)
        model = GPT(source.vocabulary, split=context.spec.variant == "split")
    return NextTokenTask(context, model, source, STEPS)


_METRIC = Metric("valid_loss", "validation loss per token, nats", "lower")

EXPERIMENTS = [
    Experiment(
        name="gpt-pysource",
        title="GPT on Python source code",
        table="",
        data=("pysource",),
        task=_task,
        parameters=33_825_280,
        epochs=15,
        batch=32,
        schedule=Cosine(warmup=100, per_epoch=STEPS),
        metrics={"default": _METRIC, "tiny": _METRIC, "split": _METRIC},
        variant_data={"tiny": ("stdlib",)},
        decays_matrices_only=True,
        tuning=_TUNING,
        compiled=True,
        distributed="fsdp",
        probe_every=STEPS,
        notes=_NOTES,
    ),
]
