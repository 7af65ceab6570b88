"""The Hugging Face Trainer: Aida with the values of the TrainingArguments, and its stepsizes in the Trainer's logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aida.optimizer import Aida
from aida.stepsizes import Record, StepsizeProbe, scalars


def optimizer_cls_and_kwargs(args: TrainingArguments, **values: Any) -> tuple[type[Aida], dict[str, Any]]:
    """What the argument of this name of the ``Trainer`` takes.

    ``lr``, ``betas`` and ``weight_decay`` are those of the arguments; the decay is decoupled, and the Trainer leaves
    biases and norms out of it. ``args.adam_epsilon`` is not used, because Aida's eps has another place and meaning.

    Args:
        args (TrainingArguments): the arguments that the Trainer gets.
        values: arguments of :class:`aida.Aida`, such as ``eps=1e-16``. They take precedence. With ``clip_norm`` set
            ``max_grad_norm=0`` in the arguments, or the gradients are clipped twice.
    """
    given = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "weight_decay": args.weight_decay}
    return Aida, {**given, **values}


class StepsizeCallback(TrainerCallback):
    """Measures the adaptive stepsizes during training, and logs them where the Trainer logs its loss.

    Add it to the Trainer: ``trainer.add_callback(StepsizeCallback(trainer))``. The logs then have
    ``stepsizes/mean/<layer>``, ``stepsizes/spread`` and so on: in ``trainer.state.log_history``, and in every tracker
    of ``report_to``. It works with any optimizer that :class:`aida.StepsizeProbe` knows, also the default AdamW.

    Args:
        trainer (Trainer): the Trainer whose logs receive the numbers.
        every (int, optional, default: None): measure after each step whose number is a multiple of this. None means
            ``logging_steps``.
        values (sequence of str, default: ("mean", "at_bound")): the fields of a layer's record to log. The numbers
            across all layers are always logged.
        sink (Callable, optional, default: None): is given all records, such as ``aida.sink("stepsizes.jsonl")``.
        weights_only (bool, default: True): leave out tensors with fewer than two dimensions: biases and norms.
    """

    def __init__(
        self,
        trainer: Trainer,
        every: int | None = None,
        values: Sequence[str] = ("mean", "at_bound"),
        sink: Callable[[Record], object] | None = None,
        weights_only: bool = True,
    ) -> None:
        self._trainer, self._every, self._values = trainer, every, values
        self._sink, self._weights_only = sink, weights_only
        self._probe: StepsizeProbe | None = None
        self._measured: dict[str, float] = {}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        **others: Any,
    ) -> None:
        self._close()  # an earlier training was interrupted
        self._probe = StepsizeProbe(
            optimizer,
            model.named_parameters(),
            every=self._every or state.logging_steps,
            sink=self._take,
            weights_only=self._weights_only,
            start=state.global_step,
        )

    def _take(self, record: Record) -> None:
        self._measured |= scalars(record, self._values)
        if self._sink is not None:
            self._sink(record)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        if self._measured:
            measured, self._measured = self._measured, {}
            should_log = control.should_log  # logging resets it, and the Trainer would not log its loss
            self._trainer.log(measured)
            control.should_log = should_log

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None
