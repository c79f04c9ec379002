"""What an exported file says about itself: enough to use it, and to know where it comes from."""

import contextlib
import copy
import dataclasses
import hashlib
import importlib.util
import json
import logging
import os
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from regard.data.preprocess import Preprocess, round_ratio
from regard.errors import InputError, MissingExtraError
from regard.layers.pixel_attention import fold_pixel_attention

FORMAT = "regard-export-1"
# What a file takes, and what it gives: tensor -> logits, image -> probabilities.
TAKES = ("tensor", "image")
PRECISIONS = ("fp32", "half", "int8")


@dataclass(frozen=True)
class FileFacts:
    """The metadata of an exported file. Each field travels as one JSON value under its name."""

    takes: str
    """tensor: "images" float32 (b, c, h, w), normalised, to "logits" (b, k); image: "images"
    uint8 (b, h, w, c) of any size to "probabilities" (b, k)."""
    precision: str
    classes: tuple[str, ...]
    preprocess: Preprocess
    model: dict[str, Any]
    """The arguments of `regard.create`."""
    dynamic: tuple[str, ...]
    """The axes of the input that may have any length, by name."""
    multiple: tuple[int, int]
    """Height and width, where dynamic, must be multiples of these."""
    run: dict[str, Any]
    """name, and sha256 of its weights."""
    licence: str
    versions: dict[str, str]
    figures: dict[str, Any] = field(default_factory=dict)
    """What the proof measured; empty until then."""

    def to_metadata(self) -> dict[str, str]:
        """Strings by name, as files hold them."""
        values = {**dataclasses.asdict(self), "preprocess": self.preprocess.to_dict()}
        return {"format": FORMAT, **{key: json.dumps(value) for key, value in values.items()}}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], where: Path) -> "FileFacts":
        """Rebuild from `to_metadata`'s result, or refuse a file that regard did not export."""
        if metadata.get("format") != FORMAT:
            raise InputError(
                f"{where} does not say that it is an export of this version; give a file that "
                "`regard export` wrote"
            )
        values: dict[str, Any] = {}
        for known in dataclasses.fields(cls):
            if known.name not in metadata:
                raise InputError(f"{where} lacks the metadata {known.name!r}; export it again")
            values[known.name] = json.loads(metadata[known.name])
        for name in ("classes", "dynamic", "multiple"):
            values[name] = tuple(values[name])
        values["preprocess"] = Preprocess.from_dict(values["preprocess"])
        return cls(**values)


def digest(path: Path) -> str:
    """The SHA-256 of a file, hexadecimal."""
    running = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            running.update(block)
    return running.hexdigest()


# Preprocessing as part of an exported file: uint8 pictures of any size in, probabilities out.


class ImageInput(nn.Module):
    """softmax(model(R_h x R_wᵀ)) of pictures x (b, H, W, c), normalised.

    R_h (h, H) and R_w (w, W) hold the weights of antialiased bilinear interpolation, so a crop is
    a range of zero columns, a letterbox's padding a range of zero rows (0 is the mean after
    normalising), and no step depends on a shape: every size exports, 1 × 1 too. The numbers are
    those of `Preprocess`.
    """

    def __init__(self, model: nn.Module, preprocess: Preprocess) -> None:
        super().__init__()
        self.model = model
        self.preprocess = preprocess
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", 255 * torch.tensor(preprocess.mean).view(-1, 1, 1))
        self.register_buffer("std", 255 * torch.tensor(preprocess.std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """uint8 (b, H, W, c) to probabilities (b, k), float32."""
        x = images.permute(0, 3, 1, 2).to(torch.float32)  # b h w c -> b c h w
        height, width = x.shape[-2:]
        rows, columns = self.resizing(height, width, x.device)
        x = rows @ ((x - self.mean) / self.std) @ columns.T
        return self.model(x).to(torch.float32).softmax(dim=-1)

    def resizing(self, height: Any, width: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        """R_h and R_w for pictures of this size, which may be symbolic."""
        h, w = self.preprocess.size
        if self.preprocess.fit == "crop":
            box_h = torch.sym_min(height, torch.sym_max(1, round_ratio(width * h, w)))
            box_w = torch.sym_min(width, torch.sym_max(1, round_ratio(height * w, h)))
            top, left = (height - box_h) // 2, (width - box_w) // 2
            return (
                interpolation(height, (top, box_h), h, (0, h), device),
                interpolation(width, (left, box_w), w, (0, w), device),
            )
        in_h, in_w = h, w
        if self.preprocess.fit == "letterbox":
            in_h = torch.sym_min(h, torch.sym_max(1, round_ratio(height * w, width)))
            in_w = torch.sym_min(w, torch.sym_max(1, round_ratio(width * h, height)))
        top, left = (h - in_h) // 2, (w - in_w) // 2
        return (
            interpolation(height, (0, height), h, (top, in_h), device),
            interpolation(width, (0, width), w, (left, in_w), device),
        )


def interpolation(
    length: Any, source: tuple[Any, Any], out: int, target: tuple[Any, Any], device: torch.device
) -> Tensor:
    """Weights (out, length) that resize the source range into the target range, float32.

    A range is (first, count). With s = source count / target count, output i of the target looks
    at the centre z = first + (i + ½) s with weights max(0, 1 - |j + ½ - z| / max(s, 1)) on the
    pixels j of the source, divided by their sum; other outputs have no weights.
    """
    first, count = source
    begin, filled = target
    scale = count / filled
    place = torch.arange(out, dtype=torch.float64, device=device) + 0.5 - begin
    pixel = torch.arange(length, dtype=torch.float64, device=device) + 0.5
    distance = (pixel[None, :] - (first + place * scale)[:, None]).abs()
    weights = (1 - distance / torch.sym_max(scale, 1.0)).clamp(min=0)
    weights = weights * ((pixel > first) & (pixel < first + count))[None, :]
    weights = weights * ((place > 0) & (place < filled))[:, None]
    # where no output is, the sum is 0 and the weights stay 0
    return (weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-12)).to(torch.float32)


# An exported file as a function: tensors in, tensors out.


SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
EXTRA_FILE = "regard.json"


class Runner(Protocol):
    """Images to what the file gives for them: logits, or probabilities where it takes pictures."""

    def __call__(self, images: Tensor) -> Tensor: ...


class ModuleRunner:
    """A module in eager torch, on its device."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module.to(device)
        self.device = device

    def __call__(self, images: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.module(images.to(self.device)).float()


class ProgramRunner:
    """A torch.export program, on the device it was exported for."""

    def __init__(self, path: Path) -> None:
        try:
            self.module: Any = torch.export.load(path).module()
        except (RuntimeError, ValueError, KeyError, AssertionError, zipfile.BadZipFile) as error:
            raise InputError(f"{path} is not a whole torch.export program ({error})") from None

    def __call__(self, images: Tensor) -> Tensor:
        with torch.inference_mode():
            try:
                return self.module(images).float()
            except AssertionError as error:  # the program's own check of shapes
                raise InputError(
                    f"images of shape {tuple(images.shape)} are not what the program was "
                    f"exported for ({error})"
                ) from None


class OnnxRunner:
    """An ONNX file in ONNX Runtime."""

    def __init__(self, path: Path, device: str = "cpu", threads: int | None = None) -> None:
        runtime = onnxruntime()
        options = runtime.SessionOptions()
        options.log_severity_level = 4  # a failure raises; it need not be printed as well
        options.intra_op_num_threads = torch.get_num_threads() if threads is None else threads
        providers = ["CPUExecutionProvider"]
        if device.startswith("cuda"):
            if "CUDAExecutionProvider" not in runtime.get_available_providers():
                raise InputError(
                    f"device {device} was asked for, and the installed onnxruntime has none; "
                    "install onnxruntime-gpu, or use cpu"
                )
            providers.insert(0, "CUDAExecutionProvider")
        try:
            self.session = runtime.InferenceSession(str(path), options, providers=providers)
        except Exception as error:  # the runtime's errors have no common base
            raise InputError(f"{path} is not a whole ONNX file ({error})") from None

    @property
    def metadata(self) -> dict[str, str]:
        """The file's metadata."""
        return dict(self.session.get_modelmeta().custom_metadata_map)

    def __call__(self, images: Tensor) -> Tensor:
        feed = {"images": np.ascontiguousarray(images.cpu().numpy())}
        try:
            outputs = self.session.run(None, feed)
        except Exception as error:
            raise InputError(
                f"images of shape {tuple(images.shape)} are not what the file takes ({error})"
            ) from None
        return torch.from_numpy(outputs[0]).float()


def open_file(path: Path, device: str = "cpu") -> tuple[FileFacts, Runner]:
    """An exported file's facts, and the file as a function."""
    if not path.is_file():
        raise InputError(f"{path} does not exist; give a file that `regard export` wrote")
    if path.suffix == SUFFIXES["onnx"]:
        onnx = OnnxRunner(path, device)
        return FileFacts.from_metadata(onnx.metadata, path), onnx
    if path.suffix == SUFFIXES["torch"]:
        return FileFacts.from_metadata(program_metadata(path), path), ProgramRunner(path)
    raise InputError(
        f"{path} has the ending {path.suffix!r}; give one of {', '.join(SUFFIXES.values())}"
    )


def program_metadata(path: Path) -> dict[str, str]:
    """The metadata of a torch.export program, read without loading it."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [n for n in archive.namelist() if n.endswith(f"/extra/{EXTRA_FILE}")]
            return json.loads(archive.read(names[0])) if names else {}
    except (zipfile.BadZipFile, json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path} is not a whole torch.export program ({error})") from None


def onnxruntime() -> Any:
    """ONNX Runtime, or which extra to install."""
    try:
        import onnxruntime
    except ImportError:
        raise MissingExtraError("onnxruntime", "export", "running an ONNX file") from None
    logging.getLogger("onnxruntime").setLevel(logging.ERROR)
    return onnxruntime


# Dynamic quantisation of an ONNX file to 8 bits, by ONNX Runtime.


def quantise(source: Path, out: Path, facts: FileFacts) -> None:
    """Write `source` with int8 weights, one scale a channel; activations are rounded as they come.

    Only products with a weight are quantised: those between queries, keys and values stay in
    float32. Weights keep 7 bits where the processor has no 8-bit dot product: without it, pairs
    of 8-bit products are added in 16 bits and saturate.
    """
    with quiet():
        quantize_dynamic, kind = quantiser()
        quantize_dynamic(
            str(source),
            str(out),
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            reduce_range=True,
            weight_type=kind.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
    rewrite_metadata(out, facts)


def quantiser() -> tuple[Any, Any]:
    """ONNX Runtime's function and its types, or which extra to install."""
    try:
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError:
        raise MissingExtraError("onnxruntime", "export", "quantising to int8") from None
    return quantize_dynamic, QuantType


# A model to a file: ONNX through torch's exporter, or a torch.export program.


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
