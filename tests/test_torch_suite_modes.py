"""What torch checks of AdamW under a GradScaler, in a CUDA graph, of its memory and of autograd through a step."""

from __future__ import annotations

import gc
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Linear, Parameter, Sequential
from torch.testing import assert_close
from torch.testing._internal.common_device_type import instantiate_device_type_tests, largeTensorTest, onlyCPU, onlyCUDA
from torch.testing._internal.common_optimizers import optims
from torch.testing._internal.common_utils import TestCase, parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aida import Aida
from torch_info import AIDA, Regression, all_kwargs, flags_or_skip, mark_gpu


class TestAidaModes(TestCase):
    @parametrize("with_scale", [True, False])
    @optims([AIDA])
    def test_found_inf_means_no_step(self, device, dtype, optim_info, with_scale):
        for name, kwargs in all_kwargs(device):
            params = [Parameter(torch.ones(3, device=device)) for _ in range(5)]
            optimizer = Aida(params, **kwargs)
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
            expected = deepcopy([params, optimizer.state_dict()["state"]])
            optimizer.grad_scale = torch.ones(1, device=device) if with_scale else None
            optimizer.found_inf = torch.ones((), device=device)
            for p in params:
                p.grad[0] = torch.inf
            optimizer.step()
            assert_close([params, optimizer.state_dict()["state"]], expected, rtol=0, atol=0, msg=name)
            # the scaler saw these; skipped() counts what it did not see
            assert not optimizer.skipped(), name

    @optims([AIDA])
    def test_grad_scale_is_taken_out_of_the_gradient_and_left_in_grad(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device):
            problem = Regression(device)
            twin = problem.copy()
            plain, scaled = Aida(problem.params, **kwargs), Aida(twin.params, **deepcopy(kwargs))
            for _ in range(5):
                problem.backward()
                plain.step()
                twin.backward()
                for p in twin.params:
                    p.grad *= 1024  # a power of two: exact in both directions
                before = [p.grad.clone() for p in twin.params]
                scaled.grad_scale = torch.full((1,), 1024.0, device=device)
                scaled.found_inf = torch.zeros(1, device=device)
                scaled.step()
                assert_close([p.grad for p in twin.params], before, rtol=0, atol=0, msg=name)
            assert_close(problem.params, twin.params, msg=name)

    @optims([AIDA])
    def test_grad_scaler_trains_as_without_it_and_sits_out_an_overflow(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device):
            torch.manual_seed(0)
            net = Sequential(Linear(4, 6), Linear(6, 2)).to(device)
            twin = deepcopy(net)
            x = torch.randn(8, 4, device=device)
            scaler = torch.amp.GradScaler(device=torch.device(device).type, init_scale=128.0, growth_interval=2)
            scaled, plain = Aida(net.parameters(), **kwargs), Aida(twin.parameters(), **deepcopy(kwargs))
            for step in range(6):
                scaled.zero_grad()
                scaler.scale(net(x).pow(2).sum()).backward()
                if step == 3:
                    net[0].weight.grad[0, 0] = torch.inf
                scale = scaler.get_scale()
                scaler.step(scaled)
                scaler.update()
                if step == 3:
                    assert scaler.get_scale() == scale / 2, name
                    continue
                plain.zero_grad()
                twin(x).pow(2).sum().backward()
                plain.step()
            assert all(state["step"].item() == 5 for state in scaled.state.values()), name
            assert_close(list(net.parameters()), list(twin.parameters()), msg=name)

    @optims([AIDA])
    def test_unscaling_before_the_step_leaves_nothing_to_unscale(self, device, dtype, optim_info):
        # scaler.unscale_, clip_grad_norm_, scaler.step: what everybody does who clips
        for name, kwargs in all_kwargs(device):
            problem = Regression(device)
            twin = problem.copy()
            scaler = torch.amp.GradScaler(device=torch.device(device).type, init_scale=64.0)
            scaled, plain = Aida(problem.params, **kwargs), Aida(twin.params, **deepcopy(kwargs))
            for _ in range(3):
                scaled.zero_grad()
                scaler.scale(problem.loss()).backward()
                scaler.unscale_(scaled)
                scaler.step(scaled)
                scaler.update()
                twin.backward()
                plain.step()
            assert_close(problem.params, twin.params, msg=name)

    @optims([AIDA])
    def test_fused_refuses_what_it_cannot_reach(self, device, dtype, optim_info):
        flags = flags_or_skip("fused", device)
        with torch.device("meta"):
            net = Sequential(Linear(2, 3), Linear(3, 1))
        optimizer = Aida(net.parameters(), **flags)
        for p in net.parameters():
            p.grad = torch.rand_like(p)
        with pytest.raises(RuntimeError, match="`fused=True` requires all the params to be floating point Tensors"):
            optimizer.step()
        # torch goes on with net.to_empty(): that makes new parameters, and leaves these without gradients
        optimizer.zero_grad(set_to_none=True)
        optimizer.step()

    @onlyCPU
    @optims([AIDA])
    def test_capturable_on_a_host_is_harmless(self, device, dtype, optim_info):
        # AdamW's foreach and for-loop paths stop with an AssertionError here, because their step counter
        # would be on the wrong device. Aida's is always beside its parameter, so a checkpoint of a captured
        # run loads and steps on a host.
        for name, kwargs in all_kwargs(device):
            problem = Regression(device)
            twin = problem.copy()
            for one, extra in ((problem, {}), (twin, {"capturable": True})):
                optimizer = Aida(one.params, **{**kwargs, **extra})
                for _ in range(3):
                    one.backward()
                    optimizer.step()
            assert_close(problem.params, twin.params, rtol=0, atol=0, msg=name)

    @onlyCUDA
    @optims([AIDA])
    def test_capture_without_capturable_is_refused(self, device, dtype, optim_info):
        problem = Regression(device)
        problem.backward()
        optimizer = Aida(problem.params)
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match=r"Attempting CUDA graph capture of step\(\)"), torch.cuda.graph(graph):
            optimizer.step()

    @onlyCUDA
    @optims([AIDA])
    def test_replayed_graph_equals_eager_steps(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device):
            kwargs["capturable"] = True
            kwargs["lr"] = torch.tensor(1e-2, device=device)
            if "betas" in kwargs:  # a graph cannot read a tensor on the host
                kwargs["betas"] = tuple(torch.as_tensor(beta, device=device) for beta in kwargs["betas"])
            problem = Regression(device)
            twin = problem.copy()
            optimizer, eager = Aida(problem.params, **kwargs), Aida(twin.params, **deepcopy(kwargs))
            for one, stepper in ((problem, optimizer), (twin, eager)):
                one.backward()
                stepper.step()  # state is made outside the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            for factor in (1.0, 0.5, 0.25):
                for p, q in zip(problem.params, twin.params, strict=True):
                    p.grad.copy_(torch.randn_like(p))
                    q.grad = p.grad.clone()
                for stepper in (optimizer, eager):
                    stepper.param_groups[0]["lr"].fill_(1e-2 * factor)
                graph.replay()
                eager.step()
            assert_close(problem.params, twin.params, msg=name)
            assert all(state["step"].item() == 4 for state in optimizer.state.values()), name

    @onlyCPU
    @optims([AIDA])
    def test_foreach_peak_on_a_host_is_below_one_parameter(self, device, dtype, optim_info):
        size = 1 << 21
        params = [Parameter(torch.randn(size)) for _ in range(2)]
        for p in params:
            p.grad = torch.randn_like(p)
        for kwargs in (
            {},
            {"weight_decay": 0.1, "maximize": True, "decoupled_weight_decay": False},
            {"weight_decay": 0.1, "clip_norm": 0.5, "decoupled_weight_decay": False},
        ):
            optimizer = Aida(params, foreach=True, **kwargs)
            optimizer.step()
            assert 0 < peak_host_bytes(optimizer) < 4 * size, kwargs

    @onlyCUDA
    @parametrize("implementation", ["foreach", "fused"])
    @optims([AIDA])
    def test_peak_on_a_device_is_one_temporary(self, device, dtype, optim_info, implementation):
        flags = flags_or_skip(implementation, device)
        # all of them fit one bucket of the foreach path, whose one temporary is then as large as the model
        count, size = 8, 1 << 20
        for one in optim_info.optim_inputs_func(device=device):
            params = [Parameter(torch.randn(size, device=device)) for _ in range(count)]
            optimizer = Aida(params, **one.kwargs, **flags)
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            optimizer.step()
            used = (torch.cuda.max_memory_allocated() - before) / (4 * size)
            # beyond the temporary, one parameter at a time: in float64 where products must not cancel
            limit = count + 7 if implementation == "foreach" else 0.5
            assert used <= limit, f"{one.desc}: {used:.1f} parameters"

    @onlyCUDA
    @largeTensorTest("80GB", "cuda")
    @parametrize("implementation", ["foreach", "fused"])
    @optims([AIDA], dtypes=[torch.float16])
    def test_tensors_beyond_32_bit_indices(self, device, dtype, optim_info, implementation):
        flags = flags_or_skip(implementation, device)
        p = Parameter(torch.ones(2**32, device=device, dtype=dtype))
        p.grad = torch.ones_like(p)
        Aida([p], lr=0.5, **flags).step()
        assert p[0].item() == pytest.approx(0.5, abs=0.1)
        assert (p.detach()[:: 2**20] == p[0]).all()
        assert p[-1] == p[0]


class HeldBytes(TorchDispatchMode):
    """The most that tensors made inside this context hold at a time."""

    def __init__(self, already: list[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._already = {t.untyped_storage()._cdata for t in already}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._already:
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return out


def peak_host_bytes(optimizer: Aida) -> int:
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    tensors += [t for group in optimizer.param_groups for p in group["params"] for t in (p, p.grad)]
    with HeldBytes(tensors) as held:
        optimizer.step()
    return held.peak


class TestAidaDifferentiable(TestCase):
    """A step as a function of everything it reads, against finite differences."""

    @parametrize(
        "kwargs",
        [
            {},
            {"projections": 0},
            {"projections": 3},
            {"decoupled_weight_decay": True},
            {"clip_norm": 0.5},
            {"maximize": True},
            {"nonfinite": "propagate"},
        ],
        name_fn=lambda kwargs: "_".join(map(str, kwargs.items())) or "default",
    )
    @optims([AIDA], dtypes=[torch.float64])
    def test_gradient_of_one_step(self, device, dtype, optim_info, kwargs):
        def step(p, grad, exp_avg, exp_avg_var, lr, beta1, beta2, weight_decay):
            p = p.clone()
            p.grad = grad
            values = {"lr": lr, "betas": (beta1, beta2), "weight_decay": weight_decay}
            optimizer = Aida([p], differentiable=True, **values, **kwargs)
            count = torch.tensor(3.0, device=device)
            # what a step adds to a state made by hand is the count of skipped steps
            optimizer.state[p].update(step=count, exp_avg=exp_avg.clone(), exp_avg_var=exp_avg_var.clone())
            optimizer.step()
            return p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_var"]

        def leaf(value: Any) -> Tensor:
            return torch.as_tensor(value, dtype=dtype, device=device).clone().requires_grad_()

        tensors = [leaf(torch.rand(5) + 0.1) for _ in range(4)]
        numbers = [leaf(value) for value in (0.01, 0.8, 0.95, 0.1)]
        assert gradcheck(step, (*tensors, *numbers))

    @optims([AIDA], dtypes=[torch.float64])
    def test_learning_rate_can_be_learned_through_several_steps(self, device, dtype, optim_info):
        def trained(lr: Tensor) -> Tensor:
            p = torch.tensor([1.5, -0.7, 0.3], dtype=dtype, device=device).requires_grad_()
            p = p.clone()
            optimizer = Aida([p], lr=lr, differentiable=True)
            for _ in range(3):
                now = p.clone()  # the step overwrites p, which the loss must not have saved
                loss = (now**2).sum() + now[0] * now[1]
                (p.grad,) = torch.autograd.grad(loss, p, create_graph=True)
                optimizer.step()
            return (p**2).sum()

        lr = torch.tensor(0.05, dtype=dtype, device=device, requires_grad=True)
        assert gradcheck(trained, (lr,))


instantiate_device_type_tests(TestAidaModes, globals(), only_for=("cpu", "cuda"))
instantiate_device_type_tests(TestAidaDifferentiable, globals(), only_for=("cpu", "cuda"))
mark_gpu(globals())
