"""Conversion of vit-pytorch's SimpleViT with QK norm: the same numbers from the same weights."""

import pytest
import torch

from regard.convert.conversion import convert
from regard.errors import InputError
from regard.models.simple_vit import SimpleViT

SIZES = {
    "image_size": (8, 12),
    "patch_size": (4, 2),
    "num_classes": None,
    "dim": 16,
    "depth": 11,  # two digits: block 1 is not block 10
    "heads": 3,
    "mlp_dim": 24,
    "channels": 2,
    "dim_head": 6,
}


@pytest.fixture
def theirs() -> torch.nn.Module:
    module = pytest.importorskip("vit_pytorch.simple_vit_with_qk_norm")
    torch.manual_seed(0)
    model = module.SimpleViT(**SIZES).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def test_converted_weights_give_the_same_features(theirs):
    ours = SimpleViT(**SIZES, dtype=torch.float64)
    ours.load_state_dict(convert(theirs.state_dict(), source="vit-pytorch-qk"))
    images = torch.randn(2, 2, 8, 12, dtype=torch.float64)
    # The positions of both are computed in float32.
    torch.testing.assert_close(ours(images), theirs(images), rtol=0, atol=1e-6)


def test_there_and_back_is_the_same_state_dict(theirs):
    state = theirs.state_dict()
    back = convert(convert(state, "vit-pytorch-qk"), "regard", "vit-pytorch-qk")
    assert back.keys() == state.keys()
    assert all(back[key].data_ptr() == state[key].data_ptr() for key in state)


def test_a_missing_and_an_unused_key_are_named(theirs):
    state = theirs.state_dict()
    del state["transformer.layers.3.1.net.1.bias"]
    state["extra"] = torch.zeros(1)
    with pytest.raises(
        InputError, match=r"missing: transformer\.layers\.3\.1\.net\.1\.bias; .*extra"
    ):
        convert(state, "vit-pytorch-qk")
