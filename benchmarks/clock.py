"""How a step is timed: on a CPU, on a GPU from Python, and replayed from a CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter, process_time

import torch
from torch import Tensor
from torch.nn import Parameter

from results import Workload
from rivals import CLIP_NORM, Rival
from shapes import Shapes

#: Two gradients for every parameter. Steps alternate between them, so that gradients lie elsewhere
#: at every step, as after a backward pass into fresh memory, and nobody pays for the allocation.
GradientSets = tuple[list[Tensor], list[Tensor]]

#: Turns a tensor into what the optimizer gets, for example a DTensor.
Place = Callable[[Tensor], Tensor]

WARMUP_STEPS = 3


class Subject:
    """A rival with parameters of its own, ready to step."""

    def __init__(
        self, rival: Rival, workload: Workload, gradients: GradientSets, capturable: bool, place: Place
    ) -> None:
        self._rival = rival
        self._steps = 0
        device = gradients[0][0].device
        dtype = rival.dtype
        self.params = [
            Parameter(place(torch.full(shape, 0.1, device=device, dtype=dtype))) for shape in workload.shapes
        ]
        # every group has an lr of its own, so that nobody can treat many groups as one
        count = workload.groups
        groups = [{"params": self.params[i::count], "lr": 1e-3 * (1 + i / count)} for i in range(count)]
        self.optimizer = rival.build(groups, capturable)
        # clipping in place would leave the others with shorter gradients
        if rival.clip_gradients or dtype != torch.float32:
            gradients = tuple([g.to(dtype, copy=True) for g in one] for one in gradients)  # type: ignore[assignment]
        self._gradients = gradients

    def assign(self, index: int) -> None:
        for p, grad in zip(self.params, self._gradients[index % 2], strict=True):
            p.grad = grad

    def step(self) -> None:
        if self._rival.changes_lr:
            self._steps += 1
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-3 / self._steps
        if self._rival.clip_gradients:
            torch.nn.utils.clip_grad_norm_(self.params, CLIP_NORM)
        self.optimizer.step()

    def warm_up(self) -> None:
        """Make the state, compile what compiles, and see that the step took the path its row names."""
        for index in range(WARMUP_STEPS):
            self.assign(index)
            self.step()
        if self._rival.path is not None:
            taken = {route.kind for route in self.optimizer._backends}  # type: ignore[attr-defined]
            if taken != {self._rival.path}:
                raise RuntimeError(f"took the path {', '.join(sorted(taken))}, not {self._rival.path}")


def unplaced(tensor: Tensor) -> Tensor:
    return tensor


def make_gradients(shapes: Shapes, device: torch.device, place: Place = unplaced) -> GradientSets:
    generator = torch.Generator(device).manual_seed(0)

    def one() -> list[Tensor]:
        return [place(torch.randn(shape, device=device, generator=generator).mul_(0.01)) for shape in shapes]

    return one(), one()


# -- one sample: milliseconds a step -----------------------------------------------------------------


def cpu_sample(subject: Subject, index: int) -> float:
    subject.assign(index)
    start = perf_counter()
    subject.step()
    return (perf_counter() - start) * 1e3


def host_sample(subject: Subject, steps: int) -> float:
    """Time that the host spends on a step. Waiting for the GPU, or on a CPU for other ranks, is not included."""
    cuda = subject.params[0].is_cuda
    clock, total = perf_counter if cuda else process_time, 0.0
    for index in range(steps):
        subject.assign(index)
        if cuda:
            torch.cuda.synchronize()
        start = clock()
        subject.step()
        total += clock() - start
    return total * 1e3 / steps


def eager_sample(subject: Subject, steps: int) -> float:
    """Wall time of a step on an idle GPU until its result is there; assigning the gradients not included."""
    total = 0.0
    for index in range(steps):
        subject.assign(index)
        torch.cuda.synchronize()
        start = perf_counter()
        subject.step()
        torch.cuda.synchronize()
        total += perf_counter() - start
    return total * 1e3 / steps


def queued_sample(subject: Subject, steps: int) -> float:
    """Wall time a step when steps are queued without waiting: the larger of the host's and the GPU's part.

    The assignment of gradients is included, because it cannot be taken out; :func:`assignment_sample`
    tells how much it is.
    """
    torch.cuda.synchronize()
    start = perf_counter()
    for index in range(steps):
        subject.assign(index)
        subject.step()
    torch.cuda.synchronize()
    return (perf_counter() - start) * 1e3 / steps


def assignment_sample(subject: Subject, steps: int) -> float:
    """The part of :func:`queued_sample` that is not the optimizer's, the same for all."""
    start = perf_counter()
    for index in range(steps):
        subject.assign(index)
    return (perf_counter() - start) * 1e3 / steps


def graph_sample(graph: torch.cuda.CUDAGraph, steps: int) -> float:
    """Device time of some replays."""
    begin, end = _events()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(steps):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / steps


def capture(subject: Subject) -> torch.cuda.CUDAGraph:
    """One step as a CUDA graph. Its addresses are fixed, so it has one set of gradients."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # torch asks for warm-up steps outside the default stream
        subject.warm_up()
        subject.assign(0)
        subject.step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        subject.step()
    return graph


def steps_in(window_seconds: float, sample: Callable[[int], float], at_most: int) -> int:
    """How many steps fill the window: a slow optimizer must not eat the time of the fast ones."""
    sample(1)
    milliseconds = sample(2)
    return max(2, min(at_most, int(window_seconds * 1e3 / max(milliseconds, 1e-3))))


# -- memory ------------------------------------------------------------------------------------------


def peak_temporary(subject: Subject) -> int:
    """Bytes a step on a GPU holds beyond what lives before it."""
    subject.assign(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    subject.step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a plain copy of a large tensor reads and writes."""
    size = (1 << 31) if device.type == "cuda" else (1 << 28)
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    rates = []
    for _ in range(9):
        if device.type == "cuda":
            begin, end = _events()
            begin.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            seconds = float(begin.elapsed_time(end)) / 1e3
        else:
            start = perf_counter()
            target.copy_(source)
            seconds = perf_counter() - start
        rates.append(2 * size / seconds)
    return statistics.median(rates[2:])  # the first ones touch fresh memory


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, return-value]
