"""Whole lives of an optimizer that Hypothesis makes up: whatever happens between steps, every path does what the
literal one does that remembers nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor
from torch.nn import Parameter
from torch.testing import assert_close

from aida import Aida
from paths import INTERPRETED_PATHS, NATIVE_PATHS, REFERENCE, Path, over_paths

#: The same lives in every run: a failure in CI is a failure here.
LIVES = settings(derandomize=True, deadline=None, max_examples=60, stateful_step_count=25)
#: A kernel that is interpreted takes a thousand times as long.
FEW_LIVES = settings(LIVES, max_examples=20, stateful_step_count=15)

SHAPES = ((), (1,), (5,), (3, 4), (2, 3, 2, 2), (3, 2, 1, 1), (0,), (67,))
#: By dtype how far two paths may differ after a life: they round in another order.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 0.05,
    torch.float16: 0.02,
    torch.complex64: 1e-4,
    torch.complex128: 1e-9,
}


def turned(grad: Tensor) -> Tensor:
    """In the reverse order of dimensions in memory."""
    around = list(reversed(range(grad.ndim)))
    return grad.permute(around).contiguous().permute(around)


def marked(grad: Tensor) -> Tensor:
    """Conjugate or negative by a mark alone, as autograd leaves some."""
    if grad.is_complex():
        return grad.conj()
    return torch.complex(grad, grad).conj().imag if grad.dtype in (torch.float32, torch.float64) else grad


#: What a gradient may be like, made of a plain one.
GRADIENTS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "plain": lambda grad: grad,
    "none": lambda grad: None,
    "zero": torch.zeros_like,
    "nonfinite": lambda grad: torch.full_like(grad, torch.nan),
    "turned": turned,
    "spread": lambda grad: grad.reshape(-1)[:1].sum().expand(grad.shape),
    "with gaps": lambda grad: torch.stack([grad, grad], -1)[..., 0],
    "marked": marked,
}

#: What may be set in a group, and to what.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "lr": st.sampled_from([0.0, 0.01, 0.3, torch.tensor(0.1), torch.tensor([0.2], dtype=torch.float64)]),
    "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.5, 0.0)]),
    "eps": st.sampled_from([1e-2, 1e-3]),
    "weight_decay": st.sampled_from([0.0, 0.1]),
    "decoupled_weight_decay": st.booleans(),
    "projections": st.integers(0, 4),
    "clip_norm": st.sampled_from([None, 0.1, 100.0]),
    "nonfinite": st.sampled_from(["skip", "propagate", "raise"]),
    "maximize": st.booleans(),
}


class Life(RuleBasedStateMachine):
    path: Path

    def __init__(self) -> None:
        super().__init__()
        self.both: list[Aida] = []
        self.seed = 0

    def fresh(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.seed += 1
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        return (drawn * (1 + 1j) if dtype.is_complex else drawn).to(self.path.device, dtype)

    def new_parameters(self, forms: list[tuple[tuple[int, ...], torch.dtype]]) -> tuple[list[Parameter], ...]:
        values = [self.fresh(*form) for form in forms]
        return tuple([Parameter(value.clone()) for value in values] for _ in range(2))

    def parameters(self) -> Iterator[tuple[Parameter, Parameter]]:
        ours, judges = ([p for group in each.param_groups for p in group["params"]] for each in self.both)
        return zip(ours, judges, strict=True)

    @property
    def groups(self) -> int:
        return len(self.both[0].param_groups) if self.both else 0

    # -- what may happen -------------------------------------------------------------------------

    forms = st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(list(TOLERANCES))), min_size=1, max_size=4)

    @initialize(forms=forms)
    def begin(self, forms: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
        ours, judges = self.new_parameters(forms)
        self.both = [self.path.make(ours, eps=1e-3), Aida(judges, eps=1e-3, **REFERENCE)]

    @rule(
        kinds=st.lists(st.sampled_from(["plain", *GRADIENTS]), min_size=1, max_size=5),
        scaled=st.sampled_from([None, None, None, 0.0, 1.0]),
    )
    def step(self, kinds: list[str], scaled: float | None) -> None:
        for index, pair in enumerate(self.parameters()):
            grad = GRADIENTS[kinds[index % len(kinds)]](self.fresh(tuple(pair[0].shape), pair[0].dtype))
            for p in pair:
                p.grad = None if grad is None else grad.detach()
        self.take(scaled)

    @rule()
    def step_on_the_same_gradients(self) -> None:
        self.take(None)

    @rule()
    def step_on_gradients_filled_in_place(self) -> None:
        for pair in self.parameters():
            for p in pair:
                if p.grad is not None:
                    p.grad = p.grad.resolve_conj().resolve_neg().contiguous().fill_(0.5)
        self.take(None)

    @rule(data=st.data(), name=st.sampled_from(list(VALUES)))
    def set_a_value(self, data: st.DataObject, name: str) -> None:
        index, value = data.draw(st.integers(0, self.groups - 1)), data.draw(VALUES[name])
        for optimizer in self.both:
            mine = value.clone() if isinstance(value, Tensor) else value
            # a tensor lr is refused by list operations without it
            optimizer.param_groups[index].update({name: mine, "capturable": True})

    @rule(factor=st.sampled_from([0.5, 2.0]))
    def scale_tensor_rates_in_place(self, factor: float) -> None:
        for optimizer in self.both:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].mul_(factor)

    @precondition(lambda self: self.groups < 3)
    @rule(forms=forms)
    def add_a_group(self, forms: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
        for optimizer, params in zip(self.both, self.new_parameters(forms), strict=True):
            optimizer.add_param_group({"params": params})

    @rule(foreach=st.sampled_from([None, True, False]))
    def change_the_path(self, foreach: bool | None) -> None:
        for group in self.both[0].param_groups:
            group.update(foreach=foreach, fused=None, capturable=True)

    @rule()
    def save_and_load(self) -> None:
        for optimizer in self.both:
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))

    @rule(copied=st.sampled_from([deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))]))
    def go_on_with_a_copy(self, copied: Callable[[Aida], Aida]) -> None:
        for pair in self.parameters():
            for p in pair:
                p.grad = None  # a pickled one would be there, a deepcopied one of an unusual kind not
        self.both = [copied(optimizer) for optimizer in self.both]

    @rule(where=st.integers(0, 3))
    def move_a_parameter_elsewhere(self, where: int) -> None:
        for p in self.at(where):
            p.data = p.data.clone()

    @rule(where=st.integers(0, 3))
    def turn_a_parameter_around(self, where: int) -> None:
        for p in self.at(where):
            if p.ndim == 4:
                p.data = p.data.contiguous(memory_format=torch.channels_last)
            elif p.ndim == 2:
                p.data = p.data.t().contiguous().t()

    @precondition(lambda self: not self.path.interpreted)  # which takes the kernels whatever a tensor is like
    @rule(where=st.integers(0, 3))
    def give_a_parameter_gaps(self, where: int) -> None:
        for p in self.at(where):
            p.data = torch.stack([p.data, p.data], -1)[..., 0]

    @rule(where=st.integers(0, 3))
    def forget_a_state(self, where: int) -> None:
        for optimizer, p in zip(self.both, self.at(where), strict=True):
            optimizer.state.pop(p, None)

    @rule()
    def reverse_a_group(self) -> None:
        for optimizer in self.both:
            optimizer.param_groups[0]["params"].reverse()

    def at(self, where: int) -> tuple[Parameter, Parameter]:
        pairs = list(self.parameters())
        return pairs[where % len(pairs)]

    # -- and what must come of it ----------------------------------------------------------------

    def take(self, scaled: float | None) -> None:
        raised = []
        for optimizer in self.both:
            if scaled is not None:
                optimizer.grad_scale = torch.full((), 4.0, device=self.path.device)
                optimizer.found_inf = torch.full((1,), scaled, device=self.path.device)
            try:
                optimizer.step()
            except RuntimeError as error:
                assert "holds NaN or inf" in str(error)  # noqa: PT017 - each of the two may raise, and both must
                raised.append(optimizer)
            optimizer.grad_scale = optimizer.found_inf = None
            self.both[1]._forget()
        assert len(raised) in (0, 2)
        for p, q in self.parameters():
            self.check(p, q, p.dtype)
            ours, judges = self.both[0].state.get(p, {}), self.both[1].state.get(q, {})
            assert list(ours) == list(judges)
            for name in ours:
                self.check(ours[name], judges[name], p.dtype)
        assert self.both[0].skipped() == self.both[1].skipped()

    def check(self, one: Tensor, other: Tensor, dtype: torch.dtype) -> None:
        tolerance = TOLERANCES[dtype]
        assert_close(one.detach(), other.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)


def lived_on(path: Path, lives: settings) -> None:
    run_state_machine_as_test(type("Life", (Life,), {"path": path}), settings=lives)


@over_paths(NATIVE_PATHS)
def test_every_life_is_that_of_the_literal_path(path: Path) -> None:
    lived_on(path, LIVES)


@pytest.mark.skipif(not INTERPRETED_PATHS, reason="needs TRITON_INTERPRET=1")
@over_paths(INTERPRETED_PATHS)
def test_every_interpreted_life_is_that_of_the_literal_path(path: Path) -> None:
    lived_on(path, FEW_LIVES)
