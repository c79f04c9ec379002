"""Who may import whom (docs/architecture.md), that nothing imports in a circle, and what
`import regard` may load."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "regard"
BASE = {"errors", "_version", "_io", "_device", "_png"}
RUN_READERS = {"training.run_folder", "training.config", "training.metrics", "training.evaluate"}
ALLOWED = {
    "errors": set(),
    "_version": set(),
    "_png": {"errors"},
    "_io": {"errors"},
    "_device": {"errors"},
    "layers": BASE,
    "foreign": {*BASE, "layers"},
    "models": {*BASE, "layers"},
    "convert": {*BASE, "layers", "models", "foreign"},
    "acceleration": {*BASE, "layers", "models", "foreign", "convert.layouts"},
    "data": BASE,
    "interpret": {*BASE, "layers", "foreign", "models", "data.preprocess"},
    "training": {*BASE, "data", "models", "interpret"},
    "pages": {*BASE, "interpret", "data", "models", *RUN_READERS},
    "export": {*BASE, "models", "data", "interpret", "layers", *RUN_READERS},
    "predict": {*BASE, "models", "data", "interpret", "export.formats", *RUN_READERS},
    "study": {*BASE, "layers", "models", "data", "interpret", "training", "pages"},
}
# They join the packages, each command importing late.
COMMAND_LINE = {"__init__", "__main__", "cli"}
# Imported only inside the function that needs it.
OPTIONAL = {
    "PIL", "datasets", "diffusers", "einops", "huggingface_hub", "lightning_fabric", "monai",
    "onnx", "onnxruntime", "onnxscript", "pandas", "pyarrow", "rich", "scipy", "simplejpeg",
    "sklearn", "tensorboard", "timm", "torchvision", "tyro", "vit_pytorch",
}  # fmt: skip

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


def imports(code, *, nested=True):
    """The dotted names that a module's text imports; with `nested`, inside functions too."""
    tree = ast.parse(code)
    for node in ast.walk(tree) if nested else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole.removeprefix("regard.") in MODULES else node.module


def ours(code):
    """The modules of this package that a module's text imports."""
    for name in imports(code):
        if name == "regard":
            yield ""
        elif name.startswith("regard."):
            yield name.removeprefix("regard.")


def violations(module, code):
    part = module.split(".")[0]
    for target in ours(code):
        allowed = any(target == one or target.startswith(one + ".") for one in ALLOWED[part])
        if target.split(".")[0] != part and not allowed:
            yield f"{module} imports {target or 'the root of the package'}"


def test_each_package_imports_what_it_may():
    found = [
        violation
        for module, path in MODULES.items()
        if module not in COMMAND_LINE
        for violation in violations(module, path.read_text())
    ]
    assert not found


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("data.decode", "from regard.layers.attend import attend"),
        ("pages.train_report", "def f():\n    from regard.training.trainer import train"),
        ("study.study", "import regard"),
        ("layers.attend", "from regard import attend"),
    ],
)
def test_a_forbidden_import_is_found(module, code):
    assert list(violations(module, code))


def graph(modules):
    return {module: set(ours(code)) - {module} for module, code in modules.items()}


def test_no_circle():
    found = graph({module: path.read_text() for module, path in MODULES.items()})
    list(graphlib.TopologicalSorter(found).static_order())


def test_a_circle_is_found():
    code = {"_io": "from regard import errors", "errors": "from regard._io import sync"}
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter(graph(code)).static_order())


def test_optional_packages_are_imported_late():
    for module, path in MODULES.items():
        if module not in COMMAND_LINE:
            top = {name.split(".")[0] for name in imports(path.read_text(), nested=False)}
            assert not top & OPTIONAL, module


def test_import_regard_is_quiet_and_light():
    heavy = sorted(OPTIONAL)
    code = f"import sys, regard; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""
