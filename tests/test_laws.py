"""The laws of the paper, for vectors and gradients that Hypothesis makes up."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor
from torch.nn import Parameter

from aida.rule import Gram, mutual_projections, rescaled_products, residual_coefficients, stepsize_bound
from paths import NATIVE_PATHS, Path, over_paths

#: The same examples in every run: a failure in CI is a failure here.
LAW = settings(derandomize=True, deadline=None, max_examples=100)
#: A step costs more than a formula, and each example takes several on every path.
STEP_LAW = settings(LAW, max_examples=20)

#: Rounding errors of sums of at most 20 terms and of powers up to the fifth, in float64.
CLOSE = 1e-12

#: The square of a smaller number underflows, so that lengths of such vectors are not known.
NEGLIGIBLE = 1e-150

BETAS = (0.9, 0.999)

#: Magnitudes whose squares neither underflow nor overflow; 0 is a magnitude too.
numbers = st.one_of(st.just(0.0), st.floats(1e-6, 1e6), st.floats(-1e6, -1e-6))
nonzero = st.one_of(st.floats(1e-3, 1e3), st.floats(-1e3, -1e-3))
projection_counts = st.integers(0, 7)
sizes = st.integers(1, 20)


@st.composite
def pairs(draw: st.DrawFn, elements: st.SearchStrategy[float] = numbers) -> tuple[Tensor, Tensor]:
    size = draw(sizes)
    both = draw(arrays(np.float64, (2, size), elements=elements))
    return torch.from_numpy(both[0]), torch.from_numpy(both[1])


@st.composite
def angled_pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor, float]:
    """Two vectors and their cosine, far enough from 0 that xi may be left out: the paper's "if xi is ignored"."""
    m, g = draw(pairs(nonzero))
    c = cosine(m, g)
    assume(abs(c) > 1e-2)
    return m, g, c


@st.composite
def gradient_sequences(draw: st.DrawFn, size: st.SearchStrategy[int] = sizes) -> Tensor:
    """Gradients of some steps, one row a step."""
    shape = (draw(st.integers(1, 6)), draw(size))
    return torch.from_numpy(draw(arrays(np.float64, shape, elements=nonzero)))


def cosine(m: Tensor, g: Tensor) -> float:
    return float(torch.dot(m, g) / (m.norm() * g.norm()))


def assert_close(found: Tensor, right: Tensor, scale: Tensor | float, tolerance: float = CLOSE) -> None:
    """Equal up to rounding of numbers as large as ``scale``."""
    error = float((found - right).abs().max())
    allowed = max(tolerance * float(torch.as_tensor(scale).abs().max()), NEGLIGIBLE)
    assert error <= allowed, f"{found} is not {right}"


# -- projections -------------------------------------------------------------------------------------


@LAW
@given(pairs(), projection_counts, st.floats(1e-30, 1e3))
def test_lengths_never_grow(pair: tuple[Tensor, Tensor], projections: int, xi: float) -> None:
    m, g = mutual_projections(*pair, projections, xi)
    next_m, next_g = mutual_projections(m, g, 1, xi)
    slack = 1 + CLOSE
    assert next_m.norm() <= m.norm() * slack
    assert next_g.norm() <= g.norm() * slack
    assert (next_m - next_g).norm() <= (m - g).norm() * slack + CLOSE * m.norm()


@LAW
@given(angled_pairs(), projection_counts)
def test_the_angle_is_kept(pair: tuple[Tensor, Tensor, float], projections: int) -> None:
    m, g, c = pair
    assert cosine(*mutual_projections(m, g, projections, 0.0)) == pytest.approx(c, abs=CLOSE)


@LAW
@given(angled_pairs(), projection_counts)
def test_the_residual_shrinks_by_the_cosine_at_each_projection(
    pair: tuple[Tensor, Tensor, float], projections: int
) -> None:
    m, g, c = pair
    projected_m, projected_g = mutual_projections(m, g, projections, 0.0)
    shrunk = abs(c) ** projections
    assert_close((projected_m - projected_g).norm(), shrunk * (m - g).norm(), shrunk * (m.norm() + g.norm()))


@LAW
@given(angled_pairs(), st.sampled_from([0, 2, 4, 6]))
def test_an_even_number_of_projections_scales_the_belief_term(
    pair: tuple[Tensor, Tensor, float], projections: int
) -> None:
    m, g, c = pair
    projected_m, projected_g = mutual_projections(m, g, projections, 0.0)
    assert_close(projected_m - projected_g, c**projections * (m - g), c**projections * (m.norm() + g.norm()))


@LAW
@given(angled_pairs(), st.sampled_from([1, 3, 5, 7]))
def test_an_odd_number_of_projections_has_its_closed_form(pair: tuple[Tensor, Tensor, float], projections: int) -> None:
    m, g, c = pair
    projected_m, projected_g = mutual_projections(m, g, projections, 0.0)
    dot = torch.dot(m, g)
    right = c ** (projections - 1) * (dot / torch.dot(g, g) * g - dot / torch.dot(m, m) * m)
    assert_close(projected_m - projected_g, right, c ** (projections - 1) * (m.norm() + g.norm()))


@LAW
@given(pairs(), projection_counts, st.floats(1e-20, 1e3))
def test_three_inner_products_give_what_the_vectors_give(
    pair: tuple[Tensor, Tensor], projections: int, xi: float
) -> None:
    m, g = pair
    projected_m, projected_g = mutual_projections(m, g, projections, xi)
    dot, mm, gg = torch.dot(m, g), torch.dot(m, m), torch.dot(g, g)
    a, b = residual_coefficients(dot, mm, gg, projections, xi)
    assert_close(a * m + b * g, projected_m - projected_g, (a * m).norm() + (b * g).norm())
    assert residual_coefficients(float(dot), float(mm), float(gg), projections, xi) == (float(a), float(b))


@LAW
@given(angled_pairs(), st.sampled_from([2, 4, 6]), st.floats(0, 1.0))
def test_both_coefficients_lie_between_0_and_1_for_an_even_number_of_projections(
    pair: tuple[Tensor, Tensor, float], projections: int, xi: float
) -> None:
    m, g, _ = pair
    a, b = residual_coefficients(torch.dot(m, g), torch.dot(m, m), torch.dot(g, g), projections, xi)
    assert 0 <= a <= 1 + CLOSE
    assert 0 <= -b <= 1 + CLOSE


@LAW
@given(pairs(), projection_counts, st.floats(1e-20, 1.0), st.integers(-20, 20))
def test_coefficients_do_not_see_the_scale_of_the_gradient(
    pair: tuple[Tensor, Tensor], projections: int, xi: float, exponent: int
) -> None:
    m, g = pair
    dot, mm, gg = torch.dot(m, g), torch.dot(m, m), torch.dot(g, g)
    square = 4.0**exponent  # a power of two: the same digits, so the same result to the last bit
    scaled = residual_coefficients(square * dot, square * mm, square * gg, projections, square * xi)
    assert scaled == residual_coefficients(dot, mm, gg, projections, xi)


@LAW
@given(
    arrays(np.float64, st.tuples(st.just(3), sizes), elements=numbers),
    st.one_of(st.just(0.0), nonzero),
    st.one_of(st.just(0.0), st.floats(1e-3, 1 - 1e-3)),
    st.one_of(st.just(0.0), st.floats(1e-6, 10.0)),
)
def test_inner_products_of_a_rescaled_gradient_need_no_second_look_at_it(
    vectors: np.ndarray[Any, np.dtype[np.float64]], scale: float, beta1: float, l2: float
) -> None:
    m, g, p = map(torch.from_numpy, vectors)
    gram = Gram(*(torch.dot(x, y) for x, y in ((m, m), (m, g), (g, g), (m, p), (g, p), (p, p))))
    found = rescaled_products(gram, torch.tensor(scale, dtype=torch.float64), beta1, l2)

    grad = scale * g + l2 * p
    mean = beta1 * m + (1 - beta1) * grad
    # the summands cancel where the true products are small: errors are relative to the summands
    longest_grad = abs(scale) * g.norm() + l2 * p.norm()
    longest_mean = beta1 * m.norm() + (1 - beta1) * longest_grad
    assert_close(found.dot, torch.dot(mean, grad), longest_mean * longest_grad)
    assert_close(found.mm, torch.dot(mean, mean), longest_mean**2)
    assert_close(found.gg, torch.dot(grad, grad), longest_grad**2)
    assert found.mm >= 0
    assert found.gg >= 0


# -- steps -------------------------------------------------------------------------------------------


def adabelief(theta: Tensor, gradients: Tensor, lr: float, eps: float) -> Tensor:
    """AdaBelief without the second eps, outside the root, after one step a row."""
    beta1, beta2 = BETAS
    m = s = torch.zeros_like(theta)
    for t, g in enumerate(gradients, 1):
        m = beta1 * m + (1 - beta1) * g
        s = beta2 * s + (1 - beta2) * (g - m) ** 2 + eps
        theta = theta - lr * (m / (1 - beta1**t)) / (s / (1 - beta2**t)).sqrt()
    return theta


def steps(path: Path, gradients: Tensor, **values: Any) -> tuple[Tensor, Tensor]:
    """Weights that began at 0, and their variance, after one step a row."""
    weight = Parameter(torch.zeros(gradients.shape[1:], dtype=gradients.dtype, device=path.device))
    optimizer = path.make([weight], betas=BETAS, **values)
    for g in gradients:
        weight.grad = g.to(path.device, copy=True)
        optimizer.step()
    return weight.detach().cpu(), optimizer.state[weight]["exp_avg_var"].cpu()


@over_paths(NATIVE_PATHS)
@STEP_LAW
@given(gradient_sequences(), st.floats(1e-16, 1e-4))
def test_without_projections_aida_is_adabelief(path: Path, gradients: Tensor, eps: float) -> None:
    found, _ = steps(path, gradients, lr=0.1, eps=eps, projections=0)
    right = adabelief(torch.zeros_like(found), gradients, lr=0.1, eps=eps)
    assert_close(found, right, right)


@over_paths(NATIVE_PATHS)
@STEP_LAW
@given(gradient_sequences(size=st.just(1)), st.floats(1e-16, 1e-4), st.integers(0, 5))
def test_a_layer_of_one_element_reduces_to_adabelief(
    path: Path, gradients: Tensor, eps: float, projections: int
) -> None:
    found, _ = steps(path, gradients, lr=0.1, eps=eps, projections=projections, xi=1e-37)
    right = adabelief(torch.zeros_like(found), gradients, lr=0.1, eps=eps)
    assert_close(found, right, right)


@over_paths(NATIVE_PATHS)
@STEP_LAW
@given(gradient_sequences(), st.integers(1, 7))
def test_the_first_step_is_the_same_for_any_number_of_projections(
    path: Path, gradients: Tensor, projections: int
) -> None:
    plain, _ = steps(path, gradients[:1], projections=0)
    found, _ = steps(path, gradients[:1], projections=projections)
    assert_close(found, plain, plain)


@over_paths(NATIVE_PATHS)
@STEP_LAW
@given(
    arrays(np.float64, st.tuples(st.integers(1, 6), sizes), elements=numbers).map(torch.from_numpy),
    st.floats(1e-16, 1.0),
    st.integers(0, 5),
)
def test_no_adaptive_stepsize_exceeds_the_bound(path: Path, gradients: Tensor, eps: float, projections: int) -> None:
    beta2 = BETAS[1]
    for t in range(1, len(gradients) + 1):
        _, variance = steps(path, gradients[:t], eps=eps, projections=projections)
        largest = float((variance / (1 - beta2**t)).rsqrt().max())
        assert largest <= stepsize_bound(beta2, eps) * (1 + CLOSE)


@over_paths(NATIVE_PATHS)
def test_weights_without_gradient_have_the_largest_stepsize(path: Path) -> None:
    _, variance = steps(path, torch.zeros(5, 3, dtype=torch.float64), eps=1e-8)
    stepsizes = (variance / (1 - BETAS[1] ** 5)).rsqrt()
    assert_close(stepsizes, torch.full_like(stepsizes, math.sqrt((1 - BETAS[1]) / 1e-8)), stepsizes)


@over_paths(NATIVE_PATHS)
@STEP_LAW
@given(gradient_sequences(), st.integers(0, 5), st.integers(-10, 10))
def test_gradients_and_eps_and_xi_on_another_scale_take_the_same_steps(
    path: Path, gradients: Tensor, projections: int, exponent: int
) -> None:
    scale, square = 2.0**exponent, 4.0**exponent
    plain, _ = steps(path, gradients, eps=1e-8, xi=1e-20, projections=projections)
    scaled, _ = steps(path, scale * gradients, eps=square * 1e-8, xi=square * 1e-20, projections=projections)
    assert torch.equal(plain, scaled)


@over_paths(NATIVE_PATHS)
@STEP_LAW
@given(gradient_sequences(), st.integers(0, 5))
def test_the_opposite_gradient_takes_the_opposite_step(path: Path, gradients: Tensor, projections: int) -> None:
    plain, _ = steps(path, gradients, projections=projections)
    opposite, _ = steps(path, -gradients, projections=projections)
    ascending, _ = steps(path, gradients, projections=projections, maximize=True)
    assert torch.equal(opposite, -plain)
    assert torch.equal(ascending, -plain)
