"""SGD, Adam and AdamW: torch's own classes, and how to read the stepsizes of torch's optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch.optim import Optimizer

from aida.baselines import radam
from aida.catalog import Entry, Paper
from aida.readings import Reading, decay_in_words, outer_eps

ADAM = replace(outer_eps("exp_avg_sq"), keys=lambda group: ("max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq",))

#: Readings of torch's classes that are not in the catalog.
OTHER_READINGS: Mapping[type[Optimizer], Reading] = {
    torch.optim.RAdam: radam.READING,
    # its update mixes the momentum with the gradient
    torch.optim.NAdam: replace(outer_eps("exp_avg_sq"), momentum=None),
}

ENTRIES = [
    Entry(
        name="sgd",
        title="SGD",
        optimizer=torch.optim.SGD,
        paper=Paper(
            "I. Sutskever, J. Martens, G. Dahl, G. Hinton",
            "On the importance of initialization and momentum in deep learning",
            2013,
        ),
        rule="m = momentum m + g; p -= lr m",
        defaults={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0},
        reading=Reading(
            about="none: every element of the momentum is multiplied by lr, so its stepsize is always 1",
            eps="none",
            weight_decay=partial(decay_in_words, effect=""),
        ),
        notes="torch.optim.SGD with momentum 0.9 and lr 0.1 by default; torch's own defaults are 0 and 1e-3.",
    ),
    Entry(
        name="adam",
        title="Adam",
        optimizer=torch.optim.Adam,
        paper=Paper("D. P. Kingma, J. Ba", "Adam: A Method for Stochastic Optimization", 2015, "1412.6980"),
        rule="v = beta2 v + (1 - beta2) g^2; p -= lr m^ / (sqrt(v^) + eps)",
        defaults={"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
        reading=ADAM,
        notes="torch.optim.Adam, weight decay as L2.",
    ),
    Entry(
        name="adamw",
        title="AdamW",
        optimizer=torch.optim.AdamW,
        paper=Paper("I. Loshchilov, F. Hutter", "Decoupled Weight Decay Regularization", 2019, "1711.05101"),
        rule="p *= 1 - lr weight_decay; then Adam",
        defaults={"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
        # older versions of torch have no decoupled_weight_decay in AdamW's groups
        reading=replace(ADAM, weight_decay=lambda group: decay_in_words({**group, "decoupled_weight_decay": True})),
        notes="torch.optim.AdamW.",
    ),
]
