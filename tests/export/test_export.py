"""regard export: files equal to the model, by the proof's own standards and by others."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.data.preprocess import Preprocess
from regard.errors import InputError, MissingExtraError
from regard.export import export as export_module
from regard.export import export as measure_module
from regard.export.export import ExportOptions, export
from regard.export.formats import FileFacts, digest, dynamic_axes, trace, write
from regard.export.parity import NotEqual
from regard.layers.pixel_attention import FoldedPixelAttention, fold_pixel_attention
from regard.predict.predictor import load
from regard.training.run_folder import RunFolder

for needed in ("onnx", "onnxscript"):
    pytest.importorskip(needed)
onnxruntime = pytest.importorskip("onnxruntime")


@pytest.fixture(autouse=True)
def short_timing(monkeypatch):
    """The timing of a few calls is not what is tested."""
    plain = measure_module.interleaved
    monkeypatch.setattr(measure_module, "interleaved", lambda f, value: plain(f, value, 0.0))


@pytest.fixture(scope="module")
def exported(vit_run, net_run):
    """Each kind of file, made once."""
    made = {}

    def make(run="vit", **options):
        key = (run, *sorted(options.items()))
        if key not in made:
            where = {"vit": vit_run, "net": net_run}[run]
            made[key] = export(ExportOptions(where, licence="CC0-1.0", **options))
        return made[key]

    return make


def check_record(result, precision, takes):
    """What lies beside a file, and in it."""
    record = json.loads(Path(f"{result.file}.json").read_text())
    assert record["sha256"] == digest(result.file)
    row = record["rows"][result.file.name]
    assert row["images"] == 179  # all that the val split has
    assert {shape[0] for shape in row["input_shapes"]} >= {1, 5}
    if precision == "fp32":
        assert row["largest_difference"] <= 1e-4
        assert row["same_class"] == 1
        assert row["accuracy"] == record["rows"]["eager"]["accuracy"] > 0.5
    card = Path(f"{result.file}.md").read_text()
    for words in (
        f"{row['accuracy']:.2%}",
        "CC0-1.0",
        "`7`",
        "digits",
        "uint8" * (takes == "image"),
    ):
        assert words in card
    assert result.facts.licence == "CC0-1.0"
    assert result.facts.figures["rows"][result.file.name] == row
    return row


def test_onnx_of_a_vit_at_other_sizes(exported, vit_run):
    result = exported()
    row = check_record(result, "fp32", "tensor")
    assert len({tuple(shape[2:]) for shape in row["input_shapes"]}) >= 2
    session = onnxruntime.InferenceSession(str(result.file))
    assert session.get_inputs()[0].shape == ["batch", 1, "height", "width"]
    assert session.get_outputs()[0].shape == ["batch", 10]
    model = RunFolder(vit_run).load_model()
    for shape in ((1, 1, 8, 8), (7, 1, 16, 4), (2, 1, 32, 40)):
        x = torch.randn(shape)
        found = session.run(None, {"images": x.numpy()})[0]
        np.testing.assert_allclose(found, model(x).detach().numpy(), atol=1e-4)
    with pytest.raises(InputError, match="not what the file takes"):
        load(result.file).runner(torch.randn(1, 1, 9, 8))


def test_onnx_of_a_net_refuses_other_sizes(exported, net_run):
    result = exported("net")
    check_record(result, "fp32", "tensor")
    assert result.facts.dynamic == ("batch",)
    with pytest.raises(InputError, match=r"Got: 12 Expected: 8"):
        load(result.file).runner(torch.randn(1, 1, 12, 8))


def test_a_program_loads_without_regard(exported, vit_run, tmp_path):
    result = exported(to="torch")
    check_record(result, "fp32", "tensor")
    x = torch.randn(3, 1, 12, 16)
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import sys, torch\n"
        "sys.modules['regard'] = None\n"
        f"x = torch.load({str(tmp_path / 'x.pt')!r})\n"
        f"y = torch.export.load({str(result.file)!r}).module()(x)\n"
        f"torch.save(y.detach(), {str(tmp_path / 'y.pt')!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    found = torch.load(tmp_path / "y.pt")
    assert (found - RunFolder(vit_run).load_model()(x)).abs().max() < 1e-4
    with pytest.raises(InputError, match="not what the program was exported for"):
        load(result.file, trusted=True).runner(torch.randn(1, 1, 9, 8))


def test_pictures_in_probabilities_out_without_regard(exported, vit_run, pictures):
    result = exported(input="image")
    check_record(result, "fp32", "image")
    script = Path(__file__).parents[2] / "examples" / "classify_onnx.py"
    command = [sys.executable, str(script), str(result.file), *pictures]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wanted = load(vit_run).predict(list(pictures))
    for line, path, one in zip(done.stdout.splitlines(), pictures, wanted, strict=True):
        name, *best = line.split("\t")
        assert name == path
        for said, (label, probability) in zip(best, one.top(3), strict=True):
            assert said.split()[0] == label
            assert float(said.split()[1]) == pytest.approx(probability, abs=1.1e-4)
    found = load(result.file).predict(list(pictures))
    np.testing.assert_allclose(found.probabilities, wanted.probabilities, atol=1e-5)
    with pytest.raises(InputError, match="gives no features"):
        load(result.file).embed(list(pictures))
    with pytest.raises(InputError, match="is an exported file and holds no module"):
        _ = load(result.file).model


def test_half_holds_its_tolerance(exported):
    result = exported(half=True)
    row = check_record(result, "half", "tensor")
    assert 0 < row["largest_probability_difference"] <= 1e-2
    onnx = pytest.importorskip("onnx")
    large = [w for w in onnx.load(str(result.file)).graph.initializer if np.prod(w.dims) > 100]
    assert len(large) >= 6
    assert {w.data_type for w in large} == {onnx.TensorProto.FLOAT16}


def test_int8_says_what_it_costs(exported, vit_run, net_run, tmp_path):
    result = exported(int8=True, max_drop=5.0)
    row = check_record(result, "int8", "tensor")
    rows = result.numbers["rows"]
    assert list(rows) == ["eager", "fp32 ONNX", "model-int8.onnx"]
    assert rows["eager"]["accuracy"] - row["accuracy"] <= 0.05
    assert row["bytes"] < 0.7 * rows["fp32 ONNX"]["bytes"]
    onnx = pytest.importorskip("onnx")
    kinds = [node.op_type for node in onnx.load(str(result.file)).graph.node]
    assert kinds.count("MatMulInteger") == 6  # patches; qkv, out, up, down; classifier
    with pytest.raises(InputError, match="int8 is for a SimpleViT"):
        export(ExportOptions(net_run, int8=True, out=tmp_path / "a.onnx"))


class Several(torch.nn.Module):
    """Models side by side, so that one export shows what would take one each."""

    def __init__(self, models):
        super().__init__()
        self.models = torch.nn.ModuleList(models)
        self.patch_size = getattr(models[0], "patch_size", None)

    def forward(self, images):
        return torch.cat([model(images) for model in self.models], dim=1)


def test_qk_norm_in_each_form(tmp_path):
    """ "unit" is that of the run above."""
    torch.manual_seed(1)
    options = {"num_classes": 3, "image_size": 8, "channels": 1, "depth": 1}
    forms = ("rms", "layer", None)
    model = Several([regard.create("simple-vit-nano/4", **options, qk_norm=f) for f in forms])
    for one in model.eval().models:
        torch.nn.init.normal_(one.classifier.weight)
    check_equal(model, trace(model, Preprocess((8, 8), channels=1), "tensor"), (3, 1, 12, 8),
                tmp_path / "a.onnx")  # fmt: skip


@pytest.mark.parametrize("fold", [True, False])
def test_pixel_attention_folded_and_not(fold, tmp_path):
    """16 channels have one head, 128 have two."""
    torch.manual_seed(2)
    options = {"num_classes": 3, "image_size": 8, "channels": 1, "depth": 1}
    model = Several(
        [regard.create("pixel-resnet-nano", **options, widths=(8, width)) for width in (16, 128)]
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    program = trace(model, Preprocess((8, 8), channels=1), "tensor", fold=fold)
    check_equal(model, program, (3, 1, 8, 8), tmp_path / "a.onnx")
    folded = fold_pixel_attention(model)
    assert sum(type(m) is FoldedPixelAttention for m in folded.modules()) == 2
    assert not any(type(m) is FoldedPixelAttention for m in model.modules())


def check_equal(model, program, shape, path):
    facts = FileFacts(
        takes="tensor", precision="fp32", classes=("a", "b", "c"),
        preprocess=Preprocess((8, 8), channels=1), model={}, dynamic=dynamic_axes(model, "tensor"),
        multiple=(1, 1), run={}, licence="", versions={"regard": "0"},
    )  # fmt: skip
    write(program, facts, path)
    x = torch.randn(shape)
    with torch.enable_grad():  # nothing folded
        wanted = model(x).detach()
    found = onnxruntime.InferenceSession(str(path)).run(None, {"images": x.numpy()})[0]
    for columns in range(0, wanted.shape[1], 3):  # a model each, of its own scale
        of_one = wanted[:, columns : columns + 3].numpy()
        np.testing.assert_allclose(
            found[:, columns : columns + 3], of_one, atol=2e-5 * max(1, np.abs(of_one).max())
        )


def test_a_file_that_differs_is_not_kept(vit_run, tmp_path, monkeypatch):
    def other(model, *arguments, **options):
        changed = RunFolder(vit_run).load_model()
        with torch.no_grad():
            changed.classifier.bias[3] += 3e-4
        return trace(changed, *arguments, **options)

    monkeypatch.setattr(export_module, "trace", other)
    with pytest.raises(NotEqual, match=r"largest output difference .* is 0.0003, and 0.0001"):
        export(ExportOptions(vit_run, out=tmp_path / "a.pt2", to="torch"))
    assert not list(tmp_path.iterdir())


def test_int8_that_costs_too_much_is_not_kept(exported, vit_run, tmp_path, monkeypatch):
    ready = exported().file.read_bytes()

    def ruin(source, out, facts):
        import onnx

        model = onnx.load(str(source))
        for value in model.graph.initializer:
            if "classifier.bias" in value.name:
                array = np.array([9e3] + [0] * 9, np.float32)
                value.CopyFrom(onnx.numpy_helper.from_array(array, value.name))
        onnx.save(model, str(out))

    monkeypatch.setattr(export_module, "trace", lambda *arguments, **options: None)
    monkeypatch.setattr(
        export_module, "write", lambda program, facts, path: path.write_bytes(ready)
    )
    monkeypatch.setattr(export_module, "quantise", ruin)
    with pytest.raises(NotEqual, match=r"in int8 the accuracy falls by \d\d\.\d\d points"):
        export(ExportOptions(vit_run, int8=True, out=tmp_path / "a.onnx"))
    assert not list(tmp_path.iterdir())


def test_an_earlier_file_is_checked(exported, vit_run, net_run):
    file = exported().file
    before = {path.name: path.stat().st_mtime_ns for path in file.parent.iterdir()}
    result = export(ExportOptions(vit_run, check=file))
    assert result.numbers["rows"][file.name]["same_class"] == 1
    assert re.search(r"eager torch +\d", str(result))
    assert before == {path.name: path.stat().st_mtime_ns for path in file.parent.iterdir()}
    with pytest.raises(InputError, match="exported from other weights"):
        export(ExportOptions(net_run, check=file))


def test_data_of_other_classes_is_refused(vit_run, tmp_path):
    for name in ("cat", "dog"):
        for i in range(3):
            path = tmp_path / "data" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.zeros((8, 8), np.uint8)).save(path)
    with pytest.raises(InputError, match="has 2 classes, among them 'cat', and the run 10"):
        export(ExportOptions(vit_run, out=tmp_path / "a.onnx", data=str(tmp_path / "data")))
    assert not list(tmp_path.glob("*a.onnx*"))


def test_refusals(vit_run, tmp_path, monkeypatch):
    out = tmp_path / "a.onnx"
    out.write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        export(ExportOptions(vit_run, out=out))
    assert out.read_text() == "mine"
    with pytest.raises(InputError, match=r"--to torch writes \.pt2"):
        export(ExportOptions(vit_run, out=tmp_path / "b.onnx", to="torch"))
    with pytest.raises(InputError, match="is not a whole ONNX file"):
        export(ExportOptions(vit_run, check=out))
    for wrong, words in (
        ({"int8": True, "half": True}, "given together"),
        ({"int8": True, "to": "torch"}, "--to onnx"),
        ({"images": 10}, "at least 1000"),
        ({"max_drop": -1.0}, "0 to 100"),
    ):
        with pytest.raises(InputError, match=words):
            ExportOptions(vit_run, **wrong)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"regard\[export\]"):
        export(ExportOptions(vit_run, out=tmp_path / "c.onnx"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]


def test_facts_come_back_from_strings():
    facts = FileFacts(
        takes="image", precision="int8", classes=("é", "b"), preprocess=Preprocess((8, 9)),
        model={"name": "simple-vit-s/16"}, dynamic=("batch",), multiple=(16, 16),
        run={"name": "r"}, licence="MIT", versions={}, figures={"rows": {"a": 1.5}},
    )  # fmt: skip
    strings = facts.to_metadata()
    assert all(isinstance(value, str) for value in strings.values())
    assert FileFacts.from_metadata(strings, Path("f")) == facts
    del strings["classes"]
    with pytest.raises(InputError, match="lacks the metadata 'classes'"):
        FileFacts.from_metadata(strings, Path("f"))
