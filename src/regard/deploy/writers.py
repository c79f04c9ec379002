"""A model to a file: ONNX through torch's exporter, or a torch.export program."""

import contextlib
import copy
import importlib.util
import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from regard.deploy.facts import FileFacts
from regard.deploy.image_input import ImageInput
from regard.deploy.runners import EXTRA_FILE, SUFFIXES
from regard.errors import InputError, MissingExtraError
from regard.images import Preprocess
from regard.models.folded import fold_pixel_attention

HUGE = 2_000_000_000  # one ONNX file is one protobuf message, which ends at 2 GiB


class Half(nn.Module):
    """A float16 copy of a model that takes and gives float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).half()

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.to(torch.float16)).to(torch.float32)


def patch_of(model: nn.Module) -> tuple[int, int] | None:
    """What height and width must be multiples of, or None where the model has one size only."""
    patch = getattr(model, "patch_size", None)
    return None if patch is None else (int(patch[0]), int(patch[1]))


def dynamic_axes(model: nn.Module, takes: str) -> tuple[str, ...]:
    """The axes of an export's input that may have any length."""
    free = takes == "image" or patch_of(model) is not None
    return ("batch", "height", "width") if free else ("batch",)


def trace(
    model: nn.Module, preprocess: Preprocess, takes: str, *, half: bool = False, fold: bool = True
) -> ExportedProgram:
    """The model in eval mode, with preprocessing where it takes pictures, as a program.

    `fold` folds the weights of pixel attention, which inference in eager torch does too.
    """
    core = fold_pixel_attention(model) if fold else model
    core = Half(core) if half else core
    h, w = preprocess.size
    shapes: dict[int, Any] = {0: Dim("batch", min=1)}
    if takes == "image":
        core = ImageInput(core, preprocess)
        # sizes that nothing in the model has, lest one be taken for another
        example = torch.zeros(2, h + 3, w + 5, preprocess.channels, dtype=torch.uint8)
        shapes |= {1: Dim("height", min=1), 2: Dim("width", min=1)}
    else:
        example = torch.zeros(2, preprocess.channels, h, w)
        patch = patch_of(model)
        if patch is not None:
            shapes |= {2: patch[0] * Dim("rows", min=1), 3: patch[1] * Dim("columns", min=1)}
    with quiet():
        return torch.export.export(
            core.eval(), (example,), dynamic_shapes={"images": shapes}, strict=False
        )


def write(program: ExportedProgram, facts: FileFacts, path: Path) -> None:
    """Write the kind of file that the ending names."""
    if path.suffix == SUFFIXES["onnx"]:
        write_onnx(program, facts, path)
    else:
        write_program(program, facts, path)


def write_program(program: ExportedProgram, facts: FileFacts, path: Path) -> None:
    """Write a .pt2 that `torch.export.load` reads without regard."""
    with quiet(), open(path, "wb") as file:
        extra = {EXTRA_FILE: json.dumps(facts.to_metadata())}
        torch.export.save(program, file, extra_files=extra)


def write_onnx(program: ExportedProgram, facts: FileFacts, path: Path) -> None:
    """Write an ONNX file whose axes carry the names that `facts` states."""
    check_exporter()
    weights = sum(p.numel() * p.element_size() for p in program.state_dict.values())
    if weights > HUGE:
        raise InputError(
            f"the weights take {weights / 1e9:.1f} GB, and an ONNX file holds no more than 2; "
            "use --half or --to torch"
        )
    output = "logits" if facts.takes == "tensor" else "probabilities"
    with quiet():
        exported = torch.onnx.export(
            program, (), dynamo=True, input_names=["images"], output_names=[output], verbose=False
        )
    if exported is None:
        raise RuntimeError("torch.onnx.export gave nothing")
    proto = exported.model_proto
    shape = proto.graph.input[0].type.tensor_type.shape
    at = {"batch": 0, "height": 1, "width": 2}
    if facts.takes == "tensor":
        at |= {"height": 2, "width": 3}
    renamed = {}
    for name in facts.dynamic:
        dim = shape.dim[at[name]]
        renamed[dim.dim_param] = name
        dim.dim_param = name
    for value in (*proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in renamed:
                dim.dim_param = renamed[dim.dim_param]
    set_metadata(proto, facts)
    path.write_bytes(proto.SerializeToString())


def check_exporter() -> None:
    """Refuse where a package that torch's exporter needs is missing, naming the extra."""
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "export", "writing an ONNX file")


def set_metadata(proto: Any, facts: FileFacts) -> None:
    """Put the facts into an ONNX model."""
    del proto.metadata_props[:]
    for key, value in facts.to_metadata().items():
        proto.metadata_props.add(key=key, value=value)
    proto.producer_name = "regard"
    proto.producer_version = facts.versions["regard"]


def rewrite_metadata(path: Path, facts: FileFacts) -> None:
    """Replace an ONNX file's metadata and leave the rest as it is."""
    import onnx

    proto = onnx.load(str(path))
    set_metadata(proto, facts)
    path.write_bytes(proto.SerializeToString())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' progress notes and warnings to themselves; errors still raise."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "root")]
    levels = [logger.level for logger in loggers]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
