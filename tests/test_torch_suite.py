"""What torch checks of AdamW's update, checked of Aida's in torch's own test classes.

State, checkpoints and hooks are in test_torch_suite_state.py; mixed precision, capture, memory and
autograd through a step in test_torch_suite_modes.py.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Parameter, Sequential, Sigmoid
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.testing import assert_close
from torch.testing._internal.common_device_type import instantiate_device_type_tests, onlyCPU, onlyCUDA
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optims
from torch.testing._internal.common_utils import TestCase, parametrize

from aida import Aida
from torch_info import AIDA, IMPLEMENTATIONS, Kwargs, Regression, all_kwargs, flags_or_skip, mark_gpu

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def train(problem: Regression, optimizer: Aida, schedulers: Any = (), steps: int = 20) -> None:
    for _ in range(steps):
        loss = problem.backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step(*([loss.detach()] if isinstance(scheduler, ReduceLROnPlateau) else []))


def assert_right_direction(before: Tensor, after: Tensor, kwargs: Kwargs, name: str) -> None:
    rose = after.item() > before.item()
    assert rose == kwargs.get("maximize", False), f"{name}: {before.item()} became {after.item()}"


def assert_same_state(a: Aida, p: Tensor, b: Aida, q: Tensor, **tolerance: float) -> None:
    assert a.state[p].keys() == b.state[q].keys()
    for key in a.state[p]:
        assert_close(a.state[p][key], b.state[q][key], msg=lambda text, key=key: f"{key}: {text}", **tolerance)


class TestAidaUpdate(TestCase):
    # Not here: torch's Rosenbrock checks, which are for optimizers that take sparse gradients. A projection needs
    # every element of its layer, so Aida refuses those (one of the bad inputs). Nor the checks over two GPUs.

    @onlyCPU
    @optims([AIDA])
    def test_inputs_leave_the_choice_of_a_path_to_the_tests(self, device, dtype, optim_info):
        for one in optim_info.optim_inputs_func(device=device):
            assert not {"foreach", "fused", "differentiable"} & set(one.kwargs), one.desc

    @optims([AIDA])
    def test_every_bad_input_raises_its_class_and_words(self, device, dtype, optim_info):
        for bad in optim_info.optim_error_inputs_func(device=device, dtype=dtype):
            one = bad.optimizer_error_input
            expect = pytest.warns if issubclass(bad.error_type, Warning) else pytest.raises
            if bad.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR:
                with expect(bad.error_type, match=bad.error_regex):
                    Aida(one.params, **one.kwargs)
            else:
                optimizer = Aida(one.params, **one.kwargs)
                with expect(bad.error_type, match=bad.error_regex):
                    optimizer.step()

    @parametrize("implementation", list(IMPLEMENTATIONS))
    @parametrize("contiguous", [True, False])
    @parametrize("scheduled", [True, False])
    @optims([AIDA])
    def test_goes_in_the_right_direction(self, device, dtype, optim_info, implementation, contiguous, scheduled):
        flags = flags_or_skip(implementation, device)
        for makers in optim_info.scheduler_inputs if scheduled else ([],):
            for one in optim_info.optim_inputs_func(device=device):
                problem = Regression(device, contiguous=contiguous)
                before = problem.loss()
                optimizer = Aida(problem.params, **one.kwargs, **flags)
                train(problem, optimizer, [make(optimizer) for make in makers])
                assert_right_direction(before, problem.loss(), one.kwargs, one.desc)

    @optims([AIDA])
    def test_groups_under_schedulers_go_in_the_right_direction(self, device, dtype, optim_info):
        for makers in optim_info.scheduler_inputs:
            problem = Regression(device)
            before = problem.loss()
            optimizer = Aida([{"params": [problem.weight]}, {"params": [problem.bias], "lr": 0.01}])
            train(problem, optimizer, [make(optimizer) for make in makers])
            assert_right_direction(before, problem.loss(), {}, "two groups")

    @optims([AIDA])
    def test_groups_equal_an_optimizer_each(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device):
            kwargs["clip_norm"] = None  # the norm is over all groups, and ties them together on purpose
            plain = {**deepcopy(kwargs), "weight_decay": 0.0}
            together = Regression(device)
            apart, before = together.copy(), together.loss()
            both = Aida([{"params": [together.weight], **kwargs}, {"params": [together.bias], **plain}])
            each = [Aida([apart.weight], **deepcopy(kwargs)), Aida([apart.bias], **deepcopy(plain))]
            for _ in range(20):
                together.backward()
                both.step()
                apart.backward()
                for optimizer in each:
                    optimizer.step()
            assert_close(together.params, apart.params, rtol=0, atol=0, msg=name)
            assert_right_direction(before, together.loss(), kwargs, name)

    @optims([AIDA])
    def test_lr_of_one_group_leaves_the_other_alone(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device):
            problem = Regression(device)
            still = Parameter(torch.randn(2, device=device))
            expected, before = still.detach().clone(), problem.loss()
            moving = {"lr": 1e-3, **kwargs, "params": problem.params}
            optimizer = Aida([moving, {"params": [still]}], lr=1e-28)
            for _ in range(20):
                problem.backward()
                still.grad = torch.rand_like(still)
                optimizer.step()
            assert_right_direction(before, problem.loss(), kwargs, name)
            assert_close(still.detach(), expected, rtol=0, atol=0, msg=name)

    @parametrize("change", ["never", "in_place", "by_scheduler"])
    @parametrize("dims", [0, 1, 2])
    @optims([AIDA])
    def test_tensor_lr_equals_float_lr(self, device, dtype, optim_info, change, dims):
        if change == "by_scheduler" and dims and torch.__version__.startswith("2.6."):
            self.skipTest("torch 2.6's schedulers take an lr of no dimensions alone")
        for name, kwargs in all_kwargs(device):
            if kwargs["foreach"] and not kwargs.get("capturable", False):
                continue  # refused, as AdamW refuses it: a bad input above
            problems = [Regression(device)]
            problems.append(problems[0].copy())
            kwargs["lr"] = 0.01
            by_float = Aida(problems[0].params, **kwargs)
            # beside the parameters or on the host
            lr = torch.tensor(0.01, device="cpu" if dims == 1 else device).reshape([1] * dims)
            by_tensor = Aida(problems[1].params, **{**kwargs, "lr": lr})
            schedulers = [ExponentialLR(o, gamma=0.5) for o in (by_float, by_tensor) if change == "by_scheduler"]
            for _ in range(5):
                for problem, optimizer in zip(problems, (by_float, by_tensor), strict=True):
                    problem.backward()
                    optimizer.step()
                if change == "in_place":
                    by_float.param_groups[0]["lr"] *= 0.5
                    by_tensor.param_groups[0]["lr"].mul_(0.5)
                for scheduler in schedulers:
                    scheduler.step()
            assert isinstance(by_tensor.param_groups[0]["lr"], Tensor), name
            expected_lr = 0.01 if change == "never" else 0.01 * 0.5**5
            assert float(by_tensor.param_groups[0]["lr"]) == pytest.approx(expected_lr), name
            assert_close(problems[0].params, problems[1].params, msg=name)

    @optims([AIDA])
    def test_tensor_betas_equal_float_betas(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device):
            if kwargs["foreach"] and not kwargs.get("capturable", False):
                continue  # refused, as for lr
            problem = Regression(device)
            twin = problem.copy()
            kwargs["betas"] = (0.8, 0.95)
            # of any shape, as long as there is one element
            betas = (torch.tensor([[0.8]], device=device), torch.tensor(0.95, device=device))
            train(problem, Aida(problem.params, **kwargs), steps=5)
            train(twin, Aida(twin.params, **{**kwargs, "betas": betas}), steps=5)
            assert_close(problem.params, twin.params, msg=name)

    @optims([AIDA], dtypes=[torch.float64])
    def test_foreach_matches_forloop(self, device, dtype, optim_info):
        compare_with_forloop(device, dtype, IMPLEMENTATIONS["foreach"])

    @optims([AIDA], dtypes=FLOATS)
    def test_fused_matches_forloop(self, device, dtype, optim_info):
        compare_with_forloop(device, dtype, flags_or_skip("fused", device))

    @onlyCUDA
    @parametrize("implementation", list(IMPLEMENTATIONS))
    @optims([AIDA], dtypes=FLOATS)
    def test_host_matches_device(self, device, dtype, optim_info, implementation):
        for place in ("cpu", device):
            flags = flags_or_skip(implementation, place)
        for one in optim_info.optim_inputs_func(device="cpu", dtype=dtype):
            runs = []
            for place in ("cpu", device):
                params = awkward_params("cpu", dtype)
                params = [Parameter(p.detach().to(place)) for p in params]
                optimizer = Aida(params, **deepcopy(one.kwargs), **flags)
                for step in range(5):
                    torch.manual_seed(step)
                    for p, grad in zip(params, awkward_grads(awkward_params("cpu", dtype)), strict=True):
                        p.grad = grad.to(place)
                    optimizer.step()
                runs.append([p.detach().cpu() for p in params])
            assert_close(runs[0], runs[1], msg=lambda text, one=one: f"{one.desc}: {text}")

    @parametrize("implementation", ["foreach", "fused"])
    @optims([AIDA])
    def test_mixed_dtypes_match_forloop(self, device, dtype, optim_info, implementation):
        flags = flags_or_skip(implementation, device)
        dtypes = (*FLOATS, torch.complex64, torch.complex128)
        for one in optim_info.optim_inputs_func(device=device):
            starts = [torch.randn(2, 3, device=device, dtype=kind) for kind in dtypes * 2]
            grads = [torch.randn_like(start) for start in starts]
            params, optimizers = [], []
            for choice in (IMPLEMENTATIONS["forloop"], flags):
                params.append([Parameter(start.clone()) for start in starts])
                optimizers.append(Aida(params[-1], **deepcopy(one.kwargs), **choice))
                for _ in range(7):
                    for p, grad in zip(params[-1], grads, strict=True):
                        p.grad = grad.clone()
                    optimizers[-1].step()
            for p, q in zip(*params, strict=True):
                assert_close(p, q, msg=lambda text, one=one: f"{one.desc}: {text}")
                # seven steps of float32 sums in another order; one operation is good to 1.3e-6
                assert_same_state(optimizers[0], p, optimizers[1], q, rtol=1e-5, atol=1e-8)

    @parametrize("implementation", list(IMPLEMENTATIONS))
    @parametrize("default", [torch.float64, torch.float16])
    @optims([AIDA])
    def test_default_dtype_changes_nothing(self, device, dtype, optim_info, implementation, default):
        flags = flags_or_skip(implementation, device)
        problem = Regression(device)
        twin = problem.copy()
        optimizers = [Aida(problem.params, **flags), Aida(twin.params, **flags)]
        train(problem, optimizers[0], steps=5)
        previous = torch.get_default_dtype()
        try:
            torch.set_default_dtype(default)
            train(twin, optimizers[1], steps=5)
        finally:
            torch.set_default_dtype(previous)
        assert_close(problem.params, twin.params, rtol=0, atol=0)
        # torch makes step float64 under a float64 default; Aida's kernels read float32, which counts to 16 million
        for p, q in zip(problem.params, twin.params, strict=True):
            assert_same_state(optimizers[0], p, optimizers[1], q, rtol=0, atol=0)

    @optims([AIDA])
    def test_step_without_gradients_changes_nothing(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device, differentiable=True):
            frozen = [torch.randn(2, 3, device=device) for _ in range(2)]
            expected = [p.clone() for p in frozen]
            optimizer = Aida(frozen, **kwargs)
            assert optimizer.step(lambda: torch.tensor(1.0)).item() == 1.0, name
            assert_close(frozen, expected, rtol=0, atol=0, msg=name)
            assert not optimizer.state, name

    @optims([AIDA])
    def test_step_after_zero_grad_changes_nothing(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device):
            problem = Regression(device)
            optimizer = Aida(problem.params, **kwargs)
            train(problem, optimizer, steps=2)
            expected = deepcopy((problem.params, optimizer.state_dict()))
            optimizer.zero_grad(set_to_none=True)
            optimizer.step()
            assert_close(
                (problem.params, optimizer.state_dict()["state"]), (expected[0], expected[1]["state"]), msg=name
            )

    @optims([AIDA])
    def test_zero_gradients_move_nothing(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device, differentiable=True):
            if kwargs.get("weight_decay", 0) != 0:
                continue  # decay moves a weight without any gradient
            start = torch.randn(5, 1, device=device)
            p = start.clone().requires_grad_(not kwargs.get("differentiable", False))
            p.grad = torch.zeros_like(p)
            Aida([p], **kwargs).step()
            assert_close(p.detach(), start, rtol=0, atol=0, msg=name)

    @optims([AIDA], dtypes=[torch.complex64])
    def test_complex_equals_its_view_as_real(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device):
            starts = [torch.randn(10, 5, device=device, dtype=dtype), torch.randn(10, device=device, dtype=dtype)]
            starts.append(torch.randn(10, 5, device=device))  # one of them real: they may be mixed
            real = [torch.view_as_real(t).clone() if t.is_complex() else t.clone() for t in starts]
            params = [Parameter(t) for t in (*starts, *real)]
            complex_optimizer, real_optimizer = Aida(params[:3], **kwargs), Aida(params[3:], **deepcopy(kwargs))
            for _ in range(3):
                for p, q in zip(params[:3], params[3:], strict=True):
                    p.grad = torch.randn_like(p)
                    q.grad = torch.view_as_real(p.grad).clone() if p.is_complex() else p.grad.clone()
                complex_optimizer.step()
                real_optimizer.step()
                for p, q in zip(params[:3], params[3:], strict=True):
                    assert_close(torch.view_as_real(p) if p.is_complex() else p, q, rtol=0, atol=0, msg=name)

    @optims([AIDA], dtypes=[torch.complex64])
    def test_complex_equals_its_parts_where_nothing_is_projected(self, device, dtype, optim_info):
        # torch compares one complex tensor with its real and imaginary parts as two parameters. A layer is
        # one tensor, so two parameters are two layers, whose projections are others: that holds for
        # projections=0 alone, where every element is on its own.
        for name, kwargs in all_kwargs(device):
            kwargs["projections"] = 0
            kwargs["clip_norm"] = None  # sums in another order would be a bit apart
            whole = Parameter(torch.randn(2, 3, device=device, dtype=dtype))
            parts = [Parameter(part.detach().clone()) for part in (whole.real, whole.imag)]
            optimizers = [Aida([whole], **kwargs), Aida(parts, **deepcopy(kwargs))]
            for _ in range(3):
                whole.grad = torch.randn_like(whole)
                for part, grad in zip(parts, (whole.grad.real, whole.grad.imag), strict=True):
                    part.grad = grad.clone()
                for optimizer in optimizers:
                    optimizer.step()
                assert_close([whole.real, whole.imag], [part.detach() for part in parts], msg=name)


def awkward_params(device: str, dtype: torch.dtype) -> list[Parameter]:
    """Zero-dimensional, empty, with gaps, transposed, channels-last: the same values at every call."""
    torch.manual_seed(2)
    images = torch.rand(2, 3, 4, 4, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    shapes = [torch.rand(shape, device=device, dtype=dtype) for shape in ((), (0, 3), (4, 6), (3, 5))]
    return [Parameter(t) for t in (shapes[0], shapes[1], shapes[2][:, ::2], shapes[3].t(), images)]


def awkward_grads(params: list[Parameter]) -> list[Tensor]:
    """New gradients; the last but one is one number expanded, as the backward of a sum leaves it."""
    grads = [torch.rand(p.shape, device=p.device, dtype=p.dtype) for p in params]
    grads[-2] = grads[-2].reshape(-1)[0].expand(params[-2].shape)
    return grads


def compare_with_forloop(device: str, dtype: torch.dtype, flags: Kwargs) -> None:
    """Two nets in lock-step: a step without gradients, a layer frozen for two, and the awkward parameters."""
    for one in AIDA.optim_inputs_func(device=device, dtype=dtype):
        nets, params, optimizers = [], [], []
        for choice in (IMPLEMENTATIONS["forloop"], flags):
            torch.manual_seed(1)
            nets.append(Sequential(Linear(2, 3), Sigmoid(), Linear(3, 1), Sigmoid()).to(device, dtype))
            params.append([*nets[-1].parameters(), *awkward_params(device, dtype)])
            optimizers.append(Aida(params[-1], **deepcopy(one.kwargs), **choice))
        x = torch.arange(1, 7, device=device, dtype=dtype).reshape(3, 2) / 10
        for step in range(7):
            grads = awkward_grads(params[0][4:])
            for net, mine, optimizer in zip(nets, params, optimizers, strict=True):
                optimizer.zero_grad()
                net[2].requires_grad_(step not in (3, 4))
                if step != 2:
                    net(x).sum().backward()
                    for p, grad in zip(mine[4:], grads, strict=True):
                        p.grad = grad
                optimizer.step()
            for p, q in zip(*params, strict=True):
                assert_close(p, q, msg=lambda text, one=one: f"{one.desc}: {text}")
                assert_same_state(optimizers[0], p, optimizers[1], q)
                with torch.no_grad():  # a difference in the last place must not grow
                    q.copy_(p)
                    for key, value in optimizers[0].state[p].items():
                        optimizers[1].state[q][key].copy_(value)


instantiate_device_type_tests(TestAidaUpdate, globals(), only_for=("cpu", "cuda"))
mark_gpu(globals())
