"""record reads other libraries' models untouched, and leaves their outputs' bits alone."""

import copy

import pytest
import torch
from torch import nn

from regard.errors import InputError
from regard.interpret.health import attention_health
from regard.interpret.record import record
from regard.interpret.relevance import class_relevance


def check(model, *inputs, grid, leading=0, names=None, heads=None):
    """Records, compares bits, and returns the recording and what went into every product."""
    model = model.eval()
    results = []
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            plain = first(model(*inputs))
            with record(model) as seen:
                recorded = first(model(*inputs))
        assert torch.equal(plain, recorded)
        results.append(seen)
    seen = results[0]
    for attention in seen.layers():
        assert attention.queries.grid == grid
        assert attention.queries.leading == leading
        torch.testing.assert_close(
            attention.weights.sum(-1), torch.ones(attention.weights.shape[:3])
        )
    if names is not None:
        assert list(seen) == names
    if heads is not None:
        assert {a.heads for a in seen.layers()} == {heads}
    for name in seen:
        torch.testing.assert_close(results[1][name].weights, seen[name].weights)
    return seen


def first(out):
    return out if isinstance(out, torch.Tensor) else out[0]


TIMM = {
    "vit_tiny_patch16_224": ((64, 96), (4, 6), 1, 3),
    "eva02_tiny_patch14_224": ((56, 84), (4, 6), 1, 3),
    "vit_small_patch14_reg4_dinov2": ((56, 84), (4, 6), 5, 6),
}


@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    timm = pytest.importorskip("timm")
    size, grid, leading, heads = TIMM[name]
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, img_size=size, depth=2)
    images = torch.randn(2, 3, *size)
    fused = check(
        model, images, grid=grid, leading=leading, heads=heads,
        names=["blocks.0.attn", "blocks.1.attn"],
    )  # fmt: skip
    # The unfused path makes its weights itself; they are recorded as they are.
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    unfused = check(plain, images, grid=grid, leading=leading)
    for key in fused:
        torch.testing.assert_close(fused[key].weights, unfused[key].weights, atol=1e-5, rtol=1e-4)
    nn.init.normal_(model.head.weight)
    found = class_relevance(model, images, 1)
    assert found.maps.shape == (2, *grid)
    torch.testing.assert_close(
        found.maps, class_relevance(plain_of(model), images, 1).maps, atol=1e-5, rtol=1e-3
    )


def plain_of(model):
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return model


def test_a_pool_by_attention_has_one_query_and_no_map_to_look_from():
    timm = pytest.importorskip("timm")
    model = timm.create_model(
        "vit_base_patch16_siglip_224", num_classes=3, img_size=64, depth=1, embed_dim=48,
        num_heads=3,
    ).eval()  # fmt: skip
    with record(model) as seen:
        model(torch.randn(1, 3, 64, 64))
    assert list(seen) == ["blocks.0.attn", "attn_pool"]
    assert seen["attn_pool"].queries.grid is None
    assert seen["attn_pool"].keys.grid == (4, 4)
    with pytest.raises(InputError, match="attn_pool attends from 1 to 16 tokens"):
        class_relevance(model, torch.randn(1, 3, 64, 64))


def vit_pytorch_options(**options):
    return {
        "image_size": (64, 96), "patch_size": 16, "num_classes": 5, "dim": 32, "depth": 2,
        "heads": 2, "mlp_dim": 32, **options,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name", "leading"),
    [
        ("simple_vit_with_qk_norm", "SimpleViT", 0),
        ("vit", "ViT", 1),
        ("simple_vit_with_register_tokens", "SimpleViT", 0),
    ],
)
def test_vit_pytorch(module, name, leading):
    package = pytest.importorskip(f"vit_pytorch.{module}")
    torch.manual_seed(0)
    model = getattr(package, name)(**vit_pytorch_options())
    images = torch.randn(2, 3, 64, 96)
    kept = []
    for layer in model.modules():
        if isinstance(layer, nn.Softmax):
            layer.register_forward_hook(lambda m, i, out: kept.append(out.detach()))
    seen = check(
        model, images, grid=(4, 6), leading=leading, heads=2,
        names=["transformer.layers.0.0", "transformer.layers.1.0"],
    )  # fmt: skip
    for attention, weights in zip(seen.layers(), kept[:2], strict=True):
        assert torch.equal(attention.weights, weights)


def test_registers_at_the_end_are_not_taken_for_places():
    package = pytest.importorskip("vit_pytorch.simple_vit_with_register_tokens")
    model = package.SimpleViT(**vit_pytorch_options(num_register_tokens=3)).eval()
    with record(model) as seen:
        model(torch.randn(1, 3, 64, 96))
    tokens = seen["transformer.layers.0.0"].keys
    assert (tokens.count, tokens.extra, tokens.places()) == (27, 3, slice(0, 24))


def test_torchvision_vit():
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = models.VisionTransformer(64, 16, 2, 2, 32, 64, num_classes=4)
    images = torch.randn(2, 3, 64, 64)
    seen = check(model, images, grid=(4, 4), leading=1, heads=2)
    assert next(iter(seen)) == "encoder.layers.encoder_layer_0.self_attention"
    nn.init.normal_(model.heads[0].weight)
    assert class_relevance(model, images, 2).maps.shape == (2, 4, 4)


@pytest.mark.parametrize("flash", [False, True])
def test_monai(flash):
    blocks = pytest.importorskip("monai.networks.blocks.spatialattention")
    torch.manual_seed(0)
    block = blocks.SpatialAttentionBlock(2, 32, 8, norm_num_groups=8, use_flash_attention=flash)
    check(block, torch.randn(2, 32, 3, 5), grid=(3, 5), heads=4, names=["attn"])


@pytest.mark.parametrize("processor", ["AttnProcessor", "AttnProcessor2_0"])
def test_diffusers(processor):
    package = pytest.importorskip("diffusers.models.attention_processor")
    torch.manual_seed(0)
    block = package.Attention(
        32, heads=4, dim_head=8, norm_num_groups=8, residual_connection=True,
        processor=getattr(package, processor)(),
    )  # fmt: skip
    x = torch.randn(2, 32, 3, 5)
    seen = check(block, x, grid=(3, 5), heads=4, names=["Attention"])
    normed = block.group_norm(x.flatten(2)).transpose(1, 2)
    q, k = (f(normed).unflatten(2, (4, 8)).transpose(1, 2) for f in (block.to_q, block.to_k))
    expected = (q.double() @ k.double().mT / 8**0.5).softmax(-1)
    torch.testing.assert_close(seen["Attention"].weights.double(), expected, atol=1e-6, rtol=1e-5)


def test_health_of_diffusers_has_the_gains_of_its_norms():
    package = pytest.importorskip("diffusers.models.attention_processor")
    torch.manual_seed(0)
    block = package.Attention(32, heads=4, dim_head=8, qk_norm="layer_norm")
    nn.init.constant_(block.norm_k.weight, 2.0)
    with attention_health(block) as health:
        block(torch.randn(2, 6, 32))
    assert health["Attention"]["q_gain"] == pytest.approx(1)
    assert health["Attention"]["k_gain"] == pytest.approx(2)


def test_swin_is_refused_by_name():
    models = pytest.importorskip("torchvision.models")
    with (
        pytest.raises(InputError, match=r"features\.1\.0\.attn \(ShiftedWindowAttention\) attends"),
        record(models.swin_t()),
    ):
        pass
