"""What all baselines share: parameter groups, checks, state, checkpoints, closures, weight decay.

A method's own file holds its hyper-parameters, the names of its state and its update over lists of
tensors. An update gets parameters and gradients as real tensors in the state's dtype, with ``maximize``
and weight decay already applied. It changes parameters and state in place and leaves gradients alone.
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

#: Elements that one list operation takes, unless one tensor alone has more: 64 MiB of float32 on an accelerator. A CPU
#: takes 64 KiB, so that the temporaries of one operation are still in its cache for the next.
BUCKET, CPU_BUCKET = 1 << 24, 1 << 14

#: Flags that choose the path or the sign; a checkpoint may lack them.
FLAGS: dict[str, Any] = {"maximize": False, "foreach": None, "capturable": False}


class Baseline(Optimizer):
    """The base class of a method, which defines :meth:`update`, its state and its hyper-parameters."""

    #: State tensors of the parameter's shape.
    moments: ClassVar[tuple[str, ...]] = ()
    #: State with one number per parameter.
    counters: ClassVar[tuple[str, ...]] = ("step",)
    #: Whether the update of an element depends on the whole layer, so that a shard cannot be updated alone.
    layerwise: ClassVar[bool] = False

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self.check(defaults)
        super().__init__(params, defaults)

    # -- what a method defines -------------------------------------------------------------------

    @abstractmethod
    def update(self, params: list[Tensor], grads: list[Tensor], state: dict[str, list[Tensor]], group: Group) -> None:
        """Take the method's step for tensors on one device; ``state["step"]`` already counts it."""

    def check(self, group: Group) -> None:
        """Raise ValueError for a bad value; a method adds the rules of its own hyper-parameters."""
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
        """Return the value that every element of the moments starts from."""
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
            self.param_groups.pop()  # a refused group leaves the optimizer unchanged
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
        """Load a checkpoint; the state of bf16 and fp16 parameters stays float32."""
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
                for bucket in _buckets(params, group["foreach"]):
                    self._step_bucket(bucket, group)
        return loss

    def _ready(self, group: dict[str, Any]) -> list[Tensor]:
        """Return the group's parameters that have a gradient; their state is created if missing."""
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
                    "or pass its parameters to torch.optim.SparseAdam"
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

    def _step_bucket(self, bucket: list[Tensor], group: Group) -> None:
        params, grads = [_wide(p) for p in bucket], [_wide_grad(p) for p in bucket]
        state = {name: [self.state[p][name] for p in bucket] for name in self.counters}
        state.update({name: [_real(self.state[p][name]) for p in bucket] for name in self.moments})

        # gradient and weight decay
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        decay = group.get("weight_decay")
        if decay and group["decoupled_weight_decay"]:
            kept = 1 - learning_rate(group) * decay
            torch._foreach_mul_(params, kept.to(params[0].dtype) if isinstance(kept, Tensor) else kept)
        elif decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))

        for name in self.counters:
            torch._foreach_add_(state[name], 1)
        self.update(params, grads, state, group)
        originals = [_real(p) for p in bucket]
        if params[0].dtype != originals[0].dtype:  # round once, at the end
            torch._foreach_copy_(originals, params)


def learning_rate(group: Group) -> float | Tensor:
    """Return the group's lr: a float, or with ``capturable`` a tensor, so that the step does not synchronize."""
    lr: float | Tensor = group["lr"]
    if not isinstance(lr, Tensor):
        return lr
    return lr.reshape(()) if group["capturable"] else lr.item()


def counted(steps: list[Tensor]) -> Tensor:
    """Return the steps of all tensors as one float64 tensor, for the scalars of an update."""
    return exact(torch.stack(steps))


def per_tensor(values: Tensor, dtype: torch.dtype) -> list[Any]:
    """Return one number per tensor, as list operations take them: floats, or tensors that stay on the device."""
    # a compiled step that read the numbers would keep those of its first run; a FakeTensor has none
    if values.device.type == "cpu" and not torch.compiler.is_compiling() and is_plain(values):
        return values.tolist()
    return list(values.to(dtype).unbind())


def check_positive(group: Group, name: str, meaning: str) -> None:
    """Raise ValueError unless the value is a finite number above 0; ``meaning`` ends the message."""
    value = group[name]
    if isinstance(value, Tensor) or not is_finite(value) or value <= 0:
        raise ValueError(f"{name}={value!r} must be a finite number > 0: {meaning}")


def _counter_device(p: Tensor, group: Group) -> torch.device:
    # a counter on the host needs no synchronization; in a CUDA graph it must be on the device
    return p.device if group["capturable"] else torch.device("cpu")


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _wide(p: Tensor) -> Tensor:
    """Return the parameter in its state's dtype: itself if the two are the same, else a copy."""
    real = _real(p)
    return real.to(STATE_DTYPES[real.dtype])


def _wide_grad(p: Tensor) -> Tensor:
    assert p.grad is not None
    # autograd sets the lazy conj bit on some gradients; a real view needs it resolved
    return _real(p.grad.resolve_conj()).to(STATE_DTYPES[_real(p).dtype])


def _check_memory(*tensors: Any) -> None:
    """Raise RuntimeError for a tensor whose storage was freed: torch's operations would read address 0."""
    for t in tensors:
        if isinstance(t, Tensor) and is_plain(t) and not t.is_meta and t.data_ptr() == 0 and t.numel():
            raise RuntimeError(
                f"the storage of a parameter, its gradient or its state (shape {tuple(t.shape)}) was freed; "
                "allocate it before the step"
            )


def _buckets(params: list[Tensor], foreach: bool | None) -> Iterator[list[Tensor]]:
    """Yield the parameters that are updated together: same device and dtype, and not too many elements."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in params:
        assert p.grad is not None
        if traced() or (is_plain(p) and is_plain(p.grad)):
            alike.setdefault((p.device, p.dtype), []).append(p)
        else:  # a subclass sees, and may repeat, the operations on all tensors of its list
            yield [p]
    for (device, _), together in alike.items():
        limit = 0 if foreach is False else CPU_BUCKET if device.type == "cpu" else BUCKET
        bucket: list[Tensor] = []
        held = 0
        for p in together:
            if bucket and held + p.numel() > limit:
                yield bucket
                bucket, held = [], 0
            bucket.append(p)
            held += p.numel()
        yield bucket
