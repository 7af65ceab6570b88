"""No input ends in a crash: what a kernel cannot read takes another path, or is refused in words.

Cases that could corrupt memory run in a process of their own, so that a crash fails one test. Other files have the
rest: test_between_steps, test_changed_models, test_moved_state, test_replaced_parameters.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from aida import Aida
from aida.backends import library, tables
from aida.backends.reference import Reference
from paths import NATIVE_PATHS, Path, over_paths

SHAPES = ((5,), (3, 4), (70, 90))


def parameters(device: str = "cpu") -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]


def steps(
    optimizer: Aida, params: list[Any], count: int = 3, wrap: Callable[[Tensor], Tensor] = lambda grad: grad
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for p in params:
            p.grad = wrap(torch.randn(p.shape, generator=generator).to(p.device))
        optimizer.step()
    return [p.detach() for p in params]


def expected(count: int = 3, **values: Any) -> list[Tensor]:
    params = parameters()
    return steps(Aida(params, **values, foreach=False, fused=False), params, count)


# -- subclasses and modes --------------------------------------------------------------------------


@over_paths(NATIVE_PATHS)
def test_a_parameter_that_wraps_others_is_updated_through_torchs_operations(path: Path) -> None:
    params = [Parameter(TwoTensor(p.detach().clone(), p.detach().clone())) for p in parameters(path.device)]
    optimizer = path.make(params)
    found = steps(optimizer, params, wrap=lambda grad: TwoTensor(grad, grad.clone()))
    assert {type(backend) for backend in optimizer._backends.values()} == {Reference}
    for mine, judge in zip(found, expected(), strict=True):
        assert_close(mine.a.cpu(), judge)
        assert_close(mine.b.cpu(), judge)


@over_paths(NATIVE_PATHS)
def test_a_gradient_that_wraps_others_is_read_through_torchs_operations(path: Path) -> None:
    """After plain ones, which leave the kernels' tables behind."""
    params = parameters(path.device)
    optimizer = path.make(params)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for p in params:
            grad = torch.randn(p.shape, generator=generator).to(p.device)
            p.grad = torch.Tensor._make_subclass(Wrapped, grad) if step % 2 else grad
        optimizer.step()
    assert_close([p.detach().cpu() for p in params], expected(4))


class Wrapped(torch.Tensor):
    """A subclass that sees every operation, as torchao's and quantised tensors do."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.as_subclass(torch.Tensor) if isinstance(value, cls) else value

        with torch._C._DisableTorchDispatch():
            return func(*torch.utils._pytree.tree_map(plain, args), **torch.utils._pytree.tree_map(plain, kwargs or {}))


def test_a_gradient_whose_collective_is_under_way_is_waited_for() -> None:
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        params = parameters()
        reduced = lambda grad: funcol.all_reduce(grad, "sum", list(range(1)))  # noqa: E731
        under_way = reduced(torch.ones(2))
        assert type(under_way).__name__ == "AsyncCollectiveTensor"
        under_way.wait()
        assert_close(steps(Aida(params), params, wrap=reduced), expected())
    finally:
        dist.destroy_process_group()


@over_paths(NATIVE_PATHS)
def test_state_is_made_on_the_parameters_device_whatever_the_default_is(path: Path) -> None:
    params = parameters(path.device)
    optimizer = path.make(params, clip_norm=0.5)
    with torch.device("meta"):
        generator = torch.Generator("cpu").manual_seed(1)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator, device="cpu").to(p.device)
            optimizer.step()
    assert_close([p.detach().cpu() for p in params], expected(clip_norm=0.5))


@over_paths(NATIVE_PATHS)
def test_parameters_on_the_meta_device_are_stepped_without_values(path: Path) -> None:
    p = Parameter(torch.ones(3, 4, device="meta"))
    optimizer = Aida([p])
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer.state[p]["exp_avg"].is_meta


def test_fake_tensors_are_stepped_as_fake_tensors() -> None:
    with FakeTensorMode():
        p = Parameter(torch.ones(3, 4))
        optimizer = Aida([p])
        for _ in range(2):
            p.grad = torch.ones_like(p)
            optimizer.step()
        assert type(optimizer.state[p]["exp_avg"]).__name__ == "FakeTensor"


def test_real_parameters_in_a_fake_mode_are_refused_by_torch_and_stay_as_they_are() -> None:
    params = parameters()
    optimizer = Aida(params)
    steps(optimizer, params)
    before = [p.detach().clone() for p in params]
    with pytest.raises(Exception, match=r"[Ff]ake"), FakeTensorMode():
        optimizer.step()
    assert_close([p.detach() for p in params], before, rtol=0, atol=0)


def test_a_mode_that_counts_operations_sees_those_of_the_step() -> None:
    seen: list[str] = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    params = parameters()
    optimizer = Aida(params)
    steps(optimizer, params, 1)
    with Spy(), FlopCounterMode(display=False):
        optimizer.step()
    assert any("foreach" in name for name in seen)


# -- what a group may hold -------------------------------------------------------------------------


@over_paths(NATIVE_PATHS)
def test_lazy_modules_are_accepted_and_take_part_once_they_have_seen_their_input(path: Path) -> None:
    torch.manual_seed(0)
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.ReLU(), torch.nn.LazyLinear(2))
    optimizer = path.make(lazy.parameters())
    lazy.to(path.device)
    for _ in range(2):
        lazy(torch.ones(3, 5, device=path.device)).sum().backward()
        optimizer.step()
    assert all(int(optimizer.state[p]["step"]) == 2 for p in lazy.parameters())


@over_paths(NATIVE_PATHS)
def test_a_parameter_given_twice_is_updated_once(path: Path) -> None:
    once, twice = parameters(path.device), parameters(path.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = path.make([*twice, twice[1]])
    assert any("duplicate" in str(each.message) for each in caught)
    assert_close(steps(optimizer, twice), steps(path.make(once), once), rtol=0, atol=0)


@over_paths(NATIVE_PATHS)
def test_a_parameter_put_into_a_group_twice_is_refused(path: Path) -> None:
    params = parameters(path.device)
    optimizer = path.make(params)
    steps(optimizer, params, 1)
    optimizer.param_groups[0]["params"].append(params[0])
    with pytest.raises(ValueError, match="in the groups twice"):
        optimizer.step()


# -- threads ---------------------------------------------------------------------------------------


@over_paths(NATIVE_PATHS)
def test_several_threads_may_step_one_optimizer(path: Path) -> None:
    params = parameters(path.device)
    optimizer = path.make(params, clip_norm=1.0)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for step in range(20):
                for p in params:
                    p.grad = torch.full_like(p, 0.1 * step)
                optimizer.step()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(p.isfinite().all() for p in params)
    assert {int(optimizer.state[p]["step"]) for p in params} == {80}


def test_a_checkpoint_is_loaded_after_a_step_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters("cpu")
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = Aida(params)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    started, go = threading.Event(), threading.Event()
    update = optimizer._update

    def wait(*work: Any) -> None:
        started.set()
        go.wait(10)
        update(*work)

    monkeypatch.setattr(optimizer, "_update", wait)
    step = threading.Thread(target=optimizer.step)
    load = threading.Thread(target=optimizer.load_state_dict, args=(saved,))
    step.start()
    assert started.wait(10)
    load.start()
    load.join(0.2)
    assert load.is_alive()
    go.set()
    step.join()
    load.join()
    assert {int(optimizer.state[p]["step"]) for p in params} == {1}


# -- how tensors are read --------------------------------------------------------------------------


@pytest.mark.skipif(library.describer() is None, reason="the C library was not built, or torch is older than 2.10")
def test_tensors_are_read_alike_in_c_and_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change that one of the two sees, the other sees."""

    def look(change: Callable[[Tensor], None]) -> tuple[list[int], bool]:
        params = parameters()
        optimizer = Aida(params)
        steps(optimizer, params)
        assert optimizer._cache is not None
        table = optimizer._cache._shares[0].batch.table
        grads = [torch.ones_like(p) for p in params]
        change(params[1])
        same = table.look(grads)
        assert not same or list(table.addresses[:3]) == [p.data_ptr() for p in params]
        assert not same or list(table.addresses[3:6]) == [grad.data_ptr() for grad in grads]
        return [address == 0 for address in table.addresses], same

    def set_data(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
        def change(p: Tensor) -> None:
            p.data = make(p.data)

        return change

    changes = {
        "nothing": lambda p: None,
        "clone": set_data(Tensor.clone),
        "double": set_data(Tensor.double),
        "shorter": set_data(lambda data: data[:2]),
        "turned": set_data(lambda data: data.t().contiguous().t()),
        "reshaped": set_data(lambda data: data.reshape(4, 3)),
    }
    in_c = {name: look(change) for name, change in changes.items()}
    monkeypatch.setattr(tables, "describer", lambda: None)
    assert {name: look(change) for name, change in changes.items()} == in_c
    assert {name for name, (_, same) in in_c.items() if same} == {"nothing"}


CRASHES = {
    "a smaller view at the same address": "p.data = p.data[:2]",
    "state of another dtype": "s['exp_avg'].data = s['exp_avg'].data.half()",
    "shorter state": "s['exp_avg_var'].data = s['exp_avg_var'].data[:1]",
    "freed counters": "s['step'].data = s['step'].data.clone(); gc.collect()",
    "shared state": "[v.share_memory_() for v in s.values()]",
    "another gradient": "p.grad.data = p.grad.data[:1]",
    "a freed gradient": "p.grad = torch.zeros_like(p); p.grad.untyped_storage().resize_(0)",
    "a freed parameter": "p.untyped_storage().resize_(0)",
    "a parameter's memory cut short": "p.untyped_storage().resize_(64)",
    "state's memory cut short": "s['exp_avg_var'].untyped_storage().resize_(64)",
}


#: The same with 8-bit state and Kahan sums.
LOW_CRASHES = {
    "shorter codes": "s['exp_avg_codes'].data = s['exp_avg_codes'].data[:1]",
    "fewer scales": "s['exp_avg_std_scales'].data = s['exp_avg_std_scales'].data.flatten()[:2]",
    "expanded scales": "v = s['exp_avg_scales']; v.data = v.data.flatten()[:1].clone().expand(v.shape)",
    "expanded codes": "v = s['exp_avg_std_codes']; v.data = v.data.flatten()[:1].clone().expand(v.shape)",
    "scales' memory cut short": "s['exp_avg_scales'].untyped_storage().resize_(64)",
    "a freed compensation": "s['compensation'].untyped_storage().resize_(0)",
    "a compensation of another dtype": "s['compensation'].data = s['compensation'].data.float()",
    "codes of another dtype": "s['exp_avg_codes'].data = s['exp_avg_codes'].data.float()",
    "shared low-precision state": "[v.share_memory_() for v in s.values()]",
}


@pytest.mark.parametrize("change", CRASHES.values(), ids=CRASHES)
def test_the_process_survives(change: str) -> None:
    survives("", "float32", [change])


def test_the_process_survives_with_low_precision_state() -> None:
    survives("state_precision='fp8', kahan_sum=True", "bfloat16", list(LOW_CRASHES.values()))


def survives(values: str, dtype: str, changes: list[str]) -> None:
    program = f"""
import gc, torch
from aida import Aida
for change in {changes!r}:
    p = torch.nn.Parameter(torch.randn(300, 400, dtype=torch.{dtype}))
    o = Aida([p], {values})
    for _ in range(3):
        p.grad = torch.randn_like(p)
        o.step()
    s = o.state[p]
    exec(change)
    junk = [torch.ones(300, 400) for _ in range(8)]
    for _ in range(20):
        try:
            o.step()
        except (RuntimeError, TypeError) as error:
            print(type(error).__name__)
    assert all((j == 1).all() for j in junk), "memory of others was written to"
print("alive")
"""
    environment = {**os.environ, "MALLOC_PERTURB_": "165", "MALLOC_CHECK_": "3"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("alive\n")
