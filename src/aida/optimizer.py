"""The optimizer class: arguments, state, checkpoints and ``step()``. ``aida.backends`` has the arithmetic."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, ParamsT

from aida._step.batch_cache import BatchCache, all_params
from aida._step.group_rules import (
    check_capture,
    check_given,
    check_names,
    check_param,
    drop_duplicates,
    is_uninitialized,
)
from aida._step.hyper import FLAG_KEYS, HYPER_KEYS, OPTIONAL_DEFAULTS, Hyper, Nonfinite, check_group, from_group
from aida._step.hyper_cache import HyperCache
from aida._step.in_backward import register
from aida._step.layers import LAYER_KEYS, layer_label, layers_of
from aida._step.phases import update
from aida._step.refusals import GivenParams, check_clipping, check_whole, initializes_state, part_builder
from aida._step.sharding import is_dtensor, local, local_gradient
from aida._step.sorting import sort
from aida._step.state import misfit, prepare, restored, rows_of, sealed
from aida._step.storage import STORAGE_KEYS, Precision, storage_of
from aida._step.tracing import without_gradients
from aida.backends import Backend, Batch
from aida.backends.choice import Route, in_dispatch_mode, make_backend
from aida.backends.exchange import Exchange, NormGroup


@_disable_dynamo
def _outside_the_trace(optimizer: Aida) -> None:
    optimizer._eager_step()


class Aida(Optimizer):
    r"""AdaBelief whose range of stepsizes is narrowed by layerwise mutual projections.

    A drop-in replacement for :class:`torch.optim.AdamW`. Every parameter tensor with gradient ``g`` is updated by::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * (a * m + b * g)**2 + eps
        p = p - lr * (m / (1 - beta1**t)) / sqrt(v / (1 - beta2**t))

    Here ``a * m + b * g`` is ``m - g`` after ``projections`` mutual projections of ``m`` and ``g``.

    Args:
        params (iterable): parameters, named parameters or parameter groups, as for any torch optimizer.
        lr (float or Tensor, default: 1e-3): learning rate. A one-element tensor can change without recompiling the
            step or recapturing a CUDA graph.
        betas (tuple of two floats or Tensors, default: (0.9, 0.999)): decay rates of the first and second moment.
        eps (float, default: 1e-8): added to the stored variance at every step. It bounds the adaptive stepsize by
            ``sqrt((1 - beta2) / eps)`` and is not AdamW's outer epsilon, so choose it: 1e-8 suits images. Language
            models have small gradients and learn slowly with it; use 1e-16, a warm-up and a third of AdamW's lr.
        weight_decay (float, default: 0.0): weight decay, decoupled or L2: see ``decoupled_weight_decay``.
        projections (int, default: 2): number of mutual projections, the paper's K. 0 is AdaBelief without outer eps.
        xi (float, default: 1e-20): keeps a projection onto a zero vector defined.
        decoupled_weight_decay (bool, default: True): if True, multiply the weights by ``1 - lr * weight_decay``, as
            AdamW does. If False, add the decay to the gradient (L2), as Adam and the authors' code do; the paper's
            values are L2.
        clip_norm (float, optional, default: None): clip the gradient norm inside the step, with the result of
            ``clip_grad_norm_`` before it. The norm is over this optimizer's gradients. If several optimizers share a
            model (one per parameter in backward hooks, ``ZeroRedundancyOptimizer``, CPU offload), each would clip by
            its own norm: leave None, and call ``clip_grad_norm_``. Pipeline stages can set :attr:`norm_group`.
        nonfinite (str, default: "skip"): what to do with a tensor whose gradient holds NaN or inf. ``"skip"`` leaves
            the tensor and its state unchanged in this step (:meth:`skipped` counts), ``"propagate"`` updates it,
            ``"raise"`` raises before anything changes (and synchronizes with the device at every step). A gradient
            whose norm exceeds 1.8e19 (float32 state) counts as non-finite, because its square overflows.
        maximize (bool, default: False): maximize the objective instead of minimizing it.
        layer_dims (int, default: 0): number of leading dimensions that count layers. 1 makes every matrix of a stack
            (experts, d, h) a layer of its own, with its own projections, ``step`` and ``skipped``.
        split_sizes (tuple of int, optional, default: None): cut one dimension into layers of these sizes, such as
            ``(d, d, d)`` for the queries, keys and values of a fused projection. Set it and ``layer_dims`` per group.
        split_dim (int, optional, default: None): the dimension that ``split_sizes`` cuts. None means the first one
            that ``layer_dims`` leaves.
        state_precision (str, default: "float32"): how the moments of float32, bf16 and fp16 parameters are stored.
            ``"bfloat16"`` takes 4 bytes per parameter, ``"fp8"`` 2.02: 8-bit floats in blocks of 128 with one scale.
            Both are rounded stochastically. With ``"fp8"`` parameters of fewer than 4,096 elements, and those whose
            layers or shards end within a block, keep float32 state.
        stochastic_rounding (bool, default: False): round bf16 and fp16 parameters up or down at random, so that updates
            of less than half a unit in the last place are not lost.
        kahan_sum (bool, default: False): keep what rounding removes from bf16 and fp16 parameters in another tensor of
            their dtype, and add it in the next step. Deterministic; 2 more bytes per parameter.
        rounding_seed (int, default: 0): seed of stochastic rounding. The random bits depend only on this seed, the
            step, the place of the parameter in the optimizer and the place of the element in the parameter.
        foreach (bool, optional, default: None): True selects the multi-tensor path.
        fused (bool, optional, default: None): True selects the fused kernels. If both are None, the fastest path that
            fits is used; if both are False, the literal transcription of the paper.
        capturable (bool, default: False): allow capture in a CUDA graph.
        differentiable (bool, default: False): let autograd record the step.
    """

    #: A process group of ranks that have different layers and share the norm of ``clip_norm``: one rank per pipeline
    #: stage, for example ``mesh["pp"].get_group()``. The squared norm is added over this group at every step, with one
    #: more all-reduce, so all its ranks must step together. Copies and pickles of the optimizer do not have it. Not
    #: needed for sharded parameters (DTensor). Not a group key, because a process group cannot be in a checkpoint.
    norm_group: Any = None

    #: The number of the first parameter, which chooses its random bits; not 0 in a part of an optimizer.
    _first_number = 0

    @_disable_dynamo  # in a compiled training loop too: torch 2.11 cannot trace it
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
        layer_dims: int = 0,
        split_sizes: tuple[int, ...] | None = None,
        split_dim: int | None = None,
        state_precision: Precision = "float32",
        stochastic_rounding: bool = False,
        kahan_sum: bool = False,
        rounding_seed: int = 0,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "projections": projections, "xi": xi,
            "decoupled_weight_decay": decoupled_weight_decay, "clip_norm": clip_norm, "nonfinite": nonfinite,
            "maximize": maximize, "layer_dims": layer_dims, "split_sizes": split_sizes, "split_dim": split_dim,
            "state_precision": state_precision, "stochastic_rounding": stochastic_rounding, "kahan_sum": kahan_sum,
            "rounding_seed": rounding_seed,
            "foreach": foreach, "fused": fused, "capturable": capturable, "differentiable": differentiable,
        }  # fmt: skip
        check_group(defaults)
        self._part_builder = part_builder()
        self._given = GivenParams()
        self._forget()
        super().__init__(params, defaults)
        self._support_amp_scaling()

    def _support_amp_scaling(self) -> None:
        # with this attribute torch.amp.GradScaler passes grad_scale and found_inf to the step instead of unscaling
        # first. As in torch only with fused=True: Lightning refuses to clip the gradients of such an optimizer.
        if self.defaults["fused"]:
            self._step_supports_amp_scaling = True

    def _forget(self) -> None:
        """Drop all caches; the next step fills them again."""
        self._lock = self.__dict__.get("_lock") or threading.RLock()
        self._hypers = HyperCache()
        self._cache: BatchCache | None = None
        self._exchanges: list[Exchange] = []
        self._redistributed: dict[int, Tensor] = {}  # gradients of the current step, by the parameter's id
        self._backends: dict[Route, Backend] = {}

    # -- groups and checkpoints ------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, for example of layers that have been frozen so far.

        Args:
            param_group (dict): ``params``, and any arguments of the optimizer that differ from its own.
        """
        if isinstance(param_group, dict):
            check_names(param_group, (*HYPER_KEYS, *LAYER_KEYS, *STORAGE_KEYS, *FLAG_KEYS), "Aida")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_group(group)
            if group["clip_norm"] is not None:
                check_clipping(self._part_builder, "Aida")
            for p in group["params"]:
                check_whole(p, "Aida", sharded=True)
                check_given(p, "Aida")
                if not is_uninitialized(p):
                    layers_of(p, group)
        except (ValueError, TypeError, RuntimeError):
            self.param_groups.pop()  # a refused group leaves the optimizer unchanged
            raise
        drop_duplicates(group)
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            group["betas"] = tuple(b.reshape(()) if isinstance(b, Tensor) else b for b in group["betas"])
        self._given.add(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint. Groups keep their own ``state_precision``, ``stochastic_rounding`` and ``kahan_sum``.

        Args:
            state_dict (dict): what :meth:`state_dict` returned, with state of any precision.
        """
        # torch would cast every tensor to its parameter's dtype. Registered last, so that it seals
        # what other hooks return; __setstate__ unseals before load_state_dict post-hooks run.
        with self._lock:  # another thread may be in a step
            for group in self.param_groups:
                self._given.check(group, "Aida")  # what is in the groups now counts as given afterwards
            handle = self.register_load_state_dict_pre_hook(sealed)
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
                    layers = layers_of(p, group)
                    self.state[p] = restored(self.state[p], p, layers, storage_of(p, group, layers), group)

    def skipped(self) -> Counter[str]:
        """The number of steps that each tensor skipped because its gradient held NaN or inf.

        Keys are parameter names if the optimizer was given names, else ``"group.index"``. Tensors that skipped
        no step are left out, and count as 0. If a parameter has several layers, its keys end with the layer's index:
        ``"experts[3]"``. Synchronizes with the device. If ranks hold different layers, all of them must call this.
        """
        found: dict[torch.device, tuple[list[str], list[Tensor]]] = {}
        for label, p, group in self._labelled():
            if self.state.get(p):
                counts, layers = self.state[p]["skipped"], layers_of(p, group)
                labels, numbers = found.setdefault(p.device, ([], []))
                labels += [layer_label(label, layers, number) for number in range(layers.count)]
                numbers.append((counts.full_tensor() if is_dtensor(counts) else counts).reshape(-1))
        skipped: Counter[str] = Counter()
        for labels, numbers in found.values():  # one copy to the host per device
            for label, count in zip(labels, torch.cat(numbers).tolist(), strict=True):
                if count:
                    skipped[label] = int(count)
        return skipped

    def _labelled(self) -> Iterable[tuple[str, Tensor, dict[str, Any]]]:
        for g, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for i, p in enumerate(group["params"]):
                yield (names[i] if names else f"{g}.{i}"), p, group

    # -- the step --------------------------------------------------------------------------------

    @without_gradients
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure (Callable, optional, default: None): evaluates the model and returns the loss, which is returned.
        """
        check_capture(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        if not torch.compiler.is_compiling():
            self._eager_step()
        elif self.norm_group is not None or any(is_dtensor(p) for g in self.param_groups for p in g["params"]):
            _outside_the_trace(self)  # collectives are not compiled
        else:
            # nothing is assigned to the optimizer here: torch 2.11 cannot trace that
            self._update(*self._sort([from_group(group) for group in self.param_groups]))
        return loss

    def step_in_backward(self) -> list[Any]:
        """Update each parameter during the backward pass, as soon as its gradient is complete, and free the gradient.

        The gradients of the whole model never exist at once, which saves their memory. ``step()`` and ``zero_grad()``
        may stay in the loop, and find no gradient. Schedulers, checkpoints and :meth:`skipped` work as before. Gradient
        accumulation, ``GradScaler``, ``clip_norm`` and sharded parameters need gradients after the backward pass.

        Returns:
            list: one handle per parameter, whose ``remove()`` ends its updates.
        """
        return register(self)

    def _eager_step(self) -> None:
        with self._lock:  # threads that share an optimizer share the tables of its kernels
            self._redistributed.clear()  # a step that raised may have left some
            if not self.state and initializes_state():
                self._sort([from_group(group) for group in self.param_groups])
            else:
                self._update(self._recall(), self._exchanges)

    def _update(self, batches: dict[Route, Batch], exchanges: list[Exchange]) -> None:
        try:
            self._take_amp_scaling(batches)
            backend = make_backend if torch.compiler.is_compiling() else self._backend
            norm_group = None
            if self.norm_group is not None:
                norm_group = NormGroup(self.norm_group, self.param_groups[0]["params"][0].device)
            work = [(backend(route), batch) for route, batch in batches.items()]
            update(work, exchanges, self._label, norm_group)
        finally:
            for batch in batches.values():
                batch.grads = []  # the cache keeps the batch, and would keep gradients alive after zero_grad()
                if batch.wholes is not None:
                    batch.wholes.grads = []
            self._redistributed.clear()

    def _take_amp_scaling(self, batches: dict[Route, Batch]) -> None:
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if grad_scale is not None or found_inf is not None:
            for batch in batches.values():
                batch.grad_scale = None if grad_scale is None else grad_scale.to(batch.device, non_blocking=True)
                batch.found_inf = None if found_inf is None else found_inf.to(batch.device, non_blocking=True)

    def _recall(self) -> dict[Route, Batch]:
        """The batches of the last step if they are still valid, else new ones."""
        hypers = self._hypers
        hypers.update(self.param_groups)
        if hypers.clips:
            check_clipping(self._part_builder, "Aida")
        params = all_params(self.param_groups)
        grads = [p.grad for p in params]
        cache, self._cache = self._cache, None
        if cache is not None and not in_dispatch_mode():
            known = cache.recall(params, grads, self.state, hypers, self._redistributed)
            if known is not None:
                self._cache = cache
                return known
        if len(set(map(id, params))) < len(params):
            raise ValueError("a parameter is in the groups twice and would be updated twice; remove one of the two")
        batches, self._exchanges = self._sort(hypers.values)
        cache = BatchCache(params, grads, self.state, hypers, batches)
        if cache.may_be_kept and not in_dispatch_mode():
            self._cache = cache
        return batches

    def _sort(self, hypers: list[Hyper]) -> tuple[dict[Route, Batch], list[Exchange]]:
        return sort(self.param_groups, hypers, self._init_group, self._first_number)

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        *state_rows: list[Tensor | None],
    ) -> bool:
        """Append the group's local tensors that have a gradient to the lists, and create missing state.

        torch.compile runs a method of this name and signature outside its trace.
        """
        has_complex = False
        state = self.state
        self._given.check(group, "Aida")
        for p in group["params"]:
            if p.grad is None and not (is_dtensor(p) and p.requires_grad):
                continue
            check_param(p, "Aida")
            known, layers = state[p], layers_of(p, group)
            storage = storage_of(p, group, layers)
            prepare(known, p, layers, storage, group)
            if p.grad is None:
                continue  # a sharded tensor has state on every rank, because checkpoints need the same keys everywhere
            if p.grad.layout != torch.strided:
                raise RuntimeError(
                    "Aida does not support sparse gradients: its projections need every element of a layer; "
                    "build the embedding with sparse=False, or pass its parameters to torch.optim.SparseAdam"
                )
            grad = local_gradient(p, p.grad, self._redistributed)
            has_complex |= p.is_complex()
            problem = misfit(p, grad, known, layers, storage)
            if problem:
                raise RuntimeError(f"{self._label(p)} {problem}")
            params.append(local(p))
            grads.append(grad)
            for row, tensor in zip(state_rows, rows_of(known, storage), strict=True):
                row.append(tensor)
        return has_complex

    def _backend(self, route: Route) -> Backend:
        if route not in self._backends:
            self._backends[route] = make_backend(route)
        return self._backends[route]

    def _label(self, tensor: Tensor) -> str:
        return next((f"parameter {label}" for label, p, _ in self._labelled() if p is tensor), "a parameter")
