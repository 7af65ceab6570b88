"""What torch checks of AdamW's state, checkpoints and copies, checked of Aida's."""

from __future__ import annotations

import io
import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Conv2d, GroupNorm, Module, Parameter, Sequential
from torch.optim import Optimizer
from torch.testing import assert_close
from torch.testing._internal.common_device_type import instantiate_device_type_tests, onlyCUDA
from torch.testing._internal.common_optimizers import optims
from torch.testing._internal.common_utils import TestCase, parametrize

from aida import Aida
from torch_info import AIDA, Regression, all_kwargs, mark_gpu

STATE_DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.complex64: torch.complex64,
}


def take_steps(problem: Regression, optimizer: Aida, steps: int = 3) -> None:
    for _ in range(steps):
        problem.backward()
        optimizer.step()


def named(problem: Regression, with_names: bool) -> list[Any]:
    params = problem.params
    return [(f"layer.{i}", p) for i, p in enumerate(params)] if with_names else list(params)


def without_names(state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def net(device: str) -> Module:
    torch.manual_seed(1)
    return Sequential(Conv2d(4, 2, 1, stride=2), GroupNorm(1, 2)).to(device)


def net_step(model: Module, optimizer: Optimizer, device: str) -> None:
    optimizer.zero_grad()
    x = torch.linspace(-1, 1, 4 * 16 * 16, device=device).reshape(1, 4, 16, 16)
    model(x).pow(3).sum().backward()
    optimizer.step()


def stepped(device: str, **kwargs: Any) -> tuple[Tensor, Aida]:
    p = Parameter(torch.randn(2, 3, device=device))
    p.grad = torch.randn_like(p)
    optimizer = Aida([p], **kwargs)
    optimizer.step()
    return p, optimizer


class TestAidaState(TestCase):
    @optims([AIDA], dtypes=list(STATE_DTYPES))
    def test_a_step_leaves_state_of_the_right_kind(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device):
            p = Parameter(torch.randn(3, 5, device=device, dtype=dtype).t())
            p.grad = torch.randn_like(p)
            optimizer = Aida([p], **kwargs)
            assert len(optimizer.state) == 0, name
            optimizer.step()
            state = optimizer.state[p]
            assert set(state) == {"step", "exp_avg", "exp_avg_var", "skipped"}, name
            for key in ("exp_avg", "exp_avg_var"):
                moment = state[key]
                assert (moment.dtype, moment.shape, moment.stride()) == (STATE_DTYPES[dtype], p.shape, p.stride()), name
                assert torch.isfinite(torch.view_as_real(moment) if moment.is_complex() else moment).all(), name
            # torch keeps step on the host unless capturable: there the host decides about a step, here the device
            assert all(value.device == p.device for value in state.values()), name
            assert (state["step"].item(), state["step"].shape, state["step"].dtype) == (1, (), torch.float32), name

    @optims([AIDA])
    def test_optimizer_prints_its_values(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device, differentiable=True):
            text = repr(Aida([torch.randn(2, device=device)], **kwargs))
            assert text.startswith("Aida ("), name
            for key in kwargs:
                assert f"{key}: " in text, name

    @parametrize("names_before", [True, False])
    @parametrize("names_after", [True, False])
    @optims([AIDA])
    def test_loaded_twin_stays_equal(self, device, dtype, optim_info, names_before, names_after):
        for name, kwargs in all_kwargs(device):
            problem = Regression(device)
            optimizer = Aida(named(problem, names_before), **kwargs)
            take_steps(problem, optimizer)
            twin = problem.copy()
            other = Aida(named(twin, names_after), **deepcopy(kwargs))
            saved = optimizer.state_dict()
            before = deepcopy(saved)
            other.load_state_dict(saved)
            self.assertEqual(saved, before, msg=f"{name}: loading changed the checkpoint")  # noqa: PT009
            for _ in range(3):
                take_steps(problem, optimizer, 1)
                take_steps(twin, other, 1)
                assert_close(problem.params, twin.params, rtol=0, atol=0, msg=name)
            self.assertEqual(without_names(other.state_dict()), without_names(optimizer.state_dict()))  # noqa: PT009
            # a parameter that occurs twice is packed under the number of its first occurrence
            other.param_groups.extend(other.param_groups)
            groups = other.state_dict()["param_groups"]
            assert groups[0]["params"] == groups[-1]["params"] == [0, 1], name

    @optims([AIDA])
    def test_older_checkpoints_load(self, device, dtype, optim_info):
        newer = (*optim_info.not_og_supported_flags, "xi", "decoupled_weight_decay", "clip_norm", "nonfinite")
        for name, kwargs in all_kwargs(device):
            model = net(device)
            optimizer = Aida(model.parameters(), **kwargs)
            net_step(model, optimizer, device)
            old = deepcopy(optimizer.state_dict())
            for group in old["param_groups"]:
                for key in newer:
                    del group[key]
            for state in old["state"].values():
                del state["skipped"]
            optimizer.load_state_dict(old)
            net_step(model, optimizer, device)
            assert all(state["step"].item() == 2 for state in optimizer.state.values()), name
            assert optimizer.param_groups[0]["nonfinite"] == "skip", name

    @parametrize("names_before", [True, False])
    @parametrize("names_after", [True, False])
    @optims([AIDA])
    def test_names_survive_a_checkpoint(self, device, dtype, optim_info, names_before, names_after):
        for name, kwargs in all_kwargs(device):
            model = net(device)
            given = [model.named_parameters() if has else model.parameters() for has in (names_before, names_after)]
            optimizer = Aida(given[0], **kwargs)
            net_step(model, optimizer, device)
            other = Aida(given[1], **deepcopy(kwargs))
            other.load_state_dict(deepcopy(optimizer.state_dict()))
            net_step(model, other, device)
            if names_before or names_after:
                expected = ["0.weight", "0.bias", "1.weight", "1.bias"]
                assert other.state_dict()["param_groups"][0]["param_names"] == expected, name

    @optims([AIDA])
    def test_checkpoint_of_other_group_sizes_is_refused(self, device, dtype, optim_info):
        _, optimizer = stepped(device)
        other = Aida([torch.randn(2, 3, device=device), torch.randn(2, device=device)])
        with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
            other.load_state_dict(optimizer.state_dict())

    @parametrize("with_names", [True, False])
    @optims([AIDA])
    def test_checkpoint_survives_a_file(self, device, dtype, optim_info, with_names):
        for name, kwargs in all_kwargs(device):
            problem = Regression(device)
            optimizer = Aida(named(problem, with_names), **kwargs)
            take_steps(problem, optimizer)
            for weights_only in (True, False):
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                file.seek(0)
                loaded = torch.load(file, weights_only=weights_only)
                self.assertEqual(loaded, optimizer.state_dict(), rtol=0, atol=0, msg=name)  # noqa: PT009

    @optims([AIDA])
    def test_step_that_is_a_plain_number_loads(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device):
            problem = Regression(device)
            optimizer = Aida(problem.params, **kwargs)
            take_steps(problem, optimizer)
            saved = deepcopy(optimizer.state_dict())
            for state in saved["state"].values():
                state["step"] = state["step"].item()
            optimizer.load_state_dict(saved)
            take_steps(problem, optimizer, 1)
            assert [state["step"].item() for state in optimizer.state.values()] == [4, 4], name

    @parametrize("saved_as", [torch.float64, torch.float32, torch.bfloat16])
    @optims([AIDA], dtypes=[torch.float64, torch.float32, torch.bfloat16])
    def test_state_loads_into_parameters_of_another_dtype(self, device, dtype, optim_info, saved_as):
        source = Parameter(torch.randn(4, device=device, dtype=saved_as))
        source.grad = torch.randn_like(source)
        optimizer = Aida([source])
        optimizer.step()
        target = Parameter(source.detach().to(dtype))
        other = Aida([target])
        other.load_state_dict(optimizer.state_dict())
        for key in ("exp_avg", "exp_avg_var"):
            expected = optimizer.state[source][key].to(STATE_DTYPES[dtype])
            assert_close(other.state[target][key], expected, rtol=0, atol=0)
        target.grad = torch.randn_like(target)
        other.step()
        assert other.state[target]["step"].item() == 2

    @onlyCUDA
    @parametrize("captured", [False, True])
    @optims([AIDA])
    def test_host_checkpoint_continues_on_the_device(self, device, dtype, optim_info, captured):
        # where torch.load(map_location="cpu") leaves a fused or captured optimizer's checkpoint. torch checks
        # that step stays on the host here; Aida keeps it beside its parameter, see above
        for name, kwargs in all_kwargs("cpu"):
            if kwargs["fused"] and "cuda" not in optim_info.supports_fused_on:
                continue
            problem = Regression("cpu")
            optimizer = Aida(problem.params, **kwargs)
            take_steps(problem, optimizer)
            saved = deepcopy(optimizer.state_dict())
            saved["param_groups"][0]["capturable"] = captured
            on_device = [Parameter(p.detach().to(device)) for p in problem.params]
            other = Aida(on_device, **{**deepcopy(kwargs), "capturable": captured})
            other.load_state_dict(saved)
            assert all(value.is_cuda for state in other.state.values() for value in state.values()), name
            for _ in range(3):
                for p, q in zip(problem.params, on_device, strict=True):
                    p.grad = torch.randn_like(p)
                    q.grad = p.grad.to(device)
                optimizer.step()
                other.step()
            assert_close([p.cpu() for p in on_device], problem.params, msg=name)

    @optims([AIDA])
    def test_deepcopy_keeps_every_public_attribute(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device):
            problem = Regression(device)
            optimizer = Aida(problem.params, **kwargs)
            take_steps(problem, optimizer)
            copies = [deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
            public = {key for key in vars(optimizer) if not key.startswith("_")}
            for copy in copies:
                assert {key for key in vars(copy) if not key.startswith("_")} == public, name
                params = [p for group in copy.param_groups for p in group["params"]]
                for p, q in zip(problem.params, params, strict=True):
                    assert q is not p, name
                    q.grad = p.grad.clone()
                copy.step()
            optimizer.step()
            for copy in copies:
                assert_close([p for group in copy.param_groups for p in group["params"]], problem.params, msg=name)

    @optims([AIDA])
    def test_closure_runs_once_with_gradients_enabled(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device):
            problem = Regression(device)
            twin = problem.copy()
            calls: list[bool] = []

            def closure(problem: Regression = problem, calls: list[bool] = calls) -> Tensor:
                calls.append(torch.is_grad_enabled())
                return problem.backward()

            optimizer = Aida(problem.params, **kwargs)
            with torch.no_grad():
                loss = optimizer.step(closure)
            assert calls == [True], name
            assert_close(loss, twin.loss(), msg=name)
            take_steps(twin, Aida(twin.params, **deepcopy(kwargs)), 1)
            assert_close(problem.params, twin.params, rtol=0, atol=0, msg=name)

    @optims([AIDA])
    def test_group_added_after_steps_starts_its_own_count(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device):
            kwargs["clip_norm"] = None  # it would tie the two groups together
            problem = Regression(device)
            twin = problem.copy()
            optimizer = Aida([problem.weight], **kwargs)
            take_steps(problem, optimizer)
            optimizer.add_param_group({"params": [problem.bias], "lr": 0.1})
            take_steps(problem, optimizer, 2)
            assert [optimizer.state[p]["step"].item() for p in problem.params] == [5, 2], name
            early = Aida([twin.weight], **deepcopy(kwargs))
            take_steps(twin, early)
            late = Aida([twin.bias], **{**deepcopy(kwargs), "lr": 0.1})
            for _ in range(2):
                take_steps(twin, early, 1)
                late.step()
            assert_close(problem.params, twin.params, msg=name)


instantiate_device_type_tests(TestAidaState, globals(), only_for=("cpu", "cuda"))
mark_gpu(globals())
