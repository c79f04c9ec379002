"""Files in, checked folders out; models saved and loaded."""

import dataclasses
import json
import os
import pickle
import sys

import pytest
import torch

from regard._io import read_weights, write_weights
from regard.convert import verify
from regard.convert.conversion import ConvertOptions, convert, convert_file
from regard.convert.request import Facts
from regard.convert.verify import vit_reference
from regard.errors import InputError, MissingExtraError
from regard.layers.pixel_attention import PixelAttention
from regard.models.hub import from_pretrained, push_to_hub, save_pretrained
from regard.models.pixel_resnet import PixelResNet
from regard.models.simple_vit import SimpleViT
from tests.reference import peers

C = 32
SIZES = {
    "image_size": (8, 12),
    "patch_size": (4, 2),
    "num_classes": None,
    "dim": 16,
    "depth": 2,
    "heads": 3,
    "mlp_dim": 24,
    "channels": 2,
    "dim_head": 6,
}


@pytest.fixture
def ldm_state():
    torch.manual_seed(0)
    blocks = {
        path: peers.randomised(peers.AttnBlock(C), i) for i, path in enumerate(("mid.a", "up.b"))
    }
    state = {
        f"{path}.{k}": t for path, block in blocks.items() for k, t in block.state_dict().items()
    }
    return state | {"conv.weight": torch.ones(3)}


def test_a_checkpoint_becomes_a_folder_of_blocks(tmp_path, ldm_state):
    torch.save({"state_dict": ldm_state, "step": 3}, tmp_path / "vae.ckpt")
    said = []
    options = ConvertOptions(tmp_path / "vae.ckpt", tmp_path / "out", facts=Facts(rest="drop"))
    convert_file(options, said.append)
    assert said[0] == "ldm to regard: 2 found in 21 tensors"
    assert "mid.a: reference of ldm and regard differ by" in said[2]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["models"]["up.b."] == {
        "class": "PixelAttention",
        "channels": C,
        "num_heads": 1,
        "num_groups": 32,
        "eps": 1e-6,
    }
    with pytest.raises(InputError, match=r"holds 2 blocks, mid\.a, up\.b: give block="):
        from_pretrained(tmp_path / "out")
    with pytest.raises(InputError, match=r"no block 'up\.c'; nearest: up\.b"):
        from_pretrained(tmp_path / "out", block="up.c")
    block = from_pretrained(tmp_path / "out", block="up.b")
    theirs = peers.randomised(peers.AttnBlock(C), 1)
    theirs.load_state_dict({k[5:]: t for k, t in ldm_state.items() if k.startswith("up.b.")})
    x = torch.randn(1, C, 3, 2, dtype=torch.float64)
    torch.testing.assert_close(block(x), theirs(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("library", ["diffusers", "monai"])
def test_the_librarys_own_module_is_run_where_installed(tmp_path, ldm_state, library):
    pytest.importorskip(library)
    write_weights(tmp_path / "vae.safetensors", ldm_state)
    said = []
    facts = Facts(rest="drop")
    options = ConvertOptions(
        tmp_path / "vae.safetensors", tmp_path / "out", target=library, facts=facts
    )
    convert_file(options, said.append)
    assert f"reference of ldm and {library} differ by" in said[2]


def test_a_vit_is_run_on_both_sides_and_loads(tmp_path):
    module = pytest.importorskip("vit_pytorch.simple_vit_with_qk_norm")
    theirs = peers.randomised(module.SimpleViT(**SIZES))
    write_weights(
        tmp_path / "vit.safetensors", {f"model.{k}": t for k, t in theirs.state_dict().items()}
    )
    facts = Facts(image_size=(8, 12), patch_size=(4, 2))
    said = []
    options = ConvertOptions(tmp_path / "vit.safetensors", tmp_path / "out", facts=facts)
    convert_file(options, said.append)
    assert "model: vit-pytorch and regard differ by" in said[1]
    images = torch.randn(1, 2, 8, 12, dtype=torch.float64)
    ours = from_pretrained(tmp_path / "out")
    torch.testing.assert_close(ours(images), theirs(images), rtol=0, atol=1e-6)
    assert not ours.training


def test_the_reference_vit_is_vit_pytorchs():
    module = pytest.importorskip("vit_pytorch.simple_vit_with_qk_norm")
    theirs = peers.randomised(module.SimpleViT(**SIZES))
    images = torch.randn(2, 2, 8, 12, dtype=torch.float64)
    expected = vit_reference(theirs.state_dict(), SIZES, images)
    torch.testing.assert_close(expected, theirs(images), rtol=0, atol=1e-6)


def test_a_vit_needs_its_patch_and_its_shapes(tmp_path):
    ours = SimpleViT(**SIZES)
    state = convert(ours.state_dict(), "regard", "vit-pytorch-qk")
    size = {"image_size": (8, 12)}
    with pytest.raises(InputError, match=r"holds 16 values, .*: give channels or patch_size"):
        convert(state, "vit-pytorch-qk", **size)
    with pytest.raises(InputError, match="holds 16 values, not 3 channels"):
        convert(state, "vit-pytorch-qk", **size, channels=3)
    key = "transformer.layers.1.0.to_qkv.weight"
    with pytest.raises(InputError, match=r"misshapen: .*to_qkv\.weight \(54, 15\) for \(54, 16\)"):
        convert({**state, key: state[key][:, :-1]}, "vit-pytorch-qk")
    with pytest.raises(InputError, match="name block 12345 but have"):
        convert({**state, key.replace("1", "12345"): state[key]}, "vit-pytorch-qk")
    plain = {k: t for k, t in state.items() if "_norm.gamma" not in k}
    with pytest.raises(InputError, match=r"missing: .*k_norm\.gamma.*another kind of ViT"):
        convert(plain, "vit-pytorch-qk")


def test_a_wrong_conversion_is_refused_and_nothing_is_written(tmp_path, ldm_state, monkeypatch):
    write_weights(tmp_path / "vae.safetensors", ldm_state)
    real = verify.reference
    monkeypatch.setattr(verify, "reference", lambda *args: real(*args) + 1e-4)
    options = ConvertOptions(
        tmp_path / "vae.safetensors", tmp_path / "out", facts=Facts(rest="drop")
    )
    with pytest.raises(
        InputError, match=r"give other outputs: mid\.a: reference of ldm and regard"
    ):
        convert_file(options, lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["vae.safetensors"]


def test_an_existing_folder_is_never_written_to(tmp_path, ldm_state):
    (tmp_path / "out").mkdir()
    write_weights(tmp_path / "vae.safetensors", ldm_state)
    options = ConvertOptions(
        tmp_path / "vae.safetensors", tmp_path / "out", facts=Facts(rest="drop")
    )
    with pytest.raises(InputError, match="out exists already"):
        convert_file(options)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    "model",
    [
        PixelAttention(8, 2, 4, 1e-6, dtype=torch.bfloat16),
        SimpleViT(**{**SIZES, "num_classes": 5, "qk_norm": "layer"}),
        PixelResNet(image_size=16, num_classes=3, widths=(8, 16), depth=1),
    ],
    ids=["block", "vit", "resnet"],
)
def test_saved_models_come_back_the_same(tmp_path, model):
    save_pretrained(model, tmp_path / "saved")
    loaded = from_pretrained(tmp_path / "saved")
    assert type(loaded) is type(model)
    state = loaded.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[key], t) for key, t in model.state_dict().items())
    assert all(state[key].dtype == t.dtype for key, t in model.state_dict().items())
    assert repr(loaded) == repr(model)
    assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))


def test_folders_that_do_not_fit_are_refused(tmp_path):
    save_pretrained(PixelAttention(8, 2, 4), tmp_path / "saved")
    weights = tmp_path / "saved" / "model.safetensors"
    held = read_weights(weights)
    write_weights(weights, {k: t for k, t in held.items() if k != "q_bias"})
    with pytest.raises(InputError, match=r"missing or misshapen q_bias"):
        from_pretrained(tmp_path / "saved")
    config = tmp_path / "saved" / "config.json"
    config.write_text('{"layout": "ldm", "models": {"": {}}}')
    with pytest.raises(InputError, match="describes no model of regard"):
        from_pretrained(tmp_path / "saved")
    config.write_text('{"layout": "regard", "models": {"": {"class": "os.system"}}}')
    with pytest.raises(InputError, match=r"no class 'os\.system'"):
        from_pretrained(tmp_path / "saved")
    with pytest.raises(InputError, match=r"a Linear is no model of regard"):
        save_pretrained(torch.nn.Linear(1, 1), tmp_path / "other")


def test_the_hub_is_asked_for_what_is_no_folder(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    save_pretrained(PixelAttention(8, 2, 4), tmp_path / "saved")
    asked = []

    def snapshot(repository, *, revision, allow_patterns):
        asked.append((repository, revision, sorted(allow_patterns)))
        return str(tmp_path / "saved")

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    assert isinstance(from_pretrained("owner/name", revision="v1"), PixelAttention)
    assert asked == [("owner/name", "v1", ["config.json", "model.safetensors"])]


def test_a_name_that_is_no_repository_is_refused_before_any_download():
    pytest.importorskip("huggingface_hub")
    with pytest.raises(InputError, match="no folder here and could not be had from the Hub"):
        from_pretrained("a/b/c/d")


def test_a_folder_is_uploaded_whole(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    save_pretrained(PixelAttention(8, 2, 4), tmp_path / "saved")
    calls = []

    class Api:
        def create_repo(self, *args, **options):
            calls.append(("create", args, options))

        def upload_folder(self, **options):
            calls.append(("upload", options))
            return "commit"

    monkeypatch.setattr(hub, "HfApi", Api)
    assert push_to_hub(tmp_path / "saved", "owner/name", private=True) == "commit"
    assert calls == [
        ("create", ("owner/name",), {"private": True, "exist_ok": True}),
        ("upload", {"folder_path": tmp_path / "saved", "repo_id": "owner/name"}),
    ]
    with pytest.raises(InputError, match=r"lacks config\.json or model\.safetensors"):
        push_to_hub(tmp_path, "owner/name")


def test_a_checkpoint_that_holds_itself_is_read(tmp_path, ldm_state):
    held = {"state_dict": ldm_state}
    held["self"] = held
    torch.save(held, tmp_path / "vae.ckpt")
    options = ConvertOptions(tmp_path / "vae.ckpt", tmp_path / "out", facts=Facts(rest="drop"))
    assert len(convert_file(options, lambda _: None).blocks) == 2


def test_a_link_to_nothing_is_no_place_to_write(tmp_path, ldm_state):
    write_weights(tmp_path / "vae.safetensors", ldm_state)
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    options = ConvertOptions(tmp_path / "vae.safetensors", tmp_path / "out")
    with pytest.raises(InputError, match="out exists already"):
        convert_file(dataclasses.replace(options, facts=Facts(rest="drop")))


def test_facts_beside_the_weights_are_read(tmp_path, ldm_state):
    first, second = tmp_path / "one", tmp_path / "two"
    write_weights(tmp_path / "vae.safetensors", ldm_state)
    facts = Facts(rest="drop", num_groups=8)
    convert_file(ConvertOptions(tmp_path / "vae.safetensors", first, facts=facts), lambda _: None)
    said = []
    convert_file(ConvertOptions(first, second, target="diffusers"), said.append)
    assert said[1] == "  of 32 channels: 1 head, 8 groups, eps 1e-06"
    (second / "config.json").write_text(
        json.dumps({"_diffusers_version": "0.35", "norm_num_groups": 16})
    )
    given = Facts(num_heads=2, eps=1e-5)
    said = []
    convert_file(ConvertOptions(second, tmp_path / "three", facts=given), said.append)
    assert said[1] == "  of 32 channels: 2 heads, 16 groups, eps 1e-05"
    told = dataclasses.replace(given, num_groups=4)
    convert_file(ConvertOptions(second, tmp_path / "four", facts=told), said.append)
    assert "  of 32 channels: 2 heads, 4 groups, eps 1e-05" in said


def test_without_the_hub_client_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"regard\[hf\]"):
        from_pretrained("owner/name")


def test_the_reference_serves_where_no_library_is_installed(tmp_path, ldm_state, monkeypatch):
    write_weights(tmp_path / "vae.safetensors", ldm_state)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = []
    facts = Facts(rest="drop")
    options = ConvertOptions(
        tmp_path / "vae.safetensors", tmp_path / "out", target="diffusers", facts=facts
    )
    convert_file(options, said.append)
    assert "reference of ldm and reference of diffusers differ by" in said[2]


def test_weights_that_may_be_nan_are_checked_without_them(tmp_path, ldm_state, monkeypatch):
    ldm_state["mid.a.q.weight"][0] = torch.nan
    write_weights(tmp_path / "vae.safetensors", ldm_state)
    options = ConvertOptions(tmp_path / "vae.safetensors", tmp_path / "out")
    with pytest.raises(InputError, match=r"NaN or infinite: mid\.a\.q\.weight; take another"):
        convert_file(dataclasses.replace(options, facts=Facts(rest="drop")))
    allowed = dataclasses.replace(options, facts=Facts(rest="drop", allow_nan=True))
    assert convert_file(allowed, lambda _: None).tensors["mid.a.q_weight"][0].isnan().all()
    # a wrong conversion is still seen
    real = verify.reference
    monkeypatch.setattr(verify, "reference", lambda *args: real(*args) + 1e-4)
    with pytest.raises(
        InputError, match=r"give other outputs: mid\.a: reference of ldm and regard"
    ):
        convert_file(dataclasses.replace(allowed, out=tmp_path / "two"), lambda _: None)


class Executes:
    """A pickle of this calls `touch` when it is read by a careless unpickler."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def truncated(path, ldm_state):
    write_weights(path, ldm_state)
    path.write_bytes(path.read_bytes()[:-100])


def truncated_zip(path, ldm_state):
    torch.save(ldm_state, path)
    path.write_bytes(path.read_bytes()[:-100])


def in_two_layouts(ldm_state):
    other = convert(ldm_state, "ldm", "diffusers-old", rest="drop")
    return ldm_state | {key: tensor.clone() for key, tensor in other.items()}


HOSTILE = {
    "truncated.safetensors": (truncated, "is not a whole safetensors file"),
    "truncated.pt": (truncated_zip, "is not a whole file written by torch.save"),
    "executes.ckpt": (
        lambda path, state: torch.save(
            {"state_dict": state, "more": Executes(path.with_name("ran"))}, path
        ),
        "could run code of the file's author",
    ),
    "executes.bin": (
        lambda path, state: path.write_bytes(pickle.dumps(Executes(path.with_name("ran")))),
        "could run code of the file's author|not a whole file",
    ),
    "text.pt": (lambda path, state: path.write_text("hello"), "could run code|not a whole file"),
    "two.safetensors": (
        lambda path, state: write_weights(path, in_two_layouts(state)),
        "fit the layouts diffusers-old and ldm: say which",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_and_leave_nothing(tmp_path, ldm_state, name):
    write, message = HOSTILE[name]
    write(tmp_path / name, ldm_state)
    before = (tmp_path / name).read_bytes()
    with pytest.raises(InputError, match=message):
        convert_file(ConvertOptions(tmp_path / name, tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == before
