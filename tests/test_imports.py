"""Who may import whom (docs/architecture.md), and what `import regard` may cost."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "regard"

BASE = {"errors", "devices", "files", "locks"}
RUN_READERS = {"runs.folder", "runs.config", "runs.metrics"}
ALLOWED = {
    "errors": set(),
    "devices": {"errors"},
    "files": {"errors"},
    "locks": {"errors"},
    "hardware": set(),
    "layers": {"errors", "files", "hardware"},
    "foreign": {"errors", "files", "layers"},
    "record": {"errors", "files", "layers", "foreign"},
    "models": {"errors", "files", "hardware", "layers"},
    "weights": {"errors", "files", "layers", "models", "foreign"},
    "images": {"errors", "files", "locks"},
    "runs": {*BASE, "hardware", "images", "models", "record"},
    "views": {"errors", "devices", "files", "models", "record", "images", *RUN_READERS},
    "deploy": {*BASE, "models", "record", "images", *RUN_READERS},
    "study": {
        *BASE,
        "images",
        "layers",
        "models",
        "record",
        "runs",
        "views",
    },
}
# What may never be imported when a module is loaded: only inside the function that needs it.
OPTIONAL = {
    "PIL", "datasets", "huggingface_hub", "lightning_fabric", "matplotlib", "monai", "onnx",
    "onnxruntime", "onnxscript", "pyarrow", "rich", "simplejpeg", "sklearn", "tensorboard", "timm",
    "torchvision", "tyro", "diffusers", "vit_pytorch", "einops", "pandas",
}  # fmt: skip


# `__main__` loads the other two, and names the extra when that fails.
THE_COMMAND_LINE = ("__init__", "__main__", "cli", "options")


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


def imported_names(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide who imports whom"
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def violations(name, tree):
    part = name.split(".")[0]
    if part in THE_COMMAND_LINE:
        return
    for node in ast.walk(tree):
        for imported in imported_names(node):
            if not imported.startswith("regard."):
                continue
            target = imported.removeprefix("regard.")
            top = target.split(".")[0]
            ours = (ROOT / top).exists() or (ROOT / f"{top}.py").exists()
            if ours and top != part and not may_import(part, target):
                yield f"{name} imports {target}"


def may_import(part, target):
    """Whether `part` may import `target`, a dotted name or, from an import list, a prefix of it."""
    return any(
        target == one or target.startswith(one + ".") or one.startswith(target + ".")
        for one in ALLOWED[part]
    )


def test_the_layers_hold():
    found = [v for name, path in modules() for v in violations(name, ast.parse(path.read_text()))]
    assert not found, found


def test_the_rule_can_fail():
    assert list(violations("images.decode", ast.parse("from regard.layers.attend import attend")))
    assert list(violations("views.report", ast.parse("from regard.runs.loop import train")))
    assert not list(violations("views.report", ast.parse("from regard.runs.folder import Run")))


def test_optional_packages_are_imported_late():
    for name, path in modules():
        if name in THE_COMMAND_LINE:
            continue
        for node in ast.parse(path.read_text()).body:
            for imported in imported_names(node):
                assert imported.split(".")[0] not in OPTIONAL, f"{name} imports {imported} at load"


def test_import_regard_is_quiet_and_light():
    heavy = sorted(OPTIONAL)
    code = f"import sys, regard; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""
