"""QK norm against loops, with its gradients and theirs."""

import math

import pytest
import torch

from regard.errors import InputError
from regard.layers.qk_norm import QKNorm


def normed_by_loop(x, gamma, form):
    """x (n, d) and gamma (d,) of one head, one vector at a time, in Python's float64."""
    rows, gains = [], gamma.tolist()
    for row in x.tolist():
        length = math.sqrt(sum(value * value for value in row))
        if form == "unit":
            divisor = max(length, 1e-12) / math.sqrt(len(row))
        else:
            divisor = math.sqrt(length * length / len(row) + 1e-6)
        rows.append([value / divisor * gain for value, gain in zip(row, gains, strict=True)])
    return torch.tensor(rows, dtype=torch.float64)


def norm_and_input(form, dtype=torch.float64):
    torch.manual_seed(0)
    norm = QKNorm(form, 2, 5, dtype=dtype)
    torch.nn.init.normal_(norm.gamma)
    packed = torch.randn(3, 4, 2, 5, dtype=dtype)  # b n g d, as a projection gives them
    return norm, packed.transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("form", ["unit", "rms"])
@pytest.mark.parametrize("grad", [True, False])
def test_each_vector_is_divided_and_scaled(form, grad):
    norm, x = norm_and_input(form, torch.float32)
    with torch.set_grad_enabled(grad):
        found = norm(x)
    assert found.requires_grad == grad
    for b in range(3):
        for g in range(2):
            wanted = normed_by_loop(x[b, g], norm.gamma[g, 0], form)
            torch.testing.assert_close(found[b, g].double(), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", ["unit", "rms", "layer"])
def test_gradients_and_gradients_of_them_are_those_of_finite_differences(form):
    norm, x = norm_and_input(form)

    def run(x, gamma):
        return torch.func.functional_call(norm, {"gamma": gamma}, x)

    assert torch.autograd.gradcheck(run, (x, norm.gamma))
    assert torch.autograd.gradgradcheck(run, (x, norm.gamma))
    norm.gamma.requires_grad_(False)
    assert torch.autograd.gradgradcheck(norm, (x,))


@pytest.mark.parametrize("form", ["unit", "rms", "layer"])
def test_a_gain_that_also_made_the_input_is_counted_once(form):
    norm, x = norm_and_input(form)

    def once(x, gamma):
        return torch.func.functional_call(norm, {"gamma": gamma}, x)

    def twice(x, gamma):
        return once(once(x, gamma), gamma)

    def of_itself(x):
        return once(x, norm.gamma * x.square().mean())

    weights = torch.randn(x.shape, dtype=x.dtype)
    for run, inputs in ((twice, (x, norm.gamma)), (of_itself, (x,))):
        assert torch.autograd.gradcheck(run, inputs)
        assert torch.autograd.gradgradcheck(run, inputs)
        plain = torch.autograd.grad((run(*inputs) * weights).sum(), inputs)
        kept = torch.autograd.grad((run(*inputs) * weights).sum(), inputs, create_graph=True)
        torch.testing.assert_close(kept, plain)


def test_a_vector_of_zeros_gets_a_finite_gradient_and_a_tiny_one_that_of_a_product():
    norm = QKNorm("unit", 1, 4, dtype=torch.float64)
    x = torch.zeros(1, 2, 4, dtype=torch.float64)
    x[0, 1] = 1e-14
    x.requires_grad_()
    weights = torch.arange(4.0, dtype=torch.float64)
    out = norm(x)
    (grad,) = torch.autograd.grad((out * weights).sum(), x)
    assert out[0, 0].eq(0).all()
    # Below the smallest length the norm is a product with 10¹² (√d γ is 1 at the start).
    torch.testing.assert_close(grad, (weights * 1e12).expand_as(grad))


@pytest.mark.parametrize("form", ["unit", "rms"])
def test_the_gradient_is_that_of_the_operations_autograd_follows(form):
    norm, x = norm_and_input(form)
    torch.manual_seed(1)
    dy = torch.randn(3, 2, 4, 5, dtype=torch.float64)
    found = torch.autograd.grad(norm(x), [x, norm.gamma], dy)
    wanted = torch.func.vjp(
        lambda x, gamma: torch.func.functional_call(norm, {"gamma": gamma}, x), x, norm.gamma
    )[1](dy)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    narrow = norm.to(torch.bfloat16)(x.bfloat16())
    assert narrow.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(1, 2, 3, 4, dtype=torch.int64), "x is torch.int64"),
        (torch.zeros(1, 2, 3, 1), r"give floating-point \(…, 2, n, 4\)"),
        (torch.zeros(1, 1, 3, 4), r"shape \(1, 1, 3, 4\)"),
        (torch.zeros(3, 4), r"shape \(3, 4\)"),
    ],
)
@pytest.mark.parametrize("form", ["unit", "rms", "layer"])
def test_queries_of_another_kind_are_refused(form, x, words):
    with pytest.raises(InputError, match=words):
        QKNorm(form, 2, 4)(x)


@pytest.mark.parametrize("arguments", [("unit", 2, 0), ("rms", 0, 4), (None, 2, 4)])
def test_a_norm_of_nothing_is_refused(arguments):
    with pytest.raises(InputError, match="give"):
        QKNorm(*arguments)
