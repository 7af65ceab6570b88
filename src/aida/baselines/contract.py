"""What every rival shares: parameter groups, checks, state, checkpoints, closures, weight decay, both paths.

A method's own file holds its hyper-parameters, the names of its state and its update, twice: one
tensor at a time, and over lists of tensors. An update gets its parameters and gradients as real
tensors in the state's dtype, with ``maximize`` and weight decay already in them; it changes the
parameters and the state in place and leaves the gradients alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from aida._step.checkpoint import StateSchema
from aida._step.group_rules import (
    STATE_DTYPES,
    check_betas,
    check_capture,
    check_eps,
    check_given,
    check_lr,
    check_names,
    check_param,
    check_weight_decay,
    drop_duplicates,
    is_finite,
    is_plain,
    traced,
)
from aida._step.refusals import check_whole
from aida.readings import Group, exact

#: Elements a list operation takes at once: 64 MiB of float32, unless one tensor alone is larger.
BUCKET = 1 << 24

#: Switches that choose a path or a sign; a checkpoint may lack them.
FLAGS: dict[str, Any] = {"maximize": False, "foreach": None, "capturable": False}


class Baseline(Optimizer):
    """An optimizer that defines :meth:`update` and :meth:`update_foreach`, and has the rest from here."""

    #: State tensors of the parameter's shape.
    moments: ClassVar[tuple[str, ...]] = ()
    #: One number a parameter, beside the moments.
    counters: ClassVar[tuple[str, ...]] = ("step",)
    #: Whether the update of an element depends on the whole layer, so that a part of one cannot be updated alone.
    layerwise: ClassVar[bool] = False

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self.check(defaults)
        super().__init__(params, defaults)

    # -- what a method defines -------------------------------------------------------------------

    @abstractmethod
    def update(self, param: Tensor, grad: Tensor, state: dict[str, Tensor], group: Group) -> None:
        """The method's step for one tensor; ``state["step"]`` already counts this step."""

    @abstractmethod
    def update_foreach(
        self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], group: Group
    ) -> None:
        """The same for a list of tensors on one device."""

    def check(self, group: Group) -> None:
        """Refuse values that no step could use; a method adds the rules of its own hyper-parameters."""
        check_lr(group)
        if "betas" in group:
            check_betas(group)
            if any(isinstance(beta, Tensor) for beta in group["betas"]):
                raise ValueError(f"betas={group['betas']!r} must be floats for {type(self).__name__}, not Tensors")
        if "eps" in group:
            check_eps(group)
        if "weight_decay" in group:
            check_weight_decay(group)

    def initial_value(self, group: Group) -> float:
        """What every element of the moments starts from."""
        return 0.0

    # -- groups and checkpoints ------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        owner = type(self).__name__
        if isinstance(param_group, dict):
            check_names(param_group, tuple(key for key in self.defaults if key != "differentiable"), owner)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.check(group)
            for p in group["params"]:
                check_given(p, owner)
                if self.layerwise:
                    check_whole(p, owner)
        except (ValueError, TypeError):
            self.param_groups.pop()  # an optimizer that refused a group is as it was before
            raise
        drop_duplicates(group)

    @property
    def schema(self) -> StateSchema:
        return StateSchema(
            owner=type(self).__name__,
            keys=(*self.counters, *self.moments),
            moments=self.moments,
            group_keys=tuple(key for key in self.defaults if key not in FLAGS and key != "differentiable"),
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; the state keeps float32 where the parameter is bf16 or fp16."""
        handle = self.register_load_state_dict_pre_hook(self.schema.seal)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        schema = self.schema
        for group in self.param_groups:
            for key, value in FLAGS.items():
                group.setdefault(key, value)
            for p in group["params"]:
                if self.state.get(p):
                    self.state[p] = schema.unseal(self.state[p], p, STATE_DTYPES[p.dtype], _counter_device(p, group))

    # -- the step --------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step; with a closure, evaluate it first and return its loss."""
        check_capture(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            work = [(group, self._ready(group)) for group in self.param_groups]  # every check before any change
            for group, params in work:
                listed = [p for p in params if _takes_lists(p, group)]
                for bucket in _buckets(listed):
                    self._step_foreach(bucket, group)
                for p in params:
                    if not _takes_lists(p, group):
                        self._step_one(p, group)
        return loss

    def _ready(self, group: dict[str, Any]) -> list[Tensor]:
        """The group's parameters that have a gradient, with their state made."""
        self.check(group)
        params = [p for p in group["params"] if p.grad is not None]
        for p in params:
            if not traced():
                check_param(p, type(self).__name__)
            if self.layerwise:
                check_whole(p, type(self).__name__)
            if p.grad.layout != torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients; build the embedding with sparse=False, "
                    "or give its parameters to torch.optim.SparseAdam"
                )
        for p in params:
            if (self.counters or self.moments) and not self.state[p]:
                self._init_state(self.state[p], p, group)
            if not traced():
                _check_memory(p, p.grad, *self.state.get(p, {}).values())
        return params

    def _init_state(self, state: dict[str, Any], p: Tensor, group: Group) -> None:
        for name in self.counters:
            state[name] = torch.zeros((), dtype=torch.float32, device=_counter_device(p, group))
        for name in self.moments:
            state[name] = torch.empty_like(p, dtype=STATE_DTYPES[p.dtype], memory_format=torch.preserve_format)
            _real(state[name]).fill_(self.initial_value(group))

    def _step_one(self, p: Tensor, group: Group) -> None:
        param, grad = _wide(p), _wide_grad(p)
        state = {name: self.state[p][name] for name in self.counters}
        state.update({name: _real(self.state[p][name]) for name in self.moments})

        # gradient and weight decay
        if group["maximize"]:
            grad = -grad
        if l2 := _l2(group):
            grad = grad.add(param, alpha=l2)
        if decay := _decoupled(group):
            param.mul_(1 - learning_rate(group) * decay)

        for name in self.counters:
            state[name].add_(1)
        self.update(param, grad, state, group)
        if param.dtype != _real(p).dtype:  # rounded once, at the end
            _real(p).copy_(param)

    def _step_foreach(self, bucket: list[Tensor], group: Group) -> None:
        params, grads = [_wide(p) for p in bucket], [_wide_grad(p) for p in bucket]
        state = {name: [self.state[p][name] for p in bucket] for name in self.counters}
        state.update({name: [_real(self.state[p][name]) for p in bucket] for name in self.moments})

        # gradient and weight decay
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        if l2 := _l2(group):
            grads = list(torch._foreach_add(grads, params, alpha=l2))
        if decay := _decoupled(group):
            shrink = 1 - learning_rate(group) * decay
            torch._foreach_mul_(params, shrink.to(params[0].dtype) if isinstance(shrink, Tensor) else shrink)

        for name in self.counters:
            torch._foreach_add_(state[name], 1)
        self.update_foreach(params, grads, state, group)
        originals = [_real(p) for p in bucket]
        if params[0].dtype != originals[0].dtype:  # rounded once, at the end
            torch._foreach_copy_(originals, params)


def learning_rate(group: Group) -> float | Tensor:
    """The group's lr: a number on the host, a tensor where the step must not wait for the device."""
    lr: float | Tensor = group["lr"]
    if not isinstance(lr, Tensor):
        return lr
    return lr.reshape(()) if group["capturable"] else lr.item()


def counted(step: Tensor | list[Tensor]) -> Tensor:
    """The step of one tensor (0-dim) or of many (1-dim), for the scalars of an update."""
    return exact(step if isinstance(step, Tensor) else torch.stack(step))


def per_tensor(values: Tensor, dtype: torch.dtype) -> Any:
    """One number a tensor, as in-place and list operations take them: of the host, or left on the device."""
    # a compiled step that read them would hold the numbers of its first run; a FakeTensor has none
    if values.device.type == "cpu" and not torch.compiler.is_compiling() and is_plain(values):
        return values.tolist()
    values = values.to(dtype)
    return values if values.ndim == 0 else list(values.unbind())


def check_positive(group: Group, name: str, meaning: str) -> None:
    value = group[name]
    if isinstance(value, Tensor) or not is_finite(value) or value <= 0:
        raise ValueError(f"{name}={value!r} must be a finite number > 0: {meaning}")


def _l2(group: Group) -> float:
    """Weight decay that enters the gradient."""
    decay: float = group.get("weight_decay", 0.0)
    return 0.0 if group.get("decoupled_weight_decay", False) else decay


def _decoupled(group: Group) -> float:
    """Weight decay that shrinks the parameter directly, times the learning rate."""
    decay: float = group.get("weight_decay", 0.0)
    return decay if group.get("decoupled_weight_decay", False) else 0.0


def _counter_device(p: Tensor, group: Group) -> torch.device:
    # on the host a counter costs no wait for the device; in a CUDA graph it must lie on the device
    return p.device if group["capturable"] else torch.device("cpu")


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _wide(p: Tensor) -> Tensor:
    """The parameter in its state's dtype: itself where the two are the same, else a copy."""
    real = _real(p)
    return real.to(STATE_DTYPES[real.dtype])


def _wide_grad(p: Tensor) -> Tensor:
    assert p.grad is not None
    # autograd leaves some conjugate by a mark alone, of which there is no real view
    return _real(p.grad.resolve_conj()).to(STATE_DTYPES[_real(p).dtype])


def _check_memory(*tensors: Any) -> None:
    """Refuse a tensor whose storage was freed: torch's operations would read address 0."""
    for t in tensors:
        if isinstance(t, Tensor) and is_plain(t) and not t.is_meta and t.data_ptr() == 0 and t.numel():
            raise RuntimeError(
                f"the storage of a parameter, its gradient or its state (shape {tuple(t.shape)}) was freed; "
                "give it memory before the step"
            )


def _takes_lists(p: Tensor, group: Group) -> bool:
    foreach: bool | None = group["foreach"]
    if foreach is None:  # on a CPU list operations are loops with larger temporaries
        foreach = p.device.type != "cpu"
    # a subclass among plain tensors would see, and may repeat, the operations on all of the list
    return foreach and (traced() or (is_plain(p) and is_plain(p.grad)))  # type: ignore[arg-type]


def _buckets(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters that are updated together: of one device and dtype, and not too many elements."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in params:
        alike.setdefault((p.device, p.dtype), []).append(p)
    for together in alike.values():
        bucket: list[Tensor] = []
        held = 0
        for p in together:
            if bucket and held + p.numel() > BUCKET:
                yield bucket
                bucket, held = [], 0
            bucket.append(p)
            held += p.numel()
        yield bucket
