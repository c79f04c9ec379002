"""Shapes without numbers: tensors on the meta device go through everything."""

import pytest
import torch

import regard


@pytest.mark.parametrize("grad", [False, True])
def test_attention_of_meta_tensors_has_the_right_shapes(grad):
    q = torch.empty(2, 3, 40, 16, device="meta", requires_grad=grad)
    v = torch.empty(2, 3, 40, 24, device="meta")
    out = regard.attend(q, q, v)
    assert (out.shape, out.device.type) == ((2, 3, 40, 24), "meta")
    if grad:
        out.sum().backward()
        assert q.grad.shape == q.shape


def test_models_on_the_meta_device_answer_with_shapes():
    vit = regard.create("simple-vit-nano/4", num_classes=3, device="meta")
    assert vit(torch.empty(2, 3, 16, 24, device="meta")).shape == (2, 3)
    x = torch.empty(2, 32, 8, 8, device="meta")
    for heads in (1, 2):
        block = regard.PixelAttention(32, num_heads=heads, num_groups=8, device="meta")
        assert block(x).shape == x.shape
        with torch.no_grad():
            assert block.eval()(x).shape == x.shape
