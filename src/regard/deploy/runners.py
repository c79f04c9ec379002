"""An exported file as a function: tensors in, tensors out."""

import json
import logging
import zipfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from regard.deploy.facts import FileFacts
from regard.errors import InputError, MissingExtraError

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
