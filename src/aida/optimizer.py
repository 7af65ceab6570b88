"""The optimizer class: arguments, state, checkpoints and ``step()``. The arithmetic is elsewhere."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from aida._step.batch_cache import BatchCache, all_params
from aida._step.group_rules import STATE_DTYPES, check_capture, check_given, check_param, drop_duplicates
from aida._step.hyper import (
    OPTIONAL_DEFAULTS,
    Hyper,
    Nonfinite,
    check_group,
    check_names,
    equal,
    from_group,
    may_change_in_place,
    read_lr,
    read_rest,
)
from aida._step.refusals import GivenParams, check_clipping, check_whole, part_builder
from aida._step.state import LAYOUT, make_missing, misfit
from aida._step.tracing import without_gradients
from aida.backends import Backend, Batch, sum_over_devices
from aida.backends.choice import Route, distribute, in_dispatch_mode, make_backend
from aida.backends.tables import keep_state_layout


class Aida(Optimizer):
    r"""AdaBelief with its stepsize range narrowed by layerwise mutual projections.

    A drop-in for :class:`torch.optim.AdamW`. For every parameter tensor, with gradient ``g``::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * (a * m + b * g)**2 + eps
        p = p - lr * (m / (1 - beta1**t)) / sqrt(v / (1 - beta2**t))

    where ``a * m + b * g`` is ``m - g`` after ``projections`` mutual projections of the two.

    Args:
        params: parameters, named parameters or parameter groups, as for any torch optimizer.
        lr: learning rate; a one-element tensor to change it without recompiling or recapturing.
        betas: decay rates of the first and second moment.
        eps: added to the stored variance at every step; it bounds the adaptive stepsize by
            ``sqrt((1 - beta2) / eps)``. Not an outer epsilon as in AdamW, and worth a thought: 1e-8 suits
            images; language models, whose gradients are small, learn slowly with it and want 1e-12,
            a warm-up and a smaller lr than AdamW's.
        weight_decay: decay rate of the weights, AdamW's or L2: see ``decoupled_weight_decay``.
        projections: how many mutual projections, the paper's K; 0 is AdaBelief without its outer eps.
        xi: keeps a projection onto a zero vector defined.
        decoupled_weight_decay: True shrinks the weights directly, as AdamW does. False adds the decay to the
            gradient (L2), as Adam and the authors' code do; the paper's values are meant so.
        clip_norm: clip the global gradient norm inside the step, as ``clip_grad_norm_`` before it would. The norm is
            that of this optimizer's gradients. If several optimizers share a model (one per parameter in backward
            hooks, ``ZeroRedundancyOptimizer``, CPU offload), each would clip by its own norm: leave None there, and
            call ``clip_grad_norm_``.
        nonfinite: what a tensor does whose gradient holds NaN or inf: ``"skip"`` leaves it and its
            state as they are in this step (:meth:`skipped` counts), ``"propagate"`` computes on,
            ``"raise"`` raises before anything changed (and synchronizes with the device at every step). A gradient
            whose norm exceeds 1.8e19 (float32 state), so that its square overflows, counts as non-finite.
        maximize: ascend instead of descend.
        foreach, fused: which path runs; None picks the fastest that fits, both False the literal
            transcription of the paper.
        capturable: allow capture in a CUDA graph.
        differentiable: let autograd follow the step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        projections: int = 2,
        xi: float = 1e-20,
        decoupled_weight_decay: bool = True,
        clip_norm: float | None = None,
        nonfinite: Nonfinite = "skip",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "projections": projections,
            "xi": xi,
            "decoupled_weight_decay": decoupled_weight_decay,
            "clip_norm": clip_norm,
            "nonfinite": nonfinite,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
        }
        check_group(defaults)
        self._part_builder = None if torch.compiler.is_compiling() else part_builder()
        self._forget()
        super().__init__(params, defaults)
        self._support_amp_scaling()

    def _support_amp_scaling(self) -> None:
        # torch.amp.GradScaler then hands grad_scale and found_inf to the step instead of unscaling first. As in torch
        # only with fused=True: Lightning refuses to clip the gradients of an optimizer that has the attribute.
        if self.defaults["fused"]:
            self._step_supports_amp_scaling = True

    def _forget(self) -> None:
        """Drop what only speeds steps up; it is found again in the next one."""
        self._lock = self.__dict__.get("_lock") or threading.RLock()
        self._lrs: list[float | Tensor] = []
        self._held: list[Any] = []
        self._rest: list[tuple[Any, ...]] = []
        self._hypers: list[Hyper] = []
        self._has_lists = False  # whether betas are in a list or an array, which may change in place
        self._clips = False
        self._cache: BatchCache | None = None
        self._backends: dict[Route, Backend] = {}

    # -- groups and checkpoints ------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            check_names(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            if group["clip_norm"] is not None:
                check_clipping(self._part_builder, "Aida")
            for p in group["params"]:
                check_whole(p, "Aida")
                check_given(p, "Aida")
        except (ValueError, TypeError, RuntimeError):
            self.param_groups.pop()  # an optimizer that refused a group is as it was before
            raise
        drop_duplicates(group)
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            group["betas"] = tuple(b.reshape(()) if isinstance(b, Tensor) else b for b in group["betas"])
        # made here: of what __init__ sets before torch's own runs, torch.compile loses this
        self.__dict__.setdefault("_given", GivenParams()).add(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; moments keep float32 where the parameter is bf16 or fp16."""
        # torch would cast every tensor to its parameter's dtype. Registered last, so that it seals
        # what other hooks leave; __setstate__ unseals before load_state_dict post-hooks look.
        with self._lock:  # another thread may be in a step
            for group in self.param_groups:
                self._given.check(group, "Aida")  # what is in the groups now counts as given afterwards
            handle = self.register_load_state_dict_pre_hook(LAYOUT.seal)
            try:
                super().load_state_dict(state_dict)
            finally:
                handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        self._given = GivenParams()
        self._part_builder = self.__dict__.get("_part_builder")
        self._support_amp_scaling()
        for group in self.param_groups:
            self._given.add(group)
            for key, value in OPTIONAL_DEFAULTS.items():
                group.setdefault(key, value)
            for p in group["params"]:
                if self.state.get(p):
                    self.state[p] = LAYOUT.unseal(self.state[p], p, STATE_DTYPES[p.dtype])

    def skipped(self) -> Counter[str]:
        """How often each tensor kept out of a step because its gradient held NaN or inf.

        Keys are parameter names where the optimizer was given names, else ``"group.index"``; tensors
        that never did are left out, and count as 0 when asked for. Waits for the device.
        """
        labels, counts = [], []
        for label, p in self._labelled():
            if self.state.get(p):
                labels.append(label)
                counts.append(self.state[p]["skipped"])
        found: Counter[str] = Counter()
        for device in {count.device for count in counts}:  # one host copy a device
            here = [i for i, count in enumerate(counts) if count.device == device]
            for i, count in zip(here, torch.stack([counts[i] for i in here]).tolist(), strict=True):
                if count:
                    found[labels[i]] = int(count)
        return found

    def _labelled(self) -> Iterable[tuple[str, Tensor]]:
        for g, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for i, p in enumerate(group["params"]):
                yield (names[i] if names else f"{g}.{i}"), p

    # -- the step --------------------------------------------------------------------------------

    @without_gradients
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; with a closure, evaluate it first and return its loss."""
        check_capture(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        if torch.compiler.is_compiling():
            self._update(self._sort([from_group(group) for group in self.param_groups]))
        else:
            with self._lock:  # several threads may share an optimizer, and with it the tables of its kernels
                self._update(self._recall())
        return loss

    def _update(self, batches: dict[Route, Batch]) -> None:
        try:
            self._take_amp_scaling(batches)
            if torch.compiler.is_compiling():
                backends: list[Backend] = [make_backend(route) for route in batches]
            else:
                backends = [self._backend(route) for route in batches]
            work = list(zip(backends, batches.values(), strict=True))

            # reduce
            raises = any(batch.traits.raises for _, batch in work)
            for _, batch in work:
                batch.may_be_called_off = raises
            norms = [backend.reduce(batch) for backend, batch in work]
            if raises:
                self._raise_nonfinite(work)
            totals = sum_over_devices(norms)

            # apply
            for (backend, batch), total in zip(work, totals, strict=True):
                backend.apply(batch, total)
        finally:
            for batch in batches.values():
                batch.grads = []  # the cache keeps the batch: a gradient must not outlive zero_grad() with it

    def _take_amp_scaling(self, batches: dict[Route, Batch]) -> None:
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if grad_scale is not None or found_inf is not None:
            for batch in batches.values():
                batch.grad_scale = None if grad_scale is None else grad_scale.to(batch.device, non_blocking=True)
                batch.found_inf = None if found_inf is None else found_inf.to(batch.device, non_blocking=True)

    def _recall(self) -> dict[Route, Batch]:
        """The batches of the last step if they still serve, else sorted anew."""
        hypers = self._current_hypers()
        if self._clips:
            check_clipping(self._part_builder, "Aida")
        params = all_params(self.param_groups)
        grads = [p.grad for p in params]
        cache, self._cache = self._cache, None
        if cache is not None and not in_dispatch_mode():
            known = cache.recall(params, grads, self.state, hypers)
            if known is not None:
                self._cache = cache
                return known
        if len(set(map(id, params))) < len(params):
            raise ValueError("a parameter is in the groups twice, and would be updated twice; keep each once")
        batches = self._sort(hypers)
        cache = BatchCache(params, grads, self.state, batches)
        if cache.may_be_kept and not in_dispatch_mode():
            self._cache = cache
        return batches

    def _sort(self, hypers: list[Hyper]) -> dict[Route, Batch]:
        batches: dict[Route, Batch] = {}
        for index, group in enumerate(self.param_groups):
            found = Batch()
            has_complex = self._init_group(
                group, found.params, found.grads, found.exp_avgs, found.exp_avg_vars, found.steps, found.skipped
            )
            if has_complex:
                keep_state_layout(found)  # a view of the state cannot be laid out anew
                found.view_as_real()
            distribute(found, index, group, hypers[index], batches)
        return batches

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_vars: list[Tensor],
        steps: list[Tensor],
        skipped: list[Tensor],
    ) -> bool:
        """Append the group's tensors that have a gradient, making the state of those that are new.

        torch.compile runs a method of this name and shape outside its trace.
        """
        has_complex = False
        state = self.state
        self._given.check(group, "Aida")
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            check_param(p, "Aida")
            if hasattr(grad, "wait"):
                grad = grad.wait()  # an AsyncCollectiveTensor: the result of a collective that may be under way
            if grad.layout != torch.strided:
                raise RuntimeError(
                    "Aida does not support sparse gradients: its projections need every element of a layer; "
                    "build the embedding with sparse=False, or give its parameters to torch.optim.SparseAdam"
                )
            has_complex |= p.is_complex()
            known = state[p]
            if len(known) < len(LAYOUT.keys):
                make_missing(known, p)
            problem = misfit(p, grad, known)
            if problem:
                raise RuntimeError(f"{self._label(p)} {problem}")
            params.append(p)
            grads.append(grad)
            exp_avgs.append(known["exp_avg"])
            exp_avg_vars.append(known["exp_avg_var"])
            steps.append(known["step"])
            skipped.append(known["skipped"])
        return has_complex

    def _current_hypers(self) -> list[Hyper]:
        """Each group's values as one frozen value, made anew (and checked) only where one was changed."""
        groups = self.param_groups
        lrs = list(map(read_lr, groups))
        # all that the groups hold, as one list: picking keys out of hundreds of groups costs a fifth of a step
        held = list(chain.from_iterable(map(dict.values, groups)))
        # lr by identity: a tensor may take the place of a float of the same value, and change in place later
        if (
            not self._has_lists
            and len(groups) == len(self._hypers)
            and all(map(is_, lrs, self._lrs))
            and equal(held, self._held)
        ):
            return self._hypers
        rest = list(map(read_rest, groups))
        hypers: list[Hyper] = []
        for index, group in enumerate(groups):
            known = index < len(self._hypers)
            if known and lrs[index] is self._lrs[index] and rest[index] == self._rest[index]:
                hypers.append(self._hypers[index])
                continue
            check_group(group, added=False)
            hypers.append(from_group(group))
            if known and rest[index] != self._rest[index]:
                self._cache = None  # a flag, or betas that are tensors now, may send tensors down another path
        if len(hypers) == len(self._hypers) and all(map(is_, hypers, self._hypers)):
            hypers = self._hypers  # the very list: what is known of it stays known
        self._lrs, self._held, self._rest, self._hypers = lrs, held, rest, hypers
        self._has_lists = any(may_change_in_place(group["betas"]) for group in groups)
        self._clips = any(hyper.clip_norm is not None for hyper in hypers)
        return hypers

    def _backend(self, route: Route) -> Backend:
        if route not in self._backends:
            self._backends[route] = make_backend(route)
        return self._backends[route]

    def _raise_nonfinite(self, work: list[tuple[Backend, Batch]]) -> None:
        for backend, batch in work:
            if not batch.traits.raises:
                continue
            if batch.found_inf is not None and bool(batch.found_inf != 0):
                continue  # GradScaler saw it first, and lets this step pass
            bad = set(backend.nonfinite())
            names = []
            for hyper, where in batch.slices():
                if hyper.nonfinite == "raise":
                    names += [self._label(batch.params[i]) for i in range(where.start, where.stop) if i in bad]
            if names:
                raise RuntimeError(
                    f"the gradient of {', '.join(names[:8])}{' and others' if len(names) > 8 else ''} holds NaN or inf;"
                    " nothing was changed. Look at the loss and the learning rate, or let such tensors sit a step"
                    ' out with nonfinite="skip"'
                )

    def _label(self, tensor: Tensor) -> str:
        for label, p in self._labelled():
            if p is tensor or p is tensor._base:  # a complex one is updated through a view
                return f"parameter {label}"
        return "a parameter"
