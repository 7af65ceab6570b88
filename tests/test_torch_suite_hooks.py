"""What torch checks of AdamW's hooks, checked of Aida's: around steps, saving and loading, in what order, with what."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing import assert_close
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import optims
from torch.testing._internal.common_utils import TestCase

from aida import Aida
from torch_info import AIDA, all_kwargs, mark_gpu

StateDict = dict[str, Any]


def parameter(device: str) -> Parameter:
    p = Parameter(torch.randn(2, 3, device=device))
    p.grad = torch.randn_like(p)
    return p


def set_lr(lr: float, *, by_copy: bool) -> Callable[[Optimizer, StateDict], StateDict | None]:
    """A load hook that changes the checkpoint in place, or hands on a changed copy of it."""

    def hook(_: Optimizer, state_dict: StateDict) -> StateDict | None:
        state_dict = deepcopy(state_dict) if by_copy else state_dict
        state_dict["param_groups"][0]["lr"] = lr
        return state_dict if by_copy else None

    return hook


class TestAidaHooks(TestCase):
    @optims([AIDA])
    def test_step_hooks_run_until_removed(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device, differentiable=True):
            optimizer = Aida([torch.ones(2, device=device)], **kwargs)
            seen: list[str] = []
            handles = [
                optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("pre")),
                optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("post")),
            ]
            optimizer.step()
            optimizer.step()
            assert seen == ["pre", "post"] * 2, name
            for handle in handles:
                handle.remove()
            optimizer.step()
            assert len(seen) == 4, name

    @optims([AIDA])
    def test_global_hooks_enclose_the_optimizer_s_own(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device, differentiable=True):
            p = torch.ones(2, device=device)
            pair = (Aida([p], **kwargs), SGD([p], lr=0.1))
            seen: list[tuple[str, str]] = []

            def note(what: str, seen: list[tuple[str, str]] = seen) -> Callable[..., None]:
                return lambda owner, args, kwargs: seen.append((type(owner).__name__, what))

            handles = [
                register_optimizer_step_pre_hook(note("global pre")),
                register_optimizer_step_post_hook(note("global post")),
            ]
            for optimizer in pair:
                handles.append(optimizer.register_step_pre_hook(note("pre")))
                handles.append(optimizer.register_step_post_hook(note("post")))
            try:
                for optimizer in (*pair, pair[0]):
                    optimizer.step()
            finally:
                for handle in handles:
                    handle.remove()
            order = ("global pre", "pre", "post", "global post")
            assert seen == [(who, what) for who in ("Aida", "SGD", "Aida") for what in order], name
            pair[0].step()
            assert len(seen) == 12, name

    @optims([AIDA])
    def test_step_hooks_see_and_may_replace_the_arguments(self, device, dtype, optim_info):
        def first() -> str:
            return "first"

        def second() -> str:
            return "second"

        for name, kwargs in all_kwargs(device):
            optimizer = Aida([parameter(device)], **kwargs)
            seen: list[tuple[Any, ...]] = []

            def swap(optimizer: Optimizer, args: Any, kwargs: Any, seen: list[Any] = seen) -> tuple[Any, Any]:
                seen.append((optimizer, args[1:], dict(kwargs)))
                return (args[0],), {"closure": second}

            def after(optimizer: Optimizer, args: Any, kwargs: Any, seen: list[Any] = seen) -> None:
                seen.append((optimizer, args[1:], dict(kwargs)))

            optimizer.register_step_pre_hook(swap)
            optimizer.register_step_post_hook(after)
            assert optimizer.step(first) == "second", name
            assert seen == [(optimizer, (first,), {}), (optimizer, (), {"closure": second})], name

    @optims([AIDA])
    def test_save_hooks_see_the_optimizer_before_and_the_checkpoint_after(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device, differentiable=True):
            optimizer = Aida([torch.randn(2, 3, device=device)], **kwargs)

            def before(optimizer: Optimizer) -> None:
                optimizer.state["mark"] = 1

            def after(_: Optimizer, state_dict: StateDict) -> StateDict:
                return {**state_dict, "marked": state_dict["state"].pop("mark", None)}

            handle = optimizer.register_state_dict_pre_hook(before)
            assert optimizer.state_dict()["state"]["mark"] == 1, name
            optimizer.register_state_dict_post_hook(after)
            assert optimizer.state_dict()["marked"] == 1, name
            handle.remove()
            del optimizer.state["mark"]
            assert optimizer.state_dict()["marked"] is None, name

    @optims([AIDA])
    def test_load_hooks_run_in_order_and_may_replace_the_checkpoint(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device, differentiable=True):
            optimizer = Aida([torch.randn(2, 3, device=device)], **kwargs)
            optimizer.register_load_state_dict_pre_hook(set_lr(0.002, by_copy=False))
            optimizer.load_state_dict(optimizer.state_dict())
            assert optimizer.param_groups[0]["lr"] == 0.002, name
            optimizer.register_load_state_dict_pre_hook(set_lr(0.003, by_copy=True), prepend=True)
            optimizer.load_state_dict(optimizer.state_dict())
            assert optimizer.param_groups[0]["lr"] == 0.002, name
            optimizer.register_load_state_dict_pre_hook(set_lr(0.004, by_copy=True))
            optimizer.load_state_dict(optimizer.state_dict())
            assert optimizer.param_groups[0]["lr"] == 0.004, name

    @optims([AIDA])
    def test_what_hooks_keep_in_the_state_survives_loading_and_steps(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device):
            optimizer = Aida([parameter(device)], **kwargs)
            optimizer.step()
            optimizer.state["number"], optimizer.state["values"] = 1, {"loss": 0.5}
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
            optimizer.step()
            assert (optimizer.state["number"], optimizer.state["values"]) == (1, {"loss": 0.5}), name

    @optims([AIDA])
    def test_load_hooks_see_plain_state_on_both_sides(self, device, dtype, optim_info):
        for name, kwargs in all_kwargs(device):
            p = parameter(device)
            optimizer = Aida([p], **kwargs)
            optimizer.step()
            expected = deepcopy(dict(optimizer.state[p]))
            seen: list[dict[str, Any]] = []

            def before(_: Optimizer, state_dict: StateDict, seen: list[Any] = seen) -> None:
                seen.append(dict(state_dict["state"][0]))

            def after(optimizer: Optimizer, seen: list[Any] = seen, p: Parameter = p) -> None:
                seen.append(dict(optimizer.state[p]))

            optimizer.register_load_state_dict_pre_hook(before)
            optimizer.register_load_state_dict_post_hook(after)
            for _ in range(2):  # what Aida itself hooks in is gone after one load
                optimizer.load_state_dict(optimizer.state_dict())
            assert len(seen) == 4, name
            for state in seen:
                assert_close(state, expected, rtol=0, atol=0, msg=name)


instantiate_device_type_tests(TestAidaHooks, globals(), only_for=("cpu", "cuda"))
mark_gpu(globals())
