"""The Triton kernels for state in fewer bits and parameters that are rounded otherwise than to nearest.

The judge is the foreach path on float32 copies, with the same random bits. After a step from the same state a float32
error may move a number across the boundary of a rounding: by one unit in the last place, and rarely.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aida import Aida, rounding
from aida._step import sorting, storage
from aida._step.storage import Stream
from aida.backends import choice
from aida.backends.foreach import Foreach
from aida.backends.triton import Triton
from aida.backends.widened import Widened
from paths import INTERPRETED_PATHS

triton = pytest.importorskip("triton", reason="Triton is not installed")

from triton import language as tl  # noqa: E402

from aida.backends import kernel_rounding  # noqa: E402

interpreted = pytest.mark.skipif(not INTERPRETED_PATHS, reason="needs TRITON_INTERPRET=1 before Python starts")

STORAGES = [
    (state, dtype, how)
    for state in ("float32", "bfloat16", "fp8")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for how in ("nearest", "stochastic", "kahan")[: 1 if dtype == torch.float32 else 3]
    if (state, how) != ("float32", "nearest")
]  # fmt: skip
EACH_STORAGE = pytest.mark.parametrize(
    ("state", "dtype", "how"), STORAGES, ids=[f"{state}-{str(dtype)[6:]}-{how}" for state, dtype, how in STORAGES]
)
#: More than a chunk of apply, not a multiple of a block; and less than a block.
SHAPES = [(700,), (5,)]


@pytest.fixture
def small_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """8-bit state of any size, and all of it in the kernels that the interpreter runs."""
    monkeypatch.setattr(storage, "SMALL", 1)
    monkeypatch.setattr(choice, "_fits_fused", lambda *_: True)


class Pair:
    """Two optimizers that take each step from the same state: the foreach path and the kernels."""

    def __init__(
        self, state: str, dtype: torch.dtype, how: str, shapes: Any = SHAPES, device: str = "cpu", **options: Any
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.params = [self.noise(shape).to(device, dtype).requires_grad_() for shape in shapes]
        self.twins = [p.detach().clone().requires_grad_() for p in self.params]
        keys = {"stochastic_rounding": how == "stochastic", "kahan_sum": how == "kahan", "rounding_seed": 3}
        options = {"lr": 1e-2, "eps": 1e-12, "state_precision": state, **keys, **options}
        self.judge = Aida(self.params, foreach=True, **options)
        make = (
            INTERPRETED_PATHS[0].make
            if device == "cpu"
            else lambda params, **values: Aida(params, fused=True, **values)
        )
        self.fused = make(self.twins, **options)

    def noise(self, shape: Any) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def set_gradients(self, factor: float = 0.1) -> None:
        for p, q in zip(self.params, self.twins, strict=True):
            p.grad = (self.noise(p.shape) * factor).to(p)
            q.grad = p.grad.clone()

    def step(self, steps: int = 2, factor: float = 0.1) -> None:
        for _ in range(steps):
            self.set_gradients(factor)
            self.check_step()

    def check_step(self) -> None:
        self.judge.step()
        self.fused.step()
        # an empty tensor keeps float32 state
        assert Widened in {type(backend) for backend in self.judge._backends.values()} <= {Widened, Foreach}
        assert {type(backend) for backend in self.fused._backends.values()} <= {Triton}
        for p, q in zip(self.params, self.twins, strict=True):
            wanted, found = self.judge.state[p], self.fused.state[q]
            assert wanted.keys() == found.keys()
            for name, tensor in found.items():
                if name != "compensation":
                    assert_near(tensor, wanted[name], name)
            if "compensation" in wanted:  # a small difference of two numbers: compare what it is added to
                sums = [w.detach().double() + s["compensation"].double() for w, s in ((p, wanted), (q, found))]
                unit = torch.finfo(p.dtype).eps * wanted["compensation"].double().abs() + 1.2e-7
                assert ((sums[0] - sums[1]).abs() <= 1e-6 * sums[0].abs() + unit).all()
            assert_near(q.detach(), p.detach(), "param")
            with torch.no_grad():
                q.copy_(p)
                for name, tensor in found.items():
                    tensor.copy_(wanted[name])


def assert_near(found: Tensor, wanted: Tensor, name: str) -> None:
    if name.endswith("scales") or name in ("step", "skipped") or not wanted.numel():
        assert torch.equal(found, wanted), name
        return
    if found.dtype == torch.float32:
        scale = wanted.abs().max()
        assert ((found - wanted).abs() <= 2e-6 * (wanted.abs() + scale)).all(), name
        return
    sign = 128 if found.dtype == torch.uint8 else 1 << 15
    codes = [t if t.dtype == torch.uint8 else t.view(torch.int16).int() & 0xFFFF for t in (found, wanted)]
    units = [torch.where(code >= sign, sign - code.int(), code.int()) for code in codes]
    gaps = (units[0] - units[1]).abs()
    # where a sum nearly cancels, its float32 error is many of its own units
    tiny = found.dtype != torch.uint8 and (found.float() - wanted.float()).abs() <= 1e-6 * wanted.float().abs().max()
    assert ((gaps <= 1) | tiny).all(), name
    assert int((gaps > 0).sum()) <= max(1, found.numel() // 1000), name


@interpreted
@EACH_STORAGE
def test_interpreted_steps_have_the_bits_of_the_foreach_path(
    small_tensors_too: None, state: str, dtype: torch.dtype, how: str
) -> None:
    Pair(state, dtype, how).step()


OPTIONS = [
    {"clip_norm": 0.5},
    {"clip_norm": 0.5, "weight_decay": 0.1, "decoupled_weight_decay": False},
    {"weight_decay": 0.1, "decoupled_weight_decay": False},
    {"weight_decay": 0.1, "maximize": True, "projections": 3},
    {"nonfinite": "raise"},
]


@interpreted
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
@pytest.mark.parametrize(("state", "how"), [("fp8", "kahan"), ("bfloat16", "stochastic")])
def test_interpreted_steps_with_every_option(
    small_tensors_too: None, state: str, how: str, options: dict[str, Any]
) -> None:
    Pair(state, torch.bfloat16, how, **options).step()


@interpreted
def test_interpreted_layers_of_a_tensor_have_its_random_bits(small_tensors_too: None) -> None:
    pair = Pair("fp8", torch.bfloat16, "kahan", [(3, 2, 128)], layer_dims=1)
    pair.step()
    assert pair.fused.state[pair.twins[0]]["step"].shape == (3,)


@interpreted
def test_interpreted_random_bits_of_a_shard_have_gaps(small_tensors_too: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for run, stride in ((130, 10**10), (600, 1000), (7, 9)):
        first = (1 << 32) - 1000  # positions cross the boundary of 32 bits
        monkeypatch.setattr(sorting, "stream_of", lambda *_, fields=(3, first, run, stride): Stream(*fields))
        Pair("bfloat16", torch.bfloat16, "stochastic", [(1100,)]).step(1)


@interpreted
def test_interpreted_gradients_of_another_dtype(small_tensors_too: None) -> None:
    for dtype in (torch.float32, torch.float64):
        pair = Pair("fp8", torch.bfloat16, "stochastic", [(300,)])
        for p in (*pair.params, *pair.twins):
            p.grad_dtype = dtype
        for p, q in zip(pair.params, pair.twins, strict=True):
            p.grad = pair.noise(p.shape).to(dtype)
            q.grad = p.grad.clone()
        pair.check_step()


@interpreted
def test_interpreted_steps_under_amp_divide_the_scale_out(small_tensors_too: None) -> None:
    pair = Pair("fp8", torch.bfloat16, "stochastic")
    for optimizer in (pair.judge, pair.fused):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    pair.step(factor=100.0)


@interpreted
@pytest.mark.parametrize("overflow", [False, True], ids=["nan", "found_inf"])
def test_interpreted_tensors_that_skip_a_step_keep_every_bit(small_tensors_too: None, overflow: bool) -> None:
    pair = Pair("fp8", torch.bfloat16, "kahan")
    pair.step()
    pair.set_gradients()
    for p in (pair.params[0], pair.twins[0]):
        p.grad[3] = float("nan")
    if overflow:
        pair.judge.found_inf = pair.fused.found_inf = torch.tensor(1.0)
    (q, state) = pair.twins[0], pair.fused.state[pair.twins[0]]
    before = [t.clone() for t in (q, *state.values())]
    pair.check_step()
    state["skipped"] -= 0 if overflow else 1
    assert all(torch.equal(a, b) for a, b in zip(before, (q, *state.values()), strict=True))


@interpreted
def test_interpreted_kahan_sums_stay_if_nothing_is_added(small_tensors_too: None) -> None:
    pair = Pair("bfloat16", torch.bfloat16, "kahan", lr=0.0)
    pair.step(1)
    for optimizer in (pair.judge, pair.fused):
        for p in optimizer.param_groups[0]["params"]:
            with torch.no_grad():  # odd multiples of the last place, and half of it: to nearest, each would change
                p.fill_(1 + 2.0**-7)
                optimizer.state[p]["compensation"].fill_(2.0**-8)
    pair.step(1)
    assert all(bool((p == 1 + 2.0**-7).all()) for p in pair.twins)


@interpreted
def test_interpreted_steps_of_empty_and_single_elements(small_tensors_too: None) -> None:
    Pair("fp8", torch.bfloat16, "stochastic", [(0,), (), (1,)]).step()


@interpreted
def test_interpreted_steps_follow_moving_tensors(small_tensors_too: None) -> None:
    pair = Pair("fp8", torch.bfloat16, "kahan")
    for t in range(3):
        if t == 1:
            pair.twins[0].data = pair.twins[0].data.clone()
        pair.step(1)


# -- the functions on a tile ---------------------------------------------------------------------------


@triton.jit
def words_kernel(positions, low, high, word, seed, step, COUNT: tl.constexpr, WIDE: tl.constexpr):
    i = tl.arange(0, COUNT)
    where = tl.load(positions + i)
    if not WIDE:
        where = where.to(tl.uint32)
    one, other = kernel_rounding.random_words(tl.load(seed), tl.load(step), where)
    tl.store(low + i, one.to(tl.int64))
    tl.store(high + i, other.to(tl.int64))
    tl.store(word + i, kernel_rounding.random_word(tl.load(seed), tl.load(step), where).to(tl.int64))


@triton.jit
def round_kernel(x, bits, to_bf16, to_fp16, scales, codes, roots, back, COUNT: tl.constexpr, NATIVE: tl.constexpr):
    row = tl.arange(0, COUNT // 128)
    i = row[:, None] * 128 + tl.arange(0, 128)[None, :]
    value, random = tl.load(x + i), tl.load(bits + i).to(tl.uint32)
    tl.store(to_bf16 + i, kernel_rounding.rounded(value, random, tl.bfloat16))
    tl.store(to_fp16 + i, kernel_rounding.rounded(value, random, tl.float16))
    scale = kernel_rounding.block_scales(value)
    tl.store(scales + row, scale.to(tl.uint8))
    code = kernel_rounding.encode(value, scale, random, True, NATIVE)
    tl.store(codes + i, code)
    tl.store(roots + i, kernel_rounding.encode(tl.abs(value), scale, random << 16, False, NATIVE))
    tl.store(back + i, kernel_rounding.decode(code, scale, NATIVE))


def check_rounding(device: str, native: bool) -> None:
    count = 4096
    generator = torch.Generator().manual_seed(0)
    for seed, step, bits in ((0, 1, 62), ((1 << 32) - 1, 1 << 24, 62), (12345, 777, 62), (12345, 778, 32)):
        positions = torch.randint(0, 1 << bits, (count,), generator=generator).to(device)
        low, high, word = (torch.empty_like(positions) for _ in range(3))
        key = [torch.tensor(number, device=device) for number in (seed, step)]
        words_kernel[(1,)](positions, low, high, word, *key, count, bits > 32)
        steps = torch.tensor(float(step), device=device)
        assert torch.equal(torch.stack([low, high]), torch.stack(rounding.random_words(seed, steps, positions)))
        assert torch.equal(word, rounding.random_word(seed, steps, positions))
    noise = torch.randn(count, generator=generator)
    x = noise * torch.exp2(torch.randint(-14, 1, (count,), generator=generator).float())
    x[128:256] *= 2.0**120  # the largest scales, and the smallest
    x[256:384] *= 2.0**-130
    x[384:512], x[512:640] = 448.0, 448.0001
    x[640:768], x[768:896] = 0.0, float("nan")
    x[896:1024] = float("inf")
    x[[1024, 1025, 1026, 1027, 1028]] = torch.tensor([float("inf"), -float("inf"), float("nan"), 65519.0, -65520.0])
    x = x.to(device)
    bits = torch.randint(0, 1 << 16, (count,), generator=generator).to(device)
    dtypes = (torch.bfloat16, torch.float16, torch.uint8, torch.uint8)
    to_bf16, to_fp16, codes, roots = (torch.empty(count, dtype=dtype, device=device) for dtype in dtypes)
    scales, back = torch.empty(count // 128, dtype=torch.uint8, device=device), torch.empty(count, device=device)
    round_kernel[(1,)](x, bits, to_bf16, to_fp16, scales, codes, roots, back, count, native)
    torch.testing.assert_close(to_bf16, rounding.to_bfloat16(x, bits), rtol=0, atol=0, equal_nan=True)
    # below 2**-14 the kernel has 13 random bits
    torch.testing.assert_close(to_fp16, rounding.to_float16(x, bits), rtol=0, atol=6e-8, equal_nan=True)
    normal = x.abs() >= 2.0**-14
    wanted = rounding.to_float16(x, bits)
    torch.testing.assert_close(to_fp16[normal], wanted[normal], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(scales, rounding.block_scales(x))
    wanted = rounding.decode(rounding.encode(x, scales, bits), scales)
    torch.testing.assert_close(rounding.decode(codes, scales), wanted, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back, wanted, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(rounding.decode(roots, scales), wanted.abs(), rtol=0, atol=0, equal_nan=True)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_interpreted_functions_round_with_the_bits_of_rounding() -> None:
    check_rounding("cpu", native=False)


# -- on a GPU ------------------------------------------------------------------------------------------

GPU_SHAPES = [(300, 701), (64, 64), (64, 3, 3, 3), (4097,), (1,), (0,), ()]


@pytest.mark.gpu
def test_the_gpu_rounds_with_the_bits_of_rounding() -> None:
    check_rounding("cuda", native=False)
    if torch.cuda.get_device_capability() >= (8, 9):
        check_rounding("cuda", native=True)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=lambda options: "-".join(options) or "plain")
@EACH_STORAGE
def test_steps_on_the_gpu_have_the_bits_of_the_foreach_path(
    monkeypatch: pytest.MonkeyPatch, state: str, dtype: torch.dtype, how: str, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(storage, "SMALL", 1)
    Pair(state, dtype, how, GPU_SHAPES, "cuda", **options).step(4)


@pytest.mark.gpu
@EACH_STORAGE
def test_graph_replays_have_the_bits_of_eager_steps(state: str, dtype: torch.dtype, how: str) -> None:
    results = []
    for captured in (False, True):
        pair = Pair(state, dtype, how, GPU_SHAPES, "cuda", clip_norm=None, capturable=True)
        params, optimizer = pair.twins, pair.fused
        for p in params:
            p.grad = torch.zeros_like(p)
        generator = torch.Generator("cuda").manual_seed(2)
        graph: torch.cuda.CUDAGraph | None = None
        for t in range(8):
            for p in params:
                p.grad.normal_(generator=generator)
            if t == 6:
                params[0].grad[0, 0] = float("nan")
            if not captured or t < 3:
                optimizer.step()
                continue
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    optimizer.step()
            graph.replay()
        results.append([t.clone() for p in params for t in (p.detach(), *optimizer.state[p].values())])
        assert sum(optimizer.skipped().values()) == 1
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
def test_a_step_takes_no_parameter_sized_temporary_and_never_waits() -> None:
    p = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    optimizer = Aida([p], fused=True, state_precision="fp8", stochastic_rounding=True)
    gradients = [torch.randn_like(p) for _ in range(4)]
    for grad in gradients[:2]:
        p.grad = grad
        optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for grad in gradients[2:]:
            p.grad = grad
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 64 * 1024
