"""The probe: a hook of an optimizer that measures stepsizes at intervals and passes records to a sink."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from aida._step.hyper import FLAG_KEYS
from aida._step.layers import LAYER_KEYS, ONE_LAYER_KEYS, layer_label, layers_of
from aida._step.sharding import is_dtensor, local
from aida._step.state import LayerState, layer_states
from aida._step.storage import STORAGE_KEYS
from aida.catalog import catalog, reading_for, unwrapped
from aida.optimizer import Aida
from aida.readings import Group, Reading
from aida.stepsizes._pieces import HostCopy, Layer, Slot, StepCounters
from aida.stepsizes._reader import Reader
from aida.stepsizes._scales import NO_SCALES, ScaleReader
from aida.stepsizes.records import LayerStepsizes, Measurement, Record, summarise


class StepsizeProbe(AbstractContextManager["StepsizeProbe"]):
    """Measures an optimizer's stepsizes after every ``every``-th step and passes the records to a sink.

    The probe attaches itself to the optimizer, so the training loop does not change. It only reads the state and
    draws no random numbers, so the results of the run do not change either. Statistics are computed on the
    parameters' device, over pieces of at most 4 million elements, and copied to the host at once. A second copy is
    needed if step counters on the device are not as expected: after a skipped step, or one that the probe missed.

    Hooks do not run while a CUDA graph is replayed or inside a compiled step: call :meth:`measure` between
    the replays. An optimizer without stepsizes per element (SGD, Fromage) gives no records. If a
    parameter has several layers (``layer_dims``, ``split_sizes``), each has its record. For a sharded tensor
    (DTensor) each rank measures its own shard, without the cosine and the scales.

    Args:
        optimizer (Optimizer): one of the catalog, or torch's Adam, AdamW, RAdam or NAdam. The wrappers of Lightning,
            accelerate and timm's Lookahead are accepted.
        named_parameters (iterable of (str, Tensor)): the layers to measure and their names. Parameters that the
            optimizer does not have are left out until it gets them.
        every (int, default: 100): measure after each step whose number is a multiple of this.
        sink (Callable, optional, default: None): called with one :class:`LayerStepsizes` per layer, then with one
            :class:`AcrossLayers`; :func:`aida.sink` makes one for files and experiment trackers.
        quantiles (sequence of float, default: (0.01, 0.25, 0.5, 0.75, 0.99)): levels between 0 and 1.
        weights_only (bool, default: False): leave out tensors with fewer than two dimensions: biases and norms.
        reading (Reading, optional, default: None): how to read the stepsizes of an optimizer that is not in the
            catalog.
        start (int, default: 0): number of steps taken before, for a run that resumes from a checkpoint.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]],
        every: int = 100,
        sink: Callable[[Record], object] | None = None,
        *,
        quantiles: Sequence[float] = (0.01, 0.25, 0.5, 0.75, 0.99),
        weights_only: bool = False,
        reading: Reading | None = None,
        start: int = 0,
    ) -> None:
        if isinstance(every, bool) or operator.index(every) < 1:
            raise ValueError(f"every={every!r} must be an integer >= 1, such as 100")
        if not all(0 <= level <= 1 for level in quantiles):
            raise ValueError(f"quantiles={tuple(quantiles)!r} must lie between 0 and 1; the median is 0.5")
        self._names = _named(named_parameters, weights_only)
        self._optimizer = optimizer = unwrapped(optimizer)
        self._reading = reading or reading_for(optimizer)
        self._method = method_of(optimizer)
        self._sink = sink
        self._quantiles = tuple(quantiles)
        self._counters = StepCounters()
        self.every = every
        #: Steps of the optimizer so far.
        self.step = start
        #: The latest measurement; None before the first.
        self.last: Measurement | None = None
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return  # the step is being recorded, not executed
        self.step += 1
        if self.step % self.every == 0:
            self.measure()

    @torch.no_grad()
    def measure(self, step: int | None = None) -> Measurement | None:
        """Measure now.

        For Aida the cosine and the scales are those of the last step: its gradients must still be in place, and
        its lr unchanged.

        Args:
            step (int, optional, default: None): number of the step for the records; None means the current one.

        Returns:
            Measurement or None: the records, or None if there is nothing to measure.
        """
        self.step = self.step if step is None else step
        records = self._read()
        if records is None:  # a step was skipped, or taken without the hook; now the counters are known
            records = self._read()
        if not records:
            return None
        self.last = Measurement(records, summarise(records))
        if self._sink is not None:
            for record in records:
                self._sink(record)
            self._sink(self.last.across)
        return self.last

    def close(self) -> None:
        """Detach from the optimizer."""
        self._handle.remove()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self) -> tuple[LayerStepsizes, ...] | None:
        """The records of all layers, or None if the predicted step counters were wrong."""
        copy = HostCopy()
        layers = self._layers(copy)
        scales = ScaleReader(self._optimizer, copy) if isinstance(self._optimizer, Aida) else None
        hypers = list(map(hyper_values, self._optimizer.param_groups))
        slots = _mapped(hypers, Tensor, lambda tensor: copy.add(tensor.reshape(1)))
        reader = Reader(layers, self._reading, self._quantiles, copy, scales)
        copy.fetch()
        if not self._counters.confirm():
            return None
        hypers = _mapped(slots, Slot, lambda slot: slot.values.item())
        projected = {} if scales is None else scales.scales()
        return tuple(
            LayerStepsizes(
                step=self.step,
                layer=layer.name,
                method=self._method,
                group=layer.group_index,
                shape=layer.shape,
                elements=layer.size,
                **found,
                **projected.get(number, NO_SCALES),
                hyper=hypers[layer.group_index],
            )
            for number, (layer, found) in enumerate(zip(layers, reader.statistics(), strict=True))
        )

    def _layers(self, copy: HostCopy) -> list[Layer]:
        """The layers of the named parameters that have state and have taken a step."""
        if self._reading.stepsize is None:
            return []
        state, groups = self._optimizer.state, self._optimizer.param_groups
        needed = [{"step", *self._reading.keys(group)} for group in groups]
        where = {p: index for index, group in enumerate(groups) for p in group["params"]}
        found: list[Layer] = []
        for p, name in self._names.items():
            index, mine = where.get(p), state.get(p)
            if index is None or mine is None or not local(p).numel():
                continue
            if all(map(LayerState(mine).__contains__, needed[index])):
                found += _layers_of(name, p, mine, index, groups[index])
        names, counters = [layer.name for layer in found], [layer.state["step"] for layer in found]
        steps = self._counters.predict(names, counters, self.step, copy)
        # Aida creates the state of a tensor even if it then skips the step: there is no stepsize yet
        return [layer._replace(step=step) for layer, step in zip(found, steps, strict=True) if step >= 1]


def _layers_of(name: str, p: Tensor, state: Mapping[str, Any], index: int, group: dict[str, Any]) -> Iterator[Layer]:
    """The layers of one parameter that have elements on this rank; their steps are not known yet."""
    layers = layers_of(p, {**ONE_LAYER_KEYS, **group})
    count = len(layers.numbers)
    params = layers.views(local(p))
    grads = [None] * count if p.grad is None or is_dtensor(p) else layers.views(p.grad)
    states = layer_states(state, p, layers, group)
    for number, param, grad, known in zip(layers.numbers, params, grads, states, strict=True):
        if size := param.numel() * (2 if p.is_complex() else 1):
            shape = layers.shape_of(p, number)
            yield Layer(layer_label(name, layers, number), shape, param, grad, size, known, index, group, 0)


def method_of(optimizer: Optimizer) -> str:
    """The optimizer's title in the catalog, or the name of its class."""
    for entry in catalog().values():
        if type(optimizer) is entry.optimizer:
            return entry.title
    return type(optimizer).__name__


def hyper_values(group: Group) -> dict[str, Any]:
    """The hyper-parameters of a group, without parameters, names, flags that only select a path, and layer keys."""
    beside = {"params", "param_names", *FLAG_KEYS, *LAYER_KEYS, *STORAGE_KEYS}
    return {key: value for key, value in group.items() if key not in beside and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, (bool, int, float, str))


def _named(named_parameters: Iterable[tuple[str, Tensor]], weights_only: bool) -> dict[Tensor, str]:
    named = list(named_parameters)
    for entry in named:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise TypeError(
                f"named_parameters must be pairs of a name and a tensor, not {type(entry).__name__}; "
                "pass model.named_parameters()"
            )
    if not named:
        raise ValueError("named_parameters is empty: a generator works only once; call model.named_parameters() again")
    return {p: name for name, p in named if not weights_only or p.ndim >= 2}


def _mapped(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Apply a function to everything of one kind in nested tuples, lists and dicts; lists become tuples."""
    if isinstance(value, dict):
        return {key: _mapped(part, kind, function) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_mapped(part, kind, function) for part in value)
    return function(value) if isinstance(value, kind) else value
