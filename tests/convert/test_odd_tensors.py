"""Tensors, facts and configs that no model has: refused by name, before anything is written."""

import json

import pytest
import torch
from torch import Tensor

from regard._io import read_weights
from regard.convert.conversion import ConvertOptions, convert, convert_file
from regard.convert.request import Facts
from regard.errors import InputError
from regard.layers.pixel_attention import PixelAttention
from regard.models.hub import from_pretrained, save_pretrained
from regard.models.simple_vit import SimpleViT
from tests.reference import peers

C = 32
FACTS = {"num_groups": 8, "num_heads": 1}
VIT = {"num_classes": None, "dim": 16, "depth": 1, "heads": 3, "mlp_dim": 24, "dim_head": 6}
ODD = {
    "sparse": (Tensor.to_sparse, "a tensor of layout torch.sparse_coo"),
    "nested": (lambda t: torch.nested.nested_tensor([t, t]), "a nested tensor"),
    "meta": (lambda t: t.to("meta"), "a meta tensor, without values"),
    "quantised": (
        lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
        "numbers of type torch.qint8",
    ),
    "complex": (lambda t: t.to(torch.complex128), "numbers of type torch.complex128"),
}


def block():
    return {f"mid.{k}": t for k, t in peers.randomised(peers.AttnBlock(C)).state_dict().items()}


def vit():
    return SimpleViT(image_size=8, patch_size=4, channels=2, **VIT).state_dict()


def test_kept_keys_that_share_memory_are_written(tmp_path):
    tied = torch.arange(12.0).reshape(3, 4)
    views = {"x1": tied, "x2": tied, "x3": tied[1:], "x4": tied[:2].T}
    torch.save(block() | views, tmp_path / "vae.pt")
    options = ConvertOptions(tmp_path / "vae.pt", tmp_path / "out", facts=Facts(rest="keep"))
    convert_file(options, lambda _: None)
    held = read_weights(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(held[key], tensor) for key, tensor in views.items())


@pytest.mark.parametrize("kind", ODD)
def test_a_tensor_that_cannot_be_written_is_named(kind):
    change, reason = ODD[kind]
    state = block() | {"conv.weight": change(torch.ones(3))}
    with pytest.raises(InputError, match=rf"cannot hold: 'conv\.weight' \({reason}\); make them"):
        convert(state, "ldm", rest="keep")
    assert len(convert(state, "ldm", rest="drop")) == 10
    for key in ("mid.q.weight", "mid.norm.weight", "mid.norm.bias"):
        state = block() | {key: change(block()[key])}
        with pytest.raises(InputError, match=rf"cannot hold: '{key}' \({reason}\); make them"):
            convert(state, "ldm")
    for key in ("norm.weight", "blocks.0.attention.qkv.weight"):
        state = vit() | {key: change(vit()[key])}
        with pytest.raises(InputError, match=rf"cannot hold: '{key}' \({reason}\); make them"):
            convert(state, "regard", "vit-pytorch-qk")


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(InputError, match=r"cannot hold: '\\ud800' \(no name of a tensor\)"):
        convert(block() | {"\ud800": torch.ones(1)}, "ldm", rest="keep")
    with pytest.raises(
        InputError, match=r"cannot hold: '\\ud800\.k\.bias' \(no name of a tensor\)"
    ):
        convert({k.replace("mid", "\ud800"): t for k, t in block().items()}, "ldm")
    with pytest.raises(InputError, match="no tensor by name under 'epoch', 3; leave them out"):
        convert(block() | {3: torch.ones(1), "epoch": 1}, "ldm")
    found = convert(block() | {3: torch.ones(1), "epoch": 1}, "ldm", rest="drop")
    assert set(found) == set(convert(block(), "ldm"))


def test_the_target_says_which_of_our_models_is_meant():
    ours = {f"mid.{k}": t for k, t in PixelAttention(32, 1, 32).state_dict().items()}
    both = vit() | ours
    told = {"num_heads": 1, "num_groups": 32, "eps": 1e-6, "rest": "drop"}
    assert all(key.startswith("mid.") for key in convert(both, "regard", "ldm", **told))
    with pytest.raises(InputError, match="a SimpleViT cannot become 'ldm'"):
        convert(vit(), "regard", "ldm")


@pytest.mark.parametrize("source", ["regard", "vit-pytorch-qk"])
@pytest.mark.parametrize(
    ("ours", "theirs", "axes"),
    [
        ("norm.weight", "transformer.norm.weight", r"\(dim\)"),
        ("embed.project.weight", "to_patch_embedding.2.weight", r"\(dim, patch\)"),
        ("blocks.0.mlp.up.weight", "transformer.layers.0.1.net.1.weight", r"\(mlp_dim, dim\)"),
        (
            "blocks.0.attention.q_norm.gamma",
            "transformer.layers.0.0.q_norm.gamma",
            r"\(heads, 1, dim_head\)",
        ),
    ],
)
def test_weights_that_say_no_width_are_misshapen(source, ours, theirs, axes):
    target = "vit-pytorch-qk" if source == "regard" else "regard"
    state = vit() if source == "regard" else convert(vit(), "regard", source)
    key = ours if source == "regard" else theirs
    with pytest.raises(InputError, match=rf"misshapen: {key} \(\) for {axes}"):
        convert(state | {key: torch.tensor(1.0)}, source, target)
    empty = state[key][:0]
    with pytest.raises(InputError, match=rf"misshapen: {key} \(0,.*\) for {axes}"):
        convert(state | {key: empty}, source, target)


def test_a_block_without_channels_is_misshapen():
    state = {f"{k}_{kind}": torch.ones(0) for k in ("norm", "out", *"qkv") for kind in ("bias",)}
    state |= {f"{k}_weight": torch.ones(0, 0) for k in ("out", *"qkv")}
    state["norm_weight"] = torch.ones(0)
    with pytest.raises(InputError, match=r"misshapen: .*norm_weight \(0,\) for \(1,\)"):
        convert(state, "regard", "monai", **FACTS, packed=True)
    ldm = block() | {"mid.norm.weight": torch.tensor(1.0)}
    with pytest.raises(InputError, match=r"misshapen: .*mid\.norm\.weight \(\) for \(1,\)"):
        convert(ldm, "ldm")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"image_size": (8, 8), "patch_size": (0, 0)}, "patch_size=0: give a positive integer"),
        ({"patch_size": (0, 0)}, "patch_size=0: give a positive integer"),
        ({"image_size": (8, 8), "patch_size": (4,)}, r"patch_size=\(4,\): give a positive"),
        ({"image_size": (8, 0), "channels": 2}, "image_size=0: give a positive integer"),
        ({"image_size": 8, "patch_size": 4, "channels": 0}, "channels=0: give a positive"),
        ({"image_size": 8, "channels": 64}, "holds 32 values, not 64 channels"),
    ],
)
def test_sizes_of_nothing_are_refused(facts, message):
    with pytest.raises(InputError, match=message):
        convert(vit(), "regard", "vit-pytorch-qk", **facts)


def test_a_block_number_of_many_digits_names_no_block():
    key = f"blocks.{'9' * 5000}.attention.qkv.weight"
    with pytest.raises(InputError, match=r"unused keys.*blocks\.999.*….*999\.attention\.qkv") as e:
        convert(vit() | {key: torch.ones(1)}, "regard", "vit-pytorch-qk")
    assert len(str(e.value)) < 500


@pytest.fixture
def saved(tmp_path):
    save_pretrained(PixelAttention(8, 2, 4), tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("described", [5, None, [], "PixelAttention"])
def test_a_config_that_describes_no_class_is_refused(saved, described):
    config = {"layout": "regard", "models": {"": described}}
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"config\.json says .* of the model ''; give its class"):
        from_pretrained(saved)


@pytest.mark.parametrize("block", [0, [], True, b""])
def test_a_block_is_named_by_text(saved, block):
    with pytest.raises(InputError, match=r"saved has no block .*; nearest: "):
        from_pretrained(saved, block=block)


def test_a_config_of_impossible_sizes_is_refused(saved):
    model = {"class": "PixelAttention", "channels": 2**62, "num_heads": 2, "num_groups": 2}
    config = {"layout": "regard", "models": {"": {**model, "eps": 1e-5}}}
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"config\.json does not fit PixelAttention"):
        from_pretrained(saved)
