"""From a mean loss to the number that language models are compared by."""

from __future__ import annotations

import math


def perplexity(loss: float) -> float:
    """exp of the mean cross entropy in nats; that of 100 nats for anything above, where it means nothing any more."""
    return math.exp(min(loss, 100.0))
