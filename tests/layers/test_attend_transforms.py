"""`attend` under autograd twice, torch.func, torch.compile, torch.export and autocast."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from regard.layers import attend_kernels as attend_function
from regard.layers.attend import attend
from regard.layers.attend_kernels import NativeAttention, native

KERNELS = ("plain", "sdpa", "blocked")


def operands(*shape, dtype=torch.float64, grad=True):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, dtype=dtype, generator=generator) for _ in range(3)]
    return [x.requires_grad_(grad) for x in made]


@pytest.mark.parametrize("kernel", KERNELS)
def test_first_and_second_derivatives(kernel):
    inputs = operands(1, 2, 5, 3)

    def function(q, k, v):
        return attend(q, k, v, scale=0.8, kernel=kernel)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_torch_attention_twice():
    # The form that devices other than the CPU take.
    inputs = operands(1, 2, 5, 3)
    assert torch.autograd.gradcheck(lambda *x: NativeAttention.apply(*x, 0.8), inputs)
    assert torch.autograd.gradgradcheck(lambda *x: NativeAttention.apply(*x, 0.8), inputs)
    q, k, v = inputs
    out = NativeAttention.apply(q, k.detach(), v.detach(), 0.8)
    (only,) = torch.autograd.grad(out.sum(), q)
    (same,) = torch.autograd.grad(attend(q, k, v, scale=0.8).sum(), q)
    torch.testing.assert_close(only, same)


def test_leading_dimensions_beyond_the_limit(monkeypatch):
    q, k, v = operands(5, 7, 3, 4, grad=False)
    whole = native(q, k, v, 0.5)
    monkeypatch.setattr(attend_function, "MOST_LEADING", 2)
    torch.testing.assert_close(native(q, k, v, 0.5), whole)


@pytest.mark.parametrize("kernel", KERNELS)
def test_torch_func(kernel):
    q, k, v = operands(4, 2, 5, 3, grad=False)

    def loss(q, k, v):
        return attend(q, k, v, kernel=kernel).square().sum()

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(loss(*inputs), inputs)
    torch.testing.assert_close(torch.func.grad(loss, (0, 1, 2))(q, k, v), grads)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(q, k, v), grads)
    mapped = torch.func.vmap(lambda q, k: attend(q, k, v[0], kernel=kernel), (0, None))(q, k[1])
    torch.testing.assert_close(mapped, attend(q, k[1], v[0], kernel=kernel))
    inner = torch.func.grad(lambda q: torch.func.grad(loss)(q, k, v).square().sum())(q)
    (first,) = torch.autograd.grad(loss(inputs[0], k, v), inputs[0], create_graph=True)
    torch.testing.assert_close(inner, torch.autograd.grad(first.square().sum(), inputs[0])[0])


@pytest.mark.parametrize("kernel", KERNELS)
def test_activation_checkpointing(kernel):
    inputs = operands(2, 2, 30, 4)

    def function(q, k, v):
        return attend(q, k, v, kernel=kernel)

    grads = torch.autograd.grad(
        checkpoint(function, *inputs, use_reentrant=False).square().sum(), inputs
    )
    torch.testing.assert_close(grads, torch.autograd.grad(function(*inputs).square().sum(), inputs))


@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_in_one_graph(kernel):
    torch._dynamo.reset()
    inputs = operands(2, 2, 30, 4, dtype=torch.float32)

    def function(q, k, v):
        return attend(q, k, v, kernel=kernel)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    out, eager = compiled(*inputs), function(*inputs)
    torch.testing.assert_close(out, eager)
    grads = torch.autograd.grad(out.square().sum(), inputs)
    torch.testing.assert_close(grads, torch.autograd.grad(eager.square().sum(), inputs))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), eager)


def test_a_scale_that_is_read_from_a_tensor_breaks_no_graph():
    def function(q, scale):
        return attend(q, q, q, scale=scale.item())

    q, scale = torch.randn(1, 2, 6, 4), torch.tensor(0.4)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(q, scale), function(q, scale))


class Module(torch.nn.Module):
    def forward(self, q, k, v):
        return attend(q, k, v, scale=0.3)


def test_exports_to_torch_attention_with_any_number_of_tokens():
    inputs = tuple(operands(2, 3, 10, 4, dtype=torch.float32, grad=False))
    free = {2: torch.export.Dim("n")}
    program = torch.export.export(Module(), inputs, dynamic_shapes=(free, free, free))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert targets == {"aten.scaled_dot_product_attention.default"}
    longer = operands(2, 3, 77, 4, dtype=torch.float32, grad=False)
    torch.testing.assert_close(program.module()(*longer), Module()(*longer))


@pytest.mark.parametrize("kernel", KERNELS)
def test_autocast_casts_the_operands(kernel):
    q, k, v = operands(2, 2, 30, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(q, k, v.double().float(), kernel=kernel)
        mixed = attend(q.bfloat16(), k, v, kernel=kernel)
    assert out.dtype == torch.bfloat16
    rounded = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(out, attend(*rounded, kernel=kernel))
    assert torch.equal(out, mixed)
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("kernel", ["auto", "plain", "sdpa", "blocked"])
def test_gradients_taken_outside_of_vmap(kernel):
    q, k, v = (torch.randn(3, 2, 40, 8, requires_grad=True) for _ in range(3))
    per_sample = torch.vmap(lambda a, b, c: attend(a, b, c, kernel=kernel).square().sum())
    found = torch.autograd.grad(per_sample(q, k, v).sum(), (q, k, v))
    expected = torch.autograd.grad(attend(q, k, v, kernel="plain").square().sum(), (q, k, v))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
