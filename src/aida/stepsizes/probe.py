"""The probe: a hook of an optimizer that measures stepsizes at intervals and passes records to a sink."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from aida.catalog import reading_for
from aida.optimizer import Aida
from aida.readings import Reading
from aida.stepsizes._counters import StepCounters
from aida.stepsizes._layers import Layer
from aida.stepsizes._pieces import HostCopy, Slot, own_size
from aida.stepsizes._reader import Reader, Statistics
from aida.stepsizes._scales import LayerScales, ScaleReader
from aida.stepsizes.explanation import hyper_values, method_of
from aida.stepsizes.records import LayerStepsizes, Measurement, Record, summarise


class StepsizeProbe:
    """Measures an optimizer's stepsizes after every ``every``-th step and passes the records to a sink.

    The probe attaches itself to the optimizer, so the training loop does not change. It only reads the state and
    draws no random numbers, so the results of the run do not change either. Statistics are computed on the
    parameters' device, over pieces of at most 4 million elements, and copied to the host at once. A second copy is
    needed if step counters on the device are not as expected: at first, and after a skipped step.

    Hooks do not run while a CUDA graph is replayed or inside a compiled step: call :meth:`measure` between
    the replays. An optimizer without stepsizes per element (SGD, Fromage) gives no records. For a sharded tensor
    (DTensor) each rank measures its own shard.

    Args:
        optimizer (Optimizer): one of the catalog, or torch's Adam, AdamW, RAdam or NAdam.
        named_parameters (iterable of (str, Tensor)): the layers to measure and their names. Parameters that the
            optimizer does not have (yet) are left out (until then).
        every (int, default: 100): measure after each step whose number is a multiple of this.
        sink (Callable, optional, default: None): called with one :class:`LayerStepsizes` per layer, then with one
            :class:`AcrossLayers`.
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
        self._optimizer = optimizer
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
        records, right = self._read()
        if not right:  # a step was skipped, or taken without the hook; now the counters are known
            records, _ = self._read()
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

    def __enter__(self) -> StepsizeProbe:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self) -> tuple[tuple[LayerStepsizes, ...], bool]:
        """The records of all layers, and whether the expected step counters were right."""
        copy = HostCopy()
        layers = self._layers(copy)
        scales = ScaleReader(self._optimizer, copy) if isinstance(self._optimizer, Aida) else None
        slots = [_hyper_slots(group, copy) for group in self._optimizer.param_groups]
        reader = Reader(layers, self._reading, self._quantiles, copy, scales)
        copy.fetch()
        if not self._counters.confirm():
            return (), False
        hypers = [{key: _on_host(value) for key, value in group.items()} for group in slots]
        projected = {} if scales is None else scales.scales()
        records = (
            self._record(layer, found, hypers[layer.group_index], projected.get(number))
            for number, (layer, found) in enumerate(zip(layers, reader.statistics(), strict=True))
        )
        return tuple(records), True

    def _layers(self, copy: HostCopy) -> list[Layer]:
        """The named parameters that have state and have taken a step."""
        if self._reading.stepsize is None:
            return []
        state, groups = self._optimizer.state, self._optimizer.param_groups
        needed = [{"step", *self._reading.keys(group)} for group in groups]
        where = {p: index for index, group in enumerate(groups) for p in group["params"]}
        found = []
        for p, name in self._names.items():
            index, mine = where.get(p), state.get(p)
            if index is not None and mine is not None and mine.keys() >= needed[index] and (size := own_size(p)):
                found.append((name, p, size, mine, index, groups[index]))
        steps = self._counters.guess([one[1] for one in found], [one[3]["step"] for one in found], self.step, copy)
        # Aida creates the state of a tensor even if it then skips the step: there is no stepsize yet
        return [Layer(*one, step) for one, step in zip(found, steps, strict=True) if step >= 1]

    def _record(
        self, layer: Layer, found: Statistics, hyper: Mapping[str, Any], scales: LayerScales | None
    ) -> LayerStepsizes:
        return LayerStepsizes(
            step=self.step,
            layer=layer.name,
            method=self._method,
            group=layer.group_index,
            shape=tuple(layer.param.shape),
            elements=layer.size,
            **found._asdict(),
            cosine=None if scales is None else scales.cosine,
            scale_m=None if scales is None else scales.of_m,
            scale_g=None if scales is None else scales.of_g,
            hyper=hyper,
        )


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


def _hyper_slots(group: Mapping[str, Any], copy: HostCopy) -> dict[str, Any]:
    """The group's hyper-parameters, with a slot in place of each tensor."""

    def slotted(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(map(slotted, value))
        return copy.add(value.reshape(1)) if isinstance(value, Tensor) else value

    return {key: slotted(value) for key, value in hyper_values(group)}


def _on_host(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_on_host, value))
    return value.value if isinstance(value, Slot) else value
