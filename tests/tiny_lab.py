"""The command ``aida`` with a small transformer on random sentences: ``python tiny_lab.py train transformer-multi30k``.

``TINY_KILL=RANK:STEP`` in the environment kills that rank of torchrun before that step of its own.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from aida_lab.cli import choices, main
from aida_lab.data import translation as data
from aida_lab.models import transformer
from aida_lab.models.transformer import Transformer
from aida_lab.tasks.translation import TranslationTask
from text_runs import VOCABULARY, pairs

#: Batches of 200: an epoch has 4.
TRAIN, VALID = 700, 100


def tiny(setattr: Any = setattr) -> None:
    """Let the experiment transformer-multi30k train a small network on random sentences."""
    sentences = data.Translation(
        pairs(TRAIN), pairs(VALID, seed=1), pairs(2, seed=2), tuple(map(str, range(VOCABULARY)))
    )

    def small(vocabulary: int, pad: int) -> Transformer:
        # float64, because training makes float32's rounding visible after a few steps
        return Transformer(vocabulary, pad=pad, d_model=32, d_inner=64, layers=2, heads=4).double()

    setattr(data, "multi30k", lambda root: sentences)
    setattr(transformer, "Transformer", small)
    setattr(choices, "require_data", lambda names, root: None)


def killed_at(step: int) -> None:
    """Let this process be killed before one of its steps."""
    taken, take = 0, TranslationTask.step

    def counted(*arguments: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(*arguments)

    TranslationTask.step = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    tiny()
    rank, _, step = os.environ.get("TINY_KILL", "").partition(":")
    if rank == os.environ.get("RANK"):
        killed_at(int(step))
    main()
