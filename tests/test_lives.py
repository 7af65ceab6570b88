"""Whole lives of an optimizer, made up by chance: whatever happens between steps, every path does what the literal one
does that remembers nothing.

Chance is uniform, and seeded. Hypothesis's state machines were tried first: they shrink what they find, and try out
too little until then (docs/log.md).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.testing import assert_close

from aida import Aida
from paths import REFERENCE, Path, over_paths

LIVES, EVENTS_OF_A_LIFE = 30, 25
#: A GPU is waited for after every step and its kernels are compiled; interpreted ones take a hundred times as long.
LIVES_ON_A_GPU, INTERPRETED_LIVES = 10, 6

Form = tuple[tuple[int, ...], torch.dtype]
FORMS: list[Form] = [
    ((), torch.float64),
    ((1,), torch.float32),
    ((3, 4), torch.float32),
    ((2, 3, 2, 2), torch.float64),
    ((3, 2, 1, 1), torch.float32),
    ((67,), torch.bfloat16),
    ((0,), torch.float64),
]
#: Of half the lives: with complex numbers nothing is remembered from step to step.
COMPLEX: list[Form] = [((3, 4), torch.complex64), ((2, 2, 3), torch.complex128)]
#: Of groups that come later.
LATER: list[Form] = [((2, 3), torch.float64), ((5,), torch.float16)]

#: By dtype how far two paths may differ after a life: they round in another order.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 0.05,
    torch.float16: 0.02,
    torch.complex64: 1e-4,
    torch.complex128: 1e-9,
}


def turned(tensor: Tensor) -> Tensor:
    """In the reverse order of dimensions in memory."""
    around = list(reversed(range(tensor.ndim)))
    return tensor.permute(around).contiguous().permute(around)


def with_gaps(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def marked(grad: Tensor) -> Tensor:
    """Conjugate or negative by a mark alone, as autograd leaves some."""
    if grad.is_complex():
        return grad.conj()
    return torch.complex(grad, grad).conj().imag if grad.dtype in (torch.float32, torch.float64) else grad


#: What a gradient may be like, made of a plain one; "kept" is the one of the step before.
GRADIENTS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "plain": lambda grad: grad,
    "none": lambda grad: None,
    "zero": torch.zeros_like,
    "nonfinite": lambda grad: torch.full_like(grad, torch.nan),
    "turned": turned,
    "spread": lambda grad: grad.reshape(-1)[:1].sum().expand(grad.shape),
    "with gaps": with_gaps,
    "marked": marked,
}

#: What may be set in a group, and to what.
VALUES: dict[str, list[Any]] = {
    "lr": [0.0, 0.01, 0.3, torch.tensor(0.1), torch.tensor([0.2], dtype=torch.float64)],
    "betas": [(0.9, 0.999), (0.0, 0.5), (0.5, 0.0)],
    "eps": [1e-2, 1e-3],
    "weight_decay": [0.0, 0.1],
    "decoupled_weight_decay": [False, True],
    "projections": [0, 1, 2, 4],
    "clip_norm": [None, 0.1, 100.0],
    "nonfinite": ["skip", "skip", "propagate", "raise"],
    "maximize": [False, True],
}


class Life:
    """Two optimizers to which the same happens: ours on some path, and a judge."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.chance = path, Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.kinds = ["plain"]
        self.found_inf: float | None = None
        forms = FORMS + COMPLEX if self.chance.random() < 0.5 else FORMS
        if path.interpreted:  # which cuts bf16 off where everybody else rounds: some steps, and the two are far apart
            forms = [form for form in forms if form[1] != torch.bfloat16]
        ours, judges = self.new_parameters(forms)
        self.both = [path.make(ours, eps=1e-3), Aida(judges, eps=1e-3, **REFERENCE)]

    def fresh(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, generator=self.generator, dtype=wide).to(self.path.device, dtype)

    def new_parameters(self, forms: list[Form]) -> tuple[list[Parameter], ...]:
        values = [self.fresh(*form) for form in forms]
        return tuple([Parameter(value.clone()) for value in values] for _ in range(2))

    def parameters(self) -> Iterator[tuple[Parameter, Parameter]]:
        ours, judges = ([p for group in each.param_groups for p in group["params"]] for each in self.both)
        return zip(ours, judges, strict=True)

    def some_parameter(self) -> tuple[Parameter, Parameter]:
        return self.chance.choice(list(self.parameters()))

    # -- what may happen -------------------------------------------------------------------------

    def have_other_gradients(self) -> None:
        self.kinds = self.chance.choices(["plain", "kept", *GRADIENTS], k=self.chance.randint(1, 5))

    def have_plain_gradients(self) -> None:
        self.kinds = ["plain"]

    def scale_the_loss(self) -> None:
        self.found_inf = self.chance.choice([0.0, 1.0])

    def set_a_value(self) -> None:
        name = self.chance.choice(list(VALUES))
        value, index = self.chance.choice(VALUES[name]), self.chance.randrange(len(self.both[0].param_groups))
        for optimizer in self.both:
            mine = value.clone() if isinstance(value, Tensor) else value
            # a tensor lr is refused by list operations without it
            optimizer.param_groups[index].update({name: mine, "capturable": True})

    def scale_tensor_rates_in_place(self) -> None:
        for optimizer in self.both:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].mul_(0.5)

    def add_a_group(self) -> None:
        for optimizer, params in zip(self.both, self.new_parameters(LATER), strict=True):
            optimizer.add_param_group({"params": params})

    def change_the_path(self) -> None:
        foreach = self.chance.choice([None, None, True, False])
        for group in self.both[0].param_groups:
            group.update(foreach=foreach, fused=None, capturable=True)

    def save_and_load(self) -> None:
        for optimizer in self.both:
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))

    def go_on_with_a_copy(self) -> None:
        self.both = [deepcopy(optimizer) for optimizer in self.both]

    def go_on_with_a_pickled_one(self) -> None:
        self.both = [pickle.loads(pickle.dumps(optimizer)) for optimizer in self.both]

    def move_a_parameter_elsewhere(self) -> None:
        for p in self.some_parameter():
            p.data = p.data.clone()

    def turn_a_parameter_around(self) -> None:
        for p in self.some_parameter():
            p.data = p.data.contiguous(memory_format=torch.channels_last) if p.ndim == 4 else turned(p.data)

    def give_a_parameter_gaps(self) -> None:
        if self.path.interpreted:
            return  # it takes the kernels whatever a tensor is like
        for p in self.some_parameter():
            p.data = with_gaps(p.data)

    def forget_a_state(self) -> None:
        for optimizer, p in zip(self.both, self.some_parameter(), strict=True):
            optimizer.state.pop(p, None)

    def replace_a_moment(self) -> None:
        for optimizer, p in zip(self.both, self.some_parameter(), strict=True):
            if optimizer.state.get(p):
                optimizer.state[p]["exp_avg"] = turned(optimizer.state[p]["exp_avg"] * 0.5)

    def reverse_a_group(self) -> None:
        for optimizer in self.both:
            optimizer.param_groups[0]["params"].reverse()

    # -- and what must come of it ----------------------------------------------------------------

    def step(self) -> None:
        self.give_gradients()
        raised = []
        for optimizer in self.both:
            if self.found_inf is not None:
                optimizer.grad_scale = torch.full((), 4.0, device=self.path.device)
                optimizer.found_inf = torch.full((1,), self.found_inf, device=self.path.device)
            try:
                optimizer.step()
            except RuntimeError as error:
                assert "holds NaN or inf" in str(error)  # noqa: PT017 - each of the two may raise, and both must
                raised.append(optimizer)
            optimizer.grad_scale = optimizer.found_inf = None
        self.both[1]._forget()
        self.found_inf = None
        assert len(raised) in (0, 2)
        for p, q in self.parameters():
            self.check(p, q, p.dtype)
            ours, judges = self.both[0].state.get(p, {}), self.both[1].state.get(q, {})
            assert list(ours) == list(judges)
            for name in ours:
                self.check(ours[name], judges[name], p.dtype)
        assert self.both[0].skipped() == self.both[1].skipped()

    def give_gradients(self) -> None:
        for index, pair in enumerate(self.parameters()):
            kind = self.kinds[index % len(self.kinds)]
            if kind != "kept":
                grad = GRADIENTS[kind](self.fresh(tuple(pair[0].shape), pair[0].dtype))
                for p in pair:
                    p.grad = None if grad is None else grad.detach()

    def check(self, one: Tensor, other: Tensor, dtype: torch.dtype) -> None:
        tolerance = TOLERANCES[dtype]
        assert_close(one.detach(), other.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)


EVENTS: list[Callable[[Life], None]] = [
    Life.have_other_gradients, Life.have_plain_gradients, Life.scale_the_loss, Life.set_a_value,
    Life.scale_tensor_rates_in_place, Life.add_a_group, Life.change_the_path, Life.save_and_load,
    Life.go_on_with_a_copy, Life.go_on_with_a_pickled_one, Life.move_a_parameter_elsewhere,
    Life.turn_a_parameter_around, Life.give_a_parameter_gaps, Life.forget_a_state, Life.replace_a_moment,
    Life.reverse_a_group,
]  # fmt: skip


def live(path: Path, seed: int) -> None:
    """A step after every event; the events so far are told where one goes wrong."""
    life, events = Life(path, seed), ["birth"]
    for _ in range(EVENTS_OF_A_LIFE):
        try:
            life.step()
        except AssertionError as error:
            raise AssertionError(
                f"seed {seed}, after {', '.join(events)} with {life.kinds} gradients: {error}"
            ) from error
        event = life.chance.choice(EVENTS)
        event(life)
        events.append(event.__name__)


@over_paths()
def test_every_life_is_that_of_the_literal_path(path: Path) -> None:
    lives = INTERPRETED_LIVES if path.interpreted else LIVES_ON_A_GPU if path.device == "cuda" else LIVES
    for seed in range(lives):
        live(path, seed)
