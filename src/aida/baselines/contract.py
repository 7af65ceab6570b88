"""What all baselines share: arguments, parameter groups, checks, state, checkpoints, closures, weight decay.

A method's own file holds its hyper-parameters, the names of its state and its update of a :class:`Bucket`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from aida._step import group_rules as rules
from aida._step.checkpoint import StateSchema
from aida._step.refusals import check_whole
from aida.readings import Group, exact

#: Elements that one list operation takes, unless one tensor alone has more: 64 MiB of float32 on an accelerator. A CPU
#: takes 64 KiB, so that the temporaries of one operation are still in its cache for the next.
BUCKET, CPU_BUCKET = 1 << 24, 1 << 14

#: Arguments that may be given without their names.
POSITIONAL = ("params", "lr", "betas", "eps", "weight_decay")

#: The rules of hyper-parameters that several methods have.
CHECKS = {
    "lr": rules.check_lr,
    "betas": rules.check_betas,
    "eps": rules.check_eps,
    "weight_decay": rules.check_weight_decay,
}

#: Flags that choose the path or the sign; a checkpoint may lack them.
FLAGS: dict[str, Any] = {"maximize": False, "foreach": None, "capturable": False}


class Bucket(NamedTuple):
    """Tensors of one group and device that are updated together: real, and in the dtype of their state.

    An update changes parameters and moments in place, and leaves gradients alone.
    """

    params: list[Tensor]
    grads: list[Tensor]  #: with ``maximize`` and L2 decay applied
    state: dict[str, list[Tensor]]  #: the counters already count this step
    group: Group
    lr: float | Tensor  #: with ``capturable`` a tensor if the group has one, so that the step does not synchronize

    @property
    def t(self) -> Tensor:
        """The steps of all tensors in float64, for the numbers of an update."""
        return exact(torch.stack(self.state["step"]))

    def each(self, values: Tensor) -> list[Any]:
        """One number per tensor, as list operations take them: floats, or tensors that stay on the device."""
        # a compiled step that read the numbers would keep those of its first run; a FakeTensor has none
        if values.device.type == "cpu" and not torch.compiler.is_compiling() and rules.is_plain(values):
            return values.tolist()
        return list(values.to(self.params[0].dtype).unbind())

    def update_moments(self, beta1: float, beta2: float) -> None:
        """``m = beta1 * m + (1 - beta1) * g`` and ``v = beta2 * v + (1 - beta2) * g**2``."""
        torch._foreach_lerp_(self.state["exp_avg"], self.grads, 1 - beta1)
        torch._foreach_mul_(self.state["exp_avg_sq"], beta2)
        torch._foreach_addcmul_(self.state["exp_avg_sq"], self.grads, self.grads, value=1 - beta2)

    def adam_step(self, variance: str = "exp_avg_sq") -> None:
        """``p = p - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)``; ``variance`` names v."""
        beta1, beta2 = self.group["betas"]
        t = self.t
        denominators = torch._foreach_sqrt(self.state[variance])
        torch._foreach_div_(denominators, self.each((1 - beta2**t).sqrt()))
        torch._foreach_add_(denominators, self.group["eps"])
        self.descend(denominators, self.lr / (1 - beta1**t))

    def descend(self, denominators: list[Tensor] | tuple[Tensor, ...], stepsizes: Tensor) -> None:
        """``p = p - stepsize * m / denominator``; overwrites the denominators."""
        torch._foreach_reciprocal_(denominators)
        torch._foreach_mul_(denominators, self.state["exp_avg"])
        torch._foreach_mul_(denominators, self.each(stepsizes))
        torch._foreach_sub_(self.params, denominators)


class Baseline(Optimizer):
    """The base class of a method, which defines :meth:`update`, its hyper-parameters and its state.

    A method has these arguments, unless it says otherwise. Those after ``weight_decay`` are keyword-only.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer.
        lr: learning rate; a one-element tensor, with ``capturable=True``, to change it in a CUDA graph.
        betas: decay rates of the first and second moment.
        eps: keeps the adaptive stepsize finite; its place in the update depends on the method.
        weight_decay: L2, or decoupled as in AdamW with ``decoupled_weight_decay=True``.
        maximize: ascend instead of descend.
        foreach: False updates one tensor at a time; True and None update lists of tensors.
        capturable: keep the step counter on the device, so that a CUDA graph can capture the step.
    """

    #: Hyper-parameters with their defaults, as the catalog lists them.
    hyper: ClassVar[dict[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    #: Other arguments with their defaults. Those of :data:`FLAGS` follow.
    options: ClassVar[dict[str, Any]] = {"decoupled_weight_decay": False}
    #: State tensors of the parameter's shape.
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    #: State with one number per parameter.
    counters: ClassVar[tuple[str, ...]] = ("step",)
    #: Whether the update of an element depends on the whole layer, so that a shard cannot be updated alone.
    layerwise: ClassVar[bool] = False
    #: What ``inspect.signature`` and ``help`` show, and what a checkpoint must hold.
    __signature__: ClassVar[Signature]
    schema: ClassVar[StateSchema]

    def __init_subclass__(cls) -> None:
        by_position, by_name = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
        arguments = {"params": Parameter.empty, **cls.hyper, **cls.options, **FLAGS}
        cls.__signature__ = Signature(
            [
                Parameter(name, by_position if name in POSITIONAL else by_name, default=value)
                for name, value in arguments.items()
            ]
        )
        keys, group_keys = (*cls.counters, *cls.moments), (*cls.hyper, *cls.options)
        cls.schema = StateSchema(owner=cls.__name__, keys=keys, moments=cls.moments, group_keys=group_keys)

    def __init__(self, params: ParamsT, *positional: Any, **named: Any) -> None:
        try:
            given = self.__signature__.bind(params, *positional, **named)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}.__init__() {error}") from None
        given.apply_defaults()
        _, *hyper = given.arguments.items()
        defaults = dict(hyper)
        self.check(defaults)
        super().__init__(params, defaults)

    # -- what a method defines -------------------------------------------------------------------

    @abstractmethod
    def update(self, bucket: Bucket) -> None:
        """Take the method's step. Decoupled weight decay is already applied."""

    def check(self, group: Group) -> None:
        """Raise ValueError for a bad value; a method adds the rules of its own hyper-parameters."""
        for name, check in CHECKS.items():
            if name in group:
                check(group)
        if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
            raise ValueError(f"betas={group['betas']!r} must be floats for {type(self).__name__}, not Tensors")

    # -- groups and checkpoints ------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        owner = type(self).__name__
        if isinstance(param_group, dict):
            rules.check_names(param_group, (*self.hyper, *self.options, *FLAGS), owner)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.check(group)
            for p in group["params"]:
                rules.check_given(p, owner)
                if self.layerwise:
                    check_whole(p, owner)
        except (ValueError, TypeError):
            self.param_groups.pop()  # a refused group leaves the optimizer unchanged
            raise
        rules.drop_duplicates(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; the state of bf16 and fp16 parameters stays float32."""
        handle = self.register_load_state_dict_pre_hook(self.schema.seal)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in FLAGS.items():
                group.setdefault(key, value)
            for p in group["params"]:
                if self.state.get(p):
                    dtype, counters = rules.STATE_DTYPES[p.dtype], _counter_device(p, group)
                    self.state[p] = self.schema.unseal(self.state[p], p, dtype, counters)

    # -- the step --------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step; with a closure, evaluate it first and return its loss."""
        rules.check_capture(self)
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
            if not rules.traced():
                rules.check_param(p, type(self).__name__)
            if self.layerwise:
                check_whole(p, type(self).__name__)
            if p.grad.layout != torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients; build the embedding with sparse=False, "
                    "or pass its parameters to torch.optim.SparseAdam"
                )
        for p in params:
            if self.schema.keys and not self.state[p]:
                state = self.state[p]
                for name in self.counters:
                    state[name] = torch.zeros((), dtype=torch.float32, device=_counter_device(p, group))
                for name in self.moments:
                    state[name] = torch.empty_like(
                        p, dtype=rules.STATE_DTYPES[p.dtype], memory_format=torch.preserve_format
                    )
                    _real(state[name]).fill_(group.get("initial_accumulator", 0.0))
            if not rules.traced():
                _check_memory(p, p.grad, *self.state.get(p, {}).values())
        return params

    def _step_bucket(self, together: list[Tensor], group: Group) -> None:
        originals = [_real(p) for p in together]
        dtype = rules.STATE_DTYPES[originals[0].dtype]
        params = [p.to(dtype) for p in originals]  # the same tensors, if they have that dtype
        # autograd sets the lazy conj bit on some gradients; a real view needs it resolved
        grads = [_real(p.grad.resolve_conj()).to(dtype) for p in together if p.grad is not None]
        state = {name: [self.state[p][name] for p in together] for name in self.counters}
        state.update({name: [_real(self.state[p][name]) for p in together] for name in self.moments})
        lr = group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.reshape(()) if group["capturable"] else lr.item()

        # gradient and weight decay
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        decay = group.get("weight_decay")
        if decay and group["decoupled_weight_decay"]:
            kept = 1 - lr * decay
            torch._foreach_mul_(params, kept.to(dtype) if isinstance(kept, Tensor) else kept)
        elif decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))

        for name in self.counters:
            torch._foreach_add_(state[name], 1)
        self.update(Bucket(params, grads, state, group, lr))
        if dtype != originals[0].dtype:  # round once, at the end
            torch._foreach_copy_(originals, params)


def check_positive(group: Group, name: str, meaning: str) -> None:
    """Raise ValueError unless the value is a finite number above 0; ``meaning`` ends the message."""
    value = group[name]
    if isinstance(value, Tensor) or not rules.is_finite(value) or value <= 0:
        raise ValueError(f"{name}={value!r} must be a finite number > 0: {meaning}")


def _counter_device(p: Tensor, group: Group) -> torch.device:
    # a counter on the host needs no synchronization; in a CUDA graph it must be on the device
    return p.device if group["capturable"] else torch.device("cpu")


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _check_memory(*tensors: Any) -> None:
    """Raise RuntimeError for a tensor whose storage was freed: torch's operations would read address 0."""
    for t in tensors:
        if isinstance(t, Tensor) and rules.is_plain(t) and not t.is_meta and t.data_ptr() == 0 and t.numel():
            raise RuntimeError(
                f"the storage of a parameter, its gradient or its state (shape {tuple(t.shape)}) was freed; "
                "allocate it before the step"
            )


def _buckets(params: list[Tensor], foreach: bool | None) -> Iterator[list[Tensor]]:
    """Yield the parameters that are updated together: same device and dtype, and not too many elements."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in params:
        assert p.grad is not None
        if rules.traced() or (rules.is_plain(p) and rules.is_plain(p.grad)):
            alike.setdefault((p.device, p.dtype), []).append(p)
        else:  # a subclass sees, and may repeat, the operations on all tensors of its list
            yield [p]
    for (device, _), together in alike.items():
        limit = 0 if foreach is False else CPU_BUCKET if device.type == "cpu" else BUCKET
        buckets: list[list[Tensor]] = []
        room = 0
        for p in together:
            if not buckets or p.numel() > room:
                buckets.append([])
                room = limit
            buckets[-1].append(p)
            room -= p.numel()
        yield from buckets
